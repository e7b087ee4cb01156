"""Steps as engines make them and captured graphs hold them: padded, empty, speculative, over shared pages and odd pools.

Each runs on the CPU, and on a GPU from a captured graph whose inputs change before the replay. No engine is needed.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.ops.indexer import index_topk_ref
from deepdecode.ops.mhc import mhc_post_ref, mhc_pre_ref
from deepdecode.plugins import sglang_ops as sglang
from deepdecode.plugins import vllm_calls as vllm
from deepdecode.plugins.guard import Guard
from deepdecode.testing.index_keys import exact_inputs, index_inputs
from deepdecode.testing.inputs import attention_inputs
from deepdecode.testing.numeric import rel_err

# bfloat16 output; hyper-connections' gates are kept to 16 bits
BF16, HYPER = 3e-3, 1e-2
NO_ROW = torch.iinfo(torch.int32).max


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name, guard in sglang.GUARDS.items():
        monkeypatch.setitem(sglang.GUARDS, name, Guard("SGLang", guard.what))


def refuse(*args, **kwargs):
    raise AssertionError("the engine's own function was called")


def replayed(run, change, device):
    """What `run` gives after `change` has written other inputs; on a GPU by a graph that was captured before."""
    if device.type == "cpu":
        run()
        change()
        return run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    change()
    graph.replay()
    torch.cuda.synchronize()
    return out


def copy_inputs(old, new):
    for name in ("q", "window_indices", "window_lens", "extra_indices", "extra_lens", "sink"):
        if getattr(old, name) is not None:
            getattr(old, name).copy_(getattr(new, name))


def sglang_view(rows):
    return rows.data[:, : rows.page_size * 584].view(-1, rows.page_size, 1, 584).view(torch.float8_e4m3fn)


def sglang_call(inputs):
    """The keywords of SGLang's backend."""
    call = {"q": inputs.q.unsqueeze(1), "k_cache": sglang_view(inputs.window), "attn_sink": inputs.sink, "head_dim_v": 512}
    call |= {"indices": inputs.window_indices.unsqueeze(1), "topk_length": inputs.window_lens, "softmax_scale": inputs.scale}
    some = inputs.extra is not None
    return call | {
        "extra_k_cache": sglang_view(inputs.extra) if some else None,
        "extra_indices_in_kvcache": inputs.extra_indices.unsqueeze(1) if some else None,
        "extra_topk_length": inputs.extra_lens,
    }


def vllm_attend(inputs, output):
    """vLLM's decode for these inputs, into its buffer."""

    def cache(rows):
        return rows.data[:, : rows.page_size * 584].view(-1, rows.page_size, 584)

    layer = SimpleNamespace(swa_cache_layer=SimpleNamespace(kv_cache=cache(inputs.window)), scale=inputs.scale)
    layer.attn_sink = torch.nn.Parameter(inputs.sink, requires_grad=False)
    chosen = None if inputs.extra is None else (inputs.extra_indices.unsqueeze(1), inputs.extra_lens)
    vllm.attend(
        layer, inputs.q, (inputs.window_indices.unsqueeze(1), inputs.window_lens),
        None if inputs.extra is None else cache(inputs.extra), chosen, output,
    )  # fmt: skip
    return output


def reference(inputs):
    return sparse_attn_ref(inputs.q.double(), *inputs.args()[1:], sink=inputs.sink.double(), scale=inputs.scale)[0]


def spoil_rows(inputs, first):
    """What stands in rows that pad a batch: anything."""
    inputs.window_indices[first::2], inputs.window_indices[first + 1 :: 2] = NO_ROW, -NO_ROW
    inputs.window_lens[first::2], inputs.window_lens[first + 1 :: 2] = NO_ROW, -NO_ROW
    if inputs.extra_indices is not None:
        inputs.extra_indices[first:], inputs.extra_lens[first:] = NO_ROW, NO_ROW
    inputs.q[first:] = float("nan")


BUCKETS = [(0, 64), (512, 64), (64, 2)]


@pytest.mark.parametrize(("extra_keys", "extra_page"), BUCKETS, ids=["window", "ratio-4", "ratio-128"])
@pytest.mark.parametrize("engine", ["sglang", "flash_mla", "vllm"])
def test_a_graphs_bucket_is_larger_than_the_batch(engine, extra_keys, extra_page, device):
    """Captured with 8 rows, replayed with 3 and garbage behind them: the 3 are right, and nothing else is read or harmed."""
    heads, own = (64, 8) if engine == "flash_mla" else (8, 8)
    sizes = {"window_page": 64 if engine == "vllm" else 256, "extra_page": extra_page, "device": device, "rows": 4096}
    inputs, other = (attention_inputs(8, heads, 128, extra_keys, full=False, seed=seed, **sizes) for seed in (0, 1))
    buffer = torch.full((10, heads, 512), 7.0, dtype=torch.bfloat16, device=device)
    more = {"block_table": None, "cache_seqlens": None, "tile_scheduler_metadata": object(), "is_fp8_kvcache": True}

    def run():
        if engine == "vllm":
            return vllm_attend(inputs, buffer[:8])
        if engine == "sglang":
            return sglang.attention_sm120(refuse, **sglang_call(inputs))[0].squeeze(1)
        with sglang.decode_step(own, captured=True):
            return sglang.flash_mla(refuse, **sglang_call(inputs), **more, use_legacy=True)[0].squeeze(1)

    def change():
        copy_inputs(inputs, other)
        spoil_rows(inputs, 3)

    out = replayed(run, change, device)
    want = reference(replace(other, window=inputs.window, extra=inputs.extra))[:3, :own]
    assert out.shape == (8, own, 512) and rel_err(out[:3], want) < BF16
    assert (buffer[8:] == 7).all()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_tokens_of_one_sequence_in_a_row(engine, device):
    """Speculation: three sequences of three tokens, whose windows and entries overlap in the same pages."""
    inputs = attention_inputs(9, 8, 128, 64, window_page=64, extra_page=2, rows=1024, device=device)
    start = torch.tensor([0, 300, 700], device=device).repeat_interleave(3) + torch.arange(3, device=device).repeat(3)
    inputs.window_indices.copy_(start[:, None] + torch.arange(128, device=device))
    inputs.extra_indices.copy_((start // 3)[:, None] + torch.arange(64, device=device))
    lens = torch.arange(9, device=device, dtype=torch.int32)
    inputs.window_lens.copy_(120 + lens % 3), inputs.extra_lens.copy_(40 + lens // 3)
    if engine == "vllm":
        out = vllm_attend(inputs, torch.empty_like(inputs.q))
    else:
        out = sglang.attention_sm120(refuse, **sglang_call(inputs))[0].squeeze(1)
    assert rel_err(out, reference(inputs)) < BF16


def test_sequences_that_share_a_prefix_read_the_same_pages(device):
    inputs = attention_inputs(4, 8, 128, 64, window_page=256, extra_page=2, device=device)
    for name in ("q", "window_indices", "extra_indices"):
        getattr(inputs, name)[1:] = getattr(inputs, name)[:1]
    out, lse = sglang.attention_sm120(refuse, **sglang_call(inputs))
    assert torch.equal(out, out[:1].expand_as(out)) and torch.equal(lse, lse[:1].expand_as(lse))
    assert rel_err(out.squeeze(1), reference(inputs)) < BF16


@pytest.mark.parametrize(("layers", "offset"), [(1, 0), (5, 0), (3, 576), (2, 4)])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_pages_of_a_pool_that_layers_share(engine, layers, offset, device):
    """A layer's pages stand between those of others, from some address on; what is not this layer's is never read."""
    made = attention_inputs(2, 8, 128, 64, window_page=64, extra_page=2, device=device)

    def pooled(rows):
        pages, size = rows.data.shape
        pool = torch.full((pages * layers * size + offset,), 0xFF, dtype=torch.uint8, device=device)
        own = pool[offset:].view(pages, layers * size)[:, :size]
        own.copy_(rows.data)
        return replace(rows, data=own)

    inputs = replace(made, window=pooled(made.window), extra=pooled(made.extra))
    if engine == "vllm":
        out = vllm_attend(inputs, torch.empty_like(inputs.q))
    else:
        out = sglang.attention_sm120(refuse, **sglang_call(inputs))[0].squeeze(1)
    assert rel_err(out, reference(made)) < BF16


def test_a_rank_without_a_token(device):
    """Data-parallel attention: a rank that idles in a step, and gives what the others expect of it."""
    inputs = attention_inputs(2, 8, 128, 64, device=device)
    none = replace(inputs, **{name: getattr(inputs, name)[:0] for name in ("q", "window_indices", "window_lens")})
    none = replace(none, extra_indices=inputs.extra_indices[:0], extra_lens=inputs.extra_lens[:0])
    out, lse = sglang.attention_sm120(refuse, **sglang_call(none))
    assert out.shape == (0, 1, 8, 512) and lse.shape == (0, 8, 1)
    assert vllm_attend(none, torch.empty_like(none.q)).shape == (0, 8, 512)
    wide = replace(none, q=none.q.new_empty(0, 64, 512), sink=torch.zeros(64, device=device))
    more = {"block_table": None, "cache_seqlens": None, "tile_scheduler_metadata": object(), "is_fp8_kvcache": True}
    with sglang.decode_step(8, captured=True):
        assert sglang.flash_mla(refuse, **sglang_call(wide), **more, use_legacy=True)[0].shape == (0, 1, 8, 512)
    assert all(guard.failed is None for guard in sglang.GUARDS.values())


def test_an_indexer_without_a_token(device):
    (made,) = index_inputs(2, 200, 64, heads=16, device=device)
    q, keys = made.index_q[:0, None], made.keys.data.view(-1, 64, 1, 132)
    table, lens, out = made.block_tables[:0], made.lens[:0], torch.full((0, 64), -7, dtype=torch.int32, device=device)
    call = (q, keys, made.index_weights[:0], lens, table, None, 200, False)
    assert sglang.topk(refuse, sglang.Deferred(refuse, call), lens, table, out, 64) is None and out.shape == (0, 64)


def test_the_indexers_bucket_is_larger_than_the_batch(device):
    """SGLang's lengths of 1, wild ones and pages that are nowhere, behind the batch and after the capture."""
    made, other = (exact_inputs(6, 16, 11, 64, 64, device=device, seed=seed) for seed in (0, 1))
    table = torch.stack([torch.randperm(11) for _ in range(6)]).int().to(device)
    keys, lens = made.keys.data[:, : 64 * 132].view(-1, 64, 1, 132), torch.full((6,), 700, dtype=torch.int32, device=device)
    out = torch.full((6, 64), -7, dtype=torch.int32, device=device)
    call = (made.index_q[:, None], keys, made.index_weights, lens, table, None, 704, False)

    def run():
        sglang.topk(refuse, sglang.Deferred(refuse, call), lens, table, out, 64)
        return out

    def change():
        made.index_q.copy_(other.index_q)
        lens.copy_(torch.tensor([650, 30, 1, 1, NO_ROW, -5], device=device))
        table[3:] = NO_ROW

    got = replayed(run, change, device)
    slots, wide = torch.arange(3, device=device).int(), (other.index_q[:3].double(), made.index_weights[:3].double())
    want, found = index_topk_ref(*wide, made.keys, table, slots, lens[:3], 64)
    assert found.tolist() == [64, 30, 1] and torch.equal(got[:3], want) and (got[3:] == -1).all()


@pytest.mark.parametrize("tokens", [1, 3])
def test_vllms_indexer_in_a_bucket(tokens, device):
    """Sequences that pad a graph have length 0 and a row of the table from earlier steps."""
    sequences = 4
    T = sequences * tokens
    made, other = (exact_inputs(T, 5, 9, 16, 20, device=device, seed=seed) for seed in (0, 1))
    table = torch.stack([torch.randperm(9) for _ in range(sequences)]).int().to(device)
    lens = torch.full((sequences, tokens), 140, dtype=torch.int32, device=device)
    layer = SimpleNamespace(
        k_cache=SimpleNamespace(kv_cache=made.keys.data[:, : 16 * 132].view(-1, 16, 132)), topk_tokens=20, dcp_world_size=1,
        use_pcp=False, skip_k_cache_insert=True, candidate_blocks=None,
    )  # fmt: skip
    decode = SimpleNamespace(
        block_table=table, seq_lens=lens, decode_lens=torch.ones(sequences, dtype=torch.int32), requires_padding=False
    )
    step = SimpleNamespace(num_decode_tokens=T, decode=decode)

    def change():
        made.index_q.copy_(other.index_q)
        lens[:2] = 90 + torch.arange(tokens, device=device).int()
        lens[2:], table[2:] = 0, NO_ROW

    got = replayed(lambda: vllm.choose(layer, made.index_q, made.index_weights, step), change, device)
    slots = torch.arange(sequences, device=device).repeat_interleave(tokens).int()
    wide = made.index_q.double(), made.index_weights.double()
    want, _ = index_topk_ref(*wide, made.keys, table, slots, lens.flatten(), 20, logical=True)
    assert torch.equal(got, want) and (got[2 * tokens :] == -1).all()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_hyper_connections_of_a_bucket(engine, device):
    """Not-a-number in rows that pad stays in these rows."""
    T, C = 5, 64
    made = [torch.randn(T, C, device=device).bfloat16(), torch.randn(T, 4, C, device=device).bfloat16()]
    made += [2 * torch.rand(T, 4, device=device), torch.rand(T, 4, 4, device=device).softmax(-1)]
    y, streams, post, comb = made
    other = [tensor.flip(0).clone() for tensor in made]
    fn, scale, base = torch.randn(24, 4 * C, device=device) / 16, torch.randn(3, device=device), torch.randn(24, device=device)
    norm = torch.rand(C, device=device).bfloat16()

    def run():
        if engine == "sglang":
            call = (y, streams, post, comb, fn, scale, base, 4, 1e-6, 1e-6, 2.0, 20, norm, 1e-6)
            return sglang.mhc_boundary(refuse, *call, fn_transpose=False)[:4]
        out, new_post, new_comb, x = vllm.boundary(
            y, streams, (post.unsqueeze(-1), comb), (fn, scale, base), (1e-6,) * 3, 2.0, 20, (norm, 1e-6)
        )
        return out, x, new_post.squeeze(-1), new_comb

    def change():
        for old, new in zip(made, other, strict=True):
            old.copy_(new)
        streams[3:] = y[4:] = float("nan")

    got = replayed(run, change, device)
    wide = mhc_post_ref(*(tensor[:3].double() for tensor in other))
    x, new_post, new_comb = mhc_pre_ref(wide, fn.double(), base.double(), scale.double(), 1e-6, 1e-6, 20)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    for value, want in zip(got, (wide, x, new_post, new_comb), strict=True):
        assert rel_err(value[:3], want) < HYPER
    assert got[0][3:].isnan().all() and got[1][3:].isnan().all()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_bfloat16_cache_is_the_engines(engine, device):
    made = attention_inputs(2, 8, 128, 0, fmt="bf16", device=device)
    pages = made.window.data[:, : 64 * 512].view(-1, 64, 512)
    if engine == "vllm":
        layer = SimpleNamespace(swa_cache_layer=SimpleNamespace(kv_cache=pages), attn_sink=made.sink, scale=made.scale)
        with pytest.raises(ValueError, match=r"the window's pages must be rows of 584 bytes, got \[4, 64, 512\] bfloat16"):
            vllm.attend(layer, made.q, (made.window_indices, made.window_lens), None, None, torch.empty_like(made.q))
        return
    call = sglang_call(replace(made, window=attention_inputs(2, 8, 128, 0, device=device).window))
    assert sglang.attention_sm120(lambda **kwargs: "SGLang's own", **(call | {"k_cache": pages.unsqueeze(2)})) == "SGLang's own"
