"""Result files in the forms that sglang.bench_serving (JSON lines) and vllm bench serve (JSON) write."""

import json

import pytest

from deepdecode.trace.model import TraceError
from deepdecode.trace.render import plain
from deepdecode.trace.report import serving_doc
from deepdecode.trace.servebench import compare_serving, is_serving, read_serving


def latencies(ms, e2e="e2e_latency"):
    out = {}
    for metric, scale in (("ttft", 10), ("tpot", 1), ("itl", 1), (e2e, 1000)):
        for stat, factor in (("mean", 1.05), ("median", 1.0), ("std", 0.1), ("p99", 1.5)):
            out[f"{stat}_{metric}_ms"] = ms * scale * factor
    return out


def sglang(concurrency, tps, **change):
    """One line of a bench_serving output file."""
    return {
        "tag": None,
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": float("inf"),  # written as Infinity
        "max_concurrency": concurrency,
        "sharegpt_output_len": None,
        "random_input_len": 1024,
        "random_output_len": 256,
        "random_range_ratio": 1.0,
        "server_info": {"model_path": "deepseek-ai/DeepSeek-V4-Flash", "tp_size": 8},
        "duration": 60.0,
        "completed": 40,
        "total_input_tokens": 40 * 1024,
        "total_output_tokens": 40 * 256,
        "total_output_tokens_retokenized": 40 * 255,
        "request_throughput": tps / 256,
        "input_throughput": 4 * tps,
        "output_throughput": tps,
        "total_throughput": 5 * tps,
        "concurrency": concurrency * 0.98,
        "accept_length": None,
        **latencies(1000 * concurrency / tps),
        **change,
    }


def vllm(concurrency, tps, **change):
    """One result of vllm bench serve --save-result --save-detailed."""
    return {
        "date": "20261130-210000",
        "backend": "openai",
        "label": None,
        "model_id": "deepseek-ai/DeepSeek-V4-Flash",
        "tokenizer_id": "deepseek-ai/DeepSeek-V4-Flash",
        "num_prompts": 40,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": concurrency,
        "duration": 60.0,
        "completed": 40,
        "failed": 0,
        "total_input_tokens": 40 * 1024,
        "total_output_tokens": 40 * 256,
        "request_throughput": tps / 256,
        "request_goodput": None,
        "output_throughput": tps,
        "total_token_throughput": 5 * tps,
        "max_output_tokens_per_s": 2 * tps,
        "max_concurrent_requests": concurrency + 1,
        "input_lens": [1024] * 40,
        "ttfts": [0.1] * 40,
        "generated_texts": ["</script>"] * 40,
        **latencies(1000 * concurrency / tps, "e2el"),
        **change,
    }


def lines(path, *runs):
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    return path


def test_campaign_c_by_c(tmp_path):
    before = lines(tmp_path / "mma.jsonl", sglang(64, 59.56), sglang(1, 8.13), sglang(16, 40.97))
    after = lines(tmp_path / "split.jsonl", sglang(1, 22.43), sglang(16, 56.46), sglang(64, 61.98))
    assert is_serving(before)
    comparison = compare_serving([read_serving(before, "MMA"), read_serving(after, "split-K")])
    rows = [row for row in comparison.rows if row.metric == "output_tps"]
    assert [row.concurrency for row in rows] == ["C=1", "C=16", "C=64"]
    assert [row.cells[1].value for row in rows] == [22.43, 56.46, 61.98]
    assert [row.ratios[1] for row in rows] == [pytest.approx(x) for x in (22.43 / 8.13, 56.46 / 40.97, 61.98 / 59.56)]
    assert [verdict.word for verdict in comparison.verdicts] == ["faster", "faster", "no change"]  # 4 % of single runs is noise
    tpot = next(row for row in comparison.rows if row.concurrency == "C=1" and row.metric == "median_tpot")
    assert tpot.cells[0].value == pytest.approx(1000 / 8.13)
    assert {row.metric for row in comparison.rows} >= {"p99_ttft", "mean_itl", "std_e2el", "median_e2el"}
    text = plain(serving_doc(comparison))
    assert "8.13" in text
    assert "2.759" in text
    assert "C=1, `MMA` -> `split-K`: faster, 8.13 -> 22.43 output tok/s, 2.76x" in text
    assert not comparison.refused


def test_vllm_pretty_list_and_appended(tmp_path):
    one = tmp_path / "a.json"
    one.write_text(json.dumps(vllm(8, 100.0), indent=2))
    appended = lines(tmp_path / "b.json", vllm(8, 80.0), vllm(8, 82.0), vllm(8, 81.0))
    listed = tmp_path / "c.json"
    listed.write_text(json.dumps([vllm(8, 100.0), vllm(16, 150.0)]))
    files = [read_serving(path, path.stem) for path in (one, appended, listed)]
    assert [file.tool for file in files] == ["vllm"] * 3
    assert [len(file.points) for file in files] == [1, 3, 2]
    assert files[0].points[0].latency_ms["p99_e2el"] == pytest.approx(1.5 * 1000 * 8 / 100 * 1000)
    comparison = compare_serving(files[:2])
    cell = comparison.rows[0].cells[1]
    assert (cell.value, cell.low, cell.high, cell.runs) == (81.0, 80.0, 82.0, 3)
    assert comparison.verdicts[0].word == "slower"
    assert comparison.regressed


def test_repeats_give_the_noise(tmp_path):
    a = read_serving(lines(tmp_path / "a", sglang(4, 100), sglang(4, 104)), "a")
    b = read_serving(lines(tmp_path / "b", sglang(4, 105), sglang(4, 106)), "b")
    verdict = compare_serving([a, b]).verdicts[0]
    assert verdict.word == "cannot tell"  # 3.4 %, within a range of 4
    assert "the range of the repeats" in verdict.text
    c = read_serving(lines(tmp_path / "c", sglang(4, 110), sglang(4, 111)), "c")
    assert compare_serving([a, c]).verdicts[0].word == "faster"


@pytest.mark.parametrize(
    ("code", "change", "words"),
    [
        ("settings-mismatch", {"random_input_len": 8192}, "prompt length asked differs: `1024` in `a`, `8192` in `b`"),
        ("settings-mismatch", {"dataset_name": "sharegpt"}, "dataset differs"),
        ("settings-mismatch", {"request_rate": 4.0}, "request rate differs: `inf` in `a`, `4` in `b`"),
        ("settings-mismatch", {"server_info": {"model_path": "other"}}, "model differs"),
        (
            "length-mismatch",
            {"total_output_tokens": 40 * 200},
            "outputs have different mean lengths in tokens: 256.0 in `a`, 200.0",
        ),
        ("length-mismatch", {"total_input_tokens": 40 * 2048}, "prompts have different mean lengths"),
        ("failed-requests", {"failed": 3}, "3 requests failed in `b`"),
    ],
)
def test_differing_settings_are_refused(tmp_path, code, change, words):
    a = read_serving(lines(tmp_path / "a", sglang(4, 100)), "a")
    b = read_serving(lines(tmp_path / "b", sglang(4, 200, **change)), "b")
    comparison = compare_serving([a, b])
    assert comparison.refused
    assert [(note.code, note.severity) for note in comparison.notes] == [(code, "refuse")]
    assert comparison.notes[0].text.startswith(f"C=4: {words}")
    assert comparison.verdicts == ()
    assert comparison.rows[0].ratios[1] == 2.0  # the table stays
    assert "no verdict, because C=4" in plain(serving_doc(comparison))
    assert compare_serving([a, b], allow=[code]).verdicts[0].word == "faster"


def test_tools_are_not_mixed(tmp_path):
    a = read_serving(lines(tmp_path / "a", sglang(4, 100)), "a")
    b = read_serving(lines(tmp_path / "b", vllm(4, 100)), "b")
    said = [note.text for note in compare_serving([a, b]).notes]
    assert any("tool differs: `sglang` in `a`, `vllm` in `b`" in text for text in said)


def test_same_file_and_missing_levels(tmp_path):
    path = lines(tmp_path / "a", sglang(4, 100))
    assert compare_serving([read_serving(path, "a"), read_serving(path, "b")]).notes[0].code == "same-file"
    b = read_serving(lines(tmp_path / "b", sglang(8, 100)), "b")
    comparison = compare_serving([read_serving(path, "a"), b])
    assert [note.text for note in comparison.notes] == [
        "`a` and `b` have no concurrency in common",
        "C=4: not in `b`",
        "C=8: not in `a`",
    ]
    assert comparison.verdicts == ()
    assert comparison.refused


def test_what_no_server_can_measure_is_no_run(tmp_path):
    path = lines(tmp_path / "a", sglang(4, -5), sglang(4, 1e300), sglang(4, float("nan")), sglang(-3, 80), sglang(4, 100))
    file = read_serving(path, "a")
    assert [(point.concurrency, point.output_tps) for point in file.points] == [(None, 80), (4, 100)]
    assert file.bad_lines == 3
    nothing = read_serving(lines(tmp_path / "b", sglang(4, 1, output_throughput=0.0, completed=0, total_output_tokens=0)), "b")
    refused = [note.text for note in compare_serving([file, nothing]).notes if note.severity == "refuse"]
    assert "C=4: no request was completed in a run of `b`" in refused


def test_damaged_lines_are_counted(tmp_path):
    path = lines(tmp_path / "a", sglang(4, 100), {"something": "else"})
    with open(path, "a") as file:
        file.write(json.dumps(sglang(8, 100))[:200] + "\n" + "[" * 100_000)
    file = read_serving(path, "a")
    assert len(file.points) == 1
    assert file.bad_lines == 3
    b = read_serving(lines(tmp_path / "b", sglang(4, 120)), "b")
    assert any("3 records of `a` could not be read" in note.text for note in compare_serving([file, b]).notes)


def test_odd_values_are_not_numbers(tmp_path):
    run = sglang(4, 100, mean_ttft_ms=float("nan"), median_tpot_ms="fast", p99_itl_ms=True, total_throughput=10**400)
    point = read_serving(lines(tmp_path / "a", run), "a").points[0]
    assert {"mean_ttft", "median_tpot", "p99_itl"}.isdisjoint(point.latency_ms)
    assert point.total_tps is None


def test_no_concurrency_limit(tmp_path):
    a = read_serving(lines(tmp_path / "a", sglang(4, 100, max_concurrency=None, request_rate=2.0)), "a")
    b = read_serving(lines(tmp_path / "b", sglang(4, 100, max_concurrency=None, request_rate=2.0)), "b")
    assert compare_serving([a, b]).rows[0].concurrency == "rate 2"


def test_not_a_result(tmp_path):
    trace = tmp_path / "t.json"
    trace.write_text('{"traceEvents": []}')
    assert not is_serving(trace)
    assert not is_serving(tmp_path / "missing")
    with pytest.raises(TraceError, match=r"compare: t.json holds no run with output_throughput"):
        read_serving(trace, "t")
    with pytest.raises(ValueError, match="compare: result files must be two or more, got 0"):
        compare_serving([])
    one = read_serving(lines(tmp_path / "a", sglang(4, 100)), "a")
    with pytest.raises(ValueError, match=r"compare: allow must be one of same-file, .*, got gpu"):
        compare_serving([one, one], allow=["gpu"])
