"""The inner loop that products and experts share: rows of a stored weight times tokens, y^T = W x^T.

Rows of the weight stand on the M side of mma.sync, so 8 tokens fill its N side. An FP8 weight enters the product as its bare
codes, exact in bfloat16; the scale of a block of 128 columns multiplies their float32 sum. An FP4 weight enters times its
scale. Scales are loaded one step ahead: the compiler's pipeline, which has the weights under way, leaves them out.

Converted codes and their tokens keep the order of columns in memory. Tokens in another order, reshaped on their way to
mma.sync, are laid out without a swizzle, and eight rows of them meet in one bank.

A warp is one of a batch of small products. With one slice of K, warps take different rows and share the tokens: for many
tokens. With as many slices as warps, all warps take the same rows, each slices of K of its own, so that a small weight still
feeds every SM; the warps' sums are added in their order at the end, so the bits do not vary.
"""

import triton
import triton.language as tl

from deepdecode.kernels.codes import (
    FP4,
    FP8,
    e8m0_bfloat,
    e8m0_float,
    fp4_order,
    fp4_values,
    fp8_converted,
    fp8_natural,
    fp8_order,
    fp8_values,
    times,
)


@triton.jit
def blocks_of(row, SLICES: tl.constexpr, WARPS: tl.constexpr):
    """Numbers of rows [M] as `product` takes them: a block for each warp that has rows of its own."""
    return tl.reshape(row, (WARPS // SLICES, row.shape[0] * SLICES // WARPS))


@triton.jit
def product(
    x_row,
    x_live,
    w_row,
    scale_row,
    K,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
    CONVERT: tl.constexpr = False,
):
    """W x^T, float32 [M, T]; x_row [T] and, from `blocks_of` M rows, w_row and scale_row point at the first columns of rows.

    SLICES: WARPS or 1. EVEN: K is a multiple of SLICES * BLOCK_K. CONVERT: E4M3 by the card's own conversion, from sm_89 on.
    """
    R: tl.constexpr = w_row.shape[1]
    N: tl.constexpr = x_row.shape[0]
    # slices take turns: what the program reads at a time is one piece of each row, since memory opens a page for it
    STEP: tl.constexpr = SLICES * BLOCK_K
    first = (tl.arange(0, SLICES) * BLOCK_K)[:, None]  # [SLICES, 1]
    k = tl.arange(0, BLOCK_K)[None, :]
    byte = tl.arange(0, BLOCK_K // 2)[None, :]
    group = tl.arange(0, BLOCK_K // 32)[None, None, :]
    acc = tl.zeros([WARPS, R, N], tl.float32)
    if KIND == FP4:
        # [WARPS, R, BLOCK_K / 32]
        scale_at = scale_row[:, :, None] + (first // 32)[:, :, None] + group
        next_scale = tl.load(scale_at, mask=first[:, :, None] + 32 * group < K, other=0)
    elif KIND == FP8:
        next_scale = tl.load(scale_row + first // 128, mask=first < K, other=0)  # [WARPS, R]
    for at in range(0, K, STEP):
        start = first + at
        ahead = start + STEP
        x_mask = x_live[None, None, :] & ((start + k < K) | EVEN)[:, :, None]
        x = tl.load(x_row[None, None, :] + (start + k)[:, :, None], mask=x_mask, other=0.0)  # [SLICES, BLOCK_K, N]
        if INTERPRET:
            x = x.to(tl.float32)
        if KIND == FP4:
            live = ((start + 2 * byte < K) | EVEN)[:, None, :]
            packed = tl.load(w_row[:, :, None] + (start // 2 + byte)[:, None, :], mask=live, other=0)
            scale = e8m0_float(next_scale) if INTERPRET else e8m0_bfloat(next_scale)
            next_scale = tl.load(scale_at + (at + STEP) // 32, mask=ahead[:, :, None] + 32 * group < K, other=0)
            # a group's scale, once for each of its columns
            scale = tl.broadcast_to(scale[:, :, :, None], (WARPS, R, BLOCK_K // 32, 32))
            w = fp4_values(packed, WARPS, R, BLOCK_K, INTERPRET)
            w = times(w, tl.reshape(scale, (WARPS, R, BLOCK_K)), INTERPRET)
            x = fp4_order(x, SLICES, BLOCK_K, N)
        else:
            live = ((start + k < K) | EVEN)[:, None, :]
            w = tl.load(w_row[:, :, None] + (start + k)[:, None, :], mask=live, other=0)
        if KIND == FP8:
            scale = e8m0_float(next_scale) if E8M0 else next_scale
            next_scale = tl.load(scale_row + ahead // 128, mask=ahead < K, other=0)
            if CONVERT:
                w = fp8_converted(w, INTERPRET)
            elif SLICES > 1:
                w = fp8_values(w, WARPS, R, BLOCK_K, INTERPRET)
                x = fp8_order(x, SLICES, BLOCK_K, N)
            else:
                w = fp8_natural(w, INTERPRET)
        if INTERPRET or w.dtype == tl.float32:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        x = tl.broadcast_to(x, (WARPS, BLOCK_K, N))
        if KIND == FP8:
            acc += tl.dot(w, x) * scale[:, :, None]
        else:
            # float32 weights are multiplied in full
            acc = tl.dot(w, x, acc, input_precision="ieee")
    return tl.sum(acc, 0) if SLICES > 1 else tl.reshape(acc, (WARPS * R, N))
