"""Sparse attention on a GPU: the compiled kernels through the op, in graphs, on streams, beside garbage."""

import os
import random
import re
import threading
from dataclasses import replace

import pytest
import torch

from deepdecode.ops.attention import sparse_attn_decode, sparse_attn_ref, sparse_attn_turned, workspace_bytes
from deepdecode.ops.rope import rope_ref
from deepdecode.ops.rows import PagedRows, allocate, read_rows, write_rows
from deepdecode.testing.inputs import AttentionInputs, attention_corners, attention_inputs
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

# the contract's bounds: over the tensor, and in the worst (token, head) row
MAX_ERR, MAX_ROW_ERR = 2.5e-3, 5e-3
LSE_ERR = 1e-5
CORNERS = attention_corners("cuda")


@pytest.fixture(autouse=True)
def _kernels_only(monkeypatch):
    monkeypatch.setenv("DEEPDECODE_STRICT", "1")


def run(inputs: AttentionInputs, **options):
    return sparse_attn_decode(*inputs.args(), sink=inputs.sink, scale=inputs.scale, **options)


def check(inputs: AttentionInputs, **options) -> None:
    sink = None if inputs.sink is None else inputs.sink.double()
    q, *rest = inputs.args()
    want, want_lse = sparse_attn_ref(q.double(), *rest, sink=sink, scale=inputs.scale)
    out, lse = run(inputs, return_lse=True, **options)
    assert rel_err(out, want) < MAX_ERR
    assert worst_row_err(out, want) < MAX_ROW_ERR
    assert rel_err(lse, want_lse) < LSE_ERR


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", sorted(CORNERS))
def test_corners(name, deterministic):
    check(CORNERS[name], deterministic=deterministic)


# every shape of the plan on this card: few and many tokens, 1 to 128 heads, all key counts
@pytest.mark.parametrize("H", [1, 4, 8, 16, 24, 64, 100, 128])
@pytest.mark.parametrize(("T", "extra_keys"), [(1, 0), (1, 8192), (3, 512), (16, 512), (64, 512), (128, 1024)])
def test_sizes(T, H, extra_keys):
    check(attention_inputs(T, H, 128, extra_keys, full=False, holes=True, device="cuda"))


# split and in one piece
@pytest.mark.parametrize(("T", "H", "extra_keys"), [(1, 8, 512), (3, 8, 0), (16, 64, 512), (64, 8, 512), (256, 8, 512)])
def test_turned_back(T, H, extra_keys):
    inputs = attention_inputs(T, H, 128, extra_keys, full=False, holes=True, device="cuda")
    positions = torch.randint(0, 1 << 17, (T,), device="cuda", dtype=torch.int32)
    freqs = torch.rand(32, device="cuda")
    got = sparse_attn_turned(*inputs.args(), sink=inputs.sink, scale=inputs.scale, positions=positions, freqs=freqs)
    q, *rest = inputs.args()
    want = sparse_attn_ref(q.double(), *rest, sink=inputs.sink.double(), scale=inputs.scale)[0]
    angles = (positions.float()[:, None] * freqs).double()
    want = rope_ref(want, -angles)
    assert rel_err(got, want) < MAX_ERR
    assert worst_row_err(got, want) < MAX_ROW_ERR


# widths that tables of instances have missed
@pytest.mark.parametrize("width", [1, 5, 64, 127, 129, 133, 192, 256, 640, 1152, 2048])
def test_any_width(width):
    check(attention_inputs(2, 8, width, 0, rows=4096, device="cuda"))
    check(attention_inputs(2, 32, 128, width, rows=4096, device="cuda"))


@pytest.mark.parametrize("page", [1, 2, 16, 32, 64, 128, 256])
def test_page_sizes(page):
    check(attention_inputs(2, 8, 40, 70, window_page=64, extra_page=page, rows=512, device="cuda"))


@pytest.mark.parametrize("q_value", [0.0, 1.0])
@pytest.mark.parametrize("align", [16, 4])
def test_every_code_and_scale(q_value, align):
    """One row a token, so its output is the row: all 256 codes, under scales from 2**-40 to 2**40.

    A q of 0 and one of 1, and a page stride that only the portable kernel takes, lead through each way of widening.
    """
    pool = torch.zeros(4, 64 * 584 + (16 if align == 16 else 4), dtype=torch.uint8, device="cuda")
    cache = PagedRows(pool[:, : 64 * 584], 64, "fp8_584")
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    # NaN codes have a test of their own
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)
    exponents = torch.arange(256, device="cuda") % 81 - 40 + 127
    for row in range(256):
        page, place = divmod(row, 64)
        cache.data[page, place * 576 : place * 576 + 448] = codes.roll(row)[torch.arange(448, device="cuda") % 256]
        cache.data[page, 64 * 576 + place * 8 : 64 * 576 + place * 8 + 7] = exponents[row].to(torch.uint8)
    q = torch.full((256, 8, 512), q_value, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(256, dtype=torch.int32, device="cuda")[:, None]
    ones = torch.ones(256, dtype=torch.int32, device="cuda")
    out = sparse_attn_decode(q, cache, rows.contiguous(), ones)
    want = read_rows(cache, rows[:, 0])[:, None].expand(-1, 8, -1)
    # by value: a sum has no -0.0
    assert torch.equal(out.float(), want)


def test_a_nan_row_shows_and_only_where_it_is_named():
    inputs = attention_inputs(4, 8, 16, 16, rows=256, device="cuda")
    cache = inputs.window
    row = int(inputs.window_indices[1, 3])
    page, place = divmod(row, cache.page_size)
    cache.data[page, cache.page_size * 576 + place * 8] = 0xFF
    out = run(inputs)
    assert out[1].isnan().any()
    others = [t for t in (0, 2, 3) if not (inputs.window_indices[t] == row).any()]
    assert not out[others].isnan().any()


@pytest.mark.parametrize("page", [64, 48])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("H", [8, 64])
def test_a_nan_code_beside_a_finite_scale_shows_in_its_row_alone(H, code, page):
    inputs = attention_inputs(5, H, 16, 16, window_page=page, extra_page=page, device="cuda")
    cache = inputs.window
    index, place = divmod(int(inputs.window_indices[1, 3]), page)
    cache.data[index, place * 576 + 77] = code
    out, lse = run(inputs, return_lse=True)
    assert out.isnan().all(dim=2).all(dim=1).tolist() == [False, True, False, False, False]
    assert out.isnan().any(dim=2).any(dim=1).tolist() == [False, True, False, False, False]
    assert lse.isnan().all(dim=1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("page", [64, 48])
@pytest.mark.parametrize("H", [8, 64])
def test_rows_that_float16_cannot_hold_amid_rows_that_it_can(H, page):
    """The first tiles are plain; then come a row of 2**30 that few heads look at, one of 2**-30, and plain rows again."""
    inputs = attention_inputs(4, H, 300, 0, window_page=page, device="cuda")
    for lane, factor in ((200, 2.0**30), (201, 2.0**-30)):
        rows = inputs.window_indices[:, lane]
        write_rows(inputs.window, rows.long(), read_rows(inputs.window, rows).float() * factor)
    check(inputs)
    check(inputs, deterministic=True)


@pytest.mark.parametrize("spread", [4, 8, 11])
def test_rows_at_the_ends_of_what_float16_holds(spread):
    for page in (64, 48):
        check(attention_inputs(6, 8, 200, 100, window_page=page, extra_page=page, spread=spread, device="cuda"))
        check(attention_inputs(6, 8, 200, 100, window_page=page, extra_page=page, spread=spread, q_scale=1e-3, device="cuda"))


def test_no_heads_but_ours_are_written():
    """5 heads fill part of every tile: the bytes around out, lse and workspace stay as they were."""
    inputs = attention_inputs(2, 5, 128, 512, device="cuda")
    size = inputs.q.numel()
    guarded = torch.full((size + 2048,), 3.0, dtype=torch.bfloat16, device="cuda")
    out = guarded[1024 : 1024 + size].view_as(inputs.q)
    need = workspace_bytes(2, 5, 128, 512, device=torch.device("cuda", 0))
    space = torch.full((need + 512,), 0xAB, dtype=torch.uint8, device="cuda")
    run(inputs, out=out, workspace=space[256 : 256 + need])
    assert (guarded[:1024] == 3).all()
    assert (guarded[1024 + size :] == 3).all()
    assert (space[:256] == 0xAB).all()
    assert (space[256 + need :] == 0xAB).all()
    assert same_bits(out, run(inputs))


def test_a_short_workspace_is_refused():
    inputs = attention_inputs(1, 8, 128, 512, device="cuda")
    need = workspace_bytes(1, 8, 128, 512, device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match=f"workspace must be at least {need} bytes from a multiple of 16, got {need - 1} at"):
        run(inputs, workspace=torch.empty(need - 1, dtype=torch.uint8, device="cuda"))


def test_a_preallocated_call_allocates_nothing():
    inputs = attention_inputs(4, 8, 128, 512, device="cuda")
    out = torch.empty_like(inputs.q)
    space = torch.empty(workspace_bytes(4, 8, 128, 512, device=torch.device("cuda", 0)), dtype=torch.uint8, device="cuda")
    run(inputs, out=out, workspace=space)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run(inputs, out=out, workspace=space)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("H", [8, 64])
def test_a_row_has_its_bits_in_any_batch(H):
    inputs = attention_inputs(64, H, 128, 512, full=False, holes=True, device="cuda")
    q, window, indices, lens, extra, extra_indices, extra_lens = inputs.args()
    whole, whole_lse = run(inputs, deterministic=True, return_lse=True)
    for T in (1, 2, 7, 33):
        part = (q[:T], window, indices[:T], lens[:T], extra, extra_indices[:T], extra_lens[:T])
        out, lse = sparse_attn_decode(*part, sink=inputs.sink, scale=inputs.scale, deterministic=True, return_lse=True)
        assert same_bits(out, whole[:T])
        assert same_bits(lse, whole_lse[:T])


@pytest.mark.parametrize(("T", "H"), [(8, 8), (8, 64), (64, 64)])
def test_a_graph_replays_with_other_contents(T, H):
    """Lengths, indices, q and rows change under a captured graph; padded rows hold garbage."""
    first = attention_inputs(T, H, 128, 512, device="cuda", seed=1)
    other = attention_inputs(T, H, 128, 512, full=False, holes=True, device="cuda", seed=2)
    out = torch.empty_like(first.q)
    run(first, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(first, out=out)
    graph.replay()
    assert same_bits(out, run(first))
    first.q.copy_(other.q)
    assert first.extra is not None
    assert other.extra is not None
    first.window.data.copy_(other.window.data)
    first.extra.data.copy_(other.extra.data)
    for name in ("window_indices", "window_lens", "extra_indices", "extra_lens", "sink"):
        getattr(first, name).copy_(getattr(other, name))
    garbage = torch.randint(-(2**31), 2**31 - 1, (2, 128), device="cuda").int()
    first.window_indices[-2:] = garbage
    first.window_lens[-2:] = torch.tensor([2**31 - 1, -5], dtype=torch.int32, device="cuda")
    graph.replay()
    assert same_bits(out, run(first))
    check(other)
    assert same_bits(out[:-2], run(other)[:-2])


def test_two_streams_at_once():
    inputs = [attention_inputs(4, 64, 128, 512, device="cuda", seed=seed) for seed in (1, 2)]
    want = [run(each) for each in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got = [[], []]
    for _ in range(50):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[n].append(run(inputs[n]))
    torch.cuda.synchronize()
    for outs, each in zip(got, want, strict=True):
        assert all(same_bits(out, each) for out in outs)


def test_a_cache_past_two_gib():
    """The same rows at the start of a cache and beyond 2**31 bytes."""
    near = allocate(1, 64, "fp8_584", device="cuda")
    pages = (2**31 + 2**28) // 37440
    far = allocate(pages, 64, "fp8_584", device="cuda")
    source = attention_inputs(1, 8, 64, 0, rows=64, device="cuda")
    near.data.copy_(source.window.data[:1])
    far.data[-1].copy_(source.window.data[0])
    lens = torch.full((1,), 64, dtype=torch.int32, device="cuda")
    index = torch.arange(64, dtype=torch.int32, device="cuda")[None]
    here = sparse_attn_decode(source.q, near, index, lens)
    there = sparse_attn_decode(source.q, far, index + (pages - 1) * 64, lens)
    assert same_bits(here, there)


@pytest.mark.parametrize("H", [8, 128])
def test_two_thousand_launches_end(H):
    inputs = attention_inputs(8, H, 128, 512, device="cuda")
    want = run(inputs)
    torch.cuda.synchronize()
    # a hang must end the run, not the machine's patience
    watchdog = threading.Timer(60.0, os._exit, (3,))
    watchdog.start()
    try:
        for _ in range(2000):
            out = run(inputs)
        torch.cuda.synchronize()
    finally:
        watchdog.cancel()
    assert same_bits(out, want)


def test_nothing_compiles_after_warmup(caplog):
    from deepdecode.kernels.launching import warmup

    warmup(8, (128, 512), range(1, 65), device=torch.device("cuda", 0))
    generator = torch.Generator().manual_seed(0)
    caplog.clear()
    for T in torch.randint(1, 65, (40,), generator=generator).tolist():
        inputs = attention_inputs(T, 8, 128, 512, full=False, device="cuda")
        run(inputs)
        # views that start anywhere in an engine's buffers, as the decoding tokens' behind those of a prefill do
        lens = torch.cat([inputs.window_lens[:1], inputs.window_lens])[1:]
        run(replace(inputs, window_lens=lens, sink=torch.cat([inputs.sink[:1], inputs.sink])[1:]))
    assert not [record for record in caplog.records if "after warmup" in record.getMessage()]
    # bfloat16 pages on multiples of 4 bytes, which no other test here has: a compile that is said
    strange = attention_inputs(1, 8, 128, 0, fmt="bf16", device="cuda")
    pages, size, width = strange.window.data.shape
    pool = torch.zeros(pages, size * width + 2, dtype=torch.bfloat16, device="cuda")
    pool[:, : size * width] = strange.window.data.flatten(1)
    cache = PagedRows(pool[:, : size * width].unflatten(1, (size, width)), size, "bf16")
    out = sparse_attn_decode(strange.q, cache, strange.window_indices, strange.window_lens, scale=strange.scale)
    assert [record for record in caplog.records if "after warmup" in record.getMessage()]
    want, _ = sparse_attn_ref(strange.q.double(), *strange.args()[1:], scale=strange.scale)
    assert rel_err(out, want) < MAX_ERR


def test_what_supports_says_is_what_happens(monkeypatch):
    """Random cases: where `supports` has no objection the kernel runs and is right, else the call is refused with its words."""
    from deepdecode.kernels.attention_plan import card_of, case_of, supports

    draw = random.Random(7)
    seen = set()
    for _ in range(24):
        pages = draw.choice([(64, 64), (64, 2), (3, 64), (1, 100), (256, 16)])
        T, H, window, extra = (
            draw.choice([1, 2, 9, 33]),
            draw.randint(1, 128),
            draw.choice([1, 40, 128]),
            draw.choice([0, 7, 300]),
        )
        fmt, gap = draw.choice(["fp8_584", "bf16"]), draw.choice([0, 16, 4, 2])
        inputs = attention_inputs(
            T,
            H,
            window,
            extra,
            fmt=fmt,
            window_page=pages[0],
            extra_page=pages[1],
            full=False,
            holes=True,
            rows=700,
            device="cuda",
        )
        if fmt == "fp8_584" and gap:
            data = inputs.window.data
            pool = torch.full((data.shape[0], data.shape[1] + gap), 0xFF, dtype=torch.uint8, device="cuda")
            pool[:, : data.shape[1]] = data
            inputs = replace(inputs, window=PagedRows(pool[:, : data.shape[1]], pages[0], fmt))
        case = case_of(inputs.q, inputs.window, inputs.window_indices, inputs.extra, inputs.extra_indices, inputs.sink)
        reason = supports(case, card_of(inputs.q.device))
        seen.add(reason)
        if reason is None:
            check(inputs)
        else:
            with pytest.raises(RuntimeError, match=re.escape(reason)):
                run(inputs)
    assert len(seen) == 2


@pytest.mark.parametrize(("T", "H"), [(1, 8), (4, 20), (40, 64)])
@pytest.mark.parametrize("arch", [80, 86, 89])
def test_ptx_of_older_archs_runs(arch, T, H):
    """The driver compiles an older arch's PTX for this GPU: that code runs and is right; its speed says nothing."""
    pytest.importorskip("cuda.bindings.driver")
    from deepdecode.bench.ptx import attention_as_ptx

    for spread in (0, 40):
        inputs = attention_inputs(T, H, 100, 200, full=False, holes=True, spread=spread, device="cuda")
        out = attention_as_ptx(inputs, arch)
        want, _ = sparse_attn_ref(inputs.q.double(), *inputs.args()[1:], sink=inputs.sink.double(), scale=inputs.scale)
        assert rel_err(out, want) < MAX_ERR
        assert worst_row_err(out, want) < MAX_ROW_ERR
