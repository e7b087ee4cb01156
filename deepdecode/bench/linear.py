"""deepdecode bench linear: a layer's fused sets of weights, checked against float64, past L2, beside their rivals."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from deepdecode.bench import cells
from deepdecode.bench.cells import Cell, Work
from deepdecode.bench.options import parser_of
from deepdecode.errors import told
from deepdecode.ops.linear import grouped_linear, linear, linear_beside
from deepdecode.ops.quant import E8M0, Weight, dequantize
from deepdecode.testing.experts import random_weight
from deepdecode.testing.numeric import rel_err, worst_row_err

# the sizes of the targets first: a run may be cut off
TOKENS = (1, 16, 64, 4, 32, 8, 128, 256)
PEER_TOKENS = (1, 16, 64)
# operands are exact; what is left of a result in bfloat16 is one rounding
MAX_ERR = 2.2e-3
# rivals round more: weights to bfloat16, a result to bfloat16, or x to E4M3
MAX_RIVAL = {"fp8": 6e-2, "bf16": 8e-3}


def sum_err(width: int) -> float:
    """How far a sum of `width` products in float32 may be from float64's.

    Tensor cores add 8 products or more at a time to a sum that they cut to float32 instead of rounding it (Fasi, Higham,
    Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, 2021): half of a last place, 2**-24, on average, and always
    towards 0, so errors add up. An H200 is at 4.4e-6 for 4096, where this is 3.1e-5; a product left out is 1.6e-2, a result in
    bfloat16 1.7e-3.
    """
    return width / 8 * 2.0**-24


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
    """torch._scaled_mm with the weight's scales of 128 x 128; x is cast to E4M3, scales of 1 x 128, before what is timed."""
    rows = _sixteen(x, weight, beside)
    blocks = rows.float().unflatten(1, (-1, 128))
    unit = blocks.abs().amax(2).clamp(min=1e-10) / 448
    codes = (blocks / unit[..., None]).flatten(1).to(torch.float8_e4m3fn)
    assert weight.scale is not None
    # tokens are neighbours in x's scales; the weight's are turned as it is
    x_scale, w_scale = unit.t().contiguous().t(), weight.scale.float().contiguous().t()
    return lambda: (_scaled(codes, weight.data.t(), x_scale, w_scale)[: len(x), None],)


def scaled_mm_one(x: torch.Tensor, weight: Weight, beside: Weight | None, dtype: torch.dtype) -> Callable[[], Results]:
    """torch._scaled_mm with one scale for all, the least it can do: x is cast before what is timed, blocks lose theirs."""
    rows = _sixteen(x, weight, beside)
    codes, one = rows.to(torch.float8_e4m3fn), torch.ones((), device=x.device)
    return lambda: (_scaled(codes, weight.data.t(), one, one)[: len(x), None],)


def _sixteen(x: torch.Tensor, weight: Weight, beside: Weight | None) -> torch.Tensor:
    """Rows of x for torch._scaled_mm, 16 at least and a multiple of 16."""
    if weight.kind != "fp8" or x.shape[1] > 1 or beside is not None:
        raise NotImplementedError("one FP8 product only")
    rows = x.new_zeros(-(-len(x) // 16) * 16, x.shape[2])
    rows[: len(x)] = x[:, 0]
    return rows


def _scaled(x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._scaled_mm(x, w, x_scale, w_scale, None, None, torch.bfloat16)


IMPLEMENTATIONS: dict[str, Runner] = {
    "deepdecode": ours,
    "torch.matmul, bfloat16 copy": cublas,
    "torch._scaled_mm, 1 x 128": scaled_mm,
    "torch._scaled_mm, one scale": scaled_mm_one,
    "dequantise, torch.matmul": widened_each_time,
}


def runs(name: str, case: Set) -> bool:
    """Whether the implementation is meant for the set at all."""
    if "_scaled_mm" in name:
        return case.kind == "fp8" and case.groups == 1 and not case.beside
    return case.kind == "fp8" or not name.startswith("dequantise")


def work(case: Set, T: int, name: str) -> Work:
    generator = torch.Generator(cells.DEVICE).manual_seed(T)
    dtype = torch.float32 if case.wide else torch.bfloat16
    x = torch.randn(T, case.groups, case.width, generator=generator, device=cells.DEVICE).bfloat16()
    weights = weights_of(case)
    # what widens a weight takes milliseconds, and leaves none of it in L2
    sets = weights[:1] if name.startswith("dequantise") else weights
    calls = [IMPLEMENTATIONS[name](x, *pair, dtype) for pair in sets]

    def check() -> dict[str, float]:
        weight, beside = weights[0]
        if name.endswith("one scale"):
            ones = torch.full_like(weight.scale.view(torch.uint8), 127).view(E8M0)  # type: ignore[union-attr]
            weight = Weight(weight.data, ones)
        want = torch.einsum("tgk,gok->tgo", x.double(), _first_rows(case, weight))
        got, *others = calls[0]()
        got = got[:, :, : want.shape[2]]
        figures = {"rel_err": rel_err(got, want), "worst_row_err": worst_row_err(got, want)}
        if beside is not None:
            (other,) = others
            figures["beside_err"] = rel_err(other[:, 0], x[:, 0].double() @ beside.data.double().T)
        return figures

    weight, beside = weights[0]
    nbytes = weight.nbytes + (0 if beside is None else beside.nbytes)
    nbytes += x.nbytes + T * (case.groups * case.out * dtype.itemsize + 4 * case.beside)
    flops = 2 * T * (case.groups * case.out + case.beside) * case.width
    if name == "deepdecode":
        wide = sum_err(case.width)
        bound = wide if case.wide else MAX_ERR
    else:
        bound = wide = MAX_RIVAL["fp8" if "_scaled_mm" in name else "bf16"]
    return Work(calls, check, ("rel_err", bound), nbytes, flops, also=("beside_err", wide) if case.beside else None)


def _first_rows(case: Set, weight: Weight) -> torch.Tensor:
    """float64 [groups, rows, width] of the first 512 rows of each group, or of as many as there are."""
    starts = range(0, case.groups * case.out, case.out)
    return torch.stack([dequantize(weight.rows(at, at + min(512, case.out)), torch.float64) for at in starts])


@lru_cache(maxsize=len(SETS))
def weights_of(case: Set) -> list[tuple[Weight, Weight | None]]:
    """Weights of this set, as many as pass L2, at most 48, drawn once for all T: 4 GB for all sets."""
    generator = torch.Generator(cells.DEVICE).manual_seed(0)

    def draw(rows: int, kind: str) -> Weight:
        return random_weight(rows, case.width, kind=kind, device=cells.DEVICE, generator=generator)

    size = (case.groups * case.out * (1 if case.kind == "fp8" else 2) + 2 * case.beside) * case.width
    return [
        (draw(case.groups * case.out, case.kind), draw(case.beside, "bf16") if case.beside else None)
        for _ in range(cells.copies(size, 48))
    ]


def jobs(peers: bool) -> Iterator[Cell]:
    for T in TOKENS:
        for case in SETS:
            keys = {"set": case.name, "ways": case.ways, "groups": case.groups, "out": case.out, "width": case.width}
            keys |= {"kind": case.kind, "beside": case.beside}
            for name in IMPLEMENTATIONS if peers and T in PEER_TOKENS else ("deepdecode",):
                if runs(name, case):
                    row: dict[str, Any] = {"op": "linear", "implementation": name, "T": T, **keys}
                    yield Cell(row, lambda case=case, T=T, name=name: work(case, T, name))


def say(row: dict[str, Any]) -> str:
    if "T" not in row:
        return cells.line(row, row["implementation"], "")
    what = f"{row['implementation']:<28} T={row['T']:<4} {row['set']:<24} 1/{row['ways']}"
    return cells.line(row, what, f"error {row.get('rel_err', 0):.1e}")


def main(argv: Sequence[str] | None = None) -> int:
    return command(parser_of("linear").parse_args(argv))


def command(options: argparse.Namespace) -> int:
    return cells.run("linear", options, jobs(options.peers), say)


if __name__ == "__main__":
    sys.exit(told(main))
