"""The indexer's scores on Hopper: wgmma from Gluon, with keys that go from memory to the tensor cores through registers alone.

A lane loads 16 bytes of a row, twice. What wgmma takes as channels 2q, 2q+1, 2q+8 and 2q+9 of a slice of 16 is then one word
of 4 codes of lane q's: a dot product does not ask for the order of its channels, only for the same order on both sides, and
the query is stored in that order. So nothing is shuffled, no key passes through shared
memory, and no barrier stands in the loop.

FP8 instructions on the same registers would take 13.0 us instead of 16.0 (H200, 16 tokens of 16384 entries), but keep scores to
1e-4 only, where these keep them to 7e-8: of the best 512 of 262144 entries one was another. A tile more on its way costs the
registers of a program: 18.9 us.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

# Gluon renamed it after 3.6
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
HIDDEN = gl.constexpr(-(2**31))
KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)
INFINITY = gl.constexpr(0x7F800000)


@gluon.jit
def _launch_dependents():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _widen(x):
    """int32 words of 4 E4M3 codes -> four float16 of the words' shape.

    One instance takes two words, of even and of odd column, into four registers of two codes each. The first result holds
    codes 0 and 1 of the even word, in the places of the two words; the second its codes 2 and 3; the others the odd word's.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b, c, d;
        mov.b32 {a, b}, $4;
        mov.b32 {c, d}, $5;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        cvt.rn.f16x2.e4m3x2 $2, c;
        cvt.rn.f16x2.e4m3x2 $3, d;
        }""",
        "=r,=r,=r,=r,r,r",
        [x],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _operand(x, ROWS: gl.constexpr):
    """int32 [ROWS, 32] -> float16 [ROWS, 128], channels in the order that the top of this file tells."""
    even_low, even_high, odd_low, odd_high = _widen(x)
    # [ROWS, word, half of a word, even or odd word]
    values = gl.join(gl.join(even_low, even_high), gl.join(odd_low, odd_high))
    # a word's column: which 64 bytes, which lane, which pair of the lane's 4 words; the last bit is now a code's
    values = gl.reshape(values, (ROWS, 2, 4, 2, 2, 2, 2))
    return gl.reshape(gl.permute(values, (0, 1, 3, 6, 5, 2, 4)), (ROWS, 128))


@gluon.jit
def _find(table_ptr, cache_pages, entry, length, PAGE: gl.constexpr):
    """The page of each entry, -1 where it is not visible."""
    page = gl.load(table_ptr + entry // PAGE, mask=entry < length, other=-1)
    return gl.where(page < cache_pages, page, -1)


@gluon.jit
def _load(keys_ptr, page_stride, page, entry, RAW: gl.constexpr, ROW: gl.constexpr, PAGE: gl.constexpr):
    """One tile's words [BLOCK_N, 32], and its scales in the accumulator's rows."""
    live = page >= 0
    page_ptr = keys_ptr + gl.where(live, page, 0).to(gl.int64) * page_stride
    place = entry % PAGE
    row_ptr = gl.multiple_of(page_ptr + place * 32, 16)
    words = row_ptr[:, None] + gl.arange(0, 32, layout=gl.SliceLayout(0, RAW))[None, :]
    raw = gl.load(words, mask=live[:, None], other=0)
    scale_ptr = gl.convert_layout(page_ptr + (PAGE * 32 + place), ROW)
    scale = gl.load(scale_ptr, mask=gl.convert_layout(live, ROW), other=0).to(gl.float32, bitcast=True)
    return raw, scale


@gluon.jit(
    do_not_specialize=["heads", "cache_pages", "table_rows", "table_pages", "rank_stride", "best_stride", "splits", "topk"]
)
def indexer_score_wgmma_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    tables_ptr,
    slots_ptr,
    lens_ptr,
    ranks_ptr,
    bests_ptr,
    heads,
    cache_pages,
    table_rows,
    table_pages,
    page_stride,
    rank_stride,
    best_stride,
    splits,
    topk,
    PAGE: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Ranks of one token's entries, tile by tile, and the best of each GROUP of them: `indexer_score_kernel` for sm_90."""
    gl.static_assert(num_warps == 4)
    gl.static_assert(BLOCK_N == 64 or BLOCK_N == 128)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_H, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    # registers: 4 words in a row, the other 64 bytes, the row 8 further on (and 64); lanes: 4 to a row of 8; warps: 16 rows
    RAW: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [8, 0]] + ([[64, 0]] if BLOCK_N == 128 else []),
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [BLOCK_N, 32],
    )
    QUERY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    t = gl.program_id(1).to(gl.int64)
    slot = gl.load(slots_ptr + t)
    length = gl.minimum(gl.load(lens_ptr + t), table_pages * PAGE)
    known = (slot >= 0) & (slot < table_rows)
    length = gl.where(known, length, 0)
    table_ptr = tables_ptr + gl.where(known, slot, 0).to(gl.int64) * table_pages
    tiles = (gl.maximum(length, 0) + BLOCK_N - 1) // BLOCK_N
    each = (tiles + splits - 1) // splits
    first = gl.program_id(0) * each
    last = gl.minimum(first + each, tiles)
    ranks_ptr += t * rank_stride
    bests_ptr += t * best_stride

    if length > topk:
        entry = first * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, RAW))
        page = _find(table_ptr, cache_pages, entry, length, PAGE)
        head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, QUERY))
        word = gl.arange(0, 32, layout=gl.SliceLayout(0, QUERY))
        q = gl.load(q_ptr + (t * heads + head)[:, None] * 32 + word[None, :], mask=(head < heads)[:, None], other=0)
        column = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, MMA))
        weight = gl.load(weights_ptr + t * heads + column, mask=column < heads, other=0.0)
        raw, scale = _load(keys_ptr, page_stride, page, entry, RAW, ROW, PAGE)
        next_page = _find(table_ptr, cache_pages, entry + BLOCK_N, length, PAGE)
        q_shared = gl.allocate_shared_memory(gl.float16, [BLOCK_H, 128], SHARED)
        q_shared.store(_operand(q, BLOCK_H))
        fence_async_shared()
        # every warp's part of the query is there
        _barrier()
        zero = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, layout=MMA)
        for tile in range(first, last):
            keys = gl.convert_layout(_operand(raw, BLOCK_N), OPERAND)
            live, scale_now = gl.convert_layout(page, ROW) >= 0, scale
            # the next tile's keys are on their way while this one is multiplied, and the page of the one after it
            page = next_page
            entry += BLOCK_N
            raw, scale = _load(keys_ptr, page_stride, page, entry, RAW, ROW, PAGE)
            next_page = _find(table_ptr, cache_pages, entry + BLOCK_N, length, PAGE)
            dots = warpgroup_mma(keys, q_shared.permute((1, 0)), zero, use_acc=False, is_async=True)
            dots = warpgroup_mma_wait(0, deps=[dots])
            hits = gl.maximum(dots, 0.0, propagate_nan=KEEP_NAN) * weight[None, :]
            score = gl.sum(hits, 1)
            # a scale of infinity makes NaN of its row's zeros
            score = gl.where(gl.abs(scale_now) < float("inf"), score * scale_now, float("nan"))
            bits = gl.where(score == 0, 0.0, score).to(gl.int32, bitcast=True)
            rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            rank = gl.where(score == score, rank, INFINITY)
            rank = gl.where(live, rank, HIDDEN)
            gl.store(ranks_ptr + tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=ROW), rank)
            if GROUP:
                best = gl.max(gl.reshape(rank, (BLOCK_N // GROUP, GROUP)), 1)
                at = gl.arange(0, BLOCK_N // GROUP, layout=best.type.layout)
                gl.store(bests_ptr + tile * (BLOCK_N // GROUP) + at, best)
    else:
        # all of them are chosen
        for tile in range(first, last):
            entry = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=ROW)
            page = _find(table_ptr, cache_pages, entry, length, PAGE)
            gl.store(ranks_ptr + entry, gl.where(page >= 0, 0, HIDDEN))
    if PDL:
        # not before: see `indexer_score_kernel`
        _launch_dependents()
