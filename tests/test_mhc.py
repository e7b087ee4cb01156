"""Hyper-connections against the formulas written out as loops over plain numbers."""

import math

import pytest
import torch

from deepdecode.ops.mhc import mhc_head, mhc_post, mhc_pre, sinkhorn
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err

EPS = 1e-6
CONFIG = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 20}
FP32_STEP = 2e-6  # a product of up to 16384 terms, then 40 normalisations
BF16_STEP = 4e-3  # one rounding to bfloat16 is at most half a step, 2**-8


def site(C, rows=24, scales=3, dtype=torch.float32):
    fn = torch.randn(rows, 4 * C, dtype=dtype) / math.sqrt(4 * C)
    return fn, torch.randn(rows, dtype=dtype), torch.rand(scales, dtype=dtype) + 0.5


def loops_sinkhorn(z, iters):
    rows = [[math.exp(v) for v in row] for row in z]
    c = [[v / sum(row) + EPS for v in row] for row in rows]
    for step in range(iters):
        if step:
            c = [[v / (sum(row) + EPS) for v in row] for row in c]
        sums = [sum(c[j][k] for j in range(4)) + EPS for k in range(4)]
        c = [[c[j][k] / sums[k] for k in range(4)] for j in range(4)]
    return c


def loops_pre(h, fn, base, scale, iters=20):
    """One token, h [4][C] as lists: x, post, comb."""
    flat = [v for stream in h for v in stream]
    r = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + EPS)
    m = [sum(a * b for a, b in zip(row, flat, strict=True)) * r for row in fn]
    gate = lambda i, s: 1 / (1 + math.exp(-(m[i] * s + base[i])))  # noqa: E731
    pre = [gate(j, scale[0]) + EPS for j in range(4)]
    post = [2 * gate(4 + j, scale[1]) for j in range(4)]
    comb = loops_sinkhorn([[m[8 + 4 * j + k] * scale[2] + base[8 + 4 * j + k] for k in range(4)] for j in range(4)], iters)
    return [sum(pre[j] * h[j][c] for j in range(4)) for c in range(len(h[0]))], post, comb


def test_sinkhorn_check_vector():
    z = torch.tensor([[[2, 0, -1, 0.5], [0, 3, 0.25, -0.5], [-2, 1, 1.5, 0], [0.5, -0.5, 0, 2.5]]])
    c = sinkhorn(z, 20, EPS)
    want = torch.tensor([[0.7714130, 0.0505416, 0.0487936, 0.1292544], [0.1333824, 0.0237552, 0.1027784, 0.7400856]])
    assert (c[0, [0, 3]] - want).abs().max() < 1.5e-7
    assert rel_err(sinkhorn(z.double(), 20, EPS)[0], torch.tensor(loops_sinkhorn(z[0].tolist(), 20))) < 1e-6


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_sinkhorn_steps(iters):
    z = 3 * torch.randn(5, 4, 4, dtype=torch.float64)
    want = torch.tensor([loops_sinkhorn(t, iters) for t in z.tolist()], dtype=torch.float64)
    assert rel_err(sinkhorn(z, iters, EPS), want) < 1e-14
    if iters == 20:
        # it ends on a column step, and eps keeps a sum of 1 at 1 / (1 + eps)
        assert torch.allclose(sinkhorn(z, iters, EPS).sum(-2), torch.full((5, 4), 0.999999, dtype=torch.float64), atol=1e-7)


def test_sinkhorn_of_extreme_logits_is_finite():
    z = torch.tensor([[[200.0, -200, 0, 0], [200, -200, 0, 0], [-200, -200, -200, -200], [0, 0, 0, 0]]])
    c = sinkhorn(z, 20, EPS)
    assert c.isfinite().all()
    assert torch.allclose(c.sum(-2), torch.ones(1, 4), atol=1e-4)


@pytest.mark.parametrize(("T", "C"), [(1, 8), (3, 33)])
def test_pre_matches_the_loops(T, C):
    h, (fn, base, scale) = torch.randn(T, 4, C, dtype=torch.float64), site(C, dtype=torch.float64)
    x, post, comb = mhc_pre(h, fn, base, scale, **CONFIG)
    for t in range(T):
        want = loops_pre(h[t].tolist(), fn.tolist(), base.tolist(), scale.tolist())
        for got, loops in zip((x[t], post[t], comb[t]), want, strict=True):
            assert rel_err(got, torch.tensor(loops, dtype=torch.float64)) < 1e-13


# V4-Flash's hidden size and V4-Pro's
@pytest.mark.parametrize("C", [4096, 7168])
def test_pre_at_model_size(C):
    h, parameters = torch.randn(3, 4, C), site(C)
    want = mhc_pre(h.double(), *parameters, **CONFIG)
    for got, exact in zip(mhc_pre(h, *parameters, **CONFIG), want, strict=True):
        assert got.dtype == torch.float32
        assert worst_row_err(got, exact) < FP32_STEP
    x, post, comb = mhc_pre(h.bfloat16(), *parameters, **CONFIG)
    full = mhc_pre(h.bfloat16().float(), *parameters, **CONFIG)
    assert same_bits(x, full[0].bfloat16())
    assert same_bits(post, full[1])
    assert same_bits(comb, full[2])


def test_column_order_is_stream_major():
    """Stream j is read by columns j * C .. (j + 1) * C - 1 of fn; equal streams read the sum over the four blocks."""
    C = 6
    fn, base, scale = site(C, dtype=torch.float64)
    h = torch.zeros(1, 4, C, dtype=torch.float64)
    h[0, 2, 5] = 1.0
    r = 1 / math.sqrt(1 / (4 * C) + EPS)
    post = mhc_pre(h, fn, base, scale, **CONFIG)[1]
    assert rel_err(post[0], 2 * torch.sigmoid(fn[4:8, 2 * C + 5] * r * scale[1] + base[4:8])) < 1e-14
    e = torch.randn(1, C, dtype=torch.float64)
    first = mhc_pre(e[:, None].expand(1, 4, C), fn, base, scale, **CONFIG)[1]
    m = fn.view(24, 4, C).sum(1)[4:8] @ e[0] / (e.square().mean() + EPS).sqrt()
    assert rel_err(first[0], 2 * torch.sigmoid(m * scale[1] + base[4:8])) < 1e-14


def test_parameters_are_not_rounded():
    """bfloat16 parameters move the gates by 1e-3 and more; they are refused."""
    C = 512
    h, (fn, base, scale) = torch.randn(2, 4, C), site(C)
    comb = mhc_pre(h, fn, base, scale, **CONFIG)[2]
    assert rel_err(mhc_pre(h, fn.bfloat16().float(), base.bfloat16().float(), scale, **CONFIG)[2], comb) > 5e-4
    with pytest.raises(ValueError, match=r"mhc_pre: fn must be \[24, 2048\] float32 or float64 on cpu, got .* bfloat16"):
        mhc_pre(h, fn.bfloat16(), base, scale, **CONFIG)


def test_post_contracts_over_the_first_index():
    """comb[j, k] carries stream j to stream k."""
    C = 5
    h, y = torch.randn(1, 4, C), torch.randn(1, C)
    comb = torch.zeros(1, 4, 4)
    comb[0, 0, 1] = comb[0, 3, 2] = 1.0
    out = mhc_post(y, h, torch.tensor([[0.0, 0, 0, 2]]), comb)
    assert torch.equal(out[0], torch.stack((torch.zeros(C), h[0, 0], h[0, 3], 2 * y[0])))


@pytest.mark.parametrize(("T", "C"), [(1, 1), (3, 65), (2, 4096)])
def test_post_matches_the_loops(T, C):
    h, y = torch.randn(T, 4, C, dtype=torch.float64), torch.randn(T, C, dtype=torch.float64)
    post, comb = torch.rand(T, 4, dtype=torch.float64), torch.rand(T, 4, 4, dtype=torch.float64)
    want = torch.stack([post[:, k, None] * y + sum(comb[:, j, k, None] * h[:, j] for j in range(4)) for k in range(4)], dim=1)
    assert rel_err(mhc_post(y, h, post, comb), want) < 1e-14
    assert rel_err(mhc_post(y.float(), h.float(), post.float(), comb.float()), want) < FP32_STEP
    low = mhc_post(y.bfloat16(), h.bfloat16(), post.float(), comb.float())
    full = mhc_post(y.bfloat16().float(), h.bfloat16().float(), post.float(), comb.float())
    assert same_bits(low, full.bfloat16())
    assert rel_err(low, mhc_post(y.bfloat16().double(), h.bfloat16().double(), post, comb)) < BF16_STEP


def test_a_long_stack_neither_grows_nor_dies():
    """Mixing has eigenvalue 1 (a nearly doubly stochastic comb), so 86 sites without output keep the mean."""
    C = 64
    h = torch.randn(2, 4, C, dtype=torch.float64)
    mean, comb = h.mean(1), sinkhorn(torch.randn(2, 4, 4, dtype=torch.float64), 200, 0.0)
    for _ in range(86):
        h = mhc_post(torch.zeros(2, C, dtype=torch.float64), h, torch.ones(2, 4, dtype=torch.float64), comb)
    assert rel_err(h.mean(1), mean) < 1e-9


@pytest.mark.parametrize("C", [7, 4096])
def test_head_is_pre_without_sinkhorn(C):
    h, (fn, base, scale) = torch.randn(3, 4, C, dtype=torch.float64), site(C, 4, 1, torch.float64)
    got = mhc_head(h, fn, base, scale, norm_eps=EPS, hc_eps=EPS)
    m = torch.einsum("rjc,tjc->tr", fn.view(4, 4, C), h) / (h.square().mean((1, 2)) + EPS).sqrt()[:, None]
    pre = 1 / (1 + (-(m * scale + base)).exp()) + EPS
    assert rel_err(got, (pre[:, :, None] * h).sum(1)) < 1e-13
    assert rel_err(mhc_head(h.float(), fn.float(), base.float(), scale.float(), norm_eps=EPS, hc_eps=EPS), got) < FP32_STEP
    low = mhc_head(h.bfloat16(), fn.float(), base.float(), scale.float(), norm_eps=EPS, hc_eps=EPS)
    assert low.dtype == torch.bfloat16
    assert rel_err(low, mhc_head(h.bfloat16().double(), fn, base, scale, norm_eps=EPS, hc_eps=EPS)) < BF16_STEP


def test_a_row_alone_is_the_row_in_a_batch():
    h, parameters = torch.randn(9, 4, 64), site(64)
    whole = mhc_pre(h, *parameters, **CONFIG)
    for got, batch in zip(mhc_pre(h[4:5], *parameters, **CONFIG), whole, strict=True):
        assert rel_err(got[0], batch[4]) < FP32_STEP
    dirty = h.clone()
    dirty[7] = float("nan")
    for got, batch in zip(mhc_pre(dirty, *parameters, **CONFIG), whole, strict=True):
        assert rel_err(got[:7], batch[:7]) < FP32_STEP
        assert got[7].isnan().all()


def test_no_tokens():
    empty, parameters = torch.empty(0, 4, 16).bfloat16(), site(16)
    x, post, comb = mhc_pre(empty, *parameters, **CONFIG)
    assert (x.shape, post.shape, comb.shape) == ((0, 16), (0, 4), (0, 4, 4))
    assert mhc_post(x, empty, post, comb).shape == (0, 4, 16)
    assert mhc_head(empty, *site(16, 4, 1), norm_eps=EPS, hc_eps=EPS).shape == (0, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h, s: mhc_pre(h[:, :3], *s, **CONFIG), r"mhc_pre: streams must be \[T, 4, C\] .* got \[2, 3, 8\]"),
        (lambda h, s: mhc_pre(h.int(), *s, **CONFIG), r"mhc_pre: streams must be .* got \[2, 4, 8\] int32"),
        (lambda h, s: mhc_pre(h, s[0][:23], *s[1:], **CONFIG), r"mhc_pre: fn must be \[24, 32\] .* got \[23, 32\]"),
        (lambda h, s: mhc_pre(h, s[0], s[1][:4], s[2], **CONFIG), r"mhc_pre: base must be \[24\] .* got \[4\]"),
        (lambda h, s: mhc_pre(h, s[0], s[1], s[2][:1], **CONFIG), r"mhc_pre: scale must be \[3\] .* got \[1\]"),
        (lambda h, s: mhc_pre(h, *s, norm_eps=EPS, hc_eps=EPS, iters=0), r"mhc_pre: iters must be >= 1, got 0"),
        (lambda h, s: sinkhorn(h, 20, EPS), r"sinkhorn: logits must be \[T, 4, 4\] .* got \[2, 4, 8\]"),
        (lambda h, s: sinkhorn(h[..., :4], 0, EPS), r"sinkhorn: iters must be >= 1, got 0"),
        (
            lambda h, s: mhc_post(h[:, 0, :7], h, h[..., 0], h[..., :4]),
            r"mhc_post: y must be \[2, 8\] float32 on cpu, got \[2, 7",
        ),
        (
            lambda h, s: mhc_post(h[:, 0], h, h[..., 0].double(), h[..., :4]),
            r"mhc_post: post must be \[2, 4\] float32 .* float64",
        ),
        (lambda h, s: mhc_post(h[:, 0], h, h[..., 0], h[..., :3]), r"mhc_post: comb must be \[2, 4, 4\] .* got \[2, 4, 3\]"),
        (lambda h, s: mhc_head(h, *s, norm_eps=EPS, hc_eps=EPS), r"mhc_head: fn must be \[4, 32\] .* got \[24, 32\]"),
    ],
)
def test_rejects(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 4, 8), site(8))
