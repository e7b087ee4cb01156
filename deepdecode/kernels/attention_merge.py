"""What the splits of sparse attention leave behind, and the merge that makes the output of it: log-sum-exp, the sink once."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepdecode.kernels.attention_plan import Config, workspace_layout

# splits that a merge holds in registers at once
MERGED = 32


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
    """One program for each (token, head, half of the channels); BLOCK_S splits at a time, in their order."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    half = tl.program_id(2)
    channel = half * 256 + tl.arange(0, 256)
    sink = float("-inf")
    if HAS_SINK:
        sink = tl.load(sink_ptr + h) * 1.4426950408889634
    if PDL:
        tl.extra.cuda.gdc_wait()
    peak = sink
    total = 0.0
    acc = tl.zeros([256], tl.float32)
    keys_peak = float("-inf")
    keys_total = 0.0
    for first in range(0, splits, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)
        row = (t * splits + part) * H + h
        lse = tl.load(part_lse_ptr + row, mask=part < splits, other=float("-inf"))
        unit = tl.load(part_unit_ptr + row * UNITS + (half if UNITS == 2 else 0), mask=part < splits, other=0.0)
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
        tl.store(lse_ptr + t * H + h, tl.where(keys_total == 0, float("-inf"), lse / 1.4426950408889634), mask=half == 0)


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


def launch_merge(sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None, parts: Parts, config: Config) -> None:
    merge_kernel[(*out.shape[:2], 2)](
        sink,
        out,
        lse,
        parts.out,
        parts.lse,
        parts.unit,
        out.shape[1],
        config.splits,
        HAS_SINK=sink is not None,
        HAS_LSE=lse is not None,
        BLOCK_S=min(MERGED, triton.next_power_of_2(config.splits)),
        UNITS=2 if config.kernel == "wide" else 1,
        PDL=config.pdl,
        num_warps=config.merge_warps,
        **({"launch_pdl": True} if config.pdl else {}),
    )
