"""Which launch sparse attention takes: pure functions of the case and the card, importable without Triton or a GPU."""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from deepdecode.cards import CARDS, Card

if TYPE_CHECKING:
    import torch

    from deepdecode.ops.rows import PagedRows

ROW_BYTES = {"fp8_584": 584, "bf16": 1024}
# keys of a tile
BLOCK_N = 64
# each part of the workspace starts on this, so that 16-byte stores stay aligned
_PART_ALIGN = 128


@dataclass(frozen=True)
class Case:
    """Everything that a launch depends on. Keys are the widths of the index tensors; extra_fmt is None without an extra set.

    align: the largest of 16, 4, 2 and 1 that divides both caches' addresses and page strides, in bytes.
    """

    T: int
    H: int
    window_keys: int
    extra_keys: int = 0
    window_fmt: str = "fp8_584"
    extra_fmt: str | None = "fp8_584"
    D: int = 512
    dtype: str = "bfloat16"
    align: int = 16
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


def supports(case: Case, card: Card) -> str | None:
    """None if a kernel covers the case on the card, else the reason why not. The dispatcher asks nothing else."""
    if card.arch < 80:
        return f"sm_{card.arch} has no bfloat16 tensor cores; sm_80 is the first that has"
    if case.D != 512:
        return f"rows of {case.D}, not 512"
    if case.dtype != "bfloat16":
        return f"q in {case.dtype}, not bfloat16"
    if case.window_fmt not in ROW_BYTES:
        return f"{case.window_fmt} rows"
    if case.extra_fmt not in (None, case.window_fmt):
        return f"window rows in {case.window_fmt} and extra rows in {case.extra_fmt}"
    if case.align < 4:
        return "pages that do not start on multiples of 4 bytes"
    return None


def plan(case: Case, card: Card) -> Config:
    """Choose the launch. The same case and card give the same launch, so a captured graph and its replay agree."""
    tiles = max(1, math.ceil(case.keys / BLOCK_N))
    # H200 (mma.sync), 128+512 keys: 8 heads a program win while one wave holds them; 16 pass over the rows half as often
    few = case.H <= 8 or case.T * math.ceil(case.H / 8) * tiles <= card.sms
    # tiles of 64 bfloat16 rows spill at 16 heads
    block_n = BLOCK_N if case.window_fmt == "fp8_584" or few else BLOCK_N // 2
    config = Config("mma", 8 if few else 16, block_n, 1, 0, 4, 1, min(case.align, 16), card.arch >= 90)
    if case.deterministic:
        # the cut must not depend on T, so it cannot fill the card at every T; the block of heads must not either
        block_h = 8 if case.H <= 8 else 16
        return replace(config, block_h=block_h, splits=math.ceil(tiles / 2), split_keys=2 * BLOCK_N)
    rows = case.T * math.ceil(case.H / config.block_h)
    # two programs fit on an SM: as many splits as that holds, of whole tiles
    splits = min(tiles, max(1, 2 * card.sms // rows))
    return replace(config, splits=math.ceil(tiles / math.ceil(tiles / splits)))


def plan_unsplit(case: Case, card: Card) -> Config:
    """Rung 1: the same kernel, one program for all keys of a block of heads."""
    return replace(plan(case, card), splits=1, split_keys=0)


def programs(case: Case, config: Config) -> tuple[int, int, int]:
    """The grid of the split kernel."""
    return math.ceil(case.H / config.block_h), case.T, config.splits


def work(case: Case) -> tuple[int, int]:
    """Bytes that must move (each row, q, out and the indices once) and floating-point operations."""
    row = ROW_BYTES[case.window_fmt]
    return case.T * (case.keys * (row + 4) + 2 * case.H * 512 * 2 + 8), 4 * case.T * case.H * case.keys * 512


def workspace_layout(T: int, H: int, splits: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes, and where the partial outputs (float16), their lse and their two units (float32) stand. 0 without splits."""
    if splits <= 1:
        return 0, [(0, 0)] * 3
    rows = T * H * splits
    parts, at = [], 0
    for size in (rows * 512 * 2, rows * 4, rows * 8):
        parts.append((at, at + size))
        at += math.ceil(size / _PART_ALIGN) * _PART_ALIGN
    return at, parts


def case_of(
    q: "torch.Tensor",
    window: "PagedRows",
    window_indices: "torch.Tensor",
    extra: "PagedRows | None",
    extra_indices: "torch.Tensor | None",
    deterministic: bool,
) -> Case:
    T, H, D = q.shape
    align = 16
    for cache_ in (window, extra):
        if cache_ is not None:
            align = math.gcd(align, cache_.data.data_ptr(), cache_.data.stride(0) * cache_.data.element_size())
    return Case(
        T=T,
        H=H,
        window_keys=window_indices.shape[1],
        extra_keys=0 if extra_indices is None else extra_indices.shape[1],
        window_fmt=window.fmt,
        extra_fmt=None if extra is None else extra.fmt,
        D=D,
        dtype=str(q.dtype).removeprefix("torch."),
        align=align if align in (16, 4, 2) else (4 if align == 8 else 1),
        deterministic=deterministic,
    )


@cache
def card_of(device: "torch.device") -> Card:
    """The card of this GPU, with what the device reports; bandwidth by the table, or a guess for a card that it lacks."""
    import torch

    have = torch.cuda.get_device_properties(device)
    arch = 10 * have.major + have.minor
    plain = have.name.lower()
    known = [card for card in CARDS if card.name.lower().split()[0] in plain.split() and card.arch == arch]
    near = known or [card for card in CARDS if card.arch == arch] or [CARDS[0]]
    shared = getattr(have, "shared_memory_per_block_optin", near[0].shared << 10) >> 10
    l2 = getattr(have, "L2_cache_size", near[0].l2 << 20) >> 20
    return replace(
        near[0], name=have.name, arch=arch, sms=have.multi_processor_count, l2=l2, shared=shared, memory=have.total_memory >> 30
    )
