"""The next token of each row, its logits spread over programs: greedily, by temperature, or within a nucleus.

Four launches in a chain; what a row does not need ends at once. The chunks' largest logits; their weights, summed in 16 cells
of 2 below the peak (in logits over temperature); the ids of the cell where the nucleus ends, or where they are too many to be
listed, sums in 16 parts of it; and, by one program a row, the bar among these, then the token in the one chunk that holds it.

Nothing outside a row can change it. Probabilities and a chunk's sums are float32, longer sums float64; weights of one cell lie
so close together that float64 sums them exactly, in whatever order their ids were written. The random number is
`ops.sample.uniform_ref`'s to the bit. Beside the float64 reference, a token differs only where the random number, or top_p,
falls within float32's rounding of a boundary between two tokens.
"""

import torch
import triton
import triton.language as tl

# cells of 2, in parts of 1/8; from 255/8 below the peak on a weight, 1e-14 of the largest, counts as 0
CELLS = tl.constexpr(16)
LAST = tl.constexpr(255)
# ids that the last program finds listed; of more it reads the row
LISTED = 16384


def supports(dtype: str, V: int) -> str | None:
    """Why no kernel runs; None if one does. dtype: of the logits [T, V]."""
    if dtype not in ("float32", "bfloat16"):
        return f"logits must be float32 or bfloat16, got {dtype}"
    # three counts of a row's tokens stand in one number
    return f"V must be less than {1 << 21}, got {V}" if V >= 1 << 21 else None


def plan(T: int, V: int) -> tuple[int, int, int]:
    """Logits of a chunk, programs that share a row's chunks, and their warps. Pure.

    A chunk's sums do not depend on who makes them.
    """
    chunk = max(16, min(4096, triton.next_power_of_2(V)))
    return chunk, max(1, min(triton.cdiv(V, chunk), 512 // T)), max(1, min(8, chunk // 256))


@triton.jit
def _order(x):
    """int32 that orders as float32 x does; NaN above all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _finalise(z):
    z = (z ^ (z >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _load(row_ptr, i, V):
    return tl.load(row_ptr + i, mask=i < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(x, i):
    """int64 that orders logits, and of equal ones the lower id first."""
    return (_order(x).to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64)


@triton.jit
def _weigh(x, peak, unit):
    """Eighths that x / temperature lies below the peak's, LAST at most, and exp of minus that distance, 1 at the peak.

    Both are never NaN, and neither ever rises as x falls. -inf and NaN: LAST, 0.
    """
    live = (x <= peak) & (x > float("-inf"))
    # finite: 0 times infinity, of an infinite temperature, would be NaN
    distance = tl.where(live & (x < peak), tl.minimum(peak - x, 3e38), 0.0)
    eighths = tl.where(live, tl.minimum(tl.maximum(distance * unit, 0.0) * 8.0, LAST * 1.0), LAST * 1.0)
    part = eighths.to(tl.int32)
    return part, tl.where(part < LAST, tl.exp(eighths * -0.125), 0.0)


@triton.jit
def _top(peaks_ptr, chunks, BLOCK_S: tl.constexpr):
    """The row's largest logit and its id, from the chunks' keys."""
    s = tl.arange(0, BLOCK_S)
    key = tl.max(tl.load(peaks_ptr + s, mask=s < chunks, other=-0x8000000000000000), 0)
    order = (key >> 32).to(tl.int32)
    peak = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return peak, 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _middle(low, high):
    # their sum, and their difference, may be more than an int64
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _unit(temperature):
    return tl.minimum(1.0 / temperature, 3e38).to(tl.float32)


@triton.jit
def _cell(sums_ptr, chunks, goal, BLOCK_S: tl.constexpr):
    """Which cell brings a row's sum to the goal, and the sums up to its end and its start, from the chunks' sums up to ends."""
    s, cell = tl.arange(0, BLOCK_S), tl.arange(0, CELLS)
    sums = tl.load(sums_ptr + s[:, None] * CELLS + cell[None, :], mask=(s < chunks)[:, None], other=0.0)
    ends = tl.sum(sums.to(tl.float64), 0)
    found = tl.minimum(tl.sum((ends < goal).to(tl.int32), 0), CELLS - 1)
    return found, tl.sum(tl.where(cell == found, ends, 0.0), 0), tl.sum(tl.where(cell == found - 1, ends, 0.0), 0)


@triton.jit
def _few(cell, sum, before, LISTED: tl.constexpr):
    """Whether a cell's ids can be listed: its smallest weight is known, so its sum says how many they are at most."""
    return (sum - before) * tl.exp((cell + 1).to(tl.float32) * 2.0) < 0.99 * LISTED


@triton.jit
def _sum(sums_ptr, chunks, BLOCK_S: tl.constexpr):
    s = tl.arange(0, BLOCK_S)
    return tl.sum(tl.load(sums_ptr + s, mask=s < chunks, other=0.0).to(tl.float64), 0)


@triton.jit
def sample_peak_kernel(
    logits_ptr,
    peaks_ptr,
    listed_ptr,
    V,
    stride_t,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each chunk's largest key."""
    t, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = s * CHUNK + tl.arange(0, CHUNK)
    key = tl.where(i < V, _key(_load(logits_ptr + t * stride_t, i, V), i), -0x8000000000000000)
    tl.store(peaks_ptr + t * tl.num_programs(1) + s, tl.max(key, 0))
    if s == 0:
        tl.store(listed_ptr + t, 0)


@triton.jit
def _sum_parts(logits_ptr, top_p, peak, unit, totals_ptr, sums_ptr, V, chunks, at, STEP: tl.constexpr, CHUNK: tl.constexpr):
    """This program's chunks: their weights, and for a nucleus those up to the ends of CELLS cells of STEP parts from `at`."""
    for s in range(tl.program_id(1), chunks, tl.num_programs(1)):
        i = s * CHUNK + tl.arange(0, CHUNK)
        part, weight = _weigh(_load(logits_ptr, i, V), peak, unit)
        if STEP > 1:
            tl.store(totals_ptr + s, tl.sum(weight, 0))
        if top_p < 1:
            cell = tl.arange(0, CELLS)
            # 1 before the end, else 0: cheaper than to compare and select
            room = (at + (cell + 1) * STEP).to(tl.float32)[:, None] - part.to(tl.float32)[None, :]
            inside = tl.minimum(tl.maximum(room, 0.0), 1.0)
            tl.store(sums_ptr + s * CELLS + cell, tl.sum(inside * weight[None, :], 1))


@triton.jit
def _members(row_ptr, start, V, peak, unit, first, size, CHUNK: tl.constexpr):
    """A chunk's ids, which of them lie in `size` parts from `first` on, and how many do."""
    # a row of these stands in one thread or two, so that few sums need other threads
    WIDE: tl.constexpr = min(8, CHUNK)
    i = start + tl.arange(0, CHUNK // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    part, weight = _weigh(_load(row_ptr, i, V), peak, unit)
    inside = ((part >= first) & (part < first + size) & (weight > 0)).to(tl.int32)
    return i, inside, tl.sum(inside)


@triton.jit
def _append(ids_ptr, at, i, inside, LISTED: tl.constexpr):
    row = tl.sum(inside, 1)
    place = at + (tl.cumsum(row, 0) - row)[:, None] + tl.cumsum(inside, 1) - 1
    tl.store(ids_ptr + place, i, mask=(inside == 1) & (place < LISTED))


@triton.jit(do_not_specialize=["chunks"])
def sample_cells_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    peaks_ptr,
    totals_ptr,
    sums_ptr,
    out_ptr,
    V,
    stride_t,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """A greedy row's token; else each chunk's weights, and their sums in cells."""
    t = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(temperature_ptr + t).to(tl.float64)
    peak, token = _top(peaks_ptr + t * chunks, chunks, BLOCK_S)
    # a NaN counts as 0
    if (temperature > 0) | (temperature < 0):
        top_p = tl.load(top_p_ptr + t).to(tl.float64)
        _sum_parts(
            logits_ptr + t * stride_t, top_p, peak, _unit(temperature), totals_ptr + t * chunks,
            sums_ptr + t * 2 * chunks * CELLS, V, chunks, 0, CELLS, CHUNK,
        )  # fmt: skip
    elif tl.program_id(1) == 0:
        tl.store(out_ptr + t, token.to(tl.int64))


@triton.jit(do_not_specialize=["chunks"])
def sample_list_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    peaks_ptr,
    totals_ptr,
    sums_ptr,
    listed_ptr,
    ids_ptr,
    V,
    stride_t,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The ids of the cell where the nucleus ends; or, where they are too many, each chunk's sums up to its parts."""
    t = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(temperature_ptr + t).to(tl.float64)
    top_p = tl.load(top_p_ptr + t).to(tl.float64)
    if ((temperature > 0) | (temperature < 0)) & (top_p < 1):
        sums_ptr += t * 2 * chunks * CELLS
        cell, sum, before = _cell(sums_ptr, chunks, top_p * _sum(totals_ptr + t * chunks, chunks, BLOCK_S), BLOCK_S)
        peak, _ = _top(peaks_ptr + t * chunks, chunks, BLOCK_S)
        unit = _unit(temperature)
        logits_ptr += t * stride_t
        first = cell * CELLS
        if _few(cell, sum, before, LISTED):
            for s in range(tl.program_id(1), chunks, tl.num_programs(1)):
                i, inside, count = _members(logits_ptr, s * CHUNK, V, peak, unit, first, CELLS, CHUNK)
                if count > 0:
                    # the order of a row's ids is left to chance: what is made of them does not depend on it
                    _append(ids_ptr + t * LISTED, tl.atomic_add(listed_ptr + t, count), i, inside, LISTED)
        else:
            _sum_parts(logits_ptr, top_p, peak, unit, totals_ptr, sums_ptr + chunks * CELLS, V, chunks, first, 1, CHUNK)


@triton.jit
def _listed(row_ptr, ids_ptr, n, V, start, peak, unit, first, size, LISTED: tl.constexpr, LANES: tl.constexpr):
    """Keys, weights and ids of the nucleus' last part, listed or among all of the row; where none is the lowest key, 0."""
    lane = start + tl.arange(0, LANES)
    i = lane
    if n <= LISTED:
        i = tl.load(ids_ptr + lane, mask=lane < n, other=0x7FFFFFFF)
    x = _load(row_ptr, i, V)
    part, weight = _weigh(x, peak, unit)
    inside = (part >= first) & (part < first + size) & (weight > 0)
    return tl.where(inside, _key(x, i), -0x8000000000000000), tl.where(inside, weight, 0.0).to(tl.float64), i


@triton.jit
def _with(a1, a2, a3, c, b1, b2, b3, d):
    return a1 + b1, a2 + b2, a3 + b3, c + d


@triton.jit
def _above(key, weight, m1, m2, m3, high):
    """Sums of the weights above each of three keys, and in three times 21 bits the numbers of keys from there to `high`."""
    low = key <= high
    counts = ((key > m1) & low).to(tl.int64) | ((key > m2) & low).to(tl.int64) << 21 | ((key > m3) & low).to(tl.int64) << 42
    w1, w2, w3 = tl.where(key > m1, weight, 0.0), tl.where(key > m2, weight, 0.0), tl.where(key > m3, weight, 0.0)
    return tl.reduce((w1, w2, w3, counts), 0, _with)


@triton.jit(do_not_specialize=["chunks"])
def sample_draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    seeds_ptr,
    positions_ptr,
    peaks_ptr,
    totals_ptr,
    sums_ptr,
    listed_ptr,
    ids_ptr,
    out_ptr,
    V,
    stride_t,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LISTED: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of a row that is not greedy."""
    t = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(temperature_ptr + t).to(tl.float64)
    if (temperature > 0) | (temperature < 0):
        row_ptr = logits_ptr + t * stride_t
        peak, token = _top(peaks_ptr + t * chunks, chunks, BLOCK_S)
        unit = _unit(temperature)
        ids_ptr += t * LISTED
        # without a nucleus all before LAST is kept, and nothing is listed
        first, size, n, lanes = tl.full([], LAST, tl.int32), 0, 0, 0
        need = tl.zeros([], tl.float64)
        totals_ptr += t * chunks
        s = tl.arange(0, BLOCK_S)
        totals = tl.load(totals_ptr + s, mask=s < chunks, other=0.0).to(tl.float64)
        top_p = tl.load(top_p_ptr + t).to(tl.float64)
        nucleus = top_p < 1
        if nucleus:
            sums_ptr += t * 2 * chunks * CELLS
            goal = top_p * tl.sum(totals, 0)
            cell, sum, before = _cell(sums_ptr, chunks, goal, BLOCK_S)
            first, size = cell * CELLS, CELLS
            # each chunk's weights before the cell
            totals = tl.load(sums_ptr + s * CELLS + cell - 1, mask=(s < chunks) & (cell > 0), other=0.0).to(tl.float64)
            if not _few(cell, sum, before, LISTED):
                sums_ptr += chunks * CELLS
                cell, sum, fine = _cell(sums_ptr, chunks, goal, BLOCK_S)
                before = tl.where(cell > 0, fine, before)
                first, size = first + cell, 1
                fines = tl.load(sums_ptr + s * CELLS + cell - 1, mask=(s < chunks) & (cell > 0), other=0.0).to(tl.float64)
                totals = tl.where(cell > 0, fines, totals)
                for start in range(0, V, CHUNK):
                    i, inside, count = _members(row_ptr, start, V, peak, unit, first, size, CHUNK)
                    if count > 0:
                        _append(ids_ptr, n, i, inside, LISTED)
                        n += count
                # other threads of this program read them
                tl.debug_barrier()
            else:
                n = tl.load(listed_ptr + t)
            need = goal - before
            lanes = tl.where(n <= LISTED, n, V)
        # the first of these stay in registers, as a rule all
        key, weight, id = _listed(row_ptr, ids_ptr, n, V, tl.where(nucleus, 0, V), peak, unit, first, size, LISTED, LANES)
        bar = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
        if n > 0:
            # the bar: the largest key that, with all above, brings the sum to `need`; it is in (low, high], among `between`
            low, high = tl.min(tl.where(weight > 0, key, 0x7FFFFFFFFFFFFFFF), 0), tl.max(key, 0)
            for start in range(LANES, lanes, LANES):
                more, some, _ = _listed(row_ptr, ids_ptr, n, V, start, peak, unit, first, size, LISTED, LANES)
                low = tl.minimum(low, tl.min(tl.where(some > 0, more, 0x7FFFFFFFFFFFFFFF), 0))
                high = tl.maximum(high, tl.max(more, 0))
            low -= 1
            between = n
            while between > 1:
                m2 = _middle(low, high)
                m1, m3 = _middle(low, m2), _middle(m2, high)
                a1, a2, a3, counts = _above(key, weight, m1, m2, m3, high)
                for start in range(LANES, lanes, LANES):
                    more, some, _ = _listed(row_ptr, ids_ptr, n, V, start, peak, unit, first, size, LISTED, LANES)
                    b1, b2, b3, others = _above(more, some, m1, m2, m3, high)
                    a1, a2, a3, counts = a1 + b1, a2 + b2, a3 + b3, counts + others
                c1, c2, c3 = counts & 0x1FFFFF, (counts >> 21) & 0x1FFFFF, counts >> 42
                # into the quarter whose lower end has enough above it, and whose upper end has not
                new_low = tl.where(a3 >= need, m3, tl.where(a2 >= need, m2, tl.where(a1 >= need, m1, low)))
                at_low = tl.where(a3 >= need, c3, tl.where(a2 >= need, c2, tl.where(a1 >= need, c1, between.to(tl.int64))))
                new_high = tl.where(a3 >= need, high, tl.where(a2 >= need, m3, tl.where(a1 >= need, m2, m1)))
                at_high = tl.where(a3 >= need, 0, tl.where(a2 >= need, c3, tl.where(a1 >= need, c2, c1)))
                low, high, between = new_low, new_high, (at_low - at_high).to(tl.int32)
            bar = tl.maximum(bar, tl.max(tl.where(key <= high, key, bar), 0))
            for start in range(LANES, lanes, LANES):
                more, _, _ = _listed(row_ptr, ids_ptr, n, V, start, peak, unit, first, size, LISTED, LANES)
                bar = tl.maximum(bar, tl.max(tl.where(more <= high, more, -0x7FFFFFFFFFFFFFFF), 0))
        weight = tl.where(key >= bar, weight, 0.0)
        some = tl.sum(weight, 0)
        for start in range(LANES, lanes, LANES):
            more, others, _ = _listed(row_ptr, ids_ptr, n, V, start, peak, unit, first, size, LISTED, LANES)
            some += tl.sum(tl.where(more >= bar, others, 0.0), 0)
        seed = tl.load(seeds_ptr + t).to(tl.uint64, bitcast=True) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        position = tl.load(positions_ptr + t).to(tl.int64).to(tl.uint64, bitcast=True)
        mixed = _finalise(_finalise(seed) + position * tl.full([], 0xD1B54A32D192ED03, tl.uint64))
        uniform = (mixed >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16
        goal = uniform * (tl.sum(totals, 0) + some)
        # the chunk that passes the goal: what is kept before it does not
        chunk, after = 0, chunks
        passed = tl.zeros([], tl.float64)
        while after - chunk > 1:
            middle = (chunk + after) // 2
            before = tl.sum(tl.where(s < middle, totals, 0.0), 0) + tl.sum(tl.where(id < middle * CHUNK, weight, 0.0), 0)
            for start in range(LANES, lanes, LANES):
                more, others, at = _listed(row_ptr, ids_ptr, n, V, start, peak, unit, first, size, LISTED, LANES)
                before += tl.sum(tl.where((more >= bar) & (at < middle * CHUNK), others, 0.0), 0)
            chunk, after = tl.where(before <= goal, middle, chunk), tl.where(before <= goal, after, middle)
            passed = tl.where(before <= goal, before, passed)
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _load(row_ptr, i, V)
        part, weight = _weigh(x, peak, unit)
        kept = (weight > 0) & ((part < first) | ((part < first + size) & (_key(x, i) >= bar)))
        below = passed + tl.cumsum(tl.where(kept, weight, 0.0).to(tl.float64), 0)
        found = tl.min(tl.where(kept & (below > goal), i, 0x7FFFFFFF), 0)
        # where rounding leaves none: the chunk's last, or the largest
        last = tl.max(tl.where(kept, i, -1), 0)
        token = tl.where(found < V, found, tl.where(last >= 0, last, token))
        tl.store(out_ptr + t, token.to(tl.int64))


def launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    arch: int,
) -> torch.Tensor:
    """int64 [T] from checked arguments; T > 0, rows of logits contiguous."""
    T, V = logits.shape
    chunk, programs, warps = plan(T, V)
    chunks = triton.cdiv(V, chunk)
    out = torch.empty(T, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(T, chunks, dtype=torch.int64, device=logits.device)
    totals = torch.empty(T, chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(T, 2, chunks, CELLS.value, dtype=torch.float32, device=logits.device)
    listed = torch.empty(T, dtype=torch.int32, device=logits.device)
    ids = torch.empty(T, LISTED, dtype=torch.int32, device=logits.device)
    extent = (V, logits.stride(0), chunks)
    both = {"CHUNK": chunk, "PDL": arch >= 90, **({"launch_pdl": True} if arch >= 90 else {})}
    more = {"BLOCK_S": triton.next_power_of_2(chunks)}
    grid = (T, programs)
    sample_peak_kernel[T, chunks](logits, peaks, listed, *extent[:2], **both, num_warps=warps)
    sample_cells_kernel[grid](logits, temperature, top_p, peaks, totals, sums, out, *extent, **both, **more, num_warps=warps)
    more["LISTED"] = LISTED
    sample_list_kernel[grid](
        logits, temperature, top_p, peaks, totals, sums, listed, ids, *extent, **both, **more, num_warps=warps
    )
    sample_draw_kernel[T,](
        logits, temperature, top_p, seeds, positions, peaks, totals, sums, listed, ids, out, *extent, LANES=min(2048, chunk),
        **both, **more, num_warps=warps,
    )  # fmt: skip
    return out
