"""Vocabulary and cross-entropy in chunks of tokens: logits are made, their gradient taken, and both forgotten."""

import torch
import triton
import triton.language as tl

from training.kernels import product

Tensor = torch.Tensor
CHUNK = 4096


@triton.jit
def tell_kernel(logit_ptr, target_ptr, loss_ptr, grad_ptr, V, share, BLOCK_V: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK_V)
    x = tl.load(logit_ptr + t * V + v, mask=v < V, other=float("-inf"))
    target = tl.load(target_ptr + t)
    x -= tl.max(x, 0)
    e = tl.exp(x)
    total = tl.sum(e, 0)
    loss = tl.log(total) - tl.sum(tl.where(v == target, x, 0.0), 0)
    tl.store(loss_ptr + t, tl.where(target < 0, 0.0, loss))
    grad = (e / total - tl.where(v == target, 1.0, 0.0)) * share
    tl.store(grad_ptr + t * V + v, tl.where(target < 0, 0.0, grad), mask=v < V)


class Tell(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, head, targets, count):
        x, V = x.contiguous(), len(head)
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        dx, dhead = torch.empty_like(x), torch.zeros(head.shape, dtype=torch.float32, device=x.device)
        for at in range(0, len(x), CHUNK):
            part = slice(at, min(at + CHUNK, len(x)))
            logits = product(x[part], head.mT)
            grad = torch.empty_like(logits, dtype=x.dtype)
            tell_kernel[len(logits),](
                logits, targets[part], losses[part], grad, V, 1 / count, BLOCK_V=triton.next_power_of_2(V), num_warps=8
            )
            dx[part] = grad @ head
            dhead += product(grad.mT, x[part])
        ctx.save_for_backward(dx, dhead)
        ctx.dtype = head.dtype
        return losses.sum() / count

    @staticmethod
    def backward(ctx, grad):
        dx, dhead = ctx.saved_tensors
        return (dx * grad).to(dx.dtype), (dhead * grad).to(ctx.dtype), None, None


def tell(x: Tensor, head: Tensor, targets: Tensor, count: int) -> Tensor:
    """Mean over `count` of -log softmax(x @ head^T)[target], nats; x [T, C]; targets int64 [T], of which -1 does not count."""
    return Tell.apply(x, head, targets.contiguous(), count)
