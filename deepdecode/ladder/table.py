"""What was measured, as documents: the campaign's table, where a step's time goes, launches, gates, and how it was done."""

import math
from collections.abc import Sequence
from typing import Any

from deepdecode.trace.model import CATEGORIES, UNKNOWN_LIMIT
from deepdecode.trace.render import Bullets, Doc, Part, Table, count, percent

Row = dict[str, Any]
Document = dict[str, Any]
NONE = "-"


def ladder_doc(document: Document) -> Doc:
    """Everything a result file of the ladder says."""
    rows = document["rows"]
    parts: list[Part] = [campaign_table(document)]
    tables = (category_table(document), entry_table(document), gate_table(document), mirror_table(document))
    parts += [table for table in tables if table]
    failed = [f"rung {row['rung']} at C = {row['concurrency']}: {row['error']}" for row in rows if "error" in row]
    for name, levels in not_run(document).items():
        failed.append(f"rung {name} at C = {', '.join(map(str, levels))}: not run")
    if failed:
        parts.append(Bullets("Not measured", tuple(failed)))
    parts.append(Bullets("How", tuple(_method(document))))
    return Doc(f"Ladder, {document['slice']} on {document['device']['name']}", tuple(parts))


def not_run(document: Document) -> dict[str, list[int]]:
    """Rungs of the plan whose measurement at a concurrency is missing: the run was cut short."""
    have = {(row["rung"], row["concurrency"]) for row in document["rows"]}
    levels = sorted({concurrency for _, concurrency in have})
    missing = {name: [level for level in levels if (name, level) not in have] for name in document["rungs"]}
    return {name: levels for name, levels in missing.items() if levels}


def ratio(rows: Sequence[Row], row: Row, other: str | None) -> float | None:
    """Tokens per second over those of another rung at the same concurrency; None where either was not measured."""
    base = next((r for r in rows if r["rung"] == other and r["concurrency"] == row["concurrency"]), None)
    if base is None or "tokens_per_s" not in base or "tokens_per_s" not in row:
        return None
    return row["tokens_per_s"] / base["tokens_per_s"]


def campaign_table(document: Document) -> Table:
    """A line for each rung and concurrency; every ratio names what it is over."""
    rows, rungs = document["rows"], document["rungs"]
    yardsticks = [name for name, rung in rungs.items() if rung["yardstick"] and any(row["rung"] == name for row in rows)]
    head = ["C", "rung", "tokens/s", "TPOT ms", "spread"]
    head += [f"x rung {name}" for name in yardsticks] + ["x below"]
    head += ["attention ms", "share", "GPU ms", "launches", "floor ms", "x floor", "experts"]
    lines = []
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        line = [str(row["concurrency"]), row["rung"]]
        if "us_warm" not in row:
            lines.append((*line, "failed", *[NONE] * (len(head) - 3)))
            continue
        profile = row["profile"]
        attention = profile["categories"].get("attention", {"ms": 0.0, "share": 0.0})
        below = rungs[row["rung"]]["below"]
        line += [f"{row['tokens_per_s']:.1f}", f"{row['us_warm'] / 1e3:.3f}"]
        line += [f"{row['us_warm_low'] / 1e3:.3f} to {row['us_warm_high'] / 1e3:.3f}"]
        line += [_times(ratio(rows, row, name)) for name in (*yardsticks, below)]
        line += [f"{attention['ms']:.3f}", percent(attention["share"]), f"{profile['busy_ms']:.3f}", count(profile["launches"])]
        line += [f"{row['floor_us'] / 1e3:.3f}", _times(row["times_floor"]), f"{row['experts_hit']['mean']:.1f}"]
        lines.append(tuple(line))
    named = [f"rung {name} mirrors {rungs[name]['yardstick']}" for name in yardsticks]
    note = "; ".join([*named, "x below: over the rung below", "attention, share, GPU and launches: of a profiled step"])
    return Table("The campaign", tuple(head), "r" + "l" + "r" * (len(head) - 2), tuple(lines), note + ".")


def profiled(document: Document) -> list[Row]:
    """The rows of the concurrency whose traces are kept, bottom up."""
    return [row for row in document["rows"] if row["concurrency"] == document["profiled_concurrency"] and "profile" in row]


def category_table(document: Document) -> Table | None:
    """Milliseconds of a step and their share, by category."""
    rows = profiled(document)
    if not rows:
        return None
    names = [name for name in CATEGORIES if any(name in row["profile"]["categories"] for row in rows)]
    lines = []
    for name in sorted(names, key=lambda name: -max(_category(row, name)["ms"] for row in rows)):
        cells = [CATEGORIES[name]]
        for row in rows:
            found = _category(row, name)
            cells += [f"{found['ms']:.3f}", percent(found["share"])]
        lines.append(tuple(cells))
    for title, key in (("busy", "busy_ms"), ("idle", "idle_ms")):
        lines.append((title, *(cell for row in rows for cell in (f"{row['profile'][key]:.3f}", ""))))
    lines.append(("launches", *(cell for row in rows for cell in (count(row["profile"]["launches"]), ""))))
    head = ("category", *(cell for row in rows for cell in (f"rung {row['rung']} ms", "share")))
    title = f"GPU time of a step at C = {document['profiled_concurrency']}, by category"
    return Table(title, head, "l" + "r" * (len(head) - 1), tuple(lines), "Medians of the profiled steps.")


def entry_table(document: Document) -> Table | None:
    """Launches and GPU time of an eager step, by entry of the table of ops."""
    rows = [row for row in profiled(document) if "entries" in row]
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row["entries"]))
    lines = []
    for name in names:
        cells = [name]
        for row in rows:
            found = row["entries"].get(name, {"launches": 0, "us": 0.0})
            cells += [str(found["launches"]), f"{found['us'] / 1e3:.3f}"]
        floor = rows[-1].get("bytes_by_entry", {}).get(name)
        cells.append(f"{floor / rows[-1]['copy_bandwidth_tb_s'] / 1e9:.3f}" if floor else NONE)
        lines.append(tuple(cells))
    total = ["all"]
    for row in rows:
        entries = row["entries"].values()
        total += [str(sum(e["launches"] for e in entries)), f"{sum(e['us'] for e in entries) / 1e3:.3f}"]
    lines.append((*total, f"{rows[-1]['floor_us'] / 1e3:.3f}"))
    head = ["entry"]
    for row in rows:
        head += [f"rung {row['rung']} launches", "ms"]
    title = f"Launches and GPU milliseconds of an eager step at C = {document['profiled_concurrency']}, by entry of the table"
    return Table(title, (*head, "floor ms"), "l" + "r" * len(head), tuple(lines), "Copies and fills are launches too.")


def gate_table(document: Document) -> Table:
    """Each rung's checks, the worst over the concurrencies."""
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for row in document["rows"]:
        for gate in row.get("gates", ()):
            key = row["rung"], gate["name"]
            if key not in worst or _worse(gate["error"]) > _worse(worst[key]["error"]):
                worst[key] = gate
    lines = [
        (rung, name, size(gate["error"]), f"{gate['bound']:.2e}", "passed" if gate["passed"] else "FAILED", gate["note"])
        for (rung, name), gate in worst.items()
    ]
    return Table("Gates, worst over all concurrencies", ("rung", "check", "error", "bound", "", "on"), "llrrll", tuple(lines))


def _method(document: Document) -> list[str]:
    rows = [row for row in document["rows"] if "us_warm" in row]
    items = [
        f"{document['layers']} layers, {document['context']} tokens of context, seeded weights in the checkpoint's formats"
    ]
    items += document["left_out"]
    items += [f"rung {name}: {rung['title']}" for name, rung in document["rungs"].items()]
    for row in rows:
        if "compiled" in row:
            made = row["compiled"]
            items.append(
                f"rung {row['rung']} at C = {row['concurrency']}: torch.compile made {made['graphs']} graphs, "
                f"with {made['graph_breaks']} graph breaks"
            )
    if rows:
        steps = sorted({row["timed_steps"] for row in rows})
        spans = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        items.append(f"TPOT: the median of {rows[0]['repeats']} passes of {spans} replays over consecutive positions")
        bandwidth = sorted({row["copy_bandwidth_tb_s"] for row in rows})
        for row in profiled(document):
            unknown = row["profile"]["unknown_share"]
            if unknown > UNKNOWN_LIMIT:
                items.append(
                    f"rung {row['rung']}: {percent(unknown)} of GPU time is in no category; `deepdecode profile` names it"
                )
        items.append(f"floor: bytes that must move, over {bandwidth[-1]:.2f} TB/s, a copy's bandwidth in the same run")
    return items


def mirror_table(document: Document) -> Table | None:
    """Which engine code each entry of a rung mirrors; what several rungs share stands once."""
    shared: dict[tuple[str, str], list[str]] = {}
    for name, rung in document["rungs"].items():
        for entry, text in rung["mirrors"].items():
            shared.setdefault((entry, text), []).append(name)
    lines = tuple((entry, ", ".join(names), text) for (entry, text), names in shared.items())
    return (
        Table("Engine code that an entry mirrors", ("entry", "rungs", "what, and why it is fair"), "lll", lines)
        if lines
        else None
    )


def _category(row: Row, name: str) -> dict[str, Any]:
    return row["profile"]["categories"].get(name, {"ms": 0.0, "share": 0.0, "launches": 0.0})


def size(error: float | None) -> str:
    return "not finite" if error is None or not math.isfinite(error) else f"{error:.2e}"


def _worse(error: float | None) -> float:
    """What is not finite is the worst there is."""
    return math.inf if error is None or math.isnan(error) else error


def _times(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}x"
