"""Stored codes in registers: E4M3 and E2M1 become bfloat16 exactly, by integer arithmetic that every arch has.

A code's bits are placed where bfloat16 has its sign, exponent and mantissa, which reads as the value times a power of two
(subnormals included), and a multiplication takes that power back. -0.0 is the neutral addend: mul.bf16x2 needs sm_90.
Under the interpreter, which knows no inline assembly, the same placement is done in float32.
"""

import triton
import triton.language as tl

# kinds of weights
PLAIN, FP8, FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def fp8_values(codes, INTERPRET: tl.constexpr):
    """uint8 E4M3 codes -> their values in bfloat16, NaN codes (0x7f, 0xff) as NaN; float32 when interpreted.

    Placed bits read 2**-120 times the value; 0x7b80 is 2**120. Adding 1 to the seven low bits of a code reaches its eighth for
    the NaN codes only: spread over the half, that is the addend.
    """
    if INTERPRET:
        code = codes.to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, t, k, n, y, z;
        mov.b32 k, 0x7b807b80;
        and.b32 n, $2, 0x7f7f7f7f;
        add.u32 n, n, 0x01010101;
        prmt.b32 y, n, n, 0x9988;
        prmt.b32 z, n, n, 0xbbaa;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 s, a, 4;
        shr.u32 t, b, 4;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x80008000;
        lop3.b32 a, a, s, 0x07f007f0, 0xf8;
        lop3.b32 b, b, t, 0x07f007f0, 0xf8;
        fma.rn.bf16x2 $0, a, k, y;
        fma.rn.bf16x2 $1, b, k, z;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def fp4_values(packed, scale, INTERPRET: tl.constexpr):
    """uint8 of two E2M1 codes and uint8 E8M0 scales of the same shape -> even columns, odd columns, times the scale.

    Placed bits read 2**-126 times the value; 0x7e80 is 2**126. The scale is a factor of its own, so all of them are exact.
    """
    if INTERPRET:
        code = packed.to(tl.int32)
        factor = e8m0_float(scale)
        low = ((code & 0x8) << 28) | ((code & 0x7) << 22)
        high = ((code & 0x80) << 24) | ((code & 0x70) << 18)
        even = low.to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor  # 2**126
        return even, high.to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, s, t, u, v, k, z;
        mov.b32 k, 0x7e807e80;
        mov.b32 z, 0x80008000;
        prmt.b32 a, $4, 0, 0x1404;
        prmt.b32 b, $4, 0, 0x3424;
        shr.u32 s, a, 2;
        shr.u32 t, b, 2;
        shl.b32 c, a, 4;
        shl.b32 d, b, 4;
        shr.u32 u, a, 6;
        shr.u32 v, b, 6;
        and.b32 c, c, z;
        and.b32 d, d, z;
        and.b32 a, a, z;
        and.b32 b, b, z;
        lop3.b32 c, c, s, 0x01c001c0, 0xf8;
        lop3.b32 d, d, t, 0x01c001c0, 0xf8;
        lop3.b32 a, a, u, 0x01c001c0, 0xf8;
        lop3.b32 b, b, v, 0x01c001c0, 0xf8;
        fma.rn.bf16x2 c, c, k, z;
        fma.rn.bf16x2 d, d, k, z;
        fma.rn.bf16x2 a, a, k, z;
        fma.rn.bf16x2 b, b, k, z;
        fma.rn.bf16x2 $0, c, $5, z;
        fma.rn.bf16x2 $1, d, $6, z;
        fma.rn.bf16x2 $2, a, $5, z;
        fma.rn.bf16x2 $3, b, $6, z;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [packed, e8m0_bfloat(scale)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


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
