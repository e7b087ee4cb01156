"""The fused table against the references: the same bits off a GPU, the same model on one."""

from dataclasses import replace

import pytest
import torch

from deepdecode.checkpoint import load_model
from deepdecode.ops._check import kernel_runs
from deepdecode.ops.fused import FUSED
from deepdecode.ops.reference import REFERENCE
from deepdecode.runner import Runner
from deepdecode.testing.numeric import rel_err, same_bits
from deepdecode.tiny import tiny_dir

# bfloat16 roundings that fall otherwise, through four layers and FP8 rows: 1.3e-2 on an H200, as far as bfloat16 is from float32
LOGITS = 3e-2
OWN = ("mhc_boundary", "attn_in", "q_proj", "attn_prepare", "attn_out", "route", "head", "sample")


def test_every_entry_has_its_fused_form():
    assert {name for name in vars(FUSED) if getattr(FUSED, name) is not getattr(REFERENCE, name)} == set(OWN)


def decode(ops, device, steps=6):
    """Logits of two sequences' next steps, fed with the same tokens; the second completes an entry of 128."""
    weights = load_model(tiny_dir(), device=device)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_model_is_the_same(monkeypatch):
    monkeypatch.setenv("DEEPDECODE_STRICT", "1")
    kernel_runs.clear()
    got = decode(FUSED, "cuda")
    assert all(kernel_runs[op] for op in ("mhc_boundary", "rms_norm", "attn_prepare", "attn_out", "route", "head"))
    want = decode(REFERENCE, "cuda")
    assert rel_err(got, want) < LOGITS
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.8
