"""SGLang's calls in our ops' terms: one function around each of SGLang's. What we do not cover goes to SGLang's own.

A `ValueError` of ours says that this call is not covered; whatever else goes wrong switches the part off in this process.
Nothing is copied but what a function's docstring names, and nothing waits for the GPU.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from deepdecode.cards import Card
from deepdecode.config import ModelConfig
from deepdecode.kernels.attention_plan import card_of, case_of, supports
from deepdecode.ops import attention, indexer
from deepdecode.ops.moe import moe, moe_ref
from deepdecode.ops.quant import E4M3, E8M0, Weight
from deepdecode.ops.rows import PagedRows
from deepdecode.ops.table import MhcSite, MoeWeights
from deepdecode.plugins.guard import Guard

Tensor = torch.Tensor
ROW_BYTES, KEY_BYTES = 584, 132
# rows of a step that our indexer is made for; a prefill's go to SGLang's
MAX_INDEXED = 512
# tokens up to which FlashMLA lost to ours with its own 64 heads; with fewer heads it always did: results/h200/attention.json
MAX_OWN = 128
# width of a shared expert that adds nothing: SGLang runs its own elsewhere, and our kernels take none of width 0. In FP8 and as
# wide as an eighth of V4-Flash's, since Hopper's streaming kernels ask for that
_SHARED = 256
_MHC_POST_MULT = 2.0

# whether the running step is one that the megakernel covers
covered: ContextVar[bool] = ContextVar("covered", default=False)
# the rank's own heads in the step that runs, where more may be handed in; None outside a decode step
_heads: ContextVar[int | None] = ContextVar("heads", default=None)
# whether SGLang captures the step, or warms up for that
_captured: ContextVar[bool] = ContextVar("captured", default=False)
# whether what the logits function gives goes straight to a top-k that is ours too
_choosing: ContextVar[bool] = ContextVar("choosing", default=False)

GUARDS = {
    "attention": Guard("SGLang", "sparse attention"),
    "indexer": Guard("SGLang", "indexer"),
    "mhc": Guard("SGLang", "hyper-connections"),
    "moe": Guard("SGLang", "experts"),
    "pages": Guard("SGLang", "page split"),
}


# sparse attention


def attention_sm120(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `flash_mla_with_kvcache_sm120`: what SGLang decodes with on sm_120 and sm_121."""
    return GUARDS["attention"].run(lambda: attend(**_keywords(args, kwargs)), lambda: original(*args, **kwargs))


def _keywords(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if args:
        raise ValueError(f"{len(args)} arguments by position")
    return kwargs


def with_heads(
    original: Callable[..., Any], self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around the backend's attention: notes the rank's heads for `flash_mla`, in decode steps.

    In the others SGLang may copy what comes back into a tensor of all padded heads.
    """

    def noted() -> tuple[int | None, bool]:
        from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode  # type: ignore

        return layer.tp_q_head_num if batch.forward_mode.is_decode() else None, get_is_capture_mode()

    heads, captured = GUARDS["attention"].run(noted, lambda: (None, False))
    with decode_step(heads, captured=captured):
        return original(self, q, k, v, layer, batch, *args, **kwargs)


@contextmanager
def decode_step(heads: int | None, *, captured: bool) -> Iterator[None]:
    """The rank's own heads, and whether SGLang captures the step or warms up for that."""
    tokens = _heads.set(heads), _captured.set(captured)
    try:
        yield
    finally:
        _heads.reset(tokens[0])
        _captured.reset(tokens[1])


def flash_mla(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around FlashMLA: calls of graphs with up to 64 heads, on sm_90, and every call on GPUs that it has no kernel for.

    The rank's own heads are copied out of the padded query, and returned alone: the model asks for no others.
    """

    def ours() -> Any:
        call = _flash_mla_call(**_keywords(args, kwargs))
        q, own = call["q"], _heads.get()
        if q.is_cuda:
            expect_faster(card_of(q.device).arch, q.shape[0], q.shape[2], own, _captured.get())
        if own is not None and own < q.shape[2]:
            call["q"] = q[:, :, :own].contiguous()
            call["attn_sink"] = None if call["attn_sink"] is None else call["attn_sink"][:own]
        return attend(**call)

    return GUARDS["attention"].run(ours, lambda: original(*args, **kwargs))


def expect_faster(arch: int, tokens: int, heads: int, own: int | None, captured: bool) -> None:
    """Raise ValueError where FlashMLA has a kernel and our call is no gain beside it.

    Outside a graph the host's part of a call counts, and ours checks more and goes through torch's dispatcher.
    """
    if arch > 90:
        raise ValueError(f"FlashMLA's kernels on sm_{arch} have not been measured beside ours")
    if arch == 90 and (own is None or not captured):
        raise ValueError("not a decode step in a graph")
    if arch == 90 and own is not None and own >= heads and (heads > 64 or tokens > MAX_OWN):
        raise ValueError(f"FlashMLA takes {heads} heads as they are, of {tokens} tokens")


def _flash_mla_call(
    *,
    q: Tensor,
    k_cache: Tensor,
    head_dim_v: int,
    indices: Tensor | None = None,
    softmax_scale: float | None = None,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    is_fp8_kvcache: bool = False,
    tile_scheduler_metadata: Any = None,
    use_legacy: bool = True,
    **others: Any,
) -> dict[str, Any]:
    """The arguments that `attend` takes; FlashMLA's schedule is its own."""
    if indices is None or not is_fp8_kvcache or not use_legacy:
        raise ValueError("only sparse calls with FP8 rows of V4 are covered")
    set_too = [name for name, value in others.items() if value is not None and value is not False]
    if set_too:
        raise ValueError(f"{', '.join(set_too)} must not be given")
    return {
        "q": q,
        "k_cache": k_cache,
        "indices": indices,
        "head_dim_v": head_dim_v,
        "topk_length": topk_length,
        "attn_sink": attn_sink,
        "softmax_scale": softmax_scale,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
    }


def attend(
    *,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    head_dim_v: int,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    softmax_scale: float | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """SGLang's call in our op's terms; nothing is copied.

    Args:
        q: [T, 1, H, 512] bfloat16, H the rank's heads or padded to 64.
        k_cache, extra_k_cache: [pages, page size, 1, 584] bytes, of any page stride.
        indices, extra_indices_in_kvcache: [T, 1, K] int32 tokens, -1 for none. topk_length, extra_topk_length: [T] int32.

    Returns:
        out [T, 1, H, 512] and lse [T, H, 1], as SGLang's torch path gives them: natural, sink excluded, -inf without a key.

    Raises:
        ValueError: a call that our op or its kernels do not cover.
    """
    if q.dim() != 4 or q.shape[1] != 1 or q.shape[3] != head_dim_v:
        raise ValueError(f"q must be [T, 1, H, {head_dim_v}], got {list(q.shape)}")
    extra: tuple[Any, ...] = (None, None, None)
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        extra = _set("extra_k_cache", extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    call = (q.squeeze(1), *_set("k_cache", k_cache, indices, topk_length), *extra)
    if q.is_cuda:
        expect_kernel(call, attn_sink, card_of(q.device))
    out, lse = attention.sparse_attn_decode(*call, sink=attn_sink, scale=softmax_scale, return_lse=True)
    return out.unsqueeze(1), lse.unsqueeze(2)


def expect_kernel(call: tuple[Any, ...], sink: Tensor | None, card: Card) -> None:
    """Raise ValueError where our op would take its reference: SGLang's own kernel is faster than that."""
    q, window, window_indices, _, extra, extra_indices, _ = call
    _expect(supports(case_of(q, window, window_indices, extra, extra_indices, sink), card))


def _expect(reason: str | None) -> None:
    if reason:
        raise ValueError(f"no kernel of ours: {reason}")


def _set(name: str, cache: Tensor, indices: Tensor, lengths: Tensor | None) -> tuple[PagedRows, Tensor, Tensor]:
    rows = cache.dim() == 4 and cache.shape[2:] == (1, ROW_BYTES) and cache.itemsize == 1
    if not rows or not cache[:1].is_contiguous():
        raise ValueError(f"{name} must be pages of rows of {ROW_BYTES} bytes, got {list(cache.shape)} {cache.dtype}")
    if indices.dim() == 3 and indices.shape[1] == 1:
        indices = indices.squeeze(1)
    if indices.dim() != 2:
        raise ValueError(f"{name}'s indices must be [T, 1, K] or [T, K], got {list(indices.shape)}")
    T, K = indices.shape
    lengths = indices.new_full((T,), K) if lengths is None else lengths.reshape(-1)
    return PagedRows(cache.view(torch.uint8).flatten(1), cache.shape[1], "fp8_584"), indices, lengths


def whole_pages(original: Callable[..., Any], kv_u8: Tensor, src_pbs: int, touched_indices: Tensor | None = None) -> Tensor:
    """Around the copy of window pages into pages of 64: the pages as they are, for FlashInfer reads any size and stride."""
    if kv_u8.dim() == 4 and kv_u8.shape[1] == src_pbs and kv_u8.stride(0) % 16 == 0:
        return kv_u8
    GUARDS["pages"].say(f"pages of {list(kv_u8.shape)} with stride {kv_u8.stride(0)} are split as before")
    return original(kv_u8, src_pbs, touched_indices=touched_indices)


# the indexer: SGLang asks for scores and then for the best of them, our op does both and writes no scores


class Deferred:
    """Scores that have not been computed: what SGLang would call, and with what."""

    def __init__(self, original: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.original, self.args = original, args

    def scores(self) -> Tensor:
        with _alone():
            return self.original(*self.args)


@contextmanager
def _alone() -> Iterator[None]:
    """SGLang's own function may call itself: what it calls then is its own too."""
    token = _choosing.set(False)
    try:
        yield
    finally:
        _choosing.reset(token)


def with_indexer(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `forward_c4_indexer`: finds the function that will score, and lets it wait for the top-k."""
    guard = GUARDS["indexer"]

    def asked() -> bool:
        c4_indexer = kwargs["c4_indexer"] if "c4_indexer" in kwargs else args[2]
        backend = self.dsa_topk_backend
        if backend.is_torch() or backend.is_flashinfer():
            raise ValueError("another top-k was asked for by --dsa-topk-backend")
        if c4_indexer.use_fp4_indexer:
            raise ValueError("its keys are FP4")
        _expect_topk()
        _hook_logits(_logits_function())
        return True

    token = _choosing.set(guard.run(asked, lambda: False))
    try:
        return original(self, *args, **kwargs)
    finally:
        _choosing.reset(token)


def _expect_topk() -> None:
    """Scores may wait only where each function that takes them is ours."""
    from sglang.srt.layers.attention.dsv4 import indexer as source  # type: ignore

    for name in ("topk_transform_paged", "topk_transform_paged_v2"):
        if not hasattr(getattr(source, name), "__wrapped__"):
            raise ValueError(f"{name} could not be replaced")


def _logits_function() -> str:
    """What `forward_c4_indexer` will take, dotted."""
    from sglang.srt.environ import envs  # type: ignore
    from sglang.srt.runtime_context import get_platform  # type: ignore

    if envs.SGLANG_OPT_USE_TILELANG_INDEXER.get():
        return "sglang.kernels.ops.attention.dsa.tilelang_kernel.tilelang_fp8_paged_mqa_logits"
    if envs.SGLANG_OPT_USE_AITER_INDEXER.get():
        raise ValueError("aiter scores")
    if envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.get():
        name = "fp8_paged_mqa_logits_torch_sm120" if get_platform().is_sm120 else "fp8_paged_mqa_logits_torch"
        return f"sglang.srt.layers.attention.dsv4.indexer.{name}"
    return "deep_gemm.fp8_paged_mqa_logits"


_hooking = threading.Lock()
_hooked: set[str] = set()


def _hook_logits(target: str) -> None:
    """Here and not when plug-ins load: its module compiles kernels as it is imported, in the processes that need it."""
    if target in _hooked:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore

    with _hooking:
        if target not in _hooked:
            HookRegistry.register(target, logits, HookType.AROUND)
            HookRegistry.apply_hooks()
            _hooked.add(target)


def logits(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around a function of scores: it waits, where the top-k that follows is ours."""
    if _choosing.get() and len(args) >= 7 and not kwargs and isinstance(args[0], Tensor) and len(args[0]) <= MAX_INDEXED:
        return Deferred(original, args)
    with _alone():
        return original(*args, **kwargs)


def topk(original: Callable[..., Any], scores: Any, *args: Any, **kwargs: Any) -> None:
    """Around SGLang's top-k without a plan: what follows is lengths, page table, rows to write, page size and entries."""
    _topk(original, scores, args, kwargs)


def topk_planned(original: Callable[..., Any], scores: Any, *args: Any, **kwargs: Any) -> None:
    """Around SGLang's top-k with a plan, which stands before the entries."""
    _topk(original, scores, args, kwargs, plan=True)


def _topk(original: Callable[..., Any], scores: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plan: bool = False) -> None:
    if not isinstance(scores, Deferred):
        original(scores, *args, **kwargs)
        return
    entries = (*args[4 + plan :], *kwargs.values())

    def ours() -> None:
        if len(args) < 4 or any(entry is not None for entry in entries):
            raise ValueError("entries are asked for beside their rows")
        _choose(scores, *args[:4])

    GUARDS["indexer"].run(ours, lambda: original(scores.scores(), *args, **kwargs))


def _choose(scores: Deferred, seq_lens: Tensor, page_tables: Tensor, out: Tensor, page_size: int) -> None:
    """Write each token's best rows to out [T, K]: as SGLang's, but in the order of the entries; one copy.

    Raises:
        ValueError: a call that our op or its kernels do not cover.
    """
    from deepdecode.kernels import indexer_plan

    q, cache, weights, _, table, *_ = scores.args
    if q.dim() != 4 or q.shape[1] != 1 or cache.dim() != 4 or cache.shape[1:] != (page_size, 1, KEY_BYTES):
        raise ValueError(f"q and keys must be [T, 1, heads, 128] and pages of {page_size} rows of {KEY_BYTES} bytes")
    if (page_tables.data_ptr(), page_tables.shape, page_tables.stride()) != (table.data_ptr(), table.shape, table.stride()):
        raise ValueError("scores and choice must have one page table")
    T, K = out.shape
    keys = PagedRows(cache.view(torch.uint8).flatten(1), page_size, "fp8_132")
    call = (q.squeeze(1), weights, keys, table, _rows(T, q.device), seq_lens.reshape(-1), K)
    if q.is_cuda:
        _expect(indexer_plan.supports(indexer_plan.case_of(*call), card_of(q.device)))
    found, _ = indexer.index_topk(*call)
    out.copy_(found)


@cache
def _rows(T: int, device: torch.device) -> Tensor:
    """0 to T - 1. Kept for good: made while SGLang warms up, before it captures the step."""
    return torch.arange(T, dtype=torch.int32, device=device)


# hyper-connections


def mhc_boundary(
    original: Callable[..., Any],
    layer_input: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int,
    rms_eps: float,
    hc_eps: float,
    hc_post_mult: float,
    sinkhorn_iters: int,
    norm_weight: Tensor | None,
    norm_eps: float | None,
    **kwargs: Any,
) -> Any:
    """Around `apply_mhc_post_pre_boundary`: the last sublayer's output into the streams, the next one's input out of them.

    Gives streams [T, 4, C], x [T, C] with its RMSNorm, post [T, 4], comb [T, 4, 4], and that the norm is in x.
    """
    args = (layer_input, residual, post, comb, hc_fn, hc_scale, hc_base, hc_mult, rms_eps, hc_eps, hc_post_mult)

    def ours() -> Any:
        if norm_weight is None or norm_eps != rms_eps or hc_post_mult != _MHC_POST_MULT or hc_mult != 4:
            raise ValueError(f"norm {norm_eps} beside {rms_eps}, factor {hc_post_mult}, {hc_mult} streams")
        if layer_input.dim() != 2:
            raise ValueError(f"layer_input must be [T, C], got {list(layer_input.shape)}")
        return _boundary(
            layer_input, residual, post, comb, hc_fn, hc_scale, hc_base, norm_weight, rms_eps, hc_eps, sinkhorn_iters
        )

    def theirs() -> Any:
        return original(*args, sinkhorn_iters, norm_weight, norm_eps, **kwargs)

    # a rank that idles
    return GUARDS["mhc"].run(ours, theirs) if len(layer_input) else theirs()


def _boundary(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    from deepdecode.ops import fused

    T, streams_of, C = streams.shape
    if streams_of != 4 or y.shape != (T, C) or y.dtype != streams.dtype:
        raise ValueError(f"streams must be [T, 4, C], got {list(streams.shape)} beside {list(y.shape)}")
    if streams.is_cuda:
        from deepdecode.kernels.mhc import supports

        _expect(supports(T, C, str(streams.dtype).removeprefix("torch."), str(fn.dtype).removeprefix("torch.")))
        if not all(tensor.is_contiguous() for tensor in (y, streams, post, comb)):
            raise ValueError("every tensor must be contiguous")
    site = MhcSite(fn, base, scale)
    post = post.squeeze(-1) if post.dim() == 3 else post
    out, x, new_post, new_comb = fused.mhc_boundary(y, streams, post, comb, site, norm, _config(norm_eps, hc_eps, iters))
    return out, x, new_post, new_comb, True


@cache
def _config(norm_eps: float, hc_eps: float, iters: int) -> ModelConfig:
    return ModelConfig(norm_eps=norm_eps, hc_eps=hc_eps, hc_iters=iters)


# FP4 experts: which layers are ours is settled when their weights are loaded, because SGLang's kernels want another layout


def moe_load(original: Callable[..., Any], self: Any, layer: Any) -> None:
    """Around the preparation of a layer's expert weights: ours stay as the checkpoint has them, w1 above w3."""

    def ours() -> MoeWeights | None:
        weights = (layer.w13_weight, layer.w13_weight_scale_inv, layer.w2_weight, layer.w2_weight_scale_inv)
        _expect_experts(self, layer, *weights)
        return _experts_of(layer)

    def theirs() -> None:
        return None

    if GUARDS["moe"].run(ours, theirs) is None:
        return original(self, layer)
    # SGLang's first step, which may give the layer other tensors
    self._fp8.process_weights_after_loading(layer)
    if getattr(layer, "_mega_moe_weights_built", False):
        return None
    experts = GUARDS["moe"].run(ours, theirs)
    if experts is None:
        first, self._fp8 = self._fp8, SimpleNamespace(process_weights_after_loading=lambda layer: None)
        try:
            return original(self, layer)
        finally:
            self._fp8 = first
    assert experts.w13.scale is not None
    for tensor in (experts.w13.data, experts.w13.scale.view(torch.uint8)):
        half = tensor.shape[1] // 2
        # SGLang loads up above gate; one expert at a time, so that no second copy of the layer is made
        for expert in tensor:
            up = expert[:half].clone()
            expert[:half] = expert[half:]
            expert[half:] = up
    layer._dsv4_mxfp4_backend = "deepdecode"
    layer._deepdecode_experts = experts
    return None


def _expect_experts(method: Any, layer: Any, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> None:
    from deepdecode.kernels import moe_plan

    config = method.moe_runner_config
    if getattr(config, "moe_ep_size", 1) != 1:
        raise ValueError(f"expert parallelism over {config.moe_ep_size} ranks")
    if getattr(config, "gemm1_clamp_limit", None) is not None or getattr(config, "swiglu_limit", None) is None:
        raise ValueError("another activation than V4's clamped SwiGLU")
    if w13.dim() != 3 or w2.dim() != 3 or w13.itemsize != 1 or w2.itemsize != 1 or s13.dtype != E8M0 or s2.dtype != E8M0:
        raise ValueError(f"weights must be packed FP4 with E8M0 scales, got {w13.dtype}, {s13.dtype}, {w2.dtype}, {s2.dtype}")
    E, rows, half = w13.shape
    if w2.shape != (E, 2 * half, rows // 4) or not (w13.is_contiguous() and w2.is_contiguous()):
        raise ValueError(f"weights must be whole experts, got {list(w13.shape)} and {list(w2.shape)}")
    if w13.is_cuda:
        case = moe_plan.Case(1, 1, E, 2 * half, rows // 2, _SHARED)
        _expect(moe_plan.supports(case, card_of(w13.device)))


def _experts_of(layer: Any) -> MoeWeights:
    def weight(name: str) -> Weight:
        return Weight(getattr(layer, name).data.view(torch.uint8), getattr(layer, f"{name}_scale_inv").data)

    w13, w2 = weight("w13_weight"), weight("w2_weight")
    shared13, shared2 = _no_expert(w13.shape[-1], w13.device)
    # the router runs elsewhere: its weight plays no role
    return MoeWeights(shared13.data, None, None, w13, w2, shared13, shared2)


@cache
def _no_expert(C: int, device: torch.device) -> tuple[Weight, Weight]:
    """A shared expert of zeros, the same for all layers."""

    def zeros(rows: int, columns: int) -> Weight:
        scale = torch.full((-(-rows // 128), -(-columns // 128)), 127, dtype=torch.uint8, device=device)
        return Weight(torch.zeros(rows, columns, dtype=torch.uint8, device=device).view(E4M3), scale.view(E8M0))

    return zeros(2 * _SHARED, C), zeros(C, _SHARED)


def moe_apply(original: Callable[..., Any], self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Around a layer's experts: those whose weights were kept for our op."""
    experts = getattr(layer, "_deepdecode_experts", None)
    if experts is None:
        return original(self, layer, dispatch_output)
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput  # type: ignore

    x, topk_output = dispatch_output.hidden_states, dispatch_output.topk_output
    if hasattr(topk_output, "to_standard"):
        topk_output = topk_output.to_standard()
    ids, weights = topk_output.topk_ids, topk_output.topk_weights.float()
    limit = float(self.moe_runner_config.swiglu_limit)

    def reference() -> Tensor:
        return moe_ref(x.float(), ids, weights, experts, limit).to(x.dtype)

    return StandardCombineInput(hidden_states=GUARDS["moe"].run(lambda: moe(x, ids, weights, experts, limit), reference))
