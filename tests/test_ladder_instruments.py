"""The ladder's instruments: passes of a clock, traces without what nobody reads, launches and operations by entry."""

import collections
import gzip
import json
import sys
import types
from dataclasses import replace

import pytest
import torch
from small_traces import kineto

from deepdecode.ladder.campaign import Plan, climb
from deepdecode.ladder.follow import ModelGates
from deepdecode.ladder.instruments import (
    Dispatched,
    Entry,
    compiled_graphs,
    entries_of,
    gpu_instruments,
    profile_steps,
    time_steps,
)
from deepdecode.ladder.slim import Slimming, write_slim
from deepdecode.ops.reference import REFERENCE
from deepdecode.rungs import RUNGS
from deepdecode.slices import RankSlice
from deepdecode.tiny import CONFIG
from deepdecode.trace import load, profile


class Clock:
    """Each replay takes the next of these milliseconds; the last one repeats."""

    def __init__(self, *ms):
        self.ms, self.replays, self.now = list(ms), 0, 0.0

    def replay(self):
        self.now += self.ms[min(self.replays, len(self.ms) - 1)] * 1e-3
        self.replays += 1

    def seconds(self, work):
        before = self.now
        work()
        return self.now - before


# 132 positions in three passes, whole groups of four that fit 0.25 s, and four at least
@pytest.mark.parametrize(("ms", "steps"), [(5.0, 44), (5.6, 44), (5.8, 40), (6.5, 36), (700.0, 4)])
def test_a_pass_fits_its_time(ms, steps):
    clock = Clock(ms)
    found = time_steps(clock.replay, clock.seconds)
    assert (found.steps, found.repeats) == (steps, 3)
    # where a pass is four steps, the first look is one
    assert clock.replays == 2 + (12 if steps == 4 else 4 + 3 * steps)
    assert (found.ms, found.low, found.high) == pytest.approx((ms, ms, ms))


def test_the_median_pass_and_its_spread():
    # the warm-up is slow; then passes of 4 steps at 300, 500 and 400 ms
    clock = Clock(*[900] * 2, *[300] * 4, *[500] * 4, *[400])
    found = time_steps(clock.replay, clock.seconds)
    assert (found.ms, found.low, found.high, found.steps) == (pytest.approx(400), pytest.approx(300), pytest.approx(500), 4)


def test_the_first_look_is_no_pass_where_passes_are_longer():
    # 4 steps of 10 ms, then passes of 24 at 8, 9 and 7 ms
    clock = Clock(*[90] * 2, *[10] * 4, *[8] * 24, *[9] * 24, *[7])
    found = time_steps(clock.replay, clock.seconds)
    assert (found.ms, found.low, found.high, found.steps) == (pytest.approx(8), pytest.approx(7), pytest.approx(9), 24)


def test_a_slim_trace_gives_the_same_profile(tmp_path):
    noise = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 9, "tid": 9, "ts": 1, "dur": 2, "args": {"File": "/home/me"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "pid": 9, "tid": 9, "ts": 1, "dur": 2},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 9, "tid": 9, "ts": 1},
    ]
    whole = kineto(tmp_path / "whole.json", extra=noise)
    document = json.loads(whole.read_text())
    document["traceName"] = "/home/me/trace.json"
    slim = tmp_path / "slim.json.gz"
    write_slim(document, slim)
    text = gzip.decompress(slim.read_bytes()).decode()
    assert "/home/me" not in text
    assert not any(word in text for word in ("aten::add", "ac2g", "cudaDeviceSynchronize"))
    before, after = profile(load(whole)), profile(load(slim))
    assert after.device.kernel_rows == before.device.kernel_rows
    assert after.device.steps == before.device.steps
    assert after.batch == before.batch == 16
    first = slim.read_bytes()
    write_slim(document, slim)
    assert slim.read_bytes() == first


def test_traces_are_written_beside_the_measurement(tmp_path):
    whole, slim, broken = kineto(tmp_path / "whole.json"), tmp_path / "slim.json.gz", tmp_path / "broken.json"
    broken.write_text("{")
    before = profile(load(whole))
    slimming = Slimming()
    slimming.start(whole, slim)
    slimming.start(broken, tmp_path / "none.json.gz")
    [failed] = slimming.wait()
    assert failed.startswith("none.json.gz: json.decoder.JSONDecodeError")
    assert profile(load(slim)).device.kernel_rows == before.device.kernel_rows
    assert sorted(file.name for file in tmp_path.iterdir()) == ["slim.json.gz"]
    assert slimming.wait() == []


def test_profiled_steps_are_counted(tmp_path):
    ran = []
    found = profile_steps(
        lambda: ran.append(1), lambda work, path: (work(), kineto(path, bs=4)), tmp_path / "a.json.gz", batch=4, steps=3
    )
    assert len(ran) == 3
    assert found.batch == 4


def event(kind, name, ts, dur, number=None, **more):
    made = {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": 9, "ts": ts, "dur": dur} | more
    return made | ({"args": {"device": 0, "stream": 7, "correlation": number}} if number else {})


def test_launches_go_to_the_entry_that_launched_them(tmp_path):
    """Work runs after its range has ended; a copy is a launch; the profiler's copy of a range on the GPU does not count."""
    extra = [
        event("user_annotation", "ops.moe", 100, 50),
        event("user_annotation", "ops.route", 10, 50),
        event("user_annotation", "something else", 5, 500),
        event("gpu_user_annotation", "ops.head", 0, 900, pid=0),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, 1),
        event("cuda_runtime", "cudaMemcpyAsync", 20, 2, 2),
        event("cuda_runtime", "cudaLaunchKernel", 149, 2, 3),
        event("cuda_runtime", "cudaLaunchKernel", 150, 2, 4),
        event("kernel", "a", 200, 3, 1, pid=0),
        event("gpu_memcpy", "Memcpy DtoD", 210, 1.5, 2, pid=0),
        event("kernel", "b", 220, 10, 3, pid=0),
        event("kernel", "c", 240, 0.25, 4, pid=0),
    ]
    path = kineto(tmp_path / "t.json", [], extra=extra)
    assert entries_of(load(path)) == {"route": Entry(2, 4.5), "moe": Entry(1, 10.0), "between the entries": Entry(1, 0.25)}
    alone = kineto(tmp_path / "u.json", [], extra=extra[4:])
    assert entries_of(load(alone)) == {"between the entries": Entry(4, 14.75)}


def test_dispatched_operations_count_for_their_entry():
    x = torch.randn(4, 6)

    def head(x):
        # a product, an addition, and views that do nothing
        return (x.view(6, 4).t() @ x.reshape(4, 6).t()[:, :4].expand(6, 4)).add(1)

    def sample(x):
        return x.add_(1).argmax()

    counter = Dispatched()
    table = counter.table(replace(REFERENCE, head=head, sample=sample))
    with counter:
        table.head(x)
        x + 1
        table.sample(x)
        with pytest.raises(RuntimeError):
            table.head(x[:3])
        x * 2
    assert dict(counter.counts) == {"head": 2, "between the entries": 2, "sample": 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_whole_ladder_on_a_small_slice(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    config = replace(CONFIG, num_heads=8, o_groups=8, expert_width=1024)
    slice = RankSlice(config, "tp8", context=1024, max_concurrency=3, device=device)
    # torch.compile takes minutes
    rungs = tuple(rung for rung in RUNGS if not rung.asked)
    plan = Plan("tp8", rungs, (1, 3), 3, 1024, config.num_layers, "abc")
    rows = climb(
        plan,
        slice,
        gpu_instruments(device),
        ModelGates(device),
        tmp_path / "l.json",
        save=lambda rows: None,
        say=lambda row: None,
    )
    assert [row["error"] for row in rows if "error" in row] == []
    for row in rows:
        profile = row["profile"]
        assert 0 < row["us_warm_low"] <= row["us_warm"] <= row["us_warm_high"]
        assert profile["unknown_share"] < 0.05
        assert profile["steps"] == (4 if row["concurrency"] == 3 else 2)
        # a replay launches the graph's kernels; copies and fills are no kernels
        assert abs(profile["launches"] - row["graph_launches"]) <= 0.05 * row["graph_launches"]
        assert 0 < profile["categories"]["attention"]["ms"] < profile["busy_ms"] <= profile["step_ms"]
        if row["concurrency"] == 3:
            launched = sum(entry["launches"] for entry in row["entries"].values())
            assert abs(launched - row["graph_launches"]) <= 0.1 * row["graph_launches"]
            assert row["entries"]["sparse_attn"]["launches"] >= config.num_layers


def test_graphs_of_torch_compile_are_counted(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert compiled_graphs() == (0, 0)
    counters = collections.defaultdict(collections.Counter)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", types.SimpleNamespace(counters=counters))
    counters["stats"]["unique_graphs"] = 5
    counters["graph_break"].update({"a call": 2, "a value": 1})
    assert compiled_graphs() == (5, 3)
