"""The kept traces through the profile reader: what moved from rung to rung, what only seems to have, what to attack next."""

from pathlib import Path
from typing import Any

from deepdecode.ladder.table import profiled
from deepdecode.trace import Profile, load, profile
from deepdecode.trace.advise import Advice, advise
from deepdecode.trace.compare import Comparison, compare
from deepdecode.trace.findings import append, entry
from deepdecode.trace.model import CATEGORIES
from deepdecode.trace.render import Bullets, Doc, ms, percent, quote, signed_ms
from deepdecode.trace.report import advice_doc, comparison_doc, profile_doc

# categories that moved less than this part of the step are not told
TOLD = 0.01
# candidates of the advice whose floor is known: the bytes of these entries, over a copy's bandwidth
FLOORS = {
    "attention-kernel": ("sparse_attn",),
    "split-attention": ("sparse_attn",),
    "tune-attention": ("sparse_attn",),
    "indexer-kernel": ("index_topk",),
    "moe-kernel": ("moe",),
    "small-m-gemm": ("attn_in", "q_proj", "attn_out", "route", "head"),
}


def write_findings(document: dict[str, Any], folder: Path, file: Path) -> Doc | None:
    """Append one entry about the traces of a result file; None, and nothing written, where it has no trace.

    Args:
        document: the result file.
        folder: where its traces lie.
        file: PROFILE_FINDINGS.md, or another.

    Returns:
        What moved from rung to rung, which the entry begins with.
    """
    # rows that were kept from an earlier run may be of another concurrency
    rows = [row for row in profiled(document) if "trace" in row and (folder / row["trace"]).is_file()]
    if not rows:
        return None
    profiles = {row["rung"]: profile(load(folder / row["trace"])) for row in rows}
    # a rung that is another form of one belongs beside what that one stands on, not between two others
    rungs = document["rungs"]
    main = [name for name in profiles if not rungs[name]["beside"]] or list(profiles)[:1]
    forms = [name for name in profiles if name not in main and rungs[name]["below"] in profiles]
    if len(main) > 1:
        comparison = compare([profiles[name] for name in main], [f"rung {name}" for name in main])
        first = moves_doc(comparison)
        docs = [first, comparison_doc(comparison)]
    else:
        first = profile_doc(profiles[main[0]], f"rung {main[0]}")
        docs = [first]
    for name in forms:
        below = rungs[name]["below"]
        pair = compare([profiles[below], profiles[name]], [f"rung {below}", f"rung {name}"])
        docs.append(moves_doc(pair, f"Rung {name}, {rungs[name]['title']}"))
    top = next(row for row in reversed(rows) if row["rung"] == main[-1])
    docs.append(advice_doc(_advise(profiles[main[-1]], f"rung {main[-1]}", top)))
    title = f"the ladder on {document['slice']}, C = {document['profiled_concurrency']}, commit {document['commit']}"
    append(file, entry(title, document["command"], list(profiles.values()), docs))
    return first


def _advise(one: Profile, label: str, row: dict[str, Any]) -> Advice:
    """What next, from the floors of this very step where they are known."""
    nanoseconds = {entry: count / row["copy_bandwidth_tb_s"] / 1e3 for entry, count in row["bytes_by_entry"].items()}
    floors = {name: sum(nanoseconds.get(entry, 0.0) for entry in entries) for name, entries in FLOORS.items()}
    there = {candidate.id for candidate in advise(one, label).candidates}
    return advise(one, label, floors_ns={name: ns for name, ns in floors.items() if name in there and ns > 0})


def moves_doc(comparison: Comparison, title: str = "What moved from rung to rung") -> Doc:
    """For each rung against the one before it: the step, what moved most, and what the shares hide."""
    parts = [Bullets(_pair(comparison, after), tuple(_moves(comparison, after))) for after in range(1, len(comparison.runs))]
    return Doc(title, tuple(parts))


def _pair(comparison: Comparison, after: int) -> str:
    return f"{quote(comparison.runs[after - 1].label)} -> {quote(comparison.runs[after].label)}"


def _moves(comparison: Comparison, after: int) -> list[str]:
    before, runs = after - 1, comparison.runs
    a, b = runs[before], runs[after]
    items = [comparison.verdicts[before].text]
    moved, risen = [], []
    for row in comparison.categories:
        old, new = row.cells[before], row.cells[after]
        was, now = old.step_ns if old else 0, new.step_ns if new else 0
        name = CATEGORIES.get(row.key, row.key)
        if abs(now - was) >= TOLD * max(a.step_ns, 1):
            moved.append((now - was, f"{name} {signed_ms(now - was)} ms ({ms(was)} -> {ms(now)})"))
        elif old and new and new.share - old.share >= TOLD:
            risen.append(f"{name} {percent(old.share)} -> {percent(new.share)} at {ms(now)} ms")
    moved.sort(key=lambda pair: -abs(pair[0]))
    items.append("moved: " + ("; ".join(text for _, text in moved) or "no category by 1 % of the step"))
    if risen:
        items.append("rose in share without rising in time: " + "; ".join(risen))
    busy = f"total GPU time {ms(a.busy_ns)} -> {ms(b.busy_ns)} ms a step"
    target = min(moved, default=(0, ""))
    if target[0] < 0 and b.busy_ns > a.busy_ns:
        items.append(f"{busy}: it rose although the target fell")
    else:
        items.append(busy)
    items.append(f"launches {a.launches:.0f} -> {b.launches:.0f} a step")
    return items
