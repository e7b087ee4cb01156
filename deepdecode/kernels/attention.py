"""Sparse attention over paged rows, for every arch: keys split over programs, then a merge.

A tile of N rows becomes one [8, N, 64] block, a channel group for each warp (or two), and both products are batched over
the groups: S = sum_g KV_g Q_g, O_g = KV_g^T P. So a warp keeps only its group of Q and of O in registers and reads only its
group of the tile, which is what lets 8 to 32 heads run on mma.sync without a spill. Keys stand on the M side, so 8 heads fill
the N side exactly.

E4M3 codes are placed into bfloat16 bits by integer arithmetic and multiplied by their row's scale: no FP8 instruction, so
sm_80 runs the same code, and no exponent is lost. Arithmetic is bfloat16 with float32 sums.
"""

import torch
import triton
import triton.language as tl

from deepdecode.kernels.attention_plan import Config, workspace_layout
from deepdecode.ops.rows import PagedRows

LOG2E = 1.4426950408889634


@triton.jit
def _place(x, scale):
    """int32 of 4 E4M3 codes, int32 of a bfloat16 scale in both halves -> 2 int32 of 2 bfloat16 values.

    Placed bits read 2**-120 times the code; 0x7180 is 2**100, and `scale` holds the other 2**20: one factor alone would
    leave bfloat16 from scales of 2**8 on. -0.0 is the neutral addend (mul.bf16x2 needs sm_90).
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x, y, u, v, z, k;
        mov.b32 z, 0x80008000;
        mov.b32 k, 0x71807180;
        prmt.b32 x, $2, 0, 0x1404;
        prmt.b32 y, $2, 0, 0x3424;
        shr.u32 u, x, 4;
        shr.u32 v, y, 4;
        and.b32 x, x, 0x80008000;
        and.b32 y, y, 0x80008000;
        lop3.b32 x, x, u, 0x07f007f0, 0xf8;
        lop3.b32 y, y, v, 0x07f007f0, 0xf8;
        fma.rn.bf16x2 x, x, k, z;
        fma.rn.bf16x2 y, y, k, z;
        fma.rn.bf16x2 $0, x, $3, z;
        fma.rn.bf16x2 $1, y, $3, z;
        }""",
        "=r,=r,r,r",
        [x, scale],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _halves(x):
    low = (x & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = ((x >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def _code(byte, scale):
    """The interpreter's E4M3: the same placement, one code at a time in float32."""
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.3292279957849159e36 * scale  # 2**120


@triton.jit
def fp8_tile(row_ptr, scale_ptr, live, N: tl.constexpr, INTERPRET: tl.constexpr):
    """[8, N, 64]: groups 0..6 hold the codes times their scale, group 7 the rope values.

    Group 7 is loaded as the codes are, 16 words for each row, and 16 more: word w holds channels 448 + 2w and + 1 in the
    first half, 480 + 2w and + 1 in the second. `rope_order` gives q that order, `channel_order` takes it from the output.
    """
    group = tl.arange(0, 8)
    rope = (group == 7)[:, None, None]
    words = row_ptr.to(tl.pointer_type(tl.int32))[None, :, None] + group[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    x = tl.load(words, mask=live[None, :, None], other=0)  # [8, N, 16]
    y = tl.load(words + 16, mask=live[None, :, None] & rope, other=0)
    scale = tl.load(scale_ptr[None, :] + group[:, None], mask=live[None, :], other=0).to(tl.int32)  # [8, N]
    if INTERPRET:
        s = tl.where(scale == 255, float("nan"), tl.exp2(scale.to(tl.float32) - 127.0))[:, :, None]
        v0 = tl.where(rope, (x << 16).to(tl.float32, bitcast=True), _code(x & 0xFF, s))
        v1 = tl.where(rope, (x & -65536).to(tl.float32, bitcast=True), _code((x >> 8) & 0xFF, s))
        v2 = tl.where(rope, (y << 16).to(tl.float32, bitcast=True), _code((x >> 16) & 0xFF, s))
        v3 = tl.where(rope, (y & -65536).to(tl.float32, bitcast=True), _code((x >> 24) & 0xFF, s))
    else:
        # 2**20 * 2**(scale - 127) as a bfloat16: infinity from 2**108 on, and NaN for E8M0's NaN
        factor = tl.where(scale == 255, 0x7FC0, tl.minimum(scale + 20, 255) << 7)
        factor = tl.broadcast_to((factor | (factor << 16))[:, :, None], (8, N, 16))
        low, high = _place(x, factor)
        v0, v1 = _halves(tl.where(rope, x, low))
        v2, v3 = _halves(tl.where(rope, y, high))
    return tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), (8, N, 64))


@triton.jit
def plain_tile(row_ptr, live):
    """[8, N, 64] of a bfloat16 row of 512."""
    channel = tl.arange(0, 8)[:, None, None] * 64 + tl.arange(0, 64)[None, None, :]
    return tl.load(row_ptr.to(tl.pointer_type(tl.bfloat16))[None, :, None] + channel, mask=live[None, :, None], other=0.0)


@triton.jit
def rope_order(x, W: tl.constexpr):
    """[8, 64, W], group 7 from channel order into the order that `fp8_tile` loads."""
    moved = tl.reshape(tl.permute(tl.reshape(x, (8, 2, 16, 2, W)), (0, 2, 1, 3, 4)), (8, 64, W))
    return tl.where((tl.arange(0, 8) == 7)[:, None, None], moved, x)


@triton.jit
def channel_order(x, W: tl.constexpr):
    moved = tl.reshape(tl.permute(tl.reshape(x, (8, 16, 2, 2, W)), (0, 2, 1, 3, 4)), (8, 64, W))
    return tl.where((tl.arange(0, 8) == 7)[:, None, None], moved, x)


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
    STAGES: tl.constexpr,
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
    group = tl.arange(0, 8)[:, None, None]
    channel = group * 64 + tl.arange(0, 64)[None, :, None]
    at = (t * H + head)[None, None, :] * 512 + channel  # [8, 64, BLOCK_H]
    q = tl.load(q_ptr + at, mask=head_live[None, None, :], other=0.0).to(DOT)
    if FP8:
        q = rope_order(q, BLOCK_H)

    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([8, 64, BLOCK_H], tl.float32)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
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
            row_ptr = tl.multiple_of(page_ptr + place * 576, ALIGN)
            kv = fp8_tile(row_ptr, page_ptr + page_size * 576 + place * 8, live, BLOCK_N, INTERPRET)
        else:
            kv = plain_tile(tl.multiple_of(page_ptr + place * 1024, ALIGN), live)
        kv = kv.to(DOT)  # [8, BLOCK_N, 64]

        score = tl.sum(tl.dot(kv, q), 0) * scale_log2  # [BLOCK_N, BLOCK_H]
        score = tl.where(live[:, None], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 0))
        # a tile without a live key must not make inf - inf
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(score - base[None, :])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(p, 0)
        peak = new_peak
        pb = tl.broadcast_to(p.to(DOT)[None, :, :], (8, BLOCK_N, BLOCK_H))
        acc = tl.dot(tl.permute(kv, (0, 2, 1)), pb, acc * fade[None, None, :])  # [8, 64, BLOCK_H]

    some = tl.where(total == 0, 1.0, total)
    lse_log2 = tl.where(total == 0, float("-inf"), peak + tl.log2(some))
    if SPLIT:
        acc = acc / some[None, None, :]
        # a power of two brings the largest channel to 2**14, so float16 holds any row; the merge takes it back
        top = tl.max(tl.max(tl.abs(acc), 0), 0)  # [BLOCK_H]
        field = tl.minimum(tl.maximum(268 - ((top.to(tl.int32, bitcast=True) >> 23) & 0xFF), 1), 253)
        acc = (acc * (field << 23).to(tl.float32, bitcast=True)[None, None, :]).to(tl.float16)
        if FP8:
            acc = channel_order(acc, BLOCK_H)
        row = (t * splits + part) * H + head
        tl.store(part_ptr + row[None, None, :] * 512 + channel, acc, mask=head_live[None, None, :])
        tl.store(part_unit_ptr + row, ((254 - field) << 23).to(tl.float32, bitcast=True), mask=head_live)
        tl.store(part_lse_ptr + row, lse_log2, mask=head_live)
    else:
        if HAS_LSE:
            tl.store(lse_ptr + t * H + head, lse_log2 / 1.4426950408889634, mask=head_live)
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=head_live, other=0.0) * 1.4426950408889634
            high = tl.maximum(peak, sink)
            # a sink of -inf beside no key
            high = tl.where(high == float("-inf"), 0.0, high)
            fade = tl.exp2(peak - high)
            total = total * fade + tl.exp2(sink - high)
            acc = acc * fade[None, None, :]
        acc = (acc / tl.where(total == 0, 1.0, total)[None, None, :]).to(out_ptr.dtype.element_ty)
        if FP8:
            acc = channel_order(acc, BLOCK_H)
        tl.store(out_ptr + at, acc, mask=head_live[None, None, :])


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
        unit = tl.load(part_unit_ptr + row, mask=part < splits, other=0.0)
        values = tl.load(part_ptr + row[:, None] * 512 + channel[None, :], mask=(part < splits)[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(lse - base)
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(values.to(tl.float32) * (weight * unit)[:, None], 0)
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
    if extra is None or extra_indices is None or extra_lens is None:
        extra, extra_indices, extra_lens, extra_keys = window, window_indices, window_lens, 0
    else:
        extra_keys = extra_indices.shape[1]
    splits = config.splits
    part = part_lse = part_unit = out
    if splits > 1:
        need, parts = workspace_layout(T, H, splits)
        if workspace is None:
            workspace = torch.empty(need, dtype=torch.uint8, device=q.device)
        part, part_lse, part_unit = (workspace[begin:end] for begin, end in parts)
        part = part.view(torch.float16)
        part_lse, part_unit = part_lse.view(torch.float32), part_unit.view(torch.float32)
    window_bytes, extra_bytes = window.data.view(torch.uint8), extra.data.view(torch.uint8)
    split_kernel[triton.cdiv(H, config.block_h), T, splits](
        q,
        window_bytes,
        extra_bytes,
        window_indices,
        extra_indices,
        window_lens,
        extra_lens,
        sink,
        out,
        lse,
        part,
        part_lse,
        part_unit,
        scale * LOG2E,
        H,
        window_indices.shape[1],
        extra_keys,
        window.num_rows,
        extra.num_rows,
        window.page_size,
        extra.page_size,
        window_bytes.stride(0),
        extra_bytes.stride(0),
        splits,
        config.split_keys,
        FP8=window.fmt == "fp8_584",
        HAS_SINK=sink is not None,
        HAS_LSE=lse is not None,
        SPLIT=splits > 1,
        ALIGN=config.align,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        PDL=config.pdl and splits > 1,
        INTERPRET=not q.is_cuda,
        num_warps=config.num_warps,
        # tl.range says how far to pipeline; this one is for loops that do not
        num_stages=1,
    )
    if splits > 1:
        launch_merge(out, lse, sink, part, part_lse, part_unit, splits, config.pdl)


def launch_merge(out, lse, sink, part, part_lse, part_unit, splits: int, pdl: bool) -> None:
    T, H, _ = out.shape
    merge_kernel[T, H](
        sink,
        out,
        lse,
        part,
        part_lse,
        part_unit,
        H,
        splits,
        HAS_SINK=sink is not None,
        HAS_LSE=lse is not None,
        BLOCK_S=min(16, triton.next_power_of_2(splits)),
        PDL=pdl,
        num_warps=2 if splits <= 4 else 4,
        **({"launch_pdl": True} if pdl else {}),
    )


def compile_args(config: Config, fmt: str = "fp8_584", lse: bool = False) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of `split_kernel` as `launch` passes them, to compile it without a GPU."""
    pointers = {"q": "bf16", "window": "u8", "extra": "u8", "sink": "fp32", "out": "bf16", "part": "fp16"}
    pointers |= {"part_lse": "fp32", "part_unit": "fp32"} | ({"lse": "fp32"} if lse else {})
    pointers |= dict.fromkeys(("window_indices", "extra_indices", "window_lens", "extra_lens"), "i32")
    types = {f"{name}_ptr": f"*{kind}:16" for name, kind in pointers.items()} | {"scale_log2": "fp32"}
    sizes = ("H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_page", "extra_page", "splits", "split_keys")
    types |= dict.fromkeys(sizes, "i32") | dict.fromkeys(("window_stride", "extra_stride"), f"i32:{config.align}")
    constants = {"FP8": fmt == "fp8_584", "HAS_SINK": True, "HAS_LSE": lse, "SPLIT": config.splits > 1, "ALIGN": config.align}
    constants |= {"BLOCK_H": config.block_h, "BLOCK_N": config.block_n, "STAGES": config.num_stages, "INTERPRET": False}
    return types, constants | {"PDL": config.pdl and config.splits > 1}
