"""The commands profile, compare and advise as a user runs them: output, files, exit status, errors."""

import gzip
import hashlib
import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from small_traces import STEP, kineto, nsys, nsys_csv, schedule, slower
from test_trace_servebench import lines, sglang

from deepdecode.__main__ import main

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared" / "traces"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/traces is not there")
HOSTILE = "</script><img src=x>|`a`\n[/x]\x1b[31m"


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def before(tmp_path):
    return kineto(tmp_path / "before.json.gz")


@pytest.fixture
def after(tmp_path):
    return kineto(tmp_path / "after.json", schedule(slower(sparse_attn=100_000)))


# ---- profile


def test_profile(run, before):
    code, out, err = run("profile", before)
    assert (code, err) == (0, "")
    assert "decode on `NVIDIA H200`, batch 16, 9 steps of 1.215 ms" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("  attention"))
    assert row[1:4] == ["0.400", "39.6", "%"]
    assert "Unknown: 0.0 % of busy time." in out
    assert "\x1b" not in out


def test_profile_json_and_markdown(run, before):
    code, out, _ = run("profile", before, "--json")
    data = json.loads(out)
    assert (code, data["schema"], data["phase"], data["batch"]) == (0, 1, "decode", 16)
    device = data["devices"][0]
    assert sum(device["exclusive_ns"].values()) + device["idle_ns"] == device["window_ns"]
    code, out, _ = run("profile", before, "--markdown")
    assert code == 0
    assert "| category | ms/step | of busy | launches/step | ms in window |\n|---|---:|---:|---:|---:|\n" in out
    assert "| GEMM tensor-core | 0.500 |" in out


def test_unknown_share_fails(run, tmp_path):
    trace = kineto(tmp_path / "t.json", schedule([*STEP, ("what_is_this", 300_000)]))
    code, _, err = run("profile", trace)
    assert code == 1
    assert err == "22.9 % of GPU time is in no category, the limit is 5 %; the largest is what_is_this\n"
    assert run("profile", trace, "--unknown-limit", "50")[0] == 0
    rules = tmp_path / "my.rules"
    rules.write_text("norm: what_is\n")
    code, out, err = run("profile", trace, "--rules", rules)
    assert (code, err) == (0, "")
    assert any(line.split()[:2] == ["norm", "0.300"] for line in out.splitlines())


def test_no_gpu_work(run, tmp_path):
    call = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    code, out, err = run("profile", kineto(tmp_path / "t.json", [], extra=[call]))
    assert code == 1
    assert err == "no GPU work was recorded\n"
    assert "there is no time to account for" in out
    assert "0.0 %" not in out


def test_why(run, before, tmp_path):
    code, out, _ = run("profile", "--why", "nvjet_sm103_tst_64x8")
    assert code == 0
    assert "GEMM tensor-core" in out
    assert "builtin:" in out
    rules = tmp_path / "my.rules"
    rules.write_text("# mine\nMoE: nvjet_tst\n")
    code, out, _ = run("profile", before, "--why", "nvjet", "--rules", rules, "--json")
    assert json.loads(out)["kernels"] == [{"name": STEP[1][0], "category": "moe", "rule": "my.rules:2 nvjet_tst"}]
    code, _, err = run("profile", before, "--why", "nothing_like_it")
    assert code == 2
    assert "--why must name a kernel of the trace, got nothing_like_it" in err


def test_html(run, before, after):
    code, _, err = run("compare", before, after, "--html", "r.html")
    assert (code, err) == (0, "report: r.html\n")
    text = Path("r.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "faster, 1.215 -&gt; 0.915 ms a step" in text


def test_inputs_are_not_changed(run, before, after, tmp_path):
    files = [before, after, nsys(tmp_path / "n.sqlite"), nsys_csv(tmp_path / "c.csv")]
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    run("compare", *files, "--html", tmp_path / "r.html")
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in files] == hashes
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*(path.name for path in files), "r.html"])


def test_an_input_is_never_written(run, before, after, tmp_path):
    kept = before.read_bytes()
    os.link(before, tmp_path / "linked.html")
    for argv in (
        ("profile", before, "--html", before),
        ("profile", before, "--html", "linked.html"),
        ("compare", before, after, "--findings", before),
        ("profile", tmp_path, "--html", before),
    ):
        code, out, err = run(*argv)
        assert (code, out) == (2, "")
        assert "must name a file that is not an input" in err
    assert before.read_bytes() == kept


# ---- compare


def test_page_and_findings_are_two_files(run, before):
    code, _, err = run("advise", before, "--html", "x.md", "--findings", "./x.md")
    assert (code, err) == (2, "error: advise: --html must name a file that is not --findings, got x.md twice\n")
    for option in ("html", "findings"):
        code, _, err = run("advise", before, f"--{option}", "")
        assert (code, err) == (2, f"error: advise: --{option} must name something, got nothing\n")
    assert [path.name for path in Path().iterdir()] == [before.name]


def test_compare_faster(run, before, after):
    code, out, err = run("compare", before, after)
    assert (code, err) == (0, "")
    assert "`before` -> `after`: faster, 1.215 -> 0.915 ms a step (-24.7 %), 1.33x as fast" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("  attention"))
    assert row == ["attention", "0.400", "39.6", "%", "1", "0.100", "14.1", "%", "1", "-0.300", "-75.0", "%"]


def test_compare_slower_exits_1(run, before, after):
    code, out, _ = run("compare", after, before)
    assert code == 1
    assert "slower, 0.915 -> 1.215 ms a step (+32.8 %), 1.33x the time" in out


def test_compare_json(run, before, after):
    code, out, _ = run("compare", before, after, "--json")
    data = json.loads(out)
    assert (code, data["schema"], data["verdicts"][0]["word"]) == (0, 1, "faster")
    assert [run["label"] for run in data["runs"]] == ["before", "after"]


def test_same_file(run, before):
    code, out, _ = run("compare", before, before)
    assert code == 1
    assert "same-file (refuse): `before (1)` and `before (2)` are the same file" in out


def test_same_recording_packed_again(run, before, tmp_path):
    again = tmp_path / "again.json"
    again.write_bytes(gzip.decompress(before.read_bytes()))
    code, out, _ = run("compare", before, again)
    assert code == 1
    assert "`before` and `again` are one recording in two files" in out


def test_refused_prints_the_table(run, before, tmp_path):
    other = kineto(tmp_path / "other.json", gpu="NVIDIA A100-SXM4-80GB", bs=64)
    code, out, _ = run("compare", before, other)
    assert code == 1
    assert "no verdict, because the batch size is 16 before and 64 after; the GPU is `NVIDIA H200` before and" in out
    assert "  attention" in out
    code, out, _ = run("compare", before, other, "--allow", "gpu-mismatch", "--allow", "batch-mismatch")
    assert code == 0
    assert "no change" in out


def test_formats_mix(run, before, tmp_path):
    """The same kernels from three tools: the times are equal, what a format does not say is said."""
    code, out, _ = run("compare", before, nsys(tmp_path / "n.sqlite"), nsys_csv(tmp_path / "c.csv"), "--json")
    data = json.loads(out)
    assert [run["format"] for run in data["runs"]] == ["kineto", "nsys-sqlite", "nsys-csv"]
    assert [run["steps"] for run in data["runs"]] == [9, 9, 9]
    for row in data["categories"]:
        assert [cell["step_ns"] for cell in row["cells"]] == [pytest.approx(row["cells"][0]["step_ns"], rel=1e-3)] * 3
    assert {verdict["word"] for verdict in data["verdicts"]} == {"no change"}
    assert code == 0
    assert {flag["code"] for flag in data["flags"]} >= {"batch-mismatch", "gpu-mismatch"}


def test_serving_results(run, tmp_path):
    a = lines(tmp_path / "mma.jsonl", sglang(1, 8.13), sglang(16, 40.97))
    b = lines(tmp_path / "split.jsonl", sglang(1, 22.43), sglang(16, 56.46))
    code, out, _ = run("compare", a, b)
    assert code == 0
    assert "C=1, `mma` -> `split`: faster, 8.13 -> 22.43 output tok/s, 2.76x" in out
    assert run("compare", b, a)[0] == 1
    code, out, _ = run("compare", a, b, "--json", "--redact")
    assert code == 0
    assert "deepseek-ai" not in out
    assert str(tmp_path) not in out
    c = lines(tmp_path / "c.jsonl", sglang(1, 8.0, dataset_name="/home/alice/questions"))
    code, out, _ = run("compare", a, c, "--redact", "--findings", "f.md")
    assert code == 1
    assert "dataset differs: `random` in `trace-1`, `dataset-" in out
    assert "alice" not in out + Path("f.md").read_text()
    code, out, _ = run("compare", a, lines(tmp_path / "d.jsonl", sglang(2, 8.0)))
    assert code == 1
    assert "no verdict, because `mma` and `d` have no concurrency in common" in out
    code, _, err = run("compare", a, kineto(tmp_path / "t.json"))
    assert code == 2
    assert "files must all be traces or all be serving results" in err
    code, _, err = run("compare", a, b, "--html", "x.html")
    assert code == 2


# ---- advise and the findings


def test_advise_appends_and_decides(run, before, after):
    code, out, err = run("advise", before, after, "--decide", "small-m-gemm: largest sure gain", "--speedup", "small-m-gemm=2")
    assert (code, err) == (0, "appended to PROFILE_FINDINGS.md\n")
    assert "What next for `after`" in out
    assert "Next: `small-m-gemm`" in out
    first = Path("PROFILE_FINDINGS.md").read_text()
    assert "Command: `deepdecode advise" in first
    assert hashlib.sha256(before.read_bytes()).hexdigest() in first
    assert "### Decision\n\nsmall-m-gemm: largest sure gain\n" in first
    assert "`before` -> `after`: faster" in first
    run("advise", after)
    assert Path("PROFILE_FINDINGS.md").read_text().startswith(first)
    assert run("advise", after, "--no-findings")[2] == ""
    assert run("advise", after, "--findings", "other.md")[2] == "appended to other.md\n"
    code, out, _ = run("advise", after, "--no-findings", "--json")
    assert json.loads(out)["advice"]["choice"]


def test_compare_appends_only_when_asked(run, before, after, tmp_path):
    run("compare", before, after)
    assert not Path("PROFILE_FINDINGS.md").exists()
    run("compare", before, after, "--findings", "F.md")
    assert "Comparison of `before`, `after`" in Path("F.md").read_text()


def test_advise_refuses_bad_numbers(run, before):
    for argv, words in (
        (["--speedup", "small-m-gemm"], "advise: --speedup must be CANDIDATE=NUMBER, got small-m-gemm"),
        (["--speedup", "small-m-gemm=0.5"], "advise: speed-up of small-m-gemm must be > 1, got 0.5"),
        (["--floor", "x=1"], "advise: floor must name one of"),
        (["--decide", " "], "advise: --decide must say what was chosen and why, got nothing"),
        (["--decide", "x", "--no-findings"], "advise: --decide must be recorded"),
    ):
        code, out, err = run("advise", before, *argv)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {words}"), err
    assert not Path("PROFILE_FINDINGS.md").exists()


def test_a_decision_names_a_candidate_of_the_ranking(run, before):
    for text, words in (
        ("nonsense: because", r"--decide must begin with one of small-m-gemm, .*, nothing, got nonsense\n"),
        ("split-attention: it is in the catalogue only", r"--decide must begin with one of .*, got split-attention\n"),
        ("small-m-gemm", r"--decide must say why, as `small-m-gemm: reason`, got no reason\n"),
    ):
        code, out, err = run("advise", before, "--decide", text, "--html", "r.html")
        assert (code, out) == (2, "")
        assert re.match("error: advise: " + words, err), err
    assert not Path("PROFILE_FINDINGS.md").exists()
    assert not Path("r.html").exists()
    assert run("advise", before, "--decide", "nothing: the step is fast enough")[0] == 0
    assert "### Decision\n\nnothing: the step is fast enough\n" in Path("PROFILE_FINDINGS.md").read_text()


# ---- what all share


def test_idle_time_is_one_number_in_every_command(run, tmp_path):
    """Steps of 900, 400 and 500 us idle; neither the mean (600) nor wall p50 minus busy p50 (600) is the median."""
    rows, at = [], 5_000_000
    for step, (wall, busy) in enumerate([(1_000_000, 100_000), (600_000, 200_000), (800_000, 300_000)]):
        half = busy // 2
        rows += [(step, STEP[0][0], at, half), (step, STEP[1][0], at + wall - half, half)]
        at += wall
    (tmp_path / "ranks").mkdir()
    one = kineto(tmp_path / "ranks" / "a.json", rows)
    kineto(tmp_path / "ranks" / "b.json", [(step, name, start, dur - 1000) for step, name, start, dur in rows])
    _, out, _ = run("profile", "ranks")
    assert "wall time p50 0.800 ms (min 0.600, max 1.000); busy p50 0.200 ms, idle p50 0.500 ms" in out
    assert re.search(r"^  idle +0\.500 +1\.800$", out, re.MULTILINE)
    tables = out[out.index("GPU timelines") :]
    assert re.search(r"`?NVIDIA H200`? +0\.800 +0\.200 +0\.500 +0\.0 %$", tables, re.MULTILINE)
    assert "step p50 ms  busy p50 ms  idle p50 ms" in tables
    _, out, _ = run("compare", one, tmp_path / "ranks" / "b.json")
    assert re.search(r"^  idle +0\.500 +0\.501 +\+0\.001", out, re.MULTILINE)
    _, out, _ = run("advise", one, "--no-findings")
    assert "0.800 ms a step, 0.200 busy, 0.500 idle." in out
    run("profile", "ranks", "--html", "r.html")
    assert "<td>0.800</td><td>0.200</td><td>0.500</td><td>0.000</td>" in Path("r.html").read_text()


@pytest.mark.parametrize(("argv", "option"), [(["--why", ""], "why"), (["--why", "  "], "why"), (["--rules", " "], "rules")])
def test_an_option_without_a_word_is_refused(run, before, argv, option):
    for trace in ([before], []):
        assert run("profile", *trace, *argv)[::2] == (2, f"error: profile: --{option} must name something, got nothing\n")


def test_a_wide_terminal_shows_whole_names(before, tmp_path, monkeypatch):
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::" + "x" * 60 + ">(int)"
    trace = kineto(tmp_path / "long.json", schedule([*STEP, (name, 20_000)]))
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    for columns, whole in ((220, True), (120, False)):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["profile", str(trace), "--top", "9"]) == 0
        assert (name in screen.getvalue()) == whole
        screen.truncate(0)


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_redaction(run, tmp_path):
    (tmp_path / "alice").mkdir()
    note = {"ph": "X", "cat": "user_annotation", "name": "alice secret run", "pid": 9, "tid": 9, "ts": 5000, "dur": 900}
    trace = kineto(tmp_path / "alice" / "host-alice.json", extra=[note])
    other = kineto(tmp_path / "alice" / "two.json", schedule(slower(sparse_attn=100_000)))
    texts = [
        run(*argv)[1]
        for argv in (
            ("profile", trace, "--redact"),
            ("profile", trace, "--redact", "--json"),
            ("compare", trace, other, "--redact", "--markdown"),
            ("advise", trace, other, "--redact", "--html", "r.html"),
        )
    ]
    (tmp_path / "alice" / "host-alice-notes.json").write_text("")  # a note would name what a folder holds besides traces
    (tmp_path / "alice" / "copy-alice.json").write_bytes(trace.read_bytes())
    texts += [run("profile", tmp_path / "alice", "--redact", *form)[1] for form in ([], ["--json"])]
    assert "other files of the folder were skipped" in texts[-1]
    texts += [Path("PROFILE_FINDINGS.md").read_text(), Path("r.html").read_text()]
    for text in texts:
        assert "alice" not in text
        assert "/tmp" not in text
        assert "step[DECODE" not in text
        assert "NVIDIA H200" in text


@pytest.mark.parametrize("form", [[], ["--markdown"], ["--json"]])
def test_hostile_names_reach_no_terminal(run, tmp_path, form):
    trace = kineto(tmp_path / "t.json", schedule([(HOSTILE, 500_000), *STEP]), gpu=HOSTILE)
    _, out, err = run("profile", trace, *form)
    assert "\x1b" not in out + err
    _, out, err = run("compare", trace, kineto(tmp_path / f"{'x' * 20}.json"), *form)
    assert "\x1b" not in out + err
    run("advise", trace)
    assert "\x1b" not in Path("PROFILE_FINDINGS.md").read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["profile"], "profile: a trace must be given, got none"),
        (["profile", "missing.json"], "missing.json: file must exist"),
        (["profile", "x", "--top", "0"], "profile: --top must be >= 1, got 0"),
        (["profile", "x", "--unknown-limit", "200"], "profile: --unknown-limit must be between 0 and 100, got 200"),
        (["profile", "--bogus"], "profile: unrecognized arguments: --bogus"),
        (["compare", "one.json"], "compare: two or more traces must be given, got 1"),
        (["compare", "a", "b", "--label", "x"], "compare: --label must be given 2 times, once for each file, got 1"),
        (["compare", "a", "b", "--json", "--markdown"], "compare: argument --markdown: not allowed with argument --json"),
        (["advise"], "advise: the following arguments are required: trace"),
    ],
)
def test_errors_are_one_sentence(run, argv, words):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {words}")
    assert "Traceback" not in err
    assert len(err.split("\n\nhint: ")[0].splitlines()) == 1


@pytest.mark.parametrize("word", ["everything", "no-gpu-work"])  # without work there is nothing to accept
def test_bad_allow(run, before, after, word):
    code, _, err = run("compare", before, after, "--allow", word)
    assert code == 2
    assert "compare: allow must be one of same-file, capture" in err
    assert err.splitlines()[0].endswith(f"got {word}")


@pytest.mark.parametrize("command", ["profile", "compare", "advise"])
def test_help_has_examples_and_exit_status(run, command):
    code, text, _ = run(command, "--help")
    assert code == 0
    assert f"  deepdecode {command} " in text
    assert "exit status: 0, 1 when" in text


def test_labels(run, before, after, tmp_path):
    out = run("compare", before, after, "--label", "original", "--label", "MMA + split-K")[1]
    assert "`original` -> `MMA + split-K`: faster" in out


def test_progress_on_a_terminal_only_when_slow(monkeypatch, capsys):
    from deepdecode.trace.cli import Progress

    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress("big\x1b") as progress:
        progress(1, 100)
        now[0] = 6.0
        progress(50_000_000, 100_000_000)
        now[0] = 6.1
        progress(60_000_000, 100_000_000)
    assert capsys.readouterr().err == "reading big\\x1b: 50 % of 100 MB\n"


def python(*argv, **options):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, **options)


def test_ascii_terminal_and_closed_pipe(tmp_path):
    trace = kineto(tmp_path / "t.json", schedule([("kérnel_漢", 500_000), *STEP]))
    done = python("-m", "deepdecode", "profile", str(trace), env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert done.returncode == 1  # the unknown kernel
    assert "k\\xe9rnel_\\u6f22" in done.stdout
    shell = f'"{sys.executable}" -m deepdecode profile "{trace}" --json | head -c 10; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_starts_light(tmp_path):
    """Processor time, which a busy machine stretches less than wall time; best of three. Rich, jinja2 and torch stay out."""
    trace = str(kineto(tmp_path / "t.json"))

    def cost(*argv):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python(*argv)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    env_free = [cost("-c", "import numpy, msgspec") for _ in range(2)]
    ours = [cost("-m", "deepdecode", "profile", trace) for _ in range(3)]
    assert min(ours) < min(env_free) + 0.3
    code = "import sys; from deepdecode.trace.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    loaded = set(python("-c", code, "profile", trace).stderr.split())
    assert loaded.isdisjoint({"torch", "rich", "jinja2", "typer", "deepdecode.trace.compare", "deepdecode.trace.html"})


# ---- the campaign, on generated traces of its rungs

CAMPAIGN = [HERE / "data" / f"decode_{rung}.json.gz" for rung in ("original", "mma", "splitk")]


def test_campaign_three_columns_in_one_command(run):
    labels = [word for label in ("original", "MMA", "MMA + split-K") for word in ("--label", label)]
    code, out, _ = run("compare", *CAMPAIGN, *labels)
    row = next(line for line in out.splitlines() if line.startswith("  attention "))
    assert [float(share) for share in re.findall(r"([\d.]+) %  ", row)[:3]] == [57.1, 17.6, 9.6]
    row = next(line for line in out.splitlines() if line.startswith("  GEMM FP32 SIMT "))
    assert [float(share) for share in re.findall(r"([\d.]+) %  ", row)[:3]] == [8.8, 20.8, 19.2]
    assert "GEMM FP32 SIMT 8.8 % -> 20.8 % of GPU time at 31.349 -> 31.417 ms" in out
    assert "attention fell (26.601 -> 15.713 ms) but total GPU time rose (151.058 -> 163.830 ms)" in out
    assert "`original` -> `MMA`: faster" in out
    assert code == 1  # these generated steps became longer from MMA to split-K, as that campaign's GPU time did
    assert "`MMA` -> `MMA + split-K`: slower" in out


@pytest.mark.parametrize(("rung", "choice"), [(0, "attention-kernel"), (1, "tensor-core-gemm"), (2, "tensor-core-gemm")])
def test_campaign_next_target(run, rung, choice):
    code, out, _ = run("advise", CAMPAIGN[rung], "--no-findings", "--json")
    advice = json.loads(out)["advice"]
    assert (code, advice["choice"]) == (0, choice)
    ids = [candidate["id"] for candidate in advice["candidates"]]
    assert "fuse-glue" in ids
    assert ("split-attention" in ids) == (rung == 1)  # the grid of 32 blocks on 188 SMs
    assert sum(candidate["step_ns"] for candidate in advice["candidates"]) <= advice["step_ns"]


# ---- real traces


@shared
def test_nsys_pair_gpu_time_fell_step_did_not(run):
    code, out, _ = run("compare", SHARED / "nsys_h100x2_before.sqlite.gz", SHARED / "nsys_h100x2_after.sqlite.gz")
    assert code == 0
    assert "535.201" in out
    assert "488.835" in out
    assert "GPU time fell (273.818 -> 254.001 ms), the step did not (299.849 -> 299.269 ms)" in out
    assert "no change" in out


@shared
def test_training_pair_is_refused(run):
    code, out, _ = run("compare", SHARED / "hta_diff_control_A100.json.gz", SHARED / "hta_diff_test_V100.json.gz")
    assert code == 1
    assert "no verdict, because the GPU is `NVIDIA A100-PG509-200` before and `Tesla V100-SXM2-16GB` after" in out
    assert "Time per step by category" in out


@shared
def test_decode_against_prefill_is_refused(run):
    decode = SHARED / "sglang_qwen3-30b-a3b_MI300X_decode.json.gz"
    code, out, _ = run("compare", decode, SHARED / "sglang_qwen3-8b_MI300X_extend.json.gz")
    assert code == 1
    assert "the phase is decode before and prefill after" in out


@shared
def test_cpu_only_is_refused(run):
    code, out, _ = run("compare", SHARED / "sglang_qwen3-30b-a3b_B300_decode.json.gz", SHARED / "hta_cpu-only-rank.json.gz")
    assert code == 1
    assert "`hta_cpu-only-rank` holds no GPU work" in out
