"""Products with stored weights, for every arch, in one launch: weights are read as stored and widened in registers.

A decode step reads each weight once, so at its sizes the floor is the weight's bytes over the memory's bandwidth.
"""

import torch
import triton
import triton.language as tl

from deepdecode.kernels.attention_plan import card_of
from deepdecode.kernels.codes import FP4, FP8, PLAIN
from deepdecode.kernels.linear_plan import Case, Config, plan, supports
from deepdecode.kernels.product import blocks_of, product

KINDS = {"plain": PLAIN, "fp8": FP8, "fp4": FP4}


@triton.jit
def rows_of(w_ptr, scale_ptr, row, stride_w, stride_scale, KIND: tl.constexpr):
    """Pointers at the first columns of these rows, and of their scales (of a plain weight: anywhere)."""
    w_row = w_ptr + row.to(tl.int64) * stride_w
    if KIND == FP8:
        scale_row = scale_ptr + (row // 128).to(tl.int64) * stride_scale
    elif KIND == FP4:
        scale_row = scale_ptr + row.to(tl.int64) * stride_scale
    else:
        scale_row = w_row
    return w_row, scale_row


@triton.jit(do_not_specialize=["T", "OUT"])
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
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """BLOCK_M rows of one group for BLOCK_T tokens. Tiles of tokens are neighbours: they share the rows in L2."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(2)
    # rows past the last read the last again, and are not stored
    row = blocks_of(group * OUT + tl.minimum(m, OUT - 1), SLICES, WARPS)
    w_row, scale_row = rows_of(w_ptr, scale_ptr, row, stride_w, stride_scale, KIND)
    x_row = x_ptr + t.to(tl.int64) * stride_xt + group * stride_xg
    acc = product(x_row, t < T, w_row, scale_row, K, KIND, E8M0, EVEN, SLICES, WARPS, BLOCK_K, INTERPRET)
    at = out_ptr + (t.to(tl.int64) * stride_ot + group * OUT)[None, :] + m[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m < OUT)[:, None] & (t < T)[None, :])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """One-byte floats as bytes, everything else as it is."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def launch(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None, kind: str, out: torch.Tensor, config: Config) -> None:
    """Fill out [T, G, OUT] from x [T, G, K] and w [G * OUT, ...]; `deepdecode.ops.linear` has checked them, and T > 0."""
    T, G, K = x.shape
    OUT = out.shape[2]
    codes, scales = bits(w), w if scale is None else bits(scale)
    even = K % (config.slices * config.block_k) == 0
    linear_kernel[triton.cdiv(T, config.block_t), triton.cdiv(OUT, config.block_m), G](
        x,
        codes,
        scales,
        out,
        T,
        OUT,
        K,
        x.stride(0),
        x.stride(1),
        codes.stride(0),
        scales.stride(0),
        G * OUT,
        KIND=KINDS[kind],
        E8M0=scales.dtype == torch.uint8,
        EVEN=even,
        SLICES=config.slices,
        WARPS=config.num_warps,
        BLOCK_M=config.block_m,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_k,
        INTERPRET=not x.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


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
    """Why rows cannot be read, if they cannot. Codes are widened four columns at a time, from loads of 16 bytes."""
    if any(t is not None and t.stride(-1) != 1 and t.shape[-1] > 1 for t in (x, *weights)):
        return "rows whose elements are not neighbours"
    codes = [t for t in weights if t is not None and t.dtype in (torch.float8_e4m3fn, torch.uint8)]
    if any(n % 16 for t in codes for n in (t.data_ptr(), t.shape[-1], *t.stride()[:-1])):
        return "rows of codes that do not start and end on multiples of 16 bytes"
    return None


def compile_args(config: Config, kind: str, out: str = "bf16", plain: str = "bf16") -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of `linear_kernel` as `launch` passes them for sizes of the model, to compile it without a GPU."""
    types = {"x_ptr": "*bf16:16", "w_ptr": f"*{plain if kind == 'plain' else 'u8'}:16", "scale_ptr": "*u8:16"}
    types |= {"out_ptr": f"*{out}:16", "T": "i32", "OUT": "i32"}
    types |= dict.fromkeys(("K", "stride_xt", "stride_xg", "stride_w", "stride_scale", "stride_ot"), "i32:16")
    constants = {"KIND": KINDS[kind].value, "E8M0": True, "EVEN": True, "SLICES": config.slices, "WARPS": config.num_warps}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k}
    return types, constants | {"INTERPRET": False}
