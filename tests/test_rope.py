import dataclasses
import math

import pytest
import torch

from deepdecode.config import ModelConfig, Yarn
from deepdecode.ops.rope import frequencies, rope
from deepdecode.testing.numeric import rel_err, same_bits

FLASH = ModelConfig()
FP32_STEP = 3e-7  # a sine, a cosine, two products and a sum
BF16_STEP = 4e-3  # one rounding to bfloat16 is at most half a step, 2**-8

# pair: window layers, compressed layers
CHECK_VALUES = {
    1: (7.498942e-1, 6.876560e-1),
    15: (1.333521e-2, 3.635539e-3),
    16: (1.0e-2, 2.265625e-3),
    20: (3.162278e-3, 2.969778e-4),
    25: (7.498942e-4, 5.372313e-6),
    31: (1.333521e-4, 5.680529e-7),
}


def turned(x, positions, freqs, sign=1):
    """As complex numbers, in float64: pair (2i, 2i + 1) times exp(i * position * frequency)."""
    R = 2 * len(freqs)
    pairs = torch.view_as_complex(x[..., -R:].double().unflatten(-1, (-1, 2)).contiguous())
    phase = torch.polar(torch.ones(1, dtype=torch.float64), sign * positions.double()[:, None] * freqs.double())
    phase = phase.view(len(x), *[1] * (x.dim() - 2), R // 2)
    return torch.cat((x[..., :-R].double(), torch.view_as_real(pairs * phase).flatten(-2)), dim=-1)


@pytest.mark.parametrize("pair", CHECK_VALUES)
def test_check_values(pair):
    """Two bases (10000 and 160000, not 40000), YaRN on the compressed layers and on no other."""
    window, compressed = CHECK_VALUES[pair]
    # seven digits are given: half a unit of the last
    assert frequencies(FLASH, 0)[pair].item() == pytest.approx(window, rel=5e-7)
    for ratio in (4, 128):
        assert frequencies(FLASH, ratio)[pair].item() == pytest.approx(compressed, rel=5e-7)


def test_all_frequencies_from_the_formula():
    for ratio in (0, 4):
        base = 10000 if ratio == 0 else 160000
        for i, got in enumerate(frequencies(FLASH, ratio).tolist()):
            want = base ** (-2 * i / 64)
            if ratio:
                ramp = min(max((i - 15) / (25 - 15), 0), 1)
                want = want / 16 * ramp + want * (1 - ramp)
            assert got == pytest.approx(want, rel=1e-6)


def test_frequencies_without_yarn_and_at_its_edges():
    plain = dataclasses.replace(FLASH, yarn=None)
    assert torch.equal(frequencies(plain, 4), 1.0 / 160000.0 ** (torch.arange(0, 64, 2) / 64))
    # a ramp that ends past the last pair: its end is cut at rope_dim - 1 = 63, not at the last pair, 31
    mid = dataclasses.replace(FLASH, yarn=Yarn(original_max_positions=10**6, beta_slow=1e-9))
    low = math.floor(64 * math.log(10**6 / (2 * math.pi * 32)) / (2 * math.log(160000)))
    ramp = (31 - low) / (63 - low)
    want = frequencies(plain, 4)[31].item() * (ramp / 16 + 1 - ramp)
    assert frequencies(mid, 4)[31].item() == pytest.approx(want, rel=1e-6)
    # both bounds at 0: a step
    short = dataclasses.replace(FLASH, yarn=Yarn(original_max_positions=167, beta_slow=32.0))
    assert torch.equal(frequencies(short, 4)[1:], frequencies(plain, 4)[1:] / 16)
    assert frequencies(short, 4)[0] == 1


# the kv row, query heads, the indexer's heads, a vector that is nothing but its rotary part
@pytest.mark.parametrize("shape", [(5, 512), (5, 3, 512), (1, 64, 128), (4, 64)])
@pytest.mark.parametrize("ratio", [0, 4])
@pytest.mark.parametrize("inverse", [False, True])
def test_matches_complex_rotation(shape, ratio, inverse):
    x, positions, freqs = torch.randn(shape), torch.randint(0, 1000, shape[:1]), frequencies(FLASH, ratio)
    want = turned(x, positions, freqs, -1 if inverse else 1)
    assert rel_err(rope(x.double(), positions, freqs, inverse=inverse), want) < 1e-14
    # at position 1000 an angle has an error of up to 3e-5 in float32
    assert rel_err(rope(x, positions, freqs, inverse=inverse), want) < 3e-5
    small = rope(x, positions % 2, freqs, inverse=inverse)
    assert rel_err(small, turned(x, positions % 2, freqs, -1 if inverse else 1)) < FP32_STEP
    low = rope(x.bfloat16(), positions.int(), freqs, inverse=inverse)
    assert same_bits(low, rope(x.bfloat16().float(), positions, freqs, inverse=inverse).bfloat16())
    assert rel_err(low, want) < BF16_STEP


def test_pairs_are_adjacent_and_the_rest_keeps_its_bits():
    x = torch.zeros(1, 512)
    x[0, :448], x[0, 448 + 2] = torch.randn(448), 1.0
    out = rope(x, torch.tensor([1]), frequencies(FLASH, 0))
    assert same_bits(out[:, :448], x[:, :448])
    want = torch.zeros(64)
    want[2], want[3] = math.cos(0.7498942), math.sin(0.7498942)
    assert rel_err(out[0, 448:], want) < FP32_STEP


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_no_attention_temperature(ratio):
    """A rotation keeps lengths; YaRN's mscale would stretch them by 1.277."""
    x = torch.randn(6, 64, dtype=torch.float64)
    out = rope(x, torch.arange(0, 600, 100), frequencies(FLASH, ratio))
    assert torch.allclose(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-12)


@pytest.mark.parametrize("positions", [[0, 1, 127], [65536, 500_000, 1_048_575]])
def test_the_inverse_undoes(positions):
    """The attention output is rotated back by the query's own position."""
    x, positions = torch.randn(3, 2, 512), torch.tensor(positions)
    freqs = frequencies(FLASH, 4)
    back = rope(rope(x, positions, freqs), positions, freqs, inverse=True)
    assert rel_err(back, x) < FP32_STEP
    assert rel_err(rope(x, positions, freqs)[1:], x[1:]) > 0.1


def test_angles_are_float32_products():
    """At position 1048575 float32 and float64 angles differ by up to 0.03: the model was trained with the former."""
    x, positions, freqs = torch.randn(1, 64), torch.tensor([1_048_575]), frequencies(FLASH, 4)
    angle = (positions.float()[:, None] * freqs).double()
    want = turned(x, torch.tensor([1]), angle[0])
    assert rel_err(rope(x, positions, freqs), want) < FP32_STEP
    assert rel_err(rope(x.double(), positions, freqs), turned(x, positions, freqs)) < 1e-13
    assert rel_err(rope(x, positions, freqs), turned(x, positions, freqs)) > 1e-3


def test_only_distances_matter():
    q, k = torch.randn(2, 1, 64, dtype=torch.float64)
    freqs = frequencies(FLASH, 4)
    near = rope(q, torch.tensor([7]), freqs) @ rope(k, torch.tensor([3]), freqs).T
    far = rope(q, torch.tensor([9007]), freqs) @ rope(k, torch.tensor([9003]), freqs).T
    assert rel_err(far, near) < 1e-11


def test_garbage_positions_of_padded_rows_touch_no_other_row():
    x, freqs = torch.randn(4, 2, 64), frequencies(FLASH, 0)
    clean = rope(x, torch.tensor([3, 5, 7, 9]), freqs)
    dirty = rope(x, torch.tensor([3, -1, 2**63 - 1, 9]), freqs)
    assert same_bits(dirty[0::3], clean[0::3])
    assert dirty.isfinite().all()
    assert rope(x, torch.tensor([3, -(2**31), 2**31 - 1, 9], dtype=torch.int32), freqs).isfinite().all()


def test_no_tokens():
    assert rope(torch.empty(0, 3, 64), torch.empty(0, dtype=torch.int64), frequencies(FLASH, 0)).shape == (0, 3, 64)
    assert rope(torch.empty(2, 0, 64), torch.zeros(2, dtype=torch.int64), frequencies(FLASH, 0)).shape == (2, 0, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, p, f: rope(x[0], p, f), r"rope: x must be \[T, \.\.\., at least 64\] .* got \[64\] float32"),
        (lambda x, p, f: rope(x[:, :62], p, f), r"rope: x must be .* got \[2, 62\]"),
        (lambda x, p, f: rope(x.int(), p, f), r"rope: x must be .* got \[2, 64\] int32"),
        (lambda x, p, f: rope(x, p[:1], f), r"rope: positions must be \[2\] int32 or int64 on cpu, got \[1\] int64"),
        (lambda x, p, f: rope(x, p.float(), f), r"rope: positions must be .* got \[2\] float32"),
        (
            lambda x, p, f: rope(x, p, f.bfloat16()),
            r"rope: freqs must be \[rope_dim / 2\] float32 or float64 on cpu, got",
        ),
        (lambda x, p, f: rope(x, p, f[:0]), r"rope: freqs must be .* got \[0\] float32"),
    ],
)
def test_rejects(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64), frequencies(FLASH, 0))
