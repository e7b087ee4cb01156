"""What a wheel of this tree holds: the package with its data, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out], cwd=ROOT, check=True, capture_output=True
    )
    return zipfile.ZipFile(next(out.glob("deepdecode-*.whl")))


def test_every_module_and_data_file_is_in(wheel):
    package = ROOT / "deepdecode"
    want = {f"deepdecode/{p.relative_to(package).as_posix()}" for p in package.rglob("*") if p.is_file()}
    want = {name for name in want if "__pycache__" not in name}
    have = {name for name in wheel.namelist() if not name.startswith("deepdecode-")}
    assert have == want
    assert "deepdecode/data/tiny/tokenizer.json" in have


def test_metadata(wheel):
    [name] = [n for n in wheel.namelist() if n.endswith("METADATA")]
    text = wheel.read(name).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.10" in text
    # triton exists on Linux only; no engine's pins are ours
    assert any(line.startswith("Requires-Dist: triton") and "linux" in line for line in text.splitlines())
    assert not any("==" in line.split(";")[0] for line in text.splitlines() if line.startswith("Requires-Dist"))


def test_entry_point(wheel):
    [name] = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    assert "deepdecode = deepdecode.__main__:main" in wheel.read(name).decode()


def test_it_is_small(wheel):
    # the embedded model may have 20 MB, all else 2
    assert sum(i.compress_size for i in wheel.infolist()) < 22e6
