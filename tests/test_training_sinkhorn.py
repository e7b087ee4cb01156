"""The trainer's Sinkhorn kernels against float64 and its gradient: interpreted without a GPU, compiled with one."""

import os
import sys
from pathlib import Path

import pytest
import torch

from deepdecode.ops.mhc import sinkhorn_ref
from deepdecode.testing.numeric import rel_err

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from training import sinkhorn as kernel

F32 = 5e-6  # eighty divisions in float32; a GPU's are good to two units in the last place


@pytest.mark.parametrize(("T", "iters", "scale"), [(1, 20, 1.0), (37, 20, 3.0), (70, 1, 1.0), (33, 3, 8.0)])
def test_matches_the_reference_and_its_gradient(T, iters, scale, device):
    z, grad = scale * torch.randn(T, 4, 4, device=device), torch.randn(T, 4, 4, device=device)
    wide = z.double().requires_grad_()
    expected = sinkhorn_ref(wide, iters, 1e-6)
    (gradient,) = torch.autograd.grad(expected, wide, grad.double())
    assert rel_err(kernel.launch_forward(z, iters, 1e-6), expected) < F32
    assert rel_err(kernel.launch_backward(z, grad, iters, 1e-6), gradient) < 20 * F32
    # as autograd calls them, with a gradient that is not contiguous
    z.requires_grad_()
    out = torch.ops.deepdecode_training.sinkhorn(z, iters, 1e-6)
    (ours,) = torch.autograd.grad(out.mT, z, grad.mT.contiguous())
    assert rel_err(ours, gradient) < 20 * F32
