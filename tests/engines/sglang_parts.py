"""Run SGLang's own callers of what our other parts replace, on the CPU, and save what they give.

    python sglang_parts.py OUT [--hostile] [--megakernel] [--break-signatures]

FlashMLA's call, the indexer, the boundary of hyper-connections and the FP4 experts. What SGLang would run there is CUDA: where
a part is off, SGLang's own torch versions of the same functions stand in for it; for the experts, which have none, nothing.
"""

import argparse
import functools
import logging
import types

import sglang_decode as decode
import stand_ins
import torch

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
# tokens, index heads, entries, chosen; three sequences have fewer entries than are chosen, or none
INDEX_T, INDEX_HEADS, ENTRIES, TOPK = 5, 64, 1000, 512
HIDDEN, EPS, ITERS = 256, 1e-6, 20
EXPERTS, WIDTH, TOP_K, LIMIT = 8, 128, 3, 2.0


def own_flash_mla(**kwargs):
    """SGLang's torch version of what FlashMLA gives."""
    import sglang.kernels.ops.attention.flash_mla_sm120 as source

    return source._sm120_sparse_decode_fwd(
        kwargs["q"], kwargs["k_cache"], kwargs["indices"], kwargs["topk_length"], kwargs["attn_sink"], kwargs["head_dim_v"],
        kwargs["softmax_scale"], kwargs["extra_k_cache"], kwargs["extra_indices_in_kvcache"], kwargs["extra_topk_length"],
    )  # fmt: skip


def flash_mla(ratio, heads, mode="DECODE"):
    """The backend's forward where it calls FlashMLA, with the rank's 8 heads in a padded query whose padding is not zero."""
    from sglang.kernels.ops.attention import flash_mla_interface
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    generator = torch.Generator().manual_seed(ratio + heads)
    made = decode.backend(ratio, 4, 256, generator)
    made._flash_mla_with_kvcache = functools.partial(flash_mla_interface.flash_mla_with_kvcache, use_legacy=True)
    made._use_sparse_prefill = lambda *args, **kwargs: False
    core = made.forward_metadata.core_attn_metadata
    schedule = flash_mla_interface.FlashMLASchedMeta()
    core.c0_flashmla_metadata = core.c4_flashmla_metadata = core.c128_flashmla_metadata = schedule
    q, sink = decode.inputs(heads, 4, generator)
    q[:, decode.HEADS :] = 7.0
    layer = types.SimpleNamespace(layer_id=0, v_head_dim=512, tp_q_head_num=decode.HEADS)
    batch = types.SimpleNamespace(forward_mode=ForwardMode[mode], batch_size=4)
    return made.forward(q, q, q, layer, batch, compress_ratio=ratio, save_kv_cache=False, attn_sink=sink)


class TopK:
    """What --dsa-topk-backend would give."""

    def __init__(self, planned, torch_asked=False):
        self.planned, self.torch_asked = planned, torch_asked

    def is_torch(self):
        return self.torch_asked

    def is_flashinfer(self):
        return False

    def should_use_topk_v2(self):
        return self.planned


def index_inputs():
    """Small whole numbers in the query and the keys, so that SGLang's bfloat16 products are exact."""
    generator = torch.Generator().manual_seed(3)

    def whole(*shape):
        return torch.randint(-1, 2, shape, generator=generator).float()

    pages = INDEX_T * (ENTRIES // 64 + 1)
    q, keys = whole(INDEX_T, INDEX_HEADS, 128).to(E4M3), whole(pages, 64 * 128).to(E4M3).view(torch.uint8)
    scales = 2.0 ** torch.randint(-2, 3, (pages, 64), generator=generator).float()
    weights = torch.randn(INDEX_T, INDEX_HEADS, 1, generator=generator)
    table = torch.randperm(pages, generator=generator).int().view(INDEX_T, -1)
    lens = torch.tensor([ENTRIES, 700, TOPK, 100, 0], dtype=torch.int32)
    return q, torch.cat([keys, scales.view(torch.uint8)], dim=1), weights, table, lens


def indexer(planned=False, torch_asked=False, entries=False):
    """SGLang's `forward_c4_indexer` from the query on: rows that it writes for the sparse attention."""
    from sglang.srt.layers.attention.dsv4 import indexer as source
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata

    q, cache, weights, table, lens = index_inputs()

    class Backend(source.C4IndexerBackendMixin):
        debug_use_external_c4_sparse_indices, hisparse_coordinator = False, None

        def _forward_prepare_normal(self, **kwargs):
            return q, weights

        def _get_nonpaged_indexer_plan(self, **kwargs):
            return None

    made = Backend()
    made.dsa_topk_backend = TopK(planned, torch_asked)
    metadata = object.__new__(PagedIndexerMetadata)
    metadata.page_size, metadata.compressed_page_size, metadata.page_table = 256, 64, table
    metadata.compressed_seq_lens, metadata.deep_gemm_metadata, metadata.topk_metadata = lens, None, torch.zeros(1)
    rows = torch.full((INDEX_T, TOPK), -7, dtype=torch.int32)
    raw = torch.full_like(rows, -7) if entries else None
    core = types.SimpleNamespace(positions=torch.arange(INDEX_T), c4_sparse_page_indices=rows, c4_sparse_raw_indices=raw)
    made.forward_metadata = types.SimpleNamespace(indexer_metadata=metadata, core_metadata=core)
    made.token_to_kv_pool = types.SimpleNamespace(get_index_k_with_scale_buffer=lambda layer_id: cache)
    mode = types.SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True)
    x = torch.zeros(INDEX_T, 1)
    made.forward_c4_indexer(
        x, x, types.SimpleNamespace(use_fp4_indexer=False, layer_id=0), types.SimpleNamespace(forward_mode=mode)
    )
    return (rows, raw) if entries else rows


def own_boundary(
    x, residual, post, comb, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, mult, iters, *, norm_weight, norm_eps
):
    """SGLang's torch versions of the boundary's steps, in its kernel's order."""
    from sglang.kernels.ops.layernorm import mhc

    streams = mhc._mhc_post_torch(x, residual, post, comb)
    post, comb, y = mhc._mhc_pre_torch(streams, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, mult, iters)
    y = torch.nn.functional.rms_norm(y.float(), y.shape[-1:], norm_weight.float(), norm_eps).to(y.dtype)
    return streams, post, comb, y


def boundary(norm_eps=EPS):
    """What SGLang's layer does between two sublayers: streams, the next input, and its gates."""
    from sglang.srt.models import deepseek_v4_boundary as source

    generator = torch.Generator().manual_seed(9)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    layer = types.SimpleNamespace(
        boundary_pre_from_prev=False, boundary_mhc_fusions=True, use_fused_mhc_post_pre=True, hc_mult=4, rms_norm_eps=EPS,
        hc_eps=EPS, hc_sinkhorn_iters=ITERS, hc_attn_fn=random(24, 4 * HIDDEN) / 16, hc_attn_scale=random(3),
        hc_attn_base=random(24), _input_layernorm_weight_bf16=None,
    )  # fmt: skip
    read = object.__new__(source.HcReadCall)
    read.layer, read.attention, read.batch, read.call = layer, True, None, None
    post, comb = random(3, 4).sigmoid() * 2, random(3, 4, 4).softmax(-1)
    state = source.ReadState(random(3, 4, HIDDEN).bfloat16(), post, comb)
    update = object.__new__(source.HcUpdate)
    norm = types.SimpleNamespace(weight=types.SimpleNamespace(data=random(HIDDEN).bfloat16()), variance_epsilon=norm_eps)
    x, state = read.update_and_read(update, random(3, HIDDEN).bfloat16(), state, norm)
    return state.streams, x, state.post, state.comb


def expert_inputs():
    generator = torch.Generator().manual_seed(11)

    def weight(rows, columns):
        codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, (EXPERTS, rows, columns // 32), generator=generator, dtype=torch.uint8)
        return codes.view(torch.int8), scales.view(E8M0)

    x = torch.randn(4, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(4)]).int()
    # a lane without an expert, as a padding row has
    ids[-1, -1] = -1
    return x, ids, torch.rand(4, TOP_K, generator=generator), *weight(2 * WIDTH, HIDDEN), *weight(HIDDEN, WIDTH)


def experts(**config):
    """SGLang's own method class for FP4 experts: its preparation of the loaded weights, then one step."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe import Mxfp4FlashinferCutlassMoEMethod

    x, ids, weights, w13, s13, w2, s2 = expert_inputs()
    method = object.__new__(Mxfp4FlashinferCutlassMoEMethod)
    prepared = []
    method._fp8 = types.SimpleNamespace(process_weights_after_loading=prepared.append)
    method.moe_runner_config = types.SimpleNamespace(
        **({"moe_ep_size": 1, "gemm1_clamp_limit": None, "swiglu_limit": LIMIT} | config)
    )
    layer = torch.nn.Module()
    for name, tensor in {"w13_weight": w13, "w2_weight": w2, "w13_weight_scale_inv": s13, "w2_weight_scale_inv": s2}.items():
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    method.process_weights_after_loading(layer)
    assert len(prepared) == 1
    step = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, torch.zeros(4, EXPERTS)))
    return method.apply(layer, step).hidden_states


def megakernel():
    """SGLang's start-up checks of our spec, and what a covered step and another one call."""
    import sglang.srt.kernel_plugins.nvidia.binding as binding
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    off = (
        "enable_dp_attention enable_eplb enable_prefill_cp enable_two_batch_overlap enable_single_batch_overlap enable_lora "
        "lora_paths enable_return_routed_experts enable_return_indexer_topk enable_hierarchical_cache enable_lmcache "
        "disaggregation_decode_enable_offload_kvcache enable_flexkv enable_hisparse enable_memory_saver cpu_offload_gb "
        "enable_weights_cpu_backup offload_group_size enable_torch_compile enable_deterministic_inference rl_on_policy_target "
        "speculative_algorithm"
    )
    graphs = types.SimpleNamespace(decode=types.SimpleNamespace(backend="full"))
    plain = dict.fromkeys(off.split()) | {
        "tp_size": 2, "pp_size": 1, "nnodes": 1, "attn_dp_size": 1, "ep_size": 1, "attn_cp_size": 1, "dcp_size": 1,
        "disaggregation_mode": "null", "cuda_graph_config": graphs, "watchdog_timeout": 300,
    }  # fmt: skip
    flash = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "head_dim": 512, "sliding_window": 128}

    def reasons(isa="sm_120", model=None, **changes):
        config = types.SimpleNamespace(**(plain | changes))
        model = types.SimpleNamespace(**(flash | (model or {})))
        return binding.megakernel_disable_reasons(cfg=config, hf_config=model, isa=isa)

    spec, accepted = reasons()
    other = types.SimpleNamespace(decode=types.SimpleNamespace(backend="tc_piecewise"))
    refused = {
        "sm_100": reasons("sm_100"),
        "tp 3": reasons(tp_size=3),
        "lora": reasons(enable_lora=True),
        "speculation": reasons(speculative_algorithm="EAGLE"),
        "graphs": reasons(cuda_graph_config=other),
        "model": reasons(model={"head_dim": 256}),
        "another": reasons(model={"architectures": ["LlamaForCausalLM"]}),
    }
    found = {
        "plugin": binding.plugin_reasons(),
        "accepted": accepted,
        "spec": (spec.name, sorted(spec.requires.isas), spec.max_rows, spec.numerics.kind.value),
        "refused": {name: why for name, (_, why) in refused.items()},
    }
    context = types.SimpleNamespace(widths=(1, 2, 4, 64))
    built = spec.build(None, types.SimpleNamespace(**flash), context)
    batch = types.SimpleNamespace(forward_mode=ForwardMode.DECODE)
    prefill = types.SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    found["planned"] = [
        None if step is None else (step.mode, step.rows)
        for step in (built.plan(torch.zeros(4), batch), built.plan(torch.zeros(3), batch), built.plan(torch.zeros(4), prefill))
    ]
    step = built.plan(torch.zeros(4), batch)
    found["outside"] = decode.forward(4, 4, 8, 256), decode_calls()
    found["inside"] = built.forward(step, decode.forward, 4, 4, 8, 256), decode_calls()
    found["after"] = decode.forward(4, 4, 8, 256), decode_calls()
    return found


_calls = []


def decode_calls():
    """How often our attention has been called since this was asked last."""
    count = len(_calls)
    _calls.clear()
    return count


def counted(module, name, corrupt=None, broken=False):
    """Count an op's calls; corrupt: change what it gives; broken: it fails."""
    op = getattr(module, name)

    @functools.wraps(op)
    def call(*args, **kwargs):
        _calls.append(name)
        if broken:
            raise RuntimeError("no such kernel")
        given = op(*args, **kwargs)
        return corrupt(given) if corrupt else given

    setattr(module, name, call)
    return lambda: setattr(module, name, op)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument(
        "--hostile", action="store_true", help="also corrupt our ops, break them, and call what they leave alone"
    )
    parser.add_argument("--megakernel", action="store_true")
    parser.add_argument("--break-signatures", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("deepdecode").addHandler(handler)
    stand_ins.install()
    import flash_mla as stand_in

    stand_in.flash_mla_with_kvcache = own_flash_mla
    if asked.break_signatures:
        decode.break_signatures()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    found = {"said": list(lines)}
    from sglang.kernels.ops.attention.dsv4 import topk
    from sglang.srt.layers.attention.dsv4 import indexer as index_source
    from sglang.srt.models import deepseek_v4 as model
    from sglang.srt.runtime_context import override_platform

    def own_topk(scores, lens, table, out, size, *rest):
        # the plan, if there is one, and the entries, if they are asked for
        entries = next((tensor for tensor in rest if tensor is not None and tensor.shape == out.shape), None)
        index_source.topk_transform_pytorch_vectorized(scores, lens, table, out, size, entries)

    own = types.SimpleNamespace(topk_transform=own_topk, topk_transform_paged=own_topk)
    topk._jit_topk_v1_module = topk._jit_topk_v2_module = lambda: own
    model.get_mhc_ops = lambda: types.SimpleNamespace(mhc_fused_post_pre=own_boundary)

    from deepdecode.ops import attention, fused
    from deepdecode.ops import indexer as index_op
    from deepdecode.plugins import sglang_ops

    ops = {
        "flashmla": (attention, "sparse_attn_decode", lambda: {r: flash_mla(r, 64) for r in (0, 4, 128)}),
        "indexer": (index_op, "index_topk", lambda: {"plain": indexer(), "planned": indexer(planned=True)}),
        "mhc": (fused, "mhc_boundary", boundary),
        "moe": (sglang_ops, "moe", experts),
    }
    changes = {
        "flashmla": lambda given: (1.5 * given[0], given[1]),
        "indexer": lambda given: (given[0].flip(1), given[1]),
        "mhc": lambda given: (1.5 * given[0], *given[1:]),
        "moe": lambda given: 1.5 * given,
    }
    if asked.megakernel:
        counted(attention, "sparse_attn_decode")
        with override_platform(is_sm120=True, is_sm100=False, is_cuda=True):
            found["megakernel"] = megakernel()
        torch.save(found, asked.out)
        return
    ours = "moe" in found["said"][0].split("off:")[0] if found["said"] else False
    for name, (module, op, run) in ops.items():
        if name == "moe" and not ours:
            continue
        with override_platform(is_sm120=name != "flashmla", is_sm100=False, is_cuda=True):
            back = counted(module, op)
            found[name], found[f"{name} calls"] = run(), decode_calls()
            back()
            if asked.hostile:
                back = counted(module, op, corrupt=changes[name])
                found[f"{name} corrupted"] = run()
                back()
                decode_calls()
    if asked.hostile:
        from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

        with override_platform(is_sm120=False, is_sm100=False, is_cuda=True):
            found["verify"] = flash_mla(4, 64, "TARGET_VERIFY")
            notes = []
            back = counted(
                attention, "sparse_attn_decode", corrupt=lambda given: notes.append(sglang_ops._captured.get()) or given
            )
            flash_mla(0, 64)
            with model_capture_mode():
                flash_mla(0, 64)
            back()
            found["captured"] = notes
            decode_calls()
        with override_platform(is_sm120=True, is_sm100=False, is_cuda=True):
            back = counted(index_op, "index_topk")
            found["entries"], found["torch asked"] = indexer(entries=True), indexer(torch_asked=True)
            found["left calls"] = decode_calls()
            # a top-k that somebody put in the place of ours since
            ours_there, index_source.topk_transform_paged = index_source.topk_transform_paged, own_topk
            found["replaced top-k"], found["replaced calls"] = indexer(), decode_calls()
            index_source.topk_transform_paged = ours_there
            back()
            back = counted(fused, "mhc_boundary")
            found["other norm"], found["other norm calls"] = boundary(norm_eps=1e-5), decode_calls()
            back()
        lines.clear()
        for name in ("flashmla", "indexer", "mhc"):
            module, op, run = ops[name]
            with override_platform(is_sm120=name != "flashmla", is_sm100=False, is_cuda=True):
                back = counted(module, op, broken=True)
                found[f"{name} broken"] = run(), run()
                found[f"{name} broken calls"] = decode_calls()
                back()
        found["broken said"] = list(lines)
    elif not ours:
        with override_platform(is_sm120=True, is_sm100=False, is_cuda=True):
            found["entries"], found["other norm"] = indexer(entries=True), boundary(norm_eps=1e-5)
        with override_platform(is_sm120=False, is_sm100=False, is_cuda=True):
            found["verify"] = flash_mla(4, 64, "TARGET_VERIFY")
    torch.save(found, asked.out)


if __name__ == "__main__":
    main()
