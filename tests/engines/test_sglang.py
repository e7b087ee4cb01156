"""SGLang's own DeepSeek-V4 backend with our plug-in: numbers, who is called, and what happens when it must stay away.

Needs an environment of its own, because engines pin what they need: `make test-engines`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepdecode.testing.numeric import rel_err

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: make test-engines")

# SGLang's reference rounds the cached rows to bfloat16, ours widens them exactly; both round the output to bfloat16
AGREE = 3e-3
SCRIPT = Path(__file__).parent / "sglang_decode.py"
# tests/engines/sglang_decode.py: 12 decode cases and 3 of its prefill way
CASES = 15
ON = {"SGLANG_SM120_MMA_FLASHMLA": "1"}
# the plug-in is not there for SGLang: only a plug-in of this name would be loaded
ABSENT = {"SGLANG_PLUGINS": "none-of-them"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the backend once for each way of switching, in a process of its own."""
    done = {}

    def run(environment, *arguments):
        key = (*sorted(environment.items()), *arguments)
        if key not in done:
            out = tmp_path_factory.mktemp("sglang") / "out.pt"
            unset = {name: os.environ[name] for name in os.environ if not name.startswith(("DEEPDECODE_", "SGLANG_"))}
            process = subprocess.run(
                [sys.executable, SCRIPT, out, *arguments],
                env={**unset, "SGLANG_SM120_FLASHMLA_BACKEND": "torch", **environment},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert process.returncode == 0, process.stderr[-4000:]
            done[key] = torch.load(out)
        return done[key]

    return run


@pytest.fixture(scope="module")
def absent(run):
    """The engine without us."""
    found = run(ABSENT)
    assert not found["calls"] and not found["said"] and not found["replaced"]
    return found


@pytest.fixture(scope="module")
def on(run):
    return run(ON, "--hostile")


def test_the_backend_reaches_our_op_and_agrees_with_its_own_reference(on, absent):
    """Ratios 0, 4 and 128, window pages of 256 and 64, 8 heads and 8 padded to 64, padding rows, and more than 64 tokens."""
    assert len(on["outs"]) == CASES and on["outs"].keys() == absent["outs"].keys()
    # once for each forward; past 64 tokens SGLang takes the padding off the heads
    want = [(tokens, heads if tokens <= 64 else 8, 512) for _, tokens, heads, _ in on["outs"]]
    assert on["calls"] == want
    for case, out in on["outs"].items():
        theirs = absent["outs"][case]
        assert out.dtype == theirs.dtype == torch.bfloat16 and out.shape == theirs.shape
        assert theirs.float().norm() > 1
        assert rel_err(out, theirs.double()) < AGREE, case


def test_its_output_is_what_the_backend_returns(on, absent):
    for case, out in on["corrupted"].items():
        assert rel_err(out, 1.5 * absent["outs"][case].double()) < AGREE, case


def test_lse_and_a_token_without_a_key(on, absent):
    for name in ("direct", "keyless"):
        (out, lse), (their_out, their_lse) = on[name], absent[name]
        assert lse.shape == their_lse.shape and lse.dtype == their_lse.dtype
        assert torch.equal(lse.isneginf(), their_lse.isneginf())
        torch.testing.assert_close(lse, their_lse, rtol=0, atol=AGREE)
        assert rel_err(out, their_out.double()) < AGREE
    out, lse = on["keyless"]
    assert not out[0].any() and lse[0].isneginf().all() and lse[1:].isfinite().all()


def test_one_line_says_that_it_is_on(on):
    assert on["said"] == [
        "deepdecode in SGLang 0.5.23: sparse attention is on, wherever SGLang takes its path for sm_120 and sm_121"
    ]


def test_a_call_it_does_not_cover_is_left_to_sglang(on, absent):
    """Queries with strides that our op refuses: SGLang's own bits, and one line however often it happens."""
    for out, lse in (on["strided"], on["strided_again"]):
        assert torch.equal(out, absent["strided"][0]) and torch.equal(lse, absent["strided"][1])
    assert on["strided_calls"] == [(3, 8, 512)]
    (line,) = on["strided_said"]
    assert "left to SGLang's own sparse attention: sparse_attn_decode: q must be contiguous" in line


def test_an_op_that_fails_is_not_tried_again(on, absent):
    first, second, calls, said = on["broken"]
    for out, lse in (first, second):
        assert torch.equal(out, absent["direct"][0]) and torch.equal(lse, absent["direct"][1])
    assert calls == [(3, 8, 512)]
    assert said == ["deepdecode in SGLang: sparse attention failed, SGLang's own runs instead: RuntimeError: no such kernel"]


@pytest.mark.parametrize(
    ("environment", "arguments", "why"),
    [
        ({}, (), "off: SGLANG_SM120_MMA_FLASHMLA=1 switches it on"),
        ({**ON, "DEEPDECODE_ENABLE": "0"}, (), "off: DEEPDECODE_ENABLE=0"),
        (
            ON,
            ("--break-signatures",),
            "off: this SGLang's source is not what was tested: kernels/ops/attention/flash_mla_sm120.py: "
            "flash_mla_with_kvcache_sm120 must take (q, k_cache), got (**kwargs)",
        ),
    ],
    ids=["not-asked-for", "disabled", "changed-engine"],
)
def test_off_is_as_if_it_were_not_installed(run, absent, environment, arguments, why):
    found = run(environment, *arguments)
    assert not found["replaced"] and not found["calls"]
    for case, out in found["outs"].items():
        assert torch.equal(out, absent["outs"][case]), case
    assert found["said"] == [f"deepdecode in SGLang 0.5.23: sparse attention is {why}"]
