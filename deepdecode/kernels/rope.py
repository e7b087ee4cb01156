"""Rotation of attention's output back by the query's position, before the grouped projection."""

import torch
import triton
import triton.language as tl

from deepdecode.kernels.rotate import rotate, turn


def supports(T: int, D: int, R: int, dtype: str) -> str | None:
    """Why no kernel runs; None if one does."""
    if dtype != "bfloat16" or D < 16 or D & (D - 1) or D > 1024 or R % 2 or not 0 < R <= D:
        return f"x must be bfloat16, its width a power of two from 16 to 1024 and rope dim even, got {dtype}, {D} and {R}"
    if T > 65535:
        return f"T must be at most 65535, got {T}"
    return None


@triton.jit(do_not_specialize=["H"])
def rope_kernel(
    x_ptr,
    positions_ptr,
    freqs_ptr,
    out_ptr,
    H,
    D: tl.constexpr,
    R: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    t = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = (t * H + h)[:, None] * D + tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + at, mask=(h < H)[:, None], other=0.0).to(tl.float32)
    cos, sin, turns = turn(tl.load(positions_ptr + t), freqs_ptr, D, R, INTERPRET)
    if INVERSE:
        sin = -sin
    x = rotate(x, cos, sin, turns, BLOCK_H, D)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=(h < H)[:, None])


def launch(
    x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor, *, inverse: bool, arch: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, H, D], contiguous, with the pairs of its last channels turned; T > 0. out: where it goes, x itself at will."""
    T, H, D = x.shape
    out = torch.empty_like(x) if out is None else out
    block_h = min(8 if T * H > 512 else 4, triton.next_power_of_2(H))
    pdl = arch >= 90
    rope_kernel[triton.cdiv(H, block_h), T](
        x, positions, freqs, out, H, D=D, R=2 * freqs.shape[0], INVERSE=inverse, BLOCK_H=block_h, PDL=pdl,
        INTERPRET=not x.is_cuda, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
