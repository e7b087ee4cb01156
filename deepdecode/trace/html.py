"""The report page: one offline HTML file with everything inline, readable without scripts, inert against hostile names.

The template is rendered by jinja2 with escaping on. A content policy allows exactly the one script of the template and no
network at all, so that even a name that escaped its quoting could not run or fetch anything.
"""

import base64
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepdecode.trace.advise import IDLE, Advice
from deepdecode.trace.compare import Comparison
from deepdecode.trace.model import CATEGORIES, DeviceProfile, Profile, Timeline, TraceError, plural
from deepdecode.trace.render import clean, count, health_text, ms, percent
from deepdecode.trace.report import change, graphs_text, headline, takes_text

MAX_KERNELS = 600  # rows of the kernel table
MAX_SLICES = 4000  # rectangles of one timeline
MAX_LANES = 48  # its rows; the streams that work least are left out
SHOWN_GAPS = 5
LANE, LANE_GAP = 22, 4
WIDTH = 1000  # of every drawing, in its own units


@dataclass(frozen=True)
class Segment:
    """One piece of a step's bar, in drawing units."""

    category: str
    x: float
    width: float
    label: str


@dataclass(frozen=True)
class Bar:
    label: str
    total: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Rect:
    category: str
    x: float
    y: int
    width: float
    key: int  # into Lanes.readouts


@dataclass(frozen=True)
class Lanes:
    """One step's timeline, ready to draw."""

    label: str
    title: str
    height: int
    streams: tuple[tuple[int, str], ...]  # y, name
    ticks: tuple[tuple[float, str], ...]
    rects: tuple[Rect, ...]
    readouts: tuple[tuple[str, str], ...]  # kernel, when and how long
    gaps: tuple[tuple[str, str, str], ...]  # microseconds, kernel before, kernel after
    note: str


def write_html(
    path: str | Path,
    profiles: Sequence[Profile],
    labels: Sequence[str],
    comparison: Comparison | None = None,
    advice: Advice | None = None,
) -> None:
    """Write the page, whole or not at all; a link is followed.

    Raises:
        TraceError: jinja2 is not installed, or the file cannot be written.
    """
    # replacing a device would delete it
    if os.path.exists(path) and not os.path.isfile(path):
        raise TraceError(f"report: {path} must be a regular file, got something else")
    text = page(profiles, labels, comparison, advice)
    try:
        _replace(Path(os.path.realpath(path)), text)
    except OSError as e:
        raise TraceError(f"report: {path} must be a file that can be written, got {e.strerror}") from None


def _replace(path: Path, text: str) -> None:
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".report-", suffix=".part")
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp's own mode lets nobody else read it
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def page(
    profiles: Sequence[Profile], labels: Sequence[str], comparison: Comparison | None = None, advice: Advice | None = None
) -> str:
    """The page as text."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise TraceError("report: jinja2 must be installed for --html", "pip install 'deepdecode[report]'") from error

    data = Path(__file__).parent.parent / "data"
    env = Environment(
        loader=FileSystemLoader(data), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = env.get_template("report.html.j2")

    def inline(text: str) -> Markup:
        """A sentence of ours: what it quotes between backticks becomes code."""
        pieces = clean(text).split("`")
        if len(pieces) % 2 == 0:
            return Markup.escape(clean(text))
        return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else Markup.escape(p) for i, p in enumerate(pieces))

    lanes = [lane for profile, label in zip(profiles, labels, strict=True) if (lane := _lanes(profile, label))]
    text = template.render(
        title=" | ".join(clean(label) for label in labels),
        runs=[_run(profile, label) for profile, label in zip(profiles, labels, strict=True)],
        bars=_bars(profiles, labels),
        used=_used(profiles),
        names={**CATEGORIES, IDLE: "idle"},
        categories=_category_rows(profiles),
        kernels=_kernel_rows(profiles),
        kernel_limit=MAX_KERNELS,
        lanes=lanes,
        readouts=Markup(_script_json([lane.readouts for lane in lanes])),
        comparison=comparison,
        advice=advice,
        labels=[clean(label) for label in labels],
        takes_text=takes_text,
        rule=profiles[0].overlap_rule,
        width=WIDTH,
        lane=LANE,
        ms=ms,
        percent=percent,
        count=count,
        inline=inline,
        upper_first=lambda text: text[:1].upper() + text[1:],
    )
    # a name cannot hold "<style>" or "<script>": escaping is on, so the first of each is the template's own
    for tag in ("script", "style"):
        own = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert own is not None
        text = text.replace(f"{tag.upper()}_HASH", _hash(own[1]), 1)
    return text


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _script_json(value: object) -> str:
    """JSON that cannot end its script element: no <, > or & is left in it."""
    text = json.dumps(value, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _device(profile: Profile) -> DeviceProfile | None:
    return None if profile.main is None else profile.devices[profile.main]


def _run(profile: Profile, label: str) -> dict:
    dev = _device(profile)
    facts = [("what", headline(profile).replace("`", ""))]
    if dev:
        steps = dev.steps
        agree = f"{steps.count} by {clean(steps.signal)}, {percent(steps.agreement)} of the signals agree"
        facts += [
            ("step p50", f"{ms(steps.p50_ns)} ms ({ms(steps.min_ns)} to {ms(steps.max_ns)})"),
            ("busy", f"{ms(steps.p50_busy_ns)} ms a step; idle {ms(steps.p50_idle_ns)} ms"),
            (
                "launches",
                f"{plural(count(dev.kernels_per_step), 'kernel')} a step, {graphs_text(dev)}",
            ),
            ("steps", "none found: the whole capture counts as one" if steps.whole else agree),
            ("unknown", f"{percent(dev.unknown_share)} of busy time"),
        ]
    trouble = health_text(profile.health)
    facts.append(("records", f"{profile.health.events}" + (f"; {trouble}" if trouble else ", none damaged")))
    files = [(clean(s.path), s.format, f"{s.bytes} bytes", s.sha256[:16]) for s in profile.sources]
    return {
        "label": clean(label),
        "facts": facts,
        "files": files,
        "warnings": [clean(w.text) for w in profile.warnings],
        "devices": _device_rows(profile) if len(profile.devices) > 1 else [],
    }


def _device_rows(profile: Profile) -> list[tuple[str, ...]]:
    return [
        (
            "-" if dev.rank is None else str(dev.rank),
            str(dev.device),
            clean(dev.gpu) or "-",
            ms(dev.steps.p50_ns),
            ms(dev.steps.p50_busy_ns),
            ms(dev.steps.p50_idle_ns),
            ms(next((cat.p50_step_ns for cat in dev.categories if cat.category == "collective"), 0)),
        )
        for dev in profile.devices
    ]


def _used(profiles: Sequence[Profile]) -> list[str]:
    """Categories that occur, in the order of tables and bars."""
    present = {cat.category for profile in profiles if (dev := _device(profile)) for cat in dev.categories if cat.exclusive_ns}
    return [key for key in CATEGORIES if key in present]


def _step_times(dev: DeviceProfile) -> dict[str, float]:
    """Mean exclusive time per counted step, so that the pieces add up to the bar; idle included."""
    steps = max(1, dev.steps.count)
    times = {key: ns / steps for key, ns in dev.exclusive_ns.items() if ns}
    times[IDLE] = dev.idle_ns / steps
    return times


def _bars(profiles: Sequence[Profile], labels: Sequence[str]) -> list[Bar]:
    """One bar a run; a unit of width is the same time in all of them."""
    devices = [(dev, label) for profile, label in zip(profiles, labels, strict=True) if (dev := _device(profile))]
    longest = max((dev.window_ns / max(1, dev.steps.count) for dev, _ in devices), default=0)
    bars = []
    for dev, label in devices:
        times, x, segments = _step_times(dev), 0.0, []
        total = sum(times.values())
        for key in (*CATEGORIES, IDLE):
            if times.get(key):
                width = WIDTH * times[key] / max(1, longest)
                text = f"{CATEGORIES.get(key, 'idle')}: {ms(times[key])} ms a step, {percent(times[key] / total)} of it"
                segments.append(Segment(key, round(x, 2), round(width, 2), text))
                x += width
        bars.append(Bar(clean(label), f"{ms(total)} ms", tuple(segments)))
    return bars


def _category_rows(profiles: Sequence[Profile]) -> list[dict]:
    devices = [_device(profile) for profile in profiles]
    rows = []
    for key in _used(profiles):
        found = [next((c for c in dev.categories if c.category == key), None) if dev else None for dev in devices]
        values = [cat.p50_step_ns if cat else None for cat in found]
        cells = [
            (ms(cat.p50_step_ns), percent(cat.share), count(cat.launches_per_step)) if cat else ("-", "-", "-") for cat in found
        ]
        moved = change(values) if len(values) > 1 else None
        rows.append({"key": key, "cells": cells, "change": moved, "size": max(value or 0 for value in values)})
    return sorted(rows, key=lambda row: -row["size"])


def _kernel_rows(profiles: Sequence[Profile]) -> list[dict]:
    """Kernels by their full name, each with ms per step and launches of every run; numbers are kept for sorting."""
    found: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    for i, profile in enumerate(profiles):
        dev = _device(profile)
        for kernel in dev.kernel_rows if dev else ():
            if kernel.window_count:
                row = found.setdefault((kernel.name, kernel.category), [(0.0, 0.0, 0)] * len(profiles))
                row[i] = (kernel.p50_step_ns / 1e6, kernel.launches_per_step, kernel.p50_ns)
    ranked = sorted(found.items(), key=lambda item: -max(value[0] for value in item[1]))[:MAX_KERNELS]
    return [
        {"name": clean(name), "category": category, "values": values, "change": values[-1][0] - values[0][0]}
        for (name, category), values in ranked
    ]


# ---- the timeline


def _lanes(profile: Profile, label: str) -> Lanes | None:
    dev = _device(profile)
    if dev is None or dev.timeline is None or not dev.timeline.slices or dev.timeline.wall_ns <= 0:
        return None
    timeline = dev.timeline
    timeline = _fewer(timeline)
    rows, row_names = _rows(timeline)
    merged = _merge(timeline, rows)
    scale = WIDTH / timeline.wall_ns
    rects, readouts = [], []
    for row, start, end, name, number in merged:
        kernel = (
            clean(timeline.names[name])
            if number == 1
            else f"{number} {CATEGORIES.get(timeline.categories[name], 'kernels')} kernels"
        )
        readouts.append((kernel, f"{ms(start)} ms, for {(end - start) / 1e3:.2f} us"))
        y = row * (LANE + LANE_GAP)
        rects.append(
            Rect(timeline.categories[name], round(start * scale, 3), y, max(0.05, round((end - start) * scale, 3)), len(rects))
        )
    drawn = f"{len(timeline.slices)} activities" + (f" drawn as {len(rects)}" if len(rects) < len(timeline.slices) else "")
    left = f"; {timeline.left_out} left out" if timeline.left_out else ""
    return Lanes(
        label=clean(label),
        title=f"step {timeline.step + 1} of {dev.steps.count}, {ms(timeline.wall_ns)} ms",
        height=len(row_names) * (LANE + LANE_GAP),
        streams=tuple((i * (LANE + LANE_GAP), name) for i, name in enumerate(row_names)),
        ticks=_ticks(timeline.wall_ns),
        rects=tuple(rects),
        readouts=tuple(readouts),
        gaps=tuple((f"{gap.dur_ns / 1e3:.2f}", clean(gap.before), clean(gap.after)) for gap in dev.gaps[:SHOWN_GAPS]),
        note=drawn + left,
    )


def _fewer(timeline: Timeline) -> Timeline:
    """Whole streams, the busiest first, for as long as their rows fit; of one that alone does not, the rows that do."""
    rows, names = _rows(timeline)
    if len(names) <= MAX_LANES:
        return timeline
    of: dict[int, set[int]] = {}
    busy: dict[int, int] = {}
    for row, piece in zip(rows, timeline.slices, strict=True):
        of.setdefault(piece.stream, set()).add(row)
        busy[piece.stream] = busy.get(piece.stream, 0) + piece.dur_ns
    kept: set[int] = set()
    for stream in sorted(busy, key=lambda stream: -busy[stream]):
        kept.update(sorted(of[stream])[: MAX_LANES - len(kept)])
    slices = tuple(piece for row, piece in zip(rows, timeline.slices, strict=True) if row in kept)
    return replace(timeline, slices=slices, left_out=timeline.left_out + len(timeline.slices) - len(slices))


def _rows(timeline: Timeline) -> tuple[list[int], list[str]]:
    """A row for each slice: a stream takes as many rows as it has kernels at once, which under PDL is two or more."""
    order = sorted(range(len(timeline.slices)), key=lambda i: timeline.slices[i].start_ns)
    ends: dict[int, list[int]] = {}
    place: list[tuple[int, int]] = [(0, 0)] * len(timeline.slices)
    for i in order:
        piece = timeline.slices[i]
        depth = ends.setdefault(piece.stream, [])
        free = next((j for j, end in enumerate(depth) if end <= piece.start_ns), len(depth))
        if free == len(depth):
            depth.append(0)
        depth[free] = piece.start_ns + piece.dur_ns
        place[i] = (piece.stream, free)
    first, names = {}, []
    for stream in sorted(ends):
        first[stream] = len(names)
        names += [f"stream {stream}" if j == 0 else "" for j in range(len(ends[stream]))]
    return [first[stream] + depth for stream, depth in place], names


def _merge(timeline: Timeline, rows: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    """(row, start, end, name, how many): beyond MAX_SLICES, neighbours of one category that are thinner than a hair join."""
    order = sorted(range(len(timeline.slices)), key=lambda i: (rows[i], timeline.slices[i].start_ns))
    hair = timeline.wall_ns / MAX_SLICES if len(order) > MAX_SLICES else -1
    out: list[tuple[int, int, int, int, int]] = []
    for i in order:
        piece, row = timeline.slices[i], rows[i]
        end = piece.start_ns + piece.dur_ns
        if out:
            last_row, start, last_end, name, number = out[-1]
            same = last_row == row and timeline.categories[name] == timeline.categories[piece.name]
            if same and piece.start_ns - last_end <= hair and end - start <= 4 * hair:
                out[-1] = (row, start, max(last_end, end), name, number + 1)
                continue
        out.append((row, piece.start_ns, end, piece.name, 1))
    return out


def _ticks(wall_ns: int) -> tuple[tuple[float, str], ...]:
    """About eight round times along the step."""
    raw = wall_ns / 8
    power = 10 ** (len(str(int(max(1, raw)))) - 1)
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw)
    return tuple((WIDTH * t / wall_ns, f"{t / 1e6:g}") for t in range(0, wall_ns + 1, int(step)))
