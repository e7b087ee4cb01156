"""Where a decode step's tokens live: the door to the kernel that finds it in one launch."""

from typing import Any

import torch
from torch import Tensor

from deepdecode.ops._check import arch, kernel_runs, use_kernel


def decode_places(tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, **sizes: Any) -> Any:
    """The tensors of a decode step's `Step` that its tokens decide, by their names there; None where no kernel runs.

    Arguments as `kernels.step.launch` takes them, checked, at least one token.
    """
    if not use_kernel(positions):
        return None
    from deepdecode.kernels import step as kernel

    kernel_runs["step"] += 1
    with torch.cuda.device(positions.device):
        return kernel.launch(tokens, positions, slots, tables, arch=arch(positions), **sizes)
