"""Manifold-constrained hyper-connections: how a sublayer reads from and writes to the four residual streams."""

import torch

from deepdecode.ops._check import FLOATS, describe, expect, wide

# what hc_mult is in every V4; the 24 mixing rows are 4 read, 4 write and 4 x 4 stream-to-stream gates
STREAMS = 4
PARAMS = FLOATS[1:]


def sinkhorn_ref(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """[..., j, k]: softmax over k, then `iters` column steps with a row step between each two; ends on a column step."""
    c = logits.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Make each [4, 4] nearly doubly stochastic: columns sum to 1 - eps, rows as nearly as `iters` steps bring them.

    logits: [T, 4, 4] float32 or float64, whose type the result has. Raises ValueError for another shape or iters < 1.
    """
    expect("sinkhorn: logits", logits, ("T", STREAMS, STREAMS), PARAMS, logits.device, contiguous=False)
    if iters < 1:
        raise ValueError(f"sinkhorn: iters must be >= 1, got {iters}")
    return sinkhorn_ref(logits, iters, eps)


def mix_ref(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """The mixing product [T, rows of fn] of the flattened streams (stream-major), over their root mean square."""
    flat = streams.flatten(1)
    return flat @ fn.mT * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def mhc_pre_ref(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m = mix_ref(streams, fn, norm_eps)
    read = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + hc_eps
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    comb = sinkhorn_ref((m[:, 8:] * scale[2] + base[8:]).unflatten(-1, (STREAMS, STREAMS)), iters, hc_eps)
    return torch.einsum("tj,tjc->tc", read, streams), post, comb


def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read one sublayer's input from the streams, and the gates that `mhc_post` will write its output with.

    Args:
        streams: [T, 4, C] bfloat16, float32 or float64.
        fn: float32 or float64 [24, 4C]; rows 0-3 read, 4-7 post, 8-23 comb, row-major; columns stream-major.
        base, scale: float32 or float64 [24] and [3]. None of the three is ever bfloat16: rounding them moves the gates.
        norm_eps, hc_eps, iters: rms_norm_eps, hc_eps and hc_sinkhorn_iters of the config.

    Returns:
        x [T, C] in the dtype of streams, before its RMSNorm; post [T, 4] and comb [T, 4, 4] float32 (float64 for
        float64 streams). comb[j, k] is what stream j gives to stream k. T == 0 gives empty tensors.

    Raises:
        ValueError: an argument has another shape, dtype or device, or iters < 1.
    """
    _expect_site("mhc_pre", streams, fn, base, scale, rows=24, scales=3)
    if iters < 1:
        raise ValueError(f"mhc_pre: iters must be >= 1, got {iters}")
    inner = wide(streams)
    fn, base, scale = fn.to(inner.dtype), base.to(inner.dtype), scale.to(inner.dtype)
    x, post, comb = mhc_pre_ref(inner, fn, base, scale, norm_eps, hc_eps, iters)
    return x.to(streams.dtype), post, comb


def mhc_post_ref(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Stream k becomes post[k] * y + sum over j of comb[j, k] * stream j: the sum runs over comb's first index."""
    return post[:, :, None] * y[:, None, :] + torch.einsum("tjk,tjc->tkc", comb, streams)


def mhc_post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Write a sublayer's output into the streams it was read from, in float32 (float64 for float64), rounded once.

    Args:
        y: [T, C], in the dtype of streams.
        streams: [T, 4, C] bfloat16, float32 or float64: as they were before this sublayer's `mhc_pre`.
        post, comb: [T, 4] and [T, 4, 4], what that `mhc_pre` gave.

    Returns:
        [T, 4, C] in the dtype of streams. T == 0 gives an empty tensor.

    Raises:
        ValueError: an argument has another shape, dtype or device.
    """
    _expect_streams("mhc_post", streams)
    T, _, C = streams.shape
    inner = wide(streams)
    expect("mhc_post: y", y, (T, C), streams.dtype, streams.device, contiguous=False)
    expect("mhc_post: post", post, (T, STREAMS), inner.dtype, streams.device, contiguous=False)
    expect("mhc_post: comb", comb, (T, STREAMS, STREAMS), inner.dtype, streams.device, contiguous=False)
    return mhc_post_ref(wide(y), inner, post, comb).to(streams.dtype)


def mhc_head_ref(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, norm_eps: float, hc_eps: float
) -> torch.Tensor:
    read = torch.sigmoid(mix_ref(streams, fn, norm_eps) * scale + base) + hc_eps
    return torch.einsum("tj,tjc->tc", read, streams)


def mhc_head(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, norm_eps: float, hc_eps: float
) -> torch.Tensor:
    """Read the final hidden state from the streams. The model's last RMSNorm comes after it.

    streams [T, 4, C]; fn [4, 4C], base [4], scale [1]; returns [T, C]. Types, empty input and errors as `mhc_pre`.
    """
    _expect_site("mhc_head", streams, fn, base, scale, rows=STREAMS, scales=1)
    inner = wide(streams)
    fn, base, scale = fn.to(inner.dtype), base.to(inner.dtype), scale.to(inner.dtype)
    return mhc_head_ref(inner, fn, base, scale, norm_eps, hc_eps).to(streams.dtype)


def _expect_streams(op: str, streams: torch.Tensor) -> None:
    if streams.dim() != 3 or streams.shape[1] != STREAMS or streams.shape[2] == 0 or streams.dtype not in FLOATS:
        raise ValueError(f"{op}: streams must be [T, 4, C] bfloat16, float32 or float64, got {describe(streams)}")


def _expect_site(
    op: str, streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, rows: int, scales: int
) -> None:
    _expect_streams(op, streams)
    expect(f"{op}: fn", fn, (rows, STREAMS * streams.shape[2]), PARAMS, streams.device)
    expect(f"{op}: base", base, (rows,), PARAMS, streams.device)
    expect(f"{op}: scale", scale, (scales,), PARAMS, streams.device)
