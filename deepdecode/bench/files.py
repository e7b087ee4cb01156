"""Result files: what one must hold to be read, and how one is written without losing what was there."""

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# names and what their values must be
Form = Mapping[str, type | tuple[type, ...]]


def read_json(path: Path, *, who: str = "bench") -> Any:
    """A file's JSON; `who` reads it and begins the sentence that refuses it.

    Raises:
        ValueError: it is cut, or no JSON.
    """
    try:
        return json.loads(path.read_text())
    except RecursionError:
        raise ValueError(f"{who}: {path} must be JSON, got brackets nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{who}: {path} must be JSON, got {error}") from None


def read_results(path: Path, *, facts: Form | None = None, row: Form | None = None, who: str = "bench") -> dict[str, Any]:
    """A result file: an object with these facts and a list of rows of this form.

    Raises:
        ValueError: it is none; the file is left as it is.
    """
    document = read_json(path, who=who)
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        raise ValueError(f"{who}: {path} must be a result file with a list of rows, got none")
    for name, kind in (facts or {}).items():
        if not isinstance(document.get(name), kind):
            raise ValueError(f"{who}: {path} must be a result file with {name}, got {_brief(document, name)}")
    check_rows(path, rows, row or {}, who=who)
    return document


def check_rows(path: Path, rows: Iterable[Row], form: Form, *, who: str) -> None:
    """Raises:
    ValueError: a row lacks a name, or has another kind of value there.
    """
    for number, row in enumerate(rows, 1):
        for name, kind in form.items():
            if not isinstance(row.get(name), kind):
                raise ValueError(f"{who}: {path} must have {name} in every row, got {_brief(row, name)} in row {number}")


def _brief(values: Row, name: str) -> str:
    return f"{values[name]!r:.40}" if name in values else "none"


def set_aside(path: Path, rows: Sequence[Row] | None, kept: Sequence[Row], *, who: str = "bench") -> None:
    """Copy a result file whose next version holds less.

    Args:
        rows: what it holds, None if that cannot be told. Rows with an error are no loss.
        kept: those that the next version begins with.
    """
    if rows is None or _measured(rows) > _measured(kept):
        copy = path.with_name(path.name + ".before")
        shutil.copyfile(path, copy)
        print(f"{who}: {path} is begun anew; what it held is in {copy}", file=sys.stderr)


def _measured(rows: Sequence[Row]) -> int:
    return sum("error" not in row for row in rows)


def save_results(path: Path, document: Row) -> None:
    """Write the file whole: whoever reads it, or stops the writer, finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)


def draft_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")
