"""The commands that run models. Heavy imports stand inside the commands, so that `--help` and `--version` are quick."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import click
import typer

from deepdecode import __version__

app = typer.Typer(
    name="deepdecode",
    help="Fast DeepSeek-V4-Flash decoding on the GPUs that the official kernels leave out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def run(argv: list[str]) -> int:
    """Run one command line and give its exit code."""
    level = os.environ.get("DEEPDECODE_LOG", "WARNING").upper()
    if level not in LEVELS:
        raise ValueError(f"DEEPDECODE_LOG must be one of {', '.join(LEVELS)}, got {level}")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("deepdecode").setLevel(level)
    command = typer.main.get_command(app)
    try:
        code = command.main(args=argv, prog_name="deepdecode", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except click.exceptions.Abort:
        return 130
    return code if isinstance(code, int) else 0


def _version(asked: bool) -> None:
    if asked:
        print(f"deepdecode {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command(
    epilog="Examples: deepdecode generate 'def add(a, b):' | deepdecode generate --checkpoint DIR --prompt-file question.txt"
    " --temperature 0.6 --top-p 0.95 --seed 7 | deepdecode generate A B C --json"
)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="One prompt each; several are decoded as one batch.")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A file whose whole text is a prompt, - for stdin; may be repeated.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of an official checkpoint [default: the embedded tiny model]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set of tokens with this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Row i of the batch samples with seed + i.")] = 0,
    context: Annotated[int | None, typer.Option(help="Longest prompt and answer together [default: what is asked for]")] = None,
    batch: Annotated[int, typer.Option(help="Prompts decoded at once; more wait.")] = 16,
    cache: Annotated[str, typer.Option(help="Cache format: fp8_584, bf16 or f32.")] = "fp8_584",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 [default: a GPU where there is one]")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's stop ids.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout at the end, no stream.")] = False,
) -> int:
    """Text in, tokens out: stream what the model makes of PROMPTS. Speed and memory go to stderr."""
    from deepdecode.generate import Request, generate_command

    texts = [*(prompts or []), *(_read(path) for path in prompt_file or [])]
    return generate_command(
        Request(
            prompts=texts, checkpoint=checkpoint, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p,
            seed=seed, context=context, batch=batch, cache=cache, device=device, ignore_eos=ignore_eos, as_json=as_json,
        )
    )  # fmt: skip


def _read(path: Path) -> str:
    return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8", errors="replace")


@app.command(epilog="Examples: deepdecode inspect ~/models/DeepSeek-V4-Flash | deepdecode inspect DIR --json")
def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> int:
    """What a checkpoint holds, which cards it fits, and every fault found in it (exit 1)."""
    from deepdecode.inspect import inspect_dir

    report = inspect_dir(folder)
    print(json.dumps(report.to_json(), indent=1) if as_json else report.to_text())
    return 1 if report.faults else 0
