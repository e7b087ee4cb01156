"""An interpolated modified Kneser-Ney model of token n-grams, what a neural model of the same tokens must beat.

`python tools/ngram.py DATA` trains on the training split of `tools/train_tiny.py data` and prints its bits per byte on the test
split, with the mark that begins a file behind each beginning and every token counted, the end mark too.
Chen and Goodman 1999, section 3: three discounts for each order, from that order's counts of counts; orders below the highest
count the distinct tokens before them instead of occurrences; the lowest is interpolated with the uniform distribution.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from training.data import BOS, load_tokens


def _unique(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows, sorted, and how often each stands there."""
    order = np.lexsort(rows.T[::-1])
    rows = rows[order]
    first = np.ones(len(rows), bool)
    first[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    at = np.flatnonzero(first)
    return rows[at], np.diff(np.append(at, len(rows)))


class KneserNey:
    """Files are sequences of their own: each begins with `order - 1` beginning marks, which nothing predicts.

    files: arrays of ids, each beginning with BOS.
    """

    def __init__(self, files: list[np.ndarray], vocab: int, order: int = 5) -> None:
        self.order, self.vocab = order, vocab
        rows = np.concatenate([self.windows(ids) for ids in files])
        rows, counts = _unique(rows)
        # for each order, of each context: what it leaves to the order below; of each n-gram: its discounted probability
        self.rest: list[dict[bytes, float]] = []
        self.share: list[dict[bytes, float]] = []
        for n in range(order, 0, -1):
            self._order(rows, counts)
            if n > 1:
                # each n-gram that is there counts once for the shorter one that it ends in
                rows, counts = _unique(rows[:, 1:])
        self.rest.reverse()
        self.share.reverse()

    def windows(self, ids: np.ndarray) -> np.ndarray:
        """[tokens told, order]: each token of a file and what stands before it."""
        padded = np.concatenate((np.full(self.order - 2, BOS), ids)).astype(np.int32)
        return np.lib.stride_tricks.sliding_window_view(padded, self.order)

    def _order(self, rows: np.ndarray, counts: np.ndarray) -> None:
        n1, n2, n3, n4 = (max(int((counts == k).sum()), 1) for k in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        discounts = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]).clip(0, [0, 1, 2, 3])
        off = discounts[counts.clip(max=3)]
        contexts, first = (
            np.unique(rows[:, :-1], axis=0, return_index=True) if rows.shape[1] > 1 else (rows[:1, :0], np.array([0]))
        )
        total, left = np.add.reduceat(counts, first), np.add.reduceat(off, first)
        per_row = np.repeat(total, np.diff(np.append(first, len(rows))))
        contexts, grams = np.ascontiguousarray(contexts), np.ascontiguousarray(rows)
        self.rest.append({c.tobytes(): r for c, r in zip(contexts, left / total, strict=True)})
        self.share.append({g.tobytes(): s for g, s in zip(grams, (counts - off) / per_row, strict=True)})

    def probability(self, gram: np.ndarray) -> float:
        """Of the last id of [order] int32, after the ones before it."""
        p = 1.0 / self.vocab
        for n in range(1, self.order + 1):
            tail = gram[self.order - n :]
            left = self.rest[n - 1].get(tail[:-1].tobytes())
            # a context never seen leaves everything to the order below, and so do all longer ones
            if left is None:
                break
            p = self.share[n - 1].get(tail.tobytes(), 0.0) + left * p
        return p

    def bits(self, files: list[np.ndarray]) -> float:
        """Bits that all tokens of these files take but their beginning marks."""
        return float(-sum(np.log2(self.probability(np.ascontiguousarray(g))) for ids in files for g in self.windows(ids)))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("data", type=Path, help="folder of `tools/train_tiny.py data`")
    p.add_argument("--order", type=int, default=5)
    p.add_argument("--split", default="test", choices=("valid", "test"))
    args = p.parse_args()
    try:
        train, held_out = load_tokens(args.data, "train"), load_tokens(args.data, args.split)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    model = KneserNey(train.files(), int(train.ids.max()) + 1, args.order)
    bits = model.bits(held_out.files())
    told = len(held_out.ids) - len(held_out.starts)
    row = {"order": args.order, "split": args.split, "tokens": told, "bytes": int(held_out.sizes.sum())}
    print(json.dumps({**row, "bits_per_token": round(bits / told, 4), "bits_per_byte": round(bits / row["bytes"], 4)}))


if __name__ == "__main__":
    main()
