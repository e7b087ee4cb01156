"""The coarse table on references: each entry composed of the fine ops, in the model's order.

This is what runs off the GPU, and what every fused kernel is compared with.
"""

from typing import Any

import torch

from deepdecode.config import ModelConfig
from deepdecode.ops._check import wide, wide_type
from deepdecode.ops.attention import sparse_attn_decode
from deepdecode.ops.compressor import compress
from deepdecode.ops.gate import gate
from deepdecode.ops.indexer import index_topk as fine_index_topk
from deepdecode.ops.linear import grouped_linear, linear
from deepdecode.ops.mhc import mhc_head, mhc_post, mhc_pre
from deepdecode.ops.moe import moe as fine_moe
from deepdecode.ops.norm import head_norm, rms_norm
from deepdecode.ops.quant import hadamard
from deepdecode.ops.rope import rope
from deepdecode.ops.rows import PagedRows, allocate, read_rows, write_rows
from deepdecode.ops.sample import sample
from deepdecode.ops.table import (
    AttnInputs,
    AttnReady,
    AttnWeights,
    CompressorState,
    CompressorWeights,
    HeadWeights,
    LayerCache,
    MhcSite,
    MoeWeights,
    Ops,
    Step,
)

Tensor = torch.Tensor
FP8_MAX = 448.0
# an all-zero query still needs a scale; the serving stacks' floor on the row's largest magnitude
FP8_FLOOR = 1e-4


def embed(tokens: Tensor, weight: Tensor, hc_mult: int) -> Tensor:
    """[T] int64, [V, C] -> [T, hc_mult, C]: every stream starts as the token's embedding."""
    return weight[tokens].unsqueeze(1).expand(-1, hc_mult, -1).contiguous()


def mhc_boundary(
    y: Tensor | None,
    streams: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    site: MhcSite,
    norm: Tensor,
    config: ModelConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write the last sublayer's y [T, C] into the streams, read the next sublayer's input from them, and norm it.

    y, post and comb are None before the first sublayer. Returns streams [T, 4, C], x [T, C], post [T, 4], comb [T, 4, 4].
    """
    if y is not None:
        assert post is not None and comb is not None
        streams = mhc_post(y, streams, post, comb)
    x, post, comb = mhc_pre(
        streams, site.fn, site.base, site.scale, norm_eps=config.norm_eps, hc_eps=config.hc_eps, iters=config.hc_iters
    )
    return streams, rms_norm(x, norm, config.norm_eps), post, comb


def attn_in(x: Tensor, weights: AttnWeights, config: ModelConfig, ratio: int) -> AttnInputs:
    """Every product of x [T, C]: one FP8 weight and one 16-bit weight, whose products stay in float32."""
    q_latent, kv = linear(x, weights.q_kv).split([config.q_lora_rank, config.head_dim], dim=-1)
    if weights.rest is None:
        return AttnInputs(q_latent.contiguous(), kv.contiguous(), None, None, None, None, None)
    d = config.head_dim * (2 if ratio == 4 else 1)
    parts = [d, d]
    if ratio == 4:
        parts += [2 * config.index_head_dim] * 2 + [config.index_heads]
    rest = linear(x, weights.rest, out_dtype=wide_type(x.dtype)).split(parts, dim=-1)
    return AttnInputs(q_latent.contiguous(), kv.contiguous(), *(r.contiguous() for r in rest), *[None] * (5 - len(parts)))


def q_proj(inputs: AttnInputs, weights: AttnWeights, config: ModelConfig) -> tuple[Tensor, Tensor | None]:
    """The latent [T, q_lora] -> q [T, H, D] and the indexer query [T, index heads, 128] or None; neither normed nor rotated.

    Of inputs with q_scaled both are short of the latent's inverse root mean square, see `latent_unit`.
    """
    latent = inputs.q_scaled
    if latent is None:
        latent = rms_norm(inputs.q_latent, weights.q_norm, config.norm_eps)
    out = linear(latent, weights.q_b)
    T, heads = len(out), weights.sink.shape[0]
    q, index_q = out.split([heads * config.head_dim, out.shape[1] - heads * config.head_dim], dim=-1)
    q = q.reshape(T, heads, config.head_dim)
    return q, index_q.reshape(T, config.index_heads, config.index_head_dim) if index_q.shape[1] else None


def latent_unit(inputs: AttnInputs, eps: float) -> Tensor | None:
    """[T, 1, 1], what q and index_q are short of after a q_proj of q_scaled; None where they are not."""
    if inputs.q_scaled is None:
        return None
    return torch.rsqrt(wide(inputs.q_latent).square().mean(-1) + eps)[:, None, None]


def attn_prepare(
    q: Tensor,
    index_q: Tensor | None,
    inputs: AttnInputs,
    weights: AttnWeights,
    cache: LayerCache,
    step: Step,
    freqs: Tensor,
    config: ModelConfig,
    ratio: int,
) -> AttnReady:
    """Norm and rotate q and kv, store the window row, feed the compressors and store the entries that this step finishes."""
    unit = latent_unit(inputs, config.norm_eps)
    if unit is not None:
        q = (q * unit).to(q.dtype)
        index_q = None if index_q is None else (index_q * unit).to(q.dtype)
    q = rope(head_norm(q, config.norm_eps), step.positions, freqs)
    kv = rope(rms_norm(inputs.kv, weights.kv_norm, config.norm_eps), step.positions, freqs)
    # before the ring is overwritten: a prefill step still needs the rows before its first token
    window = cache.window if step.window_history is None else _prefill_window(cache.window, step.window_history, kv)
    write_rows(cache.window, step.window_write, kv)
    if weights.compressor is None:
        return AttnReady(q, None, None, window)
    assert inputs.comp_kv is not None and inputs.comp_gate is not None
    assert cache.compressed is not None and cache.state is not None
    entries = _entries(inputs.comp_kv, inputs.comp_gate, weights.compressor, cache.state, step, freqs, config, q.dtype)
    write_rows(cache.compressed, step.entry_write[ratio], entries)
    if weights.index_compressor is None:
        return AttnReady(q, None, None, window)
    assert index_q is not None and inputs.index_kv is not None and inputs.index_gate is not None
    assert inputs.index_weights is not None and cache.index_keys is not None and cache.index_state is not None
    keys = _entries(
        inputs.index_kv, inputs.index_gate, weights.index_compressor, cache.index_state, step, freqs, config, q.dtype
    )
    write_rows(cache.index_keys, step.entry_write[ratio], hadamard(keys))
    index_q = hadamard(rope(index_q, step.positions, freqs))
    index_weights = inputs.index_weights * (config.index_head_dim**-0.5 * config.index_heads**-0.5)
    if cache.index_keys.fmt == "fp8_132":
        scale = index_q.float().abs().amax(-1).clamp(min=FP8_FLOOR) / FP8_MAX
        index_q = (index_q.float() / scale[..., None]).to(torch.float8_e4m3fn)
        index_weights = index_weights * scale
    return AttnReady(q, index_q, index_weights, window)


def _entries(
    kv: Tensor,
    score: Tensor,
    weights: CompressorWeights,
    state: CompressorState,
    step: Step,
    freqs: Tensor,
    config: ModelConfig,
    dtype: torch.dtype,
) -> Tensor:
    """[T, d]: the entry each token completes, rotated at its block's first position. Other rows mean nothing."""
    entries = compress(kv, score, weights, state, step, norm_eps=config.norm_eps, dtype=dtype)
    return rope(entries, step.positions + 1 - state.ratio, freqs)


def _prefill_window(ring: PagedRows, history: Tensor, kv: Tensor) -> PagedRows:
    """A cache of the ring's `history` rows and then the step's own, in the ring's format."""
    P, T = len(history), len(kv)
    rows = allocate(-(-(P + T) // ring.page_size), ring.page_size, ring.fmt, width=kv.shape[1], device=kv.device)
    place = torch.arange(P + T, dtype=torch.int32, device=kv.device)
    # exact: a row read back and quantised again gives the same values
    write_rows(rows, place[:P], read_rows(ring, history).to(kv.dtype))
    write_rows(rows, place[P:], kv)
    return rows


def index_topk(index_q: Tensor, index_weights: Tensor, keys: PagedRows, step: Step, topk: int) -> tuple[Tensor, Tensor]:
    """The topk best visible entries of each token: physical rows int32 [T, topk] (-1 padded), and how many, int32 [T]."""
    return fine_index_topk(index_q, index_weights, keys, step.block_tables, step.slots, step.entry_lens[4], topk)


def sparse_attn(q: Tensor, *caches: Any, sink: Tensor, scale: float, positions: Tensor, freqs: Tensor) -> Tensor:
    """[T, H, D]: attention over the rows named in both caches, as `sparse_attn_decode` takes them, rotated back."""
    out = sparse_attn_decode(q, *caches, sink=sink, scale=scale)
    assert isinstance(out, Tensor)
    return rope(out, positions, freqs, inverse=True)


def attn_out(o: Tensor, weights: AttnWeights) -> Tensor:
    """[T, H, D] -> [T, C]: project each group of heads by itself, then together."""
    T, H, D = o.shape
    per_group = weights.wo_a.shape[-1]
    o = o.reshape(T, H * D // per_group, per_group)
    return linear(grouped_linear(o, weights.wo_a).reshape(T, -1), weights.wo_b)


def route(x: Tensor, tokens: Tensor, weights: MoeWeights, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Expert ids int32 [T, top-k] and weights float32 [T, top-k]; by token id on hash layers, else by score."""
    return gate(x, weights.gate, weights.bias, weights.tid2eid, tokens, config.experts_per_token, config.routed_scale)


def moe(
    x: Tensor, ids: Tensor, expert_weights: Tensor, weights: MoeWeights, config: ModelConfig, shared_rows: int | None = None
) -> Tensor:
    """[T, C] -> [T, C]: this rank's routed experts and its part of the shared one, summed.

    shared_rows: the first so many rows have the shared expert's part; those behind are other ranks', which add it themselves.
    """
    return fine_moe(x, ids, expert_weights, weights, config.swiglu_limit, shared_rows)


def head(
    y: Tensor | None, streams: Tensor, post: Tensor | None, comb: Tensor | None, weights: HeadWeights, config: ModelConfig
) -> Tensor:
    """Write the last sublayer's y into the streams, read them once more, norm, and score this rank's vocabulary."""
    if y is not None:
        assert post is not None and comb is not None
        streams = mhc_post(y, streams, post, comb)
    hc = weights.hc
    x = mhc_head(streams, hc.fn, hc.base, hc.scale, norm_eps=config.norm_eps, hc_eps=config.hc_eps)
    return linear(rms_norm(x, weights.norm, config.norm_eps), weights.head, out_dtype=wide_type(x.dtype))


REFERENCE = Ops(
    embed=embed,
    mhc_boundary=mhc_boundary,
    attn_in=attn_in,
    q_proj=q_proj,
    attn_prepare=attn_prepare,
    index_topk=index_topk,
    sparse_attn=sparse_attn,
    attn_out=attn_out,
    route=route,
    moe=moe,
    head=head,
    sample=sample,
)
