"""README's paths exist, its commands and options are real, and its variables are read somewhere."""

import argparse
import importlib.util
import re
from pathlib import Path

import pytest

from deepdecode.cli import COMMANDS, parser
from deepdecode.trace import cli as trace

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]


def text_of(page):
    return (ROOT / page).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    """Every word in backticks that looks like a path of this repository is one."""
    known = {"results/<card>/<what>.json", "deepdecode/ops/x.py", "tests/test_x.py", "deepdecode/kernels/x.py"}
    words = set(re.findall(r"`((?:deepdecode|tests|docs|tools|results)/[\w./<>*-]*|[A-Z]+\.md|LICENSE)`", text_of(page)))
    missing = sorted(w for w in words - known if not (ROOT / w).exists() and "PROFILE_FINDINGS" not in w)
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page):
    used = re.findall(r"^(?:\$ )?deepdecode ((?:[a-z]+)|--version)(.*)$", text_of(page), re.M)
    for command, rest in used:
        if command == "--version":
            continue
        assert command in COMMANDS or command in trace.COMMANDS, f"{page}: deepdecode {command}"
        known = parser(command) if command in COMMANDS else trace.parser(command)
        for words in [action.choices for action in known._actions if action.nargs == argparse.PARSER]:
            # of a command of several words, the options of the last one
            known = words[rest.split()[0]]
        options = {option for action in known._actions for option in action.option_strings}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= options, f"{page}: deepdecode {command}{rest}"


def test_readme_has_commands():
    assert len(re.findall(r"^deepdecode ", text_of("README.md"), re.M)) >= 5


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", text_of(page), re.M)) <= {(t, "") for t in targets} | {
            ("", t) for t in targets
        }, page


def test_variables_are_read():
    sources = "".join(p.read_text() for p in (ROOT / "deepdecode").rglob("*.py"))
    for name in re.findall(r"`(DEEPDECODE_[A-Z]+)", text_of("README.md")):
        assert f'"{name}"' in sources, name


def test_ci_runs_the_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_results_are_the_files():
    """Every figure of README's and docs/quality.md's results comes from results/, by `python tools/readme_tables.py`."""
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "tools" / "readme_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for page in tables.PAGES:
        assert tables.written(page) == page.read_text()


def test_pictures_exist():
    for page in PAGES:
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text_of(page)):
            assert (ROOT / page).parent.joinpath(picture).exists(), f"{page}: {picture}"
