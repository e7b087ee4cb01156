"""The tuning table of sparse attention: sweep launches on a card, fit the plan's cost model, say what the plan then loses."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deepdecode.bench.attention import Sized, best_of
from deepdecode.kernels.attention_plan import TUNED, Case, Config, Shape, card_of, predict
from deepdecode.testing.inputs import KEY_COUNTS

# kernel, heads and keys of a program, warps, rows; the larger of what Triton 3.6 and 3.9 give in shared memory; programs on one
# SM by registers. tests/test_compile_attention.py compares both with the compiler.
SHAPES = (
    ("narrow", 8, 64, 4, "fp8_584", 75008, 2),
    ("narrow", 16, 64, 4, "fp8_584", 84224, 2),
    ("narrow", 32, 128, 8, "fp8_584", 173056, 1),
    ("wide", 64, 64, 4, "fp8_584", 214864, 1),
    ("mma", 8, 32, 4, "fp8_584", 47104, 2),
    ("mma", 16, 32, 4, "fp8_584", 57344, 2),
    ("mma", 32, 32, 8, "fp8_584", 77824, 1),
    ("mma", 8, 64, 8, "fp8_584", 84992, 1),
    ("mma", 16, 64, 8, "fp8_584", 96256, 1),
    ("mma", 8, 32, 4, "bf16", 41984, 2),
    ("mma", 16, 32, 4, "bf16", 50688, 2),
    ("mma", 32, 32, 8, "bf16", 68096, 1),
)
TOKENS, HEADS, FORMS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (8, 16, 32, 64, 128), ("fp8_584", "bf16")
# a launch with more waves than this is never the best one, and slow to measure
MAX_WAVES = 8


def sweep(
    kernels: tuple[str, ...], tokens: tuple[int, ...] = TOKENS, heads: tuple[int, ...] = HEADS, forms: tuple[str, ...] = FORMS
) -> list[dict[str, Any]]:
    """Warm time of every shape and split count that makes sense, over tokens, heads and keys. Rows for `fit`."""
    import torch

    card = card_of(torch.device("cuda", torch.cuda.current_device()))
    rows = []
    for fmt in forms:
        for keys in KEY_COUNTS:
            for H in heads:
                for T in tokens:
                    case = Sized(T, H, *keys, fmt)
                    tried = [config for config, waves in _launches(case, card.sms, kernels) if waves <= MAX_WAVES]
                    for us, config in best_of(case, tried, limit_s=0.01):
                        rows.append(vars(case) | {"us": us} | _shape_of(config))
    return rows


def _launches(case: Sized, sms: int, kernels: tuple[str, ...]) -> Iterator[tuple[Config, float]]:
    keys = case.window_keys + case.extra_keys
    for kernel, block_h, block_n, warps, fmt, _, per_sm in SHAPES:
        if kernel not in kernels or fmt != case.fmt or (block_h > case.H and not (kernel == "wide" and case.H >= 16)):
            continue
        tiles = -(-keys // block_n)
        programs = case.T * -(-case.H // block_h)
        for splits in sorted({-(-tiles // each) for each in range(1, tiles + 1)}):
            waves = programs * splits / (sms * per_sm)
            # too few programs to fill half the card with splits still to be had is no candidate either
            if splits == 1 or waves <= 2 or splits <= 4:
                yield Config(kernel, block_h, block_n, splits, 0, warps, 16, True, 1, True), waves


def _shape_of(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("kernel", "block_h", "block_n", "num_warps", "splits")}


def fit(rows: list[dict[str, Any]], card) -> dict[str, Any]:
    """The shapes with their costs from all rows; beside them, what a plan fitted without a point loses on that point.

    Points (T, H, keys, form) are held out by fifths: the model is fitted to four fifths and plans the last one.
    """
    points: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        points.setdefault((row["T"], row["H"], row["window_keys"], row["extra_keys"], row["fmt"]), []).append(row)
    lost = []
    for fold in range(5):
        train = [row for n, point in enumerate(points.values()) if n % 5 != fold for row in point]
        table = _shapes(train, card)
        lost += [_loss(point, table, card) for n, point in enumerate(points.values()) if n % 5 == fold]
    lost.sort()
    held_out = {
        "points": len(lost),
        "mean": round(sum(lost) / len(lost), 4),
        "within_10_percent": sum(loss <= 0.1 for loss in lost),
        "worst": round(lost[-1], 3),
    }
    return {"held_out": held_out, "shapes": [vars(shape) for shape in _shapes(rows, card).values()]}


def _shapes(rows: list[dict[str, Any]], card) -> dict[tuple, Shape]:
    table = {}
    for kernel, block_h, block_n, warps, fmt, shared, per_sm in SHAPES:
        key = (kernel, block_h, block_n, fmt)
        own = [row for row in rows if (row["kernel"], row["block_h"], row["block_n"], row["fmt"]) == key]
        if own:
            bare = Shape(kernel, block_h, block_n, warps, fmt, shared, per_sm, ())
            table[key] = Shape(kernel, block_h, block_n, warps, fmt, shared, per_sm, _costs(bare, own, card))
    return table


def _costs(shape: Shape, rows: list[dict[str, Any]], card) -> tuple[float, ...]:
    """Least squares of the relative error; a coefficient that comes out negative is left out."""
    units = [replace(shape, cost=tuple(float(n == m) for m in range(7))) for n in range(7)]
    features = np.array([[predict(unit, row["splits"], _case(row), card) for unit in units] for row in rows])
    scaled = features / np.array([row["us"] for row in rows])[:, None]
    kept = list(range(7))
    while True:
        found, *_ = np.linalg.lstsq(scaled[:, kept], np.ones(len(rows)), rcond=None)
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    costs = dict(zip(kept, found, strict=True))
    return tuple(round(float(costs.get(n, 0.0)), 4) for n in range(7))


def _case(row: dict[str, Any]) -> Case:
    return Case(row["T"], row["H"], row["window_keys"], row["extra_keys"], row["fmt"], row["fmt"])


def _loss(point: list[dict[str, Any]], table: dict[tuple, Shape], card) -> float:
    def predicted(row: dict[str, Any]) -> float:
        return predict(table[row["kernel"], row["block_h"], row["block_n"], row["fmt"]], row["splits"], _case(row), card)

    return min(point, key=predicted)["us"] / min(row["us"] for row in point) - 1


def write_table(rows: list[dict[str, Any]], card, **evidence: Any) -> Path:
    """Write the table that the package ships: evidence (device, versions, command, commit, date), held-out loss, shapes."""
    path = Path(__file__).resolve().parents[1] / "data" / TUNED
    document = {"schema": 1, **evidence, **fit(rows, card)}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
