"""The kernels of products against the float64 reference: interpreted without a GPU, compiled with one."""

import os
from dataclasses import replace

import pytest
import torch

from deepdecode.cards import CARDS, find_card
from deepdecode.ops.quant import E4M3, E8M0, Weight, dequantize
from deepdecode.testing.experts import random_weight
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

from deepdecode.kernels import linear as kernel  # noqa: E402
from deepdecode.kernels.linear_plan import Case, Config, Gemv, plan, supports  # noqa: E402

FP32_STEP = 1e-6  # the interpreter multiplies in float32
KINDS = ("fp8", "fp8_f32", "fp4", "bf16", "f32")
SMALL = Config(block_m=32, block_t=8, block_k=64, slices=1, num_warps=2, num_stages=2)


def run(x, weight, config, out_dtype=torch.float32, **more):
    T, G, _ = x.shape
    out = torch.empty(T, G, weight.shape[0] // G, dtype=out_dtype, device=x.device)
    kernel.launch(x, weight.data, weight.scale, weight.kind, out, config, **more)
    return out


def case(T, G, out, width, kind):
    weight = random_weight(G * out, width, kind=kind, device="cpu", generator=torch.Generator().manual_seed(T))
    x = torch.randn(T, G, width)
    return x, weight, torch.einsum("tgk,gok->tgo", x.double(), dequantize(weight, torch.float64).view(G, out, width))


# E4M3 by integers, and by the conversion that sm_89 is the first to have
@pytest.mark.parametrize(("kind", "convert"), [*((kind, False) for kind in KINDS), ("fp8", True), ("fp8_f32", True)])
@pytest.mark.parametrize("slices", [1, 2, 4])
# one of each, odd rows with a tail of K, groups that end inside a scale's block, two tiles of tokens
@pytest.mark.parametrize(("T", "G", "out", "width"), [(1, 1, 1, 32), (3, 1, 77, 96), (2, 2, 136, 160), (11, 1, 40, 256)])
def test_interpreted_matches_reference(kind, convert, slices, T, G, out, width):
    x, weight, want = case(T, G, out, width, kind)
    config = replace(SMALL, slices=slices, num_warps=max(2, slices), convert=convert)
    assert worst_row_err(run(x, weight, config), want) < FP32_STEP


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize(("kind", "convert"), [("fp8", False), ("fp8", True), ("bf16", False)])
# less than a tile of each, more of the second, more of the first
@pytest.mark.parametrize(("T", "rows", "beside"), [(1, 5, 17), (9, 33, 70), (2, 100, 40)])
def test_a_weight_beside(kind, convert, slices, T, rows, beside):
    x, weight, want = case(T, 1, rows, 160, kind)
    other, latent = torch.randn(beside, 160), max(1, rows - 3)
    out = torch.empty(T, 1, beside)
    scaled = kernel.Scaled(torch.rand(latent), torch.empty(T, latent))
    config = replace(SMALL, slices=slices, num_warps=max(2, slices), convert=convert)
    got = run(x, weight, config, beside=kernel.Beside(other, out), scaled=scaled)
    assert worst_row_err(got, want) < FP32_STEP
    assert rel_err(scaled.out, want[:, 0, :latent] * scaled.weight.double()) < FP32_STEP
    assert worst_row_err(out[:, 0], x[:, 0].double() @ other.double().T) < FP32_STEP


GEMV = Gemv(block_m=4, beside_m=2, block_k=256, tokens=2, num_warps=1)


@pytest.mark.parametrize("kind", ["fp8", "fp8_f32", "bf16"])
@pytest.mark.parametrize("latent", [0, 4])
# one piece, two with a tail, odd rows, groups
@pytest.mark.parametrize(("T", "G", "out", "width"), [(1, 1, 5, 256), (2, 1, 77, 384), (2, 3, 136, 512)])
def test_few_tokens_without_tensor_cores(kind, latent, T, G, out, width):
    x, weight, want = case(T, G, out, width, kind)
    scaled = kernel.Scaled(torch.rand(latent), torch.empty(T, latent)) if latent and G == 1 else None
    assert worst_row_err(run(x, weight, GEMV, scaled=scaled), want) < FP32_STEP
    if scaled is not None:
        assert worst_row_err(scaled.out, want[:, 0, :latent] * scaled.weight.double()) < FP32_STEP


def test_few_tokens_and_a_weight_beside():
    x, weight, want = case(2, 1, 33, 384, "fp8")
    other, out = torch.randn(7, 384), torch.empty(2, 1, 7)
    assert worst_row_err(run(x, weight, GEMV, beside=kernel.Beside(other, out)), want) < FP32_STEP
    assert worst_row_err(out[:, 0], x[:, 0].double() @ other.double().T) < FP32_STEP


def test_a_nan_code_is_a_nan_without_tensor_cores():
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 256).view(E4M3)
    weight = Weight(codes, torch.full((2, 2), 130, dtype=torch.uint8).view(E8M0))
    x = torch.zeros(1, 1, 256)
    x[0, 0, 5] = 1
    assert torch.equal(run(x, weight, GEMV)[0, 0].nan_to_num(7), dequantize(weight)[:, 5].nan_to_num(7))


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_more_slices_than_there_is_of_k(kind):
    x, weight, want = case(2, 1, 9, 64, kind)
    assert rel_err(run(x, weight, replace(SMALL, slices=8, num_warps=8)), want) < FP32_STEP


def test_a_token_does_not_see_its_neighbours():
    x, weight, _ = case(9, 1, 40, 96, "fp8")
    whole = run(x, weight, SMALL)
    assert same_bits(run(x[4:5], weight, SMALL), whole[4:5])
    x[3, 0, 7], x[5, 0, 1] = float("nan"), float("inf")
    got = run(x, weight, SMALL)
    assert got[3].isnan().all()
    assert not got[5].isfinite().any()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert same_bits(got[others], whole[others])


def test_every_code_and_scale_is_widened_exactly():
    """A column of ones: the output is the code times its scale, from the lowest scale to NaN."""
    x = torch.zeros(1, 1, 32)
    x[0, 0, 5] = 1
    for byte in (0, 1, 64, 127, 200, 246, 255):
        codes = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 32).view(E4M3)
        weight = Weight(codes, torch.full((2, 1), byte, dtype=torch.uint8).view(E8M0))
        want = dequantize(weight)[:, 5]
        for config in (SMALL, replace(SMALL, convert=True)):
            assert torch.equal(run(x, weight, config)[0, 0].nan_to_num(7), want.nan_to_num(7))
        packed = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)
        weight = Weight(packed, torch.full((256, 1), byte, dtype=torch.uint8).view(E8M0))
        assert torch.equal(run(x, weight, SMALL)[0, 0].nan_to_num(7), dequantize(weight)[:, 5].nan_to_num(7))


def test_codes_that_cannot_be_read_16_bytes_at_a_time_are_named():
    x, codes = torch.zeros(2, 1, 64), torch.zeros(8, 96, dtype=torch.uint8)
    reason = "rows of codes that do not start and end on multiples of 16 bytes"
    assert kernel.layout_reason(x, codes[:, :64], None) is None
    assert kernel.layout_reason(x, codes[:, :63]) == reason
    assert kernel.layout_reason(x, codes[:, 8:72]) == reason
    assert kernel.layout_reason(x, codes.view(-1)[: 8 * 90].view(8, 90)[:, :64]) == reason
    assert kernel.layout_reason(x, codes[:, ::2]) == "rows whose elements are not neighbours"
    # scales are read by the byte
    assert kernel.layout_reason(x, codes[:, :64], codes[:, :3].view(E8M0)) is None


def test_strided_rows():
    """x cut from a wider tensor, and a weight's columns (a rank's part)."""
    x, weight, _ = case(3, 1, 40, 256, "fp8")
    half = Weight(weight.data[:, 128:], weight.scale[:, 1:])
    want = x[..., 128:].double() @ dequantize(half, torch.float64).T
    assert rel_err(run(x[..., 128:], half, SMALL), want) < FP32_STEP


# ---- the plan


SIZES = [(1, 1536, 4096), (1, 2624, 4096), (1, 40960, 1024), (8, 1024, 4096), (1, 4096, 8192), (1, 129280, 4096)]


def test_plans_fit_every_card():
    for card in CARDS:
        for T in (1, 16, 64, 256, 512):
            for G, out, K in SIZES:
                for weight in ("fp8", "fp4", "bfloat16", "float32"):
                    config = plan(Case(T, G, out, K, weight), card)
                    if isinstance(config, Gemv):
                        # in registers: at most 128 weights of a thread
                        assert config.block_m * config.block_k <= 128 * 32 * config.num_warps
                        assert T == 1 and weight in ("fp8", "bfloat16") and (weight != "fp8" or card.arch >= 89)
                        continue
                    assert config.slices in (1, config.num_warps)
                    # a weight tile of each stage; what the compiler adds is checked where it compiles
                    size = {"fp8": 2, "fp4": 1, "bfloat16": 4, "float32": 8}[weight]
                    assert config.block_m * config.block_k * size // 2 * config.num_stages < card.shared << 10


def test_small_weights_fill_the_card():
    """Few rows are cut finely, and then K among a program's warps."""
    config = plan(Case(3, 1, 1536, 4096, "fp8"), find_card("H200"))
    assert -(-1536 // config.block_m) >= 96
    assert config.slices > 1
    config = plan(Case(1, 1, 1536, 4096, "fp8"), find_card("H200"))
    assert -(-1536 // config.block_m) >= 132
    assert config.num_warps * 32 * 8 * 2 == config.block_k


def test_rows_and_those_beside_are_cut_finely_where_one_wave_holds_them():
    def tile(card, **changes):
        config = plan(replace(Case(32, 1, 1536, 4096, "fp8", beside=2624), **changes), find_card(card))
        return config.block_m, config.block_t, config.slices

    fine, wide, coarse = (16, 16, 4), (16, 32, 4), (64, 32, 1)
    # two tiles of 16 tokens are 520 programs of q_kv and rest at ratio 4, and 320 at ratio 128; 132 SMs hold 396
    assert tile("H200") == tile("H200", T=17) == wide
    assert tile("H200", beside=1024) == fine
    # 99 KB hold one program each: not of 260
    assert tile("L40S") == coarse
    assert tile("L40S", out=1024, beside=1024) == wide
    # more tokens, more rows
    assert tile("H200", T=33) == tile("H200", T=64, beside=1024) == coarse
    assert tile("H200", beside=3000) == coarse
    assert tile("H200", T=16, beside=3000) == fine


def test_two_tokens_of_a_large_set_take_tensor_cores():
    h200 = find_card("H200")
    whole, eighth = Case(2, 1, 40960, 1024, "fp8"), Case(2, 1, 12288, 1024, "fp8")
    assert isinstance(plan(eighth, h200), Gemv) and isinstance(plan(replace(whole, T=1), h200), Gemv)
    assert plan(whole, h200).convert and plan(replace(whole, out=4096, K=8192), h200).convert
    # the head is bound by its bytes
    assert isinstance(plan(Case(2, 1, 129280, 4096, "bfloat16"), h200), Gemv)


def test_codes_are_converted_where_the_card_can():
    for card in CARDS:
        for T in (4, 16, 32, 64):
            for G, out, K in SIZES:
                assert plan(Case(T, G, out, K, "fp8"), card).convert == (card.arch >= 89)
                assert not plan(Case(T, G, out, K, "bfloat16"), card).convert
    # 64 rows would be 64 programs
    assert plan(Case(32, 1, 4096, 8192, "fp8"), find_card("H200")).block_m == 16


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "x in float32, not bfloat16"),
        ({"weight": "float64"}, "weights in float64"),
        ({"out_dtype": "float64"}, "a result in float64"),
        ({"groups": 65536}, "65536 groups of 64 rows, more than a grid holds"),
        ({"out": 1 << 20}, "1 groups of 1048576 rows, more than a grid holds"),
    ],
)
def test_what_no_kernel_covers_is_named(change, reason):
    some = Case(1, 1, 64, 64, "fp8")
    assert supports(some, find_card("H200")) is None
    assert supports(replace(some, **change), find_card("H200")) == reason
    turing = replace(find_card("RTX 3090"), arch=75)
    assert supports(some, turing) == "sm_75 has no bfloat16 tensor cores; sm_80 is the first that has"
