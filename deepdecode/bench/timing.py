"""Time calls on a GPU, and write what was measured as a result file."""

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepdecode.bench.files import save_results

SCHEMA = 1


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of the repeats, the fastest and the slowest of them."""

    us: float
    low: float
    high: float


def time_graph(
    calls: Sequence[Callable[[], Any]], *, calls_per_graph: int = 20, repeats: int = 7, limit_s: float = 1.0
) -> Timing:
    """Capture the calls, one after the other and over again, in a CUDA graph, and time its replays.

    One call: its inputs stay in L2, which is the warm time. Many calls over distinct inputs: the rotated time.
    A sample is several replays in a row, so that the launch of a graph does not count; slow calls are repeated less often,
    so that all samples take `limit_s` together, three samples at least.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    once = _seconds(calls[0])
    count = max(len(calls), min(calls_per_graph, max(1, int(limit_s / repeats / once))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(count):
            calls[n % len(calls)]()
    graph.replay()
    replay = _seconds(graph.replay)
    replays = max(1, min(10, int(limit_s / repeats / replay)))
    samples = []
    for _ in range(max(3, min(repeats, int(limit_s / replay)))):
        samples.append(_seconds(lambda: [graph.replay() for _ in range(replays)]) * 1e6 / (count * replays))
    samples.sort()
    return Timing(samples[len(samples) // 2], samples[0], samples[-1])


def _seconds(work: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def copy_bandwidth() -> float:
    """TB/s of a large device-to-device copy, bytes read and written counted."""
    # a kernel of elements: the copy engine, which copy_ would use, is slower
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    timing = time_graph([lambda: torch.neg(source, out=target)], calls_per_graph=4)
    return 2 * source.numel() * source.element_size() / timing.us / 1e6


def write_results(path: Path, rows: list[dict[str, Any]], *, command: str, commit: str, **facts: Any) -> None:
    """One result file: what ran, on what, and the rows. `facts` join the top level (measured bandwidth, ...)."""
    import triton

    device = torch.cuda.get_device_properties(0)
    document = {
        "schema": SCHEMA,
        "device": {"name": device.name, "arch": 10 * device.major + device.minor, "sms": device.multi_processor_count},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        **facts,
        "rows": rows,
    }
    save_results(path, document)


def need_gpu() -> None:
    """Figures come from a GPU.

    Raises:
        ValueError: there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench: a CUDA device must be present, got none")


def current_commit() -> str:
    """The commit of the working tree, "+" behind it if it has changes; "unknown" outside a repository."""
    root = Path(__file__).resolve().parents[2]
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
