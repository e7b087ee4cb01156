import pytest
import torch
import torch.nn.functional as F

from deepdecode.ops.norm import head_norm, rms_norm
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err

EPS = 1e-6
FP32_STEP = 5e-7  # a mean of at most 4096 squares, a square root and two products
BF16_STEP = 4e-3  # one rounding to bfloat16 is at most half a step, 2**-8


# odd, one, V4-Flash's hidden size and latent sizes
@pytest.mark.parametrize(("T", "C"), [(3, 65), (1, 1), (2, 4096), (5, 1024), (4, 512)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_matches_torch_in_float64(T, C, scale):
    x, weight = scale * torch.randn(T, C, dtype=torch.float64), torch.randn(C, dtype=torch.float64)
    want = F.rms_norm(x, (C,), weight, EPS)
    assert rel_err(rms_norm(x, weight, EPS), want) < 1e-14
    assert worst_row_err(rms_norm(x.float(), weight.float(), EPS), want) < FP32_STEP
    assert rel_err(head_norm(x, EPS), F.rms_norm(x, (C,), None, EPS)) < 1e-14


WEIGHT = torch.linspace(-2, 2, 512).bfloat16()


@pytest.mark.parametrize("norm", [lambda x: rms_norm(x, WEIGHT, EPS), lambda x: head_norm(x, EPS)])
def test_bfloat16_is_rounded_once(norm):
    """Squares, mean, root and products in float32: the official bfloat16 head norm rounds five times."""
    x = torch.randn(7, 8, 512).bfloat16()
    assert same_bits(norm(x), norm(x.float()).bfloat16())
    assert worst_row_err(norm(x), norm(x.double())) < BF16_STEP
    assert rel_err(norm(x).double(), norm(x.double())) < 2e-3


def test_head_norm_takes_the_whole_head():
    """Every query head, over all 512 channels, those with RoPE included, without a weight."""
    q = torch.randn(3, 64, 512) * torch.logspace(-1, 3, 64)[:, None]
    out = head_norm(q, EPS)
    assert torch.allclose(out.square().mean(-1), torch.ones(3, 64), atol=1e-3)
    assert rel_err(out[1, 7], q[1, 7].double() / (q[1, 7].double().square().mean() + EPS).sqrt()) < FP32_STEP
    bigger_rope = q.clone()
    bigger_rope[..., 448:] *= 10
    assert (head_norm(bigger_rope, EPS)[..., :448].abs() < out[..., :448].abs()).all()


def test_zeros_and_nan():
    x = torch.randn(3, 8)
    x[0], x[2, 5] = 0, float("nan")
    out = rms_norm(x, torch.ones(8), EPS)
    assert torch.equal(out[0], torch.zeros(8))
    assert out[1].isfinite().all()
    assert out[2].isnan().all()
    assert head_norm(torch.zeros(1, 8), 0.0).isnan().all()


def test_no_tokens():
    assert rms_norm(torch.empty(0, 16).bfloat16(), torch.ones(16), EPS).shape == (0, 16)
    assert head_norm(torch.empty(0, 4, 16), EPS).shape == (0, 4, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: rms_norm(x, torch.ones(7), EPS), r"rms_norm: weight must be \[8\] .* on cpu, got \[7\] float32 on cpu"),
        (lambda x: rms_norm(x.int(), torch.ones(8), EPS), r"rms_norm: x must be .* got \[2, 8\] int32"),
        (lambda x: rms_norm(x, torch.ones(8), -1.0), r"rms_norm: eps must be >= 0, got -1\.0"),
        (lambda x: rms_norm(x, torch.ones(16)[::2], EPS), r"rms_norm: weight must be contiguous, got strides \(2,\)"),
        (lambda x: head_norm(x[:, :0], EPS), r"head_norm: x must be \[\.\.\., at least 1\] .* got \[2, 0\]"),
        (lambda x: head_norm(x, float("nan")), r"head_norm: eps must be >= 0, got nan"),
    ],
)
def test_rejects(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 8))
