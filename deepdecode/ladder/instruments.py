"""What a step is measured with: a clock, a profiler, a bandwidth. They are values, so that a test can hand in its own."""

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepdecode.ops.table import Ops
from deepdecode.trace import Profile, load, profile
from deepdecode.trace.model import Trace
from deepdecode.trace.steps import launch_of

# three passes follow one another over 132 positions, so that compressors complete entries at their natural rate
REPEATS, PASS_STEPS = 3, 44
# of one pass; a slow rung is timed over fewer positions, whole groups of four all the same
PASS_S = 0.25
# of a trace that is kept, enough that the reader can tell a change from noise; of one that is only summed up
KEPT_STEPS, SUMMED_STEPS = 4, 2
# how `StepGraph.eager` names the range of an entry of the table
RANGE = "ops."
OTHER = "between the entries"


@dataclass(frozen=True)
class Instruments:
    """device, versions: facts for the result file.

    seconds(work) runs work and gives the seconds it took on the device; bandwidth() gives TB/s of a large copy;
    record(work, path) runs work under the profiler and writes a Chrome trace.
    """

    device: dict[str, Any]
    versions: dict[str, Any]
    seconds: Callable[[Callable[[], Any]], float]
    bandwidth: Callable[[], float]
    record: Callable[[Callable[[], Any], Path], None]


def gpu_instruments(device: torch.device) -> Instruments:
    import triton

    from deepdecode.bench.timing import copy_bandwidth

    # graphs captured before CUPTI starts, or replayed after it was torn down, would lose their kernels
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    with _profiler(), torch.cuda.device(device):
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    facts = torch.cuda.get_device_properties(device)

    def seconds(work: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(device)
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def record(work: Callable[[], Any], path: Path) -> None:
        torch.cuda.synchronize(device)
        with _profiler() as recorded:
            work()
            torch.cuda.synchronize(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))

    return Instruments(
        device={"name": facts.name, "arch": 10 * facts.major + facts.minor, "sms": facts.multi_processor_count},
        versions={"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        seconds=seconds,
        bandwidth=copy_bandwidth,
        record=record,
    )


@contextlib.contextmanager
def _profiler() -> Iterator[torch.profiler.profile]:
    kinds = torch.profiler.ProfilerActivity
    with warnings.catch_warnings():
        # of cycles, of which there is one here; keeping events across them would parse each in Python
        warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as recorded:
            yield recorded


@dataclass(frozen=True)
class Tpot:
    """Milliseconds of a step: the median pass, the fastest and the slowest; how many passes of how many steps."""

    ms: float
    low: float
    high: float
    steps: int
    repeats: int


def time_steps(replay: Callable[[], Any], seconds: Callable[[Callable[[], Any]], float], *, limit_s: float = PASS_S) -> Tpot:
    """Time passes over consecutive positions; a pass has PASS_STEPS of them, or as many fours as `limit_s` holds.

    The first look at the time is a pass too where a pass is as short as that look.
    """

    def run(steps: int) -> float:
        return seconds(lambda: [replay() for _ in range(steps)]) / steps

    run(2)
    once = run(4)
    steps = max(4, min(PASS_STEPS, int(limit_s / once)) // 4 * 4)
    looked = [once] if steps == 4 else []
    passes = sorted(1e3 * seconds for seconds in (*looked, *(run(steps) for _ in range(REPEATS - len(looked)))))
    return Tpot(passes[len(passes) // 2], passes[0], passes[-1], steps, REPEATS)


def profile_steps(
    replay: Callable[[], Any], record: Callable[[Callable[[], Any], Path], None], path: Path, batch: int, steps: int
) -> Profile:
    """Replay a few steps under the profiler, and account for the trace."""

    def work() -> None:
        for _ in range(steps):
            with torch.profiler.record_function(f"step[DECODE bs={batch}]"):
                replay()

    record(work, path)
    return profile(load(path))


def compiled_graphs() -> tuple[int, int]:
    """Graphs that torch.compile has made in this process, and how often it had to end one early; 0 where nobody used it."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0, 0
    counters = sys.modules["torch._dynamo.utils"].counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@dataclass(frozen=True)
class Entry:
    """What one entry of the table put on the GPU in a step: launches (copies and sets among them), and their time."""

    launches: int
    us: float


def profile_entries(
    eager: Callable[[], Any], record: Callable[[Callable[[], Any], Path], None], path: Path
) -> dict[str, Entry]:
    """One eager step under the profiler, by entry of the table; OTHER holds what no entry launched."""
    record(eager, path)
    try:
        return entries_of(load(path))
    finally:
        path.unlink()


def entries_of(trace: Trace) -> dict[str, Entry]:
    """GPU work by the named range that launched it. Zero entries are left out."""
    ranges = [a for a in trace.annotations if a.name.startswith(RANGE) and not a.gpu]
    rows = np.arange(len(trace.table))
    launch = launch_of(trace, rows)
    at = np.where(launch >= 0, trace.launches.start_ns[launch] if len(trace.launches) else 0, -1)
    begin = np.array([a.start_ns for a in ranges], np.int64)
    end = begin + np.array([a.dur_ns for a in ranges], np.int64)
    # entries do not contain one another, so the last that began is the only one that can hold the launch
    owner = np.searchsorted(begin, at, "right") - 1
    inside = (launch >= 0) & (owner >= 0) & (at < end[owner] if len(ranges) else False)
    names = [a.name.removeprefix(RANGE) for a in ranges]
    found: dict[str, list[int]] = {}
    for row, ok in enumerate(inside.tolist()):
        found.setdefault(names[owner[row]] if ok else OTHER, []).append(row)
    order = [f.name for f in fields(Ops)]
    told = sorted(found, key=lambda name: order.index(name) if name in order else len(order))
    return {name: Entry(len(found[name]), round(int(trace.table.dur_ns[found[name]].sum()) / 1e3, 3)) for name in told}


class Dispatched(TorchDispatchMode):
    """Counts the operations that torch dispatches, by entry of the table. Views move nothing and do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = OTHER
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _is_view(func):
            self.counts[self.entry] += 1
        return func(*args, **(kwargs or {}))

    def table(self, ops: Ops) -> Ops:
        """The same table; while an entry runs, its operations count for it."""
        return Ops(**{f.name: self._named(f.name, getattr(ops, f.name)) for f in fields(Ops)})

    def _named(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            with self._inside(name):
                return call(*args, **options)

        return run

    @contextlib.contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        self.entry, before = name, self.entry
        try:
            yield
        finally:
            self.entry = before


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)
