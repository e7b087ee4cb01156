"""Rung 0 of sparse attention against the float64 reference, interpreted without a GPU."""

import os

import pytest
import torch

from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.testing.inputs import attention_inputs
from deepdecode.testing.numeric import rel_err

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from deepdecode.fallback import attention as fallback

F32 = 1e-5  # float32 throughout, q and out included
# on a GPU each of the two launches, their merge and the sink round to bfloat16
BF16_STEPS = 5e-3


class OneConfig:
    """The kernel without its autotuner, which times launches."""

    def __init__(self, kernel, **constants) -> None:
        self.kernel, self.constants = kernel, constants

    def __getitem__(self, grid):
        return lambda *args: self.kernel[grid](*args, **self.constants)


@pytest.mark.parametrize("extra_keys", [0, 37])
@pytest.mark.parametrize("with_sink", [False, True])
def test_rung_0_matches_reference(monkeypatch, extra_keys, with_sink):
    cuda = torch.cuda.is_available()
    if not cuda:
        monkeypatch.setattr(fallback, "per_head_kernel", OneConfig(fallback.per_head_kernel.fn, BLOCK_N=16))
    dtype, device = (torch.bfloat16, "cuda") if cuda else (torch.float32, "cpu")
    inputs = attention_inputs(3, 2, 20, extra_keys, rows=128, full=False, holes=True, dtype=dtype, device=device)
    q, *rest = inputs.args()
    sink = inputs.sink if with_sink else None
    out, lse = fallback.sparse_attn_per_head(q, *rest, sink=sink, scale=inputs.scale)
    wide_sink = None if sink is None else sink.double()
    want, want_lse = sparse_attn_ref(q.double(), *rest, sink=wide_sink, scale=inputs.scale)
    assert rel_err(out, want) < (BF16_STEPS if cuda else F32)
    assert rel_err(lse, want_lse) < F32


def test_rung_0_refuses_bfloat16_rows():
    inputs = attention_inputs(1, 2, 20, 0, rows=64, fmt="bf16")
    with pytest.raises(ValueError, match="sparse_attn_per_head: cache must be fp8_584, got bf16"):
        fallback.sparse_attn_per_head(*inputs.args(), scale=1.0)
