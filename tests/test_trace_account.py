from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdecode.trace.account import account, grouped, median, union_ns


def charged_instant_by_instant(start, end, border):
    """The rule, by definition: every nanosecond is shared by who runs in it. Fractions, so odd ones are not placed."""
    exclusive = np.zeros(len(start))
    idle = 0
    for first, last in border:
        for t in range(first, last):
            running = [i for i in range(len(start)) if start[i] <= t < end[i]]
            idle += not running
            for i in running:
                exclusive[i] += 1 / len(running)
    return exclusive, idle


def run(start, dur, border):
    start, border = np.array(start, np.int64), np.array(border, np.int64)
    end = start + np.array(dur, np.int64)
    result = account(start, end, border)
    exclusive = np.zeros(len(start), np.int64)
    np.add.at(exclusive, result.row, result.exclusive_ns)
    return result, exclusive, charged_instant_by_instant(start.tolist(), end.tolist(), border.tolist())


def test_two_that_overlap_share_the_overlap():
    result, exclusive, _ = run([0, 6], [10, 10], [[0, 20]])
    assert exclusive.tolist() == [8, 8]
    assert result.busy_ns.tolist() == [16]
    assert (result.gap_start.tolist(), result.gap_ns.tolist()) == ([16], [4])
    assert (result.gap_before.tolist(), result.gap_after.tolist()) == ([1], [-1])


def test_odd_nanoseconds_go_to_the_one_that_ends_last():
    _, exclusive, _ = run([0, 0, 0], [7, 7, 9], [[0, 9]])
    assert exclusive.tolist() == [2, 2, 5]


def test_an_activity_over_a_border_is_cut():
    result, exclusive, _ = run([5], [10], [[0, 8], [8, 20]])
    assert exclusive.tolist() == [10]
    assert result.busy_ns.tolist() == [3, 7]
    assert result.exclusive_ns.tolist() == [3, 7]


def test_what_lies_outside_the_steps_is_not_charged():
    result, exclusive, _ = run([0, 12, 30], [5, 3, 5], [[10, 20]])
    assert exclusive.tolist() == [0, 3, 0]
    assert result.gap_ns.tolist() == [2, 5]


def test_nothing_at_all():
    result, exclusive, _ = run([], [], [[0, 10]])
    assert (exclusive.size, result.gap_ns.tolist()) == (0, [10])
    assert union_ns(np.zeros(0, np.int64), np.zeros(0, np.int64)) == 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25)), max_size=12),
    st.lists(st.integers(0, 80), min_size=2, max_size=6, unique=True),
    st.booleans(),
)
def test_equals_the_rule_by_definition(activities, cuts, contiguous):
    activities = sorted(activities)
    cuts = sorted(cuts)
    border = list(pairwise(cuts)) if contiguous else list(zip(cuts[::2], cuts[1::2], strict=False))
    result, exclusive, (want, idle) = run([a for a, _ in activities], [d for _, d in activities], border)
    # each segment between two borders gives its odd nanoseconds, fewer than there are activities, to one of them
    segments = 2 * len(activities) + 2 * len(border)
    assert (np.abs(exclusive - want) < len(activities) * segments + 1e-6).all()
    if len(activities) <= 1:
        assert exclusive.tolist() == want.tolist()
    window = sum(b - a for a, b in border)
    assert exclusive.sum() + idle == window == result.busy_ns.sum() + result.gap_ns.sum()
    assert result.gap_ns.sum() == idle


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25)), min_size=1, max_size=12))
def test_union_counts_each_instant_once(activities):
    activities = sorted(activities)
    start = np.array([a for a, _ in activities])
    end = start + np.array([d for _, d in activities])
    assert union_ns(start, end) == len({t for a, d in activities for t in range(a, a + d)})


def test_medians_are_values_that_occurred():
    assert median(np.array([9, 1, 4, 7])) == 4
    assert median(np.array([], np.int64)) == 0
    p50, least, most = grouped(np.array([5, 1, 9, 3, 2]), np.array([0, 1, 0, 0, 1]), 2)
    assert (p50.tolist(), least.tolist(), most.tolist()) == ([5, 1], [3, 1], [9, 2])


def test_pieces_are_bounded():
    start, end = np.zeros(30_000, np.int64), np.full(30_000, 1000, np.int64)
    border = np.stack([np.arange(1000), np.arange(1, 1001)], axis=1)
    with pytest.raises(ValueError, match="pieces must be at most 20000000, got 30000000"):
        account(start, end, border)
