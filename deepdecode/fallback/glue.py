"""Rung 0 of everything that is neither a product nor attention: one torch op after the other, inside the graph.

Decode steps only are timed; a prefill step, whose window is a workspace, takes the reference where the two differ.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F

from deepdecode.config import ModelConfig
from deepdecode.fallback import product
from deepdecode.fallback.product import linear
from deepdecode.fallback.store import pool, store_rows
from deepdecode.ops import reference
from deepdecode.ops.compressor import compress
from deepdecode.ops.gate import SUM_FLOOR
from deepdecode.ops.quant import Weight, hadamard
from deepdecode.ops.sample import uniform_ref
from deepdecode.ops.table import (
    AttnInputs,
    AttnReady,
    AttnWeights,
    CompressorState,
    CompressorWeights,
    LayerCache,
    MoeWeights,
    Step,
)

Tensor = torch.Tensor


def embed(tokens: Tensor, weight: Tensor, hc_mult: int) -> Tensor:
    return F.embedding(tokens, weight).unsqueeze(1).repeat(1, hc_mult, 1)


def attn_in(x: Tensor, weights: AttnWeights, config: ModelConfig, ratio: int) -> AttnInputs:
    """Every result contiguous, as launches of one thing each want them."""
    parts = vars(product.attn_in(x, weights, config, ratio))
    return AttnInputs(**{name: None if part is None else part.contiguous() for name, part in parts.items()})


def q_proj(inputs: AttnInputs, weights: AttnWeights, config: ModelConfig) -> tuple[Tensor, Tensor | None]:
    out = linear(F.rms_norm(inputs.q_latent, weights.q_norm.shape, weights.q_norm, config.norm_eps), weights.q_b)
    T, width = len(out), weights.sink.shape[0] * config.head_dim
    q = out[:, :width].reshape(T, -1, config.head_dim)
    rest = out[:, width:]
    return q, rest.reshape(T, config.index_heads, config.index_head_dim) if rest.shape[1] else None


@lru_cache(maxsize=64)
def _imaginary(freqs: Tensor, inverse: bool) -> Tensor:
    """Engines read rotations from tables; the part of the work that a position does not change is done once here too."""
    return torch.complex(torch.zeros_like(freqs), -freqs if inverse else freqs)


def turns(positions: Tensor, freqs: Tensor, *, inverse: bool = False) -> Tensor:
    """complex64 [T, R / 2]: what a rotation multiplies pairs by."""
    return (positions[:, None] * _imaginary(freqs, inverse)).exp()


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """The last channels of x [T, ..., D] turned, in float32, rounded once."""
    R = 2 * turns.shape[1]
    pairs = torch.view_as_complex(x[..., -R:].float().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * turns.view(len(x), *[1] * (x.dim() - 2), -1)).flatten(-2)
    return torch.cat((x[..., :-R], turned.to(x.dtype)), dim=-1)


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
    eps = config.norm_eps
    now = turns(step.positions, freqs)
    q = rotate(F.rms_norm(q, q.shape[-1:], eps=eps), now)
    kv = rotate(F.rms_norm(inputs.kv, weights.kv_norm.shape, weights.kv_norm, eps), now)
    store_rows(cache.window, step.window_write, kv)
    if weights.compressor is None:
        return AttnReady(q, None, None, cache.window)
    assert inputs.comp_kv is not None and inputs.comp_gate is not None
    assert cache.compressed is not None and cache.state is not None
    first = turns(step.positions + (1 - ratio), freqs)
    entries = _entries(inputs.comp_kv, inputs.comp_gate, weights.compressor, cache.state, step, eps, q.dtype)
    store_rows(cache.compressed, step.entry_write[ratio], rotate(entries, first))
    if weights.index_compressor is None:
        return AttnReady(q, None, None, cache.window)
    assert index_q is not None and inputs.index_kv is not None and inputs.index_gate is not None
    assert inputs.index_weights is not None and cache.index_keys is not None and cache.index_state is not None
    keys = _entries(inputs.index_kv, inputs.index_gate, weights.index_compressor, cache.index_state, step, eps, q.dtype)
    store_rows(cache.index_keys, step.entry_write[ratio], _hadamard(rotate(keys, first)))
    index_q = _hadamard(rotate(index_q, now)).float()
    scale = index_q.abs().amax(-1).clamp(min=reference.FP8_FLOOR) / reference.FP8_MAX
    index_weights = inputs.index_weights * (config.index_head_dim**-0.5 * config.index_heads**-0.5) * scale
    return AttnReady(q, (index_q / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), index_weights, cache.window)


def _entries(
    kv: Tensor, score: Tensor, weights: CompressorWeights, state: CompressorState, step: Step, eps: float, dtype: torch.dtype
) -> Tensor:
    """[T, d]: the pooled and normed block that ends with each token; of use only where one does end."""
    if not kv.is_cuda:
        return compress(kv, score, weights, state, step, norm_eps=eps, dtype=dtype)
    return F.rms_norm(pool(kv, score, weights.ape, state, step).to(dtype), weights.norm.shape, weights.norm, eps)


@lru_cache(maxsize=8)
def hadamard_matrix(n: int, device: torch.device) -> Tensor:
    return hadamard(torch.eye(n, device=device))


def _hadamard(x: Tensor) -> Tensor:
    return (x.float() @ hadamard_matrix(x.shape[-1], x.device)).to(x.dtype)


def turned_back(o: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    return rotate(o, turns(positions, freqs, inverse=True))


def route(x: Tensor, tokens: Tensor, weights: MoeWeights, config: ModelConfig) -> tuple[Tensor, Tensor]:
    scores = F.softplus(linear(x, Weight(weights.gate), out_dtype=torch.float32)).sqrt()
    if weights.tid2eid is not None:
        ids = weights.tid2eid[tokens]
        chosen = scores.gather(1, ids.long())
    else:
        found = scores if weights.bias is None else scores + weights.bias
        ids = found.topk(config.experts_per_token, dim=-1).indices
        chosen = scores.gather(1, ids)
        ids = ids.int()
    return ids, chosen / (chosen.sum(-1, keepdim=True) + SUM_FLOOR) * config.routed_scale


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Greedy where the temperature is 0, else by the probabilities of all tokens: top_p must be 1 and is not read."""
    greedy = temperature == 0
    probs = (logits / temperature.masked_fill(greedy, 1.0).unsqueeze(1)).softmax(-1)
    cumulated = probs.cumsum(-1)
    goal = uniform_ref(seeds, positions).to(logits.dtype).unsqueeze(1) * cumulated[:, -1:]
    drawn = torch.searchsorted(cumulated, goal, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return torch.where(greedy, logits.argmax(-1), drawn)
