"""The inner loop that products and experts share: rows of a stored weight times tokens, y^T = W x^T.

Rows of the weight stand on the M side of mma.sync, so 8 tokens fill its N side. An FP8 weight enters the product as its bare
codes, exact in bfloat16; the scale of a block of 128 columns multiplies their float32 sum. An FP4 weight enters times its
scale. Scales are loaded one step ahead: the compiler's pipeline, which has the weights under way, leaves single bytes out.

`rows_product` is for many tokens: warps take different rows, and share the tokens in shared memory. `slices_product` is for
few: all warps take the same rows, each a slice of K of its own, so that a small weight still feeds every SM; the slices are
added in their order at the end, so the bits do not vary.
"""

import triton
import triton.language as tl

from deepdecode.kernels.codes import FP4, FP8, e8m0_float, fp4_values, fp8_values


@triton.jit
def _halves(pair):
    """int32 -> its two bfloat16."""
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def _columns(x_at, mask, INTERPRET: tl.constexpr):
    """Even and odd columns of x: words of two, from pointers at the even ones."""
    if INTERPRET:
        even = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        odd = tl.load(x_at + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        even, odd = _halves(tl.load(x_at.to(tl.pointer_type(tl.int32)), mask=mask, other=0))
    return even, odd


@triton.jit
def _times(w, x, acc, INTERPRET: tl.constexpr):
    """acc + w x of a plain weight; float32 weights are multiplied in full."""
    if INTERPRET or w.dtype == tl.float32:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(w, x, acc)


@triton.jit
def rows_product(
    x_row,
    x_live,
    w_row,
    scale_row,
    K,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """W x^T, float32 [M, T]; x_row [T], w_row [M] and scale_row [M] point at first columns.

    EVEN: K is a multiple of BLOCK_K.
    """
    M: tl.constexpr = w_row.shape[0]
    acc = tl.zeros([M, x_row.shape[0]], tl.float32)
    if KIND == FP4:
        byte = tl.arange(0, BLOCK_K // 2)
        group = tl.arange(0, BLOCK_K // 32)
        scale_at = scale_row[:, None] + group[None, :]
        next_scale = tl.load(scale_at, mask=(32 * group < K)[None, :], other=0)
        for at in range(0, K, BLOCK_K):
            # K is a multiple of 32
            live = at + 2 * byte < K
            packed = tl.load(w_row[:, None] + (at // 2 + byte)[None, :], mask=EVEN or live[None, :], other=0)
            scale = tl.broadcast_to(next_scale[:, :, None], (M, BLOCK_K // 32, 16))
            next_scale = tl.load(scale_at + (at + BLOCK_K) // 32, mask=(at + BLOCK_K + 32 * group < K)[None, :], other=0)
            even, odd = fp4_values(packed, tl.reshape(scale, (M, BLOCK_K // 2)), INTERPRET)
            x_at = x_row[None, :] + (at + 2 * byte)[:, None]
            x_even, x_odd = _columns(x_at, x_live[None, :] & (EVEN or live[:, None]), INTERPRET)
            acc = tl.dot(even, x_even, acc)
            acc = tl.dot(odd, x_odd, acc)
    else:
        k = tl.arange(0, BLOCK_K)
        if KIND == FP8:
            next_scale = tl.load(scale_row)
        for at in range(0, K, BLOCK_K):
            live = at + k < K
            w = tl.load(w_row[:, None] + (at + k)[None, :], mask=EVEN or live[None, :], other=0)
            x = tl.load(x_row[None, :] + (at + k)[:, None], mask=x_live[None, :] & (EVEN or live[:, None]), other=0.0)
            if KIND == FP8:
                scale = next_scale
                next_scale = tl.load(scale_row + (at + BLOCK_K) // 128, mask=at + BLOCK_K < K, other=0)
                part = tl.dot(fp8_values(w, INTERPRET), x.to(tl.float32) if INTERPRET else x)
                acc += part * (e8m0_float(scale) if E8M0 else scale)[:, None]
            else:
                acc = _times(w, x, acc, INTERPRET)
    return acc


@triton.jit
def slices_product(
    x_row,
    x_live,
    w_row,
    scale_row,
    K,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """W x^T, float32 [M, T], as `rows_product`. Warp s takes slice s of K, as the batch of a batched product.

    EVEN: K is a multiple of SLICES * BLOCK_K.
    """
    M: tl.constexpr = w_row.shape[0]
    N: tl.constexpr = x_row.shape[0]
    acc = tl.zeros([SLICES, M, N], tl.float32)
    per = tl.cdiv(K, SLICES * BLOCK_K) * BLOCK_K
    first = tl.arange(0, SLICES) * per
    if KIND == FP4:
        byte = tl.arange(0, BLOCK_K // 2)
        group = tl.arange(0, BLOCK_K // 32)
        at_group = ((first // 32)[:, None] + group[None, :])[:, None, :]
        scale_at = scale_row[None, :, None] + at_group
        next_scale = tl.load(scale_at, mask=at_group < K // 32, other=0)
        for at in range(0, per, BLOCK_K):
            column = (first + at)[:, None] + 2 * byte[None, :]  # [SLICES, BLOCK_K / 2]
            live = column < K
            packed = tl.load(w_row[None, :, None] + (column // 2)[:, None, :], mask=EVEN or live[:, None, :], other=0)
            scale = tl.broadcast_to(next_scale[:, :, :, None], (SLICES, M, BLOCK_K // 32, 16))
            done = (at + BLOCK_K) // 32
            next_scale = tl.load(scale_at + done, mask=at_group + done < K // 32, other=0)
            even, odd = fp4_values(packed, tl.reshape(scale, (SLICES, M, BLOCK_K // 2)), INTERPRET)
            x_at = x_row[None, None, :] + column[:, :, None]
            x_even, x_odd = _columns(x_at, x_live[None, None, :] & (EVEN or live[:, :, None]), INTERPRET)
            acc = tl.dot(even, x_even, acc)
            acc = tl.dot(odd, x_odd, acc)
    else:
        k = tl.arange(0, BLOCK_K)
        if KIND == FP8:
            scale_at = scale_row[None, :] + (first // 128)[:, None]  # [SLICES, M]
            next_scale = tl.load(scale_at, mask=(first < K)[:, None], other=0)
        for at in range(0, per, BLOCK_K):
            start = first + at
            column = start[:, None] + k[None, :]  # [SLICES, BLOCK_K]
            live = column < K
            w = tl.load(w_row[None, :, None] + column[:, None, :], mask=EVEN or live[:, None, :], other=0)
            x_mask = x_live[None, None, :] & (EVEN or live[:, :, None])
            x = tl.load(x_row[None, None, :] + column[:, :, None], mask=x_mask, other=0.0)
            if KIND == FP8:
                scale = next_scale
                # slices start anywhere in a block where BLOCK_K is half of one
                ahead = (start + BLOCK_K) // 128 - first // 128
                next_scale = tl.load(scale_at + ahead[:, None], mask=(start + BLOCK_K < K)[:, None], other=0)
                part = tl.dot(fp8_values(w, INTERPRET), x.to(tl.float32) if INTERPRET else x)
                acc += part * (e8m0_float(scale) if E8M0 else scale)[:, :, None]
            else:
                acc = _times(w, x, acc, INTERPRET)
    return tl.sum(acc, 0)
