"""Write README's tables of results from the files in results/: `python tools/readme_tables.py`.

A block stands between `<!-- NAME begin -->` and `<!-- NAME end -->`; tests/test_readme.py holds it against the files.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TOKENS = (1, 8, 16, 64, 128)
WHO = ("deepdecode", "deepdecode portable", "flash_mla", "sglang dual-scope", "sglang fallback", "deepdecode rung 0")


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


def _case(row: dict) -> tuple:
    return tuple(row[key] for key in ("T", "H", "window_keys", "extra_keys", "fmt"))


BLOCKS = {"attention": attention, "trace": trace}


def written(text: str) -> str:
    """`text` with every block made anew."""
    for name, make in BLOCKS.items():
        begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->"
        assert text.count(begin) == text.count(end) == 1, f"README must have one block {name}"
        before, rest = text.split(begin)
        text = f"{before}{begin}{make()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
