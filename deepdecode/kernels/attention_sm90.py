"""Sparse attention over fp8_584 rows on Hopper: wgmma from Gluon, in two shapes.

"narrow": keys on the M side (S = KV Q^T, O^T = KV^T P), 8, 16 or 32 heads a program; every warp loads, widens and multiplies.
"wide": 64 heads on the M side and three roles: 4 warps take Q K^T, the softmax and the left half of P V, 4 warps the right
half, 4 warps load and widen the next tile.

What carries both: rows are read 16 bytes a lane with one 8-byte load for a row's scales; a tile goes to shared memory in one
store, so no barrier stands between its groups; the merge starts early (programmatic dependent launch).

Arithmetic is bfloat16 with float32 sums. E4M3 codes are placed into bfloat16 bits (2**-120 times the value) and multiplied
once; the tile stays 2**-60 too small, so one bfloat16 factor serves scales up to 2**67, and the score's scale and the output's
factor take the 2**60 back.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from deepdecode.kernels.attention import LOG2E, Parts, words_view
from deepdecode.kernels.attention_plan import Config
from deepdecode.ops.rows import PagedRows

# Gluon renamed both after 3.6
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_RENAMED: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
SIZES = ["H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_shift", "extra_shift", "splits", "split_keys"]
# the rest goes to `_left`. 128: measured on the H200 with 3.6; 88: spills least with 3.9, where 128 leaves 424 bytes
PRODUCER_REGISTERS: gl.constexpr = gl.constexpr(88 if hasattr(gl.shared_memory_descriptor, "reinterpret") else 128)
UNIT: gl.constexpr = gl.constexpr(2.0**60)


@gluon.jit
def _view(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    if _RENAMED:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:  # noqa: RET505 (a jitted function goes on after an if without else)
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def _launch_dependents():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _widen(x, scale):
    """int32 of 4 E4M3 codes, bfloat16 factor in both halves -> two int32 of two values."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 x, y, u, v;
        prmt.b32 x, $2, 0, 0x1404;
        prmt.b32 y, $2, 0, 0x3424;
        shr.u32 u, x, 4;
        shr.u32 v, y, 4;
        and.b32 x, x, 0x80008000;
        and.b32 y, y, 0x80008000;
        lop3.b32 x, x, u, 0x07f007f0, 0xf8;
        lop3.b32 y, y, v, 0x07f007f0, 0xf8;
        mul.rn.bf16x2 $0, x, $3;
        mul.rn.bf16x2 $1, y, $3;
        }""",
        "=r,=r,r,r",
        [x, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _shrink(x):
    """Two bfloat16 times 2**-60."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 k;
        mov.b32 k, 0x21802180;
        mul.rn.bf16x2 $0, $1, k;
        }""",
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _group(x, scales, GROUP: gl.constexpr, N: gl.constexpr):
    """[N, 16] words of codes -> [N, 32] words of values. scales: int64 [N], the 8 bytes of a row."""
    byte = ((scales >> (8 * GROUP)) & 0xFF).to(gl.int32)
    # 2**60 * 2**(byte - 127); E8M0's NaN stays NaN, and so do scales from 2**68 on become infinite
    factor = gl.where(byte == 255, 0x7FC0, gl.minimum(byte + 60, 255) << 7)
    low, high = _widen(x, (factor | (factor << 16))[:, None] + gl.zeros_like(x))
    return gl.reshape(gl.join(low, high), (N, 32))


@gluon.jit
def _beside(a, b, N: gl.constexpr, W: gl.constexpr):
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (N, 2 * W))


@gluon.jit
def _find(args, key, end):
    """The index of each key, and whether it is live: int32 and bool [N]."""
    window_indices, extra_indices, window_len, window_rows, extra_rows = args
    is_extra = key >= window_len
    index = gl.load(gl.where(is_extra, extra_indices + (key - window_len), window_indices + key), mask=key < end, other=-1)
    live = (index >= 0) & (index < gl.where(is_extra, extra_rows, window_rows))
    return gl.where(live, index, 0), live


@gluon.jit
def _load(args, index, live, is_extra, CODES: gl.constexpr, ROPE: gl.constexpr):
    """The words of one row of each key: seven groups of codes, the rope values, the scales."""
    window, extra, window_stride, extra_stride, window_shift, extra_shift = args
    shift = gl.where(is_extra, extra_shift, window_shift)
    page = index >> shift
    place = index - (page << shift)
    start = gl.where(is_extra, extra, window) + page.to(gl.int64) * gl.where(is_extra, extra_stride, window_stride)
    row = gl.multiple_of(start + place * 144, 16)
    tail = (start + (144 << shift) + place * 2).to(gl.pointer_type(gl.int64))
    scales = gl.load(tail, mask=live, other=0)
    words = row[:, None] + gl.arange(0, 16, layout=gl.SliceLayout(0, CODES))[None, :]
    seen = live[:, None]
    x0 = gl.load(words, mask=seen, other=0)
    x1 = gl.load(words + 16, mask=seen, other=0)
    x2 = gl.load(words + 32, mask=seen, other=0)
    x3 = gl.load(words + 48, mask=seen, other=0)
    x4 = gl.load(words + 64, mask=seen, other=0)
    x5 = gl.load(words + 80, mask=seen, other=0)
    x6 = gl.load(words + 96, mask=seen, other=0)
    rope_row = gl.convert_layout(row, gl.SliceLayout(1, ROPE), assert_trivial=True)
    rope_live = gl.convert_layout(live, gl.SliceLayout(1, ROPE), assert_trivial=True)
    rope_words = rope_row[:, None] + (112 + gl.arange(0, 32, layout=gl.SliceLayout(0, ROPE)))[None, :]
    y = gl.load(rope_words, mask=rope_live[:, None], other=0)
    return x0, x1, x2, x3, x4, x5, x6, y, scales


@gluon.jit
def _fill(tile, raw, N: gl.constexpr):
    """Widen a tile and store it: int32 [N, 256] in shared memory."""
    x0, x1, x2, x3, x4, x5, x6, y, scales = raw
    a = _beside(_group(x0, scales, 0, N), _group(x1, scales, 1, N), N, 32)
    b = _beside(_group(x2, scales, 2, N), _group(x3, scales, 3, N), N, 32)
    c = _beside(_group(x4, scales, 4, N), _group(x5, scales, 5, N), N, 32)
    g6 = _group(x6, scales, 6, N)
    d = _beside(g6, gl.convert_layout(_shrink(y), g6.type.layout, assert_trivial=True), N, 32)
    tile.store(_beside(_beside(a, b, N, 64), _beside(c, d, N, 64), N, 128))


@gluon.jit
def _span(window_lens_ptr, extra_lens_ptr, t, window_keys, extra_keys, splits, split_keys, part):
    window_len = gl.minimum(gl.maximum(gl.load(window_lens_ptr + t), 0), window_keys)
    extra_len = gl.minimum(gl.maximum(gl.load(extra_lens_ptr + t), 0), extra_keys)
    keys = window_len + extra_len
    per = split_keys if split_keys > 0 else (keys + splits - 1) // splits
    begin = part * per
    return window_len, begin, gl.minimum(begin + per, keys)


@gluon.jit
def _unit_field(top):
    """Exponent field of the power of two that brings `top` to 2**14, kept off both ends of float32."""
    return gl.minimum(gl.maximum(268 - ((top.to(gl.int32, bitcast=True) >> 23) & 0xFF), 1), 253)


@gluon.jit
def _sink_factor(peak, total, sink):
    """What the sum of p * row takes at the end, the sink in its denominator."""
    high = gl.maximum(peak, sink)
    high = gl.where(high == float("-inf"), 0.0, high)
    fade = gl.exp2(peak - high)
    total = total * fade + gl.exp2(sink - high)
    return fade / gl.where(total == 0, 1.0, total)


@gluon.jit(do_not_specialize=SIZES)
def narrow_kernel(
    q_ptr,
    window_ptr,
    extra_ptr,
    window_indices_ptr,
    extra_indices_ptr,
    window_lens_ptr,
    extra_lens_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    part_unit_ptr,
    scale_log2,
    H,
    window_keys,
    extra_keys,
    window_rows,
    extra_rows,
    window_shift,
    extra_shift,
    window_stride,
    extra_stride,
    splits,
    split_keys,
    HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_H: gl.constexpr,
    num_warps: gl.constexpr,
):
    N: gl.constexpr = 16 * num_warps
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [num_warps, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [num_warps, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, CODES)
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_H, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SHARED_P: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [num_warps // 2, 2], [0, 1])
    if SPLIT:
        _launch_dependents()
    t = gl.program_id(1).to(gl.int64)
    part = gl.program_id(2)
    window_len, begin, end = _span(window_lens_ptr, extra_lens_ptr, t, window_keys, extra_keys, splits, split_keys, part)
    finding = (window_indices_ptr + t * window_keys, extra_indices_ptr + t * extra_keys, window_len, window_rows, extra_rows)
    loading = (window_ptr, extra_ptr, window_stride, extra_stride, window_shift, extra_shift)

    key = begin + gl.arange(0, N, layout=ROWS)
    index, live = _find(finding, key, end)
    raw = _load(loading, index, live, key >= window_len, CODES, ROPE)
    next_index, next_live = _find(finding, key + N, end)
    head = gl.program_id(0) * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, HEADS))
    channel = gl.arange(0, 512, layout=gl.SliceLayout(0, HEADS))
    q = gl.load(q_ptr + (t * H + head[:, None]) * 512 + channel[None, :], mask=(head < H)[:, None], other=0.0)
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 512], SHARED)
    q_shared.store(q)
    kv = gl.allocate_shared_memory(gl.bfloat16, [N, 512], SHARED)
    tile = _view(kv, gl.int32, [N, 256], WORDS)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, N], SHARED_P)

    peak = gl.full([BLOCK_H], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
    sums = gl.zeros([N, BLOCK_H], gl.float32, layout=MMA)
    acc = gl.zeros([512, BLOCK_H], gl.float32, layout=MMA)
    for _ in range((end - begin + N - 1) // N):
        seen = gl.convert_layout(live.to(gl.int32), gl.SliceLayout(1, MMA)) > 0
        _fill(tile, raw, N)
        # the next rows are on their way while this tile is multiplied
        key += N
        index, live = next_index, next_live
        raw = _load(loading, index, live, key >= window_len, CODES, ROPE)
        next_index, next_live = _find(finding, key + N, end)
        fence_async_shared()
        zero = gl.zeros([N, BLOCK_H], gl.float32, layout=MMA)
        score = warpgroup_mma(kv, q_shared.permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        score = gl.where(seen[:, None], score * scale_log2, float("-inf"))
        new_peak = gl.maximum(peak, gl.max(score, 0))
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = gl.exp2(score - base[None, :])
        fade = gl.exp2(peak - base)
        peak = new_peak
        # summed over the keys once, at the end
        sums = sums * fade[None, :] + p
        p_shared.permute((1, 0)).store(p.to(gl.bfloat16))
        fence_async_shared()
        acc = warpgroup_mma(kv.permute((1, 0)), p_shared.permute((1, 0)), acc * fade[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

    total = gl.sum(sums, 0)
    some = gl.where(total == 0, 1.0, total)
    lse_log2 = gl.where(total == 0, float("-inf"), peak + gl.log2(some))
    h = gl.program_id(0) * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, MMA))
    out_h = gl.program_id(0) * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, OUT))
    out_channel = gl.arange(0, 512, layout=gl.SliceLayout(1, OUT))
    if SPLIT:
        field = _unit_field(gl.max(gl.abs(acc), 0) / some)
        acc = acc * ((field << 23).to(gl.float32, bitcast=True) / some)[None, :]
        row = (t * splits + part) * H
        at = part_ptr + (row + out_h[None, :]) * 512 + out_channel[:, None]
        gl.store(at, gl.convert_layout(acc.to(gl.float16), OUT), mask=(out_h < H)[None, :])
        gl.store(part_unit_ptr + row + h, ((254 - field) << 23).to(gl.float32, bitcast=True) * UNIT, mask=h < H)
        gl.store(part_lse_ptr + row + h, lse_log2, mask=h < H)
    else:
        if HAS_LSE:
            gl.store(lse_ptr + t * H + h, lse_log2 / 1.4426950408889634, mask=h < H)
        factor = 1.0 / some
        if HAS_SINK:
            sink = gl.load(sink_ptr + h, mask=h < H, other=0.0) * 1.4426950408889634
            factor = _sink_factor(peak, total, sink)
        result = (acc * (factor * UNIT)[None, :]).to(gl.bfloat16)
        at = out_ptr + (t * H + out_h[None, :]) * 512 + out_channel[:, None]
        gl.store(at, gl.convert_layout(result, OUT), mask=(out_h < H)[None, :])


@gluon.jit
def _producer(finding, loading, begin, end, count, tile, bias, full, empty):
    """4 warps: widen tile after tile of 64 rows into two buffers, with what each key adds to its scores (0 or -inf)."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, CODES)
    window_len = finding[2]
    key = begin + gl.arange(0, 32, layout=ROWS)
    index, live = _find(finding, key, end)
    raw = _load(loading, index, live, key >= window_len, CODES, ROPE)
    next_index, next_live = _find(finding, key + 32, end)
    for i in range(count):
        b = i & 1
        for half in gl.static_range(2):
            now, now_live = raw, live
            key += 32
            index, live = next_index, next_live
            raw = _load(loading, index, live, key >= window_len, CODES, ROPE)
            next_index, next_live = _find(finding, key + 32, end)
            if half == 0:
                mbarrier.wait(empty.index(b), ((i >> 1) & 1) ^ 1)
            bias.index(b).slice(half * 32, 32, dim=0).store(gl.where(now_live, 0.0, float("-inf")))
            _fill(tile.index(b).slice(half * 32, 32, dim=0), now, 32)
        fence_async_shared()
        _barrier()
        mbarrier.arrive(full.index(b), count=1)


@gluon.jit
def _left(ends, q_ptr, sink_ptr, lse_ptr, part_lse_ptr, part_unit_ptr, scale_log2, t, first_head, row, count,
          q_shared, kv, p_shared, fades, bias, full, empty, p_full, done,
          HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """4 warps: Q K^T for 64 heads and 64 keys, the softmax, P V for the left 256 channels with P in registers."""
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    VALUE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUE, k_width=2)
    H = ends[2]
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, HEADS))
    for half in gl.static_range(2):
        channel = half * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, HEADS))
        q = gl.load(q_ptr + (t * H + head[:, None]) * 512 + channel[None, :], mask=(head < H)[:, None], other=0.0)
        q_shared.slice(half * 256, 256, dim=1).store(q)
    fence_async_shared()
    peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORE))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORE))
    acc = gl.zeros([64, 256], gl.float32, layout=VALUE)
    zero = gl.zeros([64, 64], gl.float32, layout=SCORE)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    score = warpgroup_mma(q_shared, kv.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    for i in range(count):
        b = i & 1
        n = (i + 1) & 1
        x = score * scale_log2 + bias.index(b).load(gl.SliceLayout(0, SCORE))[None, :]
        new_peak = gl.maximum(peak, gl.max(x, 1))
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = gl.exp2(x - base[:, None])
        fade = gl.exp2(peak - base)
        total = total * fade + gl.sum(p, 1)
        peak = new_peak
        p = p.to(gl.bfloat16)
        p_shared.index(b).store(p)
        fades.index(b).store(fade)
        fence_async_shared()
        _barrier()
        mbarrier.arrive(p_full.index(b), count=1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, VALUE))[:, None]
        mbarrier.wait(full.index(n), ((i + 1) >> 1) & 1, pred=i + 1 < count)
        acc = warpgroup_mma(gl.convert_layout(p, P_OPERAND), kv.index(b).slice(0, 256, dim=1), acc, is_async=True)
        # the next tile's scores, behind this one's values; of the last tile's twin nothing is used
        score = warpgroup_mma(q_shared, kv.index(n).permute((1, 0)), zero, use_acc=False, is_async=True)
        acc, score = warpgroup_mma_wait(0, deps=[acc, score])
        _barrier()
        mbarrier.arrive(empty.index(b), count=1)
    h = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORE))
    some = gl.where(total == 0, 1.0, total)
    lse_log2 = gl.where(total == 0, float("-inf"), peak + gl.log2(some))
    if SPLIT:
        gl.store(part_lse_ptr + row + h, lse_log2, mask=h < H)
        factor = 1.0 / some
    else:
        if HAS_LSE:
            gl.store(lse_ptr + row + h, lse_log2 / 1.4426950408889634, mask=h < H)
        factor = 1.0 / some
        if HAS_SINK:
            sink = gl.load(sink_ptr + h, mask=h < H, other=0.0) * 1.4426950408889634
            factor = _sink_factor(peak, total, sink)
        factor = factor * UNIT
    fades.index(2).store(factor)
    _barrier()
    mbarrier.arrive(done, count=1)
    _write(
        ends,
        acc * gl.convert_layout(factor, gl.SliceLayout(1, VALUE))[:, None],
        q_shared,
        part_unit_ptr,
        row,
        first_head,
        0,
        SPLIT,
    )


@gluon.jit
def _right(
    ends, part_unit_ptr, first_head, row, count, q_shared, kv, p_shared, fades, empty, p_full, done, SPLIT: gl.constexpr
):
    """4 warps: P V for the right 256 channels."""
    VALUE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    acc = gl.zeros([64, 256], gl.float32, layout=VALUE)
    for i in range(count):
        b = i & 1
        mbarrier.wait(p_full.index(b), (i >> 1) & 1)
        acc = acc * fades.index(b).load(gl.SliceLayout(1, VALUE))[:, None]
        acc = warpgroup_mma(p_shared.index(b), kv.index(b).slice(256, 256, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(empty.index(b), count=1)
    mbarrier.wait(done, 0)
    factor = fades.index(2).load(gl.SliceLayout(1, VALUE))
    _write(ends, acc * factor[:, None], q_shared, part_unit_ptr, row, first_head, 256, SPLIT)


@gluon.jit
def _write(ends, values, q_shared, part_unit_ptr, row, first_head, CHANNEL: gl.constexpr, SPLIT: gl.constexpr):
    """256 channels of 64 heads through shared memory (q is no longer needed), so that each lane stores 16 bytes.

    A split's partial output is float16 in a unit of its own for each half of the channels.
    """
    out_ptr, part_ptr, H = ends
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, HEADS))
    channel = CHANNEL + gl.arange(0, 256, layout=gl.SliceLayout(0, HEADS))
    at = (row + head[:, None]) * 512 + channel[None, :]
    if SPLIT:
        field = _unit_field(gl.max(gl.abs(values), 1))
        values = values * (field << 23).to(gl.float32, bitcast=True)[:, None]
        h = first_head + gl.arange(0, 64, layout=field.type.layout)
        unit = ((254 - field) << 23).to(gl.float32, bitcast=True) * UNIT
        gl.store(part_unit_ptr + (row + h) * 2 + CHANNEL // 256, unit, mask=h < H)
        staged = _view(q_shared, gl.float16, [64, 512], SHARED).slice(CHANNEL, 256, dim=1)
        staged.store(values.to(gl.float16))
        gl.store(part_ptr + at, staged.load(HEADS), mask=(head < H)[:, None])
    else:
        staged = q_shared.slice(CHANNEL, 256, dim=1)
        staged.store(values.to(gl.bfloat16))
        gl.store(out_ptr + at, staged.load(HEADS), mask=(head < H)[:, None])


@gluon.jit(do_not_specialize=SIZES)
def wide_kernel(
    q_ptr,
    window_ptr,
    extra_ptr,
    window_indices_ptr,
    extra_indices_ptr,
    window_lens_ptr,
    extra_lens_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    part_unit_ptr,
    scale_log2,
    H,
    window_keys,
    extra_keys,
    window_rows,
    extra_rows,
    window_shift,
    extra_shift,
    window_stride,
    extra_stride,
    splits,
    split_keys,
    HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr,
    SPLIT: gl.constexpr,
    num_warps: gl.constexpr,
):
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if SPLIT:
        _launch_dependents()
    t = gl.program_id(1).to(gl.int64)
    part = gl.program_id(2)
    first_head = gl.program_id(0) * 64
    window_len, begin, end = _span(window_lens_ptr, extra_lens_ptr, t, window_keys, extra_keys, splits, split_keys, part)
    count = gl.maximum((end - begin + 63) // 64, 0)
    row = (t * splits + part) * H if SPLIT else t * H
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [64, 512], SHARED)
    kv = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], SHARED)
    tile = _view(kv, gl.int32, [2, 64, 256], WORDS)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    fades = gl.allocate_shared_memory(gl.float32, [4, 64], PLAIN)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for b in gl.static_range(2):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(empty.index(b), count=2)
        mbarrier.init(p_full.index(b), count=1)
    mbarrier.init(done, count=1)
    finding = (window_indices_ptr + t * window_keys, extra_indices_ptr + t * extra_keys, window_len, window_rows, extra_rows)
    loading = (window_ptr, extra_ptr, window_stride, extra_stride, window_shift, extra_shift)
    ends = (out_ptr, part_ptr, H)
    gl.warp_specialize(
        [
            (_left, (ends, q_ptr, sink_ptr, lse_ptr, part_lse_ptr, part_unit_ptr, scale_log2, t, first_head, row, count,
                     q_shared, kv, p_shared, fades, bias, full, empty, p_full, done, HAS_SINK, HAS_LSE, SPLIT)),
            (_right, (ends, part_unit_ptr, first_head, row, count, q_shared, kv, p_shared, fades, empty, p_full, done, SPLIT)),
            (_producer, (finding, loading, begin, end, count, tile, bias, full, empty)),
        ],
        [4, 4],
        [160, PRODUCER_REGISTERS],
    )  # fmt: skip


def launch(
    q: torch.Tensor,
    window: PagedRows,
    window_indices: torch.Tensor,
    window_lens: torch.Tensor,
    extra: PagedRows,
    extra_indices: torch.Tensor,
    extra_lens: torch.Tensor,
    *,
    extra_keys: int,
    sink: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    parts: Parts,
    config: Config,
) -> None:
    """The split kernel alone; `deepdecode.kernels.attention.launch` is the caller, and merges."""
    T, H, _ = q.shape
    window_words, extra_words = words_view(window), words_view(extra)
    narrow = config.kernel == "narrow"
    kernel = narrow_kernel if narrow else wide_kernel
    kernel[triton.cdiv(H, config.block_h), T, config.splits](
        q,
        window_words,
        extra_words,
        window_indices,
        extra_indices,
        window_lens,
        extra_lens,
        sink,
        out,
        lse,
        parts.out,
        parts.lse,
        parts.unit,
        # the rows in shared memory are 2**60 too small
        scale * LOG2E * 2.0**60,
        H,
        window_indices.shape[1],
        extra_keys,
        window.num_rows,
        extra.num_rows,
        window.page_size.bit_length() - 1,
        extra.page_size.bit_length() - 1,
        window_words.stride(0),
        extra_words.stride(0),
        config.splits,
        config.split_keys,
        HAS_SINK=sink is not None,
        HAS_LSE=lse is not None,
        SPLIT=config.splits > 1,
        num_warps=config.num_warps,
        **({"BLOCK_H": config.block_h} if narrow else {}),
    )


def compile_args(config: Config) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of both kernels as `launch` passes them, to compile them without a GPU."""
    pointers = {"q": "bf16", "sink": "fp32", "out": "bf16", "part": "fp16", "part_lse": "fp32", "part_unit": "fp32"}
    words = ("window", "extra", "window_indices", "extra_indices", "window_lens", "extra_lens")
    types = {f"{name}_ptr": f"*{kind}:16" for name, kind in (pointers | dict.fromkeys(words, "i32")).items()}
    types |= {"scale_log2": "fp32"} | dict.fromkeys(SIZES, "i32") | dict.fromkeys(("window_stride", "extra_stride"), "i32:16")
    constants: dict[str, object] = {"HAS_SINK": True, "HAS_LSE": False, "SPLIT": config.splits > 1}
    return types, constants | ({"BLOCK_H": config.block_h} if config.kernel == "narrow" else {})
