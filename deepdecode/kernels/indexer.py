"""The indexer on tensor cores: scores of paged keys split over programs, then the topk best of each token.

Scores: keys stand on the M side of S = K Q^T, so the sum over heads stays inside a row of the accumulator. E4M3 codes are
widened to float16, which holds each of them and each product's float32 sum exactly as far as the tensor core does; Hopper's
FP8 instructions keep fewer bits of the sum.

A score becomes an int32 of the same order, its `rank`: NaN stands with +infinity, both zeros are one, an entry that is not
visible is the smallest int32, which no score is. The selection searches the bar by cutting an interval of ranks in thirds.

A token that sees no more entries than topk is not scored: the launch does not know, the program finds out from the length.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from deepdecode.kernels.attention_plan import card_of
from deepdecode.kernels.indexer_plan import (
    WORKSPACE_BYTES,
    Case,
    Config,
    case_of,
    plan,
    row_stride,
    select_blocks,
    supports,
    workspace_ints,
)
from deepdecode.ops.rows import PagedRows

HIDDEN = tl.constexpr(-(2**31))
INFINITY = tl.constexpr(0x7F800000)
# a grid's second dimension
MAX_TOKENS = 65535


@triton.jit
def _place(codes):
    """uint8 E4M3 -> float16, 2**-8 of the value: sign and the other 7 bits in place, NaN codes made NaN."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, t, u, v;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 u, a, 1;
        shr.u32 v, b, 1;
        and.b32 u, u, 0x3f803f80;
        and.b32 v, v, 0x3f803f80;
        add.u32 s, u, 0x00800080;
        add.u32 t, v, 0x00800080;
        and.b32 s, s, 0x40004000;
        and.b32 t, t, 0x40004000;
        or.b32 u, u, s;
        or.b32 v, v, t;
        lop3.b32 $0, a, 0x80008000, u, 0xea;
        lop3.b32 $1, b, 0x80008000, v, 0xea;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _widen(tile, WIDEN: tl.constexpr):
    """A tile of keys or of the query as `tl.dot` takes it."""
    if WIDEN == "bits":
        return _place(tile)
    elif WIDEN == "f16":  # noqa: RET505 (a jitted function goes on after an if without else)
        return tile.to(tl.float16)
    else:
        return tile


@triton.jit(
    do_not_specialize=["heads", "cache_pages", "table_rows", "table_pages", "rank_stride", "best_stride", "splits", "topk"]
)
def indexer_score_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    tables_ptr,
    slots_ptr,
    lens_ptr,
    ranks_ptr,
    bests_ptr,
    heads,
    cache_pages,
    table_rows,
    table_pages,
    page_stride,
    rank_stride,
    best_stride,
    splits,
    topk,
    FP8: tl.constexpr,
    WIDEN: tl.constexpr,
    PAGE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ranks of one token's entries, tile by tile, and the best of each GROUP of them."""
    t = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    length = tl.minimum(tl.load(lens_ptr + t), table_pages * PAGE)
    known = (slot >= 0) & (slot < table_rows)
    length = tl.where(known, length, 0)
    table_ptr = tables_ptr + tl.where(known, slot, 0).to(tl.int64) * table_pages
    tiles = tl.cdiv(tl.maximum(length, 0), BLOCK_N)
    each = tl.cdiv(tiles, splits)
    first = tl.program_id(0) * each
    last = tl.minimum(first + each, tiles)

    head = tl.arange(0, BLOCK_H)
    channel = tl.arange(0, 128)
    q = tl.load(q_ptr + (t * heads + head)[:, None] * 128 + channel[None, :], mask=(head < heads)[:, None], other=0.0)
    q = tl.trans(_widen(q, WIDEN))  # [128, BLOCK_H]
    weight = tl.load(weights_ptr + t * heads + head, mask=head < heads, other=0.0)
    # both sides of a placed product are 2**-8 of the value
    UNIT: tl.constexpr = 65536.0 if WIDEN == "bits" else 1.0
    ranks_ptr += t * rank_stride
    bests_ptr += t * best_stride
    if length > topk:
        for tile in tl.range(first, last, num_stages=STAGES):
            entry = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            page = tl.load(table_ptr + entry // PAGE, mask=entry < length, other=-1)
            live = (page >= 0) & (page < cache_pages)
            page_ptr = keys_ptr + tl.where(live, page, 0).to(tl.int64) * page_stride  # [BLOCK_N]
            row_ptr = tl.multiple_of(page_ptr + (entry % PAGE) * 128, ALIGN)
            keys = tl.load(row_ptr[:, None] + channel[None, :], mask=live[:, None], other=0.0)
            dots = tl.dot(_widen(keys, WIDEN), q)  # [BLOCK_N, BLOCK_H]
            hits = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
            if PADDED:
                # a head that is not there makes NaN of a key's infinity
                hits = tl.where((head < heads)[None, :], hits, 0.0)
            score = tl.sum(hits, 1)
            if FP8:
                scale_ptr = (page_ptr + PAGE * 128).to(tl.pointer_type(tl.float32)) + entry % PAGE
                scale = tl.load(scale_ptr, mask=live, other=0.0) * UNIT
                # a scale of infinity makes NaN of its row's zeros
                score = tl.where(tl.abs(scale) < float("inf"), score * scale, float("nan"))
            bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
            rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            rank = tl.where(score == score, rank, INFINITY)
            rank = tl.where(live, rank, HIDDEN)
            tl.store(ranks_ptr + entry, rank)
            if GROUP:
                best = tl.max(tl.reshape(rank, (BLOCK_N // GROUP, GROUP)), 1)
                tl.store(bests_ptr + tile * (BLOCK_N // GROUP) + tl.arange(0, BLOCK_N // GROUP), best)
    else:
        for tile in range(first, last):
            entry = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            page = tl.load(table_ptr + entry // PAGE, mask=entry < length, other=-1)
            tl.store(ranks_ptr + entry, tl.where((page >= 0) & (page < cache_pages), 0, HIDDEN))
    if PDL:
        # not before: the selection's programs would stand on the SMs while scores are still made. H200, 2048 entries, this call
        # as the first line and as the last: 17.4 us and 16.1 for 64 tokens, 38.3 and 35.7 for 256
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _with(low, high, count, other_low, other_high, other_count):
    return tl.minimum(low, other_low), tl.maximum(high, other_high), count + other_count


@triton.jit
def _spread(rank):
    """The smallest visible rank, one more than the largest rank, and how many are visible."""
    visible = rank > HIDDEN
    low, high, count = tl.reduce((tl.where(visible, rank, INFINITY), rank, visible.to(tl.int32)), 0, _with)
    return low, high + 1, count


@triton.jit
def _bar(rank, low, high, at_low, topk):
    """The smallest rank that is chosen, and how many of the lanes that hold it are: topk lanes in all, or all visible ones.

    at_low lanes hold `low` or more, and none holds `high` or more.
    """
    at_high = 0
    # two thirds of the interval fall away each time; what holds topk lanes or more stays at low, what holds fewer at high
    while (at_low > topk) & (low + 1 < high):
        third = tl.maximum((high.to(tl.uint32) - low.to(tl.uint32)) // 3, 1).to(tl.int32)
        first = low + third
        second = tl.minimum(first + third, high - 1)
        # both counts in one sum
        both = tl.sum((rank >= first).to(tl.int32) | ((rank >= second).to(tl.int32) << 16), 0)
        at_first, at_second = both & 0xFFFF, (both >> 16) & 0xFFFF
        upper, lower = at_second >= topk, at_first < topk
        low = tl.where(upper, second, tl.where(lower, low, first))
        at_low = tl.where(upper, at_second, tl.where(lower, at_low, at_first))
        high = tl.where(upper, high, tl.where(lower, first, second))
        at_high = tl.where(upper, at_high, tl.where(lower, at_first, at_second))
    spare = tl.where(at_low > topk, topk - at_high, 0xFFFF)
    return tl.where(at_low < topk, HIDDEN + 1, low), spare


@triton.jit
def _start(rank, low, high, sifted):
    """Where the search for the bar begins: between the bar and the top of what stands for these lanes, or over all of them."""
    if sifted:
        # whatever passed holds a rank of the bar or more, so topk lanes do
        at_low = tl.sum((rank >= low).to(tl.int32), 0)
    else:
        low, high, at_low = _spread(rank)
    return low, high, at_low


@triton.jit
def _places(rank, bar, spare, before):
    """Which lanes are chosen, and where they go; `before` carries both counts from one chunk of lanes to the next."""
    above = rank > bar
    tied = rank == bar
    # two counts in one scan: lanes above the bar, lanes that hold it
    one = (above.to(tl.int32) << 16) | tied.to(tl.int32)
    seen = tl.cumsum(one, 0) - one + before
    ties = seen & 0xFFFF
    return above | (tied & (ties < spare)), (seen >> 16) + tl.minimum(ties, spare), before + tl.sum(one, 0)


@triton.jit
def _sift(rank, label, low, high, sifted, topk, passed_ptr):
    """Write the labels of the topk best lanes, in order. Gives their bar, the top, and how many they are."""
    low, high, at_low = _start(rank, low, high, sifted)
    bar, spare = _bar(rank, low, high, at_low, topk)
    passes, place, count = _places(rank, bar, spare, 0)
    tl.store(passed_ptr + place, label, mask=passes)
    # other threads of this program read them
    tl.debug_barrier()
    return bar, high, (count >> 16) + tl.minimum(count & 0xFFFF, spare)


@triton.jit
def _inside(lane, lanes, passed_ptr, sifted, SIZE: tl.constexpr):
    """What each lane stands for: SIZE places of each label that passed, or the lane itself where nothing was sifted."""
    at = lane
    if SIZE:
        label = lane // SIZE
        if sifted:
            label = tl.load(passed_ptr + label, mask=lane < lanes, other=0)
        at = label * SIZE + lane % SIZE
    return at


@triton.jit(do_not_specialize=["table_rows", "table_pages", "rank_stride", "best_stride", "topk"])
def indexer_topk_kernel(
    ranks_ptr,
    bests_ptr,
    passed_ptr,
    tables_ptr,
    slots_ptr,
    lens_ptr,
    indices_ptr,
    found_ptr,
    table_rows,
    table_pages,
    rank_stride,
    best_stride,
    topk,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    COARSE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LOGICAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """The topk best entries of one token, in their order, as physical rows or by their numbers."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    length = tl.minimum(tl.load(lens_ptr + t), table_pages * PAGE)
    known = (slot >= 0) & (slot < table_rows)
    length = tl.where(known, tl.maximum(length, 0), 0)
    table_ptr = tables_ptr + tl.where(known, slot, 0).to(tl.int64) * table_pages
    ranks_ptr += t * rank_stride
    bests_ptr += t * best_stride
    passed_ptr += t * 2 * topk
    indices_ptr += t * topk
    if PDL:
        tl.extra.cuda.gdc_wait()
    lanes = length
    sifted = False
    low, high = HIDDEN + 1, HIDDEN + 2
    if GROUP:
        groups = tl.cdiv(length, GROUP)
        if groups > topk:
            lanes = groups
            if COARSE > 1:  # noqa: SIM102 (the compiler folds this one)
                if tl.cdiv(groups, COARSE) > topk:
                    coarse = tl.arange(0, BLOCK_C)
                    best = tl.full([BLOCK_C], HIDDEN, tl.int32)
                    # one at a time: a tile of them all would not fit the registers
                    for i in tl.static_range(COARSE):
                        at = coarse * COARSE + i
                        best = tl.maximum(best, tl.load(bests_ptr + at, mask=at < groups, other=HIDDEN))
                    low, high, lanes = _sift(best, coarse, low, high, sifted, topk, passed_ptr)
                    lanes *= COARSE
                    sifted = True
            group = _inside(tl.arange(0, BLOCK_G), lanes, passed_ptr, sifted, COARSE if COARSE > 1 else 0)
            inside = (tl.arange(0, BLOCK_G) < lanes) & (group < groups)
            best = tl.load(bests_ptr + group, mask=inside, other=HIDDEN)
            low, high, lanes = _sift(best, group, low, high, sifted, topk, passed_ptr + topk)
            lanes *= GROUP
            sifted = True
    lane = tl.arange(0, BLOCK_N)
    entry = _inside(lane, lanes, passed_ptr + topk, sifted, GROUP)
    rank = tl.load(ranks_ptr + entry, mask=(lane < lanes) & (entry < length), other=HIDDEN)
    low, high, at_low = _start(rank, low, high, sifted)
    bar, spare = _bar(rank, low, high, at_low, topk)
    count = 0
    CHUNK_N: tl.constexpr = min(CHUNK, BLOCK_N)
    for start in range(0, BLOCK_N, CHUNK_N):
        if BLOCK_N > CHUNK:
            some = start + tl.arange(0, CHUNK_N)
            at = _inside(some, lanes, passed_ptr + topk, sifted, GROUP)
            rank_at = tl.load(ranks_ptr + at, mask=(some < lanes) & (at < length), other=HIDDEN)
        else:
            at, rank_at = entry, rank
        chosen, place, count = _places(rank_at, bar, spare, count)
        name = at
        if not LOGICAL:
            page = tl.load(table_ptr + at // PAGE, mask=chosen, other=0)
            name = page * PAGE + at % PAGE
        tl.store(indices_ptr + place, name, mask=chosen)
    found = (count >> 16) + tl.minimum(count & 0xFFFF, spare)
    for start in range(0, topk, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tl.store(indices_ptr + k, tl.full([BLOCK_K], -1, tl.int32), mask=(k >= found) & (k < topk))
    tl.store(found_ptr + t, found)


@cache
def gluon_ready() -> bool:
    """Whether this Triton has the Gluon of the Hopper kernel (3.6 on); without it Hopper runs what every arch runs."""
    try:
        from deepdecode.kernels import indexer_sm90  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def choose(
    index_q: torch.Tensor,
    index_weights: torch.Tensor,
    keys: PagedRows,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    topk: int,
    logical: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | str:
    """What `index_topk` gives; or the reason why no kernel can, having done nothing. T > 0."""
    args = (index_q, index_weights, keys, block_tables, slots, lens, topk)
    case, card = case_of(*args, gluon=gluon_ready()), card_of(index_q.device)
    reason = supports(case, card)
    if reason:
        return reason
    # Triton launches on the current device
    with torch.cuda.device(index_q.device):
        return launch(*args, plan(case, card), logical)


def launch(
    index_q: torch.Tensor,
    index_weights: torch.Tensor,
    keys: PagedRows,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    topk: int,
    config: Config,
    logical: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and launch; `deepdecode.ops.indexer` has checked the arguments, and T > 0 and the table is not empty."""
    T, heads, _ = index_q.shape
    case = Case(T, heads, block_tables.shape[1] * keys.page_size, topk, keys.page_size, keys.fmt)
    indices = torch.empty(T, topk, dtype=torch.int32, device=index_q.device)
    found = torch.empty(T, dtype=torch.int32, device=index_q.device)
    step = max(1, min(T, MAX_TOKENS, WORKSPACE_BYTES // (4 * workspace_ints(case, config))))
    workspace = torch.empty(step * workspace_ints(case, config), dtype=torch.int32, device=index_q.device)
    for begin in range(0, T, step):
        part = slice(begin, begin + step)
        score(index_q[part], index_weights[part], keys, block_tables, slots[part], lens[part], topk, workspace, config)
        select(keys, block_tables, slots[part], lens[part], topk, workspace, indices[part], found[part], config, logical)
    return indices, found


def _parts(workspace: torch.Tensor, case: Case, config: Config) -> tuple[torch.Tensor, ...]:
    """Ranks, bests and the groups that passed, of the tokens of one piece."""
    ranks = row_stride(case, config.block_n)
    bests = ranks // config.group if config.group else 0
    spare = workspace.numel() - case.T * (ranks + bests)
    return workspace.split([case.T * ranks, case.T * bests, spare])


def score(
    index_q: torch.Tensor,
    index_weights: torch.Tensor,
    keys: PagedRows,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    topk: int,
    workspace: torch.Tensor,
    config: Config,
) -> None:
    """Fill the workspace's ranks and bests."""
    T, heads, _ = index_q.shape
    rows, pages = block_tables.shape
    case = Case(T, heads, pages * keys.page_size, topk, keys.page_size, keys.fmt)
    ranks, bests, _ = _parts(workspace, case, config)
    stride, block_h = row_stride(case, config.block_n), max(16, triton.next_power_of_2(heads))
    data = keys.data
    if config.kernel == "wgmma":
        from deepdecode.kernels.indexer_sm90 import indexer_score_wgmma_kernel as kernel

        data, index_q = data[:, : keys.page_size * 132].view(torch.int32), index_q.view(torch.int32)
        options = {}
    else:
        kernel = indexer_score_kernel
        if keys.fmt == "fp8_132":
            # codes as E4M3 values, or as bytes where no instruction knows them
            as_type = torch.uint8 if config.widen == "bits" else torch.float8_e4m3fn
            data, index_q = data.view(as_type), index_q.view(as_type)
        options = {"FP8": keys.fmt == "fp8_132", "WIDEN": config.widen, "ALIGN": config.align, "STAGES": config.num_stages}
        options["PADDED"] = block_h != heads
    kernel[config.splits, T](
        index_q,
        index_weights,
        data,
        block_tables,
        slots,
        lens,
        ranks,
        bests,
        heads,
        data.shape[0],
        rows,
        pages,
        data.stride(0),
        stride,
        stride // config.group if config.group else 0,
        config.splits,
        topk,
        PAGE=keys.page_size,
        BLOCK_H=block_h,
        BLOCK_N=config.block_n,
        GROUP=config.group,
        PDL=config.pdl,
        num_warps=config.num_warps,
        **options,
    )


def select(
    keys: PagedRows,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    topk: int,
    workspace: torch.Tensor,
    indices: torch.Tensor,
    found: torch.Tensor,
    config: Config,
    logical: bool = False,
) -> None:
    """Fill indices and found from what `score` left in the workspace."""
    rows, pages = block_tables.shape
    case = Case(len(slots), 0, pages * keys.page_size, topk, keys.page_size, keys.fmt)
    ranks, bests, passed = _parts(workspace, case, config)
    stride = row_stride(case, config.block_n)
    block_c, block_g, block_n = select_blocks(case, config.group, config.coarse)
    indexer_topk_kernel[(case.T,)](
        ranks,
        bests,
        passed,
        block_tables,
        slots,
        lens,
        indices,
        found,
        rows,
        pages,
        stride,
        stride // config.group if config.group else 0,
        topk,
        PAGE=keys.page_size,
        GROUP=config.group,
        COARSE=config.coarse,
        BLOCK_C=block_c,
        BLOCK_G=block_g,
        BLOCK_N=block_n,
        BLOCK_K=min(1024, triton.next_power_of_2(topk)),
        CHUNK=config.select_chunk,
        LOGICAL=logical,
        PDL=config.pdl,
        num_warps=config.select_warps,
        **({"launch_pdl": True} if config.pdl else {}),
    )


def compile_args(
    config: Config, case: Case
) -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, int]]]:
    """Each kernel with types, constants and options as `launch` passes them, to compile it without a GPU."""
    values = (
        {"wgmma": "i32", "mma": "u8" if config.widen == "bits" else "fp8e4nv"}[config.kernel]
        if case.fmt == "fp8_132"
        else "bf16"
    )
    kinds = {"q": values, "keys": values, "weights": "fp32"}
    kinds |= dict.fromkeys(("tables", "slots", "lens", "ranks", "bests", "passed", "indices", "found"), "i32")
    types = {f"{name}_ptr": f"*{kind}:16" for name, kind in kinds.items()}
    sizes = ("heads", "cache_pages", "table_rows", "table_pages", "rank_stride", "best_stride", "splits", "topk")
    types |= dict.fromkeys(sizes, "i32") | {"page_stride": "i32:16" if config.align == 16 else "i32"}
    block_c, block_g, block_n = select_blocks(case, config.group, config.coarse)
    block_h = max(16, triton.next_power_of_2(case.heads))
    both = {"PAGE": case.page_size, "GROUP": config.group, "PDL": config.pdl}
    score = {"BLOCK_N": config.block_n, "BLOCK_H": block_h}
    kernel = indexer_score_kernel
    if config.kernel == "wgmma":
        from deepdecode.kernels.indexer_sm90 import indexer_score_wgmma_kernel as kernel
    else:
        score |= {"FP8": case.fmt == "fp8_132", "WIDEN": config.widen, "ALIGN": config.align, "STAGES": config.num_stages}
        score["PADDED"] = block_h != case.heads
    select = {"COARSE": config.coarse, "BLOCK_C": block_c, "BLOCK_G": block_g, "BLOCK_N": block_n, "CHUNK": config.select_chunk}
    # the other form stores the numbers as they are and loads no page
    select["LOGICAL"] = False
    select["BLOCK_K"] = min(1024, triton.next_power_of_2(case.topk))

    def only(kernel: triton.JITFunction) -> dict[str, str]:
        return {name: kind for name, kind in types.items() if name in kernel.arg_names}

    return [
        (kernel, only(kernel), both | score, {"num_warps": config.num_warps}),
        (indexer_topk_kernel, only(indexer_topk_kernel), both | select, {"num_warps": config.select_warps}),
    ]
