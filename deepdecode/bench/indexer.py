"""deepdecode bench indexer: scores and top-k together, checked against float64, past L2, beside their rivals.

Each token has keys of its own, as sequences have.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from deepdecode.bench import cells
from deepdecode.bench.cells import Cell, Work
from deepdecode.bench.options import parser_of
from deepdecode.bench.peers import deep_gemm
from deepdecode.errors import told
from deepdecode.kernels.attention_plan import card_of
from deepdecode.kernels.indexer_plan import case_of, plan, work
from deepdecode.ops.indexer import index_logits_ref, index_topk_ref
from deepdecode.ops.rows import read_rows
from deepdecode.testing.index_keys import IndexInputs, index_inputs

# (T, entries): contexts of 8k, 64k, 256k and 1M tokens; those of the targets first, since a run may be cut off
SIZES = (
    (1, 262144),
    (16, 16384),
    *((T, 2048) for T in (1, 16, 64)),
    (1, 16384),
    (64, 16384),
    *((T, 65536) for T in (1, 16)),
    *((4, entries) for entries in (2048, 16384, 65536, 262144)),
    *((T, 2048) for T in (128, 256)),
)
PAST_L2 = cells.PAST_L2
TOPK = (512, 1024)
HEADS = 64
# a chosen entry may be worse than the worst of float64's choice by this part of the largest score: float32 sums of 64 heads
MAX_GAP = 2e-6
# Hopper's FP8 products keep about 14 bits of a sum
MAX_RIVAL_GAP = 1e-2

Chosen = tuple[torch.Tensor, torch.Tensor]
Runner = Callable[[IndexInputs], Callable[[], Chosen]]
"""Takes inputs, gives the call to time, whose indices may come in any order; raises if it cannot run the case."""
ENTRIES = "deep_gemm, torch.topk"
ALONE = "torch.topk alone"


def ours(inputs: IndexInputs) -> Callable[[], Chosen]:
    from deepdecode.kernels import indexer as kernel

    args = inputs.args()
    config = plan(case_of(*args, gluon=kernel.gluon_ready()), card_of(inputs.index_q.device))
    return lambda: kernel.launch(*args, config)


def portable(inputs: IndexInputs) -> Callable[[], Chosen]:
    """The kernels that other cards run, planned for this one."""
    from deepdecode.kernels import indexer as kernel

    args = inputs.args()
    config = plan(case_of(*args, gluon=False), card_of(inputs.index_q.device))
    return lambda: kernel.launch(*args, config)


def reference(inputs: IndexInputs) -> Callable[[], Chosen]:
    return lambda: index_topk_ref(*inputs.args())


def deep_gemm_topk(inputs: IndexInputs) -> Callable[[], Chosen]:
    """DeepGEMM's paged logits, then torch.topk: entries, not rows; the schedule of its programs is made beforehand."""
    library = deep_gemm()
    q, weights, keys, tables, _, lens, topk = inputs.args()
    entries, lengths = tables.shape[1] * keys.page_size, lens.view(-1, 1)
    schedule = library.get_paged_mqa_logits_metadata(lengths, keys.page_size, card_of(q.device).sms)
    pages = keys.data.view(len(keys.data), keys.page_size, 1, 132)

    def call() -> Chosen:
        logits = library.fp8_paged_mqa_logits(q[:, None], pages, weights, lengths, tables, schedule, entries, False)
        return logits[:, :entries].topk(min(topk, entries), dim=1).indices, lens

    return call


def topk_alone(inputs: IndexInputs) -> Callable[[], Chosen]:
    """torch.topk of scores that are there already: what a choice costs without the scores."""
    scores = torch.stack([_scores(inputs, t).float() for t in range(len(inputs.lens))])
    return lambda: (scores.topk(min(inputs.topk, scores.shape[1]), dim=1).indices, inputs.lens)


IMPLEMENTATIONS: dict[str, Runner] = {"deepdecode": ours, "deepdecode portable": portable}
RIVALS: dict[str, Runner] = {ENTRIES: deep_gemm_topk, ALONE: topk_alone, "reference, float32": reference}


def runs(name: str, T: int, entries: int) -> bool:
    """Whether the cell is worth its time: the reference takes milliseconds, and scores made one token at a time as well."""
    if name == ALONE:
        return T <= 16
    return not name.startswith("reference") or (T <= 16 and entries <= 16384)


def rows_of(inputs: IndexInputs, entries: torch.Tensor) -> torch.Tensor:
    size = inputs.keys.page_size
    return inputs.block_tables.gather(1, entries // size) * size + entries % size


def judge(inputs: IndexInputs, indices: torch.Tensor) -> dict[str, float]:
    """How the choice of the first token differs from float64's.

    missed: entries that only float64 chose. gap: how far the worst chosen entry lies below float64's worst, and
    mass: the score that the choice loses, both as a part of the largest score or of the chosen scores' sum.
    """
    scores, rows = _scores(inputs, 0), _rows(inputs, 0)
    best = scores.topk(min(inputs.topk, len(scores)))
    place = torch.full((inputs.keys.num_rows,), -1, device=scores.device)
    place[rows] = torch.arange(len(rows), device=scores.device)
    mine = place[indices[0, : len(best.values)].long()]
    if not (mine.unique().numel() == len(best.values) and (mine >= 0).all()):
        return {"missed": math.inf, "gap": math.inf, "mass": math.inf}
    got = scores[mine]
    return {
        "missed": float((~torch.isin(best.indices, mine)).sum()),
        "gap": float((best.values[-1] - got.min()).clamp(min=0) / scores.abs().max()),
        "mass": float((best.values.sum() - got.sum()) / best.values.abs().sum()),
    }


def _rows(inputs: IndexInputs, t: int) -> torch.Tensor:
    """Physical rows of token t's entries, in their order."""
    _, _, keys, tables, slots, lens, _ = inputs.args()
    page = tables[slots[t]][: math.ceil(int(lens[t]) / keys.page_size)].long()
    return (page[:, None] * keys.page_size + torch.arange(keys.page_size, device=page.device)).flatten()[: int(lens[t])]


def _scores(inputs: IndexInputs, t: int) -> torch.Tensor:
    """float64 [entries of token t]."""
    q, weights = inputs.index_q[t : t + 1].double(), inputs.index_weights[t : t + 1].double()
    parts = [index_logits_ref(q, weights, read_rows(inputs.keys, part).double())[0] for part in _rows(inputs, t).split(1 << 15)]
    return torch.cat(parts)


@lru_cache(maxsize=1)
def inputs_of(T: int, entries: int) -> list[IndexInputs]:
    """Sets of inputs that together pass L2; top-k is set by who takes them."""
    nbytes = T * work(entries, HEADS, topk=TOPK[0])[0]
    return index_inputs(T, entries, TOPK[0], heads=HEADS, copies=cells.copies(nbytes), device=cells.DEVICE, seed=T)


def prepared(T: int, entries: int, topk: int, name: str) -> Work:
    nbytes, flops = (T * each for each in work(entries, HEADS, topk=topk))
    sets = [replace(inputs, topk=topk) for inputs in inputs_of(T, entries)]
    if name not in (*IMPLEMENTATIONS, ENTRIES):
        # a call takes milliseconds, or its inputs do: warm only
        sets = sets[:1]
    calls = [(IMPLEMENTATIONS | RIVALS)[name](inputs) for inputs in sets]

    def check() -> dict[str, float]:
        indices = calls[0]()[0]
        return judge(sets[0], rows_of(sets[0], indices) if name in (ENTRIES, ALONE) else indices)

    bound = MAX_GAP if name.startswith("deepdecode") else MAX_RIVAL_GAP
    return Work(calls, check, ("gap", bound), nbytes, flops)


def jobs(peers: bool) -> Iterator[Cell]:
    """All of one size, one after the other: they share inputs."""
    for T, entries in SIZES:
        for topk in TOPK:
            for name in IMPLEMENTATIONS | (RIVALS if peers else {}):
                if runs(name, T, entries):
                    row: dict[str, Any] = {"op": "indexer", "implementation": name, "T": T, "entries": entries, "topk": topk}
                    row["heads"] = HEADS
                    yield Cell(row, lambda T=T, entries=entries, topk=topk, name=name: prepared(T, entries, topk, name))


def say(row: dict[str, Any]) -> str:
    if "T" not in row:
        return cells.line(row, row["implementation"], "")
    what = f"{row['implementation']:<22} T={row['T']:<4} {row['entries']:>6} entries, top {row['topk']:<5}"
    return cells.line(row, what, f"missed {row.get('missed', 0):.0f}, gap {row.get('gap', 0):.0e}")


def main(argv: Sequence[str] | None = None) -> int:
    return command(parser_of("indexer").parse_args(argv))


def command(options: argparse.Namespace) -> int:
    return cells.run("indexer", options, jobs(options.peers), say)


if __name__ == "__main__":
    sys.exit(told(main))
