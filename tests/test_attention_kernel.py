"""The attention kernels against the float64 reference: interpreted without a GPU, compiled with one."""

import functools
import os

import pytest
import torch

from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.testing.inputs import AttentionInputs, attention_corners
from deepdecode.testing.numeric import rel_err, worst_row_err

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

from deepdecode.kernels import attention as kernel  # noqa: E402
from deepdecode.kernels.attention_plan import Config  # noqa: E402

# The interpreter multiplies in float32: only the float16 partial outputs round.
SPLIT_STEP, WHOLE_STEP = 5e-4, 2e-6
# float32 sums of scores near 2**40 and near 1e5: what the softmax makes of their last bit
WILD_STEP = 2e-2


@functools.cache
def corners(device: str, dtype: torch.dtype) -> dict[str, AttentionInputs]:
    torch.manual_seed(0)
    return attention_corners(device, dtype)


CORNERS = sorted(corners("cpu", torch.float32))


def config(inputs: AttentionInputs, splits: int, block_h: int = 8, split_keys: int = 0) -> Config:
    caches = [cache for cache in (inputs.window, inputs.extra) if cache is not None]
    strides = [cache.data.stride(0) * cache.data.element_size() for cache in caches]
    align = 16 if all(stride % 16 == 0 for stride in strides) else 4
    return Config("mma", block_h, 64, splits, split_keys, num_warps=4, num_stages=1, align=align, pdl=False)


def run(inputs: AttentionInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:2])
    kernel.launch(*inputs.args(), sink=inputs.sink, scale=inputs.scale, out=out, lse=lse, workspace=None, config=config)
    return out, lse


def reference(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    sink = None if inputs.sink is None else inputs.sink.double()
    q, *rest = inputs.args()
    return sparse_attn_ref(q.double(), *rest, sink=sink, scale=inputs.scale)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", CORNERS)
def test_interpreted_matches_reference(name, splits):
    inputs = corners("cpu", torch.float32)[name]
    out, lse = run(inputs, config(inputs, splits))
    want, want_lse = reference(inputs)
    step = SPLIT_STEP if splits > 1 else WHOLE_STEP
    if "2**40" in name or "large" in name:
        step = WILD_STEP
    assert rel_err(out, want) < step
    assert worst_row_err(out, want) < 4 * step
    assert rel_err(lse, want_lse) < 1e-5
