"""Kineto / PyTorch Chrome traces: block by block, any layout, damaged events skipped and counted.

A block ends where one event's brace closes and the next one's opens. Should that place lie inside a string or inside
an event's arguments, the block does not decode, and it is taken apart event by event instead.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from deepdecode.trace.columns import CAPTURES, GRAPH_LAUNCH, HINT, MAX_NS, ROW, Collector, call_kind, clean
from deepdecode.trace.model import KERNEL, MEMCPY, MEMSET, Gpu, Source, TraceError
from deepdecode.trace.stream import Progress, Stream

MAX_EVENT = 32 << 20  # bytes without an event's end, or before "traceEvents": not a trace
MAX_PENDING = 1 << 20

NOT_A_TIME = -(1 << 62)
MAX_US = MAX_NS // 1000

# 2021 wrote Kernel, Memcpy, Memset, Runtime
KINDS: dict[str | None, int] = {
    "kernel": KERNEL,
    "gpu_memcpy": MEMCPY,
    "memcpy": MEMCPY,
    "gpu_memset": MEMSET,
    "memset": MEMSET,
}
KINDS |= {"Kernel": KERNEL, "Memcpy": MEMCPY, "Memset": MEMSET}
WORK, CALL, NOTE = 0, 1, 2
GROUPS: dict[str | None, int] = dict.fromkeys(KINDS, WORK)
GROUPS |= dict.fromkeys(("cuda_runtime", "cuda_driver", "runtime", "Runtime", "hip_runtime", "privateuse1_runtime"), CALL)
GROUPS |= dict.fromkeys(("user_annotation", "gpu_user_annotation"), NOTE)

_PLAIN = re.compile(rb"[0-9. ]*")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_KINETO = re.compile(rb'\}\s*,\s*\{\s*"ph"')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_NEXT = re.compile(r'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|args|s|bp)"\s*:)')
_END = re.compile(r"\}\s*(\])(?=\s*(?:[,}]|$))")
_SEPARATORS = re.compile(r"[,\s]*")


class _Args(msgspec.Struct, gc=False):
    device: Any = None
    stream: Any = None
    correlation: Any = None
    grid: list[int] | str | int | float | None = None
    graph: Any = msgspec.field(default=None, name="graph id")
    node: Any = msgspec.field(default=None, name="graph node id")


class _Event(msgspec.Struct, gc=False):
    ph: str | None = None
    cat: str | None = None
    name: str | int | float | None = None
    ts: msgspec.Raw = msgspec.Raw(b"")
    dur: msgspec.Raw = msgspec.Raw(b"")
    pid: Any = None
    tid: Any = None
    args: _Args | str | int | float | bool | list | None = None


_NO_ARGS = _Args()
_ARGS = ("device", "stream", "correlation", "grid", "graph id", "graph node id")
_scanner = json.JSONDecoder(strict=False, parse_float=str)
_decode = msgspec.json.Decoder(list[_Event]).decode


def ns(text: bytes) -> int | None:
    """Microseconds as written -> integer nanoseconds, without passing through a float; None if not a finite number."""
    text = text.strip(b' "')
    whole, _, part = text.partition(b".")
    try:
        if not part:
            value = int(whole) * 1000
        elif len(part) <= 3:
            value = int(whole or b"0") * 1000
            value += int(part) * (100, 10, 1)[len(part) - 1] * (-1 if whole.startswith(b"-") else 1)
        else:
            value = int(whole or b"0") * 1000
            value += (int(part[:3]) + (part[3:4] >= b"5")) * (-1 if whole.startswith(b"-") else 1)
            int(part)  # or it is no number
    except ValueError:
        try:
            exact = float(text) * 1000
        except ValueError:
            return None
        if not math.isfinite(exact):
            return None
        value = round(exact)
    return value if -MAX_NS < value < MAX_NS else None


def all_ns(texts: list[msgspec.Raw]) -> np.ndarray:
    """[n] int64 of `ns`, NOT_A_TIME where that is None; at once where every text has at most three decimals."""
    joined = b" ".join([*texts, b""])
    flat = np.frombuffer(joined, np.uint8)
    dots, ends = np.flatnonzero(flat == ord(".")), np.flatnonzero(flat == ord(" "))
    plain = _PLAIN.fullmatch(joined) is not None and len(ends) == len(texts) and (np.diff(ends, prepend=-1) > 1).all()
    if plain and len(dots) == len(ends) > 0:
        numbers = np.fromstring(joined.replace(b".", b" "), np.int64, sep=" ")
        decimals = ends - dots - 1
        paired = len(numbers) == 2 * len(texts) and (dots[1:] > ends[:-1]).all()
        if paired and (decimals > 0).all() and (decimals <= 3).all() and numbers.max(initial=0) < MAX_US:
            return numbers[0::2] * 1000 + numbers[1::2] * np.array([0, 100, 10, 1])[decimals]
    elif plain and len(ends) and not len(dots):
        numbers = np.fromstring(joined, np.int64, sep=" ")
        if len(numbers) == len(texts) and numbers.max(initial=0) < MAX_US:
            return numbers * 1000
    return np.array([NOT_A_TIME if (value := ns(bytes(text))) is None else value for text in texts], np.int64)


def _int(value: Any, default: int = -1) -> int:
    if type(value) is int:
        return value if -MAX_NS < value < MAX_NS else default
    if isinstance(value, str):
        digits = value.rsplit(" ", 1)[-1]
        return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 18 else default
    if isinstance(value, float) and math.isfinite(value) and abs(value) < MAX_NS:
        return int(value)
    return default


def _ints(values: list[Any], default: int = -1) -> np.ndarray:
    """[n] int64 of `_int`."""
    types = set(map(type, values))
    if types == {type(None)}:
        return np.full(len(values), default, np.int64)
    if types <= {int} and min(values, default=0) > -MAX_NS and max(values, default=0) < MAX_NS:
        return np.array(values, np.int64)
    return np.array([_int(v, default) for v in values], np.int64)


def _blocks(grids: list[Any]) -> np.ndarray:
    """[n] int64 thread blocks, 0 where the grid is not three whole numbers."""
    try:
        return np.maximum(_ints([x * y * z for x, y, z in grids], 0), 0)
    except (TypeError, ValueError):
        whole = [g if type(g) is list and len(g) == 3 else (0, 0, 0) for g in grids]
        return np.maximum(_ints([x * y * z for x, y, z in whole], 0), 0)


def _take(into: Collector, events: list[_Event], process: int) -> None:
    """Keep what is GPU work, a launch, or an annotation."""
    into.events += len(events)
    kept: tuple[list[_Event], ...] = ([], [], [])
    find = GROUPS.get
    for e in events:
        if e.ph == "X" and (group := find(e.cat)) is not None:
            kept[group].append(e)
    for e in kept[NOTE]:
        start, dur = ns(bytes(e.ts)), ns(bytes(e.dur) or b"0")
        if start is not None:
            into.annotate(str(e.name), start, dur or 0, process, _int(e.tid, 0), e.cat == "gpu_user_annotation")
    if kept[WORK]:
        _take_work(into, kept[WORK], process)
    if kept[CALL]:
        _take_calls(into, kept[CALL], process)


def _take_work(into: Collector, events: list[_Event], process: int) -> None:
    args = [e.args if type(e.args) is _Args else _NO_ARGS for e in events]
    start, dur = all_ns([e.ts for e in events]), all_ns([e.dur for e in events])
    bad = (start == NOT_A_TIME) | (dur == NOT_A_TIME) | (dur < 0)
    into.impossible += int(bad.sum())
    out = np.empty((len(events), ROW), np.int64)
    out[:, 0] = _ints([e.pid if a.device is None else a.device for a, e in zip(args, events, strict=True)], 0)
    out[:, 1] = process
    out[:, 2] = _ints([e.tid if a.stream is None else a.stream for a, e in zip(args, events, strict=True)], 0)
    out[:, 3] = start
    out[:, 4] = np.where(bad, 0, dur)
    out[:, 5] = [into.name_id(e.name) for e in events]
    out[:, 6] = [KINDS[e.cat] for e in events]
    out[:, 7] = _ints([a.correlation for a in args])
    out[:, 8] = _ints([a.graph for a in args])
    out[:, 9] = _ints([a.node for a in args])
    out[:, 10] = _blocks([a.grid for a in args])
    into.rows.frombytes(out[start != NOT_A_TIME].tobytes())


def _take_calls(into: Collector, events: list[_Event], process: int) -> None:
    correlation = _ints([e.args.correlation if type(e.args) is _Args else None for e in events])
    into.runtime[process].frombytes(correlation[correlation > 0].tobytes())
    for e, number in zip(events, correlation.tolist(), strict=True):
        name = e.name if type(e.name) is str else ""
        kind = call_kind(name)
        if kind == CAPTURES:
            into.captures += 1
        elif kind:
            start, dur = ns(bytes(e.ts)), ns(bytes(e.dur) or b"0")
            if start is not None:
                into.calls.extend((process, _int(e.tid, 0), start, max(dur or 0, 0), number, kind == GRAPH_LAUNCH))


def _take_damaged(into: Collector, body: bytes, process: int, last: bool) -> tuple[bytes, bytes | None]:
    """One event at a time. Returns an unfinished event, and what follows the list, None if its end was not seen.

    Control characters, NaN and bad UTF-8 are let through; other damage costs what lies before the next event.
    """
    text = body.decode("utf-8", "replace")
    good: list[_Event] = []
    bad = at = 0
    pending, tail = "", None
    lost = False  # between damage and the next event
    while (at := _SEPARATORS.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        if text[at] == "]" and not lost:
            tail = text[at:]
            break
        try:
            fields, end = _scanner.raw_decode(text, at)
        except (ValueError, RecursionError) as e:
            if not last and getattr(e, "pos", 0) >= len(text) and len(text) - at < MAX_PENDING:
                pending = text[at:]  # the block was cut inside this event
                break
            bad += not lost
            if (following := _NEXT.search(text, at)) is None:
                if end_of_list := _END.search(text, at):
                    tail = text[end_of_list.start(1) :]
                break
            at, lost = following.end(), True
            continue
        if isinstance(fields, dict) and (not lost or "ph" in fields):
            good.append(_from_dict(fields))
            lost = False
        elif not lost:
            bad, lost = bad + 1, True
        at = end
    sound = None if bad or "\ufffd" in text else _strict(text[:at])
    into.bad += bad
    if sound is None:
        into.recovered += len(good)
    _take(into, good if sound is None else sound, process)
    return pending.encode(), None if tail is None else tail.encode("utf-8", "replace")


def _strict(text: str) -> list[_Event] | None:
    try:
        return _decode("[" + text.strip(", \t\r\n") + "]")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _from_dict(fields: dict[str, Any]) -> _Event:
    args = fields.get("args")
    args = _Args(*(args.get(k) for k in _ARGS)) if isinstance(args, dict) else None
    if args and not (type(args.grid) is list and all(type(x) is int for x in args.grid)):
        args.grid = None
    ts, dur = (msgspec.Raw(str(fields.get(k, "")).encode("utf-8", "replace")) for k in ("ts", "dur"))
    ph, cat, name = (value if isinstance(value := fields.get(k), str) else None for k in ("ph", "cat", "name"))
    return _Event(ph, cat, name, ts, dur, fields.get("pid"), fields.get("tid"), args)


def read(path: Path, file: int, into: Collector, progress: Progress | None = None) -> Source:
    """Read one file into the collector."""
    stream = Stream(path, progress)
    process = into.process(file)
    head, rest, tail = b"", b"", None
    started = False
    for block in stream:
        if not started:
            head += block
            if (at := _start(head)) is None:
                if len(head) > MAX_EVENT:
                    raise TraceError(
                        f"{path}: file must hold a list of trace events, got none in its first {MAX_EVENT >> 20} MB"
                    )
                continue
            head, block, started = head[:at], head[at:], True
        if tail is not None:
            if len(tail) < MAX_EVENT >> 3:
                tail += block
            continue
        cut = _last_boundary(block)
        if cut is None:
            rest += block
            if len(rest) > MAX_EVENT:
                raise TraceError(
                    f"{path}: an event must be under {MAX_EVENT >> 20} MB, got no end of one in {len(rest) >> 20} MB"
                )
            continue
        try:
            events = _decode(b"".join((b"[", rest, memoryview(block)[: cut[0]], b"]")))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pending, tail = _take_damaged(into, rest + block[: cut[0]], process, last=False)
            if tail is not None:
                tail += b"," + block[cut[1] :]
                continue
            rest = (pending + b"," if pending else b"") + block[cut[1] :]
        else:
            _take(into, events, process)
            del events
            rest = block[cut[1] :]
    if not started:
        got = "a .gz that is cut or damaged before its first event" if stream.truncated else _what(head)
        raise TraceError(f"{path}: file must be a profiler trace, got {got}", HINT)
    if tail is None:
        _, tail = _take_damaged(into, rest, process, last=True)
    into.truncated |= stream.truncated or tail is None
    _facts(head, tail or b"", file, process, into)
    return Source(str(path), stream.sha256, "kineto", stream.raw_bytes)


def _start(head: bytes) -> int | None:
    """Where the first event would begin."""
    if match := _EVENTS.search(head):
        return match.end()
    text = head[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    return head.index(b"[") + 1 if text.startswith(b"[") else None


def _last_boundary(block: bytes) -> tuple[int, int] | None:
    """The end of the last whole event and the start of the next; the start that Kineto writes is surer than any brace."""
    near = max(0, len(block) - (1 << 16))
    for pattern, start in ((_KINETO, near), (_BETWEEN, near), (_BETWEEN, 0)):
        if found := list(pattern.finditer(block, start)):
            return found[-1].start() + 1, block.index(b"{", found[-1].start())
    return None


def _what(head: bytes) -> str:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text:
        return "an empty file"
    if not text.startswith(b"{"):
        return "something else"
    return 'JSON whose "traceEvents" is no list' if b'"traceEvents"' in text else 'JSON without "traceEvents"'


def _facts(head: bytes, tail: bytes, file: int, process: int, into: Collector) -> None:
    """Device names, rank and base time, from what stands before and after the events."""
    facts: dict[str, Any] = {}
    head = head[: m.start()] if (m := _EVENTS.search(head)) else b""
    for text in (head.rstrip(b", \t\r\n") + b"}", b"{" + tail.lstrip(b"], \t\r\n")):
        try:
            found = json.loads(text.decode("utf-8", "replace").lstrip("\ufeff"), strict=False)
        except (ValueError, RecursionError):
            continue
        facts.update(found if isinstance(found, dict) else {})
    rank = facts.get("distributedInfo")
    rank = _int(rank.get("rank")) if isinstance(rank, dict) else -1
    into.ranks[process] = rank if rank >= 0 else None
    into.base_ns[file] = max(0, _int(facts.get("baseTimeNanoseconds"), 0))
    properties = facts.get("deviceProperties")
    for p in properties if isinstance(properties, list) else []:
        if isinstance(p, dict):
            name = p.get("name")
            device = _int(p.get("id"), 0)
            into.gpus[file, device] = Gpu(
                device, process, None, clean(name) if isinstance(name, str) else "", max(0, _int(p.get("numSms"), 0))
            )
