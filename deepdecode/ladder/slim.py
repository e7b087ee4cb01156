"""A trace with what a GPU timeline needs, compressed: `python -m deepdecode.ladder.slim WHOLE TARGET`.

A process of its own, which loads no torch, so that it works beside the next measurement and does not hold it up.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from deepdecode.trace.columns import GRAPH_LAUNCH, LAUNCH, call_kind

# GPU work, what launched it, and named ranges
KEPT = ("kernel", "gpu_memcpy", "gpu_memset", "user_annotation")
ARGS = ("device", "stream", "correlation", "grid", "block", "graph id", "graph node id")
FACTS = ("schemaVersion", "deviceProperties", "baseTimeNanoseconds")


def write_slim(document: dict[str, Any], target: Path) -> None:
    """Write the trace's GPU work, launches and ranges, without the names of the machine or of its files."""
    events = []
    for event in document.get("traceEvents", []):
        kind = event.get("cat")
        launches = kind in ("cuda_runtime", "cuda_driver") and call_kind(event.get("name", "")) in (LAUNCH, GRAPH_LAUNCH)
        if kind in KEPT or launches:
            args = event.get("args") or {}
            events.append({**event, "args": {name: args[name] for name in ARGS if name in args}})
    kept = {name: document[name] for name in FACTS if name in document}
    text = json.dumps({**kept, "traceEvents": events}, separators=(",", ":"))
    with open(target, "wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        packed.write(text.encode())


class Slimming:
    """Traces being written by processes beside this one; `wait` for them at the end."""

    def __init__(self) -> None:
        self._running: list[tuple[subprocess.Popen[str], Path, Path]] = []

    def start(self, whole: Path, target: Path) -> None:
        """Begin to write `target` from `whole`, which is deleted when it is done."""
        command = [sys.executable, "-m", "deepdecode.ladder.slim", str(whole), str(target)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self._running.append((process, whole, target))

    def wait(self) -> list[str]:
        """Wait for all; one line for each that failed."""
        failed = []
        for process, whole, target in self._running:
            words = process.communicate()[1].strip().splitlines()
            whole.unlink(missing_ok=True)
            if process.returncode:
                failed.append(f"{target.name}: {words[-1] if words else 'not written'}")
        self._running.clear()
        return failed


if __name__ == "__main__":
    write_slim(json.loads(Path(sys.argv[1]).read_text(errors="replace"), strict=False), Path(sys.argv[2]))
