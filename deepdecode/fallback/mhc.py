"""Rung 0 of the hyper-connections: a full float32 product, one launch for the gates and their Sinkhorn steps, else torch."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from deepdecode.config import ModelConfig
from deepdecode.fallback.product import linear
from deepdecode.ops.mhc import sinkhorn_ref
from deepdecode.ops.table import HeadWeights, MhcSite

Tensor = torch.Tensor


@triton.jit
def gates_kernel(mixes_ptr, scale_ptr, base_ptr, read_ptr, post_ptr, comb_ptr, eps, ITERS: tl.constexpr):
    t = tl.program_id(0)
    lane = tl.arange(0, 4)
    cell = lane[:, None] * 4 + lane[None, :]
    mixes_ptr += t * 24
    read = tl.sigmoid(tl.load(mixes_ptr + lane) * tl.load(scale_ptr) + tl.load(base_ptr + lane)) + eps
    tl.store(read_ptr + t * 4 + lane, read)
    post = tl.sigmoid(tl.load(mixes_ptr + 4 + lane) * tl.load(scale_ptr + 1) + tl.load(base_ptr + 4 + lane))
    tl.store(post_ptr + t * 4 + lane, 2 * post)
    comb = tl.load(mixes_ptr + 8 + cell) * tl.load(scale_ptr + 2) + tl.load(base_ptr + 8 + cell)
    comb = tl.exp(comb - tl.max(comb, 1)[:, None])
    comb = comb / tl.sum(comb, 1)[:, None] + eps
    comb = comb / (tl.sum(comb, 0)[None, :] + eps)
    for _ in range(ITERS - 1):
        comb = comb / (tl.sum(comb, 1)[:, None] + eps)
        comb = comb / (tl.sum(comb, 0)[None, :] + eps)
    tl.store(comb_ptr + t * 16 + cell, comb)


def gates(mixes: Tensor, site: MhcSite, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The gates from the 24 mixing values of each token: read [T, 4], post [T, 4], comb [T, 4, 4]."""
    if not mixes.is_cuda:
        read = torch.sigmoid(mixes[:, :4] * site.scale[0] + site.base[:4]) + config.hc_eps
        post = 2 * torch.sigmoid(mixes[:, 4:8] * site.scale[1] + site.base[4:8])
        comb = (mixes[:, 8:] * site.scale[2] + site.base[8:]).unflatten(-1, (4, 4))
        return read, post, sinkhorn_ref(comb, config.hc_iters, config.hc_eps)
    return launch_gates(mixes, site, config)


def launch_gates(mixes: Tensor, site: MhcSite, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    T = len(mixes)
    read, post, comb = mixes.new_empty(T, 4), mixes.new_empty(T, 4), mixes.new_empty(T, 4, 4)
    gates_kernel[T,](mixes, site.scale, site.base, read, post, comb, config.hc_eps, ITERS=config.hc_iters, num_warps=1)
    return read, post, comb


def full_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T in full float32: without tensor cores on a GPU."""
    if x.is_cuda and torch.get_float32_matmul_precision() != "highest":
        raise RuntimeError("fallback: float32 products must be full ones, got torch.set_float32_matmul_precision below highest")
    return F.linear(x, weight)


def mix(streams: Tensor, fn: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The flattened streams in float32 and their mixing products over their root mean square."""
    flat = streams.flatten(1).float()
    rsqrt = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return flat, full_product(flat, fn) * rsqrt


def read_streams(flat: Tensor, gates: Tensor, streams: Tensor) -> Tensor:
    return (gates.unsqueeze(-1) * flat.view(streams.shape)).sum(1).to(streams.dtype)


def mhc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    kept = (comb.unsqueeze(-1) * streams.unsqueeze(2)).sum(1)
    return (post.unsqueeze(-1) * y.unsqueeze(1) + kept).to(streams.dtype)


def mhc_boundary(
    y: Tensor | None,
    streams: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    site: MhcSite,
    norm: Tensor,
    config: ModelConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference of this name."""
    if y is not None:
        assert post is not None and comb is not None
        streams = mhc_post(y, streams, post, comb)
    flat, mixes = mix(streams, site.fn, config.norm_eps)
    read, post, comb = gates(mixes, site, config)
    x = read_streams(flat, read, streams)
    return streams, F.rms_norm(x, norm.shape, norm, config.norm_eps), post, comb


def head(
    y: Tensor | None, streams: Tensor, post: Tensor | None, comb: Tensor | None, weights: HeadWeights, config: ModelConfig
) -> Tensor:
    """As the reference of this name."""
    if y is not None:
        assert post is not None and comb is not None
        streams = mhc_post(y, streams, post, comb)
    hc = weights.hc
    flat, mixes = mix(streams, hc.fn, config.norm_eps)
    read = torch.sigmoid(mixes * hc.scale + hc.base) + config.hc_eps
    x = F.rms_norm(read_streams(flat, read, streams), weights.norm.shape, weights.norm, config.norm_eps)
    return linear(x, weights.head, out_dtype=torch.float32)
