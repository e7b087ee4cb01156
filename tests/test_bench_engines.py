"""The cells that `bench engines` measures, without a GPU: each hook takes the call and agrees with float64, or says why."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepdecode.bench import engines, peers
from deepdecode.bench.engines import OURS, Cell, cells, measure
from deepdecode.bench.timing import Timing
from deepdecode.cards import find_card
from deepdecode.ops.attention import sparse_attn_decode
from deepdecode.plugins import sglang_ops


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    monkeypatch.setattr(engines, "DEVICE", "cpu")
    monkeypatch.setattr(engines, "_replayed", lambda cell, run, judge, inputs: judge(run()))


def find(boundary, sizes):
    """The first of our cells at this boundary with these sizes."""
    same = (cell for cell in cells(False) if all(cell.row.get(name) == value for name, value in sizes.items()))
    return next(cell for cell in same if cell.row["boundary"] == boundary)


@pytest.mark.parametrize(
    ("boundary", "sizes"),
    [
        ("flash_mla_with_kvcache_sm120", {"ratio": 4, "T": 8, "H": 8}),
        ("flash_mla_with_kvcache_sm120", {"ratio": 128, "T": 1, "keys": 192}),
        ("flash_mla_with_kvcache", {"ratio": 4, "T": 8, "H": 8, "padded": 64}),
        ("apply_mhc_post_pre_boundary", {"T": 8}),
        ("fp8_paged_mqa_logits and topk_transform_paged", {"T": 1, "entries": 2048}),
    ],
)
def test_a_hook_agrees_with_float64(boundary, sizes):
    cell = find(boundary, sizes)
    row = measure(cell, check_only=True)
    assert "error" not in row and row["implementation"] == OURS
    assert row["rel_err"] < cell.limit and row["rel_err"] == row["replay_err"]


def test_windows_run_on_in_pages_and_the_last_row_is_padding():
    inputs = engines.engine_inputs(3, 8, 512, 64, seed=0)
    rows = inputs.window_indices
    assert (rows[:2].diff(dim=1) == 1).all() and inputs.window_lens.tolist() == [128, 128, 1]
    assert [row // 512 for row in rows[:2, 0].tolist()] == [0, 1] and rows[2].tolist() == [0] + [-1] * 127
    assert inputs.extra_lens.tolist() == [512, 512, 1] and (inputs.extra_indices[2] == -1).all()
    assert inputs.window.data.stride(0) == 149760 and inputs.window.page_size == 256


def test_steps_that_pass_l2_share_no_row(monkeypatch):
    monkeypatch.setattr(engines, "PAST_L2", 3 * 2 * 192 * 584)
    steps = engines.past_l2(2, 8, 64, 2)
    assert len(steps) == 3 and all(step.q.shape == (2, 8, 512) and step.q.is_contiguous() for step in steps)
    for name in ("window_indices", "extra_indices"):
        # but for the last token of all, which is padding
        rows = torch.cat([getattr(step, name) for step in steps])[:-1].flatten()
        assert len(rows.unique()) == len(rows)
    monkeypatch.setattr(engines, "PAST_L2", 3 * 16 * 192 * 584)
    calls = find("flash_mla_with_kvcache", {"ratio": 128, "T": 16, "keys": 192}).rotated()
    assert len(calls) == 3
    assert not torch.equal(calls[0]()[0], calls[1]()[0])


def test_a_wrong_result_has_no_time(monkeypatch):
    cell = Cell({"implementation": OURS}, lambda seed: (lambda: 1.0, lambda result: 0.5, []), limit=0.1)
    assert measure(cell) == {"op": "engines", "implementation": OURS, "rel_err": 0.5, "error": "outside the error bound"}
    wrong = Cell({}, lambda seed: (lambda: 1.0, lambda result: float("nan"), []), limit=0.1)
    assert measure(wrong)["error"] == "outside the error bound"


def test_a_call_that_goes_to_sglang_is_an_error(monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("not covered")

    monkeypatch.setattr("deepdecode.ops.attention.sparse_attn_decode", broken)
    row = measure(find("flash_mla_with_kvcache_sm120", {"ratio": 0, "T": 1, "H": 8}), check_only=True)
    assert row["error"] == "RuntimeError: the call went to SGLang's own function"


def test_sglangs_module_takes_its_triton_way(monkeypatch, tmp_path):
    """Its own file, as its wheel has it, is imported without the engine."""
    folder = tmp_path / "sglang" / "kernels" / "ops" / "attention"
    folder.mkdir(parents=True)
    (folder / "flash_mla_sm120.py").write_text(
        "from sglang.srt.environ import envs\nfrom sglang.srt.utils import is_hip\n"
        "BACKEND = envs.SGLANG_SM120_FLASHMLA_BACKEND.get(), is_hip()\n"
    )
    known = set(sys.modules)
    monkeypatch.setenv("DEEPDECODE_PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        assert peers.sglang_sm120().BACKEND == ("triton", False)
    finally:
        for name in set(sys.modules) - known:
            if name.startswith("sglang"):
                del sys.modules[name]


# a whole run: all that it does but the GPU's part, at small sizes


def other_side(**call):
    """What SGLang's or FlashMLA's function gives for these keywords."""
    window, extra = (
        None if cache is None else sglang_ops._set("", cache, call[indices], call[lens])
        for cache, indices, lens in (
            (call["k_cache"], "indices", "topk_length"),
            (call["extra_k_cache"], "extra_indices_in_kvcache", "extra_topk_length"),
        )
    )
    options = {"sink": call["attn_sink"], "scale": call["softmax_scale"], "return_lse": True}
    out, lse = sparse_attn_decode(call["q"].squeeze(1), *window, *(extra or ()), **options)
    return out.unsqueeze(1), lse


def flash_mla_side(*, block_table, cache_seqlens, is_fp8_kvcache, use_legacy, tile_scheduler_metadata, **call):
    return other_side(**call)


@pytest.fixture
def dry(monkeypatch, tmp_path):
    """Run the command as on an H200; the seconds that its calls take are made up, and those that are timed are kept."""
    timed = []

    def timer(calls, **options):
        timed.append([call() for call in calls])
        return Timing(7.0 if len(calls) == 1 else 9.0, 6.0, 11.0)

    def again(cell, run, judge, inputs):
        for old, new in zip(inputs, cell.make(1)[2], strict=True):
            old.copy_(new)
        return judge(run())

    card = find_card("H200")
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=card.sms)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(engines, "card_of", lambda device: card)
    monkeypatch.setattr(engines, "_replayed", again)
    monkeypatch.setattr(engines, "time_graph", timer)
    monkeypatch.setattr(engines, "HOST_CALLS", 1)
    sizes = {"TOKENS": (1, 2), "ROTATED": (2,), "FIRST": (1, 2), "SETS": ((4, 64, 64), (0, 0, 64))}
    sizes |= {"INDEXED": ((1, 64), (2, 64)), "ROUTED": (1, 2), "EXPERTS": (8, 64, 32), "HIDDEN": 64}
    sizes |= {"PAST_L2": 3 * 2 * 128 * 584}
    for name, value in sizes.items():
        monkeypatch.setattr(engines, name, value)
    flash_mla = SimpleNamespace(get_mla_metadata=lambda: (None,), flash_mla_with_kvcache=flash_mla_side)
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla)
    monkeypatch.setattr(peers, "sglang_sm120", lambda: SimpleNamespace(flash_mla_with_kvcache_sm120=other_side))

    def run(*words):
        timed.clear()
        return engines.main(["--peers", "--out", str(tmp_path), "--commit", "abc1234", *words])

    run.file, run.timed = tmp_path / "h200" / "engines.json", timed
    return run


def test_a_whole_run(dry, capsys):
    assert dry() == 0
    out = capsys.readouterr().out.splitlines()
    document = json.loads(dry.file.read_text())
    rows = document["rows"]
    assert document["command"] == "python -m deepdecode.bench.engines --peers" and document["left"] == 0
    assert len(rows) == len(cells(True)) == len(out) - 1 and out[-1] == f"{len(rows)} rows"
    assert not [row for row in rows if "error" in row]
    assert all(row["us_warm"] == 7.0 and row["host_us"] > 0 and row["replay_err"] < 4e-3 for row in rows)
    # the same inputs on both sides, and others after the capture
    assert all(row["rel_err"] != row["replay_err"] for row in rows if "ratio" in row)
    # one token first, and each comparison in one piece
    assert [row["T"] for row in rows] == sorted(row["T"] for row in rows)
    sides = {}
    for row in rows:
        sides.setdefault((row["boundary"], row.get("H"), row.get("keys"), row["T"]), []).append(row["implementation"])
    ratio_4 = {key[0]: names for key, names in sides.items() if key[2] == 192 and key[1] == 8 and key[3] == 2}
    assert ratio_4 == {"flash_mla_with_kvcache_sm120": [OURS, "SGLang, triton"], "flash_mla_with_kvcache": [OURS, "FlashMLA"]}
    # past L2 both sides of FlashMLA, with more than one token
    past = {(row["boundary"], row["implementation"]) for row in rows if row.get("us_rotated") == 9.0}
    assert past == {
        ("flash_mla_with_kvcache", OURS), ("flash_mla_with_kvcache", "FlashMLA"), ("flash_mla_with_kvcache_sm120", OURS),
    }  # fmt: skip
    assert "| FlashMLA, padded to 64, past L2 | 8 | 192 | – → – | 9.0 → 9.0 |" in engines.table(rows)


def test_a_run_that_was_cut_goes_on(dry, capsys, monkeypatch):
    monkeypatch.setattr(engines, "SETS", ((0, 0, 64),))
    assert dry("--seconds", "0") == 0
    count = len(cells(True))
    assert capsys.readouterr().out.splitlines()[-1] == f"0 rows, {count} left out for time" and not dry.file.exists()
    assert dry() == 0
    whole = json.loads(dry.file.read_text())
    # as after a cut, with one cell that failed
    kept = whole["rows"][:5]
    dry.file.write_text(json.dumps(whole | {"rows": [*kept, {**whole["rows"][5], "error": "OutOfMemoryError: "}], "left": 9}))
    assert dry("--resume") == 0
    resumed = json.loads(dry.file.read_text())
    assert resumed["rows"][:5] == kept and len(resumed["rows"]) == count and resumed["left"] == 0
    assert len([calls for calls in dry.timed if len(calls) == 1]) == count - 5
    # another commit's rows are not this one's
    other = json.dumps(whole | {"commit": "def5678"})
    dry.file.write_text(other)
    capsys.readouterr()
    # no time, no row, nothing begun
    assert dry("--resume", "--seconds", "0") == 0 and dry.file.read_text() == other and not capsys.readouterr().err
    assert dry("--resume") == 0 and len([calls for calls in dry.timed if len(calls) == 1]) == count
    # nor are they lost
    copy = dry.file.with_name("engines.json.before")
    assert copy.read_text() == other
    assert capsys.readouterr().err == f"bench: {dry.file} is begun anew; what it held is in {copy}\n"


def test_what_is_no_result_file_is_left_alone(dry, tmp_path):
    dry.file.parent.mkdir()
    for text, want in (
        ('{"rows": [{', "must be JSON"),
        ("3", "must be a result file with a list of rows, got none"),
        ('{"commit": "abc1234", "rows": []}', "must be a result file with device, got none"),
        ('{"commit": "abc1234", "device": {}, "rows": [{"T": 1}]}', "must have boundary in every row, got none in row 1"),
    ):
        dry.file.write_text(text)
        for words in ([], ["--resume"]):
            with pytest.raises(ValueError, match=want) as refused:
                dry(*words)
            assert str(refused.value).startswith(f"bench: {dry.file} must ")
            assert dry.file.read_text() == text and not dry.timed
        if want != "must be a result file with device, got none":
            with pytest.raises(ValueError, match=want):
                engines.main(["--table", str(dry.file)])


def test_a_run_that_only_checks(dry, capsys):
    assert dry("--check", "1/4") == 0 and not dry.timed and not dry.file.exists()
    assert len(capsys.readouterr().out.splitlines()) == len(cells(True)[1::4]) + 1


MADE = [
    {"boundary": "flash_mla_with_kvcache", "ratio": 0, "H": 8, "keys": 128, "T": 1, "implementation": OURS, "us_warm": 4.52},
    {
        "boundary": "flash_mla_with_kvcache",
        "ratio": 0,
        "H": 8,
        "keys": 128,
        "T": 1,
        "implementation": "FlashMLA",
        "us_warm": 9.0,
    },
    {
        "boundary": "flash_mla_with_kvcache_sm120",
        "ratio": 4,
        "H": 64,
        "keys": 640,
        "T": 8,
        "implementation": OURS,
        "us_warm": 7.0,
    },
    {"boundary": "apply_mhc_post_pre_boundary", "T": 8, "implementation": OURS, "us_warm": 7.0},
]


def test_a_table_of_the_rows(tmp_path, capsys):
    first, *others = (line.strip("| ").split(" | ") for line in engines.table(MADE).splitlines())
    assert first == ["what SGLang calls", "heads", "keys", "T = 1", "T = 8", "T = 16", "T = 64"]
    assert others[1:] == [
        ["FlashMLA, padded to 64, warm", "8", "128", "9.0 → 4.5", "– → –", "– → –", "– → –"],
        ["its Triton kernel for sm_120, warm", "64", "640", "– → –", "– → 7.0", "– → –", "– → –"],
    ]
    both = engines.table([row | {"us_rotated": row["us_warm"] + 1} for row in MADE])
    assert "| FlashMLA, padded to 64, warm | 8 | 128 | 9.0 → 4.5 |" in both
    assert "| FlashMLA, padded to 64, past L2 | 8 | 128 | 10.0 → 5.5 |" in both
    (tmp_path / "engines.json").write_text(json.dumps({"rows": MADE}))
    assert engines.main(["--table", str(tmp_path / "engines.json")]) == 0
    assert capsys.readouterr().out.rstrip() == engines.table(MADE)


def test_the_page_shows_what_was_measured():
    """`deepdecode bench engines --table FILE` gives the table of docs/sglang.md; without a file the page says so."""
    root = Path(__file__).parent.parent
    page = (root / "docs" / "sglang.md").read_text()
    files = sorted((root / "results").glob("*/engines.json"))
    assert ("not measured yet" in page) == (not files)
    for file in files:
        document = json.loads(file.read_text())
        assert not [row for row in document["rows"] if "error" in row] and engines.table(document["rows"]) in page


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^bench: a CUDA device must be present, got none$"):
        engines.main([])
