"""The `ladder` command: on a GPU the campaign, without one what can be said there, and reports of what was measured."""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepdecode.bench.files import save_results
from deepdecode.config import ModelConfig
from deepdecode.errors import HintedError
from deepdecode.ladder.campaign import Plan, all_rungs, climb, known, rungs_told
from deepdecode.ladder.findings import write_findings
from deepdecode.ladder.follow import ModelGates
from deepdecode.ladder.gates import Gate
from deepdecode.ladder.instruments import Instruments, gpu_instruments
from deepdecode.ladder.results import SCHEMA, make_room, read_results, set_aside
from deepdecode.ladder.table import ladder_doc
from deepdecode.ops.table import Ops
from deepdecode.progress import Progress
from deepdecode.rungs import RUNGS, Rung
from deepdecode.slices import POSITIONS, SLICES, RankSlice
from deepdecode.trace.findings import FILE
from deepdecode.trace.render import markdown, show

CONCURRENCY, PROFILED, CONTEXT = (1, 16, 64), 32, 8192
MOST = 4096


@dataclass(frozen=True)
class Request:
    """What was asked for; None is a default."""

    slice: str = "tp8"
    rungs: str | None = None
    layers: int | None = None
    concurrency: str | None = None
    context: int = CONTEXT
    resume: bool = False
    out: Path = Path("results")
    findings: Path = Path(FILE)
    no_findings: bool = False
    commit: str | None = None
    report: Path | None = None
    json: bool = False
    markdown: bool = False

    @property
    def command(self) -> str:
        """What measures the same again; where it was written does not matter."""
        names = ("slice", "rungs", "layers", "concurrency", "context")
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(Request, name)}
        return " ".join(["deepdecode ladder", *(f"--{name} {value}" for name, value in chosen.items())])


def ladder_command(request: Request) -> int:
    """0: all was measured, or without a GPU all checks passed; 1: a rung or a check failed."""
    if request.report:
        return _report(request, read_results(request.report), request.report)
    rungs, levels = choose_rungs(request.rungs), choose_levels(request.concurrency)
    config = ModelConfig()
    if request.slice not in SLICES:
        raise ValueError(f"ladder: --slice must be one of {', '.join(SLICES)}, got {request.slice}")
    if not POSITIONS <= request.context <= config.max_positions:
        raise ValueError(f"ladder: --context must be {POSITIONS} to {config.max_positions}, got {request.context}")
    if request.layers is not None and not 1 <= request.layers <= config.num_layers:
        raise ValueError(f"ladder: --layers must be 1 to {config.num_layers}, got {request.layers}")
    if not torch.cuda.is_available():
        return _offline(request, rungs)
    return _measure(request, rungs, levels, config)


def choose_rungs(text: str | None) -> tuple[Rung, ...]:
    """The named rungs, in the ladder's order; by default all but those that take minutes before their first step.

    Raises:
        ValueError: a name is no rung's, or none is given.
    """
    if text is None:
        return tuple(rung for rung in RUNGS if not rung.asked)
    names = [name.strip() for name in text.split(",") if name.strip()]
    there = [rung.name for rung in RUNGS]
    unknown = [name for name in names if name not in there]
    if unknown or not names:
        raise ValueError(f"ladder: --rungs must be of {', '.join(there)}, got {unknown[0] if unknown else 'none'}")
    return tuple(rung for rung in RUNGS if rung.name in names)


def choose_levels(text: str | None) -> tuple[int, ...]:
    """Sequences decoded at once, in rising order.

    Raises:
        ValueError: a part is no number in range.
    """
    if text is None:
        return CONCURRENCY
    parts = [part.strip() for part in text.split(",")]
    wrong = next((part for part in parts if not (part.isdecimal() and 1 <= int(part) <= MOST)), None)
    if wrong is not None:
        raise ValueError(f"ladder: --concurrency must be numbers from 1 to {MOST} with commas between, got {wrong or 'none'}")
    return tuple(sorted({int(part) for part in parts}))


def _offline(request: Request, rungs: Sequence[Rung]) -> int:
    from deepdecode.ladder.offline import SAID, offline_doc, run_offline

    # tiny tensors: a second thread costs more than it gives
    torch.set_num_threads(1)
    bar = Progress("checks without a GPU")
    document = run_offline(bar.step)
    bar.end()
    document |= {"rungs": {rung.name: {"title": rung.title, "measured": "not run"} for rung in rungs}}
    if request.json:
        print(json.dumps({"schema": SCHEMA, **document}, indent=1))
    else:
        _print(request, offline_doc(document, [rung.name for rung in rungs]))
    print(f"ladder: {SAID}", file=sys.stderr)
    return 1 if any(check["passed"] is False for check in document["checks"]) else 0


def _measure(request: Request, rungs: tuple[Rung, ...], levels: tuple[int, ...], config: ModelConfig) -> int:
    from deepdecode.bench.timing import current_commit

    device = torch.device("cuda", torch.cuda.current_device())
    instruments = gpu_instruments(device)
    profiled = PROFILED if request.concurrency is None or PROFILED in levels else levels[-1]
    layers = request.layers or config.num_layers
    plan = Plan(request.slice, rungs, levels, profiled, request.context, layers, request.commit or current_commit())
    card = str(instruments.device["name"]).lower().removeprefix("nvidia ").replace(" ", "-")
    path = request.out / card / f"ladder-{request.slice}.json"
    # what would stop the run is found before it has cost anything
    make_room(path)
    kept = _kept(request, plan, path)
    if kept is not None:
        # a file has one concurrency whose traces are kept
        plan = replace(plan, profiled=kept["profiled_concurrency"])
    gates = ModelGates(device)
    # on one CPU thread, while the GPU makes weights
    preparing = threading.Thread(target=gates.prepare)
    preparing.start()
    bar = Progress("layers made")
    slice = RankSlice(
        config,
        request.slice,
        context=request.context,
        layers=request.layers,
        max_concurrency=max(plan.levels),
        device=device,
        progress=bar.step,
    )
    bar.end()
    preparing.join()
    document = run(request, plan, slice, instruments, gates, path)
    return _report(request, document, path)


def _kept(request: Request, plan: Plan, path: Path) -> dict[str, Any] | None:
    """The result file that a run with --resume goes on with; None where it has no row of this measurement."""
    if not (request.resume and path.exists()):
        return None
    document = read_results(path)
    return document if known(document["rows"], plan) else None


def run(
    request: Request,
    plan: Plan,
    slice: Any,
    instruments: Instruments,
    gates: Callable[[Ops], Sequence[Gate]],
    path: Path,
) -> dict[str, Any]:
    """Climb, and keep the result file up to date on the way."""
    kept = _kept(request, plan, path)
    done = known(kept["rows"], plan) if kept else []
    commands = kept["command"].split(" && ") if kept else []
    document = {
        "schema": SCHEMA,
        "device": instruments.device,
        "versions": instruments.versions,
        "commit": plan.commit,
        "date": time.strftime("%Y-%m-%d"),
        # what measures the file again: of a run that went on with other rungs, both
        "command": " && ".join(commands if request.command in commands else [*commands, request.command]),
        "slice": plan.slice,
        "context": plan.context,
        "layers": plan.layers,
        "profiled_concurrency": plan.profiled,
        "left_out": left_out(plan.slice),
        "rungs": rungs_told(all_rungs(plan, done)),
        "rows": [],
    }
    set_aside(path, done)
    if done:
        print(f"{path}: {len(done)} measurements of commit {plan.commit} are kept", file=sys.stderr)
    total = len(plan.rungs) * len(plan.levels)
    bar = Progress("measurements")

    def save_and_count(rows: list[dict[str, Any]]) -> None:
        save_results(path, {**document, "rows": rows})
        bar.step(len(rows), max(total, len(rows)))

    rows = climb(plan, slice, instruments, gates, path, done=done, save=save_and_count, say=_say)
    bar.end()
    save_results(path, {**document, "rows": rows})
    return {**document, "rows": rows}


def left_out(slice: str) -> list[str]:
    items = ["one rank of eight, collectives left out: nothing is sent to other GPUs, and nobody is waited for"]
    if slice == "dp8ep8":
        items.append("C is of the whole service: this rank attends an eighth of the sequences, rounded up")
        items.append("the rows that other ranks would send to this rank's experts are seeded")
    return items


def _say(row: dict[str, Any]) -> None:
    what = f"rung {row['rung']:<11} C={row['concurrency']:<4}"
    if "error" in row:
        print(f"{what} {row['error']}", file=sys.stderr, flush=True)
        return
    attention = row["profile"]["categories"].get("attention", {"ms": 0.0})["ms"]
    times = f"{row['tokens_per_s']:9.1f} tokens/s  TPOT {row['us_warm'] / 1e3:8.3f} ms  attention {attention:7.3f} ms"
    right = f"{row['times_floor']:.1f}x floor  error {row['rel_err']:.1e}"
    print(f"{what} {times}  {right}  in {sum(row['wall_s'].values()):.1f} s", file=sys.stderr, flush=True)


def _report(request: Request, document: dict[str, Any], path: Path) -> int:
    """Tables to stdout; pictures and findings beside what was measured."""
    if request.json:
        print(json.dumps(document, indent=1))
    else:
        _print(request, ladder_doc(document))
    try:
        from deepdecode.ladder.plots import plot_ladder

        for picture in plot_ladder(document, path):
            print(f"picture: {picture}", file=sys.stderr)
    except ImportError as error:
        if request.report:
            raise HintedError(
                f"ladder: pictures must have matplotlib, got {error}", "pip install 'deepdecode[report]'"
            ) from None
        print(f"no pictures without matplotlib; `deepdecode ladder --report {path}` draws them later", file=sys.stderr)
    if not request.no_findings:
        moved = write_findings(document, path.parent, request.findings)
        if moved and not request.json:
            _print(request, moved)
        if moved:
            print(f"appended to {request.findings}", file=sys.stderr)
    return 1 if any("error" in row for row in document["rows"]) else 0


def _print(request: Request, doc: Any) -> None:
    if request.markdown:
        sys.stdout.write(markdown(doc))
    else:
        show(doc, sys.stdout)
    sys.stdout.flush()
