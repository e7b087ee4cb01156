"""The inner loop that products and experts share: rows of a stored weight times tokens, y^T = W x^T.

Rows of the weight stand on the M side of mma.sync, so 8 tokens fill its N side. An FP8 weight enters the product as its bare
codes, exact in bfloat16; the scale of a block of 128 columns multiplies their float32 sum. An FP4 weight enters times its
scale. Scales are loaded one step ahead: the compiler's pipeline, which has the weights under way, leaves them out.

With one slice, warps take different rows and share the tokens in shared memory: for many tokens. With more, all warps take
the same rows, each slices of K of its own as the batch of a batched product, so that a small weight still feeds every SM; the
warps' sums are added in their order at the end, so the bits do not vary.
"""

import triton
import triton.language as tl

from deepdecode.kernels.codes import FP4, FP8, e8m0_bfloat, e8m0_float, fp4_order, fp4_values, fp8_order, fp8_values


@triton.jit
def row_bytes(w_ptr, K, KIND: tl.constexpr):
    return K * w_ptr.dtype.element_ty.primitive_bitwidth // (16 if KIND == FP4 else 8)


@triton.jit
def fetch(w_row, nbytes):
    """Bring rows of `nbytes` from each pointer into L2, before it is known what they are multiplied with."""
    line = tl.arange(0, 32) * 128
    for at in range(0, nbytes, 4096):
        address = w_row.to(tl.int64)[:, None] + tl.minimum(at + line, nbytes - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _fp4_scales(row, at, live, BLOCK_K: tl.constexpr, WORDS: tl.constexpr):
    """The scales of columns at [SLICES, 1] .. at + BLOCK_K - 1 of rows [1, M], of a multiple of 32 live columns.

    uint8 [SLICES, M, BLOCK_K / 32]; with WORDS, where that is aligned, one word for all of them, [SLICES, M, 1].
    """
    if WORDS:
        WORD: tl.constexpr = tl.int32 if BLOCK_K == 128 else tl.int16
        scale = tl.load((row + at // 32).to(tl.pointer_type(WORD)), mask=live > 0, other=0).to(tl.int32)[:, :, None]
    else:
        group = tl.arange(0, BLOCK_K // 32)[None, None, :]
        scale = tl.load((row + at // 32)[:, :, None] + group, mask=32 * group < live[:, :, None], other=0)
    return scale


@triton.jit
def _spread(values, S: tl.constexpr, M: tl.constexpr, G: tl.constexpr, TIMES: tl.constexpr):
    """[S, M, G] -> [S, M, G * TIMES], each value many times."""
    return tl.reshape(tl.broadcast_to(values[:, :, :, None], (S, M, G, TIMES)), (S, M, G * TIMES))


@triton.jit
def _accumulate(
    x_row,
    x_live,
    w_row,
    scale_row,
    K,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """`product`, and all words of FP4 scales or-ed: with WORDS those above 2**1 (128) came out wrong."""
    M: tl.constexpr = w_row.shape[0]
    N: tl.constexpr = x_row.shape[0]
    GROUPS: tl.constexpr = BLOCK_K // 32
    # slices take turns: what the program reads at a time is one piece of each row, since memory opens a page for it
    STEP: tl.constexpr = SLICES * BLOCK_K
    first = (tl.arange(0, SLICES) * BLOCK_K)[:, None]  # [SLICES, 1]
    k = tl.arange(0, BLOCK_K)[None, :]
    byte = tl.arange(0, BLOCK_K // 2)[None, :]
    acc = tl.zeros([SLICES, M, N] if SLICES > 1 else [M, N], tl.float32)
    seen = tl.zeros([SLICES, M, 1], tl.int32)
    if KIND == FP4:
        next_scale = _fp4_scales(scale_row[None, :], first, K - first, BLOCK_K, WORDS)
    elif KIND == FP8:
        next_scale = tl.load(scale_row[None, :] + first // 128, mask=first < K, other=0)  # [SLICES, M]
    for at in range(0, K, STEP):
        start = first + at
        ahead = start + STEP
        x_mask = x_live[None, None, :] & ((start + k < K) | EVEN)[:, :, None]
        x = tl.load(x_row[None, None, :] + (start + k)[:, :, None], mask=x_mask, other=0.0)  # [SLICES, BLOCK_K, N]
        if INTERPRET:
            x = x.to(tl.float32)
        if KIND == FP4:
            live = ((start + 2 * byte < K) | EVEN)[:, None, :]
            packed = tl.load(w_row[None, :, None] + (start // 2 + byte)[:, None, :], mask=live, other=0)
            scale = next_scale
            next_scale = _fp4_scales(scale_row[None, :], ahead, K - ahead, BLOCK_K, WORDS)
            if WORDS:
                seen |= scale
                exponent = (scale >> (8 * tl.arange(0, GROUPS))[None, None, :]) & 0xFF
                # 2**126 * 2**(exponent - 127) in both halves
                factor = _spread(exponent * 0x00800080 + 0x3F003F00, SLICES, M, GROUPS, 16)
                w = fp4_values(packed, factor, SLICES, M, BLOCK_K, INTERPRET)
            else:
                w = fp4_values(packed, tl.full(packed.shape, 0x7E807E80, tl.int32), SLICES, M, BLOCK_K, INTERPRET)
                factor = e8m0_float(scale) if INTERPRET else e8m0_bfloat(scale)
                w = w * _spread(factor, SLICES, M, GROUPS, 32)
            x = fp4_order(x, SLICES, BLOCK_K, N)
        else:
            live = ((start + k < K) | EVEN)[:, None, :]
            w = tl.load(w_row[None, :, None] + (start + k)[:, None, :], mask=live, other=0)
        if KIND == FP8:
            w = fp8_values(w, SLICES, M, BLOCK_K, INTERPRET)
            x = fp8_order(x, SLICES, BLOCK_K, N)
            scale = next_scale
            next_scale = tl.load(scale_row[None, :] + ahead // 128, mask=ahead < K, other=0)
        if INTERPRET or w.dtype == tl.float32:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        if SLICES == 1:
            w = tl.reshape(w, (M, BLOCK_K))
            x = tl.reshape(x, (BLOCK_K, N))
        if KIND == FP8:
            factor = e8m0_float(scale) if E8M0 else scale
            if SLICES > 1:
                acc += tl.dot(w, x) * factor[:, :, None]
            else:
                acc += tl.dot(w, x) * tl.reshape(factor, (M, 1))
        else:
            # float32 weights are multiplied in full
            acc = tl.dot(w, x, acc, input_precision="ieee")
    if SLICES > 1:
        acc = tl.sum(acc, 0)
    return acc, seen


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
    WORDS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """W x^T, float32 [M, T]; x_row [T], w_row [M] and scale_row [M] point at the first columns of rows.

    EVEN: K is a multiple of SLICES * BLOCK_K. WORDS: rows of FP4 scales start on multiples of BLOCK_K / 32 bytes, too.
    """
    acc, seen = _accumulate(x_row, x_live, w_row, scale_row, K, KIND, E8M0, EVEN, WORDS, SLICES, BLOCK_K, INTERPRET)
    if WORDS:
        # a scale above 2 is not to be expected; it is right, and slow
        large = (seen & (-0x7F7F7F80 if BLOCK_K == 128 else 0x8080)) != 0
        if tl.max(tl.max(tl.max(large.to(tl.int32), 2), 1), 0) > 0:
            acc, seen = _accumulate(x_row, x_live, w_row, scale_row, K, KIND, E8M0, EVEN, False, SLICES, BLOCK_K, INTERPRET)
    return acc
