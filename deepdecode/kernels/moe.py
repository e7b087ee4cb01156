"""Routed and shared experts in three launches, for every arch, with weights read as stored (W4A16, W8A16).

`w13_kernel` gives h = silu(gate) * up * routing weight of every (token, expert) pair, `w2_kernel` the pair's output in float32,
`combine_kernel` their sum in the order of a token's experts, the shared one first: the bits do not vary. h is rounded to
bfloat16 between the first two, as the operand of a product; nothing else is rounded before the end.

No pair is sorted and nothing is read back. A slot is a program row that finds its own expert: the s-th expert of this rank,
or, where there are fewer pairs than experts, the expert of pair s if no pair before names it. It then collects the pairs of its
expert, a tile at a time, so an expert is read once for all its tokens, and grids do not depend on data.
"""

import torch
import triton
import triton.language as tl

from deepdecode.cards import Card
from deepdecode.kernels import moe_gemv
from deepdecode.kernels.attention_plan import card_of
from deepdecode.kernels.launching import gluon_ready
from deepdecode.kernels.linear import KINDS, bits, layout_reason, rows_of, weight_name
from deepdecode.kernels.moe_plan import Case, Config, Few, Stream, Tile, plan, plan_few, plan_stream, supports
from deepdecode.kernels.product import blocks_of, product

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


@triton.jit(do_not_specialize=["shared_rows", "pairs", "first", "E"])
def combine_kernel(
    y_ptr, ids_ptr, out_ptr, shared_rows, pairs, first, E, C, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # the ids were there when w13's launch let w2's begin, which let this one begin
    here = ()
    for n in tl.static_range(TOP):
        expert = tl.load(ids_ptr + t * TOP + n).to(tl.int64) - first
        more = ((expert >= 0) & (expert < E),)
        here = here + more
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(y_ptr + (pairs + t) * C + c, mask=(t < shared_rows) & (c < C), other=0.0)
    # unrolled, so that all loads are under way at once
    for n in tl.static_range(TOP):
        total += tl.load(y_ptr + (t * TOP + n) * C + c, mask=here[n] & (c < C), other=0.0)
    tl.store(out_ptr + t * C + c, total.to(out_ptr.dtype.element_ty), mask=c < C)


def combine(
    y: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, shared_rows: int, first_expert: int, E: int, pdl: bool
) -> None:
    """out [T, C] from y float32 [pairs + shared_rows, C]."""
    T, C = out.shape
    combine_kernel[T, triton.cdiv(C, 1024)](
        y, ids, out, shared_rows, ids.numel(), first_expert, E, C, TOP=ids.shape[1], BLOCK=1024, PDL=pdl, num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


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
    """Fill out [T, C]; `deepdecode.ops.moe` has checked the arguments, and T > 0. ids and weights are contiguous."""
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
    combine(y, ids, out, shared_rows, first_expert, E, pdl=False)


def run(
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
    *,
    first_expert: int,
    limit: float,
    shared_rows: int,
    out: torch.Tensor,
) -> str | None:
    """Fill out and give None; or give the reason why no kernel can, having done nothing."""
    kind, shared_kind = _kind(w13), _kind(shared13)
    if _kind(w2) != kind or _kind(shared2) != shared_kind:
        return "weights of two kinds in one expert"
    T, C = x.shape
    case = Case(
        T, ids.shape[1], w13.shape[0], C, w13.shape[1] // 2, shared13.shape[0] // 2, weight_name(w13, kind),
        weight_name(shared13, shared_kind), str(x.dtype).removeprefix("torch."), str(weights.dtype).removeprefix("torch."),
        shared_rows,
    )  # fmt: skip
    card = card_of(x.device)
    stored = (w13, scale13, w2, scale2, shared13, shared_scale13, shared2, shared_scale2)
    reason = supports(case, card) or layout_reason(x, *stored)
    if reason:
        return reason
    ids, weights = ids.contiguous(), weights.contiguous()
    # Triton launches on the current device
    with torch.cuda.device(x.device):
        config = _few(case, card, x, *stored)
        if config is not None:
            from deepdecode.kernels import moe_few

            moe_few.launch(x, ids, weights, *stored, first_expert, limit, out, config)
            return None
        few = moe_gemv.covers(T, C, case.I, case.shared_I, kind, shared_kind, card.arch)
        if few and shared_rows == T and x.is_contiguous() and x.data_ptr() % 4 == 0:
            moe_gemv.launch(x, ids, weights, *stored, first_expert, limit, out, card.arch)
            return None
        stream = _stream(case, card, x, *stored)
        if stream is not None:
            from deepdecode.kernels import moe_stream

            moe_stream.launch(x, ids, weights, *stored, first_expert, limit, out, stream, shared_rows)
        else:
            launch(x, ids, weights, *stored, kind, shared_kind, first_expert, limit, out, plan(case, card), shared_rows)
    return None


def _stream(case: Case, card: Card, x: torch.Tensor, *stored: torch.Tensor | None) -> Stream | None:
    """The streaming launches, where they cover what was given."""
    return plan_stream(case, card) if _plain(x, *stored) else None


def _few(case: Case, card: Card, x: torch.Tensor, *stored: torch.Tensor | None) -> Few | None:
    """The launches of a few tokens, where they cover what was given."""
    return plan_few(case, card) if _plain(x, *stored) else None


def _plain(x: torch.Tensor, *stored: torch.Tensor | None) -> bool:
    """Whether Gluon's kernels can read what was given: E8M0 scales, everything contiguous and aligned."""
    if not gluon_ready() or any(scale is None or scale.dtype != torch.float8_e8m0fnu for scale in stored[1::2]):
        return False
    return all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in (x, *stored))


def _kind(w: torch.Tensor) -> str:
    return {torch.float8_e4m3fn: "fp8", torch.uint8: "fp4"}.get(w.dtype, "plain")


def compile_args(name: str, config: Config, kind: str = "fp4", shared: str = "fp8") -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of "w13" or "w2" as `launch` passes them for sizes of the model, to compile it without a GPU."""
    pointers = {"x": "bf16", "h": "bf16", "shared_h": "bf16", "ids": "i32", "weights": "fp32", "y": "fp32"}
    pointers |= {"w": "u8" if kind != "plain" else "bf16", "shared": "u8" if shared != "plain" else "bf16"}
    pointers |= dict.fromkeys(("scale", "shared_scale"), "u8")
    counts = ("shared_rows", "pairs", "top_k", "first", "E", "shared_jobs")
    function = w13_kernel if name == "w13" else w2_kernel
    types = {f"{pointer}_ptr": f"*{type_}:16" for pointer, type_ in pointers.items()} | dict.fromkeys(counts, "i32")
    types |= {"limit": "fp32"} | dict.fromkeys(("K", "I", "SHARED_I", "C"), "i32:16")
    types |= {argument: "i32:16" for argument in function.arg_names if argument.startswith("stride_")}
    constants = {"KIND": KINDS[kind].value, "SHARED_KIND": KINDS[shared].value, "E8M0": True, "SHARED_E8M0": True, "EVEN": True}
    constants |= {"SHARED_EVEN": True, "BY_PAIR": True}
    tile = config.w13 if name == "w13" else config.w2
    constants |= {"CHUNK": MAX_CHUNK, "BLOCK_I": tile.rows // 2, "BLOCK_M": tile.rows, "BLOCK_T": config.block_t}
    constants |= {"SHARED_T": config.shared_t, "TURNS": config.w2_turns, "INTERPRET": False, **_tile(tile)}
    names = set(function.arg_names)
    return {k: v for k, v in types.items() if k in names}, {k: v for k, v in constants.items() if k in names}
