"""What the benches of products, indexer and glue share: options, a cell's measurement, a file that a stopped run goes on with.

A cell is checked against float64 before it is timed, and one that fails has no time. Times are warm, over one set of inputs,
and rotated, over sets that together pass L2: a decode step reads each weight and key once, and none waits in L2 for it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepdecode.bench.files import read_results, set_aside
from deepdecode.bench.timing import copy_bandwidth, current_commit, need_gpu, time_graph, write_results

DEVICE = "cuda"
# sets of inputs that together pass an L2 of 60 MB three times, about
PAST_L2 = 180 << 20
# a run that is cut off leaves what it had by then
WRITE_EVERY_S = 10.0
# what a result file must have for a run to go on with it
FACTS = {"commit": str, "copy_bandwidth_tb_s": (int, float)}
ROW = {"op": str, "implementation": str}


class Missing(Exception):
    """A rival is not here; its message says why."""


@dataclass(frozen=True)
class Work:
    """What a cell times and how it is checked.

    calls: one for each set of inputs. check: figures of the first call's result against float64. bound: a figure's name and
    what it may be at most; also: another's. composed: the same of fine ops, where a row has their time beside the op's.
    """

    calls: list[Callable[[], Any]]
    check: Callable[[], dict[str, float]]
    bound: tuple[str, float]
    nbytes: int
    flops: int = 0
    composed: Callable[[], Any] | None = None
    also: tuple[str, float] | None = None


@dataclass(frozen=True)
class Cell:
    """keys: op, implementation, T and all else that tells it from others. make: its inputs; `Missing` if there is no rival."""

    keys: dict[str, Any]
    make: Callable[[], Work]
    limit_s: float = 0.03


def copies(nbytes: int, most: int = 200) -> int:
    """Sets of inputs of this size that together pass L2: two at least."""
    return max(2, min(most, -(-PAST_L2 // max(1, nbytes))))


def settle() -> None:
    """Wait for the GPU, so that what went wrong there is said here."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def check(cell: Cell) -> tuple[Work, dict[str, Any]]:
    """The cell's work and its row so far; "error" in it if the first call is not right."""
    work = cell.make()
    row = cell.keys | work.check()
    settle()
    for name, bound in (work.bound, *([] if work.also is None else [work.also])):
        if not row[name] <= bound:
            row["error"] = f"{name} must be at most {bound:.1e}, got {row[name]:.1e}"
            break
    return work, row


def measure(cell: Cell, bandwidth: float) -> dict[str, Any]:
    """One row of a result file. A cell that fails its check, or that the implementation cannot run, has no time."""
    try:
        work, row = check(cell)
        if "error" in row:
            return row
        warm = time_graph(work.calls[:1], limit_s=cell.limit_s)
        row |= {"us_warm": warm.us, "us_warm_low": warm.low, "us_warm_high": warm.high}
        if len(work.calls) > 1:
            rotated = time_graph(work.calls, limit_s=cell.limit_s)
            row |= {"us_rotated": rotated.us, "us_rotated_low": rotated.low, "us_rotated_high": rotated.high}
        if work.composed is not None:
            row["us_composed"] = time_graph([work.composed], calls_per_graph=4, limit_s=cell.limit_s).us
    except Missing:
        raise
    except Exception as error:
        return cell.keys | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    row |= {"bytes": work.nbytes} | ({"flops": work.flops} if work.flops else {})
    row["floor_us"] = work.nbytes / bandwidth / 1e6
    return row | {"floor_fraction": row["floor_us"] / row.get("us_rotated", row["us_warm"])}


def folder() -> str:
    """The card's folder of result files."""
    need_gpu()
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")


def run(name: str, options: argparse.Namespace, cells: Iterable[Cell], say: Callable[[dict[str, Any]], str]) -> int:
    """Measure the cells that the result file does not hold yet: 1 if one of ours is wrong, 2 if the GPU takes no more.

    Raises:
        ValueError: there is no GPU, or what stands where the result file belongs is none.
    """
    path, commit = options.out / folder() / f"{name}.json", options.commit or current_commit()
    rows: list[dict[str, Any]] = []
    bandwidth = 0.0
    if path.exists():
        before = read_results(path, facts=FACTS, row=ROW)
        if before["commit"] == commit and not options.fresh:
            rows, bandwidth = [row for row in before["rows"] if "T" in row], before["copy_bandwidth_tb_s"]
        set_aside(path, before["rows"], rows)
    bandwidth = bandwidth or round(copy_bandwidth(), 3)
    command = f"python -m deepdecode.bench.{name}" + (" --peers" if options.peers else "")

    def write() -> None:
        write_results(path, rows, command=command, commit=commit, copy_bandwidth_tb_s=bandwidth)

    start = written = time.monotonic()
    gone: set[str] = set()
    left, broken = 0, False
    for cell in cells:
        implementation = cell.keys["implementation"]
        unwanted = options.only not in (None, implementation) or (options.tokens and cell.keys["T"] not in options.tokens)
        if unwanted or implementation in gone or any(cell.keys.items() <= row.items() for row in rows):
            continue
        if time.monotonic() - start > options.seconds or broken:
            left += 1
            continue
        try:
            row = measure(cell, bandwidth)
        except Missing as missing:
            gone.add(implementation)
            row = {"op": cell.keys["op"], "implementation": implementation, "error": f"not here: {missing}"[:200]}
        rows.append({key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()})
        print(say(rows[-1]), flush=True)
        if "error" in row:
            try:
                settle()
            except RuntimeError as error:
                print(f"bench: the GPU takes no more work of this process: {error}"[:200], file=sys.stderr)
                broken = True
        if time.monotonic() - written > WRITE_EVERY_S:
            write()
            written = time.monotonic()
    write()
    print(f"{path}: {len(rows)} rows" + (f", {left} left for another run" if left else ""))
    wrong = any("error" in row and row["implementation"].startswith("deepdecode") for row in rows)
    return 2 if broken else int(wrong)


def line(row: dict[str, Any], what: str, figures: str) -> str:
    """One line of the table: what was measured, its times or what was wrong, and its figures."""
    if "us_warm" not in row:
        return f"{what} {row['error']}"
    rotated = f"{row['us_rotated']:9.2f}" if "us_rotated" in row else " " * 9
    times = f"warm {row['us_warm']:9.2f} us  rotated {rotated} us  floor {row['floor_us']:7.2f} us"
    return f"{what} {times} {100 * row['floor_fraction']:4.0f} %  {figures}"
