"""vLLM's engine serves a small DeepSeek-V4 with our plug-in: numbers, who is called in each process, when it must stay away.

Needs an environment of its own, because engines pin what they need: `make test-engines`.
"""

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from deepdecode.testing.numeric import rel_err

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-engines")

# Log-probabilities of logits that vary by 1, after 5 layers in bfloat16. Attention and hyper-connections differ in rounding; an
# expert or entry that rounding swaps makes the largest difference. Seen: 0.12, and 0.01 in the mean; spoilt: 0.077 and more
AGREE, AGREE_MEAN, SPOILT_MEAN = 0.25, 0.02, 0.04
# bfloat16 steps: the output of one attention, and residual streams through two layers
ATTENTION, HYPER = 3e-3, 3e-3
HERE = Path(__file__).parent
# tests/engines/vllm_serve.py: three requests of 2550 prompt tokens together, the first token of each from its prompt
PROMPT_TOKENS, REQUESTS, STEPS, LAYERS, INDEXERS = 2550, 3, 12, 5, 2
PARTS = "attention-cpu,indexer,mhc-cpu"
SERVE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONUNBUFFERED": "1",
}
ABSENT, ON = {"VLLM_PLUGINS": "harness"}, {"VLLM_PLUGINS": "harness,deepdecode", "DEEPDECODE_VLLM": PARTS}
# one process for everything, or vLLM's launcher, engine core and a worker for each rank
ONE, TWO = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCHDYNAMO_DISABLE": "1"}
OFF = "off: attention, flashmla, mhc: DEEPDECODE_VLLM does not name it"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Serve once for each way of switching, in processes of their own: log-probabilities, calls by process, our log lines."""
    site = tmp_path_factory.mktemp("site")
    info = site / "vllm_harness-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_harness\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nharness = vllm_harness:register\n")
    done = {}

    def run(environment, *arguments):
        key = (*sorted(environment.items()), *arguments)
        if key not in done:
            folder = tmp_path_factory.mktemp("vllm")
            seen = folder / "seen"
            seen.mkdir()
            kept = {name: os.environ[name] for name in os.environ if not name.startswith(("DEEPDECODE_", "VLLM_"))}
            paths = {"PYTHONPATH": f"{site}:{HERE}", "VLLM_HARNESS": str(seen), "VLLM_CACHE_ROOT": str(site / "cache")}
            process = subprocess.run(
                [sys.executable, HERE / "vllm_serve.py", folder / "out.pt", *arguments],
                env={**kept, **SERVE, **paths, **environment},
                capture_output=True,
                text=True,
                timeout=900,
            )
            assert process.returncode == 0, process.stderr[-6000:]
            found = torch.load(folder / "out.pt")
            found["said"] = [line for line in process.stderr.splitlines() if "deepdecode in vLLM" in line]
            found["models"] = {file.read_text() for file in seen.glob("*.model")}
            found["commands"] = [file.read_text() for file in seen.glob("*.command")]
            done[key] = found
        return done[key]

    return run


def by_process(calls):
    """{process: {op: Counter of first argument's shapes}}"""
    found = {}
    for name, shapes in calls.items():
        process, op = name.split(".")
        if op not in ("model", "command"):
            found.setdefault(process, {})[op] = Counter(shapes)
    return found


def expected(heads):
    decoded = STEPS - 1
    sites = 2 * LAYERS
    return {
        "sparse_attn": {f"{REQUESTS},{heads},512": LAYERS * decoded},
        "index_topk": {f"{REQUESTS},8,128": INDEXERS * decoded},
        "mhc_pre": {f"{PROMPT_TOKENS},4,256": sites, f"{REQUESTS},4,256": sites * decoded},
        "mhc_post": {f"{PROMPT_TOKENS},256": sites, f"{REQUESTS},256": sites * decoded},
    }


def check_agrees(found, absent, name="clean"):
    ours, theirs = found["logprobs"][name], absent["logprobs"][name]
    assert theirs.isfinite().all() and theirs.std() > 0.5
    # given tokens, so each step follows the same text; log-probabilities of the whole vocabulary
    torch.testing.assert_close(theirs.exp().sum(-1), torch.ones(theirs.shape[:2]), rtol=0, atol=1e-4)
    difference = (ours - theirs).abs()
    assert difference.max() < AGREE and difference.mean() < AGREE_MEAN
    assert not torch.equal(ours, theirs), "ours rounds in other places"


def check_spoilt(found, op):
    clean, spoilt = (found["logprobs"][name] for name in ("clean", op))
    difference = (spoilt - clean[:, : spoilt.shape[1]]).abs()
    assert difference.mean() > SPOILT_MEAN, op
    return difference


@pytest.fixture(scope="module")
def absent(run):
    """The engine without us."""
    found = run(ABSENT | ONE, "--later")
    assert (
        not found["said"]
        and not by_process(found["calls"]["clean"])
        and found["models"] == {"vllm.models.deepseek_v4.cpu.model"}
    )
    return found


@pytest.fixture(scope="module")
def on(run):
    return run(ON | ONE, "--later", "--spoil", "sparse_attn", "index_topk", "mhc_pre", "mhc_post")


def test_one_rank_agrees(on, absent):
    check_agrees(on, absent)


def test_one_rank_calls_our_ops(on):
    (calls,) = by_process(on["calls"]["clean"]).values()
    assert calls == expected(heads=8)
    assert on["models"] == {"deepdecode.plugins.vllm_model"}
    # the process in which vLLM looks at the model's class loads plug-ins too
    assert len(on["commands"]) == 2 and sum("vllm.model_executor.models.registry" in command for command in on["commands"]) == 1
    assert [line.split("deepdecode in ")[1] for line in on["said"]] == [
        f"vLLM 0.32.0: on: indexer, attention-cpu, mhc-cpu; {OFF}"
    ]


def test_a_prompt_that_comes_later(on, absent):
    """The first request decodes while the second one's prompt is worked on: its entries are ours, the prompt's are vLLM's."""
    check_agrees(on, absent, "later")
    (calls,) = by_process(on["calls"]["later"]).values()
    # steps of 2180 tokens, 1, 1 + 300, then 2, and 1 when the first request is done
    assert calls["mhc_pre"] == {f"{T},4,256": 2 * LAYERS * steps for T, steps in ((2180, 1), (301, 1), (2, 1), (1, 3))}
    assert calls["index_topk"] == {"1,8,128": INDEXERS * 2, "2,8,128": INDEXERS}
    # on a CPU the attention of a step with a prompt is vLLM's
    assert calls["sparse_attn"] == {"1,8,512": LAYERS * 3, "2,8,512": LAYERS}


@pytest.mark.parametrize("op", ["sparse_attn", "index_topk", "mhc_pre", "mhc_post"])
def test_what_our_ops_give_is_what_the_model_uses(on, op):
    difference = check_spoilt(on, op)
    if op in ("sparse_attn", "index_topk"):
        assert not difference[:, 0].any(), "prompts are vLLM's own"
    if op == "index_topk":
        assert not difference[0].any(), "the first request has fewer entries than are left to it"


def test_two_tokens_of_a_sequence(run, absent):
    """Speculation, with drafts out of the text: each step verifies a token and its draft, of every sequence.

    Against vLLM without drafts: its own indexer for CPUs takes one token of a sequence.
    """
    found = run(ON | ONE, "--ngram")
    check_agrees(found, absent)
    (calls,) = by_process(found["calls"]["clean"]).values()
    decoded, sites, rows = STEPS - 1, 2 * LAYERS, 2 * REQUESTS
    assert calls["sparse_attn"] == {f"{rows},8,512": LAYERS * decoded}
    assert calls["index_topk"] == {f"{rows},8,128": INDEXERS * decoded}
    assert calls["mhc_pre"] == {f"{PROMPT_TOKENS},4,256": sites, f"{rows},4,256": sites * decoded}


def test_two_ranks(run):
    absent = run(ABSENT | TWO, "--tp", "2")
    assert not absent["said"] and not by_process(absent["calls"]["clean"])
    found = run(ON | TWO, "--tp", "2", "--spoil", "sparse_attn", "index_topk")
    check_agrees(found, absent)
    one, other = by_process(found["calls"]["clean"]).values()
    assert one == other
    # Requests arrive while the first prompt is worked on, and a step that works on prompts too is vLLM's. Each step reads twice
    # in each layer, which tells how many steps there were, and of how many tokens.
    decoded = {T: one["mhc_pre"][f"{T},4,256"] // (2 * LAYERS) for T in (1, 2, 3)}
    assert decoded[3] >= STEPS - 4 and sum(T * steps for T, steps in decoded.items()) >= REQUESTS * (STEPS - 3)
    assert one["sparse_attn"] == {f"{T},4,512": LAYERS * steps for T, steps in decoded.items() if steps}
    assert one["index_topk"]["3,8,128"] == INDEXERS * decoded[3] and one["mhc_post"].total() == one["mhc_pre"].total()
    assert found["models"] == {"deepdecode.plugins.vllm_model"}
    # the launcher, the engine core and two workers
    assert len(found["said"]) == 4 and all("on: indexer, attention-cpu, mhc-cpu" in line for line in found["said"])
    for op in ("sparse_attn", "index_topk"):
        check_spoilt(found, op)


def test_ops_that_fail_leave_the_engine_its_own(run):
    """Each is tried once, and one line says so; vLLM goes on with its own bits."""
    absent, found = run(ABSENT | ONE, "--short"), run(ON | ONE | {"VLLM_HARNESS_FAIL": "1"}, "--short")
    assert torch.equal(found["logprobs"]["clean"], absent["logprobs"]["clean"])
    (calls,) = by_process(found["calls"]["clean"]).values()
    assert {op: shapes.total() for op, shapes in calls.items()} == {"sparse_attn": 1, "mhc_pre": 1}
    assert [line.split("deepdecode in ")[1] for line in found["said"][1:]] == [
        f"vLLM: {what} failed, vLLM's own runs instead: RuntimeError: no such kernel" for what in ("mHC", "sparse attention")
    ]


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory):
    """vLLM's classes for NVIDIA GPUs, ours inside, called without a GPU: tests/engines/vllm_nvidia.py."""
    out = tmp_path_factory.mktemp("nvidia") / "out.pt"
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(("DEEPDECODE_", "VLLM_"))}
    process = subprocess.run(
        [sys.executable, HERE / "vllm_nvidia.py", out], env={**kept, **SERVE}, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-6000:]
    return torch.load(out)


def test_gpu_classes_are_ours_while_a_model_is_built(nvidia):
    assert set(nvidia["built"].values()) == {"deepdecode.plugins.vllm_model"}
    assert nvidia["after"] == {
        9: "vllm.models.deepseek_v4.nvidia.flashmla",
        12: "vllm.models.deepseek_v4.nvidia.flashinfer_sparse",
    }


@pytest.mark.parametrize("path", ["sm120", "flashmla"])
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_gpu_classes_decode_as_vllm_does(nvidia, path, ratio):
    """Against vLLM's own method, whose kernel is vLLM's for CPUs; both round the output to bfloat16, vLLM's its weights too."""
    ours, theirs = nvidia[path][ratio]
    assert theirs[:3].float().norm() > 1 and rel_err(ours[:3], theirs[:3].double()) < ATTENTION
    assert ours[3].isnan().all(), "what stands behind the decode tokens is not ours to write"
    assert nvidia["calls"]["sparse_attn_decode"] == [(3, 8, 512)] * 6


@pytest.mark.parametrize("tokens", [1, 2])
def test_gpu_indexer_chooses_the_same_entries(nvidia, tokens):
    """One token of a sequence and two, as in speculation; vLLM's order is by score, ours by entry."""
    ours, theirs = nvidia["indexer"][tokens]
    rows = 3 * tokens
    assert [sorted(row) for row in ours[:rows].tolist()] == [sorted(row) for row in theirs[:rows].tolist()]
    assert (ours[:rows] >= 0).sum(1).tolist() == [min(512, n) for start in (700, 530, 90) for n in range(start, start + tokens)]
    assert (ours[rows:] == 7).all(), "rows behind the decode tokens stay"
    assert nvidia["calls"]["index_topk"] == [(3, 64, 128), (6, 64, 128)]


def test_gpu_layers_run_our_hyper_connections(nvidia):
    """Two of vLLM's decoder layers one after the other, with its own torch formulas and with ours."""
    for ours, theirs in zip(*nvidia["mhc"], strict=True):
        assert ours.dtype == theirs.dtype and rel_err(ours, theirs.double()) < HYPER
    # each layer reads twice, and all but the first read follow a write
    assert nvidia["calls"]["mhc_pre"] == [(5, 4, 256)] * 4 and nvidia["calls"]["mhc_post"] == [(5, 256)] * 3
    assert nvidia["failed"] == [None] * 3 and nvidia["said"] == []


def test_gpu_classes_look_at_no_value(tmp_path):
    """With vLLM's metadata, on sm_90, sm_120 and sm_121: what a CUDA graph can hold, which is what vLLM captures."""
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(("DEEPDECODE_", "VLLM_"))}
    process = subprocess.run(
        [sys.executable, HERE / "vllm_capture.py", tmp_path / "out.pt"],
        env={**kept, **SERVE},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    found = torch.load(tmp_path / "out.pt")
    assert found["said"] == []
    for (_, ratio), launches in found["decoded"].items():
        # vLLM's own is what gives the physical rows of ratio 4
        assert launches[: -2 if launches[-1] == "merge_kernel" else -1] == (["kernel"] if ratio == 4 else [])
        assert launches[-1] in ("merge_kernel", "split_kernel")
    assert set(found["decoded"]) == {
        (card, ratio) for card in ("RTX PRO 6000", "DGX Spark GB10", "H200") for ratio in (1, 4, 128)
    }
    for launches in found["chosen"].values():
        assert launches[0].startswith("indexer_score") and launches[-1] == "indexer_topk_kernel"


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"VLLM_PLUGINS": "harness,deepdecode"}, "DEEPDECODE_VLLM does not name it"),
        (ON | {"DEEPDECODE_ENABLE": "0"}, "DEEPDECODE_ENABLE=0"),
        (
            ON | {"VLLM_BREAK_SIGNATURES": "1"},
            "this source is not what was tested: models/deepseek_v4/cpu/cpu_sparse.py: DeepseekV4CPUAttention.forward_mqa must "
            "take (self, q), got (self, q, kv, positions, output)",
        ),
    ],
    ids=["not-asked-for", "disabled", "changed-engine"],
)
def test_off_is_as_if_it_were_not_installed(run, environment, why):
    absent, found = run(ABSENT | ONE, "--short"), run(environment | ONE, "--short")
    assert torch.equal(found["logprobs"]["clean"], absent["logprobs"]["clean"])
    assert found["models"] == absent["models"] == {"vllm.models.deepseek_v4.cpu.model"}
    assert not by_process(found["calls"]["clean"])
    (line,) = found["said"]
    assert "vLLM 0.32.0: off: " in line and why in line
