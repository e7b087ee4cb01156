"""The ladder's tables: rung 0's entries against the references of the same names, and its kernels under the interpreter."""

import dataclasses
import os

import pytest
import torch

from deepdecode.config import ModelConfig
from deepdecode.ops import reference
from deepdecode.ops.attention import sparse_attn_decode
from deepdecode.ops.compressor import compress
from deepdecode.ops.fused import FUSED
from deepdecode.ops.moe import moe_ref
from deepdecode.ops.norm import rms_norm
from deepdecode.ops.quant import dequantize, hadamard
from deepdecode.ops.reference import REFERENCE
from deepdecode.ops.rope import frequencies, rope
from deepdecode.ops.rows import allocate, read_rows, write_rows
from deepdecode.ops.table import CompressorState, CompressorWeights
from deepdecode.slices import RankSlice
from deepdecode.testing.experts import random_experts, random_routes, random_weight
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err
from deepdecode.tiny import CONFIG

# Triton reads it when a kernel is defined, so before the imports below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from deepdecode import rungs
from deepdecode.fallback import attention as fallback_attention
from deepdecode.fallback import compiled, engine, experts, indexer, mhc, product, store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# two roundings to bfloat16 in other places
BF16_STEPS = 6e-3
F32 = 2e-6
FP8_STEP = 2.0**-3
# the interpreter rounds few values to other FP8 codes than torch, and what should round up to a power of two to half of it
FP8_INTERPRETED, FP8_FEW = 0.51, 0.06
# sizes that eight ranks can share
SHARED = dataclasses.replace(CONFIG, num_heads=8, o_groups=8, expert_width=1024)


class Recorder:
    """A table that runs `ops` and keeps what every entry was given, tensors cloned, and what it gave."""

    def __init__(self, ops):
        self.calls = {field.name: [] for field in dataclasses.fields(ops)}
        self.ops = type(ops)(**{name: self.wrap(name, getattr(ops, name)) for name in self.calls})

    def wrap(self, name, entry):
        def run(*args, **kwargs):
            kept = clone(args), clone(kwargs)
            out = entry(*args, **kwargs)
            self.calls[name].append((*kept, clone(out)))
            return out

        return run


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (tuple, list)):
        return type(value)(clone(v) for v in value)
    if isinstance(value, dict):
        return {key: clone(v) for key, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, type(CONFIG)):
        return dataclasses.replace(value, **{f.name: clone(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors(v)]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name))]
    return []


@pytest.fixture(scope="module")
def calls():
    """Three decode steps of a small slice, the last of which completes an entry of each ratio."""
    made = RankSlice(SHARED, "tp8", context=256, max_concurrency=3, device="cpu")
    recorder = Recorder(REFERENCE)
    step = made.graph(recorder.ops, 3)
    step.seek(125)
    for _ in range(3):
        step.replay()
    return recorder.calls


ENTRIES = ["embed", "mhc_boundary", "attn_in", "q_proj", "attn_prepare", "attn_out", "route", "moe", "head"]


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_gives_what_the_reference_gives(calls, name):
    entry = getattr(rungs.RUNGS[1].ops, name)
    assert calls[name]
    for args, kwargs, want in calls[name]:
        got = entry(*(mine := clone(args)), **kwargs)
        for a, b in zip(tensors(got), tensors(want), strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            if a.dtype == torch.int32:
                assert torch.equal(a, b)
            elif a.dtype != torch.uint8:
                assert rel_err(a.float(), b.float()) < (FP8_STEP if a.dtype == torch.float8_e4m3fn else BF16_STEPS)
        if name == "attn_prepare":
            reference.attn_prepare(*(theirs := clone(args)))
            for kept, wanted in zip(vars(mine[4]).values(), vars(theirs[4]).values(), strict=True):
                if kept is not None and hasattr(kept, "page_size"):
                    rows = torch.arange(kept.num_rows)
                    assert rel_err(read_rows(kept, rows), read_rows(wanted, rows)) < BF16_STEPS
                elif kept is not None:
                    assert same_bits(kept.kv, wanted.kv)
                    assert same_bits(kept.score, wanted.score)


def test_the_indexer_chooses_the_reference_s_entries(calls):
    for args, _, (want, want_lens) in calls["index_topk"]:
        got, lens = indexer.index_topk(*args)
        assert torch.equal(lens, want_lens)
        for mine, reference_s, n in zip(got, want, lens, strict=True):
            assert (mine[n:] == -1).all()
            assert sorted(mine[:n].tolist()) == sorted(reference_s[:n].tolist())


def test_fewer_entries_than_topk(calls):
    args = calls["index_topk"][0][0]
    got, lens = indexer.index_topk(*args[:4], 400)
    want, want_lens = reference.index_topk(*args[:4], 400)
    assert torch.equal(lens, want_lens)
    assert torch.equal(got.sort(dim=1).values, want.sort(dim=1).values)


def test_logits_of_the_indexer_in_float64(calls):
    q, weights, keys, step, _ = calls["index_topk"][0][0]
    pages = step.block_tables[step.slots]
    got = indexer.index_logits(q, weights, keys, pages)
    rows = (pages[:, :, None] * keys.page_size + torch.arange(keys.page_size)).flatten(1)
    want = torch.einsum("th,thn->tn", weights.double(), (q.double() @ read_rows(keys, rows).double().mT).relu())
    assert rel_err(got, want) < F32


def test_sampling_by_seed_and_position(calls):
    sample = rungs.RUNGS[1].ops.sample
    logits = torch.randn(64, 50) * 3
    seeds, positions = torch.arange(64), torch.arange(64) * 7
    ones = torch.ones(64)
    got = sample(logits, ones, ones, seeds, positions)
    assert torch.equal(got, REFERENCE.sample(logits, ones, ones, seeds, positions))
    assert torch.equal(sample(logits, 0 * ones, ones, seeds, positions), logits.argmax(-1))


def test_gates_kernel():
    site = dataclasses.replace(
        reference.MhcSite(torch.empty(0), torch.randn(24), torch.rand(3) + 0.5),
    )
    site = reference.MhcSite(*(t.to(DEVICE) for t in vars(site).values()))
    mixes = 2 * torch.randn(5, 24, device=DEVICE)
    got = mhc.launch_gates(mixes, site, CONFIG)
    wide = reference.MhcSite(*(t.cpu().double() for t in vars(site).values()))
    for a, b in zip(got, mhc.gates(mixes.cpu().double(), wide, CONFIG), strict=True):
        assert rel_err(a.cpu(), b) < F32


@pytest.mark.parametrize("fmt", ["fp8_584", "fp8_132"])
@pytest.mark.parametrize("page_size", [2, 64])
def test_row_kernels(fmt, page_size):
    width = 512 if fmt == "fp8_584" else 128
    cache = allocate(3, page_size, fmt, width, device=DEVICE)
    cache.data.fill_(0)
    values = torch.randn(6, width, device=DEVICE) * torch.tensor([1e-6, 1, 30, 1, 1, 1], device=DEVICE)[:, None]
    # two rows that are not to be written
    rows = torch.tensor([0, 3 * page_size - 1, 1, -1, 3 * page_size, page_size], dtype=torch.int32, device=DEVICE)
    store.launch_rows(cache, rows, values)
    got = read_rows(cache, torch.arange(cache.num_rows, device=DEVICE))
    want = allocate(3, page_size, fmt, width, device=DEVICE)
    want.data.fill_(0)
    reference.write_rows(want, rows, values)
    expected = read_rows(want, torch.arange(cache.num_rows, device=DEVICE))
    if DEVICE == "cpu":
        # below the smallest normal code steps are all alike
        smallest = expected.abs().amax(1, keepdim=True).clamp(min=1e-4) / 224 * 2.0**-9
        assert ((got - expected).abs() <= FP8_INTERPRETED * expected.abs() + smallest).all()
        codes = slice(0, 448 if fmt == "fp8_584" else 128)
        written = expected[:, codes] != 0
        assert (got[:, codes] != expected[:, codes])[written].float().mean() < FP8_FEW
    elif fmt == "fp8_584":
        assert same_bits(got, expected)
    else:
        # torch divides by a constant as it multiplies by the inverse: a scale can differ in its last bit
        assert rel_err(got, expected) < 1e-3
    # scales, and the byte beside them, have no step to differ by
    if fmt == "fp8_584":
        body = page_size * 576
        assert same_bits(cache.data[:, body : body + page_size * 8], want.data[:, body : body + page_size * 8])


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_pooling_kernel_over_a_sequence(ratio):
    """Every position from a sequence's first, padded rows beside it; entries and rings against the reference's."""
    d, ring = 32, 8 if ratio == 4 else 128
    width = 2 * d if ratio == 4 else d
    weights = CompressorWeights(torch.randn(ratio, width, device=DEVICE), torch.ones(d, device=DEVICE))
    empty = [torch.randn(3, ring, width, device=DEVICE) for _ in range(2)]
    mine, theirs = (CompressorState(*(t.clone() for t in empty), ratio) for _ in range(2))
    step = dataclasses.make_dataclass("Step", ["positions", "slots", "prefill"])
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=DEVICE)
    begins = (0, ratio - 2) if ratio == 128 else (0,)
    for begin in begins:
        for at in range(begin, begin + (5 if ratio == 128 else 18)):
            positions = torch.tensor([at, 3, at + ratio], dtype=torch.int32, device=DEVICE)
            where = step(positions, slots, False)
            kv, score = torch.randn(2, 3, width, device=DEVICE)
            pooled = store.pool(kv, score, weights.ape, mine, where)
            want = compress(kv, score, weights, theirs, where, norm_eps=0.0)
            done = (pooled != 0).any(1)
            assert done.tolist() == ((positions + 1) % ratio == 0).logical_and(slots >= 0).tolist()
            normed = pooled * torch.rsqrt(pooled.square().mean(1, keepdim=True))
            assert rel_err(torch.where(done[:, None], normed, 0), want) < 1e-5
            assert same_bits(mine.kv, theirs.kv)
            assert same_bits(mine.score, theirs.score)


@pytest.mark.parametrize(("width", "fmt"), [(512, "fp8_584"), (128, "fp8_132")])
def test_an_engine_s_entries(width, fmt):
    """Norm, rotation (Hadamard) and row in one launch; a token that completes none writes none."""
    pooled, norm = torch.randn(4, width, device=DEVICE), torch.rand(width, device=DEVICE) + 0.5
    rows, want = (allocate(3, 4, fmt, width=width, device=DEVICE) for _ in range(2))
    at = torch.tensor([5, -1, 9, 12], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([3, 5, 8191, 7], dtype=torch.int32, device=DEVICE)
    freqs = frequencies(ModelConfig(), 4).to(DEVICE)
    for kept in (rows, want):
        kept.data.zero_()
    engine.write_entry(pooled, norm, rows, at, positions, freqs, 4, 1e-6, pooled)
    values = rope(rms_norm(pooled, norm, 1e-6), positions - 3, freqs)
    write_rows(want, at, hadamard(values) if width == 128 else values)
    every = torch.arange(12, device=DEVICE)
    got, right = read_rows(rows, every), read_rows(want, every)
    assert got.abs().amax(1).nonzero().flatten().tolist() == [5, 9]
    # the interpreter cuts bfloat16 off, in which rotated values are kept; of codes few are beside a tie
    assert rel_err(got, right) < 2e-3
    assert ((got - right)[:, : width - 64].abs() > 1e-5).float().mean() < 1e-3


def test_an_engine_s_index_query():
    heads = 20
    q, weights = torch.randn(3, heads, 128, device=DEVICE), torch.randn(3, heads, device=DEVICE)
    positions = torch.tensor([0, 77, 8191], dtype=torch.int32, device=DEVICE)
    freqs = frequencies(ModelConfig(), 4).to(DEVICE)
    codes, out = engine.index_query(q, weights, positions, freqs)
    turned = hadamard(rope(q, positions, freqs))
    scale = turned.abs().amax(-1).clamp(min=reference.FP8_FLOOR) / reference.FP8_MAX
    assert rel_err(out, weights * (128 * heads) ** -0.5 * scale) < 1e-5
    assert rel_err(codes.float(), (turned / scale[..., None]).to(torch.float8_e4m3fn).float()) < 5e-3


def test_an_engine_s_products_are_the_reference_s(calls):
    for args, kwargs, want in calls["attn_in"]:
        got = engine.attn_in(*args, **kwargs)
        for a, b in zip(tensors(got), tensors(want), strict=True):
            assert rel_err(a, b) < F32


def test_low_precision_products_are_refused(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    x = torch.randn(2, 4).as_subclass(OnGpu)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with pytest.raises(RuntimeError, match="float32 products must be full ones"):
        mhc.full_product(x, torch.randn(3, 4))


def test_rungs_are_named_and_say_what_they_mirror():
    names = [rung.name for rung in rungs.RUNGS]
    assert names[:2] == ["0-padded", "0"]
    assert len(set(names)) == len(names)
    entries = {field.name for field in dataclasses.fields(REFERENCE)}
    for rung in rungs.RUNGS:
        assert set(rung.mirrors) <= entries
        assert all(text.startswith("sglang 0.5.23 ") for text in rung.mirrors.values())
    # what rung 0 has beside products of stored weights is an engine's; what rung 1 changes is not
    assert set(rungs.RUNGS[1].mirrors) == entries - {"attn_in", "attn_out", "moe"}
    assert "sparse_attn" not in rungs.RUNGS[2].mirrors


def test_what_is_compiled_is_one_graph_for_each_kind_and_gives_what_the_reference_gives(calls):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    table = compiled.entries(backend="eager")
    for name, entry in table.items():
        # of the last step, which completes an entry of each ratio
        assert calls[name]
        for args, kwargs, want in calls[name][-len(calls[name]) // 3 :]:
            got = entry(*(mine := clone(args)), **kwargs)
            for a, b in zip(tensors(got), tensors(want), strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                if a.is_floating_point():
                    assert rel_err(a.float(), b.float()) < (FP8_STEP if a.dtype == torch.float8_e4m3fn else BF16_STEPS)
                else:
                    assert torch.equal(a, b)
            if name == "attn_prepare":
                reference.attn_prepare(*(theirs := clone(args)))
                for kept, wanted in zip(vars(mine[4]).values(), vars(theirs[4]).values(), strict=True):
                    if kept is not None and hasattr(kept, "page_size"):
                        rows = torch.arange(kept.num_rows)
                        assert rel_err(read_rows(kept, rows), read_rows(wanted, rows)) < BF16_STEPS
    # one for each kind of layer and entry, not for each layer, and none of them cut
    assert 6 < counters["stats"]["unique_graphs"] <= 12 < sum(len(calls[name]) // 3 for name in table)
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_every_number_of_tokens_is_compiled():
    """The compiler's own limit is eight graphs of a function; what came after would run eagerly, and be timed as compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    embed = compiled.entries(backend="eager")["embed"]
    weight = torch.randn(20, 8)
    for T in range(2, 14):
        tokens = torch.arange(T)
        assert torch.equal(embed(tokens, weight, 4), REFERENCE.embed(tokens, weight, 4))
    assert counters["stats"]["unique_graphs"] == 12
    torch._dynamo.reset()


def changes(rung, below):
    return {f.name for f in dataclasses.fields(REFERENCE) if getattr(rung.ops, f.name) is not getattr(below.ops, f.name)}


def test_a_rung_differs_from_the_one_below_in_one_thing():
    by_name = {rung.name: rung for rung in rungs.RUNGS}
    for name, below in (("0", "0-padded"), ("1", "0"), ("2", "1"), ("2-portable", "1")):
        assert changes(by_name[name], by_name[below]) == {"sparse_attn"}
    assert changes(by_name["3"], by_name["2"]) == {"index_topk", "mhc_boundary", "head"}
    assert not changes(by_name["4"], by_name["3"]) & {"index_topk", "mhc_boundary", "head", "moe"}
    assert changes(by_name["4-engine"], by_name["4"]) == {"attn_in", "q_proj", "attn_prepare", "sparse_attn"}
    assert changes(by_name["4-compiled"], by_name["3"]) == changes(by_name["4"], by_name["3"]) - {"attn_in", "sample"}
    # products alone, and what they take in: a norm
    assert changes(by_name["5"], by_name["4"]) == {"attn_in", "q_proj", "attn_out", "moe"}
    assert by_name["5"].ops is FUSED
    # what a rung mirrors is what it has of the fallback
    for rung in rungs.RUNGS:
        assert set(rung.mirrors) - {"sparse_attn"} == set(rungs.RUNGS[1].mirrors) - changes(rung, rungs.RUNGS[1]) - {
            "sparse_attn"
        }


@pytest.mark.parametrize("kind", ["fp8", "fp4", "bf16"])
@pytest.mark.parametrize(("T", "G", "out", "width"), [(1, 1, 40, 128), (9, 2, 136, 160), (17, 1, 77, 96)])
def test_products_of_the_lower_rungs(kind, T, G, out, width):
    weight = random_weight(G * out, width, kind=kind, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(T))
    x = torch.randn(T, G, width, device=DEVICE)
    config = product.plan(T, G * out, width, full=False)
    if DEVICE == "cuda":
        x = x.bfloat16()
    got = torch.empty(T, G, out, device=DEVICE)
    product.launch(x, weight.data, weight.scale, weight.kind, got, config)
    want = torch.einsum("tgk,gok->tgo", x.double(), dequantize(weight, torch.float64).view(G, out, width))
    # sums in float32, on a GPU in another order
    assert worst_row_err(got, want) < (1e-5 if DEVICE == "cuda" else F32)


@pytest.mark.parametrize(("T", "E", "k"), [(1, 8, 2), (5, 3, 2)])
def test_experts_of_the_lower_rungs(T, E, k):
    """Of this rank are experts 2 .. E + 1 of E + 3."""
    w = random_experts(E, 32, 32, 32, first=2, device=DEVICE)
    x, (ids, weights) = 8 * torch.randn(T, 32, device=DEVICE), (t.to(DEVICE) for t in random_routes(T, E + 3, k))
    out = torch.empty_like(x)
    if DEVICE == "cuda":
        x, out = x.bfloat16(), out.bfloat16()
    stored = [part for weight in (w.w13, w.w2, w.shared13, w.shared2) for part in (weight.data, weight.scale)]
    config = experts.plan(T * k, T, E, 32, 132)
    experts.launch(x, ids, weights, *stored, w.w13.kind, w.shared13.kind, w.first_expert, 10.0, out, config)
    want = moe_ref(x.double(), ids, weights.double(), w, 10.0)
    assert rel_err(out, want) < (3e-3 if DEVICE == "cuda" else F32)


def test_padded_heads_change_nothing(monkeypatch, calls):
    args, kwargs, want = calls["sparse_attn"][1]
    seen = []

    def attend(q, *caches, sink, scale):
        seen.append(q.shape[1])
        return (sparse_attn_decode(q, *caches, sink=sink, scale=scale), None)

    rungs._padded.cache_clear()
    monkeypatch.setattr(fallback_attention, "sparse_attn_per_head", attend)
    padded = rungs._padded()
    rungs._padded.cache_clear()
    assert args[0].shape[1] == 1
    assert rel_err(padded.sparse_attn(*args, **kwargs).float(), want.float()) < BF16_STEPS
    assert seen == [64]
