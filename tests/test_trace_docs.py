"""docs/profile.md says what the code does: every flag, every candidate with its numbers, every weight."""

import re
import shlex
from pathlib import Path

import pytest

from deepdecode.__main__ import main
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


HELP = "\n".join(parser(command).format_help() for command in COMMANDS)


@pytest.mark.parametrize("text", [TEXT, HELP], ids=["docs", "help"])
def test_examples_of_shipped_files_run(text, tmp_path, monkeypatch, capsys):
    """Each command has at least one; exit 1 is a slower step, which only that pair shows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    lines = text.replace("\\\n", " ").splitlines()
    examples = [shlex.split(line)[1:] for line in lines if re.match(r"\s*deepdecode .*tests/data", line)]
    assert {argv[0] for argv in examples} == set(COMMANDS)
    for argv in examples:
        slower = any("mma" in word for word in argv) and any("splitk" in word for word in argv)
        assert main(argv) == slower, argv
    assert "error" not in capsys.readouterr().err


def test_paths_exist():
    for path in re.findall(r"(?:deepdecode|tests)/[\w/.]+\.\w+(?:\.gz)?", TEXT):
        assert (ROOT / path).exists(), path
