"""What several kernels do to a row: rotary positions, E4M3 codes and cache rows. Inlined where used; nothing to launch.

Rows are [N, D] in float32. No FP8 instruction: codes are made by integer arithmetic, so every arch runs the same code.
"""

import triton
import triton.language as tl


@triton.jit
def sincos(angle, INTERPRET: tl.constexpr):
    """cos and sin to 1e-7 of float32 angles up to 2**21 (a context of two million), without libdevice's slow path.

    The angle less k * pi / 2, in three float32 parts: the first product and difference are exact in one fma.
    """
    if INTERPRET:
        # numpy has no fma
        return tl.cos(angle), tl.sin(angle)
    k = tl.floor(angle * 0.6366197723675814 + 0.5)
    r = tl.fma(k, -1.57079637050628662109375, angle)
    r = tl.fma(k, 4.37113900018624283e-8, r)
    r = tl.fma(k, 1.71512449e-15, r)
    # a padded row may hold any position: keep it finite
    r = tl.clamp(r, -1.0, 1.0)
    s = r * r
    cos = 1.0 + s * (-0.5 + s * (0.041666666666666664 + s * (-0.001388888888888889 + s * 2.48015873015873e-05)))
    sin = r + r * s * (-0.16666666666666666 + s * (0.008333333333333333 + s * (-0.0001984126984126984 + s * 2.7557319e-06)))
    quarter = k.to(tl.int32)
    odd = (quarter & 1) == 1
    turned_cos = tl.where(odd, sin, cos)
    turned_sin = tl.where(odd, cos, sin)
    turned_cos = tl.where(((quarter + 1) & 2) != 0, -turned_cos, turned_cos)
    turned_sin = tl.where((quarter & 2) != 0, -turned_sin, turned_sin)
    return turned_cos, turned_sin


@triton.jit
def turn(position, freqs_ptr, D: tl.constexpr, R: tl.constexpr, INTERPRET: tl.constexpr):
    """cos and sin of one position for each of the D / 2 pairs, and which of them turn: the last R / 2."""
    freq, turns = frequencies(freqs_ptr, D, R)
    cos, sin = sincos(position.to(tl.float32) * freq, INTERPRET)
    return cos, sin, turns


@triton.jit
def frequencies(freqs_ptr, D: tl.constexpr, R: tl.constexpr):
    """The frequency of each of the D / 2 pairs, and which of them turn: the last R / 2."""
    k = tl.arange(0, D // 2) - (D - R) // 2
    return tl.load(freqs_ptr + k, mask=k >= 0, other=0.0), k >= 0


@triton.jit
def rotate(x, cos, sin, turns, N: tl.constexpr, D: tl.constexpr):
    """x [N, D] with adjacent pairs turned; other channels keep their bits, infinities and NaNs too."""
    even, odd = tl.split(tl.reshape(x, [N, D // 2, 2]))
    a = tl.where(turns[None, :], even * cos[None, :] - odd * sin[None, :], even)
    b = tl.where(turns[None, :], even * sin[None, :] + odd * cos[None, :], odd)
    return tl.reshape(tl.join(a, b), [N, D])


@triton.jit
def normed(x, eps, D: tl.constexpr):
    """x [N, D] over its root mean square."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]


@triton.jit
def magnitude(x):
    """|x| as bits: they order as the numbers do, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def e4m3(x):
    """int32 codes of float32 x, to nearest even, saturating at +-448; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    mag = bits & 0x7FFFFFFF
    # 3 bits of mantissa are kept, and the exponent's bias falls from 127 to 7
    normal = ((mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6 codes count steps of 2**-9: adding 1.5 * 2**23 rounds to whole steps
    small = (mag.to(tl.float32, bitcast=True) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.minimum(tl.where(mag < 0x3C800000, small, normal), 0x7E)
    return ((bits >> 24) & 0x80) | tl.where(mag > 0x7F800000, 0x7F, code)


@triton.jit
def row_scale(top, INTERPRET: tl.constexpr):
    """float32 max(|x|, 1e-4) / 448 from the largest magnitudes' bits [N]; NaN stays NaN."""
    amax = top.to(tl.float32, bitcast=True)
    amax = tl.where(top > 0x7F800000, amax, tl.maximum(amax, 1e-4))
    return quotient(amax, tl.full(amax.shape, 448.0, tl.float32), INTERPRET)


@triton.jit
def quotient(x, by, INTERPRET: tl.constexpr):
    """x / by to the nearest float32, as `tl.div_rn` without its calls: for normal quotients and divisors of up to 2**126."""
    if INTERPRET:
        # numpy has no fma
        return tl.div_rn(x, tl.broadcast_to(by, x.shape))
    unit = 1.0 / by
    unit = tl.fma(tl.fma(-by, unit, 1.0), unit, unit)
    q = x * unit
    return tl.fma(tl.fma(-q, tl.broadcast_to(by, x.shape), x), tl.broadcast_to(unit, x.shape), q)


@triton.jit
def _pairs(x, N: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Sum and difference of the two values that one bit of the column tells apart; LOW columns lie between them."""
    x = tl.permute(tl.reshape(x, [N, HIGH, 2, LOW]), (0, 1, 3, 2))
    a, b = tl.split(x)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), [N, HIGH * 2 * LOW])


@triton.jit
def hadamard(x, n: tl.constexpr):
    """The normalised Walsh-Hadamard transform of x [16, n], n from 16 to 128; float32. x is of 16 bits on tensor cores.

    Four bits of the column by a product with 16 x 16 signs, exact but for the float32 sum; the others by sums and differences.
    """
    LOW: tl.constexpr = n // 16
    i = tl.arange(0, 16)
    # the parity of the four bits that row and column share, from a table
    signs = (1.0 - 2.0 * ((0x6996 >> (i[:, None] & i[None, :])) & 1)).to(x.dtype)
    x = tl.reshape(tl.permute(tl.reshape(x, [16, 16, LOW]), (0, 2, 1)), [16 * LOW, 16])
    y = tl.dot(x, signs, input_precision="ieee")
    y = tl.reshape(tl.permute(tl.reshape(y, [16, LOW, 16]), (0, 2, 1)), [16, n])
    if LOW >= 2:
        y = _pairs(y, 16, n // 2, 1)
    if LOW >= 4:
        y = _pairs(y, 16, n // 4, 2)
    if LOW >= 8:
        y = _pairs(y, 16, n // 8, 4)
    return y * (n**-0.5)


@triton.jit
def write_584(x, cache_ptr, row, rows, page_size, stride):
    """One row [1, 512] into a paged cache of 584-byte rows, as `ops.rows.write_rows`; a row outside the cache is skipped."""
    inside = (row >= 0) & (row < rows)
    page = row // page_size
    place = row - page * page_size
    start = cache_ptr + page.to(tl.int64) * stride
    group = tl.arange(0, 8)
    lane = tl.arange(0, 64)
    x = tl.reshape(x, [8, 64])
    top = tl.max(magnitude(x), 1)  # [8]
    floored = tl.maximum(top.to(tl.float32, bitcast=True), 1e-4).to(tl.int32, bitcast=True)
    # the least power of two >= amax / 448, and 448 is 1.75 * 2**8
    scale = (floored >> 23) - 8 + ((floored & 0x7FFFFF) > 0x600000).to(tl.int32)
    broken = top >= 0x7F800000
    unit = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    code = tl.where(broken[:, None], 0x7F, e4m3(x * unit[:, None]))
    body = start + place * 576
    at = group[:, None] * 64 + lane[None, :]
    codes = (group < 7)[:, None] & inside
    tl.store(body + at, code.to(tl.uint8), mask=codes & (lane >= 0)[None, :])
    rope = (body + 448).to(tl.pointer_type(tl.bfloat16)) + (at - 448)
    tl.store(rope, x.to(tl.bfloat16), mask=(group == 7)[:, None] & inside & (lane >= 0)[None, :])
    scale = tl.where(group == 7, 0, tl.where(broken, 255, scale))
    tl.store(start + page_size * 576 + place * 8 + group, scale.to(tl.uint8), mask=(group >= 0) & inside)


@triton.jit
def write_132(x, cache_ptr, row, rows, page_size, stride, INTERPRET: tl.constexpr):
    """One row [1, 128] into a paged cache of 132-byte rows: codes, and a float32 scale behind all codes of the page."""
    inside = (row >= 0) & (row < rows)
    page = row // page_size
    place = row - page * page_size
    start = cache_ptr + page.to(tl.int64) * stride
    lane = tl.arange(0, 128)[None, :]
    scale = row_scale(tl.max(magnitude(x), 1), INTERPRET)  # [1]
    code = e4m3(quotient(x, scale[:, None], INTERPRET))
    tl.store(start + place * 128 + lane, code.to(tl.uint8), mask=(lane >= 0) & inside)
    at = (start + page_size * 128 + place * 4).to(tl.pointer_type(tl.float32)) + tl.arange(0, 1)
    tl.store(at, scale, mask=(tl.arange(0, 1) >= 0) & inside)


@triton.jit
def write_plain(x, cache_ptr, row, rows, page_size, stride, D: tl.constexpr):
    """One row [1, D] into a paged cache of plain rows."""
    inside = (row >= 0) & (row < rows)
    page = row // page_size
    channel = tl.arange(0, D)[None, :]
    at = cache_ptr + page.to(tl.int64) * stride + (row - page * page_size) * D + channel
    tl.store(at, x.to(cache_ptr.dtype.element_ty), mask=(channel >= 0) & inside)
