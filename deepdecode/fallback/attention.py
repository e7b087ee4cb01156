"""Rungs 0 and 1 of sparse attention: the yardsticks that the ladder and the benchmark measure the product against.

Rung 0 is what engines run where no tuned kernel exists: one program for each (token, head), which reads every row again for
every head, widens it element by element with a scale loaded for each element, and multiplies and sums without tensor cores.
Window and compressed rows are two launches, each rounded to bfloat16, merged with each other and with the sink by torch ops.

Rung 1 is the product's kernel without the split: tensor cores, rows read once for a block of heads, one program for all keys.
"""

import torch
import triton
import triton.language as tl

from deepdecode.kernels import attention as kernel
from deepdecode.kernels.attention_plan import card_of, case_of, plan_unsplit
from deepdecode.ops.rows import PagedRows

Tensor = torch.Tensor


# as the engines do: chosen at the first call of each power of two of keys
@triton.autotune(
    configs=[
        triton.Config({"BLOCK_N": block_n}, num_warps=warps, num_stages=2) for block_n, warps in ((16, 4), (16, 8), (32, 8))
    ],
    key=["rounded_keys"],
)
@triton.jit
def per_head_kernel(
    q_ptr,
    codes_ptr,
    scales_ptr,
    rope_ptr,
    indices_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    scale,
    H,
    K,
    rows,
    page_size,
    page_stride,
    rounded_keys,
    BLOCK_N: tl.constexpr,
):
    t = tl.program_id(0)
    h = tl.program_id(1)
    channel = tl.arange(0, 512)
    is_code = channel < 448
    rope = tl.arange(0, 64)
    at = (t.to(tl.int64) * H + h) * 512
    q = tl.load(q_ptr + at + channel, mask=is_code, other=0.0).to(tl.float32) * scale
    q_rope = tl.load(q_ptr + at + 448 + rope).to(tl.float32) * scale
    length = tl.minimum(tl.load(lens_ptr + t), K)
    peak = -1e30
    total = 0.0
    acc = tl.zeros([512], tl.float32)
    acc_rope = tl.zeros([64], tl.float32)
    # to the full width: lanes past the length are masked, not skipped
    for n in range(0, K, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        index = tl.load(indices_ptr + t.to(tl.int64) * K + key, mask=key < K, other=-1)
        live = (key < length) & (index >= 0) & (index < rows)
        index = tl.where(live, index, 0)
        page = (index // page_size).to(tl.int64) * page_stride
        place = (index % page_size).to(tl.int64)
        seen = live[:, None] & is_code[None, :]
        row = page + place * 576
        codes = tl.load(codes_ptr + row[:, None] + channel[None, :], mask=seen, other=0.0).to(tl.float32)
        # one load for each element, where 7 a row would do
        scale_at = (page + page_size * 576 + place * 8)[:, None] + (channel // 64)[None, :]
        exponent = tl.load(scales_ptr + scale_at, mask=seen, other=127).to(tl.float32)
        kv = tl.where(seen, codes * tl.exp2(exponent - 127.0), 0.0)  # [BLOCK_N, 512]
        kv_rope = tl.load(rope_ptr + ((row + 448) // 2)[:, None] + rope[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        score = tl.sum(q[None, :] * kv, 1) + tl.sum(q_rope[None, :] * kv_rope, 1)
        score = tl.where(live, score, -1e30) * 1.4426950408889634
        new_peak = tl.maximum(peak, tl.max(score, 0))
        fade = tl.exp2(peak - new_peak)
        p = tl.where(live, tl.exp2(score - new_peak), 0.0)
        total = total * fade + tl.sum(p, 0)
        acc = acc * fade + tl.sum(p[:, None] * kv, 0)
        acc_rope = acc_rope * fade + tl.sum(p[:, None] * kv_rope, 0)
        peak = new_peak
    some = tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + at + channel, (acc / some).to(out_ptr.dtype.element_ty), mask=is_code)
    tl.store(out_ptr + at + 448 + rope, (acc_rope / some).to(out_ptr.dtype.element_ty))
    lse = tl.where(total > 0.0, peak / 1.4426950408889634 + tl.log(some), float("-inf"))
    tl.store(lse_ptr + t.to(tl.int64) * H + h, lse)


def sparse_attn_per_head(
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
    """Rung 0: out [T, H, 512] in q's dtype, lse float32 [T, H] with the sink excluded. fp8_584 caches only."""
    out, lse = _one_cache(q, window, window_indices, window_lens, scale)
    if extra is not None and extra_indices is not None and extra_lens is not None:
        other, other_lse = _one_cache(q, extra, extra_indices, extra_lens, scale)
        out, lse = _merge(out, lse, other, other_lse)
    return (out if sink is None else _apply_sink(out, lse, sink)), lse


def _one_cache(q: Tensor, cache: PagedRows, indices: Tensor, lens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if cache.fmt != "fp8_584":
        raise ValueError(f"sparse_attn_per_head: cache must be fp8_584, got {cache.fmt}")
    T, H, _ = q.shape
    out = torch.zeros_like(q)
    lse = torch.full((T, H), float("-inf"), dtype=torch.float32, device=q.device)
    flat = cache.data.as_strided(((cache.data.shape[0] - 1) * cache.data.stride(0) + cache.page_size * 584,), (1,))
    rope = flat[: flat.numel() // 2 * 2].view(torch.bfloat16)
    per_head_kernel[T, H](
        q,
        flat.view(torch.float8_e4m3fn),
        flat,
        rope,
        indices,
        lens,
        out,
        lse,
        scale,
        H,
        indices.shape[1],
        cache.num_rows,
        cache.page_size,
        cache.data.stride(0),
        triton.next_power_of_2(indices.shape[1]),
    )
    return out, lse


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    top = torch.maximum(lse, other_lse)
    weight = torch.where(lse > -1e20, torch.exp(lse - top), torch.zeros_like(lse))
    other_weight = torch.where(other_lse > -1e20, torch.exp(other_lse - top), torch.zeros_like(lse))
    total = (weight + other_weight).clamp(min=1e-20)
    merged = (weight.unsqueeze(-1) * out.float() + other_weight.unsqueeze(-1) * other.float()) / total.unsqueeze(-1)
    return merged.to(out.dtype), torch.where(top > -1e20, top + torch.log(total), top)


def _apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    both = torch.logaddexp(lse, sink.view(1, -1).expand_as(lse))
    weight = torch.where(lse > -1e20, torch.exp(lse - both), torch.zeros_like(lse))
    return (out.float() * weight.unsqueeze(-1)).to(out.dtype)


def sparse_attn_unsplit(
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
    """Rung 1: out [T, H, 512] bfloat16 and lse float32 [T, H], by the product's kernel with one program for all keys."""
    config = plan_unsplit(case_of(q, window, window_indices, extra, extra_indices), card_of(q.device))
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    args = (q, window, window_indices, window_lens, extra, extra_indices, extra_lens)
    kernel.launch(*args, sink=sink, scale=scale, out=out, lse=lse, workspace=None, config=config)
    return out, lse
