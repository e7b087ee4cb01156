"""Products for very few tokens, in one launch: each weight is widened to float32 once and multiplied, without tensor cores.

A warp's piece of a row is 512 bytes, and all of a program's rows are on their way before it waits for the kernel in front: at
one token nothing else matters. On tensor cores a weight costs more instructions than here, where its conversion is one for two.
"""

import triton
import triton.language as tl

from deepdecode.kernels.codes import FP8, PLAIN, _e4m3, e8m0_float


@triton.jit
def e4m3_float(codes, INTERPRET: tl.constexpr):
    """uint8 E4M3 codes -> float32, NaN too. From sm_89 on."""
    if INTERPRET:
        return _e4m3(codes.to(tl.int32))
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, a, b, c, d;
        .reg .b32 p, q;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 p, low;
        cvt.rn.f16x2.e4m3x2 q, high;
        mov.b32 {a, b}, p;
        mov.b32 {c, d}, q;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.f32.f16 $2, c;
        cvt.f32.f16 $3, d;
        }""",
        "=f,=f,=f,=f,r",
        [codes],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _rows(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    scaled_norm_ptr,
    scaled_ptr,
    tile,
    T,
    OUT,
    K,
    stride_xt,
    stride_xg,
    stride_w,
    stride_scale,
    stride_ot,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    LATENT: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    group = tl.program_id(1)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    # rows past the last read the last again, and are not stored
    row = group * OUT + tl.minimum(m, OUT - 1)
    # codes are read 8 at a time, as tokens are: the tiles of both then have one layout
    k = tl.max_contiguous(tl.arange(0, BLOCK_K), 8)[None, :]
    w_row = (w_ptr + row.to(tl.int64) * stride_w)[:, None]
    # all rows of a tile have one scale for each 128 columns, so the tokens are multiplied by it
    block = tl.arange(0, BLOCK_K // 128)
    scale_row = scale_ptr + (group * OUT + tile * BLOCK_M).to(tl.int64) // 128 * stride_scale
    # weights do not wait for the kernel before, which must not write them
    w = tl.load(w_row + k, mask=(k < K) | EVEN, other=0)
    scale = tl.full([BLOCK_K // 128], 1.0, tl.float32)
    if KIND == FP8:
        scale = tl.load(scale_row + block, mask=(128 * block < K) | EVEN, other=0)
    if LATENT > 0:
        scaled_norm = tl.load(scaled_norm_ptr + m, mask=m < LATENT, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (tl.zeros([BLOCK_M], tl.float32),)  # noqa: RUF005 (Triton knows no starred tuples)
    for piece in tl.static_range(PIECES):
        at = piece * BLOCK_K
        if piece > 0:
            w = tl.load(w_row + at + k, mask=(at + k < K) | EVEN, other=0)
            if KIND == FP8:
                scale = tl.load(scale_row + at // 128 + block, mask=(at + 128 * block < K) | EVEN, other=0)
        values = e4m3_float(w, INTERPRET) if KIND == FP8 else w.to(tl.float32)
        column = at + 128 * block[:, None] + tl.arange(0, 128)[None, :]  # [BLOCK_K / 128, 128]
        live = (column < K) | EVEN
        # all tokens are on their way before the first sum
        tokens = ()
        for t in tl.static_range(TOKENS):
            x_row = x_ptr + tl.minimum(t, T - 1).to(tl.int64) * stride_xt + group * stride_xg
            tokens = tokens + (tl.load(x_row + column, mask=live, other=0.0),)  # noqa: RUF005
        more_sums = ()
        for t in tl.static_range(TOKENS):
            x = tokens[t].to(tl.float32)
            if KIND == FP8:
                x = x * (e8m0_float(scale) if E8M0 else scale)[:, None]
            more_sums = more_sums + (sums[t] + tl.sum(values * tl.reshape(x, [1, BLOCK_K]), 1),)  # noqa: RUF005
        sums = more_sums
    for t in tl.static_range(TOKENS):
        out = sums[t]
        at = out_ptr + tl.minimum(t, T - 1).to(tl.int64) * stride_ot + group * OUT + m
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=(m < OUT) & (t < T))
        if LATENT > 0:
            at = scaled_ptr + tl.minimum(t, T - 1).to(tl.int64) * LATENT + m
            tl.store(at, (out * scaled_norm).to(scaled_ptr.dtype.element_ty), mask=(m < LATENT) & (t < T))


@triton.jit(do_not_specialize=["T", "OUT", "beside_OUT", "beside_tiles"])
def linear_gemv_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    beside_w_ptr,
    beside_out_ptr,
    T,
    OUT,
    beside_OUT,
    beside_tiles,
    K,
    stride_xt,
    stride_xg,
    stride_w,
    stride_scale,
    stride_ot,
    stride_beside_w,
    scaled_norm_ptr,
    scaled_ptr,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    BESIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BESIDE_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    LATENT: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """BLOCK_M rows of one group for all T tokens. BESIDE, LATENT: as in `linear_kernel`."""
    tile = tl.program_id(0)
    if BESIDE:
        if tile < beside_tiles:
            _rows(
                x_ptr, beside_w_ptr, beside_w_ptr, beside_out_ptr, scaled_norm_ptr, scaled_ptr,
                tile, T, beside_OUT, K, stride_xt, stride_xg, stride_beside_w, 0, beside_OUT,
                PLAIN, E8M0, EVEN, TOKENS, BESIDE_M, BLOCK_K, PIECES, 0, PDL, INTERPRET,
            )  # fmt: skip
        else:
            _rows(
                x_ptr, w_ptr, scale_ptr, out_ptr, scaled_norm_ptr, scaled_ptr,
                tile - beside_tiles, T, OUT, K, stride_xt, stride_xg, stride_w, stride_scale, stride_ot,
                KIND, E8M0, EVEN, TOKENS, BLOCK_M, BLOCK_K, PIECES, LATENT, PDL, INTERPRET,
            )  # fmt: skip
    else:
        _rows(
            x_ptr, w_ptr, scale_ptr, out_ptr, scaled_norm_ptr, scaled_ptr, tile, T, OUT, K,
            stride_xt, stride_xg, stride_w, stride_scale, stride_ot,
            KIND, E8M0, EVEN, TOKENS, BLOCK_M, BLOCK_K, PIECES, LATENT, PDL, INTERPRET,
        )  # fmt: skip
