"""A stand-in for DeepGEMM: its functions with their names and arguments, what they ask of them on sm_90, and torch inside."""

import sys
import types

import torch

from deepdecode.ops.indexer import index_logits_ref
from deepdecode.ops.rows import PagedRows, read_rows

SMS = 132


def fp8_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, indices=None
):
    batch, next_n, heads, width = q.shape
    pages, page_size, one, row = kv_cache.shape
    assert next_n in (1, 2)
    assert heads in (32, 64)
    assert (page_size, one, row) == (64, 1, width + 4)
    assert kv_cache.stride()[1] == row
    assert kv_cache.stride(3) == 1
    assert kv_cache.stride(0) % 16 == 0
    assert q.dtype == torch.float8_e4m3fn
    assert kv_cache.dtype == torch.uint8
    assert weights.dtype == torch.float32
    assert weights.shape == (batch * next_n, heads)
    assert context_lens.shape == (batch, next_n)
    assert block_table.shape[0] == batch
    assert block_table.stride(1) == 1
    assert schedule_meta.shape == (SMS + 1, 2)
    assert {t.dtype for t in (context_lens, block_table, schedule_meta)} == {torch.int32}
    assert all(t.is_contiguous() for t in (q, weights, context_lens, schedule_meta))
    assert not clean_logits
    assert indices is None
    # what lies past a length, and past max_context_len up to the next 256, is not written
    logits = torch.full((batch, -(-max_context_len // 256) * 256), float("nan"))[:, :max_context_len]
    keys = PagedRows(kv_cache.view(pages, -1), page_size, "fp8_132")
    for b, count in enumerate(context_lens[:, 0].tolist()):
        at = torch.arange(count)
        rows = block_table[b, at // 64].long() * 64 + at % 64
        logits[b, :count] = index_logits_ref(q[b].float(), weights[b : b + 1], read_rows(keys, rows))[0]
    return logits


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None):
    assert context_lens.dim() == 2
    assert context_lens.dtype == torch.int32
    assert context_lens.is_contiguous()
    assert block_kv == 64
    assert indices is None
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


def tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits=None):
    (m, k), n = a.shape, len(b)
    assert (a.dtype, b.dtype, d.dtype, sqr_sum.dtype) == (torch.bfloat16, *[torch.float32] * 3)
    assert all(t.is_contiguous() for t in (a, b, d, sqr_sum))
    assert n <= 32
    assert n % 8 == 0
    assert k % 64 == 0
    assert d.shape == (num_splits, m, n)
    assert sqr_sum.shape == (num_splits, m)
    d.zero_()
    sqr_sum.zero_()
    # 10 bits of a number are left in TF32
    d[0] = a.float() @ (b.view(torch.int32) + 0x1000 & -0x2000).view(torch.float32).T
    sqr_sum[-1] = a.float().square().sum(1)


def install(monkeypatch):
    module = types.ModuleType("deep_gemm")
    for function in (fp8_paged_mqa_logits, get_paged_mqa_logits_metadata, tf32_hc_prenorm_gemm):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
