"""`make engines-drift` on made releases: what holds, what moved and where to, and archives that are not what they should be."""

import importlib.util
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from deepdecode.plugins.report import Part, Plugin
from deepdecode.plugins.sources import Calls, Function, Value

_spec = importlib.util.spec_from_file_location(
    "tools_engines_drift", Path(__file__).parent.parent / "tools" / "engines_drift.py"
)
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

PLUGIN = Plugin(
    "sglang",
    "1.0",
    (
        Part("attention", "attention", ("sglang.a.attend",), (Function("a.py", "attend", ("q", "k")),)),
        Part("pages", "", ("sglang.a.split",), (Value("a.py", "WIDTH", "448"), Calls("b.py", "split", frozenset({"x"})))),
    ),
)
HOLDS = {
    "sglang/__init__.py": "",
    "sglang/a.py": "WIDTH = 448\ndef attend(q, k): ...\n",
    "sglang/b.py": "split(x=1)\n",
}
MOVED = {
    "sglang/__init__.py": "",
    "sglang/a.py": "WIDTH: int = 512\n",
    "sglang/ops/new.py": "def attend(q, k): ...\n",
    "sglang/b.py": "cut(x=1)\n",
}


@pytest.fixture(autouse=True)
def _one_plugin(monkeypatch):
    monkeypatch.setattr(tool, "plugin_of", lambda name: PLUGIN)


def wheel(folder, files):
    path = folder / "sglang-2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
        made.writestr("sglang-2.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sglang\nVersion: 2.0\n")
        made.writestr("sglang/kernel.so", "not unpacked")
    return path


def archive(folder, files, outside=False):
    path = folder / "sglang-2.0.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        entries = {f"sglang-2.0/{name}": text for name, text in files.items()} | {"sglang-2.0/PKG-INFO": "Version: 2.0\n"}
        for name, text in (entries | ({"../../escaped.py": ""} if outside else {})).items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            made.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("made", [wheel, archive])
def test_a_release_as_expected(made, tmp_path, capsys):
    assert tool.main(["--json", f"--source=sglang={made(tmp_path, HOLDS)}"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert (engine["engine"], engine["version"], engine["tested"]) == ("sglang", "2.0", "1.0")
    assert [(part["name"], part["moved"]) for part in engine["parts"]] == [("attention", []), ("pages", [])]


def test_what_moved_is_named(tmp_path, capsys):
    assert tool.main(["sglang", f"--source=sglang={wheel(tmp_path, MOVED)}"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "sglang 2.0, tested with 1.0",
        "  attention: moved",
        "    a.py: attend must be a function, got none; attend is in ops/new.py",
        "  pages: moved",
        "    a.py: WIDTH must be 448, got 512",
        "    b.py: split must be called, got no call",
    ]


def test_a_folder_and_an_archive_that_climbs_out(tmp_path, capsys):
    path = archive(tmp_path, HOLDS, outside=True)
    assert tool.main([f"--source=sglang={path}"]) == 0
    assert not list(tmp_path.parent.rglob("escaped.py")) and not (tmp_path / "escaped.py").exists()
    for name, text in HOLDS.items():
        target = tmp_path / "unpacked" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    assert tool.main([f"--source=sglang={tmp_path / 'unpacked'}"]) == 0
    assert "sglang of unknown version, tested with 1.0" in capsys.readouterr().out


def test_what_cannot_be_read(tmp_path, capsys, monkeypatch):
    assert tool.main([f"--source=sglang={tmp_path / 'none.whl'}"]) == 2
    assert "none.whl must be a wheel, an archive or a folder, got [Errno 2]" in capsys.readouterr().err
    for name in ("torn.whl", "torn.tar.gz"):
        (tmp_path / name).write_bytes(b"PK torn")
        assert tool.main([f"--source=sglang={tmp_path / name}"]) == 2
        assert f"{name} must be a wheel, an archive or a folder, got " in capsys.readouterr().err
    assert tool.main([f"--source=sglang={wheel(tmp_path, {'other/__init__.py': ''})}"]) == 2
    assert "sglang-2.0-py3-none-any.whl has no package sglang" in capsys.readouterr().err
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    assert tool.main(["sglang"]) == 2
    assert "engines-drift: sglang: pip could not download it: ERROR: " in capsys.readouterr().err


def test_bad_usage():
    for words in (["llama"], ["--source=sglang"], ["--source=llama=x"]):
        with pytest.raises(SystemExit) as stopped:
            tool.main(words)
        assert stopped.value.code == 2
