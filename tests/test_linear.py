"""Stored weights in products: against float64, over every kind, in blocks, and group by group."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepdecode.ops.linear import WIDEN, grouped_linear, latent_linear, linear, linear_beside
from deepdecode.ops.quant import E4M3, E8M0, Weight, dequantize, quantize_fp4, quantize_fp8
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err

FP32_STEP = 1e-6  # sums of up to 4096 float32 products
BF16_STEP = 4e-3  # one rounding to bfloat16 is at most half a step, 2**-8

KINDS = {
    "fp8": quantize_fp8,
    "fp8_f32": lambda w: quantize_fp8(w, torch.float32),
    "fp4": quantize_fp4,
    "bf16": lambda w: Weight(w.bfloat16()),
    "f32": Weight,
    "f64": lambda w: Weight(w.double()),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
# one token and one row, odd rows, a block and a bit, two blocks of rows wide
@pytest.mark.parametrize(("T", "out", "width"), [(1, 1, 32), (3, 77, 96), (2, 300, 512), (2, 2500, 448)])
def test_matches_the_dequantised_twin(kind, T, out, width):
    """A layer on stored codes is the layer on their float64 values, to the type's own rounding."""
    x, weight = torch.randn(T, width), KINDS[kind](torch.randn(out, width) * 0.05)
    twin = x.double() @ dequantize(weight, torch.float64).T
    assert worst_row_err(linear(x.double(), weight), twin) < 1e-13
    assert worst_row_err(linear(x, weight), twin) < FP32_STEP
    low = linear(x.bfloat16(), weight)
    assert low.dtype == torch.bfloat16
    assert worst_row_err(low, x.bfloat16().double() @ dequantize(weight, torch.float64).T) < BF16_STEP


@pytest.mark.parametrize(("kind", "bound"), [("fp8", 0.03), ("fp8_f32", 0.03), ("fp4", 0.13)])
def test_quantised_layer_stays_near_the_unquantised_one(kind, bound):
    """Normal weights: E4M3 keeps three mantissa bits, E2M1 one; measured 0.026 and 0.115."""
    x, w = torch.randn(16, 1024), torch.randn(256, 1024)
    err = rel_err(linear(x, KINDS[kind](w)), x.double() @ w.double().T)
    assert bound / 4 < err < bound


@kinds
def test_rounds_once(kind):
    """The bfloat16 result is the float32 one rounded, and out_dtype leaves it unrounded."""
    x, weight = torch.randn(4, 640).bfloat16(), KINDS[kind](torch.randn(200, 640))
    full = linear(x, weight, out_dtype=torch.float32)
    assert full.dtype == torch.float32
    assert rel_err(full, x.double() @ dequantize(weight, torch.float64).T) < FP32_STEP
    if kind != "f64":
        assert same_bits(linear(x, weight), full.bfloat16())


@kinds
def test_a_row_alone_is_the_row_in_a_batch(kind):
    x, weight = torch.randn(9, 256), KINDS[kind](torch.randn(130, 256))
    whole = linear(x, weight)
    for row in (0, 8):
        assert rel_err(linear(x[row : row + 1], weight)[0], whole[row]) < FP32_STEP
    assert rel_err(linear(x.view(3, 3, 256), weight).view(9, -1), whole) < FP32_STEP


def test_large_weights_are_widened_in_blocks():
    """V4-Flash's wq_b [32768, 1024]: no temporary holds more than one block of it."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point() and out.element_size() >= 4:
                largest = max(largest, out.numel())
            return out

    weight = Weight(torch.full((32768, 1024), 0x38, dtype=torch.uint8).view(E4M3), torch.full((256, 8), 126).byte().view(E8M0))
    with Watch():
        y = linear(torch.ones(1, 1024, dtype=torch.bfloat16), weight)
    # 0x38 is 1.0, byte 126 is 2**-1
    assert torch.equal(y, torch.full((1, 32768), 512.0, dtype=torch.bfloat16))
    assert largest <= WIDEN


@kinds
def test_not_finite_numbers_go_through(kind):
    x, weight = torch.randn(3, 64), KINDS[kind](torch.rand(5, 64) + 0.5)
    x[0, 3], x[2, 1] = float("nan"), float("inf")
    y = linear(x, weight)
    assert y[0].isnan().all()
    assert y[1].isfinite().all()
    assert torch.equal(y[2], torch.full((5,), float("inf")))


@kinds
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_groups_are_block_diagonal(kind, groups):
    """wo_a is G small matrices, each for its own group's input, not one dense product."""
    out, width = 136, 64
    x, weight = torch.randn(3, groups, width), KINDS[kind](torch.randn(groups * out, width))
    w = dequantize(weight, torch.float64).view(groups, out, width)
    want = torch.stack([x[:, g].double() @ w[g].T for g in range(groups)], dim=1)
    got = grouped_linear(x, weight)
    assert got.is_contiguous()
    assert rel_err(got, want) < FP32_STEP
    assert rel_err(grouped_linear(x.double(), weight), want) < 1e-14
    low = grouped_linear(x.bfloat16(), weight, out_dtype=torch.float32)
    assert rel_err(low, grouped_linear(x.bfloat16().double(), weight)) < FP32_STEP
    if groups > 1:
        moved = x.clone()
        moved[:, 1] += 1
        assert torch.equal(grouped_linear(moved, weight)[:, 0], got[:, 0])


def test_groups_at_flash_size():
    """wo_a [8192, 4096] in 8 groups of one token: several blocks of groups."""
    codes = torch.randint(0, 0x70, (8192, 4096), dtype=torch.uint8).view(E4M3)
    weight = Weight(codes, torch.randint(118, 128, (64, 32)).byte().view(E8M0))
    x = torch.randn(1, 8, 4096).bfloat16()
    got = grouped_linear(x, weight)
    for g in (0, 5, 7):
        rows = dequantize(weight.rows(1024 * g, 1024 * g + 1024))
        assert rel_err(got[:, g], x[:, g].float() @ rows.T) < BF16_STEP


@pytest.mark.parametrize("make", [quantize_fp8, quantize_fp4, Weight])
def test_empty(make):
    weight = make(torch.randn(8, 32))
    assert linear(torch.empty(0, 32), weight).shape == (0, 8)
    assert linear(torch.empty(2, 0, 32).bfloat16(), weight, torch.float32).dtype == torch.float32
    assert grouped_linear(torch.empty(0, 2, 32), weight).shape == (0, 2, 4)
    assert torch.equal(linear(torch.empty(3, 0), Weight(torch.empty(4, 0))), torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: linear(torch.zeros(2, 31), w), r"linear: x must be \[\.\.\., 32\], got \[2, 31\] float32 on cpu"),
        (
            lambda w: linear(torch.zeros(2, 32).half(), w),
            r"linear: x must be bfloat16, float32 or float64 on cpu, got",
        ),
        (lambda w: linear(torch.zeros(2, 32, device="meta"), w), r"linear: x must be .* on cpu, got \[2, 32\] float32 on meta"),
        (lambda w: linear(torch.zeros(2, 32), w, torch.int8), r"linear: out_dtype must be .* got torch\.int8"),
        (
            lambda w: linear(torch.zeros(2, 32), Weight(torch.zeros(2, 8, 32))),
            r"linear: weight must be \[out, in\], got",
        ),
        (lambda w: grouped_linear(torch.zeros(2, 32), w), r"grouped_linear: x must be \[T, G, 32\], got \[2, 32\]"),
        (lambda w: grouped_linear(torch.zeros(2, 3, 32), w), r"weight must have a multiple of 3 rows, got 8"),
        (lambda w: grouped_linear(torch.zeros(2, 0, 32), w), r"weight must have a multiple of 0 rows, got 8"),
    ],
)
def test_rejects(call, message):
    with pytest.raises(ValueError, match=message):
        call(quantize_fp8(torch.randn(8, 32)))


@kinds
def test_a_weight_beside_is_a_product_of_its_own(kind):
    weight, beside = KINDS[kind](torch.randn(70, 96) * 0.05), Weight(torch.randn(33, 96).bfloat16())
    for x in (torch.randn(3, 96), torch.randn(3, 96).bfloat16(), torch.randn(3, 96).double(), torch.randn(0, 96)):
        out, wide = linear_beside(x, weight, beside)
        assert same_bits(out, linear(x, weight))
        assert same_bits(wide, linear(x, beside, torch.float64 if x.dtype == torch.float64 else torch.float32))


@kinds
def test_the_first_columns_a_second_time(kind):
    weight, beside, norm = KINDS[kind](torch.randn(70, 96) * 0.05), Weight(torch.randn(33, 96).bfloat16()), torch.rand(40) + 0.5
    for x in (torch.randn(3, 96), torch.randn(3, 96).bfloat16(), torch.randn(0, 96)):
        out, wide, scaled = latent_linear(x, weight, beside, norm.to(x.dtype))
        assert same_bits(out, linear(x, weight))
        assert same_bits(wide, linear(x, beside, torch.float32))
        assert same_bits(scaled, (out[:, :40].float() * norm.to(x.dtype)).to(x.dtype))
        alone = latent_linear(x, weight, None, norm.to(x.dtype))
        assert alone[1] is None
        assert same_bits(alone[2], scaled)


def test_latent_linear_rejects_what_it_cannot_take():
    weight = Weight(torch.randn(8, 32))
    with pytest.raises(ValueError, match=r"latent_linear: norm must be .* got \[4\] bfloat16 on cpu"):
        latent_linear(torch.randn(2, 32), weight, None, torch.ones(4).bfloat16())
    with pytest.raises(ValueError, match=r"latent_linear: norm must have at most 8 columns, got 9"):
        latent_linear(torch.randn(2, 32), weight, None, torch.ones(9))
    with pytest.raises(ValueError, match=r"linear: x must be \[..., 32\], got \[2, 31\] float32 on cpu"):
        latent_linear(torch.randn(2, 31), weight, None, torch.ones(4))
    for shape in ((32,), (2, 3, 32)):
        with pytest.raises(ValueError, match=r"latent_linear: x must be \[T, 32\], got "):
            latent_linear(torch.randn(shape), weight, None, torch.ones(4))
