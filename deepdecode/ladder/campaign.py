"""Climb: every rung at every concurrency is checked, timed and profiled; each row is written down as soon as it is known."""

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from deepdecode.ladder.entries import entry_gates
from deepdecode.ladder.gates import Gate, step_gates
from deepdecode.ladder.instruments import (
    KEPT_STEPS,
    SUMMED_STEPS,
    Instruments,
    compiled_graphs,
    profile_entries,
    profile_steps,
    time_steps,
)
from deepdecode.ladder.results import finite
from deepdecode.ladder.slim import Slimming
from deepdecode.ops.table import Ops
from deepdecode.rungs import RUNGS, Rung
from deepdecode.slices import POSITIONS
from deepdecode.trace import Profile

# what makes two rows one measurement; the commit joins them when a run goes on where another stopped
KEYS = ("rung", "slice", "concurrency", "context", "layers")


class Graph(Protocol):
    """A decode step, captured: `deepdecode.slices.StepGraph`."""

    tokens: torch.Tensor

    @property
    def launches(self) -> int | None: ...
    def replay(self) -> Any: ...
    def eager(self, ops: Ops | None = None) -> Any: ...
    def seek(self, step: int) -> None: ...


class Slice(Protocol):
    """A rank's part of the model: `deepdecode.slices.RankSlice`."""

    def graph(self, ops: Ops, concurrency: int) -> Graph: ...
    def bytes(self, concurrency: int) -> dict[str, int]: ...
    def experts_hit(self, concurrency: int) -> list[int]: ...
    def reset(self) -> None: ...


@dataclass(frozen=True)
class Plan:
    """What to measure. profiled: the concurrency whose trace is kept; it is measured too, if it is not among the others."""

    slice: str
    rungs: tuple[Rung, ...]
    concurrency: tuple[int, ...]
    profiled: int
    context: int
    layers: int
    commit: str

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(sorted({*self.concurrency, self.profiled}))

    def cells(self) -> Iterator[tuple[Rung, int, dict[str, Any]]]:
        """Rung, concurrency, and the keys of the row; what a run that is cut short should have comes first.

        The top, the yardsticks, the rest, other forms of a rung.
        """
        top = next((rung for rung in reversed(self.rungs) if not rung.beside), None)
        for rung in sorted(
            self.rungs, key=lambda rung: (rung is not top, bool(rung.beside), not (rung.beside or rung.yardstick))
        ):
            for concurrency in self.levels:
                values = (rung.name, self.slice, concurrency, self.context, self.layers)
                yield rung, concurrency, dict(zip(KEYS, values, strict=True))


def rungs_told(rungs: Sequence[Rung]) -> dict[str, dict[str, Any]]:
    """What the result file says of each rung. below: the rung it is compared with, the next one down that is no variant."""
    told: dict[str, dict[str, Any]] = {}
    below, base = None, None
    for rung in rungs:
        if not rung.beside:
            below, base = base, rung.name
        told[rung.name] = {
            "title": rung.title,
            "yardstick": rung.yardstick,
            "beside": rung.beside,
            "below": below,
            "mirrors": rung.mirrors,
        }
    return told


def known(rows: Sequence[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """The rows that stand beside this plan's: of its commit, slice, context and layers, any rung, no error."""
    want = {"commit": plan.commit, "slice": plan.slice, "context": plan.context, "layers": plan.layers}
    names = {rung.name for rung in (*RUNGS, *plan.rungs)}
    same = [row for row in rows if {name: row.get(name) for name in want} == want]
    return [row for row in same if "error" not in row and row.get("rung") in names]


def all_rungs(plan: Plan, done: Sequence[dict[str, Any]]) -> tuple[Rung, ...]:
    """The plan's rungs and those of the rows that are kept, bottom up."""
    kept = {row["rung"] for row in done} | {rung.name for rung in plan.rungs}
    return (*(rung for rung in RUNGS if rung.name in kept), *(rung for rung in plan.rungs if rung not in RUNGS))


def climb(
    plan: Plan,
    slice: Slice,
    instruments: Instruments,
    logits_gate: Callable[[Ops], Sequence[Gate]],
    path: Path,
    *,
    done: Sequence[dict[str, Any]] = (),
    save: Callable[[list[dict[str, Any]]], None],
    say: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Measure what `done` does not hold. Whatever fails is a row that says so, and the rest go on.

    Args:
        slice: built once, for all rungs.
        logits_gate: run once for each rung, whose table it is given.
        path: the result file; traces are named after it and stand beside it.
        done: rows to keep.
        save: takes all rows so far, after each.
        say: takes each new row.

    Returns:
        All rows, those of `done` among them, bottom up.
    """
    rows = {_key(row): row for row in done}
    names = [rung.name for rung in all_rungs(plan, done)]

    def ordered() -> list[dict[str, Any]]:
        return sorted(rows.values(), key=lambda row: (names.index(row["rung"]), row["concurrency"]))

    bandwidth = None
    logits: dict[str, Sequence[Gate] | str] = {}
    slimming = Slimming()
    try:
        for rung, concurrency, case in plan.cells():
            if _key(case) in rows:
                continue
            if bandwidth is None:
                bandwidth = instruments.bandwidth()
            row = {"op": "step", "implementation": f"rung {rung.name}", **case, "commit": plan.commit}
            row["copy_bandwidth_tb_s"] = round(bandwidth, 3)
            if rung.name not in logits:
                began = time.monotonic()
                logits[rung.name] = _guarded(lambda rung=rung: logits_gate(rung.ops))
                row["wall_s"] = {"logits": round(time.monotonic() - began, 2)}
            logits_gates = logits[rung.name]
            if isinstance(logits_gates, str):
                row["error"] = f"logits gate: {logits_gates}"
            else:
                row["gates"] = [gate.told() for gate in logits_gates]
                found = _guarded(
                    lambda args=(plan, rung.ops, logits_gates, concurrency, slice, instruments, path, row, slimming): _measure(
                        *args
                    )
                )
                if isinstance(found, str):
                    row["error"] = found
            if "error" in row:
                # a broken rung may have written NaN into the caches that the next ones read
                _guarded(slice.reset)
            rows[_key(case)] = row
            say(row)
            save(ordered())
            _free()
    finally:
        # a run that is stopped leaves no whole trace behind either
        for line in slimming.wait():
            print(f"ladder: a trace could not be written: {line}", file=sys.stderr)
    return ordered()


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEYS)


def _guarded(work: Callable[[], Any]) -> Any:
    """What work gives, or one line on why it gave nothing."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        return f"out of memory: {str(error).splitlines()[0][:160]}"
    except Exception as error:
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:240]}"


def _free() -> None:
    # a captured graph holds its memory until the last reference is gone, cycles included
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _measure(
    plan: Plan,
    ops: Ops,
    logits: Sequence[Gate],
    concurrency: int,
    slice: Slice,
    instruments: Instruments,
    path: Path,
    row: dict[str, Any],
    slimming: Slimming,
) -> None:
    """Fill the row. A step that fails a gate gets no time."""
    spent: dict[str, float] = row.setdefault("wall_s", {})
    since = time.monotonic()

    def passed(part: str) -> None:
        """Note the seconds that a part of this measurement took, on the wall."""
        nonlocal since
        now = time.monotonic()
        spent[part], since = round(now - since, 2), now

    before = compiled_graphs()
    graph = slice.graph(ops, concurrency)
    graphs, breaks = (now - then for now, then in zip(compiled_graphs(), before, strict=True))
    if graphs:
        row["compiled"] = {"graphs": graphs, "graph_breaks": breaks}
    passed("capture")
    # one eager step for both, where every compressor completes an entry
    graph.seek(POSITIONS - 1)
    entries_of_step: list[Gate] = []
    gates = step_gates(ops, lambda table: entries_of_step.extend(entry_gates(table, graph.eager))) + entries_of_step
    graph.seek(0)
    passed("gates")
    row["gates"] += [gate.told() for gate in gates]
    row |= {"rel_err": finite(gates[0].error), "worst_row_err": finite(gates[1].error)}
    failed = [gate for gate in (*logits, *gates) if not gate.passed]
    if failed:
        row["error"] = f"{failed[0].name} is off by {failed[0].error:.2e}, the bound is {failed[0].bound:.2e}"
        return
    batch = len(graph.tokens)
    tpot = time_steps(graph.replay, instruments.seconds)
    passed("timing")
    moved = slice.bytes(concurrency)
    floor_us = sum(moved.values()) / row["copy_bandwidth_tb_s"] / 1e6
    hit = slice.experts_hit(concurrency)
    kept = concurrency == plan.profiled
    trace = trace_path(path, row["rung"], concurrency)
    whole = trace.with_name(trace.name.removesuffix(".json.gz") + "-whole.json")
    measured: dict[str, Any] = {
        "T": batch,
        "us_warm": round(1e3 * tpot.ms, 2),
        "us_warm_low": round(1e3 * tpot.low, 2),
        "us_warm_high": round(1e3 * tpot.high, 2),
        "timed_steps": tpot.steps,
        "repeats": tpot.repeats,
        "tokens_per_s": round(1e3 * concurrency / tpot.ms, 2),
        "bytes": sum(moved.values()),
        "bytes_by_entry": moved,
        "floor_us": round(floor_us, 2),
        "times_floor": round(1e3 * tpot.ms / floor_us, 2),
        "experts_hit": {"mean": round(sum(hit) / max(1, len(hit)), 2), "min": min(hit, default=0), "max": max(hit, default=0)},
        "graph_launches": graph.launches,
    }
    with contextlib.ExitStack() as leaving:
        leaving.callback(whole.unlink, missing_ok=True)
        steps = KEPT_STEPS if kept else SUMMED_STEPS
        measured["profile"] = _summary(profile_steps(graph.replay, instruments.record, whole, batch, steps))
        if kept:
            leaving.pop_all()
            slimming.start(whole, trace)
    passed("profile")
    if kept:
        entries = profile_entries(graph.eager, instruments.record, trace.with_name(f"eager-{whole.name}"))
        measured |= {"trace": trace.name, "entries": {name: asdict(entry) for name, entry in entries.items()}}
        passed("entries")
    # all or nothing: a step that failed on the way has no time
    row |= measured


def trace_path(path: Path, rung: str, concurrency: int) -> Path:
    return path.with_name(f"{path.stem}-rung-{rung}-c{concurrency}.json.gz")


def _summary(profile: Profile) -> dict[str, Any]:
    """Per step, milliseconds; medians of the profiled steps."""
    device = profile.device
    return {
        "steps": device.steps.count,
        "step_ms": round(device.steps.p50_ns / 1e6, 4),
        "busy_ms": round(device.steps.p50_busy_ns / 1e6, 4),
        "idle_ms": round(device.steps.p50_idle_ns / 1e6, 4),
        "launches": device.kernels_per_step,
        "unknown_share": round(device.unknown_share, 4),
        "categories": {
            c.category: {"ms": round(c.p50_step_ns / 1e6, 4), "share": round(c.share, 4), "launches": c.launches_per_step}
            for c in device.categories
        },
    }
