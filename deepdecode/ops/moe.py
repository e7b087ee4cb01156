"""The experts: SwiGLU with V4's clamp, the routed experts of this rank, the shared one, and their sum."""

import torch
import torch.nn.functional as F

from deepdecode.ops._check import FLOATS, describe, expect, fall_back, kernel_runs, readable, torch_op, use_kernel, wide
from deepdecode.ops.linear import linear_ref
from deepdecode.ops.quant import Weight
from deepdecode.ops.table import MoeWeights

Tensor = torch.Tensor


def swiglu_ref(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float = 10.0) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), in float32 (float64 for float64), rounded once.

    The clamp is one-sided on the gate and two-sided on up; this is the only form there is.

    Args:
        gate: [T, I] bfloat16, float32 or float64.
        up: [T, I], of the dtype and on the device of `gate`.
        limit: clamp bound, > 0.

    Returns:
        [T, I] of that dtype. T == 0 gives an empty tensor. A NaN stays a NaN, and where it was.

    Raises:
        ValueError: an argument has another shape, dtype or device, or limit <= 0.
    """
    expect("swiglu: gate", gate, ("T", "width"), FLOATS, gate.device, contiguous=False)
    expect("swiglu: up", up, gate.shape, gate.dtype, gate.device, contiguous=False)
    if not limit > 0:
        raise ValueError(f"swiglu: limit must be > 0, got {limit}")
    return swiglu_ref(wide(gate), wide(up), limit).to(gate.dtype)


def moe_ref(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoeWeights, limit: float, shared_rows: int | None = None
) -> torch.Tensor:
    """[T, C] in the type of x; experts are widened one at a time, and only those that a token takes.

    Off the CPU this asks the host which experts those are, and waits for it.
    """
    y = x.new_zeros(x.shape)
    gate, up = linear_ref(x[:shared_rows], w.shared13).chunk(2, dim=-1)
    y[:shared_rows] = linear_ref(swiglu_ref(gate, up, limit), w.shared2)
    local = ids.long() - w.first_expert
    for e in local[(local >= 0) & (local < w.w13.shape[0])].unique().tolist():
        rows, lanes = (local == e).nonzero(as_tuple=True)
        gate, up = linear_ref(x[rows], w.w13[e]).chunk(2, dim=-1)
        v = swiglu_ref(gate, up, limit) * weights[rows, lanes, None]
        y.index_add_(0, rows, linear_ref(v, w.w2[e]))
    return y


def moe(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoeWeights, limit: float, shared_rows: int | None = None
) -> torch.Tensor:
    """Sum of the routed experts that a token takes on this rank and of the shared expert.

    Everything inside is float32 (float64 for float64 x): both products, the clamped SwiGLU of routed and shared experts
    alike, the routing weight (multiplied before w2) and the sum; rounded once. The stored weights stay packed. The kernels
    of bfloat16 x round what enters the second product to bfloat16 (1.7e-3 of its norm), and nothing else.

    Args:
        x: [T, C] bfloat16, float32 or float64.
        ids: int32 or int64 [T, k], expert ids of the whole model. -1, and the experts of other ranks, add nothing.
            An id that a token names twice counts twice.
        weights: float32 or float64 [T, k], what `gate` gives. The shared expert has none.
        w: this layer's experts; see `MoeWeights`.
        limit: the clamp bound of `swiglu`, > 0.
        shared_rows: the shared expert is for the first so many tokens, 0 to T; None for all. Those behind are tokens of other
            ranks, which have the shared expert too.

    Returns:
        [T, C] of x's dtype, contiguous. T == 0 gives an empty tensor; a token without an expert here gets the shared one's
        output, or 0.

    Raises:
        ValueError: an argument has another shape, dtype or device, limit <= 0, the rank's first expert < 0, or shared_rows is
            out of range.
    """
    C = w.w13.shape[-1]
    if x.dim() != 2 or x.shape[1] != C or x.dtype not in FLOATS or x.device != w.w13.device:
        raise ValueError(f"moe: x must be [T, {C}] bfloat16, float32 or float64 on {w.w13.device}, got {describe(x)}")
    expect("moe: ids", ids, (len(x), "k"), (torch.int32, torch.int64), x.device, contiguous=False)
    expect("moe: weights", weights, ids.shape, FLOATS[1:], x.device, contiguous=False)
    _expect_experts(w, C)
    if not limit > 0:
        raise ValueError(f"moe: limit must be > 0, got {limit}")
    if shared_rows is not None and not 0 <= shared_rows <= len(x):
        raise ValueError(f"moe: shared_rows must be in [0, {len(x)}], got {shared_rows}")
    if len(x) == 0:
        return x.new_empty(x.shape)
    if readable(x) and not torch.compiler.is_compiling():
        inner = wide(x)
        return moe_ref(inner, ids, weights.to(inner.dtype), w, limit, shared_rows).to(x.dtype)
    stored = [part for weight in (w.w13, w.w2, w.shared13, w.shared2) for part in (weight.data, weight.scale)]
    return _experts_op(x, ids, weights, *stored, w.first_expert, float(limit), shared_rows)


def _experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    scale13: Tensor | None,
    w2: Tensor,
    scale2: Tensor | None,
    shared13: Tensor,
    shared_scale13: Tensor | None,
    shared2: Tensor,
    shared_scale2: Tensor | None,
    first_expert: int,
    limit: float,
    shared_rows: int | None = None,
) -> Tensor:
    """[T, C] from checked arguments: the kernels where there are some, else the reference."""
    stored = (w13, scale13, w2, scale2, shared13, shared_scale13, shared2, shared_scale2)
    if use_kernel(x):
        from deepdecode.kernels import moe as kernel  # the only import of Triton on this path

        # not empty_like: the result is contiguous, whatever x is
        out = x.new_empty(x.shape)
        options = {"first_expert": first_expert, "limit": limit, "shared_rows": len(x) if shared_rows is None else shared_rows}
        reason = kernel.run(x, ids, weights, *stored, **options, out=out)
        if reason is None:
            kernel_runs["moe"] += 1
            return out
        fall_back("moe", f"x {list(x.shape)}, w13 {list(w13.shape)} {w13.dtype}", reason)
    inner = wide(x)
    w = MoeWeights(
        # the router's part plays no role here
        x,
        None,
        None,
        Weight(w13, scale13),
        Weight(w2, scale2),
        Weight(shared13, shared_scale13),
        Weight(shared2, shared_scale2),
        first_expert,
    )
    return moe_ref(inner, ids, weights.to(inner.dtype), w, limit, shared_rows).to(x.dtype)


_experts_op = torch_op("moe", _experts, lambda x, *args: x.new_empty(x.shape))


def _expect_experts(w: MoeWeights, C: int) -> None:
    # an id of -1 would be an expert of such a rank
    if w.first_expert < 0:
        raise ValueError(f"moe: first_expert must be >= 0, got {w.first_expert}")
    for name, weight in (("w2", w.w2), ("shared13", w.shared13), ("shared2", w.shared2)):
        if weight.device != w.w13.device:
            raise ValueError(f"moe: {name} must be on {w.w13.device} as w13, got {weight.device}")
    E, pair, _ = w.w13.shape if len(w.w13.shape) == 3 else (0, 1, 0)
    if pair % 2:
        raise ValueError(f"moe: w13 must be [E, 2I, C], got {list(w.w13.shape)}")
    if w.w2.shape != (E, C, pair // 2):
        raise ValueError(f"moe: w2 must be {[E, C, pair // 2]}, got {list(w.w2.shape)}")
    shared = w.shared13.shape[0]
    if w.shared13.shape != (shared, C) or shared % 2:
        raise ValueError(f"moe: shared13 must be [2I, {C}], got {list(w.shared13.shape)}")
    if w.shared2.shape != (C, shared // 2):
        raise ValueError(f"moe: shared2 must be {[C, shared // 2]}, got {list(w.shared2.shape)}")
