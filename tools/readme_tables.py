"""Write README's and docs/'s tables of results from the files in results/: `python tools/readme_tables.py`.

A block stands between `<!-- NAME begin -->` and `<!-- NAME end -->`; tests/test_readme.py holds it against the files.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TOKENS = (1, 8, 16, 64, 128)
CONCURRENCY = (1, 16, 64)
# a step's parts: categories of the profile, and entries of the table of ops that read and write their bytes
PARTS = {
    "experts and router": (("moe",), ("moe", "route")),
    "products and vocabulary": (("gemm_tc", "gemm_simt"), ("attn_in", "q_proj", "attn_out", "head")),
    "hyper-connections": (("mhc",), ("mhc_boundary",)),
    "attention": (("attention",), ("sparse_attn",)),
    "rotations, rows, compressors, norms": (("glue", "norm", "memory"), ("attn_prepare", "embed")),
    "indexer and its choice": (("indexer", "topk"), ("index_topk",)),
    "sampling": (("sampling",), ("sample",)),
}
WHO = (
    "deepdecode",
    "deepdecode portable",
    "deepdecode portable, no FP8 type",
    "flash_mla",
    "sglang dual-scope",
    "sglang fallback",
    "deepdecode rung 0",
)


def attention() -> str:
    """Microseconds of one call, FP8 rows, 128 + 512 keys."""
    path = ROOT / "results" / "h200" / "attention.json"
    result = json.loads(path.read_text())
    us = {
        (row["implementation"], row["H"], row["T"]): row["us_warm"]
        for row in result["rows"]
        if row["fmt"] == "fp8_584" and row["window_keys"] == 128 and row["extra_keys"] == 512 and "us_warm" in row
    }
    lines = ["| heads | implementation | " + " | ".join(f"T = {T}" for T in TOKENS) + " |", "|---|---|" + "---|" * len(TOKENS)]
    for H in (64, 8):
        for who in WHO:
            cells = [f"{us[who, H, T]:.1f}" if (who, H, T) in us else "" for T in TOKENS]
            if any(cells):
                lines.append(f"| {H} | {who} | " + " | ".join(cells) + " |")
    peers = [row for row in result["rows"] if row["implementation"] == "flash_mla" and "us_warm" in row]
    ours = {_case(row): row for row in result["rows"] if row["implementation"] == "deepdecode"}
    races = [(ours[_case(row)][kind], row[kind]) for row in peers for kind in ("us_warm", "us_rotated")]
    lines += [
        "",
        f"Warm, on one {result['device']['name']} ({result['date']}, `{result['command']}`). Over all measured "
        f"shapes with FP8 rows, warm and rotated past L2, deepdecode is at least as fast as FlashMLA in "
        f"{sum(a <= b for a, b in races)} of {len(races)}; a copy runs at {result['copy_bandwidth_tb_s']:.2f} TB/s.",
    ]
    return "\n".join(lines)


def beside_flash_mla() -> str:
    """All heads beside FlashMLA, warm and with rows past L2, and each time in which it is ahead."""
    result = json.loads((ROOT / "results" / "h200" / "attention.json").read_text())
    rows = [row for row in result["rows"] if row["fmt"] == "fp8_584" and "us_warm" in row]
    us = {who: {_case(row): row for row in rows if row["implementation"] == who} for who in ("deepdecode", "flash_mla")}
    lines = ["| heads | warm | FlashMLA | past L2 | FlashMLA |", "|---|---|---|---|---|"]
    for H in sorted({row["H"] for row in us["flash_mla"].values()}):
        cells = [
            " / ".join(f"{us[who][T, H, 128, 512, 'fp8_584'][kind]:.1f}" for T in TOKENS)
            for kind in ("us_warm", "us_rotated")
            for who in us
        ]
        lines.append(f"| {H} | {' | '.join(cells)} |")
    ahead = {
        (case, kind): (us["deepdecode"][case][kind], row[kind])
        for case, row in us["flash_mla"].items()
        for kind in ("us_warm", "us_rotated")
        if us["deepdecode"][case][kind] > row[kind]
    }
    cases = sorted({case for case, _ in ahead}, key=lambda case: (case[1], case[2] + case[3], case[0]))
    lines += [
        "",
        f"FlashMLA is ahead in {len(ahead)} of {2 * len(us['flash_mla'])} times, "
        f"in {len(cases)} of {len(us['flash_mla'])} cells:",
        "",
        "| heads | keys | T | warm | FlashMLA | past L2 | FlashMLA |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        T, H, window, extra, _ = case
        cells = [f"{us[who][case][kind]:.1f}" for kind in ("us_warm", "us_rotated") for who in us]
        for at, kind in ((1, "us_warm"), (3, "us_rotated")):
            if (case, kind) in ahead:
                ours, theirs = ahead[case, kind]
                cells[at] += f" ({100 * (ours / theirs - 1):.1f} %)"
        lines.append(f"| {H} | {window} + {extra} | {T} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ladder() -> str:
    """The campaign on a whole decode step; every ratio names what it is over."""
    folder = ROOT / "results" / "h200"
    tp8, dp8 = (json.loads((folder / f"ladder-{name}.json").read_text()) for name in ("tp8", "dp8ep8"))
    rungs = tp8["rungs"]
    yardsticks = [name for name in rungs if rungs[name]["yardstick"]]
    head = ["C", "rung", "tokens/s", *(f"over {name}" for name in yardsticks), "attention, ms", "launches", "floors"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---|" * (len(head) - 2)]
    for at in CONCURRENCY:
        for row in tp8["rows"]:
            if row["concurrency"] != at or "us_warm" not in row:
                continue
            profile, name = row["profile"], row["rung"]
            attention = profile["categories"]["attention"]
            over = [_over(tp8, name, other, at) for other in yardsticks]
            cells = [str(at), f"{name}: {rungs[name]['title']}", f"{row['tokens_per_s']:.1f}", *over]
            cells += [f"{attention['ms']:.2f} ({100 * attention['share']:.0f} %)", f"{row['graph_launches']}"]
            lines.append("| " + " | ".join([*cells, f"{row['times_floor']:.1f}"]) + " |")
    top = [name for name in dp8["rungs"] if not dp8["rungs"][name]["beside"]][-1]
    named = "; ".join(f"rung {name} mirrors {rungs[name]['yardstick']}" for name in yardsticks)
    levels = ", ".join(map(str, CONCURRENCY))
    ours = ", ".join(_over(dp8, top, "0", at) for at in CONCURRENCY)
    floors = ", ".join(
        f"{row['times_floor']:.1f}"
        for at in CONCURRENCY
        for row in dp8["rows"]
        if (row["rung"], row["concurrency"]) == (top, at)
    )
    first = ", ".join(_over(tp8, "2", yardsticks[0], at) for at in CONCURRENCY)
    lines += [
        "",
        "`over`: tokens/s over that rung's; `launches`: of a step's graph; `floors`: the step's time over what its bytes take "
        "at the measured copy bandwidth.",
        "",
        f"One rank of eight (tp8) on one {tp8['device']['name']}, {tp8['layers']} layers, {tp8['context']} tokens of context, "
        f"collectives left out ({tp8['date']}, `{tp8['command']}`); {named}. From rung {yardsticks[0]} to rung 2 it is "
        f"{first} at C = {levels}; the first campaign, on eight RTX PRO 6000 with collectives, saw 1.96x, 2.12x, 2.09x. "
        f"On the other slice, dp8ep8, rung {top} over rung 0 is {ours}, at {floors} floors.{_missing(tp8)}",
    ]
    return "\n".join(lines)


def stands() -> str:
    """The top rung of both slices, beside what was aimed at."""
    folder = ROOT / "results" / "h200"
    slices = [json.loads((folder / f"ladder-{name}.json").read_text()) for name in ("tp8", "dp8ep8")]
    top = [name for name in slices[0]["rungs"] if not slices[0]["rungs"][name]["beside"]][-1]

    def of(what: str, digits: int, scale: float = 1) -> list[str]:
        return [" / ".join(f"{_ladder_row(one, top, at)[what] / scale:.{digits}f}" for at in CONCURRENCY) for one in slices]

    lines = [f"| rung {top} at C = 1 / 16 / 64 | tp8 | dp8ep8 | aimed at |", "|---|---|---|---|"]
    rows = [
        ("milliseconds a step", of("us_warm", 2, 1000), ""),
        ("what its bytes take", of("floor_us", 2, 1000), ""),
        ("how often that is in it", of("times_floor", 2), "3 / 2.4 / 2.2"),
        ("launches", of("graph_launches", 0), "700"),
    ]
    for other, aim in (("0-padded", "12x / 17x / 17x"), ("0", "17x, a prize"), ("4", ""), ("4-engine", ""), ("4-compiled", "")):
        ratios = [" / ".join(_over(one, top, other, at) or "-" for at in CONCURRENCY) for one in slices]
        rows.append((f"over rung {other}", [text if "x" in text else "not measured" for text in ratios], aim))
    lines += [f"| {what} | {' | '.join(cells)} | {aim} |" for what, cells, aim in rows]
    return "\n".join(lines)


def parts() -> str:
    """The top rung's step by part, each beside what its bytes take."""
    folder = ROOT / "results" / "h200"
    slices = {name: json.loads((folder / f"ladder-{name}.json").read_text()) for name in ("tp8", "dp8ep8")}
    columns = [(name, at) for name in slices for at in CONCURRENCY]
    lines = ["| part | " + " | ".join(f"{name} C = {at}" for name, at in columns) + " |", "|---|" + "---|" * len(columns)]
    for part, (categories, entries) in PARTS.items():
        cells = []
        for name, at in columns:
            row = _ladder_row(slices[name], "5", at)
            ms = sum(row["profile"]["categories"].get(category, {"ms": 0})["ms"] for category in categories)
            floor = sum(row["bytes_by_entry"][entry] for entry in entries) / row["copy_bandwidth_tb_s"] / 1e9
            cells.append(f"{ms:.2f} ({floor:.2f})")
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    idle = [f"{_ladder_row(slices[name], '5', at)['profile']['idle_ms']:.2f}" for name, at in columns]
    return "\n".join([*lines, "| no kernel runs | " + " | ".join(idle) + " |"])


def _ladder_row(result: dict, rung: str, at: int) -> dict:
    [row] = [row for row in result["rows"] if (row["rung"], row["concurrency"]) == (rung, at)]
    return row


def _missing(result: dict) -> str:
    """Rungs of the ladder that the run did not come to."""
    have = {(row["rung"], row["concurrency"]) for row in result["rows"] if "us_warm" in row}
    left = {name: [str(at) for at in CONCURRENCY if (name, at) not in have] for name in result["rungs"]}
    told = [f"rung {name} at C = {', '.join(levels)}" for name, levels in left.items() if levels]
    return f" Not measured: {'; '.join(told)}." if told else ""


def _over(result: dict, rung: str, other: str | None, at: int) -> str:
    speeds = {row["rung"]: row["tokens_per_s"] for row in result["rows"] if row["concurrency"] == at and "us_warm" in row}
    return f"{speeds[rung] / speeds[other]:.2f}x" if rung in speeds and other in speeds else ""


def trace() -> str:
    """Seconds and memory of the trace reader."""
    result = json.loads((ROOT / "results" / "cpu" / "trace.json").read_text())
    [row] = [row for row in result["rows"] if row["file"] == "generated_200MB.json"]
    ours = row["deepdecode"]
    return (
        f"A {row['bytes'] / 1e6:.0f} MB trace of {ours['events']} events is read and accounted for in "
        f"{ours['total_s']:.1f} s and {ours['rss_mb']:.0f} MB on {result['device']['cores']} CPU cores "
        "(`results/cpu/trace.json`, with other readers beside it)."
    )


def quality() -> str:
    """What each precision choice costs, needles and drafts."""
    path = ROOT / "results" / "h200" / "quality.json"
    if not path.exists():
        return "The whole of it has not been run on a GPU yet."
    result = json.loads(path.read_text())
    base, contexts = result["rows"][0], result["contexts"]
    head = ["choice", "more bits/byte", "KL bits", "top 1", "experts", *(f"overlap, mass {context}" for context in contexts)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---|" * (len(head) - 1)]
    for row in result["rows"][1:]:
        cells = [row["choice"], f"{row['bits_per_byte'] - base['bits_per_byte']:+.4f}", f"{row['kl_bits']:.1e}"]
        cells += [f"{100 * row[what]:.1f} %" for what in ("top1", "experts")]
        seen = [row["contexts"].get(str(context)) for context in contexts]
        cells += [f"{100 * each['overlap']:.1f}, {100 * each['score_mass']:.1f} %" if each else "" for each in seen]
        lines.append("| " + " | ".join(cells) + " |")
    read = result["pieces"]
    part = "" if read["read"] == read["of"] else f", {read['read']} of {read['of']} pieces"
    lines += [
        "",
        f"fp32 needs {base['bits_per_byte']:.4f} bits per byte. {base['tokens']} tokens{part} on one "
        f"{result['device']['name']} ({result['date']}, `{result['command']}`{_note(result)}; `results/h200/quality.json`).",
    ]
    if result["needles"]:
        lines += ["", "| needles at | entries chosen by | tokens right | whole | bits/token |", "|---|---|---|---|---|"]
    for row in result["needles"]:
        cells = [str(row["context"]), row["choice"], *(f"{100 * row[what]:.1f} %" for what in ("tokens_right", "whole_right"))]
        lines.append("| " + " | ".join([*cells, f"{row['bits_per_token']:.2f}"]) + " |")
    if drafts := result["drafts"]:
        text = "the same text as" if drafts["same"] else "another text than"
        lines += [
            "",
            f"Drafts: {100 * drafts['acceptance']:.1f} % of the proposals are accepted over {drafts['tokens']} tokens, "
            f"{drafts['tokens_per_step']:.2f} tokens a step beside 1, {text} without ({drafts['texts']} texts in float32 on "
            f"{'a CPU' if drafts['device'] == 'cpu' else drafts['device']}).",
        ]
    return "\n".join(lines)


def linear() -> str:
    """A layer's sets beside their rivals, and the part of a copy's bandwidth that is reached."""
    result = _result("linear")
    rows = _by(result, "set", "ways", "T")
    sets = list(dict.fromkeys(key[:2] for key in rows))
    names = list(dict.fromkeys(row["implementation"] for row in result["rows"]))
    lines = _head("set", "T", "a copy of the bytes", *names)
    for name, ways in sets:
        for T in (1, 16, 64):
            found = rows[name, ways, T]
            lines.append(_row(_set(name, ways), T, f"{found['deepdecode']['floor_us']:.1f}", *_times(found, names)))
    lines += ["", f"{_source(result, 'linear')}", "", "How much of a copy's bandwidth deepdecode reaches, %:", ""]
    tokens = sorted({T for _, _, T in rows})
    lines += _head("set", *(f"T = {T}" for T in tokens))
    for name, ways in sets:
        parts = [rows[name, ways, T]["deepdecode"]["floor_fraction"] for T in tokens]
        lines.append(_row(_set(name, ways), *(f"{100 * part:.0f}" for part in parts)))
    return "\n".join(lines)


def indexer() -> str:
    """Scores and choice together."""
    result = _result("indexer")
    names = list(dict.fromkeys(row["implementation"] for row in result["rows"]))
    lines = _head("context", "T", "k", "floor", "times it", *names)
    for (entries, T, k), found in sorted(_by(result, "entries", "T", "topk").items()):
        # a table of decode sizes; the file has more
        if T <= 64:
            floor = found["deepdecode"]["floor_us"]
            floors = f"{_us(found['deepdecode']) / floor:.1f}x"
            lines.append(
                _row(f"{entries // 256}k" if entries < 1 << 18 else "1M", T, k, f"{floor:.2f}", floors, *_times(found, names))
            )
    return "\n".join([*lines, "", _source(result, "indexer")])


def mixing() -> str:
    """Hyper-connections' mixing product, its rivals and their errors."""
    result = _result("glue")
    lines = _head("mixing product", *(f"T = {T}" for T in CONCURRENCY), *(f"error at {T}" for T in CONCURRENCY))
    rows = [row for row in result["rows"] if row["op"] == "mhc_mix"]
    for name in dict.fromkeys(row["implementation"] for row in rows):
        found = [row for at in CONCURRENCY for row in rows if (row["implementation"], row["T"]) == (name, at)]
        lines.append(_row(name, *(f"{_us(row):.2f}" for row in found), *(f"{row['rel_err']:.1e}" for row in found)))
    return "\n".join(lines)


def glue() -> str:
    """The fused ops, and the same of torch ops in a graph."""
    result = _result("glue")
    lines = _head("op", *(f"T = {T}" for T in CONCURRENCY), *(f"torch ops, {T}" for T in CONCURRENCY), "error at most")
    plain = ("op", "implementation", "T", "rel_err", "stored_err", "bytes", "floor_us", "floor_fraction")
    found: dict[str, list[dict]] = {}
    for row in result["rows"]:
        if row["op"] != "mhc_mix":
            given = {key: row[key] for key in row if key not in plain and not key.startswith("us_") and row[key] is not False}
            keys = [key if value is True else f"{key} {value:g}" for key, value in given.items()]
            found.setdefault(", ".join([row["op"], *keys]), []).append(row)
    for name, rows in found.items():
        times = [f"{_us(row):.1f}" for row in rows], [f"{row['us_composed']:.0f}" for row in rows]
        lines.append(_row(name, *times[0], *times[1], f"{max(row['rel_err'] for row in rows):.0e}"))
    return "\n".join([*lines, "", _source(result, "glue")])


def moe(file: str = "moe") -> str:
    """The experts of a layer; the rivals' columns only where the file has any."""
    result = _result(file)
    names = list(dict.fromkeys(row["implementation"] for row in result["rows"]))
    judged = names[:2]
    lines = _head("rank", "T", "floor", "times it", *names, "error", *(f"of {name}" for name in judged[1:]))
    for (rank, T), found in sorted(_by(result, "rank", "T").items()):
        ours = found["deepdecode"]
        errors = [f"{found[name]['rel_err']:.1e}" if name in found else "" for name in judged]
        floors = f"{_us(ours) / ours['floor_us']:.2f}x"
        lines.append(_row(rank, T, f"{ours['floor_us']:.0f}", floors, *_times(found, names), *errors))
    return "\n".join([*lines, "", _source(result, file)])


def moe_rivals() -> str:
    """The run that came to the rivals of the experts."""
    return moe("moe-ab2a8b2")


def _result(name: str) -> dict:
    return json.loads((ROOT / "results" / "h200" / f"{name}.json").read_text())


def _by(result: dict, *keys: str) -> dict[tuple, dict[str, dict]]:
    """Rows that have a time, by these keys, then by implementation."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in result["rows"]:
        if "us_warm" in row:
            found.setdefault(tuple(row[key] for key in keys), {})[row["implementation"]] = row
    return found


def _us(row: dict) -> float:
    """Past L2; warm where the row has no other time."""
    return row.get("us_rotated", row["us_warm"])


def _times(found: dict[str, dict], names: list[str]) -> list[str]:
    return [f"{_us(found[name]):.1f}" if name in found else "" for name in names]


def _set(name: str, ways: int) -> str:
    return name if ways == 1 else f"{name}, of {ways} ranks"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*["---"] * len(cells))]


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _source(result: dict, name: str) -> str:
    copy = f"a copy runs at {result['copy_bandwidth_tb_s']:.2f} TB/s"
    return (
        f"Microseconds on one {result['device']['name']} ({result['date']}, commit {result['commit']}, `{result['command']}`; "
        f"`results/h200/{name}.json`); {copy}."
    )


def _note(result: dict) -> str:
    return f": {result['note']}" if "note" in result else ""


def _case(row: dict) -> tuple:
    return tuple(row[key] for key in ("T", "H", "window_keys", "extra_keys", "fmt"))


PAGES = {
    README: {"ladder": ladder, "attention": attention, "trace": trace},
    ROOT / "docs" / "attention.md": {"beside FlashMLA": beside_flash_mla},
    ROOT / "docs" / "ladder.md": {"stands": stands, "parts": parts},
    ROOT / "docs" / "quality.md": {"quality": quality},
    ROOT / "docs" / "linear.md": {"linear": linear, "mixing": mixing, "glue": glue},
    ROOT / "docs" / "indexer.md": {"indexer": indexer},
    ROOT / "docs" / "moe.md": {"moe": moe, "moe rivals": moe_rivals},
}


def written(page: Path) -> str:
    """A page's text with every block made anew."""
    text = page.read_text()
    for name, make in PAGES[page].items():
        begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->"
        assert text.count(begin) == text.count(end) == 1, f"{page.name} must have one block {name}"
        before, rest = text.split(begin)
        text = f"{before}{begin}{make()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page))
