"""Sparse attention over paged rows, for every arch: keys split over programs, then a merge.

Keys stand on the M side of both products (S = KV Q^T, O^T = KV^T P), so 8 heads fill the N side of mma.sync exactly.
A tile is widened once, into one copy in shared memory that both products read. Each word of 4 E4M3 codes is taken apart into
4 quarters of the channels, each a tile of its own: gathering them in channel order would cost a shuffle of every register, and
makes Triton keep a second copy. The 64 rope values fill what 448 codes leave of the quarters: 16 places of each. Q and the
output are read and written in the same order, at no cost.

A tile holds keys of one set only, so what differs between the sets is chosen once for it, and a row's address is a few
instructions that every thread of the row does: handed on, it would cost two barriers for each layout that needs it. Keys are
cut by the widths of the index lists, so that indices come without waiting for the lengths.

Arithmetic is float16 with float32 sums where that is exact: scales from 2**-15 to 1, |q| and rope values under 2**16 (under
2**-17 they lose bits, beside codes that a quantiser brings to 2**-7 at least with such a scale). Whatever else there is becomes
NaN; a program that ends with one does its keys again in bfloat16, which holds all and is slower. E4M3 codes are converted by
the arch's instruction, or placed into float16 bits by integers where it has none (sm_80, sm_86). A NaN code reads NaN in both.

The FP8 products of sm_89 and sm_120 are not used. They would want Q and P in E4M3, whose 4 bits are an error of 2e-2 against
the bound of 2.5e-3. Two such terms for each hold it, at as many products as float16 takes, and no instruction hands bytes to
the tensor cores transposed, as the second product wants them.
"""

import torch
import triton
import triton.language as tl

from deepdecode.kernels.attention_codes import convert, halves, interpreted, pack, place, place_bfloat16
from deepdecode.kernels.attention_merge import ANYWHERE, Parts, Turn, launch_merge
from deepdecode.kernels.attention_plan import Config
from deepdecode.ops.rows import PagedRows

LOG2E = 1.4426950408889634
# a grid's second and third dimension
MAX_TOKENS = 65535
# the axes of rows and of groups of 16 words in a tile. Of axes that memory does not tell apart, Triton lays lanes along the
# first until 3.6 and along the last from 3.7 on; they must go along rows, or a thread works out sixteen addresses and not one
ROWS: tl.constexpr = tl.constexpr(0 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 1)
GROUPS: tl.constexpr = tl.constexpr(1 - ROWS.value)


@triton.jit
def _turned(x, N: tl.constexpr):
    """A tile of 8 groups -> [N, 128], each eight rows as 0, 4, 1, 5, 2, 6, 3, 7: no two lanes then store to one bank."""
    if ROWS == 0:
        x = tl.permute(tl.reshape(x, (N // 8, 2, 2, 2, 8, 16)), (0, 2, 3, 1, 4, 5))
    else:
        x = tl.permute(tl.reshape(x, (8, N // 8, 2, 2, 2, 16)), (1, 3, 4, 2, 0, 5))
    return tl.reshape(x, (N, 128))


@triton.jit
def _turned_rows(x, N: tl.constexpr):
    """One value for each row, [N] -> [N, 1] in the order of `_turned`."""
    return tl.reshape(tl.permute(tl.reshape(x, (N // 8, 2, 2, 2)), (0, 2, 3, 1)), (N, 1))


@triton.jit
def _with_rope(v0, v1, v2, v3, rope, FORM: tl.constexpr, N: tl.constexpr):
    """Four tiles of 8 groups with the 2 groups of rope words as their eighth groups -> four [N, 128].

    Place 4 l + 2 g + a of a group takes words 4 l + 2 a and 4 l + 2 a + 1 of rope group g, four values as from a word of codes:
    so each thread keeps the words that it has loaded.
    """
    if ROWS == 0:
        rope = tl.permute(tl.reshape(rope, (N, 2, 4, 2, 2)), (0, 2, 1, 3, 4))
    else:
        rope = tl.permute(tl.reshape(rope, (2, N, 4, 2, 2)), (1, 2, 0, 3, 4))
    even, odd = tl.split(rope)
    r0, r1 = halves(tl.reshape(even, (N, 16)), FORM)
    r2, r3 = halves(tl.reshape(odd, (N, 16)), FORM)
    eighth = tl.expand_dims(tl.expand_dims(tl.arange(0, 8) == 7, ROWS), 2)
    v0 = tl.where(eighth, tl.expand_dims(r0, GROUPS), v0)
    v1 = tl.where(eighth, tl.expand_dims(r1, GROUPS), v1)
    v2 = tl.where(eighth, tl.expand_dims(r2, GROUPS), v2)
    v3 = tl.where(eighth, tl.expand_dims(r3, GROUPS), v3)
    return _turned(v0, N), _turned(v1, N), _turned(v2, N), _turned(v3, N)


@triton.jit
def _quarters(x, scales, rope, FORM: tl.constexpr, N: tl.constexpr):
    """A tile of 8 groups of codes, a row's scales int64 [N], 2 groups of words of rope values -> four [N, 128].

    Quarter k holds code k of each word, times its scale, and 16 rope values. The eighth group has no codes: it takes the first
    one's scale. In float16, what a scale outside of 2**-15 to 1 (exponents 0x70 to 0x7f) counts is NaN.
    """
    group = tl.expand_dims(tl.arange(0, 8), ROWS)
    scale = ((tl.expand_dims(scales, GROUPS) >> (8 * tl.where(group < 7, group, 0))) & 0xFF).to(tl.int32)
    if FORM == "interpreted":
        s = tl.where(scale == 255, float("nan"), tl.exp2(tl.minimum(scale, 254).to(tl.float32) - 127.0))[:, :, None]
        v0, v1, v2, v3 = interpreted(x, 0, s), interpreted(x, 1, s), interpreted(x, 2, s), interpreted(x, 3, s)
    elif FORM == "convert":
        # 2**(scale - 127); 2**-15 is a denormal
        factor = tl.where(scale > 112, (scale - 112) << 10, 0x200)
        factor = tl.where((scale & 0xF0) == 0x70, factor, 0x7E00)
        v0, v1, v2, v3 = convert(x, tl.broadcast_to(factor[:, :, None], x.shape))
    elif FORM == "place":
        factor = tl.where((scale & 0xF0) == 0x70, (scale - 104) << 10, 0x7E00)
        v0, v1, v2, v3 = place(x, tl.broadcast_to(factor[:, :, None], x.shape))
    else:
        # 2**20 * 2**(scale - 127) as a bfloat16: infinity from 2**108 on, and NaN for E8M0's NaN and beside a NaN code
        factor = tl.where(scale == 255, 0x7FC0, tl.minimum(scale + 20, 255) << 7)[:, :, None]
        # -0x7F7F7F80: the top bit of each byte
        is_nan = (((x & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80) != 0
        v0, v1, v2, v3 = place_bfloat16(x, tl.where(is_nan, 0x7FC0, factor))
    return _with_rope(v0, v1, v2, v3, rope, FORM, N)


@triton.jit
def _find(tile, lane, finding, TILE: tl.constexpr):
    """The index of each key of a tile, unchecked: it comes without waiting for the lengths. int32 [N].

    A tile holds keys of one set, so what differs between the sets is chosen once for all of them.
    """
    window_list, extra_list, window_keys, extra_keys, window_tiles, last = finding
    is_extra = tile >= window_tiles
    at = (tile - tl.where(is_extra, window_tiles, 0)) * TILE + lane
    keys = tl.where(tile < last, tl.where(is_extra, extra_keys, window_keys), 0)
    return tl.load(tl.where(is_extra, extra_list, window_list) + at, mask=at < keys, other=-1)


@triton.jit
def _divide(n, magic, shift):
    """n // size for the size whose `reciprocal` magic and shift are, int32."""
    return tl.umulhi((n * 2).to(tl.uint32), magic.to(tl.uint32, bitcast=True)).to(tl.int32) >> shift


@triton.jit
def _locate(tile, lane, index, locating, TILE: tl.constexpr, ROW: tl.constexpr):
    """Addresses int64 [N] of each key's row, 0 where it has none, and of its scales."""
    window, extra, window_tiles = locating
    is_extra = tile >= window_tiles
    at = (tile - tl.where(is_extra, window_tiles, 0)) * TILE + lane
    length = tl.where(is_extra, extra[0], window[0])
    rows = tl.where(is_extra, extra[1], window[1])
    pages = tl.where(is_extra, extra[2], window[2])
    stride = tl.where(is_extra, extra[3], window[3])
    size = tl.where(is_extra, extra[4], window[4])
    magic = tl.where(is_extra, extra[5], window[5])
    shift = tl.where(is_extra, extra[6], window[6])
    live = (at < length) & (index >= 0) & (index < rows)
    i = tl.where(live, index, 0)
    page = _divide(i, magic, shift)
    place = i - page * size
    start = pages + page.to(tl.int64) * stride
    return tl.where(live, start + place * ROW, 0), start + (size * 576 + place * 8)


@triton.jit
def _load_groups(row, first, last, ALIGN: tl.constexpr, COUNT: tl.constexpr):
    """A tile of COUNT groups of words int32 of each row, from word `first` on, zeros from group `last` on."""
    group = tl.expand_dims(tl.expand_dims(tl.arange(0, COUNT), ROWS), 2)
    live = tl.expand_dims(tl.expand_dims(row != 0, GROUPS), 2)
    at = tl.expand_dims(tl.expand_dims(tl.multiple_of(row.to(tl.pointer_type(tl.int32)), ALIGN), GROUPS), 2)
    at = at + (first + group * 16) + tl.arange(0, 16)[None, None, :]
    return tl.load(at, mask=live & (group < last), other=0)


@triton.jit
def _load_fp8(row, tail, ALIGN: tl.constexpr):
    """One tile's 8 groups of codes (the eighth is none), scales int64 [N], 2 groups of words of rope values."""
    live = row != 0
    x = _load_groups(row, 0, 7, ALIGN, 8)
    tail_ptr = tail.to(tl.pointer_type(tl.int32))
    low = tl.load(tail_ptr, mask=live, other=0x70707070).to(tl.int64) & 0xFFFFFFFF
    scales = low | (tl.load(tail_ptr + 1, mask=live, other=0x70707070).to(tl.int64) << 32)
    return x, scales, _load_groups(row, 112, 2, ALIGN, 2)


@triton.jit
def _load_plain(row, ALIGN: tl.constexpr):
    """The four quarters [N, 128] of bfloat16 rows: 128 channels in a row each."""
    live = (row != 0)[:, None]
    at = tl.multiple_of(row.to(tl.pointer_type(tl.bfloat16)), ALIGN)[:, None] + tl.arange(0, 128)[None, :]
    v0, v1 = tl.load(at, mask=live, other=0.0), tl.load(at + 128, mask=live, other=0.0)
    return v0, v1, tl.load(at + 256, mask=live, other=0.0), tl.load(at + 384, mask=live, other=0.0)


@triton.jit
def _attend(v0, v1, v2, v3, q0, q1, q2, q3, live, scale_log2, low, sums, a0, a1, a2, a3, DOT: tl.constexpr):
    """One tile: scores, softmax, weighted sums. The weights are 2**14 at most, so float16 holds 2**-38 of the largest."""
    # sums of their own, each times the scale: in one sum 32 products would wait for each other
    score = tl.dot(v0, q0) * scale_log2 + tl.dot(v1, q1) * scale_log2  # [BLOCK_N, BLOCK_H]
    score += tl.dot(v2, q2) * scale_log2 + tl.dot(v3, q3) * scale_log2
    score = tl.where(live, score, float("-inf"))
    new_low = tl.maximum(low, tl.max(score, 0) - 14.0)
    # a tile without a live key must not make inf - inf
    base = tl.where(new_low == float("-inf"), 0.0, new_low)
    p = tl.exp2(score - base[None, :])
    fade = tl.exp2(low - base)
    # added up over the keys once, at the end
    sums = sums * fade[None, :] + p
    weight = p.to(DOT)
    a0 = tl.dot(tl.trans(v0), weight, a0 * fade[None, :])  # [128, BLOCK_H]
    a1 = tl.dot(tl.trans(v1), weight, a1 * fade[None, :])
    a2 = tl.dot(tl.trans(v2), weight, a2 * fade[None, :])
    a3 = tl.dot(tl.trans(v3), weight, a3 * fade[None, :])
    return new_low, sums, a0, a1, a2, a3


@triton.jit
def _words_of(place):
    """Which four channels of a row, counted in fours, a place of the quarters holds: the inverse of `_with_rope`."""
    p = place - 112
    words = tl.where(p < 0, place, 112 + ((p >> 1) & 1) * 8 + (p >> 2) * 2 + (p & 1))
    return tl.max_contiguous(tl.multiple_of(words, 2), 2)


@triton.jit
def _load_q(ptr, row, mask, FORM: tl.constexpr):
    """Four [128, BLOCK_H] of rows of 512 values in the order of a tile's quarters; `row` counts them, [BLOCK_H]."""
    at = row[None, :] * 128 + _words_of(tl.arange(0, 128))[:, None]
    if FORM == "interpreted":
        at = ptr + 4 * at
        q0, q1 = tl.load(at, mask=mask[None, :], other=0.0), tl.load(at + 1, mask=mask[None, :], other=0.0)
        q2, q3 = tl.load(at + 2, mask=mask[None, :], other=0.0), tl.load(at + 3, mask=mask[None, :], other=0.0)
        q0, q1, q2, q3 = q0.to(tl.float32), q1.to(tl.float32), q2.to(tl.float32), q3.to(tl.float32)
    else:
        words = tl.load(ptr.to(tl.pointer_type(tl.int64)) + at, mask=mask[None, :], other=0)
        q0, q1 = halves(words.to(tl.int32), FORM)
        q2, q3 = halves((words >> 32).to(tl.int32), FORM)
    return q0, q1, q2, q3


@triton.jit
def _load_q_plain(ptr, row, mask):
    at = ptr + row[None, :] * 512 + tl.arange(0, 128)[:, None]
    q0, q1 = tl.load(at, mask=mask[None, :], other=0.0), tl.load(at + 128, mask=mask[None, :], other=0.0)
    return q0, q1, tl.load(at + 256, mask=mask[None, :], other=0.0), tl.load(at + 384, mask=mask[None, :], other=0.0)


@triton.jit
def _in_bfloat16(
    q_ptr, q_row, head_live, finding, locating, first, last, scale_log2, ALIGN: tl.constexpr, BLOCK_H: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A program's whole work again, over any rows. Tiles of 32: larger ones would spill, and time does not matter here."""
    N: tl.constexpr = 32
    low = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sums = tl.zeros([N, BLOCK_H], tl.float32)
    a0 = tl.zeros([128, BLOCK_H], tl.float32)
    a1 = tl.zeros([128, BLOCK_H], tl.float32)
    a2 = tl.zeros([128, BLOCK_H], tl.float32)
    a3 = tl.zeros([128, BLOCK_H], tl.float32)
    for n in range(first * (TILE // N), last * (TILE // N)):
        tile = n // (TILE // N)
        lane = (n % (TILE // N)) * N + tl.arange(0, N)
        row, tail = _locate(tile, lane, _find(tile, lane, finding, TILE), locating, TILE, 576)
        x, scales, rope = _load_fp8(row, tail, ALIGN)
        v0, v1, v2, v3 = _quarters(x, scales, rope, "bfloat16", N)
        # read again for each tile: kept, they would double what q takes of shared memory
        q0, q1, q2, q3 = _load_q(q_ptr, q_row, head_live, "bfloat16")
        low, sums, a0, a1, a2, a3 = _attend(
            v0, v1, v2, v3, q0, q1, q2, q3, _turned_rows(row != 0, N), scale_log2, low, sums, a0, a1, a2, a3, tl.bfloat16
        )
    return low, tl.sum(sums, 0), a0, a1, a2, a3


@triton.jit
def _store(ptr, row, mask, a0, a1, a2, a3, FORM: tl.constexpr):
    """The inverse of `_load_q`. FORM: 16-bit type of the values, or "interpreted"."""
    at = row[None, :] * 128 + _words_of(tl.arange(0, 128))[:, None]
    if FORM == "interpreted":
        at = ptr + 4 * at
        tl.store(at, a0, mask=mask[None, :])
        tl.store(at + 1, a1, mask=mask[None, :])
        tl.store(at + 2, a2, mask=mask[None, :])
        tl.store(at + 3, a3, mask=mask[None, :])
    else:
        words = (pack(a2, a3, FORM).to(tl.int64) << 32) | (pack(a0, a1, FORM).to(tl.int64) & 0xFFFFFFFF)
        tl.store(ptr.to(tl.pointer_type(tl.int64)) + at, words, mask=mask[None, :])


@triton.jit
def _store_plain(ptr, row, mask, a0, a1, a2, a3, TYPE: tl.constexpr):
    at = ptr + row[None, :] * 512 + tl.arange(0, 128)[:, None]
    tl.store(at, a0.to(TYPE), mask=mask[None, :])
    tl.store(at + 128, a1.to(TYPE), mask=mask[None, :])
    tl.store(at + 256, a2.to(TYPE), mask=mask[None, :])
    tl.store(at + 384, a3.to(TYPE), mask=mask[None, :])


@triton.jit(
    do_not_specialize=[
        "H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_page", "extra_page", "window_magic",
        "extra_magic", "window_shift", "extra_shift", "splits", "splits_magic", "splits_shift", "split_keys",
    ],
    do_not_specialize_on_alignment=ANYWHERE,
)  # fmt: skip
def split_kernel(
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
    window_page,
    extra_page,
    window_magic,
    extra_magic,
    window_shift,
    extra_shift,
    window_stride,
    extra_stride,
    splits,
    splits_magic,
    splits_shift,
    split_keys,
    FP8: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
    FORM: tl.constexpr,
):
    """FORM: how codes are widened in the float16 loop, "convert" or "place"; "interpreted": everything in float32."""
    INTERPRET: tl.constexpr = FORM == "interpreted"
    F16: tl.constexpr = tl.float32 if INTERPRET else tl.float16
    BF16: tl.constexpr = tl.float32 if INTERPRET else tl.bfloat16
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    window_len, extra_len = tl.load(window_lens_ptr + t), tl.load(extra_lens_ptr + t)
    # cut by widths: indices need not wait for the lengths
    window_tiles = tl.cdiv(window_keys, BLOCK_N)
    tiles = window_tiles + tl.cdiv(extra_keys, BLOCK_N)
    per = split_keys // BLOCK_N if split_keys > 0 else _divide(tiles + splits - 1, splits_magic, splits_shift)
    begin = part * per
    end = tl.minimum(begin + per, tiles)
    window_list, extra_list = window_indices_ptr + t * window_keys, extra_indices_ptr + t * extra_keys
    finding = (window_list, extra_list, window_keys, extra_keys, window_tiles, end)
    # length, rows, address, page stride in bytes, page size and how to divide by it
    window = (
        tl.minimum(window_len, window_keys), window_rows, window_ptr.to(tl.int64), window_stride.to(tl.int64) * 4,
        window_page, window_magic, window_shift,
    )  # fmt: skip
    extra = (
        tl.minimum(extra_len, extra_keys), extra_rows, extra_ptr.to(tl.int64), extra_stride.to(tl.int64) * 4,
        extra_page, extra_magic, extra_shift,
    )  # fmt: skip
    locating = (window, extra, window_tiles)
    ROW: tl.constexpr = 576 if FP8 else 1024

    lane = tl.arange(0, BLOCK_N)
    # the rows of a tile are asked for while the tile before is multiplied, their indices one tile earlier
    row, tail = _locate(begin, lane, _find(begin, lane, finding, BLOCK_N), locating, BLOCK_N, ROW)
    if FP8:
        live = _turned_rows(row != 0, BLOCK_N)
        x, scales, rope = _load_fp8(row, tail, ALIGN)
    else:
        live = (row != 0)[:, None]
        x0, x1, x2, x3 = _load_plain(row, ALIGN)
    index = _find(begin + 1, lane, finding, BLOCK_N)

    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_live = head < H
    low = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    a0 = tl.zeros([128, BLOCK_H], tl.float32)
    a1 = tl.zeros([128, BLOCK_H], tl.float32)
    a2 = tl.zeros([128, BLOCK_H], tl.float32)
    a3 = tl.zeros([128, BLOCK_H], tl.float32)
    if FP8:
        q0, q1, q2, q3 = _load_q(q_ptr, t * H + head, head_live, FORM)
        # before the loop: it fills the wait for the first rows
        q_top = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3)))
        q_top = tl.max(tl.max(q_top.to(tl.float32), 0), 0)
        for n in range(begin, end):
            now = live
            v0, v1, v2, v3 = _quarters(x, scales, rope, FORM, BLOCK_N)
            row, tail = _locate(n + 1, lane, index, locating, BLOCK_N, ROW)
            live = _turned_rows(row != 0, BLOCK_N)
            x, scales, rope = _load_fp8(row, tail, ALIGN)
            index = _find(n + 2, lane, finding, BLOCK_N)
            low, sums, a0, a1, a2, a3 = _attend(v0, v1, v2, v3, q0, q1, q2, q3, now, scale_log2, low, sums, a0, a1, a2, a3, F16)
        total = tl.sum(sums, 0)
        if not INTERPRET:
            wild = (tl.max((total != total).to(tl.int32), 0) != 0) | (q_top < 0.00390625)
            if wild:
                low, total, a0, a1, a2, a3 = _in_bfloat16(
                    q_ptr, t * H + head, head_live, finding, locating, begin, end, scale_log2, ALIGN, BLOCK_H, BLOCK_N
                )  # fmt: skip
    else:
        q0, q1, q2, q3 = _load_q_plain(q_ptr, t * H + head, head_live)
        q0, q1, q2, q3 = q0.to(BF16), q1.to(BF16), q2.to(BF16), q3.to(BF16)
        for n in range(begin, end):
            now = live
            v0, v1, v2, v3 = x0, x1, x2, x3
            row, tail = _locate(n + 1, lane, index, locating, BLOCK_N, ROW)
            live = (row != 0)[:, None]
            x0, x1, x2, x3 = _load_plain(row, ALIGN)
            index = _find(n + 2, lane, finding, BLOCK_N)
            low, sums, a0, a1, a2, a3 = _attend(
                v0.to(BF16), v1.to(BF16), v2.to(BF16), v3.to(BF16), q0, q1, q2, q3, now, scale_log2, low, sums,
                a0, a1, a2, a3, BF16,
            )  # fmt: skip
        total = tl.sum(sums, 0)

    some = tl.where(total == 0, 1.0, total)
    lse_log2 = tl.where(total == 0, float("-inf"), low + tl.log2(some))
    if SPLIT:
        # a power of two brings the largest channel to 2**14, so float16 holds any row; the merge takes it back
        top = tl.max(tl.maximum(tl.maximum(tl.abs(a0), tl.abs(a1)), tl.maximum(tl.abs(a2), tl.abs(a3))), 0) / some  # [BLOCK_H]
        field = tl.minimum(tl.maximum(268 - ((top.to(tl.int32, bitcast=True) >> 23) & 0xFF), 1), 253)
        factor = ((field << 23).to(tl.float32, bitcast=True) / some)[None, :]
        at = (t * splits + part) * H + head
        b0, b1, b2, b3 = a0 * factor, a1 * factor, a2 * factor, a3 * factor
        if FP8:
            _store(part_ptr, at, head_live, b0, b1, b2, b3, "interpreted" if INTERPRET else "float16")
        else:
            _store_plain(part_ptr, at, head_live, b0, b1, b2, b3, tl.float16)
        tl.store(part_unit_ptr + at, ((254 - field) << 23).to(tl.float32, bitcast=True), mask=head_live)
        tl.store(part_lse_ptr + at, lse_log2, mask=head_live)
    else:
        if HAS_LSE:
            tl.store(lse_ptr + t * H + head, lse_log2 / 1.4426950408889634, mask=head_live)
        factor = 1.0 / some
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=head_live, other=0.0) * 1.4426950408889634
            # infinity less itself would be NaN; what is this large takes all weight as well
            sink = tl.where(sink == float("inf"), 3.0e38, sink)
            high = tl.maximum(low, sink)
            # a sink of -inf beside no key
            high = tl.where(high == float("-inf"), 0.0, high)
            fade = tl.exp2(low - high)
            total = total * fade + tl.exp2(sink - high)
            factor = fade / tl.where(total == 0, 1.0, total)
        factor = factor[None, :]
        a0, a1, a2, a3 = a0 * factor, a1 * factor, a2 * factor, a3 * factor
        if FP8:
            _store(out_ptr, t * H + head, head_live, a0, a1, a2, a3, "interpreted" if INTERPRET else "bfloat16")
        else:
            _store_plain(out_ptr, t * H + head, head_live, a0, a1, a2, a3, BF16)


def launch(
    q: torch.Tensor,
    window: PagedRows,
    window_indices: torch.Tensor,
    window_lens: torch.Tensor,
    extra: PagedRows | None,
    extra_indices: torch.Tensor | None,
    extra_lens: torch.Tensor | None,
    *,
    sink: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    config: Config,
    turn: Turn | None = None,
) -> None:
    """Fill out and lse; `deepdecode.ops.attention` has checked the arguments, and T > 0. Allocates only a missing workspace.

    turn: of out, by the merge; so for launches with splits only.
    """
    assert turn is None or config.splits > 1
    T = q.shape[0]
    if T > MAX_TOKENS:
        for begin in range(0, T, MAX_TOKENS):
            part = slice(begin, begin + MAX_TOKENS)
            more = (None, None, None) if extra_indices is None else (extra, extra_indices[part], extra_lens[part])
            launch(
                q[part], window, window_indices[part], window_lens[part], *more,
                sink=sink, scale=scale, out=out[part], lse=None if lse is None else lse[part],
                workspace=workspace, config=config, turn=None if turn is None else Turn(turn.positions[part], turn.freqs),
            )  # fmt: skip
        return
    if extra is None or extra_indices is None or extra_lens is None:
        extra, extra_indices, extra_lens, extra_keys = window, window_indices, window_lens, 0
    else:
        extra_keys = extra_indices.shape[1]
    splits = config.splits
    parts = Parts.of(workspace, q, splits)
    given = (q, window, window_indices, window_lens, extra, extra_indices, extra_lens)
    if config.kernel == "mma":
        _launch_split(*given, extra_keys=extra_keys, sink=sink, scale=scale, out=out, lse=lse, parts=parts, config=config)
    else:
        from deepdecode.kernels import attention_sm90

        attention_sm90.launch(
            *given, extra_keys=extra_keys, sink=sink, scale=scale, out=out, lse=lse, parts=parts, config=config
        )
    if splits > 1:
        launch_merge(sink, out, lse, parts, config, turn)


def _launch_split(
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
    parts: "Parts",
    config: Config,
) -> None:
    T, H, _ = q.shape
    splits = config.splits
    window_words, extra_words = words_view(window), words_view(extra)
    split_kernel[triton.cdiv(H, config.block_h), T, splits](
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
        scale * LOG2E,
        H,
        window_indices.shape[1],
        extra_keys,
        window.num_rows,
        extra.num_rows,
        window.page_size,
        extra.page_size,
        *(part for pair in zip(reciprocal(window.page_size), reciprocal(extra.page_size), strict=True) for part in pair),
        window_words.stride(0),
        extra_words.stride(0),
        splits,
        *reciprocal(splits),
        config.split_keys,
        FP8=window.fmt == "fp8_584",
        HAS_SINK=sink is not None,
        HAS_LSE=lse is not None,
        SPLIT=splits > 1,
        ALIGN=config.align,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        PDL=config.pdl,
        FORM=("convert" if config.convert else "place") if q.is_cuda else "interpreted",
        num_warps=config.num_warps,
        # the next tile waits in registers: two stages would copy it through cp.async into the shared memory of a second program
        num_stages=1,
        **({"launch_pdl": True} if config.pdl else {}),
    )


def reciprocal(size: int) -> tuple[int, int]:
    """magic, shift with n // size == (2 * n * magic) >> 32 >> shift for n from 0 to 2**31 - 1; magic as a signed int32."""
    shift = (size - 1).bit_length()
    magic = -(-(1 << (31 + shift)) // size)
    return magic - (1 << 32), shift


def words_view(cache: PagedRows) -> torch.Tensor:
    """The pages as int32. In bytes, Triton would take the tile for 8-bit operands and keep one copy of it for each product."""
    pages = cache.data if cache.fmt == "bf16" else cache.data[:, : cache.page_size * 584]
    return pages.view(torch.int32)


def compile_args(config: Config, fmt: str = "fp8_584", lse: bool = False) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of `split_kernel` as `launch` passes them, to compile it without a GPU."""
    pointers = {"q": "bf16", "window": "i32", "extra": "i32", "sink": "fp32", "out": "bf16", "part": "fp16"}
    pointers |= {"part_lse": "fp32", "part_unit": "fp32"} | ({"lse": "fp32"} if lse else {})
    pointers |= dict.fromkeys(("window_indices", "extra_indices", "window_lens", "extra_lens"), "i32")
    types = {f"{name}_ptr": f"*{kind}" + ":16" * (f"{name}_ptr" not in ANYWHERE) for name, kind in pointers.items()}
    types["scale_log2"] = "fp32"
    sizes = ("H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_page", "extra_page", "splits", "split_keys")
    sizes += ("window_magic", "extra_magic", "window_shift", "extra_shift", "splits_magic", "splits_shift")
    types |= dict.fromkeys(sizes, "i32") | dict.fromkeys(
        ("window_stride", "extra_stride"), "i32:16" if config.align == 16 else "i32"
    )
    constants = {"FP8": fmt == "fp8_584", "HAS_SINK": True, "HAS_LSE": lse, "SPLIT": config.splits > 1, "ALIGN": config.align}
    constants |= {"BLOCK_H": config.block_h, "BLOCK_N": config.block_n, "PDL": config.pdl}
    return types, constants | {"FORM": "convert" if config.convert else "place"}
