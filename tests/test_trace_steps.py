"""Steps and phases: what each signal says, and who wins where they disagree."""

import json
import sqlite3

import msgspec
import pytest
from made_traces import DATA, make_traces

from deepdecode.__main__ import main
from deepdecode.trace import Profile, TraceError, load, profile
from deepdecode.trace.model import SCHEMA
from deepdecode.trace.steps import family


def made(tmp_path, steps=5, change=None, **more):
    """A generated trace, with its events changed by `change(events)`."""
    path = tmp_path / "t.json"
    make_traces.write_kineto(path, "splitk", steps, **{"layers": 8, "thin": 8} | more)
    if change:
        data = json.loads(path.read_text())
        data["traceEvents"] = change(data["traceEvents"])
        path.write_text(json.dumps(data))
    return profile(load(path))


def without(*categories):
    return lambda events: [e for e in events if e["cat"] not in categories]


def votes(result):
    return {v.signal: v.value for v in result.device.steps.votes if v.value}


@pytest.mark.parametrize(
    ("rung", "attention", "simt", "glue", "moe"),
    [("original", 57.1, 8.8, 28.0, 1.9), ("mma", 17.6, 20.8, 49.2, 3.5), ("splitk", 9.6, 19.2, 60.0, 3.2)],
)
def test_the_campaigns_shares_come_out_of_its_traces(rung, attention, simt, glue, moe):
    result = profile(load(DATA / f"decode_{rung}.json.gz"))
    shares = {c.category: round(100 * c.share, 1) for c in result.device.categories}
    assert (shares["attention"], shares["gemm_simt"], shares["glue"], shares["moe"]) == (attention, simt, glue, moe)
    assert "unknown" not in shares
    assert (result.phase, result.batch, result.device.steps.count, result.device.steps.agreement) == ("decode", 16, 3, 1.0)


def test_the_shipped_traces_are_what_the_generator_writes(tmp_path):
    make_traces.write_kineto(tmp_path / "decode_mma.json.gz", "mma", 3, thin=2)
    assert (tmp_path / "decode_mma.json.gz").read_bytes() == (DATA / "decode_mma.json.gz").read_bytes()


def test_per_step_figures(tmp_path):
    result = made(tmp_path)
    device = result.device
    steps = device.steps
    per_layer = 2 + 3 + 116 // 8 + 4 + 11
    assert votes(result) == dict.fromkeys(("engine step", "graph launches", "sampling", "once per step", "per layer"), 5)
    assert (steps.count, device.kernels_per_step, device.graph_launches_per_step) == (5, 8 * per_layer + 1, 1.0)
    assert [s.graph_launches for s in steps.items] == [1] * 5
    assert [(s.phase, s.batch) for s in steps.items] == [("decode", 16)] * 5
    walls = sorted(s.wall_ns for s in steps.items)
    assert (steps.min_ns, steps.p50_ns, steps.max_ns) == (walls[0], walls[2], walls[4])
    attention = next(c for c in device.categories if c.category == "attention")
    assert (attention.launches_per_step, len(attention.step_ns), sum(attention.step_ns)) == (16, 5, attention.exclusive_ns)
    assert device.graph_kernel_share == pytest.approx(1 - 5 / device.kernels)
    # the longest gaps lie between steps, after the token is copied out
    assert [g.after for g in device.gaps[:4]] == ["Memcpy HtoD (Pinned -> Device)"] * 4
    assert all(400_000 < g.dur_ns < 430_000 for g in device.gaps[:4])


@pytest.mark.parametrize(
    ("removed", "signal", "count"),
    [
        ((), "engine step", 5),
        (("user_annotation",), "graph launches", 5),
        (("user_annotation", "cuda_runtime"), "sampling", 5),
    ],
)
def test_fewer_signals_give_the_same_count(tmp_path, removed, signal, count):
    result = made(tmp_path, change=without(*removed))
    assert (result.device.steps.signal, result.device.steps.count) == (signal, count)
    if "cuda_runtime" in removed:
        assert "GPU_ONLY" in [w.code for w in result.warnings]
        assert result.device.graph_mode == "unknown"


def test_without_any_signal_the_capture_is_one_step_and_says_so(tmp_path):
    result = made(tmp_path, change=lambda events: [e for e in events if e["cat"] == "kernel" and "ArgMax" not in e["name"]])
    assert (result.device.steps.count, result.device.steps.agreement) == (1, 0.0)
    assert "NO_STEPS" in [w.code for w in result.warnings]


def test_disagreement_is_shown(tmp_path):
    def outer(events):
        first = next(e for e in events if e["cat"] == "user_annotation")
        return [{**first, "name": "ProfilerStep#1", "dur": 1e7}, *events]

    result = made(tmp_path, change=outer)
    assert result.device.steps.count == 5
    assert [(v.signal, v.value) for v in result.device.steps.votes if v.note] == [("ProfilerStep", 1)]
    assert result.device.steps.agreement == pytest.approx(5 / 6)
    assert "engine step says 5 steps, but ProfilerStep 1" in [w.text for w in result.warnings]


def test_nested_pseudo_steps_are_not_counted(tmp_path):
    def nest(events):
        extra = []
        for e in events:
            if e["cat"] == "user_annotation":
                extra += [{**e, "ts": e["ts"] + i, "dur": 5} for i in range(1, 40)]
        return events + extra

    assert made(tmp_path, change=nest).device.steps.count == 5


@pytest.mark.parametrize("extra", [0.001, 1.0, "a third"], ids=["a nanosecond", "a microsecond", "prepared early"])
def test_steps_that_overlap_their_neighbours_all_count(tmp_path, extra):
    def longer(events):
        more = 0.3 * min(e["dur"] for e in events if e["cat"] == "user_annotation") if extra == "a third" else extra
        marks = [e for e in events if e["cat"] == "user_annotation"]
        ends = [e["ts"] for e in marks[1:]] + [marks[-1]["ts"] + marks[-1]["dur"]]
        longer = {id(e): {**e, "dur": end - e["ts"] + more} for e, end in zip(marks, ends, strict=True)}
        return [longer.get(id(e), e) for e in events]

    result = made(tmp_path, change=longer)
    assert votes(result)["engine step"] == result.device.steps.count == 5


def test_steps_cut_by_the_capture_are_left_out(tmp_path):
    def cut(events):
        events = without("user_annotation")(events)
        kernels = [e for e in events if e["cat"] == "kernel"]
        graph = next(e for e in events if e["name"] == "cudaGraphLaunch")
        # the capture began in the first replay: half of its kernels are missing
        lost = {id(e) for e in kernels[:130] if e["args"]["correlation"] == graph["args"]["correlation"]}
        return [e for e in events if id(e) not in lost]

    result = made(tmp_path, change=cut)
    assert result.device.steps.count == 4
    assert "the first step is left out" in " ".join(w.text for w in result.warnings)


def test_phases_are_told_apart_and_can_be_chosen(tmp_path, capsys):
    def mix(events):
        first = True
        for e in events:
            if e["cat"] == "user_annotation" and first:
                e["name"], first = "step[EXTEND bs=3 toks=900]", False
        return events

    result = made(tmp_path, change=mix)
    assert (result.phase, result.batch) == ("mixed", None)
    assert [s.phase for s in result.device.steps.items] == ["prefill"] + ["decode"] * 4
    assert "MIXED" in [w.code for w in result.warnings]
    trace = load(tmp_path / "t.json")
    decode = profile(trace, phase="decode")
    assert (decode.phase, decode.batch, decode.device.steps.count) == ("decode", 16, 4)
    assert sum(decode.device.exclusive_ns.values()) + decode.device.idle_ns == decode.device.window_ns
    prefill = profile(trace, phase="prefill")
    assert prefill.device.window_ns + decode.device.window_ns == result.device.window_ns
    assert main(["profile", str(tmp_path / "t.json"), "--phase", "decode", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert str(decode.device.window_ns) in json.dumps(printed)
    with pytest.raises(TraceError, match="mixed steps must be in the trace, got 4 decode, 1 prefill"):
        profile(trace, phase="mixed")
    with pytest.raises(TraceError, match="phase must be one of decode, prefill"):
        profile(trace, phase="dekode")


def test_the_capture_of_a_graph_is_no_profile(tmp_path):
    """While a graph is captured the engine launches kernels, but none of them runs."""
    call = {"ph": "X", "cat": "cuda_runtime", "pid": 1, "tid": 1, "dur": 2}
    events = [{**call, "name": "cudaStreamBeginCapture_v2", "ts": 1, "args": {"correlation": 1}}]
    events += [{**call, "name": "cudaLaunchKernel", "ts": 5 * i, "args": {"correlation": 10 + i}} for i in range(1, 200)]
    events += [{**call, "name": "cudaGraphInstantiateWithFlags", "ts": 2000, "args": {"correlation": 500}}]
    warm = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "dur": 3}
    events += [
        {**warm, "name": "nvjet_tst", "ts": 5 * i + 3, "args": {"correlation": 10 + i, "stream": 7}} for i in range(1, 20)
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    result = profile(load(tmp_path / "t.json"))
    assert (result.health.capture, result.phase) == ("graph-capture", "capture")
    assert "GRAPH_CAPTURE" in [w.code for w in result.warnings]
    # the same launches with all of their kernels are an ordinary profile
    events += [{**warm, "name": "nvjet_tst", "ts": 5 * i + 3, "args": {"correlation": 10 + i}} for i in range(20, 200)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    assert profile(load(tmp_path / "t.json")).health.capture == "gpu"


def test_pieces_of_a_graph_are_told_from_whole_graphs(tmp_path):
    """A step of one first piece, eight equal ones and one last piece, as piecewise graphs run it."""
    events, now, correlation = [], 0, 0
    for _ in range(4):
        for size in (5, *[12] * 8, 3):
            correlation += 1
            args = {"correlation": correlation}
            events.append(
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "name": "cudaGraphLaunch",
                    "pid": 1,
                    "tid": 1,
                    "ts": now,
                    "dur": 1,
                    "args": args,
                }
            )
            for i in range(size):
                now += 10
                kernel = {"ph": "X", "cat": "kernel", "name": f"nvjet_{size}_{i}", "pid": 0, "tid": 7, "ts": now, "dur": 8}
                events.append({**kernel, "args": {"stream": 7, **args}})
        now += 500
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    device = profile(load(tmp_path / "t.json")).device
    assert (device.steps.count, device.graph_launches_per_step, device.graph_mode) == (4, 10.0, "piecewise")


@pytest.mark.parametrize(
    ("name", "signal", "phase", "batch"),
    [
        ("step[DECODE bs=16]", "engine step", "decode", 16),
        ("step[EXTEND bs=15 toks=15360]", "engine step", "prefill", 15),
        ("step[MIXED bs=4]", "engine step", "mixed", 4),
        ("step[IDLE]", "engine step", "unknown", None),
        ("execute_16_context_0(sq0sk0)_generation_16(sq16sk8193)", "engine batch", "decode", 16),
        ("decode[bs=128 tok=128 ctx=4096]", "engine step", "decode", 128),
        ("[Executor] _forward_step 41: 0 ctx reqs, 8 gen reqs", "engine batch", "decode", 8),
        ("[Executor] _forward_step 42: 2 ctx reqs, 8 gen tokens", "engine batch", "mixed", 10),
        ("execute_context_2(512)_generation_0(0)", "engine batch", "prefill", 2),
        ("execute_context_1(512)_generation_3(3)", "engine batch", "mixed", 4),
        ("ProfilerStep#12", "ProfilerStep", "unknown", None),
        ("decode_step_3", "named range", "decode", None),
        ("iteration 7", "named range", "unknown", None),
    ],
)
def test_what_a_range_says(name, signal, phase, batch):
    found = family(name)
    assert found is not None
    assert (found[0], found[1].phase, found[1].batch) == (signal, phase, batch)


@pytest.mark.parametrize("name", ["aten::copy_, op_id = 3", "nccl:all_reduce", "Optimizer.step#SGD.step", "stepping stone", ""])
def test_ranges_that_are_no_steps(name):
    assert family(name) is None


def test_a_range_name_made_to_be_slow_is_not():
    for name in ("execute_context_1" + "(" * 500, "step[" + "a " * 250, "decode" + "_" * 500 + "x", "step" * 128):
        family(name[:512])


def test_two_processes_on_one_gpu_share_its_time(tmp_path):
    make_traces.write_nsys(tmp_path / "a.sqlite", "mma", 2, layers=2)
    alone = profile(load(tmp_path / "a.sqlite")).device
    with sqlite3.connect(tmp_path / "a.sqlite") as db:
        db.execute(
            'INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT start, "end", deviceId, 9, correlationId, globalPid + 16777216,'
            " demangledName, gridX, gridY, gridZ, NULL FROM CUPTI_ACTIVITY_KIND_KERNEL"
        )
    db.close()
    result = profile(load(tmp_path / "a.sqlite"))
    device = result.device
    assert len(result.devices) == 1
    assert (device.kernels, device.sum_ns) == (2 * alone.kernels, 2 * alone.sum_ns)
    assert (device.union_ns, device.exclusive_ns) == (alone.union_ns, alone.exclusive_ns)
    assert "OVERLAP" in [w.code for w in result.warnings]


def test_the_profile_is_one_json_document_and_comes_back(tmp_path):
    result = made(tmp_path)
    text = msgspec.json.encode(result)
    assert json.loads(text)["schema"] == SCHEMA == 1
    assert msgspec.json.decode(text, type=Profile) == result


def test_the_timeline_is_the_median_step(tmp_path):
    device = made(tmp_path).device
    timeline = device.timeline
    assert timeline.wall_ns == device.steps.p50_ns == device.steps.items[timeline.step].wall_ns
    assert timeline.left_out == 0
    assert len(timeline.slices) == device.kernels_per_step + 2
    assert [s.start_ns for s in timeline.slices] == sorted(s.start_ns for s in timeline.slices)
    assert timeline.slices[0].start_ns == 0
    assert sum(s.dur_ns for s in timeline.slices) == device.steps.items[timeline.step].busy_ns
