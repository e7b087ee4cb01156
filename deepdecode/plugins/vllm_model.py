"""vLLM's DeepSeek-V4 with our ops inside: what the plug-in registers, and what vLLM imports to build a model.

Each class is vLLM's own, whose parts are subclasses of vLLM's parts while it is built: of the attention, one method; of the
indexer, one method; of the hyper-connections, the functions that the layers call. Where a part of the plug-in is off, or this
platform has none, the class is vLLM's.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import torch
from vllm.forward_context import get_forward_context  # type: ignore
from vllm.models import deepseek_v4 as theirs  # type: ignore

from deepdecode.plugins import vllm as plugin
from deepdecode.plugins import vllm_calls as calls
from deepdecode.plugins.guard import Guard

Tensor = torch.Tensor
Class = Any
# one of each in a process: what fails once is not tried at every layer
ATTENTION, INDEXER, MHC = (Guard("vLLM", what) for what in ("sparse attention", "indexer", "mHC"))


def _ours(base: Class) -> Class:
    @wraps(base, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    class Model(base):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            with _substituted():
                super().__init__(vllm_config=vllm_config, prefix=prefix)

    return Model


@contextmanager
def _substituted() -> Iterator[None]:
    """vLLM's module names our classes meanwhile."""
    module: Any = sys.modules[theirs.DeepseekV4ForCausalLM.__module__]
    kept = {}
    try:
        ours = _parts(module)
        kept = {name: getattr(module, name) for name in ours}
        vars(module).update(ours)
    except Exception as error:
        # the engine starts as it would without us
        ATTENTION.say(f"its own model is built: {type(error).__name__}: {error}")
    try:
        yield
    finally:
        vars(module).update(kept)


def _parts(module: Any) -> dict[str, Class]:
    """What stands in for names of vLLM's module while a model is built; what is called by name later is put there to stay."""
    ours = {}
    if module.__name__.endswith(".nvidia.model"):
        for part, name in (
            (plugin.ATTENTION_SM120, "DeepseekV4FlashInferSM120Attention"),
            (plugin.ATTENTION_FLASHMLA, "DeepseekV4FlashMLAAttention"),
        ):
            if plugin.is_on(part):
                ours[name] = decode_class(getattr(module, name))
        if plugin.is_on(plugin.MHC):
            _replace_mhc(module)
    elif module.__name__.endswith(".cpu.model"):
        if plugin.is_on(plugin.ATTENTION_CPU):
            ours["DeepseekV4CPUAttention"] = cpu_class(module.DeepseekV4CPUAttention)
        if plugin.is_on(plugin.MHC_CPU):
            ours |= {"MHCPreOp": pre_class(module.MHCPreOp), "MHCPostOp": post_class(module.MHCPostOp)}
    else:
        return {}
    if plugin.is_on(plugin.INDEXER):
        _register_indexer()
    return ours


@lru_cache
def decode_class(base: Class) -> Class:
    """vLLM's attention on NVIDIA GPUs, whose decode tokens are ours."""
    from vllm.models.deepseek_v4.common.ops import compute_global_topk_indices_and_lens  # type: ignore

    def selected(layer: Any, swa: Any, metadata: Any) -> calls.Set:
        """Physical rows of the entries that the indexer chose, or of all that ratio 128 has."""
        if layer.compress_ratio != 4:
            return metadata.c128a_global_decode_topk_indices, metadata.c128a_decode_topk_lens
        T = swa.num_decode_tokens
        return compute_global_topk_indices_and_lens(
            layer.topk_indices_buffer[:T],
            swa.token_to_req_indices,
            metadata.block_table[: swa.num_decodes],
            metadata.block_size // 4,
            swa.is_valid_token[:T],
        )

    class Ours(base):
        def _forward_decode(
            self, q: Tensor, kv_cache: Tensor | None, swa_metadata: Any, attn_metadata: Any, swa_only: bool, output: Tensor
        ) -> None:
            def ours() -> None:
                chosen = None if swa_only else selected(self, swa_metadata, attn_metadata)
                window = swa_metadata.decode_swa_indices, swa_metadata.decode_swa_lens
                calls.attend(self, q, window, None if swa_only else kv_cache, chosen, output)

            def own() -> None:
                super(Ours, self)._forward_decode(
                    q=q, kv_cache=kv_cache, swa_metadata=swa_metadata, attn_metadata=attn_metadata, swa_only=swa_only,
                    output=output,
                )  # fmt: skip

            ATTENTION.run(ours, own)

    return Ours


@lru_cache
def cpu_class(base: Class) -> Class:
    """vLLM's attention on CPUs, ours for steps that only decode."""
    from vllm.models.deepseek_v4.cpu.cpu_utils import map_local_to_global_slots_cpu  # type: ignore

    def selected(layer: Any, swa: Any, metadata: Any, positions: Tensor) -> calls.Set:
        T, ratio = len(positions), layer.compress_ratio
        if ratio == 4:
            local = layer.topk_indices_buffer[:T]
            # -1 behind the chosen
            lens = torch.full((T,), local.shape[1], dtype=torch.int32)
        else:
            local = torch.arange(-(-layer.max_model_len // ratio)).expand(T, -1)
            lens = ((positions + 1) // ratio).clamp(max=local.shape[1]).int()
            local = torch.where(local < lens[:, None], local, -1)
        page = metadata.block_size // ratio
        rows = map_local_to_global_slots_cpu(local, swa.token_to_req_indices[:T], metadata.block_table, page)
        return rows.int(), lens

    class Ours(base):
        def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
            metadata = get_forward_context().attn_metadata
            # none in a dry run
            swa: Any = metadata[self.swa_cache_layer.prefix] if isinstance(metadata, dict) else None

            def ours() -> None:
                window_only = self.compress_ratio <= 1
                chosen = None if window_only else selected(self, swa, metadata[self.prefix], positions)
                window = swa.decode_swa_indices, swa.decode_swa_lens
                calls.attend(self, q, window, None if window_only else self.kv_cache, chosen, output)

            def own() -> None:
                super(Ours, self).forward_mqa(q, kv, positions, output)

            if swa is None or swa.num_prefills or swa.num_decode_tokens != len(q):
                own()
            else:
                ATTENTION.run(ours, own)

    return Ours


def _register_indexer() -> None:
    """vLLM builds the class that stands under the indexer's name here."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot  # type: ignore
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer  # type: ignore

    if "SparseAttnIndexer" not in op_registry_oot:
        CustomOp.register_oot(name="SparseAttnIndexer")(indexer_class(SparseAttnIndexer))


@lru_cache
def indexer_class(base: Class) -> Class:
    """vLLM's indexer, whose decode tokens are ours."""

    def run(layer: Any, own: Callable[[], Tensor], q: Any, weights: Tensor) -> Tensor:
        metadata = get_forward_context().attn_metadata
        name = layer.k_cache.prefix
        step = metadata[name] if isinstance(metadata, dict) else None
        if step is None or not step.num_decode_tokens:
            return own()

        def ours() -> Tensor:
            if layer.use_fp4_cache:
                raise ValueError("FP4 keys")
            chosen = calls.choose(layer, q, weights, step)
            if step.num_prefills:
                # vLLM's own clears the rows and works on those of the prompts
                metadata[name] = replace(step, num_decodes=0)
                try:
                    own()
                finally:
                    metadata[name] = step
            layer.topk_indices_buffer[: len(chosen), : layer.topk_tokens].copy_(chosen)
            return layer.topk_indices_buffer

        return INDEXER.run(ours, own)

    class Ours(base):
        def forward_cuda(self, hidden_states: Tensor, q_quant: Any, k: Tensor | None, weights: Tensor) -> Tensor:
            return run(self, lambda: super(Ours, self).forward_cuda(hidden_states, q_quant, k, weights), q_quant, weights)

        def forward_cpu(self, hidden_states: Tensor, q_quant: Any, k: Tensor | None, weights: Tensor) -> Tensor:
            return run(self, lambda: super(Ours, self).forward_cpu(hidden_states, q_quant, k, weights), q_quant, weights)

    return Ours


def _replace_mhc(module: Any) -> None:
    """The layers look these up at each call: what they pass by position and what by keyword is in the plug-in's table."""
    post_pre, pre = module.mhc_fused_post_pre_tilelang, module.mhc_pre_tilelang
    if getattr(post_pre, "__module__", None) == __name__:
        return

    def norm(options: dict[str, Any]) -> tuple[Tensor, float] | None:
        return None if options.get("norm_weight") is None else (options["norm_weight"], options["norm_eps"])

    def mhc_post_pre(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, *site: Any, **options: Any) -> tuple[Tensor, ...]:
        return MHC.run(
            lambda: calls.boundary(x, residual, (post, comb), site[:3], site[3:6], site[6], site[7], norm(options)),
            lambda: post_pre(x, residual, post, comb, *site, **options),
        )

    def mhc_pre(residual: Tensor, *site: Any, **options: Any) -> tuple[Tensor, ...]:
        return MHC.run(
            lambda: calls.boundary(None, residual, None, site[:3], site[3:6], site[6], site[7], norm(options))[1:],
            lambda: pre(residual, *site, **options),
        )

    module.mhc_fused_post_pre_tilelang, module.mhc_pre_tilelang = mhc_post_pre, mhc_pre


@lru_cache
def pre_class(base: Class) -> Class:
    class Ours(base):
        def forward_cpu(
            self, residual: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, rms_eps: float, hc_pre_eps: float,
            hc_sinkhorn_eps: float, hc_post_mult_value: float, sinkhorn_repeat: int, n_splits: int = 1,
            norm_weight: Tensor | None = None, norm_eps: float = 0.0,
        ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
            site, eps = (fn, hc_scale, hc_base), (rms_eps, hc_pre_eps, hc_sinkhorn_eps)
            norm = None if norm_weight is None else (norm_weight, norm_eps)

            def own() -> tuple[Tensor, Tensor, Tensor]:
                rest = (*eps, hc_post_mult_value, sinkhorn_repeat, n_splits, norm_weight, norm_eps)
                return super(Ours, self).forward_cpu(residual, *site, *rest)

            def ours() -> tuple[Tensor, Tensor, Tensor]:
                return calls.boundary(None, residual, None, site, eps, hc_post_mult_value, sinkhorn_repeat, norm)[1:]

            return own() if torch.compiler.is_compiling() else MHC.run(ours, own)

    return Ours


@lru_cache
def post_class(base: Class) -> Class:
    class Ours(base):
        def forward_cpu(self, x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
            def own() -> Tensor:
                return super(Ours, self).forward_cpu(x, residual, post_layer_mix, comb_res_mix)

            def ours() -> Tensor:
                return calls.mhc.mhc_post(x, residual, post_layer_mix.squeeze(-1), comb_res_mix)

            return own() if torch.compiler.is_compiling() else MHC.run(ours, own)

    return Ours


DeepseekV4ForCausalLM, DeepSeekV4MTP, DSparkDeepseekV4ForCausalLM = map(
    _ours, (theirs.DeepseekV4ForCausalLM, theirs.DeepSeekV4MTP, theirs.DSparkDeepseekV4ForCausalLM)
)
