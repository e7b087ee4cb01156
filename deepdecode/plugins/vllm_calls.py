"""vLLM's calls in our ops' terms, for its GPU classes and its CPU classes alike. Nothing of vLLM is imported.

Layers and metadata are vLLM's objects. What an op or its kernels do not cover is a ValueError, before anything is written: on a
GPU vLLM's own code is faster than our references.
"""

from typing import Any

import torch

from deepdecode.ops import attention, indexer, mhc
from deepdecode.ops._check import arch, describe
from deepdecode.ops.norm import rms_norm
from deepdecode.ops.rows import ROW_132, ROW_584, PagedRows

Tensor = torch.Tensor
Set = tuple[Tensor, Tensor]


def attend(layer: Any, q: Tensor, window: Set, cache: Tensor | None, selected: Set | None, output: Tensor) -> None:
    """`sparse_attn_decode` over vLLM's pages as they lie, into vLLM's buffer.

    Args:
        layer: holds the window's pages, `attn_sink` [heads] and `scale`.
        q, output: [T, heads, 512] bfloat16, both padded to the same heads.
        window, selected: indices [T, K] or [T, 1, K] int32, physical rows, -1 for none; lengths [T] int32.
        cache: [pages, page size, 584] bytes, the compressed rows; None where the layer has only a window.
    """
    if q.shape != output.shape:
        raise ValueError(f"q must be {list(output.shape)} as its output, got {list(q.shape)}")
    rows = _rows("the window's pages", layer.swa_cache_layer.kv_cache, ROW_584)
    extra: tuple[Any, ...] = (None, None, None)
    if cache is not None and selected is not None:
        extra = (_rows("the compressed pages", cache, ROW_584), *_flat(selected))
    call = (q, rows, *_flat(window), *extra)
    sink = layer.attn_sink.detach()
    if q.is_cuda:
        _expect_attention(call, sink)
    attention.sparse_attn_decode(*call, sink=sink, scale=layer.scale, out=output)


def _expect_attention(call: tuple[Any, ...], sink: Tensor) -> None:
    from deepdecode.kernels.attention_plan import card_of, case_of, supports

    q, window, window_indices, _, extra, extra_indices, _ = call
    reason = supports(case_of(q, window, window_indices, extra, extra_indices, sink), card_of(q.device))
    if reason:
        raise ValueError(f"no kernel of ours: {reason}")


def _flat(indexed: Set) -> Set:
    indices, lengths = indexed
    # contiguous: on Hopper the indices of ratio 128 are the first columns of a wider buffer
    return indices.flatten(1).contiguous(), lengths.reshape(-1)


def _rows(name: str, cache: Tensor, row_bytes: int) -> PagedRows:
    fits = cache.dim() == 3 and cache.shape[2] == row_bytes and cache.itemsize == 1
    if not fits or not cache[:1].is_contiguous():
        raise ValueError(f"{name} must be rows of {row_bytes} bytes, got {describe(cache)} with strides {cache.stride()}")
    fmt = "fp8_584" if row_bytes == ROW_584 else "fp8_132"
    return PagedRows(cache.view(torch.uint8).flatten(1), cache.shape[1], fmt)


def choose(layer: Any, q: Tensor, weights: Tensor, metadata: Any) -> Tensor:
    """`index_topk` for a step's decode tokens: entries by their numbers [T, topk], -1 behind the chosen.

    Args:
        layer: vLLM's indexer, with the key pages [pages, page size, 132] and `topk_tokens`.
        q: [tokens, heads, 128] E4M3, weights [tokens, heads] float32: the decode tokens come first.
        metadata: vLLM's of the step, its `decode` with one table row for each sequence and one length for each token.
    """
    decode, T = metadata.decode, metadata.num_decode_tokens
    table, lens = decode.block_table, decode.seq_lens.reshape(-1)
    sequences = decode.decode_lens.shape[0]
    if decode.requires_padding or lens.shape[0] != T or not sequences or T % sequences:
        raise ValueError(f"{T} tokens of {sequences} sequences with {lens.shape[0]} lengths are not as many for each")
    if layer.dcp_world_size > 1 or layer.use_pcp:
        raise ValueError("context parallelism is on")
    if not layer.skip_k_cache_insert:
        raise ValueError("the keys are still to be written")
    if getattr(layer, "candidate_blocks", None) is not None:
        raise ValueError("candidate blocks are filtered")
    keys = _rows("the index keys' pages", layer.k_cache.kv_cache, ROW_132)
    # several tokens of a sequence share its row of the table
    slots = torch.arange(T, dtype=torch.int32, device=q.device)
    slots = slots if sequences == T else slots // (T // sequences)
    call = (q[:T], weights[:T], keys, table[:sequences], slots, lens, layer.topk_tokens)
    if q.is_cuda:
        _expect_indexer(call)
    return indexer.index_topk(*call, logical=True)[0]


def _expect_indexer(call: tuple[Any, ...]) -> None:
    from deepdecode.kernels.attention_plan import card_of
    from deepdecode.kernels.indexer import gluon_ready
    from deepdecode.kernels.indexer_plan import case_of, supports

    q = call[0]
    # vLLM 0.33 keeps four E8M0 bytes for each key there, where other cards have a float32
    reason = "keys with MX scales" if arch(q) // 10 == 10 else supports(case_of(*call, gluon=gluon_ready()), card_of(q.device))
    if reason:
        raise ValueError(f"no kernel of ours: {reason}")


def boundary(
    y: Tensor | None,
    streams: Tensor,
    gates: tuple[Tensor, Tensor] | None,
    site: tuple[Tensor, Tensor, Tensor],
    eps: tuple[float, float, float],
    post_mult: float,
    iters: int,
    norm: tuple[Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From one sublayer's output to the next one's input, in TileLang's terms.

    Args:
        y: [T, C], None where there is no sublayer before.
        streams: [T, 4, C]. gates: post [T, 4, 1] and comb [T, 4, 4] of the sublayer before.
        site: fn [24, 4C], scale [3], base [24] in float32.
        eps: of the root mean square, of the read gates, of Sinkhorn. post_mult: twice the sigmoid in every V4.
        norm: the weight of the RMSNorm that follows and its epsilon, None where vLLM norms by itself.

    Returns:
        streams, post [T, 4, 1], comb, x [T, C].
    """
    norm_eps, hc_eps, sinkhorn_eps = eps
    if post_mult != 2 or hc_eps != sinkhorn_eps or (norm is not None and norm[1] != norm_eps):
        raise ValueError(f"epsilons {eps}, {norm and norm[1]} and a factor of {post_mult} are not one model's")
    fn, scale, base = site
    post, comb = (gates[0].squeeze(-1), gates[1]) if gates else (None, None)
    if streams.is_cuda:
        if norm is None:
            raise ValueError("no kernel of ours: its RMSNorm is separate")
        return _launch_boundary(y, streams, post, comb, site, norm, hc_eps, iters)
    if y is not None and post is not None and comb is not None:
        streams = mhc.mhc_post(y, streams, post, comb)
    x, post, comb = mhc.mhc_pre(streams, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters)
    x = x if norm is None else rms_norm(x, norm[0], norm[1])
    return streams, post.unsqueeze(-1), comb, x


def _launch_boundary(
    y: Tensor | None,
    streams: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    site: tuple[Tensor, Tensor, Tensor],
    norm: tuple[Tensor, float],
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from deepdecode.kernels import mhc as kernel
    from deepdecode.ops import launches

    (fn, scale, base), (weight, norm_eps) = site, norm
    T, width, C = streams.shape
    dtype, fn_dtype = (str(t.dtype).removeprefix("torch.") for t in (streams, fn))
    reason = (
        kernel.supports(T, C, dtype, fn_dtype, hc_eps)
        or (width != mhc.STREAMS and f"{width} streams")
        or (not T and "no token")
    )
    reason = reason or (arch(streams) < 80 and f"sm_{arch(streams)}")
    if not all(t is None or t.is_contiguous() for t in (y, streams, post, comb, fn, base, scale, weight)):
        reason = "every tensor must be contiguous"
    if reason:
        raise ValueError(f"no kernel of ours: {reason}")
    x, new_post, new_comb, *new = launches.mhc_boundary(
        y, streams, post, comb, fn, base, scale, weight, norm_eps, hc_eps, iters
    )
    return new[0] if new else streams, new_post.unsqueeze(-1), new_comb, x
