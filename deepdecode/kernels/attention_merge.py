"""What the splits of sparse attention leave behind, and the merge that makes the output of it: log-sum-exp, the sink once."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepdecode.kernels.attention_plan import Config, workspace_layout
from deepdecode.kernels.rotate import frequencies, rotate, sincos

# views of a caller's buffers: wherever they start, the same code (which is what they take on 16 bytes, too)
ANYWHERE = ["window_indices_ptr", "extra_indices_ptr", "window_lens_ptr", "extra_lens_ptr", "sink_ptr", "lse_ptr"]
# splits that a merge holds in registers at once, and at most
STEP, MERGED = 32, 64


@triton.jit(do_not_specialize=["H", "splits"], do_not_specialize_on_alignment=[*ANYWHERE, "positions_ptr"])
def merge_kernel(
    sink_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    part_unit_ptr,
    positions_ptr,
    freqs_ptr,
    H,
    splits,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    R: tl.constexpr,
    STEP: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One program for each (token, head). A thread holds its channels of STEP splits and sums them in their order.

    R: of the output's last channels, which are turned back by the token's position; 0: none.
    So nothing goes from thread to thread, and all loads are on their way at once; a reduction over splits took 2 us more.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    channel = tl.arange(0, 512)
    sink = float("-inf")
    if HAS_SINK:
        sink = tl.load(sink_ptr + h) * 1.4426950408889634
        # infinity less itself would be NaN; what is this large takes all weight as well
        sink = tl.where(sink == float("inf"), 3.0e38, sink)
    row = t * splits * H + h
    # one 64-bit address of each; splits are 32-bit steps from it
    part_lse_ptr += row
    part_unit_ptr += row
    part_ptr += row * 512
    peak = sink
    total = 0.0
    acc = tl.zeros([512], tl.float32)
    keys_peak = float("-inf")
    keys_total = 0.0
    if R > 0:
        freq, turns = frequencies(freqs_ptr, 512, R)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if R > 0:
        # asked for beside the first parts
        position = tl.load(positions_ptr + t)
    for first in range(0, 1 if ONCE else splits, STEP):
        top = float("-inf")
        lses = ()
        for n in tl.static_range(STEP):
            lse = tl.load(part_lse_ptr + (first + n) * H, mask=first + n < splits, other=float("-inf"))
            lses = lses + (lse,)  # noqa: RUF005 (Triton knows no starred tuples)
            top = tl.maximum(top, lse)
        new_peak = tl.maximum(peak, top)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        fade = tl.exp2(peak - base)
        total *= fade
        acc *= fade
        peak = new_peak
        keys_new = tl.maximum(keys_peak, top)
        keys_base = tl.where(keys_new == float("-inf"), 0.0, keys_new)
        keys_total *= tl.exp2(keys_peak - keys_base)
        keys_peak = keys_new
        for n in tl.static_range(STEP):
            at = (first + n) * H
            unit = tl.load(part_unit_ptr + at, mask=first + n < splits, other=0.0)
            values = tl.load(part_ptr + (at * 512 + channel), mask=first + n < splits, other=0.0)
            weight = tl.exp2(lses[n] - base)
            total += weight
            acc += values.to(tl.float32) * (weight * unit)
            if HAS_LSE:
                keys_total += tl.exp2(lses[n] - keys_base)
    if HAS_SINK:
        total += tl.exp2(sink - tl.where(peak == float("-inf"), 0.0, peak))
    acc = acc / tl.where(total == 0, 1.0, total)
    if R > 0:
        cos, sin = sincos(position.to(tl.float32) * freq, INTERPRET)
        acc = tl.reshape(rotate(tl.reshape(acc, [1, 512]), cos, -sin, turns, 1, 512), [512])
    tl.store(out_ptr + (t * H + h) * 512 + channel, acc.to(out_ptr.dtype.element_ty))
    if HAS_LSE:
        lse = keys_peak + tl.log2(tl.where(keys_total == 0, 1.0, keys_total))
        tl.store(lse_ptr + t * H + h, tl.where(keys_total == 0, float("-inf"), lse / 1.4426950408889634))


@dataclass(frozen=True)
class Parts:
    """What splits hand to the merge: outputs float16 [T, splits, H, 512], lse in powers of two and units float32.

    A unit is what a row's float16 values are counted in.
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


@dataclass(frozen=True)
class Turn:
    """The rotation back of the output's last channels: positions int32 [T], frequencies float32 [R / 2]."""

    positions: torch.Tensor
    freqs: torch.Tensor


def launch_merge(
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    parts: Parts,
    config: Config,
    turn: Turn | None = None,
) -> None:
    T, H, _ = out.shape
    # as many as there are: up to the next power of two a warp would go through a third more instructions
    step = min(STEP if config.merge_warps < 4 else MERGED, config.splits)
    merge_kernel[T, H](
        sink,
        out,
        lse,
        parts.out,
        parts.lse,
        parts.unit,
        None if turn is None else turn.positions,
        None if turn is None else turn.freqs,
        H,
        config.splits,
        HAS_SINK=sink is not None,
        HAS_LSE=lse is not None,
        R=0 if turn is None else 2 * len(turn.freqs),
        STEP=step,
        ONCE=step >= config.splits,
        PDL=config.pdl,
        INTERPRET=not out.is_cuda,
        num_warps=config.merge_warps,
        **({"launch_pdl": True} if config.pdl else {}),
    )
