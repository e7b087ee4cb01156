"""Hold the plug-ins' tables against the newest releases of the engines: `make engines-drift`.

    python tools/engines_drift.py [ENGINE ...] [--json] [--source ENGINE=PATH ...]

pip downloads each engine's newest release that this Python takes, a wheel or (vLLM) its source archive. Nothing is installed,
and nothing of an engine runs: where pip asks an archive for its metadata, a stand-in for its build backend answers for it.
--source takes a wheel, an archive or an unpacked folder instead.

Exit 0: every table holds. 1: something moved, and what is named. 2: bad usage, or a release could not be read.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepdecode.plugins.report import ENGINES, Plugin, plugin_of
from deepdecode.plugins.sources import Entry, problems

# vLLM's wheels are half a GB of kernels; its archive is its sources
FROM_SOURCE = ("vllm",)
_BACKEND = """
import email
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    import os
    told = email.message_from_string(open("PKG-INFO", encoding="utf-8").read())
    made = f"{told['Name'].replace('-', '_')}-{told['Version']}.dist-info"
    os.makedirs(os.path.join(folder, made))
    with open(os.path.join(folder, made, "METADATA"), "w", encoding="utf-8") as file:
        file.write(f"Metadata-Version: 2.1\\nName: {told['Name']}\\nVersion: {told['Version']}\\n")
    return made
def build_wheel(*args, **kwargs):
    raise RuntimeError("nothing is built")
"""


class DriftError(Exception):
    """A release that could not be had or read."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(ENGINES)} (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--source", action="append", default=[], metavar="ENGINE=PATH", help="check this, download nothing")
    asked = parser.parse_args(argv)
    given = dict(text.split("=", 1) for text in asked.source if "=" in text)
    if len(given) < len(asked.source) or not {*asked.engines, *given} <= set(ENGINES):
        parser.error(f"engines must be of {', '.join(ENGINES)}, and sources ENGINE=PATH")
    names = asked.engines or (list(given) if given else list(ENGINES))
    found = []
    for name in names:
        print(f"{name}: {given.get(name, 'its newest release')}", file=sys.stderr)
        try:
            found.append(check(plugin_of(name), given.get(name)))
        except DriftError as error:
            print(f"engines-drift: {name}: {error}", file=sys.stderr)
            return 2
    print(json.dumps({"schema": 1, "engines": found}, indent=1) if asked.json else text_of(found))
    return 1 if any(part["moved"] for engine in found for part in engine["parts"]) else 0


def check(plugin: Plugin, source: str | None = None) -> dict[str, Any]:
    """What of the plug-in's tables does not hold for a release.

    Returns:
        engine, version, tested; parts: of each its name and moved, a sentence for each entry that does not hold.

    Raises:
        DriftError: the release cannot be had, or is no package of this engine.
    """
    with tempfile.TemporaryDirectory() as work:
        archive = Path(source) if source else download(plugin.engine, Path(work))
        try:
            package, version = unpack(archive, plugin.engine, Path(work) / "unpacked")
        except (OSError, zipfile.BadZipFile, tarfile.TarError) as error:
            raise DriftError(f"{archive.name} must be a wheel, an archive or a folder, got {error}") from None
        parts = []
        for part in plugin.parts:
            moved = [line for entry in part.table for line in _told(package, entry)]
            parts.append({"name": part.name, "replaces": list(part.replaces), "moved": moved})
    return {"engine": plugin.engine, "version": version, "tested": plugin.tested, "parts": parts}


def _told(package: Path, entry: Entry) -> Iterator[str]:
    for problem in problems(package, (entry,)):
        gone = problem.endswith(("got none", "got no call"))
        places = [place for place in defined(package, entry.name) if place != entry.file] if gone else []
        yield problem + (f"; {entry.name.split('.')[-1]} is in {', '.join(places[:3])}" if places else "")


def defined(package: Path, name: str) -> list[str]:
    """The files that define the last word of a dotted name as a function, a class or a value."""
    word = re.escape(name.split(".")[-1])
    definition = re.compile(rf"^\s*(?:(?:async )?def {word}\(|class {word}\b|{word}(?::[^=\n]+)? = )", re.MULTILINE)
    files = sorted(package.rglob("*.py"))
    return [str(file.relative_to(package)) for file in files if definition.search(file.read_text("utf-8", "replace"))]


def download(engine: str, folder: Path) -> Path:
    """The newest release, by pip."""
    backend = folder / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").write_text("")
    (backend / "build_meta.py").write_text(_BACKEND)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    form = ["--no-binary", engine, "--no-build-isolation"] if engine in FROM_SOURCE else ["--only-binary", engine]
    inside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    environment = inside | ({"PYTHONPATH": str(backend.parent)} if engine in FROM_SOURCE else {})
    done = subprocess.run(
        [*command, *form, "--dest", str(folder / "down"), engine], env=environment, capture_output=True, text=True, check=False
    )
    archives = sorted((folder / "down").glob("*")) if done.returncode == 0 else []
    if len(archives) != 1:
        lines = [line for line in done.stderr.strip().splitlines() if "error" in line.lower()] or ["no file came"]
        raise DriftError(f"pip could not download it: {lines[-1]}")
    return archives[0]


def unpack(source: Path, engine: str, folder: Path) -> tuple[Path, str]:
    """The folder of the package in a wheel, a source archive or a folder, and the release's version.

    Only Python files and metadata are written, and nothing outside `folder`.
    """
    if source.is_dir():
        folder = source
    elif source.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(source) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if _wanted(name)])
    else:
        with tarfile.open(source) as archive:
            for member in archive.getmembers():
                target = folder / member.name
                if member.isfile() and _wanted(member.name) and folder.resolve() in target.resolve().parents:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    data = archive.extractfile(member)
                    target.write_bytes(data.read() if data else b"")
    packages = [path.parent for path in (*folder.glob(f"{engine}/__init__.py"), *folder.glob(f"*/{engine}/__init__.py"))]
    packages += [path.parent for path in folder.glob(f"*/src/{engine}/__init__.py")]
    if not packages:
        raise DriftError(f"{source.name} has no package {engine}")
    told = [*folder.glob(f"{engine}-*.dist-info/METADATA"), *folder.glob("*/PKG-INFO"), *folder.glob("PKG-INFO")]
    version = re.search(r"^Version: (\S+)", told[0].read_text("utf-8", "replace"), re.MULTILINE) if told else None
    return packages[0], version[1] if version else "of unknown version"


def _wanted(name: str) -> bool:
    return name.endswith((".py", "PKG-INFO", ".dist-info/METADATA"))


def text_of(found: list[dict[str, Any]]) -> str:
    lines = []
    for engine in found:
        lines.append(f"{engine['engine']} {engine['version']}, tested with {engine['tested']}")
        for part in engine["parts"]:
            lines.append(f"  {part['name']}: " + ("moved" if part["moved"] else "holds"))
            lines += [f"    {line}" for line in part["moved"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
