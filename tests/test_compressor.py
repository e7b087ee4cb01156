import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdecode.ops import compressor
from deepdecode.ops.compressor import compress
from deepdecode.ops.table import CompressorState, CompressorWeights, Step
from deepdecode.testing.numeric import rel_err, same_bits

EXACT = 1e-13  # float64, sums in another order
F32 = 2e-6
BF16_STEP = 2 * 2**-9 * 1.01  # rounded before the norm and after it
EPS = 1e-6
D = 6


def coff(ratio):
    return 2 if ratio == 4 else 1


def make(ratio, slots=3, d=D, dtype=torch.float64, device="cpu"):
    """Weights, and a state that holds NaN where nothing was written."""
    ape = torch.randn(ratio, coff(ratio) * d, device=device)
    weights = CompressorWeights(ape, torch.randn(d, device=device).to(dtype))
    kv, score = torch.full((2, slots, coff(ratio) * ratio, coff(ratio) * d), math.nan, dtype=dtype, device=device)
    return weights, CompressorState(kv, score, ratio)


def tokens(n, ratio, d=D, dtype=torch.float64, device="cpu"):
    return tuple(torch.randn(2, n, coff(ratio) * d, dtype=dtype, device=device) * 2)


def feed(kv, score, weights, state, positions, slots, prefill, **kwargs):
    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=kv.device)

    nothing = ints([])
    step = Step(
        tokens=nothing, positions=ints(positions), slots=ints(slots), prefill=prefill, window_write=nothing,
        window_indices=nothing, window_lens=nothing, window_history=None, block_tables=nothing, entry_write={},
        entry_lens={}, entry_indices=nothing,
    )  # fmt: skip
    return compress(kv, score, weights, state, step, norm_eps=EPS, **kwargs)


def in_chunks(kv, score, weights, state, sizes, slot=0, prefill=True):
    """The entries of one sequence, fed in steps of these sizes."""
    out, at = [], 0
    for n in sizes:
        part = slice(at, at + n)
        out.append(feed(kv[part], score[part], weights, state, list(range(at, at + n)), [slot] * n, prefill))
        at += n
    return torch.cat(out)


def by_hand(kv, score, weights, ratio):
    """Entries [blocks, d] of a whole sequence: one channel at a time, in float64."""
    kv, score, ape, norm = kv.cpu(), score.cpu(), weights.ape.double().cpu(), weights.norm.double().cpu()
    d, out = len(norm), []
    for block in range(len(kv) // ratio):
        row = []
        for c in range(d):
            # (token, channel) of every candidate
            own = [(block * ratio + i, c + (d if ratio == 4 else 0)) for i in range(ratio)]
            before = [((block - 1) * ratio + i, c) for i in range(ratio)] if ratio == 4 and block else []
            weight = [math.exp(score[t, ch] + ape[t % ratio, ch]) for t, ch in before + own]
            row.append(sum(w * kv[t, ch] for w, (t, ch) in zip(weight, before + own, strict=True)) / sum(weight))
        row = torch.stack(row)
        out.append(row / (row.square().mean() + EPS).sqrt() * norm)
    return torch.stack(out) if out else torch.empty(0, d, dtype=torch.float64)


@pytest.fixture(params=[True, False], ids=["looks", "blind"])
def looks_at_positions(request, monkeypatch):
    """Off the GPU only rows that complete an entry are pooled; what a GPU runs is tested here too."""
    if not request.param:
        monkeypatch.setattr(compressor, "readable", lambda tensor: False)


# shorter than a block, one block, one more, several and a rest
@pytest.mark.parametrize(("ratio", "n"), [(4, 3), (4, 4), (4, 5), (4, 23), (128, 127), (128, 128), (128, 300)])
def test_prefill_matches_the_formula(ratio, n, device, looks_at_positions):
    """A sequence shorter than a block has no entry, and the rest of one is not pooled."""
    kv, score = tokens(n, ratio, device=device)
    weights, state = make(ratio, device=device)
    out = in_chunks(kv, score, weights, state, [n]).cpu()
    want = by_hand(kv, score, weights, ratio)
    assert rel_err(out[ratio - 1 :: ratio], want) < EXACT
    others = torch.arange(n) % ratio != ratio - 1
    assert out[others].eq(0).all()


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("prefill", [True, False])
def test_300_tokens_one_by_one_are_one_prefill(ratio, prefill, device):
    """The overlap with the previous block survives decoding; a state too short drops a token at every boundary."""
    kv, score = tokens(300, ratio, device=device)
    weights, state = make(ratio, device=device)
    whole = in_chunks(kv, score, weights, state, [300])
    weights2, state2 = weights, make(ratio, device=device)[1]
    single = in_chunks(kv, score, weights2, state2, [1] * 300, prefill=prefill)
    assert same_bits(single, whole)
    # and both leave the same rings behind: the sequence goes on the same
    assert same_bits(state.kv[0], state2.kv[0])
    assert same_bits(state.score[0], state2.score[0])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 19), min_size=1, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8), st.booleans())
def test_any_cut_gives_the_same_entries(sizes, decode, looks):
    """A sequence cut into prefill steps of any size, some of them fed token by token."""
    n = sum(sizes)
    kv, score = tokens(n, 4)
    weights, state = make(4)
    whole = in_chunks(kv, score, weights, state, [n])
    fresh = make(4)[1]
    out, at = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressor, "readable", lambda tensor: looks)
        for size, single in zip(sizes, decode, strict=False):
            for start, count in [(at + i, 1) for i in range(size)] if single else [(at, size)]:
                part = slice(start, start + count)
                positions = list(range(start, start + count))
                out.append(feed(kv[part], score[part], weights, fresh, positions, [2] * count, not single))
            at += size
    assert same_bits(torch.cat(out), whole)
    assert rel_err(whole[3::4], by_hand(kv, score, weights, 4)) < EXACT


@pytest.mark.parametrize("ratio", [4, 128])
def test_decode_rows_of_other_sequences_change_nothing(ratio, device, looks_at_positions):
    """Three sequences at different phases in one batch, one that joins late and padded rows, against each alone."""
    n, starts = (30, {0: 0, 1: 3, 2: 14}) if ratio == 4 else (200, {0: 0, 1: 3, 2: 70})
    kv, score = (x.view(3, n, -1) for x in tokens(3 * n, ratio, device=device))
    weights, state = make(ratio, device=device)
    got = {slot: [] for slot in starts}
    for at in range(n):
        rows = [(slot, at - start) if at >= start else (-1, 10**6) for slot, start in starts.items()]
        rows += [(-1, -5)]
        picks = [(slot, p) if slot >= 0 else (0, 0) for slot, p in rows]
        out = feed(
            torch.stack([kv[s, p] for s, p in picks]),
            torch.stack([score[s, p] for s, p in picks]),
            weights,
            state,
            [p for _, p in rows],
            [s for s, _ in rows],
            False,
        )
        for (slot, _), row in zip(rows, out, strict=True):
            if slot >= 0:
                got[slot].append(row)
            else:
                assert row.eq(0).all()
    for slot, start in starts.items():
        alone = in_chunks(kv[slot], score[slot], weights, make(ratio, device=device)[1], [n - start])
        assert rel_err(torch.stack(got[slot]), alone) < EXACT


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_a_slot_is_used_again_without_clearing(ratio, poison, device):
    """Nothing of the sequence before is seen, also by one shorter than a block that is then decoded on."""
    n = 2 * ratio + 1
    kv, score = tokens(n, ratio, device=device)
    weights, state = make(ratio, device=device)
    state.kv.fill_(poison)
    state.score.fill_(poison)
    out = in_chunks(kv, score, weights, state, [2] + [1] * (n - 2))
    assert rel_err(out[ratio - 1 :: ratio].cpu(), by_hand(kv, score, weights, ratio)) < EXACT


def test_padded_rows_write_nothing(device, looks_at_positions):
    for prefill in (True, False):
        kv, score = tokens(5, 4, device=device)
        weights, state = make(4, device=device)
        state.kv.fill_(7)
        state.score.fill_(8)
        out = feed(kv, score, weights, state, [-9, 2**31 - 1, 3, 7, 0], [-1, -1, -1, -(2**31), 99], prefill)
        assert out.eq(0).all()
        assert state.kv.eq(7).all()
        assert state.score.eq(8).all()


def test_padded_rows_behind_a_prefill(device, looks_at_positions):
    """A step padded to a bucket: the rest writes nothing, and the ring keeps the last real tokens."""
    kv, score = tokens(16, 4, device=device)
    weights, state = make(4, device=device)
    out = feed(kv, score, weights, state, [*range(11), 0, 11, 12, 400, -1], [1] * 11 + [-1] * 5, True)
    plain = make(4, device=device)[1]
    want = in_chunks(kv[:11], score[:11], weights, plain, [11], slot=1)
    assert same_bits(out[:11], want)
    assert out[11:].eq(0).all()
    assert same_bits(state.kv[1], plain.kv[1])
    assert state.kv[[0, 2]].isnan().all()


@pytest.mark.parametrize("ratio", [4, 128])
def test_float32_and_bfloat16(ratio, device):
    """What the product runs: float32 products and state, entries rounded to bfloat16."""
    kv, score = tokens(2 * ratio, ratio, d=512, device=device)
    weights, state = make(ratio, d=512, dtype=torch.float32, device=device)
    want = in_chunks(kv, score, weights, make(ratio, d=512, device=device)[1], [2 * ratio])
    positions, slots = list(range(2 * ratio)), [0] * 2 * ratio
    out = feed(kv.float(), score.float(), weights, state, positions, slots, True)
    assert out.dtype == torch.float32
    assert rel_err(out, want) < F32
    half = feed(kv.float(), score.float(), weights, state, positions, slots, True, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert rel_err(half, want) < BF16_STEP


def test_huge_scores_neither_overflow_nor_underflow(device):
    kv, score = tokens(8, 4, device=device)
    weights, state = make(4, device=device)
    want = in_chunks(kv, score, weights, state, [8])
    assert rel_err(in_chunks(kv, score + 1e4, weights, state, [8]), want) < 1e-9
    assert rel_err(in_chunks(kv, score - 1e4, weights, state, [8]), want) < 1e-9


def test_no_tokens(device):
    weights, state = make(4, device=device)
    kv = torch.empty(0, 2 * D, dtype=torch.float64, device=device)
    out = feed(kv, kv, weights, state, [], [], True)
    assert (out.shape, out.dtype) == ((0, D), torch.float64)


def test_rejects_bad_arguments():
    weights, state = make(4)
    kv, score = tokens(2, 4)

    def run(kv=kv, score=score, weights=weights, state=state, positions=(0, 1)):
        return feed(kv, score, weights, state, list(positions), [0, 0], True)

    with pytest.raises(ValueError, match=r"compress: kv must be \[T, 12\] float32 or float64 on cpu, got \[2, 6\] float64"):
        run(kv=kv[:, :6].contiguous())
    with pytest.raises(ValueError, match=r"compress: score must be \[2, 12\] float64 on cpu, got \[2, 12\] float32"):
        run(score=score.float())
    # the positional bias is float32 in the checkpoint
    with pytest.raises(ValueError, match=r"compress: ape must be \[4, 12\] float32 or float64 .* got \[4, 12\] bfloat16"):
        run(weights=CompressorWeights(weights.ape.bfloat16(), weights.norm))
    # four positions are too few for ratio 4
    with pytest.raises(
        ValueError, match=r"compress: state.kv must be \[slots, 8, 12\] float64 on cpu, got \[3, 4, 12\] float64"
    ):
        run(state=CompressorState(state.kv[:, :4].contiguous(), state.score[:, :4].contiguous(), 4))
    with pytest.raises(ValueError, match=r"compress: positions must be \[2\] int32 or int64 on cpu, got \[1\] int32"):
        run(positions=(0,))
