"""The attention kernels against the float64 reference: interpreted without a GPU, compiled with one."""

import functools
import os
from dataclasses import replace

import pytest
import torch

from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.ops.rope import frequencies, rope
from deepdecode.ops.rows import PagedRows
from deepdecode.testing.inputs import AttentionInputs, attention_corners, attention_inputs
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err
from deepdecode.tiny import CONFIG

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

from deepdecode.kernels import attention as kernel  # noqa: E402
from deepdecode.kernels.attention_merge import Turn  # noqa: E402
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
    return Config("mma", block_h, 64, splits, split_keys, num_warps=4, align=align, pdl=False, merge_warps=2)


def run(inputs: AttentionInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:2])
    kernel.launch(*inputs.args(), sink=inputs.sink, scale=inputs.scale, out=out, lse=lse, workspace=None, config=config)
    return out, lse


def reference(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    sink = None if inputs.sink is None else inputs.sink.double()
    q, *rest = inputs.args()
    return sparse_attn_ref(q.double(), *rest, sink=sink, scale=inputs.scale)


# three splits everywhere, none where that path differs
@pytest.mark.parametrize(
    ("name", "splits"),
    [(name, 3) for name in CORNERS] + [(name, 1) for name in ("holes", "no key at all", "a heavy sink", "17 heads")],
)
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


@pytest.mark.parametrize("name", ["random lengths and holes", "no key at all", "17 heads"])
def test_the_merge_turns_back(name):
    """Padded rows may have any position."""
    inputs = corners("cpu", torch.float32)[name]
    positions = torch.tensor([70001, 0, -5, 3, 1 << 20] * 4, dtype=torch.int32)[: len(inputs.q)]
    freqs = frequencies(CONFIG, 4)
    out, turned = run(inputs, config(inputs, 3))[0], torch.empty_like(inputs.q)
    kernel.launch(
        *inputs.args(), sink=inputs.sink, scale=inputs.scale, out=turned, lse=None, workspace=None,
        config=config(inputs, 3), turn=Turn(positions, freqs),
    )  # fmt: skip
    R = 2 * len(freqs)
    assert same_bits(turned[..., :-R], out[..., :-R])
    # a float32 angle of up to 2**20
    want = rope(out, positions, freqs, inverse=True)
    assert rel_err(turned, want) < 1e-6


def test_a_fixed_cut_does_not_look_at_the_batch():
    """Deterministic plans: pieces of 64 keys, so a row alone and a row among others take the same sums."""
    inputs = corners("cpu", torch.float32)["random lengths and holes"]
    q, _, indices, lens, _, extra_indices, extra_lens = inputs.args()
    want, _ = run(inputs, config(inputs, 3, split_keys=64))
    assert rel_err(want, reference(inputs)[0]) < SPLIT_STEP
    alone = replace(
        inputs,
        q=q[2:3].contiguous(),
        window_indices=indices[2:3].contiguous(),
        window_lens=lens[2:3].contiguous(),
        extra_indices=extra_indices[2:3].contiguous(),
        extra_lens=extra_lens[2:3].contiguous(),
    )
    out, _ = run(alone, config(alone, 3, split_keys=64))
    assert same_bits(out, want[2:3])


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of numpy's maximum, in the interpreter
def test_a_nan_scale_is_a_nan_row():
    inputs = corners("cpu", torch.float32)["window only"]
    data = inputs.window.data.clone()
    row = int(inputs.window_indices[1, 3])
    page, place = divmod(row, inputs.window.page_size)
    data[page, inputs.window.page_size * 576 + place * 8] = 0xFF
    broken = replace(inputs, window=PagedRows(data, inputs.window.page_size, inputs.window.fmt))
    out, _ = run(broken, config(broken, 2))
    named = (inputs.window_indices == row).any(dim=1)
    assert out.isnan().any(dim=(1, 2)).tolist() == named.tolist()


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_at_both_ends_of_float32(splits):
    """-inf takes no weight, inf all of it, and so does what is as large as one; beside a token without a key, too."""
    inputs = corners("cpu", torch.float32)["random lengths and holes"]
    assert inputs.sink is not None
    sink = inputs.sink.clone()
    sink[:4] = torch.tensor([-torch.inf, torch.inf, 2e38, -2e38])
    lens = inputs.window_lens.clone()
    lens[0] = 0
    inputs = replace(inputs, sink=sink, window_lens=lens, extra=None, extra_indices=None, extra_lens=None)
    out, lse = run(inputs, config(inputs, splits))
    want, want_lse = reference(inputs)
    assert rel_err(out, want) < (SPLIT_STEP if splits > 1 else WHOLE_STEP)
    assert rel_err(lse, want_lse) < 1e-5
    assert (out[:, 1:3] == 0).all()
    assert (out[0] == 0).all()


def test_more_tokens_than_a_grid_holds_are_launched_in_parts(monkeypatch):
    inputs = corners("cpu", torch.float32)["random lengths and holes"]
    want, want_lse = run(inputs, config(inputs, 2))
    monkeypatch.setattr(kernel, "MAX_TOKENS", 2)
    out, lse = run(inputs, config(inputs, 2))
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)


def test_one_fp8_term_of_the_query_is_outside_the_bound():
    """Why the FP8 products of sm_89 and sm_120 are not used: E4M3 holds the query well enough in two terms only."""
    inputs = attention_inputs(2, 8, 128, 512)
    want, _ = reference(inputs)
    assert inputs.sink is not None
    q, *rest = inputs.args()
    unit = q.double().abs().amax(-1, keepdim=True) / 448
    first = (q / unit).to(torch.float8_e4m3fn).double()
    second = (16 * (q / unit - first)).to(torch.float8_e4m3fn).double() / 16
    errors = [
        rel_err(sparse_attn_ref(terms * unit, *rest, sink=inputs.sink.double(), scale=inputs.scale)[0], want)
        for terms in (first, first + second)
    ]
    # the contract's bound for the whole call is 2.5e-3
    assert errors[0] > 2e-2
    assert errors[1] < 1e-3
