"""compute-sanitizer over the compiled attention kernels, small: no access outside a tensor, no race in shared memory."""

import linecache
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

PROGRAM = """
from dataclasses import replace

import torch
from deepdecode.kernels import attention
from deepdecode.kernels.attention_plan import Config, card_of, case_of, plan
from deepdecode.testing.inputs import attention_inputs

kernel, H, page, fmt = {kernel!r}, {H}, {page}, {fmt!r}
inputs = attention_inputs(3, H, 70, 130, window_page=page, extra_page=page, full=False, holes=True, fmt=fmt, device="cuda")
inputs.window_indices[2] = torch.randint(-(2**31), 2**31 - 1, (70,), device="cuda").int()
inputs.window_lens[2] = 2**31 - 1
inputs.extra_lens[2] = -7
if kernel == "mma":
    q, window, indices, _, extra, extra_indices, _ = inputs.args()
    config = plan(case_of(q, window, indices, extra, extra_indices), card_of(q.device))
    assert config.kernel == "mma"
else:
    config = Config(kernel, 64 if kernel == "wide" else 8, 64, 1, 0, 4, 16, True, 2)
for splits in (1, 2):
    out = torch.empty_like(inputs.q)
    lse = torch.empty(3, H, device="cuda")
    attention.launch(
        *inputs.args(), sink=inputs.sink, scale=inputs.scale, out=out, lse=lse, workspace=None,
        config=replace(config, splits=splits),
    )
    torch.cuda.synchronize()
    assert not out[:2].isnan().any()
print("ran")
"""
CASES = [("narrow", 5, 64, "fp8_584"), ("piped", 5, 64, "fp8_584"), ("wide", 64, 64, "fp8_584")]
CASES += [("mma", 5, 48, "fp8_584"), ("mma", 40, 48, "bf16")]
# the lines that Triton starts and ends roles at: the words that it keeps for it are reported of every kernel with roles
ROLES = r"def \w+_kernel\(|gl\.warp_specialize\("
# words that one role stores plainly for another: named in spite of the barriers between, as the last test here shows, though
# not in every run. An mbarrier orders for racecheck what threads did that arrive there, and in Triton one thread does, behind a
# barrier of its warps; that this barrier stands before each arrival is held by test_compile_attention.py
HANDED_ON = r"\b(fades|tops|keyed)\b"


def sanitize(tool: str, *command: str) -> str:
    """The tool's output; the program is run before, so that its kernels are compiled."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    # every tensor its own allocation, so that a read past one is seen
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    whole = [sanitizer, "--tool", tool, "--print-limit", "10000", *(RACES if tool == "racecheck" else ()), sys.executable]
    done = subprocess.run([*whole, *command], capture_output=True, text=True, env=env, timeout=300, check=False)
    assert "ran" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


RACES = ("--racecheck-report", "hazard", "--racecheck-indirect-barrier-dependency", "--show-backtrace", "device")


def lines_of(output: str, folder: Path) -> list[str]:
    """The source lines that races are reported at. Their number is that of the summary, or the format has changed."""
    found = re.findall(r"(?:Read|Write) Thread \(\d+,\d+,\d+\) at \w+\+0x[0-9a-f]+ in (\w+\.py):(\d+)", output)
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)
    assert summary, output[-2000:]
    assert len(found) == 2 * int(summary[1])
    return [linecache.getline(str(folder / name), int(line)) for name, line in found]


@pytest.mark.parametrize(("kernel", "H", "page", "fmt"), CASES)
def test_memcheck_is_silent(kernel, H, page, fmt):
    output = sanitize("memcheck", "-c", PROGRAM.format(kernel=kernel, H=H, page=page, fmt=fmt))
    assert "ERROR SUMMARY: 0 errors" in output, output[-4000:]


@pytest.mark.parametrize(("kernel", "H", "page", "fmt"), CASES)
def test_racecheck_names_nothing_but_what_it_cannot_follow(kernel, H, page, fmt):
    import deepdecode.kernels

    output = sanitize("racecheck", "-c", PROGRAM.format(kernel=kernel, H=H, page=page, fmt=fmt))
    known = f"{ROLES}|{HANDED_ON}" if kernel in ("piped", "wide") else "(?!)"
    lines = lines_of(output, Path(deepdecode.kernels.__path__[0]))
    assert [line for line in lines if not re.search(known, line)] == []


@pytest.mark.parametrize("form", ["matrix", "lane", "four"])
def test_racecheck_names_what_is_stored_plainly_and_handed_over(form):
    """Barrier, arrival and wait are the same: words of one lane or of four are named, those that stmatrix stores are not."""
    program = Path(__file__).with_name("hand_over_kernel.py")
    lines = lines_of(sanitize("racecheck", str(program), form), program.parent)
    others = [line for line in lines if not re.search(ROLES, line)]
    assert bool(others) == (form != "matrix")
    assert all("memory.index(b)" in line for line in others)
