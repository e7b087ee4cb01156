"""CSV of `nsys stats`: cuda_gpu_trace and cuda_kern_exec_trace, one activity a line."""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from deepdecode.trace.columns import MAX_NS, Collector
from deepdecode.trace.model import KERNEL, MEMCPY, MEMSET, Gpu, Source, TraceError
from deepdecode.trace.stream import Progress, Stream

MAX_LINE = 1 << 20
UNITS = {"ns": 1, "us": 1_000, "μs": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "sec": 1_000_000_000}
# our word -> headers of the reports, without their unit
HEADERS = {
    "start": ("Start", "Kernel Start"),
    "dur": ("Duration", "Kernel Dur"),
    "name": ("Name", "Kernel Name"),
    "device": ("Device", "DevId"),
    "stream": ("Strm", "Stream"),
    "correlation": ("CorrId",),
    "grid": ("GridXYZ",),
    "x": ("GrdX",),
    "y": ("GrdY",),
    "z": ("GrdZ",),
}
_HEADER = re.compile(r"^(?P<word>[^()]*?)\s*(?:\((?P<unit>[^()]*)\))?$")
# a comma may only group digits: "0,5" in a locale of decimal commas would otherwise be read as 5
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{0,30})(?P<rest>(?:\.[0-9]{0,30})?(?:[eE][-+]?[0-9]{1,3})?)"
)
_DEVICE = re.compile(r"^(?P<name>.*?)\s*\((?P<id>\d{1,4})\)$")
HINT = "write it with `nsys stats --report cuda_gpu_trace --format csv`"


def read(path: Path, file: int, into: Collector, progress: Progress | None = None) -> Source:
    """Read one CSV into the collector."""
    stream = Stream(path, progress)
    process = into.process(file)
    lines = _lines(stream, path)
    columns, mark = None, ","
    for _, line in zip(range(200), lines, strict=False):
        mark = max(",;\t", key=line.count)
        columns = _columns(line, mark, path)
        if columns:
            break
    if not columns:
        for _ in lines:
            pass
        raise TraceError(f"{path}: file must be a profiler trace, got text without the headers Start, Duration and Name", HINT)
    for line in lines:
        if not line.strip():
            continue
        try:
            _row(next(csv.reader([line], delimiter=mark, strict=True)), columns, file, process, into)
        except (ValueError, OverflowError, IndexError, csv.Error, StopIteration):
            into.bad += 1
    into.truncated |= stream.truncated
    into.recovered += into.events if into.bad else 0
    return Source(str(path), stream.sha256, "nsys-csv", stream.raw_bytes)


def _lines(stream: Stream, path: Path) -> Iterator[str]:
    rest = b""
    for block in stream:
        *whole, rest = (rest + block).split(b"\n")
        if len(rest) > MAX_LINE:
            raise TraceError(f"{path}: a line must be under {MAX_LINE >> 20} MB, got a longer one")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
    yield rest.decode("utf-8", "replace").rstrip("\r")


def _columns(line: str, mark: str, path: Path) -> dict[str, tuple[int, int]] | None:
    """Our word -> (position, nanoseconds in its unit), or None where the line is no header."""
    try:
        cells = next(csv.reader(io.StringIO(line.lstrip("\ufeff")), delimiter=mark))
    except (csv.Error, StopIteration):
        return None
    found: dict[str, tuple[int, int]] = {}
    words = set()
    for i, cell in enumerate(cells):
        if match := _HEADER.match(cell.strip()):
            words.add(match["word"])
            for ours, theirs in HEADERS.items():
                if match["word"] in theirs and ours not in found:
                    unit = match["unit"] or "ns"
                    if ours in ("start", "dur") and unit not in UNITS:
                        raise TraceError(f"{path}: {match['word']} must be in one of {', '.join(UNITS)}, got {unit}")
                    found[ours] = (i, UNITS.get(unit, 1))
    if {"Total Time", "Instances", "Name"} <= words:
        raise TraceError(f"{path}: CSV must list single kernels, got a summary without their times", HINT)
    return found if {"start", "dur", "name"} <= set(found) else None


def _row(cells: list[str], columns: dict[str, tuple[int, int]], file: int, process: int, into: Collector) -> None:
    def cell(word: str) -> str:
        at = columns.get(word)
        return cells[at[0]].strip() if at else ""

    def time(word: str) -> int:
        match, unit = _NUMBER.fullmatch(cell(word)), columns[word][1]
        if not match:
            raise ValueError
        value = match["sign"] + match["whole"].replace(",", "") + match["rest"]
        ns = round(float(value) * unit) if match["rest"] else int(value) * unit
        if abs(ns) >= MAX_NS:
            raise ValueError
        return ns

    def whole(text: str, default: int) -> int:
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default

    name = cell("name")
    if not name:
        raise ValueError
    start, dur = time("start"), time("dur")
    kind = KERNEL
    if name.startswith(("[CUDA memcpy", "[CUDA Unified Memory memcpy")):
        kind, name = MEMCPY, "Memcpy " + name.strip("[]").rsplit(" ", 1)[-1]
    elif name.startswith("[CUDA memset"):
        kind, name = MEMSET, "Memset (Device)"
    device = cell("device")
    title = _DEVICE.match(device)
    number = int(title["id"]) if title else whole(device, 0)
    if title:
        into.gpus.setdefault((file, number), Gpu(number, 0, None, title["name"]))
    grid = [whole(part, 0) for part in cell("grid").split()] or [whole(cell(w), 0) for w in "xyz"]
    blocks = grid[0] * grid[1] * grid[2] if len(grid) == 3 else 0
    if dur < 0:
        into.impossible += 1
    correlation = whole(cell("correlation"), -1)
    into.rows.extend(
        (
            number,
            process,
            whole(cell("stream"), 0),
            start,
            max(dur, 0),
            into.name_id(name),
            kind,
            correlation,
            -1,
            -1,
            min(blocks, MAX_NS),
        )
    )
    into.events += 1
