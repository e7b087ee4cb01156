"""Install, upgrade, roll back and uninstall beside an engine, as docs/engines.md says; what it loads after each of them."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# of each engine: what one of its processes does first, what switches us on, and the start of our line
ENGINES = {
    "sglang": (
        """
import stand_ins
stand_ins.install()
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.kernels.ops.attention.flash_mla_sm120 as source
replaced = hasattr(source.flash_mla_with_kvcache_sm120, "__wrapped__")
""",
        {"SGLANG_SM120_MMA_FLASHMLA": "1"},
        "deepdecode in SGLang 0.5.23: on: attention ",
    ),
    "vllm": (
        """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
replaced = ModelRegistry.models["DeepseekV4ForCausalLM"].module_name == "deepdecode.plugins.vllm_model"
""",
        {"DEEPDECODE_VLLM": "indexer"},
        "deepdecode in vLLM 0.32.0: on: indexer; ",
    ),
}
# one environment holds one engine
ENGINE = next((name for name in ENGINES if importlib.util.find_spec(name)), "")
pytestmark = pytest.mark.skipif(not ENGINE, reason="no engine is installed: make test-engines")
# what a process of the engine then has of us
LOADED = """
import json, logging, sys
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("deepdecode").addHandler(handler)
STARTED
from importlib import metadata
try:
    version = metadata.version("deepdecode")
except metadata.PackageNotFoundError:
    version = None
ours = sorted(name for name in sys.modules if name.split(".")[0] == "deepdecode")
mark = hasattr(sys.modules.get("deepdecode"), "mark")
print(json.dumps({"version": version, "said": lines, "replaced": replaced, "ours": ours, "mark": mark}))
"""
OLDER = "0.0.1"


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Of an older version, of this tree, and of this tree with another line and the same version."""
    folder = tmp_path_factory.mktemp("wheels")
    made = []
    for version, mark in ((OLDER, ""), (None, ""), (None, "mark = True\n")):
        tree = folder / f"{version or 'this'}{len(mark)}"
        shutil.copytree(ROOT / "deepdecode", tree / "deepdecode", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        if version:
            source = tree / "deepdecode" / "__init__.py"
            source.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', source.read_text()))
        with open(tree / "deepdecode" / "__init__.py", "a") as file:
            file.write(mark)
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tree / "kept", tree)
        made += (tree / "kept").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A venv that sees this one's packages, without the checkout that is installed here."""
    folder = tmp_path_factory.mktemp("install")
    engines = folder / "engines"
    engines.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.lower().strip("_").startswith(("deepdecode", "editable__")) and path.suffix != ".pth":
            (engines / path.name).symlink_to(path)
    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    (site / "engines.pth").write_text(f"{engines}\n")
    return python, site


def test_what_the_engine_pins_is_what_we_take():
    """Nothing that the engine's own metadata asks for in one version is refused by ours, and pip has nothing to change."""
    ours = {Requirement(text).name: Requirement(text) for text in metadata.requires("deepdecode") or () if "extra" not in text}
    assert {"torch", "triton", "numpy"} <= set(ours)
    assert not any(wanted.operator in ("==", "~=", "<", "<=") for one in ours.values() for wanted in one.specifier)
    name = next(name for name in (ENGINE, f"{ENGINE}-cpu") if _installed(name))
    pinned = [Requirement(text) for text in metadata.requires(name) or ()]
    pinned = [(one.name, wanted.version) for one in pinned for wanted in one.specifier if wanted.operator == "=="]
    assert pinned
    for name, version in pinned:
        if name in ours and "*" not in version:
            assert ours[name].specifier.contains(version, prereleases=True), f"{ours[name]} beside {name} {version}"


def _installed(name):
    return any(found.name == name for found in metadata.distributions())


def test_install_upgrade_roll_back_uninstall(wheels, environment):
    python, site = environment
    older, newer, marked = wheels
    started, switch, line = ENGINES[ENGINE]
    clean = {"PATH": str(python.parent), "HOME": str(site), "PYTHONPATH": str(Path(__file__).parent), **switch}

    def pip(*words):
        run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words)

    def loaded():
        # not in the checkout, whose package Python would take
        return json.loads(run(python, "-c", LOADED.replace("STARTED", started), env=clean, cwd=site).splitlines()[-1])

    absent = loaded()
    assert absent == {"version": None, "said": [], "replaced": False, "ours": [], "mark": False}
    before = sorted(path.name for path in site.iterdir())
    current = newer.name.split("-")[1]
    back = "install --force-reinstall"
    steps = [("install", older, OLDER), ("install --upgrade", newer, current), (back, marked, current), (back, newer, current)]
    for words, wheel, version in [*steps, (back, older, OLDER)]:
        pip(*words.split(), "--no-deps", "--no-index", wheel)
        found = loaded()
        assert found["version"] == version and found["replaced"] and found["mark"] == (wheel == marked)
        assert len(found["said"]) == 1 and found["said"][0].startswith(line)
    pip("uninstall", "--yes", "deepdecode")
    assert loaded() == absent
    assert sorted(path.name for path in site.iterdir()) == before
