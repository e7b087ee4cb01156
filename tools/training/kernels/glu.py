"""SwiGLU with V4's clamp, times what the router gives an expert: hidden units of every expert of every token, and back."""

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor


@triton.jit
def _act(g, u, limit):
    low = tl.minimum(g, limit)
    s = tl.sigmoid(low)
    return low, s, tl.minimum(tl.maximum(u, -limit), limit)


@triton.jit
def forward_kernel(
    gate_ptr, up_ptr, share_ptr, out_ptr, rows, limit, I: tl.constexpr, SHARE: tl.constexpr, BLOCK_R: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = row[:, None] * I + tl.arange(0, I)[None, :]
    live = (row < rows)[:, None] & (at >= 0)
    g = tl.load(gate_ptr + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + at, mask=live, other=0.0).to(tl.float32)
    low, s, cut = _act(g, u, limit)
    h = low * s * cut
    if SHARE:
        h *= tl.load(share_ptr + row, mask=row < rows, other=0.0)[:, None]
    tl.store(out_ptr + at, h, mask=live)


@triton.jit
def backward_kernel(
    gate_ptr, up_ptr, share_ptr, grad_ptr, dgate_ptr, dup_ptr, dshare_ptr, rows, limit,
    I: tl.constexpr, SHARE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = row[:, None] * I + tl.arange(0, I)[None, :]
    live = (row < rows)[:, None] & (at >= 0)
    g = tl.load(gate_ptr + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + at, mask=live, other=0.0).to(tl.float32)
    d = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)
    low, s, cut = _act(g, u, limit)
    if SHARE:
        tl.store(dshare_ptr + row, tl.sum(d * low * s * cut, 1), mask=row < rows)
        d *= tl.load(share_ptr + row, mask=row < rows, other=0.0)[:, None]
    # torch's clamp lets the gradient pass at its bounds
    tl.store(dgate_ptr + at, tl.where(g <= limit, d * cut * s * (1 + low * (1 - s)), 0.0), mask=live)
    tl.store(dup_ptr + at, tl.where((u >= -limit) & (u <= limit), d * low * s, 0.0), mask=live)


class Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, share, limit):
        I, rows = gate.shape[-1], gate.numel() // gate.shape[-1]
        flags = {"I": I, "SHARE": share is not None, "BLOCK_R": max(1, 2048 // I), "num_warps": 4}
        share = None if share is None else share.contiguous()
        out = torch.empty_like(gate)
        forward_kernel[triton.cdiv(rows, flags["BLOCK_R"]),](gate, up, share, out, rows, limit, **flags)
        ctx.save_for_backward(gate, up, share)
        ctx.sizes, ctx.flags = (rows, limit), flags
        return out

    @staticmethod
    def backward(ctx, grad):
        gate, up, share = ctx.saved_tensors
        grid = (triton.cdiv(ctx.sizes[0], ctx.flags["BLOCK_R"]),)
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        dshare = None if share is None else torch.empty_like(share)
        backward_kernel[grid](gate, up, share, grad.contiguous(), dgate, dup, dshare, *ctx.sizes, **ctx.flags)
        return dgate, dup, dshare, None


def glu(gate: Tensor, up: Tensor, share: Tensor | None, limit: float) -> Tensor:
    """gate, up [..., I], contiguous; share float32 [...] or None for one each."""
    return Glu.apply(gate, up, share, limit)
