"""deepdecode bench attention: measure on this GPU and write a result file."""

import argparse
import sys
import time
from typing import Any

import torch

from deepdecode.bench import attention, peers, tune
from deepdecode.bench.files import read_results, set_aside
from deepdecode.bench.options import parser_of
from deepdecode.bench.plots import plot_command
from deepdecode.bench.timing import copy_bandwidth, current_commit, need_gpu, write_results
from deepdecode.cards import CARDS, Card
from deepdecode.errors import HintedError, told
from deepdecode.kernels.attention_plan import TUNED_CARD, Case, card_of, floor_us, work

# the rungs and the slow rivals: few cells, since a call takes milliseconds
SLOW_TOKENS, SLOW_HEADS = (1, 8, 16, 64, 128), (8, 64)
# a run that is cut off leaves what it had by then
WRITE_EVERY_S = 10.0
# what tells a row of the result file from the others
ROW = {"implementation": str, "T": int, "H": int, "window_keys": int, "extra_keys": int, "fmt": str}
# archs whose PTX runs on any later GPU
PTX_ARCHS = (80, 86, 89)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("attention")
    parser.add_argument("op", choices=["attention"])
    return command(parser.parse_args(argv))


def command(options: argparse.Namespace) -> int:
    if options.plot:
        return plot_command(options.plot)
    if options.fit:
        return fit(options, next(card for card in CARDS if card.name == TUNED_CARD))
    need_gpu()
    card = card_of(torch.device("cuda", torch.cuda.current_device()))
    commit = options.commit or current_commit()
    if options.sweep:
        return sweep(options, card, commit)
    return run(options, card, commit)


def run(options: argparse.Namespace, card: Card, commit: str) -> int:
    path = options.out / _folder(card) / "attention.json"
    rows: list[dict[str, Any]] = []
    if path.exists():
        before = read_results(path, row=ROW)["rows"]
        rows = [] if options.fresh else [row for row in before if row.get("commit", commit) == commit]
        set_aside(path, before, rows)
    have = {_key(row) for row in rows}
    bandwidth = copy_bandwidth()
    command = "python -m deepdecode.bench attention" + (" --peers" if options.peers else "")

    def write() -> None:
        rows.sort(key=lambda row: (row["fmt"], row["extra_keys"], row["H"], row["T"], row["implementation"]))
        write_results(path, rows, command=command, commit=commit, copy_bandwidth_tb_s=round(bandwidth, 3))

    start = written = time.monotonic()
    skipped = 0
    try:
        for case, implementation, runner, limit in jobs(options.peers):
            known = _key(vars(case) | {"implementation": implementation}) in have
            if known or options.only not in (None, implementation):
                continue
            began = time.monotonic()
            if began - start > options.seconds:
                skipped += 1
                continue
            if isinstance(runner, int):
                row = attention.measure_as_ptx(case, runner)
            else:
                row = attention.measure(case, implementation, runner, limit_s=limit)
            shape = Case(case.T, case.H, case.window_keys, case.extra_keys, case.fmt, case.fmt)
            nbytes, flops = work(shape)
            row |= {"bytes": nbytes, "flops": flops, "floor_us": round(floor_us(shape, card), 3), "commit": commit}
            if "us_warm" in row:
                row["floor_fraction"] = round(row["floor_us"] / row["us_warm"], 4)
            now = time.monotonic()
            row["wall_s"] = round(now - began, 3)
            rows.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
            _say(row)
            if now - written > WRITE_EVERY_S:
                write()
                written = now
    finally:
        write()
    print(f"{path}: {len(rows)} rows" + (f", {skipped} left for another run" if skipped else ""))
    return 1 if any("error" in row and row["implementation"] == "deepdecode" for row in rows) else 0


def sweep(options: argparse.Namespace, card: Card, commit: str) -> int:
    """Measure launches, keep them as a result file, and write the plan's table from it."""
    path = options.out / _folder(card) / "attention_sweep.json"
    before = read_results(path, row=tune.ROW)["rows"] if path.exists() else []
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    cases = (case for case in tune.swept_cases() if time.monotonic() - start < options.seconds)
    for row in tune.sweep(("narrow", "piped", "wide", "mma") if card.arch == 90 else ("mma",), cases):
        rows.append(row | {"us": round(row["us"], 2), "commit": commit})
    command = "python -m deepdecode.bench attention --sweep"
    set_aside(path, before, [])
    write_results(path, rows, command=command, commit=commit)
    return fit(options, card)


def fit(options: argparse.Namespace, card: Card) -> int:
    """Write the plan's table from the launches that the card's sweeps hold."""
    folder = options.out / _folder(card)
    rows = tune.recorded(folder)
    if not rows:
        raise HintedError(f"bench: {folder} must hold launches, got none", "deepdecode bench attention --sweep measures some")
    files = sorted(path.name for path in folder.glob("attention_sweep*.json"))
    facts = {"command": "python -m deepdecode.bench attention --fit", "evidence": files, "launches": len(rows)}
    print(tune.write_table(rows, card, device=card.name, date=time.strftime("%Y-%m-%d"), **facts))
    return 0


def jobs(with_peers: bool):
    """Cells in the order of their worth: the model's own key count first, what compiles for half a minute last.

    A case, the implementation's name, how to run it (or the arch whose PTX to run), and seconds for its samples.
    """
    cases = sorted(attention.sized_cases(), key=lambda c: (c.fmt != "fp8_584", c.T not in SLOW_TOKENS, c.extra_keys))
    first = [c for c in cases if (c.fmt, c.extra_keys) == ("fp8_584", 512)]
    slow = [c for c in first if c.T in SLOW_TOKENS and c.H in SLOW_HEADS]
    yield from _raced(first, with_peers)
    for case in slow:
        yield case, "deepdecode portable", attention.portable, 0.04
        yield case, "deepdecode portable, no FP8 type", attention.portable_placed, 0.04
        yield case, "deepdecode rung 1", attention.rung1, 0.02
        yield case, "deepdecode rung 0", attention.rung0, 0.02
        if with_peers:
            yield case, "sglang fallback", peers.sglang_fallback, 0.02
            if case.H < 64:
                yield case, "flash_mla, padded before", peers.flash_mla_padded, 0.04
                yield case, "sglang fallback, 64 heads", peers.sglang_fallback_padded, 0.02
    for arch in PTX_ARCHS:
        for case in slow:
            if case.T == 16:
                yield case, attention.ptx_name(arch), arch, 0.0
    yield from _raced([c for c in cases if c.fmt == "fp8_584" and c not in first and c.T in SLOW_TOKENS], with_peers)
    if with_peers:
        for case in slow:
            yield case, "sglang dual-scope", peers.sglang_dual, 0.02
    yield from _raced([c for c in cases if c not in first and (c.fmt, c.T in SLOW_TOKENS) != ("fp8_584", True)], with_peers)


def _raced(cases: list[attention.Sized], with_peers: bool):
    """The product and, on FP8 rows, FlashMLA, one after the other."""
    for case in cases:
        yield case, "deepdecode", attention.ours, 0.04
        if with_peers and case.fmt == "fp8_584":
            yield case, "flash_mla", peers.flash_mla, 0.04


def _folder(card: Card) -> str:
    return card.name.lower().removeprefix("nvidia ").replace(" ", "-")


def _key(row: dict[str, Any]) -> tuple:
    return tuple(row[name] for name in ROW)


def _say(row: dict[str, Any]) -> None:
    keys = f"{row['window_keys']}+{row['extra_keys']}"
    what = f"{row['implementation']:<28} T={row['T']:<4} H={row['H']:<4} {keys:<9} {row['fmt']:<8}"
    error = f"error {row['rel_err']:.1e}, {row['worst_row_err']:.1e}" if "rel_err" in row else ""
    if "us_warm" not in row:
        print(f"{what} {row.get('error', error)}", flush=True)
        return
    times = f"warm {row['us_warm']:9.1f} us  rotated {row['us_rotated']:9.1f} us  floor {row['floor_us']:7.2f} us"
    print(f"{what} {times}  {error}", flush=True)


if __name__ == "__main__":
    sys.exit(told(main))
