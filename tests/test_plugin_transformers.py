"""Our ops inside transformers' DeepSeek-V4: the same logits, the same tokens, and a model that comes back as it was."""

import ast
import copy
import dataclasses
import io
import logging
import re
import subprocess
import sys

import pytest
import torch

import deepdecode.plugins.transformers as plugin
from deepdecode.plugins.sources import digest
from deepdecode.testing.numeric import same_bits

# float32 end to end, two implementations that sum in another order; the logits are of size 1
LOGITS = 2e-5
# bfloat16, four layers of a dozen roundings each (8e-3 at most): 1.0e-2 is seen with ours, 1.3e-2 with transformers' own code
BF16_LOGITS = 2e-2

SWA, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
LAYERS = [SWA, CSA, HCA, CSA]
PROMPT, NEW = 150, 12
# rms_norm: 4 in a layer, 3 compressors, 2 indexers, the last
MODULES = {
    "sparse_attn": 4,
    "mhc_post": 4,
    "mhc_pre": 8,
    "mhc_head": 1,
    "moe": 4,
    "rms_norm": 4 * 4 + 3 + 2 + 1,
    "head_norm": 4,
}
# of one forward; compressors and indexers norm what they finish only
CALLS = {"sparse_attn": 4, "mhc_post": 8, "mhc_pre": 8, "mhc_head": 1, "moe": 4, "rms_norm": 4 * 4 + 1, "head_norm": 4}


def small_model(**sizes):
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    sizes = {
        "vocab_size": 256,
        "hidden_size": 96,
        "moe_intermediate_size": 48,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "partial_rotary_factor": 16 / 64,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        # shorter than the prompt, as is the number of entries that are chosen
        "sliding_window": 32,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 12,
        "max_position_embeddings": 1024,
        "layer_types": LAYERS,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "num_hidden_layers": len(LAYERS),
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.05,
        **sizes,
    }
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes)).eval().float()
    with torch.no_grad():
        for key, t in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("tid2eid"):
                t.copy_(torch.rand(len(t), 8).topk(t.shape[1]).indices)
            elif key.endswith(("sinks", "position_bias", ".base", "hc_base", "correction_bias")):
                # zero after init: make them matter
                t.copy_(0.5 * torch.randn(t.shape))
            elif key.endswith("norm.weight"):
                t.copy_(1 + 0.2 * torch.randn(t.shape))
    return model


@pytest.fixture(scope="module")
def built():
    torch.manual_seed(3)
    return small_model()


@pytest.fixture
def model(built):
    """The untouched model; whatever a test leaves behind is undone."""
    yield built
    plugin.disable(built)
    assert not plugin._enabled and not plugin._eager


@pytest.fixture
def prompt():
    return torch.randint(1, 256, (1, PROMPT))


@torch.no_grad()
def teacher_forced(model, tokens, prefill=PROMPT):
    """Logits [T, V] at every position: one prefill, then a step for each token."""
    step = model(tokens[:, :prefill], use_cache=True)
    rows = [step.logits[0]]
    for i in range(prefill, tokens.shape[1]):
        step = model(tokens[:, i : i + 1], use_cache=True, cache=step.cache)
        rows.append(step.logits[0])
    return torch.cat(rows)


@torch.no_grad()
def generate(model, prompt, **more):
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, **more)


def forwards(model):
    """What decides what a model computes, besides its weights: each module's own attributes, and transformers' function."""
    own = {name: dict(module.__dict__).get("forward") for name, module in model.named_modules()}
    return own, sys.modules[plugin.MODULE].eager_attention_forward, model.config.to_dict()


def calls(forwards, finished):
    """How often each op runs in so many forwards, which finish the rows of so many compressors and indexers."""
    return {op: n * forwards + (finished if op == "rms_norm" else 0) for op, n in CALLS.items()}


def test_prefill_and_cached_decode_are_the_models(model, prompt):
    tokens = generate(model, prompt)
    before, no_cache = teacher_forced(model, tokens), model(tokens, use_cache=False).logits
    report = plugin.enable(model)
    assert report.replaced == MODULES and not report.left and not report.problem
    assert (teacher_forced(model, tokens) - before).abs().max() < LOGITS
    # one prefill, which finishes rows of 3 compressors and 2 indexers, and NEW steps, of which 3 finish rows of ratio 4
    assert report.calls == calls(NEW + 1, finished=5 + 3 * 4)
    assert not report.fell_back
    with torch.no_grad():
        assert (model(tokens, use_cache=False).logits - no_cache).abs().max() < LOGITS


def test_generates_the_same_tokens(model, prompt):
    before = generate(model, prompt, output_scores=True, return_dict_in_generate=True)
    report = plugin.enable(model)
    after = generate(model, prompt, output_scores=True, return_dict_in_generate=True)
    assert after.sequences.tolist() == before.sequences.tolist()
    assert (torch.stack(after.scores) - torch.stack(before.scores)).abs().max() < LOGITS
    # the last token is not fed
    assert report.calls == calls(NEW, finished=5 + 3 * 4)


def test_chunks_of_a_prompt(model, prompt):
    """A second chunk sees a window that was cut, and compressed entries that it may not see yet."""

    @torch.no_grad()
    def chunks():
        first = model(prompt[:, :70], use_cache=True)
        return torch.cat([first.logits, model(prompt[:, 70:], use_cache=True, cache=first.cache).logits], dim=1)

    before = chunks()
    report = plugin.enable(model)
    assert (chunks() - before).abs().max() < LOGITS
    assert report.calls["sparse_attn"] == 8


def test_a_batch_with_padding(model):
    """Rows of padding see no key, and sequences do not see each other."""
    tokens = torch.randint(1, 256, (3, 40))
    mask = torch.ones_like(tokens)
    mask[1, :13], mask[2, :39] = 0, 0
    with torch.no_grad():
        before = model(tokens, attention_mask=mask).logits
        report = plugin.enable(model)
        after = model(tokens, attention_mask=mask).logits
    assert (after - before).abs().max() < LOGITS
    assert report.calls == calls(1, finished=4)


def test_bfloat16(prompt):
    """Nearer to the float32 model than transformers is; where a router's choice tips over, a row is off in either."""
    torch.manual_seed(5)
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4PreTrainedModel

    # as from_pretrained loads it: some parameters stay float32
    keep = DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict
    model, short = small_model(), prompt[:, :60]
    rounded = [p for name, p in model.named_parameters() if not any(part in keep for part in name.split("."))]
    with torch.no_grad():
        for parameter in rounded:
            parameter.copy_(parameter.bfloat16())
        exact = model(short).logits[0]
        for parameter in rounded:
            parameter.data = parameter.data.bfloat16()
        theirs = model(short).logits[0]
        report = plugin.enable(model)
        ours = model(short).logits[0]
    plugin.disable(model)
    assert report.calls == calls(1, finished=4) and not report.fell_back
    assert ours.dtype == torch.bfloat16
    off, theirs_off = (((out - exact).norm(dim=1) / exact.norm(dim=1)).median() for out in (ours, theirs))
    assert off < theirs_off < BF16_LOGITS


def spoiled(op):
    """What the op gives, with a tenth of each value added to its neighbour: a norm behind it would undo a factor."""

    def run(*args, **kwargs):
        out = op(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        first = first + 0.1 * first.roll(1, -1)
        return (first, *out[1:]) if isinstance(out, tuple) else first

    return run


@pytest.mark.parametrize(
    "name", ["sparse_attn_prefill", "sparse_attn_decode", "moe", "mhc_pre", "mhc_post", "mhc_head", "rms_norm", "head_norm"]
)
def test_what_our_op_gives_is_what_the_model_uses(model, name, monkeypatch):
    tokens = torch.randint(1, 256, (1, 34))
    before = teacher_forced(model, tokens, prefill=32)
    plugin.enable(model)
    monkeypatch.setattr(plugin, name, spoiled(getattr(plugin, name)))
    change = (teacher_forced(model, tokens, prefill=32) - before).abs().amax(dim=1)
    seen = {"sparse_attn_prefill": change[:32], "sparse_attn_decode": change[32:]}.get(name, change)
    assert seen.min() > 100 * LOGITS
    if name == "sparse_attn_decode":
        assert change[:32].max() < LOGITS


def test_disable_restores_every_bit(model, prompt):
    with torch.no_grad():
        before, state = model(prompt).logits, forwards(model)
        plugin.enable(model)
        assert forwards(model)[0] != state[0] and forwards(model)[1] is not state[1]
        plugin.disable(model)
        assert forwards(model) == state
        assert same_bits(model(prompt).logits, before)
    plugin.disable(model)
    assert forwards(model) == state


def test_enable_twice_is_enable_once(model, prompt, caplog):
    first = plugin.enable(model)
    state = forwards(model)
    again = plugin.enable(model)
    assert "its layers run our ops already" in again.problem and not again.replaced
    assert forwards(model) == state
    with torch.no_grad():
        model(prompt[:, :8])
    assert first.calls == calls(1, finished=4) and not again.calls
    plugin.disable(model)
    assert plugin.enable(model).replaced == MODULES


def test_two_models_at_once(model, prompt):
    """Each has its report; the one that is disabled first leaves the other's attention in place."""
    torch.manual_seed(4)
    other = small_model()
    with torch.no_grad():
        before = model(prompt).logits
        mine, others = plugin.enable(model), plugin.enable(other)
        other(prompt)
        assert others.calls == calls(1, finished=5) and not mine.calls
        plugin.disable(other)
        assert (model(prompt).logits - before).abs().max() < LOGITS
    assert mine.calls == calls(1, finished=5)


def test_a_copy_runs_as_in_transformers(model, prompt):
    with torch.no_grad():
        before = model(prompt).logits
        report = plugin.enable(model)
        twin = copy.deepcopy(model)
        twin.model.norm.weight.mul_(2)
        # its own weights, transformers' own code
        assert same_bits(twin(prompt).logits, 2 * before)
        assert not report.calls
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        assert same_bits(torch.load(buffer, weights_only=False)(prompt).logits, before)


def test_weights_may_be_edited_while_enabled(model, prompt):
    plugin.enable(model)
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for key, t in model.named_parameters():
            if key.endswith(("down_proj", "sinks", "attn_hc.base")):
                t.mul_(1.5)
        enabled = model(prompt).logits
        plugin.disable(model)
        assert (model(prompt).logits - enabled).abs().max() < LOGITS
    model.load_state_dict(saved)


def test_gradients_and_attention_weights_are_left_to_transformers(model, prompt):
    short = prompt[:, :20]
    loss = model(short, labels=short).loss
    loss.backward()
    want = model.model.layers[1].mlp.experts.down_proj.grad.clone()
    with torch.no_grad():
        weights = model(short, output_attentions=True).attentions
    model.zero_grad()
    report = plugin.enable(model)
    again = model(short, labels=short).loss
    again.backward()
    assert again.item() == loss.item()
    assert same_bits(model.model.layers[1].mlp.experts.down_proj.grad, want)
    assert not report.calls and report.fell_back["sparse_attn: gradients are asked for"] == 4
    model.zero_grad()
    with torch.no_grad():
        after = model(short, output_attentions=True).attentions
    assert len(after) == 4
    assert max((a - b).abs().max() for a, b in zip(after, weights, strict=True)) < LOGITS
    assert report.fell_back["sparse_attn: attention weights are asked for"] == 4
    assert report.calls["moe"] == 4


def test_what_is_not_covered_runs_as_in_transformers(model, prompt, caplog):
    short = prompt[:, :20]
    # a mask that is neither 0 nor minus infinity, and activations of another type
    soft = torch.where(torch.ones(20, 20).tril().bool(), -0.5 * torch.rand(20, 20), float("-inf"))[None, None]
    twin = copy.deepcopy(model).half()
    with torch.no_grad():
        before = model(short, attention_mask=soft).logits
        before16 = twin(short).logits
        report = plugin.enable(model)
        after = model(short, attention_mask=soft).logits
        report16 = plugin.enable(twin)
        after16 = twin(short).logits
    plugin.disable(twin)
    assert (after - before).abs().max() < LOGITS and same_bits(after16, before16)
    assert report.fell_back["sparse_attn: mask must be 0 or minus infinity everywhere, got other values"] > 0
    assert report16.fell_back["mhc_post: activations in torch.float16"] == 4 and not report16.calls
    lines = [record.message for record in caplog.records if "mask must be" in record.message]
    assert len(lines) == 1 and lines[0].endswith("transformers' own code runs")


def test_modules_that_somebody_else_replaced_are_left(model, prompt):
    norm = model.model.norm
    norm.forward = lambda x: 3 * type(norm).forward(norm, x)
    try:
        with torch.no_grad():
            before = model(prompt[:, :8]).logits
            report = plugin.enable(model)
            assert (model(prompt[:, :8]).logits - before).abs().max() < 3 * LOGITS
        assert report.left == {"rms_norm: its forward has been replaced by somebody else": 1}
        assert report.calls["rms_norm"] == CALLS["rms_norm"] + 4 - 1
        plugin.disable(model)
        assert "forward" in norm.__dict__
    finally:
        del norm.__dict__["forward"]


@torch.no_grad()
def test_experts_of_another_rank_add_nothing(model):
    """transformers marks such a pair with the number of experts."""
    experts = model.model.layers[1].mlp.experts
    x, weights = torch.randn(5, 96), torch.rand(5, 2)
    ids = torch.tensor([[0, 8], [8, 8], [3, 1], [8, 7], [2, 2]])
    want = type(experts).forward.__wrapped__(experts, x, ids, weights)
    report = plugin.enable(model)
    assert (experts(x, ids, weights) - want).abs().max() < LOGITS and not want[1].any()
    assert report.calls == {"moe": 1}


def test_an_attention_put_over_ours_stays(model, prompt):
    modeling = sys.modules[plugin.MODULE]
    own = modeling.eager_attention_forward
    with torch.no_grad():
        before = model(prompt).logits
        report = plugin.enable(model)
        ours, seen = modeling.eager_attention_forward, []

        def over(module, *args, **kwargs):
            seen.append(module.layer_idx)
            return ours(module, *args, **kwargs)

        modeling.eager_attention_forward = over
        try:
            plugin.disable(model)
            assert modeling.eager_attention_forward is over
            assert same_bits(model(prompt).logits, before)
            assert seen == [0, 1, 2, 3] and not report.calls
        finally:
            modeling.eager_attention_forward = ours
            plugin.disable(model)
    assert modeling.eager_attention_forward is own


def test_two_streams_have_no_op(prompt):
    torch.manual_seed(6)
    model = small_model(hc_mult=2)
    with torch.no_grad():
        before = model(prompt).logits
        report = plugin.enable(model)
        assert (model(prompt).logits - before).abs().max() < LOGITS
    plugin.disable(model)
    none = "2 streams, not 4"
    assert report.left == {f"mhc_post: {none}": 4, f"mhc_pre: {none}": 8, f"mhc_head: {none}": 1}
    assert set(report.calls) == {"sparse_attn", "moe", "rms_norm", "head_norm"}


def changed_entry(**changes):
    first = next(entry for entry in plugin.EXPECTED if entry.name == "DeepseekV4HyperConnection.forward")
    return tuple(dataclasses.replace(entry, **changes) if entry is first else entry for entry in plugin.EXPECTED)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"takes": ("self", "streams")}, r"forward must take \(self, streams\), got \(self, hidden_streams\)"),
        ({"digest": "0" * 16}, "DeepseekV4HyperConnection.forward must compute what it did in transformers 5.24"),
        ({"name": "DeepseekV4HyperConnection.mix"}, "DeepseekV4HyperConnection.mix must be a function, got none"),
        ({"file": "models/deepseek_v4/gone.py"}, "gone.py: must be there and readable, got none"),
    ],
)
def test_another_transformers_stays_untouched(model, prompt, broken, said, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "EXPECTED", changed_entry(**broken))
    untouched(model, prompt, said, caplog)
    assert plugin.installed()["problem"]


def untouched(model, prompt, said, caplog):
    with torch.no_grad():
        before, state = model(prompt).logits, forwards(model)
        caplog.clear()
        with caplog.at_level(logging.INFO, "deepdecode"):
            report = plugin.enable(model)
        assert len(caplog.records) == 1
        assert re.search(said, caplog.records[0].getMessage())
        assert not report.replaced and forwards(model) == state
        assert same_bits(model(prompt).logits, before)


def test_an_older_version_stays_untouched(model, prompt, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "version", lambda name: "5.22.2")
    untouched(model, prompt, "transformers 5.22.2: left untouched: 5.24 is the first version that this plug-in knows", caplog)


def test_switched_off(model, prompt, monkeypatch, caplog):
    monkeypatch.setenv("DEEPDECODE_ENABLE", "0")
    untouched(model, prompt, "left untouched: DEEPDECODE_ENABLE=0", caplog)


def test_another_model_stays_untouched(caplog):
    other = torch.nn.Sequential(torch.nn.Linear(3, 3))
    report = plugin.enable(other)
    assert report.problem == "the model has no DeepSeek-V4 layer of transformers" and "forward" not in other[0].__dict__
    assert plugin.enable(None).problem == "model must be a torch.nn.Module, got NoneType"


def test_what_an_operator_is_told(model, caplog):
    told = plugin.installed()
    assert told["problem"] == "" and "DeepseekV4Experts.forward" in told["replaces"] and told["version"].startswith("5.")
    with caplog.at_level(logging.INFO, "deepdecode"):
        report = plugin.enable(model)
    assert [record.getMessage() for record in caplog.records] == [str(report)]
    assert "replaced" in str(report) and "sparse_attn in 4 modules" in str(report)


def test_digest_sees_code_and_nothing_else():
    written = 'def f(x, y=1):\n    """Says."""\n    return x + y\n'
    same = "def f(x: int, y: int = 1) -> int:\n    # why\n    return (x\n            + y)\n"
    digests = [digest(ast.parse(text), "f") for text in (written, same)]
    assert digests[0] == digests[1]
    for other in ("x - y", "y + x", "x + 1"):
        assert digest(ast.parse(written.replace("x + y", other)), "f") != digests[0]
    assert digest(ast.parse(written), "C.f") == ""
    assert digest(ast.parse(written.replace("y=1", "y=2")), "f") != digests[0]


def test_import_is_light():
    code = (
        "import sys, deepdecode.plugins.transformers as p; assert p.installed()['replaces'];"
        "print('transformers' in sys.modules, 'triton' in sys.modules and 'triton' not in before)"
    )
    code = "import sys, torch; before = set(sys.modules); " + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
