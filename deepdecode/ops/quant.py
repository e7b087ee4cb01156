"""E4M3, E2M1 and E8M0 codes, their scales, and weights as they are stored.

Decoding is exact over all codes, NaNs included: E2M1 and E8M0 by a table, E4M3 by shifting its bits into a float16, whose
exponents are 8 higher (on a 2-core CPU 0.3 ms, and 1.5 ms for `.float()`, for 524288 codes; torch 2.13). E8M0 scales are
powers of two, so a dequantised value is exact in float32 and in bfloat16, but for their ranges.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from deepdecode.ops._check import FLOATS, describe, wide, wide_type

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E4M3_MAX, E2M1_MAX = 448.0, 6.0
# the smallest |x| that a group's scale is made for
FP8_FLOOR, FP4_FLOOR = 1e-4, 6 * 2.0**-126
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# rows and columns under one FP8 scale; columns under one FP4 scale
BLOCK, FP4_GROUP = 128, 32


@dataclass(frozen=True)
class Weight:
    """A matrix [..., out, in] as the checkpoint stores it. Leading dimensions stack experts.

    float8_e4m3fn with `scale` [..., ceil(out / 128), ceil(in / 128)]: FP8, the scale float8_e8m0fnu or float32 (Flash-Base).
    uint8 [..., out, in / 2] with `scale` float8_e8m0fnu [..., out, in / 32]: FP4 E2M1, low nibble = even column.
    bfloat16, float32 or float64 with `scale` None: plain.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None

    def __post_init__(self):
        data, scale = self.data, self.scale
        if data.dim() < 2:
            raise ValueError(f"Weight: data must be [..., out, in], got {describe(data)}")
        if self.kind == "plain":
            if data.dtype not in FLOATS or scale is not None:
                got = describe(data) + (f" with scale {describe(scale)}" if scale is not None else "")
                raise ValueError(f"Weight: data must be FP8 or FP4 with a scale, or float without, got {got}")
            return
        *lead, out, width = self.shape
        if self.kind == "fp8":
            want, dtypes = [*lead, -(-out // BLOCK), -(-width // BLOCK)], (E8M0, torch.float32)
        else:
            if width % FP4_GROUP:
                raise ValueError(f"Weight: in of an FP4 weight must be a multiple of {FP4_GROUP}, got {width}")
            want, dtypes = [*lead, out, width // FP4_GROUP], (E8M0,)
        if scale is None or list(scale.shape) != want or scale.dtype not in dtypes or scale.device != data.device:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            got = "None" if scale is None else describe(scale)
            raise ValueError(f"Weight: scale must be {want} {names} on {data.device}, got {got}")

    @property
    def kind(self) -> str:
        """ "fp8", "fp4" or "plain"."""
        return {E4M3: "fp8", torch.uint8: "fp4"}.get(self.data.dtype, "plain")

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., out, in]: FP4 counts two columns a byte."""
        *lead, width = self.data.shape
        return (*lead, 2 * width if self.kind == "fp4" else width)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (self.scale.nbytes if self.scale is not None else 0)

    def __getitem__(self, index: int | slice) -> "Weight":
        """One expert of a stack (or a range of them), as a view."""
        if self.data.dim() < 3:
            raise ValueError(f"Weight: only a stack [E, out, in] can be indexed, got {list(self.shape)}; see rows()")
        return Weight(self.data[index], None if self.scale is None else self.scale[index])

    def rows(self, start: int, stop: int) -> "Weight":
        """Rows start..stop - 1 of the out dimension, as a view; an FP8 start must be a multiple of 128."""
        if self.kind == "fp8" and start % BLOCK:
            raise ValueError(f"Weight: the first row of an FP8 slice must be a multiple of {BLOCK}, got {start}")
        data, scale = self.data[..., start:stop, :], self.scale
        if scale is not None:
            scale = scale[..., start // BLOCK : -(-stop // BLOCK), :] if self.kind == "fp8" else scale[..., start:stop, :]
        return Weight(data, scale)

    def to(self, device: torch.device | str) -> "Weight":
        return Weight(self.data.to(device), None if self.scale is None else self.scale.to(device))


@lru_cache(maxsize=64)
def _table(code: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The values of all 256 bytes; a byte of two E2M1 codes gives a pair, the low nibble first, as one complex number."""
    if code == "e8m0":
        return torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")], dtype=dtype, device=device)
    half = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    pairs = torch.stack((half.repeat(16), half.repeat_interleave(16)), dim=-1)
    # one look-up for two values: three times faster than rows of two
    return torch.view_as_complex(pairs.to(device, dtype))


def _look_up(code: str, bytes_: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value of each byte, [bytes] (E2M1: [bytes, 2]); dtype is float32 or float64."""
    values = _table(code, dtype, bytes_.device).index_select(0, bytes_.reshape(-1).int())
    return torch.view_as_real(values) if values.is_complex() else values


# the three decoders give float32 or float64, as asked for


def e8m0_decode(scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Byte b is 2**(b - 127), 255 is NaN. float8_e8m0fnu, or uint8 holding the same bytes: read as bits, never by value."""
    if scale.dtype not in (E8M0, torch.uint8):
        raise ValueError(f"e8m0_decode: scale must be float8_e8m0fnu or uint8, got {describe(scale)}")
    return _look_up("e8m0", scale.view(torch.uint8), dtype).view(scale.shape)


def e8m0_encode_ceil(x: torch.Tensor) -> torch.Tensor:
    """The least power of two >= x as float8_e8m0fnu; exact powers stay.

    Below 2**-127 (and for 0) gives 2**-127, above 2**127 gives 2**127; NaN, infinity and negative numbers give NaN.
    """
    x = wide(x)
    mantissa, exponent = torch.frexp(x)
    # x = mantissa * 2**exponent with the mantissa in [0.5, 1): 0.5 is a power of two itself
    byte = (exponent - (mantissa == 0.5).int() + 127).clamp(0, 254)
    byte = byte.masked_fill(x == 0, 0).masked_fill(~(x >= 0) | x.isinf(), 255)
    return byte.to(torch.uint8).view(E8M0)


def e4m3_decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """float8_e4m3fn, or uint8 holding the same bytes, to its values; 0x7f and 0xff are NaN."""
    if codes.dtype not in (E4M3, torch.uint8):
        raise ValueError(f"e4m3_decode: codes must be float8_e4m3fn or uint8, got {describe(codes)}")
    bits = codes.view(torch.int8).to(torch.int16)
    # bit 7 is the widened sign: clear it, and set it where the lower seven are all ones, which completes a NaN's exponent
    nan = (bits & 0x7F).add_(1).bitwise_and_(0x80)
    half = bits.bitwise_and_(~0x80).bitwise_or_(nan).bitwise_left_shift_(7).view(torch.float16)
    return half.to(dtype).mul_(256.0)


def e4m3_encode(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E4M3, ties to even, saturating at +-448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def e2m1_decode(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 [..., n] to [..., 2n]: the low nibble is the even column; bit 3 is the sign, bits 0-2 the magnitude's index."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"e2m1_decode: packed must be uint8, got {describe(packed)}")
    return _look_up("e2m1", packed, dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])


def e2m1_encode(x: torch.Tensor) -> torch.Tensor:
    """[..., 2n] to uint8 [..., n]: the nearest E2M1, ties to the even code, saturating at +-6. E2M1 has no NaN: it gives 0."""
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"e2m1_encode: x must be [..., 2n], got {describe(x)}")
    a = x.abs()
    # the seven midpoints; the even neighbour of each wins its tie
    code = (a > 0.25).to(torch.uint8)
    for midpoint, tie_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += a >= midpoint if tie_up else a > midpoint
    code |= (x.signbit() & ~x.isnan()).to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values [..., out, in] in a new tensor of `dtype` (a plain weight of that type already: itself).

    Exact in float64, and in float32 wherever the value lies in its range, unless the scale is a float32: then rounded once.
    """
    if weight.kind == "plain":
        return weight.data.to(dtype)
    assert weight.scale is not None
    inner = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    scale = weight.scale.to(inner) if weight.scale.dtype == torch.float32 else e8m0_decode(weight.scale, inner)
    if weight.kind == "fp4":
        values = e2m1_decode(weight.data, inner)
        values.unflatten(-1, (-1, FP4_GROUP)).mul_(scale.unsqueeze(-1))
    else:
        values = e4m3_decode(weight.data, inner)
        scale = scale.repeat_interleave(BLOCK, dim=-1)[..., : values.shape[-1]]
        for block, rows in enumerate(values.split(BLOCK, dim=-2)):
            rows.mul_(scale[..., block : block + 1, :])
    return values.to(dtype)


def dequantize_rows(weight: Weight, start: int, stop: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`dequantize` of rows start..stop - 1 alone, which need no alignment."""
    first = start - start % BLOCK if weight.kind == "fp8" else start
    return dequantize(weight.rows(first, stop), dtype)[..., start - first :, :]


def widened(weight: Weight) -> Weight:
    """The same values as a plain weight: bfloat16 where that is exact, as it is for E8M0 scales in range, else float32.

    Twice to four times the memory. A CPU then multiplies faster: widening bfloat16 is one shift.
    """
    exact = dequantize(weight)
    short = exact.bfloat16()
    return Weight(short if torch.equal(short.float(), exact) else exact)


def quantize_fp8(w: torch.Tensor, scale_dtype: torch.dtype = E8M0) -> Weight:
    """[..., out, in] floats to E4M3 with a scale for each 128x128 block, the last ones partial.

    scale_dtype: float8_e8m0fnu, the least power of two >= amax / 448; or float32, amax / 448 itself (Flash-Base).
    A block of zeros gives zeros. A block with a NaN or an infinity dequantises to NaN throughout: nothing is hidden.
    """
    if w.dim() < 2 or w.dtype not in FLOATS:
        raise ValueError(f"quantize_fp8: w must be [..., out, in] bfloat16, float32 or float64, got {describe(w)}")
    if scale_dtype not in (E8M0, torch.float32):
        raise ValueError(f"quantize_fp8: scale_dtype must be float8_e8m0fnu or float32, got {scale_dtype}")
    w = wide(w)
    out, width = w.shape[-2:]
    tiles = F.pad(w, (0, -width % BLOCK, 0, -out % BLOCK)).unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    wanted = tiles.abs().amax(dim=(-3, -1)) / E4M3_MAX
    if scale_dtype == E8M0:
        scale = e8m0_encode_ceil(wanted)
        divisor = e8m0_decode(scale, w.dtype)
    else:
        scale = wanted.masked_fill(wanted.isinf(), float("nan")).float()
        divisor = scale.masked_fill(scale == 0, 1.0).to(w.dtype)
    codes = e4m3_encode(tiles / divisor.unsqueeze(-1).unsqueeze(-3)).flatten(-2).flatten(-3, -2)
    return Weight(codes.view(torch.uint8)[..., :out, :width].contiguous().view(E4M3), scale)


def quantize_fp4(w: torch.Tensor) -> Weight:
    """[..., out, in] floats to packed E2M1 with an E8M0 scale for 32 columns: the least power of two >= amax / 6.

    A group of zeros gives zeros; a group with a NaN or an infinity dequantises to NaN throughout.
    """
    if w.dim() < 2 or w.dtype not in FLOATS or w.shape[-1] % FP4_GROUP:
        want = f"[..., out, in] with in a multiple of {FP4_GROUP}, bfloat16, float32 or float64"
        raise ValueError(f"quantize_fp4: w must be {want}, got {describe(w)}")
    codes, scale = _cast_fp4(wide(w), floor=0.0)
    return Weight(codes, scale)


def _cast_fp4(x: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.unflatten(-1, (-1, FP4_GROUP))
    scale = e8m0_encode_ceil(groups.abs().amax(dim=-1).clamp(min=floor) / E2M1_MAX)
    return e2m1_encode((groups / e8m0_decode(scale, x.dtype).unsqueeze(-1)).flatten(-2)), scale


def per_token_cast(x: torch.Tensor, group: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations to E4M3 with an E8M0 scale for each `group` consecutive channels.

    Args:
        x: [..., n] bfloat16, float32 or float64; n a multiple of `group`.

    Returns:
        codes float8_e4m3fn [..., n] and scales float8_e8m0fnu [..., n / group]: the least power of two
        >= max(amax, 1e-4) / 448. A group with a NaN or an infinity has scale and codes NaN.
    """
    _expect_groups("per_token_cast", x, group)
    groups = wide(x).unflatten(-1, (-1, group))
    scale = e8m0_encode_ceil(groups.abs().amax(dim=-1).clamp(min=FP8_FLOOR) / E4M3_MAX)
    return e4m3_encode(groups / e8m0_decode(scale, groups.dtype).unsqueeze(-1)).flatten(-2), scale


def fake_quant_fp8(x: torch.Tensor, group: int = BLOCK) -> torch.Tensor:
    """What x is after `per_token_cast` and back, in x's dtype; exact in bfloat16."""
    codes, scale = per_token_cast(x, group)
    inner = wide_type(x.dtype)
    values = e4m3_decode(codes, inner).unflatten(-1, (-1, group)) * e8m0_decode(scale, inner).unsqueeze(-1)
    return values.flatten(-2).to(x.dtype)


def fake_quant_fp4(x: torch.Tensor) -> torch.Tensor:
    """What x is after rounding to E2M1 under an E8M0 scale for 32 channels, in x's dtype.

    The scale is the least power of two >= max(amax, 6 * 2**-126) / 6; a group with a NaN or an infinity gives NaN.
    """
    _expect_groups("fake_quant_fp4", x, FP4_GROUP)
    inner = wide_type(x.dtype)
    codes, scale = _cast_fp4(wide(x), FP4_FLOOR)
    return dequantize(Weight(codes.view(-1, codes.shape[-1]), scale.view(-1, scale.shape[-1])), inner).view(x.shape).to(x.dtype)


def _expect_groups(op: str, x: torch.Tensor, group: int) -> None:
    if group <= 0 or x.dim() == 0 or x.shape[-1] % group or x.dtype not in FLOATS:
        raise ValueError(f"{op}: x must be [..., a multiple of {group}] bfloat16, float32 or float64, got {describe(x)}")


@lru_cache(maxsize=8)
def _sylvester(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return (matrix * n**-0.5).to(device, dtype)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The Walsh-Hadamard transform of the last dimension, natural (Sylvester) order, times n**-0.5: its own inverse.

    x: [..., n], n a power of two. Computed in float32 (float64 for float64) and rounded once to x's dtype.
    """
    n = x.shape[-1] if x.dim() else 0
    if n == 0 or n & (n - 1) or x.dtype not in FLOATS:
        raise ValueError(f"hadamard: x must be [..., a power of two] bfloat16, float32 or float64, got {describe(x)}")
    inner = wide(x)
    return (inner @ _sylvester(n, inner.dtype, x.device)).to(x.dtype)


def fuse(*weights: Weight) -> Weight:
    """Stack weights of one input along `out`, so that one product gives all their outputs.

    Raises:
        ValueError: none given; another kind, scale type, input size, stack or device; or an FP8 weight before the last
            whose out is no multiple of 128, since its last block's scale would cover rows of the next.
    """
    if not weights:
        raise ValueError("fuse: weights must be one or more, got none")
    first = weights[0]
    for weight in weights[1:]:
        if _alike(weight) != _alike(first):
            raise ValueError(f"fuse: weights must be {_alike(first)} as the first, got {_alike(weight)}")
    for weight in weights[:-1]:
        if weight.kind == "fp8" and weight.shape[-2] % BLOCK:
            raise ValueError(f"fuse: out of an FP8 weight before the last must be a multiple of 128, got {weight.shape[-2]}")
    data = torch.cat([weight.data.view(torch.uint8) for weight in weights], dim=-2).view(first.data.dtype)
    scales = [weight.scale.view(torch.uint8) for weight in weights if weight.scale is not None]
    return Weight(data, torch.cat(scales, dim=-2).view(first.scale.dtype) if first.scale is not None else None)


def _alike(weight: Weight) -> str:
    """What fused weights share, in words."""
    scale = "" if weight.scale is None else f" with {str(weight.scale.dtype).removeprefix('torch.')} scales"
    lead = "".join(f"{size}, " for size in weight.shape[:-2])
    return f"[{lead}out, {weight.shape[-1]}] {str(weight.data.dtype).removeprefix('torch.')}{scale} on {weight.device}"
