"""The small kernels of a step (norm, rotation, places, the next token): interpreted without a GPU, compiled with one."""

import os

import pytest
import torch

from deepdecode.config import ModelConfig
from deepdecode.kvcache import KVCache
from deepdecode.ops.norm import rms_norm
from deepdecode.ops.reference import embed
from deepdecode.ops.rope import frequencies, rope
from deepdecode.ops.sample import sample_ref
from deepdecode.testing.numeric import rel_err, same_bits

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

from deepdecode.kernels import embed as embed_kernel  # noqa: E402
from deepdecode.kernels import norm as norm_kernel  # noqa: E402
from deepdecode.kernels import rope as rope_kernel  # noqa: E402
from deepdecode.kernels import sample as sample_kernel  # noqa: E402
from deepdecode.kernels import step as step_kernel  # noqa: E402

F32 = 1e-6  # float32 in another order
BF16_STEP = 2**-8  # one rounding
ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 80
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


def bound(device):
    return F32 if device.type == "cpu" else BF16_STEP


@pytest.mark.parametrize(("T", "C", "gap"), [(3, 1024, 512), (1, 4096, 0), (2, 65, 1)])
def test_norm_of_rows_that_are_apart(T, C, gap, device):
    x = torch.randn(T, C + gap, device=device).to(DTYPE[device.type])[:, :C]
    weight = torch.randn(C, device=device).to(x.dtype)
    out = norm_kernel.launch(x, weight, 1e-6, ARCH)
    assert out.is_contiguous()
    assert rel_err(out, rms_norm(x.double(), weight.double(), 1e-6)) < bound(device)


@pytest.mark.parametrize(("T", "C"), [(1, 4096), (3, 65)])
def test_streams_start_as_the_embedding(T, C, device):
    weight = torch.randn(50, C, device=device).to(DTYPE[device.type])
    tokens = torch.randint(50, (T,), device=device)
    assert same_bits(embed_kernel.launch(tokens, weight, 4, ARCH), embed(tokens, weight, 4))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("ratio", [0, 4])
@pytest.mark.parametrize("inverse", [True, False])
def test_rotation(ratio, inverse, device):
    config = ModelConfig()
    x = torch.randn(3, 5, 512, device=device).to(DTYPE[device.type])
    x[0, 0, 3], x[1, 2, 5] = float("nan"), float("inf")
    positions = torch.tensor([0, 77, 1_000_003], dtype=torch.int32, device=device)
    freqs = frequencies(config, ratio).to(device)
    out = rope_kernel.launch(x, positions, freqs, inverse=inverse, arch=ARCH)
    # both round the angle to float32
    want = rope(x.float(), positions, freqs, inverse=inverse)
    assert same_bits(out[..., :448], x[..., :448])
    assert rel_err(out[..., 448:], want[..., 448:]) < bound(device)


@pytest.mark.parametrize("ratios", [(0,), (0, 4), (0, 4, 128)])
@pytest.mark.parametrize("width", [None, 24])
def test_places_are_the_caches_own(ratios, width, device, monkeypatch):
    monkeypatch.setenv("DEEPDECODE_REFERENCE", "1")
    config = ModelConfig(num_layers=len(ratios), compress_ratios=ratios, window=10, vocab_size=100)
    config = ModelConfig(**{**vars(config), "head_dim": 16, "rope_dim": 4, "index_head_dim": 8})
    cache = KVCache(config, slots=5, max_len=3000, window_page=4, fmt="bf16", device=device)
    # pages out of order, a slot that lacks some, and one that holds none
    slots = [cache.acquire() for _ in range(5)]
    for length in (300, 1100, 2900):
        for slot in slots[:3]:
            cache.reserve(slot, length if slot else min(length, 800))
    cache.reserve(slots[3], 4)
    positions = torch.tensor([767, 2815, 2814, 3, 0], dtype=torch.int32, device=device)
    at = torch.tensor([slots[0], slots[1], slots[2], slots[3], -1], dtype=torch.int32, device=device)
    tokens = torch.tensor([5, 99, 0, 7, 3], device=device)
    want = cache.step(tokens, positions, at, prefill=False, width=width if 128 in ratios else None)
    got = step_kernel.launch(
        tokens, positions, at, cache.block_tables, vocab=100, ring=cache.ring, window=10, logical_page=256,
        ratios=cache.ratios, width=want.entry_indices.shape[1], arch=ARCH,
    )  # fmt: skip
    for name in ("tokens", "window_write", "window_indices", "window_lens", "entry_indices"):
        assert same_bits(getattr(got, name), getattr(want, name)), name
    for ratio in cache.ratios:
        assert same_bits(got.entry_write[ratio], want.entry_write[ratio])
        assert same_bits(got.entry_lens[ratio], want.entry_lens[ratio])


def test_places_of_wild_rows(device):
    """A padded row may hold anything, a slot may be no slot: nothing of it is read or written."""
    tables = torch.zeros(2, 3, dtype=torch.int32, device=device)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    got = step_kernel.launch(
        torch.tensor([-5, 1 << 40, 500], device=device), ints([-(2**31), 2**31 - 1, 127]), ints([-1, 7, 1]), tables,
        vocab=100, ring=128, window=128, logical_page=256,
        ratios=(4, 128), width=6, arch=ARCH,
    )  # fmt: skip
    assert got.tokens.tolist() == [0, 0, 99]
    assert got.window_lens.tolist() == [0, 0, 128]
    assert got.window_write.tolist() == [-1, -1, 128 + 127]
    assert got.window_indices[:2].unique().tolist() == [-1]
    assert got.entry_write[4].tolist() == [-1, -1, 31]
    assert got.entry_lens[128].tolist() == [0, 0, 1]
    assert got.entry_indices.tolist() == [[-1] * 6, [-1] * 6, [0] + [-1] * 5]


def draw(logits, temperature, top_p, seeds, positions):
    return sample_kernel.launch(logits, temperature, top_p, seeds, positions, ARCH)


@pytest.mark.parametrize("temperature", [float("inf"), float("nan"), 1e-30])
def test_a_temperature_out_of_range_ends_and_gives_a_token(temperature, device):
    logits = torch.randn(2, 100, device=device)
    logits[0, 3:] = float("-inf")
    rows = torch.arange(2, device=device)
    found = sample_kernel.launch(logits, torch.full((2,), temperature, device=device), rows * 0 + 0.5, rows, rows, ARCH)
    assert all(0 <= token < limit for token, limit in zip(found.tolist(), (3, 100), strict=True))


def rows(values, T, device, dtype=torch.float64):
    return torch.full((T,), values, dtype=dtype, device=device)


@pytest.mark.parametrize("V", [1, 7, 300, 5000])
def test_greedy_takes_the_largest_and_the_lower_of_equal_ones(V, device):
    T = 4
    logits = torch.randn(T, V, device=device)
    logits[1] = logits[1].round()
    logits[2] = float("-inf")
    logits[2, V // 2] = -1e30
    logits[3] = -0.0
    if V > 5:
        logits[3, 5] = 0.0
    zeros = rows(0, T, device)
    got = draw(logits, zeros, zeros + 1, zeros.long(), zeros.int())
    assert got.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.0, 0.9), (0.25, 0.3), (2.0, 1e-9), (1e-30, 0.9)])
def test_draws_are_the_references(top_p, temperature, device):
    """The same token for nearly every seed: float32 probabilities move a boundary by 1e-7 at most."""
    T, V = (4, 70) if device.type == "cpu" else (64, 20000)
    # steps of a half: many equal probabilities, so that a nucleus ends among them
    logits = (2 * torch.randn(T, V, device=device)).mul(2).round().div(2)
    logits[0, 3:] = float("-inf")
    seeds = torch.randint(-(2**62), 2**62, (T,), device=device)
    positions = torch.randint(0, 1 << 20, (T,), device=device, dtype=torch.int32)
    args = (rows(temperature, T, device), rows(top_p, T, device), seeds, positions)
    assert (draw(logits, *args) != sample_ref(logits.double(), *args)).sum() <= T // 64


@pytest.mark.parametrize("listed", [8, 16384])
def test_a_nucleus_may_end_anywhere(listed, device, monkeypatch):
    """Among ids that a list holds or not, of both signs, equal or all but equal; and with no room left by rounding."""
    V = 200
    monkeypatch.setattr(sample_kernel, "LISTED", listed)
    monkeypatch.setattr(sample_kernel, "plan", lambda T, V: (64, 2, 2))
    logits = torch.stack([0.01 * torch.randn(V), 3 * torch.randn(V).round(), torch.full((V,), 0.5), 4 * torch.randn(V)])
    top_p = torch.tensor([0.6, 0.8, 0.7, 1 - 1e-16], dtype=torch.float64, device=device)
    ids = torch.arange(4, device=device)
    args = (logits.to(device), rows(1.0, 4, device), top_p, ids, ids)
    assert draw(*args).tolist() == sample_ref(args[0].double(), *args[1:]).tolist()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_logits_without_a_largest_give_a_token(device):
    logits = torch.full((3, 40), float("-inf"), device=device)
    logits[1, 7], logits[2] = float("inf"), float("nan")
    seeds = torch.arange(3, device=device)
    for temperature in (-1.0, 0.0, 1.0):
        for top_p in (-1.0, 0.0, 0.5, 1.0, float("nan")):
            found = draw(logits, rows(temperature, 3, device), rows(top_p, 3, device), seeds, seeds)
            assert ((found >= 0) & (found < 40)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_draws_follow_the_probabilities():
    V, T, device = 5, 4000, torch.device("cuda")
    logits = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], device=device).log().expand(T, V).contiguous()
    seeds = torch.arange(T, device=device)
    got = draw(logits, rows(1.0, T, device), rows(0.8, T, device), seeds, torch.zeros(T, dtype=torch.int64, device=device))
    share = torch.bincount(got, minlength=V).double() / T
    # the nucleus: 0.4 + 0.3 < 0.8, so 0.15 is the last
    want = torch.tensor([0, 0.4, 0, 0.3, 0.15], dtype=torch.float64, device=device) / 0.85
    assert share[[0, 2]].tolist() == [0, 0]
    assert (share - want).abs().max() < 4 * (0.25 / T) ** 0.5


def test_which_logits_the_sampler_takes():
    assert sample_kernel.supports("float32", 129280) is None
    assert sample_kernel.supports("float64", 8) == "logits must be float32 or bfloat16, got float64"
    assert sample_kernel.supports("bfloat16", 1 << 21) == "V must be less than 2097152, got 2097152"


def test_rows_do_not_see_each_other(device):
    T, V = 3, 100
    logits = torch.randn(T, V, device=device)
    temperature = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64, device=device)
    top_p = torch.tensor([0.5, 1.0, 0.7], dtype=torch.float64, device=device)
    seeds, positions = torch.arange(T, device=device), torch.arange(T, device=device)
    whole = draw(logits, temperature, top_p, seeds, positions)
    alone = [draw(logits[i : i + 1], *(a[i : i + 1] for a in (temperature, top_p, seeds, positions))) for i in range(T)]
    assert whole.tolist() == torch.cat(alone).tolist()
    assert whole[0] == logits[0].argmax()
