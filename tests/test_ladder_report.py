"""What the ladder makes of its measurements: tables, pictures, findings, and the command without a GPU."""

import json
import sys

import pytest
from made_profiles import MS
from small_traces import kineto, schedule

from deepdecode.__main__ import main
from deepdecode.ladder.command import CONCURRENCY, choose_levels, choose_rungs
from deepdecode.ladder.findings import moves_doc, write_findings
from deepdecode.ladder.plots import plot_ladder
from deepdecode.ladder.table import (
    campaign_table,
    category_table,
    entry_table,
    gate_table,
    ladder_doc,
    mirror_table,
    not_run,
    ratio,
)
from deepdecode.rungs import RUNGS
from deepdecode.trace import load, profile
from deepdecode.trace.compare import compare
from deepdecode.trace.render import plain

# milliseconds of a profiled step: attention, an FP32 GEMM, glue
PARTS = {
    "0-padded": (30.0, 2.0, 4.0),
    "0": (20.0, 2.0, 4.0),
    "1": (5.0, 2.0, 21.0),
    "2": (1.0, 2.0, 4.0),
    "2-portable": (2.0, 2.0, 4.0),
}
KERNELS = ("sparse_attn_kernel", "ampere_sgemm_32x32_sliced1x4_tn", "void at::native::vectorized_elementwise_kernel<4>(int)")
CATEGORIES = ("attention", "gemm_simt", "glue")
RUNG_FACTS = {
    "0-padded": {"title": "fallback, padded", "yardstick": "the first engine", "beside": "", "below": None, "mirrors": {}},
    "0": {"title": "fallback", "yardstick": "SGLang today", "beside": "", "below": "0-padded", "mirrors": {"moe": "ours"}},
    "1": {"title": "tensor cores", "yardstick": "", "beside": "", "below": "0", "mirrors": {}},
    "2": {"title": "split keys", "yardstick": "", "beside": "", "below": "1", "mirrors": {}},
    "2-portable": {"title": "other cards", "yardstick": "", "beside": "2", "below": "1", "mirrors": {}},
}


def row(rung, C):
    ms = sum(PARTS[rung])
    gates = [{"name": "its worst row", "error": 1e-3 * C, "bound": 1e-2, "note": f"{C} tokens", "passed": True}]
    made = {
        "op": "step", "implementation": f"rung {rung}", "rung": rung, "slice": "tp8", "concurrency": C, "context": 8192,
        "layers": 43, "commit": "abc", "copy_bandwidth_tb_s": 4.0, "gates": gates, "rel_err": 1e-3, "worst_row_err": 1e-3 * C,
        "T": C, "us_warm": 1e3 * ms, "us_warm_low": 990.0 * ms, "us_warm_high": 1010.0 * ms, "timed_steps": 128, "repeats": 3,
        "tokens_per_s": round(1e3 * C / ms, 2), "bytes": 8_000_000_000, "bytes_by_entry": {"sparse_attn": 400_000_000},
        "floor_us": 2000.0, "times_floor": ms / 2, "experts_hit": {"mean": 5.5, "min": 4, "max": 6},
        "profile": {
            "steps": 4, "step_ms": ms, "busy_ms": ms, "idle_ms": 0.5, "launches": 90.0, "unknown_share": 0.0,
            "categories": {
                name: {"ms": part, "share": round(part / ms, 4), "launches": 30.0}
                for name, part in zip(CATEGORIES, PARTS[rung], strict=True)
            },
        },
    }  # fmt: skip
    if C == 32:
        made["trace"] = f"ladder-tp8-rung-{rung}-c32.json.gz"
        made["entries"] = {"sparse_attn": {"launches": 43, "us": 1e3 * PARTS[rung][0]}, "moe": {"launches": 86, "us": 500.0}}
    return made


@pytest.fixture
def document():
    return {
        "schema": 1, "device": {"name": "NVIDIA H200", "arch": 90, "sms": 132}, "versions": {}, "commit": "abc",
        "date": "2026-01-01", "command": "deepdecode ladder", "slice": "tp8", "context": 8192, "layers": 43,
        "profiled_concurrency": 32, "left_out": ["collectives left out"], "rungs": RUNG_FACTS,
        "rows": [row(rung, C) for rung in PARTS for C in (1, 32)],
    }  # fmt: skip


def write(folder, document):
    for rung, parts in PARTS.items():
        kernels = [(name, round(ms * MS)) for name, ms in zip(KERNELS, parts, strict=True)]
        kineto(folder / f"ladder-tp8-rung-{rung}-c32.json.gz", schedule(kernels, steps=4, jitter=0), bs=32)
    path = folder / "ladder-tp8.json"
    path.write_text(json.dumps(document))
    return path


def cells(table, *start):
    return next(line for line in table.rows if line[: len(start)] == start)


def test_every_ratio_names_what_it_is_over(document):
    table = campaign_table(document)
    assert table.head[:8] == ("C", "rung", "tokens/s", "TPOT ms", "spread", "x rung 0-padded", "x rung 0", "x below")
    # 36, 26, 28, 7 and 8 ms
    assert cells(table, "1", "2")[2:8] == ("142.9", "7.000", "6.930 to 7.070", "5.14x", "3.71x", "4.00x")
    assert cells(table, "1", "2-portable")[5:8] == ("4.50x", "3.25x", "3.50x")
    assert cells(table, "32", "1")[5:8] == ("1.29x", "0.93x", "0.93x")
    assert cells(table, "1", "0-padded")[5:8] == ("1.00x", "0.72x", "-")
    assert cells(table, "1", "2")[8:] == ("1.000", "14.3 %", "7.000", "90", "2.000", "3.50x", "5.5")
    assert "rung 0-padded mirrors the first engine; rung 0 mirrors SGLang today" in table.note
    assert ratio(document["rows"], document["rows"][0], "0") == pytest.approx(26 / 36, rel=1e-3)


def test_what_rungs_share_stands_once(document):
    facts = {name: dict(told) for name, told in RUNG_FACTS.items()}
    facts["0"]["mirrors"], facts["1"]["mirrors"] = {"moe": "as engines", "route": "so"}, {"moe": "as engines", "route": "other"}
    table = mirror_table(document | {"rungs": facts})
    assert table.rows == (("moe", "0, 1", "as engines"), ("route", "0", "so"), ("route", "1", "other"))


def test_without_the_native_yardstick_its_ratios_are_gone(document):
    document["rows"] = [r for r in document["rows"] if r["rung"] not in ("0", "1")]
    table = campaign_table(document)
    assert "x rung 0" not in table.head
    assert cells(table, "1", "2")[5:7] == ("5.14x", "-")


def test_a_failed_rung_has_a_reason_and_no_figures(document):
    bad = document["rows"][4]
    for name in ("us_warm", "tokens_per_s", "profile", "floor_us"):
        del bad[name]
    bad["error"] = "its worst row is off by 2.00e-01, the bound is 1.00e-02"
    bad["gates"][0] |= {"error": float("nan"), "passed": False}
    assert cells(campaign_table(document), "1", "1")[2:] == ("failed", *["-"] * 12)
    text = plain(ladder_doc(document))
    assert "rung 1 at C = 1: its worst row is off by 2.00e-01, the bound is 1.00e-02" in text
    gates = {line[0]: line for line in gate_table(document).rows}
    assert gates["1"][2:5] == ("not finite", "1.00e-02", "FAILED")
    assert gates["2"][2:6] == ("3.20e-02", "1.00e-02", "passed", "32 tokens")


def test_time_in_no_category_is_said(document):
    assert "in no category" not in plain(ladder_doc(document))
    document["rows"][-1]["profile"]["unknown_share"] = 0.07
    assert "rung 2-portable: 7.0 % of GPU time is in no category" in plain(ladder_doc(document))


def test_what_a_short_run_lacks_is_said(document):
    assert not_run(document) == {}
    document["rows"] = [r for r in document["rows"] if r["rung"] != "1" and (r["rung"], r["concurrency"]) != ("2", 32)]
    assert not_run(document) == {"1": [1, 32], "2": [32]}
    text = plain(ladder_doc(document))
    assert "rung 1 at C = 1, 32: not run" in text
    assert "rung 2 at C = 32: not run" in text


def test_graph_breaks_are_told(document):
    document["rows"][-1]["compiled"] = {"graphs": 9, "graph_breaks": 2}
    told = next(part for part in ladder_doc(document).parts if part.title == "How").items
    last = document["rows"][-1]
    assert f"rung {last['rung']} at C = {last['concurrency']}: torch.compile made 9 graphs, with 2 graph breaks" in told


def test_tables_of_the_profiled_step(document):
    table = category_table(document)
    assert cells(table, "attention")[5:7] == ("5.000", "17.9 %")
    assert cells(table, "launches")[5:7] == ("90", "")
    assert [line[0] for line in table.rows] == [
        "attention",
        "elementwise/copy/reduce glue",
        "GEMM FP32 SIMT",
        "busy",
        "idle",
        "launches",
    ]
    entries = entry_table(document)
    assert cells(entries, "sparse_attn") == (
        "sparse_attn", "43", "30.000", "43", "20.000", "43", "5.000", "43", "1.000", "43", "2.000", "0.100",
    )  # fmt: skip
    assert cells(entries, "all")[-3:] == ("129", "2.500", "2.000")
    document["rows"] = [r for r in document["rows"] if r["concurrency"] == 1]
    assert category_table(document) is None
    assert entry_table(document) is None


def test_what_moved_and_what_only_rose_in_share(tmp_path, document):
    write(tmp_path, document)
    names = ("0", "1", "2")
    profiles = [profile(load(tmp_path / f"ladder-tp8-rung-{name}-c32.json.gz")) for name in names]
    first, second = moves_doc(compare(profiles, [f"rung {name}" for name in names])).parts
    # attention fell by 15 ms and glue rose by 17
    assert first.title == "`rung 0` -> `rung 1`"
    assert first.items[1].startswith("moved: elementwise/copy/reduce glue +17.0")
    assert "; attention -15.0" in first.items[1]
    assert first.items[-2].endswith("ms a step: it rose although the target fell")
    # the step is a quarter of what it was, the FP32 GEMM is as long
    assert "attention -4.0" in second.items[1]
    assert second.items[2].startswith("rose in share without rising in time: GEMM FP32 SIMT 7.1 % -> 28.6 % at 2.0")
    assert second.items[-2].startswith("total GPU time 28.")
    assert not second.items[-2].endswith("fell")
    assert second.items[-1] == "launches 3 -> 3 a step"


def test_findings_name_what_to_attack_next(tmp_path, document):
    path, file = write(tmp_path, document), tmp_path / "PROFILE_FINDINGS.md"
    write_findings(document, path.parent, file)
    text = file.read_text()
    assert "the ladder on tp8, C = 32, commit abc" in text
    assert "### What moved from rung to rung" in text
    assert "it rose although the target fell" in text
    # rung 2, not the variant beside it
    assert "What next for `rung 2`" in text
    # the variant is held against what rung 2 stands on, and stands between no other two
    assert "### Rung 2-portable, other cards" in text
    assert "#### `rung 1` -> `rung 2-portable`" in text
    assert "#### `rung 2` -> `rung 2-portable`" not in text
    assert "Next: `tensor-core-gemm`, because" in text
    # the floor of the rung's own step: 400 MB at 4 TB/s
    assert "k: roofline: 0.100 ms a step" in text
    before = text
    write_findings(document, path.parent, file)
    assert file.read_text().startswith(before)
    document["rows"] = [r for r in document["rows"] if r["concurrency"] == 1]
    assert write_findings(document, path.parent, tmp_path / "none.md") is None
    assert not (tmp_path / "none.md").exists()


def test_findings_compare_steps_of_one_concurrency(tmp_path, document):
    path, file = write(tmp_path, document), tmp_path / "PROFILE_FINDINGS.md"
    # a run at another concurrency kept the rows of the one before, traces and all
    document["profiled_concurrency"] = 1
    alone = next(r for r in document["rows"] if (r["rung"], r["concurrency"]) == ("2", 1))
    alone["trace"] = "ladder-tp8-rung-2-c1.json.gz"
    kineto(tmp_path / alone["trace"], schedule([(name, MS) for name in KERNELS], steps=4, jitter=0), bs=1)
    write_findings(document, path.parent, file)
    text = file.read_text()
    assert "the ladder on tp8, C = 1, commit abc" in text
    assert "rung-2-c1" in text
    assert "-c32" not in text


def test_pictures_show_the_rows(tmp_path, document, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))[1])
    files = plot_ladder(document, tmp_path / "ladder-tp8.json")
    assert [file.name for file in files] == ["ladder-tp8_categories.png", "ladder-tp8_tokens.png"]
    bars, lines = drawn[0].axes[0], drawn[1].axes[0]
    heights = {box.get_label(): [patch.get_height() for patch in box] for box in bars.containers}
    assert heights["attention"] == [30.0, 20.0, 5.0, 1.0, 2.0]
    assert heights["idle"] == [0.5] * 5
    top = next(box for box in bars.containers if box.get_label() == "idle")
    assert [patch.get_y() for patch in top] == [36.0, 26.0, 28.0, 7.0, 8.0]
    assert [tick.get_text() for tick in bars.get_xticklabels()] == [f"rung {name}" for name in PARTS]
    points = {box.get_label(): box.lines[0].get_xydata().tolist() for box in lines.containers}
    assert points["rung 2: split keys"] == [[1.0, 142.86], [32.0, 4571.43]]
    [floor] = [line for line in lines.lines if line.get_label() == "floor of the bytes"]
    assert floor.get_xydata().tolist() == [[1.0, 500.0], [32.0, 16000.0]]
    before = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in plot_ladder(document, tmp_path / "ladder-tp8.json")] == before


def test_report_measures_nothing(tmp_path, document, capsys, monkeypatch):
    path, file = write(tmp_path, document), tmp_path / "f.md"
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("a report needs no GPU"))
    assert main(["ladder", "--report", str(path), "--findings", str(file), "--markdown"]) == 0
    shown = capsys.readouterr()
    assert "| 1 | 2 | 142.9 | 7.000 |" in shown.out
    assert "What moved from rung to rung" in shown.out
    assert file.exists()
    assert main(["ladder", "--report", str(path), "--no-findings", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    document["rows"][0]["error"] = "out of memory"
    path.write_text(json.dumps(document))
    assert main(["ladder", "--report", str(path), "--no-findings"]) == 1
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["ladder", "--report", str(path), "--no-findings"]) == 2
    assert "hint: pip install 'deepdecode[report]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slice", "tp4"], "ladder: --slice must be one of tp8, dp8ep8, got tp4"),
        (["--rungs", "0,none"], f"ladder: --rungs must be of {', '.join(rung.name for rung in RUNGS)}, got none"),
        (["--rungs", ","], "got none"),
        (["--concurrency", "1,x"], "ladder: --concurrency must be numbers from 1 to 4096 with commas between, got x"),
        (["--concurrency", "0"], "got 0"),
        (["--context", "100"], "ladder: --context must be 128 to 1048576, got 100"),
        (["--layers", "44"], "ladder: --layers must be 1 to 43, got 44"),
    ],
)
def test_refuses(capsys, words, message):
    assert main(["ladder", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"), [("{", "must be JSON"), ("[]", "must be a result file of the ladder, got another")]
)
def test_report_refuses(tmp_path, capsys, text, message):
    path = tmp_path / "l.json"
    path.write_text(text)
    assert main(["ladder", "--report", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_choices():
    assert [rung.name for rung in RUNGS if rung not in choose_rungs(None)] == ["4-compiled"]
    assert [rung.name for rung in choose_rungs("2, 0")] == ["0", "2"]
    assert choose_levels(None) == CONCURRENCY == (1, 16, 64)
    assert choose_levels("16,1, 16") == (1, 16)


def without_a_gpu(capsys, monkeypatch) -> dict:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["ladder", "--rungs", "0,2", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.endswith("ladder: no CUDA device: nothing was timed\n")
    assert not any(word in shown.out for word in ("us_warm", "tokens_per_s", "tpot"))
    return json.loads(shown.out)


def test_without_a_gpu(capsys, monkeypatch):
    """All but the interpreted kernels, which take most of the time."""
    monkeypatch.setattr("deepdecode.ladder.offline._kernel_checks", lambda calls: [])
    told = without_a_gpu(capsys, monkeypatch)
    assert told["timed"] is False
    assert {name: rung["measured"] for name, rung in told["rungs"].items()} == {"0": "not run", "2": "not run"}
    assert [check["passed"] for check in told["checks"]] == [True] * 3
    # one embedding lookup; two hyper-connections of 20 Sinkhorn rounds in each of 4 layers
    assert told["dispatched"]["embed"] >= 1
    assert told["dispatched"]["mhc_boundary"] > 2 * 4 * 20 * 2
    assert all(told["dispatched"][name] > 0 for name in ("index_topk", "sparse_attn", "moe", "sample"))


@pytest.mark.slow
def test_kernels_are_interpreted_without_a_gpu(capsys, monkeypatch):
    told = without_a_gpu(capsys, monkeypatch)
    checks = {(check["op"], check["implementation"]): check for check in told["checks"]}
    assert checks["all", "logits against the reference table"]["passed"]
    # something is rounded everywhere, so an error of nothing would mean that nothing was compared
    for case in (
        ("sparse_attn", "one program for all keys"),
        ("sparse_attn", "keys split, merged"),
        ("attn_in", "product with q_kv"),
        ("attn_in", "product with rest"),
        ("moe", "routed and shared experts"),
    ):
        assert 1e-9 < checks[case]["error"] < 2e-3, case
        assert checks[case]["passed"]
    assert len(checks) == 8
