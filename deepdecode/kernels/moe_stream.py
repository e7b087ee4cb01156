"""FP4 experts and their FP8 shared one, streamed from memory into the registers that mma.sync takes: Gluon, two launches.

A lane copies 16 bytes of a row, one block of 32 codes under one scale, to shared memory, DEPTH - 1 steps ahead, and reads the
same bytes again as registers of mma.sync: a product does not ask for the order of its columns, only for the same on both sides,
and the tokens are stored to shared memory in that order, once. 8 codes cost 17 instructions: two copies of a pair's bits come
to their places by one multiplication, and one with the block's scale makes bfloat16 of it, exactly. The shared expert's codes
come to registers, SHARED_DEPTH steps ahead.

`experts_kernel` with GATED gives h = silu(gate) * up * routing weight of every (token, expert) pair, without it the pair's
output in float32; `kernels.moe.combine` sums those. Its programs stay on the card: each finds the experts that any token
takes, and has an equal share of the tiles of their rows, so that grids do not depend on data and no program is without work.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from deepdecode.kernels.attention_plan import card_of
from deepdecode.kernels.attention_sm90_rows import grid_wait, launch_dependents, view
from deepdecode.kernels.moe import combine
from deepdecode.kernels.moe_codes import UNIT, fp4_operand, fp8_operand
from deepdecode.kernels.moe_plan import Case, Stage, Stream

KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)


def _words(slices, warps, per_lane):
    """[slices, 16 * warps, 4 * per_lane]: 4 lanes a row, rows as mma.sync has them, slices and then rows to the warps."""
    words = [[0, 0, 1 << n] for n in range(per_lane.bit_length() - 1)]
    lanes = [[0, 0, per_lane], [0, 0, 2 * per_lane], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    rows = [[0, 16 << n, 0] for n in range(warps.bit_length() - 1)]
    parts = [[1 << n, 0, 0] for n in range(slices.bit_length() - 1)]
    return gl.DistributedLinearLayout([*words, [0, 8, 0]], lanes, rows + parts, [], [slices, 16 * warps, 4 * per_lane])


def _scales_of_a_copy(slices, warps):
    """[slices, 16 * warps, 1]: a row's four scales of 128 columns, as a word, in one lane (of the 32, 16 have the same)."""
    rows = [[0, 16 << n, 0] for n in range(warps.bit_length() - 1)]
    parts = [[1 << n, 0, 0] for n in range(slices.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [], [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 0]], rows + parts, [], [slices, 16 * warps, 1]
    )


def _tokens_of_a_warp(slices, warps, tokens, columns):
    """[slices, columns / tokens, tokens, 128]: as mma.sync takes tokens, 8 columns of K of a lane in a row.

    Warps of other rows have the same; so have lanes of other columns, where there are fewer tokens than the 8 of a product.
    """
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 32], [0, 0, 0, 64]]
    registers += [[0, 0, 8 << n, 0] for n in range((tokens // 8).bit_length() - 1)]
    held = min(tokens, 8).bit_length() - 1
    lanes = [
        [0, 0, 0, 8],
        [0, 0, 0, 16],
        *([0, 0, 1 << n, 0] for n in range(held)),
        *([0, 1 << n, 0, 0] for n in range(3 - held)),
    ]
    parts = [[1 << n, 0, 0, 0] for n in range(slices.bit_length() - 1)]
    same = [[0, 0, 0, 0]] * (warps.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, same + parts, [], [slices, columns // tokens, tokens, 128])


def _columns(K, tokens, values):
    """Columns of the tokens that shared memory holds at a time, of so many values: a power of two that divides K."""
    return min(K & -K, values // tokens)


_piece = gluon.constexpr_function(_columns)
_tokens_layout = gluon.constexpr_function(_tokens_of_a_warp)
_words_layout = gluon.constexpr_function(_words)
_scales_layout = gluon.constexpr_function(_scales_of_a_copy)
# no pair has this number
NONE = gl.constexpr(2**31 - 1)


@gluon.jit
def _experts_of(ids_ptr, pair, pairs, first, E):
    """The experts of these pairs counted from this rank's first, -1 for those of nobody here."""
    expert = gl.load(ids_ptr + pair, mask=pair < pairs, other=-1).to(gl.int64) - first
    return gl.where((pair < pairs) & (expert >= 0) & (expert < E), expert, -1).to(gl.int32)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _passes(
    ids_ptr,
    pairs,
    first,
    E,
    BINS: gl.constexpr,
    CHUNK: gl.constexpr,
    HELD: gl.constexpr,
    W: gl.constexpr,
    EXPERTS: gl.constexpr,
):
    """How often each expert of this rank passes by HELD of its pairs, 0 for those that nobody takes; int32 [BINS]."""
    # each id in one thread, as a histogram asks
    ONCE: gl.constexpr = gl.BlockedLayout([max(1, CHUNK // (32 * W))], [32], [W], [0])
    counts = gl.zeros([BINS], gl.int32, layout=EXPERTS)
    for at in range(0, pairs, CHUNK):
        expert = _experts_of(ids_ptr, at + gl.arange(0, CHUNK, layout=ONCE), pairs, first, E)
        counts += gl.histogram(gl.maximum(expert, 0), BINS, mask=expert >= 0, layout=EXPERTS)
    return (counts + (HELD - 1)) // HELD


@gluon.jit
def _search(
    ids_ptr, expert, skip, pairs, first, E, CHUNK: gl.constexpr, HELD: gl.constexpr, NT: gl.constexpr, IDS: gl.constexpr,
    TOKENS: gl.constexpr
):  # fmt: skip
    """HELD pairs of an expert, behind its first `skip`, as the first of [NT]; and how many there are from there on."""
    wanted = gl.arange(0, NT, layout=TOKENS)
    found = gl.zeros([NT], gl.int32, layout=TOKENS)
    count = 0
    for at in range(0, pairs, CHUNK):
        pair = at + gl.arange(0, CHUNK, layout=IDS)
        same = _experts_of(ids_ptr, pair, pairs, first, E) == expert
        # pairs of an expert are few: one after the other is faster than all at once
        left = gl.where(same, pair, NONE)
        here = gl.sum(same.to(gl.int32), 0)
        for n in range(count, min(skip + HELD, count + here)):
            lowest = gl.min(left, 0)
            left = gl.where(left == lowest, NONE, left)
            found = gl.where(wanted == n - skip, lowest, found)
        count += here
    return found, count - skip


@gluon.jit
def _load(w_ptr, scale_ptr, row, step, steps, K: gl.constexpr, S: gl.constexpr, M: gl.constexpr, RAW: gl.constexpr,
          SCALES: gl.constexpr):  # fmt: skip
    """FP8 words of a step's rows row .. row + M - 1, S pieces of 128 columns, and their scales; none past the end."""
    s = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, RAW)))[:, None, None]
    m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, RAW)))[None, :, None]
    k = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, RAW)))[None, None, :]
    piece = step % (K // (128 * S)) * S
    start = w_ptr + row.to(gl.int64) * (K // 4) + piece * 32
    words = gl.load(start + (m * (K // 4) + s * 32 + k), mask=step + 0 * (m + s + k) < steps)
    s = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, SCALES)))[:, None, None]
    m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, SCALES)))[None, :, None]
    k = gl.arange(0, 1, layout=gl.SliceLayout(0, gl.SliceLayout(1, SCALES)))[None, None, :]
    start = scale_ptr + (row // 128).to(gl.int64) * (K // 128) + piece
    scale = gl.load(start + (s + 0 * (m + k)), mask=step + 0 * (m + s + k) < steps)
    return words, scale


@gluon.jit
def _tokens(tile, S: gl.constexpr, HELD: gl.constexpr, NT: gl.constexpr, WM: gl.constexpr, MMA: gl.constexpr):
    """The other operand [S, 128, NT] of HELD tokens, in one load of 16 bytes for two instructions."""
    STORED: gl.constexpr = _tokens_layout(S, WM, HELD, NT)
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    x = gl.expand_dims(tile.load(gl.SliceLayout(1, STORED)), 1)
    _, x = gl.broadcast(gl.zeros([S, NT // HELD, HELD, 128], x.dtype, layout=STORED), x)
    # [token, 8 codes of a block, block, pair of codes (2), half of a pair]
    x = gl.reshape(x, (S, NT, 4, 4, 2, 2, 2))
    x = gl.reshape(gl.permute(x, (0, 2, 4, 5, 3, 6, 1)), (S, 128, NT))
    return gl.convert_layout(x, B, assert_trivial=True)


@gluon.jit
def _multiply(acc, words, scale, x, FP4: gl.constexpr, S: gl.constexpr, M: gl.constexpr, NT: gl.constexpr, MMA: gl.constexpr):
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    if FP4:
        return mma_v2(gl.convert_layout(fp4_operand(words, scale, S, M), A, assert_trivial=True), x, acc)
    else:  # noqa: RET505
        part = gl.zeros([S, M, NT], gl.float32, layout=MMA)
        part = mma_v2(gl.convert_layout(fp8_operand(words, S, M), A, assert_trivial=True), x, part)
        byte = scale.to(gl.int32)
        factor = gl.where(byte == 255, 0x7FC00000, gl.where(byte == 0, 0x400000, byte << 23)).to(gl.float32, bitcast=True)
        return acc + part * gl.convert_layout(factor, MMA, assert_trivial=False)


@gluon.jit
def _unit(start, live, K: gl.constexpr, KC: gl.constexpr, LOADED: gl.constexpr):
    """The power of two, as float32's bits, that brings a token's largest value under 2**15; NaN if that is not finite."""
    k = gl.arange(0, KC, layout=gl.SliceLayout(0, LOADED))
    largest = gl.zeros_like(live.to(gl.int32))
    for at in range(0, K, KC):
        x = gl.load(start[:, None] + (at + k)[None, :], mask=live[:, None], other=0.0)
        # magnitudes of bfloat16 are in the order of their bits
        largest = gl.maximum(largest, gl.max(x.to(gl.int16, bitcast=True).to(gl.int32) & 0x7FFF, 1))
    exponent = largest >> 7
    return gl.where(exponent == 255, 0x7FC00000, gl.minimum(127 + 14 + 127 - exponent, 254) << 23)


@gluon.jit
def _store_tokens(memory, start, live, unit, first, PIECE: gl.constexpr, KC: gl.constexpr, FP4: gl.constexpr, NT: gl.constexpr,
                  LOADED: gl.constexpr):  # fmt: skip
    """PIECE columns of the tokens from `first` on to shared memory, those of each 128 in the order of an operand of weights."""
    TILE: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 4, order=[2, 1, 0])
    tiles = view(memory, gl.bfloat16 if FP4 else gl.float16, [PIECE // KC, KC // 128, NT, 128], TILE)
    k = gl.arange(0, KC, layout=gl.SliceLayout(0, LOADED))
    PARTS: gl.constexpr = PIECE // KC
    # parts under way beside the one that is stored, 64 registers at most: the compiler waits between the stores of two
    AHEAD: gl.constexpr = min(PARTS, 1 if FP4 else 2)
    parts = ()
    for part in gl.static_range(AHEAD):
        more = (gl.load(start[:, None] + (first + part * KC + k)[None, :], mask=live[:, None], other=0.0),)
        parts = parts + more
    for part in gl.static_range(PARTS):
        x = parts[0]
        parts = parts[1:]
        if part + AHEAD < PARTS:
            more = (gl.load(start[:, None] + (first + (part + AHEAD) * KC + k)[None, :], mask=live[:, None], other=0.0),)
            parts = parts + more
        if FP4:
            x = gl.permute(gl.reshape(x, (NT, KC // 128, 4, 4, 2, 4)), (1, 0, 3, 2, 5, 4))
        else:
            x = (x.to(gl.float32) * unit.to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
            x = gl.permute(gl.reshape(x, (NT, KC // 128, 4, 4, 8)), (1, 0, 3, 2, 4))
        tiles.index(part).store(gl.reshape(x, (KC // 128, NT, 128)))


@gluon.jit
def _swiglu(gate, up, limit):
    # by default minimum returns the limit for a NaN, which would hide it
    gate = gl.minimum(gate, limit, propagate_nan=KEEP_NAN)
    up = gl.minimum(up, limit, propagate_nan=KEEP_NAN)
    up = gl.maximum(up, -limit, propagate_nan=KEEP_NAN)
    return gate / (1 + gl.exp(-gate)) * up


@gluon.jit
def _step(w_ptr, scale_ptr, base, step, steps, K: gl.constexpr, OUT: gl.constexpr, GATED: gl.constexpr, S: gl.constexpr,
          WM: gl.constexpr):  # fmt: skip
    """What one step takes of the two halves of a tile of FP8 codes."""
    M: gl.constexpr = 16 * WM
    RAW: gl.constexpr = _words_layout(S, WM, 8)
    SCALES: gl.constexpr = _words_layout(S, WM, 1)
    row = base + step // (K // (128 * S)) * (M if GATED else 2 * M)
    words_a, scale_a = _load(w_ptr, scale_ptr, row, step, steps, K, S, M, RAW, SCALES)
    words_b, scale_b = _load(w_ptr, scale_ptr, row + (OUT if GATED else M), step, steps, K, S, M, RAW, SCALES)
    return words_a, scale_a, words_b, scale_b


@gluon.jit
def _places(DEPTH: gl.constexpr, S: gl.constexpr, WM: gl.constexpr):
    """Shared memory for DEPTH steps of FP4 codes and scales of the two halves of a tile, as words.

    Each is an allocation of its own: of one, the compiler would wait between what goes to a step's part and what comes from
    another's.
    """
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    places = ()
    for _ in gl.static_range(DEPTH):
        words_a = gl.allocate_shared_memory(gl.int32, [S, 16 * WM, 16], PLAIN)
        scale_a = gl.allocate_shared_memory(gl.int32, [S, 16 * WM, 1], PLAIN)
        words_b = gl.allocate_shared_memory(gl.int32, [S, 16 * WM, 16], PLAIN)
        scale_b = gl.allocate_shared_memory(gl.int32, [S, 16 * WM, 1], PLAIN)
        more = (((words_a, scale_a), (words_b, scale_b)),)
        places = places + more
    return places


@gluon.jit
def _copy(place, w_ptr, scale_ptr, base, step, steps, K: gl.constexpr, OUT: gl.constexpr, GATED: gl.constexpr, S: gl.constexpr,
          WM: gl.constexpr):  # fmt: skip
    """Start the copies of a step to its place, as one group; nothing past the end is read."""
    M: gl.constexpr = 16 * WM
    J: gl.constexpr = K // (128 * S)
    RAW: gl.constexpr = _words_layout(S, WM, 4)
    FOUR: gl.constexpr = _scales_layout(S, WM)
    piece = step % J * S
    for half in gl.static_range(2):
        row = (base + step // J * (M if GATED else 2 * M) + half * (OUT if GATED else M)).to(gl.int64)
        s = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, RAW)))[:, None, None]
        m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, RAW)))[None, :, None]
        k = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, RAW)))[None, None, :]
        words = w_ptr + row * (K // 8) + piece * 16 + (m * (K // 8) + s * 16 + k)
        async_copy.async_copy_global_to_shared(place[half][0], words, mask=step + 0 * (m + s + k) < steps)
        s = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, FOUR)))[:, None, None]
        m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, FOUR)))[None, :, None]
        scales = scale_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + row * (K // 128) + piece + (m * (K // 128) + s)
        async_copy.async_copy_global_to_shared(place[half][1], scales, mask=step + 0 * (m + s) < steps)
    async_copy.commit_group()


@gluon.jit
def _arrived(part, S: gl.constexpr, WM: gl.constexpr):
    """Words and scales of half a tile."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    scale = view(part[1], gl.uint8, [S, 16 * WM, 4], PLAIN).load(_words_layout(S, WM, 1))
    return part[0].load(_words_layout(S, WM, 4)), scale


@gluon.jit
def _ahead(w_ptr, scale_ptr, base, steps, K: gl.constexpr, OUT: gl.constexpr, GATED: gl.constexpr, FP4: gl.constexpr,
           S: gl.constexpr, WM: gl.constexpr, DEPTH: gl.constexpr):  # fmt: skip
    """What is under way before the first step: DEPTH - 1 steps of FP4 codes to their places, or DEPTH of FP8 ones."""
    if FP4:
        buffers = _places(DEPTH, S, WM)
        for d in gl.static_range(DEPTH - 1):
            _copy(buffers[d], w_ptr, scale_ptr, base, d, steps, K, OUT, GATED, S, WM)
    else:
        buffers = ()
        for d in gl.static_range(DEPTH):
            more = (_step(w_ptr, scale_ptr, base, d, steps, K, OUT, GATED, S, WM),)
            buffers = buffers + more
    return buffers


@gluon.jit
def _tiles(
    buffers, in_ptr, in_row, live, weight, w_ptr, scale_ptr, out_ptr, out_row, limit, base, tiles,
    K: gl.constexpr, OUT: gl.constexpr, GATED: gl.constexpr, FP4: gl.constexpr, HELD: gl.constexpr, NT: gl.constexpr,
    S: gl.constexpr, WM: gl.constexpr, DEPTH: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Some tiles of an expert's rows for HELD tokens. Rows of a tile: M of the gate and M of up, or M and the next M."""
    M: gl.constexpr = 16 * WM
    J: gl.constexpr = K // (128 * S)
    PIECE: gl.constexpr = _piece(K, HELD, VALUES)
    PIECE_STEPS: gl.constexpr = PIECE // (128 * S)
    # steps and tiles of a turn of the loop, so that a step's place in the ring is a constant
    STEPS: gl.constexpr = min(DEPTH, J)
    TURN: gl.constexpr = DEPTH // STEPS
    gl.static_assert(K % PIECE == 0 and J % STEPS == 0 and DEPTH % STEPS == 0, "the steps must divide the columns")
    gl.static_assert(DEPTH > 1 if FP4 else TURN == 1, "a ring has two places or more; registers hold steps of one tile")
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, WM, 1], instr_shape=[1, 16, 8])
    SUM: gl.constexpr = gl.SliceLayout(0, MMA)
    TILE: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 4, order=[2, 1, 0])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [S * WM, 1], [1, 0])
    # 64 values a thread at a time, or 32
    KC: gl.constexpr = min(PIECE, (2048 if FP4 else 1024) * S * WM // HELD)
    gl.static_assert(PIECE_STEPS > 0 and KC >= 128, "so many tokens at a time need a program of more warps or fewer slices")
    memory = gl.allocate_shared_memory(gl.bfloat16 if FP4 else gl.float16, [PIECE_STEPS, S, HELD, 128], TILE)
    # of NT columns the first HELD are tokens
    rows = gl.max(gl.reshape(gl.where(live, in_row, 0), (NT // HELD, HELD)), 0)
    start = in_ptr + gl.convert_layout(rows, gl.SliceLayout(1, LOADED)).to(gl.int64) * K
    started = gl.max(gl.reshape(live.to(gl.int32), (NT // HELD, HELD)), 0)
    started = gl.convert_layout(started, gl.SliceLayout(1, LOADED)) > 0
    # FP8 codes are multiplied as float16, so tokens are counted in a unit that float16 holds
    unit = started if FP4 else _unit(start, started, K, min(PIECE, 4 * KC), LOADED)
    if PIECE == K:
        _store_tokens(memory, start, started, unit, 0, K, KC, FP4, HELD, LOADED)
    n = gl.convert_layout(out_row, gl.SliceLayout(0, SUM))
    n_live = gl.convert_layout(live, gl.SliceLayout(0, SUM))
    if GATED:
        n_weight = gl.convert_layout(weight, gl.SliceLayout(0, SUM))
    m = gl.arange(0, M, layout=gl.SliceLayout(1, SUM))
    at = out_ptr + (n.to(gl.int64) * OUT)[None, :] + m[:, None]
    for turn in range(0, tiles, TURN):
        for t in gl.static_range(TURN):
            tile = turn + t
            acc_a = gl.zeros([S, M, NT], gl.float32, layout=MMA)
            acc_b = gl.zeros([S, M, NT], gl.float32, layout=MMA)
            for step in range(0, J, STEPS):
                for d in gl.static_range(STEPS):
                    if PIECE < K:  # noqa: SIM102 (a constant, and a condition of the card's)
                        if (step + d) % PIECE_STEPS == 0:
                            _store_tokens(
                                memory, start, started, unit, (step + d) * (128 * S), PIECE, KC, FP4, HELD, LOADED
                            )  # fmt: skip
                    if FP4:
                        # the step's own copies are there, and what was in the place of the step before it has been read
                        async_copy.wait_group(DEPTH - 2)
                        ahead = tile * J + step + d + DEPTH - 1
                        free = buffers[(t * J + d + DEPTH - 1) % DEPTH]
                        _copy(free, w_ptr, scale_ptr, base, ahead, tiles * J, K, OUT, GATED, S, WM)
                    x = _tokens(memory.index((step + d) % PIECE_STEPS), S, HELD, NT, WM, MMA)
                    if FP4:
                        words, scale = _arrived(buffers[(t * J + d) % DEPTH][0], S, WM)
                        acc_a = _multiply(acc_a, words, scale, x, FP4, S, M, NT, MMA)
                        words, scale = _arrived(buffers[(t * J + d) % DEPTH][1], S, WM)
                        acc_b = _multiply(acc_b, words, scale, x, FP4, S, M, NT, MMA)
                    else:
                        acc_a = _multiply(acc_a, buffers[0][0], buffers[0][1], x, FP4, S, M, NT, MMA)
                        acc_b = _multiply(acc_b, buffers[0][2], buffers[0][3], x, FP4, S, M, NT, MMA)
                        ahead = tile * J + step + d + DEPTH
                        more = (_step(w_ptr, scale_ptr, base, ahead, tiles * J, K, OUT, GATED, S, WM),)
                        buffers = buffers[1:] + more
            sum_a, sum_b = gl.sum(acc_a, 0), gl.sum(acc_b, 0)
            if FP4:
                sum_a, sum_b = sum_a * UNIT, sum_b * UNIT
            else:
                undo = gl.where(unit > 0x7F000000, unit, gl.maximum((254 << 23) - unit, 0x400000))
                undo = gl.convert_layout(undo.to(gl.float32, bitcast=True), gl.SliceLayout(0, SUM))[None, :]
                sum_a, sum_b = sum_a * undo, sum_b * undo
            place = base + tile * (M if GATED else 2 * M)
            # the last turn may have fewer tiles
            written = n_live[None, :] if TURN == 1 else n_live[None, :] & (tile < tiles)
            if GATED:
                h = _swiglu(sum_a, sum_b, limit) * n_weight[None, :]
                gl.store(at + place, h.to(out_ptr.dtype.element_ty), mask=written)
            else:
                gl.store(at + place, sum_a, mask=written)
                gl.store(at + place + M, sum_b, mask=written)
    if FP4:
        # no copy is under way to memory that is another's next
        async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["shared_rows", "pairs", "top_k", "first", "E", "shared_jobs"])
def experts_kernel(
    in_ptr,
    ids_ptr,
    weights_ptr,
    w_ptr,
    scale_ptr,
    shared_in_ptr,
    shared_ptr,
    shared_scale_ptr,
    out_ptr,
    shared_out_ptr,
    limit,
    shared_rows,
    pairs,
    top_k,
    first,
    E,
    shared_jobs,
    K: gl.constexpr,
    OUT: gl.constexpr,
    SHARED_K: gl.constexpr,
    SHARED_OUT: gl.constexpr,
    GATED: gl.constexpr,
    CHUNK: gl.constexpr,
    BINS: gl.constexpr,
    COST: gl.constexpr,
    HELD: gl.constexpr,
    SHARED_NT: gl.constexpr,
    S: gl.constexpr,
    WM: gl.constexpr,
    DEPTH: gl.constexpr,
    SHARED_DEPTH: gl.constexpr,
    PDL: gl.constexpr,
):
    """out [pairs, OUT] and shared_out [shared_rows, SHARED_OUT], of in [T or pairs, K] and shared_in
    [shared_rows, SHARED_K].

    Weights are under way before what the launch before this one writes is waited for. Of the two launches the second may read
    the ids before that: they were there when the first let it begin.
    """
    W: gl.constexpr = S * WM
    # columns of a product, of which HELD are tokens
    NT: gl.constexpr = 8
    ROWS: gl.constexpr = 16 * WM if GATED else 32 * WM
    J: gl.constexpr = K // (128 * S)
    SHARED_J: gl.constexpr = SHARED_K // (128 * S)
    TILES: gl.constexpr = OUT // ROWS
    SHARED_TILES: gl.constexpr = SHARED_OUT // ROWS
    # all of an expert's tokens, and of the shared one's as many columns as fit the same place
    VALUES: gl.constexpr = max(8192, min(32768, (K & -K) * HELD))
    # every warp has all ids, all experts and all tokens
    IDS: gl.constexpr = gl.BlockedLayout([CHUNK // 32], [32], [W], [0])
    EXPERTS: gl.constexpr = gl.BlockedLayout([max(1, BINS // 32)], [32], [W], [0])
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    if PDL and GATED:
        grid_wait()
    if PDL:
        launch_dependents()
    passes = _passes(ids_ptr, pairs, first, E, BINS, CHUNK, HELD, W, EXPERTS)
    # an expert of more pairs than one pass takes stands as several, so that programs still have equal shares
    ends = gl.associative_scan(passes, 0, _add)
    shared_cost = shared_jobs * SHARED_TILES * COST
    total = shared_cost + gl.sum(passes, 0) * TILES
    begin = (gl.program_id(0).to(gl.int64) * total // gl.num_programs(0)).to(gl.int32)
    end = ((gl.program_id(0) + 1).to(gl.int64) * total // gl.num_programs(0)).to(gl.int32)
    for unit in range((begin + COST - 1) // COST, min((end + COST - 1) // COST, shared_jobs * SHARED_TILES)):
        base = unit % SHARED_TILES * ROWS
        buffers = _ahead(
            shared_ptr, shared_scale_ptr, base, SHARED_J, SHARED_K, SHARED_OUT, GATED, False, S, WM, SHARED_DEPTH
        )  # fmt: skip
        if PDL and not GATED:
            grid_wait()
        t = unit // SHARED_TILES * SHARED_NT + gl.arange(0, SHARED_NT, layout=TOKENS)
        _tiles(
            buffers, shared_in_ptr, t, t < shared_rows, t.to(gl.float32) * 0 + 1, shared_ptr, shared_scale_ptr, shared_out_ptr,
            t, limit, base, 1, SHARED_K, SHARED_OUT, GATED, False, SHARED_NT, SHARED_NT, S, WM, SHARED_DEPTH, VALUES,
        )  # fmt: skip
    unit = gl.maximum(begin - shared_cost, 0)
    end -= shared_cost
    number = gl.arange(0, NT, layout=TOKENS)
    while unit < end:
        # the first expert whose passes end behind this one
        expert = gl.sum((ends <= unit // TILES).to(gl.int32), 0)
        index = gl.arange(0, BINS, layout=EXPERTS)
        skip = (unit // TILES - gl.sum(gl.where(index == expert, ends - passes, 0), 0)) * HELD
        base = unit % TILES * ROWS
        tiles = gl.minimum(TILES - unit % TILES, end - unit)
        start = expert.to(gl.int64) * ((2 if GATED else 1) * OUT)
        w = w_ptr + start * (K // 8)
        scale = scale_ptr + start * (K // 32)
        buffers = _ahead(w, scale, base, tiles * J, K, OUT, GATED, True, S, WM, DEPTH)
        pair, count = _search(ids_ptr, expert, skip, pairs, first, E, CHUNK, HELD, NT, IDS, TOKENS)
        live = number < min(count, HELD)
        if PDL and not GATED:
            grid_wait()
        weight = gl.load(weights_ptr + pair, mask=live, other=0.0)
        _tiles(
            buffers, in_ptr, pair // top_k if GATED else pair, live, weight, w, scale, out_ptr, pair, limit, base, tiles,
            K, OUT, GATED, True, HELD, NT, S, WM, DEPTH, VALUES,
        )  # fmt: skip
        unit += tiles


def _constants(gated: bool, pairs: int, E: int, C: int, I: int, shared_I: int, config: Stream) -> dict[str, int]:
    """The constants of one of the two launches."""
    stage = config.w13 if gated else config.w2
    sizes = (C, I, C, shared_I) if gated else (I, C, shared_I, C)
    return dict(zip(("K", "OUT", "SHARED_K", "SHARED_OUT"), sizes, strict=True)) | {
        "GATED": gated, "CHUNK": 256 if pairs <= 256 else 512, "BINS": max(32, triton.next_power_of_2(E)), "COST": config.cost,
        "HELD": config.block_t, "SHARED_NT": config.shared_t, "S": stage.slices, "WM": stage.warps, "DEPTH": stage.depth,
        "SHARED_DEPTH": stage.shared_depth, "PDL": config.pdl,
    }  # fmt: skip


def options(stage: Stage) -> dict[str, int]:
    return {"num_warps": stage.slices * stage.warps, "maxnreg": stage.registers}


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
    config: Stream,
    shared_rows: int | None = None,
) -> None:
    """Fill out [T, C], of which the first shared_rows have the shared expert's part; everything is contiguous, and T > 0."""
    T, C = x.shape
    top_k = ids.shape[1]
    pairs = T * top_k
    E, I, shared_I = w13.shape[0], w13.shape[1] // 2, shared13.shape[0] // 2
    shared_rows = T if shared_rows is None else shared_rows
    h = torch.empty(pairs, I, dtype=x.dtype, device=x.device)
    shared_h = torch.empty(shared_rows, shared_I, dtype=x.dtype, device=x.device)
    y = torch.empty(pairs + shared_rows, C, dtype=torch.float32, device=x.device)
    words = [w.view(torch.uint8).view(torch.int32) for w in (w13, w2, shared13, shared2)]
    scales = [s.view(torch.uint8) for s in (scale13, scale2, shared_scale13, shared_scale2)]
    jobs = triton.cdiv(shared_rows, config.shared_t)
    sms = card_of(x.device).sms
    counts = (limit, shared_rows, pairs, top_k, first_expert, E, jobs)
    first = (x, ids, weights, words[0], scales[0], x, words[2], scales[2], h, shared_h)
    second = (h, ids, weights, words[1], scales[1], shared_h, words[3], scales[3], y, y[pairs:])
    for stage, gated, arrays in ((config.w13, True, first), (config.w2, False, second)):
        experts_kernel[(sms * stage.per_sm,)](
            *arrays, *counts, **_constants(gated, pairs, E, C, I, shared_I, config), **options(stage), launch_pdl=config.pdl
        )
    combine(y, ids, out, shared_rows, first_expert, E, config.pdl)


def compile_args(gated: bool, case: Case, config: Stream) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of a launch as `launch` passes them, to compile it without a GPU."""
    out = "bf16" if gated else "fp32"
    pointers = {"in": "bf16", "ids": "i32", "weights": "fp32", "w": "i32", "scale": "u8", "out": out}
    pointers |= {"shared_in": "bf16", "shared": "i32", "shared_scale": "u8", "shared_out": out}
    types = {f"{pointer}_ptr": f"*{kind}:16" for pointer, kind in pointers.items()} | {"limit": "fp32"}
    types |= dict.fromkeys(("shared_rows", "pairs", "top_k", "first", "E", "shared_jobs"), "i32")
    return types, _constants(gated, case.T * case.top_k, case.E, case.C, case.I, case.shared_I, config)
