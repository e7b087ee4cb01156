"""`deepdecode env --engine`: an engine that is there, changed, older or missing, who runs what, and what it keeps to itself."""

import getpass
import json
import os
from dataclasses import replace

import pytest

from deepdecode import engines, env
from deepdecode.__main__ import main
from deepdecode.cards import CARDS, find_card
from deepdecode.config import ModelConfig
from deepdecode.plugins import gpus
from deepdecode.plugins.report import ENGINES, Part, Plugin, not_asked, plugin_of, report, why_off
from deepdecode.plugins.sources import Function, Value

ATTEND = Function("m.py", "attend", ("q", "k"))
PART = Part("attention", "attention", ("engine_of_tests.m.attend",), (ATTEND,), default=True, switch="THE_SWITCH")
MOE = Part("moe", "moe", ("engine_of_tests.m.experts",), (ATTEND,), archs=(120, 121))
PLUGIN = Plugin("engine_of_tests", "1.2.0", (PART, MOE), variable="DEEPDECODE_TESTS")


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("DEEPDECODE_", "SGLANG_", "THE_SWITCH"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A package of this source, installed for pip as 1.2.0."""

    def put(source="def attend(q, k): ...\n", version="1.2.0"):
        package = tmp_path / "engine_of_tests"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "m.py").write_text(source)
        info = tmp_path / "engine_of_tests-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: engine_of_tests\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return put


def test_an_engine_that_is_there(engine):
    engine()
    told = report(PLUGIN)
    assert {key: told[key] for key in ("engine", "installed", "version", "tested", "call")} == {
        "engine": "engine_of_tests", "installed": True, "version": "1.2.0", "tested": "1.2.0", "call": "",
    }  # fmt: skip
    assert [(part["name"], part["on"], part["why"]) for part in told["parts"]] == [
        ("attention", True, ""),
        ("moe", False, "DEEPDECODE_TESTS does not name it"),
    ]
    assert told["parts"][0]["replaces"] == ["engine_of_tests.m.attend"]


def test_a_changed_engine_is_told_whatever_is_switched(engine, monkeypatch):
    engine("def attend(q, kv): ...\n")
    problem = "m.py: attend must take (q, k), got (q, kv)"
    assert why_off(PLUGIN, PART) == f"this source is not what was tested: {problem}"
    monkeypatch.setenv("DEEPDECODE_ENABLE", "0")
    told = report(PLUGIN)["parts"][0]
    assert (told["on"], told["why"], told["signatures"]) == (False, "DEEPDECODE_ENABLE=0", [problem])


def test_an_older_engine(engine):
    engine(version="1.2.0")
    assert why_off(replace(PLUGIN, since=(1, 2)), PART) == ""
    assert why_off(replace(PLUGIN, since=(1, 3)), PART) == "1.3 is the first version that this plug-in knows"


def test_a_gpu_that_the_part_is_not_for(engine, monkeypatch):
    engine()
    monkeypatch.setenv("DEEPDECODE_TESTS", "moe")
    monkeypatch.setattr(gpus, "archs", lambda: frozenset({90}))
    assert why_off(PLUGIN, MOE) == "no GPU of sm_120, sm_121 is here"
    monkeypatch.setattr(gpus, "archs", lambda: frozenset({90, 120}))
    assert why_off(PLUGIN, MOE) == ""


def test_gpus_without_a_driver():
    """Whatever this machine has: the same twice, and no exception."""
    gpus.archs.cache_clear()
    assert gpus.archs() == gpus.archs()
    if not os.path.exists("/proc/driver/nvidia"):
        assert gpus.archs() is None


def test_an_engine_that_is_missing():
    told = report(PLUGIN)
    assert (told["installed"], told["version"], told["parts"][0]["why"]) == (False, None, "it is not installed")
    for part in told["parts"]:
        part["cards"] = []
    assert engines.engines_text([told], {"tp": 8}) == "engines, for a model of tp 8\n\nengine_of_tests: not installed"


@pytest.mark.parametrize(
    ("environment", "attention", "moe"),
    [
        ({}, "", "DEEPDECODE_TESTS does not name it"),
        ({"DEEPDECODE_TESTS": "moe"}, "DEEPDECODE_TESTS does not name it", ""),
        ({"DEEPDECODE_TESTS": "moe , attention"}, "", ""),
        ({"DEEPDECODE_TESTS": ""}, "DEEPDECODE_TESTS does not name it", "DEEPDECODE_TESTS does not name it"),
        ({"DEEPDECODE_TESTS": "", "THE_SWITCH": "1"}, "", "DEEPDECODE_TESTS does not name it"),
    ],
)
def test_switches(environment, attention, moe, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (not_asked(PLUGIN, PART), not_asked(PLUGIN, MOE)) == (attention, moe)


def test_who_runs_what_on_which_card(engine, monkeypatch):
    engine()
    monkeypatch.setenv("DEEPDECODE_TESTS", "attention,moe")
    monkeypatch.setattr(engines, "plugin_of", lambda name: PLUGIN)
    cards = [find_card("H200"), find_card("RTX 5090"), replace(find_card("H200"), arch=75)]
    attention, moe = engines.read_engines(["engine_of_tests"], cards, ModelConfig(), 8)[0]["parts"]
    assert [card["why"] for card in attention["cards"]] == [
        "", "", "sm_75 has no bfloat16 tensor cores; sm_80 is the first that has",
    ]  # fmt: skip
    assert [card["why"] for card in moe["cards"]] == ["it is for sm_120, sm_121", "", "it is for sm_120, sm_121"]
    assert [card["ours"] for card in moe["cards"]] == [card["covers"] for card in moe["cards"]] == [False, True, False]
    monkeypatch.setenv("DEEPDECODE_TESTS", "attention")
    told = engines.read_engines(["engine_of_tests"], cards, ModelConfig(), 8)
    moe = told[0]["parts"][1]
    assert [(card["covers"], card["ours"]) for card in moe["cards"]] == [(False, False), (True, False), (False, False)]
    text = engines.engines_text(told, engines.model_sizes(ModelConfig(), 8))
    assert "  attention: on\n" in text and "  moe, for sm_120, sm_121: off: DEEPDECODE_TESTS does not name it\n" in text
    assert "    GPU 0, sm_90: ours\n    GPU 1, sm_120: ours\n    GPU 2, sm_75: engine_of_tests's own: sm_75 has no" in text
    assert (
        "    GPU 0, sm_90: would be engine_of_tests's own: it is for sm_120, sm_121\n    GPU 1, sm_120: would be ours" in text
    )
    other = engines.read_engines(["engine_of_tests"], cards[:1], ModelConfig(head_dim=256), 8)[0]["parts"][0]
    assert other["cards"][0]["why"] == "rows of 256, not 512"


@pytest.mark.parametrize("op", ["attention", "indexer", "mhc", "moe", "norm"])
def test_every_card_covers_v4_flash(op):
    for card in CARDS:
        assert engines.uncovered(op, card, ModelConfig(), 8) is None, card
    assert engines.uncovered(op, replace(CARDS[0], arch=75), ModelConfig(), 8).startswith("sm_75")


def test_mhc_says_what_its_kernel_says():
    kernel = pytest.importorskip("deepdecode.kernels.mhc")
    for width in (32, 4096, 4100, 8192, 8224):
        said = engines.uncovered("mhc", CARDS[0], ModelConfig(hidden_size=width), 8)
        assert (said is None) == (kernel.supports(1, width, "bfloat16", "float32") is None), width
    assert engines.uncovered("mhc", CARDS[0], ModelConfig(hc_mult=2), 8) == "2 streams, not 4"


def test_only_words_of_parts_are_shown():
    assert engines.names_parts("attention, indexer,") and engines.names_parts("")
    assert not engines.names_parts("attention,alice") and not engines.names_parts("alice")


def test_each_engine_has_a_plugin_with_a_table():
    for name in ENGINES:
        plugin = plugin_of(name)
        assert plugin.engine == name and plugin.parts
        assert all(part.table and part.replaces for part in plugin.parts)
        assert len({part.name for part in plugin.parts}) == len(plugin.parts)


def test_the_command(engine, monkeypatch, capsys):
    engine("LIMIT = '/home/alice/x'\ndef attend(q, kv): ...\n")
    user = getpass.getuser()
    table = (ATTEND, Value("m.py", "LIMIT", "448"))
    monkeypatch.setattr(engines, "plugin_of", lambda name: replace(PLUGIN, parts=(replace(PART, table=table),)))
    monkeypatch.setattr(env, "_torch", lambda: {"works": True, "cuda": None, "gpus": [], "problems": []})
    assert main(["env", "--engine", "transformers", "--tp", "4"]) == 0
    out = capsys.readouterr().out
    assert "engine_of_tests 1.2.0; DEEPDECODE_TESTS names the parts that are on" in out
    assert "    signature: m.py: attend must take (q, k), got (q, kv)\n" in out
    assert "LIMIT must be 448, got <path>" in out
    assert "alice" not in out and user not in out.split()
    assert main(["env", "--json", "--engine", "sglang"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engines"][0]["parts"][0]["signatures"][1] == "m.py: LIMIT must be 448, got <path>"
    assert found["model"]["tp"] == 8 and found["model"]["num_heads"] == 64
    assert main(["env", "--json"]) == 0
    assert "engines" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "llama"], "env: --engine must be one of sglang, "),
        (["--engine", "--tp", "3"], "env: --tp must divide the model's 64 heads, got 3"),
        (["--engine", "--checkpoint", "/nowhere"], "nowhere"),
    ],
)
def test_a_wrong_word_is_told(words, said, capsys):
    assert main(["env", *words]) == 2
    assert said in capsys.readouterr().err


def test_no_gpu_no_card_and_a_model_of_another_size(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(env, "_torch", lambda: {"works": True, "cuda": None, "gpus": [], "problems": []})
    from deepdecode.config import config_json

    (tmp_path / "config.json").write_text(json.dumps(config_json(ModelConfig(hidden_size=7168, num_heads=128))))
    assert main(["env", "--json", "--engine", "transformers", "--checkpoint", str(tmp_path), "--tp", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"]["hidden_size"], found["model"]["num_heads"], found["model"]["tp"]) == (7168, 128, 16)
    assert all(part["cards"] == [] for part in found["engines"][0]["parts"])
