"""What to work on next: for each candidate an upper bound, how sure we are, what it costs, and what would change the choice.

A candidate takes the exclusive time of whole categories, or the idle time, and no two take the same; so their times add up
to at most the step. Confidence, effort and risk come from `deepdecode/data/catalogue.json`, which says why.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deepdecode.trace.model import UNKNOWN_LIMIT, DeviceProfile, Kernel, Profile, TraceError, plural
from deepdecode.trace.render import count, ms, percent, quote
from deepdecode.trace.runs import spread

SCHEMA = 1  # of Advice as JSON
IDLE = "idle"
NOTHING = "nothing"  # a decision to leave things as they are
SPLIT = ("merge", "combine", "reduce")  # what puts the splits of a kernel together is named so
DECODE = ("decode", "unknown")  # phases that the catalogue's speed-ups are written for
SMALLEST = 0.002  # of the step; smaller candidates are not listed
WAIT_WORDS = (
    "allreduce",
    "all_reduce",
    "reducescatter",
    "reduce_scatter",
    "allgather",
    "all_gather",
    "all2all",
    "alltoall",
    "barrier",
)


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue. `k` is the speed-up assumed where the user gives none, `k_reason` where it comes from."""

    id: str
    title: str
    takes: tuple[str, ...]
    when: str
    k: float
    k_reason: str
    confidence: str
    effort: str
    risk: str
    why: str
    check: str
    may_wait: bool = False


@dataclass(frozen=True)
class Catalogue:
    entries: tuple[Entry, ...]
    weights: dict[str, dict[str, float]]
    small_launches: float
    small_us: float
    many_launches: float
    underfilled_share: float
    tensor_core_attention: tuple[str, ...]  # words in the names of attention kernels that use tensor cores


@dataclass(frozen=True)
class Candidate:
    """`ceiling` is W/(W-x), the step's speed-up if the time vanished; `ceiling_at_k` if it ran k times faster.

    Both are upper bounds: None where nothing but this time fills the step.
    """

    id: str
    title: str
    takes: tuple[str, ...]
    step_ns: int
    share: float  # of the step's wall time
    launches: float
    k: float
    k_source: str  # "chosen", "roofline" or "catalogue: reason"
    ceiling: float | None
    ceiling_at_k: float | None
    saved_ns: int
    score: float
    confidence: str
    effort: str
    risk: str
    why: str
    check: str
    largest: str  # the kernel that takes most of it
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    schema: int
    label: str
    gpu: str
    phase: str
    batch: int | None
    steps: int
    whole: bool  # no steps were found: the capture counts as one
    step_ns: int
    busy_ns: int
    idle_ns: int
    candidates: tuple[Candidate, ...]  # best first
    choice: str | None
    because: str
    would_change: tuple[str, ...]
    limits: tuple[str, ...]  # what this profile cannot say


@cache
def catalogue() -> Catalogue:
    """The shipped catalogue. Entries that take the same categories are variants: the first whose `when` holds is used."""
    path = Path(__file__).parent.parent / "data" / "catalogue.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    entries = tuple(Entry(**{**entry, "takes": tuple(entry["takes"])}) for entry in data["candidates"])
    limits = data["thresholds"]
    small = limits["small_launches"]
    return Catalogue(
        entries=entries,
        weights=data["weights"],
        small_launches=small["launches_per_step"],
        small_us=small["mean_us"],
        many_launches=small["or_launches_per_step"],
        underfilled_share=limits["underfilled_share"],
        tensor_core_attention=tuple(limits["tensor_core_attention"]),
    )


def advise(
    profile: Profile,
    label: str,
    *,
    speedups: Mapping[str, float] | None = None,
    floors_ns: Mapping[str, float] | None = None,
) -> Advice:
    """Rank the candidates of one profile and name one.

    Args:
        profile: one with GPU work and kernels.
        label: what to call it.
        speedups: candidate -> k > 1, the speed-up to assume.
        floors_ns: candidate -> its roofline time per step, > 0; k becomes the time it takes over this floor.

    Raises:
        TraceError: the profile has no step to speed up.
        ValueError: an unknown candidate, or a number out of range.
    """
    if profile.main is None:
        raise TraceError(f"advise: {label} holds no GPU work", "record with CUDA activities enabled")
    if profile.phase == "capture" or profile.health.capture in ("graph-capture", "graph-summary"):
        raise TraceError(
            f"advise: {label} is a {profile.health.capture} trace and does not show a step's kernels",
            "record replays of the graph; with Nsight Systems use --cuda-graph-trace=node",
        )
    speedups, floors_ns = dict(speedups or {}), dict(floors_ns or {})
    check_numbers(speedups, floors_ns)
    book = catalogue()
    dev = profile.devices[profile.main]
    wall = dev.steps.p50_ns
    if wall <= 0:
        raise TraceError(f"advise: {label} has no step of measurable length", "profile a longer capture")

    times = _times(dev)
    scale = min(1.0, wall / max(1, sum(times.values())))
    candidates = []
    for entry in _applicable(book, profile, dev):
        ns = round(scale * sum(times[name] for name in entry.takes if name in times))
        if ns >= SMALLEST * wall:
            candidates.append(_candidate(entry, book, profile, dev, ns, wall, speedups, floors_ns))
    candidates.sort(key=lambda c: (-c.score, c.id))
    unused = [name for name in (*speedups, *floors_ns) if name not in {c.id for c in candidates}]
    choice = candidates[0] if candidates and candidates[0].score > 0 else None
    return Advice(
        schema=SCHEMA,
        label=label,
        gpu=dev.gpu,
        phase=profile.phase,
        batch=profile.batch,
        steps=dev.steps.count,
        whole=dev.steps.whole,
        step_ns=wall,
        busy_ns=dev.steps.p50_busy_ns,
        idle_ns=times[IDLE],
        candidates=tuple(candidates),
        choice=choice.id if choice else None,
        because=_because(choice) if choice else "no candidate takes a measurable part of the step",
        would_change=_would_change(candidates, book),
        limits=_limits(profile, dev, scale, unused),
    )


def check_numbers(speedups: Mapping[str, float], floors_ns: Mapping[str, float]) -> None:
    """ValueError unless every name is a candidate, every speed-up above 1 and every floor above 0."""
    known = [entry.id for entry in catalogue().entries]
    for what, numbers in (("speed-up", speedups), ("floor", floors_ns)):
        for name in numbers:
            if name not in known:
                raise ValueError(f"advise: {what} must name one of {', '.join(known)}, got {name}")
    for name, value in speedups.items():
        if not 1 < value < float("inf"):
            raise ValueError(f"advise: speed-up of {name} must be > 1, got {value:g}")
    for name, value in floors_ns.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"advise: floor of {name} must be > 0 ms, got {value / 1e6:g}")


def check_decision(text: str, advice: Advice) -> None:
    """ValueError unless it is `CANDIDATE: reason` of a candidate in the ranking, or `nothing: reason`."""
    name, _, reason = text.partition(":")
    known = [*(candidate.id for candidate in advice.candidates), NOTHING]
    if name.strip() not in known:
        raise ValueError(f"advise: --decide must begin with one of {', '.join(known)}, got {name.strip()[:80]}")
    if not reason.strip():
        raise ValueError(f"advise: --decide must say why, as `{name.strip()}: reason`, got no reason")


def _times(dev: DeviceProfile) -> dict[str, int]:
    """Median exclusive nanoseconds per step of each category, and of idleness."""
    return {**{cat.category: cat.p50_step_ns for cat in dev.categories}, IDLE: dev.steps.p50_idle_ns}


def _applicable(book: Catalogue, profile: Profile, dev: DeviceProfile) -> list[Entry]:
    chosen: dict[tuple[str, ...], Entry] = {}
    for entry in book.entries:
        if entry.takes not in chosen and _holds(entry, book, profile.phase, dev):
            chosen[entry.takes] = entry
    return list(chosen.values())


def _holds(entry: Entry, book: Catalogue, phase: str, dev: DeviceProfile) -> bool:
    if entry.when == "always":
        return True
    if entry.when == "not_decode":
        return phase not in DECODE
    if entry.when == "no_graph":
        return dev.graph_mode in ("eager", "piecewise")
    kernels = [kernel for kernel in dev.kernel_rows if kernel.category in entry.takes]
    total = sum(kernel.exclusive_ns for kernel in kernels)
    launches = sum(kernel.launches_per_step for kernel in kernels)
    if not total or not launches:
        return False
    if entry.when == "underfilled":
        # whose splits are merged already has as many blocks as it was given
        if not dev.sms or any(word in kernel.name.lower() for kernel in kernels for word in SPLIT):
            return False
        thin = sum(kernel.exclusive_ns for kernel in kernels if kernel.blocks_p50 and kernel.blocks_p50 < dev.sms)
        return thin >= book.underfilled_share * total
    if entry.when == "no_tensor_core_attention":
        words = book.tensor_core_attention
        tensor = sum(kernel.exclusive_ns for kernel in kernels if any(word in kernel.name.lower() for word in words))
        return 2 * tensor < total
    if entry.when == "small_launches":
        mean_us = sum(kernel.exclusive_per_step_ns for kernel in kernels) / launches / 1e3
        return launches >= book.many_launches or (launches >= book.small_launches and mean_us <= book.small_us)
    raise ValueError(f"advise: catalogue entry {entry.id}: when must be a known condition, got {entry.when}")


def _candidate(
    entry: Entry,
    book: Catalogue,
    profile: Profile,
    dev: DeviceProfile,
    ns: int,
    wall: int,
    speedups: Mapping[str, float],
    floors_ns: Mapping[str, float],
) -> Candidate:
    k, source = entry.k, f"catalogue: {entry.k_reason}"
    if entry.id in floors_ns:
        k, source = max(1.0, ns / floors_ns[entry.id]), f"roofline: {ms(floors_ns[entry.id])} ms a step"
    if entry.id in speedups:  # a number that the user chose outranks one that we computed
        k, source = speedups[entry.id], "chosen"
    saved = ns * (1 - 1 / k)
    # without steps, idle time may lie at the capture's edges
    confidence = "low" if IDLE in entry.takes and dev.steps.whole else entry.confidence
    weight = book.weights["confidence"][confidence]
    weight *= book.weights["effort"][entry.effort] * book.weights["risk"][entry.risk]
    kernels = sorted((kr for kr in dev.kernel_rows if kr.category in entry.takes), key=lambda kr: -kr.exclusive_ns)
    return Candidate(
        id=entry.id,
        title=entry.title,
        takes=entry.takes,
        step_ns=ns,
        share=ns / wall,
        launches=sum(kernel.launches_per_step for kernel in kernels),
        k=k,
        k_source=source,
        ceiling=wall / (wall - ns) if wall > ns else None,
        ceiling_at_k=wall / (wall - saved) if wall > saved else None,
        saved_ns=round(saved),
        score=saved * weight / wall,
        confidence=confidence,
        effort=entry.effort,
        risk=entry.risk,
        why=entry.why,
        check=entry.check,
        largest=kernels[0].name if kernels else "",
        notes=_notes(entry, profile, dev, kernels, saved),
    )


def _notes(entry: Entry, profile: Profile, dev: DeviceProfile, kernels: Sequence[Kernel], saved: float) -> tuple[str, ...]:
    notes = []
    waiting = [kr.name for kr in kernels if entry.may_wait or any(word in kr.name.lower() for word in WAIT_WORDS)]
    if waiting:
        notes.append(f"may be waiting for other ranks ({quote(waiting[0][:80])}): compare ranks before believing the time")
    if entry.may_wait and len(profile.devices) > 1:
        ranks = [one.exclusive_ns.get("collective", 0) / max(1, one.steps.count) for one in profile.devices]
        spans = f"{ms(min(ranks))} to {ms(max(ranks))} ms a step"
        notes.append(f"over {len(ranks)} GPU timelines it takes {spans}: what exceeds the least is likely waiting")
    if IDLE in entry.takes and dev.steps.whole:
        notes.append("no steps were found, so a part of this may lie at the capture's edges, outside any step")
    if saved and saved < spread([step.wall_ns for step in dev.steps.items]):
        notes.append("the saving is below the spread of this run's steps: a measurement may not show it")
    return tuple(notes)


def _because(choice: Candidate) -> str:
    at_k = "without limit" if choice.ceiling_at_k is None else f"at most {choice.ceiling_at_k:.2f}x"
    cost = f"confidence {choice.confidence}, effort {choice.effort}, risk {choice.risk}"
    return (
        f"it takes {percent(choice.share)} of the step; {choice.k:.3g} times faster makes the step {at_k}; {cost}; {choice.why}"
    )


def _would_change(candidates: Sequence[Candidate], book: Catalogue) -> tuple[str, ...]:
    """The nearest facts under which another candidate would lead, computed from the same scores."""
    if len(candidates) < 2 or candidates[0].score <= 0:
        return ()
    first, out = candidates[0], []
    for other in candidates[1:4]:
        if other.score <= 0:
            continue
        keep = other.score / (first.score / (1 - 1 / first.k))  # the part of x that the leader must still save
        limit = 1 / (1 - keep) if keep < 1 else float("inf")
        ways = [f"{first.id} got no more than {limit:.3g} times faster"] if 1.05 <= limit < first.k else []
        need = first.score / (other.score / (1 - 1 / other.k))
        if need < 1:
            ways.append(f"{other.id} got {1 / (1 - need):.3g} times faster or more")
        for kind in ("confidence", "effort", "risk"):
            table, now = book.weights[kind], getattr(other, kind)
            better = [word for word, value in table.items() if other.score / table[now] * value > first.score]
            if better:
                ways.append(f"its {kind} were {min(better, key=lambda word: table[word])} instead of {now}")
        if ways:
            out.append(f"{other.id} would lead if " + ", or if ".join(ways))
    return tuple(out)


def _limits(profile: Profile, dev: DeviceProfile, scale: float, unused: Sequence[str]) -> tuple[str, ...]:
    out = ["every ceiling is an upper bound: removing time may only uncover a wait that it hid"]
    if scale < 1:
        out.append(f"medians of categories add up to more than the median step and were scaled by {scale:.3f}")
    if dev.steps.whole:
        out.append("no steps were found: the whole capture counts as one step, idle time at its edges included")
    elif dev.steps.count < 4:
        out.append(f"{plural(dev.steps.count, 'step')} cannot show how much steps vary")
    if dev.unknown_share > UNKNOWN_LIMIT:
        out.append(f"{percent(dev.unknown_share)} of GPU time is in no category and in no candidate: add rules with --rules")
    if profile.phase not in DECODE:
        out.append(f"the catalogue's speed-ups are written for decode; this is {profile.phase}")
    if profile.batch is None:
        out.append("the batch size is not known")
    if not dev.sms:
        out.append("the number of SMs is not in the trace: whether grids fill the GPU cannot be told")
    if len(profile.devices) > 1:
        out.append(f"this is the busiest of {len(profile.devices)} GPU timelines: waiting shows only beside the others")
    if dev.graph_mode == "eager":
        calls = plural(count(dev.kernels_per_step), "launch", "launches")
        out.append(f"a profiler adds a cost to each of {calls} a step: idle time is larger here than without it")
    for name in unused:
        out.append(f"a number was given for {name}, which is no candidate of this profile")
    return tuple(out)
