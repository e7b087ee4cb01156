"""Bytes of a trace file: hashed and decompressed by a second thread, block by block, with memory bounded."""

import hashlib
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from deepdecode.trace.model import TraceError

BLOCK = 2 << 20
BOMB_FLOOR = 256 << 20  # below this any ratio is harmless
BOMB_RATIO = 200  # traces compress 10- to 50-fold

Progress = Callable[[int, int], None]  # bytes read so far, bytes of the file


def _inflater():
    try:
        from isal import isal_zlib  # three times as fast as zlib

        return isal_zlib.decompressobj(31)
    except ImportError:
        return zlib.decompressobj(31)


class Stream:
    """One pass over a file. After iteration: `sha256`, `raw_bytes`, and `truncated` for a .gz that ends early."""

    def __init__(self, path: Path, progress: Progress | None = None):
        self.path = path
        self.size = path.stat().st_size
        self.progress = progress
        self.raw_bytes = 0
        self.out_bytes = 0
        self.truncated = False
        self.sha256 = ""
        self._stop = threading.Event()
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(maxsize=2)

    def __iter__(self) -> Iterator[bytes]:
        thread = threading.Thread(target=self._run, name="deepdecode-trace-read", daemon=True)
        thread.start()
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                if self.progress:
                    self.progress(self.raw_bytes, self.size)
                yield item
        finally:
            self._stop.set()
            while thread.is_alive():
                try:
                    self._queue.get(timeout=0.05)
                except queue.Empty:
                    continue
            thread.join()

    def _put(self, item: bytes | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def _run(self) -> None:
        try:
            digest = hashlib.sha256()
            with open(self.path, "rb") as file:
                magic = file.peek(2)[:2]
                inflate = _inflater() if magic == b"\x1f\x8b" else None
                while not self._stop.is_set() and (raw := file.read(BLOCK if inflate is None else BLOCK >> 3)):
                    digest.update(raw)
                    self.raw_bytes += len(raw)
                    if inflate is None:
                        self.out_bytes += len(raw)
                        self._put(raw)
                    elif not self.truncated:
                        inflate = self._inflate(inflate, raw)
                if inflate is not None and not (self.truncated or self._stop.is_set() or inflate.eof):
                    self._emit(inflate.flush())
                    self.truncated = not inflate.eof
            self.sha256 = digest.hexdigest()
            self._put(None)
        except BaseException as e:
            self._put(e)

    def _inflate(self, inflate, raw: bytes):
        while raw and not self._stop.is_set():
            if inflate.eof:
                # a second gzip member may follow; zero padding may too
                raw = raw.lstrip(b"\0")
                if not raw.startswith(b"\x1f"):
                    self.truncated = self.truncated or bool(raw)
                    return inflate
                inflate = _inflater()
            try:
                out = inflate.decompress(raw, BLOCK)
            except Exception:  # zlib.error or isal's own: what came before it is good
                self.truncated = True
                return inflate
            raw = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            self._emit(out)
        return inflate

    def _emit(self, out: bytes) -> None:
        self.out_bytes += len(out)
        if self.out_bytes > BOMB_FLOOR and self.out_bytes > BOMB_RATIO * self.raw_bytes:
            raise TraceError(
                f"{self.path}: file must expand at most {BOMB_RATIO}-fold, got {self.out_bytes >> 20} MB"
                f" out of {max(1, self.raw_bytes >> 10)} kB",
                "this is not a trace, or a decompression bomb",
            )
        if out:
            self._put(out)
