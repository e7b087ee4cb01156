"""Rows of fp8_584 caches as float16 tiles, from Gluon on Hopper: found, loaded, widened; and the units they are counted in.

Each row is counted in a unit of its own, the power of two that brings its largest value just below 2**16, so that float16 holds
rows of any size; the softmax takes the units along. Rows are read 16 bytes a lane, with one 8-byte load for a row's scales, and
widened by the arch's instruction: a NaN code is a NaN value.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Gluon renamed both after 3.6
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_RENAMED: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def _everywhere(warps, heads):
    """[warps, heads]: each thread holds its columns of a wgmma accumulator, of all warps."""
    columns = [[0, 1]] + [[0, 1 << n] for n in range(3, heads.bit_length() - 1)]
    rows = [[1 << n, 0] for n in range(warps.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(columns + rows, lanes, [[0, 0]] * len(rows), [], [warps, heads])


EVERYWHERE: gl.constexpr = gl.constexpr({(w, h): _everywhere(w, h) for w in (4, 8) for h in (8, 16, 32)})


@gluon.jit
def view(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    if _RENAMED:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:  # noqa: RET505 (a jitted function goes on after an if without else)
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def launch_dependents():
    """The next kernel may take the room that this one leaves, and wait there."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def grid_wait():
    """What kernels before this one wrote may be read from here on: the launch is not held back by them."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _widen(x, factor):
    """int32 of 4 E4M3 codes, float16 factor in both halves -> two int32 of two values."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b;
        .reg .b32 x, y;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a;
        cvt.rn.f16x2.e4m3x2 y, b;
        mul.rn.f16x2 $0, x, $3;
        mul.rn.f16x2 $1, y, $3;
        }""",
        "=&r,=&r,r,r",
        [x, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def narrowed(x, factor):
    """Two bfloat16 times a bfloat16 power of two -> two float16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 x, a, b;
        .reg .f32 f, h;
        mul.rn.bf16x2 x, $1, $2;
        shl.b32 a, x, 16;
        and.b32 b, x, 0xffff0000;
        mov.b32 f, a;
        mov.b32 h, b;
        cvt.rn.f16x2.f32 $0, h, f;
        }""",
        "=r,r,r",
        [x, factor],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _larger(a, b):
    """Two bfloat16 each: the larger magnitudes, their signs without a meaning."""
    return gl.inline_asm_elementwise(
        "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _byte(scales, GROUP: gl.constexpr):
    return ((scales >> (8 * GROUP)) & 0xFF).to(gl.int32)


@gluon.jit
def _unit(scales, y, CODES: gl.constexpr):
    """The exponent of each row's unit, biased like E8M0: its largest value becomes at most 65280 of them. int32 [N].

    And whether the row shows as NaN: a NaN scale, or values beyond 2**57, where float32 no longer holds large and small rows'
    weights together.
    """
    rope = gl.convert_layout(gl.reduce(y, 1, _larger), scales.type.layout, assert_trivial=True)
    rope = gl.maximum((rope >> 7) & 0xFF, (rope >> 23) & 0xFF) - 8
    a = gl.maximum(gl.maximum(_byte(scales, 0), _byte(scales, 1)), gl.maximum(_byte(scales, 2), _byte(scales, 3)))
    b = gl.maximum(gl.maximum(_byte(scales, 4), _byte(scales, 5)), gl.maximum(_byte(scales, 6), rope))
    top = gl.maximum(a, b)
    # 7: codes of the largest scale fill float16
    return gl.maximum(top, 127 - 50) - 7, top > 127 + 50


@gluon.jit
def _group(x, scales, unit, GROUP: gl.constexpr, N: gl.constexpr):
    """[N, 16] words of codes -> [N, 32] words of values in the row's unit."""
    # float16 bits of 2**(byte - unit)
    factor = gl.maximum(_byte(scales, GROUP) - unit + 15, 0) * 0x04000400
    low, high = _widen(x, factor[:, None] + gl.zeros_like(x))
    return gl.reshape(gl.join(low, high), (N, 32))


@gluon.jit
def _beside(a, b, N: gl.constexpr, W: gl.constexpr):
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (N, 2 * W))


@gluon.jit
def find(args, key):
    """The index of each key, unchecked; it comes without waiting for the lengths. int32 [N]."""
    window_indices, extra_indices, _, _, window_keys, last, _, _ = args
    is_extra = key >= window_keys
    place = gl.where(is_extra, key - window_keys, key)
    return gl.load(gl.where(is_extra, extra_indices, window_indices) + place, mask=key < last, other=-1)


@gluon.jit
def living(args, index, key):
    """The index of each key, 0 for a dead one, and whether it is live: int32 and bool [N]."""
    _, _, window_len, extra_len, window_keys, _, window_rows, extra_rows = args
    is_extra = key >= window_keys
    live = (gl.where(is_extra, key - window_keys, key) < gl.where(is_extra, extra_len, window_len)) & (index >= 0)
    live = live & (index < gl.where(is_extra, extra_rows, window_rows))
    return gl.where(live, index, 0), live


@gluon.jit
def load(args, index, live, is_extra, CODES: gl.constexpr, ROPE: gl.constexpr):
    """The words of one row of each key: seven groups of codes, the rope values, the scales, and whether it is live."""
    window, extra, window_stride, extra_stride, window_shift, extra_shift = args
    shift = gl.where(is_extra, extra_shift, window_shift)
    page = index >> shift
    place = index - (page << shift)
    start = gl.where(is_extra, extra, window) + page.to(gl.int64) * gl.where(is_extra, extra_stride, window_stride)
    row = gl.multiple_of(start + place * 144, 16)
    tail = (start + (144 << shift) + place * 2).to(gl.pointer_type(gl.int64))
    scales = gl.load(tail, mask=live, other=0)
    rope_row = gl.convert_layout(row, gl.SliceLayout(1, ROPE), assert_trivial=True)
    rope_live = gl.convert_layout(live, gl.SliceLayout(1, ROPE), assert_trivial=True)
    rope_words = rope_row[:, None] + (112 + gl.arange(0, 32, layout=gl.SliceLayout(0, ROPE)))[None, :]
    y = gl.load(rope_words, mask=rope_live[:, None], other=0)
    at = row[:, None] + gl.arange(0, 16, layout=gl.SliceLayout(0, CODES))[None, :]
    seen = live[:, None]
    x0 = gl.load(at, mask=seen, other=0)
    x1 = gl.load(at + 16, mask=seen, other=0)
    x2 = gl.load(at + 32, mask=seen, other=0)
    x3 = gl.load(at + 48, mask=seen, other=0)
    x4 = gl.load(at + 64, mask=seen, other=0)
    x5 = gl.load(at + 80, mask=seen, other=0)
    x6 = gl.load(at + 96, mask=seen, other=0)
    return x0, x1, x2, x3, x4, x5, x6, y, scales, live


@gluon.jit
def widened(raw, N: gl.constexpr, CODES: gl.constexpr):
    """A tile as float16 in int32 [N, 256]; then of each key, float32 [N], what the softmax asks of its row's unit.

    up: the unit, which scores lack; 0 for a dead key. exponent: its logarithm, which makes a score the logarithm of what the
    key adds to the output in units; -inf for a dead key. down: its inverse, which makes such a weight the denominator's; 0.
    """
    x0, x1, x2, x3, x4, x5, x6, y, scales, live = raw
    unit, broken = _unit(scales, y, CODES)
    exponent = gl.where(broken, float("nan"), (unit - 127).to(gl.float32))
    exponent = gl.where(live, exponent, float("-inf"))
    up = gl.where(live, (unit << 23).to(gl.float32, bitcast=True), 0.0)
    down = gl.where(live, ((254 - unit) << 23).to(gl.float32, bitcast=True), 0.0)
    a = _beside(_group(x0, scales, unit, 0, N), _group(x1, scales, unit, 1, N), N, 32)
    b = _beside(_group(x2, scales, unit, 2, N), _group(x3, scales, unit, 3, N), N, 32)
    c = _beside(_group(x4, scales, unit, 4, N), _group(x5, scales, unit, 5, N), N, 32)
    g6 = _group(x6, scales, unit, 6, N)
    inverse = gl.convert_layout((254 - unit) * 0x00800080, gl.SliceLayout(1, y.type.layout), assert_trivial=True)
    rope = narrowed(y, inverse[:, None] + gl.zeros_like(y))
    d = _beside(g6, gl.convert_layout(rope, g6.type.layout, assert_trivial=True), N, 32)
    return _beside(_beside(a, b, N, 64), _beside(c, d, N, 64), N, 128), up, exponent, down


@gluon.jit
def place(given, t, TILE: gl.constexpr):
    """What a role of a program must know of its keys: the arguments of `find` and `living`, the first key, how many tiles."""
    lens, cut, lists, limits, _ = given
    window_len, extra_len, begin, last, end = span(lens[0], lens[1], t, cut[0], cut[1], cut[2], gl.program_id(2))
    finding = (lists[0] + t * cut[0], lists[1] + t * cut[1], window_len, extra_len, cut[0], last, limits[0], limits[1])
    return finding, begin, gl.maximum((end - begin + TILE - 1) // TILE, 0)


@gluon.jit
def span(window_lens_ptr, extra_lens_ptr, t, window_keys, extra_keys, split_keys, part):
    """The lengths, and the keys of this part: begin, one past the last slot, one past the last slot that may be live.

    Slots are counted over both widths and cut where the lengths have no say, so that indices need not wait for them.
    """
    window_len = gl.minimum(gl.load(window_lens_ptr + t), window_keys)
    extra_len = gl.minimum(gl.load(extra_lens_ptr + t), extra_keys)
    begin = part * split_keys
    last = gl.minimum(begin + split_keys, window_keys + extra_keys)
    return window_len, extra_len, begin, last, gl.minimum(last, gl.where(extra_len > 0, window_keys + extra_len, window_len))


@gluon.jit
def unit_of_q(top):
    """The power of two that brings the largest |q| below 2**14, and its inverse; kept off both ends of float32."""
    field = gl.minimum(gl.maximum(267 - ((top.to(gl.int32, bitcast=True) >> 23) & 0xFF), 1), 253)
    return (field << 23).to(gl.float32, bitcast=True), ((254 - field) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def sink_factor(peak, total, sink):
    """What the sum of p * row takes at the end, the sink in its denominator."""
    high = gl.where(total == 0, 0.0, peak)
    below = total + gl.exp2(sink - high)
    return 1.0 / gl.where(below == 0, 1.0, below)


@gluon.jit
def part_unit(count, TILE: gl.constexpr):
    """Exponent of the power of two that no sum of a part in float16 passes: 2 * keys."""
    keys = (gl.maximum(count, 1) * (2 * TILE)).to(gl.float32)
    return ((keys.to(gl.int32, bitcast=True) >> 23) & 0xFF) + 1


@gluon.jit
def peaks_of(score, shared, WARPS: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """The largest score of each head over all warps' keys: one barrier, where a reduction of Triton's takes two."""
    own = gl.max(gl.reshape(score, (WARPS, 16, HEADS)), 1)
    shared.store(own)
    return gl.max(shared.load(LAYOUT), 0)
