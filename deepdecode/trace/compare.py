"""Two or more profiles side by side, per step: what changed, what only seems to have, and whether a verdict is fair.

Every number is a median per counted step of the busiest device. Each profile is compared with the one before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deepdecode.trace.model import CATEGORIES, UNKNOWN_LIMIT, Profile, plural
from deepdecode.trace.render import count, health_text, ms, percent, quote, short, signed_percent
from deepdecode.trace.runs import MIN_STEPS, Cell, Row, Run, category_rows, kernel_rows, run_of

SCHEMA = 1  # of Comparison as JSON

NOISE_FLOOR = 0.01  # steps of one run hide what differs between runs; smaller changes are never called changes
NOISE_FLOOR_FEW = 0.02  # with fewer than MIN_STEPS steps the spread cannot be measured
SHARE_POINTS = 0.01  # a share that moves less than this has not moved
MOVED = 0.5  # of a category's fall, found in kernels that are new in another category
PRECISION_SHARE = 0.10  # of GEMM and MoE time of known precision
NOISE_RULE = (
    "a change counts when it passes the larger interquartile range of the two runs' steps, "
    f"and at least {100 * NOISE_FLOOR:.0f} % ({100 * NOISE_FLOOR_FEW:.0f} % with fewer than {MIN_STEPS} steps)"
)

# what makes a verdict unfair; a user who knows better names the code in `allow`
REFUSALS = (
    "same-file",
    "no-gpu-work",
    "capture",
    "step-mismatch",
    "phase-mismatch",
    "batch-mismatch",
    "gpu-mismatch",
    "gpu-count-mismatch",
    "precision-mismatch",
    "profiler-overhead",
)
ACCEPTABLE = tuple(code for code in REFUSALS if code != "no-gpu-work")  # without work there is no ratio to give a verdict on


@dataclass(frozen=True)
class Flag:
    """`severity` is "refuse", "warn" or "note"; before and after index `runs`."""

    code: str
    severity: str
    before: int
    after: int
    text: str


@dataclass(frozen=True)
class Verdict:
    """`word` says what the step did; the ratio is step time after over before.

    "faster", "slower", "no change" (by less than the least that counts), "cannot tell" (by more than that, but less than
    the noise of the runs), or "refused".
    """

    before: int
    after: int
    word: str
    ratio: float | None
    text: str


@dataclass(frozen=True)
class Comparison:
    schema: int
    runs: tuple[Run, ...]
    categories: tuple[Row, ...]
    kernels: tuple[Row, ...]
    flags: tuple[Flag, ...]
    verdicts: tuple[Verdict, ...]
    allowed: tuple[str, ...]
    noise_rule: str = NOISE_RULE

    @property
    def refused(self) -> bool:
        return any(verdict.word == "refused" for verdict in self.verdicts)

    @property
    def regressed(self) -> bool:
        return any(verdict.word == "slower" for verdict in self.verdicts)


def compare(profiles: Sequence[Profile], labels: Sequence[str], allow: Sequence[str] = ()) -> Comparison:
    """Compare profiles in the order given, each with the one before it.

    Args:
        profiles: two or more.
        labels: one distinct name each.
        allow: codes of ACCEPTABLE that the user accepts; their flags stay, as warnings.

    Raises:
        ValueError: fewer than two profiles, labels that do not fit, or an unknown code.
    """
    if len(profiles) < 2:
        raise ValueError(f"compare: profiles must be two or more, got {len(profiles)}")
    if len(labels) != len(profiles) or len(set(labels)) != len(labels):
        raise ValueError(f"compare: labels must be {len(profiles)} different names, got {', '.join(labels) or 'none'}")
    check_allow(allow)
    runs = tuple(run_of(profile, label) for profile, label in zip(profiles, labels, strict=True))
    devices = [None if p.main is None else p.devices[p.main] for p in profiles]
    categories = category_rows(devices)
    kernels = kernel_rows(devices)
    flags: list[Flag] = []
    verdicts: list[Verdict] = []
    for after in range(1, len(runs)):
        pair = _mismatches(profiles, runs, after - 1, after)
        if runs[after - 1].step_ns and runs[after].step_ns:
            pair += _readings(runs, categories, kernels, after - 1, after)
        pair = [_accept(flag) if flag.code in allow else flag for flag in pair]
        verdicts.append(_verdict(runs, pair, after - 1, after))
        flags += pair
    return Comparison(SCHEMA, runs, categories, kernels, tuple(flags), tuple(verdicts), tuple(allow))


def check_allow(allow: Sequence[str]) -> None:
    """ValueError unless every code is one of ACCEPTABLE."""
    for code in allow:
        if code not in ACCEPTABLE:
            raise ValueError(f"compare: allow must be one of {', '.join(ACCEPTABLE)}, got {code}")


def _accept(flag: Flag) -> Flag:
    return Flag(flag.code, "warn", flag.before, flag.after, flag.text + " (accepted by the caller)")


# ---- flags


def moved(before: float, after: float, noise: float, few: bool) -> int:
    """-1, 0 or 1: fell, within the noise, rose."""
    floor = (NOISE_FLOOR_FEW if few else NOISE_FLOOR) * max(before, after)
    limit = max(noise, floor)
    return 0 if abs(after - before) <= limit else (1 if after > before else -1)


def _few(a: Run, b: Run) -> bool:
    return min(a.steps, b.steps) < MIN_STEPS


def _noise(a: Run, b: Run) -> int:
    return max(a.step_noise_ns, b.step_noise_ns)


def _unclear(a: Run, b: Run) -> bool:
    """The step moved by enough to count, had the runs been quieter."""
    few = _few(a, b)
    return moved(a.step_ns, b.step_ns, 0, few) != 0 and moved(a.step_ns, b.step_ns, _noise(a, b), few) == 0


def _mismatches(profiles: Sequence[Profile], runs: Sequence[Run], before: int, after: int) -> list[Flag]:
    a, b = runs[before], runs[after]
    out: list[Flag] = []

    def flag(code: str, severity: str, text: str) -> None:
        out.append(Flag(code, severity, before, after, text))

    if a.sha256 == b.sha256:
        flag("same-file", "refuse", f"{quote(a.label)} and {quote(b.label)} are the same file: there is nothing to compare")
    elif _same_recording(profiles[before], profiles[after]):
        flag(
            "same-file",
            "refuse",
            f"{quote(a.label)} and {quote(b.label)} are one recording in two files: there is nothing to compare",
        )
    idle = [run for run in (a, b) if not run.step_ns]
    for run in idle:
        flag("no-gpu-work", "refuse", f"{quote(run.label)} holds no GPU work")
    if idle:
        return out
    for run, profile in ((a, profiles[before]), (b, profiles[after])):
        health = profile.health
        if health.bad_events or health.truncated or health.drops:
            text = f"{quote(run.label)} is not whole ({health_text(health)}): kernels may be missing from its steps"
            flag("damaged", "warn", text)
        if run.phase == "capture" or profile.health.capture in ("graph-capture", "graph-summary"):
            flag(
                "capture",
                "refuse",
                f"{quote(run.label)} is a {profile.health.capture} trace: it does not show a step's kernels",
            )
    _step_flags(a, b, flag)
    if a.phase != b.phase:
        known = "unknown" not in (a.phase, b.phase)
        text = f"the phase is {a.phase} before and {b.phase} after"
        flag("phase-mismatch", "refuse" if known else "warn", text)
    if a.batch != b.batch:
        known = a.batch is not None and b.batch is not None
        batches = f"{_or_unknown(a.batch)} before and {_or_unknown(b.batch)} after"
        flag("batch-mismatch", "refuse" if known else "note", f"the batch size is {batches}")
    if a.gpu != b.gpu:
        names = f"{quote(a.gpu) if a.gpu else 'unknown'} before and {quote(b.gpu) if b.gpu else 'unknown'} after"
        flag("gpu-mismatch", "refuse" if a.gpu and b.gpu else "note", f"the GPU is {names}")
    if a.gpu_count != b.gpu_count:
        flag("gpu-count-mismatch", "refuse", f"{a.gpu_count} GPU timelines before and {b.gpu_count} after")
    if a.graph_mode != b.graph_mode and "unknown" not in (a.graph_mode, b.graph_mode):
        text = f"CUDA graphs: {a.graph_mode} before and {b.graph_mode} after: part of the change is launch cost"
        flag("graph-mode-mismatch", "warn", text)
    _precision_flags(a, b, flag)
    for run in (a, b):
        if run.unknown_share > UNKNOWN_LIMIT:
            text = f"{percent(run.unknown_share)} of {quote(run.label)} is in no category: add rules with --rules"
            flag("unknown-share", "warn", text)
    return out


def _same_recording(a: Profile, b: Profile) -> bool:
    """Packed again or copied with other metadata: one format, and every step and kernel equal to the nanosecond."""
    if a.main is None or b.main is None or {s.format for s in a.sources} != {s.format for s in b.sources}:
        return False
    x, y = a.devices[a.main], b.devices[b.main]
    return x.span_ns == y.span_ns and x.steps.items == y.steps.items and x.kernel_rows == y.kernel_rows


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _step_flags(a: Run, b: Run, flag) -> None:
    whole = [run for run in (a, b) if run.whole]
    if len(whole) == 1:
        text = f"{quote(whole[0].label)} shows no steps: its whole capture would be compared with a step"
        flag("step-mismatch", "refuse", text)
    elif len(whole) == 2:
        kernels = f"{count(a.launches)} and {plural(count(b.launches), 'kernel')}"
        text = f"no steps were found: the whole captures are compared ({kernels}), as if each were one"
        flag("no-steps", "warn", text)
    split = [run for run in (a, b) if run not in whole and run.agreement < 0.5]
    for run in split:
        text = f"the signals disagree about the steps of {quote(run.label)} ({run.steps} by {run.step_signal})"
        flag("step-mismatch", "refuse", text)
    if not whole and not split and a.steps != b.steps:
        text = (
            f"{a.steps} steps before and {b.steps} after: compared per step; the totals of the two captures are not comparable"
        )
        flag("step-count-mismatch", "warn", text)
    if _few(a, b) and not whole:
        fewest = min(a.steps, b.steps)
        text = f"{plural(fewest, 'step')} cannot show the noise: changes under {NOISE_FLOOR_FEW:.0%} are not called"
        flag("few-steps", "note", text)


def _precision_flags(a: Run, b: Run, flag) -> None:
    main = [{name for name, share in run.precisions.items() if share >= PRECISION_SHARE} for run in (a, b)]
    if not all(main) or main[0] == main[1]:
        return
    said = [" and ".join(name for name in run.precisions if name in kept) for run, kept in zip((a, b), main, strict=True)]
    disjoint = not main[0] & main[1]
    flag("precision-mismatch", "refuse" if disjoint else "warn", f"matrix products run in {said[0]} before and {said[1]} after")


def _readings(runs: Sequence[Run], cats: Sequence[Row], kernels: Sequence[Row], before: int, after: int) -> list[Flag]:
    """What the numbers of two comparable runs say that a glance at the shares would not."""
    a, b, few = runs[before], runs[after], _few(runs[before], runs[after])
    wall = moved(a.step_ns, b.step_ns, _noise(a, b), few)
    busy = moved(a.busy_ns, b.busy_ns, max(a.busy_noise_ns, b.busy_noise_ns), few)
    out: list[Flag] = []

    def flag(code: str, severity: str, text: str) -> None:
        out.append(Flag(code, severity, before, after, text))

    step = f"{ms(a.step_ns)} -> {ms(b.step_ns)} ms"
    work = f"{ms(a.busy_ns)} -> {ms(b.busy_ns)} ms"
    if a.sha256 != b.sha256 and wall == 0:
        limit = max(_noise(a, b), (NOISE_FLOOR_FEW if few else NOISE_FLOOR) * max(a.step_ns, b.step_ns))
        change = signed_percent(a.step_ns, b.step_ns)
        flag("below-noise", "note", f"the step, {step} ({change}), moved less than the noise of the runs ({ms(limit)} ms)")
    if wall == 0 and busy != 0 and not _unclear(a, b):
        text = f"GPU time {'fell' if busy < 0 else 'rose'} ({work}), the step did not ({step}): something else sets its length"
        flag(f"gpu-{'fell' if busy < 0 else 'rose'}-step-flat", "warn", text)
    same_work = busy == 0 and moved(a.launches, b.launches, 0, few) == 0
    if wall != 0 and same_work and a.graph_mode == b.graph_mode and a.sha256 != b.sha256:
        text = f"the kernels take the same time ({work}) and only the gaps changed the step ({step}): "
        flag("profiler-overhead", "refuse", text + "the host or the profiler's own overhead; time it without a profiler")
    flat = [text for row in cats if (text := _share_rose(row, before, after, few))]
    if flat:
        flag(
            "share-rose-time-flat",
            "note",
            f"the share rose, the time per step did not, because the rest shrank: {'; '.join(flat)}",
        )
    end = {-1: "fell all the same", 0: "moved less than its noise" if _unclear(a, b) else "did not move", 1: "rose too"}[wall]
    _target_flag(cats, before, after, busy, few, f"total GPU time rose ({work}); the step {end} ({step})", flag)
    for text in _moves(cats, kernels, before, after, few):
        flag("work-moved", "warn", text)
    return out


def _share_rose(row: Row, before: int, after: int, few: bool) -> str:
    x, y = row.cells[before], row.cells[after]
    if not x or not y or y.share - x.share < SHARE_POINTS or _cell_moved(x, y, few) > 0:
        return ""
    name = CATEGORIES.get(row.key, row.key)
    return f"{name} {percent(x.share)} -> {percent(y.share)} of GPU time at {ms(x.step_ns)} -> {ms(y.step_ns)} ms"


def _cell_moved(x: Cell | None, y: Cell | None, few: bool) -> int:
    x, y = x or Cell(0, 0, 0, 0), y or Cell(0, 0, 0, 0)
    return moved(x.step_ns, y.step_ns, max(x.noise_ns, y.noise_ns), few)


def _target_flag(cats: Sequence[Row], before: int, after: int, busy: int, few: bool, total: str, flag) -> None:
    """The category that fell most is taken for the target."""
    fallen = [row for row in cats if _cell_moved(row.cells[before], row.cells[after], few) < 0]
    if busy <= 0 or not fallen:
        return
    target = min(fallen, key=lambda row: _ns(row, after) - _ns(row, before))
    name = CATEGORIES.get(target.key, target.key)
    text = f"{name} fell ({ms(_ns(target, before))} -> {ms(_ns(target, after))} ms) but {total}"
    flag("target-fell-total-rose", "warn", text)


def _ns(row: Row, run: int) -> int:
    cell = row.cells[run]
    return cell.step_ns if cell else 0


def _moves(cats: Sequence[Row], kernels: Sequence[Row], before: int, after: int, few: bool) -> list[str]:
    """A category fell, kernels of it vanished, and kernels that did not exist before took at least half of that elsewhere."""
    falls = {r.key: _ns(r, before) - _ns(r, after) for r in cats if _cell_moved(r.cells[before], r.cells[after], few) < 0}
    rises = {r.key: _ns(r, after) - _ns(r, before) for r in cats if _cell_moved(r.cells[before], r.cells[after], few) > 0}
    gone: dict[str, list[Row]] = {}
    new: dict[str, list[Row]] = {}
    for row in kernels:
        if row.cells[before] and not row.cells[after]:
            gone.setdefault(row.category, []).append(row)
        elif row.cells[after] and not row.cells[before]:
            new.setdefault(row.category, []).append(row)
    out = []
    for source, fall in falls.items():
        arrivals = {key: min(rise, sum(_ns(row, after) for row in new.get(key, ()))) for key, rise in rises.items()}
        target = max(arrivals, key=lambda key: arrivals[key], default=None)
        if target is not None and source in gone and arrivals[target] >= MOVED * fall:
            names = quote(short(gone[source][0].key)), quote(short(new[target][0].key))
            text = f"{CATEGORIES.get(source, source)} lost {ms(fall)} ms a step ({names[0]} is gone) while new kernels in "
            arrived = f"{CATEGORIES.get(target, target)} ({names[1]}) take {ms(arrivals[target])} ms"
            out.append(f"{text}{arrived}: work may have moved")
    return out


def _verdict(runs: Sequence[Run], flags: Sequence[Flag], before: int, after: int) -> Verdict:
    a, b = runs[before], runs[after]
    reasons = [flag for flag in flags if flag.severity == "refuse"]
    pair = f"{quote(a.label)} -> {quote(b.label)}"
    ratio = b.step_ns / a.step_ns if a.step_ns and b.step_ns else None
    if reasons:
        why = "; ".join(flag.text for flag in reasons)
        return Verdict(before, after, "refused", ratio, f"{pair}: no verdict, because {why}")
    assert ratio is not None  # without GPU work it is refused, whatever is allowed
    word = {-1: "faster", 0: "no change", 1: "slower"}[moved(a.step_ns, b.step_ns, _noise(a, b), _few(a, b))]
    said = word
    if _unclear(a, b):
        word, said = "cannot tell", f"cannot tell: moved less than the noise ({ms(_noise(a, b))} ms)"
    unit = "in all" if a.whole and b.whole else "a step"
    step = f"{ms(a.step_ns)} -> {ms(b.step_ns)} ms {unit} ({signed_percent(a.step_ns, b.step_ns)})"
    factor = {"faster": f", {1 / ratio:.2f}x as fast", "slower": f", {ratio:.2f}x the time"}.get(word, "")
    doubts = sorted({flag.code for flag in flags if flag.severity == "warn"})
    but = f"; read with: {', '.join(doubts)}" if doubts else ""
    return Verdict(before, after, word, ratio, f"{pair}: {said}, {step}{factor}{but}")
