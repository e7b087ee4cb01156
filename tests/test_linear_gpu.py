"""Products on a GPU: the compiled kernels through the op, against float64, at the model's sizes and at odd ones."""

import os

import pytest
import torch

from deepdecode.ops.linear import grouped_linear, latent_linear, linear
from deepdecode.ops.quant import E4M3, E8M0, Weight, dequantize
from deepdecode.testing.experts import random_weight
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

# operands are exact: float32 sums, which tensor cores cut instead of rounding (1.005e-5 in the worst of 40 rows of 8192 sums),
# and one rounding to bfloat16 at the end
FP32_STEP, BF16_STEP = 1.5e-5, 2.2e-3
KINDS = ("fp8", "fp8_f32", "fp4", "bf16", "f32")
# V4-Flash's fused sets whole, and a rank's eighth; then odd ones: one row, no multiple of 128, a tail of K
SETS = {"q_kv": (1536, 4096), "rest": (2624, 4096), "q_b": (40960, 1024), "wo_b": (4096, 8192), "q_b of 8": (12288, 1024)}
ODD = {"one row": (1, 128), "odd rows": (77, 96), "a tail": (300, 160), "a block and a bit": (2500, 4160)}


@pytest.fixture(autouse=True)
def _kernels_only(monkeypatch):
    monkeypatch.setenv("DEEPDECODE_STRICT", "1")


def draw(T, *shape, kind, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = random_weight(*shape, kind=kind, device="cuda", generator=generator)
    return torch.randn(T, shape[-1], generator=generator, device="cuda").bfloat16(), weight


def check(x, weight):
    values = dequantize(weight, torch.float64)
    want = x.double() @ values.T
    got = linear(x, weight, torch.float32)
    if len(values) > 1:
        assert worst_row_err(got, want) < FP32_STEP
    else:
        # one output can be near zero: what counts is what was summed
        assert ((got - want).abs() <= FP32_STEP * (x.double().abs() @ values.abs().T)).all()
    assert same_bits(linear(x, weight), got.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*SETS, *ODD])
@pytest.mark.parametrize("T", [1, 7, 16, 64])
def test_sizes(name, T, kind):
    check(*draw(T, *(SETS | ODD)[name], kind=kind))


@pytest.mark.parametrize("T", [2, 3, 8, 9, 17, 33, 100, 256, 700])
def test_any_number_of_tokens(T):
    for kind in ("fp8", "bf16"):
        check(*draw(T, 1536, 1024, kind=kind, seed=T))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("G", "out", "width"), [(8, 1024, 4096), (1, 1024, 4096), (3, 136, 64), (2, 24, 320)])
def test_groups(kind, G, out, width):
    for T in (1, 5, 40):
        _, weight = draw(1, G * out, width, kind=kind)
        x = torch.randn(T, G, width, device="cuda").bfloat16()
        want = torch.einsum("tgk,gok->tgo", x.double(), dequantize(weight, torch.float64).view(G, out, width))
        assert worst_row_err(grouped_linear(x, weight, torch.float32), want) < FP32_STEP
        low = grouped_linear(x, weight)
        assert low.is_contiguous()
        assert rel_err(low, want) < BF16_STEP


@pytest.mark.parametrize("T", [1, 2, 3, 16, 64])
def test_a_weight_beside_and_the_latent_times_its_norm(T):
    x, weight = draw(T, *SETS["q_kv"], kind="fp8")
    beside = draw(1, *SETS["rest"], kind="bf16", seed=1)[1]
    norm = torch.rand(1024, device="cuda").bfloat16() + 0.5
    got, wide, scaled = latent_linear(x, weight, beside, norm)
    assert wide.dtype == torch.float32
    assert rel_err(got, x.double() @ dequantize(weight, torch.float64).T) < BF16_STEP
    assert worst_row_err(wide, x.double() @ beside.data.double().T) < FP32_STEP
    want = (x.double() @ dequantize(weight, torch.float64).T)[:, :1024] * norm.double()
    assert rel_err(scaled, want) < BF16_STEP
    assert rel_err(latent_linear(x, weight, None, norm)[2], want) < BF16_STEP


def test_head():
    """The largest: 129280 rows of the vocabulary, float32 logits."""
    check(*draw(2, 129280, 4096, kind="bf16"))


def test_slices_and_strides():
    """Rows of a wider tensor, columns of a wider weight (a rank's part), and 3 leading dimensions."""
    x, weight = draw(6, 512, 1024, kind="fp8")
    wide = torch.randn(6, 3000, device="cuda").bfloat16()
    wide[:, 200:1224] = x
    want = x.double() @ dequantize(weight, torch.float64).T
    assert same_bits(linear(wide[:, 200:1224], weight), linear(x, weight))
    assert same_bits(linear(x.view(2, 3, 1024), weight).view(6, 512), linear(x, weight))
    half = Weight(weight.data[:, 512:], weight.scale[:, 4:])
    assert rel_err(linear(x[:, 512:], half), x[:, 512:].double() @ dequantize(half, torch.float64).T) < BF16_STEP
    assert rel_err(linear(x, weight.rows(128, 300), torch.float32), want[:, 128:300]) < FP32_STEP


def test_every_code_under_extreme_scales():
    """One nonzero column a token, so an output is a code times its scale: exact, NaN where the code or the scale is NaN."""
    columns = [0, 67, 134, 201]
    x = torch.eye(256, device="cuda").bfloat16()[columns].contiguous()
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(256, 1).repeat(1, 256).view(E4M3)
    for scales in ((0, 1), (1, 60), (200, 247), (255, 127)):
        weight = Weight(codes, torch.tensor([scales] * 2, dtype=torch.uint8, device="cuda").view(E8M0))
        values, got = dequantize(weight), linear(x, weight, torch.float32)
        # a NaN anywhere in a row of the weight is a NaN in all its outputs
        nan = values.isnan().any(1)
        assert got[:, nan].isnan().all()
        assert torch.equal(got[:, ~nan], values[~nan][:, columns].T)
    packed = torch.arange(256, dtype=torch.uint8, device="cuda").view(256, 1).repeat(1, 128)
    # below 2, sums are no normal numbers
    for byte in (2, 20, 127, 200, 251):
        weight = Weight(packed, torch.full((256, 8), byte, dtype=torch.uint8, device="cuda").view(E8M0))
        assert torch.equal(linear(x, weight, torch.float32), dequantize(weight)[:, columns].T), byte
    nan = torch.full((256, 8), 127, dtype=torch.uint8, device="cuda")
    nan[3, 2] = 255
    assert linear(x, Weight(packed, nan.view(E8M0))).isnan().any(0).nonzero().tolist() == [[3]]


def test_not_finite_inputs_stay_in_their_row():
    x, weight = draw(9, 300, 512, kind="fp8")
    clean = linear(x, weight)
    x[2, 5], x[7, 1] = float("nan"), float("inf")
    got = linear(x, weight)
    rows = [0, 1, 3, 4, 5, 6, 8]
    assert got[2].isnan().all()
    assert not got[7].isfinite().any()
    assert same_bits(got[rows], clean[rows])


@pytest.mark.parametrize("T", [1, 4])
def test_the_same_bits_every_time_and_in_a_graph(T):
    for name in ("q_kv", "wo_b"):
        x, weight = draw(T, *SETS[name], kind="fp8")
        first = linear(x, weight)
        assert all(same_bits(linear(x, weight), first) for _ in range(20))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = linear(x, weight)
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out, first)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert same_bits(out, linear(x, weight))


def test_a_dtype_without_a_kernel_is_named(monkeypatch):
    x, weight = draw(2, 64, 128, kind="fp8")
    with pytest.raises(RuntimeError, match=r"linear: no kernel for .* x in float32, not bfloat16"):
        linear(x.float(), weight)
    monkeypatch.delenv("DEEPDECODE_STRICT")
    assert rel_err(linear(x.float(), weight), x.double() @ dequantize(weight, torch.float64).T) < FP32_STEP
    monkeypatch.setenv("DEEPDECODE_REFERENCE", "1")
    assert os.environ["DEEPDECODE_REFERENCE"] == "1"
    assert rel_err(linear(x, weight), x.double() @ dequantize(weight, torch.float64).T) < BF16_STEP


def test_opcheck_and_compile():
    x, weight = draw(3, 256, 384, kind="fp8")
    args = ("linear", x[:, None], weight.data, weight.scale, torch.bfloat16)
    # what it mutates is found by arithmetic, which E4M3 has none of
    torch.library.opcheck(torch.ops.deepdecode.linear.default, args, test_utils="test_faketensor")
    plain = torch.randn(256, 384, device="cuda").bfloat16()
    torch.library.opcheck(torch.ops.deepdecode.linear.default, ("linear", x[:, None], plain, None, torch.bfloat16))
    norm = x[0, :200].clone()
    torch.library.opcheck(torch.ops.deepdecode.linear_beside.default, (x, plain, None, plain[:40], norm))
    compiled = torch.compile(lambda a: linear(a, weight), fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x), linear(x, weight))
