"""vLLM's classes for NVIDIA GPUs with our parts, called on a CPU as vLLM calls them, and what vLLM itself computes for each.

    python vllm_nvidia.py OUT

For the kernels that only a GPU has vLLM's own for CPUs stand here, so that both sides are computed: FlashInfer's and FlashMLA's
decode, DeepGEMM's scores and their top-k, TileLang's hyper-connections.
"""

import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.backends

triton.backends.backends.setdefault(
    "cpu", types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True), compiler=None)
)
PARTS = "attention,flashmla,indexer,mhc"
os.environ["DEEPDECODE_VLLM"] = PARTS
HEADS, TOKENS, TOPK = 8, 3, 512


def named(**members):
    return types.SimpleNamespace(**members)


def pages(rows):
    """Rows of ours as vLLM binds a cache: [pages, page size, 584], at the pages' own stride."""
    return rows.data[:, : rows.page_size * 584].view(-1, rows.page_size, 584)


def cpu_attention(output, q, window, window_slots, window_lens, extra, extra_slots, extra_lens, sink, scale):
    """vLLM's own kernel for CPUs, which takes -1 for no key and no lengths."""

    def slots(indices, lens):
        indices = indices.reshape(len(q), -1).long()
        return torch.where(torch.arange(indices.shape[1]) < lens[:, None], indices, -1)

    none = torch.full((len(q), 0), -1, dtype=torch.int64)
    torch.ops._C.flash_mla_with_kvcache_cpu(
        output, q, window.view(len(window), -1), slots(window_slots, window_lens), window.shape[1],
        (window if extra is None else extra).view(len(window if extra is None else extra), -1),
        none if extra is None else slots(extra_slots, extra_lens), 1 if extra is None else extra.shape[1], sink, scale,
    )  # fmt: skip


def flashinfer_decode(
    *, query, swa_kv_cache, workspace_buffer, sparse_indices, compressed_kv_cache, out, bmm1_scale, sinks, kv_layout,
    swa_topk_lens, extra_sparse_indices, extra_sparse_topk_lens,
):  # fmt: skip
    extra = None if compressed_kv_cache is None else compressed_kv_cache.squeeze(2)
    cpu_attention(
        out, query, swa_kv_cache.squeeze(2), sparse_indices, swa_topk_lens, extra, extra_sparse_indices, extra_sparse_topk_lens,
        sinks, bmm1_scale,
    )  # fmt: skip


def flash_mla_decode(
    *, q, k_cache, block_table, head_dim_v, tile_scheduler_metadata, cache_seqlens, is_fp8_kvcache, indices, topk_length,
    softmax_scale, attn_sink, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, out,
):  # fmt: skip
    extra = None if extra_k_cache is None else extra_k_cache.squeeze(2)
    cpu_attention(
        out.squeeze(1), q.squeeze(1), k_cache.squeeze(2), indices, topk_length, extra, extra_indices_in_kvcache,
        extra_topk_length, attn_sink, softmax_scale,
    )  # fmt: skip
    return out, None


def decode_step(ratio, wide, generator):
    """A layer, its step's metadata, q and the compressed cache. wide: ratio 128 has its indices in a wider buffer."""
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

    from deepdecode.testing.inputs import attention_inputs

    keys = {1: 0, 4: TOPK, 128: 64}[ratio]
    made = attention_inputs(TOKENS, HEADS, 128, keys, window_page=64, extra_page=256 // ratio if keys else 64, full=False)
    sink = made.sink.clone()
    # a head that only pads has no sink in vLLM
    sink[-1] = float("-inf")
    swa = DeepseekSparseSWAMetadata(
        block_table=torch.zeros(TOKENS, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(TOKENS, dtype=torch.int64),
        block_size=64,
        is_valid_token=torch.tensor([True] * (TOKENS - 1) + [False]),
        token_to_req_indices=torch.arange(TOKENS, dtype=torch.int32),
        decode_swa_indices=made.window_indices.unsqueeze(1),
        decode_swa_lens=made.window_lens,
        num_decodes=TOKENS,
        num_decode_tokens=TOKENS,
        tile_sched_swaonly=object(),
        tile_sched_c4a=object(),
        tile_sched_c128a=object(),
    )
    mla = cache = buffer = None
    if keys:
        cache = pages(made.extra)
        table = torch.stack([torch.randperm(len(cache), generator=generator) for _ in range(TOKENS)]).int()
        mla = DeepseekV4FlashMLAMetadata(
            num_reqs=TOKENS, max_query_len=1, max_seq_len=4096, num_actual_tokens=TOKENS,
            query_start_loc=torch.arange(TOKENS + 1, dtype=torch.int32), slot_mapping=swa.slot_mapping, block_table=table,
            req_id_per_token=swa.token_to_req_indices, block_size=256, topk_tokens=TOPK,
        )  # fmt: skip
    if ratio == 4:
        # entries by their numbers in the sequence, -1 behind those that are chosen
        entries = table.shape[1] * 64
        buffer = torch.full((TOKENS + 2, TOPK), -1, dtype=torch.int32)
        for row, count in enumerate((min(TOPK, entries), 7, 1)):
            buffer[row, :count] = torch.randperm(entries, generator=generator)[:count].int()
    if ratio == 128:
        indices = made.extra_indices
        if wide:
            indices = torch.cat([indices, torch.full_like(indices, 10**6)], dim=1)[:, : indices.shape[1]]
        mla.c128a_global_decode_topk_indices = indices.view(TOKENS, 1, -1)
        mla.c128a_decode_topk_lens = made.extra_lens
    layer = named(
        compress_ratio=ratio, topk_indices_buffer=buffer, attn_sink=torch.nn.Parameter(sink, requires_grad=False),
        scale=made.scale, swa_cache_layer=named(kv_cache=pages(made.window)), kv_cache_torch_dtype=torch.uint8,
    )  # fmt: skip
    return layer, swa, mla, made.q, cache


def decoded(nvidia, ours, name, patched, stand_in):
    """{ratio: (what our class writes, what vLLM's writes)}"""
    base, source, found = getattr(nvidia, name), sys.modules[getattr(nvidia, name).__module__], {}
    setattr(source, patched, stand_in)
    if hasattr(base, "_get_workspace"):
        base._get_workspace = staticmethod(lambda device: None)
    for ratio in (1, 4, 128):
        layer, swa, mla, q, cache = decode_step(ratio, "FlashMLA" in name, torch.Generator().manual_seed(ratio))
        outs = []
        for made in (ours[name], base):
            attend = object.__new__(made)
            torch.nn.Module.__init__(attend)
            for member, value in vars(layer).items():
                setattr(attend, member, value)
            # room for more tokens than decode: what stands behind must stay
            output = torch.full((TOKENS + 1, HEADS, 512), float("nan"), dtype=torch.bfloat16)
            attend._forward_decode(
                q=q, kv_cache=cache, swa_metadata=swa, attn_metadata=mla, swa_only=ratio == 1, output=output[:TOKENS]
            )
            outs.append(output)
        found[ratio] = tuple(outs)
    return found


def chosen(per_sequence, generator):
    """Entries that our class and vLLM's for CPUs leave in the buffer. per_sequence: its tokens, more than 1 in speculation."""
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.v1.attention.backends.mla.indexer import DeepSeekV32IndexerDecodeMetadata, DeepseekV32IndexerMetadata

    from deepdecode.plugins.vllm_model import indexer_class
    from deepdecode.testing.index_keys import random_keys

    sequences, table_pages = 3, 12
    keys = random_keys(sequences * table_pages, 64, generator, "cpu")
    T = sequences * per_sequence
    q = (50 * torch.randn(T, 64, 128, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    weights = 0.01 * torch.randn(T, 64, generator=generator)
    table = torch.randperm(sequences * table_pages, generator=generator).int().view(sequences, table_pages)
    lens = torch.tensor([[700], [530], [90]], dtype=torch.int32) + torch.arange(per_sequence, dtype=torch.int32)
    cache = keys.data[:, : 64 * 132].view(-1, 64, 132)

    def choose(made, forward, table, lens, q, weights):
        buffer = torch.full((T + 2, TOPK), 7, dtype=torch.int32)
        layer = object.__new__(made)
        torch.nn.Module.__init__(layer)
        layer.k_cache, layer.topk_tokens, layer.topk_indices_buffer = named(prefix="k", kv_cache=cache), TOPK, buffer
        layer.skip_k_cache_insert, layer.use_fp4_cache, layer.candidate_blocks = True, False, None
        layer.dcp_world_size, layer.use_pcp = 1, False
        decode = DeepSeekV32IndexerDecodeMetadata(
            block_table=table, seq_lens=lens, decode_lens=torch.ones(len(table), dtype=torch.int32), requires_padding=False,
            schedule_metadata=None,
        )  # fmt: skip
        step = DeepseekV32IndexerMetadata(
            seq_lens=4 * lens.reshape(-1), max_seq_len=4 * int(lens.max()), slot_mapping=torch.zeros(len(q), dtype=torch.int64),
            num_decodes=len(table), num_decode_tokens=len(q), num_prefills=0, num_prefill_tokens=0, decode=decode,
        )  # fmt: skip
        with override_forward_context(named(attn_metadata={"k": step})):
            result = getattr(layer, forward)(torch.zeros(len(q), 256), q, None, weights)
        assert result is buffer
        return buffer

    ours = choose(indexer_class(SparseAttnIndexer), "forward_cuda", table, lens, q, weights)
    # vLLM's for CPUs takes one token of a sequence
    each = table.repeat_interleave(per_sequence, 0)
    return ours, choose(SparseAttnIndexer, "forward_cpu", each, lens.reshape(-1, 1), q, weights)


def tilelang_stand_ins(nvidia):
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch

    def normed(x, weight, eps):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    def mhc_pre_tilelang(residual, *site, n_splits=1, norm_weight=None, norm_eps=1e-6):
        post, comb, x = mhc_pre_torch(residual, *site)
        return post, comb, x if norm_weight is None else normed(x, norm_weight, norm_eps)

    def mhc_fused_post_pre_tilelang(x, residual, post, comb, *site, n_splits=1, tile_n=1, norm_weight=None, norm_eps=1e-6):
        streams = mhc_post_torch(x, residual, post, comb)
        return streams, *mhc_pre_tilelang(streams, *site, norm_weight=norm_weight, norm_eps=norm_eps)

    nvidia.mhc_pre_tilelang, nvidia.mhc_fused_post_pre_tilelang = mhc_pre_tilelang, mhc_fused_post_pre_tilelang


def decoder_layers(nvidia, generator):
    """What two of vLLM's decoder layers give one after the other: residual streams, post, comb and the sublayer's output."""
    C = 256

    def norm():
        return named(weight=named(data=(1 + 0.1 * torch.randn(C, generator=generator)).bfloat16()), variance_epsilon=1e-6)

    def layer():
        site = {
            f"hc_{place}_{name}": torch.randn(*shape, generator=generator) * size
            for place in ("attn", "ffn")
            for name, shape, size in (("fn", (24, 4 * C), 0.03), ("scale", (3,), 0.5), ("base", (24,), 0.5))
        }
        mix = torch.randn(C, C, generator=generator).bfloat16() / 16
        return named(
            attn=lambda positions, x, _: x @ mix, ffn=lambda x, *_: x @ mix.T, attn_norm=norm(), ffn_norm=norm(),
            rms_norm_eps=1e-6, hc_eps=1e-6, hc_post_alpha=2.0, hc_sinkhorn_iters=20, use_sequence_parallel=False,
            hc_attn_fn_broadcast=None, **site,
        )  # fmt: skip

    x = torch.randn(5, 4, C, generator=generator).bfloat16()
    post = comb = residual = None
    for made in (layer(), layer()):
        x, residual, post, comb = nvidia.DeepseekV4DecoderLayer.forward(made, x, torch.arange(5), None, post, comb, residual)
    return x, residual, post, comb


def selected(nvidia, capability, backend=None):
    """The module of the attention class that vLLM would build."""
    nvidia.current_platform = named(get_device_capability=lambda: named(major=capability))
    return nvidia._select_dsv4_attn_cls(named(attention_config=named(backend=backend)))


def main():
    import vllm.models.deepseek_v4.nvidia.model as nvidia

    from deepdecode.ops import attention, indexer, mhc
    from deepdecode.plugins import vllm_model

    calls = {}

    def count(module, name):
        op, calls[name] = getattr(module, name), []

        def counted(first, *args, **kwargs):
            calls[name].append(tuple(first.shape))
            return op(first, *args, **kwargs)

        setattr(module, name, counted)

    for module, name in (
        (attention, "sparse_attn_decode"), (indexer, "index_topk"), (mhc, "mhc_pre"), (mhc, "mhc_post"),
    ):  # fmt: skip
        count(module, name)
    tilelang_stand_ins(nvidia)
    theirs = decoder_layers(nvidia, torch.Generator().manual_seed(3))
    vllm_model.theirs.DeepseekV4ForCausalLM = nvidia.DeepseekV4ForCausalLM
    with vllm_model._substituted():
        built = {capability: selected(nvidia, capability).__module__ for capability in (9, 12)}
        ours = {name: getattr(nvidia, name) for name in ("DeepseekV4FlashInferSM120Attention", "DeepseekV4FlashMLAAttention")}
    found = {
        "built": built,
        "after": {capability: selected(nvidia, capability).__module__ for capability in (9, 12)},
        "mhc": (decoder_layers(nvidia, torch.Generator().manual_seed(3)), theirs),
        "mhc_module": nvidia.mhc_fused_post_pre_tilelang.__module__,
        "sm120": decoded(
            nvidia,
            ours,
            "DeepseekV4FlashInferSM120Attention",
            "flashinfer_trtllm_batch_decode_sparse_mla_dsv4",
            flashinfer_decode,
        ),
        "flashmla": decoded(nvidia, ours, "DeepseekV4FlashMLAAttention", "flash_mla_with_kvcache", flash_mla_decode),
        "calls": calls,
        "indexer": {tokens: chosen(tokens, torch.Generator().manual_seed(tokens)) for tokens in (1, 2)},
        "failed": [guard.failed for guard in (vllm_model.ATTENTION, vllm_model.INDEXER, vllm_model.MHC)],
        "said": sorted(vllm_model.ATTENTION._said | vllm_model.INDEXER._said | vllm_model.MHC._said),
    }
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
