"""The `quality` command: every choice over held-out text, needles, drafts; a table, a picture, a result file."""

import json
import logging
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from deepdecode.bench.timing import current_commit
from deepdecode.checkpoint import Checkpoint, CheckpointError, load_draft, load_model, open_checkpoint
from deepdecode.config import ModelConfig
from deepdecode.errors import HintedError
from deepdecode.model import ModelWeights
from deepdecode.progress import Progress
from deepdecode.quality.choices import BASE, CHOICES, Choice
from deepdecode.quality.measure import Loss, find, speculation, tell
from deepdecode.quality.text import held_out, needles, pieces
from deepdecode.text import Text
from deepdecode.tiny import EMBEDDED
from deepdecode.trace.render import Bullets, Doc, Part, Table, percent, show

log = logging.getLogger("deepdecode")
SCHEMA = 1
# by default on a GPU, and what a CPU does in minutes
CONTEXTS, TOKENS, DRAFTS = (512, 1024, 2048, 4096), 65536, 8
CPU_CONTEXTS, CPU_TOKENS, CPU_DRAFTS = (512, 1024), 1024, 1
# tokens from one telling of a needle to the next, for each context: what is left holds the needle
MARGIN = 64
# tokens that a text goes on for with drafts
DRAFTED = 48
# they are made before the first is looked for
MOST_NEEDLES = 1000


@dataclass(frozen=True)
class Request:
    """What was asked for; None is a default."""

    checkpoint: Path | None = None
    text: tuple[Path, ...] = ()
    tokens: int | None = None
    contexts: str | None = None
    only: str | None = None
    needles: int = 2
    device: str | None = None
    out: Path | None = None
    commit: str | None = None
    json: bool = False

    @property
    def command(self) -> str:
        """What measures the same again."""
        words = ["deepdecode quality"]
        for name in ("checkpoint", "text", "tokens", "contexts", "only", "needles"):
            value = getattr(self, name)
            if value != getattr(Request, name):
                words += [f"--{name} {shlex.quote(str(each))}" for each in (value if isinstance(value, tuple) else (value,))]
        return " ".join(words)


def quality_command(request: Request) -> int:
    """Measure and print; 0, or 130 after Ctrl-C. What was measured by then is printed and kept either way."""
    device = choose_device(request.device)
    contexts, choices = choose_contexts(request.contexts, on_gpu=device.type == "cuda"), choose(request.only)
    if not 0 <= request.needles <= MOST_NEEDLES:
        raise ValueError(f"quality: --needles must be 0 to {MOST_NEEDLES}, got {request.needles}")
    if request.tokens is not None and request.tokens < 2:
        raise ValueError(f"quality: --tokens must be >= 2, got {request.tokens}")
    checkpoint = open_checkpoint(request.checkpoint or EMBEDDED)
    longest = max(contexts)
    if longest > checkpoint.config.max_positions:
        raise ValueError(f"quality: --contexts must be at most {checkpoint.config.max_positions}, got {longest}")
    if device.type == "cpu":
        torch.set_num_threads(1 if small(checkpoint.config) else torch.get_num_threads())
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "device": {"name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"},
        "versions": {"torch": torch.__version__},
        "commit": request.commit or current_commit(),
        "date": date.today().isoformat(),
        "command": request.command,
        "model": str(request.checkpoint or "embedded"),
        "contexts": list(contexts),
        "pieces": {"read": 0, "of": 0},
        "rows": [],
        "left_out": {},
        "needles": [],
        "drafts": None,
    }
    path = request.out / "quality.json" if request.out else None

    def keep() -> None:
        if path:
            save(path, document)

    if path:
        try_folder(path)
    log.addFilter(not_meant)
    code = 0
    try:
        measure(request, checkpoint, device, contexts, choices, document, keep)
    except KeyboardInterrupt:
        if not document["rows"]:
            raise
        # a second Ctrl-C must not lose what is about to be printed
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = 130
        print("\ninterrupted: what follows was measured until then", file=sys.stderr)
    finally:
        log.removeFilter(not_meant)
    if path:
        print(f"written: {path}", file=sys.stderr)
        try:
            from deepdecode.quality.plots import plot_quality

            print(f"picture: {plot_quality(document, path)}", file=sys.stderr)
        except ImportError:
            print("no picture without matplotlib: pip install 'deepdecode[report]'", file=sys.stderr)
    if request.json:
        print(json.dumps(document, indent=1))
    else:
        show(quality_doc(document), sys.stdout)
        sys.stdout.flush()
    return code


def not_meant(record: logging.LogRecord) -> bool:
    """Whether a line says more than that float32 runs on references, as it is meant to here."""
    said = record.getMessage()
    return not (said.endswith("the reference runs") and ("float32" in said or "f32" in said))


def small(config: ModelConfig) -> bool:
    """Whether one thread is enough for a model."""
    return config.hidden_size < 1024


def choose_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"quality: --device must be cpu{' or cuda' * torch.cuda.is_available()}, got {name}")
    return torch.device(name)


def choose_contexts(text: str | None, *, on_gpu: bool) -> tuple[int, ...]:
    if text is None:
        return CONTEXTS if on_gpu else CPU_CONTEXTS
    try:
        contexts = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        contexts = ()
    if not contexts or contexts[0] < 2:
        raise ValueError(f"quality: --contexts must be lengths >= 2 with commas between, got {text}")
    return contexts


def choose(text: str | None) -> tuple[Choice, ...]:
    if text is None:
        return CHOICES
    known = {choice.name: choice for choice in CHOICES}
    names = [word.strip() for word in text.split(";")]
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        raise HintedError(f"quality: --only must name choices with semicolons between, got {wrong!r}", "; ".join(known))
    return tuple(known[name] for name in names)


def measure(
    request: Request,
    checkpoint: Checkpoint,
    device: torch.device,
    contexts: Sequence[int],
    choices: Sequence[Choice],
    document: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Add what was measured to the document: rows, needles, drafts; `keep` is called after each of them."""
    config = checkpoint.config
    text = Text(checkpoint.path, config.bos_id)
    documents = held_out(list(request.text))
    on_gpu = device.type == "cuda"
    texts = pieces(text, documents, max(contexts), request.tokens or (TOKENS if on_gpu else CPU_TOKENS))
    # nearer than the window nothing is asked of the indexer
    far = [context for context in contexts if context - MARGIN > config.window] if request.needles else []
    hay, short_of = {}, {}
    for context in far:
        try:
            hay[context] = needles(text, documents, context - MARGIN, request.needles, seed=context)
        except ValueError as error:
            short_of[f"needles at {context}"] = str(error).removeprefix("quality: ")
    loaded: dict[torch.dtype, ModelWeights] = {}

    def weights(choice: Choice) -> ModelWeights:
        if choice.dtype not in loaded:
            loaded[choice.dtype] = load_model(checkpoint, device=device, dtype=choice.dtype)
        return loaded[choice.dtype]

    able = [choice for choice in choices if choice.needs(config) is None]
    document["left_out"] = {choice.name: choice.needs(config) for choice in choices if choice not in able} | short_of
    losses = {choice.name: Loss(contexts) for choice in (BASE, *able)}
    seconds = dict.fromkeys(losses, 0.0)
    bar, done = Progress("readings of a piece"), 0
    for read, piece in enumerate(texts, 1):
        base = tell(weights(BASE), BASE, piece.ids, contexts, scores=True)
        losses[BASE.name].add(piece, base, base)
        for choice in able:
            began = time.monotonic()
            losses[choice.name].add(piece, tell(weights(choice), choice, piece.ids, contexts), base)
            seconds[choice.name] += time.monotonic() - began
            done += 1
            bar.step(done, len(texts) * len(able))
        # what has been read so far is a result too
        document["pieces"] = {"read": read, "of": len(texts)}
        document["rows"] = [
            {
                "choice": choice.name,
                "what": choice.what,
                **losses[choice.name].row(),
                "seconds": round(seconds[choice.name], 2),
            }
            for choice in (BASE, *able)
        ]
        keep()
    bar.end()
    for context in hay:
        bar = Progress(f"needles at {context}")
        for name, seed in (("indexer", None), ("random entries", 1)):
            found = find(weights(BASE), BASE, hay[context], seed)
            document["needles"].append({"context": context, "choice": name, **found})
        bar.end()
        keep()
    # steps of one token in float32 are launches and little else: a small model takes them faster on the CPU
    aside = on_gpu and small(config)
    if aside:
        torch.set_num_threads(1)
        loaded[BASE.dtype] = load_model(checkpoint, device="cpu", dtype=BASE.dtype)
    try:
        draft = load_draft(checkpoint, weights(BASE), dtype=BASE.dtype)
    except CheckpointError as error:
        document["left_out"]["drafts"] = str(error)
        keep()
        return
    short = pieces(text, documents, 256, 256 * (DRAFTS if on_gpu else CPU_DRAFTS))
    told = speculation(weights(BASE), draft, BASE, short, DRAFTED)
    document["drafts"] = {"device": "cpu" if aside else document["device"]["name"], **told}
    keep()


def quality_doc(document: dict[str, Any]) -> Doc:
    """The tables of a result file."""
    base = document["rows"][0]
    contexts = list(base["contexts"])
    head = ["choice", "bits/byte", "more", "KL bits", "top 1", "experts"]
    head += [f"{what} {context}" for context in contexts for what in ("overlap", "mass")]
    lines = []
    for row in document["rows"]:
        line = [row["choice"], f"{row['bits_per_byte']:.4f}", f"{row['bits_per_byte'] - base['bits_per_byte']:+.4f}"]
        line += [f"{row['kl_bits']:.2e}", percent(row["top1"]), percent(row["experts"])]
        for context in contexts:
            line += [percent(row["contexts"][context]["overlap"]), percent(row["contexts"][context]["score_mass"])]
        lines.append(tuple(line))
    pieces = document["pieces"]
    part = "" if pieces["read"] == pieces["of"] else f", {pieces['read']} of {pieces['of']} pieces"
    note = (
        f"{base['tokens']} tokens{part}. KL and top 1: of the next token, beside fp32. experts: those that both take. overlap, "
        "mass: of the entries that fp32 attends at this many tokens of context, how many are attended too, and their score's "
        "share."
    )
    parts: list[Part] = [Table("Choices", tuple(head), "l" + "r" * (len(head) - 1), tuple(lines), note)]
    if document["needles"]:
        head = ("context", "entries chosen by", "tokens right", "whole", "bits/token")
        lines = [
            (
                str(row["context"]),
                row["choice"],
                percent(row["tokens_right"]),
                percent(row["whole_right"]),
                f"{row['bits_per_token']:.2f}",
            )
            for row in document["needles"]
        ]
        what = "A made-up definition, told again this far behind."
        parts.append(Table("Needles", head, "rlrrr", tuple(lines), what))
    more = [f"{name}: {why}" for name, why in document["left_out"].items()]
    if more:
        parts.append(Bullets("Not measured", tuple(more)))
    if document["drafts"]:
        drafts = document["drafts"]
        said = "the same text" if drafts["same"] else "ANOTHER text"
        parts.append(
            Bullets(
                "Drafts of the MTP block",
                (
                    f"{percent(drafts['acceptance'])} of the proposals are accepted, over {drafts['tokens']} tokens",
                    f"{drafts['tokens_per_step']:.2f} tokens a step with them, 1 without, {said}",
                ),
            )
        )
    return Doc(f"Quality of {document['model']} on {document['device']['name']}", tuple(parts))


def try_folder(path: Path) -> None:
    """Find a folder that cannot be written in before anything is measured; an earlier file stays until then."""
    with writing(path) as draft:
        draft.touch()
        draft.unlink()


def save(path: Path, document: dict[str, Any]) -> None:
    """Write the file whole, or not at all."""
    with writing(path) as draft:
        draft.write_text(json.dumps(document, indent=1) + "\n")
        draft.replace(path)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Where to write what becomes this file; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path.with_name(path.name + ".part")
    except OSError as error:
        raise ValueError(f"quality: --out must be a folder to write in, got {path.parent}: {error.strerror}") from None
