"""A checkpoint on disk: its files, its index, and its tensors under official names. Reads headers only."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepdecode.checkpoint.container import MAX_TENSORS, CheckpointError, Stored, TensorFile, open_file
from deepdecode.checkpoint.layout import faults, official_name, stacked, unsound
from deepdecode.config import MAX_JSON_BYTES, ModelConfig, read_config_notes, read_json, shown

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Piece:
    """A tensor under its official name: a stored tensor, or one expert's part of a stored stack."""

    stored: Stored
    expert: int | None = None
    half: int | None = None

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        if self.expert is None:
            return self.stored.shape
        rows, *rest = self.stored.shape[1:]
        return (rows if self.half is None else rows // 2, *rest)

    def read(self) -> torch.Tensor:
        tensor = self.stored.read()
        if self.expert is not None:
            tensor = tensor[self.expert]
            if self.half is not None:
                tensor = tensor[self.half * len(tensor) // 2 : (self.half + 1) * len(tensor) // 2]
        return tensor


@dataclass
class Checkpoint:
    """A checkpoint on disk, under official names. Nothing but headers is read until a tensor is.

    notes: what was assumed or skipped, as sentences. drafts: tensors of draft layers, which nothing here loads.
    """

    path: Path
    config: ModelConfig
    notes: list[str] = field(default_factory=list)
    files: list[TensorFile] = field(default_factory=list)
    tensors: dict[str, Piece] = field(default_factory=dict)
    drafts: dict[str, Stored] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are loaded: without draft layers."""
        stored = {(id(piece.stored.file), piece.stored.begin): piece.stored for piece in self.tensors.values()}
        return sum(each.end - each.begin for each in stored.values())

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def dtype(self, name: str) -> str:
        return self.tensors[name].dtype

    def get(self, name: str) -> torch.Tensor:
        """A read-only view of the mapped file, whose values are sound where every token meets them."""
        piece = self.tensors[name]
        tensor = piece.read()
        if bad := unsound(name, tensor):
            raise CheckpointError(f"{shown(piece.stored.file.path.name)}: {name} must not hold {bad}")
        return tensor

    def done(self, name: str) -> None:
        self.tensors[name].stored.release()


def open_checkpoint(path: str | os.PathLike[str], *, found: list[str] | None = None) -> Checkpoint:
    """Open a directory of safetensors files and check that it is whole.

    Args:
        path: the directory; official names, transformers' or vLLM's. Symbolic links are followed.
        found: collects every fault; without it the first one raises. With it, the checkpoint holds what could be read.

    Raises:
        CheckpointError: the first fault, in one sentence.
        ConfigError: config.json cannot be used; no checkpoint without it.
    """

    def fault(text: str) -> None:
        if found is None:
            raise CheckpointError(text)
        found.append(text)

    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"{shown(str(path))}: must be a checkpoint's directory, found {'a file' if path.exists() else 'none'}"
        )
    config, notes = read_config_notes(path)
    checkpoint = Checkpoint(path, config, notes)
    where = dict[str, str]()
    for file in _open_files(path, fault, found is not None):
        checkpoint.files.append(file)
        for name, piece in _pieces(file, config):
            if name is None or name.startswith("mtp."):
                checkpoint.drafts[piece.stored.name] = piece.stored
            elif name in checkpoint.tensors:
                fault(f"{shown(file.path.name)}: {shown(name)} stands twice, also in {where[name]}")
            else:
                checkpoint.tensors[name] = piece
                where[name] = shown(file.path.name)
    if checkpoint.drafts and not any("mtp.*" in note for note in notes):
        notes.append(f"{len(checkpoint.drafts)} tensors of draft layers (mtp.*) are not loaded")
    if checkpoint.files:
        for text in faults(config, checkpoint.tensors, where):
            fault(text)
    return checkpoint


def _open_files(path: Path, fault: Callable[[str], None], go_on: bool) -> list[TensorFile]:
    index, listed = path / INDEX, None
    if index.exists():
        try:
            listed = _read_index(index)
        except CheckpointError as problem:
            fault(str(problem))
    by_file: dict[str, set[str]] = {}
    for tensor, name in (listed or {}).items():
        by_file.setdefault(name, set()).add(tensor)
    names = sorted(by_file) if listed is not None else sorted(p.name for p in path.glob("[!.]*.safetensors"))
    if not names:
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
        if pickles:
            fault(
                f"{shown(pickles[0])}: is a pickle, which can run code when it is read; "
                "a checkpoint must be *.safetensors files"
            )
        else:
            fault(f"{shown(path.name)}: holds no *.safetensors file")
    files: list[TensorFile] = []
    for name in names:
        try:
            files.append(open_file(path / name))
        except CheckpointError as problem:
            if not go_on:
                raise
            fault(str(problem))
    # after the files that are missing or broken, of which the rest is mostly a consequence
    for file in files if listed is not None else ():
        name = file.path.name
        for tensor in sorted(by_file[name] - file.tensors.keys()):
            fault(f"{INDEX}: {shown(tensor)} must be in {shown(name)}, which does not hold it")
        for tensor in sorted(file.tensors.keys() - by_file[name]):
            fault(f"{shown(name)}: {shown(tensor)} is not listed there by {INDEX}")
    return files


def _read_index(index: Path) -> dict[str, str]:
    listed = read_json(index, CheckpointError, MAX_JSON_BYTES).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{INDEX}: weight_map must name the file of each tensor, got {shown(listed)}")
    if len(listed) > MAX_TENSORS:
        raise CheckpointError(f"{INDEX}: weight_map must name at most {MAX_TENSORS} tensors, got {len(listed)}")
    for name in {repr(name): name for name in listed.values()}.values():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\x00-\x1f]+\.safetensors", name) or name.startswith("."):
            raise CheckpointError(f"{INDEX}: a file must be a plain name ending in .safetensors, got {shown(name)}")
    return listed


def _pieces(file: TensorFile, config: ModelConfig) -> Iterator[tuple[str | None, Piece]]:
    for stored in file.tensors.values():
        name = official_name(stored.name)
        stack = None if name is None else stacked(name)
        # a stack of another size, without a middle, or of no layer, stays one tensor, which then is a fault
        experts, rows, *_ = (*stored.shape, 0, 0)
        fits = len(stored.shape) == 3 and experts == config.num_experts
        if stack is None or not fits or stack[0] >= config.num_layers or rows % len(stack[1]):
            yield name, Piece(stored)
            continue
        layer, parts, suffix = stack
        for e in range(config.num_experts):
            for half, part in enumerate(parts):
                yield f"layers.{layer}.ffn.experts.{e}.{part}{suffix}", Piece(stored, e, half if len(parts) == 2 else None)
