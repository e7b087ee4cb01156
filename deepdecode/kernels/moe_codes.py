"""Stored codes of the experts as operands of mma.sync, in the registers that they came to: for `moe_stream`.

A product does not ask for the order of its columns, only for the same on both sides: a word of 8 FP4 codes is what mma.sync
takes of a lane in two instructions, pairs of codes that stand 16 bits apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# scales are taken 2**32 too small, so that those from 2**-100 to 2**33 stay in bfloat16's range; larger ones show as NaN
UNIT = gl.constexpr(2.0**32)


@gluon.jit
def _fp4(words, factors):
    """int32 of 8 E2M1 codes times bfloat16 factors (in both halves) -> the pairs (code j, code 4 + j), j = 0 .. 3.

    Takes the words of even and of odd column: results 0 .. 3 are the even word's pairs in the places of both words, 4 .. 7 the
    odd one's. Placed bits read 2**-126 times the value.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, u, n;
        mov.b32 n, 0x80008000;
        shr.u32 u, $8, 8;
        and.b32 a, $8, 0x000f000f;
        and.b32 b, $8, 0x00f000f0;
        and.b32 c, u, 0x000f000f;
        and.b32 d, u, 0x00f000f0;
        mul.lo.u32 a, a, 0x1040;
        mul.lo.u32 b, b, 0x104;
        mul.lo.u32 c, c, 0x1040;
        mul.lo.u32 d, d, 0x104;
        and.b32 a, a, 0x81c081c0;
        and.b32 b, b, 0x81c081c0;
        and.b32 c, c, 0x81c081c0;
        and.b32 d, d, 0x81c081c0;
        fma.rn.bf16x2 $0, a, $10, n;
        fma.rn.bf16x2 $1, b, $10, n;
        fma.rn.bf16x2 $2, c, $10, n;
        fma.rn.bf16x2 $3, d, $10, n;
        shr.u32 u, $9, 8;
        and.b32 a, $9, 0x000f000f;
        and.b32 b, $9, 0x00f000f0;
        and.b32 c, u, 0x000f000f;
        and.b32 d, u, 0x00f000f0;
        mul.lo.u32 a, a, 0x1040;
        mul.lo.u32 b, b, 0x104;
        mul.lo.u32 c, c, 0x1040;
        mul.lo.u32 d, d, 0x104;
        and.b32 a, a, 0x81c081c0;
        and.b32 b, b, 0x81c081c0;
        and.b32 c, c, 0x81c081c0;
        and.b32 d, d, 0x81c081c0;
        fma.rn.bf16x2 $4, a, $11, n;
        fma.rn.bf16x2 $5, b, $11, n;
        fma.rn.bf16x2 $6, c, $11, n;
        fma.rn.bf16x2 $7, d, $11, n;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [words, factors],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _fp8(words):
    """int32 of 4 E4M3 codes -> float16 pairs (0, 1) and (2, 3), of the even word and then of the odd one."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b, c, d;
        mov.b32 {a, b}, $4;
        mov.b32 {c, d}, $5;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        cvt.rn.f16x2.e4m3x2 $2, c;
        cvt.rn.f16x2.e4m3x2 $3, d;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def fp4_operand(words, scale, S: gl.constexpr, M: gl.constexpr):
    """int32 [S, M, 16] and uint8 [S, M, 4] -> bfloat16 [S, M, 128], columns (word of a block, pair of codes, block, half)."""
    words = gl.reshape(words, (S, M, 4, 4))
    # one more than 2**-32 times the scale has in its exponent's field: placed bits read 2**-126 times the value
    factor = gl.minimum((scale.to(gl.int32) << 7) + ((127 - 1 - 32) << 7), 0x7FC0) * 0x10001
    factor = gl.convert_layout(factor, gl.SliceLayout(3, words.type.layout), assert_trivial=True)
    factor = gl.expand_dims(factor, 3) + gl.zeros_like(words)
    a, b, c, d, e, f, g, h = _fp4(words, factor)
    even = gl.join(gl.join(a, c), gl.join(b, d))
    odd = gl.join(gl.join(e, g), gl.join(f, h))
    # [row, block, pair of words, half of a word, pair of codes (2), word of the pair]
    values = gl.reshape(gl.join(even, odd), (S, M, 4, 2, 2, 2, 2, 2))
    return gl.reshape(gl.permute(values, (0, 1, 3, 7, 5, 6, 2, 4)), (S, M, 128))


@gluon.jit
def fp8_operand(words, S: gl.constexpr, M: gl.constexpr, P: gl.constexpr = 8):
    """int32 [S, M, 4 * P], P words of a lane -> float16 [S, M, 16 * P], columns (8 codes, pair of codes, lane, half)."""
    a, b, c, d = _fp8(gl.reshape(words, (S, M, 4, P)))
    values = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), (S, M, 4, P // 2, 2, 2, 2))
    return gl.reshape(gl.permute(values, (0, 1, 3, 5, 6, 2, 4)), (S, M, 16 * P))
