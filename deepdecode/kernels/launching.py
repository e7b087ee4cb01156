"""Sparse attention's door to the kernels: is one there, which launch, and what serving should compile before it starts."""

import logging
from functools import cache
from typing import Any

import torch

from deepdecode.kernels import attention, rope
from deepdecode.kernels.attention_merge import MERGED, Turn
from deepdecode.kernels.attention_plan import Case, card_of, case_of, plan, supports, workspace_layout
from deepdecode.ops.rows import PagedRows, allocate

Tensor = torch.Tensor
log = logging.getLogger("deepdecode")


@cache
def gluon_ready() -> bool:
    """Whether this Triton has the Gluon of the Hopper kernels (3.6 on); without it Hopper runs what every arch runs."""
    try:
        from deepdecode.kernels import attention_sm90  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def attend(
    q: Tensor,
    window: PagedRows,
    window_indices: Tensor,
    window_lens: Tensor,
    extra: PagedRows | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    *,
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    deterministic: bool,
    positions: Tensor | None = None,
    freqs: Tensor | None = None,
) -> str | None:
    """Fill out and lse and give None; or give the reason why no kernel can, having done nothing.

    positions, freqs: out is turned back by them: where keys are split by the merge, else by a launch of its own.
    """
    case = case_of(q, window, window_indices, extra, extra_indices, sink, deterministic, gluon_ready(), out)
    card = card_of(q.device)
    reason = supports(case, card)
    turn = None if positions is None or freqs is None else Turn(positions, freqs)
    if reason is None and turn is not None:
        reason = rope.supports(*q.shape[::2], 2 * len(turn.freqs), case.dtype)
        if turn.freqs.dtype != torch.float32:
            reason = f"freqs must be float32, got {turn.freqs.dtype}"
    if reason:
        return reason
    config = plan(case, card)
    need, _ = workspace_layout(case.T, case.H, config.splits)
    if workspace is not None and need and (workspace.numel() < need or workspace.data_ptr() % 16):
        got = f"{workspace.numel()} at address {workspace.data_ptr():#x}"
        raise ValueError(f"sparse_attn: workspace must be at least {need} bytes from a multiple of 16, got {got}")
    # Triton launches on the current device
    with torch.cuda.device(q.device):
        attention.launch(
            q, window, window_indices, window_lens, extra, extra_indices, extra_lens,
            sink=sink, scale=scale, out=out, lse=lse, workspace=workspace, config=config,
            turn=turn if config.splits > 1 else None,
        )  # fmt: skip
        if turn is not None and config.splits == 1:
            rope.launch(out, turn.positions, turn.freqs, inverse=True, arch=card.arch, out=out)
    return None


def warmup(
    H: int,
    keys: tuple[int, int],
    tokens: range | list[int],
    *,
    device: torch.device,
    fmt: str = "fp8_584",
    pages: tuple[int, int] = (64, 64),
    sink: bool = True,
    lse: bool = False,
    deterministic: bool = False,
) -> int:
    """Compile every kernel that calls of these sizes take, and give how many launches that took.

    keys: widths of the two index tensors, the second 0 for none. tokens: the T that serving will ask for.
    From then on each compile of these kernels is logged as a warning.
    """
    card = card_of(device)
    caches = [allocate(1, page, fmt, device=device) for page in pages]
    done: set[tuple[Any, ...]] = set()
    for T in tokens:
        case = Case(
            T, H, *keys, fmt, fmt if keys[1] else None, pages[0], pages[1] if keys[1] else pages[0],
            deterministic=deterministic, gluon=gluon_ready(),
        )  # fmt: skip
        if supports(case, card):
            continue
        config = plan(case, card)
        # what a compiled kernel depends on: sizes are not compiled in, the merge's step of splits is
        key = (
            config.kernel,
            config.block_h,
            config.block_n,
            config.splits > 1,
            config.merge_warps,
            min(MERGED, config.splits),
        )
        if key in done:
            continue
        done.add(key)
        q = torch.zeros(1, H, 512, dtype=torch.bfloat16, device=device)
        indices = [torch.full((1, width), -1, dtype=torch.int32, device=device) for width in keys]
        none = torch.zeros(1, dtype=torch.int32, device=device)
        extra = (caches[1], indices[1], none) if keys[1] else (None, None, None)
        with torch.cuda.device(device):
            attention.launch(
                q, caches[0], indices[0], none, *extra,
                sink=torch.zeros(H, device=device) if sink else None, scale=1.0, out=torch.empty_like(q),
                lse=torch.empty(1, H, device=device) if lse else None, workspace=None, config=config,
            )  # fmt: skip
    _watch()
    return len(done)


@cache
def _watch() -> None:
    """Log each later compile of a kernel of ours; another hook that is set already still runs."""
    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        function = kwargs.get("fn")
        if str(getattr(function, "module", "")).startswith("deepdecode."):
            log.warning("compiled %s after warmup: a call came that warmup was not told of", function.name)
        return before(*args, **kwargs) if before is not None else None

    knobs.runtime.jit_post_compile_hook = hook
