"""`deepdecode env --engine`: what our plug-ins would do in the engines that are installed, and on which GPU with which model.

Made to be pasted into an issue: names of functions, versions and sizes, and nothing of who or where. No engine is imported.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepdecode.cards import Card
from deepdecode.config import ModelConfig
from deepdecode.kernels import attention_plan, indexer_plan, moe_plan
from deepdecode.plugins.report import ENGINES, plugin_of, report

# tokens of context that the indexer's coverage is told for
CONTEXT = 131072


def engine_names(asked: str | None) -> tuple[str, ...]:
    """The engines that `--engine` asks for: "all", one of them, or none.

    Raises:
        ValueError: there is no plug-in for it.
    """
    if asked is not None and asked not in ("all", *ENGINES):
        raise ValueError(f"env: --engine must be one of {', '.join(ENGINES)}, got {asked}")
    return tuple(ENGINES) if asked == "all" else (asked,) if asked else ()


def names_parts(value: str) -> bool:
    """Whether these are words of plug-ins' parts and nothing else, as DEEPDECODE_SGLANG and its like have them."""
    known = {part.name for name in ENGINES for part in plugin_of(name).parts}
    return {word.strip() for word in value.split(",")} <= known | {""}


def read_engines(
    names: Sequence[str], cards: list[Card], model: ModelConfig, tp: int, gluon: bool = True
) -> list[dict[str, Any]]:
    """One object for each engine: its plug-in's report, and for each part and each card who runs it.

    Args:
        names: of `ENGINES`. cards: of this machine. tp: ranks that share a layer's heads and experts.
        gluon: whether Triton has the Gluon that the Hopper kernels are written in.

    Returns:
        what `plugins.report.report` gives; each part with `cards`: of each card its name, arch, `covers` (whether our kernel
        takes a decode step, if the part is on), `why` (why not, else "") and `ours` (whether it does, as things are switched).
    """
    told = []
    for name in names:
        found = report(plugin_of(name))
        for part in found["parts"]:
            part["cards"] = [{"name": card.name, "arch": card.arch, **_runs(part, card, model, tp, gluon)} for card in cards]
        told.append(found)
    return told


def _runs(part: dict[str, Any], card: Card, model: ModelConfig, tp: int, gluon: bool) -> dict[str, Any]:
    why = uncovered(part["op"], card, model, tp, gluon) if part["op"] else None
    if part["archs"] and card.arch not in part["archs"]:
        why = f"it is for {', '.join(f'sm_{arch}' for arch in part['archs'])}"
    return {"covers": not why, "why": why or "", "ours": part["on"] and not why}


def uncovered(op: str, card: Card, model: ModelConfig, tp: int, gluon: bool = True) -> str | None:
    """Why no kernel of ours covers a decode step of one token of this model on the card, None if one does."""
    if op == "attention":
        heads = max(1, model.num_heads // tp)
        case = attention_plan.Case(1, heads, model.window, model.index_topk, D=model.head_dim, gluon=gluon)
        return attention_plan.supports(case, card)
    if op == "indexer":
        entries = CONTEXT // 4
        case = indexer_plan.Case(1, model.index_heads, entries, model.index_topk, width=model.index_head_dim, gluon=gluon)
        return indexer_plan.supports(case, card)
    if op == "moe":
        width = model.expert_width // tp
        weight = {"fp8": "fp8", "fp4": "fp4"}.get(model.expert_dtype, "bfloat16")
        shared = "bfloat16" if weight == "bfloat16" else "fp8"
        case = moe_plan.Case(
            1, model.experts_per_token, model.num_experts, model.hidden_size, width, width * model.num_shared_experts
        )
        return moe_plan.supports(replace(case, weight=weight, shared=shared), card)
    if card.arch < 80:
        return f"sm_{card.arch}; the kernels are compiled from sm_80 on"
    if op == "mhc" and model.hc_mult != 4:
        return f"{model.hc_mult} streams, not 4"
    if op == "mhc" and (model.hidden_size % 32 or model.hidden_size > 8192):
        return f"C must be a multiple of 32 up to 8192, got {model.hidden_size}"
    return None


def model_sizes(model: ModelConfig, tp: int) -> dict[str, int]:
    """What coverage depends on, of a model and the ranks that share it."""
    names = ("hidden_size", "num_heads", "head_dim", "index_heads", "index_topk", "num_experts", "expert_width")
    return {**{name: getattr(model, name) for name in names}, "tp": tp}


def engines_text(told: list[dict[str, Any]], sizes: dict[str, int]) -> str:
    lines = ["engines, for a model of " + ", ".join(f"{name} {value}" for name, value in sizes.items())]
    for engine in told:
        lines += ["", _head(engine)]
        for part in engine["parts"] if engine["installed"] else ():
            cards = f", for {', '.join(f'sm_{arch}' for arch in part['archs'])}" if part["archs"] else ""
            lines.append(f"  {part['name']}{cards}: {'on' if part['on'] else 'off: ' + part['why']}")
            lines += [f"    replaces {name}" for name in part["replaces"]]
            lines += [f"    signature: {problem}" for problem in part["signatures"]] or ["    signatures hold"]
            for n, card in enumerate(part["cards"]):
                who = "ours" if card["covers"] else f"{engine['engine']}'s own: {card['why']}"
                lines.append(f"    GPU {n}, sm_{card['arch']}: {'' if part['on'] else 'would be '}{who}")
    return "\n".join(lines)


def _head(engine: dict[str, Any]) -> str:
    if not engine["installed"]:
        return f"{engine['engine']}: not installed"
    tested = "" if engine["version"] == engine["tested"] else f", tested with {engine['tested']}"
    call = f"; a program calls {engine['call']}" if engine["call"] else ""
    parts = f"; {engine['variable']} names the parts that are on" if engine["variable"] else ""
    return f"{engine['engine']} {engine['version']}{tested}{call}{parts}"
