"""Products and experts, compiled for every arch in every form that a default plan can return: a stage of its own."""

import importlib.util
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

from deepdecode.cards import CARDS, find_card
from deepdecode.kernels import linear_plan, moe_plan
from deepdecode.testing.compiled import SHARED_LIMIT, Compiled, compile_kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# kind, groups, rows of a group, columns: the model's sets whole, and a rank's eighth where that takes another form
SIZES = (
    ("fp8", 1, 1536, 4096),
    ("fp8", 1, 40960, 1024),
    ("fp8", 8, 1024, 4096),
    ("fp8", 1, 4096, 8192),
    ("fp8", 1, 12288, 1024),
    ("fp8", 1, 4096, 1024),
)
SIZES += (("plain", 1, 2624, 4096), ("plain", 1, 129280, 4096))
RANKS = ((256, 2048), (256, 256), (32, 2048))


def reachable(arch: int) -> list[tuple[str, str, object]]:
    """(kernel, kind, config) for each form that plans return on cards of this arch."""
    found = {}
    for card in CARDS:
        if card.arch != arch:
            continue
        for T in TOKENS:
            for kind, groups, out, K in SIZES:
                weight = "fp8" if kind == "fp8" else "bfloat16"
                config = linear_plan.plan(linear_plan.Case(T, groups, out, K, weight), card)
                found["linear", kind, config] = None
            for beside in (0, 2624, 1024):
                config = linear_plan.plan(linear_plan.Case(T, 1, 1536, 4096, "fp8", beside=beside), card)
                found["linear and latent" + " and beside" * (beside > 0), "fp8", config] = None
            for E, I in RANKS:
                config = moe_plan.plan(moe_plan.Case(T, 6, E, 4096, I, I), card)
                found["w13", "fp4", config] = found["w2", "fp4", config] = None
    return list(found)


def streams() -> dict[tuple[bool, object], moe_plan.Case]:
    """(gated, config) of each form that the streaming launches take on Hopper, with the first case that takes it."""
    found = {}
    for T in TOKENS:
        for E, I in RANKS:
            # the shared expert of all tokens, or of an eighth of them
            for rows in (None, -(-T // 8)):
                case = moe_plan.Case(T, 6, E, 4096, I, I, shared_rows=rows)
                config = moe_plan.plan_stream(case, find_card("H200"))
                if config is not None:
                    for gated in (True, False):
                        found.setdefault((gated, I, config), case)
    return found


CASES = [(arch, *form) for arch in SHARED_LIMIT for form in reachable(arch)]


STREAMS = streams()


def build_stream(gated: bool, case: moe_plan.Case, config: moe_plan.Stream) -> tuple[Compiled, str]:
    os.environ.pop("TRITON_INTERPRET", None)
    from deepdecode.kernels import moe_stream

    options = moe_stream.options(config.w13 if gated else config.w2)
    compiled = compile_kernel(moe_stream.experts_kernel, *moe_stream.compile_args(gated, case, config), 90, **options)
    return compiled, compiled.sass()


def build(arch: int, name: str, kind: str, config) -> tuple[Compiled, str]:
    """The compiled kernel and its SASS. Runs in a process of its own: the interpreted tests set TRITON_INTERPRET in theirs."""
    os.environ.pop("TRITON_INTERPRET", None)
    from deepdecode.kernels import linear, moe

    if "linear" in name:
        forms = {"beside": "beside" in name, "latent": 1024 if "latent" in name else 0}
        *arguments, options = linear.compile_args(config, kind, **forms)
        compiled = compile_kernel(*arguments, arch, **options)
        return compiled, compiled.sass()
    function = moe.w13_kernel if name == "w13" else moe.w2_kernel
    tile = tile_of(name, config)
    arguments = moe.compile_args(name, config, kind)
    compiled = compile_kernel(function, *arguments, arch, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return compiled, compiled.sass()


def tile_of(name: str, config):
    """What says warps and stages."""
    return config if "linear" in name else config.w13 if name == "w13" else config.w2


@pytest.fixture(scope="module")
def compiler():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("arch", "name", "kind", "config"), CASES, ids=[f"sm_{case[0]}-{case[1]}-{case[2]}-{n}" for n, case in enumerate(CASES)]
)
def test_compiles_within_the_card(compiler, arch, name, kind, config):
    compiled, sass = compiler.submit(build, arch, name, kind, config).result()
    assert compiled.shared <= SHARED_LIMIT[arch]
    if isinstance(config, linear_plan.Gemv):
        # 4 KB of weights in flight for each warp, of which so many fit an SM; tiles of codes and of tokens have one layout, so
        # none passes through shared memory
        assert compiled.local == 0
        assert 65536 // (compiled.registers * 32) >= (16 if config.tokens == 1 else 12)
        assert compiled.shared <= 1024
        assert "MMA" not in sass
        if config.pdl and kind == "fp8" and name == "linear":
            # all codes are on their way before the launch in front is waited for
            before, after = (re.findall(r"ld\.global\S*v2\.b32", part) for part in compiled.ptx.split("griddepcontrol.wait"))
            assert len(before) == config.block_m * config.block_k // (8 * 32 * config.num_warps)
            assert not after
        return
    # what finds the pairs of an expert may keep two registers in memory; the loops keep none
    assert compiled.local <= 16
    # two programs of 4 warps and more fit an SM
    assert 65536 // (compiled.registers * tile_of(name, config).num_warps * 32) >= 2
    assert "HMMA" in sass or "HGMMA" in sass or "UTCHMMA" in sass
    # weights come 16 bytes at a time
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", compiled.ptx)
    # an FP8 instruction is there from sm_89 on, and needed nowhere else
    convert = "linear" in name and kind == "fp8" and arch >= 89
    assert ("cvt.rn.f16x2.e4m3x2" in compiled.ptx) == getattr(config, "convert", False) == convert
    assert convert or "e4m3" not in compiled.ptx
    if convert:
        # eight rows of a tile are not in one bank
        assert "swizzled_shared" in compiled.ttgir and "maxPhase = 1," not in compiled.ttgir
    widened = layouts_of_codes(compiled.ttgir)
    assert widened if kind != "plain" else not widened
    assert all(re.search(r"kWidth = [48]|register = \[\[0, 0, 1\], \[0, 0, 2\]", layout) for layout in widened), widened


@pytest.mark.parametrize(("gated", "config", "case"), [(*key[::2], case) for key, case in STREAMS.items()])
def test_streams_keep_their_loop(compiler, gated, config, case):
    compiled, sass = compiler.submit(build_stream, gated, case, config).result()
    stage = config.w13 if gated else config.w2
    # what a thread keeps for the whole launch, or while the shared expert's tokens change, may lie in memory
    assert compiled.local <= 112
    # an SM has 1 KB more than a block may use, and keeps as much of each
    assert stage.per_sm * (compiled.shared + 1024) <= SHARED_LIMIT[90] + 1024
    assert stage.per_sm * compiled.registers * 32 * stage.slices * stage.warps <= 65536
    steps = ["\n".join(loop) for loop in innermost_loops(sass) if any("HMMA" in line for line in loop)]
    # the shared expert's codes become float16 by the card's own instruction
    (fp8,) = [loop for loop in steps if re.search(r"F2FP\.F16\.E4M3", loop)]
    (fp4,) = [loop for loop in steps if loop != fp8]
    assert "LDG.E.128" in fp8 and "LDS.128" in fp8
    # of a step of 128 codes a lane: 17 instructions for each 8, two of mma.sync for each 16, and little else
    assert not re.search(r"LDL|STL|SHFL|\bSTS|LDG\.", fp4)
    assert fp4.count("\n") <= 385 * stage.depth
    # codes go to shared memory 16 bytes a lane, and a row's scales as a word; each step waits once for its own
    assert fp4.count("LDGSTS.E.BYPASS.128") == 4 * stage.depth and len(re.findall(r"LDGSTS\.E ", fp4)) == 2 * stage.depth
    assert fp4.count("BAR.SYNC") == stage.depth
    assert re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled.ptx).count(str(stage.depth - 2)) >= stage.depth


def innermost_loops(sass: str) -> list[list[str]]:
    """Instructions of the loops that hold no other loop."""
    code = [(int(at, 16), line) for at, line in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)]
    loops = []
    for at, line in code:
        target = re.search(r"BRA.*?(0x[0-9a-f]+)", line)
        if target and int(target[1], 16) < at:
            loops.append((int(target[1], 16), at))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[line for at, line in code if first <= at <= last] for first, last in inner]


def layouts_of_codes(ttgir: str) -> list[str]:
    """Layouts of the tiles that are widened four codes at a time: a register must hold four neighbouring columns, in order."""
    named = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = []
    for line in ttgir.splitlines():
        if "elementwise_inline_asm" in line and "packed_element = 4" in line:
            match = re.search(r"tensor<[0-9x]+xi8, (#ttg\.\w+<\{.*?\}>|#\w+)>", line)
            found.append(named.get(match.group(1), match.group(1)) if match else line)
    return found


def test_every_arch_has_few_configs():
    for arch in SHARED_LIMIT:
        count = {name: sum(case[:2] == (arch, name) for case in CASES) for name in ("linear", "w13", "w2")}
        assert 2 <= count["w13"] == count["w2"] <= 8
        # two kinds of weight, at 1 and 2 tokens and at up to 8, 16, 32 and 64: two forms of each
        assert 2 <= count["linear"] <= 24
