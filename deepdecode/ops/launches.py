"""The kernels of the fused table as torch ops of plain tensors: what torch.compile sees instead of a launch.

Arguments have been checked by the table (`ops.fused`), which also knows that a kernel covers them; no token, no call.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepdecode.ops._check import arch, torch_op
from deepdecode.ops.rows import PagedRows

Tensor = torch.Tensor


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _arch(tensor: Tensor) -> int:
    return arch(tensor) if tensor.is_cuda else 80


def _op(name: str, fake: Callable[..., Any], mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    def make(function: Callable[..., Any]) -> Any:
        return torch_op(name, function, fake, mutates)

    return make


def _rows_like(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape)


@_op("rms_norm", _rows_like)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from deepdecode.kernels import norm as kernel

    with _on(x):
        return kernel.launch(x, weight, eps, _arch(x))


@_op("rope_back", _rows_like)
def rope_back(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    from deepdecode.kernels import rope as kernel

    with _on(x):
        return kernel.launch(x, positions, freqs, inverse=True, arch=_arch(x))


def _embed_fake(tokens: Tensor, weight: Tensor, streams: int) -> Tensor:
    return weight.new_empty(tokens.shape[0], streams, weight.shape[1])


@_op("embed", _embed_fake)
def embed(tokens: Tensor, weight: Tensor, streams: int) -> Tensor:
    from deepdecode.kernels import embed as kernel

    with _on(weight):
        return kernel.launch(tokens, weight, streams, _arch(weight))


def _boundary_fake(y: Any, streams: Tensor, post: Any, comb: Any, fn: Tensor, *args: Any) -> list[Tensor]:
    T, _, C = streams.shape
    out = [streams.new_empty(T, C)]
    if fn.shape[0] != 4:
        out += [fn.new_empty(T, 4), fn.new_empty(T, 4, 4)]
    return out + ([torch.empty_like(streams)] if y is not None else [])


@_op("mhc_boundary", _boundary_fake)
def mhc_boundary(
    y: Tensor | None,
    streams: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> list[Tensor]:
    """x; post and comb, unless it is the head's site; the new streams, if there is a y to write into them."""
    from deepdecode.kernels import mhc as kernel

    config = kernel.plan(streams.shape[2], _arch(streams), len(streams))
    with _on(streams):
        out, x, new_post, new_comb = kernel.launch(
            y, streams, post, comb, fn, base, scale, norm, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters, config=config
        )
    gates = [] if new_post is None or new_comb is None else [new_post, new_comb]
    return [x, *gates, *([] if y is None else [out])]


def _prepare_fake(q: Tensor, index_q: Tensor | None, index_weights: Tensor | None, *args: Any) -> list[Tensor]:
    out = [q.new_empty(q.shape)]
    if index_q is not None and index_weights is not None:
        index_fmt = args[-5]
        dtype = torch.float8_e4m3fn if index_fmt == "fp8_132" else q.dtype
        out += [index_q.new_empty(index_q.shape, dtype=dtype), index_weights.new_empty(index_weights.shape)]
    return out


@_op(
    "attn_prepare",
    _prepare_fake,
    ("window", "compressed", "index_keys", "state_kv", "state_score", "index_state_kv", "index_state_score"),
)
def attn_prepare(
    q: Tensor,
    index_q: Tensor | None,
    index_weights: Tensor | None,
    kv: Tensor,
    kv_norm: Tensor,
    latent: Tensor | None,
    comp_kv: Tensor | None,
    comp_gate: Tensor | None,
    ape: Tensor | None,
    norm: Tensor | None,
    index_kv: Tensor | None,
    index_gate: Tensor | None,
    index_ape: Tensor | None,
    index_norm: Tensor | None,
    window: Tensor,
    compressed: Tensor | None,
    index_keys: Tensor | None,
    state_kv: Tensor | None,
    state_score: Tensor | None,
    index_state_kv: Tensor | None,
    index_state_score: Tensor | None,
    window_write: Tensor,
    entry_write: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    freqs: Tensor,
    fmt: str,
    index_fmt: str,
    pages: Sequence[int],
    ratio: int,
    num_slots: int,
    norm_eps: float,
) -> list[Tensor]:
    """q; then index_q and its weights, where the layer has an indexer. pages: sizes, of window, compressed, index_keys."""
    from deepdecode.kernels import prepare as kernel

    def side(i: int, fmt: str, data: Any, parts: tuple[Any, ...]) -> kernel.Compressor | None:
        if data is None:
            return None
        kv, gate, ape, norm, state_kv, state_score = parts
        return kernel.Compressor(kv, gate, ape, norm, state_kv, state_score, PagedRows(data, pages[i], fmt))

    index_parts = (index_kv, index_gate, index_ape, index_norm, index_state_kv, index_state_score)
    with _on(q):
        out = kernel.launch(
            q, kv, kv_norm, PagedRows(window, pages[0], fmt), window_write, positions, slots, freqs,
            side(1, fmt, compressed, (comp_kv, comp_gate, ape, norm, state_kv, state_score)),
            side(2, index_fmt, index_keys, index_parts),
            entry_write, index_q, index_weights, latent, ratio=ratio, num_slots=num_slots, norm_eps=norm_eps,
            config=kernel.plan(q.shape[1], _arch(q)),
        )  # fmt: skip
    return [t for t in out if t is not None]


def _route_fake(x: Tensor, weight: Tensor, bias: Any, table: Any, tokens: Any, top_k: int, scale: float) -> Any:
    T = x.shape[0]
    return x.new_empty(T, top_k, dtype=torch.int32), x.new_empty(T, top_k, dtype=torch.float32)


@_op("route", _route_fake)
def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    tokens: Tensor | None,
    top_k: int,
    routed_scale: float,
) -> tuple[Tensor, Tensor]:
    from deepdecode.kernels import gate as kernel

    with _on(x):
        return kernel.launch(x, weight, bias, table, tokens, top_k, routed_scale, kernel.plan(_arch(x)))


def _tokens_like(logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@_op("sample", _tokens_like)
def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    from deepdecode.kernels import sample as kernel

    with _on(logits):
        return kernel.launch(logits, temperature, top_p, seeds, positions, _arch(logits))
