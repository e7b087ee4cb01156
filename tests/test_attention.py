import math

import pytest
import torch

from deepdecode.ops import attention
from deepdecode.ops.attention import sparse_attn_decode, sparse_attn_prefill, sparse_attn_ref, workspace_bytes
from deepdecode.ops.rows import PagedRows, allocate, read_rows, write_rows
from deepdecode.testing.numeric import rel_err, same_bits

EXACT = 1e-13  # float64 against float64, sums in another order
F32 = 2e-6  # float32 sums of up to 640 keys against float64
BF16_STEP = 2**-9 * 1.01  # one rounding of the output
KERNEL = 2.5e-3  # the kernel rounds its products' operands and its partial sums too


@pytest.fixture(params=[True, False], ids=["trimmed", "whole"])
def looks_at_lengths(request, monkeypatch):
    """Off the GPU the reference leaves out lanes that no length reaches; what a GPU runs is tested here too."""
    if not request.param:
        monkeypatch.setattr(attention, "readable", lambda tensor: False)


def filled(pages, page_size, fmt, device="cpu", width=512):
    rows = allocate(pages, page_size, fmt, width, device=device)
    write_rows(rows, torch.arange(rows.num_rows, device=device), torch.randn(rows.num_rows, width, device=device))
    return rows


def indices(T, K, rows, device="cpu"):
    return torch.randint(0, rows.num_rows, (T, K), dtype=torch.int32, device=device)


def lens(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def by_hand(q, sets, sink, scale):
    """One token at a time, from the formula; sets is [(rows [N, D] float64, indices, lens)]."""
    T, H, D = q.shape
    out = torch.zeros(T, H, D, dtype=torch.float64)
    lse = torch.full((T, H), -math.inf, dtype=torch.float64)
    for t in range(T):
        keys = [
            rows[i] for rows, index, length in sets for i in index[t].tolist()[: max(0, int(length[t]))] if 0 <= i < len(rows)
        ]
        if not keys:
            continue
        keys = torch.stack(keys)
        logits = q[t].double().cpu() @ keys.T * scale
        top = logits.max(dim=1).values
        weights = (logits - top[:, None]).exp()
        total = weights.sum(dim=1)
        lse[t] = top + total.log()
        if sink is not None:
            total = total + (sink.double().cpu() - top).exp()
        out[t] = weights @ keys / total[:, None]
    return out, lse


def everything(rows):
    return read_rows(rows, torch.arange(rows.num_rows, device=rows.data.device)).double().cpu()


def check(q, window, window_indices, window_lens, extra=None, extra_indices=None, extra_lens=None, *, sink=None, limit=F32):
    args = (q, window, window_indices, window_lens, extra, extra_indices, extra_lens)
    out, lse = sparse_attn_decode(*args, sink=sink, return_lse=True)
    sets = [(everything(window), window_indices, window_lens)]
    if extra is not None:
        sets.append((everything(extra), extra_indices, extra_lens))
    want, want_lse = by_hand(q, sets, sink, q.shape[2] ** -0.5)
    assert rel_err(out.cpu(), want) <= limit
    assert rel_err(lse.cpu(), want_lse) <= 1e-5
    assert out.dtype == q.dtype
    return out, lse


# heads: one, odd, of a rank, all; keys: none, one, odd, around 64 and 128; both sets and one
@pytest.mark.parametrize(
    ("T", "H", "K", "K2"), [(1, 1, 1, None), (1, 8, 128, 64), (3, 5, 63, 65), (2, 16, 129, 0), (4, 3, 0, 7), (1, 128, 2, 3)]
)
@pytest.mark.parametrize(("fmt", "fmt2"), [("fp8_584", "fp8_584"), ("bf16", "fp8_584"), ("f32", "bf16")])
def test_matches_the_formula(T, H, K, K2, fmt, fmt2, device, looks_at_lengths):
    window, extra = filled(3, 64, fmt, device), filled(9, 2, fmt2, device)
    q = torch.randn(T, H, 512, device=device)
    sink = torch.randn(H, device=device)
    second = () if K2 is None else (extra, indices(T, K2, extra, device), torch.randint(0, K2 + 1, (T,), device=device).int())
    full = torch.full((T,), K, dtype=torch.int32, device=device)
    check(q, window, indices(T, K, window, device), full, *second, sink=sink)
    check(q, window, indices(T, K, window, device), full // 2, *second)


def test_exact_in_float64(device):
    window, extra = filled(3, 64, "f64", device, 96), filled(9, 2, "f64", device, 96)
    q = torch.randn(3, 4, 96, dtype=torch.float64, device=device)
    args = (q, window, indices(3, 30, window, device), lens(30, 7, 0, device=device))
    check(
        *args,
        extra,
        indices(3, 9, extra, device),
        lens(9, 0, 0, device=device),
        sink=torch.randn(4).double().to(device),
        limit=EXACT,
    )


def test_bfloat16_query_rounds_once(device):
    window = filled(3, 64, "fp8_584", device)
    q = torch.randn(2, 8, 512, device=device).bfloat16()
    limit = BF16_STEP if device.type == "cpu" else KERNEL
    check(q, window, indices(2, 100, window, device), lens(100, 50, device=device), limit=limit)


@pytest.mark.parametrize("page_size", [64, 128, 256])
@pytest.mark.parametrize("page_size2", [1, 2, 32, 64, 128])
def test_any_pair_of_page_sizes(page_size, page_size2, device):
    """The same logical rows give the same bits, whatever the pages."""
    values = torch.randn(2, 256, 512, device=device)
    where = torch.arange(256, device=device)
    outs = []
    for first, second in ((page_size, page_size2), (16, 16)):
        caches = [allocate(256 // P, P, "fp8_584", device=device) for P in (first, second)]
        for cache, v in zip(caches, values, strict=True):
            write_rows(cache, where, v)
        torch.manual_seed(1)
        q, index = torch.randn(2, 4, 512, device=device), torch.randint(0, 256, (2, 2, 40), device=device).int()
        full = lens(40, 33, device=device)
        outs.append(sparse_attn_decode(q, caches[0], index[0], full, caches[1], index[1], full))
    assert same_bits(*outs)


@pytest.mark.parametrize("sink", [True, False])
def test_a_token_without_a_key(sink, device, looks_at_lengths):
    """out 0 and lse -inf, between two normal tokens, and where no token has a key."""
    window, extra = filled(2, 64, "fp8_584", device), filled(2, 2, "fp8_584", device)
    q = torch.randn(4, 8, 512, device=device)
    index, index2 = indices(4, 20, window, device), indices(4, 5, extra, device)
    index[2] = -1
    sink = torch.randn(8, device=device) if sink else None
    out, lse = check(
        q, window, index, lens(20, 0, 20, 1, device=device), extra, index2, lens(5, 0, 0, 0, device=device), sink=sink
    )
    assert out[1:3].eq(0).all()
    assert lse[1:3].eq(-math.inf).all()
    nothing = torch.zeros(4, dtype=torch.int32, device=device)
    out, lse = sparse_attn_decode(q, window, index, nothing, extra, index2, nothing, sink=sink, return_lse=True)
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()
    out, lse = sparse_attn_decode(q, window, index[:, :0].contiguous(), nothing, sink=sink, return_lse=True)
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()


@pytest.mark.parametrize("fmt", ["fp8_584", "bf16", "f32"])
def test_an_extra_set_without_lanes_is_as_none(fmt, device):
    """Whatever its format and pages, and whatever the lengths say."""
    window, q = filled(2, 64, "fp8_584", device), torch.randn(2, 8, 512, device=device)
    args = (q, window, indices(2, 20, window, device), lens(20, 3, device=device))
    extra = allocate(0, 3, fmt, device=device)
    empty = torch.empty(2, 0, dtype=torch.int32, device=device)
    got = sparse_attn_decode(*args, extra, empty, lens(5, -1, device=device), return_lse=True)
    for one, other in zip(got, sparse_attn_decode(*args, return_lse=True), strict=True):
        assert same_bits(one, other)


def test_no_tokens(device):
    window = filled(2, 64, "fp8_584", device)
    q = torch.empty(0, 8, 512, device=device).bfloat16()
    out, lse = sparse_attn_decode(q, window, indices(0, 5, window, device), lens(device=device), return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((0, 8, 512), torch.bfloat16, (0, 8), torch.float32)


def test_garbage_in_one_row_touches_no_other(device, looks_at_lengths):
    """Stale or wild lengths and indices count as clamped and as -1."""
    window = filled(2, 64, "fp8_584", device)
    q = torch.randn(6, 8, 512, device=device)
    index = indices(6, 20, window, device)
    length = lens(20, 20, 20, 5, 0, 7, device=device)
    clean = sparse_attn_decode(q, window, index, length)
    wild = index.clone()
    wild[0] = torch.randint(-(2**31), 2**31 - 1, (20,)).to(device)
    wild[1, ::2] = 128
    wild[3, 5:] = 2**31 - 1
    length = length.clone()
    length[0], length[2], length[4] = 2**31 - 1, 21, -(2**31)
    out, _ = check(q, window, wild, length)
    assert same_bits(out[2:], clean[2:])


def test_a_row_named_twice_counts_twice(device):
    window = filled(1, 64, "f32", device)
    q = torch.randn(1, 2, 512, device=device)
    once = sparse_attn_decode(q, window, lens(3, 9, device=device)[None], lens(2, device=device), return_lse=True)
    twice = sparse_attn_decode(q, window, lens(3, 9, 3, 9, device=device)[None], lens(4, device=device), return_lse=True)
    assert rel_err(twice[0], once[0]) < F32
    assert torch.allclose(twice[1], once[1] + math.log(2))


def test_reads_no_row_it_does_not_attend(device):
    """NaN in every row that no live lane names, in lanes past the length among them."""
    window = filled(2, 64, "fp8_584", device)
    q, index = torch.randn(2, 4, 512, device=device), indices(2, 12, window, device) // 2
    index[:, 6:] += 64
    length = lens(6, 0, device=device)
    clean = sparse_attn_decode(q, window, index, length)
    window.data[1] = 255
    rest = torch.tensor([row for row in range(64) if row not in index[0, :6].tolist()], device=device)
    write_rows(window, rest, torch.full((len(rest), 512), math.nan, device=device))
    assert same_bits(sparse_attn_decode(q, window, index, length), clean)
    write_rows(window, index[0, 2:3], torch.full((1, 512), math.nan, device=device))
    assert sparse_attn_decode(q, window, index, length)[0].isnan().all()


def test_sees_a_page_that_changed_since_the_last_call(device):
    """Nothing of a cache is kept between calls."""
    window = filled(1, 64, "fp8_584", device)
    q, index = torch.randn(1, 4, 512, device=device), indices(1, 12, window, device)
    check(q, window, index, lens(12, device=device))
    write_rows(window, index[0, 3:4], torch.randn(1, 512, device=device) * 9)
    check(q, window, index, lens(12, device=device))


def test_heads_are_independent_of_their_rank(device):
    """Ranks with their heads and their sinks, side by side, are the whole."""
    window = filled(2, 64, "fp8_584", device)
    q, sink = torch.randn(3, 16, 512, device=device), torch.arange(-8.0, 8.0, device=device)
    index, length = indices(3, 40, window, device), lens(40, 9, 0, device=device)
    whole = sparse_attn_decode(q, window, index, length, sink=sink)
    parts = [
        sparse_attn_decode(q[:, h : h + 2].contiguous(), window, index, length, sink=sink[h : h + 2]) for h in range(0, 16, 2)
    ]
    assert rel_err(torch.cat(parts, dim=1), whole) < F32


@pytest.mark.parametrize("value", [-math.inf, -200.0, 200.0, math.inf])
def test_extreme_sinks(value, device):
    window = filled(1, 64, "f32", device)
    q, index, length = torch.randn(1, 2, 512, device=device), indices(1, 9, window, device), lens(9, device=device)
    sink = torch.tensor([value, 0.5], device=device)
    out = sparse_attn_decode(q, window, index, length, sink=sink)
    plain, lse = sparse_attn_decode(q, window, index, length, return_lse=True)
    weight = (lse - sink).sigmoid()[..., None]
    assert weight[0, 0] in (0, 1) or value == 200.0
    assert rel_err(out, plain * weight) < F32


@pytest.mark.parametrize(("rows", "query"), [(2.0**-40, 1.0), (2.0**40, 2.0**-40), (1.0, 1e4)])
def test_extreme_magnitudes(rows, query, device):
    window = allocate(1, 64, "bf16", device=device)
    write_rows(window, torch.arange(64, device=device), torch.randn(64, 512, device=device) * rows)
    q, index = torch.randn(1, 4, 512, device=device) * query, indices(1, 30, window, device)
    # logits of 1e4 are exact to 1e-3 in float32
    check(q, window, index, lens(30, device=device), limit=2e-4)


def test_two_halves_merge_to_the_whole(device):
    """Log-sum-exp is what context-parallel callers merge by."""
    window, extra = filled(2, 64, "f64", device), filled(2, 64, "f64", device)
    q, sink = torch.randn(2, 4, 512, dtype=torch.float64, device=device), torch.randn(4, dtype=torch.float64, device=device)
    sets = [(cache, indices(2, 20, cache, device), lens(20, 3, device=device)) for cache in (window, extra)]
    (out1, lse1), (out2, lse2) = (sparse_attn_decode(q, *s, return_lse=True) for s in sets)
    whole, lse = sparse_attn_decode(q, *sets[0], *sets[1], sink=sink, return_lse=True)
    merged = torch.logaddexp(lse1, lse2)
    out = (out1 * (lse1 - merged).exp()[..., None] + out2 * (lse2 - merged).exp()[..., None]) * (merged - sink).sigmoid()[
        ..., None
    ]
    assert rel_err(lse, merged) < EXACT
    assert rel_err(whole, out) < EXACT


def test_a_row_in_a_batch_is_the_row_alone(device):
    window, extra = filled(3, 64, "fp8_584", device), filled(9, 2, "fp8_584", device)
    q, sink = torch.randn(7, 8, 512, device=device), torch.randn(8, device=device)
    index, index2 = indices(7, 128, window, device), indices(7, 30, extra, device)
    length, length2 = torch.randint(0, 129, (7,), device=device).int(), torch.randint(0, 31, (7,), device=device).int()
    batch, lse = sparse_attn_decode(q, window, index, length, extra, index2, length2, sink=sink, return_lse=True)
    for t in range(7):
        part = slice(t, t + 1)
        args = (q[part], window, index[part], length[part], extra, index2[part], length2[part])
        out, alone_lse = sparse_attn_decode(*args, sink=sink, return_lse=True)
        assert rel_err(out[0], batch[t]) < F32
        assert rel_err(alone_lse[0], lse[t]) < F32


def test_prefill_takes_many_tokens_in_bounded_memory(device, monkeypatch):
    window = filled(3, 64, "fp8_584", device)
    q, index = torch.randn(50, 2, 512, device=device), indices(50, 40, window, device)
    length = torch.randint(0, 41, (50,), device=device).int()
    whole = sparse_attn_ref(q, window, index, length, scale=0.1)[0]
    gathered = []
    # on a GPU a chunk holds so many times the bytes
    chunks = 1 if device.type == "cpu" else attention._GPU_CHUNKS
    monkeypatch.setattr(attention, "_CHUNK_BYTES", -(-7 * 40 * 2048 // chunks))
    monkeypatch.setattr(attention, "read_rows", lambda cache, rows: gathered.append(rows.numel()) or read_rows(cache, rows))
    assert rel_err(sparse_attn_prefill(q, window, index, length, scale=0.1), whole) < F32
    assert max(gathered) <= 7 * 40
    assert len(gathered) == 8


def test_writes_into_out(device):
    window = filled(1, 64, "fp8_584", device)
    q, index, length = torch.randn(2, 4, 512, device=device), indices(2, 12, window, device), lens(12, 0, device=device)
    out = torch.full_like(q, math.nan)
    need = workspace_bytes(2, 4, 12, device=torch.device(device))
    workspace = torch.empty(need, dtype=torch.uint8, device=device)
    got = sparse_attn_decode(q, window, index, length, out=out, workspace=workspace, deterministic=True)
    assert got is out
    assert same_bits(out, sparse_attn_decode(q, window, index, length))


def test_pages_past_two_to_the_31_bytes(device):
    """A page offset past 2**31 does not fit 32 bits: 2200 pages of 1 MiB, of which the last is read."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    data = torch.empty(2200 * 2**20, dtype=torch.uint8, device=device).view(2200, 2**20)
    far, near = PagedRows(data, 64, "fp8_584"), filled(1, 64, "fp8_584", device)
    values = torch.randn(64, 512, device=device)
    write_rows(far, torch.arange(2199 * 64, 2200 * 64, device=device), values)
    write_rows(near, torch.arange(64, device=device), values)
    q, index, length = torch.randn(1, 2, 512, device=device), indices(1, 20, near, device), lens(20, device=device)
    want = sparse_attn_decode(q, near, index, length)
    assert same_bits(sparse_attn_decode(q, far, index + 2199 * 64, length), want)


def arguments(**changes):
    window, extra = filled(2, 4, "fp8_584"), filled(2, 2, "bf16")
    args = {
        "q": torch.zeros(3, 4, 512),
        "window": window,
        "window_indices": torch.zeros(3, 5, dtype=torch.int32),
        "window_lens": lens(5, 5, 5),
        "extra": extra,
        "extra_indices": torch.zeros(3, 2, dtype=torch.int32),
        "extra_lens": lens(2, 2, 2),
    }
    return args | changes


@pytest.mark.parametrize("op", [sparse_attn_decode, sparse_attn_prefill])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 4, 512).half()}, r"q must be \[T, H, 512\] bfloat16 or float32 or float64 .* got .* float16"),
        ({"q": torch.zeros(3, 4, 64)}, r"q must be \[T, H, 512\]"),
        ({"q": torch.zeros(3, 129, 512)}, "q must have 1 to 128 heads, got 129"),
        ({"q": torch.zeros(4, 3, 512).transpose(0, 1)}, "q must be contiguous"),
        ({"window_indices": torch.zeros(3, 5)}, r"window_indices must be \[3, K\] int32 on cpu, got \[3, 5\] float32"),
        ({"window_indices": torch.zeros(2, 5, dtype=torch.int32)}, r"window_indices must be \[3, K\] int32"),
        (
            {"extra_indices": torch.zeros(3, 4, dtype=torch.int32)[:, :2]},
            r"extra_indices must be contiguous, got strides \(4, 1\)",
        ),
        ({"window_lens": lens(5, 5)}, r"window_lens must be \[3\] int32 on cpu, got \[2\] int32"),
        ({"extra_lens": None}, "extra, extra_indices and extra_lens must be given together"),
        ({"extra": filled(1, 2, "f32", width=64)}, "extra must hold rows of 512 on cpu, got rows of 64"),
        ({"sink": torch.zeros(5)}, r"sink must be \[4\] float32 or float64 on cpu, got \[5\] float32"),
        ({"sink": torch.zeros(4).bfloat16()}, r"sink must be \[4\] float32 or float64 .* got \[4\] bfloat16"),
        ({"out": torch.zeros(3, 4, 512).bfloat16()}, r"out must be \[3, 4, 512\] float32 on cpu, got .* bfloat16"),
        ({"workspace": torch.zeros(9)}, r"workspace must be \[bytes\] uint8 on cpu, got \[9\] float32"),
        ({"q": [[[0.0]]]}, r"q must be \[T, H, 512\] bfloat16 or float32 or float64 on cpu, got list"),
        ({"window_indices": None}, r"window_indices must be \[3, K\] int32 on cpu, got NoneType"),
        ({"window": torch.zeros(2, 4, 512)}, "window must be PagedRows, got Tensor"),
        ({"window": None}, "window must be PagedRows, got NoneType"),
        ({"extra": torch.zeros(2, 4, 512)}, "extra must be PagedRows, got Tensor"),
        ({"scale": math.nan}, "scale must be a finite number, got nan"),
        ({"scale": -math.inf}, "scale must be a finite number, got -inf"),
        ({"scale": torch.tensor(0.5)}, r"scale must be a finite number, got tensor\(0.5000\)"),
    ],
)
def test_rejects_bad_arguments(op, changes, message):
    """A view that is not contiguous is refused in words, too."""
    with pytest.raises(ValueError, match=f"{op.__name__}: {message}"):
        op(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_lens": lens(5, 6, 5)}, "window_lens must be 0 to 5, got 6 at row 1"),
        ({"window_lens": lens(5, 5, -1)}, "window_lens must be 0 to 5, got -1 at row 2"),
        (
            {"window_indices": lens(0, 1, 8, 3, 4).repeat(3, 1)},
            "window_indices must be -1 to 7, got 8 at row 0, lane 2",
        ),
        (
            {"extra_indices": torch.tensor([[0, 0], [-1, -2], [0, 0]]).int()},
            "extra_indices must be -1 to 3, got -2 at row 1, lane 1",
        ),
    ],
)
def test_check_names_row_and_lane(changes, message, monkeypatch):
    sparse_attn_decode(**arguments(**changes))
    monkeypatch.setenv("DEEPDECODE_CHECK", "1")
    sparse_attn_decode(**arguments())
    with pytest.raises(ValueError, match=f"sparse_attn_decode: {message}"):
        sparse_attn_decode(**arguments(**changes))


def test_check_looks_at_live_lanes_only(monkeypatch):
    dead = arguments(window_lens=lens(2, 0, 2), window_indices=lens(0, -1, 99, 99, 99).repeat(3, 1))
    want = sparse_attn_decode(**dead)
    monkeypatch.setenv("DEEPDECODE_CHECK", "1")
    assert torch.equal(sparse_attn_decode(**dead), want)
