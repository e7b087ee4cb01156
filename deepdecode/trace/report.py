"""Profiles, comparisons and advice as documents for `render`, as JSON, and without what must not be shared."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from deepdecode.trace.model import CATEGORIES, DeviceProfile, Profile, plural
from deepdecode.trace.render import (
    NAME_WIDTH,
    Bullets,
    Code,
    Doc,
    Part,
    Table,
    count,
    distinct,
    health_text,
    ms,
    percent,
    quote,
    short,
    signed_ms,
    signed_percent,
)

if TYPE_CHECKING:  # a profile alone is shown without loading what compares and advises
    from deepdecode.trace import servebench
    from deepdecode.trace.advise import Advice
    from deepdecode.trace.compare import Comparison, Flag
    from deepdecode.trace.runs import Row

TOP = 15
SHOWN_GAPS = 5
LABEL_WIDTH = 20
SIDE_NAME_WIDTH = 48  # of a kernel name beside the figures of several runs
MAX_NAME_WIDTH = 200


def to_json(value: Any) -> str:
    """One document; every one of ours carries `schema`."""
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
    except UnicodeEncodeError:  # half a surrogate pair in a name: ASCII escapes can say that, UTF-8 cannot
        return json.dumps(msgspec.to_builtins(value), indent=2) + "\n"


def category_name(key: str) -> str:
    return CATEGORIES.get(key, key)


# ---- one profile


def profile_doc(profile: Profile, label: str, top: int = TOP, columns: int = 0) -> Doc:
    """Health first, then where a step's time goes, by category and by kernel, whose names may fill `columns`."""
    parts: list[Part] = [Bullets("What was read", tuple(_health_items(profile)))]
    if profile.main is None:
        parts.append("No GPU work was recorded: there is no time to account for.")
    else:
        dev = profile.devices[profile.main]
        parts += [
            Bullets("Steps", tuple(_step_items(profile, dev))),
            _category_table(dev),
            _kernel_table(dev, top, columns),
        ]
        if dev.gaps:
            parts.append(_gap_table(dev))
        if len(profile.devices) > 1:
            parts.append(_device_table(profile))
    if profile.warnings:
        parts.append(Bullets("Warnings", tuple(warning.text for warning in profile.warnings)))
    return Doc(f"{quote(label)}: {headline(profile)}", tuple(parts))


def headline(profile: Profile) -> str:
    phase = "phase unknown" if profile.phase == "unknown" else profile.phase
    if profile.main is None:
        return f"{phase}, no GPU work"
    dev = profile.devices[profile.main]
    gpu = f" on {quote(dev.gpu)}" if dev.gpu else ""
    batch = f", batch {profile.batch}" if profile.batch is not None else ""
    steps = "no steps found: capture" if dev.steps.whole else plural(dev.steps.count, "step")
    return f"{phase}{gpu}{batch}, {steps} of {ms(dev.steps.p50_ns)} ms"


def _health_items(profile: Profile) -> list[str]:
    items = []
    for source in profile.sources:
        items.append(f"{quote(source.path)}: {source.format}, {source.bytes} bytes, sha256 {source.sha256[:16]}")
    health = profile.health
    trouble = health_text(health)
    items.append(f"{plural(health.events, 'record')} in {health.units}" + (f"; {trouble}" if trouble else ", none damaged"))
    if health.overlapping:
        start = plural(health.overlapping, "activity starts", "activities start")
        items.append(f"{start} before the previous one of the same stream has ended")
    return items + list(profile.notes)


def _step_items(profile: Profile, dev: DeviceProfile) -> list[str]:
    steps = dev.steps
    votes = ", ".join(f"{vote.signal} {vote.value}" for vote in steps.votes if vote.value is not None) or "none"
    found = f"{steps.count} by {quote(steps.signal)}; {percent(steps.agreement)} of the signals agree (votes: {quote(votes)})"
    wall = f"wall time p50 {ms(steps.p50_ns)} ms (min {ms(steps.min_ns)}, max {ms(steps.max_ns)})"
    wall += f"; busy p50 {ms(steps.p50_busy_ns)} ms, idle p50 {ms(steps.p50_idle_ns)} ms"
    kernels = plural(dev.kernels, "kernel")
    idle = f"idle {ms(dev.idle_ns)} ({percent(_part(dev.idle_ns, dev.window_ns))})"
    sums = f"sum {ms(dev.sum_ns)} ms, union with copies {ms(dev.union_ns)} ms"
    window = f"{ms(dev.window_ns)} ms = busy {ms(dev.busy_ns)} + {idle}"
    if steps.whole:
        items = [
            f"no signal tells steps apart (votes: {quote(votes)}): the whole capture counts as one step",
            f"capture {window}",
            f"{kernels}, {graphs_text(dev)}, {sums}",
        ]
    else:
        items = [
            found,
            wall,
            f"window {window}",
            f"whole capture: {kernels}, {sums}",
            f"per step: {plural(count(dev.kernels_per_step), 'kernel')}, {graphs_text(dev)}",
        ]
    phases = ", ".join(f"{vote.signal} {vote.value}" for vote in profile.phase_votes if vote.value is not None)
    if phases:
        items.append(f"phase {profile.phase} (votes: {quote(phases)})")
    return items


def graphs_text(dev: DeviceProfile) -> str:
    return f"{plural(count(dev.graph_launches_per_step), 'graph launch', 'graph launches')} ({dev.graph_mode})"


def _part(x: float, whole: float) -> float | None:
    return x / whole if whole else None


def _category_table(dev: DeviceProfile) -> Table:
    rows = [
        (category_name(c.category), ms(c.p50_step_ns), percent(c.share), count(c.launches_per_step), ms(c.exclusive_ns))
        for c in dev.categories
    ]
    idle = (("idle", ms(dev.steps.p50_idle_ns), "", "", ms(dev.idle_ns)),)
    head = ("category", "ms/step", "of busy", "launches/step", "ms in window")
    note = f"Unknown: {percent(dev.unknown_share)} of busy time."
    return Table("Time by category", head, "lrrrr", (*rows, *idle), note)


def _kernel_table(dev: DeviceProfile, top: int, columns: int) -> Table:
    shown = [kernel for kernel in dev.kernel_rows if kernel.window_count][:top]
    head = ("kernel", "category", "ms/step", "of busy", "launches/step", "p50 us")
    figures = [
        (
            category_name(kernel.category),
            ms(kernel.p50_step_ns),
            percent(_part(kernel.exclusive_ns, dev.busy_ns)),
            count(kernel.launches_per_step),
            f"{kernel.p50_ns / 1e3:.2f}",
        )
        for kernel in shown
    ]
    width = _name_width((head[1:], *figures), NAME_WIDTH, columns)
    names = distinct((kernel.name for kernel in shown), width)
    rows = tuple((names[kernel.name], *cells) for kernel, cells in zip(shown, figures, strict=True))
    left = sum(1 for kernel in dev.kernel_rows if kernel.window_count) - len(shown)
    note = f"{plural(left, 'more kernel')}; --top shows more, --json all." if left else ""
    return Table("Kernels", head, "llrrrr", rows, note)


def _name_width(rows: Sequence[tuple[str, ...]], least: int, columns: int) -> int:
    """What a terminal of `columns` leaves beside the other cells of `rows`; `least` where that is not known or less."""
    widths = (max(map(len, cells)) for cells in zip(*rows, strict=True))
    return max(least, min(MAX_NAME_WIDTH, columns - 2 - sum(width + 3 for width in widths)))


def _gap_table(dev: DeviceProfile) -> Table:
    rows = tuple((f"{gap.dur_ns / 1e3:.2f}", short(gap.before, 40), short(gap.after, 40)) for gap in dev.gaps[:SHOWN_GAPS])
    return Table(
        "Longest gaps", ("us", "after", "before"), "rll", rows, f"{plural(dev.gap_count, 'gap')}, {ms(dev.idle_ns)} ms in all."
    )


def _device_table(profile: Profile) -> Table:
    rows = tuple(
        (
            str(dev.device),
            str(dev.process),
            "-" if dev.rank is None else str(dev.rank),
            Code(dev.gpu or "-"),
            ms(dev.steps.p50_ns),
            ms(dev.steps.p50_busy_ns),
            ms(dev.steps.p50_idle_ns),
            percent(_part(dev.exclusive_ns.get("collective", 0), dev.busy_ns)),
        )
        for dev in profile.devices
    )
    head = ("device", "process", "rank", "GPU", "step p50 ms", "busy p50 ms", "idle p50 ms", "collective")
    note = "All per step; collective is its share of busy time. The busiest is described above."
    return Table("GPU timelines", head, "rrrlrrrr", rows, note)


# ---- a comparison


def comparison_doc(comparison: "Comparison", top: int = TOP, columns: int = 0) -> Doc:
    parts: list[Part] = [
        _runs_table(comparison),
        _rows_table("Time per step by category", "category", comparison, comparison.categories, columns),
        _rows_table("Time per step by kernel", "kernel", comparison, _most_changed(comparison, top), columns),
    ]
    if comparison.flags:
        parts.append(Bullets("Flags", tuple(_flag_text(comparison, flag) for flag in comparison.flags)))
    parts.append(Bullets("Verdict", tuple(verdict.text for verdict in comparison.verdicts)))
    parts.append(f"Noise: {comparison.noise_rule}.")
    return Doc("Comparison of " + ", ".join(quote(run.label) for run in comparison.runs), tuple(parts))


def _flag_text(comparison: "Comparison", flag: "Flag") -> str:
    labels = [quote(run.label) for run in comparison.runs]
    where = f", {labels[flag.before]} -> {labels[flag.after]}" if len(labels) > 2 else ""
    return f"{flag.code} ({flag.severity}{where}): {flag.text}"


def _label(text: str) -> Code:
    return short(text, LABEL_WIDTH)


def _runs_table(comparison: "Comparison") -> Table:
    runs = comparison.runs
    facts = (
        ("GPU", [short(run.gpu or "-", 28) for run in runs]),
        ("phase", [run.phase for run in runs]),
        ("batch", ["-" if run.batch is None else str(run.batch) for run in runs]),
        ("steps", ["none found" if run.whole else f"{run.steps} ({run.step_signal})" if run.steps else "-" for run in runs]),
        ("graphs", [run.graph_mode for run in runs]),
        ("step p50 ms", [ms(run.step_ns) for run in runs]),
        ("  spread ms", [ms(run.step_noise_ns) for run in runs]),
        ("busy p50 ms", [ms(run.busy_ns) for run in runs]),
        ("kernels/step", [count(run.launches) for run in runs]),
        ("graph launches/step", [count(run.graph_launches) for run in runs]),
        ("kernel sum, all GPUs, capture ms", [ms(run.capture_sum_ns) for run in runs]),
        ("unknown", [percent(run.unknown_share) for run in runs]),
        ("format", [run.format for run in runs]),
    )
    rows = tuple((name, *values) for name, values in facts)
    return Table("Runs", ("", *(_label(run.label) for run in runs)), "l" + "r" * len(runs), rows)


def _most_changed(comparison: "Comparison", top: int) -> tuple["Row", ...]:
    """By absolute change between the first and the last, then by size: what moved comes first."""

    def change(row: "Row") -> tuple[int, int]:
        values = [cell.step_ns if cell else 0 for cell in row.cells]
        return max(values) - min(values), max(values)

    return tuple(sorted(comparison.kernels, key=change, reverse=True)[:top])


def _rows_table(title: str, what: str, comparison: "Comparison", rows: Sequence["Row"], columns: int) -> Table:
    head: list[str] = [what]
    if what == "kernel":
        head.append("category")
    for run in comparison.runs:
        head += [Code(f"{_label(run.label)} ms"), "share", "launches"]
    head += ["change ms", "change"]
    out = []
    for row in rows:
        cells: list[str] = [category_name(row.category)]
        for cell in row.cells:
            cells += [ms(cell.step_ns), percent(cell.share), count(cell.launches)] if cell else ["-", "-", "-"]
        cells += change([cell.step_ns if cell else None for cell in row.cells])
        out.append(tuple(cells))
    notes = ["Change is the last against the first."] if len(comparison.runs) > 2 else []
    if what == "category":
        out += _total_rows(comparison)
        notes.append("All are medians over the steps, so they need not add up.")
    else:
        width = _name_width((tuple(head[1:]), *out), SIDE_NAME_WIDTH, columns)
        names = distinct((row.key for row in rows), width)
        out = [(names[row.key], *cells) for row, cells in zip(rows, out, strict=True)]
    return Table(
        title,
        tuple(head),
        "l" * (1 + (what == "kernel")) + "r" * (len(head) - 1 - (what == "kernel")),
        tuple(out),
        " ".join(notes),
    )


def change(values: Sequence[int | None]) -> tuple[str, str]:
    """The last against the first, in ms and in percent; None is a run that has none of it."""
    first, last = values[0] or 0, values[-1] or 0
    if values[-1] is None:
        return (signed_ms(-first) if first else "-"), "gone"
    return signed_ms(last - first), signed_percent(first, last)


def _total_rows(comparison: "Comparison") -> list[tuple[str, ...]]:
    runs = comparison.runs
    rows = []
    for name, values in (
        ("busy", [run.busy_ns for run in runs]),
        ("idle", [run.idle_ns for run in runs]),
        ("step", [run.step_ns for run in runs]),
    ):
        cells: list[str] = [name]
        for run, value in zip(runs, values, strict=True):
            cells += [ms(value), "", count(run.launches) if name == "busy" else ""]
        rows.append((*cells, signed_ms(values[-1] - values[0]), signed_percent(values[0], values[-1])))
    return rows


# ---- advice


def advice_doc(advice: "Advice") -> Doc:
    batch = f", batch {advice.batch}" if advice.batch is not None else ""
    phase = "phase unknown" if advice.phase == "unknown" else advice.phase
    steps = "no steps found" if advice.whole else plural(advice.steps, "step")
    length = f"{ms(advice.step_ns)} ms {'in all' if advice.whole else 'a step'}"
    intro = f"{phase}{batch}, {steps}: {length}, {ms(advice.busy_ns)} busy, {ms(advice.idle_ns)} idle."
    rows = tuple(
        (
            str(i),
            candidate.id,
            takes_text(candidate.takes),
            ms(candidate.step_ns),
            percent(candidate.share),
            _factor(candidate.ceiling),
            f"{candidate.k:.3g}",
            _factor(candidate.ceiling_at_k),
            candidate.confidence,
            candidate.effort,
            candidate.risk,
        )
        for i, candidate in enumerate(advice.candidates, 1)
    )
    head = ("", "candidate", "takes", "ms/step", "of step", "if gone", "k", "at k", "confidence", "effort", "risk")
    note = "`if gone` is W/(W-x), `at k` is W/(W-x(1-1/k)): both are upper bounds of the step's speed-up."
    parts: list[Part] = [intro, Table("Candidates, best first", head, "rllrrrrrlll", rows, note)]
    details = []
    for candidate in advice.candidates:
        why = candidate.why[0].upper() + candidate.why[1:]
        text = f"{candidate.id}: {candidate.title}. {why}. Check: {candidate.check}. k: {candidate.k_source}."
        if candidate.largest:
            text += f" Largest kernel: {quote(str(short(candidate.largest)))}."
        details.append(" ".join([text, *(f"{note[0].upper()}{note[1:]}." for note in candidate.notes)]))
    parts.append(Bullets("Candidates in words", tuple(details)))
    parts.append(f"Next: {quote(advice.choice) if advice.choice else 'nothing'}, because {advice.because}.")
    if advice.would_change:
        parts.append(Bullets("What would change the choice", advice.would_change))
    parts.append(Bullets("What this profile cannot say", advice.limits))
    return Doc(f"What next for {quote(advice.label)}", tuple(parts))


def takes_text(takes: Sequence[str]) -> str:
    """The categories that a candidate takes; `idle` is none of them and keeps its name."""
    return ", ".join(category_name(key) for key in takes)


def _factor(value: float | None) -> str:
    return "no bound" if value is None else f"<= {value:.2f}x"


# ---- serving results


def serving_doc(comparison: "servebench.ServingComparison") -> Doc:
    files = comparison.files
    head = ["", "metric", *(_label(file.label) for file in files), *(Code(f"{_label(file.label)} ratio") for file in files[1:])]
    align = "ll" + "r" * (2 * len(files) - 1)
    rows = []
    for row in comparison.rows:
        cells = [_serving_cell(cell) for cell in row.cells]
        ratios = ["-" if ratio is None else f"{ratio:.3f}" for ratio in row.ratios[1:]]
        rows.append((row.concurrency, metric_name(row), *cells, *ratios))
    note = "Latencies in ms, medians where a file repeats a concurrency; ratios are over the first file."
    parts: list[Part] = [Table("By concurrency", tuple(head), align, tuple(rows), note)]
    if comparison.notes:
        parts.append(Bullets("Flags", tuple(f"{note.code} ({note.severity}): {note.text}" for note in comparison.notes)))
    if comparison.refused:
        reasons = "; ".join(note.text for note in comparison.notes if note.severity == "refuse")
        parts.append(Bullets("Verdict", (f"no verdict, because {reasons}",)))
    else:
        verdicts = tuple(verdict.text for verdict in comparison.verdicts)
        parts.append(Bullets("Verdict", verdicts or ("no concurrency in common",)))
    return Doc("Serving results of " + ", ".join(quote(file.label) for file in files), tuple(parts))


def metric_name(row: "servebench.Row") -> str:
    if row.metric == "output_tps":
        return "output tok/s"
    stat, _, metric = row.metric.rpartition("_")
    return f"{metric.upper()} {stat}"


def _serving_cell(cell: "servebench.Cell | None") -> str:
    if cell is None:
        return "-"
    spread = f" ({cell.low:.2f} to {cell.high:.2f}, {cell.runs} runs)" if cell.runs > 1 else ""
    return f"{cell.value:.2f}{spread}"
