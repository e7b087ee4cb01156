"""python -m deepdecode.bench.glue: a step's fused glue, checked, timed warm and past L2, beside the composed fine ops.

mhc_boundary, attn_prepare, route, norm, rotation back, places and the next token at V4-Flash's sizes. Both sides are timed as
replays of a CUDA graph, so that what is compared is the GPU's time and not the host's.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from deepdecode.bench.timing import copy_bandwidth, current_commit, time_graph, write_results
from deepdecode.config import ModelConfig
from deepdecode.kvcache import KVCache
from deepdecode.ops import fused, launches, reference
from deepdecode.ops.places import decode_places
from deepdecode.ops.quant import Weight
from deepdecode.ops.rope import rope
from deepdecode.ops.rows import read_rows
from deepdecode.ops.table import MhcSite, MoeWeights
from deepdecode.testing.numeric import rel_err
from deepdecode.testing.steps import PrepareInputs, contiguous, prepare_inputs

Tensor = torch.Tensor
TOKENS = (1, 16, 64)
CONFIG = ModelConfig()
# sets of weights that together pass L2 three times, about
PAST_L2 = 180 << 20


@dataclass(frozen=True)
class Job:
    """One cell: calls of ours on each set of inputs, of the fine ops on the first; the error, its bound, bytes to move."""

    op: str
    T: int
    keys: dict[str, Any]
    ours: list[Callable[[], Any]]
    composed: Callable[[], Any]
    error: Callable[[], float]
    bound: float
    nbytes: int


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def boundary(T: int) -> Job:
    C = CONFIG.hidden_size

    def site() -> MhcSite:
        fn = normal(24, 4 * C, dtype=torch.float32) / (4 * C) ** 0.5
        return MhcSite(fn, normal(24, dtype=torch.float32), torch.rand(3, device="cuda") + 0.5)

    sites = [site() for _ in range(PAST_L2 // (24 * 4 * C * 4))]
    norm = (1 + 0.1 * normal(C, dtype=torch.float32)).bfloat16()
    y, streams = normal(T, C), normal(T, 4, C)
    post, comb = 2 * torch.rand(T, 4, device="cuda"), torch.rand(T, 4, 4, device="cuda").softmax(-1)

    def error() -> float:
        """The gates' error against float64, on the streams that the kernel itself has written."""
        new, _, got_post, got_comb = fused.mhc_boundary(y, streams, post, comb, sites[0], norm, CONFIG)
        wide = MhcSite(sites[0].fn.double(), sites[0].base.double(), sites[0].scale.double())
        _, _, want_post, want_comb = reference.mhc_boundary(None, new.double(), None, None, wide, norm.double(), CONFIG)
        return max(rel_err(got_post, want_post), rel_err(got_comb, want_comb))

    return Job(
        "mhc_boundary", T, {},
        [lambda s=s: fused.mhc_boundary(y, streams, post, comb, s, norm, CONFIG) for s in sites],
        lambda: reference.mhc_boundary(y, streams, post, comb, sites[0], norm, CONFIG),
        error, 1e-5, sites[0].fn.nbytes + y.nbytes + 2 * streams.nbytes + T * C * 2,
    )  # fmt: skip


def gate(T: int, hashed: bool) -> Job:
    C, E, top = CONFIG.hidden_size, CONFIG.num_experts, CONFIG.experts_per_token
    x, bias = normal(T, C), None if hashed else 0.1 * normal(E, dtype=torch.float32)
    table = torch.stack([torch.randperm(E, device="cuda")[:top] for _ in range(1000)]).int() if hashed else None
    tokens = torch.randint(1000, (T,), device="cuda")
    none = Weight(torch.zeros(1, 1, device="cuda"))
    weights = [MoeWeights(normal(E, C) / 32, bias, table, none, none, none, none) for _ in range(PAST_L2 // (E * C * 2))]

    def error() -> float:
        ids, got = fused.route(x, tokens, weights[0], CONFIG)
        wide = replace(weights[0], gate=weights[0].gate.double())
        want_ids, want = reference.route(x.double(), tokens, wide, CONFIG)
        return rel_err(got, want) if torch.equal(ids, want_ids) else float("inf")

    experts = len(table[tokens].unique()) if table is not None else E
    return Job(
        "route", T, {"hash": hashed}, [lambda w=w: fused.route(x, tokens, w, CONFIG) for w in weights],
        lambda: reference.route(x, tokens, weights[0], CONFIG), error, 1e-5, experts * C * 2 + x.nbytes + T * top * 8,
    )  # fmt: skip


def prepare(T: int, H: int, ratio: int, ends: bool) -> Job:
    """ends: every token completes an entry; else none does."""
    last = 8063 if ends else 8061
    case = prepare_inputs([last - 128 * (i % 7) for i in range(T)], ratio, H=H, device="cuda")
    whole = replace(case, inputs=contiguous(case.inputs))

    def stored(case: PrepareInputs) -> list[Tensor]:
        rows = [read_rows(case.cache.window, case.step.window_write)]
        entry = case.step.entry_write.get(ratio)
        for cache in (case.cache.compressed, case.cache.index_keys):
            if cache is not None and entry is not None:
                rows.append(read_rows(cache, entry))
        return rows

    def error() -> float:
        mine, other = case.again(), whole.again()
        got, want = fused.attn_prepare(*mine.args()), reference.attn_prepare(*other.args())
        return max(rel_err(a, b) for a, b in zip([got.q, *stored(mine)], [want.q, *stored(other)], strict=True))

    inputs = sum(t.nbytes for name, t in vars(case.inputs).items() if t is not None and name != "q_latent")
    # the state's own rows are written; where an entry ends, all of its block's are read
    states = [s for s in (case.cache.state, case.cache.index_state) if s is not None]
    state = sum(s.kv[0, 0].nbytes * 2 * T * (1 + (s.kv.shape[1] if ends else 0)) for s in states)
    queries = 2 * case.q.numel() * 2 + (0 if case.index_q is None else case.index_q.numel() * 3)
    return Job(
        "attn_prepare", T, {"H": H, "ratio": ratio, "ends": ends}, [lambda: fused.attn_prepare(*case.args())],
        lambda: reference.attn_prepare(*whole.args()), error, 3e-3, inputs + state + queries,
    )  # fmt: skip


def norm(T: int) -> Job:
    wide = CONFIG.q_lora_rank + CONFIG.head_dim
    x, weight = normal(T, wide)[:, : CONFIG.q_lora_rank], normal(CONFIG.q_lora_rank)
    return Job(
        "rms_norm", T, {}, [lambda: fused.rms_norm(x, weight, 1e-6)], lambda: reference.rms_norm(x, weight, 1e-6),
        lambda: rel_err(fused.rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6)),
        4e-3, 2 * x.numel() * 2,
    )  # fmt: skip


def back(T: int, H: int) -> Job:
    o, positions = normal(T, H, 512), torch.full((T,), 70000, dtype=torch.int32, device="cuda")
    freqs = torch.rand(32, device="cuda")

    def ours() -> Tensor:
        return launches.rope_back(o, positions, freqs)

    def composed() -> Tensor:
        return rope(o, positions, freqs, inverse=True)

    return Job("rope", T, {"H": H}, [ours], composed, lambda: rel_err(ours(), composed()), 1e-3, 2 * o.nbytes)


def places(T: int) -> Job:
    cache = KVCache(ModelConfig(num_layers=3, compress_ratios=(0, 4, 128)), slots=T, max_len=9000, device="cuda")
    for _ in range(T):
        cache.reserve(cache.acquire(), 8500)
    tokens = torch.zeros(T, dtype=torch.int64, device="cuda")
    positions = torch.full((T,), 8447, dtype=torch.int32, device="cuda")
    slots = torch.arange(T, dtype=torch.int32, device="cuda")
    sizes = {"vocab": CONFIG.vocab_size, "ring": cache.ring, "window": CONFIG.window, "logical_page": 256, "ratios": (4, 128)}

    def ours() -> Any:
        return decode_places(tokens, positions, slots, cache.block_tables, **sizes, width=72)

    def composed() -> Any:
        with mock.patch.dict(os.environ, DEEPDECODE_REFERENCE="1"):
            return cache.step(tokens, positions, slots, prefill=False, width=72)

    def error() -> float:
        got, want = ours(), composed()
        names = ("window_write", "window_indices", "window_lens", "entry_indices")
        return 0.0 if all(torch.equal(getattr(got, n), getattr(want, n)) for n in names) else float("inf")

    return Job("places", T, {}, [ours], composed, error, 0.0, T * (128 + 72 + 8) * 4)


def token(T: int, temperature: float, top_p: float) -> Job:
    logits = normal(T, CONFIG.vocab_size, dtype=torch.float32)
    heat, share = (torch.full((T,), value, dtype=torch.float64, device="cuda") for value in (temperature, top_p))
    seeds = torch.arange(T, device="cuda")
    args = (logits, heat, share, seeds, seeds)

    def error() -> float:
        return (fused.sample(*args) != reference.sample(*args)).float().mean().item()

    keys = {"temperature": temperature, "top_p": top_p}
    return Job("sample", T, keys, [lambda: fused.sample(*args)], lambda: reference.sample(*args), error, 0.02, logits.nbytes)


def jobs() -> Iterator[Callable[[], Job]]:
    for T in TOKENS:
        yield lambda T=T: boundary(T)
        yield lambda T=T: gate(T, False)
        yield lambda T=T: gate(T, True)
        for H in (8, 64):
            yield lambda T=T, H=H: prepare(T, H, 0, False)
            yield lambda T=T, H=H: back(T, H)
            for ratio in (4, 128):
                for ends in (False, True):
                    yield lambda T=T, H=H, ratio=ratio, ends=ends: prepare(T, H, ratio, ends)
        yield lambda T=T: norm(T)
        yield lambda T=T: places(T)
        for sampling in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9)):
            yield lambda T=T, sampling=sampling: token(T, *sampling)


def measure(job: Job, bandwidth: float, limit_s: float = 0.08) -> dict[str, Any]:
    """One row of the result file; no time where the check fails."""
    row: dict[str, Any] = {"op": job.op, "implementation": "deepdecode", "T": job.T, **job.keys}
    row["rel_err"] = job.error()
    if not row["rel_err"] <= job.bound:
        return row | {"error": f"outside {job.bound}"}
    warm, rotated = time_graph(job.ours[:1], limit_s=limit_s), None
    row |= {"us_warm": warm.us, "us_warm_low": warm.low, "us_warm_high": warm.high}
    if len(job.ours) > 1:
        rotated = time_graph(job.ours, limit_s=limit_s)
        row |= {"us_rotated": rotated.us, "us_rotated_low": rotated.low, "us_rotated_high": rotated.high}
    row["us_composed"] = time_graph([job.composed], calls_per_graph=4, limit_s=limit_s).us
    return row | {"bytes": job.nbytes, "floor_us": job.nbytes / bandwidth / 1e6}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deepdecode.bench.glue", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of result files (default: results)")
    parser.add_argument("--commit", help="the commit that is measured, where the checkout has no .git")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting cells after this long")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench: no CUDA device; figures come from a GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    start, bandwidth, rows = time.monotonic(), copy_bandwidth(), []
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    for make in jobs():
        if time.monotonic() - start > options.seconds:
            break
        row = measure(make(), bandwidth)
        rows.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
        print(row, flush=True)
    write_results(
        options.out / name / "glue.json", rows, command="python -m deepdecode.bench.glue",
        commit=options.commit or current_commit(), copy_bandwidth_tb_s=round(bandwidth, 3),
    )  # fmt: skip
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
