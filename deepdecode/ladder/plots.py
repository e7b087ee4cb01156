"""Pictures of the ladder: a step's time by category, stacked over the rungs, and tokens per second by concurrency."""

import math
from pathlib import Path
from typing import Any

from deepdecode.bench.plots import COLOURS, MARKERS
from deepdecode.ladder.table import profiled
from deepdecode.trace.model import CATEGORIES

# smaller parts of a bar are not labelled: the text would not fit
LABELLED = 0.04
# dark to light within a family, in the order of CATEGORIES; "idle" is no category
SHADES = {
    "attention": "#0072B2",
    "indexer": "#56B4E9",
    "topk": "#9BD3F5",
    "mhc": "#8C510A",
    "compressor": "#BF812D",
    "gemm_tc": "#009E73",
    "gemm_simt": "#D55E00",
    "moe": "#CC79A7",
    "norm": "#B8A9D9",
    "quant": "#6A3D9A",
    "glue": "#E69F00",
    "sampling": "#777777",
    "collective": "#333333",
    "memory": "#AAAAAA",
    "unknown": "#000000",
    "idle": "#EEEEEE",
}


def plot_ladder(document: dict[str, Any], path: Path) -> list[Path]:
    """Draw a result file of the ladder; the PNG files are named after it and stand beside it.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    drawn = []
    with matplotlib.rc_context():
        # white paper, whatever the reader's own style is
        matplotlib.rcdefaults()
        if profiled(document):
            drawn.append(_save(_stacked(document), path.with_name(f"{path.stem}_categories.png")))
        if any("tokens_per_s" in row for row in document["rows"]):
            drawn.append(_save(_speeds(document), path.with_name(f"{path.stem}_tokens.png")))
    return drawn


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def _save(figure: Any, target: Path) -> Path:
    # no version inside: the same rows give the same file
    figure.savefig(target, facecolor="white", metadata={"Software": None})
    return target


def _title(document: dict[str, Any], what: str) -> str:
    sizes = f"{document['layers']} layers, {document['context']} tokens of context"
    return f"{what}, {document['slice']}, {document['device']['name']}\n{sizes}, collectives left out"


def _stacked(document: dict[str, Any]) -> Any:
    rows = profiled(document)
    figure = _figure(2.2 + 1.3 * len(rows), 4.6)
    axes = figure.subplots()
    names = [name for name in CATEGORIES if any(name in row["profile"]["categories"] for row in rows)]
    bottom = [0.0] * len(rows)
    ticks = [f"rung {row['rung']}" for row in rows]
    tallest = max(row["profile"]["busy_ms"] + row["profile"]["idle_ms"] for row in rows)
    for name in [*names, "idle"]:
        if name == "idle":
            heights = [row["profile"]["idle_ms"] for row in rows]
        else:
            heights = [row["profile"]["categories"].get(name, {"ms": 0.0})["ms"] for row in rows]
        label = CATEGORIES.get(name, name)
        axes.bar(ticks, heights, bottom=bottom, width=0.62, color=SHADES[name], label=label, edgecolor="white", linewidth=0.4)
        for i, height in enumerate(heights):
            if height >= LABELLED * tallest:
                colour = "black" if name in ("idle", "topk", "norm", "glue", "memory", "indexer") else "white"
                axes.text(i, bottom[i] + height / 2, f"{height:.2f}", ha="center", va="center", fontsize=7, color=colour)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for i, height in enumerate(bottom):
        axes.text(i, height, f"{height:.1f}", ha="center", va="bottom", fontsize=8, fontweight="bold")
    axes.set_ylabel("milliseconds a step")
    _plain(axes)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    axes.set_title(_title(document, f"GPU time of a decode step at C = {document['profiled_concurrency']}"), fontsize=9)
    return figure


def _speeds(document: dict[str, Any]) -> Any:
    from matplotlib.ticker import FuncFormatter, NullLocator

    rows = [row for row in document["rows"] if "tokens_per_s" in row]
    figure = _figure(6.4, 5.0)
    axes = figure.subplots()
    for n, name in enumerate(dict.fromkeys(row["rung"] for row in rows)):
        points = sorted((row["concurrency"], row) for row in rows if row["rung"] == name)
        x, y = [c for c, _ in points], [row["tokens_per_s"] for _, row in points]
        low = [v - 1e6 * c / row["us_warm_high"] for v, (c, row) in zip(y, points, strict=True)]
        high = [1e6 * c / row["us_warm_low"] - v for v, (c, row) in zip(y, points, strict=True)]
        spread = [[max(0.0, v) for v in side] for side in (low, high)]
        style = {"color": COLOURS[n % len(COLOURS)], "marker": MARKERS[n % len(MARKERS)], "markersize": 5, "linewidth": 1.6}
        axes.errorbar(x, y, yerr=spread, capsize=2, label=f"rung {name}: {document['rungs'][name]['title']}", **style)
    levels = sorted({row["concurrency"] for row in rows})
    floors = {
        c: max(1e6 * c / row["floor_us"] for row in rows if row["concurrency"] == c and math.isfinite(row["floor_us"]))
        for c in levels
    }
    axes.plot(levels, [floors[c] for c in levels], color="#777777", linestyle=":", linewidth=1.2, label="floor of the bytes")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(levels)
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("C, sequences decoded at once")
    axes.set_ylabel("tokens per second")
    axes.grid(which="both", color="#dddddd", linewidth=0.5)
    _plain(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    axes.set_title(_title(document, "Decoding speed"), fontsize=9)
    return figure


def _plain(axes: Any) -> None:
    axes.set_facecolor("white")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
