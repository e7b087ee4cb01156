"""The trace generator of tools/, and the shared traces of other projects where they lie beside the checkout."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared" / "traces"
DATA = Path(__file__).parent / "data"


def load_tool(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_traces = load_tool(ROOT / "tools" / "make_traces.py")


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is missing: the traces of other projects are not part of this repository")
    return path
