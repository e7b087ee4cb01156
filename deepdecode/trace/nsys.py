"""Nsight Systems sqlite exports. The file is not trusted: read-only, tables and plain columns only, time limited."""

import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np

from deepdecode.trace.columns import (
    CAPTURES,
    GRAPH_LAUNCH,
    MAX_ANNOTATION,
    MAX_ANNOTATIONS,
    MAX_NAME,
    MAX_NS,
    ROW,
    Collector,
    call_kind,
)
from deepdecode.trace.model import KERNEL, MEMCPY, MEMSET, Gpu, Source, TraceError
from deepdecode.trace.stream import Progress, Stream

PREFIX = "CUPTI_ACTIVITY_KIND_"
COPY_KINDS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
BATCH = 20_000
MAX_PROCESSES = 2048
MAX_UNPACKED = 8 << 30  # of a .gz, into the temporary folder
SECONDS, SECONDS_PER_MB = 20.0, 0.2  # a sound export reads at 20 MB/s and more


def read(path: Path, file: int, into: Collector, progress: Progress | None = None) -> Source:
    """Read one export, .sqlite or .sqlite.gz, into the collector."""
    with _unpacked(path, progress) as (database, source):
        try:
            uri = f"file:{quote(str(database.resolve()))}?mode=ro&immutable=1"
            with closing(sqlite3.connect(uri, uri=True)) as connection:
                _Export(path, connection, database.stat().st_size).read(file, into)
        except (sqlite3.Error, OverflowError, UnicodeError, MemoryError) as e:
            if "interrupted" in str(e):
                raise TraceError(f"{path}: export must be readable in bounded time, got one that is not") from None
            raise TraceError(f"{path}: file must be an intact Nsight Systems export, got {str(e)[:200]}") from None
    return source


def _sane(times: np.ndarray) -> np.ndarray:
    return (times > -MAX_NS) & (times < MAX_NS)  # np.abs(-2**63) is negative


def _closed(path: Path) -> None:
    """Refuse an export with changes that only its log holds: an immutable reader sees the pages before them."""
    for suffix, started in (("-wal", b""), ("-journal", b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7")):
        log = Path(f"{path}{suffix}")
        if log.is_file():
            with open(log, "rb") as file:
                if (head := file.read(8)) and head.startswith(started):
                    raise TraceError(
                        f"{path}: export must be complete, got changes that wait in {log.name}",
                        "let its writer finish, or close it: `sqlite3 EXPORT 'PRAGMA wal_checkpoint(TRUNCATE)'`",
                    )


@contextmanager
def _unpacked(path: Path, progress: Progress | None) -> Iterator[tuple[Path, Source]]:
    stream = Stream(path, progress)
    with open(path, "rb") as f:
        packed = f.read(2) == b"\x1f\x8b"
    if not packed:
        _closed(path.resolve())
        for _ in stream:
            pass
        yield path, Source(str(path), stream.sha256, "nsys-sqlite", stream.raw_bytes)
        return
    handle, name = tempfile.mkstemp(suffix=".sqlite", prefix="deepdecode-")
    try:
        with os.fdopen(handle, "wb") as out:
            for block in stream:
                out.write(block)
                if stream.out_bytes > MAX_UNPACKED:
                    raise TraceError(f"{path}: .gz must hold at most {MAX_UNPACKED >> 30} GB, got more", "unpack it first")
        if stream.truncated:
            raise TraceError(f"{path}: .gz must be whole, got one that ends early")
        yield Path(name), Source(str(path), stream.sha256, "nsys-sqlite", stream.raw_bytes)
    finally:
        os.unlink(name)


class _Export:
    def __init__(self, path: Path, connection: sqlite3.Connection, size: int):
        self.path = path
        self.sql = connection
        deadline = time.monotonic() + SECONDS + SECONDS_PER_MB * size / 1e6
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 50_000)
        connection.text_factory = lambda b: b.decode("utf-8", "replace")
        connection.execute("PRAGMA trusted_schema = OFF")
        # names that appear as views or virtual tables are as good as missing
        found = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%' LIMIT 10000"
        )
        self.tables = {name for (name,) in found if isinstance(name, str)}
        self.processes: dict[int, int] = {}

    def columns(self, table: str) -> set[str]:
        """Stored columns: table_info leaves out generated ones."""
        if table not in self.tables:
            return set()
        return {row[1] for row in self.sql.execute(f'PRAGMA table_info("{table}")')}

    def select(self, table: str, wanted: dict[str, str], where: str = "") -> Iterator[np.ndarray]:
        """Batches of [n, len(wanted)] int64; `wanted` maps a column to what stands in where it is missing."""
        have = self.columns(table)
        terms = [f'coalesce(CAST("{c}" AS INTEGER), {default})' if c in have else default for c, default in wanted.items()]
        cursor = self.sql.execute(f'SELECT {", ".join(terms)} FROM "{table}" {where}')
        while rows := cursor.fetchmany(BATCH):
            yield np.array(rows, dtype=np.int64).reshape(len(rows), len(wanted))

    def read(self, file: int, into: Collector) -> None:
        activities = [t for t in ("KERNEL", "MEMCPY", "MEMSET") if PREFIX + t in self.tables]
        if not activities and PREFIX + "RUNTIME" not in self.tables and PREFIX + "GRAPH_TRACE" not in self.tables:
            raise TraceError(
                f"{self.path}: export must hold CUDA activities ({PREFIX}KERNEL), got {len(self.tables)} tables without",
                "record with `nsys profile --trace=cuda,nvtx`",
            )
        before = len(into.rows)
        for kind, table in ((KERNEL, "KERNEL"), (MEMCPY, "MEMCPY"), (MEMSET, "MEMSET")):
            if PREFIX + table in self.tables:
                self._activities(file, kind, PREFIX + table, into)
        nodes = any((rows[:, 0] > 0).any() for rows in self._if("KERNEL", {"graphNodeId": "0"}))
        graphs = sum(len(rows) for rows in self._if("GRAPH_TRACE", {"start": "0"}))
        if graphs and not nodes:
            into.graph_summary = True
            into.events += graphs
            into.notes.append(
                f"{graphs} CUDA graph launches were recorded as one range each, without their kernels:"
                " record again with `nsys profile --cuda-graph-trace=node`"
            )
        self._launches(file, into)
        self._nvtx(file, into)
        self._gpus(file, into)
        if len(into.rows) == before and not graphs:
            into.notes.append(f"{self.path.name} holds no GPU activity")

    def _if(self, table: str, wanted: dict[str, str]) -> Iterator[np.ndarray]:
        return self.select(PREFIX + table, wanted) if PREFIX + table in self.tables else iter(())

    def process(self, file: int, pids: np.ndarray, into: Collector) -> np.ndarray:
        """globalPid, or a globalTid with its thread bits cleared -> the collector's process numbers."""
        distinct, index = np.unique(pids & ~0xFFFFFF, return_inverse=True)
        if len(self.processes) + len(distinct) > MAX_PROCESSES:
            raise TraceError(f"{self.path}: export must come from at most {MAX_PROCESSES} processes, got more")
        for pid in distinct.tolist():
            if pid not in self.processes:
                self.processes[pid] = into.process(file)
        return np.array([self.processes[pid] for pid in distinct.tolist()], np.int64)[index.reshape(-1)]

    def _activities(self, file: int, kind: int, table: str, into: Collector) -> None:
        have = self.columns(table)
        wanted = {"start": "NULL", "end": "NULL", "deviceId": "0", "streamId": "0", "correlationId": "-1"}
        wanted |= {"globalPid": "0", "graphId": "-1", "graphNodeId": "-1", "gridX": "0", "gridY": "0", "gridZ": "0"}
        title = next((c for c in ("demangledName", "shortName", "mangledName", "nameId") if c in have), "copyKind")
        wanted[title] = "0"
        if not {"start", "end"} <= have:
            raise TraceError(
                f"{self.path}: {table} must have the columns start and end, got {', '.join(sorted(have)) or 'none'}"
            )
        names = self._names(table, title, kind, into)
        where = "WHERE typeof(\"start\") = 'integer' AND typeof(\"end\") = 'integer'"
        total = self.sql.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]
        read = 0
        for rows in self.select(table, wanted, where):
            read += len(rows)
            start, end = rows[:, 0], rows[:, 1]
            sane = _sane(start) & _sane(end)
            into.impossible += int((~sane).sum())
            rows = rows[sane]
            start, dur = rows[:, 0], rows[:, 1] - rows[:, 0]
            into.impossible += int((dur < 0).sum())
            out = np.empty((len(rows), ROW), np.int64)
            out[:, 0] = rows[:, 2]
            out[:, 1] = self.process(file, rows[:, 5], into)
            out[:, 2] = rows[:, 3]
            out[:, 3] = start
            out[:, 4] = np.maximum(dur, 0)
            out[:, 5] = [names.get(i, -1) for i in rows[:, 11].tolist()]
            out[out[:, 5] < 0, 5] = into.name_id(None) if (out[:, 5] < 0).any() else 0
            out[:, 6] = kind
            out[:, 7] = rows[:, 4]
            out[:, 8] = np.where(rows[:, 6] > 0, rows[:, 6], -1)
            out[:, 9] = np.where(rows[:, 7] > 0, rows[:, 7], -1)
            out[:, 10] = np.clip(rows[:, 8:11], 0, 1 << 20).prod(axis=1)
            into.rows.frombytes(out.tobytes())
            into.events += len(rows)
        into.bad += total - read

    def _names(self, table: str, title: str, kind: int, into: Collector) -> dict[int, int]:
        if kind == MEMSET:
            return dict.fromkeys([0], into.name_id("Memset (Device)")) if title == "copyKind" else {}
        if kind == MEMCPY:
            kinds = {row[0] for rows in self.select(table, {title: "0"}) for row in np.unique(rows, axis=0).tolist()}
            return {k: into.name_id(f"Memcpy {COPY_KINDS.get(k, 'other')}") for k in sorted(kinds)}
        if "StringIds" not in self.tables or not {"id", "value"} <= self.columns("StringIds"):
            return {}
        query = (
            f"SELECT id, substr(CAST(value AS TEXT), 1, {MAX_NAME}) FROM StringIds"
            f' WHERE id IN (SELECT DISTINCT CAST("{title}" AS INTEGER) FROM "{table}")'
        )
        return {i: into.name_id(value) for i, value in self.sql.execute(query) if type(i) is int}

    def _launches(self, file: int, into: Collector) -> None:
        table = PREFIX + "RUNTIME"
        have = self.columns(table)
        if not {"start", "end", "correlationId", "nameId"} <= have or "StringIds" not in self.tables:
            return
        query = f'SELECT id, CAST(value AS TEXT) FROM StringIds WHERE id IN (SELECT DISTINCT nameId FROM "{table}")'
        kind = {i: call_kind(name or "") for i, name in self.sql.execute(query)}
        wanted = {"start": "0", "end": "0", "correlationId": "-1", "globalTid": "0", "nameId": "0"}
        for rows in self.select(table, wanted):
            into.events += len(rows)
            rows = rows[_sane(rows[:, 0]) & _sane(rows[:, 1])]
            process = self.process(file, rows[:, 3], into)
            for p in np.unique(process).tolist():
                into.runtime[p].frombytes(rows[process == p, 2].tobytes())
            kinds = np.array([kind.get(i, 0) for i in rows[:, 4].tolist()], np.int64)
            into.captures += int((kinds == CAPTURES).sum())
            keep = (kinds != 0) & (kinds != CAPTURES)
            rows, process, kinds = rows[keep], process[keep], kinds[keep]
            dur = np.maximum(rows[:, 1] - rows[:, 0], 0)
            out = np.stack([process, rows[:, 3] & 0xFFFFFF, rows[:, 0], dur, rows[:, 2], kinds == GRAPH_LAUNCH], axis=1)
            into.calls.frombytes(out.astype(np.int64).tobytes())

    def _nvtx(self, file: int, into: Collector) -> None:
        have = self.columns("NVTX_EVENTS")
        if not {"start", "end", "text", "globalTid"} <= have:
            return
        text = 'CAST("text" AS TEXT)'
        if "textId" in have and {"id", "value"} <= self.columns("StringIds"):
            text = f"coalesce({text}, (SELECT CAST(value AS TEXT) FROM StringIds WHERE id = textId))"
        query = (
            f"SELECT substr({text}, 1, {MAX_ANNOTATION}),"
            ' CAST("start" AS INTEGER), CAST("end" AS INTEGER), CAST(globalTid AS INTEGER)'
            f" FROM NVTX_EVENTS WHERE typeof(\"end\") = 'integer' AND typeof(\"start\") = 'integer' LIMIT {MAX_ANNOTATIONS + 1}"
        )
        for name, start, end, tid in self.sql.execute(query):
            if name and abs(start) < MAX_NS and abs(end) < MAX_NS:
                tid = tid or 0
                process = int(self.process(file, np.array([tid], np.int64), into)[0])
                into.annotate(name, start, end - start, process, tid & 0xFFFFFF, False)
                into.events += 1

    def _gpus(self, file: int, into: Collector) -> None:
        have = self.columns("TARGET_INFO_GPU")
        if not {"id", "name"} <= have:
            return
        sms = "smCount" if "smCount" in have else "0"
        query = f"SELECT CAST(id AS INTEGER), CAST(name AS TEXT), CAST({sms} AS INTEGER) FROM TARGET_INFO_GPU LIMIT 1024"
        for device, name, count in self.sql.execute(query):
            into.gpus[file, device or 0] = Gpu(device or 0, 0, None, name or "", max(0, count or 0))
