import re
import time

import pytest
from made_traces import DATA, ROOT

from deepdecode.trace import TraceError, load, load_rules, profile, why
from deepdecode.trace.categories import BUILTIN, builtin, precision
from deepdecode.trace.model import CATEGORIES

# what each name is, from its engine's source; the traps are names that carry another category's word
NAMES = {
    # DeepSeek-V4, as engines and this package name it
    "sparse_attn_split_kernel": "attention",
    "sparse_attn_merge_kernel": "attention",
    "flash_fwd_splitkv_mla_fp8_sparse_kernel<cutlass::bfloat16_t>": "attention",
    "void sm90::decode::sparse_fp8::flash_mla_kernel": "attention",
    "_tiled_sparse_decode_kernel": "attention",
    "indexer_score_kernel": "indexer",
    "void deep_gemm::sm90_fp8_paged_mqa_logits<128u, 4u>": "indexer",
    "sm100_fp8_mqa_logits": "indexer",
    "topk_transform_decode_kernel": "topk",
    "void (anonymous namespace)::fast_topk_transform_fused": "topk",
    "indexer_topk_kernel": "topk",
    "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>": "topk",
    "mhc_pre_kernel": "mhc",
    "mhc_post_kernel": "mhc",
    "mhc_pre_big_fuse_tilelang_kernel": "mhc",
    "void deep_gemm::sm90_tf32_hc_prenorm_gemm_impl": "mhc",
    "hc_split_sinkhorn_kernel_": "mhc",
    "compressor_kernel": "compressor",
    "fused_compress_quant_cache_kernel": "compressor",
    "compress_norm_rope_store": "compressor",
    "per_token_cast_fp8_kernel": "quant",
    "fp8_gemm_block_kernel": "gemm_tc",
    # experts, before GEMM and top-k
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu": "moe",
    "bmm_Bfloat16_Bfloat16Bfloat16_Fp32_t128x8x128u2_swiGlu_dynB_sm100f": "moe",
    "void tensorrt_llm::kernels::cutlass_kernels::fused_moe::run": "moe",
    "void marlin_moe_wna16::Marlin<128, 1, 8>": "moe",
    "fused_moe_kernel": "moe",
    "void sgl::topkGatingSoftmax<float, 8>": "moe",
    "aiter::topksoftmax_4x128x8_bf16": "moe",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<m_grouped_masked>": "moe",
    "triton_poi_fused_constant_pad_nd_moe_forward_0": "moe",
    # GEMM, tensor cores or not
    "nvjet_sm103_tst_32x64_64x16_4x1_v_bz_splitK_TNN": "gemm_tc",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN": "gemm_tc",
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x64x32": "gemm_tc",
    "cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_64x6_tn_align8": "gemm_tc",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "gemm_tc",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV": "gemm_tc",
    "void marlin::Marlin<128, 1, 8>": "gemm_tc",
    "cutlass_80_simt_sgemm_128x32_8x5_nn_align1": "gemm_simt",
    "ampere_sgemm_32x32_sliced1x4_tn": "gemm_simt",
    "void gemv2T_kernel_val<int, int, float>": "gemm_simt",
    "void gemmSN_TN_kernel<float, 128>": "gemm_simt",
    # norm before cutlass and glue, whole words in Triton's lists
    "kernel_cutlass_kernel_flashinfernormkernelsfused_add_rmsnormFusedAddRMSNormKernel": "norm",
    "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64E": "norm",
    "triton_red_fused_add_rms_norm_3": "norm",
    "triton_red_fused_norm_2": "norm",
    "triton_poi_fused_normal_0": "glue",
    # collectives before reduce and norm
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "collective",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport": "collective",
    "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>": "collective",
    "multimem_all_reduce_kernel": "collective",
    # AMD
    "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernel": "attention",
    "paged_attention_ll4mi_QKV_mfma16_kernel": "attention",
    "__amd_rocclr_copyBuffer": "memory",
    "void ck::kernel_moe_gemm<ck::GridwiseMoeGemm>": "moe",
    # the rest
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>": "sampling",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>": "glue",
    "void vllm::reshape_and_cache_flash_kernel": "quant",
    "Memcpy DtoD (Device -> Device)": "memory",
    "par_ranged2d_kernel<PdV_kernel>": "unknown",
    "": "unknown",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_many_engines(name):
    assert why(name).category == NAMES[name]


def test_every_kernel_of_this_package_is_placed_by_its_file():
    """One op, one word: the file says the category. Names that a category's rules do not know show up here."""
    belongs = {"attention": {"attention"}, "indexer": {"indexer", "topk"}, "mhc": {"mhc"}, "compressor": {"compressor"}}
    belongs |= {"moe": {"moe", "quant"}, "linear": {"gemm_tc", "gemm_simt", "quant"}, "norm": {"norm"}, "gate": {"moe"}}
    misplaced = {}
    for path in sorted([*(ROOT / "deepdecode" / "kernels").glob("*.py"), *(ROOT / "deepdecode" / "fallback").glob("*.py")]):
        # helpers are inlined; only kernels are launched
        for name in re.findall(r"@(?:triton|gluon)\.jit[^@]*?\ndef (\w+_kernel)\(", path.read_text()):
            if why(name).category not in belongs.get(path.stem.removesuffix("_sm90"), set(CATEGORIES) - {"unknown"}):
                misplaced[f"{path.stem}.{name}"] = why(name).category
    assert misplaced == {}


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1", "fp4"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl", "fp8"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n", "tf32"),
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64", "bf16"),
        ("reshape_and_cache<__hip_bfloat16, (vllm::Fp8KVCacheDataType)0>", "bf16"),
        ("ampere_sgemm_32x32_sliced1x4_tn", "fp32"),
        ("volta_h884gemm_128x64_ldg8_nn", "fp16"),
        ("alloc_kernel", None),
    ],
)
def test_precision_by_name(name, want):
    assert precision(name) == want


def test_why_names_the_line():
    rule = why("void flash::flash_fwd_kernel<x>")
    assert (rule.source, rule.category) == ("builtin", "attention")
    assert "flash_fwd" in BUILTIN.read_text().splitlines()[rule.line - 1]
    assert str(why("nothing we know")) == "builtin no rule matches"


def test_all_categories_but_unknown_have_rules():
    assert {line.split(":")[0] for line in BUILTIN.read_text().splitlines() if line[:1].isalpha()} == set(CATEGORIES) - {
        "unknown"
    }


# ---- the language


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("flash", ["FlashX", "my_flash"], ["flush"]),
        ("a*b", ["ab", "xaxxbx"], ["ba", "a"]),
        ("^a", ["abc"], ["xa"]),
        ("c$", ["abc"], ["cab"]),
        ("^abc$", ["abc"], ["abcabc", "xabc"]),
        ("^a*c$", ["ac", "abc", "acc"], ["a", "xac", "acx"]),
        ("^ab*ba$", ["abba"], ["aba"]),
        ("[topk]", ["topk", "fused_topk_0", "x<topk>"], ["topks", "mytopk", "topk2"]),
        ("[rms_norm]", ["fused_rms_norm_0"], ["rms_norms"]),
        ("a !b", ["xa"], ["ab", "b"]),
        ("a b | c", ["ba", "c"], ["a", "b"]),
    ],
)
def test_the_pattern_language(tmp_path, pattern, yes, no):
    (tmp_path / "r").write_text(f"# comment\n\nmoe: {pattern}\n")
    rules = load_rules(tmp_path / "r")
    for name in yes:
        assert rules.classify(name).source == "r", name
    for name in no:
        assert rules.classify(name).source == "builtin", name


def test_user_rules_come_first_and_take_display_names(tmp_path):
    (tmp_path / "mine.txt").write_text("GEMM tensor-core: par_ranged2d\nsampling: flash_fwd\n")
    rules = load_rules(tmp_path / "mine.txt")
    assert len(rules) == len(builtin()) + 2
    assert why("par_ranged2d_kernel", rules).category == "gemm_tc"
    assert str(why("flash_fwd_kernel", rules)) == "mine.txt:2 flash_fwd"
    assert why("nvjet_tst", rules).source == "builtin"
    result = profile(load(DATA / "decode_mma.json.gz"), rules=rules)
    assert result.rules == "mine.txt, then builtin"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attention flash", "line 1 must be `category: pattern`, got 'attention flash'"),
        ("\nattnetion: flash", "line 2 must name one of attention, indexer"),
        ("moe: |", "must have a term without ! in every alternative"),
        ("moe: *", r"must have text in every term, got '\*'"),
        ("moe: !a", "must have a term without !"),
        ("moe: " + "a" * 5000, "must be at most 4000 characters, got 5005"),
        ("moe: a\n" * 6000, "must hold at most 5000 rules, got more"),
        ("moe: a\n" * 200_000, "must be at most 1 MB, got more"),
    ],
)
def test_a_wrong_rule_gets_one_sentence(tmp_path, text, message):
    (tmp_path / "r").write_text(text)
    with pytest.raises(TraceError, match=message):
        load_rules(tmp_path / "r")


def test_rules_that_are_no_text_or_no_file(tmp_path):
    with pytest.raises(TraceError, match="must be a readable file, got No such file"):
        load_rules(tmp_path / "no")
    (tmp_path / "r").write_bytes(b"\xff\xfe\0")
    with pytest.raises(TraceError, match="must be UTF-8 text"):
        load_rules(tmp_path / "r")


def test_a_pattern_made_to_be_slow_is_not(tmp_path):
    # the shapes that take a backtracking matcher years: (a*)*b, and many stars over a name of one letter
    (tmp_path / "r").write_text(
        "moe: " + "a*" * 1500 + "b\nmoe: (a+)+$ | [" + "a" * 400 + "b]\n" + "moe: a*a*a*a*a*a*a*z\n" * 500
    )
    rules = load_rules(tmp_path / "r")
    begin = time.perf_counter()
    assert rules.classify("a" * 100_000).category == "unknown"
    assert time.perf_counter() - begin < 2
