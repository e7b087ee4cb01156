"""The rungs of the ladder: tables of ops, from what engines run where no tuned kernel exists to what this package runs.

A rung differs from the one below in one thing. Everything below the product shares Triton products of stored weights (FP8
linears, FP4 experts) that read them as stored: those were never what a decode step waited for, and slow ones would flatter what
comes above. What rung 0 does otherwise is in `deepdecode/fallback/` too; file and function of the engine are named entry by
entry in `Rung.mirrors`.
Tables are built when they are asked for: importing this module needs no Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from deepdecode.ops.table import Ops

Tensor = torch.Tensor
# what the first campaign's engine pads the heads of a rank to
PADDED_HEADS = 64


@dataclass(frozen=True)
class Rung:
    """One table of ops. mirrors: entry of the table -> the engine's code that it mirrors, and why that is fair; ours have none.

    yardstick: what an end-to-end ratio over this rung is a ratio over; "" where the ladder's ratios do not use it.
    beside: the rung that this one is another form of, so that no rung stands on it.
    asked: measured only where it is asked for by name: it compiles for long before its first step.
    """

    name: str
    title: str
    build: Callable[[], Ops]
    mirrors: dict[str, str] = field(default_factory=dict)
    yardstick: str = ""
    beside: str = ""
    asked: bool = False

    @property
    def ops(self) -> Ops:
        return self.build()


@cache
def _fallback() -> Ops:
    """Rung 0."""
    from deepdecode.fallback import experts, glue, indexer, mhc, product
    from deepdecode.fallback.attention import sparse_attn_per_head

    return Ops(
        embed=glue.embed,
        mhc_boundary=mhc.mhc_boundary,
        attn_in=glue.attn_in,
        q_proj=glue.q_proj,
        attn_prepare=glue.attn_prepare,
        index_topk=indexer.index_topk,
        sparse_attn=_turned(_out_of(sparse_attn_per_head)),
        attn_out=product.attn_out,
        route=glue.route,
        moe=experts.moe,
        head=mhc.head,
        sample=glue.sample,
    )


@cache
def _padded() -> Ops:
    from deepdecode.fallback.attention import sparse_attn_per_head

    native = _out_of(sparse_attn_per_head)

    def padded(q: Tensor, *caches: Any, sink: Tensor, scale: float) -> Tensor:
        H = q.shape[1]
        more = max(0, PADDED_HEADS - H)
        out = native(F.pad(q, (0, 0, 0, more)), *caches, sink=F.pad(sink, (0, more)), scale=scale)
        return out[:, :H].contiguous()

    return replace(_fallback(), sparse_attn=_turned(padded))


@cache
def _mma() -> Ops:
    from deepdecode.fallback.attention import sparse_attn_unsplit

    return replace(_fallback(), sparse_attn=_turned(_out_of(sparse_attn_unsplit)))


@cache
def _split() -> Ops:
    from deepdecode.ops.attention import sparse_attn_decode

    return replace(_fallback(), sparse_attn=_turned(sparse_attn_decode))


@cache
def _portable() -> Ops:
    from deepdecode.kernels import attention
    from deepdecode.kernels.attention_plan import card_of, case_of, plan

    def portable(q: Tensor, *caches: Any, sink: Tensor, scale: float) -> Tensor:
        window, window_indices, _, extra, extra_indices, _ = caches
        case = case_of(q, window, window_indices, extra, extra_indices, sink, gluon=False)
        out = torch.empty_like(q)
        config = plan(case, card_of(q.device))
        attention.launch(q, *caches, sink=sink, scale=scale, out=out, lse=None, workspace=None, config=config)
        return out

    return replace(_fallback(), sparse_attn=_turned(portable))


@cache
def _tensor_cores() -> Ops:
    from deepdecode.ops.fused import FUSED

    return replace(_split(), **{entry: getattr(FUSED, entry) for entry in _ON_TENSOR_CORES})


@cache
def _fused() -> Ops:
    from deepdecode.fallback import experts, product
    from deepdecode.ops.fused import FUSED

    # the vocabulary's product has nothing left to gain: it is the bandwidth's
    return replace(FUSED, attn_in=product.attn_in, q_proj=product.q_proj, attn_out=product.attn_out, moe=experts.moe)


@cache
def _engine() -> Ops:
    from deepdecode.fallback import engine

    entries = ("attn_in", "q_proj", "attn_prepare", "sparse_attn")
    return replace(_fused(), **{entry: getattr(engine, entry) for entry in entries})


@cache
def _compiled() -> Ops:
    """Rung 3, and torch.compile over the torch ops that rung 4 fuses by hand."""
    from deepdecode.fallback import compiled

    return replace(_tensor_cores(), **compiled.entries())


def _product() -> Ops:
    from deepdecode.ops.fused import FUSED

    return FUSED


def _out_of(attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """The same without the log-sum-exp."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        return attend(*args, **kwargs)[0]

    return run


def _turned(attend: Callable[..., Any]) -> Callable[..., Tensor]:
    """The same and then the fallback's rotation back."""
    from deepdecode.fallback.glue import turned_back

    def run(*args: Any, positions: Tensor, freqs: Tensor, **kwargs: Any) -> Tensor:
        return turned_back(attend(*args, **kwargs), positions, freqs)

    return run


_ENGINE = "sglang 0.5.23 "
_ROTATED = _ENGINE + "srt/models/deepseek_v4.py _project_wo_b: the rotation back is torch's."
_GLUE = {
    "embed": _ENGINE + "kernels/ops/layernorm/mhc.py hc_broadcast, in torch: the embedding, and its copy to the streams.",
    "mhc_boundary": _ENGINE
    + (
        "srt/models/deepseek_v4.py hc_pre_torch_impl (float, square, mean, rsqrt, float32 F.linear, product), "
        "kernels/ops/layernorm/mhc.py hc_split_sinkhorn (one launch) and _mhc_post_torch: what sm_120 runs where "
        "srt/arg_groups/model_hook.py switches TileLang's and DeepGEMM's fused kernels off, without the later fusion of both."
    ),
    "q_proj": _ENGINE + "srt/models/deepseek_v4.py _compute_q_b: a norm of one launch, then the product, which is ours.",
    "attn_prepare": _ENGINE
    + (
        "srt/models/deepseek_v4.py _compute_kv_to_cache, srt/layers/attention/dsv4/compressor_v2.py and indexer.py: norms, "
        "rows written, compressors fed are one launch each, as there; rotations, Hadamard and the query's scale are torch's."
    ),
    "index_topk": _ENGINE
    + (
        "srt/layers/attention/dsv4/indexer.py fp8_paged_mqa_logits_torch_sm120 and topk_transform_pytorch_vectorized: pages "
        "gathered and widened, every head's product kept; in float32 without tensor cores, as the first campaign's engine did."
    ),
    "route": _ENGINE + "srt/layers/moe/topk.py biased_topk_impl; the gate's product is ours.",
    "head": _ENGINE + "srt/models/deepseek_v4.py hc_head_torch; the vocabulary's product is ours.",
    "sample": _ENGINE + "srt/layers/sampler.py with a temperature alone: softmax and one draw, here by seed and position.",
}
_PER_HEAD = _ENGINE + (
    "kernels/ops/attention/flash_mla_sm120_triton.py _tiled_sparse_decode_kernel, _merge_partial_attn and "
    "_apply_attn_sink: a program for each (token, head) without tensor cores, both caches a launch each, merged by torch"
)

# entries whose products were full float32 ones
_ON_TENSOR_CORES = ("index_topk", "mhc_boundary", "head")

RUNGS: tuple[Rung, ...] = (
    Rung(
        "0-padded",
        "fallback, heads padded to 64",
        _padded,
        _GLUE
        | {
            "sparse_attn": _PER_HEAD
            + f"; q and sink padded to {PADDED_HEADS} heads, as the first campaign's engine did. "
            + _ROTATED
        },
        yardstick="the first campaign's engine",
    ),
    Rung(
        "0",
        "fallback",
        _fallback,
        _GLUE | {"sparse_attn": _PER_HEAD + "; native heads, as sglang does today. " + _ROTATED},
        yardstick="SGLang today",
    ),
    Rung("1", "tensor-core attention", _mma, _GLUE),
    Rung("2", "split keys", _split, _GLUE),
    Rung("2-portable", "split keys, the kernel of other cards", _portable, _GLUE, beside="2"),
    Rung(
        "3",
        "tensor-core indexer and hyper-connections",
        _tensor_cores,
        {entry: text for entry, text in _GLUE.items() if entry not in _ON_TENSOR_CORES},
    ),
    Rung("4", "fused glue", _fused),
    Rung("4-engine", "glue as far fused as an engine's own", _engine, yardstick="how far SGLang fuses its step", beside="4"),
    Rung("4-compiled", "glue by torch.compile", _compiled, {"sample": _GLUE["sample"]}, beside="4", asked=True),
    Rung("5", "experts and products of few tokens", _product),
)
