"""The compressor's pooling: an entry is its rows' softmax, channel by channel, over their gates; ratio 4 overlaps.

kv, score [B, S, d], or [B, S, 2 d] where entry n pools the first half of its channels from block n - 1 and the second from n.
"""

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor


@triton.jit
def _tile(
    kv_ptr, score_ptr, ape_ptr, S, N, width, RATIO: tl.constexpr, OVERLAP: tl.constexpr, d: tl.constexpr, BC: tl.constexpr
):
    ROWS: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    b, n = tl.program_id(0).to(tl.int64) // N, tl.program_id(0) % N
    row = tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    token = n * RATIO + row
    channel = col + 0 * row
    if OVERLAP:
        token -= RATIO
        channel += tl.where(row >= RATIO, d, 0)
    live = (token >= 0) & (col < d)
    at = (b * S + token) * width + channel
    kv = tl.load(kv_ptr + at, mask=live, other=0.0).to(tl.float32)
    score = tl.load(score_ptr + at, mask=live, other=0.0).to(tl.float32)
    score += tl.load(ape_ptr + (row % RATIO) * width + channel, mask=live, other=0.0).to(tl.float32)
    # a channel past the last has rows too, so that nothing is divided by nothing
    score = tl.where(live | (col >= d), score, float("-inf"))
    p = tl.exp(score - tl.max(score, 0)[None, :])
    return at, live, kv, p / tl.sum(p, 0)[None, :], col


@triton.jit
def forward_kernel(
    kv_ptr, score_ptr, ape_ptr, out_ptr, S, N, width,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, d: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    _, _, kv, p, col = _tile(kv_ptr, score_ptr, ape_ptr, S, N, width, RATIO, OVERLAP, d, BC)
    at = tl.program_id(0).to(tl.int64) * d + col
    tl.store(out_ptr + at, tl.sum(kv * p, 0)[None, :], mask=col < d)


@triton.jit
def backward_kernel(
    kv_ptr, score_ptr, ape_ptr, grad_ptr, dkv_ptr, dscore_ptr, S, N, width,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, d: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    at, live, kv, p, col = _tile(kv_ptr, score_ptr, ape_ptr, S, N, width, RATIO, OVERLAP, d, BC)
    g = tl.load(grad_ptr + tl.program_id(0).to(tl.int64) * d + col, mask=col < d, other=0.0).to(tl.float32)
    tl.store(dkv_ptr + at, p * g, mask=live)
    tl.store(dscore_ptr + at, p * g * (kv - tl.sum(kv * p, 0)[None, :]), mask=live)


class Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv, score, ape, ratio):
        B, S, width = kv.shape
        overlap = ratio == 4
        d, N = width // 2 if overlap else width, S // ratio
        flags = {"RATIO": ratio, "OVERLAP": overlap, "d": d, "num_warps": 4}
        flags["BC"] = min(triton.next_power_of_2(d), 512 if overlap else 32)
        out = kv.new_empty(B, N, d)
        grid, sizes = (B * N, triton.cdiv(d, flags["BC"])), (S, N, width)
        forward_kernel[grid](kv, score, ape, out, *sizes, **flags)
        ctx.save_for_backward(kv, score, ape)
        ctx.grid, ctx.sizes, ctx.flags = grid, sizes, flags
        return out

    @staticmethod
    def backward(ctx, grad):
        kv, score, ape = ctx.saved_tensors
        # tokens behind the last entry, and a last block's first half, are in none
        dkv, dscore = torch.zeros_like(kv), torch.zeros_like(score)
        backward_kernel[ctx.grid](kv, score, ape, grad.contiguous(), dkv, dscore, *ctx.sizes, **ctx.flags)
        ratio, whole = ctx.flags["RATIO"], ctx.sizes[1] * ctx.flags["RATIO"]
        dape = dscore[:, :whole].unflatten(1, (-1, ratio)).sum((0, 1), dtype=torch.float32)
        return dkv, dscore, dape.to(ape.dtype), None


def pool(kv: Tensor, score: Tensor, ape: Tensor, ratio: int) -> Tensor:
    """[B, S // ratio, d] of kv and score, contiguous; ape [ratio, width] is added to the score."""
    return Pool.apply(kv, score, ape.contiguous(), ratio)
