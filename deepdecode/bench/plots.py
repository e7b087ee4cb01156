"""Pictures of a result file: time against T for each implementation, warm and rotated, written beside the file."""

import math
from pathlib import Path
from typing import Any

from deepdecode.bench.files import check_rows, read_results
from deepdecode.errors import HintedError

ASPECTS = {"us_warm": "warm", "us_rotated": "rotated past L2"}
FIXED_KEYS = ("window_keys", "extra_keys", "fmt")
# what a row must have to be drawn
ROW = {"implementation": str, "T": int, "H": int}
OURS = "deepdecode"
# Okabe and Ito's colours: told apart by colour-blind readers, and dark enough on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#8C510A", "#6A3D9A", "#B2DF8A")
MARKERS = "osD^vPX*h<"


def plot_results(path: Path, *, op: str = "attention") -> list[Path]:
    """Draw the rows of a result file: a picture for each form of cache and key count, a column for each H.

    Args:
        path: the JSON; pictures are named after it and stand beside it. Rows without a time are left out.

    Returns:
        The PNG files, in the order of the rows.

    Raises:
        ValueError: the file is no result file, or no row of the op has a time.
        ImportError: matplotlib is missing.
    """
    document = read_results(path, who="plots")
    rows = [row for row in document["rows"] if row.get("op") == op and _timed(row)]
    if not rows:
        raise ValueError(f"plots: {path} must have a row of {op} with a time, got {len(document['rows'])} rows without one")
    check_rows(path, rows, ROW, who="plots")
    names = sorted({row["implementation"] for row in rows}, key=lambda name: (name != OURS, name))
    styles = {name: (COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)]) for n, name in enumerate(names)}
    pictures: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        pictures.setdefault(tuple(row.get(name) for name in FIXED_KEYS), []).append(row)
    return [_draw(path, document, op, key, part, styles) for key, part in pictures.items()]


def plot_command(path: Path) -> int:
    """Draw a result file of attention and print the pictures' names."""
    try:
        pictures = plot_results(path)
    except ImportError as error:
        raise HintedError(f"bench: --plot must have matplotlib, got {error}", "pip install 'deepdecode[report]'") from None
    print(*pictures, sep="\n")
    return 0


def _timed(row: dict[str, Any]) -> bool:
    return "error" not in row and any(_time(row, aspect) for aspect in ASPECTS)


def _time(row: dict[str, Any], aspect: str) -> float | None:
    value = row.get(aspect)
    return value if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None


def series(rows: list[dict[str, Any]], aspect: str) -> dict[str, tuple[list[int], list[float]]]:
    """For each implementation, its tokens in order and their times; of a point measured twice, the later row."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        time = _time(row, aspect)
        if time:
            points.setdefault(row["implementation"], {})[row["T"]] = time
    return {name: (sorted(times), [times[T] for T in sorted(times)]) for name, times in points.items()}


def _draw(
    path: Path,
    document: dict[str, Any],
    op: str,
    key: tuple[Any, ...],
    rows: list[dict[str, Any]],
    styles: dict[str, tuple[str, str]],
) -> Path:
    import matplotlib
    from matplotlib.figure import Figure

    window_keys, extra_keys, fmt = key
    keys = f"{window_keys}+{extra_keys}" if extra_keys else f"{window_keys}"
    heads = sorted({row["H"] for row in rows})
    aspects = [aspect for aspect in ASPECTS if any(_time(row, aspect) for row in rows)]
    target = path.with_name(f"{path.stem}_{fmt}_{keys.replace('+', '_')}.png")
    with matplotlib.rc_context():
        # white paper, whatever the reader's own style is
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
        figure = Figure(figsize=(1.2 + 2.9 * len(heads), 0.9 + 2.7 * len(aspects)), dpi=110, layout="constrained")
        panels = figure.subplots(len(aspects), len(heads), sharex=True, sharey=True, squeeze=False)
        for line, aspect in enumerate(aspects):
            for column, H in enumerate(heads):
                axes = panels[line][column]
                _panel(axes, [row for row in rows if row["H"] == H], aspect, styles)
                axes.set_title(f"{H} heads, {ASPECTS[aspect]}", fontsize=9)
                axes.set_xticks(sorted({row["T"] for row in rows}), minor=False)
            panels[line][0].set_ylabel("microseconds")
        for axes in panels[-1]:
            axes.set_xlabel("T, query tokens")
        labelled = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
        shown = {label: handle for handle, label in labelled}
        order = [name for name in (*styles, "floor") if name in shown]
        figure.legend(
            [shown[name] for name in order], order, loc="outside lower center", ncols=min(4, len(order)), frameon=False
        )
        device = document.get("device")
        card = device.get("name", "") if isinstance(device, dict) else str(device or "")
        figure.suptitle(", ".join(filter(None, (op, f"{keys} keys", f"{fmt} rows", card))), fontsize=11)
        # no version inside: the same rows give the same file
        figure.savefig(target, facecolor="white", metadata={"Software": None})
    return target


def _panel(axes: Any, rows: list[dict[str, Any]], aspect: str, styles: dict[str, tuple[str, str]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    # ours last, so on top
    for name, (tokens, times) in sorted(series(rows, aspect).items(), key=lambda item: item[0] == OURS):
        colour, marker = styles[name]
        axes.plot(tokens, times, color=colour, marker=marker, markersize=4, linewidth=2.2 if name == OURS else 1.3, label=name)
    floors = {row["T"]: row["floor_us"] for row in rows if _time(row, "floor_us")}
    if floors:
        tokens = sorted(floors)
        axes.plot(tokens, [floors[T] for T in tokens], color="#777777", linestyle=":", linewidth=1.2, label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(which="both", color="#dddddd", linewidth=0.5)
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
