"""docs/profile.md says what the code does: every flag, every candidate with its numbers, every weight."""

import re
from pathlib import Path

from deepdecode.trace import compare, servebench
from deepdecode.trace.advise import catalogue
from deepdecode.trace.cli import COMMANDS, parser

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "profile.md").read_text()
SOURCE = (ROOT / "deepdecode" / "trace" / "compare.py").read_text()


def rows(start):
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith(f"| `{start}")
    ]


def test_every_flag_is_documented_with_its_severity():
    table = {row[0].strip("`"): row[1] for row in rows("") if row[1] in ("refuse", "warn", "note")}
    assert {code for code, severity in table.items() if severity == "refuse"} == set(compare.REFUSALS)
    raised = set(re.findall(r'flag\(\s*"([a-z-]+)",\s*"(refuse|warn|note)"', SOURCE))
    assert raised <= set(table.items())
    both = {
        "phase-mismatch",
        "batch-mismatch",
        "gpu-mismatch",
        "precision-mismatch",
        "gpu-fell-step-flat",
        "gpu-rose-step-flat",
    }
    assert {code for code, _ in raised} | both == set(table)
    assert all(f"`{code}`" in TEXT for code in servebench.REFUSALS)


def test_every_candidate_is_documented_with_its_numbers():
    table = {row[0].strip("`"): row[3:] for row in rows("") if len(row) == 7}
    entries = catalogue().entries
    assert table == {e.id: [f"{e.k:g}", e.confidence, e.effort, e.risk] for e in entries}
    for kind, weights in catalogue().weights.items():
        said = re.search(rf"{kind} \((.*?)\)", TEXT)
        assert said is not None
        assert said[1] == ", ".join(f"{word} {value:g}" for word, value in weights.items())


def test_every_option_named_exists():
    options = {option for command in COMMANDS for action in parser(command)._actions for option in action.option_strings}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", re.sub(r"`(?:nsys|sglang|vllm|pip)[^`]*`|`--cuda[^`]*`", "", TEXT)))
    assert named <= options
    assert {"--decide", "--redact", "--why", "--rules", "--allow", "--findings"} <= named


def test_paths_exist():
    for path in re.findall(r"(?:deepdecode|tests)/[\w/.]+\.\w+(?:\.gz)?", TEXT):
        assert (ROOT / path).exists(), path
