"""Where one step ends and the next begins, by a vote of signals that do not depend on each other."""

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from deepdecode.trace.model import Annotation, Trace, Vote

# strongest first; "once per step" and "per layer" only support what another signal says
SIGNALS = (
    "engine step",
    "engine batch",
    "graph launches",
    "sampling",
    "named range",
    "ProfilerStep",
    "once per step",
    "per layer",
)
SUPPORT = ("once per step", "per layer")
NESTED = 10  # a range that sticks out of the one before it by less than a tenth lies inside it
EDGE = 0.2  # an edge step whose kernel count is this far from the median was cut by the capture

# SGLang's step[DECODE bs=16], and decode[bs=16 ...]
_STEP = re.compile(r"(?:step\[\s*([A-Za-z_]+)|(decode|prefill|extend|mixed)\[)(?:[^\]]{0,64}?\bbs=(\d{1,7}))?")
# vLLM's requests in context and generation, then TensorRT-LLM's
_BATCH = re.compile(r"execute_(?:\d{1,9}_)?context_(\d{1,7})(?:\([^)]{0,128}\))?_generation_(\d{1,7})")
_FORWARD = re.compile(r"\[Executor\] _forward_step \d{1,9}: (\d{1,7}) ctx reqs, (\d{1,7}) gen ")
_PROFILER = re.compile(r"ProfilerStep#\d{1,12}$")
_RANGE = re.compile(
    r"(?:decode|prefill|forward|generate|token|iteration|iter|step)(?:[ _-]?(?:step|pass))?[ _#:\[(-]*\d{0,12}[\])]?$", re.I
)
_PHASES = {"decode": "decode", "extend": "prefill", "prefill": "prefill", "mixed": "mixed", "target_verify": "decode"}


@dataclass(frozen=True)
class Marked:
    """One range of a family, as text says it."""

    phase: str
    batch: int | None


@dataclass(frozen=True, eq=False)
class Found:
    """Steps of one GPU: borders on its timeline, and what is known of each."""

    border: np.ndarray  # [steps, 2] int64
    phase: list[str]
    batch: list[int | None]
    signal: str
    votes: tuple[Vote, ...]
    agreement: float
    notes: list[str] = field(default_factory=list)


def family(name: str) -> tuple[str, Marked] | None:
    """Which signal a range's name belongs to, and the phase and batch it states."""
    if match := _STEP.match(name):
        phase = _PHASES.get((match[1] or match[2]).lower(), "unknown")
        return "engine step", Marked(phase, int(match[3]) if match[3] else None)
    if match := _BATCH.match(name) or _FORWARD.match(name):
        context, generation = int(match[1]), int(match[2])
        phase = "mixed" if context and generation else "prefill" if context else "decode" if generation else "unknown"
        return "engine batch", Marked(phase, context + generation or None)
    if _PROFILER.match(name):
        return "ProfilerStep", Marked("unknown", None)
    if _RANGE.match(name):
        word = name[:7].lower()
        phase = "decode" if word.startswith("decode") else "prefill" if word.startswith("prefill") else "unknown"
        return "named range", Marked(phase, None)
    return None


def launch_of(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """[rows] index into trace.launches of what started each activity, -1 unknown."""
    table, launches = trace.table, trace.launches
    found = np.full(len(rows), -1, np.int64)
    for process in np.unique(table.process[rows]).tolist():
        mine = np.flatnonzero((table.process[rows] == process) & (table.correlation[rows] > 0))
        calls = np.flatnonzero((launches.process == process) & (launches.correlation > 0))
        if not len(mine) or not len(calls):
            continue
        calls = calls[np.argsort(launches.correlation[calls], kind="stable")]
        have = launches.correlation[calls]
        want = table.correlation[rows[mine]]
        at = np.minimum(np.searchsorted(have, want), len(have) - 1)
        found[mine] = np.where(have[at] == want, calls[at], -1)
    return found


def find(trace: Trace, rows: np.ndarray, launch: np.ndarray, sampling: np.ndarray) -> Found:
    """Vote on the steps of one GPU.

    Args:
        rows: [n] its activities in the table, in order of start; n > 0.
        launch: [n] from `launch_of`.
        sampling: [n] bool, which of them sample a token.
    """
    start = trace.table.start_ns[rows]
    end = start + trace.table.dur_ns[rows]
    starts: dict[str, np.ndarray] = {}
    ends: dict[str, int] = {}
    marked: dict[str, list[Marked]] = {}
    for name, ranges in _families(trace, rows).items():
        begins, last, marks = _place(trace, ranges, start, end, launch)
        if len(begins):
            starts[name], ends[name], marked[name] = begins, last, marks
    if len(begins := _graph_steps(trace, start, launch)):
        starts["graph launches"] = begins
    if len(begins := _sampling_steps(trace, rows, start, end, sampling)):
        starts["sampling"] = begins
    once = _once_per_step(trace.table.name[rows])
    values: dict[str, int | None] = {s: len(starts[s]) if s in starts else None for s in SIGNALS}
    values["once per step"] = once
    heads = Counter(v for s, v in values.items() if v and s not in SUPPORT)
    values["per layer"] = _per_layer(trace.table.name[rows], heads)
    given = Counter(v for v in values.values() if v)
    candidates = [s for s in SIGNALS if values[s] and s not in SUPPORT]
    if not candidates:
        votes = tuple(Vote(s, values[s]) for s in SIGNALS)
        border = np.array([[start[0], end.max()]])
        return Found(border, ["unknown"], [None], "none: the whole capture is one step", votes, 0.0)
    winner = max(candidates, key=lambda s: (given[values[s] or 0], s in ends, -SIGNALS.index(s)))
    count = values[winner] or 0
    votes = tuple(Vote(s, v, "" if v in (None, count) else "disagrees") for s, v in values.items())
    agreement = given[count] / sum(given.values())

    begins = starts[winner]
    # an engine's inner range leaves out sampling, which the outer one of the same count ends with
    stop = max((stop for s, stop in ends.items() if values[s] == count), default=int(end.max()))
    border = np.stack([begins, np.append(begins[1:], max(stop, int(begins[-1])))], axis=1)
    # what the winner cannot say, another family of as many ranges may
    marks = next((marked[s] for s in ("engine step", "engine batch", "named range") if len(marked.get(s, ())) == count), None)
    marks = marks or [Marked("unknown", None)] * len(begins)
    notes: list[str] = []
    # ranges are recorded whole; what is only counted on the GPU may have been cut by the capture
    keep = list(range(len(border)))
    if winner not in ends:
        keep, notes = _trim(border, start, [m.phase for m in marks])
    return Found(
        border[keep],
        [marks[i].phase for i in keep],
        [marks[i].batch for i in keep],
        winner,
        votes,
        agreement,
        notes,
    )


def _families(trace: Trace, rows: np.ndarray) -> dict[str, list[tuple[Annotation, Marked]]]:
    """Outermost ranges of each family, of the processes that this GPU works for; CPU-side ones where there are any."""
    processes = set(np.unique(trace.table.process[rows]).tolist())
    found: dict[tuple[str, bool], list[tuple[Annotation, Marked]]] = {}
    reach: dict[tuple[str, bool], int] = {}
    for a in trace.annotations:  # in order of start, the longer first
        if a.process in processes and (named := family(a.name)):
            key, end = (named[0], a.gpu), a.start_ns + a.dur_ns
            # neighbours overlap by a rounded microsecond, or because the next step is prepared early; what is inside is nested
            if NESTED * (end - reach.get(key, a.start_ns)) >= a.dur_ns:
                found.setdefault(key, []).append((a, named[1]))
                reach[key] = end
    return {name: found.get((name, False)) or found[name, True] for name, _ in found}


def _place(
    trace: Trace, ranges: list[tuple[Annotation, Marked]], start: np.ndarray, end: np.ndarray, launch: np.ndarray
) -> tuple[np.ndarray, int, list[Marked]]:
    """Where each range's work begins on the GPU, where the last one's ends, and the ranges that have work."""
    begin = np.array([a.start_ns for a, _ in ranges])
    stop = begin + np.array([a.dur_ns for a, _ in ranges])
    # CPU ranges hold the launch; without launches, or for the profiler's GPU copy, time must do
    known = launch >= 0
    by_launch = not ranges[0][0].gpu and known.any()
    when = trace.launches.start_ns[launch[known]] if by_launch else start
    s, e = (start[known], end[known]) if by_launch else (start, end)
    at = np.searchsorted(begin, when, "right") - 1
    ok = (at >= 0) & (when < stop[at])
    first = np.full(len(ranges), np.iinfo(np.int64).max)
    last = np.full(len(ranges), np.iinfo(np.int64).min)
    np.minimum.at(first, at[ok], s[ok])
    np.maximum.at(last, at[ok], e[ok])
    has = np.flatnonzero(last > np.iinfo(np.int64).min)
    order = has[np.argsort(first[has], kind="stable")]
    # two ranges whose work begins at one instant are one step
    order = order[np.append(True, np.diff(first[order]) > 0)] if len(order) else order
    return first[order], int(last.max()), [ranges[i][1] for i in order.tolist()]


def _graph_steps(trace: Trace, start: np.ndarray, launch: np.ndarray) -> np.ndarray:
    """Starts of the graph launches that make a step: the large ones, or the rarest piece of a step in pieces."""
    if not len(trace.launches):
        return np.zeros(0, np.int64)
    graph = np.flatnonzero((launch >= 0) & trace.launches.is_graph[launch])
    if not len(graph):
        return np.zeros(0, np.int64)
    calls, first, index = np.unique(launch[graph], return_index=True, return_inverse=True)
    size = np.bincount(index.reshape(-1), minlength=len(calls))
    begins = start[graph][first]  # rows come in order of start
    whole = size * 2 >= size.max()
    if size.max() < 64 and len(calls) > 2:
        # pieces: those of one size repeat once a layer, the first and last of a step do not
        sizes, counts = np.unique(size, return_counts=True)
        if counts.min() * 4 <= len(calls):
            # of equally rare ones, the piece that comes first begins the step
            rare = np.isin(size, sizes[counts == counts.min()])
            whole = size == size[rare][np.argmin(begins[rare])]
    return np.sort(begins[whole])


def _sampling_steps(trace: Trace, rows: np.ndarray, start: np.ndarray, end: np.ndarray, sampling: np.ndarray) -> np.ndarray:
    """A step begins with what follows the sampler of the one before; the capture's start begins the first."""
    picked = np.flatnonzero(sampling)
    if not len(picked):
        return np.zeros(0, np.int64)
    names, index = np.unique(trace.table.name[rows[picked]], return_inverse=True)
    spent = np.zeros(len(names), np.int64)
    np.add.at(spent, index.reshape(-1), trace.table.dur_ns[rows[picked]])
    marker = picked[index.reshape(-1) == np.argmax(spent)]
    after = np.searchsorted(start, end[marker], "left")
    # the last sampler's followers, if any, are the tail of its own step
    follow = after[:-1][after[:-1] < len(start)]
    return np.unique(np.concatenate([start[:1], start[follow]]))


def _once_per_step(name: np.ndarray) -> int | None:
    """The smallest count that at least three of the rarer names share; the others run once a layer, or more."""
    counts = np.bincount(name)
    rare = counts[(counts > 0) & (counts * 4 <= counts.max())]
    values, names = np.unique(rare, return_counts=True)
    shared = values[names >= 3]
    return int(shared[0]) if len(shared) else None


def _per_layer(name: np.ndarray, heads: Counter[int]) -> int | None:
    """The largest count on offer that divides the launches of most kernels that run many times."""
    counts = np.bincount(name)
    for value in sorted(heads, reverse=True):
        often = counts[counts >= 8 * value]
        if value > 1 and len(often) >= 3 and (often % value == 0).mean() >= 0.8:
            return value
    return None


def _trim(border: np.ndarray, start: np.ndarray, phase: list[str]) -> tuple[list[int], list[str]]:
    """Steps to keep: the first and last go where the capture cut them."""
    keep = list(range(len(border)))
    size = np.searchsorted(start, border[:, 1]) - np.searchsorted(start, border[:, 0])
    notes = []
    for edge, word in ((0, "first"), (-1, "last")):
        if len(keep) < 4:
            break
        i = keep[edge]
        alike = [int(size[j]) for j in keep if phase[j] == phase[i] and j != i]
        if len(alike) < 3:
            continue
        typical = sorted(alike)[(len(alike) - 1) // 2]
        if abs(int(size[i]) - typical) > EDGE * typical:
            keep.pop(edge)
            notes.append(f"the {word} step is left out: {int(size[i])} activities against {typical} in the others")
    return keep, notes
