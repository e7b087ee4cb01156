"""A document of paragraphs, lists and tables, written for a terminal, a pipe or markdown. Text from a trace is hostile.

Kernel names, file names and annotations come from a file that anybody may have written: `clean` makes every control
character visible, `Code` marks such text, and each writer here quotes it for its own format.
"""

import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

from deepdecode.trace.model import Health, plural

NAME_WIDTH = 64  # of a kernel name in a table; JSON and HTML keep it whole


class Code(str):
    """Text that a file supplied: shown as it is, never interpreted."""


@dataclass(frozen=True)
class Table:
    """`align` has one letter a column, l or r; a cell is text of ours (`str`) or of the file (`Code`)."""

    title: str
    head: tuple[str, ...]
    align: str
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Bullets:
    title: str
    items: tuple[str, ...]


Part = str | Table | Bullets


@dataclass(frozen=True)
class Doc:
    title: str
    parts: tuple[Part, ...]


# ---- numbers and names


def ms(ns: float | None) -> str:
    """Nanoseconds as milliseconds, three decimals: a decode kernel takes microseconds."""
    return "-" if ns is None else f"{ns / 1e6:.3f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def count(value: float | None) -> str:
    """A count per step: whole where it is whole."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"


def signed_ms(ns: float) -> str:
    text = f"{ns / 1e6:+.3f}"
    return "0.000" if text in ("+0.000", "-0.000") else text


def signed_percent(before: float, after: float) -> str:
    """Relative change; a change from nothing has none."""
    if not before:
        return "new" if after else "-"
    text = f"{100 * (after / before - 1):+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


def clean(text: str) -> str:
    """Make control, format (bidirectional, zero-width), private and broken characters visible as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if not unicodedata.category(c).startswith(("C", "Zl", "Zp")) else _escape(c) for c in text)


def _escape(char: str) -> str:
    code = ord(char)
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return named.get(char) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}")


def short(name: str, width: int = NAME_WIDTH) -> Code:
    """A name that fits a table: the head says what it is, the tail which variant."""
    name = clean(name)
    if len(name) > width:
        tail = width // 3
        name = name[: width - tail - 3] + "..." + name[-tail:]
    return Code(name)


def distinct(names: Iterable[str], width: int = NAME_WIDTH) -> dict[str, Code]:
    """Names cut to a table's width; those that begin alike show the word in which they part, or else a number."""
    shown = {name: short(name, width) for name in names}
    for turn in range(9):
        groups: dict[str, list[str]] = {}
        for name, text in shown.items():
            # at first by the head alone: ends that differ by a letter tell a reader little
            cut = turn == 0 and len(clean(name)) > width
            groups.setdefault(text[: width // 2] if cut else text, []).append(name)
        for alike in groups.values():
            if len(alike) > 1:
                texts = [clean(name) for name in alike]
                first, last = min(texts), max(texts)  # what these share, all share
                at = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
                for i, name in enumerate(alike, 1):
                    shown[name] = Code(f"{shown[name]} #{i}") if turn == 8 else _around(clean(name), at, width)
    return shown


def _around(name: str, at: int, width: int) -> Code:
    """The head, and the word in which a name parts from its like."""
    start, head = at, 2 * width // 5
    while start > at - width // 4 and (name[start - 1 : start].isalnum() or name[start - 1 : start] == "_"):
        start -= 1
    if len(name) <= width or start <= head + 3:
        return Code(name if len(name) <= width else name[: width - 3] + "...")
    rest, room = name[start:], width - head - 3
    if len(rest) > room:
        return Code(name[:head] + "..." + rest[: room - 3] + "...")
    return Code(name[: width - 3 - len(rest)] + "..." + rest)


def health_text(health: Health) -> str:
    """What was damaged or odd, in one sentence; empty when nothing was."""
    said = []
    for number, one, many in (
        (health.bad_events, "could not be read", "could not be read"),
        (health.recovered, "was recovered from the damaged part", "were recovered from the damaged part"),
        (health.orphans, "kernel has no launch in the file", "kernels have no launch in the file"),
        (health.impossible_durations, "has an impossible duration", "have impossible durations"),
        (health.zero_durations, "lasts zero time", "last zero time"),
        (health.drops, "was dropped by the profiler", "were dropped by the profiler"),
    ):
        if number:
            said.append(plural(number, one, many))
    if health.truncated:
        said.append("the file ends early")
    return "; ".join(said)


# ---- writers


def markdown(doc: Doc, level: int = 2) -> str:
    """GitHub-flavoured markdown. Nothing that a file supplied can open HTML, a link, a mention, a cell or a heading."""
    out = [f"{'#' * level} {_md(doc.title)}", ""]
    for part in doc.parts:
        if isinstance(part, str):
            out += [_md(part), ""]
        elif isinstance(part, Bullets):
            out += [f"{'#' * (level + 1)} {_md(part.title)}", ""] if part.title else []
            out += [*(f"- {_md(item)}" for item in part.items), ""]
        else:
            out += [f"{'#' * (level + 1)} {_md(part.title)}", ""] if part.title else []
            out.append("| " + " | ".join(_md(cell) for cell in part.head) + " |")
            out.append("|" + "|".join("---:" if side == "r" else "---" for side in part.align) + "|")
            out += ["| " + " | ".join(_md(cell) for cell in row) + " |" for row in part.rows] + [""]
            out += [_md(part.note), ""] if part.note else []
    return "\n".join(out)


def _md(text: str) -> str:
    if isinstance(text, Code):
        return code_span(text)
    text = clean(text)
    # our own sentences quote names between backticks; every second piece is such a name
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # an odd backtick opens nothing
        pieces = [text.replace("`", "'")]
    return "".join(code_span(piece) if i % 2 else _md_text(piece) for i, piece in enumerate(pieces))


def code_span(text: str) -> str:
    """A code span is inert if it cannot be closed and cannot end a table cell."""
    body = clean(text).replace("`", "'").replace("|", "¦")
    return f"`{body}`" if body.strip() else "-"


def _md_text(text: str) -> str:
    text = re.sub(r"([\\*\[\]<~]|&(?=[#0-9A-Za-z])|^[#>+=-])", r"\\\1", text).replace("|", "\\|")
    text = re.sub(r"(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])", r"\\_", text)
    return re.sub(r"(?<=https)(:)(?=//)|(?<=http)(:)(?=//)|(?<=www)(\.)|(@)", lambda m: "\\" + m.group(0), text)


def quote(name: str) -> str:
    """A file's text inside a sentence of ours: between backticks, which it cannot contain, so no writer reads it as markup."""
    return "`" + clean(name).replace("`", "'") + "`"


def plain(doc: Doc) -> str:
    """For pipes and files: aligned columns, no colour, no box."""
    out = [clean(doc.title), ""]
    for part in doc.parts:
        if isinstance(part, str):
            out += [clean(part), ""]
        elif isinstance(part, Bullets):
            out += [clean(part.title)] if part.title else []
            out += [f"  - {clean(item)}" for item in part.items] + [""]
        else:
            out += [clean(part.title)] if part.title else []
            out += [*_columns(part), ""]
            out += [clean(part.note), ""] if part.note else []
    return "\n".join(out).rstrip("\n") + "\n"


def _columns(table: Table) -> list[str]:
    rows = [tuple(clean(cell) for cell in row) for row in (table.head, *table.rows)]
    widths = [max(_width(row[i]) for row in rows) for i in range(len(table.head))]
    lines = []
    for row in rows:
        cells = []
        for cell, width, side in zip(row, widths, table.align, strict=True):
            pad = " " * (width - _width(cell))
            cells.append(pad + cell if side == "r" else cell + pad)
        lines.append("  " + "  ".join(cells).rstrip())
    lines.insert(1, "  " + "  ".join("-" * width for width in widths))
    return lines


def _least(table: Table, column: int) -> int:
    """A column of figures needs its widest; a column of names folds, down to 24."""
    widest = max(_width(clean(row[column])) for row in (table.head, *table.rows))
    return widest if table.align[column] == "r" else min(widest, 24)


def _width(text: str) -> int:
    """Columns on a terminal; wide East Asian characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def show(doc: Doc, stream: IO[str]) -> None:
    """Tables through rich on a terminal, aligned plain text anywhere else."""
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        _show_rich(doc, stream)
    else:
        stream.write(plain(doc))


def _show_rich(doc: Doc, stream: IO[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    # markup and emoji are off, and every string goes in as Text: "[/x]" in a kernel name stays what it is
    console = Console(file=stream, markup=False, emoji=False, highlight=False)
    console.print(Text(clean(doc.title), style="bold"))
    for part in doc.parts:
        console.print()
        if isinstance(part, str):
            console.print(Text(clean(part)))
        elif isinstance(part, Bullets):
            if part.title:
                console.print(Text(clean(part.title), style="bold"))
            for item in part.items:
                console.print(Padding(Text("- " + clean(item)), (0, 0, 0, 2)))
        elif sum(_least(part, i) + 3 for i in range(len(part.head))) > console.width:
            # too narrow: rich would cut figures; aligned lines that run over keep them
            console.print(Text("\n".join([clean(part.title), *_columns(part)])), soft_wrap=True)
        else:
            table = RichTable(
                title=Text(clean(part.title), style="bold") if part.title else None,
                title_justify="left",
                box=box.SIMPLE_HEAD,
                header_style="bold",
                pad_edge=False,
            )
            for head, side in zip(part.head, part.align, strict=True):
                left = side == "l"
                table.add_column(Text(clean(head)), justify="left" if left else "right", overflow="fold", no_wrap=not left)
            for row in part.rows:
                table.add_row(*(Text(clean(cell)) for cell in row))
            console.print(table)
        if isinstance(part, Table) and part.note:
            console.print(Text(clean(part.note), style="dim"))
