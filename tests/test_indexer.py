import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from deepdecode.ops import indexer
from deepdecode.ops.attention import sparse_attn_decode
from deepdecode.ops.indexer import index_logits_ref, index_topk
from deepdecode.ops.quant import hadamard
from deepdecode.ops.rows import PagedRows, allocate, read_rows, write_rows
from deepdecode.testing.numeric import rel_err, same_bits

F32 = 2e-6
# two E4M3 roundings of 128 products each
FP8_SCORE = 0.05


@pytest.fixture(params=[True, False], ids=["looks", "blind"])
def looks_at_lengths(request, monkeypatch):
    """Off the GPU the reference scores only what some token sees; what a GPU runs is tested here too."""
    if not request.param:
        monkeypatch.setattr(indexer, "readable", lambda tensor: False)


def ints(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def cache(pages, page_size, fmt, device="cpu", keys=None):
    rows = allocate(pages, page_size, fmt, 128, device=device)
    keys = torch.randn(rows.num_rows, 128, device=device) if keys is None else keys
    write_rows(rows, torch.arange(rows.num_rows, device=device), keys)
    return rows


def query(T, heads, device="cpu", dtype=torch.float32):
    return torch.randn(T, heads, 128, device=device, dtype=dtype), torch.randn(T, heads, device=device, dtype=dtype)


def by_hand(q, w, keys, table, slots, lens, topk):
    """Physical rows each token chooses: sorted by score, then by entry; a list a token."""
    every = read_rows(keys, torch.arange(keys.num_rows, device=keys.data.device)).double().cpu()
    out = []
    for t in range(len(slots)):
        slot, scored = int(slots[t]), []
        entries = 0 if not 0 <= slot < len(table) else min(max(0, int(lens[t])), table.shape[1] * keys.page_size)
        for n in range(entries):
            page = int(table[slot, n // keys.page_size])
            if 0 <= page < len(keys.data):
                row = page * keys.page_size + n % keys.page_size
                score = (w[t].double().cpu() * (q[t].double().cpu() @ every[row]).relu()).sum()
                scored.append((-float(score), n, row))
        out.append([row for _, n, row in sorted(sorted(scored)[:topk], key=lambda item: item[1])])
    return out


def check(q, w, keys, table, slots, lens, topk):
    indices, lengths = index_topk(q, w, keys, table, slots, lens, topk)
    want = by_hand(q, w, keys, table, slots, lens, topk)
    assert indices.shape == (len(slots), topk)
    assert (indices.dtype, lengths.dtype) == (torch.int32, torch.int32)
    assert lengths.tolist() == [len(rows) for rows in want]
    assert indices.tolist() == [rows + [-1] * (topk - len(rows)) for rows in want]
    return indices, lengths


def test_golden_scores():
    """ReLU for each head, then a sum with raw, signed weights. 3 tokens, 2 heads, 8 keys, worked by hand."""
    # key n is (n, 1, 0, ...), so head (a, b, 0, ...) has a dot of a * n + b with it
    keys = torch.zeros(8, 128)
    keys[:, 0], keys[:, 1] = torch.arange(8.0), 1.0
    q = torch.zeros(3, 2, 128)
    q[:, :, :2] = torch.tensor([[[1.0, 0], [-1, 3]], [[2, -5], [0, 1]], [[-1, 0], [-2, 0]]])
    w = torch.tensor([[1.0, 2.0], [1.0, -3.0], [5.0, 7.0]])
    want = [
        # n + 2 * max(0, 3 - n)
        [6, 5, 4, 3, 4, 5, 6, 7],
        # max(0, 2n - 5) - 3
        [-3, -3, -3, -2, 0, 2, 4, 6],
        # both heads are negative or 0 everywhere
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert index_logits_ref(q, w, keys).tolist() == want
    rows = cache(2, 4, "f32", keys=keys)
    args = (q, w, rows, ints(1, 0)[None], ints(0, 0, 0), ints(8, 8, 8))
    # the table swaps the pages, so keys 4..7 are entries 0..3; equal scores go to the lower entry
    assert index_topk(*args, 3)[0].tolist() == [[6, 7, 0], [5, 6, 7], [4, 5, 6]]
    assert index_topk(*args, 4)[0].tolist() == [[5, 6, 7, 0], [4, 5, 6, 7], [4, 5, 6, 7]]
    # key 1 (entry 5) and key 5 (entry 1) both score 5, keys 2 and 4 both 4
    assert index_topk(*args, 6)[0].tolist()[0] == [4, 5, 6, 7, 0, 1]


# one and odd sizes, V4-Flash's page, fewer and more entries than topk; several formats
@pytest.mark.parametrize(("T", "heads", "page_size", "pages", "topk"), [(1, 1, 1, 5, 2), (5, 3, 16, 7, 9), (4, 64, 64, 5, 512)])
@pytest.mark.parametrize("fmt", ["fp8_132", "bf16", "f32"])
def test_matches_a_sort(T, heads, page_size, pages, topk, fmt, device, looks_at_lengths):
    keys = cache(pages, page_size, fmt, device)
    table = torch.stack([torch.randperm(pages), torch.randperm(pages)]).int().to(device)
    slots = torch.randint(0, 2, (T,), dtype=torch.int32, device=device)
    lens = torch.randint(0, pages * page_size + 1, (T,), dtype=torch.int32, device=device)
    lens[0] = pages * page_size
    check(*query(T, heads, device), keys, table, slots, lens, topk)
    # a prefill step: every token on one slot
    check(*query(T, heads, device), keys, table, torch.ones_like(slots), lens, topk)


@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 64, 128, 256])
def test_any_page_size(page_size, device):
    """The same entries, whatever the pages."""
    values, (q, w) = torch.randn(256, 128, device=device), query(2, 4, device)
    keys = cache(256 // page_size, page_size, "fp8_132", device, values)
    table = torch.arange(256 // page_size, dtype=torch.int32, device=device)[None]
    got = index_topk(q, w, keys, table, ints(0, 0, device=device), ints(256, 100, device=device), 50)
    whole = cache(1, 256, "fp8_132", device, values)
    want = index_topk(q, w, whole, table[:, :1] * 0, ints(0, 0, device=device), ints(256, 100, device=device), 50)
    assert torch.equal(got[0], want[0])
    assert got[1].tolist() == [50, 50]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_corners(data):
    """Ties everywhere, holes in the table, pages outside the cache, wild slots and lengths."""
    page_size, pages, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    T, topk = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    draw = lambda low, high, n: data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n))  # noqa: E731
    # few distinct values: most scores are equal, many are 0
    keys = torch.zeros(pages * page_size, 128)
    keys[:, 0] = torch.tensor(draw(-1, 2, pages * page_size)).float()
    q = torch.zeros(T, 2, 128)
    q[..., 0] = torch.tensor(draw(-1, 1, 2 * T)).view(T, 2).float()
    w = torch.tensor(draw(-1, 2, 2 * T)).view(T, 2).float()
    table = ints(*draw(-1, pages, 2 * width)).view(2, width)
    slots, lens = ints(*draw(-1, 2, T)), ints(*draw(-2, width * page_size + 2, T))
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(indexer, "readable", lambda tensor: False)
        patch.setattr(indexer, "_CHUNK_BYTES", data.draw(st.sampled_from([1, 2000, 32 << 20])))
        check(q, w, cache(pages, page_size, "f32", keys=keys), table, slots, lens, topk)


@pytest.mark.parametrize("T", [1, 8, 31, 32, 33, 64, 128, 250, 256])
def test_zero_lengths(T, device):
    """No token sees an entry, as when a graph is captured with dummy lengths."""
    keys = cache(2, 64, "fp8_132", device)
    table, zeros = ints(0, 1, device=device)[None], torch.zeros(T, dtype=torch.int32, device=device)
    indices, lengths = index_topk(*query(T, 4, device), keys, table, zeros, zeros, 8)
    assert indices.eq(-1).all()
    assert lengths.eq(0).all()


def test_no_tokens(device):
    keys = cache(2, 64, "fp8_132", device)
    none, zero = ints(device=device), ints(0, device=device)
    indices, lengths = index_topk(*query(0, 4, device), keys, ints(0, 1, device=device)[None], none, none, 8)
    assert (indices.shape, lengths.shape) == ((0, 8), (0,))
    indices, lengths = index_topk(*query(1, 4, device), keys, none.view(1, 0), zero, zero + 1, 8)
    assert (indices.tolist(), lengths.tolist()) == ([[-1] * 8], [0])


def test_reads_no_key_past_the_length(device, looks_at_lengths):
    """What stands behind the visible entries, NaN here, takes no place."""
    values = torch.randn(128, 128, device=device)
    keys = cache(2, 64, "fp8_132", device, values)
    slots, lens = ints(0, 0, 0, device=device), ints(70, 20, 64, device=device)
    args = (*query(3, 4, device), keys, ints(0, 1, device=device)[None], slots, lens, 16)
    clean = index_topk(*args)
    keys.data.fill_(255)
    write_rows(keys, torch.arange(70, device=device), values[:70])
    dirty = index_topk(*args)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])


def test_a_nan_score_is_chosen(device):
    keys = cache(1, 64, "f32", device)
    keys.data[0, 40, 3] = math.nan
    slots, lens = ints(0, 0, device=device), ints(64, 40, device=device)
    indices, _ = index_topk(*query(2, 4, device), keys, ints(0, device=device)[None], slots, lens, 5)
    assert 40 in indices[0]
    assert 40 not in indices[1]


def test_an_entry_whose_score_is_minus_infinity_is_still_an_entry(device):
    """It comes last among the visible, and before what is not visible."""
    keys = cache(1, 64, "f32", device)
    keys.data[0, 2] = math.inf
    q, w = torch.ones(2, 1, 128, device=device), torch.full((2, 1), -1.0, device=device)
    slots, lens = ints(0, 0, device=device), ints(64, 4, device=device)
    indices, lengths = index_topk(q, w, keys, ints(0, device=device)[None], slots, lens, 5)
    assert 2 not in indices[0]
    assert indices[1].tolist() == [0, 1, 2, 3, -1]
    assert lengths.tolist() == [5, 4]


def test_the_number_chosen_is_the_caller_s(device):
    """V4-Flash chooses 512, V4-Pro 1024; nothing here knows either."""
    keys = cache(33, 64, "fp8_132", device)
    table, zero = torch.arange(33, dtype=torch.int32, device=device)[None], ints(0, device=device)
    for topk in (511, 512, 1024):
        indices, lengths = index_topk(*query(1, 2, device), keys, table, zero, ints(33 * 64, device=device), topk)
        assert indices.shape == (1, topk)
        assert (int(lengths), len(indices.unique())) == (topk, topk)


def test_padded_choices_suit_attention(device):
    """100 tokens have 25 entries; the list padded with -1 to 512 goes to the consumer as it is."""
    keys, rows = cache(1, 64, "fp8_132", device), allocate(1, 64, "fp8_584", device=device)
    write_rows(rows, torch.arange(64, device=device), torch.randn(64, 512, device=device))
    q, one = torch.randn(1, 4, 512, device=device), ints(0, device=device)
    indices, lengths = index_topk(*query(1, 4, device), keys, one[None], one, ints(25, device=device), 512)
    out = sparse_attn_decode(q, rows, ints(60, device=device)[None], one + 1, rows, indices, lengths)
    every = torch.arange(25, dtype=torch.int32, device=device)[None]
    assert rel_err(out, sparse_attn_decode(q, rows, ints(60, device=device)[None], one + 1, rows, every, one + 25)) < F32
    # also with a length that says all 512 lanes count
    assert rel_err(sparse_attn_decode(q, rows, ints(60, device=device)[None], one + 1, rows, indices, one + 512), out) < F32


def fp8_query(q, w):
    scale = q.abs().amax(dim=-1) / 448
    return (q / scale[..., None]).to(torch.float8_e4m3fn), w * scale


def test_hadamard_on_both_sides_or_on_neither(device):
    """Rotated query and rotated keys score as the plain ones do; one side alone is noise."""
    values, (q, w) = torch.randn(256, 128, device=device), query(3, 16, device)
    plain = index_logits_ref(q, w, values)
    keys = read_rows(cache(4, 64, "fp8_132", device, hadamard(values)), torch.arange(256, device=device))
    rotated, folded = fp8_query(hadamard(q), w)
    assert rel_err(index_logits_ref(rotated.float(), folded, keys), plain) < FP8_SCORE
    assert rel_err(index_logits_ref(q, w, keys), plain) > 0.5


def test_finds_the_needle(device):
    """Of 8192 keys the one that equals the query ranks first, through rotation and FP8 on both sides."""
    values = torch.randn(8192, 128, device=device)
    q, w = values[5000].expand(1, 8, 128).contiguous(), torch.ones(1, 8, device=device)
    keys = cache(128, 64, "fp8_132", device, hadamard(values))
    table, zero = torch.arange(128, dtype=torch.int32, device=device)[None], ints(0, device=device)
    indices, _ = index_topk(*fp8_query(hadamard(q), w), keys, table, zero, ints(8192, device=device), 1)
    assert indices.tolist() == [[5000]]


def test_a_row_in_a_batch_is_the_row_alone(device):
    """Whom else a step serves does not change what is chosen."""
    keys = cache(40, 64, "fp8_132", device)
    table = torch.randperm(40).view(2, 20).int().to(device)
    q, w = query(9, 8, device)
    slots, lens = torch.arange(9, device=device).int() % 2, torch.randint(0, 1281, (9,), device=device).int()
    batch = index_topk(q, w, keys, table, slots, lens, 64)
    for t in range(9):
        part = slice(t, t + 1)
        alone = index_topk(q[part], w[part], keys, table, slots[part], lens[part], 64)
        assert torch.equal(alone[0][0], batch[0][t])
        assert alone[1][0] == batch[1][t]


class Largest(TorchDispatchMode):
    """The most bytes that one tensor made inside has."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # these make views that overlap themselves: no memory of their own
        if isinstance(out, torch.Tensor) and "as_strided" not in str(func) and "expand" not in str(func):
            self.bytes = max(self.bytes, out.nbytes)
        return out


@pytest.mark.parametrize("shared", [True, False])
def test_memory_does_not_grow_with_tokens_times_entries(shared, monkeypatch):
    """Neither scores of each head, [T, heads, N], nor keys of each token, [T, N, 128], nor all scores."""
    limit = 1 << 17
    monkeypatch.setattr(indexer, "_CHUNK_BYTES", limit)
    T, heads, N = 64, 2, 1024
    keys = cache(16, 64, "fp8_132")
    table = torch.arange(16, dtype=torch.int32).expand(2, 16).contiguous()
    slots = torch.zeros(T, dtype=torch.int32) if shared else (torch.arange(T) % 2).int()
    (q, w), lens = query(T, heads), torch.full((T,), N, dtype=torch.int32)
    # all positive: no ties at 0 among the best
    w = w.abs()
    with Largest() as largest:
        indices, lengths = index_topk(q, w, keys, table, slots, lens, 32)
    assert limit / 8 < largest.bytes <= limit < T * N * 4
    assert lengths.eq(32).all()
    want = index_logits_ref(q, w, read_rows(keys, torch.arange(N))).topk(32, dim=1).indices.sort(dim=1).values
    # all but near-ties, which sums in another order may swap
    assert (indices == want).float().mean() > 0.99


def test_keys_past_two_to_the_31_bytes(device):
    """A page offset past 2**31 does not fit 32 bits: 2200 pages of 1 MiB, of which the last is read."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    data = torch.empty(2200 * 2**20, dtype=torch.uint8, device=device).view(2200, 2**20)
    far, values, (q, w) = PagedRows(data, 64, "fp8_132"), torch.randn(64, 128, device=device), query(1, 4, device)
    write_rows(far, torch.arange(2199 * 64, 2200 * 64, device=device), values)
    zero, length = ints(0, device=device), ints(64, device=device)
    want = index_topk(q, w, cache(1, 64, "fp8_132", device, values), zero[None], zero, length, 9)[0]
    got = index_topk(q, w, far, ints(2199, device=device)[None], zero, length, 9)[0]
    assert same_bits(got - 2199 * 64, want)


def test_float64(device):
    keys = cache(3, 16, "f64", device, torch.randn(48, 128, dtype=torch.float64, device=device))
    zeros, lens = ints(0, 0, device=device), ints(48, 30, device=device)
    check(*query(2, 4, device, torch.float64), keys, ints(2, 0, 1, device=device)[None], zeros, lens, 11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_q": torch.zeros(2, 4, 64)}, r"index_q must be \[T, heads, 128\] bfloat16 or .* got \[2, 4, 64\] float32"),
        ({"index_weights": torch.zeros(2, 4).bfloat16()}, r"index_weights must be \[2, 4\] float32 or float64 .* bfloat16"),
        ({"block_tables": torch.zeros(1, 2)}, r"block_tables must be \[slots, pages\] int32 on cpu, got \[1, 2\] float32"),
        ({"slots": ints(0)}, r"slots must be \[2\] int32 on cpu, got \[1\] int32"),
        ({"lens": torch.ones(2).long()}, r"lens must be \[2\] int32 on cpu, got \[2\] int64"),
        ({"lens": torch.ones(4).int()[::2]}, r"lens must be contiguous, got strides \(2,\)"),
        ({"topk": 0}, "topk must be >= 1, got 0"),
    ],
)
def test_rejects_bad_arguments(changes, message):
    args = {
        "index_q": torch.zeros(2, 4, 128),
        "index_weights": torch.zeros(2, 4),
        "keys": cache(2, 4, "fp8_132"),
        "block_tables": ints(0, 1)[None],
        "slots": ints(0, 0),
        "lens": ints(1, 1),
        "topk": 3,
    }
    index_topk(**args)
    with pytest.raises(ValueError, match=f"index_topk: {message}"):
        index_topk(**args | changes)


def test_entries_by_number():
    """The same entries under their numbers in the sequence: through the table they are the physical rows."""
    keys, (q, w) = cache(5, 16, "f32"), query(3, 4)
    table = ints(3, 0, 4, 2).view(1, 4)
    args = (q, w, keys, table, ints(0, 0, 1), ints(64, 20, 64), 24)
    rows, lengths = index_topk(*args)
    numbers, number_lengths = index_topk(*args, logical=True)
    assert number_lengths.tolist() == lengths.tolist() == [24, 20, 0]
    assert numbers[0].tolist() == sorted(numbers[0].tolist()) and numbers[1, :20].tolist() == list(range(20))
    through = torch.where(numbers >= 0, table[0, numbers // 16] * 16 + numbers % 16, -1)
    assert through.tolist() == rows.tolist() != numbers.tolist()


@pytest.mark.filterwarnings("ignore")  # torch.compile's own deprecations
def test_is_an_op_that_torch_can_trace():
    keys, zeros, lens = cache(3, 16, "fp8_132"), ints(0, 0), ints(48, 30)
    (q, w), table = query(2, 4), ints(2, 0, 1)[None]
    torch.library.opcheck(
        torch.ops.deepdecode.index_topk.default, (q, w, keys.data, 16, "fp8_132", table, zeros, lens, 11, False)
    )

    def step(q):
        indices, lengths = index_topk(q * 2, w, keys, table, zeros, lens, 11)
        return indices + 1, lengths

    for got, want in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(q), step(q), strict=True):
        assert same_bits(got, want)
