"""python -m deepdecode.bench.linear: a layer's fused sets of weights, checked against float64, past L2, beside their rivals.

A decode step reads each weight once, and no weight waits in L2 for it: the time that counts is the rotated one, over copies
that together pass L2 several times.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepdecode.bench.timing import copy_bandwidth, current_commit, time_graph, write_results
from deepdecode.ops.linear import grouped_linear, linear, linear_beside
from deepdecode.ops.quant import Weight, dequantize
from deepdecode.testing.experts import random_weight
from deepdecode.testing.numeric import rel_err, worst_row_err

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
# operands are exact; what is left is the order of float32 sums and one rounding to bfloat16
MAX_ERR = {torch.bfloat16: 2.2e-3, torch.float32: 3e-6}
# copies of a weight that together pass an L2 of 60 MB three times, about
PAST_L2 = 180 << 20


@dataclass(frozen=True)
class Set:
    """[groups * out, width] of one kind; the result float32 where the model wants that.

    beside: rows of a bfloat16 weight that the same x is multiplied with, its result in float32; the product does both at once.
    """

    name: str
    ways: int
    groups: int
    out: int
    width: int
    kind: str = "fp8"
    wide: bool = False
    beside: int = 0


# V4-Flash's sets whole, and the part of one of 8 ranks where that is another
SETS = (
    Set("q_kv", 1, 1, 1536, 4096),
    Set("q_kv and rest, ratio 4", 1, 1, 1536, 4096, beside=2624),
    Set("q_kv and rest, ratio 128", 1, 1, 1536, 4096, beside=1024),
    Set("q_b", 1, 1, 40960, 1024),
    Set("wo_a", 1, 8, 1024, 4096),
    Set("wo_b", 1, 1, 4096, 8192),
    Set("head", 1, 1, 129280, 4096, "bf16", True),
    Set("q_b", 8, 1, 12288, 1024),
    Set("wo_a", 8, 1, 1024, 4096),
    Set("wo_b", 8, 1, 4096, 1024),
    Set("head", 8, 1, 16160, 4096, "bf16", True),
)

Results = tuple[torch.Tensor, ...]
Runner = Callable[[torch.Tensor, Weight, Weight | None, torch.dtype], Callable[[], Results]]
"""Takes x [T, G, width], a weight, one beside it and the result's dtype, gives the call to time; raises if it cannot run."""


def ours(x: torch.Tensor, weight: Weight, beside: Weight | None, dtype: torch.dtype) -> Callable[[], Results]:
    if x.shape[1] > 1:
        return lambda: (grouped_linear(x, weight, dtype),)
    rows = x[:, 0]
    if beside is not None:
        return lambda: tuple(out[:, None] for out in linear_beside(rows, weight, beside))
    return lambda: (linear(rows, weight, dtype)[:, None],)


def cublas(x: torch.Tensor, weight: Weight, beside: Weight | None, dtype: torch.dtype) -> Callable[[], Results]:
    """torch.matmul on a bfloat16 copy of the weight: twice the bytes of an FP8 one."""
    G = x.shape[1]
    w = dequantize(weight).bfloat16().view(G, -1, x.shape[2])
    if G == 1:
        rows, weights = x[:, 0], [w[0].mT] + ([] if beside is None else [beside.data.mT])
        return lambda: tuple(torch.matmul(rows, one)[:, None] for one in weights)
    groups = x.transpose(0, 1)
    return lambda: (torch.bmm(groups, w.mT).transpose(0, 1),)


def widened_each_time(x: torch.Tensor, weight: Weight, beside: Weight | None, dtype: torch.dtype) -> Callable[[], Results]:
    """Dequantise to bfloat16, then torch.matmul: what an engine without a kernel for the format does."""
    if weight.kind == "plain":
        raise NotImplementedError("a plain weight needs no widening")
    return lambda: cublas(x, weight, beside, dtype)()


def scaled_mm(x: torch.Tensor, weight: Weight, beside: Weight | None, dtype: torch.dtype) -> Callable[[], Results]:
    """torch._scaled_mm with one scale for all: x is cast to FP8 beforehand, so that cast is not timed, and blocks are ignored.

    It needs 16 rows of x at least.
    """
    if weight.kind != "fp8" or x.shape[1] > 1 or beside is not None:
        raise NotImplementedError("one FP8 product only")
    rows = x.new_zeros(max(16, len(x)), x.shape[2])
    rows[: len(x)] = x[:, 0]
    codes, one = rows.to(torch.float8_e4m3fn), torch.ones((), device=x.device)

    def run() -> Results:
        return (torch.ops.aten._scaled_mm(codes, weight.data.t(), one, one, None, None, torch.bfloat16)[: len(x), None],)

    return run


IMPLEMENTATIONS: dict[str, Runner] = {
    "deepdecode": ours,
    "torch.matmul, bfloat16 copy": cublas,
    "torch._scaled_mm, one scale": scaled_mm,
    "dequantise, torch.matmul": widened_each_time,
}


def measure(case: Set, T: int, name: str, bandwidth: float, limit_s: float) -> dict[str, Any]:
    """One row of a result file. A case that fails its check, or that the implementation cannot run, has no time."""
    row: dict[str, Any] = {"op": "linear", "implementation": name, "T": T, "set": case.name, "ways": case.ways}
    row |= {"groups": case.groups, "out": case.out, "width": case.width, "kind": case.kind, "beside": case.beside}
    generator = torch.Generator("cuda").manual_seed(T)
    dtype = torch.float32 if case.wide else torch.bfloat16
    x = torch.randn(T, case.groups, case.width, generator=generator, device="cuda").bfloat16()
    weights = list(_copies(case, generator, 1 if name.startswith("dequantise") else None))
    try:
        calls = [IMPLEMENTATIONS[name](x, *pair, dtype) for pair in weights]
        got = calls[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"[:160]}
    weight, beside = weights[0]
    wants = [torch.einsum("tgk,gok->tgo", x.double(), _first_rows(case, weight))]
    if beside is not None:
        wants.append((x[:, 0].double() @ beside.data.double().T)[:, None])
    pairs = [(one[:, :, : want.shape[2]], want) for one, want in zip(got, wants, strict=True)]
    row["rel_err"], row["worst_row_err"] = (max(error(*pair) for pair in pairs) for error in (rel_err, worst_row_err))
    if name == "deepdecode" and not row["rel_err"] < MAX_ERR[dtype]:
        return row | {"error": "outside the error bound"}
    warm = time_graph(calls[:1], limit_s=limit_s)
    row |= {"us_warm": warm.us, "us_warm_low": warm.low, "us_warm_high": warm.high}
    if len(calls) > 1:
        rotated = time_graph(calls, limit_s=limit_s)
        row |= {"us_rotated": rotated.us, "us_rotated_low": rotated.low, "us_rotated_high": rotated.high}
    nbytes = weight.nbytes + x.nbytes + T * (case.groups * case.out * (4 if case.wide else 2) + 4 * case.beside)
    nbytes += 0 if beside is None else beside.nbytes
    flops = 2 * T * (case.groups * case.out + case.beside) * case.width
    row |= {"bytes": nbytes, "flops": flops, "floor_us": nbytes / bandwidth / 1e6}
    return row | {"floor_fraction": row["floor_us"] / row.get("us_rotated", row["us_warm"])}


def _first_rows(case: Set, weight: Weight) -> torch.Tensor:
    """float64 [groups, rows, width] of the first 512 rows of each group, or of as many as there are."""
    starts = range(0, case.groups * case.out, case.out)
    return torch.stack([dequantize(weight.rows(at, at + min(512, case.out)), torch.float64) for at in starts])


def _copies(case: Set, generator: torch.Generator, count: int | None) -> Iterator[tuple[Weight, Weight | None]]:
    """Weights of this set, as many as pass L2, at most 48."""
    size = (case.groups * case.out * (1 if case.kind == "fp8" else 2) + 2 * case.beside) * case.width

    def draw(rows: int, kind: str) -> Weight:
        return random_weight(rows, case.width, kind=kind, device="cuda", generator=generator)

    for _ in range(count or max(2, min(48, -(-PAST_L2 // size)))):
        yield draw(case.groups * case.out, case.kind), draw(case.beside, "bf16") if case.beside else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deepdecode.bench.linear", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="rows of x (default: 1 to 256)")
    parser.add_argument("--peers", action="store_true", help="also torch.matmul, torch._scaled_mm, dequantise + matmul")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of result files (default: results)")
    parser.add_argument("--commit", help="the commit that is measured, where the checkout has no .git")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting cells after this long")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench: no CUDA device; figures come from a GPU", file=sys.stderr)
        return 2
    commit, bandwidth, start = options.commit or current_commit(), copy_bandwidth(), time.monotonic()
    rows: list[dict[str, Any]] = []
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    command = "python -m deepdecode.bench.linear" + (" --peers" if options.peers else "")
    if tuple(options.tokens) != TOKENS:
        command += " --tokens " + " ".join(map(str, options.tokens))
    for T in options.tokens:
        for case in SETS:
            for implementation in IMPLEMENTATIONS if options.peers else ("deepdecode",):
                if time.monotonic() - start > options.seconds:
                    continue
                row = measure(case, T, implementation, bandwidth, 0.03)
                rows.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
                _say(rows[-1])
        # what a run that is stopped has measured is not lost
        path = options.out / name / "linear.json"
        write_results(path, rows, command=command, commit=commit, copy_bandwidth_tb_s=round(bandwidth, 3))
    return 1 if any("error" in row and row["implementation"] == "deepdecode" for row in rows) else 0


def _say(row: dict[str, Any]) -> None:
    what = f"{row['implementation']:<28} T={row['T']:<4} {row['set']:<24} 1/{row['ways']}"
    if "us_warm" not in row:
        print(f"{what} {row['error']}", flush=True)
        return
    times = f"warm {row['us_warm']:8.2f} us  rotated {row.get('us_rotated', 0):8.2f} us  floor {row['floor_us']:7.2f} us"
    print(f"{what} {times} {100 * row['floor_fraction']:4.0f} %  error {row['rel_err']:.1e}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
