"""What the SGLang plug-in replaces, what it expects of SGLang's source for it, and how it is switched. Imports light."""

from deepdecode.plugins.report import Part, Plugin
from deepdecode.plugins.sources import Calls, Code, Function, Statement, Value

TESTED = "0.5.23"
_SINCE = f"SGLang {TESTED}"
_SM120 = "kernels/ops/attention/flash_mla_sm120.py"
_BACKEND = "srt/layers/attention/deepseek_v4_backend.py"
_MODEL = "srt/models/deepseek_v4.py"
_LAYOUT = "kernels/ops/attention/dsv4/kv_layout.py"
_FLASH_MLA = "kernels/ops/attention/flash_mla_interface.py"
_INDEXER = "srt/layers/attention/dsv4/indexer.py"
_TOPK = "kernels/ops/attention/dsv4/topk.py"
_TILELANG = "kernels/ops/attention/dsa/tilelang_kernel.py"
_MHC = "srt/models/deepseek_common/amd/deepseek_v4_fused_mhc.py"
_MHC_CALLER = "srt/models/deepseek_v4_boundary.py"
_MOE = "srt/layers/quantization/mxfp4_flashinfer_cutlass_moe.py"
_RUNNER = "srt/layers/moe/moe_runner/flashinfer_cutlass.py"
_SPEC = "kernels/plugin_kernels/nvidia/spec.py"
_BINDING = "srt/kernel_plugins/nvidia/binding.py"
_CAPTURE = "srt/model_executor/runner_utils/capture_mode.py"
_REGISTRY = "srt/plugins/hook_registry.py"

_OWN = ("q", "k_cache", "indices", "topk_length", "attn_sink", "head_dim_v", "softmax_scale")
KEYWORDS = frozenset((*_OWN, "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
FLASH_MLA_KEYWORDS = KEYWORDS | {"block_table", "cache_seqlens", "tile_scheduler_metadata", "is_fp8_kvcache"}
_HOOKS = (
    Function(_REGISTRY, "HookRegistry.register", ("cls", "target", "hook", "hook_type", "*", "source")),
    Value(_REGISTRY, "HookType.AROUND", "'around'"),
)
# a page: the rows of all its tokens, then the scales of all its tokens
_PAGES = (
    Value(_SM120, "_NOPE_DIM", "448"),
    Value(_SM120, "_ROPE_DIM", "64"),
    Value(_SM120, "_TILE_SIZE", "64"),
    Value(_SM120, "_NOPE_ROPE_STRIDE", "576"),
    Value(_SM120, "_SCALE_STRIDE", "8"),
    Value(_LAYOUT, "KVLayout.V4", "'v4'"),
    Function(_LAYOUT, "KVLayout.row_addressing", ("self", "page_size")),
)
_DECODE = ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits")
_DECODE = (*_DECODE, "softmax_scale", "causal", "descale_q", "descale_k", "is_fp8_kvcache", "indices", "attn_sink")
_EXTRA = ("extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
_LOGITS = ("weight", "seq_lens", "page_table", "deep_gemm_metadata", "max_seq_len", "clean_logits")
_SCORES = ("scores", "seq_lens", "page_tables", "out_page_indices", "page_size")
_BOUNDARY = ("layer_input", "residual", "post", "comb", "hc_fn", "hc_scale", "hc_base", "hc_mult", "rms_eps", "hc_eps")
_BOUNDARY = (*_BOUNDARY, "hc_post_mult", "sinkhorn_iters", "norm_weight", "norm_eps", "*", "fn_transpose")
_C4 = ("self", "x", "q_lora", "c4_indexer", "forward_batch", "alt_streams", "enable_multi_stream", "q_lora_ready")
_FORWARD = ("self", "q", "k", "v", "layer", "forward_batch", "compress_ratio", "save_kv_cache", "attn_sink", "cos_sin_cache")

ATTENTION = Part(
    "attention",
    "attention",
    ("sglang.kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120",),
    (
        Function(_SM120, "flash_mla_with_kvcache_sm120", ("**kwargs",), KEYWORDS),
        Calls(_BACKEND, "flash_mla_with_kvcache_sm120", KEYWORDS),
        Function(_SM120, "_gather_and_dequant", ("k_cache", "indices", "page_size")),
        *_PAGES,
        *_HOOKS,
    ),
    switch="SGLANG_SM120_MMA_FLASHMLA",
    archs=(120, 121),
)
# FlashMLA has kernels for 64 and 128 heads, from sm_90 on: fewer are padded, and older GPUs have nothing
FLASH_MLA = Part(
    "flashmla",
    "attention",
    (
        "sglang.kernels.ops.attention.flash_mla_interface.flash_mla_with_kvcache",
        "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend._forward_attention",
    ),
    (
        Function(
            _FLASH_MLA,
            "flash_mla_with_kvcache",
            (*_DECODE, *_EXTRA, "kv_format", "*", "use_legacy"),
        ),
        Calls(_BACKEND, "flash_mla_with_kvcache", FLASH_MLA_KEYWORDS),
        Function(_BACKEND, "DeepseekV4AttnBackend._forward_attention", (*_FORWARD, "**_")),
        Function(_CAPTURE, "get_is_capture_mode", ()),
        # the model asks for its own heads alone of what comes back
        Statement(_MODEL, "MQALayer.forward", "tp_slice = slice(0, self.n_local_heads)"),
        Statement(_MODEL, "MQALayer.forward", "o = o[:, tp_slice, :]"),
        *_PAGES,
        *_HOOKS,
    ),
    default=True,
    archs=(80, 86, 89, 90),
)
INDEXER = Part(
    "indexer",
    "indexer",
    (
        "sglang.srt.layers.attention.dsv4.indexer.C4IndexerBackendMixin.forward_c4_indexer",
        "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged",
        "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged_v2",
    ),
    (
        # between the scores and the choice nothing may read the scores
        Code(
            _INDEXER,
            "C4IndexerBackendMixin.forward_c4_indexer",
            (*_C4, "skip_compressor", "q_lora_quant"),
            digest="dcaaa723b4e80d04",
            since=_SINCE,
        ),
        Function(_INDEXER, "fp8_paged_mqa_logits_torch", ("q_fp8", "kvcache_fp8", *_LOGITS)),
        Function(_INDEXER, "fp8_paged_mqa_logits_torch_sm120", ("q_fp8", "kvcache_fp8", *_LOGITS)),
        Function(_TILELANG, "tilelang_fp8_paged_mqa_logits", ("q_fp8", "kvcache_fp8", *_LOGITS)),
        Function(_TOPK, "topk_transform_paged", (*_SCORES, "out_raw_indices")),
        Function(_TOPK, "topk_transform_paged_v2", (*_SCORES, "metadata", "out_raw_indices")),
        *_HOOKS,
    ),
)
MHC = Part(
    "mhc",
    "mhc",
    ("sglang.srt.models.deepseek_common.amd.deepseek_v4_fused_mhc.apply_mhc_post_pre_boundary",),
    (
        Function(_MHC, "apply_mhc_post_pre_boundary", _BOUNDARY),
        Statement(_MHC_CALLER, "HcReadCall.update_and_read", "streams, x, post, comb, norm_fused = fused"),
        *_HOOKS,
    ),
)
MOE = Part(
    "moe",
    "moe",
    (
        "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe."
        "Mxfp4FlashinferCutlassMoEMethod.process_weights_after_loading",
        "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe.Mxfp4FlashinferCutlassMoEMethod.apply",
    ),
    (
        Function(_MOE, "Mxfp4FlashinferCutlassMoEMethod.process_weights_after_loading", ("self", "layer")),
        Statement(
            _MOE,
            "Mxfp4FlashinferCutlassMoEMethod.process_weights_after_loading",
            "self._fp8.process_weights_after_loading(layer)",
        ),
        Function(_MOE, "Mxfp4FlashinferCutlassMoEMethod.apply", ("self", "layer", "dispatch_output")),
        # w13 holds up above gate, and the routing weights the model's factor
        Statement(_MOE, "Mxfp4FlashinferCutlassMoEMethod.load_up_proj_weight_first", "return True"),
        Value(_MOE, "Mxfp4FlashinferCutlassMoEMethod.fuse_routed_scaling_factor_in_topk", "True"),
        Statement(_RUNNER, "_fused_experts_flashinfer_mxfp4_cutlass", "return StandardCombineInput(hidden_states=out)"),
        *_HOOKS,
    ),
    archs=(90, 120, 121),
)
# The copy of window pages of 256 into pages of 64, in every layer: FlashInfer 0.7.2's sources take any page size and stride,
# which nobody has run on a card.
PAGES = Part(
    "pages",
    "",
    ("sglang.kernels.ops.attention.flash_mla_sm120._split_kv_pages_to_64",),
    (
        Function(_SM120, "_split_kv_pages_to_64", ("kv_u8", "src_pbs", "touched_indices")),
        Calls(_SM120, "_split_kv_pages_to_64", frozenset({"touched_indices"}), positions=2),
        *_PAGES,
        *_HOOKS,
    ),
    archs=(120, 121),
)
MEGAKERNEL = Part(
    "megakernel",
    "",
    ("sglang.srt.models.deepseek_v4.DeepseekV4ForCausalLM.forward, by --enable-nvidia-megakernel",),
    (
        Value(_SPEC, "MEGAKERNEL_API_VERSION", "1"),
        Value(_SPEC, "ENTRY_POINT", "'nvidia_megakernel'"),
        Function(_SPEC, "register", ("*", "architecture", "path")),
        Statement(_BINDING, "_Dispatch.wrapped", "step = self.built.plan(input_ids, forward_batch, *args, **kwargs)"),
    ),
    archs=(120, 121),
)
PLUGIN = Plugin("sglang", TESTED, (ATTENTION, FLASH_MLA, INDEXER, MHC, MOE, PAGES, MEGAKERNEL), variable="DEEPDECODE_SGLANG")
