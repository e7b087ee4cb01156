"""Glue that is fused as far as a serving engine's own step is where its kernels run: a launch for each thing with a name.

SGLang 0.5.23 has some 45 launches in a layer of a decode step on sm_120, of which about 15 are there for its number formats and
its ranks: activations quantised before each product, pages split, collectives. Without those, entry by entry:

    attn_in       a product each for q and kv, the compressor, the indexer's compressor, the indexer's weights
    q_proj        norm; a product each for q and the indexer's query
    attn_prepare  norm and rotation of q and kv with the window's row (there two launches); for each compressor, one that
                  pools and one that norms, rotates and stores; one for the indexer's query
    the rest      hyper-connections in two launches, logits and top-k, attention and its merge, the rotation back, two products,
                  the gate, its top-k: as rung 4; experts in three launches, where the engine has about ten
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from deepdecode.config import ModelConfig
from deepdecode.fallback.product import linear
from deepdecode.fallback.store import pool
from deepdecode.kernels.rotate import (
    e4m3,
    hadamard,
    magnitude,
    normed,
    quotient,
    rotate,
    row_scale,
    turn,
    write_132,
    write_584,
)
from deepdecode.ops import fused, launches, reference
from deepdecode.ops.attention import sparse_attn_decode
from deepdecode.ops.quant import Weight
from deepdecode.ops.rows import PagedRows
from deepdecode.ops.table import AttnInputs, AttnReady, AttnWeights, LayerCache, Step

Tensor = torch.Tensor


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def compressor_entry_kernel(
    pooled_ptr, norm_ptr, positions_ptr, write_ptr, freqs_ptr, like, cache_ptr, rows, page_size, stride, eps,
    RATIO: tl.constexpr, D: tl.constexpr, R: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store a pooled entry; of 128 channels the Hadamard transform too, for the indexer's keys."""
    t = tl.program_id(0).to(tl.int64)
    entry = tl.load(write_ptr + t)
    if (entry < 0) | (entry >= rows):
        return
    d = tl.arange(0, D)[None, :]
    x = _rounded(tl.load(pooled_ptr + t * D + d), like)
    x = _rounded(normed(x, eps, D) * tl.load(norm_ptr + d).to(tl.float32), like)
    cos, sin, turns = turn(tl.load(positions_ptr + t) + 1 - RATIO, freqs_ptr, D, R, INTERPRET)
    x = _rounded(rotate(x, cos, sin, turns, 1, D), like)
    if D == 128:
        # 16 times the same row: what a tensor core takes
        x = hadamard(tl.broadcast_to(x, [16, D]).to(like.dtype.element_ty), D)
        x = _rounded(tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, x, 0.0), 0)[None, :], like)
        write_132(x, cache_ptr, entry, rows, page_size, stride, INTERPRET)
    else:
        write_584(x, cache_ptr, entry, rows, page_size, stride)


@triton.jit
def index_query_kernel(
    q_ptr, weights_ptr, positions_ptr, freqs_ptr, codes_ptr, out_ptr, stride_qt, stride_wt, scale,
    HEADS: tl.constexpr, R: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """16 heads of a token's index query: rotation, Hadamard, FP8, the scale folded into the heads' weights."""
    t = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * 16 + tl.arange(0, 16)
    known = head < HEADS
    at = head[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(q_ptr + t * stride_qt + at, mask=known[:, None], other=0.0).to(tl.float32)
    cos, sin, turns = turn(tl.load(positions_ptr + t), freqs_ptr, 128, R, INTERPRET)
    x = rotate(x, cos, sin, turns, 16, 128)
    x = _rounded(hadamard(x.to(q_ptr.dtype.element_ty), 128), q_ptr)
    row = row_scale(tl.max(magnitude(x), 1), INTERPRET)  # [16]
    codes = e4m3(quotient(x, row[:, None], INTERPRET))
    tl.store(codes_ptr + t * (HEADS * 128) + at, codes.to(tl.uint8), mask=known[:, None])
    weight = tl.load(weights_ptr + t * stride_wt + head, mask=known, other=0.0)
    tl.store(out_ptr + t * HEADS + head, weight * scale * row, mask=known)


def write_entry(
    pooled: Tensor, norm: Tensor, cache: PagedRows, at: Tensor, positions: Tensor, freqs: Tensor, ratio: int, eps: float,
    like: Tensor,
) -> None:  # fmt: skip
    T, d = pooled.shape
    compressor_entry_kernel[T,](
        pooled, norm, positions, at, freqs, like, cache.data, cache.num_rows, cache.page_size, cache.data.stride(0), eps,
        RATIO=ratio, D=d, R=2 * len(freqs), INTERPRET=not pooled.is_cuda, num_warps=4,
    )  # fmt: skip


def index_query(q: Tensor, weights: Tensor, positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [T, heads, 128] and the heads' weights float32 [T, heads]."""
    T, heads, width = q.shape
    codes = torch.empty(T, heads, width, dtype=torch.uint8, device=q.device)
    out = torch.empty(T, heads, dtype=torch.float32, device=q.device)
    index_query_kernel[triton.cdiv(heads, 16), T](
        q, weights, positions, freqs, codes, out, q.stride(0), weights.stride(0), width**-0.5 * heads**-0.5,
        HEADS=heads, R=2 * len(freqs), INTERPRET=not q.is_cuda, num_warps=4,
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), out


def _rows(weight: Weight, start: int, end: int) -> Weight:
    """Some rows of a weight, as they lie; of FP8 in whole blocks of 128."""
    scale = None if weight.scale is None else weight.scale[start // 128 : -(-end // 128)]
    return Weight(weight.data[start:end], scale)


def attn_in(x: Tensor, weights: AttnWeights, config: ModelConfig, ratio: int) -> AttnInputs:
    """As the reference of this name. Parts of one product are views."""
    q_latent, kv = linear(x, weights.q_kv).split([config.q_lora_rank, config.head_dim], dim=-1)
    if weights.rest is None:
        return AttnInputs(q_latent, kv, None, None, None, None, None)
    wide = 2 * config.head_dim * (2 if ratio == 4 else 1)
    comp_kv, comp_gate = linear(x, _rows(weights.rest, 0, wide), torch.float32).chunk(2, dim=-1)
    if ratio != 4:
        return AttnInputs(q_latent, kv, comp_kv, comp_gate, None, None, None)
    index = wide + 4 * config.index_head_dim
    index_kv, index_gate = linear(x, _rows(weights.rest, wide, index), torch.float32).chunk(2, dim=-1)
    index_weights = linear(x, _rows(weights.rest, index, index + config.index_heads), torch.float32)
    return AttnInputs(q_latent, kv, comp_kv, comp_gate, index_kv, index_gate, index_weights)


def q_proj(inputs: AttnInputs, weights: AttnWeights, config: ModelConfig) -> tuple[Tensor, Tensor | None]:
    """As the reference of this name."""
    if not inputs.q_latent.is_cuda:
        return reference.q_proj(inputs, weights, config)
    normed = launches.rms_norm(inputs.q_latent, weights.q_norm, config.norm_eps)
    width, rows = weights.sink.shape[0] * config.head_dim, weights.q_b.shape[0]
    q = linear(normed, _rows(weights.q_b, 0, width)).unflatten(1, (-1, config.head_dim))
    if rows == width:
        return q, None
    return q, linear(normed, _rows(weights.q_b, width, rows)).unflatten(1, (config.index_heads, -1))


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
    """As the reference of this name, whose table it takes off the GPU and for a prefill step."""
    if not q.is_cuda or step.prefill:
        inputs = AttnInputs(**{name: None if part is None else part.contiguous() for name, part in vars(inputs).items()})
        return reference.attn_prepare(q, index_q, inputs, weights, cache, step, freqs, config, ratio)
    alone = LayerCache(cache.window, None, None, None, None)
    bare = replace(weights, compressor=None, index_compressor=None)
    own = AttnInputs(inputs.q_latent, inputs.kv, None, None, None, None, None)
    ready = fused.attn_prepare(q, None, own, bare, alone, step, freqs, config, 0)
    sides = (
        (inputs.comp_kv, inputs.comp_gate, weights.compressor, cache.state, cache.compressed),
        (inputs.index_kv, inputs.index_gate, weights.index_compressor, cache.index_state, cache.index_keys),
    )
    for kv, gate, side, state, rows in sides:
        if side is not None:
            assert kv is not None and gate is not None and state is not None and rows is not None
            pooled = pool(kv, gate, side.ape, state, step)
            write_entry(pooled, side.norm, rows, step.entry_write[ratio], step.positions, freqs, ratio, config.norm_eps, q)
    if index_q is None:
        return ready
    assert inputs.index_weights is not None
    codes, index_weights = index_query(index_q, inputs.index_weights, step.positions, freqs)
    return replace(ready, index_q=codes, index_weights=index_weights)


def sparse_attn(q: Tensor, *caches: Any, sink: Tensor, scale: float, positions: Tensor, freqs: Tensor) -> Tensor:
    """As the reference of this name; the rotation back is a launch of its own."""
    if not q.is_cuda:
        return reference.sparse_attn(q, *caches, sink=sink, scale=scale, positions=positions, freqs=freqs)
    return launches.rope_back(sparse_attn_decode(q, *caches, sink=sink, scale=scale), positions, freqs)
