"""PROFILE_FINDINGS.md: appended whole, never rewritten, safe under two writers, inert whatever kernels are called."""

import os
import re
import subprocess
import sys
from datetime import datetime, timezone

import pytest
from made_profiles import profile

from deepdecode.trace.advise import advise
from deepdecode.trace.compare import compare
from deepdecode.trace.findings import HEADER, append, entry
from deepdecode.trace.model import TraceError
from deepdecode.trace.report import advice_doc, comparison_doc

HOSTILE = "</script><img src=x onerror=alert(1)>|`b`\n# heading\x1b[31m[/x] @user https://x.y [l](javascript:1)"
KERNELS = [(HOSTILE, "attention", 4.0), ("gemm", "gemm_simt", 5.0)]


def test_entry_holds_what_a_reader_needs():
    profiles = [profile(KERNELS, name="a"), profile([(HOSTILE, "attention", 2.0), ("gemm", "gemm_simt", 5.0)], name="b")]
    docs = [comparison_doc(compare(profiles, ["before", "after"])), advice_doc(advise(profiles[1], "after"))]
    now = datetime(2026, 11, 30, 21, 0, tzinfo=timezone.utc)
    text = entry("advice on `after`", "deepdecode advise a b", profiles, docs, "gemm first:\n it is sure", now=now)
    assert text.startswith("## 2026-11-30 21:00:00 UTC: advice on `after`\n")
    assert "Command: `deepdecode advise a b`" in text
    for source in (source for one in profiles for source in one.sources):
        assert f"| `{source.path}` | kineto | 1234 | `{source.sha256}` |" in text
    assert "### Decision\n\ngemm first: it is sure\n" in text
    for words in (
        "#### Time per step by category",
        "#### Flags",
        "#### Verdict",
        "Candidates, best first",
        "What would change the choice",
    ):
        assert words in text
    assert "10.000 -> 8.000 ms a step" in text


def test_hostile_names_are_inert():
    text = entry("x", "deepdecode " + HOSTILE, [profile(KERNELS)], [advice_doc(advise(profile(KERNELS), HOSTILE))], HOSTILE)
    assert "\x1b" not in text
    assert not re.search(r"^# ", text, re.MULTILINE)
    # outside code spans and escapes there is no tag, link or mention
    bare = re.sub(r"\\.", "", re.sub(r"`[^`\n]*`", "", text))
    assert not re.search(r"[<\[@]|https?:", bare)
    # every row of a table has as many cells as its head
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [re.sub(r"\\\|", "", row).count("|") for row in table.splitlines()]
        assert len(set(rows)) == 1, table


def test_append_keeps_every_byte(tmp_path):
    path = tmp_path / "F.md"
    append(path, "## one\n")
    first = path.read_bytes()
    assert first.decode() == HEADER + "\n## one\n"
    append(path, "## two\n")
    assert path.read_bytes() == first + b"\n## two\n"
    path.write_bytes(b"mine, no newline \xff")  # not even text of ours, or UTF-8
    append(path, "## three\n")
    assert path.read_bytes() == b"mine, no newline \xff\n\n## three\n"


def test_two_writers_lose_nothing(tmp_path):
    path = tmp_path / "F.md"
    code = (
        "import sys; from deepdecode.trace.findings import append\n"
        "for i in range(40): append(sys.argv[1], f'## {sys.argv[2]}-{i}\\n' + (sys.argv[2] * 99 + '\\n') * 300)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, path, who]) for who in "AB"]
    assert [writer.wait() for writer in writers] == [0, 0]
    body = path.read_text()
    assert body.count("# Profile findings") == 1
    for who in "AB":
        assert re.findall(rf"^## {who}-(\d+)$", body, re.MULTILINE) == [str(i) for i in range(40)]
    entries = body.split("## ")[1:]
    assert all(len(set(re.sub(r"^.*\n|\s", "", text, count=0).replace("\n", ""))) <= 1 for text in entries)


def test_cannot_write(tmp_path):
    with pytest.raises(TraceError, match=r"findings: .* must be a file that can be appended to, got Is a directory"):
        append(tmp_path, "## x\n")
    if os.geteuid():
        (tmp_path / "ro").touch(0o444)
        with pytest.raises(TraceError, match="got Permission denied"):
            append(tmp_path / "ro", "## x\n")
