"""The fused glue compiled for every arch, at V4-Flash's sizes and where they differ V4-Pro's: a stage of its own."""

import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from deepdecode.testing.compiled import SHARED_LIMIT, compile_kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]


def ints(names, kind="i32"):
    return dict.fromkeys(names.split(), kind)


def pointers(**types):
    return {f"{name}_ptr": f"*{kind}:16" for name, kind in types.items()}


def mhc_mix(arch, C=4096, rows=24, T=5):
    from deepdecode.kernels import mhc as kernel

    config = kernel.plan(C, arch, T)
    types = pointers(
        y="bf16", streams="bf16", post="fp32", comb="fp32", fn="fp32", out="bf16", part="fp32"
    ) | {"T": "i32", "C": "i32:16"}  # fmt: skip
    constants = {"HAS_Y": True, "ROWS": rows, "BLOCK_R": 32 if rows == 24 else 16, "BLOCK_T": config.block_t}
    constants |= {"BLOCK_C": config.block_c, "PDL": config.pdl, "INTERPRET": False}
    return kernel.mhc_mix_kernel, types, constants, config.mix_warps


def mhc_mix_few(arch, C=4096, rows=24):
    from deepdecode.kernels import mhc as kernel

    config = kernel.plan(C, arch, 1)
    types = pointers(
        y="bf16", streams="bf16", post="fp32", comb="fp32", fn="fp32", out="bf16", part="fp32"
    ) | {"T": "i32", "C": "i32:16"}  # fmt: skip
    constants = {"HAS_Y": True, "ROWS": rows, "BLOCK_R": 32 if rows == 24 else 16, "BLOCK_C": config.block_c, "PDL": config.pdl}
    return kernel.mhc_mix_few_kernel, types, constants, config.mix_warps


def mhc_read(arch, C=4096, rows=24):
    from deepdecode.kernels import mhc as kernel

    config = kernel.plan(C, arch)
    types = pointers(streams="bf16", part="fp32", base="fp32", scale="fp32", norm="bf16", x="bf16")
    types |= pointers(post="fp32", comb="fp32") if rows == 24 else {}
    types |= {"T": "i32", "C": "i32:16", "splits": "i32:16", "iters": "i32", "norm_eps": "fp32", "hc_eps": "fp32"}
    splits, block_c = (128, 4096) if C == 4096 else (256, 8192)
    constants = {
        "ROWS": rows,
        "BLOCK_R": 32 if rows == 24 else 16,
        "BLOCK_S": splits,
        "BLOCK_C": block_c,
        "PDL": config.pdl,
        "INTERPRET": False,
    }
    return kernel.mhc_read_kernel, types, constants, config.read_warps


def prepare(arch, ratio=4, fp8=True, latent=1024):
    from deepdecode.kernels import prepare as kernel

    config = kernel.plan(64, arch)
    rows = "u8" if fp8 else "bf16"
    types = pointers(
        q="bf16", kv="bf16", kv_norm="bf16", q_out="bf16", positions="i32", slots="i32", freqs="fp32", window_write="i32",
        window=rows,
    )  # fmt: skip
    side = {"kv": "fp32", "gate": "fp32", "ape": "fp32", "norm": "bf16", "state_kv": "fp32", "state_score": "fp32"}
    if ratio:
        types |= pointers(entry_write="i32", comp=rows, **{f"comp_{name}": kind for name, kind in side.items()})
    if ratio == 4:
        types |= pointers(keys=rows, **{f"index_{name}": kind for name, kind in side.items()})
        types |= pointers(index_q="bf16", index_q_out=rows, weights="fp32", weights_out="fp32")
    types |= ints("H slots window_rows window_page comp_rows comp_page key_rows key_page")
    types |= ints("window_stride comp_stride key_stride stride_qt stride_kvt stride_comp_t stride_index_t", "i32:16")
    types |= ints("stride_index_qt stride_weights_t", "i32:16") | ints("norm_eps index_scale", "fp32")
    constants = {"RATIO": ratio, "FP8": fp8, "KEYS_FP8": fp8 and ratio == 4, "D": 512, "R": 64, "BLOCK_H": config.block_h}
    constants |= {"INDEX_H": 64 if ratio == 4 else 16, "INDEX_D": 128 if ratio == 4 else 16, "LATENT": latent}
    types |= (pointers(latent="bf16") if latent else {}) | {"stride_latent_t": "i32:16"}
    return kernel.rope_prepare_kernel, types, constants | {"PDL": config.pdl, "INTERPRET": False}, config.num_warps


def merge(arch, splits=10, rope_dim=64):
    from deepdecode.kernels import attention_merge as kernel

    types = pointers(out="bf16", part="fp16", part_lse="fp32", part_unit="fp32") | ints("H splits") | {"sink_ptr": "*fp32"}
    types |= pointers(freqs="fp32") | {"positions_ptr": "*i32"} if rope_dim else {}
    constants = {"HAS_SINK": True, "HAS_LSE": False, "R": rope_dim, "STEP": splits, "ONCE": True, "PDL": arch >= 90}
    return kernel.merge_kernel, types, constants | {"INTERPRET": False}, 4


def gate_logits(arch):
    from deepdecode.kernels import gate as kernel

    config = kernel.plan(arch)
    types = pointers(x="bf16", weight="bf16", part="fp32") | ints("C E stride_xt", "i32:16") | {"T": "i32"}
    constants = {"BLOCK_E": config.block_e, "BLOCK_K": config.block_k, "BLOCK_T": config.block_t}
    return kernel.gate_logits_kernel, types, constants | {"PDL": config.pdl, "INTERPRET": False}, config.num_warps


def gate_top(arch):
    from deepdecode.kernels import gate as kernel

    types = pointers(part="fp32", bias="fp32", ids="i32", weights="fp32") | {"T": "i32", "E": "i32:16", "routed_scale": "fp32"}
    constants = {"SPLITS": 8, "TOP": 6, "BLOCK_E": 256, "HAS_BIAS": True, "PDL": arch >= 90}
    return kernel.gate_top_kernel, types, constants, 1


def gate_hash(arch):
    from deepdecode.kernels import gate as kernel

    types = pointers(x="bf16", weight="bf16", table="i32", tokens="i64", ids="i32", weights="fp32")
    types |= ints("C E vocab stride_xt", "i32:16") | {"routed_scale": "fp32"}
    return kernel.gate_hash_kernel, types, {"TOP": 6, "BLOCK_TOP": 8, "BLOCK_C": 4096, "PDL": arch >= 90}, 16


def rms_norm(arch):
    from deepdecode.kernels import norm as kernel

    types = pointers(x="bf16", weight="bf16", out="bf16") | ints("C stride_xt", "i32:16") | {"eps": "fp32"}
    return kernel.rms_norm_kernel, types, {"BLOCK_C": 1024, "PDL": arch >= 90}, 2


def embed(arch):
    from deepdecode.kernels import embed as kernel

    types = pointers(tokens="i64", weight="bf16", out="bf16") | ints("C", "i32:16")
    return kernel.embedding_kernel, types, {"STREAMS": 4, "BLOCK_C": 1024, "PDL": arch >= 90}, 4


def rope(arch):
    from deepdecode.kernels import rope as kernel

    types = pointers(x="bf16", positions="i32", freqs="fp32", out="bf16") | {"H": "i32"}
    constants = {"D": 512, "R": 64, "INVERSE": True, "BLOCK_H": 8, "PDL": arch >= 90, "INTERPRET": False}
    return kernel.rope_kernel, types, constants, 4


def step(arch):
    from deepdecode.kernels import step as kernel

    types = pointers(tokens="i64", tokens_out="i64", positions="i32", slots="i32", tables="i32")
    types |= pointers(window_write="i32", window_indices="i32", window_lens="i32")
    types |= pointers(write_4="i32", lens_4="i32", write_128="i32", lens_128="i32")
    types |= pointers(entry_indices="i32") | ints("vocab slots pages width ring window logical_page")
    constants = {"HAS_4": True, "HAS_128": True, "BLOCK_W": 128, "BLOCK_E": 1024, "PDL": arch >= 90}
    return kernel.step_index_kernel, types, constants, 4


def sample(arch, name, logits="fp32"):
    from deepdecode.kernels import sample as kernel

    chunk, _, warps = kernel.plan(1, 129280)
    function = getattr(kernel, f"sample_{name}_kernel")
    kinds = {"logits": logits, "temperature": "fp64", "top_p": "fp64", "seeds": "i64", "positions": "i64", "out": "i64"}
    kinds |= {"peaks": "i64", "totals": "fp32", "sums": "fp32", "listed": "i32", "ids": "i32"}
    types = {key: kind for key, kind in pointers(**kinds).items() if key in function.arg_names}
    types |= ints("V stride_t", "i32:16") | (ints("chunks") if name != "peak" else {})
    known = {"CHUNK": chunk, "BLOCK_S": 32, "LISTED": kernel.LISTED, "LANES": 2048, "PDL": arch >= 90}
    constants = {key: value for key, value in known.items() if key in function.arg_names}
    return function, types, constants, warps


CASES = {
    "mhc_mix": (mhc_mix, {}),
    "mhc_mix-16": (mhc_mix, {"T": 16}),
    "mhc_mix-32": (mhc_mix, {"T": 32}),
    "mhc_mix-64": (mhc_mix, {"T": 64}),
    "mhc_mix-head": (mhc_mix, {"rows": 4}),
    "mhc_few": (mhc_mix_few, {}),
    "mhc_few-head": (mhc_mix_few, {"rows": 4}),
    "mhc_read": (mhc_read, {}),
    "mhc_read-pro": (mhc_read, {"C": 7168}),
    "mhc_read-head": (mhc_read, {"rows": 4}),
    "prepare-0": (prepare, {"ratio": 0}),
    "prepare-4": (prepare, {}),
    "prepare-4-bf16": (prepare, {"fp8": False}),
    "prepare-128": (prepare, {"ratio": 128}),
    "prepare-4-normed": (prepare, {"latent": 0}),
    "merge": (merge, {}),
    "merge-not-turned": (merge, {"rope_dim": 0}),
    "gate_logits": (gate_logits, {}),
    "gate_top": (gate_top, {}),
    "gate_hash": (gate_hash, {}),
    "rms_norm": (rms_norm, {}),
    "embed": (embed, {}),
    "rope": (rope, {}),
    "step": (step, {}),
    "sample_peak": (sample, {"name": "peak"}),
    "sample_cells": (sample, {"name": "cells"}),
    "sample_cells-bf16": (sample, {"name": "cells", "logits": "bf16"}),
    "sample_list": (sample, {"name": "list"}),
    "sample_draw": (sample, {"name": "draw"}),
}


def build(name: str, arch: int):
    """Runs in a process of its own: the interpreted tests set TRITON_INTERPRET in theirs."""
    os.environ.pop("TRITON_INTERPRET", None)
    make, options = CASES[name]
    function, types, constants, warps = make(arch, **options)
    return compile_kernel(function, types, constants, arch, num_warps=warps)


@pytest.fixture(scope="module")
def compiler():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("arch", SHARED_LIMIT)
@pytest.mark.parametrize("name", CASES)
def test_compiles_within_the_card(compiler, name, arch):
    compiled = compiler.submit(build, name, arch).result()
    assert compiled.shared <= SHARED_LIMIT[arch]
    assert compiled.local == 0
    assert "e4m3" not in compiled.ptx
    if "mix" in name or "logits" in name:
        # tensor cores, not FMA
        assert "mma" in compiled.ptx
    if "few" in name:
        # nothing passes through shared memory but what two warps add
        assert "mma" not in compiled.ptx
        assert compiled.shared <= 256
