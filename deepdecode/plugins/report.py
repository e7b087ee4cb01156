"""What a plug-in would do with the engine that is installed here, told without importing the engine or torch.

A plug-in is a `Plugin` of `Part`s, which its module keeps as `PLUGIN`. The plug-in asks `why_off` before it replaces anything,
`deepdecode env --engine` prints `report`, and `make engines-drift` holds the parts' tables against newer releases.
"""

import os
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from deepdecode.plugins import gpus
from deepdecode.plugins.sources import Entry, folder, problems, version

# the module of each engine's plug-in that holds its `PLUGIN`; it imports neither the engine nor torch
ENGINES = {
    "sglang": "deepdecode.plugins.sglang_source",
    "transformers": "deepdecode.plugins.transformers_source",
    "vllm": "deepdecode.plugins.vllm",
}


@dataclass(frozen=True)
class Part:
    """One function, or few that belong together, that an op of ours stands in for.

    name: the word that switches it, and what log lines call it. op: the file in ops/ that runs instead; "" for none.
    replaces: the engine's functions, dotted. table: what must hold of the engine's source before any of them is replaced.
    default: whether it is on where nothing is said. switch: a variable that turns it on with 1 beside the plug-in's own.
    archs: the GPUs where it takes over, empty for every one.
    """

    name: str
    op: str
    replaces: tuple[str, ...]
    table: tuple[Entry, ...]
    default: bool = False
    switch: str = ""
    archs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plugin:
    """engine: the package. tested: the release that the tests run. since: the first release that is tried.

    variable: the environment variable that names the parts that are on, in place of their defaults; "" if there is none.
    call: what a program must call, "" where the engine loads the plug-in by itself.
    distributions: what may have installed the package, as pip names it.
    """

    engine: str
    tested: str
    parts: tuple[Part, ...]
    variable: str = ""
    call: str = ""
    since: tuple[int, ...] = ()
    distributions: tuple[str, ...] = ()


def why_off(plugin: Plugin, part: Part) -> str:
    """Why this part stays the engine's own, "" where ours is to take over."""
    if os.environ.get("DEEPDECODE_ENABLE") == "0":
        return "DEEPDECODE_ENABLE=0"
    asked = not_asked(plugin, part)
    if asked:
        return asked
    package = folder(plugin.engine)
    if package is None:
        return "it is not installed"
    here = gpus.archs()
    if here and part.archs and not here & set(part.archs):
        return f"no GPU of {', '.join(f'sm_{arch}' for arch in part.archs)} is here"
    found = tuple(int(digits) for digits in re.findall(r"\d+", engine_version(plugin))[: len(plugin.since)])
    # a checkout may not say its version; its source does
    if found and found < plugin.since:
        return f"{'.'.join(map(str, plugin.since))} is the first version that this plug-in knows"
    moved = problems(package, part.table)
    return f"this source is not what was tested: {'; '.join(moved)}" if moved else ""


def not_asked(plugin: Plugin, part: Part) -> str:
    """What would switch the part on, "" where it is on."""
    words = os.environ.get(plugin.variable) if plugin.variable else None
    if part.switch and os.environ.get(part.switch) == "1":
        return ""
    if part.default if words is None else part.name in {word.strip() for word in words.split(",")}:
        return ""
    return f"{part.switch}=1 switches it on" if part.switch and words is None else f"{plugin.variable} does not name it"


def engine_version(plugin: Plugin) -> str:
    told = [version(name) for name in plugin.distributions or (plugin.engine,)]
    return next((found for found in told if found[:1].isdigit()), told[0])


def said(plugin: Plugin, why: dict[str, str]) -> str:
    """The parts that are on, and the others by the reason why they are not."""
    on = [part for part in plugin.parts if not why[part.name]]
    words = [part.name + (f" (on {', '.join(f'sm_{arch}' for arch in part.archs)})" if part.archs else "") for part in on]
    lines = [f"on: {', '.join(words)}"] if on else []
    reasons: dict[str, list[str]] = {}
    for name, reason in why.items():
        if reason:
            reasons.setdefault(reason, []).append(name)
    lines += [f"off: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "; ".join(lines)


def report(plugin: Plugin) -> dict[str, Any]:
    """One JSON object.

    Returns:
        engine, installed, version (None where it is not installed), tested, variable; call: what a program must call, or "".
        parts: of each its name, op, replaces, switch, archs; on: whether it takes over (after `call`, if there is one);
        why: why not, else ""; signatures: what of its table does not hold, whatever the switches say.
    """
    package = folder(plugin.engine)
    parts = []
    for part in plugin.parts:
        why = why_off(plugin, part)
        told = {"name": part.name, "op": part.op, "replaces": list(part.replaces), "switch": part.switch}
        signatures = problems(package, part.table) if package else []
        parts.append({**told, "archs": list(part.archs), "on": not why, "why": why, "signatures": signatures})
    return {
        "engine": plugin.engine,
        "installed": package is not None,
        "version": engine_version(plugin) if package else None,
        "tested": plugin.tested,
        "variable": plugin.variable,
        "call": plugin.call,
        "parts": parts,
    }


def plugin_of(engine: str) -> Plugin:
    return import_module(ENGINES[engine]).PLUGIN
