"""Products with stored weights at decode sizes, for every arch: y^T = W x^T, weights read as stored and widened in registers.

Rows of the weight stand on the M side of mma.sync, so 8 tokens fill its N side. An FP8 weight enters the product as its bare
codes, exact in bfloat16; the scale of a block of 128 columns multiplies their float32 sum. Where there are few rows, K is cut
into splits whose float32 sums a second kernel adds in their order: the bits do not vary.
"""

import torch
import triton
import triton.language as tl

from deepdecode.kernels.attention_plan import card_of
from deepdecode.kernels.linear_plan import Case, Config, plan, supports
from deepdecode.kernels.widen import FP4, FP8, PLAIN, e8m0_float, fp4_values, fp8_values

KINDS = {"plain": PLAIN, "fp8": FP8, "fp4": FP4}


@triton.jit
def product(
    acc,
    x_row,
    x_live,
    w_row,
    scale_row,
    begin,
    end,
    K,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc [M, T] += W[:, begin:end] x[:, begin:end]^T; x_row [T], w_row [M] and scale_row [M] point at first columns."""
    k = tl.arange(0, BLOCK_K)
    if KIND == FP4:
        byte = tl.arange(0, BLOCK_K // 2)
        group = tl.arange(0, BLOCK_K // 32)
        M: tl.constexpr = acc.shape[0]
        for at in range(begin, end, BLOCK_K):
            # K is a multiple of 32
            live = at // 2 + byte < K // 2
            packed = tl.load(w_row[:, None] + (at // 2 + byte)[None, :], mask=EVEN or live[None, :], other=0)
            scale = tl.load(
                scale_row[:, None] + (at // 32 + group)[None, :], mask=EVEN or (at + 32 * group < K)[None, :], other=0
            )
            scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (M, BLOCK_K // 32, 16)), (M, BLOCK_K // 2))
            even, odd = fp4_values(packed, scale, INTERPRET)
            x_at = x_row[None, :] + (at + 2 * byte)[:, None]
            x_mask = x_live[None, :] & (EVEN or live[:, None])
            if INTERPRET:
                x_even = tl.load(x_at, mask=x_mask, other=0.0).to(tl.float32)
                x_odd = tl.load(x_at + 1, mask=x_mask, other=0.0).to(tl.float32)
            else:
                pair = tl.load(x_at.to(tl.pointer_type(tl.int32)), mask=x_mask, other=0)
                x_even = (pair & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
                x_odd = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
            acc = tl.dot(even, x_even, acc)
            acc = tl.dot(odd, x_odd, acc)
    else:
        for at in range(begin, end, BLOCK_K):
            live = at + k < K
            w = tl.load(w_row[:, None] + (at + k)[None, :], mask=EVEN or live[None, :], other=0)
            x = tl.load(x_row[None, :] + (at + k)[:, None], mask=x_live[None, :] & (EVEN or live[:, None]), other=0.0)
            if INTERPRET:
                x = x.to(tl.float32)
            if KIND == FP8:
                part = tl.dot(fp8_values(w, INTERPRET), x)
                scale = tl.load(scale_row + at // 128)
                acc += part * (e8m0_float(scale) if E8M0 else scale)[:, None]
            elif INTERPRET or w.dtype == tl.float32:
                acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(w, x, acc)
    return acc


@triton.jit(do_not_specialize=["T", "OUT", "splits", "split_k"])
def linear_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    T,
    OUT,
    K,
    stride_xt,
    stride_xg,
    stride_w,
    stride_scale,
    stride_ot,
    splits,
    split_k,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One tile of one group's rows and one split of K. With splits, out is float32 [splits, T, stride_ot]."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(2) // splits
    split = tl.program_id(2) % splits
    # rows past the last read the last again, and are not stored
    row = group * OUT + tl.minimum(m, OUT - 1)
    scale_row = scale_ptr
    if KIND == FP8:
        scale_row += (row // 128).to(tl.int64) * stride_scale
    elif KIND == FP4:
        scale_row += row.to(tl.int64) * stride_scale
    acc = product(
        tl.zeros([BLOCK_M, BLOCK_T], tl.float32),
        x_ptr + t.to(tl.int64) * stride_xt + group * stride_xg,
        t < T,
        w_ptr + row.to(tl.int64) * stride_w,
        scale_row,
        split * split_k,
        tl.minimum(split * split_k + split_k, K),
        K,
        KIND,
        E8M0,
        EVEN,
        BLOCK_K,
        INTERPRET,
    )
    out_row = (split.to(tl.int64) * T + t) * stride_ot + group * OUT
    at = out_ptr + out_row[None, :] + m[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m < OUT)[:, None] & (t < T)[None, :])


@triton.jit
def linear_sum_kernel(part_ptr, out_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(part_ptr + split * size + at, mask=live, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """One-byte floats as bytes, everything else as it is."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def launch(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None, kind: str, out: torch.Tensor, config: Config) -> None:
    """Fill out [T, G, OUT] from x [T, G, K] and w [G * OUT, ...]; `deepdecode.ops.linear` has checked them, and T > 0."""
    T, G, K = x.shape
    OUT = out.shape[2]
    splits = config.splits
    target = out if splits == 1 else torch.empty(splits, T, G * OUT, dtype=torch.float32, device=x.device)
    codes, scales = bits(w), w if scale is None else bits(scale)
    linear_kernel[triton.cdiv(T, config.block_t), triton.cdiv(OUT, config.block_m), G * splits](
        x,
        codes,
        scales,
        target,
        T,
        OUT,
        K,
        x.stride(0),
        x.stride(1),
        codes.stride(0),
        scales.stride(0),
        G * OUT,
        splits,
        triton.cdiv(triton.cdiv(K, splits), config.block_k) * config.block_k,
        KIND=KINDS[kind],
        E8M0=scales.dtype == torch.uint8,
        EVEN=K % config.block_k == 0,
        BLOCK_M=config.block_m,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_k,
        INTERPRET=not x.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        size = T * G * OUT
        linear_sum_kernel[(triton.cdiv(size, 512),)](target, out, size, SPLITS=splits, BLOCK=512, num_warps=4)


def weight_name(w: torch.Tensor, kind: str) -> str:
    """A weight's type as plans name it."""
    return kind if kind != "plain" else _name(w.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def multiply(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None, kind: str, out: torch.Tensor) -> str | None:
    """Fill out and give None; or give the reason why no kernel can, having done nothing."""
    T, G, K = x.shape
    names = [_name(dtype) for dtype in (x.dtype, torch.float32 if scale is None else scale.dtype, out.dtype)]
    case = Case(T, G, out.shape[2], K, weight_name(w, kind), *names)
    card = card_of(x.device)
    reason = supports(case, card) or layout_reason(x, w, scale)
    if reason:
        return reason
    # Triton launches on the current device
    with torch.cuda.device(x.device):
        launch(x, w, scale, kind, out, plan(case, card))
    return None


def layout_reason(x: torch.Tensor, *weights: torch.Tensor | None) -> str | None:
    """Why rows cannot be read, if they cannot. FP4 columns are read two at a time."""
    if any(t is not None and t.stride(-1) != 1 and t.shape[-1] > 1 for t in (x, *weights)):
        return "rows whose elements are not neighbours"
    if any(stride % 2 for stride in x.stride()[:-1]) or x.data_ptr() % 4:
        return "rows of x that do not start on multiples of 4 bytes"
    return None
