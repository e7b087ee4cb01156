"""What the indexer's bench calls a right choice, without a GPU."""

from dataclasses import replace

import pytest
import torch

from deepdecode.bench.indexer import MAX_GAP, judge, main, rows_of
from deepdecode.ops.indexer import index_topk_ref
from deepdecode.testing.index_keys import index_inputs


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    inputs = index_inputs(2, 1500, 40, heads=8, copies=2)[1]
    return inputs, index_topk_ref(*inputs.wide())[0]


def test_the_best_choice_misses_nothing_in_any_order(case):
    inputs, best = case
    right = {"missed": 0, "gap": 0, "mass": pytest.approx(0, abs=1e-12)}
    assert judge(inputs, best) == right
    assert judge(inputs, best.flip(1)) == right


def test_an_entry_that_was_not_best_is_measured(case):
    inputs, best = case
    every = index_topk_ref(*replace(inputs, topk=1500).wide())[0][0]
    outside = every[~torch.isin(every, best[0])]
    wrong = best.clone()
    wrong[0, 7] = outside[0]
    found = judge(inputs, wrong)
    assert found["missed"] == 1
    assert found["gap"] > MAX_GAP
    assert found["mass"] > 0


def test_a_row_twice_or_of_another_sequence_is_no_choice(case):
    inputs, best = case
    twice = best.clone()
    twice[0, 3] = twice[0, 4]
    assert judge(inputs, twice)["gap"] == float("inf")
    # a row of the second sequence
    other = best.clone()
    other[0, 3] = best[1, 3]
    assert judge(inputs, other)["gap"] == float("inf")


def test_entries_become_rows(case):
    inputs, _ = case
    entries = torch.tensor([[0, 63, 64, 1499], [5, 6, 7, 8]])
    want = [[int(inputs.block_tables[t, n // 64]) * 64 + n % 64 for n in row] for t, row in enumerate(entries.tolist())]
    assert rows_of(inputs, entries).tolist() == want


def test_says_that_it_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=r"^bench: a CUDA device must be present, got none$"):
        main([])
