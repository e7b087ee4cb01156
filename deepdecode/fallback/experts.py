"""The experts that rungs 0 to 4 share: three launches, weights read as stored, on the products of `fallback.product`.

`w13_kernel` gives h = silu(gate) * up * routing weight of every (token, expert) pair, `w2_kernel` the pair's output in float32,
`combine_kernel` their sum in the order of a token's experts, the shared one first. h is rounded to bfloat16 between the first
two. No pair is sorted: a slot is a program row that finds its own expert, and collects its pairs a tile at a time.

They began as `kernels.moe` and stand still on purpose where it moves: a yardstick that is measured over and over.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepdecode.config import ModelConfig
from deepdecode.fallback.product import KINDS, bits, blocks_of, product, rows_of
from deepdecode.ops import reference
from deepdecode.ops.table import MoeWeights

Tensor = torch.Tensor


@dataclass(frozen=True)
class Tile:
    """What a program takes: `rows` of the weight (of w13: half of the gate, half of up), block_k columns a step."""

    rows: int
    block_k: int
    slices: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Config:
    """block_t pairs of an expert, or shared_t tokens of the shared one, at a time. w2_turns: tiles of rows of a w2 program."""

    w13: Tile
    w2: Tile
    block_t: int
    shared_t: int
    w2_turns: int = 1


def plan(pairs: int, T: int, E: int, I: int, sms: int) -> Config:
    """The tiles that won on an H200, Triton 3.6.

    V4-Flash's experts whole: 60 / 525 / 1360 us at T = 1 / 16 / 64, where a copy of the bytes takes 25 / 260 / 643.
    """
    # tokens that an expert meets on average, if all are as likely
    block_t = 8 if pairs <= 4 * E else 16
    shared_t = 8 if T <= 8 else 16
    many = Tile(64, 128, slices=1, num_warps=4, num_stages=3)
    # a rank's eighth of few experts would not fill the card: finer tiles, and K among the warps
    tiles = min(pairs, E) * -(-2 * I // 64)
    w13 = many if tiles >= 2 * sms else Tile(16, 128, slices=4, num_warps=4, num_stages=3)
    # a narrow expert's rows end before a program has found its tokens: it takes more of them
    turns = 8 if I <= 512 and tiles >= 2 * sms else 1
    return Config(w13, many, block_t, shared_t, turns)


# ids that a program looks at at once
MAX_CHUNK = 256


@triton.jit
def _experts_of(ids_ptr, pair, pairs, first, E):
    """The experts of these pairs counted from this rank's first, -1 for those of nobody here."""
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1).to(tl.int64) - first
    return tl.where((pair < pairs) & (expert >= 0) & (expert < E), expert, -1).to(tl.int32)


@triton.jit
def _slot(ids_ptr, slot, pairs, first, E, BY_PAIR: tl.constexpr, CHUNK: tl.constexpr):
    """The expert of a slot, and how many pairs name it: none if another slot has it."""
    expert = slot
    if BY_PAIR:
        expert = tl.max(_experts_of(ids_ptr, slot + tl.arange(0, 1), pairs, first, E), 0)
    count = 0
    for at in range(0, pairs, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        same = _experts_of(ids_ptr, pair, pairs, first, E) == expert
        count += tl.sum(same.to(tl.int32), 0)
        if BY_PAIR:
            count -= pairs * tl.sum((same & (pair < slot)).to(tl.int32), 0)
    return expert, tl.where(expert < 0, 0, tl.maximum(count, 0))


@triton.jit
def _pairs_of(ids_ptr, expert, begin, pairs, first, E, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr):
    """Pairs number begin .. begin + BLOCK_T - 1 of an expert, in their order."""
    wanted = begin + tl.arange(0, BLOCK_T)
    found = tl.zeros([BLOCK_T], tl.int32)
    count = 0
    for at in range(0, pairs, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        same = (_experts_of(ids_ptr, pair, pairs, first, E) == expert).to(tl.int32)
        number = tl.where(same == 1, count + tl.cumsum(same, 0) - 1, -1)
        found += tl.sum(tl.where(number[:, None] == wanted[None, :], pair[:, None], 0), 0)
        count += tl.sum(same, 0)
    return found


@triton.jit
def _swiglu(acc, limit, M: tl.constexpr, T: tl.constexpr):
    """acc [M, T], of every 16 rows 8 of the gate and then 8 of up -> [M / 2, T]. One thread has row r and row r + 8."""
    pair = tl.permute(tl.reshape(acc, (M // 16, 2, 8, T)), (0, 2, 3, 1))
    gate, up = tl.split(pair)
    gate = tl.reshape(gate, (M // 2, T))
    up = tl.reshape(up, (M // 2, T))
    # by default tl.minimum returns the limit for a NaN, which would hide it
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["shared_rows", "pairs", "top_k", "first", "E", "shared_jobs"])
def w13_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,
    w_ptr,
    scale_ptr,
    shared_ptr,
    shared_scale_ptr,
    h_ptr,
    shared_h_ptr,
    limit,
    shared_rows,
    pairs,
    top_k,
    first,
    E,
    shared_jobs,
    K,
    I,
    SHARED_I,
    stride_x,
    stride_we,
    stride_w,
    stride_se,
    stride_s,
    stride_shared,
    stride_shared_scale,
    KIND: tl.constexpr,
    SHARED_KIND: tl.constexpr,
    E8M0: tl.constexpr,
    SHARED_E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    BY_PAIR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SHARED_T: tl.constexpr,
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """h [pairs, I] and shared_h [shared_rows, SHARED_I]."""
    M: tl.constexpr = 2 * BLOCK_I
    m = tl.arange(0, M)
    i = tl.program_id(0) * BLOCK_I + m // 16 * 8 + m % 8
    out_i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_up = m // 8 % 2
    job = tl.program_id(1)
    if job < shared_jobs:
        if tl.program_id(0) * BLOCK_I < SHARED_I:
            row = blocks_of(tl.minimum(i, SHARED_I - 1) + is_up * SHARED_I, SLICES, WARPS)
            w_row, scale_row = rows_of(shared_ptr, shared_scale_ptr, row, stride_shared, stride_shared_scale, SHARED_KIND)
            t = job * SHARED_T + tl.arange(0, SHARED_T)
            acc = product(
                x_ptr + t.to(tl.int64) * stride_x,
                t < shared_rows,
                w_row,
                scale_row,
                K,
                SHARED_KIND,
                SHARED_E8M0,
                EVEN,
                SLICES,
                WARPS,
                BLOCK_K,
                INTERPRET,
            )
            h = _swiglu(acc, limit, M, SHARED_T)
            at = shared_h_ptr + (t.to(tl.int64) * SHARED_I)[None, :] + out_i[:, None]
            tl.store(at, h.to(shared_h_ptr.dtype.element_ty), mask=(out_i < SHARED_I)[:, None] & (t < shared_rows)[None, :])
    elif tl.program_id(0) * BLOCK_I < I:
        expert, count = _slot(ids_ptr, job - shared_jobs, pairs, first, E, BY_PAIR, CHUNK)
        if count > 0:
            row = blocks_of(tl.minimum(i, I - 1) + is_up * I, SLICES, WARPS)
            w_row, scale_row = rows_of(
                w_ptr + expert.to(tl.int64) * stride_we,
                scale_ptr + expert.to(tl.int64) * stride_se,
                row,
                stride_w,
                stride_s,
                KIND,
            )
            for begin in range(0, count, BLOCK_T):
                pair = _pairs_of(ids_ptr, expert, begin, pairs, first, E, CHUNK, BLOCK_T)
                live = begin + tl.arange(0, BLOCK_T) < count
                acc = product(
                    x_ptr + (pair // top_k).to(tl.int64) * stride_x,
                    live,
                    w_row,
                    scale_row,
                    K,
                    KIND,
                    E8M0,
                    EVEN,
                    SLICES,
                    WARPS,
                    BLOCK_K,
                    INTERPRET,
                )
                h = _swiglu(acc, limit, M, BLOCK_T) * tl.load(weights_ptr + pair, mask=live, other=0.0)[None, :]
                at = h_ptr + (pair.to(tl.int64) * I)[None, :] + out_i[:, None]
                tl.store(at, h.to(h_ptr.dtype.element_ty), mask=(out_i < I)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["shared_rows", "pairs", "first", "E", "shared_jobs"])
def w2_kernel(
    h_ptr,
    shared_h_ptr,
    ids_ptr,
    w_ptr,
    scale_ptr,
    shared_ptr,
    shared_scale_ptr,
    y_ptr,
    shared_rows,
    pairs,
    first,
    E,
    shared_jobs,
    I,
    SHARED_I,
    C,
    stride_we,
    stride_w,
    stride_se,
    stride_s,
    stride_shared,
    stride_shared_scale,
    KIND: tl.constexpr,
    SHARED_KIND: tl.constexpr,
    E8M0: tl.constexpr,
    SHARED_E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    SHARED_EVEN: tl.constexpr,
    BY_PAIR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SHARED_T: tl.constexpr,
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y float32 [pairs + shared_rows, C]: the pairs' outputs, then the shared expert's. A program takes TURNS tiles of rows."""
    tile = tl.program_id(0) * TURNS
    job = tl.program_id(1)
    if job < shared_jobs:
        t = job * SHARED_T + tl.arange(0, SHARED_T)
        for turn in range(TURNS):
            m = (tile + turn) * BLOCK_M + tl.arange(0, BLOCK_M)
            row = blocks_of(tl.minimum(m, C - 1), SLICES, WARPS)
            w_row, scale_row = rows_of(shared_ptr, shared_scale_ptr, row, stride_shared, stride_shared_scale, SHARED_KIND)
            acc = product(
                shared_h_ptr + t.to(tl.int64) * SHARED_I,
                t < shared_rows,
                w_row,
                scale_row,
                SHARED_I,
                SHARED_KIND,
                SHARED_E8M0,
                SHARED_EVEN,
                SLICES,
                WARPS,
                BLOCK_K,
                INTERPRET,
            )
            at = y_ptr + ((pairs + t).to(tl.int64) * C)[None, :] + m[:, None]
            tl.store(at, acc, mask=(m < C)[:, None] & (t < shared_rows)[None, :])
    else:
        expert, count = _slot(ids_ptr, job - shared_jobs, pairs, first, E, BY_PAIR, CHUNK)
        if count > 0:
            w_ptr += expert.to(tl.int64) * stride_we
            scale_ptr += expert.to(tl.int64) * stride_se
            for begin in range(0, count, BLOCK_T):
                pair = _pairs_of(ids_ptr, expert, begin, pairs, first, E, CHUNK, BLOCK_T)
                live = begin + tl.arange(0, BLOCK_T) < count
                for turn in range(TURNS):
                    m = (tile + turn) * BLOCK_M + tl.arange(0, BLOCK_M)
                    row = blocks_of(tl.minimum(m, C - 1), SLICES, WARPS)
                    w_row, scale_row = rows_of(w_ptr, scale_ptr, row, stride_w, stride_s, KIND)
                    acc = product(
                        h_ptr + pair.to(tl.int64) * I,
                        live,
                        w_row,
                        scale_row,
                        I,
                        KIND,
                        E8M0,
                        EVEN,
                        SLICES,
                        WARPS,
                        BLOCK_K,
                        INTERPRET,
                    )
                    at = y_ptr + (pair.to(tl.int64) * C)[None, :] + m[:, None]
                    tl.store(at, acc, mask=(m < C)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["shared_rows", "pairs", "top_k", "first", "E"])
def combine_kernel(y_ptr, ids_ptr, out_ptr, shared_rows, pairs, top_k, first, E, C, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(y_ptr + (pairs + t) * C + c, mask=(t < shared_rows) & (c < C), other=0.0)
    for n in range(top_k):
        pair = t * top_k + n
        expert = tl.load(ids_ptr + pair).to(tl.int64) - first
        here = (expert >= 0) & (expert < E)
        total += tl.load(y_ptr + pair * C + c, mask=here & (c < C), other=0.0)
    tl.store(out_ptr + t * C + c, total.to(out_ptr.dtype.element_ty), mask=c < C)


def _tile(tile: Tile) -> dict[str, int]:
    """The part of a kernel's launch that its tile says."""
    return {
        "SLICES": tile.slices, "WARPS": tile.num_warps, "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip


def launch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    scale13: torch.Tensor | None,
    w2: torch.Tensor,
    scale2: torch.Tensor | None,
    shared13: torch.Tensor,
    shared_scale13: torch.Tensor | None,
    shared2: torch.Tensor,
    shared_scale2: torch.Tensor | None,
    kind: str,
    shared_kind: str,
    first_expert: int,
    limit: float,
    out: torch.Tensor,
    config: Config,
    shared_rows: int | None = None,
) -> None:
    """Fill out [T, C], T > 0. ids and weights are contiguous."""
    T, C = x.shape
    top_k = ids.shape[1]
    pairs = T * top_k
    E, I, shared_I = w13.shape[0], w13.shape[1] // 2, shared13.shape[0] // 2
    shared_rows = T if shared_rows is None else shared_rows
    by_pair = pairs < E
    slots = min(pairs, E)
    h = torch.empty(pairs, I, dtype=x.dtype, device=x.device)
    shared_h = torch.empty(shared_rows, shared_I, dtype=x.dtype, device=x.device)
    # without a scale, any pointer will do
    codes = [bits(w) for w in (w13, w2, shared13, shared2)]
    scales = [w if s is None else bits(s) for s, w in zip((scale13, scale2, shared_scale13, shared_scale2), codes, strict=True)]
    e8m0 = [s.dtype == torch.uint8 for s in scales]
    shared_jobs = triton.cdiv(shared_rows, config.shared_t)
    even13 = C % (config.w13.slices * config.w13.block_k) == 0
    even2, shared_even2 = (width % (config.w2.slices * config.w2.block_k) == 0 for width in (I, shared_I))
    common = {
        "KIND": KINDS[kind],
        "SHARED_KIND": KINDS[shared_kind],
        "BY_PAIR": by_pair,
        "CHUNK": max(16, min(MAX_CHUNK, triton.next_power_of_2(pairs))),
        "BLOCK_T": config.block_t,
        "SHARED_T": config.shared_t,
        "INTERPRET": not x.is_cuda,
    }
    w13_kernel[triton.cdiv(max(I, shared_I), config.w13.rows // 2), shared_jobs + slots](
        x,
        ids,
        weights,
        codes[0],
        scales[0],
        codes[2],
        scales[2],
        h,
        shared_h,
        limit,
        shared_rows,
        pairs,
        top_k,
        first_expert,
        E,
        shared_jobs,
        C,
        I,
        shared_I,
        x.stride(0),
        codes[0].stride(0),
        codes[0].stride(1),
        scales[0].stride(0),
        scales[0].stride(1),
        codes[2].stride(0),
        scales[2].stride(0),
        E8M0=e8m0[0],
        SHARED_E8M0=e8m0[2],
        EVEN=even13,
        BLOCK_I=config.w13.rows // 2,
        **_tile(config.w13),
        **common,
    )
    y = torch.empty(pairs + shared_rows, C, dtype=torch.float32, device=x.device)
    w2_kernel[triton.cdiv(C, config.w2.rows * config.w2_turns), shared_jobs + slots](
        h,
        shared_h,
        ids,
        codes[1],
        scales[1],
        codes[3],
        scales[3],
        y,
        shared_rows,
        pairs,
        first_expert,
        E,
        shared_jobs,
        I,
        shared_I,
        C,
        codes[1].stride(0),
        codes[1].stride(1),
        scales[1].stride(0),
        scales[1].stride(1),
        codes[3].stride(0),
        scales[3].stride(0),
        E8M0=e8m0[1],
        SHARED_E8M0=e8m0[3],
        EVEN=even2,
        SHARED_EVEN=shared_even2,
        BLOCK_M=config.w2.rows,
        TURNS=config.w2_turns,
        **_tile(config.w2),
        **common,
    )
    combine_kernel[T, triton.cdiv(C, 1024)](
        y, ids, out, shared_rows, pairs, top_k, first_expert, E, C, BLOCK=1024, num_warps=4
    )  # fmt: skip


def moe(
    x: Tensor, ids: Tensor, expert_weights: Tensor, weights: MoeWeights, config: ModelConfig, shared_rows: int | None = None
) -> Tensor:
    """As the reference of this name; off the GPU, that itself."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return reference.moe(x, ids, expert_weights, weights, config, shared_rows)
    pairs, I = ids.numel(), weights.w13.shape[1] // 2
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    out = x.new_empty(x.shape)
    launch(
        x, ids, expert_weights, weights.w13.data, weights.w13.scale, weights.w2.data, weights.w2.scale,
        weights.shared13.data, weights.shared13.scale, weights.shared2.data, weights.shared2.scale,
        weights.w13.kind, weights.shared13.kind, weights.first_expert, config.swiglu_limit, out,
        plan(pairs, len(x) if shared_rows is None else shared_rows, weights.w13.shape[0], I, sms), shared_rows,
    )  # fmt: skip
    return out
