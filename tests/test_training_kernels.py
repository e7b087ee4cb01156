"""The trainer's kernels against its torch parts, values and gradients: interpreted without a GPU, compiled with one."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).parent))

from small_checkpoint import PLAIN
from training.forward import Model
from training.parts import REFERENCE, fused
from training.weights import initial

from deepdecode.testing.numeric import rel_err

FUSED = fused()
# float32, the same sums in another order
F32 = 2e-5


def leaf(*shape, device, scale=1.0):
    return (scale * torch.randn(*shape, device=device)).requires_grad_()


def compare(part, *args):
    """Every output and the gradient of every input that takes one, for gradients that are random."""
    ours, theirs = (getattr(table, part)(*args) for table in (FUSED, REFERENCE))
    ours, theirs = (out if isinstance(out, tuple) else (out,) for out in (ours, theirs))
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    directions = [torch.randn_like(out) for out in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert rel_err(mine, other) < F32
    # a loss that is 0 in any case has no gradient
    told = [i for i, out in enumerate(theirs) if out.requires_grad]
    ways = [directions[i] for i in told]
    grads = [torch.autograd.grad([out[i] for i in told], leaves, ways, allow_unused=True) for out in (ours, theirs)]
    for mine, other in zip(*grads, strict=True):
        assert (mine is None or not mine.any()) if other is None else rel_err(mine, other) < F32


def turns(length, half, device):
    angles = torch.randn(length, half, device=device)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("shape", "weight", "half", "eps", "inverse"),
    [
        ((2, 9, 16), True, 0, 1e-6, False),
        ((2, 9, 16), True, 4, 1e-6, False),
        ((1, 5, 3, 16), False, 4, 1e-6, False),
        ((2, 5, 2, 16), False, 8, None, True),
    ],
    ids=["norm", "norm and turn", "heads", "turn back"],
)
def test_rows(shape, weight, half, eps, inverse, device):
    w = leaf(shape[-1], device=device) if weight else None
    compare("rows", leaf(*shape, device=device), w, turns(shape[1], half, device) if half else None, eps, inverse)


@pytest.mark.parametrize(("S", "width", "ratio"), [(19, 48, 4), (8, 16, 4), (263, 24, 128)], ids=["overlap", "even", "128"])
def test_pool(S, width, ratio, device):
    kv, score, ape = leaf(2, S, width, device=device), leaf(2, S, width, device=device), leaf(ratio, width, device=device)
    compare("pool", kv, score, ape, ratio)


def test_index_sum(device):
    compare("index_sum", leaf(2, 3 * 2, 5, device=device), leaf(2, 3, 2, device=device))


@pytest.mark.parametrize("kind", ["window", "entries", "chosen", "chosen alike", "learns"])
def test_attend(kind, device):
    """Chunks of 8: the first, which sees nothing before it, and two more; entries that are done, chosen, or none yet."""
    B, S, H, D, W, N = 2, 24, 2, 16, 8, 6
    q, kv, sink = leaf(B, S, H, D, device=device, scale=2), leaf(B, S, D, device=device), leaf(H, device=device)
    entries = leaf(B, N, D, device=device) if kind != "window" else None
    scores = leaf(B, S, N, device=device) if kind == "learns" else None
    chosen = torch.rand(B, S, N, device=device) < 0.6 if kind in ("chosen", "learns") else None
    if kind == "chosen alike":
        chosen = (torch.rand(S, N, device=device) < 0.6).expand(B, S, N)
    compare("attend", q, kv, entries, sink, scores, chosen, W, 4)


@pytest.mark.parametrize("share", [False, True])
def test_glu(share, device):
    """Some units beyond the clamp on either side."""
    gate, up = leaf(5, 3, 16, device=device, scale=2), leaf(5, 3, 16, device=device, scale=2)
    assert (gate > 2).any() and (up < -2).any() and (up > 2).any()
    compare("glu", gate, up, leaf(5, 3, device=device) if share else None, 2.0)


def test_streams(device):
    T, C = 7, 24
    flat, fn = leaf(T, 4, C, device=device), leaf(24, 4 * C, device=device, scale=0.2)
    base, scale, weight = leaf(24, device=device), leaf(3, device=device), leaf(C, device=device)
    compare("read", flat, fn, base, scale, weight, 1e-6, 1e-6)
    compare("write", leaf(T, C, device=device), flat, leaf(T, 4, device=device), leaf(T, 4, 4, device=device))


def test_tell(device, monkeypatch):
    """Two chunks, the second short; one token that counts for nothing."""
    from training.kernels import tell

    monkeypatch.setattr(tell, "CHUNK", 4)
    targets = torch.tensor([3, 0, -1, 18, 7, 7], device=device)
    compare("tell", leaf(6, 8, device=device), leaf(19, 8, device=device), targets, 5)


@pytest.mark.slow
def test_the_whole_forward_and_its_gradients(device):
    """Every layer kind, both routers and the MTP block on the kernels, beside torch's parts: losses and every gradient."""
    small = {"num_layers": 3, "compress_ratios": (0, 4, 128), "hidden_size": 32, "hc_iters": 3}
    config = dataclasses.replace(PLAIN, window=32, **small)
    params = {name: p.to(device) for name, p in initial(config, 7).items()}
    tokens = torch.randint(0, config.vocab_size, (1, 161), device=device)
    found = []
    for parts in (REFERENCE, FUSED):
        p = {n: t.clone().requires_grad_(t.is_floating_point() and not n.endswith(".bias")) for n, t in params.items()}
        losses, _ = Model(config, parts).losses(p, tokens, topk=config.index_topk, dropout=0.0, draft=True)
        names = [name for name, t in p.items() if t.requires_grad]
        grads = torch.autograd.grad(sum(losses.values()), [p[name] for name in names])
        found.append(({name: float(loss.detach()) for name, loss in losses.items()}, dict(zip(names, grads, strict=True))))
    (expected, theirs), (losses, ours) = found
    assert losses == pytest.approx(expected, rel=F32)
    for name, grad in theirs.items():
        # what the head's gates share is a difference of large sums
        assert rel_err(ours[name], grad) < 50 * F32, name


CODE = """
import dataclasses, sys
import torch
from triton.runtime.jit import JITFunction

sys.path[:0] = sys.argv[1:]
from training import parts, sinkhorn
from training.config import CONFIG
from training.forward import Model
from training.kernels import attend, streams, tell
from training.weights import initial, specs
from deepdecode.testing.compiled import compile_kernel

TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "i1", torch.int64: "i64"}
seen = {}


def note(self, *args, grid, warmup=False, **options):
    # what a launch would be compiled for: as Triton does, 1 is a constant, and what divides by 16 is known to
    values = dict(zip(self.arg_names, args)) | {k: options.pop(k) for k in list(options) if k in self.arg_names}
    types, constants = {}, {}
    for param in self.params:
        value = values[param.name]
        if param.is_constexpr or (type(value) is int and value == 1):
            constants[param.name] = value
        elif isinstance(value, torch.Tensor):
            types[param.name] = f"*{TYPES[value.dtype]}:16"
        elif value is not None:
            types[param.name] = "fp32" if isinstance(value, float) else "i32:16" if value % 16 == 0 else "i32"
    key = (self.fn.__module__, self.fn.__name__, str(types), str(constants))
    seen[key] = (self, types, constants, options)


JITFunction.run = note
for module in (attend, streams, tell):
    module.product = lambda a, b: a.new_empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32)


class Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, iters, eps):
        ctx.save_for_backward(z)
        ctx.rest = iters, eps
        return sinkhorn.launch_forward(z.contiguous(), iters, eps)

    @staticmethod
    def backward(ctx, grad):
        return sinkhorn.launch_backward(ctx.saved_tensors[0], grad.contiguous(), *ctx.rest), None, None


kinds = specs(CONFIG)
p = {}
for name, t in initial(CONFIG, 4).items():
    learnt = kinds[name].kind != "ids" and not name.endswith(".bias")
    dtype = torch.bfloat16 if kinds[name].kind not in ("f32", "ids") else t.dtype
    p[name] = torch.empty_like(t, device="meta", dtype=dtype).requires_grad_(learnt)
model = Model(CONFIG, dataclasses.replace(parts.fused(), sinkhorn=Sinkhorn.apply))
tokens = torch.empty(4, 4097, dtype=torch.int64, device="meta")
losses, _ = model.losses(p, tokens, topk=64, dropout=0.1, draft=True)
torch.autograd.grad(sum(losses.values()), [t for t in p.values() if t.requires_grad])
for (module, name, *_), (function, types, constants, options) in seen.items():
    made = compile_kernel(function, types, constants, 90, **options)
    print(module, name, made.local, made.shared)
"""


@pytest.mark.slow
def test_every_launch_of_a_step_compiles():
    """The kernels as the embedded model's training launches them, for an H200: none spills."""
    import subprocess

    root = Path(__file__).parent.parent
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CODE, str(root / "tools"), str(root)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len({tuple(line[:2]) for line in lines}) == 18 and len(lines) > 40
    assert [line for line in lines if int(line[2]) or int(line[3]) > 232448] == []
