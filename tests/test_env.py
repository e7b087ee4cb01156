"""`deepdecode env` on broken machines, what it keeps to itself, and the support table against its evidence."""

import getpass
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepdecode import env, support
from deepdecode.__main__ import main
from deepdecode.cards import CARDS
from deepdecode.env import hidden, read_env
from deepdecode.testing.compiled import SHARED_LIMIT

ROOT = Path(__file__).parent.parent
ARCHS = {card.arch for card in CARDS}

_spec = importlib.util.spec_from_file_location("tools_support", ROOT / "tools" / "support.py")
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

FAKE_TORCH = """
from types import SimpleNamespace as N
import atexit
print("a banner that some builds print")
atexit.register(print, "and a farewell")
version = N(cuda="12.8")
def properties(n):
    return N(name=["NVIDIA GeForce RTX 4090", "Quadro RTX 8000"][n], major=[8, 7][n], minor=[9, 5][n],
             multi_processor_count=[128, 72][n], total_memory=[24, 48][n] << 30, shared_memory_per_block_optin=99 << 10)
cuda = N(is_available=lambda: True, device_count=lambda: 2, get_device_properties=properties)
"""


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch, tmp_path):
    """No GPU tool, and no variable of ours."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in [name for name in os.environ if name.startswith(("DEEPDECODE_", "TRITON_", "CUDA_", "PYTORCH_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def torch_is(monkeypatch, tmp_path):
    """Makes every new process import this source as torch."""

    def put(source):
        folder = tmp_path / "fake"
        folder.mkdir()
        (folder / "torch.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return put


def nvidia_smi_says(tmp_path, text):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!{sys.executable}\nprint('''{text}''')\n")
    tool.chmod(0o755)


def test_two_gpus(torch_is, capsys):
    torch_is(FAKE_TORCH)
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert found["torch"] == {"works": True, "cuda": "12.8", "problems": []}
    first, second = found["gpus"]
    assert first == {
        "name": "NVIDIA GeForce RTX 4090",
        "arch": 89,
        "sms": 128,
        "memory_gib": 24.0,
        "shared_kib": 99,
        "kernels": first["kernels"],
    }
    assert first["kernels"]["attention"].startswith("kernel mma (")
    assert second["kernels"] == {"attention": "reference: sm_75 has no bfloat16 tensor cores; sm_80 is the first that has"}
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "GPU 0: NVIDIA GeForce RTX 4090, sm_89, 128 SMs, 24.0 GiB\n  attention: kernel mma (" in out
    assert "GPU 1: Quadro RTX 8000, sm_75, 72 SMs, 48.0 GiB\n  attention: reference: sm_75 has no" in out


def test_the_reference_is_asked_for(torch_is, monkeypatch):
    torch_is(FAKE_TORCH)
    monkeypatch.setenv("DEEPDECODE_REFERENCE", "1")
    found = read_env()
    assert found["gpus"][0]["kernels"] == {"attention": "reference: DEEPDECODE_REFERENCE=1"}
    assert found["variables"] == {"DEEPDECODE_REFERENCE": "1"}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise ModuleNotFoundError('no', name='torch')", "torch is not installed"),
        ("import of_course_not", "torch does not start: ModuleNotFoundError: No module named 'of_course_not'"),
        ("raise OSError('libcudart.so.12: cannot open')", "torch does not start: OSError: libcudart.so.12: cannot open"),
        ("import os; os.abort()", "torch does not start: its process died of signal 6"),
        ("raise SystemExit(3)", "torch does not start: no message"),
        ("import os; os._exit(0)", "torch does not start: no message"),
        ("", "torch does not start: AttributeError: module 'torch' has no attribute 'version'"),
        (
            FAKE_TORCH + "def no(n): raise RuntimeError('driver too old')\ncuda.get_device_properties = no",
            "torch does not work: RuntimeError: driver too old",
        ),
        (
            FAKE_TORCH + "import warnings\ndef no(): warnings.warn('CUDA initialization: too old')\ncuda.is_available = no",
            "torch is built for CUDA and finds no GPU that it can use\nCUDA initialization: too old",
        ),
        (FAKE_TORCH + "version.cuda = None", "torch is built without CUDA, so it runs on the CPU only"),
    ],
    ids=["missing", "half", "library", "abort", "exit", "silent", "empty", "driver", "warning", "cpu"],
)
def test_torch_missing_or_broken(torch_is, capsys, source, problem):
    torch_is(source)
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert f"\n{problem}\n" in out
    assert "GPUs: none found, the references run on the CPU" in out
    # the rest does not need torch
    assert all(f"sm_{arch} " in out for arch in ARCHS)


def test_torch_that_hangs(torch_is, monkeypatch):
    torch_is("import time; time.sleep(60)")
    monkeypatch.setattr(env, "TORCH_SECONDS", 1)
    assert read_env()["torch"]["problems"] == ["torch does not start within 1 s"]


def test_nobody_at_home(torch_is, monkeypatch, capsys):
    """A user without a home and a name, as in a container, and an interpreter that does not know where it is."""
    torch_is("raise OSError('/opt/x.so')")
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4242)
    assert main(["env"]) == 0
    assert "\ntorch does not start: OSError: <path>\n" in capsys.readouterr().out
    monkeypatch.setattr(sys, "executable", "/none/python")
    assert main(["env"]) == 0
    assert "torch was not asked: [Errno 2] No such file or directory: <path>" in capsys.readouterr().out


def test_the_real_torch():
    import torch

    said = env.ask_torch()
    assert said["works"]
    assert said["cuda"] == torch.version.cuda
    assert len(said["gpus"]) == torch.cuda.device_count()


def test_a_gpu_that_torch_does_not_see(torch_is, tmp_path):
    torch_is(FAKE_TORCH + "version.cuda = None")
    nvidia_smi_says(tmp_path, "580.65.06, NVIDIA H200, 9.0, 143771\n580.65.06, NVIDIA GB10, 12.1, [N/A]\nrubbish")
    found = read_env()
    assert found["driver"] == "580.65.06"
    assert [(gpu["name"], gpu["arch"], gpu["memory_gib"]) for gpu in found["gpus"]] == [
        ("NVIDIA H200", 90, 140.4),
        ("NVIDIA GB10", 121, None),
    ]
    assert {gpu["kernels"]["attention"] for gpu in found["gpus"]} == {"reference: torch does not see this GPU"}
    assert "GPU 1: NVIDIA GB10, sm_121\n" in env.env_text(found)


@pytest.mark.parametrize(("triton", "kernel"), [("3.5.1", "mma"), ("3.6.0", "narrow"), ("3.10.0+git1", "narrow")])
def test_hopper_needs_a_triton_with_gluon(torch_is, monkeypatch, triton, kernel):
    torch_is(FAKE_TORCH.replace("[8, 7]", "[9, 7]").replace("[9, 5]", "[0, 5]").replace("99 << 10", "227 << 10"))
    known = env._version
    monkeypatch.setattr(env, "_version", lambda name: triton if name == "triton" else known(name))
    assert read_env()["gpus"][0]["kernels"]["attention"].startswith(f"kernel {kernel} (")


def test_no_triton(torch_is, monkeypatch):
    torch_is(FAKE_TORCH)
    known = env._version
    monkeypatch.setattr(env, "_version", lambda name: None if name == "triton" else known(name))
    found = read_env()
    assert found["gpus"][0]["kernels"] == {"attention": "reference: Triton is not installed"}
    assert ", no triton\n" in env.env_text(found)


def test_hides_who_and_where():
    home, user, host = str(Path.home()), getpass.getuser(), platform.node()
    for text in (
        "OSError: /home/alice/lib/libtorch.so: cannot open",
        "in '/Users/Alice Smith/venv/lib/x.py', line 3",
        r"C:\Users\alice\torch.dll is missing",
        r"\\server\alice\share",
        "~/alice/x",
        f"by {user} on {host}",
        f"{home}/alice",
        "file:///srv/alice",
    ):
        shown = hidden(text)
        assert "alice" not in shown.lower(), shown
        assert not {user, host} & set(re.findall(r"[\w.-]+", shown)), shown
    for text in ("CUDA 12.8, 3/4 of it", "n/a", "libcudart.so.12: cannot open", "a: b", "sm_90 and/or sm_80"):
        assert hidden(text) == text


def test_output_names_no_one(torch_is, monkeypatch, capsys, tmp_path):
    torch_is("raise OSError('/home/alice/venv/libtorch.so: cannot open')")
    monkeypatch.setenv("DEEPDECODE_PEERS", "alice")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f3e1c5a-alice")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/home/alice/ptxas")
    for words in ([], ["--json"]):
        assert main(["env", *words]) == 0
        out = capsys.readouterr().out
        assert "<path>: cannot open" in out
        for secret in ("alice", str(tmp_path), str(ROOT), str(Path.home()), sys.prefix):
            assert secret not in out
        found = set(re.findall(r"[\w.-]+", out))
        assert not found & {getpass.getuser(), platform.node()}
    assert main(["env", "--paths"]) == 0
    out = capsys.readouterr().out
    assert "DEEPDECODE_PEERS=alice" in out
    assert "/home/alice/venv/libtorch.so: cannot open" in out
    assert f"deepdecode  {ROOT / 'deepdecode'}" in out


def test_variables(torch_is, monkeypatch):
    torch_is("")
    for name, value in {
        "DEEPDECODE_STRIKT": "1",
        "DEEPDECODE_LOG": "debug",
        "DEEPDECODE_CHECK": "",
        "DEEPDECODE_SGLANG": "attention, indexer",
        "CUDA_VISIBLE_DEVICES": "0,3",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "HOME_OF_SOMEBODY": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert read_env()["variables"] == {
        "CUDA_VISIBLE_DEVICES": "0,3",
        "DEEPDECODE_CHECK": "",
        "DEEPDECODE_LOG": "debug",
        "DEEPDECODE_SGLANG": "attention, indexer",
        "DEEPDECODE_STRIKT": "1 (not a variable of deepdecode)",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_variables_are_those_that_the_sources_read():
    found = set()
    for path in (ROOT / "deepdecode").rglob("*.py"):
        if path.name != "env.py":
            found |= set(re.findall(r"""["'](DEEPDECODE_[A-Z_]+)["']""", path.read_text()))
    assert found == set(env.VARIABLES), "deepdecode/env.py lists the variables that the package reads"


# the support table: what it claims is in results/ or in the compiler


def test_every_run_it_claims_is_in_the_results():
    shown = tool.runs("attention")
    for word in (support.MEASURED, support.AS_PTX):
        for claim in support.evidence()["ops"]["attention"][word]:
            assert claim in shown[word], f"{claim} is not in results/: run tools/support.py --results"


def test_every_compiled_form_fits_its_arch():
    forms = support.evidence()["ops"]["attention"]["compiled"]
    assert {form["arch"] for form in forms} == ARCHS
    for form in forms:
        assert 0 < form["shared"] <= SHARED_LIMIT[form["arch"]], form
        assert 0 < form["registers"] <= 255, form
        # the kernels of sm_90 alone
        assert form["kernel"] == "mma" or form["arch"] == 90, form


def test_status_is_the_best_that_holds(monkeypatch):
    def form(arch, local):
        return {"arch": arch, "local": local}

    known = {
        "source": support.source_hash("attention"),
        support.MEASURED: [{"arch": 90, "device": "NVIDIA H200"}],
        support.AS_PTX: [{"arch": 80, "device": "NVIDIA H200"}, {"arch": 90, "device": "NVIDIA H200"}],
        "compiled": [form(90, 0), form(80, 96), form(80, 8), form(86, 0)],
    }
    monkeypatch.setattr(support, "evidence", lambda: {"ops": {"attention": known}})
    words = [tuple(support.status("attention", arch).values()) for arch in (90, 80, 86, 120)]
    assert words == [
        ("measured", "NVIDIA H200", 1, 0, True),
        ("run as PTX", "NVIDIA H200", 2, 96, True),
        ("compiled only", None, 1, 0, True),
        ("no evidence", None, 0, 0, True),
    ]
    known["source"] = "of another version"
    assert not support.status("attention", 90)["current"]
    said = [env._status_words(support.status("attention", arch)) for arch in (90, 86, 120)]
    assert said == [
        "measured on NVIDIA H200; 1 forms compiled, no spill, from other sources than these",
        "compiled only; 1 forms compiled, no spill, from other sources than these",
        "no evidence",
    ]


def test_what_counts_as_a_run(tmp_path):
    rows = [
        {"op": "attention", "implementation": "deepdecode", "us_warm": 5.0, "rel_err": 1e-3},
        {"op": "attention", "implementation": "deepdecode", "ptx_arch": 80, "rel_err": 1e-3},
        {"op": "attention", "implementation": "deepdecode", "ptx_arch": 86, "error": "no kernel image"},
        {"op": "attention", "implementation": "FlashMLA", "us_warm": 9.0},
    ]
    cases = {"h200/attention.json": (90, rows), "l40s/attention.json": (89, rows[2:]), "b200/indexer.json": (100, [])}
    cases["b200/attention.json"] = (100, [{"op": "attention", "implementation": "deepdecode", "us_warm": 1, "error": "wrong"}])
    for name, (arch, part) in cases.items():
        path = tmp_path / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schema": 1, "device": {"name": f"card {arch}", "arch": arch}, "rows": part}))
    file = "results/h200/attention.json"
    assert tool.runs("attention", tmp_path / "results") == {
        support.MEASURED: [{"arch": 90, "device": "card 90", "file": file}],
        support.AS_PTX: [{"arch": 80, "device": "card 90", "file": file}],
    }
    assert tool.runs("indexer", tmp_path / "results") == {support.MEASURED: [], support.AS_PTX: []}


@pytest.mark.slow
def test_the_table_is_up_to_date():
    """All of results/ is in it, and every launch that a default plan returns; run tools/support.py where this fails."""
    kernels = {path.stem for path in (ROOT / "deepdecode" / "kernels").glob("*.py")}
    ops = {path.stem for path in (ROOT / "deepdecode" / "ops").glob("*.py")} - {"__init__"}
    assert set(support.SOURCES) == set(support.evidence()["ops"])
    assert set(support.SOURCES) <= kernels & ops
    known = support.evidence()["ops"]["attention"]
    assert support.is_current("attention")
    assert {word: known[word] for word in (support.MEASURED, support.AS_PTX)} == tool.runs("attention")
    compiled = known["compiled"]
    assert [form for form in tool.launches() if not any(form.items() <= have.items() for have in compiled)] == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_the_compiler_says_the_same(arch, tmp_path):
    """The last form of each arch; the compile stage of the kernel's own tests holds all of them to the card's limits."""
    triton = pytest.importorskip("triton")
    document = support.evidence()
    if triton.__version__ != document["triton"]:
        pytest.skip(f"the table is Triton {document['triton']}'s, this is {triton.__version__}")
    form = [form for form in document["ops"]["attention"]["compiled"] if form["arch"] == arch][-1]
    bare = {name: value for name, value in form.items() if name not in ("registers", "local", "shared")}
    # a process of its own: in this one the kernels may be the interpreter's
    code = "import json, support, sys; print(json.dumps(support.compiled(json.loads(sys.argv[1]))))"
    path = {"PYTHONPATH": str(ROOT / "tools"), "PATH": os.defpath, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(bare)], env=path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == form
