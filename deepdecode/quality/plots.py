"""A picture of a quality file: what each choice loses, and how much of the chosen entries' score is left by context."""

from pathlib import Path
from typing import Any

COLOUR = "#0072B2"


def plot_quality(document: dict[str, Any], path: Path) -> Path:
    """Draw a result file; the PNG stands beside it. ImportError if matplotlib is missing."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = document["rows"][1:]
    with matplotlib.rc_context():
        # white paper, whatever the reader's own style is
        matplotlib.rcdefaults()
        figure = Figure(figsize=(11, 0.6 + 0.32 * max(4, len(rows))), dpi=110, layout="constrained")
        left, right = figure.subplots(1, 2)
        left.barh([row["choice"] for row in rows], [max(row["kl_bits"], 1e-9) for row in rows], color=COLOUR)
        left.set_xscale("log")
        left.invert_yaxis()
        left.set_xlabel("KL to fp32, bits a token")
        for row in rows:
            points = [(int(context), 1 - each["score_mass"]) for context, each in row["contexts"].items()]
            if any(lost > 1e-6 for _, lost in points):
                right.plot(*zip(*points, strict=True), marker="o", label=row["choice"])
        right.set_xlabel("context, tokens")
        right.set_ylabel("score of the chosen entries that is lost")
        if right.lines:
            right.set_xscale("log", base=2)
            right.set_xticks(document["contexts"], labels=[str(context) for context in document["contexts"]])
            right.legend(fontsize=7)
        target = path.with_name(path.stem + ".png")
        # no version inside: the same rows give the same file
        figure.savefig(target, metadata={"Software": None})
    return target
