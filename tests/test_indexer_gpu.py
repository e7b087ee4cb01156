"""The indexer on a GPU: the compiled kernels through the op, in graphs, on streams, beside garbage."""

from dataclasses import replace

import pytest
import torch

from deepdecode.bench.indexer import MAX_GAP, judge
from deepdecode.ops.indexer import index_topk, index_topk_ref
from deepdecode.ops.rows import PagedRows, allocate
from deepdecode.testing.index_keys import IndexInputs, exact_inputs, index_corners, index_inputs
from deepdecode.testing.numeric import same_bits

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

# after the skip: without a GPU other tests interpret these kernels, which the first import decides
from deepdecode.kernels import indexer as kernel
from deepdecode.kernels.attention_plan import card_of
from deepdecode.kernels.indexer_plan import case_of, plan, supports

pytestmark = pytest.mark.gpu

CORNERS = index_corners("cuda")
# the Hopper kernel where it runs, what every arch runs, and what cards without FP8 run
FORMS = {"planned": {}, "mma": {"kernel": "mma"}, "bits": {"kernel": "mma", "widen": "bits"}}


@pytest.fixture(autouse=True)
def _kernels_only(monkeypatch):
    monkeypatch.setenv("DEEPDECODE_STRICT", "1")


def check(inputs: IndexInputs, **form) -> None:
    """Bit for bit: whole numbers sum exactly in any order."""
    if form:
        config = plan(case_of(*inputs.args()), card_of(inputs.index_q.device))
        indices, lengths = kernel.launch(*inputs.args(), replace(config, **form))
    else:
        indices, lengths = index_topk(*inputs.args())
    want, want_lengths = index_topk_ref(*inputs.wide())
    assert torch.equal(lengths, want_lengths)
    assert torch.equal(indices, want)


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("name", sorted(CORNERS))
def test_corners(name, form):
    check(CORNERS[name], **FORMS[form])


@pytest.mark.parametrize("name", sorted(CORNERS))
def test_entries_by_number(name):
    inputs = CORNERS[name]
    for got, want in zip(index_topk(*inputs.args(), logical=True), index_topk_ref(*inputs.wide(), logical=True), strict=True):
        assert torch.equal(got, want)


# one pass, groups of 8, 16 and 32; all heads that a rank may have; every page size; few and many values
@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize(
    ("T", "heads", "pages", "page_size", "topk", "values"),
    [
        (1, 64, 33, 64, 512, 8),
        (40, 64, 33, 64, 512, 1),
        (5, 64, 600, 64, 512, 8),
        (3, 32, 2000, 64, 1024, 2),
        (2, 64, 4096, 64, 512, 8),
        (2, 64, 4096, 64, 1024, 1),
        (2, 128, 600, 64, 2048, 3),
        (2, 8, 4096, 2, 100, 4),
        (3, 64, 40, 256, 512, 4),
        (300, 1, 33, 16, 7, 1),
    ],
)
def test_sizes(form, T, heads, pages, page_size, topk, values):
    check(exact_inputs(T, heads, pages, page_size, topk, values=values, device="cuda"), **FORMS[form])


@pytest.mark.parametrize(("T", "entries"), [(1, 262144), (16, 16384), (64, 2048)])
@pytest.mark.parametrize("topk", [512, 1024])
def test_scores_of_real_numbers(T, entries, topk):
    """Not one entry that float64 does not choose, but for those whose score is the last one's within float32's rounding."""
    inputs = index_inputs(T, entries, topk, device="cuda")[0]
    assert judge(inputs, index_topk(*inputs.args())[0])["gap"] < MAX_GAP


def test_bfloat16_keys():
    inputs = exact_inputs(5, 64, 600, 64, 512, fmt="bf16", device="cuda")
    check(replace(inputs, index_q=inputs.index_q.bfloat16()))


def test_a_row_has_its_bits_in_any_batch():
    """Scores of real numbers too: a tile is summed in the same way wherever it stands."""
    inputs = index_inputs(40, 5000, device="cuda")[0]
    lens = torch.randint(0, 5001, (40,), device="cuda", dtype=torch.int32)
    inputs = replace(inputs, lens=lens, slots=torch.randint(0, 40, (40,), device="cuda", dtype=torch.int32))
    whole = index_topk(*inputs.args())
    for t in (0, 7, 39):
        part = slice(t, t + 1)
        alone = replace(
            inputs, index_q=inputs.index_q[part], index_weights=inputs.index_weights[part],
            slots=inputs.slots[part], lens=inputs.lens[part],
        )  # fmt: skip
        for got, want in zip(index_topk(*alone.args()), whole, strict=True):
            assert same_bits(got, want[part])


@pytest.mark.parametrize(("T", "pages", "topk"), [(4, 33, 512), (3, 600, 100)])
def test_a_graph_replays_with_other_contents(T, pages, topk):
    """Captured with lengths of 0, as engines do; then everything changes under the graph, and garbage comes."""
    inputs = exact_inputs(T, 64, pages, 64, topk, device="cuda", seed=1)
    other = exact_inputs(T, 64, pages, 64, topk, values=1, device="cuda", seed=2)
    lens = inputs.lens.clone()
    inputs.lens.zero_()
    index_topk(*inputs.args())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indices, lengths = index_topk(*inputs.args())
    graph.replay()
    assert indices.eq(-1).all()
    assert lengths.eq(0).all()
    inputs.lens.copy_(lens)
    graph.replay()
    assert torch.equal(indices, index_topk_ref(*inputs.wide())[0])
    for name in ("index_q", "index_weights", "block_tables", "slots", "lens"):
        getattr(inputs, name).copy_(getattr(other, name))
    inputs.keys.data.copy_(other.keys.data)
    graph.replay()
    assert torch.equal(indices, index_topk_ref(*other.wide())[0])
    garbage = torch.randint(-(2**31), 2**31 - 1, (2,), device="cuda").int()
    inputs.slots[-1], inputs.lens[-1] = garbage
    inputs.block_tables[1] = torch.randint(-(2**31), 2**31 - 1, (pages,), device="cuda").int()
    graph.replay()
    assert torch.equal(indices, index_topk_ref(*inputs.wide())[0])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_call_waits_for_the_host():
    inputs = index_inputs(4, 9000, device="cuda")[0]
    want = index_topk(*inputs.args())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = index_topk(*inputs.args())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(got[0], want[0])


def test_two_streams_at_once():
    inputs = [index_inputs(4, 20000, device="cuda", seed=seed)[0] for seed in (1, 2)]
    want = [index_topk(*each.args())[0] for each in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got = [[], []]
    for _ in range(50):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[n].append(index_topk(*inputs[n].args())[0])
    torch.cuda.synchronize()
    for outs, each in zip(got, want, strict=True):
        assert all(same_bits(out, each) for out in outs)


def test_a_prefill_of_many_tokens_stays_in_its_workspace():
    """Scores of 3000 tokens over a table of 65536 entries would take 786 MB; the workspace's bound is 256 MiB."""
    inputs = exact_inputs(3000, 2, 1024, 64, 16, device="cuda")
    index_topk(*replace(inputs, lens=inputs.lens * 0).args())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    indices, _ = index_topk(*inputs.args())
    assert torch.cuda.max_memory_allocated() - before < 257 << 20
    some = slice(2500, 2600)
    part = replace(
        inputs, index_q=inputs.index_q[some], index_weights=inputs.index_weights[some],
        slots=inputs.slots[some], lens=inputs.lens[some],
    )  # fmt: skip
    assert torch.equal(indices[some], index_topk_ref(*part.wide())[0])


def test_a_cache_past_two_gib():
    """The same keys at the start of a cache and beyond 2**31 bytes."""
    near = exact_inputs(2, 64, 40, 64, 100, device="cuda")
    pages = (2**31 + 2**28) // 8448
    far = allocate(pages, 64, "fp8_132", 128, device="cuda")
    far.data[-40:].copy_(near.keys.data)
    inside = (near.block_tables >= 0) & (near.block_tables < 40)
    tables = torch.where(inside, near.block_tables + (pages - 40), -1).int()
    want, _ = index_topk(*near.args())
    got, _ = index_topk(*replace(near, keys=far, block_tables=tables).args())
    assert torch.equal(got, torch.where(want >= 0, want + (pages - 40) * 64, -1))


def test_pages_in_a_pool_with_gaps():
    """The engines' pools: pages a multiple of 16 bytes apart, or of 4 only."""
    inputs = exact_inputs(3, 64, 70, 64, 300, device="cuda")
    want = index_topk(*inputs.args())[0]
    for gap in (48, 4):
        pool = torch.full((70, 8448 + gap), 0xFF, dtype=torch.uint8, device="cuda")
        pool[:, :8448] = inputs.keys.data
        moved = replace(inputs, keys=PagedRows(pool[:, :8448], 64, "fp8_132"))
        assert same_bits(index_topk(*moved.args())[0], want)


def test_what_no_kernel_covers_falls_back(monkeypatch):
    monkeypatch.delenv("DEEPDECODE_STRICT")
    inputs = exact_inputs(2, 4, 9, 16, 20, device="cuda")
    wide = replace(inputs, index_q=inputs.index_q.float())
    assert supports(case_of(*wide.args()), card_of(inputs.index_q.device)) is not None
    assert torch.equal(index_topk(*wide.args())[0], index_topk_ref(*inputs.wide())[0])
