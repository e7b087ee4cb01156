"""vLLM's classes for NVIDIA GPUs with our parts and vLLM's metadata, walked with tensors that have no values.

    python vllm_capture.py OUT

A CUDA graph holds no look at a value and no copy from the host; on tensors without values either is an error. What is saved for
each call: the kernels that it launches, vLLM's own among them, on a card of the plug-in's table.
"""

import contextlib
import dataclasses
import sys

import torch
import vllm_nvidia as made
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

CARDS = {"DeepseekV4FlashInferSM120Attention": ("RTX PRO 6000", "DGX Spark GB10"), "DeepseekV4FlashMLAAttention": ("H200",)}
# of a page of 64 rows and of 2, as vLLM has them
STRIDES = {64: 37440, 2: 1728}
launched = []


def without_values(value):
    """The same with meta tensors, pages with their strides."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: without_values(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 3 and value.shape[2] == 584:
        count, size, _ = value.shape
        pool = torch.empty(count, STRIDES[size], dtype=torch.uint8, device="meta")
        return pool[:, : size * 584].view(count, size, 584)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def on(name):
    """Take the tensors without values for those of this card."""
    from deepdecode.cards import find_card

    card = find_card(name)
    for module in ("attention_plan", "launching", "indexer"):
        sys.modules[f"deepdecode.kernels.{module}"].card_of = lambda device: card
    torch.cuda.get_device_capability = lambda device=None: divmod(card.arch, 10)


def stand_around():
    from deepdecode.kernels import indexer, launching  # noqa: F401
    from deepdecode.ops import attention
    from deepdecode.ops import indexer as index_op

    attention._attend_op, index_op._index_topk_op = attention._attend_caches, index_op._index_topk
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.Tensor.is_cuda = property(lambda tensor: tensor.is_meta)
    torch.Tensor.data_ptr = lambda tensor: tensor.storage_offset() * tensor.element_size()
    JITFunction.run = lambda kernel, *args, **options: launched.append(kernel.fn.__name__)
    GridExecutor.__call__ = lambda grid, *args, **options: launched.append(grid.fn.__name__)


def decoded(name, made_class, ratio):
    """The launches of one of vLLM's decode calls."""
    layer, swa, mla, q, cache = made.decode_step(ratio, "FlashMLA" in name, torch.Generator().manual_seed(ratio))
    attend = object.__new__(made_class)
    torch.nn.Module.__init__(attend)
    for member, value in vars(layer).items():
        setattr(attend, member, without_values(value))
    attend.swa_cache_layer = made.named(kv_cache=without_values(layer.swa_cache_layer.kv_cache))
    if mla is not None:
        chosen = vars(mla).get("c128a_global_decode_topk_indices"), vars(mla).get("c128a_decode_topk_lens")
        mla = without_values(mla)
        mla.c128a_global_decode_topk_indices, mla.c128a_decode_topk_lens = map(without_values, chosen)
    # a graph of more tokens than are decoded
    output = torch.empty(made.TOKENS + 5, made.HEADS, 512, dtype=torch.bfloat16, device="meta")[: made.TOKENS]
    launched.clear()
    attend._forward_decode(
        q=without_values(q), kv_cache=without_values(cache), swa_metadata=without_values(swa), attn_metadata=mla,
        swa_only=ratio == 1, output=output,
    )  # fmt: skip
    return list(launched)


def chosen(per_sequence):
    """The launches of one of the indexer's calls."""
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.v1.attention.backends.mla.indexer import DeepSeekV32IndexerDecodeMetadata, DeepseekV32IndexerMetadata

    from deepdecode.plugins.vllm_model import indexer_class

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    sequences, T = 4, 4 * per_sequence
    layer = object.__new__(indexer_class(SparseAttnIndexer))
    torch.nn.Module.__init__(layer)
    layer.k_cache = made.named(prefix="k", kv_cache=empty(50, 64, 132, dtype=torch.uint8))
    layer.topk_tokens, layer.topk_indices_buffer = made.TOPK, empty(T + 9, made.TOPK)
    layer.skip_k_cache_insert, layer.use_fp4_cache, layer.candidate_blocks = True, False, None
    layer.dcp_world_size, layer.use_pcp = 1, False
    decode = DeepSeekV32IndexerDecodeMetadata(
        block_table=empty(sequences, 512), seq_lens=empty(sequences, per_sequence), decode_lens=empty(sequences),
        requires_padding=False, schedule_metadata=None,
    )  # fmt: skip
    step = DeepseekV32IndexerMetadata(
        seq_lens=empty(sequences), max_seq_len=131072, slot_mapping=empty(T, dtype=torch.int64), num_decodes=sequences,
        num_decode_tokens=T, num_prefills=0, num_prefill_tokens=0, decode=decode,
    )  # fmt: skip
    launched.clear()
    # padded to the graph's size
    q, weights = empty(T + 9, 64, 128, dtype=torch.float8_e4m3fn), empty(T + 9, 64, dtype=torch.float32)
    with override_forward_context(made.named(attn_metadata={"k": step})):
        layer.forward_cuda(empty(T + 9, 256), q, None, weights)
    return list(launched)


def main():
    import vllm.models.deepseek_v4.nvidia.model as nvidia

    from deepdecode.plugins import vllm_model

    made.tilelang_stand_ins(nvidia)
    vllm_model.theirs.DeepseekV4ForCausalLM = nvidia.DeepseekV4ForCausalLM
    with vllm_model._substituted():
        ours = {name: getattr(nvidia, name) for name in CARDS}
    stand_around()
    found = {"decoded": {}, "chosen": {}}
    for name, cards in CARDS.items():
        for card in cards:
            on(card)
            found["decoded"] |= {(card, ratio): decoded(name, ours[name], ratio) for ratio in (1, 4, 128)}
            found["chosen"] |= {(card, tokens): chosen(tokens) for tokens in (1, 2)}
    guards = vllm_model.ATTENTION, vllm_model.INDEXER
    found["said"] = sorted(line for guard in guards for line in (*guard._said, *filter(None, [guard.failed])))
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
