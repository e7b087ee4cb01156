"""compute-sanitizer over the compiled attention kernels, small: no access outside a tensor, no race in shared memory."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch
from deepdecode.ops.attention import sparse_attn_decode
from deepdecode.testing.inputs import attention_inputs

page, H, fmt = {page}, {H}, "{fmt}"
inputs = attention_inputs(3, H, 70, 130, window_page=page, extra_page=page, full=False, holes=True, fmt=fmt, device="cuda")
inputs.window_indices[2] = torch.randint(-(2**31), 2**31 - 1, (70,), device="cuda").int()
inputs.window_lens[2] = 2**31 - 1
inputs.extra_lens[2] = -7
for deterministic in (False, True):
    out, lse = sparse_attn_decode(
        *inputs.args(), sink=inputs.sink, scale=inputs.scale, return_lse=True, deterministic=deterministic
    )
torch.cuda.synchronize()
assert not out[:2].isnan().any()
print("ran")
"""


# pages of 64: the card's own kernels; of 48: the one that every arch runs
@pytest.mark.parametrize(("H", "page", "fmt"), [(5, 64, "fp8_584"), (64, 64, "fp8_584"), (5, 48, "fp8_584"), (40, 48, "bf16")])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_is_silent(tool, H, page, fmt):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    program = PROGRAM.format(page=page, H=H, fmt=fmt)
    # compiled before, so that the tool watches the kernels alone
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", program]
    # every tensor its own allocation, so that a read past one is seen
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert "ran" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode == 0, done.stdout[-4000:]
