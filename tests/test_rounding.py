"""What one rounding does to a step, on a small slice: the tool's runs against one another."""

import sys
from pathlib import Path

import pytest
import torch
from small_checkpoint import SMALL

from deepdecode.ops.reference import REFERENCE
from deepdecode.slices import RankSlice

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from rounding import Run, nudged, others


@pytest.fixture(scope="module")
def graph():
    return RankSlice(SMALL, "tp8", context=384, max_concurrency=4, device="cpu").graph(REFERENCE, 3)


def logits(graph, run):
    graph.seek(127)
    with torch.inference_mode():
        graph.eager(run.table)
    return graph.logits.clone()


def test_a_run_is_what_it_was_and_a_nudge_moves_it(graph):
    first, again, moved = Run(REFERENCE), Run(REFERENCE), Run(REFERENCE, nudge=nudged(0.1))
    want = logits(graph, first)
    assert torch.equal(logits(graph, again), want)
    assert others(again.experts, first.experts) == [0] * SMALL.num_layers
    assert 0 < (logits(graph, moved) - want).norm() / want.norm() < 0.2
    assert len(first.streams) == 2 * SMALL.num_layers


def test_choices_of_an_earlier_run_are_answered_with(graph):
    first = Run(REFERENCE)
    want = logits(graph, first)
    backwards = Run(REFERENCE)
    logits(graph, backwards)
    # as if the earlier run had taken the last experts of all
    backwards.experts = [(ids.flip(0), share.flip(0)) for ids, share in first.experts]
    forced = Run(REFERENCE, experts=backwards)
    assert not torch.equal(logits(graph, forced), want)
    assert torch.equal(logits(graph, Run(REFERENCE, experts=first, entries=first)), want)


def test_nudges_are_one_unit():
    x = torch.randn(50, 40).bfloat16()
    one = (nudged(0)(x).view(torch.int16) - x.view(torch.int16)).flatten()
    assert one.nonzero().flatten().tolist() == [5]
    assert one[5] == 1
    tenth = nudged(0.1)(x).view(torch.int16) - x.view(torch.int16)
    assert set(tenth.flatten().tolist()) == {0, 1}
    assert 0.08 < tenth.float().mean() < 0.12
