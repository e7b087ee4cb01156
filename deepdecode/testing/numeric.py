"""How two tensors are compared: by norm, by their worst row, by bits."""

import torch


def rel_err(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| in float64; inf where NaNs or infinities stand in different places. Empty tensors agree."""
    if out.shape != ref.shape:
        raise ValueError(f"rel_err: out must be {list(ref.shape)}, got {list(out.shape)}")
    out, ref = out.detach().double().flatten(), ref.detach().double().flatten()
    finite = ref.isfinite()
    if not torch.equal(finite, out.isfinite()) or not _same(out[~finite], ref[~finite]):
        return float("inf")
    out, ref = out[finite], ref[finite]
    gap, size = (out - ref).norm().item(), ref.norm().item()
    return gap / size if size else (0.0 if gap == 0 else float("inf"))


def worst_row_err(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The largest `rel_err` over rows of the last dimension."""
    if out.shape == ref.shape and ref.numel() and bool((out.isfinite() & ref.isfinite()).all()):
        # all rows at once: one by one they take longer than most kernels that are measured
        gap, size = (out.double() - ref.double()).norm(dim=-1), ref.double().norm(dim=-1)
        return torch.where(size > 0, gap / size, torch.where(gap > 0, float("inf"), 0.0)).max().item()
    rows = zip(out.reshape(-1, out.shape[-1]), ref.reshape(-1, ref.shape[-1]), strict=True)
    return max((rel_err(a, b) for a, b in rows), default=0.0)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes; NaNs of equal bits are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)) and torch.equal(a.isnan(), b.isnan())
