"""SGLang with our ops: an entry point of `sglang.srt.plugins`, so that an installed package is all it takes.

`sglang_source.PLUGIN` says what can be replaced, and `deepdecode env --engine sglang` what is. DEEPDECODE_SGLANG names the
parts that are on, in place of their defaults: attention, flashmla, indexer, mhc, moe, pages, megakernel.
SGLANG_SM120_MMA_FLASHMLA=1 switches attention on beside them, and DEEPDECODE_ENABLE=0 all of them off.

SGLang loads plug-ins in every process that it starts, most of which never see a GPU: nothing heavy is imported here.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from deepdecode.plugins.report import Part, engine_version, said, why_off
from deepdecode.plugins.sglang_source import PLUGIN, TESTED

log = logging.getLogger("deepdecode")

_OPS = "deepdecode.plugins.sglang_ops"
# the function of sglang_ops that stands around each of the part's functions, in their order
HOOKS = {
    "attention": ("attention_sm120",),
    "flashmla": ("flash_mla", "with_heads"),
    "indexer": ("with_indexer", "topk", "topk_planned"),
    "mhc": ("mhc_boundary",),
    "moe": ("moe_load", "moe_apply"),
    "pages": ("whole_pages",),
    "megakernel": (),
}
# what a covered step of the megakernel runs as ours
COVERED = ("attention", "indexer", "mhc")


@cache
def register() -> None:
    """What SGLang calls in each of its processes; a second call does nothing, and none raises."""
    try:
        why = {part.name: why_off(PLUGIN, part) for part in PLUGIN.parts}
        for part in PLUGIN.parts:
            in_steps = not why["megakernel"] and part.name in COVERED
            if not why[part.name]:
                _hook(part, always=True)
            elif in_steps and not _broken(part):
                _hook(part, always=False)
        line = said(PLUGIN, why)
    except Exception as error:
        line = f"off: {type(error).__name__}: {error}"
    tested = "" if engine_version(PLUGIN) == TESTED else f" (tested with {TESTED})"
    # a warning, because SGLang loads its plug-ins before it sets its logging up
    log.warning("deepdecode in SGLang %s%s: %s", engine_version(PLUGIN), tested, line)


def _broken(part: Part) -> str:
    from deepdecode.plugins.sources import folder, problems

    package = folder(PLUGIN.engine)
    return "; ".join(problems(package, part.table)) if package else "it is not installed"


def _hook(part: Part, *, always: bool) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore

    for target, name in zip(part.replaces, HOOKS[part.name], strict=bool(HOOKS[part.name])):
        HookRegistry.register(target, _around(name, always=always), HookType.AROUND)


def _around(name: str, *, always: bool) -> Callable[..., Any]:
    """The hook as SGLang calls it; what it does is imported at the first call, in the process that makes it."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ops = import_module(_OPS)
        if not always and not ops.covered.get():
            return original(*args, **kwargs)
        return getattr(ops, name)(original, *args, **kwargs)

    around.__name__ = name
    return around
