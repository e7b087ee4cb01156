"""What a plug-in expects of an engine's source, held against the source that is installed. Nothing of the engine is imported.

A table is a tuple of `Function`, `Code`, `Calls`, `Statement` and `Value`; `problems` gives a sentence for each entry that
does not hold.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Function:
    """A function with these parameters, by name: "*", "*args" and "**kwargs" as they are written.

    file: path from the package's folder. name: "Class.method" for a method. reads: the keys that it asks its keywords for.
    """

    file: str
    name: str
    takes: tuple[str, ...]
    reads: frozenset[str] | None = None

    def problem(self, tree: ast.Module) -> str | None:
        function = _find(tree, self.name.split("."))
        if not isinstance(function, ast.FunctionDef):
            return f"{self.name} must be a function, got none"
        takes = _parameters(function.args)
        if takes != self.takes:
            return f"{self.name} must take ({', '.join(self.takes)}), got ({', '.join(takes)})"
        reads = _keys_read(function)
        if self.reads is not None and reads != self.reads:
            return f"{self.name} must read the keywords {_listed(self.reads)}, got {_listed(reads)}"
        return None


@dataclass(frozen=True)
class Calls:
    """Every call of `name` in the file, one at least, passes exactly these keywords, and so many arguments by position."""

    file: str
    name: str
    passes: frozenset[str]
    positions: int = 0

    def problem(self, tree: ast.Module) -> str | None:
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _callee(node.func) == self.name]
        if not calls:
            return f"{self.name} must be called, got no call"
        for call in calls:
            passes = frozenset(keyword.arg or "**" for keyword in call.keywords)
            if len(call.args) != self.positions or passes != self.passes:
                want = f"{_listed(self.passes)}{_by_position(self.positions)}"
                return f"{self.name} must be called with {want}, got {_listed(passes)}{_by_position(len(call.args))}"
        return None


@dataclass(frozen=True)
class Statement:
    """A statement of this text, as Python writes it back, stands somewhere in the function or property."""

    file: str
    name: str
    text: str

    def problem(self, tree: ast.Module) -> str | None:
        function = _find(tree, self.name.split("."))
        if not isinstance(function, ast.FunctionDef):
            return f"{self.name} must be a function, got none"
        said = any(isinstance(node, ast.stmt) and ast.unparse(node) == self.text for node in ast.walk(function))
        return None if said else f"{self.name} must say `{self.text}`, got no such statement"


@dataclass(frozen=True)
class Value:
    """A name of the module or class that stands for this expression at last, compared as text."""

    file: str
    name: str
    text: str

    def problem(self, tree: ast.Module) -> str | None:
        *scope, name = self.name.split(".")
        body = _find(tree, scope)
        texts = [ast.unparse(value) for target, value in _assigned(body) if target == name]
        if not texts or texts[-1] != self.text:
            return f"{self.name} must be {self.text}, got {texts[-1] if texts else 'none'}"
        return None


@dataclass(frozen=True)
class Code(Function):
    """A function with this `digest` of its defaults and body, as in `since`; comments, docstring and layout do not count."""

    digest: str = ""
    since: str = "the release that was tested"

    def problem(self, tree: ast.Module) -> str | None:
        changed = super().problem(tree)
        if changed or digest(tree, self.name) == self.digest:
            return changed
        return f"{self.name} must compute what it did in {self.since}, got other code"


Entry = Function | Calls | Statement | Value


def problems(package: Path, table: Iterable[Entry]) -> list[str]:
    """What of the table does not hold for the sources under `package`: sentences, none if all holds."""
    found = []
    for entry in table:
        try:
            problem = entry.problem(_parsed(package / entry.file))
        except (OSError, SyntaxError, ValueError):
            problem = "must be there and readable, got none"
        if problem:
            found.append(f"{entry.file}: {problem}")
    return found


def digest(tree: ast.Module, name: str) -> str:
    """What `Code` holds of a function, "Class.method" for a method; the same under every Python. "" if it is not there."""
    node: Any = tree
    for part in name.split("."):
        node = next((found for found in node.body if getattr(found, "name", None) == part), None)
        if node is None:
            return ""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    text = _canonical([node.args.defaults, node.args.kw_defaults, body])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _canonical(node: Any) -> str:
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = [
        f"{key}={_canonical(value)}"
        for key, value in ast.iter_fields(node)
        if key not in _NO_MEANING and value not in (None, [])
    ]
    return f"{type(node).__name__}({','.join(parts)})"


_NO_MEANING = {"ctx", "kind", "type_comment", "type_params"}


def folder(package: str) -> Path | None:
    """Where a top-level package is installed, found without importing it."""
    spec = util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


def version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"


@lru_cache(maxsize=32)
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _find(node: ast.AST, names: list[str]) -> ast.AST | None:
    """The class or function of that dotted name; the last where several are defined."""
    if not names:
        return node
    inside = [found for found in _statements(node) if getattr(found, "name", None) == names[0]]
    return _find(inside[-1], names[1:]) if inside else None


def _statements(node: ast.AST | None) -> Iterator[ast.AST]:
    """The statements of a module's or class's body, those under `if`, `try` and `with` too."""
    for child in ast.iter_child_nodes(node) if node else ():
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            yield from _statements(child)


def _assigned(node: ast.AST | None) -> Iterator[tuple[str, ast.expr]]:
    for statement in _statements(node):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(statement, (ast.Assign, ast.AnnAssign)) and value is not None:
                yield target.id, value


def _parameters(args: ast.arguments) -> tuple[str, ...]:
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    if args.vararg:
        names.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        names.append("*")
    names += [arg.arg for arg in args.kwonlyargs]
    return (*names, f"**{args.kwarg.arg}") if args.kwarg else tuple(names)


def _keys_read(function: ast.FunctionDef) -> frozenset[str]:
    """The constants in `kwargs["x"]`, `kwargs.get("x")` and `kwargs.pop("x")`."""
    name = function.args.kwarg.arg if function.args.kwarg else None
    keys: set[str] = set()
    for node in ast.walk(function):
        key = None
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == name:
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            holder = node.func.value
            key = node.args[0] if isinstance(holder, ast.Name) and holder.id == name else None
        if isinstance(key, ast.Constant):
            keys.add(str(key.value))
    return frozenset(keys)


def _callee(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _by_position(count: int) -> str:
    return f" and {count} by position" if count else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
