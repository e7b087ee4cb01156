"""Experts token by token in float64, the clamp's corners, ids that are nobody's, and stored against dequantised weights."""

import math
from dataclasses import replace

import pytest
import torch

from deepdecode.ops.moe import moe, swiglu
from deepdecode.ops.quant import E8M0, Weight, dequantize, quantize_fp4, quantize_fp8
from deepdecode.ops.table import MoeWeights
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err

FP32_STEP = 2e-6  # two products of up to 4096 terms
BF16_STEP = 4e-3  # one rounding to bfloat16 is at most half a step, 2**-8
LIMIT = 10.0
KINDS = {"fp4": (quantize_fp4, quantize_fp8), "fp8": (quantize_fp8, quantize_fp8), "f64": (Weight, Weight)}


def experts(E, C, width, kind="f64", shared=None, first=0, scale=1.0):
    shared = shared or width
    routed, common = KINDS[kind]

    def make(*shape):
        return scale * torch.randn(*shape, dtype=torch.float64) / math.sqrt(shape[-1])

    return MoeWeights(
        torch.zeros(E, C),
        torch.zeros(E),
        None,
        routed(make(E, 2 * width, C)),
        routed(make(E, C, width)),
        common(make(2 * shared, C)),
        common(make(C, shared)),
        first,
    )


def scalar_swiglu(gate, up, limit=LIMIT):
    gate, up = min(gate, limit), max(min(up, limit), -limit)
    return gate / (1 + math.exp(-gate)) * up


def one_expert(x, w13, w2, weight=1.0):
    """x [C] through one expert, its activation in Python floats."""
    width = w2.shape[1]
    a = (w13 @ x).tolist()
    return w2 @ torch.tensor([scalar_swiglu(a[i], a[width + i]) * weight for i in range(width)], dtype=torch.float64)


def token_by_token(x, ids, weights, w):
    w13, w2, shared13, shared2 = (dequantize(m, torch.float64) for m in (w.w13, w.w2, w.shared13, w.shared2))
    out = []
    for row, chosen, g in zip(x.double(), ids.tolist(), weights.tolist(), strict=True):
        y = one_expert(row, shared13, shared2)
        for e, weight in zip(chosen, g, strict=True):
            if 0 <= e - w.first_expert < len(w13):
                y = y + one_expert(row, w13[e - w.first_expert], w2[e - w.first_expert], weight)
        out.append(y)
    return torch.stack(out)


def routed(T, E, k):
    return torch.stack([torch.randperm(E)[:k] for _ in range(T)]).int(), torch.rand(T, k) * 1.5


@pytest.mark.parametrize("kind", KINDS)
# one token, odd sizes, a shared expert of another width, every expert hit
@pytest.mark.parametrize(
    ("T", "E", "k", "C", "width", "shared"), [(1, 4, 2, 32, 32, 32), (7, 5, 3, 160, 96, 64), (20, 8, 6, 64, 32, 64)]
)
def test_matches_token_by_token(kind, T, E, k, C, width, shared):
    """The clamp in routed and shared experts; a stored layer is its dequantised twin."""
    w, (ids, weights) = experts(E, C, width, kind, shared, scale=4.0), routed(T, E, k)
    x = 2 * torch.randn(T, C)
    want = token_by_token(x, ids, weights, w)
    assert worst_row_err(moe(x.double(), ids, weights, w, LIMIT), want) < 1e-13
    if kind != "f64":
        assert worst_row_err(moe(x, ids, weights, w, LIMIT), want) < FP32_STEP
        low = moe(x.bfloat16(), ids.long(), weights, w, LIMIT)
        assert same_bits(low, moe(x.bfloat16().float(), ids, weights, w, LIMIT).bfloat16())
        assert worst_row_err(low, token_by_token(x.bfloat16(), ids, weights, w)) < BF16_STEP


@pytest.mark.parametrize("part", ["routed", "shared"])
@pytest.mark.parametrize(
    ("gate", "up", "want"), [(30, 30, (10, 10)), (-30, -30, (-30, -10)), (30, -30, (10, -10)), (-30, 30, (-30, 10))]
)
def test_clamp_at_30(part, gate, up, want):
    """Pre-activations of +-30: the gate is cut from above only, up on both sides, in both kinds of expert."""
    C = 2
    one = Weight(torch.eye(2, dtype=torch.float64))
    none = Weight(torch.zeros(2, 2, dtype=torch.float64))
    down, zero = (Weight(torch.full((2, 1), value, dtype=torch.float64)) for value in (1.0, 0.0))
    stack = lambda m: Weight(m.data[None])  # noqa: E731
    if part == "routed":
        w = MoeWeights(torch.zeros(1, C), None, None, stack(one), stack(down), none, zero)
    else:
        w = MoeWeights(torch.zeros(1, C), None, None, stack(none), stack(zero), one, down)
    x = torch.tensor([[gate, up]], dtype=torch.float64)
    y = moe(x, torch.tensor([[0]]), torch.ones(1, 1), w, LIMIT)
    a, b = want
    assert rel_err(y, torch.full((1, 2), a / (1 + math.exp(-a)) * b, dtype=torch.float64)) < 1e-14


@pytest.mark.parametrize(("T", "width"), [(3, 65), (1, 2048), (7, 2048)])
@pytest.mark.parametrize("scale", [1.0, 20.0], ids=["small", "clamped"])
def test_swiglu_matches_the_formula(T, width, scale):
    gate, up = scale * torch.randn(2, T, width, dtype=torch.float64)
    pairs = zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    want = torch.tensor([scalar_swiglu(a, b) for a, b in pairs], dtype=torch.float64).view(T, width)
    assert rel_err(swiglu(gate, up, LIMIT), want) < 1e-14
    assert rel_err(swiglu(gate.float(), up.float()), want) < FP32_STEP
    low, full = swiglu(gate.bfloat16(), up.bfloat16()), swiglu(gate.bfloat16().float(), up.bfloat16().float())
    assert same_bits(low, full.bfloat16())


def test_nan_stays_where_it_was():
    gate, up = torch.randn(2, 2, 65)
    gate[0, 3] = up[1, 64] = float("nan")
    assert swiglu(gate, up).isnan().nonzero().tolist() == [[0, 3], [1, 64]]
    w, (ids, weights) = experts(4, 32, 32, "fp4"), routed(3, 4, 2)
    x = torch.randn(3, 32)
    clean = moe(x, ids, weights, w, LIMIT)
    x[1, 0] = float("nan")
    out = moe(x, ids, weights, w, LIMIT)
    assert out[1].isnan().all()
    assert rel_err(out[0::2], clean[0::2]) < FP32_STEP


def test_ids_that_are_nobodys_add_nothing():
    """Masked ids of expert parallelism: -1 in some places or in all, ids past the last expert, whatever their weight."""
    w, x = experts(4, 64, 32, "fp8"), torch.randn(4, 64)
    ids = torch.tensor([[-1, -1], [2, -1], [99, 2], [-(2**31), 2**31 - 1]], dtype=torch.int32)
    weights = torch.tensor([[float("nan"), 3.0], [0.5, float("nan")], [float("inf"), 0.5], [1.0, 1.0]])
    out = moe(x, ids, weights, w, LIMIT)
    shared = moe(x, torch.empty(4, 0, dtype=torch.int32), torch.empty(4, 0), w, LIMIT)
    assert same_bits(out[0::3], shared[0::3])
    alone = moe(x, torch.full((4, 1), 2), torch.full((4, 1), 0.5), w, LIMIT)
    assert rel_err(out[1:3], alone[1:3]) < FP32_STEP
    assert rel_err(shared, token_by_token(x, ids * 0 - 1, weights, w)) < FP32_STEP


def test_an_id_named_twice_counts_twice():
    w, x = experts(4, 64, 32), torch.randn(2, 64, dtype=torch.float64)
    twice = moe(x, torch.tensor([[1, 1], [3, 1]]), torch.tensor([[0.25, 0.5], [1.0, 1.0]]), w, LIMIT)
    once = moe(x, torch.tensor([[1], [3]]), torch.tensor([[0.75], [1.0]]), w, LIMIT)
    assert rel_err(twice[0], once[0]) < 1e-13
    assert rel_err(twice[1], once[1]) > 1e-3


def test_ranks_add_up_to_the_whole():
    """Two ranks with four experts each, the shared one cut in halves along its width, give what one rank gives."""
    w, (ids, weights) = experts(8, 64, 32), routed(9, 8, 3)
    x = torch.randn(9, 64, dtype=torch.float64)
    total = torch.zeros_like(x)
    for rank in range(2):
        half = slice(16 * rank, 16 * rank + 16)
        part = MoeWeights(
            w.gate,
            w.bias,
            None,
            w.w13[4 * rank : 4 * rank + 4],
            w.w2[4 * rank : 4 * rank + 4],
            Weight(torch.cat((w.shared13.data[:32][half], w.shared13.data[32:][half]))),
            Weight(w.shared2.data[:, half]),
            4 * rank,
        )
        total += moe(x, ids, weights, part, LIMIT)
    assert rel_err(total, moe(x, ids, weights, w, LIMIT)) < 1e-13


def test_ranks_with_tokens_of_their_own_add_up_to_the_whole():
    """Each of two ranks has the shared expert whole, for its own tokens, which come first there."""
    w, (ids, weights) = experts(8, 64, 32), routed(9, 8, 3)
    x = torch.randn(9, 64, dtype=torch.float64)
    total = torch.zeros_like(x)
    for rank, own in ((0, list(range(4))), (1, list(range(4, 9)))):
        rows = [*own, *(t for t in range(9) if t not in own)]
        part = replace(w, w13=w.w13[4 * rank : 4 * rank + 4], w2=w.w2[4 * rank : 4 * rank + 4], first_expert=4 * rank)
        total[rows] += moe(x[rows], ids[rows], weights[rows], part, LIMIT, shared_rows=len(own))
    assert rel_err(total, moe(x, ids, weights, w, LIMIT)) < 1e-13
    assert not moe(x, ids * 0 - 1, weights, w, LIMIT, shared_rows=0).any()


def test_the_routing_weight_is_linear_and_the_shared_expert_has_none():
    """The shared expert is always added, however the ids were chosen."""
    w, (ids, weights) = experts(4, 64, 32), routed(3, 4, 2)
    x = torch.randn(3, 64, dtype=torch.float64)
    shared = moe(x, ids, weights * 0, w, LIMIT)
    one, two = (moe(x, ids, weights * s, w, LIMIT) - shared for s in (1, 2))
    assert rel_err(two, 2 * one) < 1e-13
    assert rel_err(shared, token_by_token(x, ids * 0 - 1, weights, w)) < 1e-13


def test_only_the_experts_hit_are_read():
    """The others' scales are NaN, which would show."""
    w = experts(6, 64, 64, "fp4")
    for m in (w.w13, w.w2):
        m.scale.view(torch.uint8)[[0, 2, 3, 5]] = 255
    ids = torch.tensor([[1, 4], [4, -1]])
    assert moe(torch.randn(2, 64), ids, torch.ones(2, 2), w, LIMIT).isfinite().all()
    assert moe(torch.randn(2, 64), ids + 1, torch.ones(2, 2), w, LIMIT).isnan().all()


def test_flash_expert_size():
    """One of V4-Flash's experts, FP4 [4096, 4096] and [4096, 2048], and its FP8 shared one, from random codes."""
    C, width = 4096, 2048
    code = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8)  # noqa: E731
    scale = lambda *shape: torch.randint(118, 121, shape, dtype=torch.uint8).view(E8M0)  # noqa: E731
    fp8 = lambda *shape: (code(*shape) & 0xBF).view(torch.float8_e4m3fn)  # noqa: E731
    w = MoeWeights(
        torch.zeros(1, C),
        None,
        None,
        Weight(code(1, 2 * width, C // 2), scale(1, 2 * width, C // 32)),
        Weight(code(1, C, width // 2), scale(1, C, width // 32)),
        Weight(fp8(2 * width, C), scale(32, 32)),
        Weight(fp8(C, width), scale(32, 16)),
    )
    x = torch.randn(2, C).bfloat16()
    out = moe(x, torch.tensor([[0], [-1]]), torch.tensor([[1.5], [1.5]]), w, LIMIT)
    alone = expert_in_float32(dequantize(w.shared13), dequantize(w.shared2), x.float())
    with_expert = alone[0] + 1.5 * expert_in_float32(dequantize(w.w13[0]), dequantize(w.w2[0]), x[:1].float())[0]
    assert worst_row_err(out, torch.stack((with_expert, alone[1]))) < BF16_STEP
    assert rel_err(with_expert, alone[0]) > 0.1


def expert_in_float32(w13, w2, x):
    gate, up = (x @ w13.T).chunk(2, dim=-1)
    return (torch.sigmoid(gate.clamp(max=10)) * gate.clamp(max=10) * up.clamp(-10, 10)) @ w2.T


def test_no_tokens():
    w = experts(4, 64, 32, "fp4")
    assert moe(torch.empty(0, 64).bfloat16(), torch.empty(0, 2).int(), torch.empty(0, 2), w, LIMIT).shape == (0, 64)
    assert swiglu(torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 8)


def replaced(name, weight):
    w = experts(4, 64, 32)
    parts = {field: getattr(w, field) for field in ("gate", "bias", "tid2eid", "w13", "w2", "shared13", "shared2")}
    return MoeWeights(**(parts | {name: weight}))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, i, g, w: swiglu(x, x[:, :9]), r"swiglu: up must be \[3, 64\] float64 on cpu, got \[3, 9\] float64 on cpu"),
        (lambda x, i, g, w: swiglu(x, x.float()), r"swiglu: up must be \[3, 64\] float64 on cpu, got \[3, 64\] float32 on cpu"),
        (lambda x, i, g, w: swiglu(x.half(), x.half()), r"swiglu: gate must be \[T, width\] .* got \[3, 64\] float16"),
        (lambda x, i, g, w: swiglu(x, x, 0), r"swiglu: limit must be > 0, got 0"),
        (lambda x, i, g, w: moe(x, i, g, w, float("nan")), r"moe: limit must be > 0, got nan"),
        (lambda x, i, g, w: moe(x[:, :9], i, g, w, LIMIT), r"moe: x must be \[T, 64\] .* got \[3, 9\]"),
        (lambda x, i, g, w: moe(x, i[:2], g, w, LIMIT), r"moe: ids must be \[3, k\] int32 or int64 on cpu, got \[2, 2\]"),
        (lambda x, i, g, w: moe(x, i.float(), g, w, LIMIT), r"moe: ids must be \[3, k\] int32 or int64 .* float32"),
        (lambda x, i, g, w: moe(x, i, g[:, :1], w, LIMIT), r"moe: weights must be \[3, 2\] .* got \[3, 1\]"),
        (lambda x, i, g, w: moe(x, i, g.bfloat16(), w, LIMIT), r"moe: weights must be \[3, 2\] float32 or float64 .* bfloat16"),
        (lambda x, i, g, w: moe(x, i, g, replaced("w13", w.shared13), LIMIT), r"moe: w13 must be \[E, 2I, C\], got \[64, 64\]"),
        (lambda x, i, g, w: moe(x, i, g, replaced("w2", w.w2[:3]), LIMIT), r"moe: w2 must be \[4, 64, 32\], got \[3, 64, 32\]"),
        (lambda x, i, g, w: moe(x, i, g, replaced("shared13", w.w2[0]), LIMIT), r"moe: shared13 must be \[2I, 64\], got"),
        (
            lambda x, i, g, w: moe(x, i, g, replaced("shared2", w.shared2.to("meta")), LIMIT),
            r"moe: shared2 must be on cpu as w13, got meta",
        ),
        (lambda x, i, g, w: moe(x, i, g, replaced("shared2", w.shared13), LIMIT), r"moe: shared2 must be \[64, 32\], got"),
        (lambda x, i, g, w: moe(x, i, g, replaced("first_expert", -3), LIMIT), r"moe: first_expert must be >= 0, got -3"),
        (lambda x, i, g, w: moe(x, i, g, w, LIMIT, 4), r"moe: shared_rows must be in \[0, 3\], got 4"),
    ],
)
def test_rejects(call, message):
    ids, weights = routed(3, 4, 2)
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 64, dtype=torch.float64), ids, weights, experts(4, 64, 32))


@pytest.mark.parametrize("kind", ["fp4", "f64"])
def test_the_op_says_what_it_gives_for_any_layout_of_x(kind):
    w = experts(4, 64, 32, kind)
    stored = [part for weight in (w.w13, w.w2, w.shared13, w.shared2) for part in (weight.data, weight.scale)]
    x, ids, weights = torch.randn(64, 3).T, torch.tensor([[0, 3], [1, -1], [2, 2]]), torch.rand(3, 2)
    # columns that are neighbours: the result is contiguous, for torch.compile too
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.deepdecode.moe.default, (x, ids, weights, *stored, 0, LIMIT), test_utils=checks)
    out = torch.ops.deepdecode.moe(x, ids, weights, *stored, 0, LIMIT)
    assert out.is_contiguous()
    assert rel_err(out, token_by_token(x, ids, weights, w)) < FP32_STEP
