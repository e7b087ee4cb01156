"""The hyper-connection kernels against float64: interpreted without a GPU, compiled with one."""

import math
import os

import pytest
import torch

from deepdecode.ops.mhc import mhc_head_ref, mhc_post_ref, mhc_pre_ref
from deepdecode.ops.norm import rms_norm_ref
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

from deepdecode.kernels import mhc as kernel  # noqa: E402

F32 = 2e-6  # float32 sums in another order, then 40 normalisations
MIX = 1e-5  # weights in two bfloat16 parts: 16 bits of them
BF16_STEP = 2**-8  # bfloat16 streams and x, each rounded once
EPS, ITERS = 1e-6, 20


def site(C, rows, device):
    fn = torch.randn(rows, 4 * C, device=device) / math.sqrt(4 * C)
    return fn, torch.randn(rows, device=device), torch.rand(3 if rows == 24 else 1, device=device) + 0.5


def inputs(T, C, device="cpu", dtype=torch.float32, rows=24):
    streams, y = torch.randn(T, 4, C, device=device).to(dtype), 3 * torch.randn(T, C, device=device).to(dtype)
    post = 2 * torch.rand(T, 4, device=device)
    comb = torch.rand(T, 4, 4, device=device).softmax(-1)
    return y, streams, post, comb, *site(C, rows, device), 1 + 0.1 * torch.randn(C, device=device).to(dtype)


def reference(y, streams, post, comb, fn, base, scale, norm):
    """The same in float64, with streams and x rounded where the product rounds them."""
    dtype = streams.dtype
    fn, base, scale = fn.double(), base.double(), scale.double()
    if y is not None:
        streams = mhc_post_ref(y.double(), streams.double(), post.double(), comb.double()).to(dtype)
    h = streams.double()
    if len(fn) == 4:
        x, post, comb = mhc_head_ref(h, fn, base, scale, EPS, EPS), None, None
    else:
        x, post, comb = mhc_pre_ref(h, fn, base, scale, EPS, EPS, ITERS)
    return streams, rms_norm_ref(x.to(dtype).double(), norm.double(), EPS), post, comb


def run(args, config):
    return kernel.launch(*args, norm_eps=EPS, hc_eps=EPS, iters=ITERS, config=config)


# one token over many parts, odd, two blocks of tokens; widths that are no power of two
@pytest.mark.parametrize(("T", "C"), [(1, 1024), (3, 96), (9, 32)])
@pytest.mark.parametrize("first", [False, True], ids=["after a sublayer", "first"])
@pytest.mark.parametrize("rows", [24, 4], ids=["layer", "head"])
def test_interpreted_matches_reference(T, C, first, rows):
    args = inputs(T, C, rows=rows)
    if first:
        args = (None, args[1], None, None, *args[4:])
    got = run(args, kernel.plan(C, 80))
    for out, want in zip(got, reference(*args), strict=True):
        assert (out is None) == (want is None)
        if want is not None:
            assert rel_err(out, want) < F32
    assert (got[0] is args[1]) == first


@pytest.mark.parametrize(("T", "C"), [(1, 1024), (4, 96)])
@pytest.mark.parametrize("first", [False, True], ids=["after a sublayer", "first"])
@pytest.mark.parametrize("rows", [24, 4], ids=["layer", "head"])
def test_few_tokens_are_mixed_one_by_one(T, C, first, rows):
    args = inputs(T, C, rows=rows)
    if first:
        args = (None, args[1], None, None, *args[4:])
    config = kernel.plan(C, 80, T)
    assert config.block_t == 1
    for out, want in zip(run(args, config), reference(*args), strict=True):
        if want is not None:
            assert rel_err(out, want) < F32
    alone = run([a[-1:] if i < 4 and a is not None else a for i, a in enumerate(args)], config)
    whole = run(args, config)
    assert all(same_bits(a[-1:], b) for a, b in zip(whole, alone, strict=True) if a is not None)


def test_sinkhorn_steps():
    """One step ends on columns that sum to 1 - eps, and leaves rows further off than twenty do."""
    args = inputs(2, 64)
    off = []
    for iters in (1, 2, 20):
        comb = kernel.launch(*args, norm_eps=EPS, hc_eps=EPS, iters=iters, config=kernel.plan(64, 80))[3]
        assert (
            rel_err(comb, mhc_pre_ref(reference(*args)[0].double(), *(a.double() for a in args[4:7]), EPS, EPS, iters)[2]) < F32
        )
        off.append((comb.sum(2) - 1).abs().max().item())
    assert off[0] > off[1] > off[2]


@pytest.mark.parametrize(("iters", "spread"), [(3, 6), (4, 6), (20, 6), (20, 60)])
def test_sinkhorn_of_logits_far_apart(iters, spread):
    """Steps without a reciprocal keep their range and their precision where shares of 1e-6 decide."""
    args = list(inputs(3, 32))
    args[5] = spread * torch.randn(24)
    comb = kernel.launch(*args, norm_eps=EPS, hc_eps=EPS, iters=iters, config=kernel.plan(32, 80, 3))[3]
    want = mhc_pre_ref(reference(*args)[0].double(), *(a.double() for a in args[4:7]), EPS, EPS, iters)[2]
    assert worst_row_err(comb.flatten(1)[:, None], want.flatten(1)[:, None]) < F32


def test_one_bfloat16_part_of_the_weights_would_not_do():
    """What the two products are for: the mixing product's error with the weights in one bfloat16 part, and in two."""
    h = torch.randn(4, 4 * 4096).bfloat16().double()
    fn = site(4096, 24, "cpu")[0]
    high = fn.bfloat16().double()
    both = high + (fn.double() - high).float().bfloat16().double()
    want = h @ fn.double().mT
    assert rel_err(h @ both.mT, want) < MIX < 100 * MIX < rel_err(h @ high.mT, want)


def test_a_token_does_not_see_its_batch():
    args = inputs(10, 32)
    whole = run(args, kernel.plan(32, 80))
    alone = run([a[9:] if i < 4 else a for i, a in enumerate(args)], kernel.plan(32, 80))
    assert all(same_bits(a[9:], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_stays_in_its_token():
    args = inputs(3, 64)
    args[0][1, 5] = float("nan")
    for out in run(args, kernel.plan(64, 80)):
        assert out.flatten(1).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"streams": "float32"}, "float32"),
        ({"fn": "bfloat16"}, "bfloat16"),
        ({"C": 100}, "100"),
        ({"T": 2**21}, "2097152"),
        ({"hc_eps": 1e-20}, "1e-20"),
    ],
)
def test_supports_says_why_not(change, reason):
    base = {"T": 1, "C": 4096, "streams": "bfloat16", "fn": "float32"}
    assert kernel.supports(**base) is None
    assert kernel.supports(**{**base, "C": 7168}) is None
    assert reason in kernel.supports(**{**base, **change})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("T", "C"), [(1, 4096), (3, 4096), (5, 4096), (16, 4096), (64, 4096), (130, 7168)])
@pytest.mark.parametrize("rows", [24, 4], ids=["layer", "head"])
def test_compiled_matches_float64(T, C, rows):
    args = inputs(T, C, "cuda", torch.bfloat16, rows)
    config = kernel.plan(C, 10 * torch.cuda.get_device_capability()[0], T)
    got = run(args, config)
    want = reference(*args)
    # what stands in the streams decides the rest, and may differ from the reference by a rounding
    assert (got[0] != want[0]).float().mean() < 1e-3
    want = reference(None, got[0], None, None, *args[4:])
    assert rel_err(got[1], want[1]) < BF16_STEP
    if rows == 24:
        assert rel_err(got[2], want[2]) < MIX
        assert rel_err(got[3], want[3]) < MIX
    alone = run([a[-1:] if i < 4 else a for i, a in enumerate(args)], config)
    assert all(same_bits(a[-1:], b) for a, b in zip(got, alone, strict=True) if a is not None)
