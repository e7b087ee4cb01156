"""Attention over a window, a sink and compressed entries; the indexer's scores; its loss. Products are torch's.

Queries in chunks of a window see their own chunk's rows and those before: [B, chunks, W, H, 2 W] logits, and [B, S, H, N] of
the entries. One program takes a token with all its heads through the softmax, or back.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from training.kernels import product

Tensor = torch.Tensor


@triton.jit
def _near(near_ptr, t, w, first, scale, H: tl.constexpr, W: tl.constexpr):
    """A token's logits over the window [H, 2 W]; places outside are -inf."""
    h, j = tl.arange(0, H)[:, None], tl.arange(0, 2 * W)[None, :]
    seen = (j > w) & (j <= w + W) & ((j >= W) | (first == 0))
    return tl.where(seen, tl.load(near_ptr + (t * H + h) * 2 * W + j) * scale, float("-inf"))


@triton.jit
def spread_kernel(
    near_ptr, far_ptr, sink_ptr, chosen_ptr, near_out_ptr, far_out_ptr, sink_out_ptr, S, N, ratio, scale,
    H: tl.constexpr, W: tl.constexpr, BLOCK_N: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    s = t % S
    h, j = tl.arange(0, H)[:, None], tl.arange(0, 2 * W)[None, :]
    near = _near(near_ptr, t, s % W, s < W, scale, H, W)
    sink = tl.load(sink_ptr + tl.arange(0, H))
    top = tl.maximum(tl.max(near, 1), sink)
    if BLOCK_N:
        n = tl.arange(0, BLOCK_N)[None, :]
        seen = n < (s + 1) // ratio
        if CHOSEN:
            seen = seen & (tl.load(chosen_ptr + t * N + n, mask=n < N, other=0) != 0)
        far = tl.load(far_ptr + (t * H + h) * N + n, mask=seen & (n < N), other=0.0) * scale
        far = tl.where(seen, far, float("-inf"))
        top = tl.maximum(top, tl.max(far, 1))
        far = tl.exp(far - top[:, None])
    near = tl.exp(near - top[:, None])
    sink = tl.exp(sink - top)
    total = tl.sum(near, 1) + sink
    if BLOCK_N:
        total += tl.sum(far, 1)
        tl.store(far_out_ptr + (t * H + h) * N + n, far / total[:, None], mask=n < N)
    tl.store(near_out_ptr + (t * H + h) * 2 * W + j, near / total[:, None])
    tl.store(sink_out_ptr + t * H + tl.arange(0, H), sink / total)


@triton.jit
def spread_back_kernel(
    near_ptr, far_ptr, sink_ptr, dnear_ptr, dfar_ptr, near_out_ptr, far_out_ptr, sink_out_ptr, N, scale,
    H: tl.constexpr, W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h, j = tl.arange(0, H)[:, None], tl.arange(0, 2 * W)[None, :]
    at = (t * H + h) * 2 * W + j
    p = tl.load(near_ptr + at).to(tl.float32)
    d = tl.load(dnear_ptr + at).to(tl.float32)
    mean = tl.sum(p * d, 1)
    if BLOCK_N:
        n = tl.arange(0, BLOCK_N)[None, :]
        far_at = (t * H + h) * N + n
        q = tl.load(far_ptr + far_at, mask=n < N, other=0.0).to(tl.float32)
        e = tl.load(dfar_ptr + far_at, mask=n < N, other=0.0).to(tl.float32)
        mean += tl.sum(q * e, 1)
        tl.store(far_out_ptr + far_at, q * (e - mean[:, None]) * scale, mask=n < N)
    tl.store(near_out_ptr + at, p * (d - mean[:, None]) * scale)
    lane = t * H + tl.arange(0, H)
    tl.store(sink_out_ptr + lane, -tl.load(sink_ptr + lane) * mean)


@triton.jit
def index_loss_kernel(
    near_ptr, far_ptr, sink_ptr, score_ptr, loss_ptr, grad_ptr, S, N, ratio, scale,
    H: tl.constexpr, W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    s = t % S
    h, n = tl.arange(0, H)[:, None], tl.arange(0, BLOCK_N)[None, :]
    near = _near(near_ptr, t, s % W, s < W, scale, H, W)
    sink = tl.load(sink_ptr + tl.arange(0, H))
    seen = n < (s + 1) // ratio
    far = tl.where(seen, tl.load(far_ptr + (t * H + h) * N + n, mask=seen & (n < N), other=0.0) * scale, float("-inf"))
    top = tl.maximum(tl.maximum(tl.max(near, 1), sink), tl.max(far, 1))
    far = tl.exp(far - top[:, None])
    total = tl.sum(tl.exp(near - top[:, None]), 1) + tl.exp(sink - top) + tl.sum(far, 1)
    target = tl.sum(far / total[:, None], 0)
    target /= tl.maximum(tl.sum(target, 0), 1e-20)
    n = tl.arange(0, BLOCK_N)
    seen = n < (s + 1) // ratio
    score = tl.load(score_ptr + t * N + n, mask=seen & (n < N), other=0.0)
    # a token that sees nothing: any softmax, of which nothing is taken
    score = tl.where(seen | (s + 1 < ratio), score, float("-inf"))
    score -= tl.max(score, 0)
    told = tl.exp(score)
    total = tl.sum(told, 0)
    # where nothing is told, 0 times infinity is not 0
    log_told = tl.where(seen, score, 0.0) - tl.log(total)
    tl.store(loss_ptr + t, tl.sum(target * (tl.log(tl.maximum(target, 1e-38)) - log_told), 0))
    tl.store(grad_ptr + t * N + n, tl.where(seen, tl.sum(target, 0) * told / total - target, 0.0), mask=n < N)


@triton.jit
def index_sum_kernel(dot_ptr, weight_ptr, out_ptr, N, H: tl.constexpr, BLOCK_N: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h, n = tl.arange(0, H)[:, None], tl.arange(0, BLOCK_N)[None, :]
    dots = tl.load(dot_ptr + (t * H + h) * N + n, mask=n < N, other=0.0).to(tl.float32)
    total = tl.sum(tl.maximum(dots, 0.0) * tl.load(weight_ptr + t * H + h), 0)
    n = tl.arange(0, BLOCK_N)
    tl.store(out_ptr + t * N + n, total, mask=n < N)


@triton.jit
def index_sum_back_kernel(dot_ptr, weight_ptr, grad_ptr, ddot_ptr, dweight_ptr, N, H: tl.constexpr, BLOCK_N: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h, n = tl.arange(0, H)[:, None], tl.arange(0, BLOCK_N)[None, :]
    at = (t * H + h) * N + n
    dots = tl.load(dot_ptr + at, mask=n < N, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + t * N + n, mask=n < N, other=0.0)
    tl.store(ddot_ptr + at, tl.where(dots > 0, g * tl.load(weight_ptr + t * H + h), 0.0), mask=n < N)
    tl.store(dweight_ptr + t * H + tl.arange(0, H), tl.sum(tl.maximum(dots, 0.0) * g, 1))


class Attend(torch.autograd.Function):
    """q [B, S, H, D], kv [B, S, D], entries [B, N, D] or None, sink float32 [H], chosen bool [B, S, N] or None.

    Gives the output [B, S, H, D]; with scores [B, S, N] the indexer's loss too, summed over tokens.
    """

    @staticmethod
    def forward(ctx, q, kv, entries, sink, scores, chosen, W, ratio):
        B, S, H, D = q.shape
        N = entries.shape[1] if entries is not None else 0
        padded = F.pad(kv, (0, 0, W, 0)).unflatten(1, (-1, W))
        rows = torch.cat((padded[:, :-1], padded[:, 1:]), dim=2).flatten(0, 1)  # [B * chunks, 2W, D]
        chunked, whole = q.view(len(rows), W * H, D), q.view(B, S * H, D)
        near = product(chunked, rows.mT)
        far = product(whole, entries.mT) if N else None
        flags = {"H": H, "W": W, "BLOCK_N": triton.next_power_of_2(N) if N else 0, "num_warps": 4}
        scale, loss, dscores = D**-0.5, sink.new_zeros(()), None
        if scores is not None and N:
            each, dscores = sink.new_empty(B * S), torch.empty_like(scores)
            index_loss_kernel[B * S,](near, far, sink, scores, each, dscores, S, N, ratio, scale, **flags)
            loss = each.sum()
        near_w, far_w = q.new_empty(near.shape), None if far is None else q.new_empty(far.shape)
        sink_w = sink.new_empty(B * S, H)
        spread_kernel[B * S,](
            near, far, sink, chosen, near_w, far_w, sink_w, S, N, max(1, ratio), scale, **flags, CHOSEN=chosen is not None
        )
        out = torch.bmm(near_w, rows)
        if N:
            out = torch.baddbmm(out.view(B, S * H, D), far_w, entries)
        ctx.save_for_backward(q, rows, entries, near_w, far_w, sink_w, dscores)
        ctx.sizes, ctx.flags = (N, scale), flags
        return out.view(B, S, H, D), loss

    @staticmethod
    def backward(ctx, grad, dloss):
        q, rows, entries, near_w, far_w, sink_w, dscores = ctx.saved_tensors
        B, S, H, D = q.shape
        N, W = ctx.sizes[0], ctx.flags["W"]
        grad = grad.contiguous()
        chunked, whole = (x.view(len(rows), W * H, D) for x in (q, grad)), (x.view(B, S * H, D) for x in (q, grad))
        (q_near, g_near), (q_far, g_far) = chunked, whole
        dnear, dfar = torch.bmm(g_near, rows.mT), torch.bmm(g_far, entries.mT) if N else None
        # in place: a program reads what it writes
        dsink = torch.empty_like(sink_w)
        spread_back_kernel[B * S,](near_w, far_w, sink_w, dnear, dfar, dnear, dfar, dsink, *ctx.sizes, **ctx.flags)
        dq = torch.bmm(dnear, rows)
        drows = torch.baddbmm(torch.bmm(near_w.mT, g_near), dnear.mT, q_near).view(B, -1, 2 * W, D)
        # a chunk's rows are seen from its own queries and from the next chunk's
        dkv = drows[:, :, W:].clone()
        dkv[:, :-1] += drows[:, 1:, :W]
        dentries = None
        if N:
            dq = torch.baddbmm(dq.view(B, S * H, D), dfar, entries)
            dentries = torch.baddbmm(torch.bmm(far_w.mT, g_far), dfar.mT, q_far)
        dscores = None if dscores is None else dscores * dloss
        return dq.view_as(q), dkv.view(B, S, D), dentries, dsink.sum(0), dscores, None, None, None


class IndexSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dots, weights):
        T, H, N = weights[..., 0].numel(), weights.shape[-1], dots.shape[-1]
        flags = {"H": H, "BLOCK_N": triton.next_power_of_2(N), "num_warps": 4}
        out = weights.new_empty(*weights.shape[:-1], N)
        index_sum_kernel[T,](dots, weights, out, N, **flags)
        ctx.save_for_backward(dots, weights)
        ctx.flags = flags
        return out

    @staticmethod
    def backward(ctx, grad):
        dots, weights = ctx.saved_tensors
        ddots, dweights = torch.empty_like(dots), torch.empty_like(weights)
        T = weights[..., 0].numel()
        index_sum_back_kernel[T,](dots, weights, grad.contiguous(), ddots, dweights, dots.shape[-1], **ctx.flags)
        return ddots, dweights


def attend(
    q: Tensor,
    kv: Tensor,
    entries: Tensor | None,
    sink: Tensor,
    scores: Tensor | None,
    chosen: Tensor | None,
    W: int,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    """What `Attend` gives; S must be a multiple of W."""
    # where every visible entry is chosen, one row stands for all sequences
    chosen = None if chosen is None else chosen.contiguous()
    return Attend.apply(q.contiguous(), kv.contiguous(), entries, sink, scores, chosen, W, ratio)


def index_sum(dots: Tensor, weights: Tensor) -> Tensor:
    """Scores [B, S, N] float32 from dots [B, S * H, N] and weights [B, S, H] float32."""
    return IndexSum.apply(dots.contiguous(), weights.contiguous())
