"""The benches' command lines: `deepdecode bench NAME`, and `python -m` with a bench's module, as scripts have it."""

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepdecode.__main__ import main
from deepdecode.bench import __main__ as attention
from deepdecode.bench import cells, tune
from deepdecode.bench.files import read_results
from deepdecode.bench.options import BENCHES
from deepdecode.cli import parser
from deepdecode.errors import HintedError, told

MODULES = [bench.module.removesuffix(".__main__") for bench in BENCHES.values()]
COMMON = ["--peers", "--out", "x", "--commit", "abc1234", "--seconds", "1.5"]
ASKED = {"peers": True, "out": Path("x"), "commit": "abc1234", "seconds": 1.5}
PLAIN = {"peers": False, "out": Path("results"), "commit": None, "seconds": 1e9}
CELLS = ["--tokens", "1", "16", "--only", "deepdecode", "--fresh"], {"tokens": [1, 16], "only": "deepdecode", "fresh": True}
OWN = dict.fromkeys(("linear", "moe", "indexer", "glue"), CELLS) | {
    "attention": (
        ["--only", "flash_mla", "--fresh", "--sweep", "--fit"],
        {"only": "flash_mla", "fresh": True, "sweep": True, "fit": True, "plot": None},
    ),
    "engines": (["--resume", "--check", "1/4"], {"resume": True, "check": (1, 4), "table": None}),
}


def exit_of(monkeypatch, module, *words):
    """The exit code of `python -m module words`, run here: torch is there already."""
    monkeypatch.setattr(sys, "argv", [module, *words])
    entry = f"{module}.__main__" if module == "deepdecode.bench" else module
    # as a new process has it
    monkeypatch.delitem(sys.modules, entry, raising=False)
    with pytest.raises(SystemExit) as left:
        runpy.run_module(module, run_name="__main__")
    return left.value.code


def given(monkeypatch, name):
    """The options that a bench is run with, kept instead of run."""
    kept = []
    monkeypatch.setattr(f"{BENCHES[name].module}.command", lambda options: kept.append(vars(options)) or 0)
    return kept


@pytest.mark.parametrize("name", BENCHES)
def test_the_command_gives_each_bench_its_options(monkeypatch, name):
    kept = given(monkeypatch, name)
    words, own = OWN[name]
    assert main(["bench", name, *COMMON, *words]) == 0
    assert main(["bench", name]) == 0
    nothing = {key: False if isinstance(value, bool) else None for key, value in own.items()}
    assert kept == [{"bench": name, **ASKED, **own}, {"bench": name, **PLAIN, **nothing}]


@pytest.mark.parametrize("name", BENCHES)
def test_a_module_has_the_commands_options(monkeypatch, name):
    module = importlib.import_module(BENCHES[name].module)
    kept = given(monkeypatch, name)
    words, own = OWN[name]
    assert module.main([*(["attention"] if name == "attention" else []), *COMMON, *words]) == 0
    assert kept == [ASKED | own | ({"op": "attention"} if name == "attention" else {})]


def test_without_a_name_it_is_attention(monkeypatch):
    kept = given(monkeypatch, "attention")
    assert main(["bench"]) == 0
    assert main(["bench", "--peers"]) == 0
    assert [(options["bench"], options["peers"]) for options in kept] == [("attention", False), ("attention", True)]


@pytest.mark.parametrize("name", BENCHES)
def test_help_has_examples_that_are_read(capsys, name):
    assert main(["bench", name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: deepdecode bench {name} [-h]")
    assert all(word in text for word in OWN[name][0] if word.startswith("--"))
    examples = [line.split("deepdecode ")[1].split() for line in text.split("examples:\n")[1].splitlines()]
    assert len(examples) >= 2
    for words in examples:
        assert words[:2] == ["bench", name]
        assert parser("bench").parse_args(words[1:]).bench == name


def test_help_names_the_benches(capsys):
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text.replace("\n", " ") for name in BENCHES) and "examples:" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "error: bench: argument BENCH: invalid choice: 'nope'"),
        (
            ["linear", "--sweep"],
            "error: bench linear: unrecognized arguments: --sweep\n\nhint: deepdecode bench linear --help\n",
        ),
        (["--tokens", "1"], "error: bench attention: unrecognized arguments: --tokens 1\n"),
        (["moe", "--tokens", "many"], "error: bench moe: argument --tokens: invalid int value: 'many'"),
        (["engines", "--check", "4/4"], "error: bench engines: argument --check: must be I/N with I below N, got 4/4\n"),
        (["engines", "--check", "one"], "error: bench engines: argument --check: must be I/N with I below N, got one\n"),
        (["glue", "--see", "1"], "error: bench glue: unrecognized arguments: --see 1\n"),
    ],
)
def test_what_is_not_understood(capsys, words, said):
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("name", BENCHES)
def test_the_command_without_a_gpu(monkeypatch, capsys, tmp_path, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", name, "--peers", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: bench: a CUDA device must be present, got none\n"
    assert not os.listdir(tmp_path)


def test_a_fit_needs_no_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "attention", "--fit", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"error: bench: {tmp_path / 'h200'} must hold launches, got none"
    assert told[2] == "hint: deepdecode bench attention --sweep measures some"


def test_words_and_help_wait_for_no_torch():
    lines = "['bench', 'linear', '--help']", "['bench', 'moe', '--x']", "['bench', '--plot', 'none.json']"
    code = f"import sys; from deepdecode.__main__ import main; {'; '.join(f'main({words})' for words in lines)}"
    code += "; print({'torch', 'triton'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("usage:") and done.stdout.endswith("set()\n")
    assert "none.json: No such file" in done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_without_a_gpu_it_is_one_sentence(monkeypatch, capsys, tmp_path, module):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["--peers", "--seconds", "13", "--out", str(tmp_path), "--commit", "abc1234"]
    words += ["--resume"] if module.endswith("engines") else []
    words = ["attention", *words] if module == "deepdecode.bench" else words
    assert exit_of(monkeypatch, module, *words) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "error: bench: a CUDA device must be present, got none\n")
    assert not os.listdir(tmp_path)


def test_an_error_as_the_command_tells_it(monkeypatch, capsys):
    def refuse():
        raise HintedError("bench: x must be y, got z", "try y")

    assert told(lambda: 1) == 1
    assert told(refuse) == 2
    assert capsys.readouterr().err == "error: bench: x must be y, got z\n\nhint: try y\n"
    monkeypatch.setenv("DEEPDECODE_TRACEBACK", "1")
    with pytest.raises(HintedError):
        told(refuse)


RESULTS = sorted((Path(__file__).parents[1] / "results" / "h200").glob("[ag]*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_run_can_go_on_with_what_is_here(path):
    """The repository's own result files have the form that a bench asks for."""
    form = {"attention_sweep": tune.ROW, "glue": cells.ROW}.get(path.stem, attention.ROW)
    assert read_results(path, facts=cells.FACTS if path.stem == "glue" else None, row=form)["rows"]
    with pytest.raises(ValueError, match=r"must have nothing in every row, got none in row 1$"):
        read_results(path, row=form | {"nothing": str})
