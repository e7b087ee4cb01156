"""What one rounding does to a whole step: `python tools/rounding.py [--slice tp8] [--layers N] [--out FILE]`, on a GPU.

Runs a rank's decode step (`deepdecode.slices`) on rung 2, and again on others, with one input moved by one unit in its last
place, and with the choices of the first run (experts, entries) put in the place of its own. Prints how far logits and streams
are from the first run, and how many choices differ, and writes it all as JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepdecode.bench.timing import current_commit
from deepdecode.config import ModelConfig
from deepdecode.ops.table import Ops
from deepdecode.rungs import RUNGS
from deepdecode.slices import POSITIONS, RankSlice
from deepdecode.testing.numeric import rel_err

Tensor = torch.Tensor
STEPS = (POSITIONS - 1, 0, 50)
SHOWN = (1, 4, 8, 12, 20, 30, 42)


class Run:
    """A table that notes what a step's layers get and choose.

    experts, entries: an earlier run whose choices are answered with. nudge: what becomes of the first normed input.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        experts: "Run | None" = None,
        entries: "Run | None" = None,
        nudge: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.streams: list[Tensor] = []
        self.experts: list[tuple[Tensor, Tensor]] = []
        self.entries: list[tuple[Tensor, Tensor]] = []

        def boundary(*args: Any) -> Any:
            streams, x, post, comb = ops.mhc_boundary(*args)
            if nudge is not None and not self.streams:
                x = nudge(x)
            self.streams.append(streams.clone())
            return streams, x, post, comb

        def route(*args: Any) -> Any:
            self.experts.append(tuple(part.clone() for part in ops.route(*args)))
            return (experts or self).experts[len(self.experts) - 1]

        def index_topk(*args: Any) -> Any:
            self.entries.append(tuple(part.clone() for part in ops.index_topk(*args)))
            return (entries or self).entries[len(self.entries) - 1]

        self.table = replace(ops, mhc_boundary=boundary, route=route, index_topk=index_topk)


def nudged(share: float) -> Callable[[Tensor], Tensor]:
    """One unit in the last place on this share of the values; of 0, on one value of all."""

    def nudge(x: Tensor) -> Tensor:
        chosen = torch.rand(x.shape, device=x.device, generator=torch.Generator(x.device).manual_seed(7)) < share
        if not share:
            chosen.view(-1)[5] = True
        return torch.where(chosen, (x.view(torch.int16) + 1).view(x.dtype), x)

    return nudge


def cases() -> dict[str, Callable[[Run], Run]]:
    """Each from rung 2's own run, with which it is compared."""
    ops = {rung.name: rung.ops for rung in RUNGS}
    top = [rung for rung in RUNGS if not rung.beside][-1].name
    found: dict[str, Callable[[Run], Run]] = {"rung 2 again": lambda first: Run(ops["2"])}
    for name in ("0", "3", "4", top):
        found[f"rung {name}"] = lambda first, name=name: Run(ops[name])
    found |= {
        "rung 2, one value nudged": lambda first: Run(ops["2"], nudge=nudged(0)),
        "rung 2, a tenth nudged": lambda first: Run(ops["2"], nudge=nudged(0.1)),
        f"rung {top}, rung 2's experts": lambda first: Run(ops[top], experts=first),
        f"rung {top}, rung 2's entries": lambda first: Run(ops[top], entries=first),
        f"rung {top}, both": lambda first: Run(ops[top], experts=first, entries=first),
        "rung 2, a tenth nudged, both": lambda first: Run(ops["2"], experts=first, entries=first, nudge=nudged(0.1)),
    }
    return found


def others(mine: Sequence[tuple[Tensor, Tensor]], theirs: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """Choices of each layer that the other run did not make."""
    return [
        sum(len(set(a) - set(b)) for a, b in zip(x[0].tolist(), y[0].tolist(), strict=True))
        for x, y in zip(mine, theirs, strict=True)
    ]


@torch.inference_mode()
def measure(slice: RankSlice, concurrency: int, at: int) -> list[dict[str, Any]]:
    ops = next(rung.ops for rung in RUNGS if rung.name == "2")
    graph = slice.graph(ops, concurrency)

    def run(one: Run) -> Tensor:
        graph.seek(at)
        graph.eager(one.table)
        return graph.logits.clone()

    first = Run(ops)
    want = run(first)
    rows = []
    for name, make in cases().items():
        one = make(first)
        logits = run(one)
        a, b = want.double().log_softmax(-1), logits.double().log_softmax(-1)
        rows.append({
            "case": name, "concurrency": concurrency, "step": at, "logits": rel_err(logits, want),
            "divergence": float((a.exp() * (a - b)).sum(-1).mean()),
            "best_kept": float((logits.argmax(-1) == want.argmax(-1)).float().mean()),
            "streams": [rel_err(x, y) for x, y in zip(one.streams[2::2], first.streams[2::2], strict=True)],
            "experts": others(one.experts, first.experts), "entries": others(one.entries, first.entries),
        })  # fmt: skip
        row = rows[-1]
        streams = " ".join(f"{row['streams'][n - 1]:.1e}" for n in SHOWN if n <= len(row["streams"]))
        print(f"C={concurrency} step {at:3} {name:30} logits {row['logits']:.2e}  streams {streams}  "
              f"experts {sum(row['experts'])}  entries {sum(row['entries'])}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slice", default="tp8")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/h200/rounding.json"))
    parser.add_argument("--commit")
    args = parser.parse_args()
    slice = RankSlice(ModelConfig(), args.slice, layers=args.layers, max_concurrency=16)
    document = {
        "schema": 1, "device": {"name": torch.cuda.get_device_name()}, "versions": {"torch": torch.__version__},
        "commit": args.commit or current_commit(), "date": time.strftime("%Y-%m-%d"), "command": "python tools/rounding.py",
        "slice": args.slice, "layers": slice.config.num_layers, "context": slice.context, "rows": [],
    }  # fmt: skip
    for concurrency, at in (*((1, at) for at in STEPS), (16, STEPS[0])):
        document["rows"] += measure(slice, concurrency, at)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
