"""The attention benchmark without a GPU: its cells, how it goes on after a stop, and the fit of the plan's model."""

import argparse
import dataclasses
import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch

from deepdecode.bench import __main__ as bench
from deepdecode.bench import attention, tune
from deepdecode.bench.timing import Timing
from deepdecode.cards import CARDS
from deepdecode.errors import HintedError
from deepdecode.kernels.attention_plan import Case, shapes
from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.ops.rows import read_rows, row_bytes

H200 = next(card for card in CARDS if card.name == "H200")


def test_cells_are_distinct_and_start_with_the_models_own_keys():
    cells = [(case, name) for case, name, *_ in bench.jobs(with_peers=True)]
    keys = [bench._key(vars(case) | {"implementation": name}) for case, name in cells]
    assert len(set(keys)) == len(keys)
    assert sum(name == "deepdecode" for _, name in cells) == 9 * 5 * 4 * 2
    assert sum(name == "flash_mla" for _, name in cells) == 9 * 5 * 4
    first = next(case for case, name in cells if name == "deepdecode")
    assert (first.window_keys, first.extra_keys, first.fmt) == (128, 512, "fp8_584")


@pytest.fixture
def small(monkeypatch):
    """Caches of 4096 rows on the CPU, and a card with 1 MB of L2."""
    changes = {"DEVICE": "cpu", "ROWS": 4096, "ROWS_AT_ONCE": 1000, "card_of": lambda _: dataclasses.replace(H200, l2=1)}
    for name, value in changes.items():
        monkeypatch.setattr(attention, name, value)
    kept = (attention.caches, attention._checked, attention._pools)
    for cache in kept:
        cache.cache_clear()
    yield
    for cache in kept:
        cache.cache_clear()


@pytest.mark.parametrize("fmt", ["fp8_584", "bf16"])
def test_cases_share_rows_and_a_rotation_names_none_twice(small, fmt):
    case = attention.Sized(2, 3, 16, 32, fmt)
    pools = attention._pools(case)
    for name, keys, large in zip(("window", "extra"), (16, 32), attention.caches(fmt), strict=True):
        cache = getattr(pools[0], name)
        assert cache.data.data_ptr() == large.data.data_ptr() and cache.num_rows < large.num_rows
        lanes = torch.stack([getattr(pool, f"{name}_indices") for pool in pools])
        assert lanes.shape == (len(pools), 2, keys) and lanes.dtype == torch.int32
        assert lanes.unique().numel() == lanes.numel() and lanes.min() >= 0 and lanes.max() < cache.num_rows
        # no rows of zeros left: all of them were written, the last and incomplete part too
        values = read_rows(large, torch.arange(large.num_rows)).float()
        assert values.std(dim=1).min() > 0.8 and values.std(dim=1).max() < 1.2
    assert len(pools) * 2 * (16 + 32) * row_bytes(fmt) > 2 * 2**20
    # another case has the same rows; more lanes than rows are drawn with repetition
    wide = attention._pools(attention.Sized(64, 3, 16, 64, fmt))
    assert wide[0].window.data.data_ptr() == pools[0].window.data.data_ptr()
    drawn = torch.stack([pool.extra_indices for pool in wide if pool.extra_indices is not None])
    assert wide[0].extra is not None and wide[0].extra.num_rows == 4096 < drawn.numel() // len(wide) * 2
    assert drawn.min() >= 0 and drawn.max() < 4096 and drawn.unique().numel() > 2048


def test_a_row_is_checked_and_timed_warm_and_rotated(small, monkeypatch):
    timed = []

    def time_graph(calls, **_):
        timed.append([call() for call in calls])
        return Timing(10.0, 9.0, 11.0) if len(calls) > 1 else Timing(8.0, 7.0, 9.0)

    def runner(inputs, out, wrong=0.0):
        def call():
            out.copy_(sparse_attn_ref(inputs.q.float(), *inputs.args()[1:], sink=inputs.sink, scale=inputs.scale)[0])
            out.add_(wrong)
            return inputs.window_indices

        return call

    monkeypatch.setattr(attention, "time_graph", time_graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    case = attention.Sized(18, 3, 16, 32, "fp8_584")
    row = attention.measure(case, "deepdecode", runner, limit_s=0.04)
    assert (row["us_warm"], row["us_rotated"], row["us_rotated_high"]) == (8.0, 10.0, 11.0)
    # the output is bfloat16
    assert 0 < row["rel_err"] < 2.5e-3 and row["worst_row_err"] < 5e-3
    warm, rotated = timed
    assert len(warm) == 1 and len(rotated) == len(attention._pools(case)) > 1
    assert len({tuple(indices.flatten().tolist()) for indices in rotated}) == len(rotated)
    row = attention.measure(case, "deepdecode", lambda *given: runner(*given, wrong=0.01), limit_s=0.04)
    assert row["error"] == "outside the error bounds" and "us_warm" not in row and len(timed) == 2


@pytest.fixture
def measured(monkeypatch):
    """Runs the benchmark with a measurement that counts instead."""
    calls = []

    def measure(case, name, runner, *, limit_s):
        calls.append((case, name))
        if case.T == 2:
            return {"implementation": name, **vars(case), "error": "no such kernel"}
        times = {"us_warm": 10.0, "us_rotated": 12.0, "rel_err": 2e-3, "worst_row_err": 3e-3}
        return {"implementation": name, **vars(case), **times}

    def write(path: Path, rows, **facts):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": rows, **facts}))

    def measure_as_ptx(case, arch):
        calls.append((case, arch))
        return {
            "implementation": bench.attention.ptx_name(arch),
            **vars(case),
            "ptx_arch": arch,
            "rel_err": 2e-3,
            "worst_row_err": 3e-3,
        }

    monkeypatch.setattr(bench.attention, "measure", measure)
    monkeypatch.setattr(bench.attention, "measure_as_ptx", measure_as_ptx)
    monkeypatch.setattr(bench, "write_results", write)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4.25)
    return calls


def options(out, **changes):
    return argparse.Namespace(**({"out": out, "peers": False, "fresh": False, "only": None, "seconds": 1e9} | changes))


def test_a_second_run_measures_only_what_is_missing(measured, tmp_path, capsys):
    assert bench.run(options(tmp_path, only="deepdecode portable"), H200, "abc") == 0
    few = len(measured)
    assert few == 10
    # a product cell without a time is a finding
    assert bench.run(options(tmp_path), H200, "abc") == 1
    everything = len(measured)
    assert bench.run(options(tmp_path), H200, "abc") == 1
    assert len(measured) == everything
    document = json.loads((tmp_path / "h200" / "attention.json").read_text())
    assert len(document["rows"]) == everything
    row = next(row for row in document["rows"] if row["implementation"] == "deepdecode" and row["T"] == 64 and row["H"] == 64)
    assert row["floor_fraction"] == round(row["floor_us"] / 10.0, 4)
    assert "no such kernel" in capsys.readouterr().out
    older = [row for row in document["rows"] if "ptx_arch" in row]
    assert {row["ptx_arch"] for row in older} == {80, 86, 89}
    assert all("us_warm" not in row and "floor_fraction" not in row for row in older)


def test_rows_of_another_commit_are_measured_again(measured, tmp_path, capsys):
    bench.run(options(tmp_path, only="deepdecode portable"), H200, "abc")
    path = tmp_path / "h200" / "attention.json"
    was = path.read_text()
    assert capsys.readouterr().err == ""
    bench.run(options(tmp_path, only="deepdecode portable"), H200, "def")
    assert len(measured) == 20
    copy = path.with_name("attention.json.before")
    assert copy.read_text() == was != path.read_text()
    assert capsys.readouterr().err == f"bench: {path} is begun anew; what it held is in {copy}\n"
    bench.run(options(tmp_path, only="deepdecode portable"), H200, "def")
    assert copy.read_text() == was
    assert capsys.readouterr().err == ""


def test_runs_that_are_cut_join_into_one_of_every_cell(measured, tmp_path, monkeypatch, capsys):
    path = tmp_path / "h200" / "attention.json"
    clock = iter(range(10**6))
    monkeypatch.setattr(bench.time, "monotonic", lambda: float(next(clock)))
    bench.run(options(tmp_path, peers=True, seconds=500), H200, "abc")
    some = len(json.loads(path.read_text())["rows"])
    assert 0 < some < len(list(bench.jobs(with_peers=True)))
    assert f"{some} rows, " in capsys.readouterr().out
    measure = bench.attention.measure

    def interrupted(*args, **options):
        if len(measured) == some + 5:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(bench.attention, "measure", interrupted)
    monkeypatch.setattr(bench, "WRITE_EVERY_S", 1e9)
    with pytest.raises(KeyboardInterrupt):
        bench.run(options(tmp_path, peers=True), H200, "abc")
    assert len(json.loads(path.read_text())["rows"]) == some + 5
    monkeypatch.setattr(bench.attention, "measure", measure)
    bench.run(options(tmp_path, peers=True), H200, "abc")
    rows = json.loads(path.read_text())["rows"]
    cells = {bench._key(vars(case) | {"implementation": name}) for case, name, *_ in bench.jobs(with_peers=True)}
    assert len(rows) == len(cells) == len(measured) and {bench._key(row) for row in rows} == cells
    assert all(row["wall_s"] == 1 and row["commit"] == "abc" for row in rows)


CUT = '{"rows": [{"T": 1'


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (CUT, "must be JSON, got Expecting"),
        ("[]", "must be a result file with a list of rows, got none"),
        (
            '{"rows": [{"implementation": "deepdecode", "T": 1, "H": 8}]}',
            "window_keys in every row, got none in row 1",
        ),
        ('{"rows": [{"implementation": "deepdecode", "T": [1]}]}', r"must have T in every row, got \[1\] in row 1"),
    ],
)
def test_what_is_no_result_file_is_left_alone(measured, tmp_path, text, want):
    path = tmp_path / "h200" / "attention.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=want) as refused:
        bench.run(options(tmp_path), H200, "abc")
    assert str(refused.value).startswith(f"bench: {path} must ")
    assert measured == [] and [file.read_text() for file in path.parent.iterdir()] == [text]


def test_a_sweep_leaves_the_one_before(measured, tmp_path, monkeypatch, capsys):
    launch = {"kernel": "mma", "block_h": 8, "block_n": 32, "splits": 1, "us": 3.14159, "held_out": False}
    row = launch | {"T": 1, "H": 8, "window_keys": 128, "extra_keys": 0, "fmt": "fp8_584"}
    swept = []
    monkeypatch.setattr(tune, "sweep", lambda kernels, cases: swept.append(kernels) or [row])
    monkeypatch.setattr(tune, "write_table", lambda rows, card, **facts: f"table of {len(rows)}")
    path = tmp_path / "h200" / "attention_sweep.json"
    assert bench.sweep(options(tmp_path), H200, "abc") == 0
    was = path.read_text()
    assert capsys.readouterr().err == ""
    assert bench.sweep(options(tmp_path), H200, "def") == 0
    assert path.with_name("attention_sweep.json.before").read_text() == was
    told = capsys.readouterr()
    # the copy is no sweep that the table is made from
    assert "is begun anew" in told.err and told.out == "table of 1\n"
    path.write_text(CUT)
    with pytest.raises(ValueError, match=r"attention_sweep\.json must be JSON"):
        bench.sweep(options(tmp_path), H200, "ghi")
    assert len(swept) == 2 and path.read_text() == CUT


def test_a_fit_wants_launches(tmp_path):
    with pytest.raises(HintedError, match=r"h200 must hold launches, got none") as refused:
        bench.fit(options(tmp_path), H200)
    assert "--sweep" in refused.value.hint


def test_time_that_is_up_leaves_the_rest(measured, tmp_path, capsys):
    bench.run(options(tmp_path, seconds=-1.0), H200, "abc")
    assert measured == []
    assert "left for another run" in capsys.readouterr().out


def made_rows():
    """Times made from the shipped costs, at points of a sweep and at points between them."""
    for shape in shapes():
        for H, T, held_out in product((8, 16, 64), (1, 2, 3, 4, 8, 16, 24, 32, 64, 128), (False, True)):
            if held_out != (T in (3, 24)):
                continue
            for extra, splits in product((0, 512, 1024, 8192), (1, 2, 5, 10)):
                case = Case(T, H, 128, extra, shape.fmt, shape.fmt)
                point = {"T": T, "H": H, "window_keys": 128, "extra_keys": extra, "fmt": shape.fmt, "splits": splits}
                name = {"kernel": shape.kernel, "block_h": shape.block_h, "block_n": shape.block_n}
                yield point | name | {"us": tune.model(shape, splits, case, H200), "held_out": held_out}


def test_a_fit_finds_the_costs_that_made_the_times():
    """The fit gives costs that predict the points it has not seen, so its plan loses next to nothing there."""
    rows = list(made_rows())
    table = tune.fit(rows, H200)
    # the portable kernel's launches are points of their own
    assert table["held_out"]["points"] == (2 + 1) * 3 * 2 * 4
    # not nothing: a shape that is near the best at few points leaves some of its costs open
    assert table["held_out"]["mean"] < 0.01
    assert table["held_out"]["within_10_percent"] >= 0.95 * table["held_out"]["points"]
    assert len(table["shapes"]) == len(shapes())


def test_a_fit_learns_from_launches_nearby_what_its_model_cannot_say():
    """Times in a wave over T H that no coefficient describes: with launches nearby, points in between are predicted better."""
    rows = [row for row in made_rows() if row["kernel"] == "mma"]
    for row in rows:
        row["us"] *= 1 + 0.3 * math.sin(math.log2(row["T"] * row["H"]))
    table = tune._shapes([row for row in rows if not row["held_out"]], H200)
    alone = {key: dataclasses.replace(shape, seen=()) for key, shape in table.items()}

    def missed(shapes):
        between = tune.near_best(row for row in rows if row["held_out"])
        ratios = [tune.predict(shapes[tune._key(row)], row["splits"], tune._case(row), H200) / row["us"] for row in between]
        return sum(abs(math.log2(ratio)) for ratio in ratios) / len(ratios)

    assert missed(table) < 0.6 * missed(alone)


def test_a_table_says_what_it_was_fitted_to(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "__file__", str(tmp_path / "bench" / "tune.py"))
    (tmp_path / "data").mkdir()
    path = tune.write_table(list(made_rows()), H200, commit="abc")
    document = json.loads(path.read_text())
    assert document["commit"] == "abc"
    assert {tuple(shape) for shape in map(sorted, document["shapes"])} == {tuple(sorted(vars(shapes()[0]).keys() - {"misses"}))}
    assert all(shape["seen"] for shape in document["shapes"])


def test_what_is_swept_is_distinct_and_what_is_held_out_lies_between():
    cells = list(tune.swept_cases())
    held_out = [case for case, out in cells if out]
    assert len(held_out) == tune.HELD_OUT_POINTS
    assert not {(case.T, case.H, case.extra_keys) for case in held_out} & {
        (case.T, case.H, case.extra_keys) for case, out in cells if not out
    }
    for case in held_out:
        assert tune.launches(case, H200, ("narrow", "piped", "wide", "mma"))
