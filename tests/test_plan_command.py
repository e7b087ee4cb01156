"""`deepdecode plan`: its numbers against the definitions, its words for what it cannot do."""

import json
import subprocess
import sys

import pytest

from deepdecode import support
from deepdecode.__main__ import main
from deepdecode.cards import CARDS, find_card
from deepdecode.kernels import attention_plan
from deepdecode.kernels.attention_plan import explain, floor_us
from deepdecode.plan import find_cards, plan_case, plan_text, read_case

ARCHS = "sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, sm_121"


def told(capsys, *words):
    """The exit code and the one plan of a `--json` call."""
    code = main(["plan", *words, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert document["op"] == "attention"
    [plan] = document["plans"]
    return code, plan


def test_one_row_of_eight_heads(capsys):
    code, plan = told(capsys, "--arch", "sm_120", "--heads", "8", "--batch", "1", "--keys", "128+512")
    assert code == 0
    assert plan["card"] == "RTX PRO 6000"
    # 640 rows of 584 bytes, each with its index; q and out in bfloat16; two lengths
    assert plan["bytes"] == 640 * (584 + 4) + 2 * 8 * 512 * 2 + 8
    # two products of 8 x 640 x 512, a multiplication and an addition each
    assert plan["flops"] == 2 * 2 * 8 * 640 * 512
    assert plan["floor_us"] == pytest.approx(plan["bytes"] / 1.79e6, abs=6e-4)
    assert plan["bound"] == "bytes"
    config = plan["config"]
    assert config == vars(attention_plan.plan(attention_plan.Case(1, 8, 128, 512), find_card("sm_120")))
    assert plan["grid"] == [1, 1, config["splits"]]
    assert plan["keys_per_split"] == -(-640 // config["splits"])
    # a partial row in float16, its lse and its unit in float32; each part rounded up to 128 bytes
    assert plan["workspace_bytes"] == sum(-(-8 * config["splits"] * size // 128) * 128 for size in (1024, 4, 4))
    assert plan["merge_grid"] == [1, 8]
    assert plan["prediction"] == "scaled from the H200, never measured here"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize(("heads", "batch", "keys"), [(8, 1, "128"), (64, 128, "128+512"), (100, 3, "128+8192")])
@pytest.mark.parametrize("fmt", ["fp8_584", "bf16"])
def test_every_card_has_a_launch_that_covers_the_case(card, heads, batch, keys, fmt):
    case = read_case(heads=heads, batch=batch, keys=keys, fmt=fmt)
    plan = plan_case(case, card)
    config = plan["config"]
    assert plan["grid"][0] * config["block_h"] >= heads > (plan["grid"][0] - 1) * config["block_h"]
    assert plan["grid"][1:] == [batch, config["splits"]]
    assert plan["keys_per_split"] * config["splits"] >= case.keys
    assert plan["shared_bytes"] <= plan["shared_limit"] == card.shared * 1024
    assert plan["waves"] * card.sms >= plan["grid"][0] * batch * config["splits"] / 8
    assert plan["predicted_us"] >= round(plan["floor_us"], 2) > 0


def test_no_card_named_is_every_card(capsys):
    assert main(["plan", "--heads", "64", "--keys", "128+1024"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "attention: batch 1, 64 heads, 128+1024 keys, fp8_584 rows, pages of 64"
    assert [line[2:16].strip() for line in lines[3:]] == [card.name for card in CARDS]


def test_many_heads_are_bound_by_operations():
    case = read_case(heads=128, batch=16, keys="128+512")
    card = find_card("RTX 3090")
    plan = plan_case(case, card)
    assert plan["bound"] == "operations"
    assert plan["floor_us"] == round(floor_us(case, card), 3) > plan["bytes_us"] == round(plan["bytes"] / 0.94e6, 3)
    assert f"from the operations; the bytes at 0.94 TB/s take {plan['bytes_us']:.2f} us" in plan_text(case, [plan])


def test_lse_is_written_too():
    case = read_case(heads=8, batch=5, keys="128")
    without, with_lse = (plan_case(case, find_card("H200"), lse=lse) for lse in (False, True))
    assert with_lse["bytes"] - without["bytes"] == 5 * 8 * 4
    assert plan_text(case, [with_lse], lse=True).splitlines()[0].endswith("with lse")


def test_deterministic_cuts_rows_alike_in_every_batch():
    cuts = set()
    for batch in (1, 7, 256):
        plan = plan_case(read_case(heads=8, batch=batch, keys="128+512", deterministic=True), find_card("sm_89"))
        cuts.add((plan["keys_per_split"], plan["config"]["block_h"], plan["config"]["block_n"], plan["config"]["splits"]))
    assert len(cuts) == 1
    assert cuts.pop()[0] > 0


def test_pages_that_are_no_power_of_two_leave_the_hopper_kernels():
    kernels = [
        plan_case(read_case(heads=64, batch=1, keys="128+512", page_size=pages), find_card("H200"))["config"]["kernel"]
        for pages in ("64", "64+2", "48")
    ]
    assert kernels[0] == kernels[1] != "mma"
    assert kernels[2] == "mma"


def test_a_prediction_is_never_below_the_floor(monkeypatch):
    monkeypatch.setattr("deepdecode.plan.explain", lambda case, card: explain(case, card) | {"predicted_us": 0.001})
    case = read_case(heads=64, batch=64, keys="128+512")
    spark, h200 = (plan_case(case, find_card(name)) for name in ("spark", "H200"))
    assert spark["predicted_us"] == round(spark["floor_us"], 2)
    assert spark["prediction"] == "the floor: the model of the H200 gives less"
    # where the model was fitted, a prediction below the floor is the model's error and is shown
    assert (h200["predicted_us"], h200["prediction"]) == (0.0, "fitted to measurements of this card")


def test_registers_are_those_of_the_installed_kernel(monkeypatch):
    case = read_case(heads=8, batch=1, keys="128+512")
    launch = plan_case(case, find_card("sm_86"))["config"]
    form = {name: launch[name] for name in ("kernel", "block_h", "block_n", "num_warps")}
    form |= {"arch": 86, "fmt": "fp8_584", "split": True, "registers": 77, "local": 0, "shared": 1234}
    known = {"ops": {"attention": {"source": support.source_hash("attention"), "compiled": [form]}}}
    monkeypatch.setattr(support, "evidence", lambda: known)
    plan = plan_case(case, find_card("sm_86"))
    assert (plan["registers"], plan["local_bytes"], plan["shared_bytes"]) == (77, 0, 1234)
    assert "77 and no local memory a thread" in plan_text(case, [plan])
    # other arch, same launch
    assert plan_case(case, find_card("sm_89"))["registers"] is None
    known["ops"]["attention"]["source"] = "of another version"
    stale = plan_case(case, find_card("sm_86"))
    assert stale["registers"] is None
    assert stale["shared_bytes"] == explain(case, find_card("sm_86"))["shared_bytes"]
    assert "registers  not known" in plan_text(case, [stale])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--fmt", "f32"], "f32 rows"),
        (["--fmt", "fp8_584+bf16"], "window rows in fp8_584 and extra rows in bf16"),
    ],
)
def test_what_no_kernel_covers(capsys, words, reason):
    code, plan = told(capsys, "--arch", "sm_90", *words)
    assert code == 1
    assert plan == {"card": "H100 SXM", "arch": 90, "sms": 132, "supported": False, "reason": reason}
    assert main(["plan", "--arch", "sm_90", *words]) == 1
    assert f"supported  no: {reason}; the reference runs" in capsys.readouterr().out


def test_one_set_of_keys_needs_one_format(capsys):
    """The extra cache's format does not matter where there is none."""
    code, plan = told(capsys, "--card", "h200", "--keys", "128", "--fmt", "bf16")
    assert code == 0
    assert plan["bytes"] == 128 * (1024 + 4) + 2 * 8 * 512 * 2 + 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "sm_75"], f"plan: arch must be one of {ARCHS}, got 'sm_75'"),
        (["--arch", ""], f"plan: arch must be one of {ARCHS}, got ''"),
        (["--card", "V100"], "plan: card must be one of A100-80, RTX 3090, L40S, RTX 4090, H100 SXM, H200, B200, RTX PRO 6000, "
                             "RTX 5090, DGX Spark GB10, got 'V100'"),
        (["--card", "rtx"], "plan: card must be one of A100-80, "),
        (["--card", "H200", "--arch", "sm_80"], "plan: card must be of sm_80, got H200, which is sm_90"),
        (["--keys", "128+"], "plan: keys must be numbers from 0 to 1048576 such as 128 or 128+512, got '128+'"),
        (["--keys", "-1"], "plan: keys must be numbers"),
        (["--keys", "1+2+3"], "plan: keys must be numbers"),
        (["--keys", "9999999"], "plan: keys must be numbers"),
        (["--page-size", "0"], "plan: page-size must be numbers from 1 to 1048576 such as 64 or 64+2, got '0'"),
        (["--heads", "129"], "plan: heads must be 1 to 128, got 129"),
        (["--batch", "0"], "plan: batch must be 1 to 65535, got 0"),
        (["--fmt", "fp4"], "plan: fmt must be one of fp8_584, bf16, f32, or two of them joined by +, got 'fp4'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_refuses(capsys, words, message):
    # "-1" would be an option to argparse
    words = [f"{words[0]}={words[1]}", *words[2:]]
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("word", ["sm_120", "SM120", "120", " sm_120 "])
def test_arch_however_spelled(word):
    assert [card.name for card in find_cards(word, None)] == ["RTX PRO 6000"]


def test_the_largest_case_is_quick_and_needs_no_torch():
    code = (
        "import sys; from deepdecode.__main__ import main; "
        "rc = main(['plan', '--batch', '65535', '--heads', '128', '--keys', '1048576+1048576']); "
        "print(rc, 'torch' in sys.modules, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 False False"
