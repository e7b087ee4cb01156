"""Experts of one token, compiled for Hopper in every form that the plan returns: a stage of its own."""

import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from deepdecode.cards import find_card
from deepdecode.kernels.moe_plan import Case, plan_few
from deepdecode.testing.compiled import compile_kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]

# an eighth of every expert, 32 whole ones
RANKS = ((256, 256), (32, 2048))


def compiled(gated, case):
    """Runs in a process of its own: the interpreted tests set TRITON_INTERPRET in theirs."""
    os.environ.pop("TRITON_INTERPRET", None)
    from deepdecode.kernels import moe_few as kernel

    function = kernel.moe_w13_few_kernel if gated else kernel.moe_w2_few_kernel
    found = compile_kernel(function, *kernel.compile_args(gated, case, plan_few(case, find_card("H200"))), 90, num_warps=8)
    return found, found.sass()


@pytest.mark.parametrize(("E", "I"), RANKS)
@pytest.mark.parametrize("gated", [True, False], ids=["w13", "w2"])
def test_compiles_within_the_card(gated, E, I):
    pytest.importorskip("triton.experimental.gluon", reason="Triton's Gluon, from 3.6 on")
    case = Case(1, 6, E, 4096, I, I)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found, sass = pool.submit(compiled, gated, case).result()
    assert found.local == 0
    # two programs of eight warps fit an SM; of an eighth of each expert, four of the second launch
    assert found.registers <= (128 if gated or I > 512 else 64)
    assert "HMMA" in sass
    if not gated and I <= 512:
        # all weights are on their way before the launch in front is waited for, and h comes by one load of each warp
        before, after = sass.split("ACQBULK", 1)
        config = plan_few(case, find_card("H200"))
        assert before.count("LDG.E.128") == config.block_c // 8 * I // 128
        assert after.count("LDG.E.128") <= 3
