"""RMSNorm and rotation of rows: both, or either, in one pass.

y = turn(x * rsqrt(mean(x^2) + eps) * weight). Rows are [B, L, H] of them: a row's rotation is that of its place in L.
"""

import torch
import triton
import triton.language as tl

from training.kernels import programs

Tensor = torch.Tensor


@triton.jit
def forward_kernel(
    x_ptr, w_ptr, cos_ptr, sin_ptr, out_ptr, rows, L, H, eps, sign,
    D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = (row < rows)[:, None]
    col = tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + row[:, None] * D + col, mask=live, other=0.0).to(tl.float32)
    y = x
    if NORM:
        r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        y = y * r
    if WEIGHT:
        y = y * tl.load(w_ptr + col).to(tl.float32)
    tl.store(out_ptr + row[:, None] * D + col, y, mask=live & (col < D - 2 * HALF))
    if HALF:
        pair = tl.arange(0, HALF)[None, :]
        at = row[:, None] * D + D - 2 * HALF + 2 * pair
        e = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        o = tl.load(x_ptr + at + 1, mask=live, other=0.0).to(tl.float32)
        if NORM:
            e, o = e * r, o * r
        if WEIGHT:
            e *= tl.load(w_ptr + D - 2 * HALF + 2 * pair).to(tl.float32)
            o *= tl.load(w_ptr + D - 2 * HALF + 2 * pair + 1).to(tl.float32)
        turn = ((row // H) % L)[:, None] * HALF + pair
        c = tl.load(cos_ptr + turn)
        s = tl.load(sin_ptr + turn) * sign
        tl.store(out_ptr + at, e * c - o * s, mask=live)
        tl.store(out_ptr + at + 1, e * s + o * c, mask=live)


@triton.jit
def backward_kernel(
    x_ptr, w_ptr, cos_ptr, sin_ptr, grad_ptr, out_ptr, part_ptr, rows, L, H, eps, sign, each,
    D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, D)[None, :]
    still = col < D - 2 * HALF
    pair = tl.arange(0, HALF if HALF else 1)[None, :]
    w = tl.full((1, D), 1.0, tl.float32)
    we = tl.full((1, HALF if HALF else 1), 1.0, tl.float32)
    wo = we
    if WEIGHT:
        w = tl.load(w_ptr + col).to(tl.float32)
        if HALF:
            we = tl.load(w_ptr + D - 2 * HALF + 2 * pair).to(tl.float32)
            wo = tl.load(w_ptr + D - 2 * HALF + 2 * pair + 1).to(tl.float32)
    # what the weight's gradient has gathered: of channels that are not rotated, and of the others
    gathered = tl.zeros((1, D), tl.float32)
    gathered_e = tl.zeros((1, HALF if HALF else 1), tl.float32)
    gathered_o = gathered_e
    for i in range(each):
        row = (tl.program_id(0).to(tl.int64) * each + i) * BLOCK_R + tl.arange(0, BLOCK_R)
        live = (row < rows)[:, None]
        at = row[:, None] * D + col
        x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        g = tl.load(grad_ptr + at, mask=live & still, other=0.0).to(tl.float32)
        if NORM:
            r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            along = tl.sum(g * w * x, 1)[:, None]
        if HALF:
            at2 = row[:, None] * D + D - 2 * HALF + 2 * pair
            e = tl.load(x_ptr + at2, mask=live, other=0.0).to(tl.float32)
            o = tl.load(x_ptr + at2 + 1, mask=live, other=0.0).to(tl.float32)
            ye = tl.load(grad_ptr + at2, mask=live, other=0.0).to(tl.float32)
            yo = tl.load(grad_ptr + at2 + 1, mask=live, other=0.0).to(tl.float32)
            turn = ((row // H) % L)[:, None] * HALF + pair
            c = tl.load(cos_ptr + turn)
            s = tl.load(sin_ptr + turn) * sign
            ge, go = ye * c + yo * s, yo * c - ye * s
            if NORM:
                along += tl.sum(ge * we * e + go * wo * o, 1)[:, None]
                gathered_e += tl.sum(ge * e * r, 0)[None, :]
                gathered_o += tl.sum(go * o * r, 0)[None, :]
                less = r * r * r * along / D
                ge, go = ge * we * r - e * less, go * wo * r - o * less
            tl.store(out_ptr + at2, ge, mask=live)
            tl.store(out_ptr + at2 + 1, go, mask=live)
        if NORM:
            gathered += tl.sum(g * x * r, 0)[None, :]
            g = g * w * r - x * (r * r * r * along / D)
        tl.store(out_ptr + at, g, mask=live & still)
    if WEIGHT:
        at = tl.program_id(0).to(tl.int64) * D
        tl.store(part_ptr + at + col, gathered, mask=still)
        if HALF:
            tl.store(part_ptr + at + D - 2 * HALF + 2 * pair, gathered_e)
            tl.store(part_ptr + at + D - 2 * HALF + 2 * pair + 1, gathered_o)


class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps, heads, sign):
        x = x.contiguous()
        D, rows = x.shape[-1], x.numel() // x.shape[-1]
        half, length = (cos.shape[1], cos.shape[0]) if cos is not None else (0, 1)
        block = max(1, 2048 // D)
        flags = {"D": D, "HALF": half, "NORM": eps is not None, "WEIGHT": weight is not None, "BLOCK_R": block, "num_warps": 4}
        sizes = (rows, length, heads, eps or 0.0, sign)
        out = torch.empty_like(x)
        forward_kernel[triton.cdiv(rows, block),](x, weight, cos, sin, out, *sizes, **flags)
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.sizes, ctx.flags = sizes, flags
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, cos, sin = ctx.saved_tensors
        count, each = programs(triton.cdiv(ctx.sizes[0], ctx.flags["BLOCK_R"]))
        out = torch.empty_like(x)
        parts = None if weight is None else x.new_empty(count, x.shape[-1], dtype=torch.float32)
        backward_kernel[count,](x, weight, cos, sin, grad.contiguous(), out, parts, *ctx.sizes, each, **ctx.flags)
        return out, None if parts is None else parts.sum(0).to(weight.dtype), None, None, None, None, None


def rows(x: Tensor, weight: Tensor | None, turns: tuple[Tensor, Tensor] | None, eps: float | None, inverse: bool) -> Tensor:
    """x [B, L, ..., D]: normed if there is an eps, times the weight if there is one, rotated if there are turns [L, R / 2]."""
    cos, sin = turns or (None, None)
    heads = x[0, 0].numel() // x.shape[-1]
    return Rows.apply(x, weight, cos, sin, eps, heads, -1.0 if inverse else 1.0)
