"""The commands. Heavy imports stand inside them, so that `--help`, `--version` and a wrong word are quick."""

import argparse
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from deepdecode import __version__
from deepdecode.errors import HintedError
from deepdecode.trace import cli as trace

# sixteen bytes for each token of the longest context; a tokenizer takes some 300 bytes for each of these
MAX_PROMPT_BYTES = 16 << 20
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise HintedError(f"{self.prog.removeprefix('deepdecode ')}: {message}", f"{self.prog} --help")


@dataclass(frozen=True)
class Command:
    help: str
    examples: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: list[str]) -> int:
    """Run one command line and give its exit code: 0 fine, 1 found something, 2 bad usage or our failure."""
    _set_log_level()
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"deepdecode {__version__}")
        return 0
    if argv[0] in trace.COMMANDS:
        return trace.main(argv)
    if argv[0] not in COMMANDS:
        raise HintedError(
            f"deepdecode: the command must be one of {', '.join([*COMMANDS, *trace.COMMANDS])}, got {argv[0]}",
            "deepdecode --help",
        )
    command = COMMANDS[argv[0]]
    try:
        args, unknown = parser(argv[0]).parse_known_args(_words(argv))
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    if unknown:
        name = f"bench {args.bench}" if argv[0] == "bench" else argv[0]
        raise HintedError(f"{name}: unrecognized arguments: {' '.join(unknown)}", f"deepdecode {name} --help")
    return command.run(args)


def _words(argv: list[str]) -> list[str]:
    """What follows the command; of `bench` without a name it is attention's."""
    unnamed = len(argv) < 2 or (argv[1].startswith("-") and argv[1] not in ("-h", "--help"))
    return ["attention", *argv[1:]] if argv[0] == "bench" and unnamed else argv[1:]


def parser(name: str) -> argparse.ArgumentParser:
    command = COMMANDS[name]
    made = Parser(
        prog=f"deepdecode {name}",
        description=command.help,
        epilog="examples:\n" + command.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.arguments(made)
    return made


def _overview() -> str:
    rows = {name: command.help for name, command in COMMANDS.items()} | trace.COMMANDS
    lines = [f"  {name:<10} {text}" for name, text in rows.items()]
    return "\n".join(
        [
            "usage: deepdecode COMMAND [OPTIONS] | --version | --help",
            "",
            "Fast DeepSeek-V4-Flash decoding on the GPUs that the official kernels leave out.",
            "",
            *lines,
            "",
            "`deepdecode COMMAND --help` has examples.",
        ]
    )


def _set_log_level() -> None:
    level = os.environ.get("DEEPDECODE_LOG", "WARNING").upper()
    if level not in LEVELS:
        raise ValueError(f"DEEPDECODE_LOG must be one of {', '.join(LEVELS)}, got {level}")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("deepdecode").setLevel(level)


def _generate_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("prompts", nargs="*", metavar="PROMPT", help="one prompt each; several are decoded as one batch")
    p.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE", help="its whole text is a prompt, - for stdin; repeatable"
    )
    p.add_argument("--checkpoint", type=Path, metavar="DIR", help="an official checkpoint (default: the embedded tiny model)")
    p.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens for each prompt (default %(default)s)")
    p.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default %(default)s)")
    p.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the smallest set of this probability",
    )
    p.add_argument("--seed", type=int, default=0, metavar="N", help="row i samples with seed + i (default %(default)s)")
    p.add_argument("--context", type=int, metavar="N", help="longest prompt and answer together (default: what is asked for)")
    p.add_argument(
        "--batch", type=int, default=16, metavar="N", help="prompts decoded at once, more wait (default %(default)s)"
    )
    p.add_argument("--cache", default="auto", metavar="FMT", help="fp8_584, bf16, f32, or auto: what fits the model")
    p.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    p.add_argument("--ignore-eos", action="store_true", help="go on past the model's stop ids")
    p.add_argument(
        "--draft",
        action="store_true",
        help="the same greedy text with the checkpoint's MTP block as a draft, one prompt at a time",
    )
    p.add_argument("--json", action="store_true", help="one JSON document on stdout at the end, no stream")


def _generate(args: argparse.Namespace) -> int:
    from deepdecode.generate import Request, generate_command

    values = {**vars(args), "prompts": [*args.prompts, *(_read(name) for name in args.prompt_file)]}
    del values["prompt_file"]
    return generate_command(Request(**values))


def _read(name: str) -> str:
    """A prompt's text. What is no UTF-8 is replaced, and a file without an end (a device, a pipe) is not read to it."""
    if name != "-":
        try:
            with Path(name).open("rb") as file:
                text = file.read(MAX_PROMPT_BYTES + 1)
        except OSError as error:
            raise ValueError(f"generate: --prompt-file must be a file to read, got {name}: {error.strerror}") from None
    elif sys.stdin is None:
        raise ValueError("generate: --prompt-file - must find stdin open, got it closed")
    else:
        text = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(text) > MAX_PROMPT_BYTES:
        raise ValueError(f"generate: --prompt-file {name} must be at most {MAX_PROMPT_BYTES} bytes, got more")
    return text.decode("utf-8", "replace")


def _inspect_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help="folder of a checkpoint (default: the embedded tiny model)"
    )
    p.add_argument("--context", type=int, metavar="N", help="tokens that a card must hold beside the weights (default: 32768)")
    p.add_argument("--cache", metavar="FMT", help="their format: fp8_584, bf16 or f32 (default: the first that the model has)")
    p.add_argument("--full", action="store_true", help="search all scales and plain weights for NaN, not 256 MB of each")
    p.add_argument("--json", action="store_true", help="one JSON document")


def _inspect(args: argparse.Namespace) -> int:
    from deepdecode.inspect import READ_BYTES, inspect_dir
    from deepdecode.tiny import EMBEDDED

    limit = None if args.full else READ_BYTES
    folder = EMBEDDED if args.folder is None else args.folder
    report = inspect_dir(folder, cache_tokens=args.context, cache_format=args.cache, read_bytes=limit)
    print(json.dumps(report.to_json(), indent=1) if args.json else report.to_text())
    return 1 if report.faults else 0


def _plan_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--arch", metavar="SM", help="sm_80, ..., sm_121: its first card (default: every known card)")
    p.add_argument("--card", metavar="NAME", help="one card, however it is spelled: h200, 'RTX 4090', rtx-5090")
    p.add_argument("--heads", type=int, default=8, metavar="H", help="query heads of a rank, 1 to 128 (default %(default)s)")
    p.add_argument("--batch", type=int, default=1, metavar="T", help="query tokens (default %(default)s)")
    p.add_argument(
        "--keys", default="128+512", metavar="W+E", help="keys of the window and of the compressed set (default %(default)s)"
    )
    p.add_argument("--fmt", default="fp8_584", metavar="FMT", help="rows: fp8_584, bf16 or f32, for both caches or as A+B")
    p.add_argument("--page-size", default="64", metavar="N", help="rows of a page, for both caches or as A+B (default 64)")
    p.add_argument("--deterministic", action="store_true", help="a row's bits do not depend on its batch")
    p.add_argument("--lse", action="store_true", help="the log-sum-exp is written too")
    p.add_argument("--json", action="store_true", help="one JSON document")


def _plan(args: argparse.Namespace) -> int:
    from deepdecode.plan import find_cards, plan_case, plan_json, plan_text, read_case

    case = read_case(
        heads=args.heads,
        batch=args.batch,
        keys=args.keys,
        fmt=args.fmt,
        page_size=args.page_size,
        deterministic=args.deterministic,
    )
    plans = [plan_case(case, card, lse=args.lse) for card in find_cards(args.arch, args.card)]
    form = json.dumps(plan_json(case, plans, lse=args.lse), indent=1) if args.json else plan_text(case, plans, lse=args.lse)
    print(form)
    return 0 if all(told["supported"] for told in plans) else 1


def _env_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--paths", action="store_true", help="show paths and free-form values, which may name a user or a machine")
    p.add_argument(
        "--engine", nargs="?", const="all", metavar="NAME",
        help="also what our plug-in would do in sglang, vllm or transformers as installed here (default: in all of them)",
    )  # fmt: skip
    p.add_argument("--checkpoint", type=Path, metavar="DIR", help="--engine: for this model (default: DeepSeek-V4-Flash)")
    p.add_argument("--tp", type=int, default=8, metavar="N", help="--engine: tensor parallelism (default %(default)s)")
    p.add_argument("--json", action="store_true", help="one JSON document")


def _env(args: argparse.Namespace) -> int:
    from deepdecode.config import read_config
    from deepdecode.engines import engine_names
    from deepdecode.env import env_text, read_env

    model = read_config(args.checkpoint) if args.checkpoint else None
    found = read_env(paths=args.paths, engines=engine_names(args.engine), model=model, tp=args.tp)
    print(json.dumps(found, indent=1) if args.json else env_text(found))
    return 0


def _bench_arguments(p: argparse.ArgumentParser) -> None:
    from deepdecode.bench.options import add_benches

    add_benches(p)


def _bench(args: argparse.Namespace) -> int:
    from deepdecode.bench.options import BENCHES
    from deepdecode.bench.plots import plot_command

    if args.bench == "attention" and args.plot:  # before torch is loaded
        return plot_command(args.plot)
    return importlib.import_module(BENCHES[args.bench].module).command(args)


def _ladder_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--slice", default="tp8", metavar="NAME", help="rank of the model: tp8 or dp8ep8 (default %(default)s)")
    p.add_argument("--rungs", metavar="A,B", help="only these rungs (default: all but 4-compiled, which compiles for minutes)")
    p.add_argument("--layers", type=int, metavar="N", help="only the first N layers (default: all 43)")
    p.add_argument("--concurrency", metavar="A,B", help="sequences decoded at once (default: 1,16,64, and 32 for the profiles)")
    p.add_argument("--context", type=int, default=8192, metavar="N", help="tokens of each sequence (default %(default)s)")
    p.add_argument("--resume", action="store_true", help="keep what the result file holds of this commit, measure the rest")
    p.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="folder of result files (default: results)")
    p.add_argument(
        "--findings", type=Path, default=Path("PROFILE_FINDINGS.md"), metavar="FILE", help="append an entry here (%(default)s)"
    )
    p.add_argument("--no-findings", action="store_true", help="append nothing")
    p.add_argument("--commit", metavar="ID", help="the commit that is measured, where the checkout has no .git")
    p.add_argument(
        "--report", type=Path, metavar="FILE", help="measure nothing: tables, pictures and findings of this result file"
    )
    p.add_argument("--json", action="store_true", help="one JSON document on stdout")
    p.add_argument("--markdown", action="store_true", help="tables as markdown")


def _ladder(args: argparse.Namespace) -> int:
    from deepdecode.ladder.command import Request, ladder_command

    return ladder_command(Request(**vars(args)))


def _quality_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--checkpoint", type=Path, metavar="DIR", help="an official checkpoint (default: the embedded tiny model)")
    p.add_argument(
        "--text", type=Path, action="append", default=[], metavar="FILE", help="text that the model has not seen; repeatable"
    )
    p.add_argument("--tokens", type=int, metavar="N", help="tokens of text to read (default: 65536 on a GPU, 1024 without)")
    p.add_argument("--contexts", metavar="A,B", help="lengths at which choices of entries are compared, the longest is read")
    p.add_argument("--only", metavar="A;B", help="only these choices, semicolons between")
    p.add_argument(
        "--needles", type=int, default=2, metavar="N", help="needles at each context, 0 for none (default %(default)s)"
    )
    p.add_argument("--device", metavar="NAME", help="cpu or cuda (default: a GPU where there is one)")
    p.add_argument("--out", type=Path, metavar="DIR", help="write quality.json and a picture there")
    p.add_argument("--commit", metavar="ID", help="the commit that is measured, where the checkout has no .git")
    p.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _quality(args: argparse.Namespace) -> int:
    from deepdecode.quality.command import Request, quality_command

    return quality_command(Request(**{**vars(args), "text": tuple(args.text)}))


COMMANDS = {
    "generate": Command(
        "text in, tokens out, for prompts taken as they are (no chat format); speed and memory go to stderr",
        """  deepdecode generate "def add(a, b):"
  deepdecode generate --checkpoint DIR --prompt-file question.txt --temperature 0.6 --top-p 0.95 --seed 7
  deepdecode generate "first prompt" "second prompt" --max-new-tokens 32 --json""",
        _generate_arguments,
        _generate,
    ),
    "inspect": Command(
        "what a checkpoint holds, which cards it fits, and every fault found in it (exit 1)",
        """  deepdecode inspect
  deepdecode inspect ~/models/DeepSeek-V4-Flash
  deepdecode inspect DIR --context 131072 --cache bf16
  deepdecode inspect DIR --full --json""",
        _inspect_arguments,
        _inspect,
    ),
    "plan": Command(
        "the launch that sparse attention takes on a card, its floor and its predicted time (exit 1: no kernel covers it)",
        """  deepdecode plan --arch sm_120 --heads 8 --batch 1 --keys 128+512
  deepdecode plan --card "RTX 4090" --heads 64 --batch 16 --keys 128+8192 --deterministic
  deepdecode plan --heads 8 --keys 128 --fmt bf16 --json""",
        _plan_arguments,
        _plan,
    ),
    "bench": Command(
        "check and time an op on this GPU, warm and past L2, beside its floor and its rivals; or draw what was measured",
        """  deepdecode bench attention
  DEEPDECODE_PEERS=~/wheels deepdecode bench attention --peers --seconds 500
  deepdecode bench attention --plot results/h200/attention.json
  deepdecode bench moe --help""",
        _bench_arguments,
        _bench,
    ),
    "ladder": Command(
        "the campaign on this GPU: every rung checked, timed and profiled in a whole decode step; without a GPU, checks alone",
        """  deepdecode ladder
  deepdecode ladder --slice dp8ep8 --rungs 0,1,2 --concurrency 1,16,64 --resume
  deepdecode ladder --layers 8 --context 32768 --no-findings
  deepdecode ladder --report results/h200/ladder-tp8.json --no-findings""",
        _ladder_arguments,
        _ladder,
    ),
    "quality": Command(
        "what each precision choice costs on held-out text: bits, chosen entries and experts, needles found, drafts accepted",
        """  deepdecode quality
  deepdecode quality --checkpoint DIR --text a.py --text b.py --tokens 32768 --out results/h200
  deepdecode quality --only "kv fp8; index fp4" --contexts 512,2048 --needles 0 --json""",
        _quality_arguments,
        _quality,
    ),
    "env": Command(
        "versions, GPUs, which kernels cover them and what that rests on; safe to paste: no paths, users or host names",
        """  deepdecode env
  deepdecode env --json
  deepdecode env --engine sglang --checkpoint ~/models/DeepSeek-V4-Flash --tp 4
  deepdecode env --paths""",
        _env_arguments,
        _env,
    ),
}
