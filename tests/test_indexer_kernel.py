"""The indexer's kernels against the float64 reference: interpreted without a GPU, compiled with one."""

import functools
import logging
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdecode.cards import CARDS, find_card
from deepdecode.ops import _check
from deepdecode.ops import indexer as op
from deepdecode.ops._check import kernel_runs
from deepdecode.ops.indexer import index_topk_ref
from deepdecode.ops.rows import PagedRows
from deepdecode.testing.index_keys import IndexInputs, exact_inputs, index_corners, index_inputs

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

from deepdecode.kernels import indexer as kernel  # noqa: E402
from deepdecode.kernels import indexer_plan  # noqa: E402
from deepdecode.kernels.indexer_plan import Case, Config, case_of, plan, select_blocks, supports  # noqa: E402

# numpy says so where NaN or infinity is what a test is about
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@functools.cache
def corners(fmt: str) -> dict[str, IndexInputs]:
    torch.manual_seed(0)
    return index_corners(fmt=fmt)


def config(
    inputs: IndexInputs, group: int = 8, splits: int = 3, block_n: int = 32, chunk: int = 128, coarse: int = 1
) -> Config:
    widen = "f16" if inputs.keys.fmt == "fp8_132" else "none"
    return Config(
        kernel="mma", block_n=block_n, group=group, coarse=coarse, splits=splits, num_warps=4, num_stages=3, select_warps=4,
        select_chunk=chunk, align=4, widen=widen, pdl=False,
    )  # fmt: skip


def run(inputs: IndexInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    return kernel.launch(*inputs.args(), config)


def check(inputs: IndexInputs, config: Config) -> None:
    """Bit for bit: these scores are exact in any order."""
    indices, lengths = run(inputs, config)
    want, want_lengths = index_topk_ref(*inputs.wide())
    assert lengths.tolist() == want_lengths.tolist()
    assert indices.tolist() == want.tolist()


# groups, and one pass over everything. The interpreter reads a NaN code as 480, so those corners wait for a GPU
@pytest.mark.parametrize("group", [8, 0])
@pytest.mark.parametrize(
    ("fmt", "name"), [(fmt, name) for fmt in ("fp8_132", "f32") for name in corners(fmt) if "a code of" not in name]
)
def test_interpreted_matches_reference(fmt, name, group):
    inputs = corners(fmt)[name]
    check(inputs, config(inputs, group))


@pytest.mark.parametrize("name", ["holes, wild slots and lengths", "fewer entries than topk", "no page"])
def test_entries_by_number(name):
    inputs = corners("fp8_132")[name]
    indices, lengths = kernel.launch(*inputs.args(), config(inputs), logical=True)
    want, want_lengths = index_topk_ref(*inputs.wide(), logical=True)
    assert lengths.tolist() == want_lengths.tolist() and indices.tolist() == want.tolist()


@pytest.mark.parametrize(
    ("group", "coarse", "block_n"), [(0, 1, 64), (8, 1, 64), (16, 1, 16), (32, 1, 32), (8, 2, 16), (8, 4, 64)]
)
@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(50, marks=pytest.mark.slow)])
def test_any_cut(group, coarse, block_n, splits):
    """One program and more programs than tiles; groups and coarse groups of every size."""
    for values in (1, 8):
        inputs = exact_inputs(2, 3, 40, 16, 15, values=values)
        check(inputs, config(inputs, group, splits, block_n, coarse=coarse))


def test_scores_of_real_numbers():
    """No sum is exact here: what is chosen differs from float64's choice by nothing, at this size."""
    for inputs in (index_inputs(2, 600, 50, heads=16)[0], index_inputs(1, 2000, 512, heads=3)[0]):
        check(inputs, config(inputs))


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_random_corners(data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    sizes = draw(1, 4), draw(1, 3), draw(1, 9), draw(1, 20), draw(1, 40)
    inputs = exact_inputs(*sizes, values=draw(1, 3), seed=draw(0, 1 << 20))
    coarse = data.draw(st.sampled_from([1, 2, 4]))
    check(inputs, config(inputs, data.draw(st.sampled_from([0, 8, 16])), draw(1, 4), coarse=coarse))


def test_every_rank_of_a_float():
    """The order of scores, from -inf over both zeros to NaN, which stands beside +inf; the lower entry where two are equal."""
    scores = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3e38, -3e38, 0.0]
    keys = torch.zeros(1, len(scores), 128)
    # one head of weight 1 gives what is positive, one of weight -1 what is negative
    keys[0, :, 0] = torch.tensor(scores)
    q = torch.zeros(1, 2, 128)
    q[0, 0, 0], q[0, 1, 0] = 1, -1
    one = torch.zeros(1, dtype=torch.int32)
    inputs = IndexInputs(q, torch.tensor([[1.0, -1.0]]), PagedRows(keys, 12, "f32"), one[None], one, one + 12, 1)
    for topk in range(1, 13):
        check(replace(inputs, topk=topk), config(inputs))
    assert run(replace(inputs, topk=7), config(inputs))[0].tolist() == [[0, 1, 2, 4, 6, 7, 9]]


def test_a_row_in_a_batch_is_the_row_alone():
    inputs = exact_inputs(6, 3, 20, 16, 30)
    indices, lengths = run(inputs, config(inputs))
    for t in range(6):
        part = slice(t, t + 1)
        alone = replace(
            inputs, index_q=inputs.index_q[part], index_weights=inputs.index_weights[part],
            slots=inputs.slots[part], lens=inputs.lens[part],
        )  # fmt: skip
        got = run(alone, config(inputs, splits=5))
        assert got[0].tolist() == indices[part].tolist()
        assert got[1].tolist() == lengths[part].tolist()


def test_topk_beyond_all_entries():
    """What is padded is as long as the caller wants, in pieces of 1024."""
    inputs = replace(exact_inputs(2, 3, 5, 16, 1), topk=2500)
    check(inputs, config(inputs, 0))


def test_many_tokens_take_a_bounded_workspace(monkeypatch):
    """Piece by piece, with the same result."""
    inputs = exact_inputs(7, 3, 20, 16, 30)
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 4 * 3 * 400)
    check(inputs, config(inputs))


def test_reads_no_key_past_the_length():
    inputs = exact_inputs(3, 4, 9, 16, 20)
    lens = torch.tensor([70, 33, 5], dtype=torch.int32)
    table = torch.arange(9, dtype=torch.int32).expand(2, 9).contiguous()
    inputs = replace(inputs, block_tables=table, slots=inputs.slots * 0, lens=lens)
    clean = run(inputs, config(inputs))
    data = inputs.keys.data.clone()
    data[5:] = 0xFF
    # the rest of page 4: codes and scales of the rows from 70 on
    data[4, 6 * 128 : 16 * 128] = 0xFF
    data[4, 16 * 128 + 6 * 4 :] = 0xFF
    dirty = run(replace(inputs, keys=PagedRows(data, 16, "fp8_132")), config(inputs))
    assert dirty[0].tolist() == clean[0].tolist()
    assert dirty[1].tolist() == clean[1].tolist() == [20, 20, 5]


def test_a_call_takes_the_kernel_or_says_why_not(monkeypatch, caplog):
    """The dispatch of a GPU, with the interpreter in its place: counted, or one line of the log and the reference's answer."""
    taken, refused = exact_inputs(4, 3, 9, 16, 20), exact_inputs(3, 3, 9, 16, 20)

    def choose(index_q: torch.Tensor, *_):
        return run(taken, config(taken)) if index_q is taken.index_q else "this shape is refused"

    monkeypatch.setattr(op, "use_kernel", lambda tensor: True)
    monkeypatch.setattr(kernel, "choose", choose)
    monkeypatch.setattr(_check, "_said", set())
    before = kernel_runs["index_topk"]
    with caplog.at_level(logging.WARNING, logger="deepdecode"):
        for inputs in (taken, refused, refused):
            assert op.index_topk(*inputs.args())[0].tolist() == index_topk_ref(*inputs.wide())[0].tolist()
    assert kernel_runs["index_topk"] == before + 1
    want = "index_topk: no kernel for index_q [3, 3, 128], 144 entries, top 20, fp8_132 keys: this shape is refused"
    assert [record.getMessage() for record in caplog.records] == [f"{want}; the reference runs"]
    monkeypatch.setenv("DEEPDECODE_STRICT", "1")
    with pytest.raises(RuntimeError, match=r"top 20, fp8_132 keys: this shape is refused"):
        op.index_topk(*refused.args())


FLASH = Case(1, 64, 262144, 512)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("topk", [1, 33, 512, 1024, 2048])
@pytest.mark.parametrize("entries", [1, 64, 2048, 4097, 16384, 262144])
def test_plan_fits_the_selection(card, topk, entries):
    for T in (1, 16, 256):
        case = Case(T, 64, entries, topk)
        assert supports(case, card) is None
        found = plan(case, card)
        coarse, groups, lanes = select_blocks(case, found.group, found.coarse)
        if not found.group:
            assert lanes >= entries
        elif found.coarse == 1:
            assert groups * found.group >= entries
        else:
            assert coarse * found.coarse * found.group >= entries
            assert groups >= topk * found.coarse
        assert lanes >= min(entries, topk * max(1, found.group))
        assert max(coarse, groups, lanes) <= 32768
        # a program has a tile at least
        assert 1 <= found.splits <= max(1, -(-entries // found.block_n))
        assert found.widen == ("bits" if card.arch < 89 else "f16")


def test_plan_fills_the_card():
    card = find_card("H200")
    for T in (1, 2, 16, 64, 128):
        programs = T * plan(replace(FLASH, T=T), card).splits
        assert card.sms <= programs <= 8 * card.sms


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fmt": "f32"}, "f32 keys"),
        ({"q_dtype": "bfloat16"}, "a query in bfloat16 beside fp8_132 keys"),
        ({"fmt": "bf16"}, "a query in float8_e4m3fn beside bf16 keys"),
        ({"weights_dtype": "float64"}, "weights in float64, not float32"),
        ({"heads": 129}, "129 heads, not 1 to 128"),
        ({"width": 64}, "keys of 64, not 128"),
        ({"align": 2}, "pages that do not start on multiples of 4 bytes"),
        ({"topk": 4096}, "top 4096 of 262144 entries"),
        ({"entries": 1 << 21}, "top 512 of 2097152 entries"),
        ({"entries": 0}, "top 512 of 0 entries"),
    ],
)
def test_says_what_no_kernel_covers(changes, reason):
    assert supports(replace(FLASH, **changes), find_card("H200")) == reason


def test_case_of_reads_the_alignment():
    inputs = index_inputs(1, 64)[0]
    assert case_of(*inputs.args()) == Case(1, 64, 64, 512, align=16)
    odd = PagedRows(torch.zeros(2, 64 * 132 + 4, dtype=torch.uint8)[:, : 64 * 132], 64, "fp8_132")
    assert case_of(*replace(inputs, keys=odd).args()).align == 4


def test_workspace_bytes_are_what_a_launch_takes():
    assert indexer_plan.workspace_ints(FLASH, plan(FLASH, find_card("H200"))) == 262144 + 262144 // 8 + 2 * 512
