"""Products with stored weights, for every arch, in one launch: weights are read as stored and widened in registers.

A decode step reads each weight once, so at its sizes the floor is the weight's bytes over the memory's bandwidth.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepdecode.kernels.attention_plan import card_of
from deepdecode.kernels.codes import FP4, FP8, PLAIN
from deepdecode.kernels.linear_gemv import linear_gemv_kernel
from deepdecode.kernels.linear_plan import Case, Config, Gemv, plan, supports
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


@triton.jit
def _tile(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    scaled_norm_ptr,
    scaled_ptr,
    tile,
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
    LATENT: tl.constexpr,
    INTERPRET: tl.constexpr,
    CONVERT: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(2)
    # rows past the last read the last again, and are not stored
    row = blocks_of(group * OUT + tl.minimum(m, OUT - 1), SLICES, WARPS)
    w_row, scale_row = rows_of(w_ptr, scale_ptr, row, stride_w, stride_scale, KIND)
    x_row = x_ptr + t.to(tl.int64) * stride_xt + group * stride_xg
    if LATENT > 0:
        # under way before the rows are
        norm = tl.load(scaled_norm_ptr + m, mask=m < LATENT, other=0.0).to(tl.float32)
    acc = product(x_row, t < T, w_row, scale_row, K, KIND, E8M0, EVEN, SLICES, WARPS, BLOCK_K, INTERPRET, CONVERT)
    at = out_ptr + (t.to(tl.int64) * stride_ot + group * OUT)[None, :] + m[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m < OUT)[:, None] & (t < T)[None, :])
    if LATENT > 0:
        at = scaled_ptr + (t.to(tl.int64) * LATENT)[None, :] + m[:, None]
        tl.store(at, (acc * norm[:, None]).to(scaled_ptr.dtype.element_ty), mask=(m < LATENT)[:, None] & (t < T)[None, :])


@triton.jit(do_not_specialize=["T", "OUT", "beside_OUT", "beside_tiles"])
def linear_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    beside_w_ptr,
    beside_out_ptr,
    T,
    OUT,
    beside_OUT,
    beside_tiles,
    K,
    stride_xt,
    stride_xg,
    stride_w,
    stride_scale,
    stride_ot,
    stride_beside_w,
    scaled_norm_ptr,
    scaled_ptr,
    KIND: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    BESIDE: tl.constexpr,
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LATENT: tl.constexpr,
    INTERPRET: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """BLOCK_M rows of one group for BLOCK_T tokens. Tiles of tokens are neighbours: they share the rows in L2.

    BESIDE: a plain weight that the same x is multiplied with; its tiles come first, since they have more bytes.
    LATENT: so many first rows go to scaled_ptr [T, LATENT] as well, times a weight.
    """
    tile = tl.program_id(1)
    if BESIDE:
        if tile < beside_tiles:
            _tile(
                x_ptr, beside_w_ptr, beside_w_ptr, beside_out_ptr, scaled_norm_ptr, scaled_ptr, tile, T, beside_OUT, K,
                stride_xt, stride_xg, stride_beside_w, 0, beside_OUT,
                PLAIN, E8M0, EVEN, SLICES, WARPS, BLOCK_M, BLOCK_T, BLOCK_K, 0, INTERPRET, CONVERT,
            )  # fmt: skip
        else:
            _tile(
                x_ptr, w_ptr, scale_ptr, out_ptr, scaled_norm_ptr, scaled_ptr, tile - beside_tiles, T, OUT, K,
                stride_xt, stride_xg, stride_w, stride_scale, stride_ot,
                KIND, E8M0, EVEN, SLICES, WARPS, BLOCK_M, BLOCK_T, BLOCK_K, LATENT, INTERPRET, CONVERT,
            )  # fmt: skip
    else:
        _tile(
            x_ptr, w_ptr, scale_ptr, out_ptr, scaled_norm_ptr, scaled_ptr, tile, T, OUT, K,
            stride_xt, stride_xg, stride_w, stride_scale, stride_ot,
            KIND, E8M0, EVEN, SLICES, WARPS, BLOCK_M, BLOCK_T, BLOCK_K, LATENT, INTERPRET, CONVERT,
        )  # fmt: skip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """One-byte floats as bytes, everything else as it is."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@dataclass(frozen=True)
class Beside:
    """A plain weight [OUT, K] that the same x is multiplied with in the same launch, and where that goes: out [T, 1, OUT]."""

    w: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class Scaled:
    """The first rows of the product a second time, times a weight [rows]: out [T, rows]."""

    weight: torch.Tensor
    out: torch.Tensor


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    kind: str,
    out: torch.Tensor,
    config: Config | Gemv,
    *,
    beside: Beside | None = None,
    scaled: Scaled | None = None,
) -> None:
    """Fill out [T, G, OUT] from x [T, G, K] and w [G * OUT, ...]; `deepdecode.ops.linear` has checked them, and T > 0."""
    T, G, K = x.shape
    OUT = out.shape[2]
    codes, scales = bits(w), w if scale is None else bits(scale)
    few = isinstance(config, Gemv)
    beside_out = 0 if beside is None else beside.out.shape[2]
    beside_tiles = triton.cdiv(beside_out, config.beside_m if few else config.block_m)
    tiles = triton.cdiv(OUT, config.block_m) + beside_tiles
    arguments = (
        x,
        codes,
        scales,
        out,
        None if beside is None else beside.w,
        None if beside is None else beside.out,
        T,
        OUT,
        beside_out,
        beside_tiles,
        K,
        x.stride(0),
        x.stride(1),
        codes.stride(0),
        scales.stride(0),
        G * OUT,
        0 if beside is None else beside.w.stride(0),
        None if scaled is None else scaled.weight,
        None if scaled is None else scaled.out,
    )
    options = {
        "KIND": KINDS[kind],
        "E8M0": scales.dtype == torch.uint8,
        "BESIDE": beside is not None,
        "LATENT": 0 if scaled is None else len(scaled.weight),
        "INTERPRET": not x.is_cuda,
        "num_warps": config.num_warps,
    }
    if few:
        pieces = triton.cdiv(K, config.block_k)
        linear_gemv_kernel[tiles, G](
            *arguments, EVEN=pieces * config.block_k == K, TOKENS=config.tokens,
            BLOCK_M=config.block_m, BESIDE_M=config.beside_m, BLOCK_K=config.block_k, PIECES=pieces, PDL=config.pdl,
            **options, **({"launch_pdl": True} if config.pdl else {}),
        )  # fmt: skip
        return
    linear_kernel[triton.cdiv(T, config.block_t), tiles, G](
        *arguments, EVEN=K % (config.slices * config.block_k) == 0, SLICES=config.slices, WARPS=config.num_warps,
        BLOCK_M=config.block_m, BLOCK_T=config.block_t, BLOCK_K=config.block_k, CONVERT=config.convert,
        num_stages=config.num_stages, **options,
    )  # fmt: skip


def weight_name(w: torch.Tensor, kind: str) -> str:
    """A weight's type as plans name it."""
    return kind if kind != "plain" else _name(w.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    kind: str,
    out: torch.Tensor,
    *,
    beside: Beside | None = None,
    scaled: Scaled | None = None,
) -> str | None:
    """Fill out, and that of the weight beside, and give None; or give the reason why no kernel can, having done nothing."""
    T, G, K = x.shape
    names = [_name(dtype) for dtype in (x.dtype, torch.float32 if scale is None else scale.dtype, out.dtype)]
    rows = 0 if beside is None else len(beside.w)
    case = Case(T, G, out.shape[2], K, weight_name(w, kind), *names, beside=rows)
    card = card_of(x.device)
    reason = supports(case, card) or layout_reason(x, w, scale, None if beside is None else beside.w)
    if reason:
        return reason
    config = plan(case, card)
    # Triton launches on the current device
    with torch.cuda.device(x.device):
        launch(x, w, scale, kind, out, config, beside=beside, scaled=scaled)
    return None


def layout_reason(x: torch.Tensor, *weights: torch.Tensor | None) -> str | None:
    """Why rows cannot be read, if they cannot. Codes are widened four columns at a time, from loads of 16 bytes."""
    if any(t is not None and t.stride(-1) != 1 and t.shape[-1] > 1 for t in (x, *weights)):
        return "rows whose elements are not neighbours"
    codes = [t for t in weights if t is not None and t.dtype in (torch.float8_e4m3fn, torch.uint8)]
    if any(n % 16 for t in codes for n in (t.data_ptr(), t.shape[-1], *t.stride()[:-1])):
        return "rows of codes that do not start and end on multiples of 16 bytes"
    return None


def compile_args(
    config: Config | Gemv, kind: str, *, beside: bool = False, latent: int = 0
) -> tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, int]]:
    """The kernel, its types, constants and options as `launch` passes them at the model's sizes, to compile it anywhere."""
    types = {"x_ptr": "*bf16:16", "w_ptr": f"*{'bf16' if kind == 'plain' else 'u8'}:16", "scale_ptr": "*u8:16"}
    types |= {"out_ptr": "*bf16:16"} | dict.fromkeys(("T", "OUT", "beside_OUT", "beside_tiles"), "i32")
    types |= {"beside_w_ptr": "*bf16:16", "beside_out_ptr": "*fp32:16"} if beside else {}
    types |= {"scaled_norm_ptr": "*bf16:16", "scaled_ptr": "*bf16:16"} if latent else {}
    sizes = ("K", "stride_xt", "stride_xg", "stride_w", "stride_scale", "stride_ot", "stride_beside_w")
    types |= dict.fromkeys(sizes, "i32:16")
    constants = {"KIND": KINDS[kind].value, "E8M0": True, "EVEN": True, "BESIDE": beside, "LATENT": latent, "INTERPRET": False}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k}
    if isinstance(config, Gemv):
        constants |= {"BESIDE_M": config.beside_m, "TOKENS": config.tokens, "PIECES": 1, "PDL": config.pdl}
        return linear_gemv_kernel, types, constants, {"num_warps": config.num_warps}
    constants |= {"SLICES": config.slices, "WARPS": config.num_warps, "BLOCK_T": config.block_t, "CONVERT": config.convert}
    return linear_kernel, types, constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}
