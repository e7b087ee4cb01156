"""DeepSeek-V4, top to bottom: one forward over the tokens of a `Step`, on whatever table of ops it is given.

A layer, in order: hyper-connection read, attention, hyper-connection write and read, experts. The write of
one sublayer and the read of the next stand together in `mhc_boundary`, so that one kernel can do both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from deepdecode.config import ModelConfig
from deepdecode.ops.quant import Weight
from deepdecode.ops.rope import frequencies
from deepdecode.ops.table import AttnWeights, HeadWeights, LayerCache, MhcSite, MoeWeights, Ops, Step

Tensor = torch.Tensor
# the last sublayer's y [T, C], the streams [T, 4, C] that it has yet to be written into, and its post and comb
Last = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class LayerWeights:
    attn_hc: MhcSite
    attn_norm: Tensor
    attn: AttnWeights
    ffn_hc: MhcSite
    ffn_norm: Tensor
    moe: MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """`embed` [V, C] is whole on every rank; its dtype is the dtype of all activations."""

    config: ModelConfig
    embed: Tensor
    layers: list[LayerWeights]
    head: HeadWeights


@dataclass(frozen=True)
class DraftWeights:
    """The MTP block: it tells the token after next, from the streams behind a token and the embedding of the next one.

    e_proj, h_proj [C, C], their norms [C]; a window layer of its own; a head of its own but for the vocabulary's rows.
    """

    enorm: Tensor
    hnorm: Tensor
    e_proj: Weight
    h_proj: Weight
    layer: LayerWeights
    head: HeadWeights


def _alone(x: Tensor) -> Tensor:
    return x


def _own_rows(x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return x, tokens


@dataclass(frozen=True)
class Collectives:
    """What several ranks add to a step.

    all_reduce: the sum over tensor-parallel ranks of [T, C]; all_gather: their parts of [T, V / ranks] side by side.
    dispatch: where each rank attends its own sequences and holds some of the experts: x [T, C] and tokens [T] of this rank
        -> those of all ranks, this rank's first. combine: [all rows, C], the experts' sums -> this rank's rows of them.
    """

    all_reduce: Callable[[Tensor], Tensor] = _alone
    all_gather: Callable[[Tensor], Tensor] = _alone
    dispatch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _own_rows
    combine: Callable[[Tensor], Tensor] = _alone


ALONE = Collectives()


def forward(
    weights: ModelWeights,
    caches: Sequence[LayerCache],
    step: Step,
    ops: Ops,
    *,
    rows: Tensor | None = None,
    ranks: Collectives = ALONE,
) -> Tensor:
    """Run the step's T tokens through the model, update the caches, and give logits.

    Args:
        weights: of this rank.
        caches: one a layer, as `KVCache.layers`.
        step: the tokens and where they live, from `KVCache.step`.
        ops: the table to run on.
        rows: int64 [R], the tokens whose logits are wanted; None for all T.
        ranks: collectives over the tensor-parallel ranks.

    Returns:
        [R, vocab] float32 (float64 for float64 weights). A padded row's logits are finite and mean nothing.
    """
    streams = ops.embed(step.tokens, weights.embed, weights.config.hc_mult)
    last = run_layers(weights.layers, streams, caches, step, ops, weights.config, ranks=ranks)
    if rows is not None:
        last = tuple(None if t is None else t[rows] for t in last)
    return ranks.all_gather(ops.head(*last, weights.head, weights.config))


def run_layers(
    layers: Sequence[LayerWeights],
    streams: Tensor,
    caches: Sequence[LayerCache],
    step: Step,
    ops: Ops,
    config: ModelConfig,
    *,
    ranks: Collectives = ALONE,
) -> Last:
    """The layers of `config.compress_ratios`, one after another; what they return is what `ops.head` takes."""
    last = (None, streams, None, None)
    for i, layer in enumerate(layers):
        last = run_layer(layer, last, caches[i], step, ops, config, config.ratio(i), ranks=ranks)
    return last


def run_layer(
    layer: LayerWeights,
    last: Last,
    cache: LayerCache,
    step: Step,
    ops: Ops,
    config: ModelConfig,
    ratio: int,
    *,
    ranks: Collectives = ALONE,
) -> Last:
    """One layer, from what the one before it left; (None, streams, None, None) before the first."""
    y, streams, post, comb = last
    streams, x, post, comb = ops.mhc_boundary(y, streams, post, comb, layer.attn_hc, layer.attn_norm, config)
    y = ranks.all_reduce(attention(x, layer.attn, cache, step, ops, config, ratio))
    streams, x, post, comb = ops.mhc_boundary(y, streams, post, comb, layer.ffn_hc, layer.ffn_norm, config)
    own = len(x)
    x, tokens = ranks.dispatch(x, step.tokens)
    ids, expert_weights = ops.route(x, tokens, layer.moe, config)
    y = ranks.all_reduce(ranks.combine(ops.moe(x, ids, expert_weights, layer.moe, config, own)))
    return y, streams, post, comb


@lru_cache(maxsize=64)
def _frequencies(config: ModelConfig, ratio: int, device: torch.device) -> Tensor:
    """`frequencies` on a device, copied there once: a copy from the host cannot be part of a CUDA graph."""
    return frequencies(config, ratio).to(device)


def attention(
    x: Tensor, weights: AttnWeights, cache: LayerCache, step: Step, ops: Ops, config: ModelConfig, ratio: int
) -> Tensor:
    """One layer's attention over the window and, where the layer compresses, its entries. [T, C] -> [T, C]."""
    freqs = _frequencies(config, ratio, x.device)
    inputs = ops.attn_in(x, weights, config, ratio)
    q, index_q = ops.q_proj(inputs, weights, config)
    ready = ops.attn_prepare(q, index_q, inputs, weights, cache, step, freqs, config, ratio)
    entries = lens = None
    if ratio == 4:
        entries, lens = ops.index_topk(ready.index_q, ready.index_weights, cache.index_keys, step, config.index_topk)
    elif ratio:
        entries, lens = step.entry_indices, step.entry_lens[ratio]
    o = ops.sparse_attn(
        ready.q, ready.window, step.window_indices, step.window_lens, cache.compressed, entries, lens,
        sink=weights.sink, scale=config.head_dim**-0.5, positions=step.positions, freqs=freqs,
    )  # fmt: skip
    return ops.attn_out(o, weights)
