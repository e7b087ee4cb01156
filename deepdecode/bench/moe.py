"""deepdecode bench moe: the experts of a layer, checked against float64, past L2, beside their rivals.

Rotated calls have routes of their own each, so that few of the weights they read are left in L2 by the call before. The floor
counts the distinct experts hit.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from deepdecode.bench import cells
from deepdecode.bench.cells import Cell, Missing, Work
from deepdecode.bench.options import parser_of
from deepdecode.errors import told
from deepdecode.ops.moe import moe, moe_ref, swiglu_ref
from deepdecode.ops.quant import dequantize
from deepdecode.ops.table import MoeWeights
from deepdecode.testing.experts import random_experts, random_routes
from deepdecode.testing.numeric import rel_err, worst_row_err

# the sizes of the targets first: a run may be cut off
TOKENS = (1, 16, 64, 32, 2, 4, 8, 128, 256)
PEER_TOKENS = (1, 16, 64)
TOP_K, C, LIMIT = 6, 4096, 10.0
# h is rounded to bfloat16 between the two products, and the sum once at the end; of one token, the error is that of a row
MAX_ERR, MAX_ROW_ERR = 3e-3, 4e-3
# rivals round more: both products, what lies between, and each step of the sum, to bfloat16
MAX_RIVAL = 1.5e-2
# the reference widens every expert it meets: a large batch is checked on its first tokens
CHECKED_TOKENS = 8


@dataclass(frozen=True)
class Rank:
    """experts first .. first + E - 1 of `experts`, of this width, the shared one, for its own of all `ranks`' tokens."""

    name: str
    E: int
    width: int
    shared: int
    first: int = 0
    experts: int = 256
    ranks: int = 1

    def own(self, T: int) -> int:
        return -(-T // self.ranks)


# V4-Flash whole; a rank of 8 that has an eighth of every expert; one that has 32 whole ones, and 8 ranks' tokens
RANKS = (Rank("tp1", 256, 2048, 2048), Rank("tp8", 256, 256, 256), Rank("ep8", 32, 2048, 2048, 96, ranks=8))

Routes = tuple[torch.Tensor, torch.Tensor]
Runner = Callable[[torch.Tensor, Routes, MoeWeights, Rank], Callable[[], torch.Tensor]]
"""Takes x, a route, the weights and whose they are, gives the call to time; raises if it cannot run."""


def ours(x: torch.Tensor, routes: Routes, w: MoeWeights, rank: Rank) -> Callable[[], torch.Tensor]:
    return lambda: moe(x, *routes, w, LIMIT, rank.own(len(x)))


def grouped(x: torch.Tensor, routes: Routes, w: MoeWeights, rank: Rank) -> Callable[[], torch.Tensor]:
    """torch.nn.functional.grouped_mm on bfloat16 copies, four times the bytes; the call sorts the pairs, on the device."""
    if not hasattr(F, "grouped_mm"):
        raise Missing("torch.nn.functional.grouped_mm")
    ids, weights = routes
    w13, w2, shared13, shared2 = copies_of(rank)
    E, top_k, own = w.w13.shape[0], ids.shape[1], rank.own(len(x))
    ends = torch.arange(1, E + 1, device=x.device)

    def call() -> torch.Tensor:
        expert = ids.flatten() - w.first_expert
        here = (expert >= 0) & (expert < E)
        # those of other ranks come last, behind the last group
        expert, order = torch.where(here, expert, E).sort(stable=True)
        offs = torch.searchsorted(expert, ends, out_int32=True)
        token, weight = order // top_k, weights.flatten()[order, None].bfloat16()
        gate, up = F.grouped_mm(x[token], w13.mT, offs=offs).chunk(2, dim=-1)
        pairs = F.grouped_mm(swiglu_ref(gate, up, LIMIT) * weight, w2.mT, offs=offs)
        gate, up = (x[:own] @ shared13.mT).chunk(2, dim=-1)
        y = F.pad(swiglu_ref(gate, up, LIMIT) @ shared2.mT, (0, 0, 0, len(x) - own))
        # rows behind the last group were not written
        return y.index_add_(0, token, torch.where(expert[:, None] < E, pairs, 0))

    return call


def widened_each_time(x: torch.Tensor, routes: Routes, w: MoeWeights, rank: Rank) -> Callable[[], torch.Tensor]:
    """Expert by expert: dequantise to bfloat16, torch.matmul. The experts hit are asked for beforehand, and not timed."""
    ids, weights = routes
    local = ids.long() - w.first_expert
    hit = [(e, *(local == e).nonzero(as_tuple=True)) for e in local[(local >= 0) & (local < w.w13.shape[0])].unique().tolist()]
    rows = [weights[at, lane, None].bfloat16() for _, at, lane in hit]
    own = rank.own(len(x))

    def call() -> torch.Tensor:
        gate, up = (x[:own] @ dequantize(w.shared13).bfloat16().mT).chunk(2, dim=-1)
        y = F.pad(swiglu_ref(gate, up, LIMIT) @ dequantize(w.shared2).bfloat16().mT, (0, 0, 0, len(x) - own))
        for (e, at, _), weight in zip(hit, rows, strict=True):
            gate, up = (x[at] @ dequantize(w.w13[e]).bfloat16().mT).chunk(2, dim=-1)
            y.index_add_(0, at, (swiglu_ref(gate, up, LIMIT) * weight) @ dequantize(w.w2[e]).bfloat16().mT)
        return y

    return call


SLOW = "dequantise, torch.matmul"
IMPLEMENTATIONS: dict[str, Runner] = {
    "deepdecode": ours,
    "grouped_mm, bfloat16 copy": grouped,
    SLOW: widened_each_time,
}


@lru_cache(maxsize=len(RANKS))
def weights_of(rank: Rank) -> MoeWeights:
    """Drawn once for all T."""
    return random_experts(rank.E, C, rank.width, rank.shared, first=rank.first, device=cells.DEVICE)


@lru_cache(maxsize=len(RANKS))
def copies_of(rank: Rank) -> tuple[torch.Tensor, ...]:
    """w13, w2 and the shared expert's two in bfloat16: 13 GB of V4-Flash's whole, and widened an expert at a time."""
    w = weights_of(rank)
    routed = (torch.stack([dequantize(part[e]).bfloat16() for e in range(rank.E)]) for part in (w.w13, w.w2))
    return (*routed, dequantize(w.shared13).bfloat16(), dequantize(w.shared2).bfloat16())


@lru_cache(maxsize=len(RANKS) * len(TOKENS))
def wanted(rank: Rank, T: int) -> torch.Tensor:
    """float64, of the first tokens of the first route: every implementation is checked against the same."""
    x, n = tokens_of(T), CHECKED_TOKENS
    own = min(rank.own(T), T, n)
    ids, weights = random_routes(T, rank.experts, TOP_K, device=cells.DEVICE, seed=0)
    return moe_ref(x[:n].double(), ids[:n], weights[:n].double(), weights_of(rank), LIMIT, own)


def tokens_of(T: int) -> torch.Tensor:
    return torch.randn(T, C, generator=torch.Generator(cells.DEVICE).manual_seed(T), device=cells.DEVICE).bfloat16()


def _here(ids: torch.Tensor, rank: Rank) -> torch.Tensor:
    """The ids that are this rank's, flat."""
    return ids[(ids >= rank.first) & (ids < rank.first + rank.E)]


def work(rank: Rank, T: int, name: str) -> Work:
    w = weights_of(rank)
    x = tokens_of(T)
    each = (w.w13.nbytes + w.w2.nbytes) / rank.E
    shared = w.shared13.nbytes + w.shared2.nbytes
    # what widens weights takes milliseconds, and leaves none of them in L2; others in turn read experts that differ
    likely = int(min(rank.E, T * TOP_K * rank.E / rank.experts) * each) + shared
    count = 1 if name == SLOW else cells.copies(likely, 32)
    routes = [random_routes(T, rank.experts, TOP_K, device=cells.DEVICE, seed=n) for n in range(count)]
    calls = [IMPLEMENTATIONS[name](x, route, w, rank) for route in routes]

    def check() -> dict[str, float]:
        want = wanted(rank, T)
        got = calls[0]()[: len(want)]
        return {"rel_err": rel_err(got, want), "worst_row_err": worst_row_err(got, want)}

    hit = sum(len(_here(ids, rank).unique()) for ids, _ in routes) / count
    pairs = sum(len(_here(ids, rank)) for ids, _ in routes) / count
    nbytes = int(hit * each) + shared + 2 * x.nbytes
    bound = MAX_RIVAL if name != "deepdecode" else MAX_ERR if T > 1 else MAX_ROW_ERR
    return Work(calls, check, ("rel_err", bound), nbytes, int(6 * C * (pairs * rank.width + rank.own(T) * rank.shared)))


def jobs(peers: bool) -> Iterator[Cell]:
    """Ours where rivals are, the rival that takes no longer, ours elsewhere, the slow one: a run may be cut off.

    Each rank's sizes together, and V4-Flash whole before the others: its time has a target.
    """
    among, elsewhere = ([T for T in TOKENS if (T in PEER_TOKENS) is wanted] for wanted in (True, False))
    rivals = [name for name in IMPLEMENTATIONS if name not in ("deepdecode", SLOW)]
    rounds = [("deepdecode", among), *((name, among) for name in rivals), ("deepdecode", elsewhere), (SLOW, among)]
    for name, sizes in rounds:
        if name != "deepdecode" and not peers:
            continue
        for rank in RANKS:
            for T in sizes:
                keys = {"rank": rank.name, "experts": rank.E, "top_k": TOP_K, "width": rank.width, "shared": rank.shared}
                row: dict[str, Any] = {"op": "moe", "implementation": name, "T": T, **keys}
                limit_s = 0.01 if name == SLOW else 0.06
                yield Cell(row, lambda rank=rank, T=T, name=name: work(rank, T, name), limit_s=limit_s)


def say(row: dict[str, Any]) -> str:
    if "T" not in row:
        return cells.line(row, row["implementation"], "")
    errors = f"error {row.get('rel_err', 0):.1e}, {row.get('worst_row_err', 0):.1e}"
    return cells.line(row, f"{row['implementation']:<26} {row['rank']} T={row['T']:<4}", errors)


def main(argv: Sequence[str] | None = None) -> int:
    return command(parser_of("moe").parse_args(argv))


def command(options: argparse.Namespace) -> int:
    return cells.run("moe", options, jobs(options.peers), say)


if __name__ == "__main__":
    sys.exit(told(main))
