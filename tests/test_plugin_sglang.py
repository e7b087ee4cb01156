"""What the SGLang plug-in does with SGLang's calls, and the check of an engine's source; tests/engines runs SGLang itself."""

import logging
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from deepdecode.cards import find_card
from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.plugins import sglang_ops as ops
from deepdecode.plugins.guard import Guard
from deepdecode.plugins.sources import Calls, Function, Statement, Value, folder, problems
from deepdecode.testing.inputs import attention_inputs
from deepdecode.testing.numeric import rel_err

# bfloat16 output
BF16 = 3e-3


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name, guard in ops.GUARDS.items():
        monkeypatch.setitem(ops.GUARDS, name, Guard("SGLang", guard.what))


def original(**kwargs):
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
