"""Result files of `sglang.bench_serving` (JSON lines) and `vllm bench serve` (JSON), compared concurrency by concurrency.

Both write one object per run under almost the same names. Repeats of one concurrency in a file give a median and a spread.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepdecode.trace.model import TraceError
from deepdecode.trace.render import quote

SCHEMA = 1  # of ServingComparison as JSON
MAX_BYTES = 512 << 20
SINGLE_RUN_NOISE = 0.05  # one run shows no spread; smaller differences are not called
NOISE_FLOOR = 0.01
LENGTH_SLACK = 0.02  # mean prompt and output length per request

METRICS = ("ttft", "tpot", "itl", "e2el")
STATS = ("mean", "median", "std", "p90", "p95", "p99")
_LATENCY = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el|e2e_latency)_ms")
# settings that make two runs different work, by the names either tool uses
SETTINGS = {
    "tool": (),
    "backend": ("backend",),
    "model": ("model_id", "model"),
    "dataset": ("dataset_name",),
    "request rate": ("request_rate",),
    "burstiness": ("burstiness",),
    "prompt length asked": ("random_input_len",),
    "output length asked": ("random_output_len", "sharegpt_output_len"),
    "length range": ("random_range_ratio",),
    "requests": ("num_prompts",),
}
REFUSALS = ("same-file", "settings-mismatch", "length-mismatch", "failed-requests", "no-common-level")
LARGEST = 1e15  # rates, lengths and times beyond are damage


@dataclass(frozen=True)
class Point:
    """One run of the tool, at one concurrency. Latencies are milliseconds by (statistic, metric)."""

    concurrency: int | None
    settings: dict[str, str]
    completed: int
    failed: int
    prompt_len: float
    output_len: float
    output_tps: float
    total_tps: float | None
    request_tps: float | None
    accept_length: float | None
    latency_ms: dict[str, float]  # "median_ttft" -> ms


@dataclass(frozen=True)
class Serving:
    """One result file."""

    label: str
    path: str
    sha256: str
    tool: str  # "sglang" or "vllm"
    points: tuple[Point, ...]
    bad_lines: int


@dataclass(frozen=True)
class Cell:
    value: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True)
class Row:
    """One metric at one concurrency; `ratios` are over the first file, None where either lacks it."""

    concurrency: str
    metric: str  # "output_tps" or e.g. "median_ttft"
    cells: tuple[Cell | None, ...]
    ratios: tuple[float | None, ...]


@dataclass(frozen=True)
class Note:
    code: str
    severity: str  # "refuse", "warn" or "note"
    text: str


@dataclass(frozen=True)
class ServingVerdict:
    concurrency: str
    after: int
    word: str  # "faster", "slower", "no change", "cannot tell" (within the repeats' range) by output tokens per second
    text: str


@dataclass(frozen=True)
class ServingComparison:
    schema: int
    files: tuple[Serving, ...]
    rows: tuple[Row, ...]
    notes: tuple[Note, ...]
    verdicts: tuple[ServingVerdict, ...]
    allowed: tuple[str, ...]

    @property
    def refused(self) -> bool:
        return any(note.severity == "refuse" for note in self.notes)

    @property
    def regressed(self) -> bool:
        return any(verdict.word == "slower" for verdict in self.verdicts)


# ---- reading


def is_serving(path: str | Path) -> bool:
    """Whether a file looks like a serving benchmark's result, from what its first and last 64 KB name."""
    try:
        with open(path, "rb") as file:
            head = file.read(65536)
            file.seek(max(0, file.seek(0, 2) - 65536))
            text = head + file.read()
    except OSError:
        return False
    return head.lstrip()[:1] in (b"{", b"[") and b'"output_throughput"' in text and b'ttft_ms"' in text


def read_serving(path: str | Path, label: str) -> Serving:
    """Read every run of a result file; a line that is no run is counted, not fatal.

    Raises:
        TraceError: the file is too large or holds no run.
        OSError: it cannot be read.
    """
    path = Path(path)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise TraceError(
            f"compare: {path.name} must be at most {MAX_BYTES >> 20} MB, got {size >> 20} MB", "save without details"
        )
    data = path.read_bytes()
    records, bad = _records(data.decode("utf-8-sig", "replace"))
    runs = [record for record in records if isinstance(record, dict) and _number(record.get("output_throughput")) is not None]
    bad += len(records) - len(runs)
    if not runs:
        raise TraceError(f"compare: {path.name} holds no run with output_throughput", "give a file written by --save-result")
    tool = "vllm" if "model_id" in runs[0] or "e2el" in " ".join(runs[0]) else "sglang"
    points = tuple(_point(run, tool) for run in runs)
    return Serving(label, str(path), hashlib.sha256(data).hexdigest(), tool, points, bad)


def _records(text: str) -> tuple[list, int]:
    """One document, a list of them, or one per line; `Infinity` and `NaN` occur and are read."""
    try:
        whole = json.loads(text)
        return (whole if isinstance(whole, list) else [whole]), 0
    except (ValueError, RecursionError):
        pass
    records, bad = [], 0
    for line in text.splitlines():
        if line.strip():
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError):
                bad += 1
    return records, bad


def _number(value: object) -> float | None:
    """A rate, a count or a time: finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if 0 <= value < LARGEST else None


def _point(run: dict, tool: str) -> Point:
    completed = int(_number(run.get("completed", run.get("num_prompts"))) or 0)
    settings = {"tool": tool}
    for name, keys in SETTINGS.items():
        value = next((run[key] for key in keys if run.get(key) is not None), None)
        if value is not None:
            settings[name] = _setting(value)
    server = run.get("server_info")
    if isinstance(server, dict) and isinstance(server.get("model_path"), str):
        settings.setdefault("model", server["model_path"])
    latency = {}
    for key, value in run.items():
        match, number = _LATENCY.fullmatch(key), _number(value)
        if match and number is not None:
            latency[f"{match[1]}_{'e2el' if match[2] == 'e2e_latency' else match[2]}"] = number
    concurrency = _number(run.get("max_concurrency"))
    asked = int(_number(run.get("num_prompts")) or 0)
    failed = _number(run.get("failed"))
    return Point(
        concurrency=int(concurrency) or None if concurrency else None,
        settings=settings,
        completed=completed,
        failed=int(failed) if failed is not None else max(0, asked - completed),
        prompt_len=(_number(run.get("total_input_tokens")) or 0) / max(1, completed),
        output_len=(_number(run.get("total_output_tokens")) or 0) / max(1, completed),
        output_tps=_number(run.get("output_throughput")) or 0.0,
        total_tps=_number(run.get("total_token_throughput", run.get("total_throughput"))),
        request_tps=_number(run.get("request_throughput")),
        accept_length=_number(run.get("accept_length", run.get("spec_decode_acceptance_length"))),
        latency_ms=latency,
    )


def _setting(value: object) -> str:
    """`inf` is written as a string by one tool and as Infinity by the other."""
    if isinstance(value, float):
        return "inf" if math.isinf(value) else f"{value:g}"
    return str(value)[:200]


# ---- comparing


def compare_serving(files: Sequence[Serving], allow: Sequence[str] = ()) -> ServingComparison:
    """Compare result files, each with the first, at every concurrency that occurs.

    Raises:
        ValueError: fewer than two files or an unknown code in `allow`.
    """
    if len(files) < 2:
        raise ValueError(f"compare: result files must be two or more, got {len(files)}")
    for code in allow:
        if code not in REFUSALS:
            raise ValueError(f"compare: allow must be one of {', '.join(REFUSALS)}, got {code}")
    levels = sorted({_level(point) for file in files for point in file.points}, key=_level_order)
    rows = tuple(row for level in levels for row in _rows(files, level))
    notes = [note for level in levels for note in _notes(files, level)]
    notes = _file_notes(files) + _merged(notes)
    notes = [Note(n.code, "warn", n.text + " (accepted by the caller)") if n.code in allow else n for n in notes]
    refused = any(note.severity == "refuse" for note in notes)
    verdicts = () if refused else tuple(_verdict(files, row, i) for row in rows for i in _judged(row))
    return ServingComparison(SCHEMA, tuple(files), rows, tuple(notes), verdicts, tuple(allow))


def _level(point: Point) -> str:
    if point.concurrency:
        return f"C={point.concurrency}"
    rate = point.settings.get("request rate", "inf")
    return "unlimited" if rate == "inf" else f"rate {rate}"


def _level_order(level: str) -> tuple[str, float]:
    kind, _, number = level.replace("=", " ").partition(" ")
    try:
        return kind, float(number)
    except ValueError:
        return kind, 0.0


def _rows(files: Sequence[Serving], level: str) -> list[Row]:
    here = [[point for point in file.points if _level(point) == level] for file in files]
    names = ["output_tps"]
    present = {key for points in here for point in points for key in point.latency_ms}
    for metric in METRICS:
        stats = sorted({key.rsplit("_", 1)[0] for key in present if key.endswith(f"_{metric}")}, key=_stat_order)
        names += [f"{stat}_{metric}" for stat in stats]
    rows = []
    for name in names:
        cells = tuple(_cell([_value(point, name) for point in points]) for points in here)
        first = cells[0]
        ratios = tuple(cell.value / first.value if cell and first and first.value else None for cell in cells)
        rows.append(Row(level, name, cells, ratios))
    return rows


def _stat_order(stat: str) -> tuple[int, float]:
    return (STATS.index(stat), 0) if stat in STATS[:3] else (len(STATS), float(stat[1:]))


def _value(point: Point, name: str) -> float | None:
    return point.output_tps if name == "output_tps" else point.latency_ms.get(name)


def _cell(values: Sequence[float | None]) -> Cell | None:
    known = [value for value in values if value is not None]
    return Cell(float(np.median(known)), min(known), max(known), len(known)) if known else None


def _file_notes(files: Sequence[Serving]) -> list[Note]:
    out = []
    for i, file in enumerate(files):
        twins = [other.label for other in files[:i] if other.sha256 == file.sha256]
        if twins:
            out.append(Note("same-file", "refuse", f"{quote(file.label)} and {quote(twins[0])} are the same file"))
        if not {_level(p) for p in file.points} & {_level(p) for p in files[0].points}:
            text = f"{quote(files[0].label)} and {quote(file.label)} have no concurrency in common"
            out.append(Note("no-common-level", "refuse", text))
        if file.bad_lines:
            out.append(Note("bad-lines", "warn", f"{file.bad_lines} records of {quote(file.label)} could not be read"))
    return out


def _notes(files: Sequence[Serving], level: str) -> list[tuple[str, Note]]:
    here = [(file, [point for point in file.points if _level(point) == level]) for file in files]
    out = []
    if not all(points for _, points in here):
        missing = ", ".join(quote(file.label) for file, points in here if not points)
        out.append((level, Note("missing-level", "note", f"not in {missing}")))
    here = [(file, points) for file, points in here if points]
    for name in SETTINGS:
        values = {point.settings[name] for _, points in here for point in points if name in point.settings}
        if len(values) > 1:
            each = ", ".join(
                f"{quote(' or '.join(sorted({p.settings.get(name, 'unknown') for p in points})))} in {quote(file.label)}"
                for file, points in here
            )
            out.append((level, Note("settings-mismatch", "refuse", f"{name} differs: {each}")))
    for name, what in (("prompt_len", "prompts"), ("output_len", "outputs")):
        lengths = [float(np.mean([getattr(point, name) for point in points])) for _, points in here]
        if lengths and max(lengths) > (1 + LENGTH_SLACK) * min(lengths):
            each = ", ".join(f"{length:.1f} in {quote(file.label)}" for length, (file, _) in zip(lengths, here, strict=True))
            out.append((level, Note("length-mismatch", "refuse", f"{what} have different mean lengths in tokens: {each}")))
    for file, points in here:
        failed = sum(point.failed for point in points)
        if not all(point.completed for point in points):
            out.append((level, Note("failed-requests", "refuse", f"no request was completed in a run of {quote(file.label)}")))
        elif failed:
            out.append((level, Note("failed-requests", "refuse", f"{failed} requests failed in {quote(file.label)}")))
    return out


def _merged(notes: Sequence[tuple[str, Note]]) -> list[Note]:
    """The same sentence at several concurrencies is one note."""
    levels: dict[Note, list[str]] = {}
    for level, note in notes:
        levels.setdefault(note, []).append(level)
    return [Note(note.code, note.severity, f"{', '.join(where)}: {note.text}") for note, where in levels.items()]


def _judged(row: Row) -> list[int]:
    return [i for i in range(1, len(row.cells)) if row.cells[i] and row.cells[0]] if row.metric == "output_tps" else []


def _verdict(files: Sequence[Serving], row: Row, after: int) -> ServingVerdict:
    a, b = row.cells[0], row.cells[after]
    assert a is not None  # `_judged` chose it
    assert b is not None
    if min(a.runs, b.runs) > 1:
        noise, said = max(a.high - a.low, b.high - b.low, NOISE_FLOOR * a.value), "the range of the repeats"
    else:
        noise, said = SINGLE_RUN_NOISE * max(a.value, b.value), f"{SINGLE_RUN_NOISE:.0%}, as a single run shows no spread"
    change = b.value - a.value
    word = "faster" if change > 0 else "slower"
    if abs(change) <= noise:
        word = "cannot tell" if min(a.runs, b.runs) > 1 and abs(change) > NOISE_FLOOR * a.value else "no change"
    ratio = f", {b.value / a.value:.2f}x" if a.value else ""
    numbers = f"{a.value:.2f} -> {b.value:.2f} output tok/s{ratio}"
    text = f"{row.concurrency}, {quote(files[0].label)} -> {quote(files[after].label)}: {word}, {numbers} (noise: {said})"
    return ServingVerdict(row.concurrency, after, word, text)
