"""Codes over their whole spaces, scales at their corners, stored weights against a naive reading of the format."""

import itertools
import math
import re

import pytest
import torch

from deepdecode.ops.quant import (
    E4M3,
    E8M0,
    Weight,
    dequantize,
    dequantize_rows,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    e8m0_decode,
    e8m0_encode_ceil,
    fake_quant_fp4,
    fake_quant_fp8,
    fuse,
    hadamard,
    per_token_cast,
    quantize_fp4,
    quantize_fp8,
    widened,
)
from deepdecode.testing.numeric import rel_err, same_bits

NAN, INF = float("nan"), float("inf")
BYTES = torch.arange(256, dtype=torch.uint8)
WIDTHS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
FP32_STEP = 1e-6  # sums of up to 512 float32 products


def e4m3_value(byte):
    """By the format's definition: sign, 4 exponent bits with bias 7, 3 mantissa bits; all ones is NaN."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return NAN
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


def e2m1_value(code):
    """Sign, 2 exponent bits with bias 1, 1 mantissa bit."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else math.ldexp(2 + mantissa, exponent - 2))


def nearest_even(x, values):
    """The index of the value nearest to x; of two equally near, the even index."""
    return min(range(len(values)), key=lambda i: (abs(values[i] - x), i % 2))


def naive_dequantize(weight):
    """Element by element, from the layout's description."""
    data = weight.data.view(torch.uint8).tolist()
    exact = weight.scale.dtype == E8M0
    scale = (weight.scale.view(torch.uint8) if exact else weight.scale).tolist()
    out = []
    for row, codes in enumerate(data):
        if weight.kind == "fp8":
            values, scales = [e4m3_value(code) for code in codes], scale[row // 128]
        else:
            values, scales = [e2m1_value(half) for byte in codes for half in (byte & 15, byte >> 4)], scale[row]
        span = 128 if weight.kind == "fp8" else 32
        factors = [2.0 ** (scales[col // span] - 127) if exact else scales[col // span] for col in range(len(values))]
        out.append([value * factor for value, factor in zip(values, factors, strict=True)])
    return torch.tensor(out, dtype=torch.float64)


@WIDTHS
def test_e8m0_decodes_every_byte(dtype):
    want = torch.tensor([math.ldexp(1.0, b - 127) for b in range(255)] + [NAN], dtype=dtype)
    assert same_bits(e8m0_decode(BYTES, dtype), want)
    assert same_bits(e8m0_decode(BYTES.view(E8M0), dtype), want)


def test_e8m0_is_read_by_reinterpretation():
    """A byte converted by value gives scales up to 255, the float8 type's own conversion agrees with ours."""
    ours = e8m0_decode(BYTES)
    assert rel_err(ours, BYTES.view(E8M0).float()) == 0
    assert ours[127] == 1.0
    assert ours[130] == 8.0


@WIDTHS
def test_e8m0_round_trip_and_ceiling(dtype):
    values, step = e8m0_decode(BYTES, dtype)[:255], torch.finfo(dtype).eps
    byte = BYTES[:255].int()
    assert torch.equal(e8m0_encode_ceil(values).view(torch.uint8), BYTES[:255])
    above, below = e8m0_encode_ceil(values * (1 + step)), e8m0_encode_ceil(values * (1 - step / 2))
    # 2**-127 is subnormal in float32, where a step of 1 + eps is lost: start at byte 1
    assert torch.equal(above.view(torch.uint8).int()[1:], (byte + 1).clamp(max=254)[1:])
    assert torch.equal(below.view(torch.uint8).int()[1:], byte[1:])


@pytest.mark.parametrize(
    ("x", "byte"),
    [
        *((0.0, 0), (-0.0, 0), (1e-45, 0), (2.0**-127, 0), (2.0**-127 + 2.0**-149, 1), (2.0**-126, 1), (1.0, 127)),
        *((1.75, 128), (2.0, 128), (3.4e38, 254), (INF, 255), (NAN, 255), (-1.0, 255), (-INF, 255)),
    ],
)
def test_e8m0_corners(x, byte):
    assert int(e8m0_encode_ceil(torch.tensor([x])).view(torch.uint8)) == byte


@WIDTHS
def test_e4m3_over_all_codes(dtype):
    want = torch.tensor([e4m3_value(b) for b in range(256)], dtype=dtype)
    assert rel_err(e4m3_decode(BYTES, dtype), want) == 0
    assert rel_err(e4m3_decode(BYTES.view(E4M3)), BYTES.view(E4M3).float()) == 0
    finite = ~want.isnan()
    assert finite.sum() == 254
    assert torch.equal(e4m3_encode(want).view(torch.uint8)[finite], BYTES[finite])


def test_e4m3_rounds_to_even_and_saturates():
    values = [e4m3_value(b) for b in range(127)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    codes = e4m3_encode(torch.tensor(middles)).view(torch.uint8).tolist()
    assert codes == [nearest_even(x, values) for x in middles]
    big = e4m3_encode(torch.tensor([449.0, 1e30, INF, -449.0, -INF, NAN])).float()
    assert rel_err(big, torch.tensor([448.0, 448, 448, -448, -448, NAN])) == 0


@WIDTHS
def test_e2m1_over_all_bytes(dtype):
    want = torch.tensor([[e2m1_value(b & 15), e2m1_value(b >> 4)] for b in range(256)], dtype=dtype)
    values = e2m1_decode(BYTES[:, None], dtype)
    assert same_bits(values, want)
    assert torch.equal(e2m1_encode(values)[:, 0], BYTES)


def test_e2m1_rounds_to_even_and_saturates():
    """Every multiple of 1/64 up to 8, so all seven ties: 0.25 0.75 1.25 1.75 2.5 3.5 5 go to 0 1 1 2 2 4 4."""
    values = [e2m1_value(code) for code in range(8)]
    grid = torch.arange(0, 513) / 64
    want = torch.tensor([values[nearest_even(min(x, 6.0), values)] for x in grid.tolist()])
    pairs = torch.stack((grid, -grid), dim=-1)
    assert torch.equal(e2m1_decode(e2m1_encode(pairs)), torch.stack((want, -want), dim=-1))
    ties = e2m1_decode(e2m1_encode(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, INF])))
    assert ties.tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    assert e2m1_decode(e2m1_encode(torch.tensor([NAN, -NAN]))).tolist() == [0, 0]


# one block, odd sizes in both, a narrow and a flat one
@pytest.mark.parametrize(("out", "width"), [(128, 128), (130, 200), (1, 129), (257, 32)])
@pytest.mark.parametrize("scale_dtype", [E8M0, torch.float32], ids=["e8m0", "f32"])
def test_fp8_weights_against_the_format(out, width, scale_dtype):
    """Flash-Base stores its FP8 scales as float32."""
    w = torch.randn(out, width) * torch.logspace(-3, 3, out)[:, None]
    q = quantize_fp8(w, scale_dtype)
    assert q.kind == "fp8"
    assert q.shape == (out, width)
    assert q.scale.dtype == scale_dtype
    want = naive_dequantize(q)
    assert same_bits(dequantize(q, torch.float64), want)
    assert same_bits(dequantize(q), want.float())
    scale = e8m0_decode(q.scale, torch.float64) if scale_dtype == E8M0 else q.scale.double()
    s = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:out, :width]
    # half a step of three mantissa bits, or of the subnormals
    bound = torch.maximum(w.double().abs() * 2.0**-4, s * 2.0**-10)
    assert ((want - w).abs() <= bound * (1 + 1e-6)).all()
    for i in range(-(-out // 128)):
        for j in range(-(-width // 128)):
            ratio = w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].double().abs().max() / 448 / scale[i, j]
            assert 0.5 < ratio <= 1 if scale_dtype == E8M0 else abs(ratio - 1) < 1e-7


@pytest.mark.parametrize(("out", "width"), [(1, 32), (5, 96), (64, 256)])
def test_fp4_weights_against_the_format(out, width):
    w = torch.randn(out, width) * torch.logspace(-20, 20, out)[:, None]
    q = quantize_fp4(w)
    assert q.kind == "fp4"
    assert q.shape == (out, width)
    want = naive_dequantize(q)
    assert same_bits(dequantize(q, torch.float64), want)
    assert same_bits(dequantize(q), want.float())
    groups, scale = w.double().unflatten(-1, (-1, 32)), e8m0_decode(q.scale, torch.float64)
    ratio = groups.abs().amax(-1) / 6 / scale
    assert ((ratio > 0.5) & (ratio <= 1)).all()
    # half the widest gap below each magnitude: 1/4 below 2, 1/2 below 4, 1 below 6
    size = groups.abs() / scale[..., None]
    bound = torch.where(size <= 2, 0.25, torch.where(size <= 4, 0.5, 1.0)) * scale[..., None]
    assert ((want.unflatten(-1, (-1, 32)) - groups).abs() <= bound).all()


@pytest.mark.parametrize(("spread", "lossless"), [(0, True), (7, True), (30, False)])
def test_fp4_as_fp8_is_lossless_only_while_the_scales_lie_close(spread, lossless):
    """E4M3 holds E2M1's values under one scale for 128x128 while the row scales differ by a few powers of two."""
    codes = torch.randint(0, 256, (128, 64), dtype=torch.uint8)
    codes[:, 0] = 0x77  # every group of the first 32 columns holds a 6
    scale = torch.full((128, 4), 120, dtype=torch.uint8)
    scale[1:] -= torch.randint(0, spread + 1, (127, 4)).byte()
    fp4 = Weight(codes, scale.view(E8M0))
    exact = dequantize(fp4)
    again = dequantize(quantize_fp8(exact))
    assert torch.equal(again, exact) == lossless
    assert rel_err(again, exact) < 0.03


def test_widened_weights_are_the_same_numbers():
    """bfloat16 holds E4M3 and E2M1 under E8M0 scales exactly; under float32 scales, or out of range, float32 is kept."""
    w = torch.randn(130, 160)
    for q in (quantize_fp8(w), quantize_fp4(w), Weight(w.bfloat16())):
        plain = widened(q)
        assert plain.data.dtype == torch.bfloat16
        assert torch.equal(plain.data.float(), dequantize(q))
    for q in (quantize_fp8(w, torch.float32), Weight(w), quantize_fp8(w * 1e-36)):
        plain = widened(q)
        assert plain.data.dtype == torch.float32
        assert torch.equal(plain.data, dequantize(q))


@pytest.mark.parametrize("exponent", [-133, -126, -30, 0, 1, 90])
def test_a_scale_is_exact_where_amax_is_a_power_of_two_or_full_scale(exponent):
    """amax = 448 * 2**k takes scale 2**k and one step more takes 2**(k + 1); the same for 6 in FP4."""
    for largest, quantize in ((448.0, quantize_fp8), (6.0, quantize_fp4)):
        at = torch.zeros(1, 32, dtype=torch.float64)
        at[0, 3] = largest * 2.0**exponent
        powers = [quantize(at), quantize(at * (1 + 2.0**-50)), quantize(torch.full_like(at, 2.0**exponent))]
        want = [exponent, exponent + 1, exponent + math.ceil(-math.log2(largest))]
        got = [int(q.scale.view(torch.uint8).flatten()[0]) - 127 for q in powers]
        assert got == [max(w, -127) for w in want]
        if exponent >= -127:
            assert torch.equal(dequantize(powers[0], torch.float64), at)


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_fp4, lambda w: quantize_fp8(w, torch.float32)])
def test_zero_denormal_huge_and_not_finite_weights(quantize):
    w = torch.zeros(256, 256)
    w[0, 0], w[0, 200], w[200, 0], w[200, 200] = 1e-44, NAN, 2e38, INF
    q = dequantize(quantize(w))
    assert torch.equal(q[:128, :128], torch.zeros(128, 128))
    assert q[0, 192:224].isnan().all()
    assert q[200, 192:224].isnan().all()
    assert abs(q[200, 0] / 2e38 - 1) < 0.25
    assert q[:128, :128].isfinite().all()


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_fp4])
def test_stacks_rows_and_experts_are_views_of_the_same_numbers(quantize):
    w = torch.randn(3, 140, 160)
    q = quantize(w)
    whole = dequantize(q)
    assert q.shape == (3, 140, 160)
    for e in range(3):
        assert same_bits(dequantize(q[e]), whole[e])
        assert same_bits(dequantize(q[e]), dequantize(quantize(w[e])))
    assert same_bits(dequantize(q[1:]), whole[1:])
    assert q[1].data.data_ptr() == q.data[1].data_ptr()
    assert same_bits(dequantize(q.rows(128, 140)), whole[:, 128:])
    assert same_bits(dequantize_rows(q[2], 77, 133), whole[2, 77:133])
    assert q.nbytes == q.data.numel() + q.scale.numel()
    assert same_bits(dequantize(q.to("cpu"), torch.bfloat16), whole.bfloat16())


def python_cast(row, largest, floor):
    """The scale's exponent of one group, in Python floats."""
    return math.ceil(math.log2(max(max(abs(x) for x in row), floor) / largest))


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_per_token_cast_follows_the_formula(group, dtype):
    x = (torch.randn(5, 3, 2 * group) * torch.logspace(-8, 8, 5)[:, None, None]).to(dtype)
    x[2, 1] = 0
    codes, scale = per_token_cast(x, group)
    assert codes.dtype == E4M3
    assert scale.dtype == E8M0
    groups = x.double().reshape(-1, group)
    exponents = [python_cast(row, 448, 1e-4) for row in groups.tolist()]
    assert (scale.view(torch.uint8).int() - 127).flatten().tolist() == exponents
    want = (groups / torch.tensor([2.0**e for e in exponents], dtype=torch.float64)[:, None]).clamp(-448, 448)
    assert same_bits(codes.view(-1, group), want.float().to(E4M3))
    fake = fake_quant_fp8(x, group)
    assert fake.dtype == dtype
    assert torch.equal(fake.double().view(-1, group), codes.view(-1, group).double() * 2.0 ** torch.tensor(exponents)[:, None])
    assert torch.equal(fake_quant_fp8(fake, group), fake)


def test_a_row_of_zeros_takes_the_floor():
    codes, scale = per_token_cast(torch.zeros(1, 128, dtype=torch.bfloat16))
    assert codes.float().abs().sum() == 0
    # 2**ceil(log2(1e-4 / 448)) = 2**-22
    assert e8m0_decode(scale).item() == 2.0**-22


def test_fake_quant_fp8_really_rounds():
    """The April reference's cast was an identity; a value between two codes must move."""
    x = torch.full((1, 64), 1.0)
    x[0, 1] = 1.03
    assert fake_quant_fp8(x, 64)[0, 1] == 1.0
    x[0, 0] = 448.0
    assert fake_quant_fp8(x, 64)[0, 1] == 1.0
    assert fake_quant_fp8(x + 0.1, 64)[0, 1] == 1.125


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fake_quant_fp4_follows_the_formula(dtype):
    x = (torch.randn(7, 128) * torch.logspace(-6, 6, 7)[:, None]).to(dtype)
    x[3] = 0
    values = [e2m1_value(code) for code in range(8)]
    want = []
    for row in x.double().reshape(-1, 32).tolist():
        s = 2.0 ** python_cast(row, 6, 6 * 2.0**-126)
        want.append([math.copysign(values[nearest_even(min(abs(v) / s, 6.0), values)] * s, v) for v in row])
    fake = fake_quant_fp4(x)
    assert fake.dtype == dtype
    assert torch.equal(fake.double().view(-1, 32), torch.tensor(want, dtype=torch.float64))
    assert torch.equal(fake_quant_fp4(fake), fake)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("fake", [fake_quant_fp8, fake_quant_fp4])
def test_a_number_that_is_not_finite_spoils_its_group_only(bad, fake):
    x = torch.randn(2, 256)
    clean = fake(x)
    x[1, 5] = bad
    group = 128 if fake is fake_quant_fp8 else 32
    out = fake(x)
    assert out[1, :group].isnan().all()
    assert torch.equal(out[1, group:], clean[1, group:])
    assert torch.equal(out[0], clean[0])


@pytest.mark.parametrize("n", [1, 2, 64, 128])
def test_hadamard_is_the_sylvester_matrix(n):
    x = torch.randn(3, 2, n, dtype=torch.float64)
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    want = x @ torch.tensor(signs, dtype=torch.float64) / math.sqrt(n)
    assert rel_err(hadamard(x), want) < 1e-14
    assert rel_err(hadamard(hadamard(x)), x) < 1e-14
    assert rel_err(hadamard(x.float()), want) < FP32_STEP
    assert same_bits(hadamard(x.bfloat16()), hadamard(x.bfloat16().float()).bfloat16())


def test_hadamard_on_both_sides_keeps_every_dot_product():
    q, k = torch.randn(2, 9, 128, dtype=torch.float64)
    assert rel_err(hadamard(q) @ hadamard(k).T, q @ k.T) < 1e-13
    assert rel_err(hadamard(q) @ k.T, q @ k.T) > 0.5


@pytest.mark.parametrize("make", [quantize_fp8, quantize_fp4, Weight, lambda w: quantize_fp8(w, torch.float32)])
def test_fused_weights_are_their_parts(make):
    parts = [make(torch.randn(out, 192)) for out in (256, 128, 72)]
    fused = fuse(*parts)
    assert fused.shape == (456, 192)
    assert same_bits(dequantize(fused), torch.cat([dequantize(p) for p in parts]))


WANT_GROUPS = r"x must be \[\.\.\., a multiple of"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Weight(torch.zeros(4)), r"Weight: data must be \[\.\.\., out, in\], got \[4\] float32 on cpu"),
        (lambda: Weight(torch.zeros(4, 4).to(E4M3)), r"scale must be \[1, 1\] float8_e8m0fnu or float32 on cpu, got None"),
        (
            lambda: Weight(torch.zeros(4, 16).byte(), torch.ones(4, 1)),
            r"scale must be \[4, 1\] float8_e8m0fnu .* got \[4, 1\]",
        ),
        (lambda: Weight(torch.zeros(4, 15).byte(), torch.ones(4, 1)), r"in of an FP4 weight must be a multiple of 32, got 30"),
        (
            lambda: Weight(torch.zeros(4, 4).int()),
            r"must be FP8 or FP4 with a scale, or float without, got \[4, 4\] int32",
        ),
        (
            lambda: Weight(torch.zeros(4, 4), torch.ones(1, 1)),
            r"got \[4, 4\] float32 on cpu with scale \[1, 1\]",
        ),
        (lambda: Weight(torch.zeros(4, 4))[0], r"only a stack \[E, out, in\] can be indexed, got \[4, 4\]"),
        (lambda: quantize_fp8(torch.zeros(300, 8)).rows(100, 200), r"must be a multiple of 128, got 100"),
        (lambda: quantize_fp8(torch.zeros(8)), r"quantize_fp8: w must be \[\.\.\., out, in\]"),
        (lambda: quantize_fp8(torch.zeros(8, 8), torch.bfloat16), r"scale_dtype must be .* got torch\.bfloat16"),
        (lambda: quantize_fp4(torch.zeros(8, 40)), r"in a multiple of 32, .* got \[8, 40\]"),
        (lambda: e8m0_decode(torch.zeros(3)), r"e8m0_decode: scale must be float8_e8m0fnu or uint8, got \[3\] float32"),
        (lambda: e4m3_decode(torch.zeros(3)), r"e4m3_decode: codes must be float8_e4m3fn or uint8, got \[3\] float32"),
        (lambda: e2m1_decode(torch.zeros(3)), r"e2m1_decode: packed must be uint8, got \[3\] float32"),
        (lambda: e2m1_encode(torch.zeros(3)), r"e2m1_encode: x must be \[\.\.\., 2n\], got \[3\]"),
        (lambda: per_token_cast(torch.zeros(2, 100)), WANT_GROUPS + r" 128\] .* got \[2, 100\]"),
        (lambda: fake_quant_fp8(torch.zeros(2, 64).int(), 64), WANT_GROUPS + r" 64\] .* got \[2, 64\] int32"),
        (lambda: fake_quant_fp4(torch.zeros(2, 16)), "fake_quant_fp4: " + WANT_GROUPS + r" 32\]"),
        (lambda: hadamard(torch.zeros(2, 96)), r"hadamard: x must be \[\.\.\., a power of two\] .* got \[2, 96\]"),
        (lambda: fuse(), r"fuse: weights must be one or more, got none"),
        (
            lambda: fuse(Weight(torch.zeros(4, 8)), Weight(torch.zeros(4, 9))),
            re.escape("fuse: weights must be [out, 8] float32 on cpu as the first, got [out, 9] float32 on cpu"),
        ),
        (
            lambda: fuse(quantize_fp8(torch.zeros(8, 8)), quantize_fp8(torch.zeros(8, 8), torch.float32)),
            r"with float8_e8m0fnu scales on cpu as the first, got .* with float32 scales",
        ),
        (lambda: fuse(*[quantize_fp8(torch.zeros(100, 8))] * 2), r"before the last must be a multiple of 128, got 100"),
    ],
)
def test_rejects(call, message):
    with pytest.raises(ValueError, match=message):
        call()
