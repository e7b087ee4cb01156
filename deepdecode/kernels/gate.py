"""The router: scores of all experts and the choice in two launches, or on hash layers the chosen experts' scores in one.

The first launch cuts experts and channels over programs: one token's product reads 2 MB, which one processor alone would take
20 us for. How they are cut does not depend on the tokens, and parts are summed in their order, so neither do a token's bits.
A hash layer knows its experts beforehand: it reads their rows only, one program a token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Config:
    """block_e: experts of a program of the first launch; block_k: its channels; block_t: its tokens."""

    block_e: int
    block_k: int
    block_t: int
    num_warps: int
    pdl: bool


def plan(arch: int) -> Config:
    """The same for every number of tokens. Pure."""
    return Config(block_e=64, block_k=512, block_t=16, num_warps=4, pdl=arch >= 90)


def supports(T: int, C: int, E: int, top_k: int, dtype: str, weight: str) -> str | None:
    """Why no kernel runs; None if one does. dtype, weight: the types of x and of the gate's weight."""
    if dtype != "bfloat16" or weight != "bfloat16":
        return f"x and weight must be bfloat16, got {dtype} and {weight}"
    if C % 64 or E > 1024 or top_k > 16:
        return f"C must be a multiple of 64, E at most 1024 and top_k at most 16, got {C}, {E} and {top_k}"
    if T > 65535 * 16:
        return f"T must be at most {65535 * 16}, got {T}"
    return None


@triton.jit
def _score(z):
    """sqrt(softplus(z)), softplus as max(z, 0) + log(1 + exp(-|z|)) with the logarithm as a series: exact at both ends.

    log(1 + u) = 2 atanh(u / (2 + u)), and u / (2 + u) <= 1/3. NaN stays NaN.
    """
    u = tl.exp(-tl.abs(z))
    s = u / (2.0 + u)
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q * (1 / 15)))))))
    return tl.sqrt(tl.where(z <= 0, 0.0, z) + 2.0 * s * series)


@triton.jit(do_not_specialize=["T"])
def gate_logits_kernel(
    x_ptr,
    weight_ptr,
    part_ptr,
    T,
    C,
    E,
    stride_xt,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """part[split, t, e]: the share of channels split * BLOCK_K.. in token t's logit of expert e."""
    DOT: tl.constexpr = tl.float32 if INTERPRET else tl.bfloat16
    split = tl.program_id(0)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = split * BLOCK_K + tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    known = (e < E)[:, None] & (c < C)[None, :]
    # weights do not wait for the kernel before, which must not write them
    weight = tl.load(weight_ptr + e[:, None] * C + c[None, :], mask=known, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = t.to(tl.int64)
    x = tl.load(x_ptr + row[:, None] * stride_xt + c[None, :], mask=(t < T)[:, None] & (c < C)[None, :], other=0.0)
    z = tl.dot(weight.to(DOT), tl.trans(x.to(DOT)), input_precision="ieee")  # [BLOCK_E, BLOCK_T]
    at = part_ptr + (split.to(tl.int64) * T + row)[None, :] * E + e[:, None]
    tl.store(at, z, mask=(e < E)[:, None] & (t < T)[None, :])


# what stands behind every choice
LOWEST = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["T"])
def gate_top_kernel(
    part_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    T,
    E,
    routed_scale,
    SPLITS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: sum its logits' parts, score, and take the largest TOP times, the lower id first of equal ones."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    bias = tl.zeros([BLOCK_E], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    z = tl.zeros([BLOCK_E], tl.float32)
    for split in tl.static_range(SPLITS):
        z += tl.load(part_ptr + (split * T + t) * E + e, mask=e < E, other=0.0)
    score = _score(z)
    choice = score + bias
    # bits that order as the numbers do, NaN above all: a warp finds the largest of 32 bits by one instruction
    bits = (choice + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(choice != choice, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    order = tl.where(e < E, order, LOWEST)
    place = tl.full([BLOCK_E], TOP, tl.int32)
    for i in tl.static_range(TOP):
        best = tl.max(order, 0)
        found = tl.min(tl.where(order == best, e, BLOCK_E), 0)
        place = tl.where(e == found, i, place)
        order = tl.where(e == found, LOWEST, order)
    taken = place < TOP
    factor = routed_scale / (tl.sum(tl.where(taken, score, 0.0), 0) + 1e-20)
    tl.store(ids_ptr + t * TOP + place, e, mask=taken)
    tl.store(weights_ptr + t * TOP + place, score * factor, mask=taken)


@triton.jit
def gate_hash_kernel(
    x_ptr,
    weight_ptr,
    table_ptr,
    tokens_ptr,
    ids_ptr,
    weights_ptr,
    C,
    E,
    vocab,
    stride_xt,
    routed_scale,
    TOP: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: its experts by the table, ids out of range taken to the nearest valid one, and their scores alone."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_TOP)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.minimum(tl.maximum(tl.load(tokens_ptr + t), 0), vocab - 1).to(tl.int64)
    ids = tl.load(table_ptr + token * TOP + k, mask=k < TOP, other=0)
    ids = tl.minimum(tl.maximum(ids, 0), E - 1).to(tl.int32)
    z = tl.zeros([BLOCK_TOP], tl.float32)
    for first in range(0, C, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        x = tl.load(x_ptr + t * stride_xt + c, mask=c < C, other=0.0).to(tl.float32)
        at = weight_ptr + ids[:, None] * C + c[None, :]
        weight = tl.load(at, mask=(k < TOP)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        z += tl.sum(weight * x[None, :], 1)
    chosen = tl.where(k < TOP, _score(z), 0.0)
    total = tl.sum(chosen, 0) + 1e-20
    weight = tl.div_rn(chosen, tl.zeros([BLOCK_TOP], tl.float32) + total) * routed_scale
    tl.store(ids_ptr + t * TOP + k, ids, mask=k < TOP)
    tl.store(weights_ptr + t * TOP + k, weight, mask=k < TOP)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    tokens: torch.Tensor | None,
    top_k: int,
    routed_scale: float,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 and weights float32 [T, top_k], from checked arguments, T > 0. The rows of x may be apart."""
    T, C = x.shape
    E = weight.shape[0]
    ids = torch.empty(T, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(T, top_k, dtype=torch.float32, device=x.device)
    block_top = triton.next_power_of_2(top_k)
    pdl = {"launch_pdl": True} if config.pdl else {}
    if table is not None:
        gate_hash_kernel[T,](
            x, weight, table, tokens, ids, weights, C, E, table.shape[0], x.stride(0), routed_scale,
            TOP=top_k, BLOCK_TOP=block_top, BLOCK_C=min(4096, triton.next_power_of_2(C)), PDL=config.pdl, num_warps=16, **pdl,
        )  # fmt: skip
        return ids, weights
    splits = triton.cdiv(C, config.block_k)
    part = torch.empty(splits, T, E, dtype=torch.float32, device=x.device)
    gate_logits_kernel[splits, triton.cdiv(E, config.block_e), triton.cdiv(T, config.block_t)](
        x, weight, part, T, C, E, x.stride(0), BLOCK_E=config.block_e, BLOCK_K=config.block_k, BLOCK_T=config.block_t,
        PDL=config.pdl, INTERPRET=not x.is_cuda, num_warps=config.num_warps, **pdl,
    )  # fmt: skip
    gate_top_kernel[T,](
        part, bias, ids, weights, T, E, routed_scale, SPLITS=splits, TOP=top_k,
        BLOCK_E=triton.next_power_of_2(E), HAS_BIAS=bias is not None, PDL=config.pdl, num_warps=1, **pdl,
    )  # fmt: skip
    return ids, weights
