"""The next token of each row in one launch: greedy rows read their logits once, others as often as their nucleus needs.

One program a row, so nothing outside a row can change it. Probabilities and sums of a few of them are float32, longer
sums float64; the random number is `ops.sample.uniform_ref`'s to the bit. Beside the float64 reference, a token differs only
where the random number, or top_p, falls within float32's rounding of a boundary between two tokens.
"""

import torch
import triton
import triton.language as tl


def supports(dtype: str) -> str | None:
    """Why no kernel runs; None if one does. dtype: of the logits."""
    return f"logits must be float32 or bfloat16, got {dtype}" if dtype not in ("float32", "bfloat16") else None


def plan(V: int, arch: int) -> tuple[int, int, int]:
    """Logits read at a time where only the largest is sought, and where they are summed; and warps. Pure."""
    # a thread's loads are all under way at once; on sm_100 and later the compiler spills with as many
    large = min(16384 if arch < 100 else 8192, triton.next_power_of_2(V))
    return large, min(8192 if arch < 100 else 4096, large), max(1, min(16, large // 256))


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
def _weights(logits, peak, unit):
    """exp((logits - peak) / temperature): 1 at the peak, whatever the temperature; 0 for -inf and NaN. Never NaN."""
    # -inf times 0, of an infinite temperature, would be NaN
    below = (logits < peak) & (logits > float("-inf"))
    return tl.where(below, tl.exp(tl.where(below, logits - peak, 0.0) * unit), tl.where(logits == peak, 1.0, 0.0))


@triton.jit
def sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    seeds_ptr,
    positions_ptr,
    out_ptr,
    V,
    stride_t,
    LARGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = logits_ptr + t * stride_t
    wide = tl.arange(0, LARGE)
    best = tl.full([LARGE], -0x7FFFFFFF, tl.int32)
    where = wide
    for first in range(0, V, LARGE):
        i = first + wide
        order = _order(tl.load(row + i, mask=i < V, other=float("-inf")).to(tl.float32))
        # later ones must be larger to win
        better = (order > best) & (i < V)
        best = tl.where(better, order, best)
        where = tl.where(better, i, where)
    key = (best.to(tl.int64) << 32) | (0x7FFFFFFF - where).to(tl.int64)
    token = 0x7FFFFFFF - (tl.max(key, 0) & 0xFFFFFFFF).to(tl.int32)
    token = tl.minimum(token, V - 1)
    temperature = tl.load(temperature_ptr + t).to(tl.float64)
    # a NaN counts as 0: with weights of NaN the search for the nucleus would not end
    if (temperature > 0) | (temperature < 0):
        lane = tl.arange(0, BLOCK)
        top = tl.max(best, 0)
        peak = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        # finite, for the same reason
        unit = tl.minimum(1.0 / temperature, 3e38).to(tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, V, BLOCK):
            i = first + lane
            x = tl.load(row + i, mask=i < V, other=float("-inf")).to(tl.float32)
            sums += _weights(x, peak, unit)
        total = tl.sum(sums.to(tl.float64), 0)
        top_p = tl.load(top_p_ptr + t).to(tl.float64)
        # the nucleus: all above `bar`, and of those equal to it the `equals` of the lowest ids
        bar = tl.full([], -0x7FFFFFFF, tl.int32)
        equals = tl.full([], 0x7FFFFFFFFFFF, tl.int64)
        if top_p < 1:
            goal = top_p * total
            # what lies above `low` sums to the goal or more, what lies above `high` to less; each pass leaves a quarter
            low = tl.full([], -0x80000000, tl.int64)
            high = top.to(tl.int64)
            above = tl.zeros([], tl.float64)
            while high - low > 1:
                m1, m2, m3 = low + ((high - low) >> 2), low + ((high - low) >> 1), low + ((3 * (high - low)) >> 2)
                sums1 = tl.zeros([BLOCK], tl.float32)
                sums2 = tl.zeros([BLOCK], tl.float32)
                sums3 = tl.zeros([BLOCK], tl.float32)
                for first in range(0, V, BLOCK):
                    i = first + lane
                    x = tl.load(row + i, mask=i < V, other=float("-inf")).to(tl.float32)
                    order, weight = _order(x), _weights(x, peak, unit)
                    sums1 += tl.where(order > m1.to(tl.int32), weight, 0.0)
                    sums2 += tl.where(order > m2.to(tl.int32), weight, 0.0)
                    sums3 += tl.where(order > m3.to(tl.int32), weight, 0.0)
                above1 = tl.sum(sums1.to(tl.float64), 0)
                above2 = tl.sum(sums2.to(tl.float64), 0)
                above3 = tl.sum(sums3.to(tl.float64), 0)
                new_low = tl.where(above3 >= goal, m3, tl.where(above2 >= goal, m2, tl.where(above1 >= goal, m1, low)))
                new_high = tl.where(above1 < goal, m1, tl.where(above2 < goal, m2, tl.where(above3 < goal, m3, high)))
                above = tl.where(above1 < goal, above1, tl.where(above2 < goal, above2, tl.where(above3 < goal, above3, above)))
                low, high = new_low, new_high
            bar = high.to(tl.int32)
            value = (bar ^ ((bar >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            each = _weights(value, peak, unit).to(tl.float64)
            need = tl.ceil((goal - above) / tl.where(each > 0, each, 1.0))
            equals = tl.maximum(need, 1.0).to(tl.int64)
            total = above + equals.to(tl.float64) * each
        seed = tl.load(seeds_ptr + t).to(tl.uint64, bitcast=True) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        position = tl.load(positions_ptr + t).to(tl.int64).to(tl.uint64, bitcast=True)
        mixed = _finalise(_finalise(seed) + position * tl.full([], 0xD1B54A32D192ED03, tl.uint64))
        goal = (mixed >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16 * total
        passed = tl.zeros([], tl.float64)
        seen = tl.zeros([], tl.int64)
        found = tl.full([], 0x7FFFFFFF, tl.int32)
        first = 0
        while (first < V) & (found == 0x7FFFFFFF):
            i = first + lane
            x = tl.load(row + i, mask=i < V, other=float("-inf")).to(tl.float32)
            order = _order(x)
            same = (order == bar).to(tl.int32)
            count = tl.sum(same, 0).to(tl.int64)
            kept = (order > bar) | ((same == 1) & (seen + count <= equals))
            if (seen < equals) & (seen + count > equals):
                # this block's first ones of those equal to the bar
                kept = (order > bar) | ((same == 1) & (tl.cumsum(same, 0) <= (equals - seen)))
            weight = tl.where(kept & (i < V), _weights(x, peak, unit), 0.0)
            some = tl.sum(weight, 0).to(tl.float64)
            if passed + some > goal:
                below = tl.cumsum(weight, 0).to(tl.float64) + passed
                found = tl.min(tl.where((below > goal) & (weight > 0), i, 0x7FFFFFFF), 0)
            passed += some
            seen += count
            first += BLOCK
        # where rounding leaves none, the largest
        token = tl.where(found < V, found, token)
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
    out = torch.empty(T, dtype=torch.int64, device=logits.device)
    large, block, warps = plan(V, arch)
    pdl = arch >= 90
    sample_kernel[T,](
        logits, temperature, top_p, seeds, positions, out, V, logits.stride(0), LARGE=large, BLOCK=block, PDL=pdl,
        num_warps=warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
