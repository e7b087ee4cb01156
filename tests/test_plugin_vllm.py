"""What the vLLM plug-in makes of vLLM's calls; tests/engines runs vLLM itself."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepdecode.cards import find_card
from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.ops.indexer import index_topk_ref
from deepdecode.ops.mhc import mhc_post_ref, mhc_pre_ref
from deepdecode.ops.norm import rms_norm_ref
from deepdecode.plugins import vllm as plugin
from deepdecode.plugins import vllm_calls as calls
from deepdecode.plugins.guard import Guard
from deepdecode.plugins.sources import folder, problems
from deepdecode.testing.index_keys import exact_inputs
from deepdecode.testing.inputs import attention_inputs
from deepdecode.testing.numeric import rel_err

# bfloat16 output
BF16 = 3e-3
F32 = 3e-5


def cache(rows, width):
    """Our pages as vLLM binds them: [pages, page size, bytes of a row], at the pages' own stride."""
    return rows.data[:, : rows.page_size * width].view(-1, rows.page_size, width)


def layer(inputs, **members):
    """The parts of vLLM's attention that the plug-in reads."""
    sink = torch.nn.Parameter(inputs.sink, requires_grad=False)
    window = SimpleNamespace(kv_cache=cache(inputs.window, 584))
    return SimpleNamespace(swa_cache_layer=window, attn_sink=sink, scale=inputs.scale, **members)


def attend(inputs, output, **changes):
    """The call that vLLM's decode makes for these inputs."""
    call = {
        "layer": layer(inputs),
        "q": inputs.q,
        "window": (inputs.window_indices.unsqueeze(1), inputs.window_lens),
        "cache": None if inputs.extra is None else cache(inputs.extra, 584),
        "selected": None if inputs.extra is None else (inputs.extra_indices.unsqueeze(1), inputs.extra_lens),
        "output": output,
    }
    return calls.attend(**(call | changes))


@pytest.mark.parametrize(("extra_keys", "extra_page"), [(0, 64), (512, 64), (64, 2)], ids=["window", "ratio-4", "ratio-128"])
@pytest.mark.parametrize("H", [8, 64])
def test_attention_is_written_into_the_engines_buffer(extra_keys, extra_page, H, device):
    inputs = attention_inputs(
        3, H, 128, extra_keys, window_page=64, extra_page=extra_page, full=False, holes=True, device=device
    )
    # vLLM gives a head that only pads no sink
    inputs.sink[-1] = float("-inf")
    whole = torch.full((5, H, 512), float("nan"), dtype=torch.bfloat16, device=device)
    assert attend(inputs, whole[:3]) is None
    want, _ = sparse_attn_ref(inputs.q.double(), *inputs.args()[1:], sink=inputs.sink.double(), scale=inputs.scale)
    assert rel_err(whole[:3], want) < BF16
    assert whole[3:].isnan().all(), "what stands behind the decode tokens is not ours to write"


def test_columns_of_a_wider_buffer_are_indices_too(device):
    inputs = attention_inputs(2, 8, 128, 64, extra_page=2, device=device)
    wider = torch.cat([inputs.extra_indices, torch.full_like(inputs.extra_indices, 10**6)], dim=1)
    plain, outs = torch.empty_like(inputs.q), torch.empty_like(inputs.q)
    attend(inputs, plain)
    attend(inputs, outs, selected=(wider[:, :64].unsqueeze(1), inputs.extra_lens))
    assert torch.equal(plain, outs)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda i: {"q": i.q[:, :4]}, r"q must be \[2, 8, 512\] as its output, got \[2, 4, 512\]"),
        (lambda i: {"q": i.q.to(torch.float8_e4m3fn)}, r"q must be .* bfloat16"),
        (
            lambda i: {"layer": SimpleNamespace(swa_cache_layer=SimpleNamespace(kv_cache=torch.zeros(4, 64, 512).bfloat16()))},
            r"the window's pages must be rows of 584 bytes, got \[4, 64, 512\] bfloat16",
        ),
        (lambda i: {"cache": cache(i.extra, 584)[:, ::2]}, r"the compressed pages must be rows of 584 bytes"),
        (lambda i: {"window": (i.window_indices.long(), i.window_lens)}, r"window_indices must be \[2, K\] int32"),
        (lambda i: {"selected": (i.extra_indices, i.extra_lens[:1])}, r"extra_lens must be \[2\] int32"),
    ],
    ids=["padded-output", "fp8-query", "bfloat16-cache", "page-strides", "int64", "lengths"],
)
def test_attention_that_is_not_covered_is_left_to_the_engine(change, line):
    inputs = attention_inputs(2, 8, 128, 64)
    output = torch.full_like(inputs.q, float("nan"))
    with pytest.raises(ValueError, match=line):
        attend(inputs, output, **change(inputs))
    assert output.isnan().all()


def test_a_card_without_a_kernel_is_left_to_the_engine(monkeypatch):
    inputs = attention_inputs(1, 8, 128, 0)
    card = find_card("sm_120")
    monkeypatch.setattr("deepdecode.kernels.attention_plan.card_of", lambda device: card)
    calls._expect_attention(inputs.args(), inputs.sink)
    monkeypatch.setattr("deepdecode.kernels.attention_plan.card_of", lambda device: replace(card, arch=75))
    with pytest.raises(ValueError, match="no kernel of ours: sm_75 has no bfloat16 tensor cores"):
        calls._expect_attention(inputs.args(), inputs.sink)


def indexer(inputs, **members):
    own = {
        "k_cache": SimpleNamespace(kv_cache=cache(inputs.keys, 132)),
        "topk_tokens": inputs.topk,
        "dcp_world_size": 1,
        "use_pcp": False,
        "skip_k_cache_insert": True,
        "candidate_blocks": None,
    }
    return SimpleNamespace(**(own | members))


def step(table, lens, T, **members):
    decode = {
        "block_table": table,
        "seq_lens": lens,
        "decode_lens": torch.ones(len(table), dtype=torch.int32),
        "requires_padding": False,
    }
    return SimpleNamespace(num_decode_tokens=T, decode=SimpleNamespace(**(decode | members)))


@pytest.mark.parametrize(("sequences", "tokens"), [(2, 1), (2, 3), (1, 1)])
def test_the_indexer_names_entries_by_number(sequences, tokens, device):
    """Tables of each sequence, lengths of each token, several tokens of a sequence as in speculation."""
    T = sequences * tokens
    inputs = exact_inputs(T + 1, 5, 9, 16, 20, device=device)
    table = torch.stack([torch.randperm(9) for _ in range(sequences)]).int().to(device)
    lens = torch.randint(0, 145, (sequences, tokens)).int().to(device)
    got = calls.choose(indexer(inputs), inputs.index_q, inputs.index_weights, step(table, lens, T))
    slots = torch.arange(sequences, device=device).repeat_interleave(tokens).int()
    want, _ = index_topk_ref(
        inputs.index_q[:T].double(),
        inputs.index_weights[:T].double(),
        inputs.keys,
        table,
        slots,
        lens.flatten(),
        20,
        logical=True,
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("members", "decode", "line"),
    [
        ({}, {"requires_padding": True}, "4 tokens of 2 sequences with 4 lengths are not as many for each"),
        ({}, {"seq_lens": torch.zeros(2, 3, dtype=torch.int32)}, "4 tokens of 2 sequences with 6 lengths"),
        ({}, {"decode_lens": torch.ones(3, dtype=torch.int32)}, "4 tokens of 3 sequences"),
        ({"dcp_world_size": 2}, {}, "context parallelism is on"),
        ({"skip_k_cache_insert": False}, {}, "the keys are still to be written"),
        ({"candidate_blocks": torch.zeros(1)}, {}, "candidate blocks are filtered"),
        (
            {"k_cache": SimpleNamespace(kv_cache=torch.zeros(3, 64, 68, dtype=torch.uint8))},
            {},
            r"rows of 132 bytes, got \[3, 64, 68\]",
        ),
        ({}, {"block_table": torch.zeros(2, 9, dtype=torch.int64)}, "block_tables must be .* int32"),
    ],
    ids=["padding", "ragged", "sequences", "parallel", "insert", "candidates", "fp4-keys", "int64"],
)
def test_an_indexer_that_is_not_covered_is_left_to_the_engine(members, decode, line):
    inputs = exact_inputs(4, 5, 9, 16, 20)
    table, lens = torch.zeros(2, 9, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=line):
        calls.choose(indexer(inputs, **members), inputs.index_q, inputs.index_weights, step(table, lens, 4, **decode))


def site(C, device="cpu"):
    fn = torch.randn(24, 4 * C, device=device) / (4 * C) ** 0.5
    return fn, torch.rand(3, device=device), torch.randn(24, device=device)


@pytest.mark.parametrize("first", [True, False], ids=["first-layer", "between"])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
def test_hyper_connections(first, normed, device):
    if device.type == "cuda" and not normed:
        pytest.skip("the kernel has the norm inside, and vLLM's GPU layers always ask for it")
    C, T = 64, 5
    (fn, scale, base), streams = site(C, device), torch.randn(T, 4, C, device=device).bfloat16()
    y, weight = torch.randn(T, C, device=device).bfloat16(), torch.rand(C, device=device).bfloat16()
    post, comb = torch.rand(T, 4, 1, device=device), torch.rand(T, 4, 4, device=device)
    got = calls.boundary(
        None if first else y, streams, None if first else (post, comb), (fn, scale, base), (1e-6, 1e-5, 1e-5), 2.0, 20,
        (weight, 1e-6) if normed else None,
    )  # fmt: skip
    want = streams.double()
    if not first:
        want = mhc_post_ref(y.double(), want, post.squeeze(-1).double(), comb.double())
    # what is read is the streams as they are written, in bfloat16
    read = want.bfloat16().double()
    x, new_post, new_comb = mhc_pre_ref(read, fn.double(), base.double(), scale.double(), 1e-6, 1e-5, 20)
    x = rms_norm_ref(x, weight.double(), 1e-6) if normed else x
    assert rel_err(got[0], want) < BF16 and rel_err(got[3], x) < 2 * BF16
    assert got[1].shape == (T, 4, 1) and rel_err(got[1].squeeze(-1), new_post) < F32 and rel_err(got[2], new_comb) < F32


@pytest.mark.parametrize(
    ("eps", "post_mult", "norm_eps"), [((1e-6, 1e-6, 1e-5), 2.0, 1e-6), ((1e-6,) * 3, 1.0, 1e-6), ((1e-6,) * 3, 2.0, 1e-5)]
)
def test_hyper_connections_of_another_model_are_left_to_the_engine(eps, post_mult, norm_eps):
    with pytest.raises(ValueError, match="are not one model's"):
        calls.boundary(None, torch.zeros(1, 4, 32), None, site(32), eps, post_mult, 20, (torch.ones(32), norm_eps))


# the guard


def broken(error):
    def ours():
        raise error

    return ours


def test_what_is_not_covered_runs_as_the_engines_and_is_said_once(caplog):
    guard = Guard("vLLM", "indexer")
    for n in (1, 2):
        assert guard.run(broken(ValueError(f"{n} tokens")), lambda: "theirs") == "theirs"
    assert guard.run(lambda: "ours", lambda: "theirs") == "ours"
    assert caplog.messages == ["deepdecode in vLLM: a call is left to vLLM's own indexer: 1 tokens"]


def test_what_fails_is_not_tried_again(caplog):
    guard, tried = Guard("vLLM", "mHC"), []

    def ours():
        tried.append(1)
        raise RuntimeError("no such kernel")

    assert [guard.run(ours, lambda: "theirs") for _ in range(3)] == ["theirs"] * 3
    assert tried == [1] and guard.failed == "RuntimeError: no such kernel"
    assert caplog.messages == ["deepdecode in vLLM: mHC failed, vLLM's own runs instead: RuntimeError: no such kernel"]


def test_memory_that_runs_short_is_tried_again():
    guard = Guard("vLLM", "mHC")
    assert guard.run(broken(torch.OutOfMemoryError("x")), lambda: "theirs") == "theirs"
    assert guard.failed is None and guard.run(lambda: "ours", lambda: "theirs") == "ours"


def test_what_the_engine_raises_is_the_engines():
    with pytest.raises(KeyError):
        Guard("vLLM", "mHC").run(broken(ValueError("x")), broken(KeyError("y")))


# the entry point

ALL = "attention,flashmla,indexer,mhc,attention-cpu,mhc-cpu"


def registered(code="", **environment):
    """What `register` says in a process of its own, and the modules that it loads."""
    code += "\nimport sys; from deepdecode.plugins.vllm import register; register(); register(); print(*sys.modules)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("DEEPDECODE_")} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return done.stderr.splitlines(), set(done.stdout.split())


@pytest.mark.parametrize("environment", [{}, {"DEEPDECODE_VLLM": ALL, "DEEPDECODE_ENABLE": "0"}], ids=["default", "disabled"])
def test_the_entry_point_is_light(environment):
    """vLLM loads it in processes that have no use for torch's kernels: what is off imports nothing."""
    (line,), loaded = registered(**environment)
    assert not {"torch", "triton", "numpy", "vllm"} & loaded
    assert ": off: " in line and ": on: " not in line


@pytest.mark.skipif(folder("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_entry_point_says_so():
    (line,), loaded = registered(DEEPDECODE_VLLM=ALL)
    assert not {"torch", "triton", "numpy", "vllm"} & loaded
    assert line == f"deepdecode in vLLM of unknown version: off: {ALL.replace(',', ', ')}: it is not installed"


# a package that stands for vLLM: its registry, which keeps what it is given, and no source that we know
STAND_IN = """
import sys, types, pathlib
from importlib.machinery import ModuleSpec
vllm = types.ModuleType("vllm")
vllm.__spec__ = ModuleSpec("vllm", None, is_package=True)
vllm.__spec__.submodule_search_locations = ["."]
models = {}
class ModelRegistry:
    @staticmethod
    def register_model(architecture, model): models[architecture] = model
vllm.ModelRegistry = ModelRegistry
sys.modules["vllm"] = vllm
import atexit; atexit.register(lambda: print("models", *models, *models.values()))
"""


def test_a_vllm_that_we_do_not_know_stays_untouched():
    (line,), printed = registered(STAND_IN, DEEPDECODE_VLLM=ALL)
    assert "off: attention: this source is not what was tested: models/deepseek_v4/nvidia/flashinfer_sparse.py: " in line
    assert not any("DeepseekV4" in word for word in printed)


def test_a_part_that_is_on_registers_our_classes():
    known = STAND_IN + "\nimport deepdecode.plugins.report as report; report.problems = lambda *args: []"
    (line,), printed = registered(known, DEEPDECODE_VLLM="indexer")
    assert re.search(
        r": on: indexer; off: attention, flashmla, mhc, attention-cpu, mhc-cpu: DEEPDECODE_VLLM does not name", line
    )
    assert set(plugin.MODELS) | {f"deepdecode.plugins.vllm_model:{name}" for name in plugin.MODELS.values()} <= printed


def test_a_registry_that_fails_is_no_failure_of_the_engine():
    known = (
        STAND_IN
        + "\nimport deepdecode.plugins.report as report; report.problems = lambda *args: []; del ModelRegistry.register_model"
    )
    (line,), _ = registered(known, DEEPDECODE_VLLM="indexer")
    assert ": off: AttributeError: " in line


@pytest.mark.skipif(folder("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("part", plugin.PLUGIN.parts, ids=lambda part: part.name)
def test_the_installed_vllm_is_what_was_tested(part):
    package = folder("vllm")
    assert package is not None and problems(package, part.table) == []
