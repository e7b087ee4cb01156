"""RMSNorm with a weight, and the weightless one over each query head."""

import torch

from deepdecode.ops._check import FLOATS, describe, expect, wide


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def head_norm_ref(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (float64 for float64), rounded once.

    Args:
        x: [..., C] bfloat16, float32 or float64.
        weight: [C], of any of these types, on the device of x.
        eps: >= 0.

    Returns:
        [..., C] of x's dtype. A row of zeros gives zeros if eps > 0. No token gives an empty tensor.

    Raises:
        ValueError: an argument has another shape, dtype or device, or eps < 0.
    """
    _expect_rows("rms_norm", x, eps)
    expect("rms_norm: weight", weight, (x.shape[-1],), FLOATS, x.device)
    inner = wide(x)
    return rms_norm_ref(inner, weight.to(inner.dtype), eps).to(x.dtype)


def head_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) over the last dimension, all of it: in float32 (float64 for float64), rounded once.

    x: [..., D] bfloat16, float32 or float64; contracts as `rms_norm`.
    """
    _expect_rows("head_norm", x, eps)
    return head_norm_ref(wide(x), eps).to(x.dtype)


def _expect_rows(op: str, x: torch.Tensor, eps: float) -> None:
    if x.dim() == 0 or x.shape[-1] == 0 or x.dtype not in FLOATS:
        raise ValueError(f"{op}: x must be [..., at least 1] bfloat16, float32 or float64, got {describe(x)}")
    if not eps >= 0:
        raise ValueError(f"{op}: eps must be >= 0, got {eps}")
