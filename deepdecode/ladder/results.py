"""Result files of the ladder: what one must hold to be read, and how one is written without losing what was there."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepdecode.bench import files

SCHEMA = 1
FACTS: dict[str, type] = {
    "device": dict, "commit": str, "command": str, "slice": str, "context": int, "layers": int, "profiled_concurrency": int,
    "left_out": list, "rungs": dict, "rows": list,
}  # fmt: skip
RUNG = ("title", "yardstick", "beside", "below", "mirrors")
# what a row without an error has
TIMES = ("us_warm", "us_warm_low", "us_warm_high", "tokens_per_s", "floor_us", "copy_bandwidth_tb_s", "times_floor")
STEP = ("busy_ms", "idle_ms", "launches", "unknown_share")


def read_results(path: Path) -> dict[str, Any]:
    """A result file of the ladder.

    Raises:
        ValueError: it is none.
    """
    document = files.read_json(path, who="ladder")
    fault = _fault(document)
    if fault:
        raise ValueError(f"ladder: {path} must be a result file of the ladder, got {fault}")
    return document


def make_room(path: Path) -> None:
    """Make the file's folder, and find out before anything is measured that it can be written in.

    Raises:
        ValueError: it cannot.
    """
    draft = files.draft_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise ValueError(f"ladder: --out must be a folder to write in, got {path.parent}: {error.strerror}") from None


def set_aside(path: Path, kept: Sequence[dict[str, Any]]) -> None:
    """Copy a result file that holds more than the rows that are kept; its next version will not."""
    if not path.exists():
        return
    try:
        rows = read_results(path)["rows"]
    except ValueError:
        rows = None
    files.set_aside(path, rows, kept, who="ladder")


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: None stands for both."""
    return value if math.isfinite(value) else None


def _fault(document: Any) -> str | None:
    """What makes it no result file, in a few words; None if it is one."""
    if not isinstance(document, dict) or "profiled_concurrency" not in document:
        return "another"
    if document.get("schema") != SCHEMA:
        return f"schema {str(document.get('schema'))[:40]}, not {SCHEMA}"
    for name, kind in FACTS.items():
        if not isinstance(document.get(name), kind):
            return f"no {name}"
    if not isinstance(document["device"].get("name"), str):
        return "no name of the device"
    for name, rung in document["rungs"].items():
        if not isinstance(rung, dict) or any(part not in rung for part in RUNG) or not isinstance(rung["mirrors"], dict):
            return f"a rung {name!r:.40} that is not described"
    for number, row in enumerate(document["rows"], 1):
        fault = _row_fault(row, document["rungs"])
        if fault:
            return f"{fault} in row {number}"
    return None


def _row_fault(row: Any, rungs: dict[str, Any]) -> str | None:
    if not isinstance(row, dict) or row.get("rung") not in rungs or not isinstance(row.get("concurrency"), int):
        return "no rung that it names, or no concurrency,"
    if any(not {"name", "error", "bound", "passed", "note"} <= set(gate) for gate in _dicts(row.get("gates", []))):
        return "a gate that is not described"
    trace = row.get("trace", "a")
    if not isinstance(trace, str) or Path(trace).name != trace:
        return "a trace that is not beside it"
    if "error" in row:
        return None
    for name in TIMES:
        if not _is_number(row.get(name)) or row[name] <= 0:
            return f"no {name}"
    profile = row.get("profile")
    if not isinstance(profile, dict) or not isinstance(profile.get("categories"), dict):
        return "no profile"
    parts = [profile.get(name) for name in STEP]
    parts += [part.get(name) for part in _dicts(profile["categories"].values()) for name in ("ms", "share")]
    parts += [part.get(name) for part in _dicts(row.get("entries", {}).values()) for name in ("launches", "us")]
    made = row.get("compiled", {"graphs": 0, "graph_breaks": 0})
    parts += [made.get(name) if isinstance(made, dict) else None for name in ("graphs", "graph_breaks")]
    hit = row.get("experts_hit")
    parts += [row.get("timed_steps"), row.get("repeats"), hit.get("mean") if isinstance(hit, dict) else None]
    return None if all(_is_number(part) for part in parts) else "a profile without its numbers"


def _dicts(values: Any) -> list[dict[str, Any]]:
    """What is none counts as an empty one, which lacks everything."""
    return [value if isinstance(value, dict) else {} for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
