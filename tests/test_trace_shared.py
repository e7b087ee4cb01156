"""Real traces of other projects, against numbers computed by an independent script (MANIFEST.md beside them)."""

import csv
import hashlib
from dataclasses import dataclass

import pytest
from made_traces import SHARED, shared

from deepdecode.trace import load, profile, why
from deepdecode.trace.categories import builtin
from deepdecode.trace.model import OVERLAP_RULE

ROUNDING_MS = 0.0006  # the manifest gives three decimals
FLOAT_MS = {"hta_ns_resolution_V100.json.gz": 0.01}  # its timestamps lose nanoseconds in the float64 the manifest used
LLM = (
    "sglang_qwen3-30b-a3b_B300_decode.json.gz",
    "sglang_qwen3-30b-a3b_MI300X_decode.json.gz",
    "vllm_full-graph_decode_rocm.json.gz",
    "sglang_qwen3-8b_MI300X_extend.json.gz",
    "hf_qwen1.5-0.5b_H100_eager.json.gz",
    "hf_bert-small_H100.json.gz",
)


@dataclass
class Expected:
    gpu: str
    events: int
    kernels: int
    names: int
    sum_ms: float
    union_ms: float
    span_ms: float
    graph_launches: int


def manifest() -> dict[str, Expected]:
    if not (SHARED / "MANIFEST.md").exists():
        return {}
    found = {}
    for line in (SHARED / "MANIFEST.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 14 and cells[1].endswith(".gz"):
            found[cells[1]] = Expected(cells[4], *map(int, cells[5:8]), *map(float, cells[8:11]), int(cells[11]))
    return found


MANIFEST = manifest()
FILES = sorted(MANIFEST) or ["(none)"]


@pytest.fixture(scope="module")
def read():
    """One reading of each file for all tests; the file must be as it was afterwards."""
    known = {}

    def once(name):
        if name not in known:
            path = shared(name)
            before = hashlib.sha256(path.read_bytes()).hexdigest()
            trace = load(path)
            known[name] = trace, profile(trace)
            assert hashlib.sha256(path.read_bytes()).hexdigest() == before == trace.sources[0].sha256
        return known[name]

    return once


@pytest.mark.parametrize("name", FILES)
def test_every_number_of_the_manifest(name, read):
    trace, result = read(name)
    want = MANIFEST[name]
    assert sum(d.kernels for d in result.devices) == want.kernels
    kernel_names = {k.name for d in result.devices for k in d.kernel_rows if k.kind == "kernel"}
    assert len(kernel_names) == want.names
    tolerance = FLOAT_MS.get(name, ROUNDING_MS)
    assert sum(d.sum_ns for d in result.devices) / 1e6 == pytest.approx(want.sum_ms, abs=ROUNDING_MS)
    assert sum(d.union_ns for d in result.devices) / 1e6 == pytest.approx(want.union_ms, abs=tolerance)
    ends = trace.table.start_ns + trace.table.dur_ns
    span = int(ends.max() - trace.table.start_ns.min()) if len(ends) else 0
    assert span / 1e6 == pytest.approx(want.span_ms, abs=ROUNDING_MS)
    assert trace.launches.is_graph.sum() == want.graph_launches
    assert trace.health.bad_events == trace.health.recovered == trace.health.impossible_durations == 0
    assert not trace.health.truncated
    if name.endswith(".json.gz"):
        assert trace.health.events == want.events
        assert result.gpus == ((want.gpu,) if want.gpu != "-" else ())


@pytest.mark.parametrize("name", FILES)
def test_exclusive_and_idle_fill_the_window_to_the_nanosecond(name, read):
    _, result = read(name)
    for d in result.devices:
        assert sum(d.exclusive_ns.values()) + d.idle_ns == d.window_ns == sum(s.wall_ns for s in d.steps.items)
        assert sum(k.exclusive_ns for k in d.kernel_rows) == d.busy_ns == sum(sum(c.step_ns) for c in d.categories)
        assert sum(k.window_count for k in d.kernel_rows) <= d.kernels + d.copies
    assert result.overlap_rule == OVERLAP_RULE


def test_all_713_kernels_of_the_overlapping_trace_are_kept(read):
    trace, result = read(LLM[0])
    device = result.device
    assert device.kernels == 713
    assert trace.health.overlapping == 674
    assert [w.code for w in result.warnings] == ["FEW_STEPS", "OVERLAP"]
    assert max(s.start_ns + s.dur_ns for s in device.timeline.slices) == device.timeline.wall_ns
    # sums would give the MoE 61.2 % of 6.290 ms; of busy time it is more, since glue is what overlaps
    shares = {c.category: c.share for c in device.categories}
    assert shares["moe"] == pytest.approx(0.642, abs=0.002)
    assert shares["attention"] == pytest.approx(0.080, abs=0.002)


@pytest.mark.parametrize(
    ("name", "phase", "batch", "graphs", "mode"),
    [
        (LLM[0], "decode", 16, 1, "full"),
        (LLM[1], "decode", 16, 1, "full"),
        (LLM[2], "decode", 32, 1, "full"),
        (LLM[3], "prefill", 15, 0, "eager"),
    ],
)
def test_one_step_of_a_known_phase(name, phase, batch, graphs, mode, read):
    _, result = read(name)
    device = result.device
    assert (result.phase, result.batch, device.graph_mode) == (phase, batch, mode)
    assert (device.steps.count, device.steps.agreement, device.graph_launches_per_step) == (1, 1.0, graphs)
    assert ("PREFILL" in [w.code for w in result.warnings]) == (phase == "prefill")


def test_waiting_before_the_step_is_not_idle_time_of_the_step(read):
    _, result = read(LLM[3])
    # the capture's 987 ms hold 493 ms between a preparing kernel and the step itself
    assert result.device.span_ns > 987e6
    assert result.device.idle_ns / result.device.window_ns < 0.01


@pytest.mark.parametrize("name", LLM)
def test_unknown_share_is_at_most_one_percent(name, read):
    assert read(name)[1].device.unknown_share <= 0.01


def test_a_program_that_is_no_model_is_mostly_unknown(read):
    _, result = read("nsys_cloverleaf_A100.sqlite.gz")
    assert result.device.unknown_share > 0.8
    assert "UNKNOWN_SHARE" in [w.code for w in result.warnings]


@pytest.mark.parametrize("name", ["hta_diff_control_A100.json.gz", "hta_diff_test_V100.json.gz", "hta_nccl_A100.json.gz"])
def test_training_is_recognised(name, read):
    assert read(name)[1].phase == "training"


def test_training_steps_are_counted_from_both_sides(read):
    steps = read("hta_diff_control_A100.json.gz")[1].device.steps
    assert (steps.count, steps.signal) == (6, "ProfilerStep")
    assert {v.signal: v.value for v in steps.votes if v.value} == {"ProfilerStep": 6, "once per step": 6, "per layer": 6}
    assert steps.min_ns <= steps.p50_ns <= steps.max_ns


def test_cpu_only_rank_says_so_and_prints_no_zero(read):
    trace, result = read("hta_cpu-only-rank.json.gz")
    assert (trace.health.capture, result.phase, result.main, result.devices) == ("cpu-only", "cpu-only", None, ())
    assert [w.code for w in result.warnings] == ["NO_GPU"]


@pytest.mark.parametrize(
    ("name", "orphans"), [("hf_qwen1.5-0.5b_H100_eager.json.gz", 436), ("kineto_resnet50_2021_old-schema.json.gz", 708)]
)
def test_kernels_without_a_launch_are_counted(name, orphans, read):
    assert read(name)[0].health.orphans == orphans


def test_colliding_correlation_ids_of_two_processes(read):
    trace, result = read("nsys_h100x2_before.sqlite.gz")
    kernels = trace.table.kind == 0
    assert len(set(trace.table.correlation[kernels].tolist())) == 3932
    assert len({d.process for d in result.devices}) == 2
    assert trace.health.orphans == 24


def test_gpu_time_fell_and_the_capture_did_not_shrink(read):
    before, after = (read(f"nsys_h100x2_{side}.sqlite.gz")[1] for side in ("before", "after"))
    assert sum(d.sum_ns for d in before.devices) / 1e6 == pytest.approx(535.201, abs=ROUNDING_MS)
    assert sum(d.sum_ns for d in after.devices) / 1e6 == pytest.approx(488.835, abs=ROUNDING_MS)
    assert after.device.window_ns / before.device.window_ns == pytest.approx(1, abs=0.003)


def test_timestamps_keep_their_nanoseconds(read):
    trace, _ = read("hta_ns_resolution_V100.json.gz")
    # a float64 near 1.7e15 us steps by 250 ns
    assert len({int(t) % 250 for t in trace.table.start_ns[:1000]}) > 100


def test_a_folder_of_ranks(tmp_path):
    for rank in range(4):
        (tmp_path / f"rank{rank}.json.gz").symlink_to(shared(f"dlrm_8gpu_V100_rank{rank}.json.gz"))
    result = profile(load(tmp_path))
    assert [(d.rank, d.device, d.kernels) for d in result.devices] == [(0, 0, 245), (1, 1, 310), (2, 2, 246), (3, 3, 315)]
    assert result.main == 1
    assert "MANY_DEVICES" in [w.code for w in result.warnings]


def test_every_shared_kernel_name_has_the_category_its_family_says():
    path = shared("kernel_names.tsv")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) > 600
    families = {
        "nccl": "collective",
        "flash_fwd_kernel": "attention",
        "paged_attention": "attention",
        "unified_attention": "attention",
        "fmha": "attention",
        "moe": "moe",
        "matmul_ogs": "moe",
        "swiGlu": "moe",
        "volta_sgemm": "gemm_simt",
        "ampere_sgemm": "gemm_simt",
        "simt_sgemm": "gemm_simt",
        "tf32f32": "gemm_tc",
        "nvjet": "gemm_tc",
        "Cijk_": "gemm_tc",
        "rmsnorm": "norm",
        "layer_norm": "norm",
        "ArgMaxOps": "sampling",
        "kvcache": "quant",
    }
    seen = dict.fromkeys(families, 0)
    wrong = []
    for row in rows:
        for word, category in families.items():
            if word in row["name"]:
                seen[word] += 1
                if why(row["name"]).category != category:
                    wrong.append((word, why(row["name"]).category, row["name"][:80]))
                break
    assert wrong == []
    assert all(seen.values()), seen
    unknown = [r["name"] for r in rows if builtin().classify(r["name"]).category == "unknown" and "clover" not in r["name"]]
    assert len(unknown) <= 5, unknown
