"""The cells that `bench engines` measures, without a GPU: each hook takes the call and agrees with float64, or says why."""

import json
import sys
from pathlib import Path

import pytest
import torch

from deepdecode.bench import engines, peers
from deepdecode.bench.engines import OURS, Cell, cells, measure


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
    calls = find("flash_mla_with_kvcache", {"ratio": 128, "T": 1, "keys": 192}).rotated()
    assert len(calls) == 6
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
    rotated = [row | {"us_rotated": row["us_warm"] + 1} for row in MADE]
    assert "| FlashMLA, padded to 64, past L2 | 8 | 128 | 10.0 → 5.5 |" in engines.table(rotated)
    (tmp_path / "engines.json").write_text(json.dumps({"rows": MADE}))
    assert engines.main(["--table", str(tmp_path / "engines.json")]) == 0
    assert capsys.readouterr().out.rstrip() == engines.table(MADE)


def test_the_page_shows_what_was_measured():
    """`python -m deepdecode.bench.engines --table FILE` gives the table of docs/sglang.md; without a file the page says so."""
    root = Path(__file__).parent.parent
    page = (root / "docs" / "sglang.md").read_text()
    files = sorted((root / "results").glob("*/engines.json"))
    assert ("not measured yet" in page) == (not files)
    for file in files:
        document = json.loads(file.read_text())
        assert not [row for row in document["rows"] if "error" in row] and engines.table(document["rows"]) in page


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert engines.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
