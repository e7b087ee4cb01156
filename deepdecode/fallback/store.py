"""Rung 0 of what is kept: rows quantised and written, compressors fed and pooled; one launch each, as in engines."""

import torch
import triton
import triton.language as tl

from deepdecode.ops.rows import PagedRows, write_rows
from deepdecode.ops.table import CompressorState, Step

Tensor = torch.Tensor
# channels of a program of the compressor; divides every width that V4 has
POOL_BLOCK = 32


@triton.jit
def row_584_kernel(values_ptr, rows_ptr, codes_ptr, bytes_ptr, rope_ptr, num_rows, page_size, page_stride):
    t = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.load(rows_ptr + t)
    if (row < 0) | (row >= num_rows):
        return
    page = (row // page_size).to(tl.int64) * page_stride
    place = (row % page_size).to(tl.int64)
    lane = tl.arange(0, 64)
    x = tl.load(values_ptr + t.to(tl.int64) * 512 + group * 64 + lane).to(tl.float32)
    at = page + place * 576 + group * 64
    scale_at = page + page_size * 576 + place * 8 + group
    if group == 7:
        tl.store(rope_ptr + at // 2 + lane, x.to(tl.bfloat16))
        tl.store(bytes_ptr + scale_at, 0)
    else:
        bits = (tl.math.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-4), 448.0)).to(tl.int32, bitcast=True)
        # the least power of two that is not below
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        codes = tl.clamp(x * ((254 - exponent) << 23).to(tl.float32, bitcast=True), -448.0, 448.0)
        tl.store(codes_ptr + at + lane, codes.to(codes_ptr.dtype.element_ty))
        tl.store(bytes_ptr + scale_at, exponent.to(tl.uint8))


@triton.jit
def row_132_kernel(values_ptr, rows_ptr, codes_ptr, scales_ptr, num_rows, page_size, page_stride):
    t = tl.program_id(0)
    row = tl.load(rows_ptr + t)
    if (row < 0) | (row >= num_rows):
        return
    page = (row // page_size).to(tl.int64) * page_stride
    place = (row % page_size).to(tl.int64)
    lane = tl.arange(0, 128)
    x = tl.load(values_ptr + t.to(tl.int64) * 128 + lane).to(tl.float32)
    scale = tl.math.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-4), 448.0)
    codes = tl.clamp(tl.math.div_rn(x, scale), -448.0, 448.0)
    tl.store(codes_ptr + page + place * 128 + lane, codes.to(codes_ptr.dtype.element_ty))
    tl.store(scales_ptr + (page + page_size * 128) // 4 + place, scale)


@triton.jit
def pool_kernel(
    kv_ptr, score_ptr, ape_ptr, positions_ptr, slots_ptr, state_kv_ptr, state_score_ptr, out_ptr, slots, ratio, d, stride_t,
    RING: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out_at = out_ptr + t.to(tl.int64) * d + channel
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if (slot < 0) | (slot >= slots):
        tl.store(out_at, tl.zeros([BLOCK], tl.float32))
        return
    position = tl.load(positions_ptr + t)
    width = 2 * d if OVERLAP else d
    ring = slot * RING * width
    given = t.to(tl.int64) * stride_t + channel
    ape = ape_ptr + (position % ratio) * width + channel
    place = ring + (position % RING) * width + channel
    kv = tl.load(kv_ptr + given)
    score = tl.load(score_ptr + given) + tl.load(ape)
    tl.store(state_kv_ptr + place, kv)
    tl.store(state_score_ptr + place, score)
    if OVERLAP:
        kv = tl.load(kv_ptr + given + d)
        score = tl.load(score_ptr + given + d) + tl.load(ape + d)
        tl.store(state_kv_ptr + place + d, kv)
        tl.store(state_score_ptr + place + d, score)
    if (position + 1) % ratio != 0:
        tl.store(out_at, tl.zeros([BLOCK], tl.float32))
        return
    back = RING - 1 - tl.arange(0, RING)
    age = position - back
    # the older half of an overlapping ring speaks through the first half of the channels
    half = tl.where(back < RING // 2, d, 0) if OVERLAP else back * 0
    at = ring + ((age % RING) * width + half)[:, None] + channel[None, :]
    older = ((age >= 0) & (back > 0))[:, None]
    kvs = tl.where((back == 0)[:, None], kv[None, :], tl.load(state_kv_ptr + at, mask=older, other=0.0))
    scores = tl.load(state_score_ptr + at, mask=older, other=float("-inf"))
    scores = tl.where((back == 0)[:, None], score[None, :], scores)
    weights = tl.exp(scores - tl.max(scores, 0)[None, :])
    tl.store(out_at, tl.sum(weights * kvs, 0) / tl.sum(weights, 0))


def store_rows(cache: PagedRows, rows: Tensor, values: Tensor) -> None:
    """`write_rows` of int32 rows in one launch; off the GPU, that function itself."""
    if not values.is_cuda:
        write_rows(cache, rows, values)
    elif cache.fmt in ("fp8_584", "fp8_132"):
        launch_rows(cache, rows, values.contiguous())
    else:
        raise ValueError(f"store_rows: cache must be fp8_584 or fp8_132, got {cache.fmt}")


def launch_rows(cache: PagedRows, rows: Tensor, values: Tensor) -> None:
    payload = cache.page_size * (584 if cache.fmt == "fp8_584" else 132)
    span = (cache.data.shape[0] - 1) * cache.data.stride(0) + payload
    flat = cache.data.as_strided((span // 4 * 4,), (1,))
    codes = flat.view(torch.float8_e4m3fn)
    where = (cache.num_rows, cache.page_size, cache.data.stride(0))
    if cache.fmt == "fp8_584":
        row_584_kernel[len(rows), 8](values, rows, codes, flat, flat.view(torch.bfloat16), *where, num_warps=1)
    else:
        row_132_kernel[len(rows),](values, rows, codes, flat.view(torch.float32), *where, num_warps=1)


def pool(kv: Tensor, score: Tensor, ape: Tensor, state: CompressorState, step: Step) -> Tensor:
    """[T, d] float32: each token's kv and score taken into the rings, and the blocks that end; zeros where none does.

    kv and score may have any one distance from token to token.
    """
    T, width = kv.shape
    slots, ring, _ = state.kv.shape
    overlap = ring != state.ratio
    d = width // 2 if overlap else width
    out = kv.new_empty(T, d)
    pool_kernel[T, d // POOL_BLOCK](
        kv, score, ape, step.positions, step.slots, state.kv, state.score, out, slots, state.ratio, d, kv.stride(0),
        RING=ring, OVERLAP=overlap, BLOCK=POOL_BLOCK,
    )  # fmt: skip
    return out
