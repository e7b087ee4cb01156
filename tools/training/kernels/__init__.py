"""The trainer's own kernels: each is one operation of the forward with its gradient, fused so that memory is passed over once.

Every file has a Triton kernel there, one back, and a `torch.autograd.Function` around both. What they compute is what
`training.parts.REFERENCE` says in torch; the tests compare them, values and gradients.
"""

import torch

Tensor = torch.Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32: of bfloat16 numbers accumulated in float32 and not rounded."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def programs(blocks: int, most: int = 528) -> tuple[int, int]:
    """How many programs share these blocks, four for each of 132 multiprocessors, and how many blocks each takes."""
    each = -(-blocks // most)
    return -(-blocks // each), each
