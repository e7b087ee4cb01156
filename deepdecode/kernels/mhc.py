"""Hyper-connections between two sublayers: post of one, pre of the next and its RMSNorm, in two launches.

The first cuts the channels over programs, since one token's mixing product reads 24 x 4C weights: each program writes its
channels of the new streams and takes their part of the product and of the sum of squares. The second has the sums, so it makes
the gates, reads the sublayer's input from the streams and norms it; Sinkhorn stands in a program of its own beside that one,
because 39 dependent steps take as long and nothing before the next boundary needs them.

The streams are bfloat16, so splitting the float32 weights into two bfloat16 keeps 16 bits of them in two tensor-core products.
How the channels are cut depends on C and on how many tokens there are, and parts are summed in their order. Up to 4 tokens are
mixed one by one without tensor cores: half of the first launch was the way of weights and streams into tiles for them, behind
the wait.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# rows of the mixing product of a layer's site: 4 read, 4 write, 16 stream to stream; the head's site has the first 4
SITE_ROWS = 24
# tokens that are mixed one by one: each reads the weights again, from L2 and before it waits. On an H200, C = 4096, past L2,
# the first launch takes 1.74 us instead of 2.56 at T = 1, 2.29 for 2.60 at 2, 2.56 for 2.69 at 4 (bench glue, mhc_mix)
FEW = 4


@dataclass(frozen=True)
class Config:
    """block_c: channels of each stream in a program of the first launch; block_t: tokens of one; 1: without tensor cores."""

    block_c: int
    block_t: int
    mix_warps: int
    read_warps: int
    pdl: bool


def plan(C: int, arch: int, T: int = 5) -> Config:
    """Choose both launches. Pure.

    Channels of each stream, tokens and warps of a program of the first: what was fastest of nine on an H200, C = 4096, both
    launches past L2. Us, beside those of (32, 1, 2) and (32, 8, 2): 3.6 and 4.1 at T = 1, 4.2 and 4.7 at 4, 5.6 and 6.0 at 16,
    6.4 and 6.8 at 32, 7.1 and 8.2 at 64.
    """
    tiles = ((FEW, (64, 1, 4)), (8, (32, 8, 2)), (16, (64, 16, 4)), (32, (32, 16, 4)))
    block_c, block_t, mix_warps = next((tile for most, tile in tiles if most >= T), (32, 16, 2))
    # channels are not masked
    block_c = block_c if C % block_c == 0 else 32
    return Config(block_c, block_t, mix_warps, read_warps=4 if C <= 4096 else 8, pdl=arch >= 90)


def supports(T: int, C: int, streams: str, fn: str, hc_eps: float = 1e-6) -> str | None:
    """Why no kernel runs; None if one does. streams, fn: their dtypes by name."""
    if streams != "bfloat16" or fn != "float32":
        return f"streams and fn must be bfloat16 and float32, got {streams} and {fn}"
    if C % 32 or C > 8192:
        return f"C must be a multiple of 32 up to 8192, got {C}"
    if hc_eps < 1e-12:
        # shares smaller than this leave float32 where three sums of them are multiplied
        return f"hc_eps must be at least 1e-12, got {hc_eps}"
    if T > 65535 * 8:
        return f"T must be at most {65535 * 8}, got {T}"
    return None


@triton.jit
def _after(ptr, INTERPRET: tl.constexpr):
    """The pointer as a number that is not known before this point: what is read through it stays behind the wait."""
    number = ptr.to(tl.int64)
    if INTERPRET:
        return number
    return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [number], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _each(address, INTERPRET: tl.constexpr):
    """float32 at byte addresses [T, C] that are equal along a row, in the layout of what it multiplies.

    `tl.load` would choose a layout of its own, and 20 of them pass shared memory and its barriers one after the other. Four
    neighbours stand in one row, so one of them loads.
    """
    if INTERPRET:
        return tl.load(address.to(tl.pointer_type(tl.float32)))
    return tl.inline_asm_elementwise(
        "{ ld.global.f32 $0, [$4]; mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0; }",
        "=&f,=f,=f,=f,l,l,l,l", [address], dtype=tl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _part(acc, streams, w, INTERPRET: tl.constexpr):
    """acc [R, T] + w [R, C] @ streams [T, C]^T, w in two bfloat16 parts."""
    if INTERPRET:
        return tl.dot(w, tl.trans(streams), acc, input_precision="ieee")
    s = tl.trans(streams.to(tl.bfloat16))
    high = w.to(tl.bfloat16)
    low = (w - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(high, s, tl.dot(low, s, acc))


@triton.jit(do_not_specialize=["T"])
def mhc_mix_kernel(
    y_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    out_ptr,
    part_ptr,
    T,
    C,
    HAS_Y: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """part[split, t, r]: this split's share of row r's product, and in row ROWS of the sum of squares."""
    split = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = split * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    live = t < T
    row = t.to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # weights do not wait for the kernel before, which must not write them
    weight = fn_ptr + r[:, None] * (4 * C) + c[None, :]
    known = (r < ROWS)[:, None]
    w0 = tl.load(weight, mask=known, other=0.0)  # [BLOCK_R, BLOCK_C]
    w1 = tl.load(weight + C, mask=known, other=0.0)
    w2 = tl.load(weight + 2 * C, mask=known, other=0.0)
    w3 = tl.load(weight + 3 * C, mask=known, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = row[:, None] * (4 * C) + c[None, :]
    h0 = tl.load(streams_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_C]
    h1 = tl.load(streams_ptr + at + C, mask=live[:, None], other=0.0).to(tl.float32)
    h2 = tl.load(streams_ptr + at + 2 * C, mask=live[:, None], other=0.0).to(tl.float32)
    h3 = tl.load(streams_ptr + at + 3 * C, mask=live[:, None], other=0.0).to(tl.float32)
    if HAS_Y:
        y = tl.load(y_ptr + row[:, None] * C + c[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        # rows past the last token read the last one's gates
        same = tl.minimum(row, T - 1)[:, None] + (c * 0)[None, :]
        post = _after(post_ptr, INTERPRET) + same * 16
        comb = _after(comb_ptr, INTERPRET) + same * 64
        n0 = _post(post, comb, 0, y, h0, h1, h2, h3, INTERPRET).to(out_ptr.dtype.element_ty)
        n1 = _post(post, comb, 1, y, h0, h1, h2, h3, INTERPRET).to(out_ptr.dtype.element_ty)
        n2 = _post(post, comb, 2, y, h0, h1, h2, h3, INTERPRET).to(out_ptr.dtype.element_ty)
        n3 = _post(post, comb, 3, y, h0, h1, h2, h3, INTERPRET).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, n0, mask=live[:, None])
        tl.store(out_ptr + at + C, n1, mask=live[:, None])
        tl.store(out_ptr + at + 2 * C, n2, mask=live[:, None])
        tl.store(out_ptr + at + 3 * C, n3, mask=live[:, None])
        h0, h1, h2, h3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    acc = _part(acc, h0, w0, INTERPRET)
    acc = _part(acc, h1, w1, INTERPRET)
    acc = _part(acc, h2, w2, INTERPRET)
    acc = _part(acc, h3, w3, INTERPRET)
    squares = tl.sum(h0 * h0 + h1 * h1 + (h2 * h2 + h3 * h3), 1)  # [BLOCK_T]
    acc = tl.where((r == ROWS)[:, None], squares[None, :], acc)
    tl.store(part_ptr + (split.to(tl.int64) * T + row)[None, :] * BLOCK_R + r[:, None], acc, mask=live[None, :])


@triton.jit
def _post1(post_ptr, comb_ptr, k: tl.constexpr, y, h0, h1, h2, h3):
    """`_post` of one token."""
    c0, c1 = tl.load(comb_ptr + k), tl.load(comb_ptr + 4 + k)
    c2, c3 = tl.load(comb_ptr + 8 + k), tl.load(comb_ptr + 12 + k)
    return tl.load(post_ptr + k) * y + (c0 * h0 + c1 * h1 + (c2 * h2 + c3 * h3))


@triton.jit(do_not_specialize=["T"])
def mhc_mix_few_kernel(
    y_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    out_ptr,
    part_ptr,
    T,
    C,
    HAS_Y: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `mhc_mix_kernel`, one token of a program: what a thread multiplies stays in the registers it was loaded to."""
    split, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    c = split * BLOCK_C + tl.arange(0, BLOCK_C)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # weights do not wait for the kernel before, which must not write them
    weight = fn_ptr + r[:, None] * (4 * C) + c[None, :]
    known = (r < ROWS)[:, None]
    w0 = tl.load(weight, mask=known, other=0.0)  # [BLOCK_R, BLOCK_C]
    w1 = tl.load(weight + C, mask=known, other=0.0)
    w2 = tl.load(weight + 2 * C, mask=known, other=0.0)
    w3 = tl.load(weight + 3 * C, mask=known, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    stream = streams_ptr + t * (4 * C) + c
    h0 = tl.load(stream).to(tl.float32)  # [BLOCK_C]
    h1 = tl.load(stream + C).to(tl.float32)
    h2 = tl.load(stream + 2 * C).to(tl.float32)
    h3 = tl.load(stream + 3 * C).to(tl.float32)
    if HAS_Y:
        y = tl.load(y_ptr + t * C + c).to(tl.float32)
        post, comb = post_ptr + t * 4, comb_ptr + t * 16
        n0 = _post1(post, comb, 0, y, h0, h1, h2, h3).to(out_ptr.dtype.element_ty)
        n1 = _post1(post, comb, 1, y, h0, h1, h2, h3).to(out_ptr.dtype.element_ty)
        n2 = _post1(post, comb, 2, y, h0, h1, h2, h3).to(out_ptr.dtype.element_ty)
        n3 = _post1(post, comb, 3, y, h0, h1, h2, h3).to(out_ptr.dtype.element_ty)
        out = out_ptr + t * (4 * C) + c
        tl.store(out, n0)
        tl.store(out + C, n1)
        tl.store(out + 2 * C, n2)
        tl.store(out + 3 * C, n3)
        h0, h1, h2, h3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
    mixed = w0 * h0[None, :] + w1 * h1[None, :] + (w2 * h2[None, :] + w3 * h3[None, :])
    squares = tl.sum(h0 * h0 + h1 * h1 + (h2 * h2 + h3 * h3), 0)
    acc = tl.where(r == ROWS, squares, tl.sum(mixed, 1))
    tl.store(part_ptr + (split.to(tl.int64) * T + t) * BLOCK_R + r, acc)


@triton.jit
def _post(post, comb, k: tl.constexpr, y, h0, h1, h2, h3, INTERPRET: tl.constexpr):
    """Stream k after the sublayer: its share of y, and of each stream j by comb[j, k]."""
    c0, c1 = _each(comb + 4 * k, INTERPRET), _each(comb + 16 + 4 * k, INTERPRET)
    c2, c3 = _each(comb + 32 + 4 * k, INTERPRET), _each(comb + 48 + 4 * k, INTERPRET)
    return _each(post + 4 * k, INTERPRET) * y + (c0 * h0 + c1 * h1 + (c2 * h2 + c3 * h3))


@triton.jit
def _inverse(x, INTERPRET: tl.constexpr):
    """1 / x to one unit in the last place."""
    if INTERPRET:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _softmax4(a, b, c, d, eps, INTERPRET: tl.constexpr):
    peak = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - peak), tl.exp(b - peak), tl.exp(c - peak), tl.exp(d - peak)
    unit = _inverse((a + b) + (c + d), INTERPRET)
    return a * unit + eps, b * unit + eps, c * unit + eps, d * unit + eps


@triton.jit
def _balance4(a, b, c, d, eps, INTERPRET: tl.constexpr):
    """Four numbers over their sum plus eps."""
    unit = _inverse((a + b) + (c + d) + eps, INTERPRET)
    return a * unit, b * unit, c * unit, d * unit


@triton.jit
def _sum4(a, b, c, d, v0, v1, v2, v3):
    return a * v0 + b * v1 + c * v2 + d * v3


@triton.jit
def _others(s0, s1, s2, s3):
    """Each sum's three others multiplied, over something near the first such product, which keeps them in range.

    So all are one factor from the sums' reciprocals. The bits of a number, turned round, are its reciprocal to an eighth.
    """
    p01, p23 = s0 * s1, s2 * s3
    u0, u1, u2, u3 = s1 * p23, s0 * p23, s3 * p01, s2 * p01
    unit = (0x7F000000 - u0.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return u0 * unit, u1 * unit, u2 * unit, u3 * unit


@triton.jit
def _pick(sums, i: tl.constexpr):
    """One of the sums, for every thread."""
    return tl.sum(tl.where(tl.arange(0, sums.shape[0]) == i, sums, 0.0), 0)


@triton.jit
def _pick4(sums, i: tl.constexpr):
    return _pick(sums, i), _pick(sums, i + 1), _pick(sums, i + 2), _pick(sums, i + 3)


@triton.jit
def _load4(ptr, i: tl.constexpr):
    return tl.load(ptr + i), tl.load(ptr + i + 1), tl.load(ptr + i + 2), tl.load(ptr + i + 3)


@triton.jit
def _gate(m, unit, base):
    return 1.0 / (1.0 + tl.exp(-(m * unit + base)))


@triton.jit
def _mix4(sums, i: tl.constexpr, unit, b0, b1, b2, b3, eps, INTERPRET: tl.constexpr):
    """One row of comb before its first column step: softmax of four logits, plus eps."""
    a, b, c, d = _pick4(sums, i)
    return _softmax4(a * unit + b0, b * unit + b1, c * unit + b2, d * unit + b3, eps, INTERPRET)


@triton.jit
def _store4(ptr, a, b, c, d):
    tl.store(ptr, a)
    tl.store(ptr + 1, b)
    tl.store(ptr + 2, c)
    tl.store(ptr + 3, d)


@triton.jit(do_not_specialize=["T"])
def mhc_read_kernel(
    streams_ptr,
    part_ptr,
    base_ptr,
    scale_ptr,
    norm_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    T,
    C,
    splits,
    norm_eps,
    hc_eps,
    iters,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Program (t, 0) reads and norms token t's input; (t, 1) makes the gates that the next boundary writes with."""
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)[:, None]
    # whole rows, 16 bytes at a time: a column alone takes a sector for each number
    at = part_ptr + (s * T + t) * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # weights do not wait for the kernel before, which must not write them
    if tl.program_id(1) == 0:
        c = tl.arange(0, BLOCK_C)
        b0, b1, b2, b3 = _load4(base_ptr, 0)
        norm = tl.load(norm_ptr + c, mask=c < C, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr)
        if PDL:
            tl.extra.cuda.gdc_wait()
        stream = streams_ptr + t * 4 * C + c
        h0 = tl.load(stream, mask=c < C, other=0.0)
        h1 = tl.load(stream + C, mask=c < C, other=0.0)
        h2 = tl.load(stream + 2 * C, mask=c < C, other=0.0)
        h3 = tl.load(stream + 3 * C, mask=c < C, other=0.0)
        sums = tl.sum(tl.load(at, mask=s < splits, other=0.0), 0)  # [BLOCK_R]
        unit = tl.rsqrt(_pick(sums, ROWS) / (4 * C) + norm_eps) * scale
        g0, g1, g2, g3 = _pick4(sums, 0)
        g0, g1 = _gate(g0, unit, b0) + hc_eps, _gate(g1, unit, b1) + hc_eps
        g2, g3 = _gate(g2, unit, b2) + hc_eps, _gate(g3, unit, b3) + hc_eps
        x = g0 * h0.to(tl.float32) + g1 * h1.to(tl.float32) + (g2 * h2.to(tl.float32) + g3 * h3.to(tl.float32))
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x) / C + norm_eps) * norm
        tl.store(x_ptr + t * C + c, x.to(x_ptr.dtype.element_ty), mask=c < C)
    elif ROWS == 24:
        b4, b5, b6, b7 = _load4(base_ptr, 4)
        b8, b9, b10, b11 = _load4(base_ptr, 8)
        b12, b13, b14, b15 = _load4(base_ptr, 12)
        b16, b17, b18, b19 = _load4(base_ptr, 16)
        b20, b21, b22, b23 = _load4(base_ptr, 20)
        post_scale, comb_scale = tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
        if PDL:
            tl.extra.cuda.gdc_wait()
        sums = tl.sum(tl.load(at, mask=s < splits, other=0.0), 0)
        rms = tl.rsqrt(_pick(sums, ROWS) / (4 * C) + norm_eps)
        unit = rms * post_scale
        p0, p1, p2, p3 = _pick4(sums, 4)
        p0, p1, p2, p3 = _gate(p0, unit, b4), _gate(p1, unit, b5), _gate(p2, unit, b6), _gate(p3, unit, b7)
        _store4(post_ptr + t * 4, 2.0 * p0, 2.0 * p1, 2.0 * p2, 2.0 * p3)
        unit = rms * comb_scale
        c00, c01, c02, c03 = _mix4(sums, 8, unit, b8, b9, b10, b11, hc_eps, INTERPRET)
        c10, c11, c12, c13 = _mix4(sums, 12, unit, b12, b13, b14, b15, hc_eps, INTERPRET)
        c20, c21, c22, c23 = _mix4(sums, 16, unit, b16, b17, b18, b19, hc_eps, INTERPRET)
        c30, c31, c32, c33 = _mix4(sums, 20, unit, b20, b21, b22, b23, hc_eps, INTERPRET)
        c00, c10, c20, c30 = _balance4(c00, c10, c20, c30, hc_eps, INTERPRET)
        c01, c11, c21, c31 = _balance4(c01, c11, c21, c31, hc_eps, INTERPRET)
        c02, c12, c22, c32 = _balance4(c02, c12, c22, c32, hc_eps, INTERPRET)
        c03, c13, c23, c33 = _balance4(c03, c13, c23, c33, hc_eps, INTERPRET)
        for _ in range(1, tl.minimum(iters, 2)):
            c00, c01, c02, c03 = _balance4(c00, c01, c02, c03, hc_eps, INTERPRET)
            c10, c11, c12, c13 = _balance4(c10, c11, c12, c13, hc_eps, INTERPRET)
            c20, c21, c22, c23 = _balance4(c20, c21, c22, c23, hc_eps, INTERPRET)
            c30, c31, c32, c33 = _balance4(c30, c31, c32, c33, hc_eps, INTERPRET)
            c00, c10, c20, c30 = _balance4(c00, c10, c20, c30, hc_eps, INTERPRET)
            c01, c11, c21, c31 = _balance4(c01, c11, c21, c31, hc_eps, INTERPRET)
            c02, c12, c22, c32 = _balance4(c02, c12, c22, c32, hc_eps, INTERPRET)
            c03, c13, c23, c33 = _balance4(c03, c13, c23, c33, hc_eps, INTERPRET)
        if iters > 2:
            # Units of all rows, or all columns, may be off by one factor: no reciprocal is waited for until the last step. That
            # step alone takes hc_eps, which beside sums near 1 counts for nothing in those before
            v0, v1, v2, v3 = 1.0, 1.0, 1.0, 1.0
            for _ in range(3, iters):
                s0, s1 = _sum4(c00, c01, c02, c03, v0, v1, v2, v3), _sum4(c10, c11, c12, c13, v0, v1, v2, v3)
                s2, s3 = _sum4(c20, c21, c22, c23, v0, v1, v2, v3), _sum4(c30, c31, c32, c33, v0, v1, v2, v3)
                u0, u1, u2, u3 = _others(s0, s1, s2, s3)
                s0, s1 = _sum4(c00, c10, c20, c30, u0, u1, u2, u3), _sum4(c01, c11, c21, c31, u0, u1, u2, u3)
                s2, s3 = _sum4(c02, c12, c22, c32, u0, u1, u2, u3), _sum4(c03, c13, c23, c33, u0, u1, u2, u3)
                v0, v1, v2, v3 = _others(s0, s1, s2, s3)
            c00, c01, c02, c03 = _balance4(c00 * v0, c01 * v1, c02 * v2, c03 * v3, 0.0, INTERPRET)
            c10, c11, c12, c13 = _balance4(c10 * v0, c11 * v1, c12 * v2, c13 * v3, 0.0, INTERPRET)
            c20, c21, c22, c23 = _balance4(c20 * v0, c21 * v1, c22 * v2, c23 * v3, 0.0, INTERPRET)
            c30, c31, c32, c33 = _balance4(c30 * v0, c31 * v1, c32 * v2, c33 * v3, 0.0, INTERPRET)
            c00, c10, c20, c30 = _balance4(c00, c10, c20, c30, hc_eps, INTERPRET)
            c01, c11, c21, c31 = _balance4(c01, c11, c21, c31, hc_eps, INTERPRET)
            c02, c12, c22, c32 = _balance4(c02, c12, c22, c32, hc_eps, INTERPRET)
            c03, c13, c23, c33 = _balance4(c03, c13, c23, c33, hc_eps, INTERPRET)
        _store4(comb_ptr + t * 16, c00, c01, c02, c03)
        _store4(comb_ptr + t * 16 + 4, c10, c11, c12, c13)
        _store4(comb_ptr + t * 16 + 8, c20, c21, c22, c23)
        _store4(comb_ptr + t * 16 + 12, c30, c31, c32, c33)


def mix(
    y: torch.Tensor | None,
    streams: torch.Tensor,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    fn: torch.Tensor,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first launch: the new streams, and parts [splits, T, rows] of the mixing product and of the sum of squares.

    Row r of the product is the parts' sum at r, the sum of squares at the number of fn's rows.
    """
    T, _, C = streams.shape
    rows = fn.shape[0]
    splits = triton.cdiv(C, config.block_c)
    out = streams if y is None else torch.empty_like(streams)
    part = torch.empty(splits, T, _rows(rows), dtype=torch.float32, device=streams.device)
    if config.block_t == 1:
        mhc_mix_few_kernel[splits, T](
            y, streams, post, comb, fn, out, part, T, C, HAS_Y=y is not None, ROWS=rows, BLOCK_R=_rows(rows),
            BLOCK_C=config.block_c, PDL=config.pdl, num_warps=config.mix_warps, **({"launch_pdl": True} if config.pdl else {}),
        )  # fmt: skip
        return out, part
    mhc_mix_kernel[splits, triton.cdiv(T, config.block_t)](
        y,
        streams,
        post,
        comb,
        fn,
        out,
        part,
        T,
        C,
        HAS_Y=y is not None,
        ROWS=rows,
        BLOCK_R=_rows(rows),
        BLOCK_T=config.block_t,
        BLOCK_C=config.block_c,
        PDL=config.pdl,
        INTERPRET=not streams.is_cuda,
        num_warps=config.mix_warps,
        **({"launch_pdl": True} if config.pdl else {}),
    )
    return out, part


def _rows(rows: int) -> int:
    """Rows of a part: the product's and the sum of squares', as tiles have them."""
    return max(16, triton.next_power_of_2(rows + 1))


def launch(
    y: torch.Tensor | None,
    streams: torch.Tensor,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Streams [T, 4, C], x [T, C], post [T, 4] and comb [T, 4, 4]; the last two None for a head's site (fn of 4 rows).

    All arguments are contiguous and checked, T > 0. Without y the streams come back as they are.
    """
    T, _, C = streams.shape
    out, part = mix(y, streams, post, comb, fn, config)
    splits, _, block_r = part.shape
    x = torch.empty(T, C, dtype=streams.dtype, device=streams.device)
    site = len(fn) == SITE_ROWS
    new_post = torch.empty(T, 4, dtype=torch.float32, device=streams.device) if site else None
    new_comb = torch.empty(T, 4, 4, dtype=torch.float32, device=streams.device) if site else None
    mhc_read_kernel[T, 2 if site else 1](
        out,
        part,
        base,
        scale,
        norm,
        x,
        new_post,
        new_comb,
        T,
        C,
        splits,
        norm_eps,
        hc_eps,
        iters,
        ROWS=len(fn),
        BLOCK_R=block_r,
        BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_C=triton.next_power_of_2(C),
        PDL=config.pdl,
        INTERPRET=not streams.is_cuda,
        num_warps=config.read_warps,
        **({"launch_pdl": True} if config.pdl else {}),
    )
    return out, x, new_post, new_comb
