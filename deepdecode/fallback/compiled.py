"""Rung 3's torch ops by torch.compile: each run of them between two launches is a function that is compiled whole.

Products, attention and what a serving engine has a kernel for (rows written, compressors pooled) stay launches of their own.
To the compiler these are opaque wherever the graph is cut, so a graph of the whole step would fuse nothing more; and cut like
this, the layers of a model share some ten small graphs for each number of tokens, whatever their number. Rotations are in real
numbers, since Inductor leaves complex ones to torch. Sampling stays torch's: from 16 tokens on, Inductor of torch 2.11 puts the
vocabulary's argmax into the kernel of its cumsum, and ends in its own NotImplementedError.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from deepdecode.config import ModelConfig
from deepdecode.fallback.glue import hadamard_matrix
from deepdecode.fallback.product import linear
from deepdecode.fallback.store import pool, store_rows
from deepdecode.ops import reference
from deepdecode.ops.attention import sparse_attn_decode
from deepdecode.ops.gate import SUM_FLOOR
from deepdecode.ops.quant import Weight
from deepdecode.ops.table import AttnInputs, AttnReady, AttnWeights, LayerCache, MoeWeights, Step

Tensor = torch.Tensor
# Graphs of one function: the kinds of layers times the numbers of tokens of a process. Past the limit it would run eagerly,
# which the compiler says in a log alone.
GRAPHS = 64


# --- what is compiled ---


def _turned(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """float32 x [T, ..., D], the pairs of its last channels turned by position times frequency."""
    R = 2 * freqs.shape[0]
    angles = (positions.float()[:, None] * freqs).view(len(x), *[1] * (x.dim() - 2), R // 2)
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., -R:].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-R], turned), dim=-1)


def _embed(tokens: Tensor, weight: Tensor, hc_mult: int) -> Tensor:
    return F.embedding(tokens, weight).unsqueeze(1).repeat(1, hc_mult, 1)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _query_and_row(q: Tensor, kv: Tensor, norm: Tensor, positions: Tensor, freqs: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    q_out = _turned(F.rms_norm(q, q.shape[-1:], eps=eps).float(), positions, freqs)
    row = _turned(F.rms_norm(kv, norm.shape, norm, eps).float(), positions, freqs)
    return q_out.to(q.dtype), row.to(kv.dtype)


def _entry(pooled: Tensor, norm: Tensor, positions: Tensor, freqs: Tensor, eps: float, ratio: int) -> Tensor:
    rows = F.rms_norm(pooled.to(norm.dtype), norm.shape, norm, eps)
    return _turned(rows.float(), positions + (1 - ratio), freqs).to(norm.dtype)


def _index_entry(
    pooled: Tensor, norm: Tensor, positions: Tensor, freqs: Tensor, matrix: Tensor, eps: float, ratio: int
) -> Tensor:
    return (_entry(pooled, norm, positions, freqs, eps, ratio).float() @ matrix).to(norm.dtype)


def _index_query(
    q: Tensor, weights: Tensor, positions: Tensor, freqs: Tensor, matrix: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    turned = (_turned(q.float(), positions, freqs).to(q.dtype).float() @ matrix).to(q.dtype).float()
    largest = turned.abs().amax(-1).clamp(min=reference.FP8_FLOOR) / reference.FP8_MAX
    return (turned / largest.unsqueeze(-1)).to(torch.float8_e4m3fn), weights * scale * largest


def _turned_back(o: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    return _turned(o.float(), positions, -freqs).to(o.dtype)


def _by_token(logits: Tensor, tokens: Tensor, table: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = F.softplus(logits).sqrt()
    ids = table[tokens]
    chosen = scores.gather(1, ids.long())
    return ids, chosen / (chosen.sum(-1, keepdim=True) + SUM_FLOOR) * scale


def _by_score(logits: Tensor, bias: Tensor | None, k: int, scale: float) -> tuple[Tensor, Tensor]:
    scores = F.softplus(logits).sqrt()
    ids = (scores if bias is None else scores + bias).topk(k, dim=-1).indices
    chosen = scores.gather(1, ids)
    return ids.int(), chosen / (chosen.sum(-1, keepdim=True) + SUM_FLOOR) * scale


# --- the entries around it ---


def entries(backend: str = "inductor") -> dict[str, Callable[..., Any]]:
    """Entries of the table by name, each compiled at its first call with tensors of these shapes."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        @cache
        def made() -> Callable[..., Any]:
            # whole: a break in a graph is an error, not a slower graph
            return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)

        def run(*args: Any) -> Any:
            import torch._dynamo

            with torch._dynamo.config.patch(recompile_limit=GRAPHS):
                return made()(*args)

        return run

    normed, query_and_row, entry, index_entry = map(compiled, (_normed, _query_and_row, _entry, _index_entry))
    index_query, turned_back, by_token, by_score = map(compiled, (_index_query, _turned_back, _by_token, _by_score))

    def q_proj(inputs: AttnInputs, weights: AttnWeights, config: ModelConfig) -> tuple[Tensor, Tensor | None]:
        out = linear(normed(inputs.q_latent, weights.q_norm, config.norm_eps), weights.q_b)
        T, width = len(out), weights.sink.shape[0] * config.head_dim
        q, rest = out[:, :width].reshape(T, -1, config.head_dim), out[:, width:]
        return q, rest.reshape(T, config.index_heads, config.index_head_dim) if rest.shape[1] else None

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
        if step.prefill:
            return reference.attn_prepare(q, index_q, inputs, weights, cache, step, freqs, config, ratio)
        eps, at = config.norm_eps, step.positions
        q, row = query_and_row(q, inputs.kv, weights.kv_norm, at, freqs, eps)
        store_rows(cache.window, step.window_write, row)
        if weights.compressor is None:
            return AttnReady(q, None, None, cache.window)
        assert inputs.comp_kv is not None and inputs.comp_gate is not None
        assert cache.compressed is not None and cache.state is not None
        pooled = pool(inputs.comp_kv, inputs.comp_gate, weights.compressor.ape, cache.state, step)
        store_rows(cache.compressed, step.entry_write[ratio], entry(pooled, weights.compressor.norm, at, freqs, eps, ratio))
        if weights.index_compressor is None:
            return AttnReady(q, None, None, cache.window)
        assert index_q is not None and inputs.index_kv is not None and inputs.index_gate is not None
        assert inputs.index_weights is not None and cache.index_keys is not None and cache.index_state is not None
        matrix = hadamard_matrix(config.index_head_dim, q.device)
        pooled = pool(inputs.index_kv, inputs.index_gate, weights.index_compressor.ape, cache.index_state, step)
        keys = index_entry(pooled, weights.index_compressor.norm, at, freqs, matrix, eps, ratio)
        store_rows(cache.index_keys, step.entry_write[ratio], keys)
        scale = config.index_head_dim**-0.5 * config.index_heads**-0.5
        codes, index_weights = index_query(index_q, inputs.index_weights, at, freqs, matrix, scale)
        return AttnReady(q, codes, index_weights, cache.window)

    def sparse_attn(q: Tensor, *caches: Any, sink: Tensor, scale: float, positions: Tensor, freqs: Tensor) -> Tensor:
        return turned_back(sparse_attn_decode(q, *caches, sink=sink, scale=scale), positions, freqs)

    def route(x: Tensor, tokens: Tensor, weights: MoeWeights, config: ModelConfig) -> tuple[Tensor, Tensor]:
        logits = linear(x, Weight(weights.gate), out_dtype=torch.float32)
        if weights.tid2eid is not None:
            return by_token(logits, tokens, weights.tid2eid, config.routed_scale)
        return by_score(logits, weights.bias, config.experts_per_token, config.routed_scale)

    return {
        "embed": compiled(_embed),
        "q_proj": q_proj,
        "attn_prepare": attn_prepare,
        "sparse_attn": sparse_attn,
        "route": route,
    }
