"""Rotary positions: adjacent pairs of a vector's last channels, one table for each kind of layer."""

import math
from functools import lru_cache

import torch

from deepdecode.config import ModelConfig
from deepdecode.ops._check import FLOATS, describe, wide

INTEGERS = (torch.int32, torch.int64)


@lru_cache(maxsize=16)
def frequencies(config: ModelConfig, ratio: int) -> torch.Tensor:
    """float32 [rope_dim / 2]: radians per position of a layer with this compress ratio, for everything it rotates.

    Window layers (ratio 0) take rope_theta as it is; compressed ones compress_rope_theta and YaRN, at every position.
    YaRN's attention temperature is not used. Float32 throughout, as the model was trained. Every caller gets the same
    tensor: it is read, never written.
    """
    dim, base = config.rope_dim, config.rope_theta if ratio == 0 else config.compress_rope_theta
    freqs = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if ratio == 0 or config.yarn is None:
        return freqs
    yarn = config.yarn

    def channel(rotations: float) -> float:
        """The pair that turns this many times within the original context."""
        return dim * math.log(yarn.original_max_positions / (2 * math.pi * rotations)) / (2 * math.log(base))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return freqs / yarn.factor * ramp + freqs * (1 - ramp)


def rope_ref(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [T, ..., D] with pairs (2i, 2i + 1) of its last channels turned by angles [T, R / 2]."""
    R = 2 * angles.shape[-1]
    angles = angles.view(len(angles), *[1] * (x.dim() - 2), R // 2)
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., -R::2], x[..., -R + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-R], turned), dim=-1)


def rope(x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Rotate the last channels of each token's vectors by its position; `inverse` rotates back.

    The angle is position * frequency in float32, as the model was trained (float64 for a float64 x);
    the rotation is computed in the same type and rounded once.

    Args:
        x: [T, D] or [T, H, D], bfloat16, float32 or float64.
        positions: [T] int32 or int64. A padded row may hold anything, also a negative number.
        freqs: float32 or float64 [R / 2], R <= D: what `frequencies` gives.

    Returns:
        A new tensor of x's shape and dtype; channels before the last R keep their bits.

    Raises:
        ValueError: an argument has another shape, dtype or device.
    """
    expect_turn("rope", x, positions, freqs)
    if x.numel() == 0:
        return torch.empty_like(x)
    inner = wide(x)
    angles = positions.to(inner.dtype)[:, None] * freqs.to(inner.dtype)
    return rope_ref(inner, -angles if inverse else angles).to(x.dtype)


def expect_turn(op: str, x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor) -> None:
    """Raise ValueError unless x can be turned by these, as `rope` has it."""
    R = 2 * freqs.numel()
    if x.dim() < 2 or x.dtype not in FLOATS or x.shape[-1] < R:
        raise ValueError(f"{op}: x must be [T, ..., at least {R}] bfloat16, float32 or float64, got {describe(x)}")
    if list(positions.shape) != [len(x)] or positions.dtype not in INTEGERS or positions.device != x.device:
        raise ValueError(f"{op}: positions must be [{len(x)}] int32 or int64 on {x.device}, got {describe(positions)}")
    if freqs.dim() != 1 or R == 0 or freqs.dtype not in FLOATS[1:] or freqs.device != x.device:
        raise ValueError(f"{op}: freqs must be [rope_dim / 2] float32 or float64 on {x.device}, got {describe(freqs)}")
