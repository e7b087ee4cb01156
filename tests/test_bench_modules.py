"""Each bench run by itself, as `python -m deepdecode.bench...`: the command lines that scripts use, and how it refuses."""

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

from deepdecode.bench import __main__ as attention
from deepdecode.bench import cells, tune
from deepdecode.bench.files import read_results
from deepdecode.errors import HintedError, told

MODULES = ["deepdecode.bench", *(f"deepdecode.bench.{name}" for name in ("linear", "moe", "indexer", "glue", "engines"))]


def exit_of(monkeypatch, module, *words):
    """The exit code of `python -m module words`, run here: torch is there already."""
    monkeypatch.setattr(sys, "argv", [module, *words])
    entry = f"{module}.__main__" if module == "deepdecode.bench" else module
    # as a new process has it
    monkeypatch.delitem(sys.modules, entry, raising=False)
    with pytest.raises(SystemExit) as left:
        runpy.run_module(module, run_name="__main__")
    return left.value.code


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
