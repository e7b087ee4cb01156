"""Every kernel that a default plan can return, compiled for every arch: a stage of its own, since each takes seconds."""

import importlib.util
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

from deepdecode.bench.tune import SHAPES
from deepdecode.cards import CARDS
from deepdecode.kernels.attention_plan import Case, Config, plan
from deepdecode.testing.compiled import SHARED_LIMIT, Compiled, compile_kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]

# bytes of a thread in local memory that stand, each with its reason; the contract allows 256
SPILLS = {
    # three roles share 504 registers a thread of each: kernel arguments that one role reads once wait in memory
    ("wide", 64): 128,
    # accumulators and one tile of raw words take 255: what is spilled is read once a tile
    ("narrow", 8): 64,
    ("narrow", 16): 256,
    ("narrow", 32): 256,
    # accumulators, the next tile and the addresses of the one after take 255: what is spilled is read once a tile at most
    ("mma", 8): 128,
    ("mma", 16): 256,
}


def reachable(arch: int) -> list[tuple[str, Config]]:
    """One config for each kernel shape that plans return on cards of this arch, over both forms, with and without splits."""
    found = {}
    for card in CARDS:
        if card.arch != arch:
            continue
        for fmt in ("fp8_584", "bf16"):
            for H in (8, 16, 32, 64, 128):
                for T in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                    for extra in (0, 512, 1024, 8192):
                        config = plan(Case(T, H, 128, extra, fmt, fmt), card)
                        found[fmt, config.kernel, config.block_h, config.block_n, config.splits > 1] = config
    # the split form stands for both where both are reached: its epilogue is the longer one
    return [(key[0], config) for key, config in sorted(found.items()) if key[4] or (*key[:4], True) not in found]


CASES = [(arch, fmt, config) for arch in SHARED_LIMIT for fmt, config in reachable(arch)]


def build(arch: int, fmt: str, config: Config) -> tuple[Compiled, str]:
    """The compiled kernel and its SASS. Runs in a process of its own: the interpreted tests set TRITON_INTERPRET in theirs."""
    os.environ.pop("TRITON_INTERPRET", None)
    if config.kernel == "mma":
        from deepdecode.kernels import attention as kernel

        types, constants = kernel.compile_args(config, fmt)
        compiled = compile_kernel(kernel.split_kernel, types, constants, arch, num_warps=config.num_warps, num_stages=1)
        return compiled, compiled.sass()
    from deepdecode.kernels import attention_sm90 as hopper

    types, constants = hopper.compile_args(config)
    compiled = compile_kernel(hopper.KERNELS[config.kernel], types, constants, arch, **hopper.options(config))
    return compiled, compiled.sass()


# arrivals at mbarriers: of wide full, q_max and empty twice, p_full, q_full, done; of piped full twice, empty
ARRIVALS = {"wide": 8, "piped": 3}


def unguarded(sass: str) -> list[str]:
    """Accesses to shared memory with no barrier between them and the next arrival at an mbarrier."""
    last, found = "nothing", []
    for op in re.findall(r"\b(BAR\.SYNC|STSM?|LDSM?|SYNCS\.ARRIVE)\b", sass):
        if op != "SYNCS.ARRIVE":
            last = op
        elif last != "BAR.SYNC":
            found.append(last)
    return found


@pytest.fixture(scope="module")
def compiler():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("arch", "fmt", "config"), CASES, ids=[f"sm_{a}-{f}-{c.kernel}-{c.block_h}x{c.block_n}" for a, f, c in CASES]
)
def test_compiles_within_the_card(compiler, arch, fmt, config):
    compiled, sass = compiler.submit(build, arch, fmt, config).result()
    shape = (config.kernel, config.block_h, config.block_n, config.num_warps, fmt)
    shared, per_sm = next(entry[5:] for entry in SHAPES if entry[:5] == shape)
    assert compiled.shared <= SHARED_LIMIT[arch]
    # the plan reckons with these: never more shared memory, never fewer programs on an SM by registers. On sm_100 operands
    # of its tensor cores take more; two programs must fit there as well
    assert compiled.shared <= (112 << 10 if arch == 100 else shared)
    threads = config.num_warps * 32 * (3 if config.kernel in ("piped", "wide") else 1)
    assert 65536 // (compiled.registers * threads) >= min(per_sm, 2)
    assert compiled.local <= SPILLS.get((config.kernel, config.block_h), 0)
    assert "HMMA" in sass or "HGMMA" in sass
    assert re.search(r"ld\.global[.\w:]*\.v4|cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", compiled.ptx)
    if arch < 89:
        assert "e4m3" not in compiled.ptx
    # one thread says for its role that buffers are full or free: all that the role stored or read comes before
    assert sass.count("SYNCS.ARRIVE") == ARRIVALS.get(config.kernel, 0)
    assert unguarded(sass) == []


def test_an_access_between_barrier_and_arrival_is_found():
    guarded = "STS [R1], R2 ; BAR.SYNC 0x0 ; IADD3 R1, R1 ; @!P3 SYNCS.ARRIVE.TRANS64 RZ, [R4] ; "
    assert unguarded(guarded + guarded) == []
    assert unguarded(guarded.replace("IADD3 R1,", "LDS.64 R1,") + guarded) == ["LDS"]
    assert unguarded(guarded + guarded.replace("BAR.SYNC", "NOP").replace("STS", "STSM.16.M88.4")) == ["STSM"]


def test_every_arch_has_few_configs():
    for arch in SHARED_LIMIT:
        assert 2 <= sum(case[0] == arch for case in CASES) <= 8
