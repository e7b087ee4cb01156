"""What people hand over by mistake or malice: copies, archives, other encodings, devices, exports still being written."""

import bz2
import gzip
import io
import json
import lzma
import os
import sqlite3
import tarfile
import time
import zipfile
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from made_traces import DATA
from small_traces import STEP, kineto, nsys, nsys_csv, schedule

from deepdecode.trace import TraceError, columns, load, load_rules, profile
from deepdecode.trace import kineto as kineto_reader
from deepdecode.trace.findings import append
from deepdecode.trace.html import write_html
from deepdecode.trace.load import _clip_overruns


def zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("trace.json", data)
    return buffer.getvalue()


def tarred(data: bytes) -> bytes:
    buffer, info = io.BytesIO(), tarfile.TarInfo("trace.json")
    info.size = len(data)
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


ARCHIVES = {
    "a gzip file inside a gzip file": lambda d: gzip.compress(gzip.compress(d)),
    "a zip archive": zipped,
    "a tar archive": tarred,
    "a bzip2 file": bz2.compress,
    "an xz file": lzma.compress,
}


@pytest.mark.parametrize("what", ARCHIVES)
def test_an_archive_is_named_for_what_it_is(tmp_path, what):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(ARCHIVES[what](kineto(tmp_path / "sound.json").read_bytes()))
    with pytest.raises(TraceError, match=f"file must be a profiler trace, got {what}$") as caught:
        load(path)
    assert caught.value.hint == "unpack it and give the trace in it"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("writer", [kineto, nsys_csv])
def test_what_powershell_redirects_is_named(tmp_path, encoding, writer):
    sound = writer(tmp_path / "sound").read_text()
    path = tmp_path / "t"
    path.write_bytes(("" if encoding == "utf-16" else "\ufeff").encode(encoding) + sound.encode(encoding))
    with pytest.raises(TraceError, match="file must be UTF-8, got UTF-16"):
        load(path)


def test_a_copy_in_a_folder_of_ranks_is_counted_once(tmp_path):
    kineto(tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes((tmp_path / "a.json").read_bytes())
    trace = load(tmp_path)
    assert (len(trace.sources), len(trace.gpus), len(trace.table)) == (1, 1, 9 * len(STEP))
    assert trace.notes == ("skipped b.json: it holds the same bytes as a.json",)


def test_two_captures_of_one_rank_are_said(tmp_path):
    for i, name in enumerate("ab"):
        path = kineto(tmp_path / f"{name}.json", schedule(steps=3 + i))
        path.write_text(json.dumps(json.loads(path.read_text()) | {"distributedInfo": {"rank": 1}}))
    trace = load(tmp_path)
    assert len(trace.gpus) == 2
    assert trace.notes == ("more than one file says that it is rank 1: each counts as a timeline of its own",)


def test_different_gpus_in_a_folder_are_warned_of(tmp_path):
    kineto(tmp_path / "a.json", gpu="NVIDIA H100 80GB HBM3")
    kineto(tmp_path / "b.json", gpu="NVIDIA H100 80GB HBM3", bs=8)
    assert "MIXED_GPUS" not in [w.code for w in profile(load(tmp_path)).warnings]
    kineto(tmp_path / "c.json", gpu="Tesla V100-SXM2-16GB")
    kineto(tmp_path / "d.json", gpu="", bs=4)
    warned = {w.code: w.text for w in profile(load(tmp_path)).warnings}
    names = "NVIDIA H100 80GB HBM3, Tesla V100-SXM2-16GB"
    assert warned["MIXED_GPUS"] == f"the GPUs differ ({names}): they are taken for ranks of one run"


def test_a_rank_without_the_wanted_phase_is_left_out(tmp_path):
    kineto(tmp_path / "decode.json")
    kineto(tmp_path / "prefill.json", phase="EXTEND")
    both = load(tmp_path)
    assert len(profile(both).devices) == 2
    decode = profile(both, phase="decode")
    assert (decode.phase, len(decode.devices)) == ("decode", 1)
    assert "device 0 is left out: its steps are 9 prefill" in [w.text for w in decode.warnings]
    with pytest.raises(TraceError, match="mixed steps must be in the trace, got 9 decode; 9 prefill"):
        profile(both, phase="mixed")


def test_activities_without_a_possible_time_are_no_cpu_only_trace(tmp_path):
    rows = [{"ph": "X", "cat": "kernel", "name": "k", "ts": 2**63 + i, "dur": 1} for i in range(10)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": rows}))
    with pytest.raises(TraceError, match="GPU activities must have times, got 10 without a possible one"):
        load(tmp_path / "t.json")


def test_kernels_without_a_name(tmp_path):
    rows = [{"ph": "X", "cat": "kernel", "ts": i, "dur": 1} | ({"name": ""} if i % 2 else {}) for i in range(10)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": rows}))
    assert load(tmp_path / "t.json").names == ("(unnamed)",)


def test_ranges_past_the_limit_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "MAX_ANNOTATIONS", 5)
    assert [note.split(":")[0] for note in load(kineto(tmp_path / "t.json")).notes] == ["more than 200000 named ranges"]
    assert load(kineto(tmp_path / "t.json", schedule(steps=5))).notes == ()


def test_an_absurd_duration_near_the_end_is_cut_too():
    start, dur = np.arange(6) * 10, np.full(6, 5)
    dur[4] = 10**15
    assert _clip_overruns(np.zeros(6), np.zeros(6), start, dur) == 1
    assert dur.tolist() == [5, 5, 5, 5, 10, 5]
    dur[5] = 86_400 * 10**9 + 1  # the last of its stream has no successor
    assert _clip_overruns(np.zeros(6), np.zeros(6), start, dur) == 1
    assert dur.tolist() == [5, 5, 5, 5, 10, 0]


def test_100_000_distinct_names_are_placed_in_seconds():
    rules = load_rules()
    start = time.process_time()
    found = {rules.classify(f"kernel_{i}_{'y' * 40}").category for i in range(10_000)}
    assert found == {"unknown"}
    assert time.process_time() - start < 3  # 0.5 s here, 4.8 s when every term of every rule was tried


def test_ids_that_are_all_different_do_not_take_forever(tmp_path):
    rows = [{"ph": "X", "cat": "kernel", "name": f"sampling_{i}", "ts": i, "dur": 1} for i in range(30_000)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": rows}))
    start = time.process_time()
    assert profile(load(tmp_path / "t.json")).device.kernels == 30_000
    assert time.process_time() - start < 6  # it was quadratic
    rows = [{"ph": "X", "cat": "kernel", "name": "k", "ts": i, "dur": 1, "args": {"device": i}} for i in range(3000)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": rows}))
    with pytest.raises(TraceError, match="devices must be at most 2048, got 3000"):
        load(tmp_path / "t.json")


def test_a_kernels_time_is_its_median_over_the_steps(tmp_path):
    """One slow step of nine must not move what a step takes, nor what a comparison calls a change."""
    rows = [
        (step, name, at, dur * (50 if step == 4 and name == STEP[0][0] else 1))
        for step, name, at, dur in schedule(between=60_000_000, jitter=0)
    ]
    one = profile(load(kineto(tmp_path / "t.json", rows))).device
    kernels = {k.name: k for k in one.kernel_rows}
    assert kernels[STEP[0][0]].p50_step_ns == STEP[0][1]
    assert kernels[STEP[0][0]].exclusive_per_step_ns > 5 * STEP[0][1]
    rare = profile(load(kineto(tmp_path / "r.json", [r for r in schedule() if r[1] != STEP[4][0] or r[0] < 3]))).device
    assert {k.name: k.p50_step_ns for k in rare.kernel_rows}[STEP[4][0]] == 0
    assert {k.name: k.launches_per_step for k in rare.kernel_rows}[STEP[4][0]] == pytest.approx(3 / 9)


# ---- exports


def test_an_export_that_is_still_being_written_is_refused(tmp_path):
    path = nsys(tmp_path / "t.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE correlationId > 4")
        db.commit()
        with pytest.raises(TraceError, match=r"export must be complete, got changes that wait in t\.sqlite-wal"):
            load(path)
    db.close()  # writes the log into the file
    assert len(load(path).table) == 5
    (tmp_path / "t.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504))
    with pytest.raises(TraceError, match=r"changes that wait in t\.sqlite-journal"):
        load(path)


def test_the_smallest_integer_is_no_time(tmp_path):
    path = nsys(tmp_path / "t.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = -9223372036854775808 WHERE correlationId = 3")
    db.close()
    trace = load(path)
    assert (len(trace.table), trace.health.impossible_durations) == (9 * len(STEP) - 1, 1)
    assert profile(trace).device.span_ns < 20e6


# ---- CSV


@pytest.mark.parametrize("mark", [";", "\t"])
def test_other_separators(tmp_path, mark):
    text = nsys_csv(tmp_path / "sound.csv", [(0, "flash_fwd", 1000 * i, 500) for i in range(5)]).read_text()
    (tmp_path / "t.csv").write_text(text.replace(",", mark))
    assert load(tmp_path / "t.csv").table.dur_ns.tolist() == [500] * 5


@pytest.mark.parametrize(
    ("duration", "ns"),
    [("1,234", 1_234_000), ("0,5", None), ("1.234,5", None), ("1_0", None), ("١٢", None), ("-", None), ("2.5e1", 25_000)],
)
def test_a_number_is_read_as_written_or_not_at_all(tmp_path, duration, ns):
    rows = f'Start (us),Duration (us),Name\n1,1,a\n3,"{duration}",b\n'
    (tmp_path / "t.csv").write_text(rows)
    trace = load(tmp_path / "t.csv")
    assert trace.table.dur_ns.tolist() == ([1000] if ns is None else [1000, ns])
    assert trace.health.bad_events == (ns is None)


def test_the_first_of_two_columns_and_no_unknown_unit(tmp_path):
    (tmp_path / "t.csv").write_text("Start (ns),Duration (ns),Name,Name\n1,1,a,b\n")
    assert load(tmp_path / "t.csv").names == ("a",)
    (tmp_path / "t.csv").write_text("Start (ticks),Duration (ns),Name\n1,1,a\n")
    with pytest.raises(TraceError, match=r"Start must be in one of ns, us, .* got ticks"):
        load(tmp_path / "t.csv")


# ---- what is no regular file


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_nothing_but_a_regular_file_is_read_or_written(tmp_path, fifo):
    result = profile(load(kineto(tmp_path / "t.json")))
    for act, what in (
        (lambda p: load(p), "trace"),
        (lambda p: load_rules(p), "rules"),
        (lambda p: write_html(p, [result], ["t"]), "report"),
        (lambda p: append(p, "## x\n"), "findings"),
    ):
        with pytest.raises(TraceError, match=rf"{what}: .*must be a regular file|{what} must be a regular file"):
            act(fifo)
    assert fifo.is_fifo()


def test_what_cannot_be_reached_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(TraceError, match="x: file must be readable, got File name too long"):
        load("x" * 5000)

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    for rank in range(2):
        kineto(tmp_path / f"{rank}.json", schedule(steps=3 + rank))
    read = kineto_reader.read
    monkeypatch.setattr(kineto_reader, "read", lambda path, *rest: denied() if path.name == "1.json" else read(path, *rest))
    assert load(tmp_path).notes == ("skipped 1.json: file must be readable, got Permission denied",)
    with pytest.raises(TraceError, match=r"1\.json: file must be readable, got Permission denied"):
        load(tmp_path / "1.json")


def test_a_report_follows_a_link(tmp_path):
    result = profile(load(kineto(tmp_path / "t.json")))
    (tmp_path / "latest.html").symlink_to("real.html")
    write_html(tmp_path / "latest.html", [result], ["t"])
    assert (tmp_path / "latest.html").is_symlink()
    assert (tmp_path / "real.html").read_text().startswith("<!doctype html>")


def _shuffled(events):
    Random(1).shuffle(events)


def _an_hour_later(events):
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] + 3_600_000_000, 3)


def _fields_reversed(events):
    events[:] = [dict(reversed(event.items())) for event in events]


def _times_as_text(events):
    for event in events:
        event |= {key: str(event[key]) for key in ("ts", "dur") if key in event}


def _busy_host(events):
    events += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5, "dur": 10**9, "args": {}}] * 50


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    with gzip.open(DATA / "decode_splitk.json.gz") as file:
        text = file.read()
    (path := tmp_path_factory.mktemp("generated") / "trace.json").write_bytes(text)
    return text, profile(load(path))


@pytest.mark.parametrize("change", [_shuffled, _an_hour_later, _fields_reversed, _times_as_text, _busy_host])
def test_what_says_nothing_of_the_gpu_changes_nothing(tmp_path, generated, change):
    """The order of events, the clock's zero, how numbers are spelled, what the host did: the profile stays as it is."""
    text, before = generated
    trace = json.loads(text)
    change(trace["traceEvents"])
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    after = profile(load(tmp_path / "trace.json"))
    assert before.devices[0].steps.count == 3
    # a timeline's names stand in the order in which the file first has them
    assert [replace(one, timeline=None) for one in after.devices] == [replace(one, timeline=None) for one in before.devices]
    assert (after.phase, after.batch, after.warnings) == (before.phase, before.batch, before.warnings)
    assert replace(after.health, events=0) == replace(before.health, events=0)
