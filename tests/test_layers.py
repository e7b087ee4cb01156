"""Imports point one way (each part names what it may import), and the trace reader and the front door stay light."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "deepdecode"

# the part -> the parts it may import; every part may import the package's own version
MAY = {
    "config": set(),
    "cards": set(),
    "ops": {"ops", "config", "kernels", "cards"},
    # rows.py is data: what a cache looks like in bytes
    "kernels": {"kernels", "cards", "ops.rows"},
    "fallback": {"fallback", "config", "ops", "kernels"},
    "kvcache": {"config", "ops"},
    "model": {"config", "ops"},
    "checkpoint": {"checkpoint", "config", "model", "ops"},
    "inspect": {"checkpoint", "config", "cards", "kvcache", "text"},
    "graphs": set(),
    "runner": {"config", "graphs", "kvcache", "model", "ops"},
    # one rank of a large model with seeded weights, and the tables of ops that the ladder measures on it
    "slices": {"checkpoint", "config", "graphs", "kvcache", "model", "ops"},
    "rungs": {"fallback", "kernels", "ops"},
    # a runner with a draft block
    "speculate": {"kvcache", "model", "ops", "runner"},
    "text": {"config"},
    "progress": set(),
    "errors": set(),
    "distributed": {"model"},
    "tiny": {"checkpoint", "config"},
    "generate": {"checkpoint", "config", "distributed", "errors", "kvcache", "ops", "progress", "runner"}
    | {"speculate", "text", "tiny"},
    "testing": {"testing", "config", "ops", "kvcache", "model"},
    "trace": {"trace"},
    # what the package knows of its kernels, a table
    "support": set(),
    "plan": {"cards", "kernels", "support"},
    "env": {"cards", "config", "engines", "kernels", "support"},
    "engines": {"cards", "config", "kernels", "plugins"},
    "plugins": {"plugins", "ops", "kernels", "config", "cards"},
    # plugins: what stands at an engine's boundary is measured through its hooks
    "bench": {"bench", "ops", "kernels", "kvcache", "fallback", "testing", "config", "cards", "errors", "plugins"},
    "ladder": {"bench", "cards", "checkpoint", "config", "errors", "kernels", "kvcache", "ladder", "model", "ops", "progress"}
    | {"runner", "rungs", "slices", "testing", "tiny", "trace"},
    # what precision costs, a command
    "quality": {"bench", "checkpoint", "config", "errors", "kvcache", "model", "ops", "progress", "quality", "runner"}
    | {"speculate", "text", "tiny", "trace"},
    "cli": {"errors", "generate", "inspect", "plan", "env", "engines", "bench", "ladder", "kernels", "ops", "cards", "config"}
    | {"quality", "tiny", "trace"},
    "__main__": {"cli"},
}

# the commands
EDGE = {"generate", "inspect", "plan", "env", "ladder", "quality"}
# what of the edge a part may import
ALLOWED = {"__main__": {"cli"}, "cli": EDGE, "ladder": {"ladder"}, "quality": {"quality"}}
ALLOWED |= {name: {"plugins"} for name in ("plugins", "engines", "bench")}


def files():
    return sorted(PACKAGE.rglob("*.py"))


def part(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imported_parts(path):
    """The parts of deepdecode that a file imports, anywhere in it; `ops.rows` for that one module of ops."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" if node.module == "deepdecode" else node.module for alias in node.names]
        for name in names:
            if name.startswith("deepdecode."):
                found.add("ops.rows" if name == "deepdecode.ops.rows" else name.split(".")[1])
    return frozenset(found - {"__version__"})


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    if part(path) == "__init__":
        assert imported_parts(path) == set()
        return
    assert part(path) in MAY, f"{path} is a new part: say in MAY what it may import"
    may = MAY[part(path)]
    assert imported_parts(path) <= (may | {"ops.rows"} if "ops" in may else may)


def test_nothing_imports_the_edge():
    """Plug-ins and commands import; nothing imports them."""
    for path in files():
        allowed = ALLOWED.get(part(path), set())
        assert not imported_parts(path) & ({"plugins", "cli", *EDGE} - allowed), path


def modules_after(statement, before="pass"):
    """What `statement` loads that `before` has not loaded."""
    code = f"import sys; {before}; had = {{*sys.modules}}; {statement}; print(*{{*sys.modules}} - had)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_trace_reader_starts_without_torch():
    loaded = modules_after("import deepdecode.trace.cli")
    assert not {"torch", "triton", "transformers"} & loaded
    assert {m for m in loaded if m.startswith("deepdecode.")} <= {m for m in loaded if m.startswith("deepdecode.trace")}


def test_the_planner_starts_without_torch():
    assert not {"torch", "triton"} & modules_after("import deepdecode.plan, deepdecode.env, deepdecode.bench.plots")


def test_the_front_door_starts_without_torch():
    assert not {"torch", "triton"} & modules_after("import deepdecode.cli")


def test_references_start_without_triton():
    assert "triton" not in modules_after("import deepdecode.ops.reference", before="import torch")


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_small(path):
    lines = path.read_text().count("\n")
    assert lines <= 600, f"{lines} lines: two rooms"
