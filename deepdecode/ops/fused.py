"""The coarse table on fused kernels, entry by entry as in `ops.reference`: same arguments, same results but for rounding.

Off the GPU every entry is the reference. On one, a shape that no kernel covers falls back to it with one log line; so does a
prefill step's `attn_prepare`, silently, since its kernel is made for decode steps.
"""

from collections.abc import Callable
from typing import Any

import torch

from deepdecode.config import ModelConfig
from deepdecode.ops import launches, reference
from deepdecode.ops._check import arch, fall_back, kernel_runs, use_kernel
from deepdecode.ops.attention import sparse_attn_turned
from deepdecode.ops.linear import latent_linear, linear
from deepdecode.ops.table import (
    AttnInputs,
    AttnReady,
    AttnWeights,
    HeadWeights,
    LayerCache,
    MhcSite,
    MoeWeights,
    Ops,
    Step,
)

Tensor = torch.Tensor


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _runs(op: str, tensor: Tensor, shape: str, reason: str | None) -> bool:
    """Whether the kernel runs; if not on a GPU that should have one, say why."""
    if reason is None and arch(tensor) < 80:
        reason = f"sm_80 or newer is needed, got sm_{arch(tensor)}"
    if reason is not None:
        fall_back(op, shape, reason)
        return False
    kernel_runs[op] += 1
    return True


def _product(op: str, product: Callable[..., Any], *args: Any) -> Any:
    """One of `ops.linear`, whose kernel's launch counts for the entry that it is most of."""
    before = kernel_runs["linear"]
    out = product(*args)
    kernel_runs[op] += kernel_runs["linear"] - before
    return out


def embed(tokens: Tensor, weight: Tensor, hc_mult: int) -> Tensor:
    """See `ops.reference.embed`. One launch."""
    if use_kernel(weight) and len(tokens) and _runs("embed", weight, f"tokens {list(tokens.shape)}", None):
        return launches.embed(tokens, weight, hc_mult)
    return reference.embed(tokens, weight, hc_mult)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.norm.rms_norm` of [T, C], whose rows may be apart."""
    if use_kernel(x) and len(x) and x.stride(1) == 1:
        from deepdecode.kernels import norm as kernel

        if _runs("rms_norm", x, f"x {list(x.shape)}", kernel.supports(x.shape[1], _dtype(x))):
            return launches.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def mhc_boundary(
    y: Tensor | None,
    streams: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    site: MhcSite,
    norm: Tensor,
    config: ModelConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ops.reference.mhc_boundary`. Two launches; post and comb within 1e-5, which the weights' 16 bits allow."""
    if use_kernel(streams) and len(streams):
        done = _boundary("mhc_boundary", y, streams, post, comb, site, norm, config)
        if done is not None:
            x, new_post, new_comb, *new = done
            return new[0] if new else streams, x, new_post, new_comb
    return reference.mhc_boundary(y, streams, post, comb, site, norm, config)


def _boundary(
    op: str,
    y: Tensor | None,
    streams: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    site: MhcSite,
    norm: Tensor,
    config: ModelConfig,
) -> Any:
    """What the kernel gives, or None if there is none."""
    from deepdecode.kernels import mhc as kernel

    T, _, C = streams.shape
    reason = kernel.supports(T, C, _dtype(streams), _dtype(site.fn), config.hc_eps)
    if not all(t is None or t.is_contiguous() for t in (y, streams, post, comb)):
        reason = "every tensor must be contiguous"
    if not _runs(op, streams, f"streams {list(streams.shape)}", reason):
        return None
    return launches.mhc_boundary(
        y, streams, post, comb, site.fn, site.base, site.scale, norm, config.norm_eps, config.hc_eps, config.hc_iters
    )


def attn_in(x: Tensor, weights: AttnWeights, config: ModelConfig, ratio: int) -> AttnInputs:
    """See `ops.reference.attn_in`. One launch; the parts are views of two products, with the products' strides.

    q_latent times its norm's weight comes with it, so that the norm is no launch before q_proj's product.
    """
    if not use_kernel(x):
        return reference.attn_in(x, weights, config, ratio)
    parts: list[Any] = []
    out, rest, scaled = _product("attn_in", latent_linear, x, weights.q_kv, weights.rest, weights.q_norm)
    if rest is not None:
        d, index = config.head_dim * (2 if ratio == 4 else 1), 2 * config.index_head_dim
        parts = list(rest.split([d, d, index, index, config.index_heads] if ratio == 4 else [d, d], dim=-1))
    q_latent, kv = out.split([config.q_lora_rank, config.head_dim], dim=-1)
    return AttnInputs(q_latent, kv, *parts, *[None] * (5 - len(parts)), q_scaled=scaled)


def q_proj(inputs: AttnInputs, weights: AttnWeights, config: ModelConfig) -> tuple[Tensor, Tensor | None]:
    """See `ops.reference.q_proj`. One launch; both results are views of its product."""
    if not use_kernel(inputs.q_latent):
        return reference.q_proj(inputs, weights, config)
    latent = rms_norm(inputs.q_latent, weights.q_norm, config.norm_eps) if inputs.q_scaled is None else inputs.q_scaled
    out = _product("q_proj", linear, latent, weights.q_b)
    width = weights.sink.shape[0] * config.head_dim
    index_q = out[:, width:].unflatten(1, (config.index_heads, -1)) if out.shape[1] > width else None
    return out[:, :width].unflatten(1, (-1, config.head_dim)), index_q


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
    """See `ops.reference.attn_prepare`. One launch when decoding; values round where the reference's do.

    q, index_q and the inputs may be views with any distance from token to token.
    """
    if use_kernel(q) and len(q) and not step.prefill:
        from deepdecode.kernels import prepare as kernel

        T, _, D = q.shape
        index = None if index_q is None else (index_q.shape[1], index_q.shape[2])
        state = "float32" if cache.state is None else _dtype(cache.state.kv)
        index_fmt = cache.index_keys.fmt if cache.index_keys else None
        reason = kernel.supports(T, D, 2 * len(freqs), _dtype(q), cache.window.fmt, index, index_fmt, state)
        pairs = ((inputs.comp_kv, inputs.comp_gate), (inputs.index_kv, inputs.index_gate))
        whole = (q, index_q, inputs.kv, inputs.q_latent, inputs.index_weights, *(t for pair in pairs for t in pair))
        if not all(t is None or t[0].is_contiguous() for t in whole):
            reason = "every token's row must be contiguous"
        if any(kv is not None and gate is not None and kv.stride(0) != gate.stride(0) for kv, gate in pairs):
            reason = "a compressor's two products must have one distance from token to token"
        if cache.compressed is not None and cache.compressed.fmt != cache.window.fmt:
            reason = f"window and compressed rows must have one format, got {cache.window.fmt} and {cache.compressed.fmt}"
        if _runs("attn_prepare", q, f"q {list(q.shape)}, {cache.window.fmt} rows", reason):
            return _prepare(q, index_q, inputs, weights, cache, step, freqs, config, ratio)
    if use_kernel(q):
        parts: dict[str, Any] = {name: None if t is None else t.contiguous() for name, t in vars(inputs).items()}
        inputs = AttnInputs(**parts)
    return reference.attn_prepare(q, index_q, inputs, weights, cache, step, freqs, config, ratio)


def _prepare(
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
    caches = [rows for rows in (cache.window, cache.compressed, cache.index_keys) if rows is not None]
    data = [rows.data for rows in caches] + [None] * (3 - len(caches))
    pages = [rows.page_size for rows in caches]

    def pair(of: Any, *names: str) -> list[Any]:
        return [None if of is None else getattr(of, name) for name in names]

    ready, *index = launches.attn_prepare(
        q, index_q, inputs.index_weights, inputs.kv, weights.kv_norm, None if inputs.q_scaled is None else inputs.q_latent,
        inputs.comp_kv, inputs.comp_gate, *pair(weights.compressor, "ape", "norm"),
        inputs.index_kv, inputs.index_gate, *pair(weights.index_compressor, "ape", "norm"),
        *data, *pair(cache.state, "kv", "score"), *pair(cache.index_state, "kv", "score"),
        step.window_write, step.entry_write.get(ratio), step.positions, step.slots, freqs,
        cache.window.fmt, "" if cache.index_keys is None else cache.index_keys.fmt, pages,
        ratio, step.block_tables.shape[0], config.norm_eps,
    )  # fmt: skip
    index_q, index_weights = index if index else (None, None)
    return AttnReady(ready, index_q, index_weights, cache.window)


def sparse_attn(q: Tensor, *caches: Any, sink: Tensor, scale: float, positions: Tensor, freqs: Tensor) -> Tensor:
    """See `ops.reference.sparse_attn`. The rotation is the merge's of split keys, else a launch of its own."""
    attend = sparse_attn_turned if use_kernel(q) else reference.sparse_attn
    return attend(q, *caches, sink=sink, scale=scale, positions=positions, freqs=freqs)


def attn_out(o: Tensor, weights: AttnWeights) -> Tensor:
    """See `ops.reference.attn_out`. Two launches."""
    if not use_kernel(o):
        return reference.attn_out(o, weights)
    return _product("attn_out", reference.attn_out, o, weights)


def route(x: Tensor, tokens: Tensor, weights: MoeWeights, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """See `ops.reference.route`. Two launches; one on hash layers, which read the chosen experts' rows only."""
    if use_kernel(x) and len(x) and x.stride(1) == 1:
        from deepdecode.kernels import gate as kernel

        E, C = weights.gate.shape
        reason = kernel.supports(len(x), C, E, config.experts_per_token, _dtype(x), _dtype(weights.gate))
        if not all(t is None or t.is_contiguous() for t in (tokens, weights.gate, weights.bias, weights.tid2eid)):
            reason = "tokens and weights must be contiguous"
        if _runs("route", x, f"x {list(x.shape)}, {E} experts", reason):
            top_k = config.experts_per_token
            return launches.route(x, weights.gate, weights.bias, weights.tid2eid, tokens, top_k, config.routed_scale)
    return reference.route(x, tokens, weights, config)


def head(
    y: Tensor | None, streams: Tensor, post: Tensor | None, comb: Tensor | None, weights: HeadWeights, config: ModelConfig
) -> Tensor:
    """See `ops.reference.head`. Two launches beside the product's."""
    if use_kernel(streams) and len(streams):
        done = _boundary("head", y, streams, post, comb, weights.hc, weights.norm, config)
        if done is not None:
            return linear(done[0], weights.head, out_dtype=torch.float32)
    return reference.head(y, streams, post, comb, weights, config)


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `ops.sample.sample`. Four launches; a drawn token differs only within float32's rounding of a boundary."""
    if use_kernel(logits) and len(logits) and logits.stride(1) == 1:
        from deepdecode.kernels import sample as kernel

        if _runs("sample", logits, f"logits {list(logits.shape)}", kernel.supports(_dtype(logits), logits.shape[1])):
            # one value expanded to all rows is a row's too
            rows = (t.contiguous() for t in (temperature, top_p, seeds, positions))
            return launches.sample(logits, *rows)
    return reference.sample(logits, temperature, top_p, seeds, positions)


FUSED = Ops(
    embed=embed,
    mhc_boundary=mhc_boundary,
    attn_in=attn_in,
    q_proj=q_proj,
    attn_prepare=attn_prepare,
    index_topk=reference.index_topk,
    sparse_attn=sparse_attn,
    attn_out=attn_out,
    route=route,
    moe=reference.moe,
    head=head,
    sample=sample,
)
