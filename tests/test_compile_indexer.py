"""Every indexer kernel that a default plan can return, compiled for every arch: a stage of its own, of seconds each."""

import importlib.util
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

from deepdecode.cards import CARDS
from deepdecode.kernels.indexer_plan import Case, Config, plan
from deepdecode.testing.compiled import SHARED_LIMIT, Compiled, compile_kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]

# contexts of 8k, 64k and 1M tokens, both selections' widths, keys of either format
SIZES = (
    (2048, 512, "fp8_132"),
    (16384, 512, "fp8_132"),
    (262144, 512, "fp8_132"),
    (262144, 1024, "fp8_132"),
    (2048, 512, "bf16"),
)


def cases(arch: int) -> list[tuple[Case, Config]]:
    card = next(card for card in CARDS if card.arch == arch)
    found = []
    for entries, topk, fmt in SIZES:
        case = Case(1, 64, entries, topk, fmt=fmt, q_dtype="bfloat16" if fmt == "bf16" else "float8_e4m3fn")
        found.append((case, plan(case, card)))
    return found


CASES = [(arch, case, config) for arch in SHARED_LIMIT for case, config in cases(arch)]


def build(arch: int, case: Case, config: Config) -> list[tuple[Compiled, str]]:
    """Both kernels and their SASS. Runs in a process of its own: the interpreted tests set TRITON_INTERPRET in theirs."""
    os.environ.pop("TRITON_INTERPRET", None)
    from deepdecode.kernels import indexer as kernel

    compiled = []
    for function, types, constants, options in kernel.compile_args(config, case):
        one = compile_kernel(function, types, constants, arch, **options)
        compiled.append((one, one.sass()))
    return compiled


@pytest.fixture(scope="module")
def compiler():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("arch", "case", "config"), CASES, ids=[f"sm_{arch}-{case.fmt}-{case.entries}-{case.topk}" for arch, case, _ in CASES]
)
def test_compiles_within_the_card(compiler, arch, case, config):
    (score, sass), (select, _) = compiler.submit(build, arch, case, config).result()
    for compiled in (score, select):
        assert compiled.shared <= SHARED_LIMIT[arch]
        assert compiled.local == 0
    assert re.search(r"HMMA|HGMMA|tcgen05|UTCHMMA|UTCQMMA", sass)
    assert ("e4m3" in score.ptx) == (case.fmt == "fp8_132" and arch >= 89)
    if config.align == 16:
        assert re.search(r"ld\.global[.\w:]*\.v4|cp\.async\.c[ag]\.shared\.global", score.ptx)
    # the programs that the plan puts on an SM fit there
    assert 65536 // (score.registers * config.num_warps * 32) >= 2
