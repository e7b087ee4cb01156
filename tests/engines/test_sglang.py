"""SGLang's own DeepSeek-V4 backend with our plug-in: numbers, who is called, and what happens when it must stay away.

Needs an environment of its own, because engines pin what they need: `make test-engines`.
"""

import importlib.util
import json
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
HERE = Path(__file__).parent
SCRIPT = HERE / "sglang_decode.py"
OTHERS = HERE / "sglang_parts.py"
# tests/engines/sglang_decode.py: 12 decode cases and 3 of its prefill way
CASES = 15
ON = {"SGLANG_SM120_MMA_FLASHMLA": "1"}
# sglang_parts.py: the parts beside sm_120's attention
PARTS = {"DEEPDECODE_SGLANG": "flashmla, indexer,mhc,moe"}
# SGLang's own torch versions, which run here
TORCH = {"SGLANG_SM120_FLASHMLA_BACKEND": "torch", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}
NOT_NAMED = "off: indexer, mhc, moe, pages, megakernel: DEEPDECODE_SGLANG does not name it"
# the plug-in is not there for SGLang: only a plug-in of this name would be loaded
ABSENT = {"SGLANG_PLUGINS": "none-of-them"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a script once for each way of switching, in a process of its own."""
    done = {}

    def run(environment, *arguments, script=SCRIPT):
        key = (script, *sorted(environment.items()), *arguments)
        if key not in done:
            out = tmp_path_factory.mktemp("sglang") / "out.pt"
            unset = {name: os.environ[name] for name in os.environ if not name.startswith(("DEEPDECODE_", "SGLANG_"))}
            process = subprocess.run(
                [sys.executable, script, out, *arguments],
                env={**unset, **TORCH, **environment},
                capture_output=True,
                text=True,
                timeout=900,
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
        "deepdecode in SGLang 0.5.23: on: attention (on sm_120, sm_121), flashmla (on sm_80, sm_86, sm_89, sm_90); " + NOT_NAMED
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


MOVED = (
    "this source is not what was tested: kernels/ops/attention/flash_mla_sm120.py: "
    "flash_mla_with_kvcache_sm120 must take (q, k_cache), got (**kwargs)"
)


@pytest.mark.parametrize(
    ("environment", "arguments", "why"),
    [
        (
            {},
            (),
            "on: flashmla (on sm_80, sm_86, sm_89, sm_90); off: attention: SGLANG_SM120_MMA_FLASHMLA=1 switches it on; "
            + NOT_NAMED,
        ),
        (
            {**ON, "DEEPDECODE_ENABLE": "0"},
            (),
            "off: attention, flashmla, indexer, mhc, moe, pages, megakernel: DEEPDECODE_ENABLE=0",
        ),
        (ON, ("--break-signatures",), f"off: attention, flashmla: {MOVED}; {NOT_NAMED}"),
    ],
    ids=["not-asked-for", "disabled", "changed-engine"],
)
def test_off_is_as_if_it_were_not_installed(run, absent, environment, arguments, why):
    found = run(environment, *arguments)
    assert not found["replaced"] and not found["calls"]
    for case, out in found["outs"].items():
        assert torch.equal(out, absent["outs"][case]), case
    assert found["said"] == [f"deepdecode in SGLang 0.5.23: {why}"]


def test_env_tells_the_same_of_this_sglang():
    """And of this transformers, which is older than what the plug-in for it knows."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPDECODE_", "SGLANG_"))}
    command = [sys.executable, "-m", "deepdecode", "env", "--json", "--engine"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**clean, **ON})
    told = {engine["engine"]: engine for engine in json.loads(done.stdout)["engines"]}
    sglang = told["sglang"]
    assert (sglang["version"], sglang["tested"]) == ("0.5.23", "0.5.23")
    assert [part["signatures"] for part in sglang["parts"]] == [[]] * 7
    assert [part["name"] for part in sglang["parts"] if part["on"]] == ["attention", "flashmla"]
    parts = told["transformers"]["parts"]
    assert {part["why"] for part in parts} == {"5.24 is the first version that this plug-in knows"}


# the other parts


@pytest.fixture(scope="module")
def own(run):
    """What SGLang's callers give without us."""
    found = run(ABSENT, script=OTHERS)
    assert not found["said"] and not any(found[name] for name in found if name.endswith(" calls"))
    return found


@pytest.fixture(scope="module")
def parts(run):
    found = run(PARTS, "--hostile", script=OTHERS)
    assert found["said"] == [
        "deepdecode in SGLang 0.5.23: on: flashmla (on sm_80, sm_86, sm_89, sm_90), indexer, mhc, moe (on sm_90, sm_120, "
        "sm_121); off: attention, pages, megakernel: DEEPDECODE_SGLANG does not name it"
    ]
    return found


def test_flash_mla_gets_the_own_heads_of_a_padded_query(parts, own):
    """Decode steps of all three ratios: our op computes the rank's 8 heads of 64 and gives those; a verify step gets all 64."""
    assert parts["flashmla calls"] == 3
    for ratio, out in parts["flashmla"].items():
        theirs = own["flashmla"][ratio]
        assert theirs.shape == (4, 64, 512) and out.shape == (4, 8, 512) and out.dtype == theirs.dtype
        assert rel_err(out, theirs[:, :8].double()) < AGREE
        assert rel_err(parts["flashmla corrupted"][ratio], 1.5 * theirs[:, :8].double()) < AGREE
    # a step that SGLang captures is known as one
    assert parts["captured"] == [False, True]
    assert parts["verify"].shape == own["verify"].shape == (4, 64, 512)
    assert rel_err(parts["verify"], own["verify"].double()) < AGREE


def test_the_indexer_chooses_what_sglang_chooses(parts, own):
    """One call of our op in place of scores and top-k, with SGLang's rows; ours stand in the order of the entries."""
    assert parts["indexer calls"] == 2
    for name in ("plain", "planned"):
        ours, theirs, changed = parts["indexer"][name], own["indexer"][name], parts["indexer corrupted"][name]
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert [sorted(row) for row in ours.tolist()] == [sorted(row) for row in theirs.tolist()]
        assert [int((row >= 0).sum()) for row in ours] == [512, 512, 512, 100, 0]
        assert torch.equal(changed, ours.flip(1)) and not torch.equal(changed, ours)


def test_the_indexer_leaves_other_ways_to_sglang(parts, own):
    """Entries beside their rows, and a top-k that the operator asked for: SGLang's own bits, and our op is not called."""
    for ours, theirs in zip(parts["entries"], own["entries"], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(parts["torch asked"], own["indexer"]["plain"])
    assert parts["left calls"] == 0
    assert torch.equal(parts["replaced top-k"], own["indexer"]["plain"]) and parts["replaced calls"] == 0


def test_the_boundary_of_hyper_connections(parts, own):
    assert parts["mhc calls"] == 1
    for ours, theirs in zip(parts["mhc"], own["mhc"], strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert rel_err(ours, theirs.double()) < AGREE
    streams, x, *_ = parts["mhc corrupted"]
    assert rel_err(streams, 1.5 * own["mhc"][0].double()) < AGREE and torch.equal(x, parts["mhc"][1])
    # another norm than the gates' is not what our op computes
    assert parts["other norm calls"] == 0
    assert all(torch.equal(a, b) for a, b in zip(parts["other norm"], own["other norm"], strict=True))


def test_fp4_experts_are_those_of_the_loaded_weights(parts):
    """SGLang loads up above gate and multiplies the routing weights before; float64 from the loaded bytes."""
    import sglang_parts as script

    x, ids, weights, w13, s13, w2, s2 = script.expert_inputs()

    def values(codes, scales):
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
        both = torch.stack([codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4], dim=-1).flatten(-2)
        return table[both.long()] * 2.0 ** (scales.view(torch.uint8).double() - 127).repeat_interleave(32, dim=-1)

    w13, w2, out = values(w13, s13), values(w2, s2), torch.zeros(4, script.HIDDEN, dtype=torch.float64)
    for t in range(4):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if e >= 0:
                up, gate = (w13[e] @ x[t].double()).chunk(2)
                h = torch.nn.functional.silu(gate.clamp(max=script.LIMIT)) * up.clamp(-script.LIMIT, script.LIMIT)
                out[t] += weight * (w2[e] @ h)
    assert parts["moe calls"] == 1 and parts["moe"].dtype == torch.bfloat16
    assert rel_err(parts["moe"], out) < AGREE
    assert rel_err(parts["moe corrupted"], 1.5 * out) < AGREE


def test_a_part_that_fails_is_sglangs_from_then_on(parts, own):
    for name in ("flashmla", "indexer", "mhc"):
        theirs = list(own[name].values()) if isinstance(own[name], dict) else own[name]
        for found in parts[f"{name} broken"]:
            values = list(found.values()) if isinstance(found, dict) else found
            assert all(torch.equal(a, b) for a, b in zip(values, theirs, strict=True)), name
        assert parts[f"{name} broken calls"] == 1
    assert parts["broken said"] == [
        f"deepdecode in SGLang: {what} failed, SGLang's own runs instead: RuntimeError: no such kernel"
        for what in ("sparse attention", "indexer", "hyper-connections")
    ]


@pytest.mark.parametrize(
    ("environment", "arguments", "why"),
    [
        ({"DEEPDECODE_SGLANG": ""}, (), "DEEPDECODE_SGLANG does not name it"),
        ({**PARTS, "DEEPDECODE_ENABLE": "0"}, (), "DEEPDECODE_ENABLE=0"),
        (PARTS, ("--break-signatures",), f"off: flashmla, indexer, mhc, moe: {MOVED}"),
    ],
    ids=["none", "disabled", "changed-engine"],
)
def test_parts_that_are_off(run, own, environment, arguments, why):
    found = run(environment, *arguments, script=OTHERS)
    (line,) = found["said"]
    assert " on: " not in line and why in line
    assert not any(found[name] for name in found if name.endswith(" calls"))
    for name in ("flashmla", "indexer", "mhc"):
        values, theirs = (list(v[name].values()) if isinstance(v[name], dict) else v[name] for v in (found, own))
        assert all(torch.equal(a, b) for a, b in zip(values, theirs, strict=True)), name


def test_the_megakernel_contract(run, absent):
    """Accepted for sm_120 by SGLang's own checks, refused where it must be, and ours inside covered steps alone."""
    found = run({"DEEPDECODE_SGLANG": "megakernel"}, "--megakernel", script=OTHERS)["megakernel"]
    assert found["plugin"] == [] and found["accepted"] == []
    assert found["spec"] == ("deepdecode", ["sm_120", "sm_121"], 64, "tolerance")
    assert found["refused"] == {
        "sm_100": ["deepdecode.plugins.sglang_megakernel:SPEC supports ['sm_120', 'sm_121'], not sm_100"],
        "tp 3": ["tp_size 3 is not one of ['1', '2', '4', '8']"],
        "lora": ["LoRA is in use and deepdecode does not accept it"],
        "speculation": ["speculative decoding is in use and deepdecode does not accept it"],
        "graphs": ["decode CUDA graphs 'tc_piecewise' is not one of ['disabled', 'full']"],
        "model": ["config.head_dim 256 is not 512"],
        "another": ["no megakernel spec is registered for ['LlamaForCausalLM'] (registered: ['DeepseekV4ForCausalLM'])"],
    }
    # three rows are no width that was asked for, and a prefill is no decode step
    assert found["planned"] == [("decode", 4), None, None]
    theirs = absent["outs"][(4, 4, 8, 256)]
    for when, calls in (("outside", 0), ("inside", 1), ("after", 0)):
        out, called = found[when]
        assert called == calls, when
        assert rel_err(out, theirs.double()) < AGREE
    assert torch.equal(found["outside"][0], theirs) and torch.equal(found["after"][0], theirs)


def test_without_the_word_no_megakernel_is_registered(run):
    """The entry point is there, and SGLang says that it registered nothing."""
    code = "import stand_ins; stand_ins.install(); from sglang.srt.plugins import load_plugins; load_plugins(); "
    code += "from sglang.kernels.plugin_kernels.nvidia.spec import registered_architectures; print(registered_architectures())"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPDECODE_", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=Path(__file__).parent
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_process_that_sglang_starts_has_its_hooks(run):
    """The launcher, two ranks' schedulers, the data-parallel controller and the detokenizer, by SGLang's own functions."""
    found = run(ON, script=HERE / "sglang_processes.py")
    assert set(found) == {"launcher", "scheduler 0", "scheduler 1", "controller", "detokenizer"}
    for name, told in found.items():
        assert told["replaced"] and not told["cuda"], name
        (line,) = told["said"]
        assert line.startswith("deepdecode in SGLang 0.5.23: on: attention (on sm_120, sm_121), flashmla "), name
        # SGLang went on to where it needs a server
        assert told["stopped"].startswith(("AttributeError: 'NoneType'", "TypeError: ")), told["stopped"]


def test_what_sglang_captures_looks_at_no_value(run):
    """Its backend on tensors without values: our kernels on each card, the own heads back, FlashMLA where it is faster."""
    found = run(ON, script=HERE / "sglang_capture.py")
    assert found.pop("failed") is None and len(found) == 24
    for (card, captured, heads, own, ratio), (shape, called) in found.items():
        eager_hopper = card == "H200" and not captured
        padded = card in ("RTX PRO 6000", "DGX Spark GB10") or eager_hopper
        assert shape == (16, heads if padded else own, 512), (card, ratio)
        assert (called == ["FlashMLA"]) == eager_hopper and called, (card, ratio)
        assert eager_hopper or "FlashMLA" not in called
