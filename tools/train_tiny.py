"""Train the embedded model: text, training, export, card.

    python tools/train_tiny.py data OUT [--stdlib DIR]      tokenizer and tokens, from CPython 3.11.7's standard library
    python tools/train_tiny.py train DATA RUN [options]     train, or go on with a run; --seconds ends a piece
    python tools/train_tiny.py speed DATA [options]         time of a step, as a graph or with --eager; nothing is kept
    python tools/train_tiny.py export DATA RUN MODEL        an official checkpoint: FP8, FP4, tokenizer, card
    python tools/train_tiny.py curve RUN                    the loss curve as a picture
    python tools/train_tiny.py prompts MODEL                greedy text of twenty prompts, and how many are Python
    python tools/train_tiny.py embed MODEL                  make an exported model the one that deepdecode has inside

Resumable: the same command goes on where the last piece ended, bit for bit on a CPU. Everything follows from --seed.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from training import data
from training.config import CONFIG
from training.export import curve, embed, export
from training.loop import Recipe, Run
from training.prompts import PROMPTS, complete, parses

from deepdecode.tiny import EMBEDDED


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = p.add_subparsers(dest="what", required=True)
    one = what.add_parser("data")
    one.add_argument("out", type=Path)
    one.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    one.add_argument("--vocab", type=int, default=CONFIG.vocab_size)
    both = [what.add_parser("train"), what.add_parser("speed")]
    both[0].add_argument("data", type=Path)
    both[0].add_argument("run", type=Path)
    both[0].add_argument("--seconds", type=float, default=float("inf"), help="end this piece after so long")
    both[0].add_argument("--planned", type=float, help="with --steps 0: as many steps as end after so many seconds")
    both[0].add_argument("--until", type=int, help="end this piece at this step")
    both[0].add_argument("--eval-every", type=int, default=160)
    both[1].add_argument("data", type=Path)
    both[1].add_argument("--timed", type=int, default=20, help="steps that are timed, after three others")
    for one in both:
        one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        one.add_argument("--eager", action="store_true", help="no graphs: every launch on its own")
        for field in dataclasses.fields(Recipe):
            if field.name != "betas":
                one.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    one = what.add_parser("export")
    one.add_argument("data", type=Path)
    one.add_argument("run", type=Path)
    one.add_argument("model", type=Path)
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where its figures are measured")
    one = what.add_parser("curve")
    one.add_argument("run", type=Path)
    one = what.add_parser("prompts")
    one.add_argument("model", type=Path)
    one.add_argument("--tokens", type=int, default=64)
    what.add_parser("embed").add_argument("model", type=Path)
    args = p.parse_args(argv)
    try:
        return run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """One of the commands; ValueError with a sentence for what it cannot use."""
    if args.what == "data":
        print(json.dumps(data.prepare(args.stdlib, args.out, args.vocab), indent=1))
    elif args.what == "train":
        return train(args)
    elif args.what == "speed":
        print(json.dumps(speed(args)))
    elif args.what == "export":
        print(json.dumps(export(args.data, args.run, args.model, CONFIG, torch.device(args.device)), indent=1))
    elif args.what == "curve":
        print(curve(args.run))
    elif args.what == "embed":
        print("\n".join(map(str, embed(args.model, EMBEDDED))))
        # what the ladder must follow is the model's own text; in a process that finds the new one
        return subprocess.run([sys.executable, Path(__file__).parent / "follow.py"]).returncode
    else:
        made = complete(args.model, args.tokens)
        for prompt, text in zip(PROMPTS, made, strict=True):
            print(f"=== {'parses' if parses(prompt, text) else 'does not parse'}\n{prompt}|{text}\n")
        print(f"{sum(map(parses, PROMPTS, made))} of {len(PROMPTS)} parse up to their last complete statement")
    return 0


def new_run(args: argparse.Namespace, folder: Path) -> Run:
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(Recipe) if f.name != "betas"}
    tokens = {split: data.load_tokens(args.data, split) for split in ("train", "valid")}
    device = torch.device(args.device)
    return Run(folder, CONFIG, Recipe(**values), tokens, device, graphs=not args.eager)


def speed(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step, tokens per second, memory, and the seconds that the first three steps took."""
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(args, Path(folder))
        on_gpu = run.device.type == "cuda"
        seconds = []
        for steps in (3, args.timed):
            began = time.perf_counter()
            for _ in range(steps):
                run.train_step()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    each = seconds[1] / args.timed
    told = {"ms": each * 1e3, "tokens_per_s": args.rows * args.length / each, "first_steps_s": seconds[0]}
    return told | ({"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if on_gpu else {})


def train(args: argparse.Namespace) -> int:
    """0 once the run is over, 3 when only this piece is."""
    run = new_run(args, args.run)

    def say(row: dict[str, Any]) -> None:
        print(
            " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
            file=sys.stderr,
            flush=True,
        )

    over = run.go(until=args.until, seconds=args.seconds, planned=args.planned, eval_every=args.eval_every, say=say)
    if run.device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB", file=sys.stderr)
    return 0 if over else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
