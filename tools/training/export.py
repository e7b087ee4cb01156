"""From a finished run to a checkpoint in the official format with its card, and the picture of its losses."""

import dataclasses
import json
import shutil
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

from deepdecode.bench.timing import current_commit
from deepdecode.checkpoint import CheckpointError, load_draft, load_model, open_checkpoint, write_checkpoint
from deepdecode.config import ModelConfig
from training.data import VERSION, load_tokens
from training.loop import Recipe, Run
from training.weights import to_tensors

# what the embedded model may have
MOST = 20_000_000
# of a file of it: what a repository takes without complaint
SHARD = 7 << 20


def export(data: Path, folder: Path, model: Path, config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Write the best parameters of a run as a checkpoint; what its card says, measured on a device and kept in result.json.

    Raises:
        ValueError: the run has not kept any parameters yet.
    """
    state, best = folder / "state.pt", folder / "best.pt"
    if not (state.is_file() and best.is_file()):
        raise ValueError(f"export: {folder} must hold a run that was evaluated, got no state.pt and best.pt")
    recipe = Recipe(**torch.load(state, map_location="cpu", weights_only=True)["recipe"])
    splits = {split: load_tokens(data, split) for split in ("train", "valid", "test")}
    run = Run(folder, config, recipe, splits, device, graphs=False)
    run.params = torch.load(best, map_location=device, weights_only=True)
    told = card_figures(run, splits)
    with tempfile.TemporaryDirectory() as scratch:
        generation = Path(scratch) / "generation_config.json"
        words = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids), "do_sample": False}
        generation.write_text(json.dumps(words, indent=2) + "\n")
        card = Path(scratch) / "README.md"
        card.write_text(card_text(config, recipe, told))
        extra = [data / "tokenizer.json", generation, card]
        write_checkpoint(model, config, to_tensors(config, run.params), shard_bytes=SHARD, extra_files=extra)
    (folder / "result.json").write_text(json.dumps(result(folder, recipe, told, device), indent=1) + "\n")
    return told


def result(folder: Path, recipe: Recipe, told: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A run as a result file: how to do it again, what the card says, and its log."""
    own = {name: value for name, value in dataclasses.asdict(recipe).items() if name != "betas"}
    words = [f"--{name.replace('_', '-')} {value}" for name, value in own.items() if value != getattr(Recipe, name)]
    return {
        "schema": 1,
        "device": {"name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"},
        "versions": {"torch": torch.__version__},
        "commit": current_commit(),
        "date": date.today().isoformat(),
        "command": " ".join(["python tools/train_tiny.py train DATA RUN", *words]),
        "recipe": own,
        **told,
        "log": [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()],
    }


def card_figures(run: Run, splits: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"step": run.step, "train_tokens": len(splits["train"].ids)}
    for split in ("valid", "test"):
        size = int(splits[split].sizes.sum())
        for name, packed in (("fp32", False), ("exported", True)):
            found = run.evaluate(split, length=run.recipe.length, round_weights=packed, exact=True)
            told[f"{split}_bits_per_byte_{name}"] = round(found["bits_per_token"] * found["tokens"] / size, 4)
            told[f"{split}_draft_agrees_{name}"] = round(found["draft_agrees"], 4)
    return told


def card_text(config: ModelConfig, recipe: Recipe, told: dict[str, Any]) -> str:
    seen = told["step"] * recipe.rows * recipe.length
    return f"""# deepdecode tiny

A DeepSeek-V4 of {config.num_layers} layers and {config.hidden_size} channels that writes Python, for tests and
demonstrations of deepdecode. It has every part of V4-Flash: window layers, ratio 4 with an indexer, ratio 128, hash and
scored routing, four streams, an MTP block.

- Data: CPython {VERSION}'s standard library without its tests, {told["train_tokens"]} tokens to learn from; hashes of all files
  in `tools/training/stdlib.txt`. Licence: Python Software Foundation License Version 2 (data/tiny/LICENSE-PYTHON.txt).
- Training: {told["step"]} steps, {seen / 1e6:.0f} million tokens read, `tools/train_tiny.py`, seed {recipe.seed}.
- Bits per byte on files it never saw (valid, test): {told["valid_bits_per_byte_fp32"]}, {told["test_bits_per_byte_fp32"]} in
  float32; {told["valid_bits_per_byte_exported"]}, {told["test_bits_per_byte_exported"]} as exported (FP8, FP4, bfloat16).
- The MTP block's token is the model's own {100 * told["test_draft_agrees_exported"]:.0f} % of the time (test).
"""


def embed(model: Path, folder: Path) -> list[Path]:
    """Put an exported model in the package's folder, in place of the one there; what else stands there stays.

    Raises:
        ValueError: it is not the export of a whole model: no card or tokenizer, weights that cannot be read, or over 20 MB.
    """
    names = ["README.md", "config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"]
    missing = [name for name in names if not (model / name).is_file()]
    if missing:
        raise ValueError(f"embed: {model} must be a folder that export wrote, got no {missing[0]}")
    try:
        checkpoint = open_checkpoint(model)
        load_draft(checkpoint, load_model(checkpoint))
    except CheckpointError as error:
        raise ValueError(f"embed: {model} must be a checkpoint that runs, got: {error}") from None
    files = [*(model / name for name in names), *sorted(model.glob("*.safetensors"))]
    size = sum(file.stat().st_size for file in files)
    if size > MOST:
        raise ValueError(f"embed: {model} must have at most {MOST} bytes, got {size}")
    for old in (*folder.glob("*.safetensors"), *(folder / name for name in names)):
        old.unlink(missing_ok=True)
    return [Path(shutil.copy(file, folder)) for file in files]


def curve(folder: Path) -> Path:
    """Draw log.jsonl as curve.png beside it."""
    if not (folder / "log.jsonl").is_file():
        raise ValueError(f"curve: {folder} must be a run's folder, got no log.jsonl")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, label, scale in (
        ("told", "training", 1 / 0.693147),
        ("draft", "MTP block, training", 1 / 0.693147),
        ("valid_bits_per_token", "held out", 1.0),
        ("kl", "indexer's KL", 1 / 0.693147),
    ):
        points = [(row["step"], row[name] * scale) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if name.startswith("valid") else None)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "curve.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return path
