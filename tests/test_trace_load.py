"""Reading: layouts, damage, other formats, and files made to hurt. Nothing but TraceError may come out."""

import gzip
import hashlib
import json
import sqlite3
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_traces import DATA, make_traces

from deepdecode.trace import TraceError, columns, load, profile
from deepdecode.trace import nsys as nsys_reader
from deepdecode.trace.kineto import NOT_A_TIME, all_ns, ns

N = 2000


def event(i: int, **more) -> dict:
    fields = {"ph": "X", "cat": "kernel", "name": f"k{i}", "pid": 0, "tid": 7, "ts": 1000.0 + 10 * i, "dur": 5.5}
    return fields | {"args": {"stream": 7, "correlation": i}} | more


def kineto(events: list[dict]) -> bytes:
    """The layout that Kineto writes."""
    body = ",\n".join("  {\n    " + json.dumps(e)[1:-1] + "\n  }" for e in events)
    return f'{{\n "schemaVersion": 1,\n "traceEvents": [\n{body}\n ]}}\n'.encode()


SOUND = kineto([event(i) for i in range(N)])
CUT = SOUND[: len(SOUND) * 3 // 4]
PACKED = gzip.compress(SOUND, mtime=0)


def read(tmp_path, data: bytes, name: str = "trace.json"):
    path = tmp_path / name
    path.write_bytes(data)
    trace = load(path)
    assert path.read_bytes() == data
    assert trace.sources[0].sha256 == hashlib.sha256(data).hexdigest()
    assert trace.sources[0].bytes == len(data)
    return trace


def test_a_sound_file_has_clean_health(tmp_path):
    trace = read(tmp_path, SOUND)
    health = trace.health
    assert (health.events, health.bad_events, health.recovered, health.truncated) == (N, 0, 0, False)
    assert len(trace.table) == N
    assert trace.table.dur_ns.tolist() == [5500] * N
    assert np.diff(trace.table.start_ns).tolist() == [10_000] * (N - 1)


LAYOUTS = {
    "compact": json.dumps({"traceEvents": [event(i) for i in range(N)]}, separators=(",", ":")).encode(),
    "indented": json.dumps({"traceEvents": [event(i) for i in range(N)]}, indent=4).encode(),
    "bare list": json.dumps([event(i) for i in range(N)]).encode(),
    "blank lines first": b"\n\n  \n" + SOUND,
    "byte order mark": b"\xef\xbb\xbf" + SOUND,
    "windows lines": SOUND.replace(b"\n", b"\r\n"),
    "events in the middle": json.dumps(
        {"a": [1], "traceEvents": [event(i) for i in range(N)], "z": [{"name": "x"}] * 9}
    ).encode(),
    "trailing comma": SOUND.replace(b"\n ]}", b",\n ]}"),
    "commas first": SOUND.replace(b"},\n", b"}\n,"),
    "upper case of 2021": SOUND.replace(b'"cat": "kernel"', b'"cat": "Kernel"'),
    "two gzip members": gzip.compress(SOUND[:5000]) + gzip.compress(SOUND[5000:]),
    "zero padded gzip": PACKED + bytes(512),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(tmp_path, layout):
    health = read(tmp_path, LAYOUTS[layout]).health
    assert (health.events, health.bad_events, health.recovered, health.truncated) == (N, 0, 0, False)


# damaged bytes -> events read, damaged ones, whether the file ends early
DAMAGE = {
    "truncated": (CUT, CUT.count(b"\n  },"), 1, True),
    "control character": (SOUND.replace(b'"k5"', b'"a\x01\x02b"'), N, 0, False),
    "raw newline": (SOUND.replace(b'"k5"', b'"lib = Library(\n(1): <module>"'), N, 0, False),
    "inner quotes": (SOUND.replace(b'"k5"', b'"Library("_inductor_test", "IMPL")"'), N - 1, 1, False),
    "bad escapes": (SOUND.replace(b'"k5"', rb'"torch\cuda\__init__.py(219): _lazy_init"'), N - 1, 1, False),
    "bad utf-8": (SOUND.replace(b'"k5"', b'"k\xff\xfe5"'), N, 0, False),
    "list without an end": (b"[" + SOUND[SOUND.index(b"[") + 1 :].replace(b" ]}\n", b""), N, 0, True),
    "nan": (SOUND.replace(b'"ts": 1050.0', b'"ts": NaN'), N, 0, False),
    "infinity": (SOUND.replace(b'"dur": 5.5', b'"dur": Infinity', 1), N, 0, False),
    "time as text": (SOUND.replace(b'"ts": 1050.0', b'"ts": "1050.0"'), N, 0, False),
    "no duration": (SOUND.replace(b'"dur": 5.5, ', b"", 1), N, 0, False),
    "a hole of zeros": (SOUND.replace(b'"k5"', bytes(4096)), N - 1, 1, False),
    "an event cut in two": (SOUND.replace(b'"name": "k5", "pid": 0, "tid": 7, ', b""), N, 0, False),
    "the last event": (SOUND.replace(b'"k1999"', b'"k"1999"'), N - 1, 1, False),
    "half a surrogate": (SOUND.replace(b'"k5"', rb'"k\ud8005"'), N, 0, False),
    "a brace too many": (SOUND.replace(b'"k5"', b'"k5"}'), N, 1, False),
}


SOUND_BLOCKS = ("the last event", "truncated", "list without an end", "time as text", "no duration", "an event cut in two")


@pytest.mark.parametrize("packed", [False, True], ids=["json", "gz"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_counted_and_the_rest_is_read(tmp_path, damage, packed):
    data, events, bad, truncated = DAMAGE[damage]
    health = read(tmp_path, gzip.compress(data) if packed else data).health
    assert (health.events, health.bad_events, health.truncated) == (events, bad, truncated)
    # all but the last, which ends the list, lay in one block; a sound block recovers nothing
    assert health.recovered == (0 if damage in SOUND_BLOCKS else events - 1)


def test_truncated_gzip(tmp_path):
    trace = read(tmp_path, PACKED[: len(PACKED) * 3 // 4])
    assert trace.health.truncated
    assert 1200 < len(trace.table) < 1700
    assert trace.table.name.tolist() == list(range(len(trace.table)))  # the first ones, none missing between
    assert trace.health.bad_events <= 1


def test_times_that_cannot_be_are_counted_apart(tmp_path):
    trace = read(tmp_path, DAMAGE["nan"][0])
    assert (len(trace.table), trace.health.impossible_durations) == (N - 1, 1)
    negative = read(tmp_path, SOUND.replace(b'"dur": 5.5', b'"dur": -5.5', 1))
    assert (len(negative.table), negative.health.impossible_durations, negative.health.zero_durations) == (N, 1, 1)


def test_one_bad_duration_does_not_inflate_the_total(tmp_path):
    trace = read(tmp_path, SOUND.replace(b'"dur": 5.5', b'"dur": 9000000000.5', 1))
    assert trace.health.impossible_durations == 1
    assert trace.table.dur_ns.sum() == 10_000 + 5500 * (N - 1)


def test_damage_in_a_large_file_costs_its_own_block_only(tmp_path):
    # several blocks; the damage sits in the first
    events = [event(i, name=f"a kernel with quite a long name, number {i}") for i in range(40_000)]
    data = kineto(events).replace(b"number 7000", b'number "7000')
    trace = read(tmp_path, data)
    assert (trace.health.events, trace.health.bad_events) == (39_999, 1)
    assert 5000 < trace.health.recovered < 20_000


def test_an_argument_that_looks_like_a_boundary(tmp_path):
    events = [event(i, args={"stream": 7, "correlation": i, "x": [{"name": "y"}, {"name": "z"}] * 20}) for i in range(N)]
    health = read(tmp_path, kineto(events)).health
    assert (health.events, health.bad_events, health.recovered) == (N, 0, 0)


def test_sync_events_and_annotations_are_no_gpu_work(tmp_path):
    extra = [event(9000 + i, cat=c) for i, c in enumerate(("cuda_sync", "gpu_user_annotation", "overhead", "Trace"))]
    assert len(read(tmp_path, kineto([event(0), *extra])).table) == 1


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (b"1712195495519689.047", 1712195495519689047),
        (b"7721328753776.237", 7721328753776237),
        (b"1669783687384378", 1669783687384378000),
        (b"5.5", 5500),
        (b'"1050.25"', 1050250),
        (b"-3.25", -3250),
        (b"0.0005", 1),
        (b"1e3", 1_000_000),
        (b"1.5e-3", 2),
        (b"NaN", None),
        (b"1e400", None),
        (b"1.2.3", None),
        (b"", None),
        (b"9" * 5000, None),
    ],
)
def test_microseconds_become_exact_nanoseconds(text, want):
    assert ns(text) == want


@given(
    st.lists(
        st.one_of(st.integers(0, 10**16), st.decimals(0, 10**16, places=3), st.floats(), st.text("0123456789.e-", max_size=9))
    )
)
def test_many_times_at_once_equal_one_by_one(values):
    texts = [str(v).encode() for v in values]
    one_by_one = [NOT_A_TIME if (value := ns(text)) is None else value for text in texts]
    assert all_ns(texts).tolist() == one_by_one  # type: ignore[arg-type]


# ---- other formats


def test_three_formats_of_one_run_agree(tmp_path):
    made = {"layers": 4}
    make_traces.write_kineto(tmp_path / "a.json.gz", "splitk", 3, **made)
    make_traces.write_nsys(tmp_path / "a.sqlite", "splitk", 3, **made)
    make_traces.write_csv(tmp_path / "a.csv", "splitk", 3, **made)
    results = [profile(load(tmp_path / f"a.{kind}")) for kind in ("json.gz", "sqlite", "csv")]
    assert [r.sources[0].format for r in results] == ["kineto", "nsys-sqlite", "nsys-csv"]
    first = results[0].device
    for r in results:
        d = r.device
        assert (d.kernels, d.copies, d.sum_ns, d.union_ns, d.steps.count) == (first.kernels, 6, first.sum_ns, first.union_ns, 3)
        assert d.gpu == make_traces.GPU
        assert r.health.bad_events == r.health.impossible_durations == 0
    # the CSV has no ranges, so its steps begin where the sampler before ended
    assert [r.device.steps.signal for r in results] == ["engine step", "engine step", "sampling"]
    assert results[0].device.exclusive_ns == results[1].device.exclusive_ns
    assert results[2].device.exclusive_ns["attention"] == first.exclusive_ns["attention"]
    assert [(r.phase, r.device.graph_mode) for r in results] == [("decode", "full"), ("decode", "full"), ("unknown", "unknown")]
    assert [r.batch for r in results] == [16, 16, None]


def test_packed_export_is_unpacked_and_cleaned_up(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    make_traces.write_nsys(tmp_path / "a.sqlite", "mma", 1, layers=2)
    (tmp_path / "b.sqlite.gz").write_bytes(gzip.compress((tmp_path / "a.sqlite").read_bytes()))
    plain, packed = load(tmp_path / "a.sqlite"), load(tmp_path / "b.sqlite.gz")
    assert plain.table.dur_ns.tolist() == packed.table.dur_ns.tolist()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_packed_export_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(nsys_reader, "MAX_UNPACKED", 1 << 20)
    (tmp_path / "a.sqlite.gz").write_bytes(gzip.compress(b"SQLite format 3\0" + bytes(5 << 20)))
    with pytest.raises(TraceError, match="must hold at most 0 GB, got more"):
        load(tmp_path / "a.sqlite.gz")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_csv_lines_that_are_no_rows_are_counted(tmp_path):
    make_traces.write_csv(tmp_path / "a.csv", "mma", 1, layers=2)
    lines = (tmp_path / "a.csv").read_text().splitlines()
    lines[10] = "not,a,row"
    lines[11] = lines[11].replace(",", ",1e999,", 1)
    (tmp_path / "b.csv").write_text("\n".join(lines))
    whole, damaged = load(tmp_path / "a.csv"), load(tmp_path / "b.csv")
    assert (damaged.health.bad_events, damaged.health.events) == (2, whole.health.events - 2)


def test_csv_in_milliseconds_and_of_another_report(tmp_path):
    (tmp_path / "a.csv").write_text(
        "API Start (ns),API Dur (ns),Kernel Start (ms),Kernel Dur (us),DevId,GridXYZ,Kernel Name\n"
        '10,5,1.5,2.25,3,"   4    2    1",flash_fwd_kernel\n'
        '20,5,2.5,2.25,3,"   4    2    1","f(int, int)"\n'
    )
    trace = load(tmp_path / "a.csv")
    assert trace.table.start_ns.tolist() == [0, 1_000_000]
    assert trace.table.dur_ns.tolist() == [2250, 2250]
    assert (trace.gpus[0].device, trace.table.blocks.tolist()) == (3, [8, 8])
    assert trace.names == ("flash_fwd_kernel", "f(int, int)")


def test_graphs_recorded_whole_are_named_as_the_gap_they_are(tmp_path):
    make_traces.write_nsys(tmp_path / "a.sqlite", "mma", 2, layers=2)
    with sqlite3.connect(tmp_path / "a.sqlite") as db:
        db.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE graphNodeId IS NOT NULL")
        db.execute('CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, "end" INTEGER, graphId INTEGER)')
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1, 2, 3)")
    db.close()
    trace = load(tmp_path / "a.sqlite")
    assert trace.health.capture == "graph-summary"
    assert "--cuda-graph-trace=node" in trace.notes[0]
    assert "GRAPH_SUMMARY" in [w.code for w in profile(trace).warnings]


def test_progress_reaches_the_end(tmp_path):
    seen = []
    for i in range(2):
        (tmp_path / f"{i}.json").write_bytes(SOUND.replace(b"k5", b"k%d" % i))
    load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2 * len(SOUND), 2 * len(SOUND))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# ---- what is no trace


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.json", b"", "file must be a profiler trace, got an empty file"),
        ("a.json", b'{"a": 1}', 'got JSON without "traceEvents"'),
        ("a.json", b'{"traceEvents": []}', "file must hold trace events, got none"),
        ("a.json", b"[1, 2, 3]", "file must hold trace events, got 1 that are all damaged"),
        ("a.json", b"[" * 3_000_000, "file must hold trace events, got 1 that are all damaged"),
        ("a.json", b'{"traceEvents": [' + b'{"a":' * 400_000, "got 1 that are all damaged"),
        ("a.json", b"\0" * 600, "file must be a profiler trace, got binary data"),
        ("a.nsys-rep", b"QDSTRM" + b"\0" * 600, "file must be an export, got a raw report"),
        ("a.csv", b"a,b\n1,2\n", "got text without the headers Start, Duration and Name"),
        ("a.csv", b"Time (%),Total Time (ns),Instances,Name\n1,2,3,k\n", "CSV must list single kernels, got a summary"),
        ("a.csv", b"Start (ns),Duration (ns),Name\n", "file must hold trace events, got none"),
        ("a.csv", b"x" * (3 << 20), "a line must be under 1 MB"),
        ("a.sqlite", b"SQLite format 3\0" + b"\xff" * 5000, "file must be an intact Nsight Systems export"),
        ("a.gz", b"\x1f\x8b" + b"\xff" * 200, "got a .gz that is cut or damaged before its first event"),
        ("a.gz", gzip.compress(SOUND, mtime=0)[:20], "got a .gz that is cut or damaged before its first event"),
        ("a.json", b'{"traceEvents": {"a": 1}}', 'got JSON whose "traceEvents" is no list'),
    ],
)
def test_one_sentence_for_what_is_no_trace(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TraceError) as e:
        load(tmp_path / name)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def test_other_files_in_a_folder_are_skipped_with_a_note(tmp_path):
    (tmp_path / "rank0.json").write_bytes(SOUND)
    (tmp_path / "server_args.json").write_text('{"tp": 8}')
    trace = load(tmp_path)
    assert (len(trace.sources), len(trace.table)) == (1, N)
    assert trace.notes == ('skipped server_args.json: file must be a profiler trace, got JSON without "traceEvents"',)
    (tmp_path / "rank0.json").unlink()
    (tmp_path / "more.json").write_text("{}")
    with pytest.raises(TraceError, match="folder must hold traces, got 2 files that are none"):
        load(tmp_path)


def test_names_without_end_share_one(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "MAX_NAMES", 100)
    trace = read(tmp_path, SOUND)
    assert (len(trace.names), trace.names[-1]) == (101, "(names past the limit)")
    assert (trace.table.name == 100).sum() == N - 100
    assert "the rest are counted as one" in trace.notes[0]
    long = read(tmp_path, kineto([event(i, name="x" * 100_000 + str(i)) for i in range(20)]))
    assert len(long.names) == 1
    assert len(long.names[0]) == 8192


def test_missing_file_and_empty_folder(tmp_path):
    with pytest.raises(TraceError, match="file must exist, got nothing there"):
        load(tmp_path / "no.json")
    with pytest.raises(TraceError, match=r"folder must hold .* got none"):
        load(tmp_path)


@pytest.fixture(scope="module")
def spaces():
    """320 MB of them, as one member of a .gz, which another may stand before."""
    packed, block = zlib.compressobj(9, wbits=31), b" " * (1 << 20)
    return b"".join(packed.compress(block) for _ in range(320)) + packed.flush()


@pytest.mark.parametrize(
    "start", [b"", b'{"traceEvents": [', b'{"traceEvents": [{"ph":"X"},'], ids=["nothing else", "a list", "one event"]
)
def test_gzip_bomb_ends_in_one_sentence_with_little_memory(tmp_path, spaces, start):
    path = tmp_path / "bomb.json.gz"
    path.write_bytes((gzip.compress(start) if start else b"") + spaces)
    assert path.stat().st_size < 400_000
    tracemalloc.start()
    with pytest.raises(TraceError, match=r"must (expand at most 200-fold|be under 32 MB|hold a list of trace events)"):
        load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20


# ---- sqlite that is made to hurt


def hurtful(path, script: str):
    with sqlite3.connect(path) as db:
        db.executescript(script)
    db.close()
    return path


def test_views_and_generated_columns_are_not_evaluated(tmp_path):
    bomb = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) AS start, 1 AS end FROM n"
    path = hurtful(tmp_path / "view.sqlite", f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {bomb};")
    with pytest.raises(TraceError, match="export must hold CUDA activities"):
        load(path)
    path = hurtful(
        tmp_path / "generated.sqlite",
        """CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER);
           INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2);
           ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN demangledName INTEGER AS (abs(-9223372036854775807 - 1));""",
    )
    assert load(path).table.dur_ns.tolist() == [1]


def test_an_export_that_never_ends_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(nsys_reader, "SECONDS", 0.1)
    monkeypatch.setattr(nsys_reader, "SECONDS_PER_MB", 0)
    rows = ", ".join(f"({i}, {i + 1}, 'x')" for i in range(3000))
    path = hurtful(
        tmp_path / "a.sqlite",
        f"""CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER, demangledName);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES {rows};
            CREATE TABLE StringIds (id, value);
            INSERT INTO StringIds VALUES (0, 'k');
            CREATE TABLE NVTX_EVENTS (start INTEGER, "end" INTEGER, text TEXT, textId, globalTid INTEGER);
            INSERT INTO NVTX_EVENTS SELECT start, "end", NULL, start - 9000, 1 FROM CUPTI_ACTIVITY_KIND_KERNEL;
            INSERT INTO StringIds SELECT a.start, 'x'
              FROM CUPTI_ACTIVITY_KIND_KERNEL a, CUPTI_ACTIVITY_KIND_KERNEL b LIMIT 300000;
        """,
    )
    with pytest.raises(TraceError, match="export must be readable in bounded time"):
        load(path)


def test_wrong_types_and_huge_numbers_in_an_export(tmp_path):
    path = hurtful(
        tmp_path / "a.sqlite",
        """CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, "end", deviceId, streamId, correlationId, gridX, demangledName);
           INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 20, 0, 7, 1, 3, 1), ('a', 'b', 'c', 'd', 'e', 'f', 'g'),
             (9223372036854775807, -9223372036854775807, 0, 0, 0, 0, 0), (NULL, NULL, NULL, NULL, NULL, NULL, NULL),
             (30, 25, x'00ff', 1e300, '7', 9223372036854775807, 99);""",
    )
    trace = load(path)
    assert trace.table.dur_ns.tolist() == [10, 0]
    assert (trace.health.bad_events, trace.health.impossible_durations) == (2, 2)
    assert trace.names == ("(unnamed)",)


def test_a_database_error_stays_one_sentence(tmp_path):
    make_traces.write_nsys(tmp_path / "a.sqlite", "mma", 1, layers=1, thin=8)
    data = (tmp_path / "a.sqlite").read_bytes()
    damaged = data.replace(b"NOT NULL, globalTid", b'NOT\n\x1b[31m "lobalTid')
    assert len(damaged) == len(data)
    (tmp_path / "b.sqlite").write_bytes(damaged)
    with pytest.raises(TraceError, match="file must be an intact Nsight Systems export, got malformed") as e:
        load(tmp_path / "b.sqlite")
    assert str(e.value).isprintable()


def test_the_export_on_disk_is_opened_read_only(tmp_path):
    make_traces.write_nsys(tmp_path / "a.sqlite", "mma", 1, layers=1)
    before = (tmp_path / "a.sqlite").read_bytes()
    (tmp_path / "a.sqlite").chmod(0o444)
    load(tmp_path / "a.sqlite")
    assert (tmp_path / "a.sqlite").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.sqlite"]  # no journal, no index beside it


# ---- fuzzing


def survives(path):
    """Whatever the file, a profile or one sentence."""
    try:
        result = profile(load(path))
    except TraceError as e:
        if len(str(e).splitlines()) != 1:
            raise AssertionError("not one sentence") from e
        return
    assert msgspec.json.decode(msgspec.json.encode(result))["schema"] == 1
    for d in result.devices:
        assert sum(d.exclusive_ns.values()) + d.idle_ns == d.window_ns


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = (
    gzip.decompress((DATA / "decode_mma.json.gz").read_bytes())[:9000],
    kineto([event(i, args={"stream": 7, "correlation": i, "grid": [1, 2, 3]}) for i in range(8)]),
)


@FUZZ
@given(
    st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 8999), st.binary(max_size=4)), max_size=12), st.integers(0, 9000)
)
def test_fuzzed_bytes(tmp_path, seed, edits, cut):
    data = bytearray(seed)
    for at, patch in edits:
        data[at : at + len(patch)] = patch
    path = tmp_path / "f.json"
    path.write_bytes(bytes(data[: max(cut, 200)]))
    survives(path)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.lists(st.integers(), max_size=4)
)
ANYTHING = st.recursive(SCALARS, lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=4)
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "X", "i", 5])},
    optional={
        "cat": st.one_of(st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "user_annotation", "Kernel"]), SCALARS),
        "name": st.one_of(st.sampled_from(["cudaGraphLaunch", "step[DECODE bs=2]", "flash_fwd", "argmax"]), SCALARS),
        "ts": st.one_of(st.integers(-(10**20), 10**20), st.floats(0, 1e6), SCALARS),
        "dur": st.one_of(st.floats(-5, 1e6), SCALARS),
        "pid": SCALARS,
        "tid": SCALARS,
        "args": st.one_of(
            st.fixed_dictionaries(
                {},
                optional={
                    "device": SCALARS,
                    "stream": SCALARS,
                    "correlation": st.one_of(st.integers(0, 4), SCALARS),
                    "grid": SCALARS,
                    "graph id": SCALARS,
                },
            ),
            ANYTHING,
        ),
    },
)


@FUZZ
@given(
    st.lists(st.one_of(EVENTS, EVENTS, ANYTHING), max_size=12),
    st.dictionaries(st.sampled_from(["deviceProperties", "distributedInfo", "baseTimeNanoseconds"]), ANYTHING),
)
def test_fuzzed_events(tmp_path, events, facts):
    path = tmp_path / "f.json"
    path.write_text(json.dumps(facts | {"traceEvents": events}))
    survives(path)


CELLS = st.one_of(st.integers(-5, 40), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3), st.none())


@FUZZ
@given(
    st.lists(st.tuples(*[CELLS] * 8), min_size=1, max_size=8),
    st.lists(st.tuples(*[CELLS] * 5), max_size=5),
)
def test_fuzzed_export(tmp_path, kernels, runtime):
    path = tmp_path / "f.sqlite"
    path.unlink(missing_ok=True)
    kernels, runtime = (
        [[v % 2**63 if isinstance(v, int) and abs(v) >= 2**63 else v for v in r] for r in rows] for rows in (kernels, runtime)
    )
    db = sqlite3.connect(path)
    db.execute("PRAGMA synchronous = OFF")
    columns = 'start, "end", deviceId, streamId, correlationId, globalPid, graphNodeId, shortName'
    db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
    db.execute('CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, "end", globalTid, correlationId, nameId)')
    db.execute("CREATE TABLE StringIds (id, value)")
    db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", kernels)
    db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", runtime)
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "flash_fwd"), (2, b"\xff"), ("x", None), (3, "cudaGraphLaunch")])
    db.commit()
    db.close()
    survives(path)


@FUZZ
@given(st.lists(st.tuples(*[st.one_of(st.integers(-9, 99).map(str), st.text(max_size=5))] * 5), max_size=8))
def test_fuzzed_csv(tmp_path, rows):
    path = tmp_path / "f.csv"
    text = "Start (ns),Duration (ns),Device,Strm,Name\n" + "\n".join(",".join(r) for r in rows)
    path.write_bytes(text.encode("utf-8", "replace"))
    survives(path)
