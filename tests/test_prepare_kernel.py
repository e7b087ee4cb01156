"""The launch between a layer's projections and its attention, against the composed fine ops."""

import os
from dataclasses import replace

import pytest
import torch

from deepdecode.config import ModelConfig
from deepdecode.ops import reference
from deepdecode.ops.quant import e4m3_encode
from deepdecode.ops.rows import read_rows
from deepdecode.testing.numeric import rel_err, same_bits
from deepdecode.testing.steps import contiguous, prepare_inputs

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from deepdecode.kernels import prepare as kernel  # noqa: E402
from deepdecode.kernels.rotate import e4m3, quotient, sincos  # noqa: E402

F32 = 3e-6  # float32 in another order
CODE = 2**-4  # one step of E4M3, where a value fell on the other side of a tie; the interpreter also cuts bfloat16 off
# On a GPU torch divides by 448 through a reciprocal, so its index scales may differ in the last bit: quotients of bfloat16
# numbers are often exact ties between two codes, and those then fall the other way. Few do, each by one code.
FLIPS, FLIPPED = 1e-2, 2e-2
SMALL = ModelConfig(head_dim=64, rope_dim=16, index_heads=5, index_head_dim=16)


def run(case, config=None):
    w, c, i, s = case.weights, case.cache, case.inputs, case.step
    comp = index = None
    if w.compressor is not None:
        comp = kernel.Compressor(
            i.comp_kv, i.comp_gate, w.compressor.ape, w.compressor.norm, c.state.kv, c.state.score, c.compressed
        )
    if w.index_compressor is not None:
        iw = w.index_compressor
        index = kernel.Compressor(
            i.index_kv, i.index_gate, iw.ape, iw.norm, c.index_state.kv, c.index_state.score, c.index_keys
        )
    H = case.q.shape[1]
    return kernel.launch(
        case.q, i.kv, w.kv_norm, c.window, s.window_write, s.positions, s.slots, case.freqs, comp, index,
        s.entry_write.get(case.ratio), case.index_q, i.index_weights, None if i.q_scaled is None else i.q_latent,
        ratio=case.ratio, num_slots=s.block_tables.shape[0], norm_eps=case.config.norm_eps,
        config=config or kernel.plan(H, 80),
    )  # fmt: skip


def wanted(case):
    return reference.attn_prepare(*replace(case, inputs=contiguous(case.inputs)).args())


def written(case):
    """What the step stored: window rows, entries and index keys, widened; then the states."""
    rows = [read_rows(case.cache.window, case.step.window_write)]
    for cache in (case.cache.compressed, case.cache.index_keys):
        if cache is not None:
            rows.append(read_rows(cache, case.step.entry_write[case.ratio]))
    return rows


def flipped(got, want):
    """Where a code is another one. An index key's float32 scale may differ in its last bit, which moves all values a little."""
    return (got - want).abs() > 1e-5 * want.abs()


def states(case):
    return [t for s in (case.cache.state, case.cache.index_state) if s is not None for t in (s.kv, s.score)]


# the end of a block, its middle, the first block, the very first token; and a padded row
CASES = {0: [5, 700], 4: [3, 1023, 1024, 0, 6], 128: [127, 4095, 200]}


@pytest.mark.parametrize("ratio", CASES)
@pytest.mark.parametrize("fmt", ["fp8_584", "bf16"])
def test_interpreted_matches_reference(ratio, fmt):
    sizes = {"config": SMALL} if fmt == "bf16" else {}
    case = prepare_inputs(CASES[ratio], ratio, H=3, fmt=fmt, dtype=torch.float32, padded=(1,) if ratio == 0 else (), **sizes)
    other = case.again()
    (q, index_q, index_weights), want = run(case), wanted(other)
    live = case.step.slots >= 0
    assert rel_err(q[live], want.q[live]) < F32
    for got, row in zip(written(case), written(other), strict=True):
        assert rel_err(got, row) < CODE
        if fmt == "fp8_584":
            # the interpreter cuts the rope values' bfloat16 off where it should round
            assert flipped(got, row)[:, : 448 if got.shape[1] == 512 else 128].float().mean() < 1e-3
    assert all(same_bits(a, b) for a, b in zip(states(case), states(other), strict=True))
    if ratio == 4:
        assert index_q.dtype == want.index_q.dtype
        assert rel_err(index_weights, want.index_weights) < F32
        gap = (index_q.float() - want.index_q.float()).abs()
        assert rel_err(index_q.float(), want.index_q.float()) < CODE / 4
        assert (gap > 0).float().mean() < (1e-3 if fmt == "fp8_584" else 1)


@pytest.mark.parametrize("ratio", CASES)
def test_what_q_is_short_of(ratio):
    """A product of q_latent times its norm's weight lacks the norm's factor: large and small ones, and zeros."""
    case = prepare_inputs(CASES[ratio], ratio, H=3, dtype=torch.float32)
    size = torch.tensor([1e-3, 30.0, 1.0, 0.0, 5.0])[: len(case.q), None]
    latent = size * torch.randn(len(case.q), 96)
    case = replace(case, q=case.q * size[..., None], inputs=replace(case.inputs, q_latent=latent, q_scaled=latent))
    if case.index_q is not None:
        case = replace(case, index_q=case.index_q * size[..., None])
    other = case.again()
    (q, index_q, index_weights), want = run(case), wanted(other)
    assert rel_err(q, want.q) < F32
    if ratio == 4:
        assert rel_err(index_q.float() * index_weights[..., None], want.index_q.float() * want.index_weights[..., None]) < CODE


def test_a_padded_row_writes_nothing():
    case = prepare_inputs([127, 255], 128, H=1, dtype=torch.float32, padded=(0, 1))
    before = case.again()
    run(case)
    for name in ("window", "compressed"):
        assert same_bits(getattr(case.cache, name).data, getattr(before.cache, name).data)
    assert all(same_bits(a, b) for a, b in zip(states(case), states(before), strict=True))


@triton.jit
def codes_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, e4m3(tl.load(x_ptr + i)).to(tl.uint8))


def test_codes_are_torchs(device):
    """Every code, every midpoint between two, their float32 neighbours, zeros and NaN."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    points = torch.cat([points, torch.nextafter(points, torch.tensor(1e9)), torch.nextafter(points, torch.tensor(0.0))])
    points = torch.cat([points, -points])[: 1 << 10]
    x = torch.zeros(2048)
    x[: len(points)] = points.clamp(-448, 448)
    x = torch.cat([x[:-1], torch.tensor([float("nan")])]).to(device)
    out = torch.empty(2048, dtype=torch.uint8, device=device)
    codes_kernel[1,](x, out, 2048)
    assert same_bits(out[:-1], e4m3_encode(x[:-1]).view(torch.uint8))
    assert out[-1] & 0x7F == 0x7F


@triton.jit
def sincos_kernel(x_ptr, cos_ptr, sin_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    cos, sin = sincos(tl.load(x_ptr + i), False)
    tl.store(cos_ptr + i, cos)
    tl.store(sin_ptr + i, sin)


@triton.jit
def quotient_kernel(x_ptr, by_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, quotient(tl.load(x_ptr + i), tl.load(by_ptr + i), False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_quotients_are_the_nearest():
    x = torch.randn(1 << 14, device="cuda") * torch.exp2(torch.randint(-20, 20, (1 << 14,), device="cuda").float())
    x[: 1 << 13] = x[: 1 << 13].bfloat16().float()
    by = (x.abs().roll(1) + 1e-4) / 448
    out = torch.empty_like(x)
    quotient_kernel[1,](x, by, out, 1 << 14)
    assert same_bits(out, x / by)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("largest", [1.0, 4096.0, 2.0**20, 2.0**21])
def test_cos_and_sin_of_large_angles(largest):
    x = (torch.rand(4096, device="cuda") * 2 - 1) * largest
    cos, sin = torch.empty_like(x), torch.empty_like(x)
    sincos_kernel[1,](x, cos, sin, 4096)
    assert (cos - x.double().cos()).abs().max() < 3e-7
    assert (sin - x.double().sin()).abs().max() < 3e-7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("ratio", CASES)
@pytest.mark.parametrize("fmt", ["fp8_584", "bf16"])
@pytest.mark.parametrize("H", [8, 64])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_compiled_matches_reference(ratio, fmt, H, scale):
    positions = CASES[ratio] + [1_000_003, 1_048_575 - 512, 777]
    case = prepare_inputs(positions, ratio, H=H, fmt=fmt, padded=(2,), scale=scale, device="cuda")
    other = case.again()
    major, minor = torch.cuda.get_device_capability()
    (q, index_q, index_weights), want = run(case, kernel.plan(H, 10 * major + minor)), wanted(other)
    live = case.step.slots >= 0
    # rounded in the same places: what differs is float32's last bit, seen where it tips a rounding
    assert (q[live] != want.q[live]).float().mean() < 1e-3
    assert rel_err(q[live], want.q[live]) < 1e-3
    for got, row in zip(written(case), written(other), strict=True):
        assert flipped(got, row).float().mean() < FLIPS
        assert rel_err(got, row) < FLIPPED
    assert all(same_bits(a, b) for a, b in zip(states(case), states(other), strict=True))
    if ratio == 4:
        assert rel_err(index_weights[live], want.index_weights[live]) < 1e-3
        assert (index_q.float() != want.index_q.float())[live].float().mean() < FLIPS
        assert rel_err(index_q.float()[live], want.index_q.float()[live]) < FLIPPED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"state": "float64"}, "float64"),
        ({"T": 70000}, "70000"),
        ({"D": 96}, "96"),
        ({"fmt": "f32"}, "f32"),
        ({"index": (64, 32)}, "32"),
        ({"index_fmt": "f64"}, "f64"),
    ],
)
def test_supports_says_why_not(change, reason):
    base = {"T": 1, "D": 512, "R": 64, "dtype": "bfloat16", "fmt": "fp8_584", "index": (64, 128), "index_fmt": "fp8_132"}
    base["state"] = "float32"
    assert kernel.supports(**base) is None
    assert kernel.supports(**{**base, "index": None, "index_fmt": None, "fmt": "bf16"}) is None
    assert reason in kernel.supports(**{**base, **change})
