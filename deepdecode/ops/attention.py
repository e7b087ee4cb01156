"""Sparse attention: every token's heads over the rows that its indices name, in two paged caches, under one softmax.

    l = scale * (q . row);  out = sum exp(l) * row / (sum exp(l) + exp(sink));  lse = log(sum exp(l))

A row is key and value at once. The sink is a learned logit of each head: it takes weight and gives nothing.
"""

import math
import os
from typing import Any

import torch

from deepdecode.ops._check import FLOATS, expect, fall_back, kernel_runs, readable, torch_op, use_kernel, wide, wide_type
from deepdecode.ops.rope import expect_turn, rope
from deepdecode.ops.rows import PagedRows, read_rows

Tensor = torch.Tensor
# bytes of gathered rows that the reference holds at once; on a GPU, where a chunk costs some forty launches, so often as many
_CHUNK_BYTES, _GPU_CHUNKS = 32 << 20, 8


def sparse_attn_ref(
    q: Tensor,
    window: PagedRows,
    window_indices: Tensor,
    window_lens: Tensor,
    extra: PagedRows | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Out [T, H, D] and lse [T, H] in the dtype of q, float32 or float64; rows of an FP8 cache are widened exactly."""
    T, H, D = q.shape
    sets = [(window, window_indices, window_lens)]
    if extra is not None and extra_indices is not None and extra_lens is not None:
        sets.append((extra, extra_indices, extra_lens))
    out, lse = torch.empty_like(q), q.new_empty(T, H)
    keys = sum(indices.shape[1] for _, indices, _ in sets)
    held = _CHUNK_BYTES if readable(q) else _GPU_CHUNKS * _CHUNK_BYTES
    step = max(1, held // max(1, keys * D * q.element_size()))
    for start in range(0, T, step):
        part = slice(start, start + step)
        rows, seen = zip(*(_gather(cache, indices[part], lens[part]) for cache, indices, lens in sets), strict=True)
        out[part], lse[part] = _attend(q[part], torch.cat(rows, dim=1).to(q.dtype), torch.cat(seen, dim=1), sink, scale)
    return out, lse


def _gather(cache: PagedRows, indices: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, K, D], zeros where there is none, and which lanes hold a key, bool [T, K]."""
    K = indices.shape[1]
    if K and readable(lens):
        # leave out lanes past every length
        K = int(lens.max().clamp(0, K))
        indices = indices[:, :K]
    seen = (torch.arange(K, device=lens.device) < lens[:, None]) & (indices >= 0) & (indices < cache.num_rows)
    return read_rows(cache, torch.where(seen, indices, -1)), seen


def _attend(q: Tensor, rows: Tensor, seen: Tensor, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, H, D], rows [T, K, D], seen [T, K] -> out [T, H, D], lse [T, H]."""
    if not rows.shape[1]:
        return torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"))
    logits = ((q @ rows.mT) * scale).masked_fill(~seen[:, None], float("-inf"))
    top = logits.amax(dim=2)
    # a token without a key: exp(-inf - 0) gives weights of 0
    some = seen.any(dim=1)[:, None]
    weights = (logits - torch.where(some, top, 0)[..., None]).exp()
    total = weights.sum(dim=2)
    lse = top + total.log()
    out = weights @ rows / torch.where(some, total, 1)[..., None]
    if sink is not None:
        # 1 / (1 + exp(sink - lse))
        out = out * torch.where(some, lse - sink.to(q.dtype), 0).sigmoid()[..., None]
    return out, lse


def sparse_attn_decode(
    q: Tensor,
    window: PagedRows,
    window_indices: Tensor,
    window_lens: Tensor,
    extra: PagedRows | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    workspace: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend the union of two sets of cached rows; computes in float32 (float64 for float64 q) and rounds once.

    Args:
        q: [T, H, D] bfloat16, contiguous, H from 1 to 128; float32 and float64 on the reference path. D is the caches' width.
        window, extra: paged caches, each with its own page size, page stride and format; extra may be None.
        window_indices, extra_indices: int32 [T, K], physical rows of their cache; -1: no key. Any K, 0 included: an extra set
            without lanes is as none.
        window_lens, extra_lens: int32 [T]; lanes at or past the length are not read.
        sink: float32 [H] (float64 for float64 q), or None for no sink.
        scale: of the logits, a finite number; D ** -0.5 if None.
        out: [T, H, D] in the dtype of q, contiguous, to write into.
        return_lse: return (out, lse) instead of out.
        workspace: uint8, at least `workspace_bytes` long, contiguous; the call then allocates nothing but what it returns.
        deterministic: a row's bits do not depend on the batch around it.

    Returns:
        out [T, H, D]; lse float32 [T, H] (float64 for float64 q), natural logarithm, sink excluded.
        A token without a key gives out 0 and lse -inf, with and without a sink. A row named twice counts twice. A sink of
        -inf takes no weight, one of inf all.
        T == 0 gives empty tensors. Lengths are clamped to [0, K], and an index outside its cache counts as -1.
        With DEEPDECODE_CHECK=1 both are errors that name row and lane; that reads the tensors back, so not under a graph.

    Raises:
        ValueError: an argument has another shape, dtype, layout or device, or scale is not finite.
    """
    args = (q, window, window_indices, window_lens, extra, extra_indices, extra_lens)
    return _sparse_attn("sparse_attn_decode", *args, sink, scale, out, return_lse, workspace, deterministic)


def sparse_attn_prefill(
    q: Tensor,
    window: PagedRows,
    window_indices: Tensor,
    window_lens: Tensor,
    extra: PagedRows | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    workspace: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`sparse_attn_decode` for many tokens: the same contract, memory that does not grow with T."""
    args = (q, window, window_indices, window_lens, extra, extra_indices, extra_lens)
    return _sparse_attn("sparse_attn_prefill", *args, sink, scale, out, return_lse, workspace, deterministic)


def sparse_attn_turned(
    q: Tensor,
    window: PagedRows,
    window_indices: Tensor,
    window_lens: Tensor,
    extra: PagedRows | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    *,
    sink: Tensor,
    scale: float,
    positions: Tensor,
    freqs: Tensor,
) -> Tensor:
    """`sparse_attn_decode` and then `rope` with inverse=True; where keys are split, in no launch more and rounded once.

    positions, freqs: contiguous, else as `rope` takes them. Other arguments and errors as those two have them.
    """
    args = (q, window, window_indices, window_lens, extra, extra_indices, extra_lens)
    expect_turn("sparse_attn_turned", q, positions, freqs)
    for name, tensor in (("positions", positions), ("freqs", freqs)):
        if not tensor.is_contiguous():
            raise ValueError(f"sparse_attn_turned: {name} must be contiguous, got strides {list(tensor.stride())}")
    return _sparse_attn("sparse_attn_turned", *args, sink, scale, None, False, None, False, positions, freqs)


def workspace_bytes(
    T: int,
    H: int,
    window_width: int,
    extra_width: int = 0,
    *,
    device: torch.device,
    deterministic: bool = False,
    fmt: str = "fp8_584",
    pages: tuple[int, int] = (64, 64),
    align: int = 16,
) -> int:
    """Bytes that one call with these sizes needs in `workspace`; 0 for the reference, which allocates as it goes.

    fmt, pages: of both caches, their page sizes. align: 16, or 4 where addresses or page strides are no multiples of 16 bytes.
    """
    if device.type != "cuda" or os.environ.get("DEEPDECODE_REFERENCE") == "1":
        return 0
    from deepdecode.kernels.attention_plan import Case, card_of, plan, supports, workspace_layout
    from deepdecode.kernels.launching import gluon_ready

    extra_fmt = fmt if extra_width else None
    window_page, extra_page = pages
    case = Case(
        T, H, window_width, extra_width, fmt, extra_fmt, window_page, extra_page if extra_width else window_page,
        align=align, deterministic=deterministic, gluon=gluon_ready(),
    )  # fmt: skip
    card = card_of(device)
    if T == 0 or supports(case, card):
        return 0
    return workspace_layout(T, H, plan(case, card).splits)[0]


def _sparse_attn(
    op: str,
    q: Tensor,
    window: PagedRows,
    window_indices: Tensor,
    window_lens: Tensor,
    extra: PagedRows | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    sink: Tensor | None,
    scale: float | None,
    out: Tensor | None,
    return_lse: bool,
    workspace: Tensor | None,
    deterministic: bool,
    positions: Tensor | None = None,
    freqs: Tensor | None = None,
) -> Any:
    for name, cache in (("window", window), ("extra", extra)):
        if not isinstance(cache, PagedRows) and (cache is not None or name == "window"):
            raise ValueError(f"{op}: {name} must be PagedRows, got {type(cache).__name__}")
    expect(f"{op}: q", q, ("T", "H", window.width), FLOATS, getattr(q, "device", window.data.device))
    T, H, D = q.shape
    if not 1 <= H <= 128:
        raise ValueError(f"{op}: q must have 1 to 128 heads, got {H}")
    _expect_set(op, "window", q, window, window_indices, window_lens)
    if (extra is None) != (extra_indices is None) or (extra is None) != (extra_lens is None):
        raise ValueError(f"{op}: extra, extra_indices and extra_lens must be given together")
    if extra is not None and extra_indices is not None and extra_lens is not None:
        _expect_set(op, "extra", q, extra, extra_indices, extra_lens)
        if not extra_indices.shape[1]:
            # of a set without lanes nothing counts, its format and its pages neither
            extra = extra_indices = extra_lens = None
    if sink is not None:
        expect(f"{op}: sink", sink, (H,), (torch.float32, torch.float64), q.device)
    if workspace is not None:
        expect(f"{op}: workspace", workspace, ("bytes",), torch.uint8, q.device)
    if out is None:
        out = torch.empty_like(q)
    else:
        expect(f"{op}: out", out, q.shape, q.dtype, q.device)
    scale = 1 / math.sqrt(max(1, D)) if scale is None else scale
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"{op}: scale must be a finite number, got {scale!r}")
    lse = q.new_empty(T, H, dtype=wide_type(q.dtype)) if return_lse else None
    if T:
        extras = (None, 0, "") if extra is None else (extra.data, extra.page_size, extra.fmt)
        _attend_op(
            q, window.data, window.page_size, window.fmt, window_indices, window_lens, *extras, extra_indices, extra_lens,
            sink, scale, deterministic, out, lse, workspace, positions, freqs,
        )  # fmt: skip
    return out if lse is None else (out, lse)


def _attend_caches(
    q: Tensor,
    window: Tensor,
    window_page: int,
    window_fmt: str,
    window_indices: Tensor,
    window_lens: Tensor,
    extra: Tensor | None,
    extra_page: int,
    extra_fmt: str,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    sink: Tensor | None,
    scale: float,
    deterministic: bool,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    positions: Tensor | None = None,
    freqs: Tensor | None = None,
) -> None:
    """Fill out and lse from arguments that `_sparse_attn` has checked: the kernel where there is one, else the reference."""
    window_rows = PagedRows(window, window_page, window_fmt)
    extra_rows = None if extra is None else PagedRows(extra, extra_page, extra_fmt)
    args = (q, window_rows, window_indices, window_lens, extra_rows, extra_indices, extra_lens)
    if use_kernel(q):
        from deepdecode.kernels import launching as kernel  # the only import of Triton on this path

        reason = kernel.attend(
            *args, sink=sink, scale=scale, out=out, lse=lse, workspace=workspace, deterministic=deterministic,
            positions=positions, freqs=freqs,
        )  # fmt: skip
        if reason is None:
            kernel_runs["sparse_attn"] += 1
            return
        keys = window_indices.shape[1] + (0 if extra_indices is None else extra_indices.shape[1])
        fall_back("sparse_attn", f"q {list(q.shape)}, {keys} keys, {window_fmt} rows", reason)
    result, result_lse = sparse_attn_ref(wide(q), *args[1:], sink=sink, scale=scale)
    out.copy_(result if positions is None or freqs is None else rope(result, positions, freqs, inverse=True))
    if lse is not None:
        lse.copy_(result_lse)


_attend_op = torch_op("sparse_attn", _attend_caches, lambda *args: None, ("out", "lse", "workspace"))


def _expect_set(op: str, name: str, q: Tensor, cache: PagedRows, indices: Tensor, lens: Tensor) -> None:
    if cache.width != q.shape[2] or cache.data.device != q.device:
        want = f"rows of {q.shape[2]} on {q.device}"
        raise ValueError(f"{op}: {name} must hold {want}, got rows of {cache.width} on {cache.data.device}")
    expect(f"{op}: {name}_indices", indices, (q.shape[0], "K"), torch.int32, q.device)
    expect(f"{op}: {name}_lens", lens, (q.shape[0],), torch.int32, q.device)
    if os.environ.get("DEEPDECODE_CHECK") == "1":
        _check_values(op, name, cache, indices, lens)


def _check_values(op: str, name: str, cache: PagedRows, indices: Tensor, lens: Tensor) -> None:
    K = indices.shape[1]
    wrong = ((lens < 0) | (lens > K)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"{op}: {name}_lens must be 0 to {K}, got {int(lens[row])} at row {row}")
    inside = torch.arange(K, device=lens.device) < lens[:, None]
    wrong = (inside & ((indices < -1) | (indices >= cache.num_rows))).nonzero()
    if len(wrong):
        row, lane = wrong[0].tolist()
        got = f"{int(indices[row, lane])} at row {row}, lane {lane}"
        raise ValueError(f"{op}: {name}_indices must be -1 to {cache.num_rows - 1}, got {got}")
