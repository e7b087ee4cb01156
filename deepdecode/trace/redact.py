"""What is left out before a profile or a serving result is shared: names of files and hosts, paths, what users annotated."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace

from deepdecode.trace.model import SKIPPED, Profile, Source
from deepdecode.trace.servebench import Point, Serving

_PATHS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\s\\/:;,<>()\[\]{}'\"`]+){2,}")


def redact_profile(profile: Profile, index: int) -> Profile:
    """Without file and host names, paths and what users or engines annotated. GPU and kernel names, times and hashes stay."""
    sources = tuple(
        Source(f"trace-{index + 1}" + (f"-{i + 1}" if len(profile.sources) > 1 else ""), s.sha256, s.format, s.bytes)
        for i, s in enumerate(profile.sources)
    )
    secrets = {name for source in profile.sources for name in (source.path, re.split(r"[\\/]", source.path)[-1]) if name}

    def text(value: str) -> str:
        for secret in sorted(secrets, key=len, reverse=True):
            value = value.replace(secret, sources[0].path)
        return _PATHS.sub("<path>", value)

    def votes(items):
        return tuple(replace(vote, note="") for vote in items)

    devices = tuple(
        replace(
            dev,
            steps=replace(dev.steps, votes=votes(dev.steps.votes)),
            kernel_rows=tuple(
                replace(row, name=text(row.name), rule=row.rule if row.rule.startswith("builtin") else "user rule")
                for row in dev.kernel_rows
            ),
            gaps=tuple(replace(gap, before=text(gap.before), after=text(gap.after)) for gap in dev.gaps),
            timeline=dev.timeline and replace(dev.timeline, names=tuple(text(name) for name in dev.timeline.names)),
        )
        for dev in profile.devices
    )
    return replace(
        profile,
        sources=sources,
        devices=devices,
        phase_votes=votes(profile.phase_votes),
        warnings=tuple(replace(warning, text=text(warning.text)) for warning in profile.warnings),
        rules="builtin" if profile.rules == "builtin" else "with user rules",
        notes=tuple(text(note) for note in profile.notes if not note.startswith(SKIPPED))
        + (("other files of the folder were skipped",) if any(n.startswith(SKIPPED) for n in profile.notes) else ()),
    )


def redact_command(argv: Sequence[str]) -> str:
    """The command's shape: options stay, paths and free text go."""
    kept = []
    for word in argv:
        option, equals, _ = word.partition("=")
        kept.append(option + ("=<...>" if equals else "") if word.startswith("--") else "<...>")
    return " ".join(["deepdecode", argv[0], *kept[1:]]) if argv else "deepdecode"


def redact_serving(file: Serving, index: int) -> Serving:
    """Without the file's name and what names a model or a place; equal names stay equal."""
    return replace(file, path=f"result-{index + 1}", points=tuple(_without_paths(point) for point in file.points))


def _without_paths(point: Point) -> Point:
    """A model's name, or any other that looks like one, may be a path on somebody's disk."""
    settings = {
        name: f"{name}-{hashlib.sha256(value.encode('utf-8', 'replace')).hexdigest()[:8]}"
        if name == "model" or "/" in value or "\\" in value
        else value
        for name, value in point.settings.items()
    }
    return replace(point, settings=settings)
