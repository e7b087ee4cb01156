"""Sparse attention over paged rows, for every arch: keys split over programs, then a merge.

Keys stand on the M side of both products (S = KV Q^T, O^T = KV^T P), so 8 heads fill the N side of mma.sync exactly.
A tile is widened once, into one copy in shared memory that both products read. Each word of 4 E4M3 codes is taken apart into
4 quarters of the channels, each a tile of its own: gathering them in channel order would cost a shuffle of every register, and
makes Triton keep a second copy. Q and the output are read and written in the same order, at no cost. The rope values are a
fifth tile and stay bfloat16.

Where a row stands is computed once for each key, by one thread, and handed on: address arithmetic in the layout of the tile
is done again by every thread that loads of the row, and took half of all instructions.

Arithmetic is float16 with float32 sums where that is exact: scales from 2**-15 to 1 and |q| under 2**15. A program that met
anything else does its keys again in bfloat16, which holds every scale and is slower. E4M3 codes are converted by the arch's
instruction, or placed into float16 bits by integer arithmetic where it has none (sm_80, sm_86). A NaN code reads NaN in both.

The FP8 products of sm_89 and sm_120 are not used. They would want Q and P in E4M3, whose 4 bits are an error of 2e-2 against
the bound of 2.5e-3; sums of three such terms for each would hold it, at more products than float16 takes.
"""

import torch
import triton
import triton.language as tl

from deepdecode.kernels.attention_codes import convert, interpreted, place, place_bfloat16
from deepdecode.kernels.attention_merge import Parts, launch_merge
from deepdecode.kernels.attention_plan import Config
from deepdecode.ops.rows import PagedRows

LOG2E = 1.4426950408889634
# a grid's second and third dimension
MAX_TOKENS = 65535


@triton.jit
def _quarters(x, scales, FORM: tl.constexpr, N: tl.constexpr):
    """Codes int32 [N, 8, 16], a row's scales int64 [N] -> four [N, 128]: quarter k holds code k of each word, times its scale.

    The eighth group has no codes: it takes the first one's scale.
    """
    group = tl.arange(0, 8)[None, :]
    scale = ((scales[:, None] >> (8 * tl.where(group < 7, group, 0))) & 0xFF).to(tl.int32)  # [N, 8]
    if FORM == "interpreted":
        s = tl.where(scale == 255, float("nan"), tl.exp2(tl.minimum(scale, 254).to(tl.float32) - 127.0))[:, :, None]
        v0, v1, v2, v3 = interpreted(x, 0, s), interpreted(x, 1, s), interpreted(x, 2, s), interpreted(x, 3, s)
    elif FORM == "convert":
        # 2**(scale - 127); 2**-15 is a denormal
        factor = tl.where(scale > 112, (scale - 112) << 10, 0x200)
        v0, v1, v2, v3 = convert(x, tl.broadcast_to(factor[:, :, None], (N, 8, 16)))
    elif FORM == "place":
        v0, v1, v2, v3 = place(x, tl.broadcast_to(((scale - 104) << 10)[:, :, None], (N, 8, 16)))
    else:
        # 2**20 * 2**(scale - 127) as a bfloat16: infinity from 2**108 on, and NaN for E8M0's NaN and beside a NaN code
        factor = tl.where(scale == 255, 0x7FC0, tl.minimum(scale + 20, 255) << 7)[:, :, None]
        # -0x7F7F7F80: the top bit of each byte
        is_nan = (((x & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80) != 0
        v0, v1, v2, v3 = place_bfloat16(x, tl.where(is_nan, 0x7FC0, factor))
    return tl.reshape(v0, (N, 128)), tl.reshape(v1, (N, 128)), tl.reshape(v2, (N, 128)), tl.reshape(v3, (N, 128))


@triton.jit
def _is_odd(scales):
    """Where float16 does not hold a row: a scale outside of 2**-15 to 1, whose exponents are 0x70 to 0x7f. int64 [N]."""
    return (scales ^ 0x70707070707070) & 0xF0F0F0F0F0F0F0


@triton.jit
def _find(key, first, last, lists, rows):
    """The index of each key, -1 where there is none: int32 [N, 2], window and extra rows, of which one at most is there.

    key: [N, 1]. first, last: which keys are the set's; lists: its indices, less what `first` adds; rows: how many it has.
    """
    index = tl.load(lists + (key - first), mask=(key >= first) & (key < last), other=-1)
    return tl.where(index < rows, index, -1)


@triton.jit
def _divide(n, magic, shift):
    """n // size for the size whose `reciprocal` magic and shift are, int32."""
    return tl.umulhi((n * 2).to(tl.uint32), magic.to(tl.uint32, bitcast=True)).to(tl.int32) >> shift


@triton.jit
def _locate(index, pages, stride, size, magic, shift, ROW: tl.constexpr):
    """Addresses int64 [N] of each key's row and of its scales, 0 where it has none. One key a thread: both sets, added up."""
    live = index >= 0
    i = tl.where(live, index, 0)
    page = _divide(i, magic, shift)
    place = i - page * size
    start = pages + page.to(tl.int64) * stride
    row = tl.sum(tl.where(live, start + place * ROW, 0), 1)
    tail = tl.sum(tl.where(live, start + size * 576 + place * 8, 0), 1)
    return row, tail


@triton.jit
def _load_fp8(row, tail, ALIGN: tl.constexpr):
    """One tile's codes int32 [N, 8, 16] (the eighth group is none), scales int64 [N], rope values bfloat16 [N, 8, 8]."""
    live = row != 0
    group = tl.arange(0, 8)[None, :, None]
    at = tl.multiple_of(row.to(tl.pointer_type(tl.int32)), ALIGN)[:, None, None] + group * 16
    x = tl.load(at + tl.arange(0, 16)[None, None, :], mask=live[:, None, None] & (group < 7), other=0)
    # 8 bytes that stand on multiples of 4
    tail_ptr = tail.to(tl.pointer_type(tl.int32))
    low = tl.load(tail_ptr, mask=live, other=0x70707070).to(tl.int64) & 0xFFFFFFFF
    scales = low | (tl.load(tail_ptr + 1, mask=live, other=0x70707070).to(tl.int64) << 32)
    # 4 bytes a lane: wider loads would lay rows out otherwise
    rope_ptr = tl.multiple_of(row.to(tl.pointer_type(tl.bfloat16)), 4)[:, None, None] + 224 + group * 8
    return x, scales, tl.load(rope_ptr + tl.arange(0, 8)[None, None, :], mask=live[:, None, None], other=0.0)


@triton.jit
def _load_plain(row, ALIGN: tl.constexpr):
    """The four quarters [N, 128] of bfloat16 rows: 128 channels in a row each."""
    live = (row != 0)[:, None]
    at = tl.multiple_of(row.to(tl.pointer_type(tl.bfloat16)), ALIGN)[:, None] + tl.arange(0, 128)[None, :]
    v0, v1 = tl.load(at, mask=live, other=0.0), tl.load(at + 128, mask=live, other=0.0)
    return v0, v1, tl.load(at + 256, mask=live, other=0.0), tl.load(at + 384, mask=live, other=0.0)


@triton.jit
def _attend(
    v0, v1, v2, v3, rope, q0, q1, q2, q3, q_rope, live, scale_log2, low, sums, a0, a1, a2, a3, a_rope,
    FP8: tl.constexpr, DOT: tl.constexpr, ROPE_DOT: tl.constexpr,
):  # fmt: skip
    """One tile: scores, softmax, weighted sums. The weights are 2**14 at most, so float16 holds 2**-38 of the largest."""
    # sums of their own, each times the scale: in one sum 32 products would wait for each other
    score = tl.dot(v0, q0) * scale_log2 + tl.dot(v1, q1) * scale_log2  # [BLOCK_N, BLOCK_H]
    score += tl.dot(v2, q2) * scale_log2 + tl.dot(v3, q3) * scale_log2
    if FP8:
        score += tl.dot(rope, q_rope) * scale_log2
    score = tl.where(live[:, None], score, float("-inf"))
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
    if FP8:
        a_rope = tl.dot(tl.trans(rope), p.to(ROPE_DOT), a_rope * fade[None, :])
    return new_low, sums, a0, a1, a2, a3, a_rope


@triton.jit
def _load_q(ptr, row, mask, FP8: tl.constexpr, PACKED: tl.constexpr):
    """Four [128, BLOCK_H] of rows of 512 values in the order of a tile's quarters; `row` counts them, [BLOCK_H].

    PACKED: the four bfloat16 of a word of codes in one load.
    """
    i = tl.arange(0, 128)[:, None]
    mask = mask[None, :] & (i < (112 if FP8 else 128))
    if PACKED:
        words = tl.load(ptr.to(tl.pointer_type(tl.int64)) + row[None, :] * 128 + i, mask=mask, other=0)
        q0, q1, q2, q3 = _short(words), _short(words >> 16), _short(words >> 32), _short(words >> 48)
    else:
        FIRST: tl.constexpr = 4 if FP8 else 1
        STEP: tl.constexpr = 1 if FP8 else 128
        at = ptr + row[None, :] * 512 + FIRST * i
        q0, q1 = tl.load(at, mask=mask, other=0.0), tl.load(at + STEP, mask=mask, other=0.0)
        q2, q3 = tl.load(at + 2 * STEP, mask=mask, other=0.0), tl.load(at + 3 * STEP, mask=mask, other=0.0)
    return q0, q1, q2, q3


@triton.jit
def _short(x):
    return (x & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _in_bfloat16(
    q_ptr, q_row, head_live, q_rope, finding, locating, begin, end, scale_log2, ALIGN: tl.constexpr, BLOCK_H: tl.constexpr
):
    """A program's whole work again, over any rows. Tiles of 32: larger ones would spill, and time does not matter here."""
    N: tl.constexpr = 32
    first, last, lists, rows = finding
    pages, stride, size, magic, shift = locating
    lane = tl.arange(0, N)[:, None]
    low = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sums = tl.zeros([N, BLOCK_H], tl.float32)
    a0 = tl.zeros([128, BLOCK_H], tl.float32)
    a1 = tl.zeros([128, BLOCK_H], tl.float32)
    a2 = tl.zeros([128, BLOCK_H], tl.float32)
    a3 = tl.zeros([128, BLOCK_H], tl.float32)
    a_rope = tl.zeros([64, BLOCK_H], tl.float32)
    row, tail = _locate(_find(begin + lane, first, last, lists, rows), pages, stride, size, magic, shift, 576)
    live = row != 0
    x, scales, rope = _load_fp8(row, tail, ALIGN)
    for n in range(begin, end, N):
        v0, v1, v2, v3 = _quarters(x, scales, "bfloat16", N)
        # read again for each tile: kept, they would double what q takes of shared memory
        q0, q1, q2, q3 = _load_q(q_ptr, q_row, head_live, True, False)
        low, sums, a0, a1, a2, a3, a_rope = _attend(
            v0, v1, v2, v3, tl.reshape(rope, (N, 64)), q0, q1, q2, q3, q_rope, live, scale_log2, low, sums,
            a0, a1, a2, a3, a_rope, True, tl.bfloat16, tl.bfloat16,
        )  # fmt: skip
        index = _find(n + N + lane, first, last, lists, rows)
        row, tail = _locate(index, pages, stride, size, magic, shift, 576)
        live = row != 0
        x, scales, rope = _load_fp8(row, tail, ALIGN)
    return low, tl.sum(sums, 0), a0, a1, a2, a3, a_rope


@triton.jit
def _bits(x, TYPE: tl.constexpr):
    return x.to(TYPE).to(tl.uint16, bitcast=True).to(tl.int64)


@triton.jit
def _store(ptr, row, mask, a0, a1, a2, a3, a_rope, TYPE: tl.constexpr, FP8: tl.constexpr, INTERPRET: tl.constexpr):
    """The inverse of `_load_q`, with the rope values beside; values of 16 bits, unless interpreted."""
    i = tl.arange(0, 128)[:, None]
    at = ptr + row[None, :] * 512
    seen = mask[None, :] & (i < (112 if FP8 else 128))
    if FP8 and not INTERPRET:
        packed = _bits(a0, TYPE) | (_bits(a1, TYPE) << 16) | (_bits(a2, TYPE) << 32) | (_bits(a3, TYPE) << 48)
        tl.store(ptr.to(tl.pointer_type(tl.int64)) + row[None, :] * 128 + i, packed, mask=seen)
    else:
        FIRST: tl.constexpr = 4 if FP8 else 1
        STEP: tl.constexpr = 1 if FP8 else 128
        tl.store(at + FIRST * i, a0.to(TYPE), mask=seen)
        tl.store(at + FIRST * i + STEP, a1.to(TYPE), mask=seen)
        tl.store(at + FIRST * i + 2 * STEP, a2.to(TYPE), mask=seen)
        tl.store(at + FIRST * i + 3 * STEP, a3.to(TYPE), mask=seen)
    if FP8:
        tl.store(at + 448 + tl.arange(0, 64)[:, None], a_rope.to(TYPE), mask=mask[None, :])


@triton.jit(
    do_not_specialize=[
        "H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_page", "extra_page", "window_magic",
        "extra_magic", "window_shift", "extra_shift", "splits", "splits_magic", "splits_shift", "split_keys",
    ]
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
    t = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    window_len = tl.minimum(tl.maximum(tl.load(window_lens_ptr + t), 0), window_keys)
    extra_len = tl.minimum(tl.maximum(tl.load(extra_lens_ptr + t), 0), extra_keys)
    keys = window_len + extra_len
    # deterministic: the cut depends on the row alone, not on how many programs the batch wants
    per = split_keys if split_keys > 0 else _divide(keys + splits - 1, splits_magic, splits_shift)
    begin = part * per
    end = tl.minimum(begin + per, keys)

    # [1, 2]: what differs between window and extra rows
    is_extra = tl.arange(0, 2)[None, :] == 1
    first = tl.where(is_extra, window_len, 0)
    last = tl.minimum(tl.where(is_extra, keys, window_len), end)
    lists = tl.where(is_extra, extra_indices_ptr + t * extra_keys, window_indices_ptr + t * window_keys)
    rows = tl.where(is_extra, extra_rows, window_rows)
    pages = tl.where(is_extra, extra_ptr.to(tl.int64), window_ptr.to(tl.int64))
    stride = tl.where(is_extra, extra_stride, window_stride).to(tl.int64) * 4
    size = tl.where(is_extra, extra_page, window_page)
    magic = tl.where(is_extra, extra_magic, window_magic)
    shift = tl.where(is_extra, extra_shift, window_shift)
    ROW: tl.constexpr = 576 if FP8 else 1024

    lane = tl.arange(0, BLOCK_N)[:, None]
    # the rows of a tile are asked for while the tile before is multiplied, their indices one tile earlier
    row, tail = _locate(_find(begin + lane, first, last, lists, rows), pages, stride, size, magic, shift, ROW)
    live = row != 0
    if FP8:
        x, scales, rope = _load_fp8(row, tail, ALIGN)
    else:
        x0, x1, x2, x3 = _load_plain(row, ALIGN)
    index = _find(begin + BLOCK_N + lane, first, last, lists, rows)

    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_live = head < H
    q0, q1, q2, q3 = _load_q(q_ptr, t * H + head, head_live, FP8, FP8 and not INTERPRET)
    q_rope = tl.load(
        q_ptr + (t * H + head)[None, :] * 512 + 448 + tl.arange(0, 64)[:, None], mask=head_live[None, :], other=0.0
    )
    low = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    a0 = tl.zeros([128, BLOCK_H], tl.float32)
    a1 = tl.zeros([128, BLOCK_H], tl.float32)
    a2 = tl.zeros([128, BLOCK_H], tl.float32)
    a3 = tl.zeros([128, BLOCK_H], tl.float32)
    a_rope = tl.zeros([64, BLOCK_H], tl.float32)
    if FP8:
        h0, h1, h2, h3 = q0.to(F16), q1.to(F16), q2.to(F16), q3.to(F16)
        q_top = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3)))
        odd = _is_odd(scales)
        for n in range(begin, end, BLOCK_N):
            now = live
            v0, v1, v2, v3 = _quarters(x, scales, FORM, BLOCK_N)
            v_rope = tl.reshape(rope, (BLOCK_N, 64)).to(BF16)
            odd |= _is_odd(scales)
            row, tail = _locate(index, pages, stride, size, magic, shift, ROW)
            live = row != 0
            x, scales, rope = _load_fp8(row, tail, ALIGN)
            index = _find(n + 2 * BLOCK_N + lane, first, last, lists, rows)
            low, sums, a0, a1, a2, a3, a_rope = _attend(
                v0, v1, v2, v3, v_rope, h0, h1, h2, h3, q_rope, now, scale_log2, low, sums, a0, a1, a2, a3, a_rope,
                FP8, F16, BF16,
            )  # fmt: skip
        total = tl.sum(sums, 0)
        if not INTERPRET:
            top = tl.max(tl.max(q_top.to(tl.float32), 0), 0)
            wild = (tl.max((odd != 0).to(tl.int32), 0) != 0) | (top >= 32768.0) | (top < 0.00390625)
            if wild:
                low, total, a0, a1, a2, a3, a_rope = _in_bfloat16(
                    q_ptr, t * H + head, head_live, q_rope, (first, last, lists, rows), (pages, stride, size, magic, shift),
                    begin, end, scale_log2, ALIGN, BLOCK_H,
                )  # fmt: skip
    else:
        for n in range(begin, end, BLOCK_N):
            now = live
            v0, v1, v2, v3 = x0, x1, x2, x3
            row, tail = _locate(index, pages, stride, size, magic, shift, ROW)
            live = row != 0
            x0, x1, x2, x3 = _load_plain(row, ALIGN)
            index = _find(n + 2 * BLOCK_N + lane, first, last, lists, rows)
            low, sums, a0, a1, a2, a3, a_rope = _attend(
                v0.to(BF16), v1.to(BF16), v2.to(BF16), v3.to(BF16), v0, q0, q1, q2, q3, q_rope, now, scale_log2, low, sums,
                a0, a1, a2, a3, a_rope, FP8, BF16, BF16,
            )  # fmt: skip
        total = tl.sum(sums, 0)

    some = tl.where(total == 0, 1.0, total)
    lse_log2 = tl.where(total == 0, float("-inf"), low + tl.log2(some))
    if SPLIT:
        # a power of two brings the largest channel to 2**14, so float16 holds any row; the merge takes it back
        top = tl.max(tl.maximum(tl.maximum(tl.abs(a0), tl.abs(a1)), tl.maximum(tl.abs(a2), tl.abs(a3))), 0)
        top = tl.maximum(top, tl.max(tl.abs(a_rope), 0)) / some  # [BLOCK_H]
        field = tl.minimum(tl.maximum(268 - ((top.to(tl.int32, bitcast=True) >> 23) & 0xFF), 1), 253)
        factor = ((field << 23).to(tl.float32, bitcast=True) / some)[None, :]
        at = (t * splits + part) * H + head
        HALF: tl.constexpr = tl.float16
        _store(
            part_ptr, at, head_live, a0 * factor, a1 * factor, a2 * factor, a3 * factor, a_rope * factor, HALF, FP8, INTERPRET
        )
        tl.store(part_unit_ptr + at, ((254 - field) << 23).to(tl.float32, bitcast=True), mask=head_live)
        tl.store(part_lse_ptr + at, lse_log2, mask=head_live)
    else:
        if HAS_LSE:
            tl.store(lse_ptr + t * H + head, lse_log2 / 1.4426950408889634, mask=head_live)
        factor = 1.0 / some
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=head_live, other=0.0) * 1.4426950408889634
            high = tl.maximum(low, sink)
            # a sink of -inf beside no key
            high = tl.where(high == float("-inf"), 0.0, high)
            fade = tl.exp2(low - high)
            total = total * fade + tl.exp2(sink - high)
            factor = fade / tl.where(total == 0, 1.0, total)
        factor = factor[None, :]
        at = t * H + head
        _store(
            out_ptr, at, head_live, a0 * factor, a1 * factor, a2 * factor, a3 * factor, a_rope * factor, BF16, FP8, INTERPRET
        )


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
) -> None:
    """Fill out and lse; `deepdecode.ops.attention` has checked the arguments, and T > 0. Allocates only a missing workspace."""
    T = q.shape[0]
    if T > MAX_TOKENS:
        for begin in range(0, T, MAX_TOKENS):
            part = slice(begin, begin + MAX_TOKENS)
            more = (None, None, None) if extra_indices is None else (extra, extra_indices[part], extra_lens[part])
            launch(
                q[part], window, window_indices[part], window_lens[part], *more,
                sink=sink, scale=scale, out=out[part], lse=None if lse is None else lse[part],
                workspace=workspace, config=config,
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
        launch_merge(sink, out, lse, parts, config)


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
        PDL=config.pdl and splits > 1,
        FORM=("convert" if config.convert else "place") if q.is_cuda else "interpreted",
        num_warps=config.num_warps,
        # the next tile waits in registers: two stages would copy it through cp.async into the shared memory of a second program
        num_stages=1,
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
    types = {f"{name}_ptr": f"*{kind}:16" for name, kind in pointers.items()} | {"scale_log2": "fp32"}
    sizes = ("H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_page", "extra_page", "splits", "split_keys")
    sizes += ("window_magic", "extra_magic", "window_shift", "extra_shift", "splits_magic", "splits_shift")
    types |= dict.fromkeys(sizes, "i32") | dict.fromkeys(
        ("window_stride", "extra_stride"), "i32:16" if config.align == 16 else "i32"
    )
    constants = {"FP8": fmt == "fp8_584", "HAS_SINK": True, "HAS_LSE": lse, "SPLIT": config.splits > 1, "ALIGN": config.align}
    constants |= {"BLOCK_H": config.block_h, "BLOCK_N": config.block_n, "PDL": config.pdl and config.splits > 1}
    return types, constants | {"FORM": "convert" if config.convert else "place"}
