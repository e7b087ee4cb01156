"""Routed and shared experts for very few tokens, in two launches and without tensor cores, as `linear_gemv`.

The first gives h = silu(gate) * up * routing weight of every (token, expert) pair and of the shared expert, the second the sum
over a token's experts: a program has some channels of all of them, so nothing is left to combine. h is rounded between the two.
A byte of FP4 codes is two neighbouring columns, and so is a word of a token: neither is taken apart before it is multiplied.
"""

import torch
import triton
import triton.language as tl

from deepdecode.kernels.codes import e8m0_float
from deepdecode.kernels.linear import bits
from deepdecode.kernels.linear_gemv import e4m3_float

# rows of gate and of up in a program of the first launch, channels in one of the second
BLOCK_I, BLOCK_C = 2, 4


@triton.jit
def _e2m1_pair(codes, INTERPRET: tl.constexpr):
    """uint8 of two E2M1 codes -> float32 of the low and of the high one, times 2**-14."""
    if INTERPRET:
        code = codes.to(tl.int32)
        return _e2m1_small(code & 15), _e2m1_small(code >> 4)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, s, t, u, n;
        .reg .b16 p, q;
        mov.b32 n, 0x80008000;
        shl.b32 a, $8, 12;
        shl.b32 b, $8, 8;
        shl.b32 c, $8, 4;
        shr.u32 s, a, 3;
        shr.u32 t, b, 3;
        shr.u32 u, c, 3;
        shr.u32 d, $8, 3;
        and.b32 a, a, n;
        and.b32 b, b, n;
        and.b32 c, c, n;
        lop3.b32 a, a, s, 0x0e000e00, 0xf8;
        lop3.b32 b, b, t, 0x0e000e00, 0xf8;
        lop3.b32 c, c, u, 0x0e000e00, 0xf8;
        and.b32 s, $8, n;
        lop3.b32 d, s, d, 0x0e000e00, 0xf8;
        mov.b32 {p, q}, a;
        cvt.f32.f16 $0, p;
        cvt.f32.f16 $2, q;
        mov.b32 {p, q}, b;
        cvt.f32.f16 $4, p;
        cvt.f32.f16 $6, q;
        mov.b32 {p, q}, c;
        cvt.f32.f16 $1, p;
        cvt.f32.f16 $3, q;
        mov.b32 {p, q}, d;
        cvt.f32.f16 $5, p;
        cvt.f32.f16 $7, q;
        }""",
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r",
        [codes],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _e2m1_small(code):
    """The interpreter's, by its digits: one of mantissa, two of exponent."""
    exponent, digit = (code >> 1) & 3, (code & 1).to(tl.float32)
    size = tl.where(exponent == 0, 0.5 * digit, (1.0 + 0.5 * digit) * (1 << tl.maximum(exponent - 1, 0)).to(tl.float32))
    return tl.where((code & 8) != 0, -size, size) * 6.103515625e-05


@triton.jit
def _words(x_ptr, live, STEP: tl.constexpr):
    """Two neighbouring values as float32: of a word of bfloat16, or under the interpreter two float32."""
    if STEP == 1:
        word = tl.load(x_ptr, mask=live, other=0)
        even = (word << 16).to(tl.float32, bitcast=True)
        odd = (word & -65536).to(tl.float32, bitcast=True)
    else:
        even = tl.load(x_ptr, mask=live, other=0.0)
        odd = tl.load(x_ptr + 1, mask=live, other=0.0)
    return even, odd


@triton.jit
def _swiglu(gate, up, limit):
    # by default tl.minimum returns the limit for a NaN, which would hide it
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _fp8_sums(x, codes, scale, E8M0: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRET: tl.constexpr):
    """Sums [M] over columns of codes [M, BLOCK_K] and one token's x [BLOCK_K / 128, 128], a scale for each of its rows."""
    x = x * (e8m0_float(scale) if E8M0 else scale)[:, None]
    return tl.sum(e4m3_float(codes, INTERPRET) * tl.reshape(x, [1, BLOCK_K]), 1)


@triton.jit
def _fp4_part(even, odd, codes, scale, INTERPRET: tl.constexpr):
    """Sums [M, Q] over 8 columns each of codes [M, Q, 4] with values [1, Q, 4] of even and odd columns; scale [M, Q]."""
    low, high = _e2m1_pair(codes, INTERPRET)
    return tl.sum(low * even + high * odd, 2) * e8m0_float(scale)


@triton.jit(do_not_specialize=["T", "top_k", "first", "E"])
def moe_w13_gemv_kernel(
    x_ptr,
    x_words_ptr,
    ids_ptr,
    weights_ptr,
    w_ptr,
    scale_ptr,
    shared_ptr,
    shared_scale_ptr,
    h_ptr,
    shared_h_ptr,
    limit,
    T,
    top_k,
    first,
    E,
    K,
    I,
    SHARED_I,
    stride_x,
    stride_words,
    stride_we,
    stride_w,
    stride_se,
    stride_s,
    stride_shared,
    stride_shared_scale,
    E8M0: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Program (tile, job): a job below T is a token of the shared expert, others are pairs. STEP: elements of x in a word."""
    tile = tl.program_id(0)
    job = tl.program_id(1)
    i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if job < T:
        if tile * BLOCK_I < SHARED_I:
            k = tl.max_contiguous(tl.arange(0, BLOCK_K), 8)[None, :]
            block = tl.arange(0, BLOCK_K // 128)
            row = tl.minimum(i, SHARED_I - 1).to(tl.int64)[:, None]
            # weights do not wait for the kernel before, which must not write them
            gate_codes = tl.load(shared_ptr + row * stride_shared + k, mask=k < K, other=0)
            up_codes = tl.load(shared_ptr + (row + SHARED_I) * stride_shared + k, mask=k < K, other=0)
            gate_at = shared_scale_ptr + tile * BLOCK_I // 128 * stride_shared_scale + block
            up_at = shared_scale_ptr + (SHARED_I + tile * BLOCK_I) // 128 * stride_shared_scale + block
            gate_scale = tl.load(gate_at, mask=128 * block < K, other=0)
            up_scale = tl.load(up_at, mask=128 * block < K, other=0)
            if PDL:
                tl.extra.cuda.gdc_wait()
            column = 128 * block[:, None] + tl.arange(0, 128)[None, :]
            x = tl.load(x_ptr + job.to(tl.int64) * stride_x + column, mask=column < K, other=0.0).to(tl.float32)
            gate = _fp8_sums(x, gate_codes, gate_scale, E8M0, BLOCK_K, INTERPRET)
            up = _fp8_sums(x, up_codes, up_scale, E8M0, BLOCK_K, INTERPRET)
            at = shared_h_ptr + job.to(tl.int64) * SHARED_I + i
            tl.store(at, _swiglu(gate, up, limit).to(shared_h_ptr.dtype.element_ty), mask=i < SHARED_I)
    elif tile * BLOCK_I < I:
        pair = job - T
        if PDL:
            tl.extra.cuda.gdc_wait()
        expert = tl.load(ids_ptr + pair).to(tl.int64) - first
        if (expert >= 0) & (expert < E):
            q = tl.arange(0, BLOCK_K // 8)
            byte = (4 * q[:, None] + tl.arange(0, 4)[None, :])[None, :, :]  # [1, BLOCK_K / 8, 4]
            live = byte < K // 2
            row = tl.minimum(i, I - 1).to(tl.int64)
            w_at = w_ptr + expert * stride_we + (row * stride_w)[:, None, None] + byte
            gate_codes = tl.load(w_at, mask=live, other=0)
            up_codes = tl.load(w_at + I.to(tl.int64) * stride_w, mask=live, other=0)
            # a scale for each 16 bytes
            scale_at = scale_ptr + expert * stride_se + (row * stride_s)[:, None] + (q // 4)[None, :]
            gate_scale = tl.load(scale_at, mask=(8 * q < K)[None, :], other=0)
            up_scale = tl.load(scale_at + I.to(tl.int64) * stride_s, mask=(8 * q < K)[None, :], other=0)
            even, odd = _words(x_words_ptr + (pair // top_k).to(tl.int64) * stride_words + byte * STEP, live, STEP)
            # codes came as 2**-14 times their values
            gate = tl.sum(_fp4_part(even, odd, gate_codes, gate_scale, INTERPRET), 1) * 16384.0
            up = tl.sum(_fp4_part(even, odd, up_codes, up_scale, INTERPRET), 1) * 16384.0
            h = _swiglu(gate, up, limit) * tl.load(weights_ptr + pair)
            tl.store(h_ptr + pair.to(tl.int64) * I + i, h.to(h_ptr.dtype.element_ty), mask=i < I)


@triton.jit(do_not_specialize=["first", "E"])
def moe_w2_gemv_kernel(
    h_words_ptr,
    shared_h_ptr,
    ids_ptr,
    w_ptr,
    scale_ptr,
    shared_ptr,
    shared_scale_ptr,
    out_ptr,
    first,
    E,
    C,
    I,
    SHARED_I,
    stride_words,
    stride_we,
    stride_w,
    stride_se,
    stride_s,
    stride_shared,
    stride_shared_scale,
    E8M0: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Program (tile, t): BLOCK_C channels of token t, of its experts and the shared one."""
    tile = tl.program_id(0)
    t = tl.program_id(1)
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.minimum(c, C - 1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.max_contiguous(tl.arange(0, BLOCK_SHARED), 8)[None, :]
    # weights do not wait for the kernel before, which must not write them
    shared_codes = tl.load(shared_ptr + row[:, None] * stride_shared + k, mask=k < SHARED_I, other=0)
    shared_at = shared_scale_ptr + tile * BLOCK_C // 128 * stride_shared_scale + k // 128
    shared_scale = tl.load(shared_at, mask=k < SHARED_I, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    q = tl.arange(0, BLOCK_I // 8)
    byte = (4 * q[:, None] + tl.arange(0, 4)[None, :])[None, :, :]  # [1, BLOCK_I / 8, 4]
    part = tl.zeros([BLOCK_C, BLOCK_I // 8], tl.float32)
    for n in tl.static_range(TOP):
        pair = t * TOP + n
        expert = tl.load(ids_ptr + pair).to(tl.int64) - first
        here = (expert >= 0) & (expert < E)
        expert = tl.where(here, expert, 0)
        live = here & (byte < I // 2)
        codes = tl.load(w_ptr + expert * stride_we + (row * stride_w)[:, None, None] + byte, mask=live, other=0)
        scale_at = scale_ptr + expert * stride_se + (row * stride_s)[:, None] + (q // 4)[None, :]
        scale = tl.load(scale_at, mask=here & (8 * q < I)[None, :], other=0)
        # h of a pair that is not here was not written
        even, odd = _words(h_words_ptr + pair.to(tl.int64) * stride_words + byte * STEP, live, STEP)
        part += _fp4_part(even, odd, codes, scale, INTERPRET)
    x = tl.load(shared_h_ptr + t.to(tl.int64) * SHARED_I + k, mask=k < SHARED_I, other=0.0).to(tl.float32)
    x = x * (e8m0_float(shared_scale) if E8M0 else shared_scale)
    y = tl.sum(e4m3_float(shared_codes, INTERPRET) * x, 1) + tl.sum(part, 1) * 16384.0
    tl.store(out_ptr + t.to(tl.int64) * C + c, y.to(out_ptr.dtype.element_ty), mask=c < C)


def covers(T: int, C: int, I: int, shared_I: int, kind: str, shared_kind: str, arch: int) -> bool:
    """Whether these launches are made: one token, and narrow experts, as a rank of eight has them.

    On an H200 a step of the tp8 slice takes 2.87 ms with them, 3.08 with tensor cores and a launch that combines.
    """
    if T > 1 or kind != "fp4" or shared_kind != "fp8" or arch < 89:
        return False
    # rows of a shared tile have one row of scales, and a row of codes is read in words
    return C % 128 == 0 and 256 <= C <= 8192 and I % 32 == 0 and 64 <= I <= 512 and shared_I % 128 == 0 and shared_I <= 512


def launch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    scale13: torch.Tensor,
    w2: torch.Tensor,
    scale2: torch.Tensor,
    shared13: torch.Tensor,
    shared_scale13: torch.Tensor,
    shared2: torch.Tensor,
    shared_scale2: torch.Tensor,
    first_expert: int,
    limit: float,
    out: torch.Tensor,
    arch: int,
) -> None:
    """Fill out [T, C]; the arguments are checked, and T > 0. x, ids and weights are contiguous."""
    T, C = x.shape
    top_k = ids.shape[1]
    E, I, shared_I = w13.shape[0], w13.shape[1] // 2, shared13.shape[0] // 2
    h = torch.empty(T * top_k, I, dtype=x.dtype, device=x.device)
    shared_h = torch.empty(T, shared_I, dtype=x.dtype, device=x.device)
    step = 1 if x.dtype == torch.bfloat16 else 2

    def words(values: torch.Tensor) -> torch.Tensor:
        return values.view(torch.int32) if step == 1 else values

    scale13, scale2, shared_scale13, shared_scale2 = (bits(s) for s in (scale13, scale2, shared_scale13, shared_scale2))
    shared13, shared2 = bits(shared13), bits(shared2)
    e8m0 = shared_scale13.dtype == torch.uint8
    pdl = arch >= 90
    # a warp has 256 columns of a row or more, all of a program's warps are in one row
    warps = max(1, min(8, triton.next_power_of_2(C) // 512))
    options = {"E8M0": e8m0, "STEP": step, "PDL": pdl, "INTERPRET": not x.is_cuda, **({"launch_pdl": True} if pdl else {})}
    moe_w13_gemv_kernel[triton.cdiv(max(I, shared_I), BLOCK_I), T + T * top_k](
        x, words(x), ids, weights, w13, scale13, shared13, shared_scale13, h, shared_h, limit, T, top_k, first_expert, E, C, I,
        shared_I, x.stride(0), words(x).stride(0), w13.stride(0), w13.stride(1), scale13.stride(0), scale13.stride(1),
        shared13.stride(0), shared_scale13.stride(0), BLOCK_I=BLOCK_I, BLOCK_K=triton.next_power_of_2(C), num_warps=warps,
        **options,
    )  # fmt: skip
    warps = max(1, min(8, triton.next_power_of_2(I) // 256))
    moe_w2_gemv_kernel[triton.cdiv(C, BLOCK_C), T](
        words(h), shared_h, ids, w2, scale2, shared2, shared_scale2, out, first_expert, E, C, I, shared_I, words(h).stride(0),
        w2.stride(0), w2.stride(1), scale2.stride(0), scale2.stride(1), shared2.stride(0), shared_scale2.stride(0),
        TOP=top_k, BLOCK_C=BLOCK_C, BLOCK_I=triton.next_power_of_2(I), BLOCK_SHARED=triton.next_power_of_2(shared_I),
        num_warps=warps, **options,
    )  # fmt: skip
