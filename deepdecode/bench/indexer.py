"""python -m deepdecode.bench.indexer: scores and top-k together, checked against float64, past L2, beside their rivals.

Each token has keys of its own, as sequences have. A decode step reads each key once, and none waits in L2 for it: the time that
counts is the rotated one, over copies that together pass L2 several times.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from deepdecode.bench.peers import add_peers
from deepdecode.bench.timing import copy_bandwidth, current_commit, time_graph, write_results
from deepdecode.kernels.attention_plan import card_of
from deepdecode.kernels.indexer_plan import case_of, plan, work
from deepdecode.ops.indexer import index_logits_ref, index_topk_ref
from deepdecode.ops.rows import read_rows
from deepdecode.testing.index_keys import IndexInputs, index_inputs

# (T, entries): contexts of 8k, 64k, 256k and 1M tokens
SIZES = (
    *((T, 2048) for T in (1, 4, 16, 64, 128, 256)),
    *((T, 16384) for T in (1, 4, 16, 64)),
    *((T, 65536) for T in (1, 4, 16)),
    *((T, 262144) for T in (1, 4)),
)
TOPK = (512, 1024)
HEADS = 64
# copies that together pass an L2 of 60 MB three times, about
PAST_L2 = 180 << 20
# a chosen entry may be worse than the worst of float64's choice by this part of the largest score: float32 sums of 64 heads
MAX_GAP = 2e-6

Chosen = tuple[torch.Tensor, torch.Tensor]
Runner = Callable[[IndexInputs], Callable[[], Chosen]]
"""Takes inputs, gives the call to time, whose indices may come in any order; raises if it cannot run the case."""
ENTRIES = "deep_gemm, torch.topk"


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


def deep_gemm(inputs: IndexInputs) -> Callable[[], Chosen]:
    """DeepGEMM's paged logits (PyPI's sgl-deep-gemm), then torch.topk: entries, not rows; its schedule is made beforehand."""
    add_peers()
    import deep_gemm  # pyright: ignore[reportMissingImports]

    q, weights, keys, tables, _, lens, topk = inputs.args()
    entries, lengths = tables.shape[1] * keys.page_size, lens.view(-1, 1)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, keys.page_size, sms)
    pages = keys.data.view(len(keys.data), keys.page_size, 1, 132)

    def call() -> Chosen:
        logits = deep_gemm.fp8_paged_mqa_logits(q[:, None], pages, weights, lengths, tables, schedule, entries, False)
        return logits[:, :entries].topk(topk, dim=1).indices, lens

    return call


IMPLEMENTATIONS: dict[str, Runner] = {"deepdecode": ours, "deepdecode portable": portable}
RIVALS: dict[str, Runner] = {ENTRIES: deep_gemm, "reference, float32": reference}


def rows_of(inputs: IndexInputs, entries: torch.Tensor) -> torch.Tensor:
    size = inputs.keys.page_size
    return inputs.block_tables.gather(1, entries // size) * size + entries % size


def judge(inputs: IndexInputs, indices: torch.Tensor) -> dict[str, float]:
    """How the choice of the first token differs from float64's.

    missed: entries that only float64 chose. gap: how far the worst chosen entry lies below float64's worst, and
    mass: the score that the choice loses, both as a part of the largest score or of the chosen scores' sum.
    """
    q, weights, keys, tables, slots, lens, topk = inputs.args()
    page = tables[slots[0]][: math.ceil(int(lens[0]) / keys.page_size)].long()
    rows = (page[:, None] * keys.page_size + torch.arange(keys.page_size, device=q.device)).flatten()[: int(lens[0])]
    parts = [
        index_logits_ref(q[:1].double(), weights[:1].double(), read_rows(keys, part).double())[0]
        for part in rows.split(1 << 15)
    ]
    scores = torch.cat(parts)
    best = scores.topk(min(topk, len(scores)))
    place = torch.full((keys.num_rows,), -1, device=q.device)
    place[rows] = torch.arange(len(rows), device=q.device)
    mine = place[indices[0, : len(best.values)].long()]
    if not (mine.unique().numel() == len(best.values) and (mine >= 0).all()):
        return {"missed": math.inf, "gap": math.inf, "mass": math.inf}
    got = scores[mine]
    return {
        "missed": float((~torch.isin(best.indices, mine)).sum()),
        "gap": float((best.values[-1] - got.min()).clamp(min=0) / scores.abs().max()),
        "mass": float((best.values.sum() - got.sum()) / best.values.abs().sum()),
    }


def measure(T: int, entries: int, topk: int, name: str, runner: Runner, bandwidth: float, limit_s: float) -> dict[str, Any]:
    """One row of a result file. A case that fails its check, or that the implementation cannot run, has no time."""
    row: dict[str, Any] = {"op": "indexer", "implementation": name, "T": T, "entries": entries, "topk": topk, "heads": HEADS}
    nbytes, flops = (T * each for each in work(entries, HEADS, topk=topk))
    copies = index_inputs(T, entries, topk, heads=HEADS, copies=max(2, min(200, -(-PAST_L2 // nbytes))), device="cuda", seed=T)
    try:
        calls = [runner(inputs) for inputs in copies]
        indices = calls[0]()[0]
        row |= judge(copies[0], rows_of(copies[0], indices) if name == ENTRIES else indices)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"[:160]}
    if name.startswith("deepdecode") and not row["gap"] < MAX_GAP:
        return row | {"error": "not the best entries"}
    warm, rotated = time_graph(calls[:1], limit_s=limit_s), time_graph(calls, limit_s=limit_s)
    row |= {"us_warm": warm.us, "us_warm_low": warm.low, "us_warm_high": warm.high}
    row |= {"us_rotated": rotated.us, "us_rotated_low": rotated.low, "us_rotated_high": rotated.high}
    row |= {"bytes": nbytes, "flops": flops, "floor_us": nbytes / bandwidth / 1e6}
    return row | {"floor_fraction": row["floor_us"] / row["us_rotated"]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deepdecode.bench.indexer", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="also DeepGEMM from $DEEPDECODE_PEERS, and the eager reference")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of result files (default: results)")
    parser.add_argument("--commit", help="the commit that is measured, where the checkout has no .git")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting cells after this long")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench: no CUDA device; figures come from a GPU", file=sys.stderr)
        return 2
    commit, bandwidth, start = options.commit or current_commit(), copy_bandwidth(), time.monotonic()
    rows: list[dict[str, Any]] = []
    runners = IMPLEMENTATIONS | (RIVALS if options.peers else {})
    for topk in TOPK:
        for name, runner in runners.items():
            for T, entries in SIZES:
                if time.monotonic() - start > options.seconds:
                    continue
                row = measure(T, entries, topk, name, runner, bandwidth, 0.03)
                rows.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
                _say(rows[-1])
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    command = "python -m deepdecode.bench.indexer" + (" --peers" if options.peers else "")
    path = options.out / name / "indexer.json"
    write_results(path, rows, command=command, commit=commit, copy_bandwidth_tb_s=round(bandwidth, 3))
    return 1 if any("error" in row and row["implementation"].startswith("deepdecode") for row in rows) else 0


def _say(row: dict[str, Any]) -> None:
    what = f"{row['implementation']:<22} T={row['T']:<4} {row['entries']:>6} entries, top {row['topk']:<5}"
    if "us_warm" not in row:
        print(f"{what} {row['error']}", flush=True)
        return
    times = f"warm {row['us_warm']:8.2f} us  rotated {row['us_rotated']:8.2f} us  floor {row['floor_us']:6.2f} us"
    print(f"{what} {times} {100 * row['floor_fraction']:4.0f} %  missed {row['missed']:.0f}, gap {row['gap']:.0e}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
