"""From a checkpoint's files, or from a seed, to the weights that ops take: fused, stacked, cut to one rank's part.

Memory at the peak is what the ops keep and one tensor: every fused weight is allocated once and filled piece by piece
from the mapped files. FP8 and FP4 stay packed.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from deepdecode.checkpoint.container import DTYPES, CheckpointError, Stored, TensorFile, open_file
from deepdecode.checkpoint.layout import PLAIN, faults, official_name, scale_name, stacked, tensor_specs
from deepdecode.config import ModelConfig, read_config_notes, read_json, shown
from deepdecode.model import LayerWeights, ModelWeights
from deepdecode.ops.quant import Weight
from deepdecode.ops.table import AttnWeights, CompressorWeights, HeadWeights, MhcSite, MoeWeights

INDEX = "model.safetensors.index.json"
BLOCK = 128  # rows and columns that share a scale in FP8
GROUP = 32  # columns that share a scale in FP4


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

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def dtype(self, name: str) -> str:
        return self.tensors[name].dtype

    def get(self, name: str) -> torch.Tensor:
        """A read-only view of the mapped file; scales are checked for the E8M0 code that means NaN."""
        piece = self.tensors[name]
        tensor = piece.read()
        if piece.dtype == "F8_E8M0" and bool((tensor.view(torch.uint8) == 255).any()):
            raise CheckpointError(f"{shown(piece.stored.file.path.name)}: {name} must not hold NaN (code 255)")
        return tensor

    def done(self, name: str) -> None:
        self.tensors[name].stored.release()


class Source(Protocol):
    """Where tensors come from: a `Checkpoint`, or a seed."""

    config: ModelConfig

    def __contains__(self, name: str) -> bool: ...
    def dtype(self, name: str) -> str: ...
    def get(self, name: str) -> torch.Tensor: ...
    def done(self, name: str) -> None: ...


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
            f"{shown(path.name)}: must be a checkpoint's directory, found {'a file' if path.exists() else 'none'}"
        )
    config, notes = read_config_notes(path)
    checkpoint = Checkpoint(path, config, notes)
    where = dict[str, str]()
    for file in _open_files(path, fault, found is not None):
        checkpoint.files.append(file)
        for name, piece in _pieces(file):
            if name is None or name.startswith("mtp."):
                checkpoint.drafts[piece.stored.name] = piece.stored
            elif name in checkpoint.tensors:
                fault(f"{shown(file.path.name)}: {shown(name)} stands twice, also in {where[name]}")
            else:
                checkpoint.tensors[name] = piece
                where[name] = shown(file.path.name)
    if checkpoint.drafts and not any("(mtp.*) skipped" in note for note in notes):
        notes.append(f"{len(checkpoint.drafts)} tensors of draft layers (mtp.*) skipped")
    if checkpoint.files:
        for text in faults(config, checkpoint.tensors, where):
            fault(text)
    return checkpoint


def _open_files(path: Path, fault, go_on: bool) -> Iterator[TensorFile]:
    index, listed = path / INDEX, None
    if index.exists():
        try:
            listed = _read_index(index)
        except CheckpointError as problem:
            fault(str(problem))
    names = sorted(set(listed.values())) if listed is not None else sorted(p.name for p in path.glob("*.safetensors"))
    if not names:
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
        if pickles:
            fault(
                f"{shown(pickles[0])}: is a pickle, which can run code when it is read; "
                "a checkpoint must be *.safetensors files"
            )
        else:
            fault(f"{shown(path.name)}: holds no *.safetensors file")
    for name in names:
        try:
            file = open_file(path / name)
        except CheckpointError as problem:
            if not go_on:
                raise
            fault(str(problem))
            continue
        if listed is not None:
            for tensor, at in listed.items():
                if at == name and tensor not in file.tensors:
                    fault(f"{INDEX}: {shown(tensor)} must be in {shown(name)}, which does not hold it")
            for tensor in file.tensors:
                if listed.get(tensor) != name:
                    fault(f"{shown(name)}: {shown(tensor)} is not listed there by {INDEX}")
        yield file


def _read_index(index: Path) -> dict[str, str]:
    listed = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{INDEX}: weight_map must name the file of each tensor, got {shown(listed)}")
    for name in {repr(name): name for name in listed.values()}.values():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\x00-\x1f]+\.safetensors", name) or name.startswith("."):
            raise CheckpointError(f"{INDEX}: a file must be a plain name ending in .safetensors, got {shown(name)}")
    return listed


def _pieces(file: TensorFile) -> Iterator[tuple[str | None, Piece]]:
    for stored in file.tensors.values():
        name = official_name(stored.name)
        stack = None if name is None else stacked(name)
        if stack is None or len(stored.shape) != 3 or stored.shape[0] > 1 << 16:
            yield name, Piece(stored)
            continue
        prefix, parts, suffix = stack
        for e in range(stored.shape[0]):
            for half, part in enumerate(parts):
                yield f"{prefix}.{e}.{part}{suffix}", Piece(stored, e, half if len(parts) == 2 else None)


@dataclass(frozen=True)
class Cut:
    """One rank's part of a model, each as (ways, rank): attention heads, expert width, whole experts, head's vocabulary."""

    name: str = "whole"
    heads: tuple[int, int] = (1, 0)
    width: tuple[int, int] = (1, 0)
    experts: tuple[int, int] = (1, 0)
    vocab: tuple[int, int] = (1, 0)


def parse_cut(config: ModelConfig, slice: str | tuple[int, int] | None, rank: int = 0) -> Cut:
    """ "tp8" cuts heads, experts' width and the head's vocabulary; "dp8ep8" gives whole experts to ranks and cuts nothing else.

    Raises:
        ValueError: another word, a rank outside, or sizes that do not divide.
    """
    if slice is None:
        ways, kind = 1, "tp"
    elif isinstance(slice, tuple) and len(slice) == 2 and all(type(n) is int for n in slice):
        (ways, rank), kind = slice, "tp"
    elif isinstance(slice, str) and (match := re.fullmatch(r"tp(\d{1,3})|dp(\d{1,3})ep\2", slice)):
        ways, kind = int(match[1] or match[2]), "tp" if match[1] else "ep"
    else:
        raise ValueError(f"load_model: slice must be None, tpN, dpNepN or (ways, rank), got {slice!r}")
    if not (ways >= 1 and 0 <= rank < ways):
        raise ValueError(f"load_model: rank must be from 0 to {ways - 1}, got {rank}")
    sizes = {"experts": config.num_experts}
    if kind == "tp":
        sizes = {"o_groups": config.o_groups, "expert width": config.expert_width, "vocabulary": config.vocab_size}
    for what, size in sizes.items():
        if size % ways:
            raise ValueError(f"load_model: slice must divide the {what} ({size}), got {slice!r}")
    part = (ways, rank)
    if kind == "tp":
        return Cut(f"tp{ways}", heads=part, width=part, vocab=part)
    return Cut(f"dp{ways}ep{ways}", experts=part)


def load_model(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    slice: str | tuple[int, int] | None = None,
    rank: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> ModelWeights:
    """Load a checkpoint, or one rank's part of it, as the ops want it.

    Args:
        path: the checkpoint's directory, or an open checkpoint.
        slice: None for all; "tp8" (or any number): attention heads, the width of every expert and the head's vocabulary
            over 8 ranks; "dp8ep8": all heads and the whole head, an eighth of the experts. The embedding, the latents,
            compressors, indexer, router and hyper-connections are whole on every rank. (ways, rank) means tp.
        rank: which part.
        device: where the weights go.
        dtype: what unquantised tensors become; None: as stored. FP8 and FP4 weights stay packed in any case, and what
            V4 keeps in float32 (hyper-connections, sinks, ape, gate bias) stays float32, or becomes float64 with the rest.

    Returns:
        The weights; `config` is the whole model's, whatever the slice.

    Raises:
        CheckpointError: the checkpoint has a fault.
        ConfigError: config.json cannot be used.
        ValueError: the slice does not fit the model, or cuts through a scale's block.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    return assemble(checkpoint, parse_cut(checkpoint.config, slice, rank), torch.device(device), dtype)


def assemble(source: Source, cut: Cut, device: torch.device, dtype: torch.dtype | None) -> ModelWeights:
    """Fuse, stack and cut the source's tensors into `ModelWeights`."""
    if dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"load_model: dtype must be None, bfloat16, float32 or float64, got {dtype}")
    make = _Maker(source, cut, device, dtype)
    layers = [make.layer(i) for i in range(source.config.num_layers)]
    head = HeadWeights(make.site("hc_head_"), make.plain("norm.weight"), make.weight([("head.weight", cut.vocab, None)]))
    return ModelWeights(source.config, make.plain("embed.weight"), layers, head)


# a weight's name, and which (ways, rank) part of its rows and of its columns is taken
Part = tuple[str, tuple[int, int] | None, tuple[int, int] | None]


class _Maker:
    def __init__(self, source: Source, cut: Cut, device: torch.device, dtype: torch.dtype | None):
        self.source, self.cut, self.device, self.dtype = source, cut, device, dtype
        self.specs = tensor_specs(source.config)

    def layer(self, i: int) -> LayerWeights:
        at = f"layers.{i}."
        return LayerWeights(
            attn_hc=self.site(at + "hc_attn_"),
            attn_norm=self.plain(at + "attn_norm.weight"),
            attn=self.attention(at + "attn.", self.source.config.ratio(i)),
            ffn_hc=self.site(at + "hc_ffn_"),
            ffn_norm=self.plain(at + "ffn_norm.weight"),
            moe=self.moe(at + "ffn."),
        )

    def attention(self, at: str, ratio: int) -> AttnWeights:
        heads = self.cut.heads
        rest: list[str] = []
        q_b: list[Part] = [(at + "wq_b.weight", heads, None)]
        if ratio:
            rest += [at + "compressor.wkv.weight", at + "compressor.wgate.weight"]
        if ratio == 4:
            rest += [at + f"indexer.{name}.weight" for name in ("compressor.wkv", "compressor.wgate", "weights_proj")]
            q_b.append((at + "indexer.wq_b.weight", None, None))
        return AttnWeights(
            q_kv=self.weight([(at + "wq_a.weight", None, None), (at + "wkv.weight", None, None)]),
            rest=self.weight([(name, None, None) for name in rest]) if rest else None,
            q_norm=self.plain(at + "q_norm.weight"),
            kv_norm=self.plain(at + "kv_norm.weight"),
            q_b=self.weight(q_b),
            sink=self.plain(at + "attn_sink", heads),
            wo_a=self.weight([(at + "wo_a.weight", heads, None)]),
            wo_b=self.weight([(at + "wo_b.weight", None, heads)]),
            compressor=self.compressor(at + "compressor.") if ratio else None,
            index_compressor=self.compressor(at + "indexer.compressor.") if ratio == 4 else None,
        )

    def compressor(self, at: str) -> CompressorWeights:
        return CompressorWeights(self.plain(at + "ape"), self.plain(at + "norm.weight"))

    def moe(self, at: str) -> MoeWeights:
        ways, rank = self.cut.experts
        count = self.source.config.num_experts // ways
        mine, width = range(rank * count, (rank + 1) * count), self.cut.width
        ids, bias = at + "gate.tid2eid", at + "gate.bias"
        return MoeWeights(
            gate=self.plain(at + "gate.weight"),
            bias=self.plain(bias) if bias in self.specs else None,
            tid2eid=self.expert_ids(ids) if ids in self.specs else None,
            w13=self.stack([[(f"{at}experts.{e}.{w}.weight", width, None) for w in ("w1", "w3")] for e in mine]),
            w2=self.stack([[(f"{at}experts.{e}.w2.weight", None, width)] for e in mine]),
            shared13=self.weight([(f"{at}shared_experts.{w}.weight", width, None) for w in ("w1", "w3")]),
            shared2=self.weight([(f"{at}shared_experts.w2.weight", None, width)]),
            first_expert=mine.start,
        )

    def site(self, at: str) -> MhcSite:
        return MhcSite(self.plain(at + "fn"), self.plain(at + "base"), self.plain(at + "scale"))

    def expert_ids(self, name: str) -> torch.Tensor:
        ids, experts = self.source.get(name), self.source.config.num_experts
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < experts:
            raise CheckpointError(f"{name} must hold experts from 0 to {experts - 1}, got {int(ids.min())} to {int(ids.max())}")
        out = ids.to(device=self.device, dtype=torch.int32, copy=True)
        self.source.done(name)
        return out

    def plain(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """An unquantised tensor, or its part of the first dimension."""
        tensor = _part(self.source.get(name), rows, None)
        dtype = self.dtype or tensor.dtype
        if self.specs[name].kind == "f32":
            dtype = torch.float64 if self.dtype == torch.float64 else torch.float32 if self.dtype else tensor.dtype
        out = tensor.to(device=self.device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        self.source.done(name)
        return out

    def weight(self, parts: Sequence[Part]) -> Weight:
        """The parts under one another."""
        stack = self.stack([parts])
        return Weight(stack.data[0], None if stack.scale is None else stack.scale[0])

    def stack(self, experts: Sequence[Sequence[Part]]) -> Weight:
        """The same for each expert."""
        names = [name for parts in experts for name, _, _ in parts]
        forms = {self.form(name): name for name in reversed(names)}
        plain = all(dtype in PLAIN for dtype, _ in forms)
        if not plain and len(forms) > 1:
            (one, first), (other, second) = list(forms.items())[-2:][::-1]
            raise CheckpointError(f"{second} must be stored as {first} is, {_said(one)}, got {_said(other)}")
        dtype, scale_dtype = next(iter(forms))
        rows = [self.part_rows(experts[0], i, dtype) for i in range(len(experts[0]))]
        first, _, col_part = experts[0][0]
        cols = self.part_size(first, col_part, dtype, dim=1)
        lead = (len(experts), sum(rows))
        if plain:
            stored = max((DTYPES[dtype] for dtype, _ in forms), key=lambda dtype: dtype.itemsize)
            weight = Weight(torch.empty(*lead, cols, dtype=self.dtype or stored, device=self.device))
        elif dtype == "I8":
            weight = Weight(
                torch.empty(*lead, cols // 2, dtype=torch.uint8, device=self.device),
                self.empty((*lead, cols // GROUP), torch.float8_e8m0fnu),
            )
        else:
            assert scale_dtype is not None
            blocks = (lead[0], -(-lead[1] // BLOCK), -(-cols // BLOCK))
            weight = Weight(self.empty((*lead, cols), torch.float8_e4m3fn), self.empty(blocks, DTYPES[scale_dtype]))
        for e, parts in enumerate(experts):
            at = scale_at = 0
            for name, row_part, col_part in parts:
                at += self.copy(weight.data[e], at, name, row_part, col_part)
                if weight.scale is not None:
                    scale_at += self.copy(weight.scale[e], scale_at, scale_name(name), row_part, col_part)
        return weight

    def form(self, name: str) -> tuple[str, str | None]:
        scale = scale_name(name)
        return self.source.dtype(name), self.source.dtype(scale) if scale in self.source else None

    def part_rows(self, parts: Sequence[Part], i: int, dtype: str) -> int:
        name, rows, _ = parts[i]
        size = self.part_size(name, rows, dtype, dim=0)
        if dtype == "F8_E4M3" and i + 1 < len(parts) and size % BLOCK:
            raise CheckpointError(f"{name} must have a multiple of {BLOCK} rows to stand above {parts[i + 1][0]}, got {size}")
        return size

    def part_size(self, name: str, part: tuple[int, int] | None, dtype: str, *, dim: int) -> int:
        """Rows or columns of one rank's part, which must hold whole blocks of scales."""
        size, ways = self.specs[name].shape[dim], 1 if part is None else part[0]
        unit = {"F8_E4M3": BLOCK, "I8": (1, GROUP)[dim]}.get(dtype, 1)
        if size % ways or (ways > 1 and size // ways % unit):
            what = ("rows", "columns")[dim]
            raise ValueError(f"load_model: slice must keep blocks of {unit} {what} whole, got {size} / {ways} in {name}")
        return size // ways

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `torch.empty`, which cannot be told to make 8-bit floats everywhere."""
        raw = torch.empty(*shape[:-1], shape[-1] * dtype.itemsize, dtype=torch.uint8, device=self.device)
        return raw.view(dtype)

    def copy(self, into: torch.Tensor, at: int, name: str, rows: tuple[int, int] | None, cols: tuple[int, int] | None) -> int:
        """Copy a part of a tensor to row `at`; how many rows."""
        part = _part(self.source.get(name), rows, cols)
        target = into[at : at + len(part)]
        if part.dtype.itemsize == 1:
            target.view(torch.uint8).copy_(part.view(torch.uint8))
        else:
            target.copy_(part)
        self.source.done(name)
        return len(part)


def _said(form: tuple[str, str | None]) -> str:
    return form[0] if form[1] is None else f"{form[0]} with {form[1]} scales"


def _part(tensor: torch.Tensor, rows: tuple[int, int] | None, cols: tuple[int, int] | None) -> torch.Tensor:
    for dim, part in enumerate((rows, cols)):
        if part is not None:
            size = tensor.shape[dim] // part[0]
            tensor = tensor.narrow(dim, part[1] * size, size)
    return tensor
