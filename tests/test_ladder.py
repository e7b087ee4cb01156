"""The ladder end to end on a small slice: what a row holds, what fails without stopping the rest, what a second run keeps."""

import json
import os
from dataclasses import replace

import pytest
import torch
from made_profiles import MS
from small_checkpoint import SMALL
from small_traces import kineto, schedule

from deepdecode.ladder.campaign import Plan, climb, known, rungs_told, trace_path
from deepdecode.ladder.command import Request, _kept, run
from deepdecode.ladder.entries import FLOAT64, compared, entry_gates
from deepdecode.ladder.gates import Gate, LogitsGate, step_gates
from deepdecode.ladder.instruments import Instruments
from deepdecode.ops.reference import REFERENCE
from deepdecode.ops.rows import read_rows, write_rows
from deepdecode.ops.table import AttnInputs
from deepdecode.rungs import Rung
from deepdecode.slices import RankSlice

# microseconds that a step of each rung takes on the clock of these tests, and of its attention in a trace
STEP_US = {"slow": 40_000.0, "quick": 10_000.0, "variant": 20_000.0}
ATTENTION_US = {"slow": 24_000, "quick": 1_000, "variant": 9_000}
# the rest of a step's kernels takes as long on every rung
GLUE = ("void at::native::vectorized_elementwise_kernel<4>(int)", 3 * MS)


@pytest.fixture(scope="module")
def small():
    return RankSlice(SMALL, "tp8", context=384, max_concurrency=4, device="cpu")


@pytest.fixture(scope="module")
def gate():
    return LogitsGate()


def loud(*args, **options):
    return 1.05 * REFERENCE.sparse_attn(*args, **options)


def full(*args, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nand more words")


def rung(name, beside="", yardstick="", **entries):
    table = replace(REFERENCE, **entries)
    return Rung(name, f"the {name} one", lambda: table, {"moe": "somebody's"}, yardstick=yardstick, beside=beside)


SLOW, QUICK, VARIANT = rung("slow", yardstick="an engine"), rung("quick"), rung("variant", beside="quick")


class Bench:
    """A slice, a clock and a profiler whose numbers are known; the first step of each graph does run."""

    def __init__(self, slice, rungs):
        self.slice, self.tables = slice, {rung.name: rung.ops for rung in rungs}
        self.bytes, self.experts_hit, self.reset = slice.bytes, slice.experts_hit, slice.reset
        self.rung, self.ran, self.steps = "", [], 0

    def graph(self, ops, concurrency):
        return Replayed(self, self.slice.graph(ops, concurrency))

    def instruments(self):
        facts = {"name": "NVIDIA H200", "arch": 90, "sms": 132}
        return Instruments(facts, {"torch": "2"}, self.seconds, lambda: 4.0, self.record)

    def gate(self, ops):
        """Called first for each rung, so it knows which one is measured."""
        self.rung = next(name for name, table in self.tables.items() if table is ops)
        self.ran.append(self.rung)
        return [Gate("logits against the reference table", 0.01, 0.02, "8 rows")]

    def seconds(self, work):
        before = self.steps
        work()
        return (self.steps - before) * STEP_US[self.rung] * 1e-6

    def record(self, work, path):
        work()
        attention = ("sparse_attn_decode_mma_kernel", 1000 * ATTENTION_US[self.rung])
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name.startswith("eager-"):
            entries(path)
        else:
            kineto(path, schedule([attention, GLUE], steps=4), bs=2)


class Replayed:
    launches = 7

    def __init__(self, bench, graph):
        self.bench, self.graph, self.tokens, self.eager = bench, graph, graph.tokens, graph.eager
        self.seek = graph.seek

    def replay(self):
        self.bench.steps += 1
        if self.graph.steps < 2:
            self.graph.replay()


def entries(path):
    """One eager step: three launches in two entries, and one between them."""
    marks = [("ops.route", 0, 100), ("ops.sparse_attn", 200, 100)]
    launches = [(10, 5_000, "a_kernel"), (50, 7_000, "b_kernel"), (150, 2_000, "c_kernel"), (210, 30_000, "sparse_attn_kernel")]
    extra = [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 9, "tid": 9, "ts": ts, "dur": dur} for name, ts, dur in marks
    ]
    for n, (at, dur, name) in enumerate(launches, 1):
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": at, "dur": 5}
        extra.append({**call, "args": {"correlation": n}})
        args = {"device": 0, "stream": 7, "correlation": n, "grid": [4, 1, 1]}
        done = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": at + 400, "dur": dur / 1e3}
        extra.append({**done, "args": args})
    kineto(path, [], extra=extra)


def plan_of(*rungs, levels=(1, 2), commit="abc"):
    return Plan("tp8", rungs, levels, 2, 384, SMALL.num_layers, commit)


def climbed(small, path, *rungs, **options):
    bench, saved = Bench(small, rungs), []
    rows = climb(
        plan_of(*rungs, **options),
        bench,
        bench.instruments(),
        bench.gate,
        path,
        save=lambda rows: saved.append(len(rows)),
        say=lambda row: None,
    )
    return rows, saved


def test_a_row_holds_what_was_measured(small, tmp_path):
    path = tmp_path / "card" / "ladder-tp8.json"
    rows, saved = climbed(small, path, SLOW, QUICK)
    assert [(row["rung"], row["concurrency"]) for row in rows] == [("slow", 1), ("slow", 2), ("quick", 1), ("quick", 2)]
    assert saved == [1, 2, 3, 4]
    row = rows[1]
    assert (row["us_warm"], row["us_warm_low"], row["us_warm_high"]) == (40_000.0, 40_000.0, 40_000.0)
    # 0.25 seconds hold 6 steps, of whole fours 4
    assert (row["timed_steps"], row["repeats"]) == (4, 3)
    assert row["tokens_per_s"] == 50.0
    assert row["bytes"] == sum(small.bytes(2).values()) > 10_000
    assert row["floor_us"] == round(row["bytes"] / 4.0 / 1e6, 2)
    assert row["times_floor"] == round(40_000 / (row["bytes"] / 4.0 / 1e6), 2)
    # where the time of the measurement itself went; a rung's logits are looked at once
    parts = ["capture", "gates", "timing", "profile", "entries"]
    assert [list(row["wall_s"]) for row in rows[:2]] == [["logits", *parts[:-1]], parts]
    hit = small.experts_hit(2)
    assert row["experts_hit"] == {"mean": round(sum(hit) / 3, 2), "min": min(hit), "max": max(hit)}
    profile = row["profile"]
    assert (profile["steps"], profile["launches"]) == (4, 2)
    assert profile["categories"]["attention"]["ms"] == pytest.approx(24.0, rel=0.01)
    assert profile["categories"]["attention"]["share"] == pytest.approx(24 / 27, rel=0.01)
    assert profile["categories"]["glue"]["ms"] == pytest.approx(3.0, rel=0.01)
    assert row["entries"] == {
        "sparse_attn": {"launches": 1, "us": 30.0},
        "route": {"launches": 2, "us": 12.0},
        "between the entries": {"launches": 1, "us": 2.0},
    }
    assert [gate["name"] for gate in row["gates"]] == [
        "logits against the reference table",
        "attention against float64",
        "its worst row",
        "chosen entries that float64 does not choose",
        "scores lost by them",
        "entries against float64",
        "rows written against float64",
        "experts that float64 does not choose",
        "hyper-connections' gates against float64",
    ]
    assert 1e-4 < row["rel_err"] < 3e-3
    # the trace of the profiled concurrency alone stays
    assert [file.name for file in sorted(path.parent.iterdir())] == [
        trace_path(path, name, 2).name for name in ("quick", "slow")
    ]
    assert "entries" not in rows[0]
    assert "trace" not in rows[0]


def test_what_fails_has_no_time_and_stops_nothing(small, tmp_path):
    wrong, big = rung("slow", sparse_attn=loud), rung("variant", head=full)
    rows, _ = climbed(small, tmp_path / "l.json", wrong, big, QUICK, levels=(1,))
    told = {(row["rung"], row["concurrency"]): row for row in rows}
    assert told["slow", 1]["error"].startswith("attention against float64 is off by 5.0")
    assert told["slow", 1]["error"].endswith("e-02, the bound is 5.00e-03")
    assert told["slow", 1]["rel_err"] == pytest.approx(0.05, rel=0.02)
    assert told["variant", 2]["error"] == "out of memory: CUDA out of memory. Tried to allocate 9 GiB"
    for key in (("slow", 1), ("slow", 2), ("variant", 1), ("variant", 2)):
        assert not {"us_warm", "tokens_per_s", "profile", "floor_us"} & set(told[key])
    assert told["quick", 2]["us_warm"] == 10_000.0


def test_rows_that_a_broken_rung_wrote_do_not_break_the_next(small, tmp_path):
    class Warmed(Bench):
        """Steps run before a graph is there, as a capture's warm-up does."""

        def graph(self, ops, concurrency):
            graph = self.slice.graph(ops, concurrency)
            graph.replay()
            graph.replay()
            graph.seek(0)
            return Replayed(self, graph)

    def nothing(*args, **options):
        return REFERENCE.sparse_attn(*args, **options) * float("nan")

    # on a GPU, sampling does not look at the logits' values
    broken = rung(
        "slow", yardstick="an engine", sparse_attn=nothing, sample=lambda logits, *rest: logits.new_zeros(len(logits))
    )
    fine = rung("variant")
    bench = Warmed(small, [broken, fine, QUICK])
    rows = climb(
        plan_of(broken, fine, QUICK, levels=(2,)),
        bench,
        bench.instruments(),
        bench.gate,
        tmp_path / "l.json",
        save=lambda rows: None,
        say=lambda row: None,
    )
    assert bench.ran == ["quick", "slow", "variant"]
    # the broken one has no time, the one after it has
    assert [row.get("us_warm") for row in rows] == [None, 20_000.0, 10_000.0]
    assert rows[0]["error"].startswith("attention against float64 is off by ")


def test_a_failed_profile_is_no_time_either(small, tmp_path):
    bench = Bench(small, [QUICK])

    def record(work, path):
        raise RuntimeError("CUPTI\nsays no")

    rows = climb(
        plan_of(QUICK, levels=(2,)),
        bench,
        replace(bench.instruments(), record=record),
        bench.gate,
        tmp_path / "l.json",
        save=lambda rows: None,
        say=lambda row: None,
    )
    assert [row["error"] for row in rows] == ["RuntimeError: CUPTI says no"]
    assert not {"us_warm", "tokens_per_s", "profile", "trace"} & set(rows[0])


def test_what_a_short_run_should_have_comes_first():
    plan = plan_of(SLOW, rung("middle"), QUICK, VARIANT, levels=(2,))
    assert [rung.name for rung, _, _ in plan.cells()] == ["quick", "slow", "middle", "variant"]


def test_a_failed_logits_gate_is_no_time_either(small, tmp_path):
    bench = Bench(small, [QUICK])
    gate = Gate("logits against the reference table", float("nan"), 0.02)
    rows = climb(
        plan_of(QUICK, levels=(1,)),
        bench,
        bench.instruments(),
        lambda ops: [gate],
        tmp_path / "l.json",
        save=lambda rows: None,
        say=lambda row: None,
    )
    assert [row["error"] for row in rows] == ["logits against the reference table is off by nan, the bound is 2.00e-02"] * 2
    assert not any("us_warm" in row for row in rows)


def test_a_second_run_measures_what_the_first_could_not(small, tmp_path):
    path, plan = tmp_path / "ladder-tp8.json", plan_of(SLOW, rung("quick", head=full))
    bench = Bench(small, plan.rungs)
    request = Request(resume=True)
    first = run(request, plan, bench, bench.instruments(), bench.gate, path)
    assert ["error" in row for row in first["rows"]] == [False, False, True, True]
    assert json.loads(path.read_text()) == first
    plan = plan_of(SLOW, QUICK)
    bench = Bench(small, plan.rungs)
    again = run(request, plan, bench, bench.instruments(), bench.gate, path)
    assert bench.ran == ["quick"]
    assert again["rows"][:2] == first["rows"][:2]
    assert [row["us_warm"] for row in again["rows"]] == [40_000.0, 40_000.0, 10_000.0, 10_000.0]
    # the concurrency whose traces are kept is the file's; a file without a row of this measurement says nothing
    assert _kept(request, plan, path)["profiled_concurrency"] == 2
    assert _kept(Request(), plan, path) is _kept(request, plan_of(SLOW, commit="def"), path) is None
    # another commit, another context: nothing of it counts
    assert known(again["rows"], plan) == again["rows"]
    assert known(again["rows"], plan_of(SLOW, QUICK, commit="def")) == []
    assert known(again["rows"], replace(plan, context=128)) == []


def test_a_run_of_one_rung_keeps_the_others(small, tmp_path, monkeypatch):
    monkeypatch.setattr("deepdecode.ladder.campaign.RUNGS", (SLOW, QUICK))
    path, plan = tmp_path / "ladder-tp8.json", plan_of(SLOW, levels=(2,))
    bench = Bench(small, plan.rungs)
    first = run(Request(), plan, bench, bench.instruments(), bench.gate, path)
    bench = Bench(small, [QUICK])
    more = Request(resume=True, rungs="quick", concurrency="1")
    both = run(more, plan_of(QUICK, levels=(1,)), bench, bench.instruments(), bench.gate, path)
    assert bench.ran == ["quick"]
    commands = ["deepdecode ladder", "deepdecode ladder --rungs quick --concurrency 1"]
    assert both["command"] == " && ".join(commands)
    again = run(more, plan_of(QUICK, levels=(1,)), bench, bench.instruments(), bench.gate, path)
    assert again == both
    assert [(row["rung"], row["concurrency"]) for row in both["rows"]] == [("slow", 2), ("quick", 1), ("quick", 2)]
    assert both["rows"][0] == first["rows"][0]
    assert list(both["rungs"]) == ["slow", "quick"]
    assert both["rungs"]["quick"]["below"] == "slow"
    assert json.loads(path.read_text()) == both
    # without --resume the file is begun anew
    bench = Bench(small, [QUICK])
    alone = run(Request(), plan_of(QUICK, levels=(2,)), bench, bench.instruments(), bench.gate, path)
    assert [row["rung"] for row in alone["rows"]] == ["quick"]


def test_the_result_file_says_what_it_was(small, tmp_path):
    plan = plan_of(SLOW, QUICK, VARIANT, levels=(2,))
    bench = Bench(small, plan.rungs)
    document = run(Request(layers=3), plan, bench, bench.instruments(), bench.gate, tmp_path / "l.json")
    assert document["command"] == "deepdecode ladder --layers 3"
    assert {key: document[key] for key in ("schema", "commit", "slice", "context", "layers", "profiled_concurrency")} == {
        "schema": 1, "commit": "abc", "slice": "tp8", "context": 384, "layers": 3, "profiled_concurrency": 2,
    }  # fmt: skip
    assert document["rungs"] == rungs_told(plan.rungs)
    below = {name: told["below"] for name, told in document["rungs"].items()}
    assert below == {"slow": None, "quick": "slow", "variant": "slow"}


def test_step_gates_look_at_every_kind_of_layer(small):
    graph = small.graph(REFERENCE, 2)
    tensor, row, others, lost = step_gates(REFERENCE, graph.eager)
    # the window alone, with 16 chosen entries of ratio 4, with the ratio-128 entries padded to 64
    assert tensor.note == "2 tokens, 1 heads, 128, 144, 192 keys"
    assert others.note.startswith("2 tokens, top 16 of ")
    assert tensor.passed
    assert row.passed
    assert others.error == lost.error == 0

    def one_row(*args, **options):
        out = REFERENCE.sparse_attn(*args, **options)
        out[1, 0] *= 1.02
        return out

    tensor, row, *_ = step_gates(replace(REFERENCE, sparse_attn=one_row), graph.eager)
    assert row.error == pytest.approx(0.02, rel=0.1)
    assert not row.passed
    with pytest.raises(ValueError, match="step gates: the step must call sparse_attn, got no call"):
        step_gates(REFERENCE, lambda ops: None)


def test_step_gates_count_wrongly_chosen_entries(small):
    graph = small.graph(REFERENCE, 2)

    def backwards(*args):
        # the same entries in another order
        indices, lens = REFERENCE.index_topk(*args)
        return indices.flip(1), lens

    assert step_gates(replace(REFERENCE, index_topk=backwards), graph.eager)[2].error == 0

    def three_others(index_q, weights, keys, step, topk):
        indices, lens = REFERENCE.index_topk(index_q, weights, keys, step, topk)
        indices[1, :3] = -1
        return indices, lens

    others, lost = step_gates(replace(REFERENCE, index_topk=three_others), graph.eager)[2:]
    assert others.error == 3 / 32
    assert not others.passed
    # three of the 16 best of one token
    assert 0.05 < lost.error < 0.4
    assert not lost.passed

    def the_worst(index_q, weights, *rest):
        return REFERENCE.index_topk(index_q, -weights, *rest)

    assert step_gates(replace(REFERENCE, index_topk=the_worst), graph.eager)[2].error > 0.5


def test_another_entry_next_to_the_bar_costs_nothing(small):
    """An entry as good as the last one chosen counts as another, and loses no score."""
    graph = small.graph(REFERENCE, 2)

    def twins(index_q, weights, keys, step, topk):
        # every key the same: whichever are chosen score alike
        rows = torch.arange(keys.num_rows)
        kept = read_rows(keys, rows)
        write_rows(keys, rows, kept[:1].expand_as(kept))
        indices, lens = REFERENCE.index_topk(index_q, weights, keys, step, topk)
        later = step.block_tables[step.slots.long(), 0] * keys.page_size + int(step.entry_lens[4].min()) - 1
        indices[:, 0] = later
        return indices, lens

    others, lost = step_gates(replace(REFERENCE, index_topk=twins), graph.eager)[2:]
    small.reset()
    assert others.error > 0.02
    assert lost.error < 1e-12


LATER = 127


def entry_gates_of(small, ops):
    graph = small.graph(REFERENCE, 2)
    graph.seek(LATER)
    found = {gate.name: gate for gate in entry_gates(ops, graph.eager)}
    small.reset()
    return found


def test_one_step_serves_both_gates(small):
    graph, apart, inside = small.graph(REFERENCE, 2), [], []
    for gates in (step_gates, entry_gates):
        graph.seek(127)
        apart += gates(REFERENCE, graph.eager)
    graph.seek(127)
    together = step_gates(REFERENCE, lambda table: inside.extend(entry_gates(table, graph.eager))) + inside
    assert together == apart
    assert len(together) > 6


def test_entry_gates_pass_the_reference(small):
    gates = entry_gates_of(small, REFERENCE)
    assert all(gate.passed for gate in gates.values())
    # rounding to bfloat16 shows: the comparison is with float64
    assert 1e-3 < gates["entries against float64"].error < 4e-3
    assert 1e-3 < gates["rows written against float64"].error < 3e-2
    assert gates["experts that float64 does not choose"].error == 0
    mixed = gates["hyper-connections' gates against float64"]
    assert 0 < mixed.error < 2e-6
    assert 1e-5 < float(mixed.note.split()[-1]) < 1e-2


def test_a_mixing_product_in_bfloat16_is_refused(small):
    """Its gates are off by less than the entries' own roundings, so only a gate of their own sees it."""

    def rounded(y, streams, post, comb, site, norm, config):
        site = replace(site, fn=site.fn.bfloat16().float())
        return REFERENCE.mhc_boundary(y, streams, post, comb, site, norm, config)

    gates = entry_gates_of(small, replace(REFERENCE, mhc_boundary=rounded))
    assert gates["entries against float64"].passed
    mixed = gates["hyper-connections' gates against float64"]
    assert not mixed.passed
    # as the note of every rung says
    assert mixed.error == pytest.approx(float(mixed.note.split()[-1]), rel=0.1)


def a_bit_more(entry, part=None, by=1.02):
    """An entry that gives one of its results 2 % too large."""

    def run(*args, **options):
        given = getattr(REFERENCE, entry)(*args, **options)
        if part is None:
            return given * by
        if isinstance(given, tuple):
            return tuple(value * by if i == part else value for i, value in enumerate(given))
        return replace(given, **{part: getattr(given, part) * by})

    return replace(REFERENCE, **{entry: run})


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("embed", None), ("mhc_boundary", 0), ("mhc_boundary", 1), ("mhc_boundary", 2), ("mhc_boundary", 3),
        ("attn_in", "q_latent"), ("attn_in", "kv"), ("q_proj", 0), ("attn_prepare", "q"), ("sparse_attn", None),
        ("attn_out", None), ("route", 1), ("moe", None), ("head", None),
    ],
)  # fmt: skip
def test_entry_gates_name_the_entry_that_is_off(small, entry, part):
    gate = entry_gates_of(small, a_bit_more(entry, part))["entries against float64"]
    assert gate.error == pytest.approx(0.02, rel=0.25)
    assert not gate.passed
    assert gate.note.endswith(f" of {entry}")


def test_entry_gates_see_what_is_written(small):
    def loud(q, index_q, inputs, *rest):
        return REFERENCE.attn_prepare(
            q, index_q, replace(inputs, comp_gate=None if inputs.comp_gate is None else -inputs.comp_gate), *rest
        )

    gates = entry_gates_of(small, replace(REFERENCE, attn_prepare=loud))
    assert gates["rows written against float64"].error > 0.1
    assert "compressed row of attn_prepare" in gates["rows written against float64"].note


def test_float64_looks_for_no_kernel(monkeypatch):
    """Nothing is said of kernels that float64 has not, in strict mode neither."""
    seen = []

    class Weights:
        @property
        def hc(self):
            seen.append(os.environ.get("DEEPDECODE_REFERENCE"))
            raise KeyError("enough")

    monkeypatch.delenv("DEEPDECODE_REFERENCE", raising=False)
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv("DEEPDECODE_REFERENCE", before)
        with pytest.raises(KeyError, match="enough"):
            FLOAT64.head(None, torch.zeros(1, 4, 8), None, None, Weights(), SMALL)
        assert os.environ.get("DEEPDECODE_REFERENCE") == before
    assert seen == ["1", "1"]


def test_entry_gates_take_views(small):
    """Parts of one product, with the product's distance from token to token."""

    def views(*args):
        given = vars(REFERENCE.attn_in(*args))
        wide = {name: None if part is None else torch.cat([part, part], dim=1) for name, part in given.items()}
        return AttnInputs(**{name: None if part is None else part[:, : part.shape[1] // 2] for name, part in wide.items()})

    def prepare(q, index_q, inputs, *rest):
        whole = {name: None if part is None else part.contiguous() for name, part in vars(inputs).items()}
        return REFERENCE.attn_prepare(q, index_q, AttnInputs(**whole), *rest)

    gates = entry_gates_of(small, replace(REFERENCE, attn_in=views, attn_prepare=prepare))
    assert all(gate.passed for gate in gates.values())


def test_entry_gates_count_other_experts(small):
    def next_one(x, tokens, weights, config):
        ids, share = REFERENCE.route(x, tokens, weights, config)
        ids[0, 0] = next(i for i in range(len(weights.gate)) if i not in ids[0].tolist())
        return ids, share

    gate = entry_gates_of(small, replace(REFERENCE, route=next_one))["experts that float64 does not choose"]
    assert gate.error == 1 / (2 * SMALL.experts_per_token)
    assert not gate.passed


def test_a_table_is_compared_on_another_s_inputs(small):
    """An entry that is off moves no later entry's inputs: only its own results are apart."""
    graph = small.graph(REFERENCE, 2)
    table, found = compared(REFERENCE, {"off": a_bit_more("moe")}, lambda entry, args: True)
    graph.seek(LATER)
    graph.eager()
    want = graph.logits.clone()
    graph.seek(LATER)
    graph.eager(table)
    assert torch.equal(graph.logits, want)
    apart = {(one.entry, one.part): one.error for one in found if one.error}
    assert list(apart) == [("moe", "y")]
    assert apart["moe", "y"] == pytest.approx(0.02, rel=0.1)
    assert len([one for one in found if one.entry == "moe"]) == SMALL.num_layers


def test_logits_gate_knows_the_reference_from_a_broken_one(gate):
    good, divergence, others = gate(REFERENCE)
    assert good.passed
    assert good.error == pytest.approx(good.bound / 2)
    assert 1e-3 < good.bound < 0.1
    assert divergence.error == pytest.approx(divergence.bound / 4)
    # of two distributions a small step e apart in logits of this spread, some e**2 / 2
    assert 1e-6 < divergence.error < 1e-3
    assert others.error == 0

    def window_only(q, window, indices, lens, *rest, **options):
        return REFERENCE.sparse_attn(q, window, indices, lens, **options)

    assert [one.passed for one in gate(replace(REFERENCE, sparse_attn=window_only))][:2] == [False, False]
    broken = gate(replace(REFERENCE, moe=lambda *args: REFERENCE.moe(*args) * float("nan")))
    assert [one.error for one in broken[:2]] == [float("inf")] * 2
    assert not any(one.passed for one in broken)
