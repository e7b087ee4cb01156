"""One door for every trace: a Kineto file, an Nsight Systems export, an nsys stats CSV, or a folder of ranks."""

import filecmp
import gzip
import os
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

from deepdecode.trace import kineto, nsys, nsys_csv
from deepdecode.trace.columns import CALL, HINT, MAX_ANNOTATIONS, MAX_NAMES, OTHER_NAMES, ROW, Collector
from deepdecode.trace.model import KERNEL, SKIPPED, Annotation, Gpu, Health, Launches, Source, Table, Trace, TraceError
from deepdecode.trace.stream import Progress

# what a file begins with -> what it is; none of these is read
PACKED = {
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip file inside a gzip file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ\0": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
}
UTF16 = (b"\xff\xfe", b"\xfe\xff")
SUFFIXES = (".json", ".json.gz", ".sqlite", ".sqlite.gz", ".csv", ".csv.gz")
MAX_FILES, MAX_GPUS = 1024, 2048
# an activity that outlives its fourth successor, or its next, by more than this cannot be right
DAY_NS = 86_400 * 10**9
OVERRUNS = ((4, 50_000_000), (1, 10_000_000_000))


def load(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Trace:
    """Read a trace file, or all ranks of a folder, without changing anything on disk.

    Args:
        path: .json, .json.gz, .sqlite, .csv, or a folder of such files (one rank each).
        progress: called with (bytes read, bytes in all), from the calling thread.

    Raises:
        TraceError: the file is none of these, or nothing in it could be read. Other files in a folder are skipped
            with a note.
    """
    path = Path(path)
    into = Collector()
    try:
        files = _distinct(_files(path), into)
        total = sum(f.stat().st_size for f in files)
    except OSError as e:
        raise TraceError(f"{path}: file must be readable, got {e.strerror}") from None
    sources: list[Source] = []
    for i, file in enumerate(files):
        done = sum(s.bytes for s in sources)
        before = len(into.rows)
        try:
            try:
                sources.append(_read(file, i, into, progress and partial(_report, progress, done, total)))
            except OSError as e:
                raise TraceError(f"{file}: file must be readable, got {e.strerror or e}") from None
        except TraceError as e:
            # a folder of ranks may hold other files; one that was read in part is no such file
            if len(files) == 1 or len(into.rows) > before:
                raise
            into.notes.append(f"{SKIPPED}{file.name}: {str(e).removeprefix(f'{file}: ')}")
    if not sources:
        raise TraceError(f"{path}: folder must hold traces, got {len(files)} files that are none", HINT)
    if progress:
        progress(total, total)
    return assemble(sources, into)


def _report(progress: Progress, done: int, total: int, read: int, _size: int) -> None:
    progress(done + read, total)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.is_file() and f.name.lower().endswith(SUFFIXES))
        if not files:
            raise TraceError(f"{path}: folder must hold .json, .json.gz, .sqlite or .csv files, got none")
        if len(files) > MAX_FILES:
            raise TraceError(f"{path}: folder must hold at most {MAX_FILES} traces, got {len(files)}")
        return files
    if not path.exists():
        raise TraceError(f"{path}: file must exist, got nothing there")
    if not path.is_file():
        raise TraceError(f"{path}: trace must be a regular file or a folder, got something else")
    return [path]


def _distinct(files: list[Path], into: Collector) -> list[Path]:
    """Without copies: a rank that lies in a folder twice is one timeline."""
    by_size: dict[int, list[Path]] = {}
    for file in files:
        by_size.setdefault(file.stat().st_size, []).append(file)
    copies: dict[Path, Path] = {}
    for alike in by_size.values():
        for i, file in enumerate(alike):
            first = next((one for one in alike[:i] if one not in copies and _same_bytes(one, file)), None)
            if first:
                copies[file] = first
                into.notes.append(f"{SKIPPED}{file.name}: it holds the same bytes as {first.name}")
    return [file for file in files if file not in copies]


def _same_bytes(one: Path, other: Path) -> bool:
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:  # reading it will say why
        return False


def _read(path: Path, process: int, into: Collector, progress: Progress | None) -> Source:
    with open(path, "rb") as file:
        start = file.read(512)
    if start.startswith(b"\x1f\x8b"):
        try:
            with gzip.open(path, "rb") as file:
                start = file.read(512)
        except (OSError, EOFError, ValueError):
            start = b"{"  # damaged: the Kineto reader takes what there is
        except Exception as e:  # zlib.error
            raise TraceError(f"{path}: file must be readable as gzip, got {e}") from None
    if start.startswith(b"SQLite format 3\0"):
        return nsys.read(path, process, into, progress)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith((b"{", b"[")) or not text:
        return kineto.read(path, process, into, progress)
    if start.startswith((b"QDSTRM", b"NVTXT")) or path.suffix == ".nsys-rep":
        raise TraceError(
            f"{path}: file must be an export, got a raw report",
            f"run `nsys export --type sqlite {path.name}` and give the .sqlite file",
        )
    packed = next((what for magic, what in PACKED.items() if start.startswith(magic)), None)
    packed = packed or ("a tar archive" if start[257:262] == b"ustar" else None)
    if packed:
        raise TraceError(f"{path}: file must be a profiler trace, got {packed}", "unpack it and give the trace in it")
    if start.startswith(UTF16):
        raise TraceError(f"{path}: file must be UTF-8, got UTF-16", "redirect as UTF-8: PowerShell writes UTF-16 by itself")
    if b"\0" in start:
        raise TraceError(f"{path}: file must be a profiler trace, got binary data", HINT)
    return nsys_csv.read(path, process, into, progress)


def assemble(sources: list[Source], into: Collector) -> Trace:
    """Columns, one time base, one order, and the health of what was read."""
    rows = np.frombuffer(into.rows, dtype=np.int64).reshape(-1, ROW)
    calls = np.frombuffer(into.calls, dtype=np.int64).reshape(-1, CALL)
    if not into.events:
        got = f"{into.bad} that are all damaged" if into.bad else "none"
        raise TraceError(f"{sources[0].path}: file must hold trace events, got {got}", HINT)
    if into.impossible and not len(rows):
        raise TraceError(f"{sources[0].path}: GPU activities must have times, got {into.impossible} without a possible one")
    if again := sorted(r for r, n in Counter(r for r in into.ranks if r is not None).items() if n > 1):
        which = ", ".join(map(str, again[:8]))
        into.notes.append(f"more than one file says that it is rank {which}: each counts as a timeline of its own")
    shift = _shift(into)  # [processes]
    start = rows[:, 3] + shift[rows[:, 1]]
    call_start = calls[:, 2] + shift[calls[:, 0]]
    marks = [(name, t + int(shift[p]), dur, p, thread, gpu) for name, t, dur, p, thread, gpu in into.annotations]
    origin = int(min((c.min() for c in (start, call_start) if len(c)), default=min((m[1] for m in marks), default=0)))

    gpus, gpu = _gpus(into, rows)
    order = np.lexsort((rows[:, 4], start, gpu))
    column = [rows[order, i] for i in range(ROW)]
    gpu, start, dur = gpu[order], start[order] - origin, column[4]
    clipped = _clip_overruns(gpu, column[2], start, dur)
    table = Table(
        gpu=gpu,
        process=column[1],
        stream=column[2],
        start_ns=start,
        dur_ns=dur,
        name=column[5].astype(np.int32),
        kind=column[6].astype(np.int8),
        correlation=column[7],
        graph=column[8],
        node=column[9],
        blocks=column[10],
    )
    order = np.argsort(call_start, kind="stable")
    column = [calls[order, i] for i in range(CALL)]
    launches = Launches(column[0], column[1], call_start[order] - origin, column[3], column[4], column[5].astype(bool))
    health = Health(
        events=into.events,
        bad_events=into.bad,
        recovered=into.recovered,
        truncated=into.truncated,
        orphans=_orphans(into, table),
        zero_durations=int((table.dur_ns == 0).sum()),
        impossible_durations=into.impossible + clipped,
        drops=into.drops,
        overlapping=_overlapping(table),
        units="ns" if all(s.format.startswith("nsys") for s in sources) else "us",
        capture=_capture(into, table, launches),
    )
    marks.sort(key=lambda m: (m[1], -m[2]))
    annotations = tuple(Annotation(name, t - origin, dur, p, thread, on_gpu) for name, t, dur, p, thread, on_gpu in marks)
    if into.too_many_ranges:
        into.notes.append(f"more than {MAX_ANNOTATIONS} named ranges: steps that only the rest would show are missed")
    if OTHER_NAMES in into.names:
        into.notes.append(f"more than {MAX_NAMES} distinct kernel names, or very long ones: the rest are counted as one")
    return Trace(tuple(sources), table, tuple(into.names), launches, annotations, gpus, origin, health, tuple(into.notes))


def _shift(into: Collector) -> np.ndarray:
    """[processes] nanoseconds to add, so that the files of a folder share a clock where they say how."""
    base = [into.base_ns.get(file, 0) for file in into.file_of]
    if len(set(base)) > 1 and not all(base):
        into.notes.append("the files do not all name a base time: times of different ranks cannot be compared")
        return np.zeros(len(base), np.int64)
    return np.array(base, np.int64) - min(base, default=0)


def _gpus(into: Collector, rows: np.ndarray) -> tuple[tuple[Gpu, ...], np.ndarray]:
    """The timelines that have work, in order of (file, device), and each row's index into them."""
    if not len(rows):
        return (), np.zeros(0, np.int32)
    files = np.array(into.file_of, np.int64)[rows[:, 1]]
    devices, device_of = np.unique(rows[:, 0], return_inverse=True)
    distinct, first, index = np.unique(files * len(devices) + device_of, return_index=True, return_inverse=True)
    if len(distinct) > MAX_GPUS:
        raise TraceError(f"trace: devices must be at most {MAX_GPUS}, got {len(distinct)}", "their ids are likely damaged")
    gpus = []
    for key, at in zip(distinct.tolist(), first.tolist(), strict=True):
        file, device = key // len(devices), int(devices[key % len(devices)])
        process = int(rows[at, 1])
        # a process that sees one GPU may list it as 0 and number its work otherwise
        listed = {(g.name, g.sms) for (f, _), g in into.gpus.items() if f == file}
        alike = Gpu(device, 0, None, *next(iter(listed))) if len(listed) == 1 else Gpu(device)
        known = into.gpus.get((file, device), alike)
        gpus.append(Gpu(device, process, into.ranks[process], known.name, known.sms))
    return tuple(gpus), index.astype(np.int32)


def _by_stream(gpu: np.ndarray, stream: np.ndarray, start: np.ndarray) -> np.ndarray:
    return np.lexsort((start, stream, gpu))


def _clip_overruns(gpu: np.ndarray, stream: np.ndarray, start: np.ndarray, dur: np.ndarray) -> int:
    """End an activity at its successor's start, in place, where a successor begins long before its end; none lasts a day.

    A stream runs in order; programmatic dependent launch lets neighbours overlap, by microseconds.
    """
    order = _by_stream(gpu, stream, start)
    g, s, t = gpu[order], stream[order], start[order]
    clipped = 0
    for ahead, slack in OVERRUNS:
        if len(start) > ahead:
            same = (g[ahead:] == g[:-ahead]) & (s[ahead:] == s[:-ahead])
            at = np.flatnonzero(same & (t[:-ahead] + dur[order[:-ahead]] > t[ahead:] + slack))
            dur[order[at]] = t[at + 1] - t[at]
            clipped += len(at)
    endless = dur > DAY_NS
    dur[endless] = 0
    return clipped + int(endless.sum())


def _overlapping(table: Table) -> int:
    kernels = np.flatnonzero(table.kind == KERNEL)
    gpu, stream, start = table.gpu[kernels], table.stream[kernels], table.start_ns[kernels]
    order = _by_stream(gpu, stream, start)
    end = (start + table.dur_ns[kernels])[order]
    same = (np.diff(gpu[order]) == 0) & (np.diff(stream[order]) == 0)
    return int((same & (start[order][1:] < end[:-1])).sum())


def _orphans(into: Collector, table: Table) -> int:
    """Kernels whose launch the file does not hold."""
    kernel = table.kind == KERNEL
    found = np.zeros(len(table), bool)
    for process, runtime in enumerate(into.runtime):
        mine = table.process == process
        found[mine] = np.isin(table.correlation[mine], np.frombuffer(runtime, np.int64))
    return int((kernel & ~found).sum())


def _capture(into: Collector, table: Table, launches: Launches) -> str:
    if into.graph_summary:
        return "graph-summary"
    plain = ~launches.is_graph
    if into.captures and plain.sum() >= 8:
        # while a graph is captured, launches are recorded but nothing runs
        ran = np.zeros(len(launches), bool)
        for process in range(len(into.runtime)):
            mine = launches.process == process
            ran[mine] = np.isin(launches.correlation[mine], table.correlation[table.process == process])
        if (plain & ~ran).sum() * 2 > plain.sum():
            return "graph-capture"
    if not len(table):
        return "cpu-only"
    return "gpu" if len(launches) else "gpu-only"
