"""The safetensors container: a length, a JSON header, the tensors' bytes. Read with every check, mapped, never copied.

A file is untrusted: it may be cut, hostile, or no safetensors at all. Whatever is wrong is a `CheckpointError`.
"""

import json
import math
import mmap
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from deepdecode.config import parse_json, shown

MAX_HEADER_BYTES = 100_000_000
# how a file begins that stands for one which has not been fetched
LFS = b"version https://git-lfs"
# above what the largest config we read asks for: six for each expert, and the rest
MAX_TENSORS = 700_000

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. One sentence, naming file and tensor."""


class CheckpointExists(CheckpointError, FileExistsError):
    """Writing would replace something."""


@dataclass(frozen=True)
class Stored:
    """One tensor in a file; its bytes stand at begin..end of the file."""

    file: "TensorFile"
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> torch.Tensor:
        """The tensor as a read-only view of the mapped file."""
        dtype = DTYPES[self.dtype]
        if self.begin == self.end:
            return torch.empty(self.shape, dtype=dtype)
        flat = self.file.bytes(self.begin, self.end)
        if self.begin % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(self.shape)

    def release(self) -> None:
        """Give back the memory of the pages read so far; the view stays valid and reads them again."""
        self.file.release()


@dataclass(eq=False)
class TensorFile:
    """One open safetensors file."""

    path: Path
    size: int
    header_bytes: int
    metadata: dict[str, str]
    tensors: dict[str, Stored] = field(default_factory=dict)
    _map: mmap.mmap | None = None
    _bytes: torch.Tensor | None = None

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        whole = self._bytes
        if whole is None:
            try:
                with self.path.open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as problem:
                raise CheckpointError(f"{shown(self.path.name)}: cannot be mapped: {problem}") from None
            with warnings.catch_warnings():
                # nobody writes to it: every use copies out of it
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                whole = self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return whole[begin:end]

    def release(self) -> None:
        # of the whole file, since the kernel maps neighbours of the pages that are read
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def open_file(path: Path) -> TensorFile:
    """Read and check the header; the tensors' bytes are mapped when one is first read."""
    name = shown(path.name)
    try:
        if not path.is_file():
            raise CheckpointError(f"{name}: must be a file, found {'something else' if path.exists() else 'none'}")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8:
                raise CheckpointError(f"{name}: is not a safetensors file: it has {size} bytes")
            if head == LFS[:8] and file.read(len(LFS) - 8) == LFS[8:]:
                raise CheckpointError(f"{name}: is a Git LFS pointer, not the file itself, which `git lfs pull` fetches")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{name}: header must be at most {MAX_HEADER_BYTES} bytes, got {length}")
            if 8 + length > size:
                raise CheckpointError(f"{name}: is cut short: the header has {length} bytes, the file {size}")
            text = file.read(length)
    except OSError as problem:
        raise CheckpointError(f"{name}: cannot be read: {problem.strerror}") from None
    if not text.startswith(b"{"):
        raise CheckpointError(f"{name}: is not a safetensors file: its header is not a JSON object")
    # three brackets each; counted first, since brackets are what a header grows thirtyfold by when it is read
    if text.count(b"{") + text.count(b"[") > 3 * MAX_TENSORS:
        raise CheckpointError(f"{name}: header must describe at most {MAX_TENSORS} tensors, got more")
    header = parse_json(text, f"{name}: header", CheckpointError)
    return _check_header(path, name, size, 8 + length, header)


def _check_header(path: Path, name: str, size: int, start: int, header: dict[str, object]) -> TensorFile:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{name}: __metadata__ must be strings under names, got {shown(metadata)}")
    found = TensorFile(path, size, start, metadata)
    for tensor, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise CheckpointError(f"{name}: {shown(tensor)} must have dtype, shape and data_offsets, got {shown(entry)}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointError(f"{name}: {shown(tensor)}: dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}")
        if not _sizes(shape) or len(shape) > 8:
            raise CheckpointError(f"{name}: {shown(tensor)}: shape must be a list of at most 8 sizes, got {shown(shape)}")
        if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise CheckpointError(f"{name}: {shown(tensor)}: data_offsets must be [begin, end], got {shown(offsets)}")
        want = math.prod(shape) * DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != want:
            got = offsets[1] - offsets[0]
            raise CheckpointError(
                f"{name}: {shown(tensor)}: data_offsets must span {want} bytes for {dtype} {shape}, got {got}"
            )
        found.tensors[tensor] = Stored(found, tensor, dtype, tuple(shape), start + offsets[0], start + offsets[1])
    at = start
    for stored in sorted(found.tensors.values(), key=lambda stored: (stored.begin, stored.end)):
        if stored.begin != at:
            fault = "overlaps the tensor before it" if stored.begin < at else f"leaves a hole of {stored.begin - at} bytes"
            raise CheckpointError(f"{name}: {shown(stored.name)} {fault}")
        at = stored.end
    if at != size:
        fault = f"is cut short: its header describes {at} bytes" if at > size else f"has {size - at} bytes after its tensors"
        raise CheckpointError(f"{name}: {fault}, the file has {size}")
    return found


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> bytes:
    """Length and header of a file that holds these (name, dtype, shape) in this order, padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def append(file: BinaryIO, tensor: torch.Tensor) -> int:
    """Write a tensor's bytes; how many."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel():
        file.write(flat.view(torch.uint8).numpy().data)
    return flat.numel() * flat.element_size()
