"""Sparse attention on Hopper for 16 to 128 heads: 64 heads on the M side of wgmma, and three roles of 4 warps each.

One role loads and widens tiles of 64 keys into two buffers. One takes Q K^T, the softmax and the left half of P V, one the
right half; both take P from shared memory. A role has one warp on each of the SM's schedulers and so takes about three cycles
for an instruction: what stands before the first product, and between two, is kept short, and a buffer goes back as soon as its
values are summed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from deepdecode.kernels.attention_merge import ANYWHERE
from deepdecode.kernels.attention_sm90_rows import (
    barrier,
    find,
    grid_wait,
    launch_dependents,
    living,
    load,
    narrowed,
    part_unit,
    place,
    sink_factor,
    view,
    widened,
)

SIZES = ["H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_shift", "extra_shift", "splits", "split_keys"]
# of right and producer; left takes the rest of 504
REGISTERS: gl.constexpr = gl.constexpr((160, 136))


@gluon.jit
def _magnitudes(words):
    """Bits of the magnitudes of two bfloat16 each, plus 0x80: what is not finite turns negative and loses every comparison."""
    return (words & 0x7FFF7FFF) + 0x00800080


@gluon.jit
def _larger(a, b):
    return gl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _factor(tops, LAYOUT: gl.constexpr):
    """The exponent, biased, of the power of two that brings the largest |q| below 2**14, kept off both ends of float32."""
    top = gl.maximum(tops.index(0).load(LAYOUT), tops.index(1).load(LAYOUT))
    return gl.minimum(gl.maximum(268 - (top >> 7), 1), 253)


@gluon.jit
def _give_q(q_ptr, H, t, first_head, q_shared, tops, q_max, HALF: gl.constexpr):
    """Half of the channels of 64 heads as float16, in a unit that both halves agree on through `tops`."""
    HEADS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    CHANNELS: gl.constexpr = gl.SliceLayout(0, HEADS)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, HEADS))
    # one 64-bit product: sixteen rows' worth of them would wait in registers for the end
    at = q_ptr.to(gl.pointer_type(gl.int32)) + (t * H + first_head) * 256 + 128 * HALF
    at += head[:, None] * 256 + gl.arange(0, 128, layout=CHANNELS)[None, :]
    words = gl.load(at, mask=(head < H - first_head)[:, None], other=0)
    top = gl.reduce(gl.reshape(_magnitudes(words), (64 * 128,)), 0, _larger)
    tops.index(HALF).store(gl.full([1], gl.maximum((top << 16) >> 16, top >> 16), gl.int32, layout=CHANNELS))
    barrier()
    mbarrier.arrive(q_max, count=1)
    mbarrier.wait(q_max, 0)
    factor = _factor(tops, CHANNELS) * 0x00800080
    whole = view(q_shared, gl.int32, [64, 256], WORDS)
    whole.slice(128 * HALF, 128, dim=1).store(narrowed(words, factor[None, :] + gl.zeros_like(words)))
    fence_async_shared()


@gluon.jit
def _producer(given, tile, keyed, full, empty):
    """4 warps: widen tile after tile of 64 rows into two buffers, with what the softmax asks of each key beside them."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    caches = given[4]
    window_keys = given[1][0]
    finding, begin, count = place(given, gl.program_id(1).to(gl.int64), 64)
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
def _left(given, ends, H, scale_log2, splits, memory, bars,
          HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """4 warps: Q K^T for 64 heads and 64 keys, the softmax, P V for the left 256 channels."""
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    VALUE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    KEYS: gl.constexpr = gl.SliceLayout(0, SCORE)
    q_ptr, sink_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, part_unit_ptr = ends
    q_shared, kv, p_shared, fades, keyed, tops = memory
    full, empty, p_full, done, q_max, q_full = bars
    t = gl.program_id(1).to(gl.int64)
    first_head = gl.program_id(0) * 64
    row = (t * splits + gl.program_id(2)) * H if SPLIT else t * H
    _, _, count = place(given, t, 64)
    _give_q(q_ptr, H, t, first_head, q_shared, tops, q_max, 0)
    q_unit = scale_log2 * ((254 - _factor(tops, KEYS)) << 23).to(gl.float32, bitcast=True)
    peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORE))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORE))
    acc = gl.zeros([64, 256], gl.float32, layout=VALUE)
    zero = gl.zeros([64, 64], gl.float32, layout=SCORE)
    mbarrier.wait(q_full, 0)
    for i in range(count):
        b = i & 1
        mbarrier.wait(full.index(b), (i >> 1) & 1)
        score = warpgroup_mma(q_shared, kv.index(b).permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        unit = keyed[0].index(b).load(KEYS) * q_unit
        # log2 of what a key adds to the output, its row counted in its own unit
        x = score * unit[None, :] + keyed[1].index(b).load(KEYS)[None, :]
        new_peak = gl.maximum(peak, gl.max(x, 1))
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        fade = gl.exp2(peak - base)
        p = gl.exp2(x - base[:, None]).to(gl.float16)
        peak = new_peak
        p_shared.index(b).store(p)
        fades.index(b).store(fade)
        fence_async_shared()
        barrier()
        mbarrier.arrive(p_full.index(b), count=1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, VALUE))[:, None]
        acc = warpgroup_mma(p_shared.index(b), kv.index(b).slice(0, 256, dim=1), acc, is_async=True)
        # summed while the tensor cores work
        total = total * fade + gl.sum(p.to(gl.float32) * keyed[2].index(b).load(KEYS)[None, :], 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
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
def _right(given, q_ptr, out_ptr, part_ptr, H, splits, memory, bars, SPLIT: gl.constexpr):
    """4 warps: P V for the right 256 channels."""
    VALUE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    q_shared, kv, p_shared, fades, tops = memory
    empty, p_full, done, q_max, q_full = bars
    t = gl.program_id(1).to(gl.int64)
    first_head = gl.program_id(0) * 64
    row = (t * splits + gl.program_id(2)) * H if SPLIT else t * H
    _, _, count = place(given, t, 64)
    _give_q(q_ptr, H, t, first_head, q_shared, tops, q_max, 1)
    barrier()
    mbarrier.arrive(q_full, count=1)
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
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, HEADS))
    mask = (head < H - first_head)[:, None]
    at = head[:, None] * 512 + gl.arange(0, 256, layout=gl.SliceLayout(0, HEADS))[None, :]
    first = (row + first_head) * 512 + CHANNEL
    if SPLIT:
        staged = q_shared.slice(CHANNEL, 256, dim=1)
        staged.store(values.to(gl.float16))
        gl.store(part_ptr + first + at, staged.load(HEADS), mask=mask)
    else:
        staged = view(q_shared, gl.bfloat16, [64, 512], SHARED).slice(CHANNEL, 256, dim=1)
        staged.store(values.to(gl.bfloat16))
        gl.store(out_ptr + first + at, staged.load(HEADS), mask=mask)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
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
    q_shared = gl.allocate_shared_memory(gl.float16, [64, 512], SHARED)
    kv = gl.allocate_shared_memory(gl.float16, [2, 64, 512], SHARED)
    tile = view(kv, gl.int32, [2, 64, 256], WORDS)
    p_shared = gl.allocate_shared_memory(gl.float16, [2, 64, 64], SHARED)
    fades = gl.allocate_shared_memory(gl.float32, [4, 64], PLAIN)
    up = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    exponent = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    down = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    tops = gl.allocate_shared_memory(gl.int32, [2, 1], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_max = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for b in gl.static_range(2):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(empty.index(b), count=2)
        mbarrier.init(p_full.index(b), count=1)
    mbarrier.init(done, count=1)
    mbarrier.init(q_max, count=2)
    mbarrier.init(q_full, count=1)
    caches = (window_ptr, extra_ptr, window_stride, extra_stride, window_shift, extra_shift)
    lens, cut = (window_lens_ptr, extra_lens_ptr), (window_keys, extra_keys, split_keys)
    # each role reads the lengths itself, so that none waits for them before it begins
    given = (lens, cut, (window_indices_ptr, extra_indices_ptr), (window_rows, extra_rows), caches)
    ends = (q_ptr, sink_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, part_unit_ptr)
    memory = (q_shared, kv, p_shared, fades, (up, exponent, down), tops)
    shared = (q_shared, kv, p_shared, fades, tops)
    bars = (full, empty, p_full, done, q_max, q_full)
    gl.warp_specialize(
        [
            (_left, (given, ends, H, scale_log2, splits, memory, bars, HAS_SINK, HAS_LSE, SPLIT)),
            (_right, (given, q_ptr, out_ptr, part_ptr, H, splits, shared, bars[1:], SPLIT)),
            (_producer, (given, tile, (up, exponent, down), full, empty)),
        ],
        [4, 4],
        [REGISTERS[0], REGISTERS[1]],
    )  # fmt: skip
