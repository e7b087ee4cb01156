"""Sparse attention as a registered op: opcheck, torch.compile, and the dispatch without a GPU."""

import logging

import pytest
import torch

from deepdecode.ops import _check, attention
from deepdecode.ops.attention import sparse_attn_decode, sparse_attn_turned
from deepdecode.ops.rope import rope
from deepdecode.testing.inputs import AttentionInputs, attention_inputs
from deepdecode.testing.numeric import same_bits


def flat(inputs: AttentionInputs) -> tuple:
    """The arguments of torch.ops.deepdecode.sparse_attn."""
    extra = inputs.extra
    more = (None, 0, "") if extra is None else (extra.data, extra.page_size, extra.fmt)
    window = (inputs.window.data, inputs.window.page_size, inputs.window.fmt, inputs.window_indices, inputs.window_lens)
    out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:2])
    return (inputs.q, *window, *more, inputs.extra_indices, inputs.extra_lens, inputs.sink, inputs.scale, False, out, lse, None)


@pytest.mark.parametrize("extra_keys", [0, 12])
def test_opcheck(extra_keys):
    inputs = attention_inputs(2, 4, 8, extra_keys, rows=64, dtype=torch.float32)
    torch.library.opcheck(torch.ops.deepdecode.sparse_attn.default, flat(inputs))


@pytest.mark.filterwarnings("ignore")  # torch.compile's own deprecations
def test_compiles_without_a_graph_break():
    inputs = attention_inputs(2, 4, 8, 12, rows=64, dtype=torch.float32)

    def step(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, *rest = inputs.args()
        out, lse = sparse_attn_decode(q * 2, *rest, sink=inputs.sink, return_lse=True)
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(inputs.q), step(inputs.q), strict=True):
        assert same_bits(got, want)


def test_turned_back_is_the_attention_and_then_the_rotation():
    """A kernel reads positions and frequencies one after another, so others are refused, here too."""
    inputs = attention_inputs(3, 4, 8, 12, rows=64, dtype=torch.float64)
    positions, freqs = torch.tensor([7, -1, 1 << 30], dtype=torch.int32), torch.rand(32)
    given = {"sink": inputs.sink, "scale": inputs.scale}
    want = rope(sparse_attn_decode(*inputs.args(), **given), positions, freqs, inverse=True)
    assert same_bits(sparse_attn_turned(*inputs.args(), **given, positions=positions, freqs=freqs), want)
    with pytest.raises(ValueError, match=r"sparse_attn_turned: positions must be contiguous, got strides \[2\]"):
        sparse_attn_turned(*inputs.args(), **given, positions=positions.repeat_interleave(2)[::2], freqs=freqs)
    with pytest.raises(ValueError, match=r"sparse_attn_turned: freqs must be contiguous, got strides \[0\]"):
        sparse_attn_turned(*inputs.args(), **given, positions=positions, freqs=freqs[:1].expand(32))


class Refusing:
    """Stands for the kernels on a machine without a GPU: refuses one shape, answers the others with a constant."""

    def __init__(self, refused: int) -> None:
        self.refused = refused

    def attend(self, q, *args, out, **options):
        if q.shape[0] == self.refused:
            return "this shape is refused"
        out.fill_(7.0)
        return None


def test_a_refused_shape_alone_falls_back_and_says_so_once(monkeypatch, caplog):
    from deepdecode.kernels import launching

    monkeypatch.setattr(attention, "use_kernel", lambda q: True)
    monkeypatch.setattr(launching, "attend", Refusing(3).attend)
    monkeypatch.setattr(_check, "_said", set())
    taken, refused = (attention_inputs(T, 4, 8, 12, rows=64, dtype=torch.float32) for T in (2, 3))
    with caplog.at_level(logging.WARNING, logger="deepdecode"):
        assert (sparse_attn_decode(*taken.args(), sink=taken.sink) == 7.0).all()
        outs = [sparse_attn_decode(*refused.args(), sink=refused.sink) for _ in range(2)]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "sparse_attn: no kernel for q [3, 4, 512], 20 keys, fp8_584 rows: this shape is refused; the reference runs"
    ]
    monkeypatch.undo()
    for out in outs:
        assert same_bits(out, sparse_attn_decode(*refused.args(), sink=refused.sink))


def test_strict_makes_a_fallback_an_error(monkeypatch):
    from deepdecode.kernels import launching

    monkeypatch.setattr(attention, "use_kernel", lambda q: True)
    monkeypatch.setattr(launching, "attend", Refusing(3).attend)
    monkeypatch.setenv("DEEPDECODE_STRICT", "1")
    refused = attention_inputs(3, 4, 8, 12, rows=64, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"sparse_attn: no kernel for q \[3, 4, 512\], 20 keys, fp8_584 rows: this shape"):
        sparse_attn_decode(*refused.args())


def test_a_compile_after_warmup_is_said(monkeypatch, caplog):
    """What Triton tells its hook of one of our kernels, and of somebody else's; a hook that was there still runs."""
    triton = pytest.importorskip("triton")
    from deepdecode.kernels import attention as kernel
    from deepdecode.kernels import launching

    seen = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **told: seen.append(told["fn"].name))
    launching._watch.__wrapped__()
    function = kernel.split_kernel.fn
    for module, name in ((function.__module__, function.__qualname__), ("engine.ops", "gemm")):
        about = triton.runtime.jit.JitFunctionInfo(module, name, None)
        triton.knobs.runtime.jit_post_compile_hook(key="", repr="", fn=about, compile={})
    assert seen == ["split_kernel", "gemm"]
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "compiled split_kernel after warmup: a call came that warmup was not told of"
