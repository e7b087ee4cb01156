"""Time accounting of one GPU: who is charged for an instant, what is idle, and where the gaps are. Integers only."""

from dataclasses import dataclass

import numpy as np

MAX_PIECES = 20_000_000


@dataclass(frozen=True, eq=False)
class Account:
    """Activities cut at the steps' borders, each piece with its exclusive time. See model.OVERLAP_RULE."""

    row: np.ndarray  # [p] int32, which activity
    step: np.ndarray  # [p] int32, which step
    exclusive_ns: np.ndarray  # [p] int64
    busy_ns: np.ndarray  # [steps] int64
    gap_start: np.ndarray  # [g] int64, in order of time
    gap_ns: np.ndarray  # [g] int64
    gap_before: np.ndarray  # [g] int64, the activity that ended last, -1 none
    gap_after: np.ndarray  # [g] int64, the activity that starts next, -1 none


def union_ns(start: np.ndarray, end: np.ndarray) -> int:
    """Time with at least one of the intervals running; `start` is sorted."""
    if not len(start):
        return 0
    reach = np.maximum.accumulate(end)
    begin = np.maximum(start[1:], reach[:-1])
    return int(end[0] - start[0] + np.maximum(end[1:] - begin, 0).sum())


def account(start: np.ndarray, end: np.ndarray, border: np.ndarray) -> Account:
    """Charge every instant of the steps to who ran in it, or to idleness.

    Args:
        start, end: [n] int64 of the activities, sorted by start, end >= start.
        border: [steps, 2] int64, first and last nanosecond of each step, in order, not overlapping.
    """
    steps = len(border)
    first = np.searchsorted(border[:, 1], start, "right")
    last = np.searchsorted(border[:, 0], end, "left") - 1
    pieces = np.maximum(last - first + 1, 0)
    total = int(pieces.sum())
    if total > MAX_PIECES:
        raise ValueError(f"account: pieces must be at most {MAX_PIECES}, got {total}")
    row = np.repeat(np.arange(len(start), dtype=np.int32), pieces)
    step = (first[row] + np.arange(total) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.int32)
    del first, last, pieces  # a gigabyte of trace is a million rows: what is done with goes
    s = np.maximum(start[row], border[step, 0])
    e = np.minimum(end[row], border[step, 1])
    if (np.diff(s) < 0).any():
        order = np.argsort(s, kind="stable")
        row, step, s, e = row[order], step[order], s[order], e[order]
        del order

    points = np.sort(np.concatenate([s, e, border.reshape(-1)]))
    points = points[np.append(True, np.diff(points) > 0)]
    lo, hi = np.searchsorted(points, s).astype(np.int32), np.searchsorted(points, e).astype(np.int32)
    length = np.diff(points)  # [segments]
    running = np.bincount(lo, minlength=len(points)) - np.bincount(hi, minlength=len(points))
    running = np.cumsum(running, out=running)[:-1]
    share = np.where(running > 0, length // np.maximum(running, 1), 0)
    odd = np.where(running > 0, length - share * running, 0)
    upto = np.concatenate([[0], np.cumsum(share)])
    exclusive = upto[hi] - upto[lo]
    del lo, hi, share, upto
    # of the pieces that have started by a segment, the one that ends last is running if any is
    reach = np.maximum.accumulate(e)
    longest = np.maximum.accumulate(np.where(e == reach, np.arange(total), 0)) if total else np.zeros(0, np.int64)
    started = np.searchsorted(s, points[:-1], "right") - 1
    at = np.flatnonzero(odd)
    np.add.at(exclusive, longest[started[at]], odd[at])
    del reach, odd

    inside = np.searchsorted(border[:, 0], points[:-1], "right") - 1
    inside = np.where((inside >= 0) & (points[:-1] < border[inside, 1]), inside, -1)
    busy = np.zeros(steps, np.int64)
    taken = (running > 0) & (inside >= 0)
    np.add.at(busy, inside[taken], length[taken])

    gap = np.flatnonzero((running == 0) & (inside >= 0) & (length > 0))
    gap_start, gap_end = points[gap], points[gap + 1]
    before = started[gap]
    after = np.searchsorted(s, gap_end, "left")
    if not total:
        gap_before = gap_after = np.full(len(gap), -1, np.int64)
    else:
        gap_before = np.where(before >= 0, row[longest[np.maximum(before, 0)]], -1)
        gap_after = np.where(after < total, row[np.minimum(after, total - 1)], -1)
    return Account(row, step, exclusive, busy, gap_start, gap_end - gap_start, gap_before, gap_after)


def median(values: np.ndarray) -> int:
    """The lower median, which is one of the values; 0 where there are none."""
    if not len(values):
        return 0
    return int(np.sort(values)[(len(values) - 1) // 2])


def grouped(values: np.ndarray, group: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower median, least and largest of `values` in each of `groups` groups that all have members."""
    order = np.lexsort((values, group))
    ordered = values[order]
    count = np.bincount(group, minlength=groups)
    begin = np.cumsum(count) - count
    return ordered[begin + (count - 1) // 2], ordered[begin], ordered[begin + count - 1]
