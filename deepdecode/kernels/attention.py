"""Sparse attention over paged rows, for every arch: keys split over programs, then a merge.

Keys stand on the M side of both products (S = KV Q^T, O^T = KV^T P), so 8 heads fill the N side of mma.sync exactly.
A tile is widened once, into one copy in shared memory that both products read. Each word of 4 E4M3 codes is taken apart into
4 quarters of the channels, each a tile of its own: gathering them in channel order would cost a shuffle of every register, and
makes Triton keep a second copy. Q and the output are read and written in the same order, at no cost.

E4M3 codes are placed into bfloat16 bits by integer arithmetic and multiplied by their row's scale: no FP8 instruction, so
sm_80 runs the same code, and no exponent is lost. Arithmetic is bfloat16 with float32 sums. A NaN code (0x7f, 0xff) beside a
finite scale reads 480; `write_rows` never writes one, it gives a group with a NaN a NaN scale.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepdecode.kernels.attention_plan import Config, workspace_layout
from deepdecode.ops.rows import PagedRows

LOG2E = 1.4426950408889634
# a grid's second and third dimension
MAX_TOKENS = 65535


@triton.jit
def _place(x, scale):
    """int32 of 4 E4M3 codes, int32 of a bfloat16 scale -> the 4 values in bfloat16.

    One instance takes two words and their scales, so that a register holds the same code of both. Placed bits read 2**-120
    times the code; 0x7180 is 2**100, and `scale` holds the other 2**20: one factor alone would leave bfloat16 from 2**8 on.
    -0.0 is the neutral addend (mul.bf16x2 needs sm_90). What prmt leaves in the low bytes is masked away.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, s, t, u, v, z, k, f;
        mov.b32 z, 0x80008000;
        mov.b32 k, 0x71807180;
        prmt.b32 f, $6, $7, 0x5410;
        prmt.b32 a, $4, $5, 0x4404;
        prmt.b32 b, $4, $5, 0x5515;
        prmt.b32 c, $4, $5, 0x6626;
        prmt.b32 d, $4, $5, 0x7737;
        shr.u32 s, a, 4;
        shr.u32 t, b, 4;
        shr.u32 u, c, 4;
        shr.u32 v, d, 4;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x80008000;
        and.b32 c, c, 0x80008000;
        and.b32 d, d, 0x80008000;
        lop3.b32 a, a, s, 0x07f007f0, 0xf8;
        lop3.b32 b, b, t, 0x07f007f0, 0xf8;
        lop3.b32 c, c, u, 0x07f007f0, 0xf8;
        lop3.b32 d, d, v, 0x07f007f0, 0xf8;
        fma.rn.bf16x2 a, a, k, z;
        fma.rn.bf16x2 b, b, k, z;
        fma.rn.bf16x2 c, c, k, z;
        fma.rn.bf16x2 d, d, k, z;
        fma.rn.bf16x2 $0, a, f, z;
        fma.rn.bf16x2 $1, b, f, z;
        fma.rn.bf16x2 $2, c, f, z;
        fma.rn.bf16x2 $3, d, f, z;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [x, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _halves(x):
    """int32 -> its two bfloat16."""
    low = (x & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = ((x >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def _code(word, byte: tl.constexpr, scale):
    """The interpreter's E4M3: the same placement, one code at a time in float32."""
    code = (word >> (8 * byte)) & 0xFF
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.3292279957849159e36 * scale  # 2**120


@triton.jit
def words_of(FP8: tl.constexpr):
    """Where the channels of the four quarters stand in a plain row of 512, counted in words of two channels.

    int32 [128] twice: the first word holds channel i of quarters 0 and 1, the second of quarters 2 and 3. See `fp8_quarters`.
    """
    i = tl.arange(0, 128)
    if FP8:
        group = i // 16
        w = i % 16
        first = tl.where(group == 7, 224 + w, group * 32 + 2 * w)
        second = tl.where(group == 7, 240 + w, group * 32 + 2 * w + 1)
    else:
        first = i
        second = i + 128
    return first, second


@triton.jit
def fp8_quarters(row_ptr, scale_ptr, live, N: tl.constexpr, INTERPRET: tl.constexpr):
    """Four [N, 128] of one tile of rows: quarter k holds code k of each word of 4 codes, times its scale.

    The last 16 columns hold the rope values: loaded as if they were 16 words of codes, and 16 words more.
    """
    group = tl.arange(0, 8)
    rope = (group == 7)[None, :, None]
    words = row_ptr[:, None, None] + group[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    x = tl.load(words, mask=live[:, None, None], other=0)  # [N, 8, 16]
    y = tl.load(words + 16, mask=live[:, None, None] & rope, other=0)
    scale = tl.load(scale_ptr[:, None] + group[None, :] // 4, mask=live[:, None], other=0)
    scale = (scale >> (8 * (group % 4))[None, :]) & 0xFF  # [N, 8]
    r0, r1 = _halves(x)
    r2, r3 = _halves(y)
    if INTERPRET:
        s = tl.where(scale == 255, float("nan"), tl.exp2(tl.minimum(scale, 254).to(tl.float32) - 127.0))[:, :, None]
        v0, v1, v2, v3 = _code(x, 0, s), _code(x, 1, s), _code(x, 2, s), _code(x, 3, s)
        r0, r1, r2, r3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
    else:
        # 2**20 * 2**(scale - 127) as a bfloat16: infinity from 2**108 on, and NaN for E8M0's NaN
        factor = tl.where(scale == 255, 0x7FC0, tl.minimum(scale + 20, 255) << 7)
        v0, v1, v2, v3 = _place(x, tl.broadcast_to(factor[:, :, None], (N, 8, 16)))
    v0 = tl.reshape(tl.where(rope, r0, v0), (N, 128))
    v1 = tl.reshape(tl.where(rope, r1, v1), (N, 128))
    v2 = tl.reshape(tl.where(rope, r2, v2), (N, 128))
    v3 = tl.reshape(tl.where(rope, r3, v3), (N, 128))
    return v0, v1, v2, v3


@triton.jit
def plain_quarters(row_ptr, live):
    """The same of bfloat16 rows: quarters 0 and 1 are the even and odd channels of the first half, 2 and 3 of the second."""
    words = row_ptr[:, None] + tl.arange(0, 128)[None, :]
    v0, v1 = _halves(tl.load(words, mask=live[:, None], other=0))
    v2, v3 = _halves(tl.load(words + 128, mask=live[:, None], other=0))
    return v0, v1, v2, v3


@triton.jit
def _pack(low, high):
    low = low.to(tl.uint16, bitcast=True).to(tl.int32)
    return low | (high.to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _store(ptr, row, mask, a0, a1, a2, a3, FP8: tl.constexpr):
    """Four [128, BLOCK_H] into rows of 512 values of 16 bits; `row` counts them, [BLOCK_H]."""
    first, second = words_of(FP8)
    at = ptr.to(tl.pointer_type(tl.int32)) + row[None, :] * 256
    tl.store(at + first[:, None], _pack(a0, a1), mask=mask[None, :])
    tl.store(at + second[:, None], _pack(a2, a3), mask=mask[None, :])


@triton.jit(
    do_not_specialize=[
        "H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_page", "extra_page", "splits", "split_keys",
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
    window_stride,
    extra_stride,
    splits,
    split_keys,
    FP8: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    DOT: tl.constexpr = tl.float32 if INTERPRET else tl.bfloat16
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    window_len = tl.minimum(tl.maximum(tl.load(window_lens_ptr + t), 0), window_keys)
    extra_len = tl.minimum(tl.maximum(tl.load(extra_lens_ptr + t), 0), extra_keys)
    keys = window_len + extra_len
    # deterministic: the cut depends on the row alone, not on how many programs the batch wants
    per = split_keys if split_keys > 0 else tl.cdiv(keys, splits)
    begin = part * per
    end = tl.minimum(begin + per, keys)

    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_live = head < H
    first, second = words_of(FP8)
    if INTERPRET:
        at = q_ptr + (t * H + head)[None, :] * 512
        q0 = tl.load(at + 2 * first[:, None], mask=head_live[None, :], other=0.0)
        q1 = tl.load(at + 2 * first[:, None] + 1, mask=head_live[None, :], other=0.0)
        q2 = tl.load(at + 2 * second[:, None], mask=head_live[None, :], other=0.0)
        q3 = tl.load(at + 2 * second[:, None] + 1, mask=head_live[None, :], other=0.0)
    else:
        at = q_ptr.to(tl.pointer_type(tl.int32)) + (t * H + head)[None, :] * 256
        q0, q1 = _halves(tl.load(at + first[:, None], mask=head_live[None, :], other=0))  # [128, BLOCK_H]
        q2, q3 = _halves(tl.load(at + second[:, None], mask=head_live[None, :], other=0))

    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    a0 = tl.zeros([128, BLOCK_H], tl.float32)
    a1 = tl.zeros([128, BLOCK_H], tl.float32)
    a2 = tl.zeros([128, BLOCK_H], tl.float32)
    a3 = tl.zeros([128, BLOCK_H], tl.float32)
    for n in range(begin, end, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        is_extra = key >= window_len
        index_ptr = tl.where(
            is_extra, extra_indices_ptr + t * extra_keys + (key - window_len), window_indices_ptr + t * window_keys + key
        )
        index = tl.load(index_ptr, mask=key < end, other=-1)
        live = (index >= 0) & (index < tl.where(is_extra, extra_rows, window_rows))
        index = tl.where(live, index, 0)
        page_size = tl.where(is_extra, extra_page, window_page)
        page = index // page_size
        place = index - page * page_size
        page_ptr = tl.where(is_extra, extra_ptr, window_ptr) + page.to(tl.int64) * tl.where(
            is_extra, extra_stride, window_stride
        )
        if FP8:
            row_ptr = tl.multiple_of(page_ptr + place * 144, ALIGN)
            v0, v1, v2, v3 = fp8_quarters(row_ptr, page_ptr + page_size * 144 + place * 2, live, BLOCK_N, INTERPRET)
        else:
            v0, v1, v2, v3 = plain_quarters(tl.multiple_of(page_ptr + place * 256, ALIGN), live)
        v0, v1, v2, v3 = v0.to(DOT), v1.to(DOT), v2.to(DOT), v3.to(DOT)

        score = tl.dot(v0, q0.to(DOT))  # [BLOCK_N, BLOCK_H]
        score = tl.dot(v1, q1.to(DOT), score)
        score = tl.dot(v2, q2.to(DOT), score)
        score = tl.dot(v3, q3.to(DOT), score)
        score = tl.where(live[:, None], score * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 0))
        # a tile without a live key must not make inf - inf
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(score - base[None, :])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(p, 0)
        peak = new_peak
        p = p.to(DOT)
        a0 = tl.dot(tl.trans(v0), p, a0 * fade[None, :])  # [128, BLOCK_H]
        a1 = tl.dot(tl.trans(v1), p, a1 * fade[None, :])
        a2 = tl.dot(tl.trans(v2), p, a2 * fade[None, :])
        a3 = tl.dot(tl.trans(v3), p, a3 * fade[None, :])

    some = tl.where(total == 0, 1.0, total)
    lse_log2 = tl.where(total == 0, float("-inf"), peak + tl.log2(some))
    if SPLIT:
        # a power of two brings the largest channel to 2**14, so float16 holds any row; the merge takes it back
        top = tl.maximum(tl.maximum(tl.abs(a0), tl.abs(a1)), tl.maximum(tl.abs(a2), tl.abs(a3)))
        top = tl.max(top, 0) / some  # [BLOCK_H]
        field = tl.minimum(tl.maximum(268 - ((top.to(tl.int32, bitcast=True) >> 23) & 0xFF), 1), 253)
        factor = ((field << 23).to(tl.float32, bitcast=True) / some)[None, :]
        row = (t * splits + part) * H + head
        F16: tl.constexpr = tl.float16
        _store(
            part_ptr,
            row,
            head_live,
            (a0 * factor).to(F16),
            (a1 * factor).to(F16),
            (a2 * factor).to(F16),
            (a3 * factor).to(F16),
            FP8,
        )
        tl.store(part_unit_ptr + row, ((254 - field) << 23).to(tl.float32, bitcast=True), mask=head_live)
        tl.store(part_lse_ptr + row, lse_log2, mask=head_live)
    else:
        if HAS_LSE:
            tl.store(lse_ptr + t * H + head, lse_log2 / 1.4426950408889634, mask=head_live)
        factor = 1.0 / some
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=head_live, other=0.0) * 1.4426950408889634
            high = tl.maximum(peak, sink)
            # a sink of -inf beside no key
            high = tl.where(high == float("-inf"), 0.0, high)
            fade = tl.exp2(peak - high)
            total = total * fade + tl.exp2(sink - high)
            factor = fade / tl.where(total == 0, 1.0, total)
        factor = factor[None, :]
        if INTERPRET:
            at = out_ptr + (t * H + head)[None, :] * 512
            tl.store(at + 2 * first[:, None], a0 * factor, mask=head_live[None, :])
            tl.store(at + 2 * first[:, None] + 1, a1 * factor, mask=head_live[None, :])
            tl.store(at + 2 * second[:, None], a2 * factor, mask=head_live[None, :])
            tl.store(at + 2 * second[:, None] + 1, a3 * factor, mask=head_live[None, :])
        else:
            BF16: tl.constexpr = tl.bfloat16
            row = t * H + head
            _store(
                out_ptr,
                row,
                head_live,
                (a0 * factor).to(BF16),
                (a1 * factor).to(BF16),
                (a2 * factor).to(BF16),
                (a3 * factor).to(BF16),
                FP8,
            )


@triton.jit(do_not_specialize=["H", "splits"])
def merge_kernel(
    sink_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    part_unit_ptr,
    H,
    splits,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    UNITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for each (token, head); BLOCK_S splits at a time, in their order, so the bits do not vary."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    channel = tl.arange(0, 512)
    sink = float("-inf")
    if HAS_SINK:
        sink = tl.load(sink_ptr + h) * 1.4426950408889634
    if PDL:
        tl.extra.cuda.gdc_wait()
    peak = sink
    total = 0.0
    acc = tl.zeros([512], tl.float32)
    keys_peak = float("-inf")
    keys_total = 0.0
    for first in range(0, splits, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)
        row = (t * splits + part) * H + h
        lse = tl.load(part_lse_ptr + row, mask=part < splits, other=float("-inf"))
        unit = tl.load(part_unit_ptr + row * UNITS, mask=part < splits, other=0.0)
        right = tl.load(part_unit_ptr + row * UNITS + UNITS - 1, mask=part < splits, other=0.0)
        values = tl.load(part_ptr + row[:, None] * 512 + channel[None, :], mask=(part < splits)[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(lse - base)
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weight, 0)
        factor = tl.where((channel < 256)[None, :], (weight * unit)[:, None], (weight * right)[:, None])
        acc = acc * fade + tl.sum(values.to(tl.float32) * factor, 0)
        peak = new_peak
        if HAS_LSE:
            keys_new = tl.maximum(keys_peak, tl.max(lse, 0))
            keys_base = tl.where(keys_new == float("-inf"), 0.0, keys_new)
            keys_total = keys_total * tl.exp2(keys_peak - keys_base) + tl.sum(tl.exp2(lse - keys_base), 0)
            keys_peak = keys_new
    if HAS_SINK:
        total += tl.exp2(sink - tl.where(peak == float("-inf"), 0.0, peak))
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + (t * H + h) * 512 + channel, acc.to(out_ptr.dtype.element_ty))
    if HAS_LSE:
        lse = keys_peak + tl.log2(tl.where(keys_total == 0, 1.0, keys_total))
        tl.store(lse_ptr + t * H + h, tl.where(keys_total == 0, float("-inf"), lse / 1.4426950408889634))


@dataclass(frozen=True)
class Parts:
    """What splits hand to the merge: outputs float16 [T, splits, H, 512], lse in powers of two and units float32.

    A unit is the power of two that the float16 values are counted in: one for each row, or for each half of its channels.
    """

    out: torch.Tensor
    lse: torch.Tensor
    unit: torch.Tensor

    @staticmethod
    def of(workspace: torch.Tensor | None, q: torch.Tensor, splits: int) -> "Parts":
        """Views of the caller's workspace, or of a new one; without splits, tensors that no kernel touches."""
        if splits == 1:
            return Parts(q, q, q)
        need, spans = workspace_layout(*q.shape[:2], splits)
        if workspace is None:
            workspace = torch.empty(need, dtype=torch.uint8, device=q.device)
        out, lse, unit = (workspace[begin:end] for begin, end in spans)
        return Parts(out.view(torch.float16), lse.view(torch.float32), unit.view(torch.float32))


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
    T, H, _ = q.shape
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
        merge_kernel[T, H](
            sink,
            out,
            lse,
            parts.out,
            parts.lse,
            parts.unit,
            H,
            splits,
            HAS_SINK=sink is not None,
            HAS_LSE=lse is not None,
            BLOCK_S=min(16, triton.next_power_of_2(splits)),
            UNITS=2 if config.kernel == "wide" else 1,
            PDL=config.pdl,
            num_warps=config.merge_warps,
            **({"launch_pdl": True} if config.pdl else {}),
        )


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
        window_words.stride(0),
        extra_words.stride(0),
        splits,
        config.split_keys,
        FP8=window.fmt == "fp8_584",
        HAS_SINK=sink is not None,
        HAS_LSE=lse is not None,
        SPLIT=splits > 1,
        ALIGN=config.align,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        PDL=config.pdl and splits > 1,
        INTERPRET=not q.is_cuda,
        num_warps=config.num_warps,
        # two stages copy the next tile through cp.async, in the shared memory of a second program: H200, 128+512 keys, 128
        # tokens of 8 heads in tiles of 32: 45.3 us against 43.6
        num_stages=1,
    )


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
    types |= dict.fromkeys(sizes, "i32") | dict.fromkeys(
        ("window_stride", "extra_stride"), "i32:16" if config.align == 16 else "i32"
    )
    constants = {"FP8": fmt == "fp8_584", "HAS_SINK": True, "HAS_LSE": lse, "SPLIT": config.splits > 1, "ALIGN": config.align}
    constants |= {"BLOCK_H": config.block_h, "BLOCK_N": config.block_n, "INTERPRET": False}
    return types, constants | {"PDL": config.pdl and config.splits > 1}
