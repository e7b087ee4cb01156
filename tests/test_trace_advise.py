"""Ceilings, their sum, the ranking and its reasons, on profiles whose times are known."""

import re
from dataclasses import replace

import pytest
from made_profiles import profile

from deepdecode.trace.advise import IDLE, advise, catalogue
from deepdecode.trace.model import CATEGORIES, Health, Profile, TraceError

# after the campaign's second rung: attention 9.6 %, FP32 GEMM 19.2 %, glue 60 %, FP4 MoE 3.2 %
RUNG_2 = [
    ("sparse_attn_split_kernel", "attention", 9.6, {"blocks": 300}),
    ("ampere_sgemm_64x64_tn", "gemm_simt", 19.2),
    ("elementwise_kernel", "glue", 60.0, {"launches": 12000}),
    ("moe_fp4", "moe", 3.2),
    ("nvjet", "gemm_tc", 8.0),
]


def ids(advice):
    return [candidate.id for candidate in advice.candidates]


def get(advice, name):
    return next(candidate for candidate in advice.candidates if candidate.id == name)


def test_ceilings_are_amdahl_on_exclusive_time():
    advice = advise(profile(RUNG_2, idle=20.0), "rung 2", speedups={"tensor-core-gemm": 4.0})
    gemm = get(advice, "tensor-core-gemm")
    wall = 100.0 + 20.0
    assert gemm.step_ns == 19_200_000
    assert gemm.ceiling == pytest.approx(wall / (wall - 19.2))
    assert gemm.ceiling_at_k == pytest.approx(wall / (wall - 19.2 * 0.75))
    assert gemm.k_source == "chosen"
    assert get(advice, "fuse-glue").k_source.startswith("catalogue: ")


def test_candidates_share_no_time():
    advice = advise(profile(RUNG_2, idle=20.0), "rung 2")
    taken = [name for candidate in advice.candidates for name in candidate.takes]
    assert len(taken) == len(set(taken))
    assert sum(candidate.step_ns for candidate in advice.candidates) == advice.step_ns == 120_000_000


def test_the_campaigns_next_target_is_the_sure_one():
    advice = advise(profile(RUNG_2, idle=20.0), "rung 2")
    assert ids(advice)[:2] == ["tensor-core-gemm", "fuse-glue"]
    assert advice.choice == "tensor-core-gemm"
    assert "confidence high" in advice.because
    assert "at most 1.15x" in advice.because
    assert "selection" in get(advice, "tensor-core-gemm").check
    assert "torch.compile is doubtful" in get(advice, "fuse-glue").check


def test_what_would_change_the_choice_does_change_it():
    advice = advise(profile(RUNG_2, idle=20.0), "rung 2")
    line = next(text for text in advice.would_change if text.startswith("fuse-glue would lead if"))
    limit = float(line.split("tensor-core-gemm got no more than ")[1].split(" times")[0])
    assert advise(profile(RUNG_2, idle=20.0), "x", speedups={"tensor-core-gemm": limit - 0.1}).choice == "fuse-glue"
    assert advise(profile(RUNG_2, idle=20.0), "x", speedups={"tensor-core-gemm": limit + 0.1}).choice == "tensor-core-gemm"
    enough = float(line.split("or if fuse-glue got ")[1].split(" times")[0])
    assert advise(profile(RUNG_2, idle=20.0), "x", speedups={"fuse-glue": enough + 0.1}).choice == "fuse-glue"
    assert advise(profile(RUNG_2, idle=20.0), "x", speedups={"fuse-glue": enough - 0.1}).choice == "tensor-core-gemm"


def test_underfilled_grid_asks_for_a_split():
    thin = [("attn_mma", "attention", 17.6, {"blocks": 2}), ("moe", "moe", 10.0)]
    assert "split-attention" in ids(advise(profile(thin), "thin"))
    full = [("attn_mma", "attention", 17.6, {"blocks": 264}), ("moe", "moe", 10.0)]
    assert "tune-attention" in ids(advise(profile(full), "full"))
    merged = [*thin, ("merge_kernel", "attention", 2.0, {"blocks": 1})]
    assert "tune-attention" in ids(advise(profile(merged), "split already"))
    per_head = [("decode_attention_per_head", "attention", 57.1, {"blocks": 1024}), ("moe", "moe", 10.0)]
    assert advise(profile(per_head), "per head").choice == "attention-kernel"
    blind = advise(profile(thin, sms=0), "blind")
    assert "tune-attention" in ids(blind)
    assert any("number of SMs is not in the trace" in text for text in blind.limits)


def test_gaps_ask_for_graphs_only_where_there_are_none():
    assert "cuda-graphs" in ids(advise(profile(RUNG_2, idle=50.0, graph_mode="eager"), "eager"))
    assert "idle-gaps" in ids(advise(profile(RUNG_2, idle=50.0), "graphs"))


def test_idle_time_of_a_capture_without_steps_is_doubted():
    advice = advise(
        profile(RUNG_2, idle=5000.0, graph_mode="eager", steps=1, signal="none: the whole capture is one step"), "x"
    )
    idle = get(advice, "cuda-graphs")
    assert idle.confidence == "low"
    assert "capture's edges" in idle.notes[0]
    assert get(advise(profile(RUNG_2, idle=5000.0, graph_mode="eager"), "x"), "cuda-graphs").confidence == "high"


def test_prefill_is_not_advised_like_decode():
    advice = advise(profile(RUNG_2, phase="prefill"), "x")
    assert "large-gemm" in ids(advice)
    assert "small-m-gemm" not in ids(advice)
    assert "the catalogue's speed-ups are written for decode; this is prefill" in advice.limits


def test_small_launches_or_traffic():
    few = [("norm", "norm", 10.0, {"launches": 86}), ("moe", "moe", 10.0)]
    assert "glue-traffic" in ids(advise(profile(few), "few"))
    assert "fuse-glue" in ids(advise(profile(RUNG_2), "many"))
    many = [("add", "glue", 50.0, {"launches": 2494}), ("moe", "moe", 10.0)]  # 20 us each, but thousands of them
    assert "fuse-glue" in ids(advise(profile(many), "thousands"))


def test_collectives_may_be_waiting():
    advice = advise(profile([*RUNG_2, ("ncclDevKernel_AllReduce_Sum_bf16", "collective", 30.0)]), "tp8")
    wait = get(advice, "collective-wait")
    assert wait.confidence == "low"
    assert "may be waiting for other ranks (`ncclDevKernel_AllReduce_Sum_bf16`)" in wait.notes[0]
    assert not any("GPU timelines" in note for note in wait.notes)
    ranks = profile([*RUNG_2, ("ncclDevKernel_AllReduce_Sum_bf16", "collective", 30.0)], gpus=2)
    quick = replace(ranks.devices[1], exclusive_ns={**ranks.devices[1].exclusive_ns, "collective": 8 * 10_000_000})
    both = advise(replace(ranks, devices=(ranks.devices[0], quick)), "ranks")
    assert get(both, "collective-wait").notes[1].startswith("over 2 GPU timelines it takes 10.000 to 30.000 ms a step")
    fused = advise(profile([("fused_moe_all2all_gemm", "moe", 30.0), ("x", "glue", 1.0)]), "ep")
    assert "may be waiting" in get(fused, "moe-kernel").notes[0]


def test_roofline_speed_up():
    advice = advise(profile(RUNG_2, idle=20.0), "rung 2", floors_ns={"moe-kernel": 1.6e6})
    assert get(advice, "moe-kernel").k == pytest.approx(2.0)
    assert get(advice, "moe-kernel").k_source == "roofline: 1.600 ms a step"
    at_the_floor = advise(profile(RUNG_2, idle=20.0), "rung 2", floors_ns={"moe-kernel": 5e6})
    assert get(at_the_floor, "moe-kernel").saved_ns == 0
    assert get(at_the_floor, "moe-kernel").ceiling_at_k == 1.0


def test_saving_below_the_spread_is_said():
    noisy = profile([*RUNG_2, ("sample", "sampling", 1.0)], idle=20.0, jitter=0.2)
    assert any("below the spread" in note for note in get(advise(noisy, "noisy"), "sampling").notes)


def test_limits_are_said():
    advice = advise(profile([*RUNG_2, ("what", "unknown", 10.0)], steps=2, batch=None, gpus=8, graph_mode="eager"), "x")
    said = " ".join(advice.limits)
    for words in ("upper bound", "2 steps cannot show", "9.1 % of GPU time is in no category", "batch size is not known"):
        assert words in said
    assert "busiest of 8 GPU timelines" in said
    assert "a profiler adds a cost to each of 12215 launches" in said


def test_nothing_left_to_gain():
    alone = advise(profile([("x", "unknown", 10.0)], idle=0.0), "x")
    assert alone.choice is None
    assert alone.because == "no candidate takes a measurable part of the step"
    whole = advise(profile([("x", "moe", 10.0)], idle=0.0), "x")
    assert get(whole, "moe-kernel").ceiling is None  # W - x is nothing


def test_refuses_what_has_no_step():
    empty = Profile(1, (), (), (), None, "cpu-only", (), None, Health(capture="cpu-only"), ())
    with pytest.raises(TraceError, match="advise: x holds no GPU work"):
        advise(empty, "x")
    with pytest.raises(TraceError, match="x is a graph-capture trace"):
        advise(profile(RUNG_2, capture="graph-capture", phase="capture"), "x")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speedups": {"moe": 2.0}}, "speed-up must name one of attention-kernel, .*, got moe"),
        ({"speedups": {"moe-kernel": 1.0}}, "speed-up of moe-kernel must be > 1, got 1"),
        ({"speedups": {"moe-kernel": float("nan")}}, "speed-up of moe-kernel must be > 1, got nan"),
        ({"floors_ns": {"moe-kernel": 0.0}}, "floor of moe-kernel must be > 0 ms, got 0"),
        ({"floors_ns": {"x": 1.0}}, "floor must name one of"),
    ],
)
def test_bad_numbers(options, words):
    with pytest.raises(ValueError, match=words):
        advise(profile(RUNG_2), "x", **options)


def test_the_measured_speed_up_is_that_of_its_figures():
    split = next(entry for entry in catalogue().entries if entry.id == "split-attention")
    before, after = map(float, re.findall(r"from (\d+) to (\d+) ms", split.k_reason)[0])
    assert split.k == round(before / after, 1)
    assert "all kernels rose from 4828 to 5240 ms" in split.k_reason


def test_catalogue_covers_every_category_once():
    book = catalogue()
    sets = {entry.takes for entry in book.entries}
    taken = [name for takes in sets for name in takes]
    assert sorted(taken) == sorted({*CATEGORIES, IDLE} - {"unknown"})
    assert all(entry.k > 1 and entry.k_reason and entry.check for entry in book.entries)
    assert len({entry.id for entry in book.entries}) == len(book.entries)
    assert next(entry.id for entry in book.entries if entry.takes == ("attention",)) == "attention-kernel"
    for takes in sets:  # whatever the profile is like, some variant applies
        assert [entry.when for entry in book.entries if entry.takes == takes][-1] == "always"
    for kind in ("confidence", "effort", "risk"):
        assert {getattr(entry, kind) for entry in book.entries} <= set(book.weights[kind])
