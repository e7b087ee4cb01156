"""Rivals that run beside us, from the folder that DEEPDECODE_PEERS names. None is a dependency.

The folder holds unpacked wheels: `flash_mla/` of PyPI's sgl-flash-mla, `sglang/` of PyPI's sglang (its attention kernels are
enough: what they import from the engine is replaced by stand-ins here), `deep_gemm/` of PyPI's sgl-deep-gemm 0.1.4.post1 and
`tvm_ffi/` of apache-tvm-ffi 0.1.11, which it stands on. DeepGEMM compiles its kernels at their first call with nvcc, 5 s each,
into DG_JIT_CACHE_DIR.
"""

import importlib
import os
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from deepdecode.bench.cells import Missing
from deepdecode.ops.rows import PagedRows
from deepdecode.testing.inputs import AttentionInputs

# Each function takes inputs and an output, runs once into the output, and gives the call to time.


def add_peers() -> None:
    folder = os.environ.get("DEEPDECODE_PEERS")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)


@cache
def deep_gemm() -> Any:
    """DeepGEMM's module; `Missing` says why it is not here."""
    add_peers()
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        # it finds its library and CUDA's compiler while it is imported
        raise Missing(f"deep_gemm: {type(error).__name__}: {error}") from None


def engine_view(cache: PagedRows) -> torch.Tensor:
    """fp8_584 pages as engines hand them over: [pages, page_size, 1, 584] uint8 with the pages' own stride."""
    return cache.data.as_strided((cache.data.shape[0], cache.page_size, 1, 584), (cache.data.stride(0), 584, 584, 1))


def flash_mla(inputs: AttentionInputs, out: torch.Tensor, *, pad: bool = True) -> Callable[[], Any]:
    """FlashMLA's Hopper kernel. It takes 64 or 128 heads: fewer are padded, in the timed call if `pad`, before it if not."""
    add_peers()
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    q, window, indices, lens, extra, extra_indices, extra_lens = inputs.args()
    T, H, _ = q.shape
    heads = 64 if H <= 64 else 128
    wide = torch.zeros(T, heads, 512, dtype=q.dtype, device=q.device)
    wide[:, :H] = q
    sink = torch.zeros(heads, device=q.device)
    if inputs.sink is not None:
        sink[:H] = inputs.sink
    metadata, _ = get_mla_metadata()
    arguments: dict[str, Any] = {"indices": indices.unsqueeze(1), "topk_length": lens, "attn_sink": sink}
    if extra is not None and extra_indices is not None:
        arguments |= {"extra_k_cache": engine_view(extra), "extra_indices_in_kvcache": extra_indices.unsqueeze(1)}
        arguments |= {"extra_topk_length": extra_lens}
    keys = engine_view(window)

    def call() -> torch.Tensor:
        if pad and heads != H:
            wide[:, :H] = q
        return flash_mla_with_kvcache(
            wide.unsqueeze(1), keys, None, None, 512, metadata, softmax_scale=inputs.scale, use_legacy=True, **arguments
        )[0]

    out.copy_(call().view(T, heads, 512)[:, :H])
    return call


def flash_mla_padded(inputs: AttentionInputs, out: torch.Tensor) -> Callable[[], Any]:
    return flash_mla(inputs, out, pad=False)


def sglang_fallback(inputs: AttentionInputs, out: torch.Tensor, *, pad: bool = False) -> Callable[[], Any]:
    """SGLang's fallback: what rung 0 stands for. pad: 64 heads whatever q has, as it once was called."""
    module = _sglang("flash_mla_sm120_triton")
    q, window, indices, lens, extra, extra_indices, extra_lens = inputs.args()
    T, H, _ = q.shape
    heads = 64 if pad else H
    wide = torch.zeros(T, heads, 512, dtype=q.dtype, device=q.device)
    wide[:, :H] = q
    sink = torch.zeros(heads, device=q.device)
    if inputs.sink is not None:
        sink[:H] = inputs.sink
    more = () if extra is None else (engine_view(extra), extra_indices, extra_lens)

    def call() -> torch.Tensor:
        return module.flash_mla_sparse_decode_triton(
            wide.unsqueeze(1), engine_view(window), indices, lens, sink, 512, inputs.scale, *more
        )[0]

    out.copy_(call().view(T, heads, 512)[:, :H])
    return call


def sglang_fallback_padded(inputs: AttentionInputs, out: torch.Tensor) -> Callable[[], Any]:
    return sglang_fallback(inputs, out, pad=True)


def sglang_dual(inputs: AttentionInputs, out: torch.Tensor) -> Callable[[], Any]:
    """SGLang's dual-scope split-K kernel, written for ROCm and plain Triton."""
    package = _sglang("dsv4.triton_sparse_decode")
    q, window, indices, lens, extra, extra_indices, extra_lens = inputs.args()
    arguments: dict[str, Any] = {"indices": indices.unsqueeze(1), "topk_length": lens, "attn_sink": inputs.sink}
    if extra is not None and extra_indices is not None:
        arguments |= {"extra_k_cache": engine_view(extra), "extra_indices_in_kvcache": extra_indices.unsqueeze(1)}
        arguments |= {"extra_topk_length": extra_lens}

    def call() -> torch.Tensor:
        return package.triton_fp8_attention_fwd(q.unsqueeze(1), engine_view(window), 512, inputs.scale, **arguments)[0]

    out.copy_(call().view_as(out))
    return call


def sglang_sm120() -> Any:
    """SGLang's own module of what it decodes with on sm_120, set to its Triton kernel."""
    variable = types.SimpleNamespace(get=lambda: "triton")
    values = {"utils.is_hip": lambda: False, "environ.envs": types.SimpleNamespace(SGLANG_SM120_FLASHMLA_BACKEND=variable)}
    for path, value in values.items():
        name, attribute = path.split(".")
        module = types.ModuleType(f"sglang.srt.{name}")
        setattr(sys.modules.setdefault(module.__name__, module), attribute, value)
    return _sglang("flash_mla_sm120")


def _sglang(name: str) -> Any:
    """A module of sglang.kernels.ops.attention, without the engine that its package would import."""
    add_peers()
    folder = os.environ.get("DEEPDECODE_PEERS", "")
    path = "sglang/kernels/ops/attention"
    parts = path.split("/")
    for n in range(1, len(parts) + 1):
        package = types.ModuleType(".".join(parts[:n]))
        package.__path__ = [os.path.join(folder, *parts[:n])]
        sys.modules.setdefault(package.__name__, package)
    dsv4 = types.ModuleType("sglang.kernels.ops.attention.dsv4")
    dsv4.__path__ = [os.path.join(folder, path, "dsv4")]
    sys.modules.setdefault(dsv4.__name__, dsv4)
    for stand_in in ("sglang.srt", "sglang.srt.utils"):
        sys.modules.setdefault(stand_in, types.ModuleType(stand_in))
    common = types.ModuleType("sglang.srt.utils.common")
    common.is_gfx942_supported = lambda: False  # type: ignore[attr-defined]
    sys.modules.setdefault(common.__name__, common)
    return importlib.import_module(f"sglang.kernels.ops.attention.{name}")
