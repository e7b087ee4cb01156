"""The one writer of PROFILE_FINDINGS.md: entries are appended whole, what stands there is never read back or rewritten."""

import os
import stat
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from deepdecode.trace.model import Profile, TraceError
from deepdecode.trace.render import Code, Doc, Table, code_span, markdown

try:
    import fcntl
except ImportError:  # not POSIX: O_APPEND alone keeps entries whole on local disks
    fcntl = None

FILE = "PROFILE_FINDINGS.md"
HEADER = """# Profile findings

Entries are appended by `deepdecode advise`, `deepdecode compare` and `deepdecode ladder`; the newest is the last.
A line in an entry is never changed later: a finding that turned out wrong gets a new entry that says so.
"""


def entry(
    title: str,
    command: str,
    profiles: Sequence[Profile],
    docs: Sequence[Doc],
    decision: str | None = None,
    *,
    now: datetime | None = None,
) -> str:
    """One entry as markdown: date, command, the files by hash, the documents, and the decision.

    Args:
        title: a few words of ours.
        command: the command line; shown verbatim.
        profiles: those the documents are about; their files are listed.
        docs: tables, flags and ranking.
        decision: the user's own words, if a choice was made.
        now: the time to write; the current time if None.
    """
    stamp = (now or datetime.now(timezone.utc)).strftime("%Y-%m-%d %H:%M:%S UTC")
    files = tuple(
        (Code(source.path), source.format, str(source.bytes), Code(source.sha256))
        for profile in profiles
        for source in profile.sources
    )
    head = Doc(f"{stamp}: {title}", (Table("", ("file", "format", "bytes", "sha256"), "llrl", files),) if files else ())
    parts = [markdown(head, 2), f"Command: {code_span(command)}", ""]
    parts += [markdown(doc, 3) for doc in docs]
    if decision is not None:
        parts.append(markdown(Doc("Decision", (" ".join(decision.split()),)), 3))
    return "\n".join(parts).rstrip("\n") + "\n"


def append(path: str | Path, text: str) -> None:
    """Append one entry under an exclusive lock, with one write; a new file gets its heading first.

    Raises:
        TraceError: this is no regular file, or it cannot be written.
    """
    try:
        _append(path, text)
    except OSError as e:
        raise TraceError(
            f"findings: {path} must be a file that can be appended to, got {e.strerror}", "--findings names another file"
        ) from None


def _append(path: str | Path, text: str) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    fd = os.open(path, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise TraceError(f"findings: {path} must be a regular file, got something else")
        if fcntl:
            fcntl.flock(fd, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        if size:
            os.lseek(fd, -1, os.SEEK_END)
            before = "\n" if os.read(fd, 1) == b"\n" else "\n\n"
        else:
            before = HEADER + "\n"
        data = memoryview((before + text).encode("utf-8", "backslashreplace"))
        while data:  # a full disk or a signal can shorten a write; the lock keeps others out meanwhile
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
