"""The benches' names and options, for `deepdecode bench NAME` and for `python -m` with a bench's module; no torch here."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bench:
    """module: what has `command(options)`. peers: what --peers adds."""

    module: str
    help: str
    peers: str
    examples: str
    more: Callable[[argparse.ArgumentParser], None]


def add_benches(parser: argparse.ArgumentParser) -> None:
    """A word for each bench, with options and help of its own; `bench` of what is parsed names it."""
    words = parser.add_subparsers(dest="bench", required=True, metavar="BENCH", title="benches (default: attention)")
    for name, bench in BENCHES.items():
        add_arguments(name, words.add_parser(name, help=bench.help, **_form(name)))


def parser_of(name: str) -> argparse.ArgumentParser:
    """The command line of a bench's module, run by itself."""
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHES[name].module.removesuffix('.__main__')}", **_form(name))
    add_arguments(name, parser)
    return parser


def _form(name: str) -> dict[str, Any]:
    bench = BENCHES[name]
    lines = "\n".join(f"  {line}" for line in bench.examples.splitlines())
    raw = argparse.RawDescriptionHelpFormatter
    return {"description": bench.help, "epilog": f"examples:\n{lines}", "formatter_class": raw, "allow_abbrev": False}


def add_arguments(name: str, p: argparse.ArgumentParser) -> None:
    p.add_argument("--peers", action="store_true", help=f"also {BENCHES[name].peers}")
    p.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="folder of result files (default: results)")
    p.add_argument("--commit", metavar="ID", help="the commit that is measured, where the checkout has no .git")
    again = "again with --resume" if name == "engines" else "again"
    told = f"stop starting cells after this long; run {again} to go on"
    p.add_argument("--seconds", type=float, default=1e9, metavar="N", help=told)
    BENCHES[name].more(p)


def _kept(p: argparse.ArgumentParser) -> None:
    p.add_argument("--only", metavar="NAME", help="measure this implementation alone; the file keeps the others")
    p.add_argument("--fresh", action="store_true", help="measure again what the result file already holds")


def _cells(p: argparse.ArgumentParser) -> None:
    p.add_argument("--tokens", type=int, nargs="+", metavar="T", help="only these T")
    _kept(p)


def _attention(p: argparse.ArgumentParser) -> None:
    _kept(p)
    p.add_argument("--sweep", action="store_true", help="sweep launches and write the tuning table")
    p.add_argument("--fit", action="store_true", help="write the tuning table from the H200's sweeps; needs no GPU")
    p.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing: draw this result file, pictures beside it")


def _engines(p: argparse.ArgumentParser) -> None:
    p.add_argument("--resume", action="store_true", help="keep what this commit has in the file, measure the rest")
    p.add_argument(
        "--check", type=_part, metavar="I/N", help="check every Nth cell from the Ith on, counted from 0, and time nothing"
    )
    p.add_argument("--table", type=Path, metavar="FILE", help="measure nothing: this result file's attention as markdown")


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if not found or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"must be I/N with I below N, got {text}")
    return int(found[1]), int(found[2])


BENCHES = {
    "attention": Bench(
        "deepdecode.bench.__main__",
        "sparse attention over all forms of cache, key counts, heads and tokens",
        "FlashMLA and SGLang's kernels, from $DEEPDECODE_PEERS",
        """deepdecode bench attention
DEEPDECODE_PEERS=~/wheels deepdecode bench attention --peers --seconds 500
deepdecode bench attention --plot results/h200/attention.json
deepdecode bench attention --sweep --seconds 50""",
        _attention,
    ),
    "linear": Bench(
        "deepdecode.bench.linear",
        "the products of a layer, its fused sets of weights as one call",
        "torch.matmul, torch._scaled_mm, dequantise + matmul",
        """deepdecode bench linear --peers
deepdecode bench linear --tokens 1 16 --only deepdecode""",
        _cells,
    ),
    "moe": Bench(
        "deepdecode.bench.moe",
        "the experts of a layer; the floor counts the distinct ones hit",
        "grouped_mm on bfloat16 copies; dequantise + matmul",
        """deepdecode bench moe --peers
deepdecode bench moe --tokens 64 --fresh""",
        _cells,
    ),
    "indexer": Bench(
        "deepdecode.bench.indexer",
        "scores and top-k of the indexer together, each token with keys of its own",
        "DeepGEMM from $DEEPDECODE_PEERS with torch.topk, torch.topk alone, and the eager reference",
        """DEEPDECODE_PEERS=~/wheels deepdecode bench indexer --peers
deepdecode bench indexer --tokens 1""",
        _cells,
    ),
    "glue": Bench(
        "deepdecode.bench.glue",
        "a step's fused glue, beside the composed fine ops",
        "the mixing product by DeepGEMM from $DEEPDECODE_PEERS and by torch.matmul in float32 and bfloat16",
        """deepdecode bench glue
deepdecode bench glue --peers --seconds 15""",
        _cells,
    ),
    "engines": Bench(
        "deepdecode.bench.engines",
        "what stands at SGLang's boundaries, called as SGLang calls it, also after a replay with other inputs",
        "SGLang's own and FlashMLA, from $DEEPDECODE_PEERS",
        """DEEPDECODE_PEERS=~/wheels deepdecode bench engines --peers --resume
deepdecode bench engines --check 0/1
deepdecode bench engines --table results/h200/engines.json""",
        _engines,
    ),
}
