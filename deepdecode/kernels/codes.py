"""Stored codes in registers: E4M3 and E2M1 become bfloat16 exactly, by integer arithmetic that every arch has.

A code's bits are placed where bfloat16 has its sign, exponent and mantissa, which reads as the value times a power of two
(subnormals included), and a multiplication takes that power back. -0.0 is the neutral addend: mul.bf16x2 needs sm_90.
The two halves of a word are placed at once, so what comes out are pairs of columns half a word apart; an order of columns that
the tokens are given too costs less than to restore it. That takes four neighbouring columns in one register of a thread,
as tiles have that are read 16 bytes at a time. Shifts to the left are multiplications, for which there is room.
Under the interpreter, which knows no inline assembly, the same placement is done in float32.
"""

import triton
import triton.language as tl

# kinds of weights
PLAIN, FP8, FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _e4m3(code):
    """The interpreter's E4M3, int32 -> float32, by the same placement."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _e2m1(code):
    """The interpreter's E2M1, int32 of four bits -> float32."""
    bits = ((code & 0x8) << 28) | ((code & 0x7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def fp8_values(codes, S: tl.constexpr, M: tl.constexpr, K: tl.constexpr, INTERPRET: tl.constexpr):
    """uint8 E4M3 codes [S, M, K] -> bfloat16 (float32 when interpreted), of every four columns in the order 0, 2, 1, 3.

    Placed bits read 2**-120 times the value; 0x7b80 is 2**120. NaN codes (0x7f, 0xff) read 480 then. Times 0x7b09, which is
    1.07 * 2**119, that is infinite and 448 is not, and infinity times 0 is the NaN to add.
    """
    if INTERPRET:
        pairs = tl.permute(tl.reshape(_e4m3(codes.to(tl.int32)), (S, M, K // 4, 2, 2)), (0, 1, 2, 4, 3))
        return tl.reshape(pairs, (S, M, K))
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, t, k, c, y, z, n, o;
        mov.b32 o, 0;
        mov.b32 k, 0x7b807b80;
        mov.b32 n, 0x80008000;
        mov.b32 c, 0x7b097b09;
        shl.b32 a, $2, 8;
        shl.b32 s, $2, 4;
        shr.u32 t, $2, 4;
        and.b32 a, a, n;
        and.b32 b, $2, n;
        lop3.b32 a, a, s, 0x07f007f0, 0xf8;
        lop3.b32 b, b, t, 0x07f007f0, 0xf8;
        fma.rn.bf16x2 a, a, k, n;
        fma.rn.bf16x2 b, b, k, n;
        fma.rn.bf16x2 y, a, c, n;
        fma.rn.bf16x2 z, b, c, n;
        fma.rn.bf16x2 $0, y, o, a;
        fma.rn.bf16x2 $1, z, o, b;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def fp8_order(x, S: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """x [S, K, N] with its columns in the order of `fp8_values`."""
    return tl.reshape(tl.permute(tl.reshape(x, (S, K // 4, 2, 2, N)), (0, 1, 3, 2, 4)), (S, K, N))


@triton.jit
def fp8_natural(codes, INTERPRET: tl.constexpr):
    """`fp8_values` with columns in their own order: for many tokens, which would cost more to reorder."""
    if INTERPRET:
        return _e4m3(codes.to(tl.int32))
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, t, k, c, y, z, n, o;
        mov.b32 o, 0;
        mov.b32 k, 0x7b807b80;
        mov.b32 n, 0x80008000;
        mov.b32 c, 0x7b097b09;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 s, a, 4;
        shr.u32 t, b, 4;
        and.b32 a, a, n;
        and.b32 b, b, n;
        lop3.b32 a, a, s, 0x07f007f0, 0xf8;
        lop3.b32 b, b, t, 0x07f007f0, 0xf8;
        fma.rn.bf16x2 a, a, k, n;
        fma.rn.bf16x2 b, b, k, n;
        fma.rn.bf16x2 y, a, c, n;
        fma.rn.bf16x2 z, b, c, n;
        fma.rn.bf16x2 $0, y, o, a;
        fma.rn.bf16x2 $1, z, o, b;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def fp8_converted(codes, INTERPRET: tl.constexpr):
    """`fp8_natural` by the card's own conversion, from sm_89 on: four instructions for two codes instead of seven.

    By way of float16 and float32, whose upper half is bfloat16. NaN stays NaN.
    """
    if INTERPRET:
        return _e4m3(codes.to(tl.int32))
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, a, b, c, d;
        .reg .b32 p, q, r, s, t, u;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 p, low;
        cvt.rn.f16x2.e4m3x2 q, high;
        mov.b32 {a, b}, p;
        mov.b32 {c, d}, q;
        cvt.f32.f16 r, a;
        cvt.f32.f16 s, b;
        cvt.f32.f16 t, c;
        cvt.f32.f16 u, d;
        prmt.b32 $0, r, s, 0x7632;
        prmt.b32 $1, t, u, 0x7632;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def fp4_values(packed, S: tl.constexpr, M: tl.constexpr, K: tl.constexpr, INTERPRET: tl.constexpr):
    """uint8 of two E2M1 codes [S, M, K / 2] -> bfloat16 [S, M, K] (float32 when interpreted).

    Of every eight columns in the order 0, 4, 1, 5, 2, 6, 3, 7. Placed bits read 2**-126 times the value; 0x7e80 is 2**126.
    """
    if INTERPRET:
        code = packed.to(tl.int32)
        natural = tl.reshape(tl.join(_e2m1(code & 15), _e2m1(code >> 4)), (S, M, K // 8, 2, 4))
        return tl.reshape(tl.permute(natural, (0, 1, 2, 4, 3)), (S, M, K))
    first, second = tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, s, t, u, v, k, n;
        mov.b32 k, 0x7e807e80;
        mov.b32 n, 0x80008000;
        shl.b32 a, $4, 12;
        shl.b32 s, $4, 6;
        shl.b32 b, $4, 8;
        shl.b32 t, $4, 2;
        shl.b32 c, $4, 4;
        shr.u32 u, $4, 2;
        shr.u32 v, $4, 6;
        and.b32 a, a, n;
        and.b32 b, b, n;
        and.b32 c, c, n;
        and.b32 d, $4, n;
        lop3.b32 a, a, s, 0x01c001c0, 0xf8;
        lop3.b32 b, b, t, 0x01c001c0, 0xf8;
        lop3.b32 c, c, u, 0x01c001c0, 0xf8;
        lop3.b32 d, d, v, 0x01c001c0, 0xf8;
        fma.rn.bf16x2 $0, a, k, n;
        fma.rn.bf16x2 $1, b, k, n;
        fma.rn.bf16x2 $2, c, k, n;
        fma.rn.bf16x2 $3, d, k, n;
        }""",
        "=r,=r,=r,=r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
    both = tl.reshape(tl.join(first, second), (S, M, K // 8, 4, 2))
    return tl.reshape(tl.permute(both, (0, 1, 2, 4, 3)), (S, M, K))


@triton.jit
def times(values, factors, INTERPRET: tl.constexpr):
    """Elementwise product of bfloat16, two to an instruction: factors that are equal in pairs are no reason not to."""
    if INTERPRET:
        return values * factors
    return tl.inline_asm_elementwise(
        "{ .reg .b32 n; mov.b32 n, 0x80008000; fma.rn.bf16x2 $0, $1, $2, n; }",
        "=r,r,r",
        [values, factors],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def fp4_order(x, S: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """x [S, K, N] with its columns in the order of `fp4_values`."""
    return tl.reshape(tl.permute(tl.reshape(x, (S, K // 8, 2, 4, N)), (0, 1, 3, 2, 4)), (S, K, N))


@triton.jit
def e8m0_float(scale):
    """uint8 -> float32: 2**(scale - 127), of which the lowest is subnormal; 255 is NaN."""
    byte = scale.to(tl.int32)
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_bfloat(scale):
    """The same in bfloat16, as exact: its exponents are float32's."""
    byte = scale.to(tl.int16)
    bits = tl.where(byte == 0, 0x40, byte << 7)
    return tl.where(byte == 255, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
