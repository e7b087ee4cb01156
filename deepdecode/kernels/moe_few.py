"""FP4 experts and their FP8 shared one for a few tokens, each pair for itself: Gluon, two launches, nothing left to combine.

At one token an op is two latencies more than its bytes, so everything a program reads is under way at once, in registers that
mma.sync takes as they come: a lane has 32 columns of a row, its part of two instructions for each 8 codes. The first launch
gives h = silu(gate) * up * routing weight of every (token, expert) pair and of the shared expert, the second the sum over a
token's experts. It starts when the first has waited for the router: ids are there then, and its weights arrive while the
first still multiplies.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from deepdecode.kernels.attention_sm90_rows import grid_wait, launch_dependents
from deepdecode.kernels.moe_codes import UNIT, fp4_operand, fp8_operand
from deepdecode.kernels.moe_plan import Case, Few

KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)


def _weights_of(slices, rows, per_lane):
    """[slices, rows, 4 * per_lane]: 4 lanes a row, rows as mma.sync has them, a warp for each slice of K."""
    words = [[0, 0, 1 << n] for n in range(per_lane.bit_length() - 1)]
    lanes = [[0, 0, per_lane], [0, 0, 2 * per_lane], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    more = [[0, 8 << n, 0] for n in range((rows // 8).bit_length() - 1)]
    parts = [[1 << n, 0, 0] for n in range(slices.bit_length() - 1)]
    return gl.DistributedLinearLayout([*words, *more], lanes, parts, [], [slices, rows, 4 * per_lane])


def _held_of(slices, held, per_lane):
    """[slices, 8 / held, held, 4 * per_lane]: the same, of fewer tokens than 8."""
    values = [[0, 0, 0, 1 << n] for n in range(per_lane.bit_length() - 1)]
    tokens = [[0, 0, 1 << n, 0] for n in range(held.bit_length() - 1)]
    tokens += [[0, 1 << n, 0, 0] for n in range((8 // held).bit_length() - 1)]
    lanes = [[0, 0, 0, per_lane], [0, 0, 0, 2 * per_lane], *tokens]
    parts = [[1 << n, 0, 0, 0] for n in range(slices.bit_length() - 1)]
    return gl.DistributedLinearLayout(values, lanes, parts, [], [slices, 8 // held, held, 4 * per_lane])


def _fetched_of(slices, held, columns):
    """[slices, held, columns]: 16 bytes a lane, a warp's own slice."""
    rest = [[0, 0, 8 << n] for n in range((columns // 8).bit_length() - 1)] + [
        [0, 1 << n, 0] for n in range(held.bit_length() - 1)
    ]
    lanes = (rest + [[0, 0, 0]] * 5)[:5]
    parts = [[1 << n, 0, 0] for n in range(slices.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], [0, 0, 4], *rest[5:]], lanes, parts, [], [slices, held, columns])


_held_layout = gluon.constexpr_function(_held_of)
_fetched_layout = gluon.constexpr_function(_fetched_of)
_weights_layout = gluon.constexpr_function(_weights_of)


@gluon.jit
def _index(N: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """0 .. N - 1 along a dimension of three."""
    if DIM == 0:
        return gl.arange(0, N, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    elif DIM == 1:  # noqa: RET505
        return gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    else:
        return gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]


@gluon.jit
def _under_way():
    """Loads before this are not moved behind it: all of a program's are on their way before the first is used."""
    grid_wait()


@gluon.jit
def _fetch(x_ptr, start, live, STEPS: gl.constexpr, COLUMNS: gl.constexpr):
    """[S, HELD, COLUMNS] for each step, of what starts at start [S, HELD, 1]; zeros where live is False."""
    LOADED: gl.constexpr = start.type.layout
    at = start + _index(COLUMNS, 2, LOADED)
    xs = ()
    for step in gl.static_range(STEPS):
        if live is None:
            xs = xs + (gl.load(x_ptr + at + step * COLUMNS),)  # noqa: RUF005 (Triton knows no starred tuples)
        else:
            xs = xs + (gl.load(x_ptr + at + step * COLUMNS, mask=live & (at >= 0), other=0.0),)  # noqa: RUF005
    return xs


@gluon.jit
def _store(xs, STEPS: gl.constexpr):
    """To shared memory, an allocation for each step: of one, the compiler would wait between two stores."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    memory = ()
    for step in gl.static_range(STEPS):
        part = gl.allocate_shared_memory(xs[step].dtype, xs[step].shape, PLAIN, xs[step])
        memory = memory + (part,)  # noqa: RUF005
    return memory


@gluon.jit
def _stored(memory, step, S: gl.constexpr, HELD: gl.constexpr, COLUMNS: gl.constexpr):
    """[S, 8, COLUMNS] of shared memory, each token 8 / HELD times."""
    LOADED: gl.constexpr = _held_layout(S, HELD, COLUMNS // 4)
    x = memory[step].load(gl.SliceLayout(1, LOADED))
    _, x = gl.broadcast(gl.zeros([S, 8 // HELD, HELD, COLUMNS], x.dtype, layout=LOADED), gl.expand_dims(x, 1))
    return gl.reshape(x, (S, 8, COLUMNS))


@gluon.jit
def _fp4_tokens(x, S: gl.constexpr, MMA: gl.constexpr):
    """[S, 8, 128] as an operand, columns in the order of `fp4_operand`."""
    # [column, block, word of it, half of a word, code of the half]
    x = gl.reshape(x, (S, 8, 4, 4, 2, 2, 2))
    x = gl.reshape(gl.permute(x, (0, 3, 5, 6, 2, 4, 1)), (S, 128, 8))
    return gl.convert_layout(x, gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2), assert_trivial=True)


@gluon.jit
def _fp8_tokens(x, S: gl.constexpr, P: gl.constexpr, MMA: gl.constexpr):
    """[S, 8, 16 * P] as an operand, columns in the order of `fp8_operand`."""
    # [column, lane, pair of words, word of it, pair of codes, code of the pair]
    x = gl.reshape(x, (S, 8, 4, P // 2, 2, 2, 2))
    x = gl.permute(x, (0, 3, 4, 5, 2, 6, 1))
    x = gl.reshape(x, (S, 16 * P, 8))
    return gl.convert_layout(x, gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2), assert_trivial=True)


@gluon.jit
def _halved(xs, STEPS: gl.constexpr, S: gl.constexpr, HELD: gl.constexpr, MMA: gl.constexpr):
    """Each slice of each token as float16, in a unit of its own that brings its largest under 2**15; the units, [S, 1, 8]."""
    largest = xs[0].to(gl.int16, bitcast=True).to(gl.int32) & 0x7FFF
    for step in gl.static_range(STEPS - 1):
        # magnitudes of bfloat16 are in the order of their bits
        largest = gl.maximum(largest, xs[step + 1].to(gl.int16, bitcast=True).to(gl.int32) & 0x7FFF)
    exponent = gl.max(largest, 2) >> 7
    unit = gl.where(exponent == 255, 0x7FC00000, gl.minimum(127 + 14 + 127 - exponent, 254) << 23)
    parts = ()
    for step in gl.static_range(STEPS):
        x = xs[step].to(gl.float32) * unit.to(gl.float32, bitcast=True)[:, :, None]
        parts = parts + (x.to(gl.float16),)  # noqa: RUF005
    undo = gl.where(unit > 0x7F000000, unit, gl.maximum((254 << 23) - unit, 0x400000)).to(gl.float32, bitcast=True)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, MMA)
    if HELD == 8:
        return parts, gl.expand_dims(gl.convert_layout(undo, COLUMNS), 1)
    else:  # noqa: RET505
        undo = gl.expand_dims(undo, 2)
        EACH_OF: gl.constexpr = undo.type.layout
        _, undo = gl.broadcast(gl.zeros([S, HELD, 8 // HELD], gl.float32, layout=EACH_OF), undo)
        undo = gl.reshape(gl.permute(undo, (0, 2, 1)), (S, 8))
        return parts, gl.expand_dims(gl.convert_layout(undo, COLUMNS), 1)


@gluon.jit
def _fp4_product(acc, words, scale, x, S: gl.constexpr, M: gl.constexpr, MMA: gl.constexpr):
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    return mma_v2(gl.convert_layout(fp4_operand(words, scale, S, M), A, assert_trivial=True), x, acc)


@gluon.jit
def _fp8_product(acc, words, scale, x, S: gl.constexpr, M: gl.constexpr, P: gl.constexpr, MMA: gl.constexpr):
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    part = gl.zeros([S, M, 8], gl.float32, layout=MMA)
    part = mma_v2(gl.convert_layout(fp8_operand(words, S, M, P), A, assert_trivial=True), x, part)
    byte = scale.to(gl.int32)
    factor = gl.where(byte == 255, 0x7FC00000, gl.where(byte == 0, 0x400000, byte << 23)).to(gl.float32, bitcast=True)
    return acc + part * factor


@gluon.jit
def _swiglu(gate, up, limit):
    # by default minimum returns the limit for a NaN, which would hide it
    gate = gl.minimum(gate, limit, propagate_nan=KEEP_NAN)
    up = gl.minimum(up, limit, propagate_nan=KEEP_NAN)
    up = gl.maximum(up, -limit, propagate_nan=KEEP_NAN)
    return gate / (1 + gl.exp(-gate)) * up


@gluon.jit
def _halves(acc):
    """Sums over slices of [S, 16, 8]: of rows 0 .. 7 and of rows 8 .. 15."""
    total = gl.permute(gl.reshape(gl.sum(acc, 0), (2, 8, 8)), (1, 2, 0))
    return gl.split(total)


@gluon.jit
def _pair(x_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, h_ptr, limit, tile, pair, top_k, first, E, K: gl.constexpr,
          I: gl.constexpr, S: gl.constexpr, STEPS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """8 values of h of a pair, if its expert is here."""
    expert = gl.load(ids_ptr + pair).to(gl.int64) - first
    X4: gl.constexpr = _fetched_layout(S, 1, 128)
    x_start = pair // top_k * K + _index(S, 0, X4) * (STEPS * 128) + _index(1, 1, X4)
    xs = _fetch(x_ptr, x_start, None, STEPS, 128)
    weight = gl.load(weights_ptr + pair)
    if (expert >= 0) & (expert < E):
        RAW4: gl.constexpr = _weights_layout(S, 16, 4)
        SCALES: gl.constexpr = _weights_layout(S, 16, 1)
        m = _index(16, 1, RAW4)
        at = (tile * 8 + m % 8 + m // 8 * I) * (K // 8) + _index(S, 0, RAW4) * (STEPS * 16) + _index(16, 2, RAW4)
        w = w_ptr + expert * (2 * I * (K // 8)) + at
        m = _index(16, 1, SCALES)
        at = (tile * 8 + m % 8 + m // 8 * I) * (K // 32) + _index(S, 0, SCALES) * (STEPS * 4) + _index(4, 2, SCALES)
        scales = scale_ptr + expert * (2 * I * (K // 32)) + at
        words = ()
        factors = ()
        for step in gl.static_range(STEPS):
            words = words + (gl.load(w + step * 16),)  # noqa: RUF005
            factors = factors + (gl.load(scales + step * 4),)  # noqa: RUF005
        _under_way()
        memory = _store(xs, STEPS)
        sums = gl.zeros([S, 16, 8], gl.float32, layout=MMA)
        for step in gl.static_range(STEPS):
            x = _fp4_tokens(_stored(memory, step, S, 1, 128), S, MMA)
            sums = _fp4_product(sums, words[step], factors[step], x, S, 16, MMA)
        gate, up = _halves(sums)
        LAST: gl.constexpr = gate.type.layout
        i = tile * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, LAST))[:, None]
        n = gl.arange(0, 8, layout=gl.SliceLayout(0, LAST))[None, :]
        h = _swiglu(gate * UNIT, up * UNIT, limit) * weight
        gl.store(h_ptr + pair * I + i + 0 * n, h.to(h_ptr.dtype.element_ty), mask=(n == 0) & (i < I))


@gluon.jit(do_not_specialize=["T", "top_k", "first", "E"])
def moe_w13_few_kernel(
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
    T,
    top_k,
    first,
    E,
    K: gl.constexpr,
    I: gl.constexpr,
    SHARED_I: gl.constexpr,
    S: gl.constexpr,
    HELD: gl.constexpr,
    AHEAD: gl.constexpr,
    TURNS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program (tile, job): 8 rows of gate and of up, job 0 those of the shared expert for all T <= HELD tokens, then pairs."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, 1, 1], instr_shape=[1, 16, 8])
    STEPS: gl.constexpr = K // (128 * S)
    tile = gl.program_id(0)
    job = gl.program_id(1)
    acc = gl.zeros([S, 16, 8], gl.float32, layout=MMA)
    if job == 0:
        if tile * 8 < SHARED_I:
            RAW: gl.constexpr = _weights_layout(S, 16, 8)
            m = _index(16, 1, RAW)
            row = tile * 8 + m % 8 + m // 8 * SHARED_I
            start = shared_ptr + row * (K // 4) + _index(S, 0, RAW) * (STEPS * 32) + _index(32, 2, RAW)
            half = _index(16, 1, MMA) // 8
            scales = shared_scale_ptr + (tile * 8 + half * SHARED_I) // 128 * (K // 128) + _index(S, 0, MMA) * STEPS
            words = ()
            factors = ()
            # weights do not wait for the kernel before, which must not write them
            for step in gl.static_range(AHEAD):
                words = words + (gl.load(start + step * 32),)  # noqa: RUF005
            for step in gl.static_range(STEPS):
                factors = factors + (gl.load(scales + step),)  # noqa: RUF005
            if PDL:
                grid_wait()
                launch_dependents()
            X8: gl.constexpr = _fetched_layout(S, HELD, 128)
            x_start = gl.minimum(_index(HELD, 1, X8), T - 1) * K + _index(S, 0, X8) * (STEPS * 128)
            xs = _fetch(x_ptr, x_start, None, STEPS, 128)
            xs, undo = _halved(xs, STEPS, S, HELD, MMA)
            memory = _store(xs, STEPS)
            for step in gl.static_range(STEPS):
                x = _fp8_tokens(_stored(memory, step, S, HELD, 128), S, 8, MMA)
                acc = _fp8_product(acc, words[step], factors[step], x, S, 16, 8, MMA)
                if step + AHEAD < STEPS:
                    words = words + (gl.load(start + (step + AHEAD) * 32),)  # noqa: RUF005
            gate, up = _halves(acc * undo)
            LAST8: gl.constexpr = gate.type.layout
            i = tile * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, LAST8))[:, None]
            n = gl.arange(0, 8, layout=gl.SliceLayout(0, LAST8))[None, :]
            h = _swiglu(gate, up, limit)
            gl.store(shared_h_ptr + n * SHARED_I + i, h.to(shared_h_ptr.dtype.element_ty), mask=(n < T) & (i < SHARED_I))
        elif PDL:
            grid_wait()
            launch_dependents()
    else:
        if PDL:
            grid_wait()
            launch_dependents()
        if tile * 8 < I:
            if TURNS:
                for pair in range(T * top_k):
                    _pair(
                        x_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, h_ptr, limit, tile, pair, top_k, first, E,
                        K, I, S, STEPS, MMA,
                    )  # fmt: skip
            else:
                _pair(
                    x_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, h_ptr, limit, tile, job - 1, top_k, first, E,
                    K, I, S, STEPS, MMA,
                )  # fmt: skip


@gluon.jit
def _experts_of(ids_ptr, t, n, first, E, TOP: gl.constexpr, S: gl.constexpr, TOGETHER: gl.constexpr, LAYOUT: gl.constexpr):
    """[S, 1, 1]: the expert of each warp, and whether it is here."""
    slot = n + _index(S, 0, LAYOUT) // (S // TOGETHER)
    expert = gl.load(ids_ptr + t * TOP + slot, mask=slot < TOP, other=-1).to(gl.int64) - first
    here = (slot < TOP) & (expert >= 0) & (expert < E)
    return gl.where(here, expert, 0), here


@gluon.jit
def _routed(w_ptr, scale_ptr, ids_ptr, tile, t, n, first, E, C: gl.constexpr, I: gl.constexpr, TOP: gl.constexpr,
            M: gl.constexpr, S: gl.constexpr, TOGETHER: gl.constexpr):  # fmt: skip
    """Words and scales of the experts that the warps have, for each step."""
    RAW: gl.constexpr = _weights_layout(S, M, 4)
    SCALES: gl.constexpr = _weights_layout(S, M, 1)
    PARTS: gl.constexpr = S // TOGETHER
    STEPS: gl.constexpr = I // (128 * PARTS)
    expert, here = _experts_of(ids_ptr, t, n, first, E, TOP, S, TOGETHER, RAW)
    inside = (tile * M + _index(M, 1, RAW)) * (I // 8) + _index(S, 0, RAW) % PARTS * (STEPS * 16) + _index(16, 2, RAW)
    w = w_ptr + expert * (C * (I // 8)) + inside
    here = here & (inside >= 0)
    expert, scaled = _experts_of(ids_ptr, t, n, first, E, TOP, S, TOGETHER, SCALES)
    inside = (tile * M + _index(M, 1, SCALES)) * (I // 32) + _index(S, 0, SCALES) % PARTS * (STEPS * 4) + _index(4, 2, SCALES)
    scales = scale_ptr + expert * (C * (I // 32)) + inside
    scaled = scaled & (inside >= 0)
    words = ()
    factors = ()
    for step in gl.static_range(STEPS):
        words = words + (gl.load(w + step * 16, mask=here, other=0),)  # noqa: RUF005 (Triton knows no starred tuples)
        factors = factors + (gl.load(scales + step * 4, mask=scaled, other=0),)  # noqa: RUF005
    return words, factors


@gluon.jit
def _routed_rows(ids_ptr, t, n, first, E, I: gl.constexpr, TOP: gl.constexpr, S: gl.constexpr, TOGETHER: gl.constexpr):
    """Where h of the warps' experts starts; that of a pair that is not here was not written."""
    X4: gl.constexpr = _fetched_layout(S, 1, 128)
    PARTS: gl.constexpr = S // TOGETHER
    _, here = _experts_of(ids_ptr, t, n, first, E, TOP, S, TOGETHER, X4)
    start = (t * TOP + n + _index(S, 0, X4) // PARTS) * I + _index(S, 0, X4) % PARTS * (I // PARTS) + _index(1, 1, X4)
    return start, here


@gluon.jit(do_not_specialize=["first", "E"])
def moe_w2_few_kernel(
    h_ptr,
    ids_ptr,
    w_ptr,
    scale_ptr,
    shared_h_ptr,
    shared_ptr,
    shared_scale_ptr,
    out_ptr,
    first,
    E,
    C: gl.constexpr,
    I: gl.constexpr,
    SHARED_I: gl.constexpr,
    TOP: gl.constexpr,
    BLOCK_C: gl.constexpr,
    S: gl.constexpr,
    TOGETHER: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program (tile, t): BLOCK_C channels of token t. Its S warps have TOGETHER experts at a time, and slices of their K."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, 1, 1], instr_shape=[1, 16, 8])
    M: gl.constexpr = BLOCK_C
    P: gl.constexpr = min(8, SHARED_I // (16 * S))
    SHARED_STEPS: gl.constexpr = SHARED_I // (16 * P * S)
    PARTS: gl.constexpr = S // TOGETHER
    STEPS: gl.constexpr = I // (128 * PARTS)
    RAW8: gl.constexpr = _weights_layout(S, M, P)
    tile = gl.program_id(0)
    t = gl.program_id(1)
    if PDL:
        launch_dependents()
    # weights do not wait for the kernel before, which must not write them; and ids were there when that let this one begin
    start = shared_ptr + (tile * M + _index(M, 1, RAW8)) * (SHARED_I // 4) + _index(S, 0, RAW8) * (SHARED_STEPS * 4 * P)
    start += _index(4 * P, 2, RAW8)
    s = _index(S, 0, MMA)
    shared_words = ()
    shared_factors = ()
    for step in gl.static_range(SHARED_STEPS):
        shared_words = shared_words + (gl.load(start + step * (4 * P)),)  # noqa: RUF005
        block = (s * SHARED_STEPS + step) * (16 * P) // 128 + 0 * _index(M, 1, MMA)
        at = shared_scale_ptr + tile * M // 128 * (SHARED_I // 128) + block
        shared_factors = shared_factors + (gl.load(at),)  # noqa: RUF005
    X8: gl.constexpr = _fetched_layout(S, 1, 16 * P)
    shared_row = t * SHARED_I + _index(S, 0, X8) * (SHARED_I // S) + _index(1, 1, X8)
    acc = gl.zeros([S, M, 8], gl.float32, layout=MMA)
    if TOGETHER >= TOP:
        words, factors = _routed(w_ptr, scale_ptr, ids_ptr, tile, t, 0, first, E, C, I, TOP, M, S, TOGETHER)
        row, live = _routed_rows(ids_ptr, t, 0, first, E, I, TOP, S, TOGETHER)
        _under_way()
        xs = _fetch(h_ptr, row, live, STEPS, 128)
        shared_xs = _fetch(shared_h_ptr, shared_row, None, SHARED_STEPS, 16 * P)
        memory = _store(xs, STEPS)
        shared_xs, undo = _halved(shared_xs, SHARED_STEPS, S, 1, MMA)
        shared_memory = _store(shared_xs, SHARED_STEPS)
        for step in gl.static_range(STEPS):
            x = _fp4_tokens(_stored(memory, step, S, 1, 128), S, MMA)
            acc = _fp4_product(acc, words[step], factors[step], x, S, M, MMA)
    else:
        for n in range(0, TOP, TOGETHER):
            count = 0
            for j in gl.static_range(TOGETHER):
                expert = gl.load(ids_ptr + t * TOP + n + j, mask=n + j < TOP, other=-1).to(gl.int64) - first
                count += ((n + j < TOP) & (expert >= 0) & (expert < E)).to(gl.int32)
            if count > 0:
                words, factors = _routed(w_ptr, scale_ptr, ids_ptr, tile, t, n, first, E, C, I, TOP, M, S, TOGETHER)
                row, live = _routed_rows(ids_ptr, t, n, first, E, I, TOP, S, TOGETHER)
                _under_way()
                xs = _fetch(h_ptr, row, live, STEPS, 128)
                memory = _store(xs, STEPS)
                for step in gl.static_range(STEPS):
                    x = _fp4_tokens(_stored(memory, step, S, 1, 128), S, MMA)
                    acc = _fp4_product(acc, words[step], factors[step], x, S, M, MMA)
        if PDL:
            grid_wait()
        shared_xs = _fetch(shared_h_ptr, shared_row, None, SHARED_STEPS, 16 * P)
        shared_xs, undo = _halved(shared_xs, SHARED_STEPS, S, 1, MMA)
        shared_memory = _store(shared_xs, SHARED_STEPS)
    shared = gl.zeros([S, M, 8], gl.float32, layout=MMA)
    for step in gl.static_range(SHARED_STEPS):
        x = _fp8_tokens(_stored(shared_memory, step, S, 1, 16 * P), S, P, MMA)
        shared = _fp8_product(shared, shared_words[step], shared_factors[step], x, S, M, P, MMA)
    y = gl.sum(acc * UNIT + shared * undo, 0)
    LAST: gl.constexpr = y.type.layout
    c = tile * M + gl.arange(0, M, layout=gl.SliceLayout(1, LAST))[:, None]
    n = gl.arange(0, 8, layout=gl.SliceLayout(0, LAST))[None, :]
    gl.store(out_ptr + t * C + c + 0 * n, y.to(out_ptr.dtype.element_ty), mask=n == 0)


def _constants(gated: bool, T: int, top_k: int, C: int, I: int, shared_I: int, config: Few) -> dict[str, int]:
    """The constants of one of the two launches."""
    common = {"I": I, "SHARED_I": shared_I, "S": 8, "PDL": True}
    if gated:
        # a slice has C / 1024 steps
        steps = {"AHEAD": min(config.ahead, C // 1024), "TURNS": config.turns}
        return common | steps | {"K": C, "HELD": triton.next_power_of_2(T)}
    return common | {"C": C, "TOP": top_k, "BLOCK_C": config.block_c, "TOGETHER": config.together}


def launch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    scale13: torch.Tensor,
    w2: torch.Tensor,
    scale2: torch.Tensor,
    shared13: torch.Tensor,
    shared_scale13: torch.Tensor,
    shared2: torch.Tensor,
    shared_scale2: torch.Tensor,
    first_expert: int,
    limit: float,
    out: torch.Tensor,
    config: Few,
) -> None:
    """Fill out [T, C]; everything is contiguous, and 0 < T <= 8."""
    T, C = x.shape
    top_k = ids.shape[1]
    E, I, shared_I = w13.shape[0], w13.shape[1] // 2, shared13.shape[0] // 2
    h = torch.empty(T * top_k, I, dtype=x.dtype, device=x.device)
    shared_h = torch.empty(T, shared_I, dtype=x.dtype, device=x.device)
    words = [w.view(torch.uint8).view(torch.int32) for w in (w13, w2, shared13, shared2)]
    scales = [s.view(torch.uint8) for s in (scale13, scale2, shared_scale13, shared_scale2)]
    sizes = (T, top_k, C, I, shared_I, config)
    moe_w13_few_kernel[max(I, shared_I) // 8, 2 if config.turns else 1 + T * top_k](
        x, ids, weights, words[0], scales[0], words[2], scales[2], h, shared_h, limit, T, top_k, first_expert, E,
        **_constants(True, *sizes), num_warps=8, launch_pdl=True,
    )  # fmt: skip
    moe_w2_few_kernel[C // config.block_c, T](
        h, ids, words[1], scales[1], shared_h, words[3], scales[3], out, first_expert, E,
        **_constants(False, *sizes), num_warps=8, launch_pdl=True,
    )  # fmt: skip


def compile_args(gated: bool, case: Case, config: Few) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of a launch as `launch` passes them, to compile it without a GPU."""
    kinds = {"x": "bf16", "h": "bf16", "shared_h": "bf16", "ids": "i32", "weights": "fp32", "out": "bf16"}
    kinds |= {"w": "i32", "scale": "u8", "shared": "i32", "shared_scale": "u8"}
    types = {f"{part}_ptr": f"*{kind}:16" for part, kind in kinds.items()} | {"limit": "fp32"}
    types |= dict.fromkeys(("T", "top_k", "first", "E"), "i32")
    function = moe_w13_few_kernel if gated else moe_w2_few_kernel
    types = {argument: kind for argument, kind in types.items() if argument in function.arg_names}
    return types, _constants(gated, case.T, case.top_k, case.C, case.I, case.shared_I, config)
