"""From a decode step's projections to what its attention reads and its caches keep, in one launch.

Program (role, t) does one of these for token t:
    a block of query heads: what is left of the latent's norm, norm over the head, RoPE
    the window row: norm, RoPE, FP8, into the ring
    the compressor: into its state, and where the token completes an entry: pool, norm, RoPE, FP8, into the cache
    the indexer's compressor: the same, and Hadamard
    16 heads of the indexer's query: what is left of that norm, RoPE, Hadamard, FP8, its scale folded into the head weights
The roles share nothing, so each is as long as its own chain; the compressors come first, since theirs is the longest.
Values are rounded where the fine ops round them: to the activations' type after each norm, rotation and Hadamard.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

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
    write_plain,
)
from deepdecode.ops.rows import PagedRows


@dataclass(frozen=True)
class Config:
    """block_h: query heads of one program."""

    block_h: int
    num_warps: int
    pdl: bool


def plan(H: int, arch: int) -> Config:
    """Pure; no sum depends on it. Four warps lie side by side over 512 channels, so that a pool over rows stays in a thread."""
    # 8 or 16 heads would have the shape of the rows that are pooled, and the layout of one is bad for the other
    return Config(min(4, triton.next_power_of_2(H)), num_warps=4, pdl=arch >= 90)


def supports(
    T: int, D: int, R: int, dtype: str, fmt: str, index: tuple[int, int] | None, index_fmt: str | None, state: str
) -> str | None:
    """Why no kernel runs; None if one does. index: heads and width of the indexer, None where there is none."""
    if dtype != "bfloat16" or state != "float32":
        return f"activations and states must be bfloat16 and float32, got {dtype} and {state}"
    if T > 65535:
        return f"T must be at most 65535, got {T}"
    if D < 16 or D & (D - 1) or D > 1024 or R % 2 or not 0 < R <= D:
        return f"head dim must be a power of two from 16 to 1024 and rope dim even, got {D} and {R}"
    if fmt not in ("fp8_584", "bf16") or (index and index_fmt not in ("fp8_132", "bf16")):
        return f"caches must be fp8_584 or bf16, and fp8_132 or bf16, got {fmt} and {index_fmt}"
    if index and (index[1] < 16 or index[1] & (index[1] - 1) or index[1] > 128 or index[1] < R):
        return f"index width must be a power of two from 16 to 128 and at least the rope dim, got {index[1]}"
    return None


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _latent_unit(latent_ptr, eps, LATENT: tl.constexpr):
    """What the query's products are short of where their input was multiplied by its norm's weight alone."""
    BLOCK: tl.constexpr = triton.next_power_of_2(LATENT)
    channel = tl.arange(0, BLOCK)
    x = tl.load(latent_ptr + channel, mask=channel < LATENT, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x) / LATENT + eps)


@triton.jit
def _compress(
    kv_ptr,
    gate_ptr,
    ape_ptr,
    norm_ptr,
    state_kv_ptr,
    state_score_ptr,
    cache_ptr,
    write_ptr,
    freqs_ptr,
    like,
    t,
    position,
    slot,
    slots,
    rows,
    page_size,
    stride,
    stride_t,
    norm_eps,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    FP8: tl.constexpr,
    HADAMARD: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * D if RATIO == 4 else D
    RING: tl.constexpr = 8 if RATIO == 4 else RATIO
    # a token speaks through the last D of its channels in its own block's entry
    OWN: tl.constexpr = WIDTH - D
    if (slot >= 0) & (slot < slots):
        kv_row = kv_ptr + t * stride_t
        gate_row = gate_ptr + t * stride_t
        ape_row = ape_ptr + (position % RATIO) * WIDTH
        ring = slot.to(tl.int64) * RING
        channel = tl.arange(0, WIDTH)
        own = (ring + position % RING) * WIDTH + channel
        tl.store(state_kv_ptr + own, tl.load(kv_row + channel))
        tl.store(state_score_ptr + own, tl.load(gate_row + channel) + tl.load(ape_row + channel))
        if (position + 1) % RATIO == 0:
            d = tl.arange(0, D)
            # this token's row is taken from where it came: other threads are still storing it
            own_kv = tl.load(kv_row + OWN + d)[None, :]
            own_score = (tl.load(gate_row + OWN + d) + tl.load(ape_row + OWN + d))[None, :]
            peak = tl.full([D], float("-inf"), tl.float32)
            total = tl.zeros([D], tl.float32)
            x = tl.zeros([D], tl.float32)
            # rows of ratio 128 come from far: more of them at once
            ROWS: tl.constexpr = 8 if RING == 8 else 16
            for first in range(0, RING, ROWS):
                row = first + tl.arange(0, ROWS)
                p = position - (RING - 1) + row
                # ratio 4: the block before speaks through the first half of its channels
                half = tl.where(row < RING // 2, 0, OWN) if RATIO == 4 else row * 0
                at = (ring + (p + RING) % RING)[:, None] * WIDTH + half[:, None] + d[None, :]
                known = ((p >= 0) & (p < position))[:, None]
                kv = tl.load(state_kv_ptr + at, mask=known, other=0.0)  # [ROWS, D]
                score = tl.load(state_score_ptr + at, mask=known, other=float("-inf"))
                kv = tl.where((p == position)[:, None], own_kv, kv)
                score = tl.where((p == position)[:, None], own_score, score)
                new_peak = tl.maximum(peak, tl.max(score, 0))
                # rows before the sequence's first have a score of -inf, and nothing before them
                base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                weight = tl.exp(score - base[None, :])
                fade = tl.exp(peak - base)
                total = total * fade + tl.sum(weight, 0)
                x = x * fade + tl.sum(weight * kv, 0)
                peak = new_peak
            x = _rounded((x / total)[None, :], like)
            x = _rounded(normed(x, norm_eps, D) * tl.load(norm_ptr + d).to(tl.float32)[None, :], like)
            cos, sin, turns = turn(position + 1 - RATIO, freqs_ptr, D, R, INTERPRET)
            x = _rounded(rotate(x, cos, sin, turns, 1, D), like)
            if HADAMARD:
                # 16 times the same row: what a tensor core takes
                x = hadamard(tl.broadcast_to(x, [16, D]).to(like.dtype.element_ty), D)
                x = _rounded(tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, x, 0.0), 0)[None, :], like)
            entry = tl.load(write_ptr + t)
            if not FP8:
                write_plain(x, cache_ptr, entry, rows, page_size, stride, D)
            elif HADAMARD:
                write_132(x, cache_ptr, entry, rows, page_size, stride, INTERPRET)
            else:
                write_584(x, cache_ptr, entry, rows, page_size, stride)


@triton.jit(
    do_not_specialize=[
        "H", "slots", "window_rows", "window_page", "comp_rows", "comp_page", "key_rows", "key_page",
    ]
)  # fmt: skip
def rope_prepare_kernel(
    q_ptr,
    kv_ptr,
    kv_norm_ptr,
    latent_ptr,
    q_out_ptr,
    positions_ptr,
    slots_ptr,
    freqs_ptr,
    window_write_ptr,
    entry_write_ptr,
    window_ptr,
    comp_ptr,
    keys_ptr,
    comp_kv_ptr,
    comp_gate_ptr,
    comp_ape_ptr,
    comp_norm_ptr,
    comp_state_kv_ptr,
    comp_state_score_ptr,
    index_kv_ptr,
    index_gate_ptr,
    index_ape_ptr,
    index_norm_ptr,
    index_state_kv_ptr,
    index_state_score_ptr,
    index_q_ptr,
    index_q_out_ptr,
    weights_ptr,
    weights_out_ptr,
    H,
    slots,
    window_rows,
    window_page,
    window_stride,
    comp_rows,
    comp_page,
    comp_stride,
    key_rows,
    key_page,
    key_stride,
    stride_qt,
    stride_kvt,
    stride_latent_t,
    stride_comp_t,
    stride_index_t,
    stride_index_qt,
    stride_weights_t,
    norm_eps,
    index_scale,
    RATIO: tl.constexpr,
    FP8: tl.constexpr,
    KEYS_FP8: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INDEX_H: tl.constexpr,
    INDEX_D: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    FIRST: tl.constexpr = 0 if RATIO == 0 else (2 + (INDEX_H + 15) // 16 if RATIO == 4 else 1)
    role = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions_ptr + t)
    slot = tl.load(slots_ptr + t)
    if role > FIRST:
        h = (role - FIRST - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        channel = tl.arange(0, D)
        at = h[:, None] * D + channel[None, :]
        q = tl.load(q_ptr + t * stride_qt + at, mask=(h < H)[:, None], other=0.0).to(tl.float32)
        if LATENT > 0:
            q *= _latent_unit(latent_ptr + t * stride_latent_t, norm_eps, LATENT)
        q = _rounded(normed(q, norm_eps, D), q_ptr)
        cos, sin, turns = turn(position, freqs_ptr, D, R, INTERPRET)
        q = rotate(q, cos, sin, turns, BLOCK_H, D)
        tl.store(q_out_ptr + t * H * D + at, q.to(q_out_ptr.dtype.element_ty), mask=(h < H)[:, None])
    elif role == FIRST:
        channel = tl.arange(0, D)[None, :]
        kv = tl.load(kv_ptr + t * stride_kvt + channel).to(tl.float32)  # [1, D]
        kv = _rounded(normed(kv, norm_eps, D) * tl.load(kv_norm_ptr + channel).to(tl.float32), q_ptr)
        cos, sin, turns = turn(position, freqs_ptr, D, R, INTERPRET)
        kv = _rounded(rotate(kv, cos, sin, turns, 1, D), q_ptr)
        row = tl.load(window_write_ptr + t)
        if FP8:
            write_584(kv, window_ptr, row, window_rows, window_page, window_stride)
        else:
            write_plain(kv, window_ptr, row, window_rows, window_page, window_stride, D)
    elif RATIO > 0:
        if role == 0:
            _compress(
                comp_kv_ptr, comp_gate_ptr, comp_ape_ptr, comp_norm_ptr, comp_state_kv_ptr, comp_state_score_ptr,
                comp_ptr, entry_write_ptr, freqs_ptr, q_ptr, t, position, slot, slots, comp_rows, comp_page, comp_stride,
                stride_comp_t, norm_eps, RATIO, D, R, FP8, False, INTERPRET,
            )  # fmt: skip
        elif RATIO == 4:
            if role == 1:
                _compress(
                    index_kv_ptr, index_gate_ptr, index_ape_ptr, index_norm_ptr, index_state_kv_ptr, index_state_score_ptr,
                    keys_ptr, entry_write_ptr, freqs_ptr, q_ptr, t, position, slot, slots, key_rows, key_page, key_stride,
                    stride_index_t, norm_eps, RATIO, INDEX_D, R, KEYS_FP8, True, INTERPRET,
                )  # fmt: skip
            else:
                head = (role - 2) * 16 + tl.arange(0, 16)
                known = head < INDEX_H
                at = head[:, None] * INDEX_D + tl.arange(0, INDEX_D)[None, :]
                x = tl.load(index_q_ptr + t * stride_index_qt + at, mask=known[:, None], other=0.0).to(tl.float32)
                weight = tl.load(weights_ptr + t * stride_weights_t + head, mask=known, other=0.0) * index_scale
                cos, sin, turns = turn(position, freqs_ptr, INDEX_D, R, INTERPRET)
                if LATENT > 0:
                    x *= _latent_unit(latent_ptr + t * stride_latent_t, norm_eps, LATENT)
                x = rotate(x, cos, sin, turns, 16, INDEX_D)
                x = _rounded(hadamard(x.to(q_ptr.dtype.element_ty), INDEX_D), q_ptr)
                out = index_q_out_ptr + t * (INDEX_H * INDEX_D) + at
                if KEYS_FP8:
                    scale = row_scale(tl.max(magnitude(x), 1), INTERPRET)  # [16]
                    codes = e4m3(quotient(x, scale[:, None], INTERPRET))
                    tl.store(out, codes.to(tl.uint8), mask=known[:, None])
                    weight = weight * scale
                else:
                    tl.store(out, x.to(index_q_out_ptr.dtype.element_ty), mask=known[:, None])
                tl.store(weights_out_ptr + t * INDEX_H + head, weight, mask=known)


@dataclass(frozen=True)
class Compressor:
    """What one compressor reads and writes: its products kv, gate [T, coff * d] of equal strides, weights, state and cache."""

    kv: torch.Tensor
    gate: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor
    state_kv: torch.Tensor
    state_score: torch.Tensor
    cache: PagedRows


def launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm: torch.Tensor,
    window: PagedRows,
    window_write: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    freqs: torch.Tensor,
    compressor: Compressor | None,
    index: Compressor | None,
    entry_write: torch.Tensor | None,
    index_q: torch.Tensor | None,
    index_weights: torch.Tensor | None,
    latent: torch.Tensor | None = None,
    *,
    ratio: int,
    num_slots: int,
    norm_eps: float,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """q [T, H, D] ready; index_q [T, heads, d] and its weights [T, heads] float32, None off ratio 4. Caches in place.

    latent [T, q_lora]: q and index_q are short of its inverse root mean square. It, q, kv, index_q and index_weights may have
    any stride from token to token; T > 0.
    """
    T, H, D = q.shape
    q_out = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
    index_out = weights_out = None
    index_heads, index_dim, index_scale = 16, 16, 1.0
    if index is not None and index_q is not None and index_weights is not None:
        _, index_heads, index_dim = index_q.shape
        index_scale = index_dim**-0.5 * index_heads**-0.5
        fp8 = index.cache.fmt == "fp8_132"
        index_out = torch.empty(index_q.shape, dtype=torch.uint8 if fp8 else q.dtype, device=q.device)
        weights_out = torch.empty(T, index_heads, dtype=torch.float32, device=q.device)

    def parts(side: Compressor | None) -> tuple[list[torch.Tensor | None], int]:
        if side is None:
            return [None] * 6, 0
        return [side.kv, side.gate, side.ape, side.norm, side.state_kv, side.state_score], side.kv.stride(0)

    def place(cache: PagedRows | None) -> tuple[int, int, int]:
        return (0, 1, 0) if cache is None else (cache.num_rows, cache.page_size, cache.data.stride(0))

    comp, comp_stride = parts(compressor)
    idx, idx_stride = parts(index)
    comp_cache = compressor.cache if compressor else None
    key_cache = index.cache if index else None
    roles = {0: 1, 4: 3 + triton.cdiv(index_heads, 16), 128: 2}[ratio] + triton.cdiv(H, config.block_h)
    rope_prepare_kernel[roles, T](
        q,
        kv,
        kv_norm,
        latent,
        q_out,
        positions,
        slots,
        freqs,
        window_write,
        entry_write,
        window.data,
        comp_cache.data if comp_cache else None,
        key_cache.data if key_cache else None,
        *comp,
        *idx,
        index_q,
        index_out,
        index_weights,
        weights_out,
        H,
        num_slots,
        *place(window),
        *place(comp_cache),
        *place(key_cache),
        q.stride(0),
        kv.stride(0),
        0 if latent is None else latent.stride(0),
        comp_stride,
        idx_stride,
        index_q.stride(0) if index_q is not None else 0,
        index_weights.stride(0) if index_weights is not None else 0,
        norm_eps,
        index_scale,
        RATIO=ratio,
        FP8=window.fmt == "fp8_584",
        KEYS_FP8=key_cache is not None and key_cache.fmt == "fp8_132",
        D=D,
        R=2 * freqs.shape[0],
        INDEX_H=index_heads,
        INDEX_D=index_dim,
        LATENT=0 if latent is None else latent.shape[1],
        BLOCK_H=config.block_h,
        PDL=config.pdl,
        INTERPRET=not q.is_cuda,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if config.pdl else {}),
    )
    if index_out is not None and index_out.dtype == torch.uint8:
        index_out = index_out.view(torch.float8_e4m3fn)
    return q_out, index_out, weights_out
