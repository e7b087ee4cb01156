"""From a checkpoint's files, or from a seed, to the weights that ops take: fused, stacked, cut to one rank's part.

Memory at the peak is what the ops keep and one tensor: every fused weight is allocated once and filled piece by piece
from the mapped files. FP8 and FP4 stay packed, unless asked otherwise.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deepdecode.checkpoint.container import DTYPES, CheckpointError
from deepdecode.checkpoint.layout import PLAIN, faults, official_name, scale_name, shard, tensor_specs, unsound
from deepdecode.checkpoint.open import Checkpoint, open_checkpoint
from deepdecode.config import ModelConfig, shown
from deepdecode.model import DraftWeights, LayerWeights, ModelWeights
from deepdecode.ops.quant import Weight, dequantize
from deepdecode.ops.table import AttnWeights, CompressorWeights, HeadWeights, MhcSite, MoeWeights

BLOCK = 128  # rows and columns that share a scale in FP8
GROUP = 32  # columns that share a scale in FP4


class Source(Protocol):
    """Where tensors come from: a `Checkpoint`, or a seed."""

    config: ModelConfig

    def __contains__(self, name: str) -> bool: ...
    def dtype(self, name: str) -> str: ...
    def get(self, name: str) -> torch.Tensor: ...
    def done(self, name: str) -> None: ...


@dataclass(frozen=True)
class Cut:
    """One rank's part of a model, each as (ways, rank): attention heads, expert width, whole experts, head's vocabulary."""

    name: str = "whole"
    heads: tuple[int, int] = (1, 0)
    width: tuple[int, int] = (1, 0)
    experts: tuple[int, int] = (1, 0)
    vocab: tuple[int, int] = (1, 0)


def parse_cut(config: ModelConfig, slice: str | tuple[int, int] | None, rank: int = 0) -> Cut:
    """What a slice asks for: tpN cuts heads, experts' width and the head's vocabulary, dpNepN deals out whole experts.

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
    if ways < 1:
        raise ValueError(f"load_model: slice must be of at least one rank, got {slice!r}")
    if type(rank) is not int or not 0 <= rank < ways:
        raise ValueError(f"load_model: rank must be from 0 to {ways - 1}, got {rank!r}")
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
    widen: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Load a checkpoint, or one rank's part of it, as the ops want it.

    Args:
        path: the checkpoint's directory, or a checkpoint that `open_checkpoint` found whole.
        slice: None for all; "tp8" (or any number): attention heads, the width of every expert and the head's vocabulary
            over 8 ranks; "dp8ep8": all heads and the whole head, an eighth of the experts. The embedding, the latents,
            compressors, indexer, router and hyper-connections are whole on every rank. (ways, rank) means tp.
        rank: which part.
        device: where the weights go.
        dtype: what unquantised tensors become; None: as stored. FP8 and FP4 weights stay packed unless `widen`, and what
            V4 keeps in float32 (hyper-connections, sinks, ape, gate bias) stays float32, or becomes float64 with the rest.
        widen: weights of products become float32 (float64 with the rest) once, here, where references would do it in every
            step: the same numbers in up to eight times the memory, for small models on a CPU.
        progress: called with the layers that are loaded, and all of them, after each layer.

    Returns:
        The weights; `config` is the whole model's, whatever the slice.

    Raises:
        CheckpointError: the checkpoint has a fault.
        ConfigError: config.json cannot be used.
        ValueError: the slice does not fit the model, or cuts through a scale's block.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    return assemble(checkpoint, parse_cut(checkpoint.config, slice, rank), torch.device(device), dtype, progress, widen)


def assemble(
    source: Source,
    cut: Cut,
    device: torch.device,
    dtype: torch.dtype | None,
    progress: Callable[[int, int], None] | None = None,
    widen: bool = False,
) -> ModelWeights:
    """Fuse, stack and cut the source's tensors into `ModelWeights`."""
    if dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"load_model: dtype must be None, bfloat16, float32 or float64, got {dtype}")
    make = _Maker(source, cut, device, dtype, widen)
    layers, total = [], source.config.num_layers
    for i in range(total):
        layers.append(make.layer(i))
        if progress:
            progress(i + 1, total)
    head = HeadWeights(make.site("hc_head_"), make.plain("norm.weight"), make.weight("head.weight"))
    return ModelWeights(source.config, make.plain("embed.weight"), layers, head)


def load_draft(
    path: str | os.PathLike[str] | Checkpoint, model: ModelWeights, *, dtype: torch.dtype | None = None, widen: bool = False
) -> DraftWeights:
    """Load a checkpoint's MTP block beside its model, whose device and vocabulary it takes; the rest as for `load_model`.

    Raises:
        CheckpointError: the checkpoint has no MTP block, another draft model, or a fault in it.
    """
    source = _Drafts(path if isinstance(path, Checkpoint) else open_checkpoint(path))
    make = _Maker(source, Cut(), model.embed.device, dtype, widen)
    at = "mtp.0."
    return DraftWeights(
        enorm=make.plain(at + "enorm.weight"),
        hnorm=make.plain(at + "hnorm.weight"),
        e_proj=make.weight(at + "e_proj.weight"),
        h_proj=make.weight(at + "h_proj.weight"),
        layer=make.block(at, 0),
        head=HeadWeights(make.site(at + "hc_head_"), make.plain(at + "norm.weight"), model.head.head),
    )


def expect_draft(checkpoint: Checkpoint) -> None:
    """CheckpointError where `load_draft` would raise it; no weight is read."""
    _Drafts(checkpoint)


class _Drafts:
    """The MTP block's tensors of a checkpoint, as a source; whether it is whole is checked as the backbone was."""

    def __init__(self, checkpoint: Checkpoint):
        self.config = checkpoint.config
        named = {official_name(name): stored for name, stored in checkpoint.drafts.items()}
        self.tensors = {name: stored for name, stored in named.items() if name and name.startswith("mtp.")}
        folder = shown(checkpoint.path.name)
        if not self.tensors:
            raise CheckpointError(f"load_draft: {folder} must hold an MTP block (mtp.0.*), got none")
        where = dict.fromkeys([*checkpoint.tensors, *self.tensors], folder)
        for fault in faults(self.config, {**checkpoint.tensors, **self.tensors}, where, mtp=True):
            raise CheckpointError(fault)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def dtype(self, name: str) -> str:
        return self.tensors[name].dtype

    def get(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name].read()
        if bad := unsound(name, tensor):
            raise CheckpointError(f"{name} must not hold {bad}")
        return tensor

    def done(self, name: str) -> None:
        self.tensors[name].release()


def unfusable(checkpoint: Checkpoint) -> Iterator[str]:
    """Faults that headers show but only fusing meets: FP8 weights that cannot stand under one another."""
    config = checkpoint.config
    make = _Maker(checkpoint, parse_cut(config, None), torch.device("cpu"), None)
    for i in range(config.num_layers):
        fused = [("attn.wq_a", "attn.wkv"), ("ffn.experts.0.w1", "ffn.experts.0.w3")]
        fused.append(("ffn.shared_experts.w1", "ffn.shared_experts.w3"))
        if config.ratio(i) == 4:
            fused.append(("attn.wq_b", "attn.indexer.wq_b"))
        for pair in fused:
            names = [f"layers.{i}.{name}.weight" for name in pair]
            try:
                make.rows(names, checkpoint.dtype(names[0]))
            except CheckpointError as fault:
                yield str(fault)


class _Maker:
    def __init__(self, source: Source, cut: Cut, device: torch.device, dtype: torch.dtype | None, widen: bool = False):
        self.source, self.cut, self.device, self.dtype, self.widen = source, cut, device, dtype, widen
        self.specs = tensor_specs(source.config, mtp=True)

    def layer(self, i: int) -> LayerWeights:
        return self.block(f"layers.{i}.", self.source.config.ratio(i))

    def block(self, at: str, ratio: int) -> LayerWeights:
        return LayerWeights(
            attn_hc=self.site(at + "hc_attn_"),
            attn_norm=self.plain(at + "attn_norm.weight"),
            attn=self.attention(at + "attn.", ratio),
            ffn_hc=self.site(at + "hc_ffn_"),
            ffn_norm=self.plain(at + "ffn_norm.weight"),
            moe=self.moe(at + "ffn."),
        )

    def attention(self, at: str, ratio: int) -> AttnWeights:
        rest, q_b = [], [at + "wq_b.weight"]
        if ratio:
            rest += [at + "compressor.wkv.weight", at + "compressor.wgate.weight"]
        if ratio == 4:
            rest += [at + f"indexer.{name}.weight" for name in ("compressor.wkv", "compressor.wgate", "weights_proj")]
            q_b.append(at + "indexer.wq_b.weight")
        return AttnWeights(
            q_kv=self.weight(at + "wq_a.weight", at + "wkv.weight"),
            rest=self.weight(*rest) if rest else None,
            q_norm=self.plain(at + "q_norm.weight"),
            kv_norm=self.plain(at + "kv_norm.weight"),
            q_b=self.weight(*q_b),
            sink=self.plain(at + "attn_sink"),
            wo_a=self.weight(at + "wo_a.weight"),
            wo_b=self.weight(at + "wo_b.weight"),
            compressor=self.compressor(at + "compressor.") if ratio else None,
            index_compressor=self.compressor(at + "indexer.compressor.") if ratio == 4 else None,
        )

    def compressor(self, at: str) -> CompressorWeights:
        return CompressorWeights(self.plain(at + "ape"), self.plain(at + "norm.weight"))

    def moe(self, at: str) -> MoeWeights:
        ways, rank = self.cut.experts
        count = self.source.config.num_experts // ways
        mine = range(rank * count, (rank + 1) * count)
        ids, bias = at + "gate.tid2eid", at + "gate.bias"
        return MoeWeights(
            gate=self.plain(at + "gate.weight"),
            bias=self.plain(bias) if bias in self.specs else None,
            tid2eid=self.expert_ids(ids) if ids in self.specs else None,
            w13=self.stack([[f"{at}experts.{e}.{w}.weight" for w in ("w1", "w3")] for e in mine]),
            w2=self.stack([[f"{at}experts.{e}.w2.weight"] for e in mine]),
            shared13=self.weight(at + "shared_experts.w1.weight", at + "shared_experts.w3.weight"),
            shared2=self.weight(at + "shared_experts.w2.weight"),
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

    def plain(self, name: str) -> torch.Tensor:
        """An unquantised tensor, or this rank's part of it."""
        tensor = self.part(name, name)
        dtype = self.dtype or tensor.dtype
        if self.specs[name].kind == "f32":
            dtype = torch.float64 if self.dtype == torch.float64 else torch.float32 if self.dtype else tensor.dtype
        out = tensor.to(device=self.device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        self.source.done(name)
        return out

    def weight(self, *names: str) -> Weight:
        """These weights under one another."""
        stack = self.stack([names])
        return Weight(stack.data[0], None if stack.scale is None else stack.scale[0])

    def stack(self, experts: Sequence[Sequence[str]]) -> Weight:
        """The same for each expert."""
        forms: dict[tuple[str, str | None], str] = {}
        for name in (name for names in experts for name in names):
            forms.setdefault(self.form(name), name)
        plain = all(dtype in PLAIN for dtype, _ in forms)
        if not plain and len(forms) > 1:
            (one, first), (other, second) = list(forms.items())[:2]
            raise CheckpointError(f"{second} must be stored as {first} is, {_said(one)}, got {_said(other)}")
        dtype, scale_dtype = next(iter(forms))
        rows = self.rows(experts[0], dtype)
        cols = self.part_size(experts[0][0], dtype, 1)
        lead = (len(experts), rows)
        if plain:
            stored = max((DTYPES[dtype] for dtype, _ in forms), key=lambda dtype: dtype.itemsize)
            weight = Weight(torch.empty(*lead, cols, dtype=self.dtype or stored, device=self.device))
        elif dtype == "I8":
            codes = torch.empty(*lead, cols // 2, dtype=torch.uint8, device=self.device)
            weight = Weight(codes, self.empty((*lead, cols // GROUP), torch.float8_e8m0fnu))
        else:
            assert scale_dtype is not None
            blocks = (len(experts), -(-rows // BLOCK), -(-cols // BLOCK))
            weight = Weight(self.empty((*lead, cols), torch.float8_e4m3fn), self.empty(blocks, DTYPES[scale_dtype]))
        for e, names in enumerate(experts):
            at = scale_at = 0
            for name in names:
                at += self.copy(name, name, weight.data[e], at)
                if weight.scale is not None:
                    scale_at += self.copy(scale_name(name), name, weight.scale[e], scale_at)
        if not self.widen:
            return weight
        return Weight(dequantize(weight, torch.float64 if self.dtype == torch.float64 else torch.float32))

    def form(self, name: str) -> tuple[str, str | None]:
        scale = scale_name(name)
        return self.source.dtype(name), self.source.dtype(scale) if scale in self.source else None

    def rows(self, names: Sequence[str], dtype: str) -> int:
        sizes = [self.part_size(name, dtype, 0) for name in names]
        for name, below, size in zip(names, names[1:], sizes, strict=False):
            if dtype == "F8_E4M3" and size % BLOCK:
                raise CheckpointError(f"{name} must have a multiple of {BLOCK} rows to stand above {below}, got {size}")
        return sum(sizes)

    def ways(self, name: str) -> tuple[int, int, int]:
        """Dimension that is cut, into how many parts, and which is ours."""
        what = shard(name)
        return (0, 1, 0) if what is None else (what[1], *getattr(self.cut, what[0]))

    def part_size(self, name: str, dtype: str, dim: int) -> int:
        """Rows or columns of this rank's part, which must hold whole blocks of scales."""
        size, (cut_dim, ways, _) = self.specs[name].shape[dim], self.ways(name)
        ways = ways if dim == cut_dim else 1
        unit = {"F8_E4M3": BLOCK, "I8": (1, GROUP)[dim]}.get(dtype, 1)
        if ways > 1 and (size % ways or size // ways % unit):
            what = ("rows", "columns")[dim]
            raise ValueError(f"load_model: slice must keep blocks of {unit} {what} whole, got {size} / {ways} in {name}")
        return size // ways

    def part(self, name: str, weight: str) -> torch.Tensor:
        """This rank's part of a tensor, a weight or its scale."""
        dim, ways, rank = self.ways(weight)
        tensor = self.source.get(name)
        size = tensor.shape[dim] // ways
        return tensor if ways == 1 else tensor.narrow(dim, rank * size, size)

    def copy(self, name: str, weight: str, into: torch.Tensor, at: int) -> int:
        """Copy this rank's part of a tensor to row `at`; how many rows."""
        part = self.part(name, weight)
        target = into[at : at + len(part)]
        if part.dtype.itemsize == 1:
            target.view(torch.uint8).copy_(part.view(torch.uint8))
        else:
            target.copy_(part)
        self.source.done(name)
        return len(part)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `torch.empty`, which cannot be told to make 8-bit floats everywhere."""
        raw = torch.empty(*shape[:-1], shape[-1] * dtype.itemsize, dtype=torch.uint8, device=self.device)
        return raw.view(dtype)


def _said(form: tuple[str, str | None]) -> str:
    return form[0] if form[1] is None else f"{form[0]} with {form[1]} scales"
