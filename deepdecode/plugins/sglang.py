"""SGLang with our sparse attention: an entry point of `sglang.srt.plugins`, so that an installed package is all it takes.

SGLang decodes DeepSeek-V4 on sm_120 and sm_121 through one function, `flash_mla_with_kvcache_sm120`. The plug-in stands around
it and hands SGLang's pages to `sparse_attn_decode` as they lie. What we do not cover goes to SGLang's own function.
SGLANG_SM120_MMA_FLASHMLA=1 switches it on, DEEPDECODE_ENABLE=0 off, whatever else is set.

SGLang loads plug-ins in every process that it starts, most of which never see a GPU: nothing heavy is imported here.
"""

import logging
import os
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from deepdecode.plugins.sources import Calls, Function, Value, folder, problems, version

if TYPE_CHECKING:
    from torch import Tensor

    from deepdecode.cards import Card
    from deepdecode.ops.rows import PagedRows

log = logging.getLogger("deepdecode")

TESTED = "0.5.23"
TARGET = "sglang.kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120"
_SOURCE = "kernels/ops/attention/flash_mla_sm120.py"
_HOOKS = "srt/plugins/hook_registry.py"
_LAYOUT = "kernels/ops/attention/dsv4/kv_layout.py"
_OWN = ("q", "k_cache", "indices", "topk_length", "attn_sink", "head_dim_v", "softmax_scale")
KEYWORDS = frozenset((*_OWN, "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
SIGNATURES = (
    Function(_SOURCE, "flash_mla_with_kvcache_sm120", ("**kwargs",), KEYWORDS),
    Calls("srt/layers/attention/deepseek_v4_backend.py", "flash_mla_with_kvcache_sm120", KEYWORDS),
    # a page: the rows of all its tokens, then the scales of all its tokens
    Function(_SOURCE, "_gather_and_dequant", ("k_cache", "indices", "page_size")),
    Value(_SOURCE, "_NOPE_DIM", "448"),
    Value(_SOURCE, "_ROPE_DIM", "64"),
    Value(_SOURCE, "_TILE_SIZE", "64"),
    Value(_SOURCE, "_NOPE_ROPE_STRIDE", "576"),
    Value(_SOURCE, "_SCALE_STRIDE", "8"),
    Value(_LAYOUT, "KVLayout.V4", "'v4'"),
    Function(_LAYOUT, "KVLayout.row_addressing", ("self", "page_size")),
    Function(_HOOKS, "HookRegistry.register", ("cls", "target", "hook", "hook_type", "*", "source")),
    Value(_HOOKS, "HookType.AROUND", "'around'"),
)
ROW_BYTES = 584

# why our kernel stays off in this process although it was switched on: it failed once
_failed: str | None = None
_said: set[str] = set()


@cache
def register() -> None:
    """What SGLang calls in each of its processes; a second call does nothing, and none raises."""
    try:
        off = why_off()
        if off is None:
            from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore

            HookRegistry.register(TARGET, flash_mla, HookType.AROUND)
    except Exception as error:
        off = f"{type(error).__name__}: {error}"
    tested = "" if version("sglang") == TESTED else f" (tested with {TESTED})"
    state = "on, wherever SGLang takes its path for sm_120 and sm_121" if off is None else f"off: {off}"
    # a warning, because SGLang loads its plug-ins before it sets its logging up
    log.warning("deepdecode in SGLang %s%s: sparse attention is %s", version("sglang"), tested, state)


def why_off() -> str | None:
    """Why sparse attention stays SGLang's own, None where ours is to take over."""
    if os.environ.get("DEEPDECODE_ENABLE") == "0":
        return "DEEPDECODE_ENABLE=0"
    if os.environ.get("SGLANG_SM120_MMA_FLASHMLA") != "1":
        return "SGLANG_SM120_MMA_FLASHMLA=1 switches it on"
    package = folder("sglang")
    if package is None:
        return "SGLang is not installed"
    moved = problems(package, SIGNATURES)
    return f"this SGLang's source is not what was tested: {'; '.join(moved)}" if moved else None


def flash_mla(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's function: ours where we cover the call, else the original, and a line that says why."""
    global _failed
    if _failed is None:
        try:
            return _attend(*args, **kwargs)
        except ValueError as uncovered:
            _say(f"a call is left to SGLang's own sparse attention: {uncovered}")
        except Exception as error:
            line = f"{type(error).__name__}: {error}"
            # memory that is short now need not be short later; a kernel that does not compile is not tried at every layer
            if type(error).__name__ != "OutOfMemoryError":
                _failed = line
            _say(f"sparse attention failed, SGLang's own runs instead: {line}")
    return original(*args, **kwargs)


def _say(line: str) -> None:
    """Once for lines that differ in their numbers only."""
    kind = re.sub(r"\d+", "0", line)
    if kind not in _said:
        _said.add(kind)
        log.warning("deepdecode in SGLang: %s", line)


def _attend(
    *,
    q: "Tensor",
    k_cache: "Tensor",
    indices: "Tensor",
    head_dim_v: int,
    topk_length: "Tensor | None" = None,
    attn_sink: "Tensor | None" = None,
    softmax_scale: float | None = None,
    extra_k_cache: "Tensor | None" = None,
    extra_indices_in_kvcache: "Tensor | None" = None,
    extra_topk_length: "Tensor | None" = None,
) -> "tuple[Tensor, Tensor]":
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
    from deepdecode.kernels.attention_plan import card_of
    from deepdecode.ops import attention

    if q.dim() != 4 or q.shape[1] != 1 or q.shape[3] != head_dim_v:
        raise ValueError(f"q must be [T, 1, H, {head_dim_v}], got {list(q.shape)}")
    extra: tuple[Any, ...] = (None, None, None)
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        extra = _set("extra_k_cache", extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    call = (q.squeeze(1), *_set("k_cache", k_cache, indices, topk_length), *extra)
    if q.is_cuda:
        _expect_kernel(call, attn_sink, card_of(q.device))
    out, lse = attention.sparse_attn_decode(*call, sink=attn_sink, scale=softmax_scale, return_lse=True)
    return out.unsqueeze(1), lse.unsqueeze(2)


def _expect_kernel(call: tuple[Any, ...], sink: "Tensor | None", card: "Card") -> None:
    """Raise ValueError where our op would take its reference: SGLang's own kernel is faster than that."""
    from deepdecode.kernels.attention_plan import case_of, supports

    q, window, window_indices, _, extra, extra_indices, _ = call
    reason = supports(case_of(q, window, window_indices, extra, extra_indices, sink), card)
    if reason:
        raise ValueError(f"no kernel of ours: {reason}")


def _set(name: str, cache: "Tensor", indices: "Tensor", lengths: "Tensor | None") -> "tuple[PagedRows, Tensor, Tensor]":
    import torch

    from deepdecode.ops.rows import PagedRows

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
