"""Writing checkpoints, and making them from a seed."""

import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from deepdecode.checkpoint.container import DTYPE_NAMES, DTYPES, CheckpointError, CheckpointExists, append, header_bytes
from deepdecode.checkpoint.layout import Spec, faults, packed_shapes, packing, scale_name, tensor_specs
from deepdecode.checkpoint.load import assemble, parse_cut
from deepdecode.checkpoint.open import INDEX
from deepdecode.config import ModelConfig, config_json, shown
from deepdecode.model import ModelWeights

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Written:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def write_checkpoint(
    path: str | os.PathLike[str],
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = 4 << 30,
    extra_files: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """Write config.json, safetensors shards and their index: all of it, or nothing.

    Args:
        path: a directory that does not exist, or is empty.
        config: what config.json will say.
        tensors: (official name, tensor), consumed one by one; FP4 as int8, scales as float8_e8m0fnu.
        shard_bytes: a shard ends before the tensor that would make it larger than this.
        extra_files: copied beside them, under their own names (a tokenizer).

    Raises:
        CheckpointExists: the target is there and not empty, or came to be meanwhile. It stays as it is.
        CheckpointError: the tensors are not those of the config. Nothing is left behind.
    """
    target = Path(path).absolute()
    exists = CheckpointExists(f"{shown(target.name)}: must not exist or be an empty directory, found something there")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise exists
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        shards = _write_shards(scratch, tensors, shard_bytes)
        found = {written.name: written for shard in shards for written in shard}
        mtp = any(name.startswith("mtp.") for name in found)
        for fault in faults(config, found, dict.fromkeys(found, "write_checkpoint"), mtp=mtp):
            raise CheckpointError(fault)
        listed = dict[str, str]()
        for i, shard in enumerate(shards, start=1):
            name = f"model-{i:05}-of-{len(shards):05}.safetensors"
            (scratch / f"{i}.safetensors").rename(scratch / name)
            listed |= {written.name: name for written in shard}
        total = sum(written.end - written.begin for written in found.values())
        _write_json(scratch / INDEX, {"metadata": {"total_size": total}, "weight_map": listed})
        _write_json(scratch / "config.json", config_json(config, draft_layers=int(mtp)))
        for extra in map(Path, extra_files):
            with extra.open("rb") as source, (scratch / extra.name).open("xb") as copy:
                shutil.copyfileobj(source, copy)
                copy.flush()
                os.fsync(copy.fileno())
        umask = os.umask(0)
        os.umask(umask)
        scratch.chmod(0o777 & ~umask)
        _sync(scratch)
        try:
            scratch.rename(target)
        except OSError as problem:
            if problem.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise exists from None
            raise
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write_shards(scratch: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> list[list[_Written]]:
    """Write each shard as its tensors come: their bytes first, to a file of their own, then header and bytes in order."""
    shards: list[list[_Written]] = [[]]
    seen = set[str]()
    data = (scratch / "data").open("w+b")
    try:
        for name, tensor in tensors:
            if name in seen:
                raise CheckpointError(f"write_checkpoint: {shown(name)} must come once, got it twice")
            if tensor.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"write_checkpoint: {shown(name)} must be of a checkpoint's dtype, got {tensor.dtype}")
            seen.add(name)
            if shards[-1] and data.tell() + tensor.numel() * tensor.element_size() > shard_bytes:
                _finish(scratch / f"{len(shards)}.safetensors", shards[-1], data)
                shards.append([])
            begin = data.tell()
            end = begin + append(data, tensor)
            shards[-1].append(_Written(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), begin, end))
        _finish(scratch / f"{len(shards)}.safetensors", shards[-1], data)
    finally:
        data.close()
    (scratch / "data").unlink()
    return shards


def _finish(path: Path, shard: list[_Written], data: BinaryIO) -> None:
    # wide types first, so that every tensor is aligned
    order = sorted(shard, key=lambda written: -DTYPES[written.dtype].itemsize)
    with path.open("wb") as file:
        file.write(header_bytes((written.name, written.dtype, written.shape) for written in order))
        for written in order:
            data.seek(written.begin)
            left = written.end - written.begin
            while left:
                chunk = data.read(min(left, 1 << 24))
                file.write(chunk)
                left -= len(chunk)
        file.flush()
        os.fsync(file.fileno())
    data.seek(0)
    data.truncate()


def _write_json(path: Path, value: object) -> None:
    with path.open("w") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def seeded_tensors(
    config: ModelConfig, seed: int, *, quantized: bool | None = None, mtp: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """A random checkpoint, tensor by tensor, under official names and in the official formats.

    Args:
        config: any; sizes need not be V4-Flash's.
        seed: same seed, same tensors, whatever else is asked for.
        quantized: whether weights are packed as config.expert_dtype says; False: everything float32. None: as the
            config says.
        mtp: also the MTP block, mtp.0.*

    Yields:
        (name, tensor) in checkpoint order, scales after their weights. Linears have a standard deviation near
        in ** -0.5, norms are near 1, everything else is random and not zero, so that no part can be left out unseen.
    """
    source = Seeded(config, seed, torch.device("cpu"), quantized=quantized, mtp=mtp)
    for name in source.specs:
        yield name, source.get(name)
        if scale_name(name) in source:
            yield scale_name(name), source.get(scale_name(name))


def seeded_model(
    config: ModelConfig,
    seed: int,
    *,
    slice: str | tuple[int, int] | None = None,
    rank: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    quantized: bool | None = None,
) -> ModelWeights:
    """What `load_model` gives for a checkpoint of `seeded_tensors`, made on the device, with no file.

    On a GPU the numbers are that GPU's generator's, not the CPU's. Arguments as for `load_model` and `seeded_tensors`.
    """
    at = torch.device(device)
    return assemble(Seeded(config, seed, at, quantized=quantized), parse_cut(config, slice, rank), at, dtype)


class Seeded:
    """A source of random tensors; each depends on the seed and its name only."""

    def __init__(
        self, config: ModelConfig, seed: int, device: torch.device, *, quantized: bool | None = None, mtp: bool = False
    ):
        self.config, self.seed, self.device = config, seed, device
        if quantized and config.expert_dtype == "float":
            raise ValueError("seeded_tensors: quantized must be False for a config whose expert_dtype is float, got True")
        self.expert_dtype = "float" if quantized is False else config.expert_dtype
        self.specs = tensor_specs(config, mtp=mtp)
        self.weights = {scale_name(name): name for name, spec in self.specs.items() if packing(spec, self.expert_dtype)}
        for name in self.weights.values():
            spec = self.specs[name]
            if packing(spec, self.expert_dtype) == "fp4" and spec.shape[1] % 32:
                raise ValueError(f"seeded_tensors: {name} must be a multiple of 32 wide for FP4, got {list(spec.shape)}")

    def __contains__(self, name: str) -> bool:
        return name in self.specs or name in self.weights

    def dtype(self, name: str) -> str:
        if name in self.weights:
            return "F32" if self.expert_dtype == "fp8" else "F8_E8M0"
        spec = self.specs[name]
        how = packing(spec, self.expert_dtype)
        if how is not None:
            return "I8" if how == "fp4" else "F8_E4M3"
        if spec.kind == "ids":
            return "I64"
        return "BF16" if spec.kind != "f32" and self.expert_dtype != "float" else "F32"

    def done(self, name: str) -> None:
        pass

    def get(self, name: str) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        if name in self.weights:
            return self._scale(self.specs[self.weights[name]], generator)
        spec = self.specs[name]
        how = packing(spec, self.expert_dtype)
        if how == "fp4":
            codes = torch.randint(
                256, packed_shapes(spec.shape, how)[0], generator=generator, device=self.device, dtype=torch.uint8
            )
            return codes.view(torch.int8)
        if how == "fp8":
            # far from the largest code, 448
            return (self._normal(spec.shape, generator) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
        if spec.kind == "ids":
            # distinct experts for each token
            order = torch.rand(spec.shape[0], self.config.num_experts, generator=generator, device=self.device)
            return order.topk(spec.shape[1]).indices.long()
        return self._plain(name, spec, generator).to(DTYPES[self.dtype(name)])

    def _normal(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device)

    def _plain(self, name: str, spec: Spec, generator: torch.Generator) -> Tensor:
        values = self._normal(spec.shape, generator)
        if name.endswith(("norm.weight", "_scale")):
            return 1 + 0.1 * values
        if name.endswith(".bias"):
            return 0.1 * values
        if name == "head.weight":
            return values * 2 * spec.shape[1] ** -0.5
        if name == "embed.weight" or len(spec.shape) == 1 or name.endswith(".ape"):
            return values
        return values * spec.shape[1] ** -0.5

    def _scale(self, spec: Spec, generator: torch.Generator) -> Tensor:
        """Block scales that differ and bring the codes to in ** -0.5, within a factor of two."""
        how = packing(spec, self.expert_dtype)
        assert how is not None
        shape = packed_shapes(spec.shape, how)[1]
        # root mean square of the codes: all 16 of E2M1 alike, or 64
        rms = 2.93 if how == "fp4" else 64.0
        if self.expert_dtype == "fp8":
            spread = 0.5 + torch.rand(shape, generator=generator, device=self.device)
            return spread * (spec.shape[1] ** -0.5 / rms)
        # the upper of two exponents, so that the mean of both comes out right
        exponent = 127 + round(-0.5 * math.log2(spec.shape[1]) - math.log2(rms) + 0.3)
        codes = torch.randint(exponent - 1, exponent + 1, shape, generator=generator, device=self.device)
        return codes.to(torch.uint8).view(torch.float8_e8m0fnu)
