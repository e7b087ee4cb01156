"""The plug-ins' path on a GPU, walked without one: tensors that only have shapes, cards of the table, launches that are noted.

What an engine captures into a CUDA graph may look at no value, wait for nothing and bring nothing from the host. Torch's "meta"
tensors stand for the GPU's here: they refuse the first, and copies between them and the host are refused.
"""

import contextlib
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Triton reads it when a kernel is defined, so before the imports below; other tests run these kernels
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from deepdecode.cards import find_card
from deepdecode.kernels import launching
from deepdecode.ops import attention, indexer, launches, moe
from deepdecode.plugins import sglang_ops as sglang
from deepdecode.plugins import vllm_calls as vllm
from deepdecode.plugins.guard import Guard

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
CARDS = ("A100-80", "RTX 3090", "RTX 4090", "H200", "B200", "RTX PRO 6000", "DGX Spark GB10")
# the window's page stride that SGLang has, and the compressed pages' of ratio 4 and 128
STRIDES = {256: 149760, 64: 37440, 2: 1728}


class NoHostCopies(TorchDispatchMode):
    """A copy from or to the host, which a graph cannot hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::copy_", "aten::_to_copy"):
            source = args[1] if func._schema.name == "aten::copy_" else args[0]
            if source.device != out.device:
                raise RuntimeError(f"a copy from {source.device} to {out.device} in a step")
        return out


@pytest.fixture
def gpu(monkeypatch):
    """Gives a context in which tensors are a card's, without values; launches are kept with their grids."""
    launched = []

    def note(kernel, *args, grid, warmup, **options):
        assert not warmup
        size = grid(options) if callable(grid) else grid
        name = kernel.fn.__name__
        assert all(isinstance(n, int) and n > 0 for n in size), (name, size)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        assert tensors and all(tensor.is_cuda for tensor in tensors), name
        launched.append((name, tuple(size)))

    # the ops' bodies, where torch would ask a stand-in of them for shapes
    monkeypatch.setattr(attention, "_attend_op", attention._attend_caches)
    monkeypatch.setattr(indexer, "_index_topk_op", indexer._index_topk)
    monkeypatch.setattr(moe, "_experts_op", moe._experts)
    monkeypatch.setattr(launches, "mhc_boundary", launches.mhc_boundary.__wrapped__)
    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "run", note)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta), raising=False)
    # every storage starts where a multiple of 16 is, as CUDA's allocator has them
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: tensor.storage_offset() * tensor.element_size(), raising=False)
    for name in sglang.GUARDS:
        monkeypatch.setitem(sglang.GUARDS, name, Guard("SGLang", name))
    sglang._rows.cache_clear()

    @contextlib.contextmanager
    def on(name):
        card = find_card(name)
        for module in (
            "kernels.attention_plan",
            "kernels.launching",
            "kernels.indexer",
            "kernels.moe",
            "kernels.moe_stream",
            "plugins.sglang_ops",
        ):
            monkeypatch.setattr(f"deepdecode.{module}.card_of", lambda device: card)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(card.arch, 10))
        launched.clear()
        with NoHostCopies():
            yield launched

    yield on
    sglang._rows.cache_clear()


def refuse(*args, **kwargs):
    raise AssertionError("the engine's own function was called")


def cuda(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def int32(*shape):
    return cuda(*shape, dtype=torch.int32)


def pages(count, size, stride=None):
    """Pages as an engine binds them: a view of rows of 584 bytes in a pool with the engine's stride."""
    stride = stride or STRIDES[size]
    return cuda(count, stride, dtype=torch.uint8)[:, : size * 584].view(count, size, 584)


def sglang_call(T, heads, ratio, page=256):
    width, size = {0: (0, 0), 4: (512, 64), 128: (8192, 2)}[ratio]
    call = {"q": cuda(T, 1, heads, 512, dtype=torch.bfloat16), "k_cache": pages(50, page).unsqueeze(2).view(E4M3)}
    call |= {"indices": int32(T, 1, 128), "topk_length": int32(T), "attn_sink": cuda(heads), "head_dim_v": 512}
    extra = pages(50, size).unsqueeze(2).view(E4M3) if ratio else None
    call |= {"softmax_scale": 512**-0.5, "extra_k_cache": extra}
    return call | {
        "extra_indices_in_kvcache": int32(T, 1, width) if ratio else None,
        "extra_topk_length": int32(T) if ratio else None,
    }


def test_a_look_at_a_value_and_a_copy_from_the_host_are_seen(gpu):
    with gpu("H200"):
        for look in (lambda: int32(3).max().item(), lambda: bool(int32(1) > 0), lambda: int32(3).nonzero()):
            with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
                look()
        for copy in (lambda: torch.zeros(3).to("meta"), lambda: int32(3).copy_(torch.zeros(3))):
            with pytest.raises(RuntimeError, match="a copy from cpu to meta in a step"):
                copy()


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_sglangs_attention(gpu, name, ratio):
    """T of one graph's bucket and of a prefill, own and padded heads, window pages of 256 and 64."""
    with gpu(name) as launched:
        for T, heads, page in ((1, 8, 256), (16, 64, 256), (64, 8, 64), (5000, 8, 256)):
            out, lse = sglang.attention_sm120(refuse, **sglang_call(T, heads, ratio, page))
            assert out.shape == (T, 1, heads, 512) and lse.shape == (T, heads, 1) and out.dtype == torch.bfloat16
            assert launched, (T, heads)
            launched.clear()
    assert sglang.GUARDS["attention"].failed is None


@pytest.mark.parametrize(("name", "captured"), [("H200", True), ("A100-80", False), ("RTX 3090", True), ("RTX 4090", False)])
def test_flash_mla_in_a_decode_step(gpu, name, captured):
    more = {"block_table": None, "cache_seqlens": None, "tile_scheduler_metadata": object(), "is_fp8_kvcache": True}
    with gpu(name) as launched:
        for T, own in ((1, 8), (64, 16), (512, 32), (128, 64)):
            launched.clear()
            with sglang.decode_step(own, captured=captured):
                out, _ = sglang.flash_mla(refuse, **sglang_call(T, 64, 4), **more, use_legacy=True)
            assert out.shape == (T, 1, own, 512) and launched


@pytest.mark.parametrize("name", CARDS)
def test_sglangs_indexer(gpu, name):
    """Tables for a million tokens: what is scored grows with the lengths, which nobody looks at."""
    with gpu(name) as launched:
        for T in (1, 16, 512):
            table, lens, out = int32(T, 4096), int32(T), int32(T, 512)
            keys = cuda(50, 64, 1, 132, dtype=torch.uint8)
            call = (cuda(T, 1, 64, 128, dtype=E4M3), keys, cuda(T, 64), lens, table, None, 262144, False)
            launched.clear()
            sglang.topk(refuse, sglang.Deferred(refuse, call), lens, table, out, 64)
            assert len(launched) >= 2
    assert sglang.GUARDS["indexer"].failed is None


@pytest.mark.parametrize("name", CARDS)
def test_sglangs_boundary(gpu, name):
    with gpu(name) as launched:
        for T in (1, 64):
            launched.clear()
            streams, x, post, comb, normed = sglang.mhc_boundary(
                refuse, cuda(T, 4096, dtype=torch.bfloat16), cuda(T, 4, 4096, dtype=torch.bfloat16), cuda(T, 4), cuda(T, 4, 4),
                cuda(24, 16384), cuda(3), cuda(24), 4, 1e-6, 1e-6, 2.0, 20, cuda(4096, dtype=torch.bfloat16), 1e-6,
                fn_transpose=False,
            )  # fmt: skip
            assert streams.shape == (T, 4, 4096) and x.shape == (T, 4096) and post.shape == (T, 4) and normed
            assert comb.shape == (T, 4, 4) and launched


@pytest.mark.parametrize("name", ["H200", "RTX PRO 6000", "DGX Spark GB10"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_sglangs_experts(gpu, name, ids, monkeypatch):
    standard = SimpleNamespace(StandardCombineInput=lambda hidden_states: hidden_states)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.moe.token_dispatcher.standard", standard)
    config = SimpleNamespace(moe_ep_size=1, gemm1_clamp_limit=None, swiglu_limit=10.0)
    method = SimpleNamespace(moe_runner_config=config, _fp8=SimpleNamespace(process_weights_after_loading=lambda layer: None))
    with gpu(name) as launched:
        layer = SimpleNamespace(
            w13_weight=cuda(256, 512, 2048, dtype=torch.int8), w13_weight_scale_inv=cuda(256, 512, 128, dtype=E8M0),
            w2_weight=cuda(256, 4096, 128, dtype=torch.int8), w2_weight_scale_inv=cuda(256, 4096, 8, dtype=E8M0),
        )  # fmt: skip
        sglang.moe_load(refuse, method, layer)
        for T in (1, 16, 64):
            launched.clear()
            topk = SimpleNamespace(topk_ids=cuda(T, 6, dtype=ids), topk_weights=cuda(T, 6))
            step = SimpleNamespace(hidden_states=cuda(T, 4096, dtype=torch.bfloat16), topk_output=topk)
            assert sglang.moe_apply(refuse, method, layer, step).shape == (T, 4096) and launched
    assert sglang.GUARDS["moe"].failed is None


# vLLM


@pytest.mark.parametrize("name", ["H200", "B200", "RTX PRO 6000", "DGX Spark GB10"])
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_vllms_attention(gpu, name, ratio):
    """Into the rows of the decode tokens of vLLM's buffer; ratio 128's indices are columns of a wider one, on Hopper."""
    width, size = {1: (0, 64), 4: (512, 64), 128: (8192, 2)}[ratio]
    with gpu(name) as launched:
        for T, heads in ((1, 64), (16, 8), (256, 64), (64, 128)):
            launched.clear()
            # a pool that several layers share: pages stand further apart
            layer = SimpleNamespace(
                swa_cache_layer=SimpleNamespace(kv_cache=pages(50, 64, 3 * STRIDES[64])),
                attn_sink=torch.nn.Parameter(cuda(heads), requires_grad=False), scale=512**-0.5,
            )  # fmt: skip
            window = int32(300, 1, 128)[:T], int32(300)[:T]
            chosen = None if ratio == 1 else (int32(T, 1, 2 * width)[..., :width], int32(300)[:T])
            output = cuda(T + 7, heads, 512, dtype=torch.bfloat16)[:T]
            cache = None if ratio == 1 else pages(50, size)
            assert vllm.attend(layer, cuda(T, heads, 512, dtype=torch.bfloat16), window, cache, chosen, output) is None
            assert launched


@pytest.mark.parametrize("name", ["A100-80", "H200", "RTX PRO 6000"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_vllms_indexer(gpu, name, tokens):
    """Several tokens of a sequence as in speculation; step sizes of graphs, more rows of q than decode tokens."""
    with gpu(name) as launched:
        for sequences in (1, 32):
            launched.clear()
            T = sequences * tokens
            layer = SimpleNamespace(
                k_cache=SimpleNamespace(kv_cache=cuda(50, 64, 132, dtype=torch.uint8)), topk_tokens=512, dcp_world_size=1,
                use_pcp=False, skip_k_cache_insert=True, candidate_blocks=None,
            )  # fmt: skip
            decode = SimpleNamespace(
                block_table=int32(sequences, 4096), seq_lens=int32(sequences, tokens), decode_lens=int32(sequences),
                requires_padding=False,
            )  # fmt: skip
            step = SimpleNamespace(num_decode_tokens=T, decode=decode)
            chosen = vllm.choose(layer, cuda(T + 3, 64, 128, dtype=E4M3), cuda(T + 3, 64), step)
            assert chosen.shape == (T, 512) and len(launched) >= 2


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("first", [True, False])
def test_vllms_boundary(gpu, name, first):
    with gpu(name) as launched:
        for T in (1, 64):
            launched.clear()
            streams = cuda(T, 4, 4096, dtype=torch.bfloat16)
            gates = None if first else (cuda(T, 4, 1), cuda(T, 4, 4))
            site, norm = (cuda(24, 16384), cuda(3), cuda(24)), (cuda(4096, dtype=torch.bfloat16), 1e-6)
            y = None if first else cuda(T, 4096, dtype=torch.bfloat16)
            out, post, comb, x = vllm.boundary(y, streams, gates, site, (1e-6,) * 3, 2.0, 20, norm)
            assert (out is streams) == first and out.shape == streams.shape and x.shape == (T, 4096)
            assert post.shape == (T, 4, 1) and comb.shape == (T, 4, 4) and launched


def test_without_gluon_hopper_runs_what_every_card_runs(gpu, monkeypatch):
    with gpu("H200") as launched:
        sglang.attention_sm120(refuse, **sglang_call(1, 8, 4))
        with_gluon = list(launched)
        monkeypatch.setattr(launching, "gluon_ready", lambda: False)
        launched.clear()
        sglang.attention_sm120(refuse, **sglang_call(1, 8, 4))
    assert with_gluon[0][0] != launched[0][0] == "split_kernel"
