"""Experts of one token without tensor cores, against float64: interpreted without a GPU, compiled with one."""

import os

import pytest
import torch

from deepdecode.ops.moe import moe
from deepdecode.testing.experts import random_experts, random_routes
from deepdecode.testing.numeric import rel_err

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

from deepdecode.kernels import moe_gemv as kernel  # noqa: E402

FP32_STEP = 1e-6  # the interpreter multiplies in float32
BF16_STEP = 4e-3  # h is rounded between the two launches, the result at the end
LIMIT = 7.0
ARCH = 90 if torch.cuda.is_available() else 80


@pytest.fixture(autouse=True)
def _larger_programs(monkeypatch):
    """The interpreter pays for each program; sums do not depend on how many rows one has."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernel, "BLOCK_I", 32)
        monkeypatch.setattr(kernel, "BLOCK_C", 128)


def run(x, ids, weights, w):
    out = torch.empty_like(x)
    parts = [part for weight in (w.w13, w.w2, w.shared13, w.shared2) for part in (weight.data, weight.scale)]
    kernel.launch(x, ids, weights, *parts, w.first_expert, LIMIT, out, ARCH)
    return out


def check(T, E, C, I, shared_I, first, device, change=None):
    w = random_experts(E, C, I, shared_I, first=first, device=device)
    ids, weights = random_routes(T, 8, 6, device=device)
    if change is not None:
        change(ids)
    x = torch.randn(T, C, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    want = moe(x.double().cpu(), ids.cpu(), weights.double().cpu(), random_experts(E, C, I, shared_I, first=first), LIMIT)
    if device.type == "cpu":
        assert rel_err(run(x, ids, weights, w), want) < FP32_STEP
    return x, ids, weights, w


# a rank's width, a tail of each width, two tokens, experts of other ranks
@pytest.mark.parametrize(
    ("T", "E", "C", "I", "shared_I", "first"), [(1, 8, 256, 64, 128, 0), (2, 5, 384, 96, 256, 2), (1, 4, 640, 256, 384, 4)]
)
def test_matches_float64(T, E, C, I, shared_I, first):
    check(T, E, C, I, shared_I, first, torch.device("cpu"))


def test_masked_pairs_add_nothing():
    def mask(ids):
        ids[0, 1:4] = torch.tensor([-1, 10**6, -(10**6)])

    check(2, 8, 256, 64, 128, 0, torch.device("cpu"), mask)


def test_every_expert_masked_leaves_the_shared_one():
    check(1, 8, 256, 64, 128, 0, torch.device("cpu"), lambda ids: ids.fill_(-1))


def test_one_expert_taken_six_times():
    check(2, 8, 256, 64, 128, 0, torch.device("cpu"), lambda ids: ids.fill_(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("T", "E", "I"), [(1, 256, 256), (2, 256, 256), (2, 32, 512)])
def test_on_a_gpu_it_is_what_tensor_cores_give(T, E, I):
    from deepdecode.cards import find_card
    from deepdecode.kernels import moe as cores
    from deepdecode.kernels.moe_plan import Case, plan

    w = random_experts(E, 4096, I, I, device="cuda")
    ids, weights = random_routes(T, E, 6, device="cuda")
    x = torch.randn(T, 4096, device="cuda").bfloat16()
    want = torch.empty_like(x)
    parts = [part for weight in (w.w13, w.w2, w.shared13, w.shared2) for part in (weight.data, weight.scale)]
    config = plan(Case(T, 6, E, 4096, I, I), find_card("H200"))
    cores.launch(x, ids, weights, *parts, "fp4", "fp8", 0, LIMIT, want, config)
    got = run(x, ids, weights, w)
    assert rel_err(got, want.double()) < BF16_STEP
    # the bits do not vary
    assert all(torch.equal(run(x, ids, weights, w), got) for _ in range(5))


def test_what_it_covers():
    rank = (1, 4096, 256, 256, "fp4", "fp8")
    assert kernel.covers(*rank, 90)
    assert kernel.covers(*rank, 89)
    # no instruction there widens E4M3
    assert not kernel.covers(*rank, 86)
    assert not kernel.covers(2, 4096, 256, 256, "fp4", "fp8", 90)
    assert not kernel.covers(1, 4096, 2048, 2048, "fp4", "fp8", 90)
    assert not kernel.covers(1, 4096, 256, 256, "plain", "fp8", 90)
    assert not kernel.covers(1, 4096, 256, 192, "fp4", "fp8", 90)
