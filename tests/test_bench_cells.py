"""The benches of products, indexer and glue without a GPU: all but the timing runs, on small sizes and a made clock."""

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import made_deep_gemm
import pytest
import torch

# Triton reads it when a kernel is defined, so before the imports below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from deepdecode.bench import cells, glue, indexer, linear, moe, peers
from deepdecode.bench.timing import Timing
from deepdecode.cards import CARDS
from deepdecode.config import ModelConfig
from deepdecode.kernels import indexer as indexer_kernel
from deepdecode.kernels import step as step_kernel
from deepdecode.testing.numeric import rel_err
from deepdecode.testing.steps import contiguous, prepare_inputs

H200 = next(card for card in CARDS if card.name == "H200")


@pytest.fixture
def dry(monkeypatch, tmp_path):
    """A machine whose GPU is the CPU: every call to time is made once, and takes 8 us warm and 10 rotated."""

    def time_graph(calls, **_):
        for call in calls:
            call()
        return Timing(10.0, 9.0, 11.0) if len(calls) > 1 else Timing(8.0, 7.0, 9.0)

    monkeypatch.setattr(cells, "DEVICE", "cpu")
    monkeypatch.setattr(cells, "PAST_L2", 1)
    monkeypatch.setattr(cells, "folder", lambda: "h200")
    monkeypatch.setattr(cells, "copy_bandwidth", lambda: 4.25)
    monkeypatch.setattr(cells, "time_graph", time_graph)
    device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    # launches that start before the one in front has ended cannot be interpreted
    for module in (glue, indexer):
        monkeypatch.setattr(module, "card_of", lambda _: replace(H200, arch=89))
    peers.deep_gemm.cache_clear()
    made_deep_gemm.install(monkeypatch)
    yield lambda module, *words: module.main([*words, "--out", str(tmp_path), "--commit", "abc"])
    peers.deep_gemm.cache_clear()


def rows_of(tmp_path, name):
    document = json.loads((tmp_path / "h200" / f"{name}.json").read_text())
    assert (document["commit"], document["copy_bandwidth_tb_s"]) == ("abc", 4.25)
    return document["rows"]


def check_times(rows):
    """Every row that is right has its times, floor and share of it."""
    for row in rows:
        assert "error" not in row, row
        assert row["us_warm"] == 8
        assert row["floor_us"] == pytest.approx(row["bytes"] / 4.25e6, abs=1e-6)
        assert row["floor_fraction"] == pytest.approx(row["floor_us"] / row.get("us_rotated", 8), abs=2e-6)


@pytest.fixture
def small_sets(monkeypatch):
    monkeypatch.setattr(linear, "TOKENS", (1, 3))
    monkeypatch.setattr(linear, "PEER_TOKENS", (1, 3))
    sets = [linear.Set(f"{case.name}", case.ways, min(2, case.groups), 256, 256, case.kind, case.wide, case.beside and 24)
            for case in linear.SETS if case.ways == 1]  # fmt: skip
    monkeypatch.setattr(linear, "SETS", tuple(sets))
    linear.weights_of.cache_clear()
    yield
    linear.weights_of.cache_clear()


def scaled(x, w, x_scale, w_scale):
    """What torch._scaled_mm computes, by its layout of scales; the CPU has none of 1 x 128."""
    if x_scale.dim() == 0:
        return (x.float() @ w.float()).bfloat16()
    assert x_scale.stride(0) == 1
    assert len(x) % 16 == 0
    wide = x_scale.repeat_interleave(128, 1), w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return ((x.float() * wide[0]) @ (w.float() * wide[1][: len(w), : w.shape[1]])).bfloat16()


def test_products(dry, small_sets, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(linear, "_scaled", scaled)
    assert dry(linear, "--peers") == 0
    rows = rows_of(tmp_path, "linear")
    check_times(rows)
    names = {(row["implementation"], row["set"]) for row in rows}
    assert len(rows) == 2 * len(names)
    assert {name for name, _ in names} == set(linear.IMPLEMENTATIONS)
    assert {row["set"] for row in rows} == {case.name for case in linear.SETS}
    assert all(("us_rotated" in row) == (not row["implementation"].startswith("dequantise")) for row in rows)
    errors = {row["implementation"]: row["rel_err"] for row in rows if row["set"] == "q_b"}
    # x in E4M3 costs a digit
    assert errors["deepdecode"] < 2.2e-3 < 1e-2 < errors["torch._scaled_mm, 1 x 128"] < 6e-2
    assert f"{len(rows)} rows" in capsys.readouterr().out


@pytest.mark.parametrize("step", [8, 16])
def test_the_bound_of_a_sum_is_that_of_a_cut_one(step):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 4096, generator=generator).bfloat16().double() for rows in (4, 200))
    want, total = x @ w.T, torch.zeros(4, 200)
    for at in range(0, 4096, step):
        exact = total.double() + x[:, at : at + step] @ w[:, at : at + step].T
        # towards 0
        total = exact.float()
        total = torch.where(total.double().abs() > exact.abs(), torch.nextafter(total, torch.zeros(())), total)
    # as the head of one H200, whose steps are of 16, and twice that
    assert rel_err(total, want) == pytest.approx(4.4e-6 * 16 / step, rel=0.25)
    bound = linear.sum_err(4096)
    assert 3 * rel_err(total, want) < bound
    # a result in bfloat16, and one product left out
    assert rel_err(want.bfloat16(), want) > 30 * bound
    assert rel_err(want - x[:, :1] @ w[:, :1].T, want) > 300 * bound


@pytest.mark.parametrize("part", ["wide", "beside"])
def test_a_wide_result_in_bfloat16_has_no_time(dry, small_sets, tmp_path, monkeypatch, part):
    def rounded(x, weight, beside, dtype):
        def call():
            out, *others = linear.ours(x, weight, beside, dtype)()
            return out if part == "beside" else out.bfloat16(), *(one.bfloat16() if part == "beside" else one for one in others)

        return call

    monkeypatch.setitem(linear.IMPLEMENTATIONS, "deepdecode", rounded)
    assert dry(linear) == 1
    rows = rows_of(tmp_path, "linear")
    sets = {"head"} if part == "wide" else {case.name for case in linear.SETS if case.beside}
    assert {row["set"] for row in rows if "us_warm" not in row} == sets
    figure = "rel_err" if part == "wide" else "beside_err"
    assert all(row["error"].startswith(f"{figure} must be at most 1.9e-06, got 1.") for row in rows if row["set"] in sets)


def test_indexer(dry, tmp_path, monkeypatch):
    monkeypatch.setattr(indexer_kernel, "gluon_ready", lambda: False)
    monkeypatch.setattr(indexer, "SIZES", ((1, 128), (3, 192)))
    monkeypatch.setattr(indexer, "TOPK", (40,))
    monkeypatch.setattr(indexer, "HEADS", 32)
    indexer.inputs_of.cache_clear()
    assert dry(indexer, "--peers") == 0
    indexer.inputs_of.cache_clear()
    rows = rows_of(tmp_path, "indexer")
    check_times(rows)
    assert len(rows) == 2 * len(indexer.IMPLEMENTATIONS | indexer.RIVALS)
    assert all(row["missed"] == 0 for row in rows)
    assert {row["implementation"]: row["us_rotated"] for row in rows if "us_rotated" in row} == {
        "deepdecode": 10, "deepdecode portable": 10, "deep_gemm, torch.topk": 10,
    }  # fmt: skip


def whole(case):
    return replace(case, inputs=contiguous(case.inputs))


def test_glue(dry, tmp_path, monkeypatch):
    monkeypatch.setattr(glue, "TOKENS", (2,))
    config = ModelConfig(hidden_size=256, vocab_size=1000)
    monkeypatch.setattr(glue, "CONFIG", config)
    # the reference, which runs here, takes no views; places have no reference of their own
    monkeypatch.setattr(glue, "prepare_inputs", lambda *args, **keys: whole(prepare_inputs(*args, **keys)))
    monkeypatch.setattr(glue, "decode_places", lambda *args, **sizes: step_kernel.launch(*args, arch=80, **sizes))
    assert dry(glue, "--peers") == 0
    rows = rows_of(tmp_path, "glue")
    check_times(rows)
    ops = [row["op"] for row in rows]
    assert {op: ops.count(op) for op in ops} == {
        "mhc_boundary": 1, "mhc_mix": 4, "route": 2, "attn_prepare": 10, "rope": 2, "rms_norm": 1, "places": 1, "sample": 3,
    }  # fmt: skip
    assert all(("us_composed" in row) == (row["op"] != "mhc_mix") for row in rows)
    errors = {row["implementation"]: row["rel_err"] for row in rows if row["op"] == "mhc_mix"}
    # what the weights' second bfloat16 part is for
    assert errors["deepdecode"] < 1e-5 < 1e-4 < errors["deep_gemm, TF32"] < errors["torch.matmul, bfloat16"]


def test_a_route_may_take_the_second_of_a_tie():
    scores = torch.tensor([[0.9, 0.5, 0.5 + 1e-9, 0.3], [0.1, 0.8, 0.7, 0.6]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.1, 0.1, 0.0])

    def error(ids, **more):
        ids = torch.tensor(ids)
        return glue.routed_err(ids, glue.weigh_ref(scores, ids, glue.CONFIG.routed_scale), scores, bias, more.get("fixed"))

    assert error([[0, 2], [1, 2]]) == 0
    assert error([[0, 1], [1, 2]]) < 1e-8 < glue.ROUTED
    assert error([[0, 3], [1, 2]]) > 0.1
    assert error([[0, 2], [1, 3]]) > 0.1
    assert error([[0, 0], [1, 2]]) == float("inf")
    # a table's are not chosen
    fixed = torch.tensor([[0, 2], [1, 2]])
    assert error([[0, 2], [1, 2]], fixed=fixed) == 0
    assert error([[0, 1], [1, 2]], fixed=fixed) == float("inf")
    # and weights are those of the experts
    assert glue.routed_err(fixed, glue.weigh_ref(scores, fixed, 1.01 * glue.CONFIG.routed_scale), scores, bias, None) > 9e-3


@pytest.mark.parametrize("top_p", [1.0, 0.75])
def test_a_drawn_token_may_be_the_neighbour_of_a_boundary(top_p):
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # of the nucleus: 4 / 9, 3 / 9, 2 / 9
    edge = torch.tensor([0.4 if top_p == 1 else 4 / 9], dtype=torch.float64)

    def error(token, uniform, temperature=1.0):
        return glue.drawn_err(torch.tensor([token]), logits, temperature, top_p, uniform)

    assert error(0, edge - 0.01) == error(1, edge + 0.01) == 0
    assert 0 < error(0, edge + 1e-6) < glue.DRAWN and 0 < error(1, edge - 1e-6) < glue.DRAWN
    assert error(0, edge + 0.01) > 9e-3 and error(1, edge - 0.01) > 9e-3
    # what the nucleus leaves out is near its end only
    assert error(3, edge) > 0.5
    assert error(0, edge + 0.01, temperature=0.0) == 0 and error(1, edge + 0.01, temperature=0.0) == 1


def test_goes_on_after_a_stop(dry, small_sets, tmp_path, capsys, monkeypatch):
    assert dry(linear, "--seconds", "0") == 0
    every = len(list(linear.jobs(False)))
    assert rows_of(tmp_path, "linear") == []
    assert f"0 rows, {every} left for another run" in capsys.readouterr().out
    made = []
    real = linear.work
    monkeypatch.setattr(linear, "work", lambda case, T, name: made.append((case.name, T, name)) or real(case, T, name))
    assert dry(linear, "--tokens", "3") == 0
    assert dry(linear) == 0
    assert dry(linear) == 0
    assert len(made) == len(set(made)) == every
    assert len(rows_of(tmp_path, "linear")) == every
    whole = (tmp_path / "h200" / "linear.json").read_text()
    assert dry(linear, "--fresh", "--tokens", "1", "--only", "deepdecode") == 0
    assert (tmp_path / "h200" / "linear.json.before").read_text() == whole
    assert {row["T"] for row in rows_of(tmp_path, "linear")} == {1}


def test_rows_of_another_commit_are_not_kept(dry, small_sets, tmp_path, capsys):
    assert dry(linear, "--tokens", "1") == 0
    path = tmp_path / "h200" / "linear.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit": "before"}))
    was = path.read_text()
    capsys.readouterr()
    assert dry(linear, "--tokens", "3") == 0
    assert {row["T"] for row in rows_of(tmp_path, "linear")} == {3}
    # nothing is lost
    copy = path.with_name("linear.json.before")
    assert copy.read_text() == was
    assert capsys.readouterr().err == f"bench: {path} is begun anew; what it held is in {copy}\n"
    # a run that only goes on leaves the copy as it is
    assert dry(linear) == 0
    assert copy.read_text() == was and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"rows": [{"op": "linear", "impl', "must be JSON, got Unterminated string"),
        ("", "must be JSON, got Expecting value"),
        ("[1]", "must be a result file with a list of rows, got none"),
        ('{"rows": [], "copy_bandwidth_tb_s": 4}', "must be a result file with commit, got none"),
        ('{"rows": [], "commit": "abc", "copy_bandwidth_tb_s": null}', "a result file with copy_bandwidth_tb_s, got None"),
        (
            '{"rows": [{"op": "linear"}], "commit": "abc", "copy_bandwidth_tb_s": 4}',
            "must have implementation in every row, got none in row 1",
        ),
    ],
)
@pytest.mark.parametrize("words", [[], ["--fresh"]])
def test_what_is_no_result_file_is_left_alone(dry, tmp_path, monkeypatch, text, want, words):
    monkeypatch.setattr(cells, "measure", lambda *_: pytest.fail("measured"))
    path = tmp_path / "h200" / "linear.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=want) as refused:
        dry(linear, *words)
    assert str(refused.value).startswith(f"bench: {path} must ")
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [("linear.json", text)]


def test_a_rival_that_is_not_here_is_one_line(dry, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(glue, "TOKENS", (1, 2))
    monkeypatch.setattr(glue, "CONFIG", ModelConfig(hidden_size=64, vocab_size=100))
    # the import system's own word for a module that is not to be had
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert dry(glue, "--peers", "--only", "deep_gemm, TF32") == 0
    (row,) = rows_of(tmp_path, "glue")
    assert row["error"].startswith("not here: deep_gemm: ModuleNotFoundError")
    assert capsys.readouterr().out.count("not here") == 1
    # asked again, it may be there
    peers.deep_gemm.cache_clear()
    made_deep_gemm.install(monkeypatch)
    assert dry(glue, "--peers", "--only", "deep_gemm, TF32") == 0
    assert [row["T"] for row in rows_of(tmp_path, "glue")] == [1, 2]


def test_what_is_wrong_has_no_time(dry, small_sets, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(linear, "TOKENS", (1,))
    right = linear.ours
    monkeypatch.setitem(linear.IMPLEMENTATIONS, "deepdecode", lambda *args: lambda: [1.1 * out for out in right(*args)()])

    def refuses(*_):
        raise RuntimeError("no such\n  layout")

    monkeypatch.setitem(linear.IMPLEMENTATIONS, "torch.matmul, bfloat16 copy", refuses)
    assert dry(linear, "--peers") == 1
    rows = rows_of(tmp_path, "linear")
    ours = [row for row in rows if row["implementation"] == "deepdecode"]
    assert all("rel_err must be at most" in row["error"] and "us_warm" not in row for row in ours)
    refused = [row for row in rows if row["implementation"] == "torch.matmul, bfloat16 copy"]
    assert {row["error"] for row in refused} == {"RuntimeError: no such layout"}
    assert "got 1.0e-01" in capsys.readouterr().out


def test_a_gpu_that_a_rival_has_broken_ends_the_run(dry, small_sets, tmp_path, monkeypatch, capsys):
    def breaks(*_):
        def settle():
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(cells, "settle", settle)
        raise RuntimeError("launch failed")

    monkeypatch.setitem(linear.IMPLEMENTATIONS, "torch.matmul, bfloat16 copy", breaks)
    assert dry(linear, "--peers") == 2
    assert len(rows_of(tmp_path, "linear")) == 2
    said = capsys.readouterr()
    assert "takes no more work of this process: an illegal memory access" in said.err
    assert "left for another run" in said.out
    # the next run leaves that cell alone
    monkeypatch.setattr(cells, "settle", lambda: None)
    monkeypatch.setitem(linear.IMPLEMENTATIONS, "torch.matmul, bfloat16 copy", linear.cublas)
    dry(linear, "--peers", "--tokens", "1", "--only", "torch.matmul, bfloat16 copy")
    rows = [row for row in rows_of(tmp_path, "linear") if row["implementation"] != "deepdecode"]
    assert [("error" in row) for row in rows] == [True] + [False] * (len(linear.SETS) - 1)


def test_says_that_it_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for module in (linear, moe, indexer, glue):
        with pytest.raises(ValueError, match=r"^bench: a CUDA device must be present, got none$"):
            module.main([])


def test_copies_pass_l2():
    assert cells.copies(1 << 30) == 2
    assert cells.copies(1 << 20) == 180
    assert cells.copies(1) == 200
    assert H200.l2 << 20 < cells.PAST_L2 / 2.9
