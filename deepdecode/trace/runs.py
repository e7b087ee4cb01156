"""Profiles as the columns of a table: what each run is like, and its categories and kernels row by row.

Every number is a median per counted step of the busiest device.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepdecode.trace.model import CATEGORIES, WHOLE, DeviceProfile, Kernel, Profile

MIN_STEPS = 4  # with fewer the spread cannot be measured


@dataclass(frozen=True)
class Run:
    """One profile as it takes part; None or an empty string where it cannot be known."""

    label: str
    sha256: tuple[str, ...]
    format: str
    gpu: str
    gpu_count: int
    phase: str
    batch: int | None
    graph_mode: str
    steps: int
    step_signal: str
    agreement: float
    step_ns: int
    step_noise_ns: int
    busy_ns: int
    busy_noise_ns: int
    idle_ns: int
    launches: float
    graph_launches: float
    precisions: dict[str, float]
    unknown_share: float
    capture_sum_ns: int  # of all kernels of all GPUs in the whole capture; counts overlap twice

    @property
    def whole(self) -> bool:
        """No steps were found: the capture counts as one."""
        return self.step_signal.startswith(WHOLE)


@dataclass(frozen=True)
class Cell:
    """Exclusive time per step, its spread, launches per step and the share of busy time."""

    step_ns: int
    noise_ns: int
    launches: float
    share: float


@dataclass(frozen=True)
class Row:
    """A category, or a kernel of one; a cell is None where the profile has none of it."""

    key: str
    category: str
    cells: tuple[Cell | None, ...]


def run_of(profile: Profile, label: str) -> Run:
    sha = tuple(sorted(source.sha256 for source in profile.sources))
    formats = "+".join(sorted({source.format for source in profile.sources}))
    names = ", ".join(profile.gpus)
    if profile.main is None:
        return Run(
            label, sha, formats, names, 0, profile.phase, profile.batch, "unknown", 0, "", 0.0, 0, 0, 0, 0, 0, 0, 0, {}, 0, 0
        )
    dev = profile.devices[profile.main]
    return Run(
        label=label,
        sha256=sha,
        format=formats,
        gpu=dev.gpu or names,
        gpu_count=len(profile.devices),
        phase=profile.phase,
        batch=profile.batch,
        graph_mode=dev.graph_mode,
        steps=dev.steps.count,
        step_signal=dev.steps.signal,
        agreement=dev.steps.agreement,
        step_ns=dev.steps.p50_ns,
        step_noise_ns=spread([step.wall_ns for step in dev.steps.items]),
        busy_ns=dev.steps.p50_busy_ns,
        busy_noise_ns=spread([step.busy_ns for step in dev.steps.items]),
        idle_ns=dev.steps.p50_idle_ns,
        launches=dev.kernels_per_step,
        graph_launches=dev.graph_launches_per_step,
        precisions=_precisions(dev),
        unknown_share=dev.unknown_share,
        capture_sum_ns=sum(one.sum_ns for one in profile.devices),
    )


def spread(values: Sequence[int]) -> int:
    """Interquartile range of per-step values; the whole range below four of them, and 0 for one."""
    if len(values) < 2:
        return 0
    if len(values) < MIN_STEPS:
        return max(values) - min(values)
    low, high = np.percentile(values, (25, 75))
    return round(float(high - low))


def _precisions(dev: DeviceProfile) -> dict[str, float]:
    """Share of each known precision in the exclusive time of tensor-core GEMM and MoE kernels that name one."""
    times: dict[str, int] = {}
    for kernel in dev.kernel_rows:
        if kernel.category in ("gemm_tc", "moe") and kernel.precision:
            times[kernel.precision] = times.get(kernel.precision, 0) + kernel.exclusive_ns
    total = sum(times.values())
    return {name: ns / total for name, ns in sorted(times.items(), key=lambda item: -item[1])} if total else {}


def category_rows(devices: Sequence[DeviceProfile | None]) -> tuple[Row, ...]:
    cells: dict[str, list[Cell | None]] = {}
    for i, dev in enumerate(devices):
        for cat in dev.categories if dev else ():
            row = cells.setdefault(cat.category, [None] * len(devices))
            row[i] = Cell(cat.p50_step_ns, spread(cat.step_ns), cat.launches_per_step, cat.share)
    order = list(CATEGORIES)
    rows = (Row(key, key, tuple(row)) for key, row in cells.items() if any(cell and cell.launches for cell in row))
    return tuple(sorted(rows, key=lambda row: (-_largest(row), order.index(row.key) if row.key in order else len(order))))


def kernel_rows(devices: Sequence[DeviceProfile | None]) -> tuple[Row, ...]:
    cells: dict[tuple[str, str], list[Cell | None]] = {}
    for i, dev in enumerate(devices):
        if dev is None:
            continue
        noise = {cat.category: spread(cat.step_ns) / max(1, cat.p50_step_ns) for cat in dev.categories}
        for kernel in dev.kernel_rows:
            if not kernel.window_count:
                continue
            row = cells.setdefault((kernel.category, normal(kernel.name)), [None] * len(devices))
            row[i] = _add(row[i], kernel, noise.get(kernel.category, 0.0), max(1, dev.busy_ns))
    rows = (Row(name, category, tuple(row)) for (category, name), row in cells.items())
    return tuple(sorted(rows, key=lambda row: (-_largest(row), row.key)))


def _add(cell: Cell | None, kernel: Kernel, noise: float, busy: int) -> Cell:
    """Several raw names can share a normalised one. A kernel has no spread of its own: its category's stands in."""
    was = cell or Cell(0, 0, 0.0, 0.0)
    ns = was.step_ns + kernel.p50_step_ns
    return Cell(ns, round(noise * ns), was.launches + kernel.launches_per_step, was.share + kernel.exclusive_ns / busy)


def _largest(row: Row) -> int:
    return max((cell.step_ns for cell in row.cells if cell), default=0)


def normal(name: str) -> str:
    """A kernel's name without what a rebuild changes: the return type, `.kd`, serial numbers and hashes at the end."""
    name = name.removeprefix("void ").removesuffix(".kd").strip()
    parts = name.split("_")
    while len(parts) > 1 and _SERIAL.fullmatch(parts[-1]):
        parts.pop()
    return "_".join(parts) or name


_SERIAL = re.compile(r"[0-9]+|[0-9a-f]{8,64}")
