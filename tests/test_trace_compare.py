"""Flags and verdicts on profiles whose differences are known."""

from dataclasses import replace

import msgspec
import pytest
from made_profiles import profile

from deepdecode.trace.compare import REFUSALS, compare, moved
from deepdecode.trace.model import Health, Profile
from deepdecode.trace.runs import normal, spread

BASE = [("flash_fwd", "attention", 4.0), ("gemm", "gemm_tc", 5.0), ("add", "glue", 1.0)]


def with_attention(ms, glue=1.0):
    return [("flash_fwd", "attention", ms), ("gemm", "gemm_tc", 5.0), ("add", "glue", glue)]


def run(*profiles, allow=()):
    return compare(profiles, [f"run{i}" for i in range(len(profiles))], allow)


def codes(comparison, severity=None):
    return [flag.code for flag in comparison.flags if severity in (None, flag.severity)]


def text_of(comparison, code):
    return next(flag.text for flag in comparison.flags if flag.code == code)


def test_faster_and_slower_say_the_same_numbers():
    faster = run(profile(BASE, name="a"), profile(with_attention(2.0), name="b"))
    assert faster.verdicts[0].word == "faster"
    assert faster.verdicts[0].ratio == pytest.approx(9 / 11)
    assert "11.000 -> 9.000 ms a step (-18.2 %), 1.22x as fast" in faster.verdicts[0].text
    assert not faster.refused
    assert not faster.regressed
    slower = run(profile(with_attention(2.0), name="b"), profile(BASE, name="a"))
    assert slower.regressed
    assert "9.000 -> 11.000 ms a step (+22.2 %), 1.22x the time" in slower.verdicts[0].text


def test_rows_hold_time_launches_share_of_each_run():
    comparison = run(profile(BASE, name="a"), profile(with_attention(2.0), name="b"))
    row = next(row for row in comparison.categories if row.key == "attention")
    assert [cell.step_ns for cell in row.cells] == [4_000_000, 2_000_000]
    assert [cell.share for cell in row.cells] == [pytest.approx(0.4), pytest.approx(0.25)]
    assert [cell.launches for cell in row.cells] == [43, 43]
    row = next(row for row in comparison.kernels if row.key == "flash_fwd")
    assert [cell.step_ns for cell in row.cells] == [4_000_000, 2_000_000]


def test_below_noise_cannot_be_told():
    # steps spread over 6 %: half of that is the interquartile range, more than the 1.8 % change
    comparison = run(profile(BASE, name="a", jitter=0.03), profile(with_attention(3.8), name="b", jitter=0.03))
    assert comparison.verdicts[0].word == "cannot tell"
    assert (
        "cannot tell: moved less than the noise (0.330 ms), 11.000 -> 10.800 ms a step (-1.8 %)" in comparison.verdicts[0].text
    )
    assert not comparison.regressed
    assert "(-1.8 %), moved less than the noise of the runs" in text_of(comparison, "below-noise")


def test_far_inside_the_noise_is_no_change():
    comparison = run(profile(BASE, name="a", jitter=0.03), profile(with_attention(3.95), name="b", jitter=0.03))
    assert comparison.verdicts[0].word == "no change"  # 0.5 %: under what counts however quiet the runs


def test_a_step_that_cannot_be_told_is_not_said_to_stand_still():
    loud = profile(BASE, name="b", idle=3.0, jitter=0.3)
    steady = replace(loud.devices[0].steps, p50_busy_ns=14_000_000)
    items = tuple(replace(step, busy_ns=14_000_000) for step in steady.items)
    loud = replace(loud, devices=(replace(loud.devices[0], steps=replace(steady, items=items)),))
    comparison = run(profile(BASE, name="a"), loud)
    assert comparison.verdicts[0].word == "cannot tell"
    assert "gpu-rose-step-flat" not in codes(comparison)


def test_share_rose_time_did_not():
    comparison = run(profile(BASE, name="a"), profile(with_attention(1.0), name="b"))
    text = text_of(comparison, "share-rose-time-flat")
    assert text.startswith("the share rose, the time per step did not, because the rest shrank: ")
    assert "GEMM tensor-core 50.0 % -> 71.4 % of GPU time at 5.000 -> 5.000 ms" in text
    assert "glue 10.0 % -> 14.3 %" in text
    assert "attention" not in text


def test_target_fell_total_rose():
    # the first campaign: attention 850 -> 505, in all 4828 -> 5240, and still faster because the gaps shrank
    before = profile([("attn_mma", "attention", 8.5), ("rest", "glue", 39.78)], name="a", idle=10)
    after = profile([("attn_split", "attention", 5.05), ("rest", "glue", 47.35)], name="b", idle=2)
    comparison = run(before, after)
    text = text_of(comparison, "target-fell-total-rose")
    assert text.startswith(
        "attention fell (8.500 -> 5.050 ms) but total GPU time rose (48.280 -> 52.400 ms); the step fell all the same"
    )
    assert comparison.verdicts[0].word == "faster"


def test_gpu_time_fell_step_did_not():
    comparison = run(profile(BASE, name="a", idle=1.0), profile(with_attention(3.0), name="b", idle=2.0))
    assert "GPU time fell (10.000 -> 9.000 ms), the step did not (11.000 -> 11.000 ms)" in text_of(
        comparison, "gpu-fell-step-flat"
    )
    assert comparison.verdicts[0].word == "no change"


def test_work_moved_to_another_category():
    before = [("fused_attention_with_quant", "attention", 4.0), ("gemm", "gemm_tc", 5.0)]
    after = [("attention_plain", "attention", 2.0), ("quant_rows", "quant", 1.8), ("gemm", "gemm_tc", 5.0)]
    comparison = run(profile(before, name="a"), profile(after, name="b"))
    text = text_of(comparison, "work-moved")
    assert "attention lost 2.000 ms a step (`fused_attention_with_quant` is gone)" in text
    assert "quantise/cache (`quant_rows`) take 1.800 ms" in text
    gone = run(profile(before, name="a"), profile([("attention_plain", "attention", 2.0), ("gemm", "gemm_tc", 5.0)], name="b"))
    assert "work-moved" not in codes(gone)
    spread = [*after[:1], ("quant_rows", "quant", 1.8), ("norm_rows", "norm", 1.9), ("gemm", "gemm_tc", 5.0)]
    moves = [flag.text for flag in run(profile(before, name="a"), profile(spread, name="b")).flags if flag.code == "work-moved"]
    assert len(moves) == 1  # the 2 ms that were lost did not arrive twice
    assert "norm (`norm_rows`) take 1.900 ms" in moves[0]


def test_same_file_is_refused():
    comparison = run(profile(BASE, name="a"), profile(BASE, name="a"))
    assert codes(comparison, "refuse") == ["same-file"]
    assert comparison.refused
    assert (
        comparison.verdicts[0].text
        == "`run0` -> `run1`: no verdict, because `run0` and `run1` are the same file: there is nothing to compare"
    )
    assert len(comparison.categories) == 3


@pytest.mark.parametrize(
    ("code", "change", "words"),
    [
        ("phase-mismatch", {"phase": "prefill"}, "decode before and prefill after"),
        ("batch-mismatch", {"batch": 64}, "batch size is 16 before and 64 after"),
        ("gpu-mismatch", {"gpu": "NVIDIA A100"}, "`NVIDIA H200` before and `NVIDIA A100` after"),
        ("gpu-count-mismatch", {"gpus": 8}, "1 GPU timelines before and 8 after"),
        ("step-mismatch", {"signal": "none: x", "steps": 1}, "`run1` shows no steps"),
        ("step-mismatch", {"agreement": 0.3}, "the signals disagree about the steps of `run1`"),
        ("capture", {"capture": "graph-capture", "phase": "capture"}, "`run1` is a graph-capture trace"),
    ],
)
def test_mismatch_is_refused_and_can_be_allowed(code, change, words):
    before, after = profile(BASE, name="a"), profile(with_attention(2.0), name="b", **change)
    comparison = run(before, after)
    assert code in codes(comparison, "refuse")
    assert words in text_of(comparison, code)
    assert comparison.verdicts[0].word == "refused"
    assert words in comparison.verdicts[0].text
    assert comparison.categories[0].cells[1] is not None  # the table is still there
    allowed = run(before, after, allow=codes(comparison, "refuse"))
    assert allowed.verdicts[0].word == "faster"
    assert code in allowed.verdicts[0].text


def test_unknowns_are_said_but_not_refused():
    after = profile(with_attention(2.0), name="b", gpu="", batch=None, phase="unknown", graph_mode="unknown")
    comparison = run(profile(BASE, name="a"), after)
    assert codes(comparison, "refuse") == []
    assert {"phase-mismatch", "batch-mismatch", "gpu-mismatch"} <= set(codes(comparison))
    assert comparison.verdicts[0].word == "faster"


def test_graph_mode_and_step_count_qualify_the_verdict():
    comparison = run(profile(BASE, name="a", graph_mode="eager", steps=5), profile(with_attention(2.0), name="b"))
    assert "eager before and full after" in text_of(comparison, "graph-mode-mismatch")
    assert "5 steps before and 8 after: compared per step" in text_of(comparison, "step-count-mismatch")
    assert comparison.verdicts[0].word == "faster"
    assert comparison.verdicts[0].text.endswith("read with: graph-mode-mismatch, step-count-mismatch")


def precise(precision, ms=5.0):
    return [("flash_fwd", "attention", 4.0), ("gemm", "gemm_tc", ms, {"precision": precision})]


def test_precision_mismatch():
    comparison = run(profile(precise("bf16"), name="a"), profile(precise("fp8", 2.5), name="b"))
    assert text_of(comparison, "precision-mismatch") == "matrix products run in bf16 before and fp8 after"
    assert comparison.refused
    mixed = [*precise("bf16"), ("moe", "moe", 2.0, {"precision": "fp4"})]
    overlapping = run(profile(precise("bf16"), name="a"), profile(mixed, name="b"))
    assert codes(overlapping, "warn") == ["precision-mismatch"]
    assert "bf16 before and bf16 and fp4 after" in text_of(overlapping, "precision-mismatch")


def test_profiler_overhead_is_not_called_a_regression():
    comparison = run(profile(BASE, name="a", idle=1.0), profile(BASE, name="b", idle=3.0))
    assert "only the gaps changed the step (11.000 -> 13.000 ms)" in text_of(comparison, "profiler-overhead")
    assert comparison.verdicts[0].word == "refused"
    assert run(profile(BASE, name="a", idle=1.0), profile(BASE, name="b", idle=3.0), allow=["profiler-overhead"]).regressed


def test_few_steps_widen_the_noise():
    one = run(profile(BASE, name="a", steps=1), profile(with_attention(3.85), name="b", steps=1))
    assert one.verdicts[0].word == "no change"  # 1.4 % of one step each
    assert "1 step cannot show the noise" in text_of(one, "few-steps")
    many = run(profile(BASE, name="a"), profile(with_attention(3.85), name="b"))
    assert many.verdicts[0].word == "faster"


def test_neither_shows_steps():
    comparison = run(
        profile(BASE, name="a", signal="none: the whole capture is one step", steps=1),
        profile(with_attention(2.0), name="b", signal="none: the whole capture is one step", steps=1),
    )
    assert codes(comparison, "refuse") == []
    assert "whole captures are compared (129 and 129 kernels)" in text_of(comparison, "no-steps")


def test_no_gpu_work():
    empty = Profile(1, (), (), (), None, "cpu-only", (), None, Health(capture="cpu-only"), ())
    comparison = run(profile(BASE, name="a"), empty)
    assert comparison.verdicts[0].word == "refused"
    assert "`run1` holds no GPU work" in comparison.verdicts[0].text
    assert comparison.verdicts[0].ratio is None


def test_three_runs_are_judged_pairwise():
    comparison = run(profile(BASE, name="a"), profile(with_attention(2.0), name="b"), profile(with_attention(3.0), name="c"))
    assert [(v.before, v.after, v.word) for v in comparison.verdicts] == [(0, 1, "faster"), (1, 2, "slower")]
    assert all(len(row.cells) == 3 for row in comparison.categories + comparison.kernels)


def test_unknown_share_is_flagged():
    comparison = run(profile(BASE, name="a"), profile([*BASE, ("what", "unknown", 1.0)], name="b"))
    assert "9.1 % of `run1` is in no category" in text_of(comparison, "unknown-share")


def test_damage_is_flagged():
    damaged = profile(with_attention(2.0), name="b", health=Health(events=900, bad_events=12, truncated=True))
    comparison = run(profile(BASE, name="a"), damaged)
    assert text_of(comparison, "damaged").startswith("`run1` is not whole (12 could not be read; the file ends early)")
    assert comparison.verdicts[0].text.endswith("read with: damaged")


def test_json_has_a_schema_and_every_flag():
    comparison = run(profile(BASE, name="a"), profile(BASE, name="a"))
    data = msgspec.json.decode(msgspec.json.encode(comparison))
    assert data["schema"] == 1
    assert data["flags"][0]["code"] == "same-file"


def test_bad_arguments():
    one = profile(BASE)
    with pytest.raises(ValueError, match="compare: profiles must be two or more, got 1"):
        compare([one], ["a"])
    with pytest.raises(ValueError, match="compare: labels must be 2 different names, got a, a"):
        compare([one, one], ["a", "a"])
    with pytest.raises(ValueError, match=r"compare: allow must be one of same-file, .*, got speed"):
        run(one, one, allow=["speed"])
    assert "gpu-mismatch" in REFUSALS


def test_spread_and_moved():
    assert spread([5]) == 0
    assert spread([5, 9]) == 4
    assert spread([0, 1, 2, 3, 100]) == 2  # one odd step does not widen the noise
    assert [moved(100, x, 0, few=False) for x in (98, 99.5, 100.5, 102)] == [-1, 0, 0, 1]
    assert moved(100, 98.5, 0, few=True) == 0


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        ("void flash_fwd<64>(int)", "flash_fwd<64>(int)"),
        ("triton_red_fused_add_12", "triton_red_fused_add"),
        ("triton_poi_fused_0d1f2a3b_3", "triton_poi_fused"),
        ("Cijk_Ailk.kd", "Cijk_Ailk"),
        ("_123", "_123"),
        ("_12345678" * 900 + "x", "_12345678" * 900 + "x"),  # where backtracking would take years
    ],
)
def test_normal_names(raw, kept):
    assert normal(raw) == kept
