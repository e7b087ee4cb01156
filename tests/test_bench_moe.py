"""The bench of experts without a GPU: all of it but the timing runs, on small ranks and a made clock."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from deepdecode.bench import cells
from deepdecode.bench import moe as bench
from deepdecode.bench.timing import Timing
from deepdecode.ops.moe import moe_ref
from deepdecode.testing.experts import random_experts, random_routes
from deepdecode.testing.numeric import rel_err

RANKS = (bench.Rank("tp8", 10, 32, 32, experts=10), bench.Rank("ep8", 3, 64, 32, 4, experts=12))


@pytest.fixture
def dry(monkeypatch, tmp_path):
    """A machine whose GPU is the CPU: every call to time is made once, and takes 8 us warm and 10 rotated."""

    def time_graph(calls, **_):
        for call in calls:
            call()
        return Timing(10.0, 9.0, 11.0) if len(calls) > 1 else Timing(8.0, 7.0, 9.0)

    device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    made = {"DEVICE": "cpu", "folder": lambda: "h200", "copy_bandwidth": lambda: 4.25, "time_graph": time_graph, "PAST_L2": 1}
    for name, value in made.items():
        monkeypatch.setattr(cells, name, value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    for name, value in {"TOKENS": (1, 9), "PEER_TOKENS": (1, 9), "C": 64, "RANKS": RANKS}.items():
        monkeypatch.setattr(bench, name, value)
    for kept in (bench.weights_of, bench.copies_of, bench.wanted):
        kept.cache_clear()
    yield lambda *words: bench.main([*words, "--out", str(tmp_path), "--commit", "abc"])
    for kept in (bench.weights_of, bench.copies_of, bench.wanted):
        kept.cache_clear()


def rows_of(tmp_path):
    return json.loads((tmp_path / "h200" / "moe.json").read_text())["rows"]


def test_a_whole_run(dry, tmp_path, capsys):
    assert dry("--peers") == 0
    rows = rows_of(tmp_path)
    names = [(row["implementation"], row["rank"], row["T"]) for row in rows]
    assert sorted(names) == sorted((name, rank.name, T) for name in bench.IMPLEMENTATIONS for rank in RANKS for T in (1, 9))
    for row in rows:
        assert "error" not in row, row
        assert row["us_warm"] == 8
        assert row["rel_err"] <= (bench.MAX_RIVAL if row["implementation"] != "deepdecode" else bench.MAX_ERR)
        # rivals of other weights rotate too; what widens them leaves nothing in L2
        assert ("us_rotated" in row) == (not row["implementation"].startswith("dequantise"))
        assert row["floor_us"] == pytest.approx(row["bytes"] / 4.25e6, abs=1e-6)
    assert "12 rows" in capsys.readouterr().out


def test_the_slow_rival_comes_last(dry, tmp_path):
    """A run that is cut off has ours at every size, and what has a rival at all."""
    cells_of = list(bench.jobs(peers=True))
    names = [cell.keys["implementation"] for cell in cells_of]
    slow = names.index(bench.SLOW)
    assert set(names[slow:]) == {bench.SLOW} and len(names[slow:]) == 4
    assert names[:slow] == ["deepdecode"] * 4 + ["grouped_mm, bfloat16 copy"] * 4
    assert [(cell.keys["rank"], cell.keys["T"]) for cell in cells_of[:3]] == [("tp8", 1), ("tp8", 9), ("ep8", 1)]
    assert {cell.limit_s for cell in cells_of[slow:]} == {0.01}
    assert dry("--peers") == 0
    assert [row["implementation"] for row in rows_of(tmp_path)] == names
    assert [cell.keys["implementation"] for cell in bench.jobs(peers=False)] == ["deepdecode"] * 4


def test_bytes_are_those_of_the_experts_hit(dry):
    rank, T = RANKS[1], 9
    w = bench.weights_of(rank)
    routes = [random_routes(T, 12, bench.TOP_K, seed=n)[0] for n in range(2)]
    hit = [{e for e in ids.flatten().tolist() if 4 <= e < 7} for ids in routes]
    each = (w.w13.nbytes + w.w2.nbytes) // 3
    shared = w.shared13.nbytes + w.shared2.nbytes
    assert bench.work(rank, T, "deepdecode").nbytes == each * sum(map(len, hit)) // 2 + shared + 2 * 2 * T * 64


def test_goes_on_after_a_stop(dry, tmp_path, monkeypatch):
    made = []
    real = bench.work
    monkeypatch.setattr(bench, "work", lambda rank, T, name: made.append((rank.name, T, name)) or real(rank, T, name))
    assert dry("--seconds", "0") == 0
    assert rows_of(tmp_path) == [] == made
    assert dry("--tokens", "9") == 0
    assert dry("--peers") == 0
    assert len(made) == len(set(made)) == len(rows_of(tmp_path)) == 12


def test_what_is_wrong_has_no_time(dry, tmp_path, monkeypatch, capsys):
    right = bench.ours
    monkeypatch.setitem(bench.IMPLEMENTATIONS, "deepdecode", lambda *args: lambda: 1.1 * right(*args)())
    assert dry("--tokens", "9") == 1
    assert all("rel_err must be at most" in row["error"] and "us_warm" not in row for row in rows_of(tmp_path))
    assert capsys.readouterr().out.count("must be at most 3.0e-03, got ") == len(RANKS)


def test_a_torch_without_grouped_products_is_one_line(dry, tmp_path, monkeypatch):
    monkeypatch.delattr(F, "grouped_mm")
    assert dry("--peers", "--tokens", "1") == 0
    gone = [row for row in rows_of(tmp_path) if row["implementation"].startswith("grouped")]
    assert [row["error"] for row in gone] == ["not here: torch.nn.functional.grouped_mm"]


@pytest.mark.parametrize("name", list(bench.IMPLEMENTATIONS))
# every pair of other ranks; one expert for all; an expert that a token names twice
@pytest.mark.parametrize(
    "change", [lambda ids: ids.fill_(-1), lambda ids: ids.fill_(5), lambda ids: ids[:, 1].copy_(ids[:, 0])]
)
def test_implementations_agree_on_hard_routes(dry, name, change):
    rank = RANKS[1]
    w = random_experts(rank.E, 64, rank.width, rank.shared, first=rank.first)
    ids, weights = random_routes(6, 12, 3)
    change(ids)
    x = torch.randn(6, 64).bfloat16()
    want = moe_ref(x.double(), ids, weights.double(), w, bench.LIMIT)
    assert rel_err(bench.IMPLEMENTATIONS[name](x, (ids, weights), w, rank)(), want) < bench.MAX_RIVAL


def test_says_that_it_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=r"^bench: a CUDA device must be present, got none$"):
        bench.main([])
