"""Which launch sparse attention takes: pure functions of the case and the card, importable without Triton or a GPU."""

import math
from dataclasses import dataclass

FLOAT16_BYTES = 2
# each part of the workspace starts on this, so 16-byte stores stay aligned
_ALIGN = 128


@dataclass(frozen=True)
class Case:
    """Everything that a launch depends on. Keys are the widths of the index tensors; fmt is None where there is no extra set.

    align: the largest of 16, 4, 2 and 1 that divides both caches' addresses and page strides, in bytes.
    """

    T: int
    H: int
    window_keys: int
    extra_keys: int = 0
    window_fmt: str = "fp8_584"
    extra_fmt: str | None = None
    window_page: int = 64
    extra_page: int = 64
    D: int = 512
    dtype: str = "bfloat16"
    align: int = 16
    lse: bool = False
    deterministic: bool = False

    @property
    def keys(self) -> int:
        return self.window_keys + self.extra_keys


@dataclass(frozen=True)
class Config:
    """block_h heads and tiles of block_n keys for each program; split_keys 0: a row's keys are cut evenly into `splits`."""

    kernel: str
    block_h: int
    block_n: int
    splits: int
    split_keys: int
    num_warps: int
    num_stages: int
    align: int
    pdl: bool


def workspace_layout(T: int, H: int, splits: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes, and where the partial outputs (float16), their lse and their units (float32) stand. 0 bytes without splits."""
    if splits <= 1:
        return 0, [(0, 0)] * 3
    rows = T * H * splits
    parts, at = [], 0
    for size in (rows * 512 * FLOAT16_BYTES, rows * 4, rows * 4):
        parts.append((at, at + size))
        at += math.ceil(size / _ALIGN) * _ALIGN
    return at, parts
