"""Sparse attention on Hopper for 8 or 16 heads and many tokens: keys on the M side of wgmma, three roles of 4 warps each.

Two roles load and widen half of every tile of 64 keys into three buffers, one multiplies: what the narrow kernel's warps do one
after the other runs side by side. One program fills an SM, where the narrow kernel has two or three.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from deepdecode.kernels.attention_merge import ANYWHERE
from deepdecode.kernels.attention_sm90_rows import (
    EVERYWHERE,
    barrier,
    find,
    grid_wait,
    launch_dependents,
    living,
    load,
    part_unit,
    peaks_of,
    place,
    sink_factor,
    unit_of_q,
    view,
    widened,
)

SIZES = ["H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_shift", "extra_shift", "splits", "split_keys"]


@gluon.jit
def _fill(given, tile, keyed, full, empty, HALF: gl.constexpr, BUFFERS: gl.constexpr):
    """4 warps: widen half of every tile of 64 rows, with what the softmax asks of each key beside it."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    caches, window_keys = given[4], given[1][0]
    finding, begin, count = place(given, gl.program_id(1).to(gl.int64), 64)
    key = begin + 32 * HALF + gl.arange(0, 32, layout=gl.SliceLayout(1, CODES))
    index, live = living(finding, find(finding, key), key)
    raw = load(caches, index, live, key >= window_keys, CODES, ROPE)
    index = find(finding, key + 64)
    for i in range(count):
        b = i % BUFFERS
        turn = (i // BUFFERS) & 1
        now = raw
        key += 64
        index, live = living(finding, index, key)
        raw = load(caches, index, live, key >= window_keys, CODES, ROPE)
        index = find(finding, key + 64)
        mbarrier.wait(empty.index(b), turn ^ 1)
        words, up, exponent, down = widened(now, 32, CODES)
        keyed[0].index(b).slice(HALF * 32, 32, dim=0).store(up)
        keyed[1].index(b).slice(HALF * 32, 32, dim=0).store(exponent)
        keyed[2].index(b).slice(HALF * 32, 32, dim=0).store(down)
        tile.index(b).slice(HALF * 32, 32, dim=0).store(words)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(b), count=1)


@gluon.jit
def _multiply(given, ends, H, scale_log2, splits, memory, bars,
              HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, BLOCK_H: gl.constexpr,
              BUFFERS: gl.constexpr):  # fmt: skip
    """4 warps: Q K^T, the softmax, P V."""
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_H, 16])
    KEYS: gl.constexpr = gl.SliceLayout(1, MMA)
    ALL: gl.constexpr = EVERYWHERE[(4, BLOCK_H)]
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [2, 2], [0, 1])
    q_ptr, sink_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, part_unit_ptr = ends
    q_shared, kv, p_shared, peaks, keyed = memory
    full, empty = bars
    t = gl.program_id(1).to(gl.int64)
    part = gl.program_id(2)
    first_head = gl.program_id(0) * BLOCK_H
    head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, HEADS))
    at = head[:, None] * 512 + gl.arange(0, 512, layout=gl.SliceLayout(0, HEADS))[None, :]
    q = gl.load(q_ptr + (t * H + first_head) * 512 + at, mask=(head < H - first_head)[:, None], other=0.0).to(gl.float32)
    _, _, count = place(given, t, 64)
    q_factor, q_unit = unit_of_q(gl.max(gl.max(gl.where(gl.abs(q) < float("inf"), gl.abs(q), 0.0), 1), 0))
    scale_log2 *= q_unit
    q_shared.store((q * q_factor).to(gl.float16))
    fence_async_shared()
    peak = gl.full([BLOCK_H], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
    sums = gl.zeros([64, BLOCK_H], gl.float32, layout=MMA)
    acc = gl.zeros([512, BLOCK_H], gl.float32, layout=MMA)
    zero = gl.zeros([64, BLOCK_H], gl.float32, layout=MMA)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    score = warpgroup_mma(kv.index(0), q_shared.permute((1, 0)), zero, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    for i in range(count):
        b = i % BUFFERS
        n = (i + 1) % BUFFERS
        unit = keyed[0].index(b).load(KEYS) * scale_log2
        # log2 of what a key adds to the output, its row counted in its own unit
        x = score * unit[:, None] + keyed[1].index(b).load(KEYS)[:, None]
        top = peaks_of(x, peaks, 4, BLOCK_H, ALL)
        new_peak = gl.maximum(peak, gl.convert_layout(top, gl.SliceLayout(0, MMA), assert_trivial=True))
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = gl.exp2(x - base[None, :])
        fade = gl.exp2(peak - base)
        peak = new_peak
        p_shared.permute((1, 0)).store(p.to(gl.float16))
        fence_async_shared()
        acc = warpgroup_mma(kv.index(b).permute((1, 0)), p_shared.permute((1, 0)), acc * fade[None, :], is_async=True)
        # summed over the keys once, at the end
        sums = sums * fade[None, :] + p * keyed[2].index(b).load(KEYS)[:, None]
        mbarrier.wait(full.index(n), ((i + 1) // BUFFERS) & 1, pred=i + 1 < count)
        # of the last tile's twin nothing is used
        score = warpgroup_mma(kv.index(n), q_shared.permute((1, 0)), zero, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index(b), count=1)
        score = warpgroup_mma_wait(0, deps=[score])

    total = gl.sum(sums, 0)
    some = gl.where(total == 0, 1.0, total)
    lse_log2 = gl.where(total == 0, float("-inf"), peak + gl.log2(some))
    h = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, MMA))
    out_h = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, OUT))
    mask = (out_h < H - first_head)[None, :]
    at = out_h[None, :] * 512 + gl.arange(0, 512, layout=gl.SliceLayout(1, OUT))[:, None]
    if SPLIT:
        field = part_unit(count, 64)
        row = (t * splits + part) * H
        result = (acc * ((254 - field) << 23).to(gl.float32, bitcast=True)).to(gl.float16)
        gl.store(part_ptr + (row + first_head) * 512 + at, gl.convert_layout(result, OUT), mask=mask)
        gl.store(part_unit_ptr + row + h, (field << 23).to(gl.float32, bitcast=True) / some, mask=h < H)
        gl.store(part_lse_ptr + row + h, lse_log2, mask=h < H)
    else:
        if HAS_LSE:
            gl.store(lse_ptr + t * H + h, lse_log2 / 1.4426950408889634, mask=h < H)
        factor = 1.0 / some
        if HAS_SINK:
            sink = gl.load(sink_ptr + h, mask=h < H, other=0.0) * 1.4426950408889634
            factor = sink_factor(peak, total, sink)
        result = (acc * factor[None, :]).to(gl.bfloat16)
        gl.store(out_ptr + (t * H + first_head) * 512 + at, gl.convert_layout(result, OUT), mask=mask)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def piped_kernel(
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
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BUFFERS: gl.constexpr = 3
    # of each role that loads; the one that multiplies takes the rest of 504
    REGISTERS: gl.constexpr = 192 if BLOCK_H == 8 else 176
    grid_wait()
    if SPLIT:
        launch_dependents()
    q_shared = gl.allocate_shared_memory(gl.float16, [BLOCK_H, 512], SHARED)
    kv = gl.allocate_shared_memory(gl.float16, [BUFFERS, 64, 512], SHARED)
    tile = view(kv, gl.int32, [BUFFERS, 64, 256], WORDS)
    p_shared = gl.allocate_shared_memory(gl.float16, [BLOCK_H, 64], SHARED)
    peaks = gl.allocate_shared_memory(gl.float32, [4, BLOCK_H], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    up = gl.allocate_shared_memory(gl.float32, [BUFFERS, 64], PLAIN)
    exponent = gl.allocate_shared_memory(gl.float32, [BUFFERS, 64], PLAIN)
    down = gl.allocate_shared_memory(gl.float32, [BUFFERS, 64], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(BUFFERS):
        mbarrier.init(full.index(b), count=2)
        mbarrier.init(empty.index(b), count=1)
    lens = (window_lens_ptr, extra_lens_ptr)
    cut = (window_keys, extra_keys, split_keys)
    caches = (window_ptr, extra_ptr, window_stride, extra_stride, window_shift, extra_shift)
    given = (lens, cut, (window_indices_ptr, extra_indices_ptr), (window_rows, extra_rows), caches)
    ends = (q_ptr, sink_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, part_unit_ptr)
    keyed = (up, exponent, down)
    memory = (q_shared, kv, p_shared, peaks, keyed)
    bars = (full, empty)
    gl.warp_specialize(
        [
            (_multiply, (given, ends, H, scale_log2, splits, memory, bars, HAS_SINK, HAS_LSE, SPLIT, BLOCK_H, BUFFERS)),
            (_fill, (given, tile, keyed, full, empty, 0, BUFFERS)),
            (_fill, (given, tile, keyed, full, empty, 1, BUFFERS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
