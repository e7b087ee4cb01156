"""Products with stored weights: widened exactly, accumulated in float32, rounded once (W8A16, W4A16).

From sm_90 on, a product of one or two tokens reads its weights while the launch in front of it still runs: that one must not be
what writes them.
"""

import torch

from deepdecode.ops._check import (
    FLOATS,
    describe,
    expect,
    fall_back,
    kernel_runs,
    readable,
    torch_op,
    use_kernel,
    wide,
    wide_type,
)
from deepdecode.ops.quant import BLOCK, Weight, dequantize_rows

# weights widened at a time: 4 MB of float32, so that neither the cache nor the memory has to hold a whole layer's
WIDEN = 1 << 20


def linear_ref(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [..., in] @ weight [out, in]^T in the type of x, by blocks of rows."""
    out, width = weight.shape
    step = max(BLOCK, WIDEN // max(width, 1) // BLOCK * BLOCK)
    blocks = [x @ dequantize_rows(weight, start, min(start + step, out), x.dtype).mT for start in range(0, out, step)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)


def linear(x: torch.Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x @ weight^T: the weight widened exactly, float32 accumulation (float64 if x or the weight is), rounded once.

    Args:
        x: [..., in] bfloat16, float32 or float64. Activations are not quantised.
        weight: [out, in], any kind, on the device of x.
        out_dtype: bfloat16, float32 or float64; that of x if None.

    Returns:
        [..., out]. No token gives an empty tensor, in == 0 gives zeros. NaN and infinity go through.

    Raises:
        ValueError: an argument has another shape, dtype or device.
    """
    inner, out_dtype = _prepare("linear", x, weight, out_dtype)
    out, width = weight.shape
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(f"linear: x must be [..., {width}], got {describe(x)}")
    if x.numel() == 0 or out == 0:
        return x.new_zeros(*x.shape[:-1], out, dtype=out_dtype)
    if readable(x) and not torch.compiler.is_compiling():
        return linear_ref(x.to(inner), weight).to(out_dtype)
    rows = x.reshape(-1, 1, width)
    return _product_op("linear", rows, weight.data, weight.scale, out_dtype).view(*x.shape[:-1], out)


def grouped_linear_ref(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [T, G, in], weight [G * out, in] -> [T, G, out]: group g takes rows g * out.. of the weight."""
    groups, width = x.shape[1:]
    out = weight.shape[0] // groups
    step = max(1, WIDEN // (out * width))
    blocks = []
    for g in range(0, groups, step):
        part = x[:, g : g + step]
        rows = dequantize_rows(weight, g * out, (g + part.shape[1]) * out, x.dtype).unflatten(0, (-1, out))
        blocks.append((part.transpose(0, 1) @ rows.mT).transpose(0, 1))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def grouped_linear(x: torch.Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """A block-diagonal product (wo_a): each group of inputs has its own rows of the weight; precision as `linear`.

    Args:
        x: [T, G, in] bfloat16, float32 or float64.
        weight: [G * out, in], any kind; rows g * out .. (g + 1) * out - 1 belong to group g.

    Returns:
        [T, G, out], contiguous. T == 0 gives an empty tensor.

    Raises:
        ValueError: an argument has another shape, dtype or device, or the weight's rows do not divide by G.
    """
    inner, out_dtype = _prepare("grouped_linear", x, weight, out_dtype)
    rows, width = weight.shape
    if x.dim() != 3 or x.shape[2] != width:
        raise ValueError(f"grouped_linear: x must be [T, G, {width}], got {describe(x)}")
    if x.shape[1] == 0 or rows % x.shape[1]:
        raise ValueError(f"grouped_linear: weight must have a multiple of {x.shape[1]} rows, got {rows}")
    if x.numel() == 0 or rows == 0:
        return x.new_zeros(*x.shape[:2], rows // x.shape[1], dtype=out_dtype)
    if readable(x) and not torch.compiler.is_compiling():
        return grouped_linear_ref(x.to(inner), weight).to(out_dtype).contiguous()
    return _product_op("grouped_linear", x, weight.data, weight.scale, out_dtype)


def linear_beside(x: torch.Tensor, weight: Weight, beside: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Two products of one x: linear(x, weight), and linear(x, beside) in float32; on a GPU in one launch.

    Args:
        x: [T, in] bfloat16, float32 or float64.
        weight: [out, in], any kind.
        beside: [beside out, in], any kind; with bfloat16 rows it shares the launch.

    Returns:
        [T, out] of the type of x, [T, beside out] float32 (float64 if x is). No token gives empty tensors.

    Raises:
        ValueError: an argument has another shape, dtype or device.
    """
    wide = wide_type(x.dtype)
    together = weight.shape[1:] == beside.shape[1:] and beside.data.dtype == torch.bfloat16 and x.dim() == 2
    if not together or x.numel() == 0 or (readable(x) and not torch.compiler.is_compiling()):
        return linear(x, weight), linear(x, beside, out_dtype=wide)
    for each in (weight, beside):
        _prepare("linear_beside", x, each, None)
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear_beside: x must be [T, {weight.shape[1]}], got {describe(x)}")
    out, wide = _beside_product_op(x, weight.data, weight.scale, beside.data, None)
    return out, wide


def latent_linear(
    x: torch.Tensor, weight: Weight, beside: Weight | None, norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`linear`, or `linear_beside`, and the first columns of linear(x, weight) times norm: in the same launch.

    Args:
        x, weight, beside: as `linear_beside` takes them; without the second weight there is no second result.
        norm: [latent], contiguous, of the type of x; no longer than weight has rows.

    Returns:
        [T, out]; [T, beside out] or None; [T, latent] of the type of x.

    Raises:
        ValueError: an argument has another shape, dtype or device.
    """
    if x.dim() != 2:
        raise ValueError(f"latent_linear: x must be [T, {weight.shape[1]}], got {describe(x)}")
    together = beside is None or (weight.shape[1:] == beside.shape[1:] and beside.data.dtype == torch.bfloat16)
    expect("latent_linear: norm", norm, ("latent",), (x.dtype,), x.device)
    if len(norm) > weight.shape[0]:
        raise ValueError(f"latent_linear: norm must have at most {weight.shape[0]} columns, got {len(norm)}")
    if not together or x.numel() == 0 or (readable(x) and not torch.compiler.is_compiling()):
        out, wide = (linear(x, weight), None) if beside is None else linear_beside(x, weight, beside)
        return out, wide, _scaled(out, norm)
    _prepare("latent_linear", x, weight, None)
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"latent_linear: x must be [T, {weight.shape[1]}], got {describe(x)}")
    out, *wide, scaled = _beside_product_op(x, weight.data, weight.scale, None if beside is None else beside.data, norm)
    return out, wide[0] if wide else None, scaled


def _scaled(out: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return (wide(out[:, : len(norm)]) * norm).to(out.dtype)


def _product(op: str, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """[T, G, out] from checked arguments, x [T, G, in]: the kernel where there is one, else the reference."""
    weight = Weight(data, scale)
    out = x.new_empty(*x.shape[:2], weight.shape[0] // x.shape[1], dtype=out_dtype)
    if use_kernel(x):
        from deepdecode.kernels import linear as kernel  # the only import of Triton on this path

        reason = kernel.multiply(x, data, scale, weight.kind, out)
        if reason is None:
            kernel_runs[op] += 1
            return out
        fall_back(op, f"x {list(x.shape)}, weight {list(weight.shape)} {weight.kind}", reason)
    inner = torch.promote_types(wide_type(x.dtype), data.dtype if weight.kind == "plain" else torch.float32)
    ref = grouped_linear_ref(x.to(inner), weight) if x.shape[1] > 1 else linear_ref(x[:, 0].to(inner), weight)[:, None]
    return out.copy_(ref)


def _product_fake(op, x, data, scale, out_dtype) -> torch.Tensor:
    return x.new_empty(*x.shape[:2], data.shape[0] // x.shape[1], dtype=out_dtype)


_product_op = torch_op("linear", _product, _product_fake)


def _beside_product(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None, beside: torch.Tensor | None, norm: torch.Tensor | None
) -> list[torch.Tensor]:
    """[T, out]; [T, beside out] float32 of the weight beside; [T, latent] if there is a norm; from checked arguments.

    One launch where a kernel covers all, else products one by one.
    """
    weight = Weight(data, scale)
    if use_kernel(x):
        from deepdecode.kernels import linear as kernel  # the only import of Triton on this path

        out = x.new_empty(len(x), 1, weight.shape[0])
        more: list[torch.Tensor] = []
        second = scaled = None
        if beside is not None:
            more.append(x.new_empty(len(x), 1, len(beside), dtype=wide_type(x.dtype)))
            second = kernel.Beside(beside, more[0])
        if norm is not None:
            more.append(x.new_empty(len(x), 1, len(norm)))
            scaled = kernel.Scaled(norm, more[-1])
        reason = kernel.multiply(x[:, None], data, scale, weight.kind, out, beside=second, scaled=scaled)
        if reason is None:
            kernel_runs["linear"] += 1
            return [t[:, 0] for t in (out, *more)]
        rows = "" if beside is None else f" and {len(beside)} rows"
        fall_back("linear_beside", f"x {list(x.shape)}, weights {list(weight.shape)} {weight.kind}{rows}", reason)
    out = linear(x, weight)
    return [
        out,
        *([] if beside is None else [linear(x, Weight(beside), out_dtype=wide_type(x.dtype))]),
        *([] if norm is None else [_scaled(out, norm)]),
    ]


def _beside_fake(x, data, scale, beside, norm) -> list[torch.Tensor]:
    parts = [x.new_empty(len(x), data.shape[0])]
    if beside is not None:
        parts.append(x.new_empty(len(x), len(beside), dtype=wide_type(x.dtype)))
    return parts + ([] if norm is None else [x.new_empty(len(x), len(norm))])


_beside_product_op = torch_op("linear_beside", _beside_product, _beside_fake)


def _prepare(op: str, x: torch.Tensor, weight: Weight, out_dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """Check what both products share; the type to compute in and the type to return."""
    if x.dtype not in FLOATS or x.device != weight.device:
        raise ValueError(f"{op}: x must be bfloat16, float32 or float64 on {weight.device}, got {describe(x)}")
    if len(weight.shape) != 2:
        raise ValueError(f"{op}: weight must be [out, in], got {list(weight.shape)}")
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if out_dtype not in FLOATS:
        raise ValueError(f"{op}: out_dtype must be bfloat16, float32 or float64, got {out_dtype}")
    return torch.promote_types(wide_type(x.dtype), weight.data.dtype if weight.kind == "plain" else torch.float32), out_dtype
