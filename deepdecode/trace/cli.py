"""The commands `profile`, `compare` and `advise`. argparse, and late imports: a small trace must not wait for the tool."""

import argparse
import io
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deepdecode.trace.model import CATEGORIES, UNKNOWN_LIMIT, Profile, TraceError

COMMANDS = {
    "profile": "where the time of one trace goes, by category and by kernel",
    "compare": "what changed between two or more traces, or serving results, per step",
    "advise": "what to work on next, as upper bounds, and record the decision",
}

EXAMPLES = {
    "profile": """examples:
  deepdecode profile tests/data/decode_original.json.gz
  deepdecode profile ranks/ --html report.html
  deepdecode profile export.sqlite --json > profile.json
  deepdecode profile trace.json.gz --why sparse_attn_split_kernel
  deepdecode profile --why nvjet_sm103_tst_64x8 --rules my.rules

exit status: 0, 1 when there is no GPU work or too much of it is in no category (--unknown-limit), 2 on error""",
    "compare": """examples:
  deepdecode compare tests/data/decode_original.json.gz tests/data/decode_mma.json.gz
  deepdecode compare original.json.gz mma.json.gz split.json.gz --label original --label MMA --label "MMA + split-K"
  deepdecode compare before.sqlite after.json.gz --allow gpu-mismatch --html report.html
  deepdecode compare sglang_before.jsonl sglang_after.jsonl

exit status: 0, 1 when a step became slower or a verdict is refused, 2 on error""",
    "advise": """examples:
  deepdecode advise tests/data/decode_splitk.json.gz
  deepdecode advise tests/data/decode_splitk.json.gz --decide "tensor-core-gemm: largest sure gain, selection check is ready"
  deepdecode advise before.json.gz after.json.gz --speedup fuse-glue=4
  deepdecode advise trace.json.gz --floor split-attention=0.35

Files of tests/data are in the repository.
An entry is appended to PROFILE_FINDINGS.md in the current folder; --findings names another file, --no-findings none.
exit status: 0, 1 when the traces could not be compared fairly, 2 on error""",
}


class Usage(TraceError):
    """A command line that cannot be followed."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Usage(f"{self.prog.removeprefix('deepdecode ')}: {message}", f"{self.prog} --help")


def parser(command: str) -> argparse.ArgumentParser:
    p = Parser(
        prog=f"deepdecode {command}",
        description=COMMANDS[command][0].upper() + COMMANDS[command][1:] + ".",
        epilog=EXAMPLES[command],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = "a Kineto trace (.json, .json.gz), an Nsight Systems export (.sqlite), an nsys stats CSV, or a folder of ranks"
    if command == "profile":
        p.add_argument("trace", nargs="?", help=kinds)
        p.add_argument(
            "--why",
            metavar="KERNEL",
            help="name the rule that places this kernel; with a trace, every kernel with this in its name",
        )
        p.add_argument(
            "--unknown-limit",
            type=float,
            default=100 * UNKNOWN_LIMIT,
            metavar="PERCENT",
            help="exit 1 above this (default %(default)g)",
        )
    else:
        p.add_argument("traces", nargs="+", metavar="trace", help=kinds)
        p.add_argument(
            "--label", action="append", default=[], metavar="NAME", help="a name for each trace, in order; default: file names"
        )
        p.add_argument(
            "--allow", action="append", default=[], metavar="CODE", help="accept this mismatch and give a verdict all the same"
        )
    if command == "advise":
        p.add_argument(
            "--speedup", action="append", default=[], metavar="CANDIDATE=K", help="how many times faster a candidate gets"
        )
        p.add_argument(
            "--floor",
            action="append",
            default=[],
            metavar="CANDIDATE=MS",
            help="its roofline time per step; k is the time over it",
        )
        p.add_argument(
            "--decide",
            metavar="TEXT",
            help="record this choice: a candidate of the ranking, a colon, and why; or nothing, a colon, and why",
        )
        p.add_argument("--no-findings", action="store_true", help="append nothing")
    if command != "profile":
        default = "PROFILE_FINDINGS.md" if command == "advise" else None
        p.add_argument(
            "--findings",
            metavar="FILE",
            default=default,
            help="append an entry to this markdown file" + (f" (default {default})" if default else ""),
        )
    p.add_argument("--rules", metavar="FILE", help="rules of your own, tried before the built-in ones")
    phases = ("decode", "prefill", "mixed")
    p.add_argument("--phase", choices=phases, help="count only steps of this phase, where a trace holds several")
    p.add_argument("--top", type=int, default=15, metavar="N", help="kernels to list (default %(default)s)")
    p.set_defaults(command=command)
    form = p.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON document, with a schema number")
    form.add_argument("--markdown", action="store_true", help="markdown instead of a terminal table")
    p.add_argument("--html", metavar="FILE", help="write a report page as well: one file, works offline")
    p.add_argument("--redact", action="store_true", help="leave out file and host names, paths and user annotations")
    return p


def main(argv: list[str]) -> int:
    """Run `argv`, e.g. ["profile", "trace.json"]; gives the exit status. Errors are `TraceError` and `OSError`."""
    if not argv or argv[0] not in COMMANDS:
        raise Usage(f"command must be one of {', '.join(COMMANDS)}, got {argv[0] if argv else 'none'}", "deepdecode --help")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal shows what it cannot print as escapes
    command = argv[0]
    try:
        args = parser(command).parse_args(argv[1:])
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    if args.top < 1:
        raise Usage(f"{command}: --top must be >= 1, got {args.top}")
    for option in ("html", "findings", "rules", "why"):
        if (named := getattr(args, option, None)) is not None and not named.strip():
            raise Usage(f"{command}: --{option} must name something, got nothing")
    protect(args)
    return {"profile": run_profile, "compare": run_compare, "advise": run_advise}[command](args, argv)


# ---- the commands


def run_profile(args: argparse.Namespace, argv: list[str]) -> int:
    from deepdecode.trace.render import clean
    from deepdecode.trace.report import profile_doc

    if args.trace is None and args.why is None:
        raise Usage("profile: a trace must be given, got none", "deepdecode profile --help")
    if not 0 <= args.unknown_limit <= 100:
        raise Usage(f"profile: --unknown-limit must be between 0 and 100, got {args.unknown_limit:g}")
    if args.trace is None:
        return explain(args.why, None, args)
    (profile,), (label,) = read([args.trace], args)
    if args.why is not None:
        return explain(args.why, profile, args)
    output(args, profile, profile_doc(profile, label, args.top, columns(args)))
    write_page(args, [profile], [label])
    if profile.main is None:
        say("no GPU work was recorded")
        return 1
    unknown = 100 * profile.device.unknown_share
    if unknown > args.unknown_limit:
        worst = next((k for k in profile.device.kernel_rows if k.category == "unknown"), None)
        largest = f"; the largest is {clean(worst.name)[:120]}" if worst else ""
        say(f"{unknown:.1f} % of GPU time is in no category, the limit is {args.unknown_limit:g} %{largest}")
        return 1
    return 0


def explain(name: str, profile: Profile | None, args: argparse.Namespace) -> int:
    """Which rule placed a kernel: of the name itself, or of every kernel of a profile that has it in its name."""
    from deepdecode.trace.categories import load_rules, why
    from deepdecode.trace.render import Doc, Table, distinct

    if profile is None:
        rule = why(name, load_rules(args.rules))
        placed = [(name, rule.category, str(rule))]
    else:
        rows = profile.device.kernel_rows
        placed = [(row.name, row.category, row.rule) for row in rows if name.lower() in row.name.lower()]
        if not placed:
            raise TraceError(
                f"profile: --why must name a kernel of the trace, got {name}", "without a trace, any name is placed"
            )
    names = distinct((kernel for kernel, _, _ in placed), 100)
    rows = tuple((names[kernel], CATEGORIES.get(category, category), rule) for kernel, category, rule in placed)
    found = [{"name": kernel, "category": category, "rule": rule} for kernel, category, rule in placed]
    output(args, {"schema": 1, "kernels": found}, Doc("Rules", (Table("", ("kernel", "category", "rule"), "lll", rows),)))
    return 0


def run_compare(args: argparse.Namespace, argv: list[str]) -> int:
    from deepdecode.trace.compare import check_allow, compare
    from deepdecode.trace.report import comparison_doc
    from deepdecode.trace.servebench import is_serving

    if len(args.traces) < 2:
        raise Usage(f"compare: two or more traces must be given, got {len(args.traces)}", "deepdecode compare --help")
    serving = [os.path.isfile(path) and is_serving(path) for path in args.traces]
    if all(serving):
        return run_serving(args, argv)
    if any(serving):
        raise Usage("compare: files must all be traces or all be serving results, got both", "compare them apart")
    check_allow(args.allow)
    profiles, labels = read(args.traces, args)
    comparison = compare(profiles, labels, args.allow)
    doc = comparison_doc(comparison, args.top, columns(args))
    output(args, comparison, doc)
    write_page(args, profiles, labels, comparison)
    record(args, argv, "comparison of " + ", ".join(quoted(labels)), profiles, [doc])
    return 1 if comparison.refused or comparison.regressed else 0


def run_serving(args: argparse.Namespace, argv: list[str]) -> int:
    from deepdecode.trace.redact import redact_serving
    from deepdecode.trace.report import serving_doc
    from deepdecode.trace.servebench import compare_serving, read_serving

    if args.html:
        raise Usage("compare: --html must be used with traces, got serving results", "--markdown or --json hold the same")
    labels = name_them(args.traces, args)
    files = [read_serving(path, label) for path, label in zip(args.traces, labels, strict=True)]
    if args.redact:
        files = [redact_serving(file, i) for i, file in enumerate(files)]
    comparison = compare_serving(files, args.allow)
    doc = serving_doc(comparison)
    output(args, comparison, doc)
    record(args, argv, "serving results of " + ", ".join(quoted(labels)), [], [doc])
    return 1 if comparison.refused or comparison.regressed else 0


def run_advise(args: argparse.Namespace, argv: list[str]) -> int:
    from deepdecode.trace.advise import advise, check_decision, check_numbers
    from deepdecode.trace.compare import check_allow, compare
    from deepdecode.trace.render import Doc
    from deepdecode.trace.report import advice_doc, comparison_doc, profile_doc

    if args.decide is not None and not args.decide.strip():
        raise Usage("advise: --decide must say what was chosen and why, got nothing")
    if args.decide is not None and args.no_findings:
        raise Usage("advise: --decide must be recorded, got --no-findings as well")
    speedups = pairs("speedup", args.speedup)
    floors = {name: 1e6 * value for name, value in pairs("floor", args.floor).items()}
    check_numbers(speedups, floors)
    check_allow(args.allow)
    profiles, labels = read(args.traces, args)
    comparison = compare(profiles, labels, args.allow) if len(profiles) > 1 else None
    advice = advise(profiles[-1], labels[-1], speedups=speedups, floors_ns=floors)
    if args.decide is not None:
        check_decision(args.decide, advice)
    first = (
        comparison_doc(comparison, args.top, columns(args))
        if comparison
        else profile_doc(profiles[-1], labels[-1], args.top, columns(args))
    )
    docs = [first, advice_doc(advice)]
    shown = Doc(docs[1].title, (*docs[0].parts, *docs[1].parts)) if comparison else docs[1]
    output(args, {"schema": advice.schema, "advice": advice, "comparison": comparison}, shown)
    write_page(args, profiles, labels, comparison, advice)
    record(args, argv, "advice on " + quoted(labels)[-1], profiles, docs, args.decide)
    return 1 if comparison and comparison.refused else 0


# ---- what they share


def protect(args: argparse.Namespace) -> None:
    """What is read must not be written, whatever was typed."""
    paths = [path for path in (getattr(args, "trace", None), args.rules, *getattr(args, "traces", ())) if path]
    inputs = [Path(path) for path in paths if os.path.exists(path)]
    folders = [path for path in inputs if path.is_dir() and os.access(path, os.R_OK | os.X_OK)]
    inputs += [file for folder in folders for file in folder.iterdir()]
    html, findings = getattr(args, "html", None), getattr(args, "findings", None)
    if html and findings and os.path.realpath(html) == os.path.realpath(findings):
        raise Usage(f"{args.command}: --html must name a file that is not --findings, got {html} twice")
    for option in ("html", "findings"):
        target = getattr(args, option, None)
        if target and os.path.exists(target) and any(os.path.samefile(target, path) for path in inputs if path.exists()):
            raise Usage(f"{args.command}: --{option} must name a file that is not an input, got {target}")


def pairs(option: str, words: Sequence[str]) -> dict[str, float]:
    """`CANDIDATE=NUMBER` words."""
    found = {}
    for word in words:
        name, equals, number = word.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise Usage(f"advise: --{option} must be CANDIDATE=NUMBER, got {word}", "deepdecode advise --help")
    return found


def name_them(paths: Sequence[str], args: argparse.Namespace) -> list[str]:
    """One label a path: the user's, or the file's name without its suffixes, made unique."""
    given = getattr(args, "label", [])
    if given and len(given) != len(paths):
        raise Usage(f"{args.command}: --label must be given {len(paths)} times, once for each file, got {len(given)}")
    if given:
        labels = [label.strip() or f"trace-{i + 1}" for i, label in enumerate(given)]
    elif args.redact:
        labels = [f"trace-{i + 1}" for i in range(len(paths))]
    else:
        labels = [stem(path) for path in paths]
    seen: dict[str, int] = {}
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
    return [f"{label} ({i + 1})" if seen[label] > 1 else label for i, label in enumerate(labels)]


def stem(path: str) -> str:
    name = Path(path).resolve().name or path
    for suffix in (".gz", ".json", ".jsonl", ".sqlite", ".csv", ".trace", ".pt"):
        name = name.removesuffix(suffix) or name
    return name


def quoted(labels: Sequence[str]) -> list[str]:
    from deepdecode.trace.render import quote

    return [quote(label) for label in labels]


def read(paths: Sequence[str], args: argparse.Namespace) -> tuple[list[Profile], list[str]]:
    """Profiles and labels of the traces, redacted if asked; progress goes to stderr."""
    from deepdecode.trace.categories import load_rules
    from deepdecode.trace.load import load
    from deepdecode.trace.profile import profile

    labels = name_them(paths, args)
    rules = load_rules(args.rules)
    profiles = []
    for path, label in zip(paths, labels, strict=True):
        with Progress(label) as progress:
            profiles.append(profile(load(path, progress=progress), rules=rules, phase=args.phase))
    if args.redact:
        from deepdecode.trace.redact import redact_profile

        profiles = [redact_profile(one, i) for i, one in enumerate(profiles)]
    return profiles, labels


class Progress:
    """Reading progress on stderr: a line that is rewritten on a terminal, a new line every few seconds elsewhere."""

    AFTER, EVERY = 1.0, 5.0

    def __init__(self, label: str):
        from deepdecode.trace.render import clean

        self.label = clean(label)[:60]
        self.start = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.start < self.AFTER or now - self.last < (0.2 if self.terminal else self.EVERY):
            return
        self.last, self.shown = now, True
        text = f"reading {self.label}: {min(100, 100 * done // max(1, total))} % of {total / 1e6:.0f} MB"
        print(f"\r{text}\x1b[K" if self.terminal else text, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self.shown and self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def columns(args: argparse.Namespace) -> int:
    """Of the terminal that the tables go to; 0 where they go elsewhere."""
    to_terminal = sys.stdout.isatty() and not (args.json or args.markdown)
    return shutil.get_terminal_size().columns if to_terminal else 0


def output(args: argparse.Namespace, value, doc) -> None:
    from deepdecode.trace import render
    from deepdecode.trace.report import to_json

    if args.json:
        sys.stdout.write(to_json(value))
    elif args.markdown:
        sys.stdout.write(render.markdown(doc))
    else:
        render.show(doc, sys.stdout)
    sys.stdout.flush()


def write_page(args: argparse.Namespace, profiles, labels, comparison=None, advice=None) -> None:
    if args.html:
        from deepdecode.trace.html import write_html

        write_html(args.html, profiles, labels, comparison, advice)
        say(f"report: {args.html}")


def record(args: argparse.Namespace, argv: list[str], title: str, profiles, docs, decision: str | None = None) -> None:
    if not args.findings or getattr(args, "no_findings", False):
        return
    from deepdecode.trace.findings import append, entry
    from deepdecode.trace.redact import redact_command

    command = redact_command(argv) if args.redact else "deepdecode " + shlex.join(argv)
    append(args.findings, entry(title, command, profiles, docs, decision))
    say(f"appended to {args.findings}")


def say(text: str) -> None:
    from deepdecode.trace.render import clean

    print(clean(text), file=sys.stderr)
