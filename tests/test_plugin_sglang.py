"""What the SGLang plug-in does with SGLang's calls, and the check of an engine's source; tests/engines runs SGLang itself."""

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepdecode.cards import find_card
from deepdecode.kernels.moe_plan import Case, plan_stream
from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.ops.indexer import index_topk_ref
from deepdecode.ops.mhc import mhc_post_ref, mhc_pre_ref
from deepdecode.ops.quant import dequantize
from deepdecode.plugins import sglang as plugin
from deepdecode.plugins import sglang_megakernel as megakernel
from deepdecode.plugins import sglang_ops as ops
from deepdecode.plugins.guard import Guard
from deepdecode.plugins.sglang_source import PLUGIN
from deepdecode.plugins.sources import Calls, Function, Statement, Value, folder, problems
from deepdecode.testing.index_keys import index_inputs
from deepdecode.testing.inputs import attention_inputs
from deepdecode.testing.numeric import rel_err

# bfloat16 output
BF16 = 3e-3


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name, guard in ops.GUARDS.items():
        monkeypatch.setitem(ops.GUARDS, name, Guard("SGLang", guard.what))


def original(*args, **kwargs):
    return "SGLang's own"


def as_sglang(inputs, **changes):
    """The keywords with which SGLang's backend would call for these inputs."""

    def pages(rows):
        return rows.data[:, : rows.page_size * 584].view(-1, rows.page_size, 1, 584).view(torch.float8_e4m3fn)

    call = {
        "q": inputs.q.unsqueeze(1),
        "k_cache": pages(inputs.window),
        "indices": inputs.window_indices.unsqueeze(1),
        "topk_length": inputs.window_lens,
        "attn_sink": inputs.sink,
        "head_dim_v": 512,
        "softmax_scale": inputs.scale,
        "extra_k_cache": None if inputs.extra is None else pages(inputs.extra),
        "extra_indices_in_kvcache": None if inputs.extra is None else inputs.extra_indices.unsqueeze(1),
        "extra_topk_length": inputs.extra_lens,
    }
    return call | changes


@pytest.mark.parametrize(
    ("extra_keys", "window_page", "extra_page"), [(0, 256, 64), (512, 256, 64), (64, 256, 2), (512, 64, 64), (64, 64, 2)]
)
@pytest.mark.parametrize("H", [8, 64])
def test_pages_are_read_as_they_lie(extra_keys, window_page, extra_page, H):
    inputs = attention_inputs(2, H, 128, extra_keys, window_page=window_page, extra_page=extra_page, full=False, holes=True)
    out, lse = ops.attention_sm120(original, **as_sglang(inputs))
    want, want_lse = sparse_attn_ref(inputs.q.double(), *inputs.args()[1:], sink=inputs.sink.double(), scale=inputs.scale)
    assert out.shape == (2, 1, H, 512) and rel_err(out[:, 0], want) < BF16
    torch.testing.assert_close(lse, want_lse.float().unsqueeze(2), rtol=1e-5, atol=1e-5)


def test_without_lengths_every_lane_counts():
    inputs = attention_inputs(2, 8, 128, 64)
    call = as_sglang(inputs, topk_length=None, extra_topk_length=None, softmax_scale=None)
    out, _ = ops.attention_sm120(original, **call)
    want, _ = sparse_attn_ref(inputs.q.double(), *inputs.args()[1:], sink=inputs.sink.double(), scale=512**-0.5)
    assert rel_err(out[:, 0], want) < BF16


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda c: {"q": c["q"].expand(2, 2, 8, 512)}, r"q must be \[T, 1, H, 512\], got \[2, 2, 8, 512\]"),
        (lambda c: {"head_dim_v": 256}, r"q must be \[T, 1, H, 256\], got \[2, 1, 8, 512\]"),
        (lambda c: {"k_cache": c["k_cache"][..., :528]}, r"k_cache must be pages of rows of 584 bytes, got \[4, 64, 1, 528\]"),
        (lambda c: {"k_cache": c["k_cache"][:, ::2]}, r"k_cache must be pages of rows of 584 bytes, got \[4, 32, 1, 584\]"),
        (lambda c: {"indices": c["indices"].long()}, r"window_indices must be \[2, K\] int32"),
        (lambda c: {"topk_length": c["topk_length"][:1]}, r"window_lens must be \[2\] int32"),
        (lambda c: {"attn_sink": c["attn_sink"].bfloat16()}, r"sink must be \[8\] float32"),
    ],
    ids=["two-queries", "head-dim", "row-bytes", "page-strides", "int64", "lengths", "sink"],
)
def test_what_is_not_covered_is_left_to_the_engine(change, line, caplog):
    call = as_sglang(attention_inputs(2, 8, 128, 0))
    for _ in range(2):
        assert ops.attention_sm120(original, **(call | change(call))) == "SGLang's own"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(line, record.getMessage())
    assert isinstance(ops.attention_sm120(original, **call), tuple), "the next call that is covered is ours"


def test_a_card_without_a_kernel_is_left_to_the_engine():
    inputs = attention_inputs(1, 8, 128, 0)
    ops.expect_kernel(inputs.args(), inputs.sink, find_card("sm_120"))
    with pytest.raises(ValueError, match="no kernel of ours: sm_75 has no bfloat16 tensor cores"):
        ops.expect_kernel(inputs.args(), inputs.sink, replace(find_card("sm_120"), arch=75))


def test_memory_that_runs_short_is_tried_again(monkeypatch, caplog):
    def short(*args, **kwargs):
        raise torch.OutOfMemoryError("x")

    call = as_sglang(attention_inputs(1, 8, 128, 0))
    with monkeypatch.context() as patch:
        patch.setattr("deepdecode.ops.attention.sparse_attn_decode", short)
        assert ops.attention_sm120(original, **call) == "SGLang's own"
    assert "OutOfMemoryError: x" in caplog.text
    assert isinstance(ops.attention_sm120(original, **call), tuple)


def test_the_entry_point_is_light():
    """SGLang loads it in processes that have no use for torch's kernels; without SGLang it says so and changes nothing."""
    code = "import sys; from deepdecode.plugins.sglang import register; register(); register(); print(*sys.modules)"
    env = os.environ | {"SGLANG_SM120_MMA_FLASHMLA": "1"}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert not {"torch", "triton", "numpy", "sglang"} & set(process.stdout.split())
    if folder("sglang") is None:
        (line,) = process.stderr.splitlines()
        assert "off: attention, flashmla: it is not installed; " in line
        assert line.endswith("off: indexer, mhc, moe, pages, megakernel: DEEPDECODE_SGLANG does not name it")


def test_every_function_that_is_replaced_has_its_hook():
    for part in PLUGIN.parts:
        hooks = plugin.HOOKS[part.name]
        assert len(hooks) in (0 if part.name == "megakernel" else len(part.replaces),), part.name
        assert all(callable(getattr(ops, name)) for name in hooks)
    assert set(plugin.HOOKS) == {part.name for part in PLUGIN.parts} >= set(plugin.COVERED)


def test_the_line_names_what_is_on_and_why_the_rest_is_not():
    why = {part.name: "" if part.name in ("flashmla", "mhc") else "nobody asked" for part in PLUGIN.parts}
    why["moe"] = "no GPU"
    assert plugin.said(plugin.PLUGIN, why) == (
        "on: flashmla (on sm_80, sm_86, sm_89, sm_90), mhc; off: attention, indexer, pages, megakernel: nobody asked; "
        "off: moe: no GPU"
    )
    assert plugin.said(plugin.PLUGIN, dict.fromkeys(why, "")).count("off") == 0


# FlashMLA's call


def flash_mla_call(inputs):
    more = {"block_table": None, "cache_seqlens": None, "tile_scheduler_metadata": object(), "is_fp8_kvcache": True}
    return as_sglang(inputs) | more | {"use_legacy": True}


def test_padding_heads_are_neither_computed_nor_returned():
    inputs = attention_inputs(2, 64, 128, 64)
    want, _ = sparse_attn_ref(inputs.q[:, :8].double(), *inputs.args()[1:], sink=inputs.sink[:8].double(), scale=inputs.scale)
    inputs.q[:, 8:] = float("nan")
    call = flash_mla_call(inputs)

    with ops.decode_step(8, captured=False):
        out, lse = ops.flash_mla(original, **call)
    assert out.shape == (2, 1, 8, 512) and lse.shape == (2, 8, 1)
    assert rel_err(out[:, 0], want) < BF16
    # a step that is no decode step: what comes back is as wide as what went in
    out, _ = ops.flash_mla(original, **call)
    assert out.shape == (2, 1, 64, 512) and rel_err(out[:, 0, :8], want) < BF16
    assert ops._heads.get() is None


@pytest.mark.parametrize(
    ("arch", "tokens", "heads", "own", "captured", "line"),
    [
        (90, 1, 64, 8, True, None),
        (90, 512, 64, 32, True, None),
        (90, 128, 64, 64, True, None),
        (90, 129, 64, 64, True, "FlashMLA takes 64 heads as they are, of 129 tokens"),
        (90, 1, 128, 128, True, "FlashMLA takes 128 heads as they are, of 1 tokens"),
        (90, 1, 64, 8, False, "not a decode step in a graph"),
        (90, 1, 64, None, True, "not a decode step in a graph"),
        (80, 1, 64, None, False, None),
        (89, 1000, 64, 64, False, None),
        (100, 1, 64, 8, True, "FlashMLA's kernels on sm_100 have not been measured beside ours"),
    ],
)
def test_where_flash_mla_has_the_better_kernel(arch, tokens, heads, own, captured, line):
    if line is None:
        ops.expect_faster(arch, tokens, heads, own, captured)
        return
    with pytest.raises(ValueError, match=re.escape(line)):
        ops.expect_faster(arch, tokens, heads, own, captured)


def test_flash_mla_was_measured_to_be_slower_where_its_calls_are_taken():
    rows = json.loads((Path(__file__).parent.parent / "results" / "h200" / "attention.json").read_text())["rows"]
    times = {"deepdecode": {}, "flash_mla": {}}
    for row in rows:
        taken = row["H"] < 64 or (row["H"] == 64 and row["T"] <= ops.MAX_OWN)
        if row["fmt"] == "fp8_584" and taken and row["implementation"] in times:
            times[row["implementation"]][row["T"], row["H"], row["window_keys"], row["extra_keys"]] = row
    pairs = [(times["deepdecode"][size], theirs) for size, theirs in times["flash_mla"].items()]
    # 9 batches of up to 256 tokens and 4 key counts with 8, 16 and 32 heads, one batch less with 64
    assert len(pairs) == 3 * 36 + 32
    for ours, theirs in pairs:
        assert ours["us_warm"] < theirs["us_warm"] and ours["us_rotated"] < theirs["us_rotated"], ours


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"indices": None}, "only sparse calls with FP8 rows of V4 are covered"),
        ({"use_legacy": False}, "only sparse calls with FP8 rows of V4 are covered"),
        ({"block_table": torch.zeros(1)}, "block_table must not be given"),
        ({"causal": True, "kv_format": "V4"}, "causal, kv_format must not be given"),
    ],
)
def test_another_call_of_flash_mla_is_its_own(change, line, caplog):
    call = flash_mla_call(attention_inputs(1, 8, 128, 0))
    assert ops.flash_mla(original, **(call | change)) == "SGLang's own"
    assert line in caplog.text
    assert ops.flash_mla(original, call["q"], call["k_cache"]) == "SGLang's own"
    assert "2 arguments by position" in caplog.text
    assert ops.GUARDS["attention"].failed is None


# the indexer


def deferred(inputs, calls):
    """SGLang's logits for these inputs, waiting; its own would be called with all of it."""
    table = inputs.block_tables[inputs.slots.long().clamp(0)].contiguous()
    keys = inputs.keys.data.view(-1, 64, 1, 132)
    args = (inputs.index_q[:, None], keys, inputs.index_weights, inputs.lens, table, None, 1000, False)

    def own(*given):
        calls.append(ops._choosing.get())
        return "scores"

    token = ops._choosing.set(True)
    try:
        found = ops.logits(own, *args)
        assert not calls and isinstance(found, ops.Deferred)
    finally:
        ops._choosing.reset(token)
    assert ops.logits(own, *args) == "scores" and calls == [False]
    calls.clear()
    return found, table


@pytest.mark.parametrize("plan", [False, True], ids=["plain", "planned"])
def test_scores_wait_for_the_choice(plan):
    (inputs,) = index_inputs(3, 200, 64, heads=16)
    inputs.lens[1], inputs.lens[2] = 30, 0
    calls = []
    scores, table = deferred(inputs, calls)
    out = torch.full((3, 64), -7, dtype=torch.int32)
    hook = ops.topk_planned if plan else ops.topk
    more = (torch.zeros(1), None) if plan else (None,)
    assert hook(original, scores, inputs.lens, table, out, 64, *more) is None
    want, found = index_topk_ref(*inputs.wide())
    assert torch.equal(out, want) and found.tolist() == [64, 30, 0] and not calls


@pytest.mark.parametrize("change", ["entries", "table", "page size", "broken"])
def test_scores_are_made_where_the_choice_is_sglangs(change, monkeypatch, caplog):
    (inputs,) = index_inputs(2, 100, 64, heads=16)
    calls, given = [], []
    scores, table = deferred(inputs, calls)
    out = torch.full((2, 64), -7, dtype=torch.int32)
    entries = out.clone() if change == "entries" else None
    if change == "broken":
        monkeypatch.setattr("deepdecode.ops.indexer.index_topk", None)

    def own(scores, *rest):
        given.append(scores)

    args = (inputs.lens, table.clone() if change == "table" else table, out, 128 if change == "page size" else 64, entries)
    ops.topk(own, scores, *args)
    assert given == ["scores"] and calls == [False] and (out == -7).all()
    ops.topk(own, "own scores", *args)
    assert given[1] == "own scores"
    assert caplog.text.count("deepdecode in SGLang: ") == 1


def test_many_rows_are_sglangs():
    token = ops._choosing.set(True)
    try:
        q = torch.zeros(ops.MAX_INDEXED + 1, 1, 2, 128)
        assert ops.logits(lambda *args: ops._choosing.get(), q, *range(7)) is False
    finally:
        ops._choosing.reset(token)


# hyper-connections, experts, pages


def boundary_call(**changes):
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    call = {
        "layer_input": random(3, 64).bfloat16(), "residual": random(3, 4, 64).bfloat16(),
        "post": 2 * random(3, 4).sigmoid(), "comb": random(3, 4, 4).softmax(-1), "hc_fn": random(24, 256) / 16,
        "hc_scale": random(3), "hc_base": random(24), "hc_mult": 4, "rms_eps": 1e-6, "hc_eps": 1e-5, "hc_post_mult": 2.0,
        "sinkhorn_iters": 5, "norm_weight": random(64).bfloat16(), "norm_eps": 1e-6,
    }  # fmt: skip
    return call | changes


@pytest.mark.parametrize("gates", [2, 3])
def test_the_boundary_agrees_with_float64(gates):
    call = boundary_call()
    if gates == 3:
        call["post"] = call["post"].unsqueeze(-1)
    out = ops.mhc_boundary(original, *call.values(), fn_transpose=True)
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    streams = mhc_post_ref(wide["layer_input"], wide["residual"], wide["post"].view(3, 4), wide["comb"])
    x, post, comb = mhc_pre_ref(streams, wide["hc_fn"], wide["hc_base"], wide["hc_scale"], 1e-6, 1e-5, 5)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * wide["norm_weight"]
    assert out[4] is True and out[2].shape == (3, 4)
    for got, want in zip(out[:4], (streams, x, post, comb), strict=True):
        assert rel_err(got, want) < 1e-2


@pytest.mark.parametrize(
    "change",
    [{"norm_weight": None}, {"norm_eps": 1e-5}, {"hc_post_mult": 1.0}, {"hc_mult": 2}, {"layer_input": torch.zeros(0, 64)}],
)
def test_another_boundary_is_sglangs(change, caplog):
    assert ops.mhc_boundary(original, *boundary_call(**change).values(), fn_transpose=False) == "SGLang's own"
    # a rank that idles is no news
    assert len(caplog.records) == (0 if "layer_input" in change else 1)


def test_pages_stay_whole():
    pages = torch.zeros(3, 149760, dtype=torch.uint8).as_strided((3, 256, 1, 584), (149760, 584, 584, 1))
    assert ops.whole_pages(original, pages, 256, touched_indices=None) is pages
    odd = torch.zeros(3, 149761, dtype=torch.uint8).as_strided((3, 256, 1, 584), (149761, 584, 584, 1))
    assert ops.whole_pages(original, odd, 256) == "SGLang's own"


def expert_layer(dtype=torch.float8_e8m0fnu):
    rows = torch.arange(128, dtype=torch.uint8).view(2, 64, 1)
    return SimpleNamespace(
        w13_weight=rows.repeat(1, 1, 32), w13_weight_scale_inv=rows.repeat(1, 1, 2).view(torch.float8_e8m0fnu).to(dtype),
        w2_weight=torch.zeros(2, 64, 16, dtype=torch.uint8), w2_weight_scale_inv=torch.zeros(2, 64, 1).to(dtype),
    )  # fmt: skip


def expert_method(process, **config):
    made = {"moe_ep_size": 1, "gemm1_clamp_limit": None, "swiglu_limit": 10.0} | config
    return SimpleNamespace(
        moe_runner_config=SimpleNamespace(**made), _fp8=SimpleNamespace(process_weights_after_loading=process)
    )


def test_weights_are_turned_in_place():
    layer, seen = expert_layer(), []
    where = layer.w13_weight.data_ptr(), layer.w13_weight_scale_inv.data_ptr()
    assert ops.moe_load(original, expert_method(seen.append), layer) is None
    assert seen == [layer] and where == (layer.w13_weight.data_ptr(), layer.w13_weight_scale_inv.data_ptr())
    turned = torch.arange(128).view(2, 2, 32).flip(1).flatten(1)
    assert torch.equal(layer.w13_weight[..., 0].long(), turned)
    assert torch.equal(layer.w13_weight_scale_inv.view(torch.uint8)[..., 1].long(), turned)
    assert layer._deepdecode_experts.w13.data.data_ptr() == where[0]


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
@pytest.mark.parametrize("T", [2, 16, 64])
def test_hopper_streams_the_experts(T, ways):
    """The shared expert of zeros is one beside which the plan streams the routed ones."""
    [shared13, shared2] = ops._no_expert(4096, torch.device("cpu"))
    assert shared13.shape == (512, 4096) and shared2.shape == (4096, 256) and not dequantize(shared13).any()
    assert ops._no_expert(4096, torch.device("cpu"))[0] is shared13
    assert plan_stream(Case(T, 6, 256, 4096, 2048 // ways, shared13.shape[0] // 2), find_card("H200")) is not None


def test_weights_that_sglang_changes_first_are_its_own():
    """SGLang's first step runs once, whoever goes on."""
    layer, steps = expert_layer(), []

    def process(layer):
        steps.append("first")
        layer.w2_weight = torch.zeros(2, 64, 32, dtype=torch.uint8)

    def own(method, layer):
        method._fp8.process_weights_after_loading(layer)
        steps.append("own")

    method = expert_method(process)
    ops.moe_load(own, method, layer)
    assert steps == ["first", "own"] and method._fp8.process_weights_after_loading is process
    assert not hasattr(layer, "_deepdecode_experts") and layer.w13_weight[0, 0, 0] == 0


@pytest.mark.parametrize(
    ("config", "dtype", "line"),
    [
        ({"moe_ep_size": 2}, torch.float8_e8m0fnu, "expert parallelism over 2 ranks"),
        ({"swiglu_limit": None}, torch.float8_e8m0fnu, "another activation than V4's clamped SwiGLU"),
        ({}, torch.float32, "weights must be packed FP4 with E8M0 scales"),
    ],
)
def test_other_experts_are_prepared_by_sglang(config, dtype, line, caplog):
    layer, method = expert_layer(dtype), expert_method(None, **config)
    assert ops.moe_load(original, method, layer) == "SGLang's own"
    assert line in caplog.text and not hasattr(layer, "_deepdecode_experts")
    assert ops.moe_apply(original, method, layer, None) == "SGLang's own"


# the megakernel contract


@pytest.fixture
def another_megakernel(tmp_path, monkeypatch):
    """A distribution with an entry point of the same name, of which SGLang would run one alone."""
    (tmp_path / "another_mega.py").write_text("calls = []\ndef register(): calls.append(1)\n")
    info = tmp_path / "another_mega-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another-mega\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nnvidia_megakernel = another_mega:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_megakernel_of_another_package_has_the_place(another_megakernel, monkeypatch, caplog):
    monkeypatch.setenv("DEEPDECODE_SGLANG", "megakernel")
    megakernel.register.__wrapped__()
    import another_mega

    assert another_mega.calls == [1]
    assert caplog.messages == ["deepdecode in SGLang: megakernel is off: another_mega has one"]


def test_a_megakernel_that_breaks_raises_nothing(another_megakernel, tmp_path, caplog):
    (tmp_path / "another_mega.py").write_text("raise OSError('no libcuda')")
    sys.modules.pop("another_mega", None)
    megakernel.register.__wrapped__()
    assert caplog.messages == ["deepdecode in SGLang: megakernel is off: OSError: no libcuda"]


def test_a_covered_step_is_covered_and_no_longer():
    built = megakernel._build(None, None, SimpleNamespace(widths=(1, 8, 64, 128)))
    assert built.widths == (1, 8, 64)
    assert built.forward(None, lambda *args: (ops.covered.get(), args), 1, 2) == (True, (1, 2))
    assert not ops.covered.get()
    with pytest.raises(ZeroDivisionError):
        built.forward(None, lambda: 1 / 0)
    assert not ops.covered.get()


def test_hooks_of_covered_steps_are_sglangs_outside(monkeypatch):
    hook = plugin._around("attention_sm120", always=False)
    call = as_sglang(attention_inputs(1, 8, 128, 0))
    assert hook(original, **call) == "SGLang's own"
    built = megakernel.Steps((1,))
    out, _ = built.forward(None, lambda: hook(original, **call))
    assert torch.equal(out, plugin._around("attention_sm120", always=True)(original, **call)[0])


# the check of an engine's source

SOURCE = """
WIDTH = 448
WIDTH = A + 64

class Layout:
    if True:
        V4: str = "v4"
    def page(self, rows, *, pad=True):
        return rows

def attend(first, *args, **kwargs):
    return kwargs["q"], kwargs.get("lens"), other["x"]

def caller():
    attend(q=1, lens=2)
    module.attend(q=1, lens=3)
    shape(1, x=2)
"""
HOLDS = (
    Value("m.py", "WIDTH", "A + 64"),
    Value("m.py", "Layout.V4", "'v4'"),
    Function("m.py", "Layout.page", ("self", "rows", "*", "pad")),
    Function("m.py", "attend", ("first", "*args", "**kwargs"), frozenset({"q", "lens"})),
    Calls("m.py", "attend", frozenset({"q", "lens"})),
    Calls("m.py", "shape", frozenset({"x"}), 1),
    Statement("m.py", "caller", "module.attend(q=1, lens=3)"),
    Statement("m.py", "Layout.page", "return rows"),
)


@pytest.fixture
def package(tmp_path):
    (tmp_path / "m.py").write_text(SOURCE)
    return tmp_path


def test_a_source_as_expected_has_no_problem(package):
    assert problems(package, HOLDS) == []


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (Value("m.py", "WIDTH", "448"), "WIDTH must be 448, got A + 64"),
        (Value("m.py", "Layout.V5", "'v5'"), "Layout.V5 must be 'v5', got none"),
        (Function("m.py", "Layout.page", ("self", "rows")), "Layout.page must take (self, rows), got (self, rows, *, pad)"),
        (Function("m.py", "Layout.row", ("self",)), "Layout.row must be a function, got none"),
        (Function("m.py", "Layout", ()), "Layout must be a function, got none"),
        (
            Function("m.py", "attend", ("first", "*args", "**kwargs"), frozenset({"q", "k"})),
            "attend must read the keywords k, q, got lens, q",
        ),
        (Calls("m.py", "attend", frozenset({"q"})), "attend must be called with q, got lens, q"),
        (Calls("m.py", "shape", frozenset({"x"})), "shape must be called with x, got x and 1 by position"),
        (Calls("m.py", "shape", frozenset({"x"}), 2), "shape must be called with x and 2 by position, got x and 1 by position"),
        (Calls("m.py", "page", frozenset({"rows"})), "page must be called, got no call"),
        (Statement("m.py", "caller", "shape(1, x=3)"), "caller must say `shape(1, x=3)`, got no such statement"),
        (Statement("m.py", "Layout", "x"), "Layout must be a function, got none"),
        (Value("gone.py", "WIDTH", "448"), "must be there and readable, got none"),
    ],
)
def test_a_changed_source_is_told_in_one_sentence(package, entry, problem):
    assert problems(package, (*HOLDS, entry)) == [f"{entry.file}: {problem}"]
