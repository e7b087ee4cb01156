"""Sinkhorn's steps as one operation: unrolled in a graph they are eighty reductions over four numbers, there and back.

Each step divides a [4, 4] by its sums: c_k = c_(k - 1) / (s_k + eps). What the gradient needs is every c_k, made again
on the way back: g_(k - 1) = (g_k - sum(g_k * c_k)) / (s_k + eps), sums along the step's own direction.
"""

import torch
import triton
import triton.language as tl

from deepdecode.ops.mhc import sinkhorn_ref

Tensor = torch.Tensor
BLOCK = 32


@triton.jit
def _step(c, eps, column):
    """One division, and what it divided by."""
    by = tl.where(column, tl.sum(c, 1)[:, None, :] + c * 0, tl.sum(c, 2)[:, :, None] + c * 0) + eps
    return c / by, by


@triton.jit
def _begin(z_ptr, at, mask, eps):
    z = tl.load(z_ptr + at, mask=mask, other=0.0)
    p = tl.exp(z - tl.max(z, 2)[:, :, None])
    return p / tl.sum(p, 2)[:, :, None]


@triton.jit
def forward_kernel(z_ptr, out_ptr, T, eps, STEPS: tl.constexpr, BLOCK_T: tl.constexpr):
    lane = tl.arange(0, 4)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = row[:, None, None] * 16 + lane[None, :, None] * 4 + lane[None, None, :]  # [BLOCK_T, 4, 4]
    mask = (row < T)[:, None, None] & (at >= 0)
    c = _begin(z_ptr, at, mask, eps) + eps
    for k in range(STEPS):
        c, _ = _step(c, eps, k % 2 == 0)
    tl.store(out_ptr + at, c, mask=mask)


@triton.jit
def backward_kernel(z_ptr, grad_ptr, out_ptr, kept_ptr, T, eps, STEPS: tl.constexpr, BLOCK_T: tl.constexpr):
    lane = tl.arange(0, 4)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = row[:, None, None] * 16 + lane[None, :, None] * 4 + lane[None, None, :]
    mask = (row < T)[:, None, None] & (at >= 0)
    p = _begin(z_ptr, at, mask, eps)
    c = p + eps
    for k in range(STEPS):
        # each thread reads back what it wrote itself: the same places in the same layout
        tl.store(kept_ptr + k * T * 16 + at, c, mask=mask)
        c, _ = _step(c, eps, k % 2 == 0)
    g = tl.load(grad_ptr + at, mask=mask, other=0.0)
    for i in range(STEPS):
        k = STEPS - 1 - i
        before = tl.load(kept_ptr + k * T * 16 + at, mask=mask, other=1.0)
        after, by = _step(before, eps, k % 2 == 0)
        product = g * after
        along = tl.where(k % 2 == 0, tl.sum(product, 1)[:, None, :] + g * 0, tl.sum(product, 2)[:, :, None] + g * 0)
        g = (g - along) / by
    g = p * (g - tl.sum(p * g, 2)[:, :, None])
    tl.store(out_ptr + at, g, mask=mask)


def launch_forward(z: Tensor, iters: int, eps: float) -> Tensor:
    out = torch.empty_like(z)
    forward_kernel[triton.cdiv(len(z), BLOCK),](z, out, len(z), eps, STEPS=2 * iters - 1, BLOCK_T=BLOCK, num_warps=4)
    return out


def launch_backward(z: Tensor, grad: Tensor, iters: int, eps: float) -> Tensor:
    steps = 2 * iters - 1
    out, kept = torch.empty_like(z), z.new_empty(steps, *z.shape)
    backward_kernel[triton.cdiv(len(z), BLOCK),](z, grad, out, kept, len(z), eps, STEPS=steps, BLOCK_T=BLOCK, num_warps=4)
    return out


@torch.library.custom_op("deepdecode_training::sinkhorn", mutates_args=())
def _forward(z: Tensor, iters: int, eps: float) -> Tensor:
    return launch_forward(z.contiguous(), iters, eps)


@_forward.register_fake
def _(z, iters, eps):
    return torch.empty_like(z, memory_format=torch.contiguous_format)


@torch.library.custom_op("deepdecode_training::sinkhorn_backward", mutates_args=())
def _backward(z: Tensor, grad: Tensor, iters: int, eps: float) -> Tensor:
    return launch_backward(z.contiguous(), grad.contiguous(), iters, eps)


@_backward.register_fake
def _(z, grad, iters, eps):
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.iters, ctx.eps = inputs[1:]


_forward.register_autograd(
    lambda ctx, grad: (_backward(ctx.saved_tensors[0], grad, ctx.iters, ctx.eps), None, None), setup_context=_keep
)


def sinkhorn(z: Tensor, iters: int, eps: float) -> Tensor:
    """[T, 4, 4] float32: what `sinkhorn_ref` gives, by one kernel on a GPU."""
    return _forward(z, iters, eps) if z.is_cuda and z.dtype == torch.float32 else sinkhorn_ref(z, iters, eps)
