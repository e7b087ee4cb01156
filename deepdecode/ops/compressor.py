"""The compressor: every `ratio` tokens become one cached entry, pooled by a softmax over tokens, channel by channel.

    s_t = gate_t + ape[t mod ratio]
    entry = norm(sum over the block's tokens of softmax(s) * kv)

Ratio 4 overlaps: an entry pools 8 tokens, the previous block by the first half of their channels, its own by the second.
The first block of a sequence has no previous one. The entry of block n belongs to position n * ratio, for RoPE.
"""

import torch

from deepdecode.ops._check import expect, readable
from deepdecode.ops.norm import rms_norm
from deepdecode.ops.rows import put_rows
from deepdecode.ops.table import CompressorState, CompressorWeights, Step

Tensor = torch.Tensor


def pool_ref(kv: Tensor, score: Tensor, seen: Tensor, overlap: bool) -> Tensor:
    """Pool [B, tokens, coff * d], oldest first, to [B, d]; tokens that are not `seen` [B, tokens] count for nothing.

    With `overlap` the first half of the tokens speaks through the first half of the channels, the second through the second.
    """
    seen = seen[:, :, None]
    kv, score = torch.where(seen, kv, 0), torch.where(seen, score, float("-inf"))
    if overlap:
        half, d = kv.shape[1] // 2, kv.shape[2] // 2
        kv, score = (torch.cat([x[:, :half, :d], x[:, half:, d:]], dim=1) for x in (kv, score))
    return (score.softmax(dim=1) * kv).sum(dim=1)


def compress(
    kv: Tensor,
    score: Tensor,
    weights: CompressorWeights,
    state: CompressorState,
    step: Step,
    *,
    norm_eps: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Take the step's tokens into the state and give the entries they complete, normed, not yet rotated.

    A decode step takes one token of each of T sequences, a prefill step T consecutive tokens of one, starting anywhere.
    Cut into steps in any way, a sequence gives the same entries.

    Args:
        kv, score: [T, coff * d] float32 (float64 on the reference path), contiguous: the products of x; score without ape.
        weights: ape [ratio, coff * d] and norm [d]. coff is 2 for ratio 4 (overlap), else 1.
        state: this layer's rings, in the dtype of kv. Updated in place; rows with slot -1 change nothing.
        step: see `Step`. Positions before a sequence's first token are never read, whatever its slot held before.
        dtype: the pooled row is rounded to it before the norm, and the normed row after; that of kv if None.

    Returns:
        [T, d] in `dtype`. Row i is the entry that token i completes, for RoPE position `positions[i] + 1 - ratio`; rows of
        tokens that complete none, where (position + 1) % ratio != 0 or the slot is -1, are zeros.

    Raises:
        ValueError: an argument has another shape, dtype, layout or device.
    """
    ratio, d = state.ratio, weights.norm.shape[0]
    overlap = ratio == 4
    width = 2 * d if overlap else d
    ring = 2 * ratio if overlap else ratio
    expect("compress: kv", kv, ("T", width), (torch.float32, torch.float64), kv.device)
    expect("compress: score", score, kv.shape, kv.dtype, kv.device)
    expect("compress: ape", weights.ape, (ratio, width), (torch.float32, torch.float64), kv.device)
    expect("compress: state.kv", state.kv, ("slots", ring, width), kv.dtype, kv.device)
    expect("compress: state.score", state.score, state.kv.shape, kv.dtype, kv.device)
    T = kv.shape[0]
    expect("compress: positions", step.positions, (T,), (torch.int32, torch.int64), kv.device)
    expect("compress: slots", step.slots, (T,), (torch.int32, torch.int64), kv.device)
    dtype = kv.dtype if dtype is None else dtype
    if T == 0:
        return torch.empty(0, d, dtype=dtype, device=kv.device)
    live = (step.slots >= 0) & (step.slots < state.kv.shape[0])
    # a padded row may hold any position; at 0 it completes no entry and is not the last
    positions = torch.where(live, step.positions, 0).long()
    slots = torch.where(live, step.slots, 0).long()
    score = score + weights.ape[positions % ratio].to(score.dtype)
    ends = _ends(positions, ratio, step.prefill)
    # [B, ring]: positions of each block's tokens, its previous block's before them
    at = positions[ends, None] + torch.arange(1 - ring, 1, device=kv.device)
    from_ring = (slots[ends, None], at % ring)
    if step.prefill:
        # tokens of this step stand in kv, older ones still in the ring, which is written afterwards
        row = at - positions[0]
        new = (row >= 0)[:, :, None]
        row = row.clamp(min=0)
        kvs, scores = torch.where(new, kv[row], state.kv[from_ring]), torch.where(new, score[row], state.score[from_ring])
        _store(kv, score, state, positions, slots, live & (positions > positions.max() - ring))
    else:
        _store(kv, score, state, positions, slots, live)
        kvs, scores = state.kv[from_ring], state.score[from_ring]
    out = torch.zeros(T, d, dtype=dtype, device=kv.device)
    if not ends.numel():
        return out
    entries = rms_norm(pool_ref(kvs, scores, at >= 0, overlap).to(dtype), weights.norm, norm_eps)
    done = live[ends] & ((positions[ends] + 1) % ratio == 0)
    return out.index_copy_(0, ends, torch.where(done[:, None], entries, 0))


def _ends(positions: Tensor, ratio: int, prefill: bool) -> Tensor:
    """Rows of the step that may complete an entry, all that do among them, each once."""
    T = positions.shape[0]
    if readable(positions):
        return ((positions + 1) % ratio == 0).nonzero().flatten()
    if not prefill:
        return torch.arange(T, device=positions.device)
    # each run of `ratio` rows has one; the last may lie past the step, and its stand-in completes nothing
    first = (ratio - 1 - positions[0]) % ratio
    return (first + torch.arange(0, T, ratio, device=positions.device)).clamp(max=T - 1)


def _store(kv: Tensor, score: Tensor, state: CompressorState, positions: Tensor, slots: Tensor, keep: Tensor) -> None:
    at = (slots, positions % state.kv.shape[1])
    put_rows(state.kv, at, kv, keep)
    put_rows(state.score, at, score, keep)
