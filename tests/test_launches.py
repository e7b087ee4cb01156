"""The fused kernels as torch ops: what they mutate, and what torch.compile is told of them, is what they do."""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepdecode.config import ModelConfig
from deepdecode.ops._check import torch_op
from deepdecode.testing.steps import prepare_inputs

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from deepdecode.ops import fused, launches

CHECKS = ("test_schema", "test_faketensor")
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
SMALL = ModelConfig(head_dim=64, rope_dim=16, index_heads=5, index_head_dim=16)


def check(op, args):
    torch.library.opcheck(getattr(torch.ops.deepdecode, op.__name__).default, args, test_utils=CHECKS)


def test_norm_and_rotation(device):
    x = torch.randn(3, 96, device=device).to(DTYPE[device.type])
    check(launches.rms_norm, (x[:, :64], x[0, :64], 1e-6))
    o = torch.randn(2, 3, 64, device=device).to(x.dtype)
    check(launches.rope_back, (o, torch.arange(2, device=device, dtype=torch.int32), torch.rand(8, device=device)))


def test_embedding(device):
    weight = torch.randn(7, 40, device=device).to(DTYPE[device.type])
    check(launches.embed, (torch.tensor([3, 6], device=device), weight, 4))


@pytest.mark.parametrize("rows", [24, 4])
@pytest.mark.parametrize("first", [True, False])
def test_boundary(rows, first, device):
    T, C = 2, 32
    streams = torch.randn(T, 4, C, device=device).to(DTYPE[device.type])
    old = (None, None, None) if first else (streams[:, 0].clone(), torch.rand(T, 4), torch.rand(T, 4, 4))
    y, post, comb = (None if t is None else t.to(device) for t in old)
    site = (torch.randn(rows, 4 * C), torch.randn(rows), torch.rand(3 if rows == 24 else 1))
    fn, base, scale = (t.to(device) for t in site)
    check(launches.mhc_boundary, (y, streams, post, comb, fn, base, scale, streams[0, 0].clone(), 1e-6, 1e-6, 3))


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.filterwarnings("ignore::UserWarning")  # opcheck compares outputs of a type that has no addition
def test_prepare(ratio, device, monkeypatch):
    case = prepare_inputs([127, 2], ratio, H=2, fmt="bf16", dtype=DTYPE[device.type], config=SMALL, device=device)
    seen = []
    monkeypatch.setattr(launches, "attn_prepare", lambda *args: seen.append(args) or [case.q])
    fused._prepare(*case.args())
    monkeypatch.undo()
    check(launches.attn_prepare, seen[0])


@pytest.mark.parametrize("hashed", [True, False])
def test_route(hashed, device):
    x = torch.randn(2, 64, device=device).to(DTYPE[device.type])
    table = torch.randint(8, (5, 2), device=device, dtype=torch.int32) if hashed else None
    bias = None if hashed else torch.randn(8, device=device)
    tokens = torch.tensor([1, 4], device=device)
    check(launches.route, (x, torch.randn(8, 64, device=device).to(x.dtype), bias, table, tokens, 2, 1.5))


def test_sample(device):
    rows = torch.ones(3, dtype=torch.float64, device=device)
    seeds = torch.arange(3, device=device)
    check(launches.sample, (torch.randn(3, 40, device=device), rows, rows, seeds, seeds))


class Seen(TorchDispatchMode):
    """The ops of a call, by their names."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.name())
        return op(*args, **(kwargs or {}))


class Other(torch.Tensor):
    """A tensor of another kind, as those that trace are."""


def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


twice_op = torch_op("twice_of_a_test", twice, torch.empty_like)


def test_an_op_is_what_a_tracer_sees():
    """Off the CPU under a mode and where a gradient is asked for; of a tensor of another kind; not by others."""

    def through_the_op(x):
        with torch.profiler.profile() as profile:
            twice_op(x)
        return "deepdecode::twice_of_a_test" in {event.name for event in profile.events()}

    x = torch.rand(3)
    assert torch.equal(twice_op(x), x + x) and not through_the_op(x)
    assert through_the_op(x.as_subclass(Other))
    leaf = x.clone().requires_grad_()
    assert torch.autograd.grad(twice_op(leaf).sum(), leaf)[0].tolist() == [2, 2, 2]
    # stands for a GPU's
    meta = x.to("meta")
    assert not through_the_op(meta) and through_the_op(meta.clone().requires_grad_())
    for tensor, name in ((x, "aten::add.Tensor"), (meta, "deepdecode::twice_of_a_test")):
        with Seen() as seen:
            twice_op(tensor)
        assert seen.names == [name]
