"""The tuning table of sparse attention: sweep launches on a card, fit the plan's cost model, say what the plan then loses."""

import contextlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepdecode.bench.attention import LAUNCH, Sized, best_of, mma_sync
from deepdecode.bench.files import read_results
from deepdecode.cards import Card
from deepdecode.kernels.attention_plan import (
    TUNED,
    Case,
    Config,
    Shape,
    card_of,
    merge_warps,
    model,
    predict,
    shapes,
    split_counts,
)
from deepdecode.testing.inputs import KEY_COUNTS

# kernel, heads and keys of a program, warps, rows; the larger of what Triton 3.6 and 3.9 give in shared memory; programs on one
# SM by registers. tests/test_compile_attention.py compares both with the compiler.
SHAPES = (
    ("narrow", 8, 64, 4, "fp8_584", 75008, 3),
    ("narrow", 16, 64, 4, "fp8_584", 84224, 2),
    ("narrow", 32, 128, 8, "fp8_584", 173056, 1),
    ("piped", 8, 64, 4, "fp8_584", 216576, 1),
    ("piped", 16, 64, 4, "fp8_584", 225920, 1),
    ("wide", 64, 64, 4, "fp8_584", 216064, 1),
    ("mma", 8, 32, 4, "fp8_584", 41984, 2),
    ("mma", 16, 32, 4, "fp8_584", 50688, 2),
    ("mma", 8, 64, 4, "fp8_584", 75264, 2),
    ("mma", 16, 64, 4, "fp8_584", 84992, 2),
    ("mma", 8, 32, 4, "bf16", 41984, 2),
    ("mma", 16, 32, 4, "bf16", 50688, 2),
)
TOKENS, HEADS, FORMS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (8, 16, 32, 64, 128), ("fp8_584", "bf16")
# a row of a sweep's result file
ROW = {"kernel": str, "block_h": int, "block_n": int, "splits": int, "us": (int, float), "held_out": bool}
ROW |= {"T": int, "H": int, "window_keys": int, "extra_keys": int, "fmt": str}
# points between those of the sweep: the fit never sees them, the plan is judged by them
HELD_OUT_TOKENS, HELD_OUT_HEADS, HELD_OUT_KEYS = (
    (3, 6, 12, 24, 48, 96, 192),
    (8, 12, 24, 48, 64, 96),
    (100, 256, 700, 2048, 6000),
)
HELD_OUT_POINTS = 24
# launches this much slower than a point's best say nothing of where to go
NEAR_BEST = 1.5
# what the present table predicts to take this many times the best launch is not measured; more is at held-out points, which are
# to judge the plan
HOPELESS, HOPELESS_HELD_OUT = 1.2, 1.35


def swept_cases(forms: tuple[str, ...] = FORMS) -> Iterator[tuple[Sized, bool]]:
    """Every point, and whether it is held out; the held-out ones first, so that a sweep that is cut off has them."""
    draw = random.Random(0)
    for _ in range(HELD_OUT_POINTS):
        T, H, keys = draw.choice(HELD_OUT_TOKENS), draw.choice(HELD_OUT_HEADS), draw.choice(HELD_OUT_KEYS)
        yield Sized(T, H, 128, keys, draw.choice(forms)), True
    grid = [Sized(T, H, *keys, fmt) for fmt in forms for keys in KEY_COUNTS for H in HEADS for T in TOKENS]

    def turn(case: Sized) -> tuple:
        """Every third T of FP8 rows, then the model's own keys, then the rest: a sweep that is cut off has seen all of it."""
        coarse, own = TOKENS.index(case.T) % 3 == 0, case.extra_keys == 512
        return case.fmt != forms[0] and not (coarse and own), not coarse, not own

    for case in sorted(grid, key=turn):
        yield case, False


def sweep(kernels: tuple[str, ...], cases: Iterable[tuple[Sized, bool]]) -> Iterator[dict[str, Any]]:
    """Warm time of every shape and split count that makes sense, case by case. Rows for `fit`.

    Over FP8 rows the portable kernel has the instructions of other cards, over bfloat16 rows those that it takes here.
    """
    import torch

    card = card_of(torch.device("cuda", torch.cuda.current_device()))
    for case, held_out in cases:
        with mma_sync() if case.fmt == "fp8_584" else contextlib.nullcontext():
            timed = best_of(case, launches(case, card, kernels, HOPELESS_HELD_OUT if held_out else HOPELESS), limit_s=0.004)
        for us, config in timed:
            yield vars(case) | {"op": "attention", "us": us, "held_out": held_out} | _shape_of(config)


def launches(case: Sized, card: Card, kernels: tuple[str, ...], hopeless: float = HOPELESS) -> list[Config]:
    """What is worth measuring: shapes that are not mostly empty, cut into each number of tiles, the hopeless left out.

    A shape that the table does not know is judged like another of as many heads and keys.
    """
    point = _case(vars(case))
    able = []
    for kernel, block_h, block_n, warps, fmt, *_ in SHAPES:
        if (
            kernel not in kernels
            or fmt != case.fmt
            or (block_h >= 2 * max(8, case.H) and not (kernel == "wide" and case.H >= 16))
        ):
            continue
        alike = [s for s in shapes() if (s.block_h, s.block_n, s.fmt) == (block_h, block_n, fmt) and s.kernel != "mma"]
        known = next((s for s in shapes() if (s.kernel, s.block_h, s.block_n, s.fmt) == (kernel, block_h, block_n, fmt)), None)
        known = known or next(iter(alike), None)
        for splits in split_counts(case.window_keys + case.extra_keys, block_n):
            config = Config(kernel, block_h, block_n, splits, 0, warps, 16, True, merge_warps(case.T, case.H, splits), True)
            able.append((predict(known, splits, point, card) if known else 0.0, config))
    best = {
        mma: min((us for us, config in able if us and _is_portable(config.kernel) == mma), default=0.0) for mma in (False, True)
    }
    return [config for us, config in able if us <= hopeless * best[_is_portable(config.kernel)]]


def _is_portable(kernel: str) -> bool:
    """The portable kernel is planned for other cards: it is compared with itself, not with Hopper's kernels."""
    return kernel == "mma"


def _shape_of(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in LAUNCH}


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Every launch in a card's sweeps. The benchmark's own calls are left to judge the table by: they are what it plans."""
    return [row for path in sorted(folder.glob("attention_sweep*.json")) for row in read_results(path, row=ROW)["rows"]]


def fit(rows: list[dict[str, Any]], card: Card) -> dict[str, Any]:
    """The shapes with their costs and measured launches, from the rows that are not held out; and what the plan then loses.

    A held-out point's loss is the time of the launch that the plan takes there over the best that was measured there, less 1.
    """
    table = _shapes([row for row in rows if not row["held_out"]], card)
    lost = sorted(_loss(point, table, card) for point in _points(row for row in rows if row["held_out"]))
    held_out = {
        "points": len(lost),
        "mean": round(sum(lost) / max(1, len(lost)), 4),
        "within_10_percent": sum(loss <= 0.1 for loss in lost),
        "worst": round(max(lost, default=0.0), 3),
    }
    return {"held_out": held_out, "shapes": [_written(shape) for shape in table.values()]}


def _written(shape: Shape) -> dict[str, Any]:
    return {each.name: getattr(shape, each.name) for each in fields(shape)}


def _points(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    points: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        case = row["T"], row["H"], row["window_keys"], row["extra_keys"], row["fmt"]
        points.setdefault((*case, _is_portable(row["kernel"])), []).append(row)
    return list(points.values())


def near_best(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for point in _points(rows) for row in point if row["us"] <= NEAR_BEST * min(other["us"] for other in point)]


def _shapes(rows: list[dict[str, Any]], card: Card) -> dict[tuple, Shape]:
    near = near_best(rows)
    table = {}
    for kernel, block_h, block_n, warps, fmt, shared, per_sm in SHAPES:
        key = (kernel, block_h, block_n, fmt)
        own = [row for row in near if _key(row) == key]
        known = next((shape for shape in shapes() if (shape.kernel, shape.block_h, shape.block_n, shape.fmt) == key), None)
        if not own and known is not None:
            # a sweep that was cut off keeps what the table had
            table[key] = known
        if own:
            bare = Shape(kernel, block_h, block_n, warps, fmt, shared, per_sm, ())
            seen = [
                (row["T"], row["H"], row["window_keys"] + row["extra_keys"], row["splits"], round(row["us"], 2)) for row in own
            ]
            table[key] = replace(bare, cost=_costs(bare, own, card), seen=tuple(seen))
    return table


def _costs(shape: Shape, rows: list[dict[str, Any]], card: Card) -> tuple[float, ...]:
    """Least squares of the relative error; a coefficient that comes out negative is left out."""
    units = [replace(shape, cost=tuple(float(n == m) for m in range(7))) for n in range(7)]
    features = np.array([[model(unit, row["splits"], _case(row), card) for unit in units] for row in rows])
    scaled = features / np.array([row["us"] for row in rows])[:, None]
    kept = list(range(7))
    while True:
        found, *_ = np.linalg.lstsq(scaled[:, kept], np.ones(len(rows)), rcond=None)
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    costs = dict(zip(kept, found, strict=True))
    return tuple(round(float(costs.get(n, 0.0)), 4) for n in range(7))


def _key(row: dict[str, Any]) -> tuple[str, int, int, str]:
    return row["kernel"], row["block_h"], row["block_n"], row["fmt"]


def _case(row: dict[str, Any]) -> Case:
    return Case(row["T"], row["H"], row["window_keys"], row["extra_keys"], row["fmt"], row["fmt"])


def _loss(point: list[dict[str, Any]], table: dict[tuple, Shape], card) -> float:
    def predicted(row: dict[str, Any]) -> float:
        return predict(table[_key(row)], row["splits"], _case(row), card)

    return min((row for row in point if _key(row) in table), key=predicted)["us"] / min(row["us"] for row in point) - 1


def write_table(rows: list[dict[str, Any]], card: Card, **evidence: Any) -> Path:
    """Write the table that the package ships: evidence (device, versions, command, commit, date), held-out loss, shapes."""
    path = Path(__file__).resolve().parents[1] / "data" / TUNED
    document = {"schema": 1, **evidence, **fit(rows, card)}
    # a line for each shape: its launches would be thousands
    lines = ",\n".join(f"  {json.dumps(shape)}" for shape in document.pop("shapes"))
    path.write_text(json.dumps(document, indent=1).removesuffix("\n}") + f',\n "shapes": [\n{lines}\n ]\n}}\n')
    return path
