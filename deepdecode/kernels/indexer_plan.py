"""Which launch the indexer takes: pure functions of the case and the card, importable without Triton or a GPU.

Two kernels. The first scores tiles of keys, split over programs, and keeps the best of each group of entries. The second,
one program a token, finds the bar among the groups' bests, then among the entries of the groups that pass: the topk best
entries stand in the topk best groups, so it reads a number of scores that does not depend on what they are. Where groups are
many, coarse groups of groups are sifted before them in the same way.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepdecode.cards import Card

if TYPE_CHECKING:
    import torch

    from deepdecode.ops.rows import PagedRows

# bytes of one key, scale included
KEY_BYTES = {"fp8_132": 132, "bf16": 256}
# lanes that the selection holds in registers: coarse groups or groups where it starts, those sifted once, entries; and the
# bests of all groups, which it sees once
MAX_FIRST, MAX_GROUPS, MAX_ENTRIES, MAX_BESTS = 4096, 8192, 32768, 32768
# keys of a tile, and programs on each SM: registers of 64 heads leave room for four. H200, scores of 16 tokens with 16384
# entries: 2, 3, 4, 6, 8 programs take 21.2, 18.1, 16.2, 19.5, 17.0 us; tiles of 128 keys 18.7 at best
BLOCK_N, PER_SM = 64, 4
# scores and bests of a call; a call of more tokens goes piece by piece
WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """Everything that a launch depends on. entries: what a table row can hold.

    align: the largest of 16, 4, 2 and 1 that divides the cache's address and page stride, in bytes.
    gluon: whether this Triton has the Gluon that the Hopper kernel is written in.
    """

    T: int
    heads: int
    entries: int
    topk: int
    page_size: int = 64
    fmt: str = "fp8_132"
    q_dtype: str = "float8_e4m3fn"
    weights_dtype: str = "float32"
    width: int = 128
    align: int = 16
    gluon: bool = True


@dataclass(frozen=True)
class Config:
    """kernel: "wgmma" (Hopper) or "mma". group: entries of a group; 0: one pass over all of them. coarse: groups of a
    coarse group; 1: none.

    select_chunk: lanes that the selection writes at a time.
    widen: how E4M3 becomes float16: "f16" by the card's own conversion, "bits" by integer arithmetic; "none" does not.
    """

    kernel: str
    block_n: int
    group: int
    coarse: int
    splits: int
    num_warps: int
    num_stages: int
    select_warps: int
    select_chunk: int
    align: int
    widen: str
    pdl: bool


def case_of(
    index_q: "torch.Tensor",
    index_weights: "torch.Tensor",
    keys: "PagedRows",
    block_tables: "torch.Tensor",
    slots: "torch.Tensor",
    lens: "torch.Tensor",
    topk: int,
    gluon: bool = True,
) -> Case:
    """The case of one call's arguments."""
    T, heads, width = index_q.shape
    align = math.gcd(16, keys.data.data_ptr(), keys.data.stride(0) * keys.data.element_size())
    return Case(
        T=T,
        heads=heads,
        entries=block_tables.shape[1] * keys.page_size,
        topk=topk,
        page_size=keys.page_size,
        fmt=keys.fmt,
        q_dtype=str(index_q.dtype).removeprefix("torch."),
        weights_dtype=str(index_weights.dtype).removeprefix("torch."),
        width=width,
        align=4 if align == 8 else align,
        gluon=gluon,
    )


def supports(case: Case, card: Card) -> str | None:
    """None if a kernel covers the case on the card, else the reason why not. The dispatcher asks nothing else."""
    if card.arch < 80:
        return f"sm_{card.arch}; the kernels are compiled from sm_80 on"
    if case.fmt not in KEY_BYTES:
        return f"{case.fmt} keys"
    if case.width != 128:
        return f"keys of {case.width}, not 128"
    want = "float8_e4m3fn" if case.fmt == "fp8_132" else "bfloat16"
    if case.q_dtype != want:
        return f"a query in {case.q_dtype} beside {case.fmt} keys"
    if case.weights_dtype != "float32":
        return f"weights in {case.weights_dtype}, not float32"
    if not 1 <= case.heads <= 128:
        return f"{case.heads} heads, not 1 to 128"
    if case.align < 4:
        return "pages that do not start on multiples of 4 bytes"
    if case.entries < 1 or _groups(case) is None:
        return f"top {case.topk} of {case.entries} entries"
    return None


def plan(case: Case, card: Card) -> Config:
    """Choose the launch. The same case and card give the same launch, so a captured graph and its replay agree."""
    found = _groups(case)
    assert found is not None
    group, coarse = found
    hopper = card.arch == 90 and case.gluon and case.fmt == "fp8_132" and case.align == 16
    tiles = max(1, math.ceil(case.entries / BLOCK_N))
    lanes = max(select_blocks(case, group, coarse))
    return Config(
        kernel="wgmma" if hopper else "mma",
        block_n=BLOCK_N,
        group=group,
        coarse=coarse,
        splits=max(1, min(tiles, PER_SM * card.sms // max(1, case.T))),
        num_warps=4,
        num_stages=1,
        select_warps=4 if lanes <= 4096 and coarse == 1 else 8,
        # more than 32 lanes a thread would spill
        select_chunk=4096,
        align=min(case.align, 16),
        widen="none" if case.fmt != "fp8_132" else "bits" if card.arch < 89 else "f16",
        pdl=card.arch >= 90,
    )


def select_blocks(case: Case, group: int, coarse: int) -> tuple[int, int, int]:
    """Lanes of the selection's passes: bests of coarse groups, bests of groups, entries."""
    if not group:
        return 1, 1, _power(case.entries)
    groups, entries = math.ceil(case.entries / group), _power(case.topk) * group
    if coarse == 1:
        return 1, _power(groups), entries
    return _power(math.ceil(groups / coarse)), _power(case.topk) * coarse, entries


def row_stride(case: Case, block_n: int) -> int:
    """Scores of one token in the workspace: whole tiles."""
    return -(-case.entries // block_n) * block_n


def workspace_ints(case: Case, config: Config) -> int:
    """32-bit words for each token: a score an entry, a best a group, and what passed both sievings."""
    stride = row_stride(case, config.block_n)
    return stride + (stride // config.group + 2 * case.topk if config.group else 0)


def work(entries: int, heads: int, fmt: str = "fp8_132", topk: int = 512) -> tuple[int, int]:
    """Bytes that must move for one token (each key, the query and the indices once), and floating-point operations."""
    return entries * KEY_BYTES[fmt] + heads * (128 + 4) + 4 * topk, 2 * entries * heads * 128


def _groups(case: Case) -> tuple[int, int] | None:
    """Entries of a group and groups of a coarse one, the fewest lanes in all; None if none fit the selection's registers."""
    if case.entries <= 4096:
        return 0, 1
    found = []
    for group in (8, 16, 32):
        for coarse in (1, 2, 4, 8):
            first, second, entries = select_blocks(case, group, coarse)
            if coarse == 1:
                first, second = second, 0
            bests = math.ceil(case.entries / group)
            if first <= MAX_FIRST and second <= MAX_GROUPS and entries <= MAX_ENTRIES and bests <= MAX_BESTS:
                # a pass costs what 2048 lanes do, about; more than 4096 lanes spill where labels stay beside them. H200, the
                # best 512 of 262144: groups of 8, 16, 32 in coarse ones of 8, 4, 2 take 16.6, 18.5, 23.6 us
                lanes = first + second + entries + (2048 if coarse > 1 else 0)
                found.append((second > 4096, lanes, group, coarse))
    return min(found)[2:] if found else None


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
