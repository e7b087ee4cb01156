"""Hyper-connections: what a sublayer reads from the four streams, and how its output is written into them.

Read: gates from the mixing product, their sum over the streams, RMSNorm; the gates of the write and Sinkhorn's logits besides.
The mixing product takes bfloat16 streams exactly, its float32 weights as two bfloat16 numbers; its gradient is bfloat16.
"""

import torch
import triton
import triton.language as tl

from training.kernels import product, programs

Tensor = torch.Tensor


@triton.jit
def _stream(s_ptr, t, j, col, mask, C):
    return tl.load(s_ptr + (t[:, None] * 4 + j) * C + col, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _column(m, at, j):
    """Column j of m [BLOCK_T, 32]."""
    return tl.sum(tl.where(at == j, m, 0.0), 1)[:, None]


@triton.jit
def read_kernel(
    s_ptr, raw_ptr, base_ptr, scale_ptr, w_ptr, x_ptr, post_ptr, z_ptr, T, C, eps, hc_eps,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col, row = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, 32)[None, :]
    mask, live = (t < T)[:, None] & (col < C), (t < T)[:, None] & (row < 24)
    a, b = _stream(s_ptr, t, 0, col, mask, C), _stream(s_ptr, t, 1, col, mask, C)
    c, d = _stream(s_ptr, t, 2, col, mask, C), _stream(s_ptr, t, 3, col, mask, C)
    r = tl.rsqrt(tl.sum(a * a + b * b + c * c + d * d, 1) / (4 * C) + eps)[:, None]
    raw = tl.load(raw_ptr + t[:, None] * 24 + row, mask=live, other=0.0)
    scale = tl.load(scale_ptr + row, mask=row < 24, other=0.0)
    m = raw * r * scale + tl.load(base_ptr + row, mask=row < 24, other=0.0)
    g = tl.sigmoid(m)
    tl.store(post_ptr + t[:, None] * 4 + row - 4, 2 * g, mask=live & (row >= 4) & (row < 8))
    tl.store(z_ptr + t[:, None] * 16 + row - 8, m, mask=live & (row >= 8))
    g += hc_eps
    x = _column(g, row, 0) * a + _column(g, row, 1) * b + _column(g, row, 2) * c + _column(g, row, 3) * d
    x *= tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None] * tl.load(w_ptr + col, mask=col < C, other=0.0).to(tl.float32)
    tl.store(x_ptr + t[:, None] * C + col, x, mask=mask)


@triton.jit
def read_back_kernel(
    s_ptr, raw_ptr, base_ptr, scale_ptr, w_ptr, dx_ptr, dpost_ptr, dz_ptr, ds_ptr, draw_ptr, dm_ptr, dscaled_ptr, part_ptr,
    T, C, eps, hc_eps, each, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    col, row = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, 32)[None, :]
    w = tl.load(w_ptr + col, mask=col < C, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row, mask=row < 24, other=0.0)
    base = tl.load(base_ptr + row, mask=row < 24, other=0.0)
    gathered = tl.zeros((1, BLOCK_C), tl.float32)
    for i in range(each):
        t = (tl.program_id(0).to(tl.int64) * each + i) * BLOCK_T + tl.arange(0, BLOCK_T)
        mask, live = (t < T)[:, None] & (col < C), (t < T)[:, None] & (row < 24)
        a, b = _stream(s_ptr, t, 0, col, mask, C), _stream(s_ptr, t, 1, col, mask, C)
        c, d = _stream(s_ptr, t, 2, col, mask, C), _stream(s_ptr, t, 3, col, mask, C)
        r = tl.rsqrt(tl.sum(a * a + b * b + c * c + d * d, 1) / (4 * C) + eps)[:, None]
        at = t[:, None] * 24 + row
        raw = tl.load(raw_ptr + at, mask=live, other=0.0)
        sig = tl.sigmoid(raw * r * scale + base)
        g = sig + hc_eps
        g0, g1, g2, g3 = _column(g, row, 0), _column(g, row, 1), _column(g, row, 2), _column(g, row, 3)
        x = g0 * a + g1 * b + g2 * c + g3 * d
        rx = tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None]
        dy = tl.load(dx_ptr + t[:, None] * C + col, mask=mask, other=0.0).to(tl.float32)
        gathered += tl.sum(dy * x * rx, 0)[None, :]
        dx = dy * w * rx - x * (rx * rx * rx * tl.sum(dy * w * x, 1)[:, None] / C)
        # of the gates: from x, from the write, from Sinkhorn's logits
        dg = tl.where(row == 0, tl.sum(dx * a, 1)[:, None], 0.0) + tl.where(row == 1, tl.sum(dx * b, 1)[:, None], 0.0)
        dg += tl.where(row == 2, tl.sum(dx * c, 1)[:, None], 0.0) + tl.where(row == 3, tl.sum(dx * d, 1)[:, None], 0.0)
        dg += 2 * tl.load(dpost_ptr + t[:, None] * 4 + row - 4, mask=live & (row >= 4) & (row < 8), other=0.0)
        dm = dg * sig * (1 - sig) + tl.load(dz_ptr + t[:, None] * 16 + row - 8, mask=live & (row >= 8), other=0.0)
        tl.store(dm_ptr + at, dm, mask=live)
        tl.store(dscaled_ptr + at, dm * raw * r, mask=live)
        dm *= scale
        tl.store(draw_ptr + at, dm * r, mask=live)
        less = r * r * r * tl.sum(dm * raw, 1)[:, None] / (4 * C)
        out = ds_ptr + t[:, None] * 4 * C + col
        tl.store(out, g0 * dx - less * a, mask=mask)
        tl.store(out + C, g1 * dx - less * b, mask=mask)
        tl.store(out + 2 * C, g2 * dx - less * c, mask=mask)
        tl.store(out + 3 * C, g3 * dx - less * d, mask=mask)
    tl.store(part_ptr + tl.program_id(0).to(tl.int64) * C + col, gathered, mask=col < C)


class Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flat, fn, base, scale, weight, eps, hc_eps):
        T, _, C = flat.shape
        if flat.dtype == torch.bfloat16:
            high = fn.bfloat16()
            parts = product(flat.flatten(1), torch.cat((high, (fn - high).bfloat16())).mT)
            raw = parts[:, :24] + parts[:, 24:]
        else:
            raw = product(flat.flatten(1), fn.mT)
        # one for each row of fn: 4 read, 4 write, 16 mix
        scales = torch.cat((scale[:1].expand(4), scale[1:2].expand(4), scale[2:].expand(16)))
        x, post, z = flat.new_empty(T, C), raw.new_empty(T, 4), raw.new_empty(T, 4, 4)
        flags = {"BLOCK_C": triton.next_power_of_2(C), "BLOCK_T": max(1, 1024 // triton.next_power_of_2(C)), "num_warps": 4}
        read_kernel[triton.cdiv(T, flags["BLOCK_T"]),](flat, raw, base, scales, weight, x, post, z, T, C, eps, hc_eps, **flags)
        ctx.save_for_backward(flat, raw, fn, base, scales, weight)
        ctx.sizes, ctx.flags = (T, C, eps, hc_eps), flags
        return x, post, z

    @staticmethod
    def backward(ctx, dx, dpost, dz):
        flat, raw, fn, base, scales, weight = ctx.saved_tensors
        T, C = ctx.sizes[:2]
        count, each = programs(triton.cdiv(T, ctx.flags["BLOCK_T"]))
        ds, draw, dm, dscaled = torch.empty_like(flat), *(torch.empty_like(raw) for _ in range(3))
        part = raw.new_empty(count, C)
        read_back_kernel[count,](
            flat, raw, base, scales, weight, dx.contiguous(), dpost.contiguous(), dz.contiguous(), ds, draw, dm, dscaled, part,
            *ctx.sizes, each, **ctx.flags,
        )  # fmt: skip
        draw = draw.to(flat.dtype)
        dfn = product(draw.mT, flat.flatten(1))
        ds = torch.addmm(ds.flatten(1), draw, fn.to(flat.dtype)).view_as(flat)
        by_row = dscaled.sum(0)
        dscale = torch.stack((by_row[:4].sum(), by_row[4:8].sum(), by_row[8:].sum()))
        return ds, dfn, dm.sum(0), dscale, part.sum(0).to(weight.dtype), None, None


@triton.jit
def _gate(p_ptr, t, width, k, T):
    return tl.load(p_ptr + t * width + k, mask=t < T, other=0.0)[:, None]


@triton.jit
def write_kernel(y_ptr, s_ptr, post_ptr, comb_ptr, out_ptr, T, C, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.arange(0, BLOCK_C)[None, :]
    mask = (t < T)[:, None] & (col < C)
    y = tl.load(y_ptr + t[:, None] * C + col, mask=mask, other=0.0).to(tl.float32)
    a, b = _stream(s_ptr, t, 0, col, mask, C), _stream(s_ptr, t, 1, col, mask, C)
    c, d = _stream(s_ptr, t, 2, col, mask, C), _stream(s_ptr, t, 3, col, mask, C)
    for k in tl.static_range(4):
        out = _gate(post_ptr, t, 4, k, T) * y + _gate(comb_ptr, t, 16, k, T) * a + _gate(comb_ptr, t, 16, 4 + k, T) * b
        out += _gate(comb_ptr, t, 16, 8 + k, T) * c + _gate(comb_ptr, t, 16, 12 + k, T) * d
        tl.store(out_ptr + (t[:, None] * 4 + k) * C + col, out, mask=mask)


@triton.jit
def write_back_kernel(
    y_ptr, s_ptr, post_ptr, comb_ptr, grad_ptr, dy_ptr, ds_ptr, dpost_ptr, dcomb_ptr, T, C,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.arange(0, BLOCK_C)[None, :]
    mask = (t < T)[:, None] & (col < C)
    y = tl.load(y_ptr + t[:, None] * C + col, mask=mask, other=0.0).to(tl.float32)
    g0, g1 = _stream(grad_ptr, t, 0, col, mask, C), _stream(grad_ptr, t, 1, col, mask, C)
    g2, g3 = _stream(grad_ptr, t, 2, col, mask, C), _stream(grad_ptr, t, 3, col, mask, C)
    dy = _gate(post_ptr, t, 4, 0, T) * g0 + _gate(post_ptr, t, 4, 1, T) * g1
    dy += _gate(post_ptr, t, 4, 2, T) * g2 + _gate(post_ptr, t, 4, 3, T) * g3
    tl.store(dy_ptr + t[:, None] * C + col, dy, mask=mask)
    tl.store(dpost_ptr + t * 4, tl.sum(y * g0, 1), mask=t < T)
    tl.store(dpost_ptr + t * 4 + 1, tl.sum(y * g1, 1), mask=t < T)
    tl.store(dpost_ptr + t * 4 + 2, tl.sum(y * g2, 1), mask=t < T)
    tl.store(dpost_ptr + t * 4 + 3, tl.sum(y * g3, 1), mask=t < T)
    for j in tl.static_range(4):
        s = _stream(s_ptr, t, j, col, mask, C)
        tl.store(dcomb_ptr + t * 16 + 4 * j, tl.sum(s * g0, 1), mask=t < T)
        tl.store(dcomb_ptr + t * 16 + 4 * j + 1, tl.sum(s * g1, 1), mask=t < T)
        tl.store(dcomb_ptr + t * 16 + 4 * j + 2, tl.sum(s * g2, 1), mask=t < T)
        tl.store(dcomb_ptr + t * 16 + 4 * j + 3, tl.sum(s * g3, 1), mask=t < T)
        ds = _gate(comb_ptr, t, 16, 4 * j, T) * g0 + _gate(comb_ptr, t, 16, 4 * j + 1, T) * g1
        ds += _gate(comb_ptr, t, 16, 4 * j + 2, T) * g2 + _gate(comb_ptr, t, 16, 4 * j + 3, T) * g3
        tl.store(ds_ptr + (t[:, None] * 4 + j) * C + col, ds, mask=mask)


class Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, flat, post, comb):
        T, _, C = flat.shape
        y, post, comb = y.contiguous(), post.contiguous(), comb.contiguous()
        flags = {"BLOCK_C": triton.next_power_of_2(C), "BLOCK_T": max(1, 1024 // triton.next_power_of_2(C)), "num_warps": 4}
        grid = (triton.cdiv(T, flags["BLOCK_T"]),)
        out = torch.empty_like(flat)
        write_kernel[grid](y, flat, post, comb, out, T, C, **flags)
        ctx.save_for_backward(y, flat, post, comb)
        ctx.grid, ctx.flags = grid, flags
        return out

    @staticmethod
    def backward(ctx, grad):
        y, flat, post, comb = ctx.saved_tensors
        T, _, C = flat.shape
        dy, ds, dpost, dcomb = (torch.empty_like(each) for each in (y, flat, post, comb))
        write_back_kernel[ctx.grid](y, flat, post, comb, grad.contiguous(), dy, ds, dpost, dcomb, T, C, **ctx.flags)
        return dy, ds, dpost, dcomb


def read(
    flat: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, ...]:
    """flat [T, 4, C], contiguous: x [T, C] normed; post [T, 4] and Sinkhorn's logits [T, 4, 4], float32."""
    return Read.apply(flat, fn, base, scale, weight, eps, hc_eps)


def write(y: Tensor, flat: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams [T, 4, C] with y [T, C] in them."""
    return Write.apply(y, flat, post, comb)
