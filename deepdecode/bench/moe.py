"""python -m deepdecode.bench.moe: the experts of a layer, checked against float64, past L2, beside their rivals.

Every call has routes of its own, so that few of the weights it reads are left in L2 by the call before. The floor counts the
distinct experts hit.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepdecode.bench.timing import copy_bandwidth, current_commit, time_graph, write_results
from deepdecode.ops.moe import moe, moe_ref, swiglu_ref
from deepdecode.ops.quant import dequantize
from deepdecode.ops.table import MoeWeights
from deepdecode.testing.experts import random_experts, random_routes
from deepdecode.testing.numeric import rel_err, worst_row_err

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
TOP_K, C, LIMIT = 6, 4096, 10.0
# h is rounded to bfloat16 between the two products, and the sum once at the end
MAX_ERR = 3e-3
# the reference widens every expert it meets: a large batch is checked on its first tokens
CHECKED_TOKENS = 8


@dataclass(frozen=True)
class Rank:
    """experts first .. first + E - 1 of `experts`, of this width, and the shared one."""

    name: str
    E: int
    width: int
    shared: int
    first: int = 0
    experts: int = 256


# V4-Flash whole; a rank of 8 that has an eighth of every expert; a rank of 8 that has 32 whole ones, and 8 ranks' tokens
RANKS = (Rank("tp1", 256, 2048, 2048), Rank("tp8", 256, 256, 256), Rank("ep8", 32, 2048, 2048, 96))

Routes = tuple[torch.Tensor, torch.Tensor]
Runner = Callable[[torch.Tensor, Routes, MoeWeights], Callable[[], torch.Tensor]]


def ours(x: torch.Tensor, routes: Routes, w: MoeWeights) -> Callable[[], torch.Tensor]:
    return lambda: moe(x, *routes, w, LIMIT)


def widened_each_time(x: torch.Tensor, routes: Routes, w: MoeWeights) -> Callable[[], torch.Tensor]:
    """Expert by expert: dequantise to bfloat16, torch.matmul. The experts hit are asked for beforehand, and not timed."""
    ids, weights = routes
    local = ids.long() - w.first_expert
    hit = [(e, *(local == e).nonzero(as_tuple=True)) for e in local[(local >= 0) & (local < w.w13.shape[0])].unique().tolist()]
    rows = [weights[at, lane, None].bfloat16() for _, at, lane in hit]

    def call() -> torch.Tensor:
        gate, up = (x @ dequantize(w.shared13).bfloat16().mT).chunk(2, dim=-1)
        y = swiglu_ref(gate, up, LIMIT) @ dequantize(w.shared2).bfloat16().mT
        for (e, at, _), weight in zip(hit, rows, strict=True):
            gate, up = (x[at] @ dequantize(w.w13[e]).bfloat16().mT).chunk(2, dim=-1)
            y.index_add_(0, at, (swiglu_ref(gate, up, LIMIT) * weight) @ dequantize(w.w2[e]).bfloat16().mT)
        return y

    return call


IMPLEMENTATIONS: dict[str, Runner] = {"deepdecode": ours, "dequantise, torch.matmul": widened_each_time}


def _here(ids: torch.Tensor, rank: Rank) -> torch.Tensor:
    """The ids that are this rank's, flat."""
    return ids[(ids >= rank.first) & (ids < rank.first + rank.E)]


def measure(rank: Rank, w: MoeWeights, T: int, name: str, bandwidth: float, limit_s: float) -> dict[str, Any]:
    """One row of a result file. A case that fails its check, or that the implementation cannot run, has no time."""
    row: dict[str, Any] = {"op": "moe", "implementation": name, "T": T, "rank": rank.name, "experts": rank.E, "top_k": TOP_K}
    row |= {"width": rank.width, "shared": rank.shared}
    generator = torch.Generator("cuda").manual_seed(T)
    x = torch.randn(T, C, generator=generator, device="cuda").bfloat16()
    count = 1 if name.startswith("dequantise") else max(2, min(32, 256 // T))
    routes = [random_routes(T, rank.experts, TOP_K, device="cuda", seed=n) for n in range(count)]
    try:
        calls = [IMPLEMENTATIONS[name](x, route, w) for route in routes]
        got = calls[0]()[:CHECKED_TOKENS]
        torch.cuda.synchronize()
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"[:160]}
    n = CHECKED_TOKENS
    want = moe_ref(x[:n].double(), routes[0][0][:n], routes[0][1][:n].double(), w, LIMIT)
    row |= {"rel_err": rel_err(got, want), "worst_row_err": worst_row_err(got, want)}
    if name == "deepdecode" and not row["rel_err"] < MAX_ERR:
        return row | {"error": "outside the error bound"}
    timing = time_graph(calls, calls_per_graph=len(calls), limit_s=limit_s)
    row |= {"us_rotated": timing.us, "us_rotated_low": timing.low, "us_rotated_high": timing.high}
    hit = sum(len(_here(ids, rank).unique()) for ids, _ in routes) / count
    each = (w.w13.nbytes + w.w2.nbytes) / rank.E
    nbytes = int(hit * each) + w.shared13.nbytes + w.shared2.nbytes + 2 * x.nbytes
    pairs = sum(len(_here(ids, rank)) for ids, _ in routes) / count
    row |= {"hit": hit, "bytes": nbytes, "flops": int(6 * C * (pairs * rank.width + T * rank.shared))}
    row["floor_us"] = nbytes / bandwidth / 1e6
    return row | {"times_floor": timing.us / row["floor_us"]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deepdecode.bench.moe", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="tokens (default: 1 to 256)")
    parser.add_argument("--peers", action="store_true", help="also dequantise + torch.matmul, expert by expert")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of result files (default: results)")
    parser.add_argument("--commit", help="the commit that is measured, where the checkout has no .git")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting cells after this long")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench: no CUDA device; figures come from a GPU", file=sys.stderr)
        return 2
    commit, bandwidth, start = options.commit or current_commit(), copy_bandwidth(), time.monotonic()
    rows: list[dict[str, Any]] = []
    for rank in RANKS:
        w = random_experts(rank.E, C, rank.width, rank.shared, first=rank.first, device="cuda")
        for T in options.tokens:
            for name in IMPLEMENTATIONS if options.peers else ("deepdecode",):
                # the rival takes milliseconds
                if time.monotonic() - start > options.seconds or (name != "deepdecode" and T not in (1, 16)):
                    continue
                row = measure(rank, w, T, name, bandwidth, 0.1)
                rows.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
                _say(rows[-1])
        del w
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    command = "python -m deepdecode.bench.moe" + (" --peers" if options.peers else "")
    path = options.out / name / "moe.json"
    write_results(path, rows, command=command, commit=commit, copy_bandwidth_tb_s=round(bandwidth, 3))
    return 1 if any("error" in row and row["implementation"] == "deepdecode" for row in rows) else 0


def _say(row: dict[str, Any]) -> None:
    what = f"{row['implementation']:<26} {row['rank']} T={row['T']:<4}"
    if "us_rotated" not in row:
        print(f"{what} {row['error']}", flush=True)
        return
    times = (
        f"{row['us_rotated']:9.2f} us  floor {row['floor_us']:8.2f} us  {row['times_floor']:5.2f} x  {row['hit']:6.1f} experts"
    )
    print(f"{what} {times}  error {row['rel_err']:.1e}, {row['worst_row_err']:.1e}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
