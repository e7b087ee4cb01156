"""The coarse table of ops that the model runs on, and the weights each entry takes.

A rung of the ladder, the product, a test with one op exchanged: each is an `Ops` value. The entries are coarse so that
a fused kernel fits inside one; the references are composed of the fine ones (`rms_norm`, `rope`, ...).
Letters: T query tokens, H heads of this rank, D head dim, C hidden, K selected entries, E experts of this rank, I expert width.
Activations have the dtype of the embedding weight: bfloat16 in the product, float32 or float64 in tests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepdecode.ops.quant import Weight
from deepdecode.ops.rows import PagedRows

Tensor = torch.Tensor


@dataclass(frozen=True)
class MhcSite:
    """One hyper-connection read: fn f32 [24, 4C], base f32 [24], scale f32 [3] (hc_head: [4, 4C], [4], [1])."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """ape f32 [ratio, coff * d], norm [d]; its two projections are in `AttnWeights.rest`. coff is 2 for ratio 4, else 1."""

    ape: Tensor
    norm: Tensor


@dataclass(frozen=True)
class AttnWeights:
    """One layer's attention. Rows of a fused weight stand in the order named.

    q_kv: wq_a [q_lora, C], wkv [D, C]
    rest: compressor wkv, wgate [coff * D, C]; indexer compressor wkv, wgate [2 * 128, C]; weights_proj [index heads, C].
        None where the layer's ratio is 0; without the indexer's parts where it is 128.
    q_b: wq_b [H * D, q_lora], on ratio-4 layers then the indexer's wq_b [index heads * 128, q_lora]
    wo_a: [groups * o_lora, heads per group * D], block-diagonal: one [o_lora, heads per group * D] block a group
    wo_b: [C, groups * o_lora]
    """

    q_kv: Weight
    rest: Weight | None
    q_norm: Tensor
    kv_norm: Tensor
    q_b: Weight
    sink: Tensor
    wo_a: Weight
    wo_b: Weight
    compressor: CompressorWeights | None
    index_compressor: CompressorWeights | None


@dataclass(frozen=True)
class MoeWeights:
    """gate [all experts, C]; bias f32 [all experts] or tid2eid int32 [vocab, top-k], the other None.

    w13: stacked [E, 2I, C], w1 above w3; w2: stacked [E, C, I]; shared13 [2 * Is, C], shared2 [C, Is]: the shared expert.
    The E experts of this rank are first_expert..first_expert + E - 1; ids outside are another rank's and add nothing.
    """

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    w13: Weight
    w2: Weight
    shared13: Weight
    shared2: Weight
    first_expert: int = 0


@dataclass(frozen=True)
class HeadWeights:
    """hc: fn f32 [4, 4C], base [4], scale [1]; norm [C]; head [V, C] (this rank's rows of the vocabulary)."""

    hc: MhcSite
    norm: Tensor
    head: Weight


@dataclass(frozen=True)
class CompressorState:
    """Ring of the last rows that a compressor has not pooled for good: kv and score (ape added), float32.

    kv, score: [slots, ring, coff * d]; ring is 8 for ratio 4 and 128 for ratio 128; position t stands in row t % ring.
    Rows of positions before the sequence's first are never read, so a slot needs no clearing when it is reused.
    """

    kv: Tensor
    score: Tensor
    ratio: int


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the KV cache; what the layer's ratio does not need is None."""

    window: PagedRows
    compressed: PagedRows | None
    index_keys: PagedRows | None
    state: CompressorState | None
    index_state: CompressorState | None


@dataclass(frozen=True)
class Step:
    """One forward over T tokens, and where they live in the caches. Made once by `KVCache.step`, read by every layer.

    A decode step has one token of each of T sequences; a prefill step has T consecutive tokens of one sequence.
    A padded row has slot -1: nothing of it is read or written, and its lengths are 0.

    tokens: int64 [T], in the vocabulary even where padded; positions: int32 [T]
    slots: int32 [T], the sequence's slot in states and tables
    prefill: True: consecutive tokens of one sequence
    window_write: int32 [T], physical row of the token in the window cache (-1: not stored)
    window_indices, window_lens: int32 [T, window], [T]: rows of the window cache, oldest first, the token itself included.
        In a prefill step they index the rows of `window_history` followed by the T new rows.
    window_history: int32 [P], physical rows of the P tokens before a prefill step's first, oldest first; None when decoding
    block_tables: int32 [slots, pages]: page of the compressed caches for each 256 tokens, one table for all layers
    entry_write: for each ratio, int32 [T], physical row of the entry a token completes, -1 where it completes none
    entry_lens: for each ratio, int32 [T], the entries visible to the token: (position + 1) // ratio
    entry_indices: int32 [T, K], all visible ratio-128 entries (physical rows, -1 padded)
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    prefill: bool
    window_write: Tensor
    window_indices: Tensor
    window_lens: Tensor
    window_history: Tensor | None
    block_tables: Tensor
    entry_write: dict[int, Tensor]
    entry_lens: dict[int, Tensor]
    entry_indices: Tensor


@dataclass(frozen=True)
class AttnInputs:
    """What attn_in gives: the products of one x.

    q_latent [T, q_lora], kv [T, D] in the activation dtype; the rest float32 (float64 for float64 inputs), None where absent:
    comp_kv, comp_gate [T, coff * D]; index_kv, index_gate [T, 2 * 128]; index_weights [T, index heads] unscaled.
    q_scaled: None, or q_latent times its norm's weight: q_proj then takes that for the normed rows, and attn_prepare makes up
        for what is left of the norm, one factor a token.
    """

    q_latent: Tensor
    kv: Tensor
    comp_kv: Tensor | None
    comp_gate: Tensor | None
    index_kv: Tensor | None
    index_gate: Tensor | None
    index_weights: Tensor | None
    q_scaled: Tensor | None = None


@dataclass(frozen=True)
class AttnReady:
    """What attn_prepare gives: q normed and rotated, the indexer's query ready to score, and the window rows to attend.

    q: [T, H, D]; index_q: [T, index heads, 128], float8_e4m3fn for FP8 key caches, else the activation dtype; None off ratio 4.
    index_weights: float32 [T, index heads] with 128**-0.5 * heads**-0.5 and the query's FP8 scale folded in.
    window: the cache that `Step.window_indices` points into: the layer's own when decoding, a workspace in prefill.
    """

    q: Tensor
    index_q: Tensor | None
    index_weights: Tensor | None
    window: PagedRows


@dataclass(frozen=True)
class Ops:
    """The coarse table. Signatures stand beside the references in `deepdecode/ops/reference.py`."""

    embed: Callable[..., Tensor]
    mhc_boundary: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    attn_in: Callable[..., AttnInputs]
    q_proj: Callable[..., tuple[Tensor, Tensor | None]]
    attn_prepare: Callable[..., AttnReady]
    index_topk: Callable[..., tuple[Tensor, Tensor]]
    sparse_attn: Callable[..., Tensor]
    attn_out: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    moe: Callable[..., Tensor]
    head: Callable[..., Tensor]
    sample: Callable[..., Tensor]
