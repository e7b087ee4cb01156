"""The kernels of the experts against the float64 reference: interpreted without a GPU, compiled with one."""

import functools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepdecode.cards import CARDS, find_card
from deepdecode.ops.moe import moe_ref
from deepdecode.testing.experts import random_experts, random_routes
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

from deepdecode.kernels import moe as kernel  # noqa: E402
from deepdecode.kernels.moe_plan import Case, Config, Tile, plan, plan_few, plan_stream, supports  # noqa: E402

FP32_STEP = 2e-6  # the interpreter multiplies in float32, and h stays float32 there
LIMIT = 10.0
BLOCKS, SLICES = Tile(32, 64, slices=1, num_warps=2, num_stages=2), Tile(16, 32, slices=2, num_warps=2, num_stages=2)
SMALL = Config(BLOCKS, SLICES, block_t=8, shared_t=8)
# three tiles of rows a program, the last of them past the end
TURNS = Config(SLICES, BLOCKS, block_t=8, shared_t=8, w2_turns=3)


def run_with(config, x, ids, weights, w):
    stored = [part for weight in (w.w13, w.w2, w.shared13, w.shared2) for part in (weight.data, weight.scale)]
    out = torch.empty_like(x)
    kernel.launch(x, ids, weights, *stored, w.w13.kind, w.shared13.kind, w.first_expert, LIMIT, out, config)
    return out


def run(x, ids, weights, w, config=SMALL):
    return run_with(config, x, ids, weights, w)


def check_with(config, x, ids, weights, w):
    out = run_with(config, x, ids, weights, w)
    want = moe_ref(x.double(), ids, weights.double(), w, LIMIT)
    assert rel_err(out, want) < FP32_STEP
    assert worst_row_err(out, want) < 4 * FP32_STEP
    return out


def check(x, ids, weights, w, config=SMALL):
    return check_with(config, x, ids, weights, w)


@pytest.mark.parametrize(("kind", "shared"), [("fp4", "fp8"), ("fp8", "fp8"), ("fp8_f32", "fp8_f32"), ("bf16", "f32")])
# fewer pairs than experts, odd widths and a shared expert of another, more pairs than experts
@pytest.mark.parametrize(
    ("T", "E", "k", "C", "I", "shared_I"), [(1, 16, 2, 32, 32, 32), (7, 5, 3, 160, 96, 32), (12, 6, 4, 64, 32, 64)]
)
def test_interpreted_matches_reference(kind, shared, T, E, k, C, I, shared_I):
    """Experts of this rank are 2 .. E + 1 of E + 3; half the pre-activations meet the clamp."""
    w = random_experts(E, C, I, shared_I, kind=kind, shared=shared, first=2)
    check(8 * torch.randn(T, C), *random_routes(T, E + 3, k), w)


@pytest.mark.parametrize("shared_rows", [0, 3, 8])
def test_the_shared_expert_of_some_rows(shared_rows):
    w = random_experts(5, 64, 32, 32, first=2)
    x, (ids, weights) = torch.randn(9, 64), random_routes(9, 7, 2)
    stored = [part for weight in (w.w13, w.w2, w.shared13, w.shared2) for part in (weight.data, weight.scale)]
    out = torch.empty_like(x)
    kernel.launch(x, ids, weights, *stored, w.w13.kind, w.shared13.kind, 2, LIMIT, out, SMALL, shared_rows)
    assert rel_err(out, moe_ref(x.double(), ids, weights.double(), w, LIMIT, shared_rows)) < FP32_STEP


@pytest.mark.slow
def test_programs_may_take_several_tiles_of_rows():
    w = random_experts(5, 160, 96, 64, first=2)
    x, (ids, weights) = torch.randn(9, 160), random_routes(9, 7, 3)
    assert same_bits(check(x, ids, weights, w, TURNS), run(x, ids, weights, w, Config(SLICES, BLOCKS, 8, 8)))


@pytest.mark.parametrize(
    ("config", "T"),
    [(SMALL, 3), pytest.param(SMALL, 1, marks=pytest.mark.slow), pytest.param(TURNS, 3, marks=pytest.mark.slow)],
    ids=["small", "small, one token", "turns"],
)
def test_hostile_routes(config, T):
    w = random_experts(9, 64, 32, 32, first=4)
    run = functools.partial(run_with, config)
    check = functools.partial(check_with, config)
    x, (ids, weights) = torch.randn(T, 64), random_routes(T, 13, 3)
    nan = torch.full_like(weights, float("nan"))
    none = check(x, torch.full_like(ids, -1), nan, w)
    assert same_bits(run(x, torch.full_like(ids, 13), nan, w), none)
    assert same_bits(run(x, ids[:, :0], weights[:, :0], w), none)
    # all on one expert, twice and more for a token: several tiles of pairs
    check(x, torch.full_like(ids, 7), weights, w)
    wild = ids.clone()
    wild[:, 0], wild[:, 2] = 2**31 - 1, -(2**31)
    check(x, wild, torch.where(wild == ids, weights, 0), w)
    assert run(x, wild, torch.where(wild == ids, weights, nan), w).isfinite().all()
    # int64 ids are not cut to 32 bits: this one would be expert 4
    far = torch.where(wild == ids, ids.long(), 2**32 + 4)
    assert same_bits(run(x, far, weights, w), run(x, wild, weights, w))


def test_pairs_are_collected_over_many_chunks(monkeypatch):
    """Ranks of pairs run on where a chunk of ids ends."""
    w, (ids, weights), x = random_experts(3, 32, 32, 32), random_routes(20, 4, 2), torch.randn(20, 32)
    want = check(x, ids, weights, w)
    monkeypatch.setattr(kernel, "MAX_CHUNK", 16)
    assert same_bits(run(x, ids, weights, w), want)
    assert same_bits(run(x[:1], ids[:1], weights[:1], w), want[:1])


@pytest.mark.parametrize("value", [0.0, -1.5, 1e37, float("inf"), float("nan")])
def test_a_routing_weight_may_be_anything(value):
    """What is not finite is not finite in that token alone, as in the reference."""
    w, (ids, weights), x = random_experts(5, 64, 32, 64, first=2), random_routes(3, 5, 2), torch.randn(3, 64)
    ids += 2
    weights[1, 0] = value
    with np.errstate(all="ignore"):
        out = run(x, ids, weights, w)
    want = moe_ref(x.double(), ids, weights.double(), w, LIMIT)
    assert torch.equal(out.isfinite(), want.isfinite())
    assert out[0::2].isfinite().all()
    finite = want.isfinite().all(1)
    assert worst_row_err(out[finite], want[finite]) < 4 * FP32_STEP


def test_rows_apart_and_many_pairs_of_a_token():
    w, x = random_experts(5, 64, 32, 64), torch.randn(3, 100)[:, 10:74]
    check(x, *random_routes(3, 8, 3), w)
    # more pairs than experts, most of them of an expert that the token has already
    ids = torch.randint(-1, 7, (1, 40), dtype=torch.int32)
    check(x[:1], ids, torch.rand(1, 40), w)


def test_a_nan_stays_in_its_token_and_shows():
    w, (ids, weights), x = random_experts(4, 64, 32, 32), random_routes(5, 4, 2), torch.randn(5, 64)
    clean = run(x, ids, weights, w)
    x[2, 9] = float("nan")
    out = run(x, ids, weights, w)
    assert out[2].isnan().all()
    assert same_bits(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


# ---- the plan


def test_plans_fit_every_card():
    for card in CARDS:
        for T in (1, 16, 64, 256, 512):
            for E, I in ((256, 2048), (256, 256), (32, 2048), (8, 64)):
                config = plan(Case(T, 6, E, 4096, I, I), card)
                for tile in (config.w13, config.w2):
                    assert tile.rows * tile.block_k * tile.num_stages < card.shared << 10
                    # FP8 scales stand for 128 columns, and a warp has 16 rows at least
                    assert tile.block_k <= 128 and tile.slices in (1, tile.num_warps)
                    assert tile.rows * tile.slices >= 16 * tile.num_warps


def test_streams_where_their_tiles_divide_the_experts():
    """V4-Flash's whole, an eighth of each, wider and small ones; sizes, types and cards that take the other launches."""
    h200 = find_card("H200")
    for T in (1, 16, 64, 128):
        for E, C, I, shared_I in ((256, 4096, 2048, 2048), (256, 4096, 256, 256), (80, 7168, 3072, 3072), (64, 256, 128, 384)):
            config = plan_stream(Case(T, 6, E, C, I, shared_I), h200)
            assert config.block_t == 4 and config.shared_t == (8 if T <= 8 else 16)
            for stage, each, columns, rows in ((config.w13, 1, (C, C), (I, shared_I)), (config.w2, 2, (I, shared_I), (C,))):
                assert stage.slices * stage.warps in (2, 4)
                assert all(K % (128 * stage.slices) == 0 for K in columns)
                # a step's place in the ring is a constant
                steps = columns[0] // (128 * stage.slices)
                assert stage.depth >= 2 and (steps % stage.depth == 0 or stage.depth % steps == 0)
                # slices have steps of their own to be slices of
                assert stage.slices == 1 or steps > 1
                assert all(count % (16 * each * stage.warps) == 0 for count in rows)
    # an eighth of the tokens meet the shared expert: no more than a product has columns
    assert plan_stream(Case(64, 6, 32, 4096, 2048, 2048, shared_rows=8), h200).shared_t == 8
    # more tokens of an expert than four, most of the time
    assert plan_stream(Case(256, 6, 256, 4096, 256, 256), h200).block_t == 8
    # rows of their own for the warps where every program has several tiles, else slices
    assert plan_stream(Case(64, 6, 256, 4096, 2048, 2048), h200).w13.slices == 1
    assert plan_stream(Case(4, 6, 256, 4096, 2048, 2048), h200).w13.slices == 4
    some = Case(1, 6, 256, 4096, 2048, 2048)
    for change in ({"weight": "fp8"}, {"shared": "bfloat16"}, {"C": 4096 + 64}, {"I": 2048 + 32}, {"T": 1024}):
        assert plan_stream(replace(some, **change), h200) is None
    assert plan_stream(some, find_card("A100")) is None and plan_stream(some, find_card("B200")) is None


def test_one_token_takes_each_pair_for_itself():
    """An eighth of each expert, some whole ones, and what takes the other launches."""
    h200 = find_card("H200")
    narrow, whole = Case(1, 6, 256, 4096, 256, 256), Case(1, 6, 32, 4096, 2048, 2048)
    # all six experts of a token at a time, where each has 256 columns; else a warp has a slice of one
    assert plan_few(narrow, h200).together == 8 and not plan_few(narrow, h200).turns
    assert plan_few(whole, h200).together == 1 and plan_few(whole, h200).turns
    assert plan_few(replace(whole, E=256), h200) is None
    changes = ({"weight": "fp8"}, {"shared": "bfloat16"}, {"C": 4096 + 128}, {"I": 384}, {"shared_I": 128}, {"T": 2})
    for change in (*changes, {"shared_rows": 0}):
        assert plan_few(replace(narrow, **change), h200) is None
    assert plan_few(narrow, find_card("A100")) is None and plan_few(narrow, find_card("B200")) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "x in float32, not bfloat16"),
        ({"shared": "float64"}, "weights in float64"),
        ({"expert_weights": "float64"}, "routing weights in float64, not float32"),
        ({"E": 0}, "no token, no expert or an expert of width 0"),
        ({"T": 1 << 20}, "1048576 tokens and 256 experts, more than a grid holds"),
    ],
)
def test_what_no_kernel_covers_is_named(change, reason):
    some = Case(1, 6, 256, 4096, 2048, 2048)
    assert supports(some, find_card("H200")) is None
    assert supports(replace(some, **change), find_card("H200")) == reason
