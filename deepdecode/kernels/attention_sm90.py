"""Sparse attention over fp8_584 rows on Hopper: wgmma from Gluon, in three shapes.

"narrow", here: keys on the M side (S = KV Q^T, O^T = KV^T P), 8, 16 or 32 heads a program; every warp loads, widens and
multiplies. "piped", in attention_sm90_piped.py: the same in three roles, for many tokens. "wide", in attention_sm90_wide.py: 64
heads on the M side and three roles.

What carries them: indices that do not wait for the lengths; rows read 16 bytes a lane; a tile stored to shared memory in one
go, so that no barrier stands between its groups; parts in units that no reduction over channels must find; launches that the
kernel before does not hold back, and that do not hold back the merge (programmatic dependent launch).

Arithmetic is float16 with float32 sums, each row in a unit of its own (attention_sm90_rows.py). Where s is the logarithm of a
key's weight and 2**e its row's unit, the weight in float16 is 2**(s + e - peak), the peak taken over s + e: it is what the key
adds to the output that counts, so a small row loses nothing beside a large one without weight. The denominator sums
2**(s + e - peak) * 2**-e.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deepdecode.kernels.attention import LOG2E, words_view
from deepdecode.kernels.attention_merge import ANYWHERE, Parts
from deepdecode.kernels.attention_plan import Config
from deepdecode.kernels.attention_sm90_piped import piped_kernel
from deepdecode.kernels.attention_sm90_rows import (
    EVERYWHERE,
    find,
    grid_wait,
    launch_dependents,
    living,
    load,
    part_unit,
    peaks_of,
    sink_factor,
    span,
    unit_of_q,
    view,
    widened,
)
from deepdecode.kernels.attention_sm90_wide import wide_kernel
from deepdecode.ops.rows import PagedRows

SIZES = ["H", "window_keys", "extra_keys", "window_rows", "extra_rows", "window_shift", "extra_shift", "splits", "split_keys"]


def _loaded(warps, words):
    """[16 * warps, 4 * words]: 4 lanes a row, `words` words a lane; rows as a wgmma accumulator has them."""
    columns = [[0, 1 << n] for n in range(words.bit_length() - 1)]
    lanes = [[0, words], [0, 2 * words], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [*columns, [8, 0]], lanes, [[16 << n, 0] for n in range(warps.bit_length() - 1)], [], [16 * warps, 4 * words]
    )


LOADED: gl.constexpr = gl.constexpr({(w, n): _loaded(w, n) for w in (4, 8) for n in (4, 8)})


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
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
    CODES: gl.constexpr = LOADED[(num_warps, 4)]
    ROPE: gl.constexpr = LOADED[(num_warps, 8)]
    ROWS: gl.constexpr = gl.SliceLayout(1, CODES)
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_H, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    ALL: gl.constexpr = EVERYWHERE[(num_warps, BLOCK_H)]
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [num_warps // 2, 2], [0, 1])
    grid_wait()
    if SPLIT:
        launch_dependents()
    t = gl.program_id(1).to(gl.int64)
    part = gl.program_id(2)
    window_len, extra_len, begin, last, end = span(
        window_lens_ptr, extra_lens_ptr, t, window_keys, extra_keys, split_keys, part
    )
    window_list, extra_list = window_indices_ptr + t * window_keys, extra_indices_ptr + t * extra_keys
    finding = (window_list, extra_list, window_len, extra_len, window_keys, last, window_rows, extra_rows)
    loading = (window_ptr, extra_ptr, window_stride, extra_stride, window_shift, extra_shift)

    key = begin + gl.arange(0, N, layout=ROWS)
    index = find(finding, key)
    head = gl.program_id(0) * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, HEADS))
    channel = gl.arange(0, 512, layout=gl.SliceLayout(0, HEADS))
    q = gl.load(q_ptr + (t * H + head[:, None]) * 512 + channel[None, :], mask=(head < H)[:, None], other=0.0)
    index, live = living(finding, index, key)
    raw = load(loading, index, live, key >= window_keys, CODES, ROPE)
    # checked where it is used, so that nothing waits for it before
    index = find(finding, key + N)
    q = q.to(gl.float32)
    q_factor, q_unit = unit_of_q(gl.max(gl.max(gl.where(gl.abs(q) < float("inf"), gl.abs(q), 0.0), 1), 0))
    scale_log2 *= q_unit
    q_shared = gl.allocate_shared_memory(gl.float16, [BLOCK_H, 512], SHARED)
    q_shared.store((q * q_factor).to(gl.float16))
    kv = gl.allocate_shared_memory(gl.float16, [N, 512], SHARED)
    tile = view(kv, gl.int32, [N, 256], WORDS)
    p_shared = gl.allocate_shared_memory(gl.float16, [BLOCK_H, N], SHARED)
    peaks = gl.allocate_shared_memory(gl.float32, [num_warps, BLOCK_H], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

    peak = gl.full([BLOCK_H], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
    sums = gl.zeros([N, BLOCK_H], gl.float32, layout=MMA)
    acc = gl.zeros([512, BLOCK_H], gl.float32, layout=MMA)
    count = gl.maximum((end - begin + N - 1) // N, 0)
    for _ in range(count):
        key += N
        words, up, exponent, down = widened(raw, N, CODES)
        tile.store(words)
        # the next rows are on their way while this tile is multiplied
        index, live = living(finding, index, key)
        raw = load(loading, index, live, key >= window_keys, CODES, ROPE)
        index = find(finding, key + N)
        fence_async_shared()
        zero = gl.zeros([N, BLOCK_H], gl.float32, layout=MMA)
        score = warpgroup_mma(kv, q_shared.permute((1, 0)), zero, use_acc=False, is_async=True)
        unit = gl.convert_layout(up * scale_log2, gl.SliceLayout(1, MMA), assert_trivial=True)
        exponent = gl.convert_layout(exponent, gl.SliceLayout(1, MMA), assert_trivial=True)
        inverse = gl.convert_layout(down, gl.SliceLayout(1, MMA), assert_trivial=True)
        score = warpgroup_mma_wait(0, deps=[score])
        # log2 of what a key adds to the output, its row counted in its own unit
        score = score * unit[:, None] + exponent[:, None]
        top = peaks_of(score, peaks, num_warps, BLOCK_H, ALL)
        new_peak = gl.maximum(peak, gl.convert_layout(top, gl.SliceLayout(0, MMA), assert_trivial=True))
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = gl.exp2(score - base[None, :])
        fade = gl.exp2(peak - base)
        peak = new_peak
        # summed over the keys once, at the end
        sums = sums * fade[None, :] + p * inverse[:, None]
        p_shared.permute((1, 0)).store(p.to(gl.float16))
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
        field = part_unit(count, N)
        row = (t * splits + part) * H
        at = part_ptr + (row + out_h[None, :]) * 512 + out_channel[:, None]
        result = (acc * ((254 - field) << 23).to(gl.float32, bitcast=True)).to(gl.float16)
        gl.store(at, gl.convert_layout(result, OUT), mask=(out_h < H)[None, :])
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
        at = out_ptr + (t * H + out_h[None, :]) * 512 + out_channel[:, None]
        gl.store(at, gl.convert_layout(result, OUT), mask=(out_h < H)[None, :])


KERNELS = {"narrow": narrow_kernel, "piped": piped_kernel, "wide": wide_kernel}


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
    own = {} if config.kernel == "wide" else {"BLOCK_H": config.block_h}
    KERNELS[config.kernel][triton.cdiv(H, config.block_h), T, config.splits](
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
        window.page_size.bit_length() - 1,
        extra.page_size.bit_length() - 1,
        window_words.stride(0),
        extra_words.stride(0),
        config.splits,
        config.split_keys or triton.cdiv(window_indices.shape[1] + extra_keys, config.splits),
        HAS_SINK=sink is not None,
        HAS_LSE=lse is not None,
        SPLIT=config.splits > 1,
        launch_pdl=config.pdl,
        **own,
        **options(config),
    )


def options(config: Config) -> dict[str, int]:
    """What the compiler is told. With 8 heads three programs go on an SM: 27.7 us for 29.2 (H200, 128+512 keys, 128 tokens)."""
    few = config.kernel == "narrow" and config.block_h == 8
    return {"num_warps": config.num_warps} | ({"maxnreg": 168} if few else {})


def compile_args(config: Config) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of each kernel as `launch` passes them, to compile them without a GPU."""
    pointers = {"q": "bf16", "sink": "fp32", "out": "bf16", "part": "fp16", "part_lse": "fp32", "part_unit": "fp32"}
    words = ("window", "extra", "window_indices", "extra_indices", "window_lens", "extra_lens")
    pointers |= dict.fromkeys(words, "i32")
    types = {f"{name}_ptr": f"*{kind}" + ":16" * (f"{name}_ptr" not in ANYWHERE) for name, kind in pointers.items()}
    types |= {"scale_log2": "fp32"} | dict.fromkeys(SIZES, "i32") | dict.fromkeys(("window_stride", "extra_stride"), "i32:16")
    constants: dict[str, object] = {"HAS_SINK": True, "HAS_LSE": False, "SPLIT": config.splits > 1}
    return types, constants | ({} if config.kernel == "wide" else {"BLOCK_H": config.block_h})
