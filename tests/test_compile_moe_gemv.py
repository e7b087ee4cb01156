"""Experts of one token without tensor cores, compiled for every arch that has them: a stage of its own."""

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


def compiled(name, arch):
    """Runs in a process of its own: the interpreted tests set TRITON_INTERPRET in theirs."""
    os.environ.pop("TRITON_INTERPRET", None)
    from deepdecode.kernels import moe_gemv as kernel

    function = kernel.moe_w13_gemv_kernel if name == "w13" else kernel.moe_w2_gemv_kernel
    kinds = {"x": "bf16", "x_words": "i32", "h": "bf16", "h_words": "i32", "shared_h": "bf16", "ids": "i32", "weights": "fp32"}
    kinds |= {"w": "u8", "scale": "u8", "shared": "u8", "shared_scale": "u8", "out": "bf16"}
    types = {f"{part}_ptr": f"*{kind}:16" for part, kind in kinds.items()} | {"limit": "fp32"}
    types |= dict.fromkeys(("T", "top_k", "first", "E"), "i32") | dict.fromkeys(("K", "I", "SHARED_I", "C"), "i32:16")
    types |= {argument: "i32:16" for argument in function.arg_names if argument.startswith("stride_")}
    types = {argument: kind for argument, kind in types.items() if argument in function.arg_names}
    constants = {"E8M0": True, "STEP": 1, "PDL": arch >= 90, "INTERPRET": False}
    if name == "w13":
        constants |= {"BLOCK_I": kernel.BLOCK_I, "BLOCK_K": 4096}
        return compile_kernel(function, types, constants, arch, num_warps=8)
    constants |= {"TOP": 6, "BLOCK_C": kernel.BLOCK_C, "BLOCK_I": 256, "BLOCK_SHARED": 256}
    return compile_kernel(function, types, constants, arch, num_warps=1)


@pytest.mark.parametrize("arch", [arch for arch in SHARED_LIMIT if arch >= 89])
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_compiles_within_the_card(name, arch):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(compiled, name, arch).result()
    assert found.local == 0
    # 20 warps and more fit an SM
    assert found.registers <= 96
    assert found.shared <= 1024
