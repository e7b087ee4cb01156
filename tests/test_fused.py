"""The fused table against the references: the same bits off a GPU, the same model on one."""

from dataclasses import replace

import pytest
import torch

from deepdecode.checkpoint import load_model
from deepdecode.ops import _check, fused, reference
from deepdecode.ops._check import kernel_runs
from deepdecode.ops.fused import FUSED
from deepdecode.ops.reference import REFERENCE
from deepdecode.runner import Runner
from deepdecode.testing.numeric import rel_err, same_bits
from deepdecode.testing.steps import contiguous, prepare_inputs
from deepdecode.tiny import EMBEDDED

# bfloat16 roundings that fall otherwise, through four layers and FP8 rows: 1.3e-2 on an H200, as far as from float32
LOGITS = 3e-2
OWN = ("embed", "mhc_boundary", "attn_in", "q_proj", "attn_prepare", "sparse_attn", "attn_out", "route", "head", "sample")


def test_every_entry_has_its_fused_form():
    assert {name for name in vars(FUSED) if getattr(FUSED, name) is not getattr(REFERENCE, name)} == set(OWN)


def decode(ops, device, steps=6):
    """Logits of two sequences' next steps, fed with the same tokens; the second completes an entry of 128."""
    weights = load_model(EMBEDDED, device=device)
    runner = Runner(weights, max_len=600, slots=2, ops=replace(ops, index_topk=REFERENCE.index_topk))
    ids = torch.arange(2, 602).tolist()
    lengths = (300, 125)
    slots = [runner.cache.acquire() for _ in lengths]
    for slot, length in zip(slots, lengths, strict=True):
        runner.prefill(slot, ids[:length])
    logits = []
    for i in range(steps):
        at = [length + i for length in lengths]
        logits.append(runner.decode(slots, [ids[p] for p in at], at))
    return torch.stack(logits)


def test_off_the_gpu_it_is_the_reference():
    assert same_bits(decode(FUSED, "cpu", steps=2), decode(REFERENCE, "cpu", steps=2))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Every CPU tensor taken for one of a GPU: what no kernel covers must come back from the reference."""
    monkeypatch.setattr(fused, "use_kernel", lambda tensor: True)
    monkeypatch.setattr(fused, "arch", lambda tensor: 90)
    monkeypatch.setattr(_check, "_said", set())


def test_what_no_kernel_covers_is_said_and_done_by_the_reference(as_on_a_gpu, caplog):
    x = torch.randn(3, 64)
    got = fused.rms_norm(x, x[0], 1e-6)
    assert same_bits(got, reference.rms_norm(x, x[0], 1e-6))
    assert caplog.messages == [
        "rms_norm: no kernel for x [3, 64]: x must be bfloat16 and C at most 16384, got float32 and 64; the reference runs"
    ]
    case = prepare_inputs([3, 8], 4, H=2, dtype=torch.float32)
    other = case.again()
    got, want = (
        fused.attn_prepare(*case.args()),
        reference.attn_prepare(*replace(other, inputs=contiguous(other.inputs)).args()),
    )
    assert same_bits(got.q, want.q)
    assert same_bits(case.cache.window.data, other.cache.window.data)
    assert caplog.messages[1].startswith("attn_prepare: no kernel for q [2, 2, 512], fp8_584 rows: activations and states must")


def test_one_value_expanded_to_all_rows_is_sampled_with(as_on_a_gpu, monkeypatch):
    """Kernels read a row's temperature beside its neighbour's: what has no distance from row to row is laid out first."""
    given = []
    monkeypatch.setattr(fused.launches, "sample", lambda *args: given.append(args) or args[0].argmax(-1))
    logits, ints = torch.randn(3, 50), torch.arange(6).view(3, 2)
    temperature, top_p = torch.tensor([[0.5], [0.9]]).expand(2, 3)
    fused.sample(logits, temperature, top_p, ints[:, 0], ints[:, 1])
    rows = [t.tolist() for t in given[0][1:]]
    assert rows == [[0.5] * 3, [pytest.approx(0.9)] * 3, [0, 2, 4], [1, 3, 5]]
    assert all(t.is_contiguous() for t in given[0][1:])


def test_layouts_that_no_kernel_reads_are_said(as_on_a_gpu, caplog):
    case = prepare_inputs([3, 8], 4, H=2)
    twisted = replace(case.inputs, comp_gate=case.inputs.comp_gate.contiguous())
    assert fused.attn_prepare(*replace(case, inputs=twisted).args()).q.shape == case.q.shape
    assert "one distance from token to token" in caplog.text
    turned = replace(case, q=case.q.transpose(1, 2).contiguous().transpose(1, 2))
    want = reference.attn_prepare(*replace(turned.again(), inputs=contiguous(case.inputs)).args())
    assert same_bits(fused.attn_prepare(*turned.args()).q, want.q)
    assert "every token's row must be contiguous" in caplog.text


def test_a_product_counts_for_its_entry():
    """`generate` says of every entry whether a kernel ran: attn_in and q_proj are their products."""

    def product(x, weight):
        kernel_runs["linear"] += 1
        return x.new_zeros(len(x), weight)

    before = kernel_runs.copy()
    x = torch.randn(2, 8)
    assert fused._product("attn_in", product, x, 4).shape == (2, 4)
    fused._product("q_proj", product, x, 4)
    assert [kernel_runs[op] - before[op] for op in ("attn_in", "q_proj", "linear")] == [1, 1, 2]


def test_old_archs_take_the_reference(as_on_a_gpu, monkeypatch, caplog):
    monkeypatch.setattr(fused, "arch", lambda tensor: 75)
    x = torch.randn(2, 64).bfloat16()
    assert same_bits(fused.rms_norm(x, x[0], 1e-6), reference.rms_norm(x, x[0], 1e-6))
    assert "sm_80 or newer is needed, got sm_75" in caplog.text
    monkeypatch.setenv("DEEPDECODE_STRICT", "1")
    with pytest.raises(RuntimeError, match="sm_75"):
        fused.rms_norm(x, x[0], 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_model_is_the_same(monkeypatch):
    monkeypatch.setenv("DEEPDECODE_STRICT", "1")
    kernel_runs.clear()
    got = decode(FUSED, "cuda")
    assert all(kernel_runs[op] for op in ("mhc_boundary", "attn_in", "q_proj", "attn_prepare", "attn_out", "route", "head"))
    want = decode(REFERENCE, "cuda")
    # rounding tips an expert or an entry next to the bar in one token of twelve at most, and what it takes instead is another's
    errors = [rel_err(*pair) for pair in zip(got.flatten(0, 1), want.flatten(0, 1), strict=True)]
    assert sorted(errors)[-2] < LOGITS and max(errors) < 1
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.8
