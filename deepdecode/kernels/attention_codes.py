"""E4M3 codes to 16-bit floats, four to a word, times a scale: by the arch's instruction or by integer arithmetic.

One instance takes two words and their scales, so that a register holds the same code of both: what comes out are four tensors
of the words' shape, one for each code.
"""

import triton
import triton.language as tl


@triton.jit
def convert(x, scale):
    """int32 of 4 E4M3 codes, float16 bits of a scale -> the 4 values in float16, by the conversion of sm_89 and later."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, f, s, t, u, v;
        .reg .b16 al, ah, bl, bh;
        prmt.b32 f, $6, $7, 0x5410;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $4, $5, 0x7362;
        mov.b32 {al, ah}, a;
        mov.b32 {bl, bh}, b;
        cvt.rn.f16x2.e4m3x2 s, al;
        cvt.rn.f16x2.e4m3x2 t, ah;
        cvt.rn.f16x2.e4m3x2 u, bl;
        cvt.rn.f16x2.e4m3x2 v, bh;
        mul.rn.f16x2 $0, s, f;
        mul.rn.f16x2 $1, t, f;
        mul.rn.f16x2 $2, u, f;
        mul.rn.f16x2 $3, v, f;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [x, scale],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def place(x, scale):
    """`convert` by integer arithmetic. Placed bits read 2**-8 times the code, so `scale` holds 2**8 more.

    What is above 0x3f00, the largest number's bits, is a NaN code: the comparison gives the bits of a NaN to add, or 0.
    What prmt leaves in the low bytes is masked away.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, f, s, t, u, v, h, i, j, k, l;
        mov.b32 l, 0x3f003f00;
        prmt.b32 f, $6, $7, 0x5410;
        prmt.b32 a, $4, $5, 0x4404;
        prmt.b32 b, $4, $5, 0x5515;
        prmt.b32 c, $4, $5, 0x6626;
        prmt.b32 d, $4, $5, 0x7737;
        shr.u32 s, a, 1;
        shr.u32 t, b, 1;
        shr.u32 u, c, 1;
        shr.u32 v, d, 1;
        and.b32 s, s, 0x3f803f80;
        and.b32 t, t, 0x3f803f80;
        and.b32 u, u, 0x3f803f80;
        and.b32 v, v, 0x3f803f80;
        set.gt.u32.f16x2 h, s, l;
        set.gt.u32.f16x2 i, t, l;
        set.gt.u32.f16x2 j, u, l;
        set.gt.u32.f16x2 k, v, l;
        lop3.b32 a, a, 0x80008000, s, 0xea;
        lop3.b32 b, b, 0x80008000, t, 0xea;
        lop3.b32 c, c, 0x80008000, u, 0xea;
        lop3.b32 d, d, 0x80008000, v, 0xea;
        fma.rn.f16x2 $0, a, f, h;
        fma.rn.f16x2 $1, b, f, i;
        fma.rn.f16x2 $2, c, f, j;
        fma.rn.f16x2 $3, d, f, k;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [x, scale],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def place_bfloat16(x, scale):
    """`place` in bfloat16, for any scale; NaN codes are left to the caller, who gives them a NaN scale.

    Placed bits read 2**-120 times the code; 0x7180 is 2**100, and `scale` holds the other 2**20: one factor alone would leave
    bfloat16 from 2**8 on. -0.0 is the neutral addend (mul.bf16x2 needs sm_90).
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, s, t, u, v, z, k, f;
        mov.b32 z, 0x80008000;
        mov.b32 k, 0x71807180;
        prmt.b32 f, $6, $7, 0x5410;
        prmt.b32 a, $4, $5, 0x4404;
        prmt.b32 b, $4, $5, 0x5515;
        prmt.b32 c, $4, $5, 0x6626;
        prmt.b32 d, $4, $5, 0x7737;
        shr.u32 s, a, 4;
        shr.u32 t, b, 4;
        shr.u32 u, c, 4;
        shr.u32 v, d, 4;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x80008000;
        and.b32 c, c, 0x80008000;
        and.b32 d, d, 0x80008000;
        lop3.b32 a, a, s, 0x07f007f0, 0xf8;
        lop3.b32 b, b, t, 0x07f007f0, 0xf8;
        lop3.b32 c, c, u, 0x07f007f0, 0xf8;
        lop3.b32 d, d, v, 0x07f007f0, 0xf8;
        fma.rn.bf16x2 a, a, k, z;
        fma.rn.bf16x2 b, b, k, z;
        fma.rn.bf16x2 c, c, k, z;
        fma.rn.bf16x2 d, d, k, z;
        fma.rn.bf16x2 $0, a, f, z;
        fma.rn.bf16x2 $1, b, f, z;
        fma.rn.bf16x2 $2, c, f, z;
        fma.rn.bf16x2 $3, d, f, z;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [x, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def halves(x, FORM: tl.constexpr):
    """int32 of two bfloat16 -> the lower and the upper one: in bfloat16, or in float16 with NaN for what it does not hold.

    Products with 0 are added: infinity times 0 is NaN. Interpreted: float32.
    """
    if FORM == "interpreted" or FORM == "bfloat16":
        low = (x & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = ((x >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        if FORM == "interpreted":
            low, high = low.to(tl.float32), high.to(tl.float32)
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, z;
            .reg .f32 c, d, e, f;
            mov.b32 z, 0;
            shl.b32 a, $2, 16;
            shl.b32 b, $3, 16;
            mov.b32 c, a;
            mov.b32 d, b;
            and.b32 a, $2, 0xffff0000;
            and.b32 b, $3, 0xffff0000;
            mov.b32 e, a;
            mov.b32 f, b;
            cvt.rn.f16x2.f32 a, d, c;
            cvt.rn.f16x2.f32 b, f, e;
            fma.rn.f16x2 $0, a, z, a;
            fma.rn.f16x2 $1, b, z, b;
            }""",
            "=r,=r,r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def pack(low, high, TYPE: tl.constexpr):
    """Two float32 -> int32 of both in "float16" or "bfloat16"."""
    NAME: tl.constexpr = "f16x2" if TYPE == "float16" else "bf16x2"
    return tl.inline_asm_elementwise(
        "cvt.rn." + NAME + ".f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def interpreted(word, byte: tl.constexpr, scale):
    """One code of a word, placed in float32: for the interpreter, which knows no inline assembly."""
    code = (word >> (8 * byte)) & 0xFF
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.3292279957849159e36 * scale  # 2**120
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)
