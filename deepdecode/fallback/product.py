"""The products that rungs 0 to 4 share: Triton, one launch each, weights read as stored and widened in registers.

Nothing of what comes after: no norm or rotation before the product, no programmatic launch, no order of loads tuned to a
card. So slow ones do not flatter what stands above, and what the product's own kernels add is a rung of its own.

Rows of the weight stand on the M side of mma.sync, so 8 tokens fill its N side. An FP8 weight enters the product as its bare
codes, exact in bfloat16; the scale of a block of 128 columns multiplies their float32 sum. An FP4 weight enters times its
scale. A warp is one of a batch of small products: with one slice of K, warps take different rows; with as many slices as
warps, all take the same rows, and their sums are added in order.

They began as `kernels.product` and stand still on purpose where it moves: a yardstick that is measured over and over.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from deepdecode.config import ModelConfig
from deepdecode.kernels.codes import (
    FP4,
    FP8,
    PLAIN,
    e8m0_bfloat,
    e8m0_float,
    fp4_order,
    fp4_values,
    fp8_natural,
    fp8_order,
    fp8_values,
    times,
)
from deepdecode.ops import launches, reference
from deepdecode.ops import linear as ours
from deepdecode.ops._check import wide_type
from deepdecode.ops.quant import Weight
from deepdecode.ops.table import AttnInputs, AttnWeights

Tensor = torch.Tensor
KINDS = {"plain": PLAIN, "fp8": FP8, "fp4": FP4}


@dataclass(frozen=True)
class Config:
    """Programs take block_m rows for block_t tokens, block_k columns at a time, in slices that are a warp's each."""

    block_m: int
    block_t: int
    block_k: int
    slices: int
    num_warps: int
    num_stages: int


def plan(T: int, rows: int, K: int, full: bool) -> Config:
    """The forms that won on an H200, Triton 3.6. full: float32 weights.

    us at T = 1 / 16 / 64, weights rotated past L2 (a copy of the bytes takes): q_kv 6.2 / 8.3 / 14.2 (1.5); q_b whole
    14.6 / 16.8 (9.9), of 8 ranks 6.6 / 8.3 / 16.7 (3.0); wo_a whole 13.4 / 16.7 (7.9); head whole 242 / 249 (249).
    """
    stages = 3 if full else 4
    block_k = 64 if full else 128
    if T > 16:
        if rows <= 2048:
            return Config(16, 16, block_k, slices=4, num_warps=4, num_stages=3)
        block_t = 32 if T <= 32 or rows < 8192 else 64
        return Config(64, block_t, block_k, slices=1, num_warps=4, num_stages=stages if block_t == 32 else 3)
    block_t = 8 if T <= 8 else 16
    if rows >= 65536 or (block_t == 16 and rows >= 8192 and K < 2048):
        return Config(64, block_t, block_k, slices=1, num_warps=4, num_stages=stages)
    if K < 2048:
        if rows >= 32768:
            return Config(32, block_t, block_k, slices=2, num_warps=2, num_stages=2)
        return Config(16, block_t, block_k, slices=2, num_warps=2, num_stages=3)
    return Config(16 if rows < 8192 or block_t == 8 else 32, block_t, block_k, slices=4, num_warps=4, num_stages=3)


@triton.jit
def blocks_of(row, SLICES: tl.constexpr, WARPS: tl.constexpr):
    """Numbers of rows [M] as `product` takes them: a block for each warp that has rows of its own."""
    return tl.reshape(row, (WARPS // SLICES, row.shape[0] * SLICES // WARPS))


@triton.jit
def product(
    x_row,
    x_live,
    w_row,
    scale_row,
    K,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """W x^T, float32 [M, T]; x_row [T] and, from `blocks_of` M rows, w_row and scale_row point at the first columns of rows.

    SLICES: WARPS or 1. EVEN: K is a multiple of SLICES * BLOCK_K.
    """
    R: tl.constexpr = w_row.shape[1]
    N: tl.constexpr = x_row.shape[0]
    # slices take turns: what the program reads at a time is one piece of each row, since memory opens a page for it
    STEP: tl.constexpr = SLICES * BLOCK_K
    first = (tl.arange(0, SLICES) * BLOCK_K)[:, None]  # [SLICES, 1]
    k = tl.arange(0, BLOCK_K)[None, :]
    byte = tl.arange(0, BLOCK_K // 2)[None, :]
    group = tl.arange(0, BLOCK_K // 32)[None, None, :]
    acc = tl.zeros([WARPS, R, N], tl.float32)
    if KIND == FP4:
        # [WARPS, R, BLOCK_K / 32]
        scale_at = scale_row[:, :, None] + (first // 32)[:, :, None] + group
        next_scale = tl.load(scale_at, mask=first[:, :, None] + 32 * group < K, other=0)
    elif KIND == FP8:
        next_scale = tl.load(scale_row + first // 128, mask=first < K, other=0)  # [WARPS, R]
    for at in range(0, K, STEP):
        start = first + at
        ahead = start + STEP
        x_mask = x_live[None, None, :] & ((start + k < K) | EVEN)[:, :, None]
        x = tl.load(x_row[None, None, :] + (start + k)[:, :, None], mask=x_mask, other=0.0)  # [SLICES, BLOCK_K, N]
        if INTERPRET:
            x = x.to(tl.float32)
        if KIND == FP4:
            live = ((start + 2 * byte < K) | EVEN)[:, None, :]
            packed = tl.load(w_row[:, :, None] + (start // 2 + byte)[:, None, :], mask=live, other=0)
            scale = e8m0_float(next_scale) if INTERPRET else e8m0_bfloat(next_scale)
            next_scale = tl.load(scale_at + (at + STEP) // 32, mask=ahead[:, :, None] + 32 * group < K, other=0)
            # a group's scale, once for each of its columns
            scale = tl.broadcast_to(scale[:, :, :, None], (WARPS, R, BLOCK_K // 32, 32))
            w = fp4_values(packed, WARPS, R, BLOCK_K, INTERPRET)
            w = times(w, tl.reshape(scale, (WARPS, R, BLOCK_K)), INTERPRET)
            x = fp4_order(x, SLICES, BLOCK_K, N)
        else:
            live = ((start + k < K) | EVEN)[:, None, :]
            w = tl.load(w_row[:, :, None] + (start + k)[:, None, :], mask=live, other=0)
        if KIND == FP8:
            scale = e8m0_float(next_scale) if E8M0 else next_scale
            next_scale = tl.load(scale_row + ahead // 128, mask=ahead < K, other=0)
            if SLICES > 1:
                w = fp8_values(w, WARPS, R, BLOCK_K, INTERPRET)
                x = fp8_order(x, SLICES, BLOCK_K, N)
            else:
                w = fp8_natural(w, INTERPRET)
        if INTERPRET or w.dtype == tl.float32:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        x = tl.broadcast_to(x, (WARPS, BLOCK_K, N))
        if KIND == FP8:
            acc += tl.dot(w, x) * scale[:, :, None]
        else:
            # float32 weights are multiplied in full
            acc = tl.dot(w, x, acc, input_precision="ieee")
    return tl.sum(acc, 0) if SLICES > 1 else tl.reshape(acc, (WARPS * R, N))


@triton.jit
def rows_of(w_ptr, scale_ptr, row, stride_w, stride_scale, KIND: tl.constexpr):
    """Pointers at the first columns of these rows, and of their scales (of a plain weight: anywhere)."""
    w_row = w_ptr + row.to(tl.int64) * stride_w
    if KIND == FP8:
        scale_row = scale_ptr + (row // 128).to(tl.int64) * stride_scale
    elif KIND == FP4:
        scale_row = scale_ptr + row.to(tl.int64) * stride_scale
    else:
        scale_row = w_row
    return w_row, scale_row


@triton.jit(do_not_specialize=["T", "OUT"])
def linear_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    T,
    OUT,
    K,
    stride_xt,
    stride_xg,
    stride_w,
    stride_scale,
    stride_ot,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """BLOCK_M rows of one group for BLOCK_T tokens. Tiles of tokens are neighbours: they share the rows in L2."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(2)
    # rows past the last read the last again, and are not stored
    row = blocks_of(group * OUT + tl.minimum(m, OUT - 1), SLICES, WARPS)
    w_row, scale_row = rows_of(w_ptr, scale_ptr, row, stride_w, stride_scale, KIND)
    x_row = x_ptr + t.to(tl.int64) * stride_xt + group * stride_xg
    acc = product(x_row, t < T, w_row, scale_row, K, KIND, E8M0, EVEN, SLICES, WARPS, BLOCK_K, INTERPRET)
    at = out_ptr + (t.to(tl.int64) * stride_ot + group * OUT)[None, :] + m[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m < OUT)[:, None] & (t < T)[None, :])


def bits(tensor: Tensor) -> Tensor:
    """One-byte floats as bytes, everything else as it is."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def launch(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None, kind: str, out: torch.Tensor, config: Config) -> None:
    """Fill out [T, G, OUT] from x [T, G, K] and w [G * OUT, ...], T > 0."""
    T, G, K = x.shape
    OUT = out.shape[2]
    codes, scales = bits(w), w if scale is None else bits(scale)
    even = K % (config.slices * config.block_k) == 0
    linear_kernel[triton.cdiv(T, config.block_t), triton.cdiv(OUT, config.block_m), G](
        x,
        codes,
        scales,
        out,
        T,
        OUT,
        K,
        x.stride(0),
        x.stride(1),
        codes.stride(0),
        scales.stride(0),
        G * OUT,
        KIND=KINDS[kind],
        E8M0=scales.dtype == torch.uint8,
        EVEN=even,
        SLICES=config.slices,
        WARPS=config.num_warps,
        BLOCK_M=config.block_m,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_k,
        INTERPRET=not x.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def linear(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """`ops.linear.linear` of x [T, C]; off the GPU, that function itself."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return ours.linear(x, weight, out_dtype=out_dtype)
    return _multiply(x.unsqueeze(1), weight.data, weight.scale, weight.kind, out_dtype or x.dtype).squeeze(1)


def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    """`ops.linear.grouped_linear` of x [T, G, C]; off the GPU, that function itself."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return ours.grouped_linear(x, weight)
    return _multiply(x, weight.data, weight.scale, weight.kind, x.dtype)


def _multiply_now(x: Tensor, data: Tensor, scale: Tensor | None, kind: str, out_dtype: torch.dtype) -> Tensor:
    T, G, K = x.shape
    out = x.new_empty(T, G, data.shape[0] // G, dtype=out_dtype)
    launch(x, data, scale, kind, out, plan(T, data.shape[0], K, full=data.dtype == torch.float32))
    return out


# an op of torch, so that torch.compile sees a product and not a launch
_multiply = torch.library.custom_op("deepdecode::fallback_product", _multiply_now, mutates_args=())


@_multiply.register_fake
def _(x: Tensor, data: Tensor, scale: Any, kind: str, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], data.shape[0] // x.shape[1], dtype=out_dtype)


def attn_in(x: Tensor, weights: AttnWeights, config: ModelConfig, ratio: int) -> AttnInputs:
    """As the reference of this name. On a GPU the parts are views of two products."""
    if not x.is_cuda:
        return reference.attn_in(x, weights, config, ratio)
    q_latent, kv = linear(x, weights.q_kv).split([config.q_lora_rank, config.head_dim], dim=-1)
    parts: list[Any] = []
    if weights.rest is not None:
        d, index = config.head_dim * (2 if ratio == 4 else 1), 2 * config.index_head_dim
        sizes = [d, d, index, index, config.index_heads] if ratio == 4 else [d, d]
        parts = list(linear(x, weights.rest, wide_type(x.dtype)).split(sizes, dim=-1))
    return AttnInputs(q_latent, kv, *parts, *[None] * (5 - len(parts)))


def q_proj(inputs: AttnInputs, weights: AttnWeights, config: ModelConfig) -> tuple[Tensor, Tensor | None]:
    """As the reference of this name, of bfloat16 on a GPU; the norm is a launch before the product's. The results are views."""
    if not inputs.q_latent.is_cuda:
        return reference.q_proj(inputs, weights, config)
    out = linear(launches.rms_norm(inputs.q_latent, weights.q_norm, config.norm_eps), weights.q_b)
    width = weights.sink.shape[0] * config.head_dim
    index_q = out[:, width:].unflatten(1, (config.index_heads, -1)) if out.shape[1] > width else None
    return out[:, :width].unflatten(1, (-1, config.head_dim)), index_q


def attn_out(o: Tensor, weights: AttnWeights) -> Tensor:
    """As the reference of this name, of bfloat16 on a GPU."""
    if not o.is_cuda:
        return reference.attn_out(o, weights)
    T, per_group = len(o), weights.wo_a.shape[-1]
    return linear(grouped_linear(o.view(T, -1, per_group), weights.wo_a).view(T, -1), weights.wo_b)
