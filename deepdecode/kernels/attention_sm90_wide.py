"""Sparse attention on Hopper for 16 to 128 heads: 64 heads on the M side of wgmma, and three roles of 4 warps each.

One role takes Q K^T, the softmax and the left half of P V with P in registers, one the right half with P through shared memory,
one loads and widens tiles into two buffers. What the next rows wait for is asked for a half tile ahead: a form that asked for
their indices late took 43.9 us where one that asked early took 35.5 (H200, 128+512 keys, 64 heads, 128 tokens). Nor may the
producer take anything back from local memory: that comes behind the rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from deepdecode.kernels.attention_sm90_rows import (
    barrier,
    find,
    grid_wait,
    launch_dependents,
    living,
    load,
    part_unit,
    sink_factor,
    span,
    unit_of_q,
    view,
    widened,
)

SIZES = ["H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_shift", "extra_shift", "splits", "split_keys"]
# of right and producer; left takes the rest of 504
REGISTERS: gl.constexpr = gl.constexpr((160, 128))


@gluon.jit
def _producer(finding, caches, begin, count, tile, keyed, full, empty):
    """4 warps: widen tile after tile of 64 rows into two buffers, with what the softmax asks of each key beside them."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    window_keys = finding[4]
    key = begin + gl.arange(0, 32, layout=gl.SliceLayout(1, CODES))
    index, live = living(finding, find(finding, key), key)
    raw = load(caches, index, live, key >= window_keys, CODES, ROPE)
    index, live = living(finding, find(finding, key + 32), key + 32)
    for i in range(count):
        b = i & 1
        for half in gl.static_range(2):
            now = raw
            key += 32
            raw = load(caches, index, live, key >= window_keys, CODES, ROPE)
            # asked for while a half is widened, or the next rows would wait for it
            index, live = living(finding, find(finding, key + 32), key + 32)
            if half == 0:
                mbarrier.wait(empty.index(b), ((i >> 1) & 1) ^ 1)
            words, up, exponent, down = widened(now, 32, CODES)
            keyed[0].index(b).slice(half * 32, 32, dim=0).store(up)
            keyed[1].index(b).slice(half * 32, 32, dim=0).store(exponent)
            keyed[2].index(b).slice(half * 32, 32, dim=0).store(down)
            tile.index(b).slice(half * 32, 32, dim=0).store(words)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(b), count=1)


@gluon.jit
def _left(ends, H, scale_log2, t, first_head, row, count, memory, bars,
          HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """4 warps: Q K^T for 64 heads and 64 keys, the softmax, P V for the left 256 channels with P in registers."""
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    VALUE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUE, k_width=2)
    q_ptr, sink_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, part_unit_ptr = ends
    q_shared, kv, p_shared, fades, keyed = memory
    full, empty, p_full, done = bars
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, HEADS))
    channel = gl.arange(0, 256, layout=gl.SliceLayout(0, HEADS))
    at = q_ptr + (t * H + head[:, None]) * 512 + channel[None, :]
    q0 = gl.load(at, mask=(head < H)[:, None], other=0.0)
    q1 = gl.load(at + 256, mask=(head < H)[:, None], other=0.0)
    top = gl.maximum(gl.abs(q0).to(gl.float32), gl.abs(q1).to(gl.float32))
    q_factor, q_unit = unit_of_q(gl.max(gl.max(gl.where(top < float("inf"), top, 0.0), 1), 0))
    scale_log2 *= q_unit
    q_shared.slice(0, 256, dim=1).store((q0.to(gl.float32) * q_factor).to(gl.float16))
    q_shared.slice(256, 256, dim=1).store((q1.to(gl.float32) * q_factor).to(gl.float16))
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
        unit = keyed[0].index(b).load(gl.SliceLayout(0, SCORE)) * scale_log2
        # log2 of what a key adds to the output, its row counted in its own unit
        x = score * unit[None, :] + keyed[1].index(b).load(gl.SliceLayout(0, SCORE))[None, :]
        new_peak = gl.maximum(peak, gl.max(x, 1))
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = gl.exp2(x - base[:, None])
        fade = gl.exp2(peak - base)
        total = total * fade + gl.sum(p * keyed[2].index(b).load(gl.SliceLayout(0, SCORE))[None, :], 1)
        peak = new_peak
        p = p.to(gl.float16)
        p_shared.index(b).store(p)
        fades.index(b).store(fade)
        fence_async_shared()
        barrier()
        mbarrier.arrive(p_full.index(b), count=1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, VALUE))[:, None]
        mbarrier.wait(full.index(n), ((i + 1) >> 1) & 1, pred=i + 1 < count)
        acc = warpgroup_mma(gl.convert_layout(p, P_OPERAND), kv.index(b).slice(0, 256, dim=1), acc, is_async=True)
        # the next tile's scores, behind this one's values; of the last tile's twin nothing is used
        score = warpgroup_mma(q_shared, kv.index(n).permute((1, 0)), zero, use_acc=False, is_async=True)
        acc, score = warpgroup_mma_wait(0, deps=[acc, score])
        barrier()
        mbarrier.arrive(empty.index(b), count=1)
    h = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORE))
    some = gl.where(total == 0, 1.0, total)
    lse_log2 = gl.where(total == 0, float("-inf"), peak + gl.log2(some))
    if SPLIT:
        field = part_unit(count, 64)
        gl.store(part_lse_ptr + row + h, lse_log2, mask=h < H)
        gl.store(part_unit_ptr + row + h, (field << 23).to(gl.float32, bitcast=True) / some, mask=h < H)
        factor = gl.zeros_like(some) + ((254 - field) << 23).to(gl.float32, bitcast=True)
    else:
        if HAS_LSE:
            gl.store(lse_ptr + row + h, lse_log2 / 1.4426950408889634, mask=h < H)
        factor = 1.0 / some
        if HAS_SINK:
            sink = gl.load(sink_ptr + h, mask=h < H, other=0.0) * 1.4426950408889634
            factor = sink_factor(peak, total, sink)
    fades.index(2).store(factor)
    barrier()
    mbarrier.arrive(done, count=1)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, VALUE))[:, None]
    _write(out_ptr, part_ptr, H, acc, q_shared, row, first_head, 0, SPLIT)


@gluon.jit
def _right(
    out_ptr, part_ptr, H, first_head, row, count, q_shared, kv, p_shared, fades, empty, p_full, done, SPLIT: gl.constexpr
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
        barrier()
        mbarrier.arrive(empty.index(b), count=1)
    mbarrier.wait(done, 0)
    factor = fades.index(2).load(gl.SliceLayout(1, VALUE))
    _write(out_ptr, part_ptr, H, acc * factor[:, None], q_shared, row, first_head, 256, SPLIT)


@gluon.jit
def _write(out_ptr, part_ptr, H, values, q_shared, row, first_head, CHANNEL: gl.constexpr, SPLIT: gl.constexpr):
    """256 channels of 64 heads through shared memory (q is no longer needed), so that each lane stores 16 bytes."""
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, HEADS))
    channel = CHANNEL + gl.arange(0, 256, layout=gl.SliceLayout(0, HEADS))
    at = (row + head[:, None]) * 512 + channel[None, :]
    if SPLIT:
        staged = q_shared.slice(CHANNEL, 256, dim=1)
        staged.store(values.to(gl.float16))
        gl.store(part_ptr + at, staged.load(HEADS), mask=(head < H)[:, None])
    else:
        staged = view(q_shared, gl.bfloat16, [64, 512], SHARED).slice(CHANNEL, 256, dim=1)
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
    grid_wait()
    if SPLIT:
        launch_dependents()
    t = gl.program_id(1).to(gl.int64)
    part = gl.program_id(2)
    first_head = gl.program_id(0) * 64
    window_len, extra_len, begin, last, end = span(
        window_lens_ptr, extra_lens_ptr, t, window_keys, extra_keys, split_keys, part
    )
    count = gl.maximum((end - begin + 63) // 64, 0)
    row = (t * splits + part) * H if SPLIT else t * H
    q_shared = gl.allocate_shared_memory(gl.float16, [64, 512], SHARED)
    kv = gl.allocate_shared_memory(gl.float16, [2, 64, 512], SHARED)
    tile = view(kv, gl.int32, [2, 64, 256], WORDS)
    p_shared = gl.allocate_shared_memory(gl.float16, [2, 64, 64], SHARED)
    fades = gl.allocate_shared_memory(gl.float32, [4, 64], PLAIN)
    up = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    exponent = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    down = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for b in gl.static_range(2):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(empty.index(b), count=2)
        mbarrier.init(p_full.index(b), count=1)
    mbarrier.init(done, count=1)
    window_list, extra_list = window_indices_ptr + t * window_keys, extra_indices_ptr + t * extra_keys
    finding = (window_list, extra_list, window_len, extra_len, window_keys, last, window_rows, extra_rows)
    caches = (window_ptr, extra_ptr, window_stride, extra_stride, window_shift, extra_shift)
    ends = (q_ptr, sink_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, part_unit_ptr)
    memory = (q_shared, kv, p_shared, fades, (up, exponent, down))
    bars = (full, empty, p_full, done)
    gl.warp_specialize(
        [
            (_left, (ends, H, scale_log2, t, first_head, row, count, memory, bars, HAS_SINK, HAS_LSE, SPLIT)),
            (_right, (out_ptr, part_ptr, H, first_head, row, count, q_shared, kv, p_shared, fades, empty, p_full, done, SPLIT)),
            (_producer, (finding, caches, begin, count, tile, (up, exponent, down), full, empty)),
        ],
        [4, 4],
        [REGISTERS[0], REGISTERS[1]],
    )  # fmt: skip
