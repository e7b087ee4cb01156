"""deepdecode bench glue: a step's fused glue, checked, timed warm and past L2, beside the composed fine ops.

mhc_boundary, attn_prepare, route, norm, rotation back, places and the next token at V4-Flash's sizes; and of mhc_boundary the
mixing product by itself, beside its rivals. All are timed as replays of a CUDA graph: what is compared is the GPU's time, not
the host's.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from deepdecode.bench import cells
from deepdecode.bench.cells import Cell, Work
from deepdecode.bench.options import parser_of
from deepdecode.bench.peers import deep_gemm
from deepdecode.config import ModelConfig
from deepdecode.errors import told
from deepdecode.kernels.attention_plan import card_of
from deepdecode.kvcache import KVCache
from deepdecode.ops import fused, launches, reference
from deepdecode.ops.gate import score_ref, weigh_ref
from deepdecode.ops.places import decode_places
from deepdecode.ops.quant import Weight
from deepdecode.ops.rope import rope
from deepdecode.ops.rows import read_rows
from deepdecode.ops.sample import nucleus_ref, uniform_ref
from deepdecode.ops.table import MhcSite, MoeWeights
from deepdecode.testing.numeric import rel_err
from deepdecode.testing.steps import PrepareInputs, contiguous, prepare_inputs

Tensor = torch.Tensor
TOKENS = (1, 16, 64)
CONFIG = ModelConfig()
# float32 sums of the mixing product, and of rivals: TF32, or operands in bfloat16
MIX, MIX_TF32, MIX_BF16 = 1e-5, 2e-3, 8e-3
# float32 scores, and what they choose: an expert may stand where float64 has one that much better, by this much of it
ROUTED = 1e-5
# a stored row may have one code of E4M3 that fell the other way: a sixteenth of its largest value, which is 3 of its 128's norm
STORED = 2e-2
# how far outside of the drawn token's share of (0, 1) the number that drew it may lie: on average a token has 8e-6
DRAWN = 4e-6


def work(
    ours: list[Callable[[], Any]], composed: Callable[[], Any], error: Callable[[], float], bound: float, nbytes: int
) -> Work:
    return Work(ours, lambda: {"rel_err": error()}, ("rel_err", bound), nbytes, composed=composed)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=cells.DEVICE).to(dtype)


def mhc_sites() -> list[MhcSite]:
    """As many as pass L2."""
    width = 4 * CONFIG.hidden_size

    def site() -> MhcSite:
        fn = normal(24, width, dtype=torch.float32) / width**0.5
        return MhcSite(fn, normal(24, dtype=torch.float32), torch.rand(3, device=cells.DEVICE) + 0.5)

    return [site() for _ in range(cells.copies(24 * width * 4))]


def boundary(T: int) -> Work:
    C, sites = CONFIG.hidden_size, mhc_sites()
    norm = (1 + 0.1 * normal(C, dtype=torch.float32)).bfloat16()
    y, streams = normal(T, C), normal(T, 4, C)
    post, comb = 2 * torch.rand(T, 4, device=cells.DEVICE), torch.rand(T, 4, 4, device=cells.DEVICE).softmax(-1)

    def error() -> float:
        """The gates' error against float64, on the streams that the kernel itself has written."""
        new, _, got_post, got_comb = fused.mhc_boundary(y, streams, post, comb, sites[0], norm, CONFIG)
        wide = MhcSite(sites[0].fn.double(), sites[0].base.double(), sites[0].scale.double())
        _, _, want_post, want_comb = reference.mhc_boundary(None, new.double(), None, None, wide, norm.double(), CONFIG)
        return max(rel_err(got_post, want_post), rel_err(got_comb, want_comb))

    return work(
        [lambda s=s: fused.mhc_boundary(y, streams, post, comb, s, norm, CONFIG) for s in sites],
        lambda: reference.mhc_boundary(y, streams, post, comb, sites[0], norm, CONFIG),
        error, MIX, sites[0].fn.nbytes + y.nbytes + 2 * streams.nbytes + T * C * 2,
    )  # fmt: skip


Mixed = Callable[[], tuple[Tensor, Tensor]]


def mix_ours(streams: Tensor, fn: Tensor) -> tuple[Callable[[], Any], Mixed]:
    """The mixing product's launch by itself; who takes its result adds the parts."""
    from deepdecode.kernels import mhc as kernel

    config = kernel.plan(streams.shape[2], card_of(streams.device).arch, len(streams))

    def result() -> tuple[Tensor, Tensor]:
        sums = kernel.mix(None, streams, None, None, fn, config)[1].sum(0)
        return sums[:, : len(fn)], sums[:, len(fn)]

    return lambda: kernel.mix(None, streams, None, None, fn, config), result


def mix_deep_gemm(streams: Tensor, fn: Tensor) -> tuple[Callable[[], Any], Mixed]:
    """DeepGEMM's product and sum of squares in TF32, cut as SGLang cuts it; who takes its result adds the parts as well."""
    library, flat = deep_gemm(), streams.flatten(1)
    T, width = flat.shape
    # a program has 64 tokens and four steps of 64 columns at least
    splits = max(1, min(card_of(streams.device).sms // -(-T // 64), width // 256))
    out = torch.empty(splits, T, len(fn), device=flat.device)
    squares = torch.empty(splits, T, device=flat.device)

    def call() -> None:
        library.tf32_hc_prenorm_gemm(flat, fn, out, squares, splits)

    def result() -> tuple[Tensor, Tensor]:
        call()
        return out.sum(0), squares.sum(0)

    return call, result


def mix_torch(streams: Tensor, fn: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Callable[[], Any], Mixed]:
    flat, weight = streams.flatten(1).to(dtype), fn.to(dtype).mT

    def call() -> tuple[Tensor, Tensor]:
        return flat @ weight, flat.square().sum(1)

    return call, call


def mix_bfloat16(streams: Tensor, fn: Tensor) -> tuple[Callable[[], Any], Mixed]:
    """What one bfloat16 part of the weights would cost and give: the precision that the two parts are for."""
    return mix_torch(streams, fn, torch.bfloat16)


MIXES = {
    "deepdecode": (mix_ours, MIX),
    "deep_gemm, TF32": (mix_deep_gemm, MIX_TF32),
    "torch.matmul, float32": (mix_torch, MIX),
    "torch.matmul, bfloat16": (mix_bfloat16, MIX_BF16),
}


def mixing(T: int, name: str) -> Work:
    """The mixing product of the streams and their sums of squares."""
    make, bound = MIXES[name]
    streams, weights = normal(T, 4, CONFIG.hidden_size), [site.fn for site in mhc_sites()]
    made = [make(streams, fn) for fn in weights]

    def error() -> float:
        product, squares = made[0][1]()
        flat = streams.flatten(1).double()
        # the sum of squares in bfloat16 is rounded as such
        return max(rel_err(product, flat @ weights[0].double().mT), rel_err(squares, flat.square().sum(1)))

    flops = 2 * T * weights[0].numel()
    calls = [call for call, _ in made]
    return Work(calls, lambda: {"rel_err": error()}, ("rel_err", bound), weights[0].nbytes + streams.nbytes, flops)


def routed_err(ids: Tensor, weights: Tensor, scores: Tensor, bias: Tensor | None, fixed: Tensor | None) -> float:
    """How far a route is from float64 scores [T, E]: its weights from those of its own experts, and these from the best ones.

    fixed: the experts of a hash layer, which are these and no others.
    """
    if not all(len(row.unique()) == len(row) for row in ids):
        return float("inf")
    error = rel_err(weights, weigh_ref(scores, ids, CONFIG.routed_scale))
    if fixed is not None:
        return error if torch.equal(ids, fixed) else float("inf")
    rank = scores if bias is None else scores + bias.double()
    best, mine = rank.topk(ids.shape[1]).values, rank.gather(1, ids)
    return max(error, ((best - mine).abs() / best.abs()).max().item())


def gate(T: int, hashed: bool) -> Work:
    C, E, top = CONFIG.hidden_size, CONFIG.num_experts, CONFIG.experts_per_token
    x, bias = normal(T, C), None if hashed else 0.1 * normal(E, dtype=torch.float32)
    table = torch.stack([torch.randperm(E, device=cells.DEVICE)[:top] for _ in range(1000)]).int() if hashed else None
    tokens = torch.randint(1000, (T,), device=cells.DEVICE)
    none = Weight(torch.zeros(1, 1, device=cells.DEVICE))
    weights = [MoeWeights(normal(E, C) / 32, bias, table, none, none, none, none) for _ in range(cells.copies(E * C * 2))]

    def error() -> float:
        ids, got = fused.route(x, tokens, weights[0], CONFIG)
        scores = score_ref(x.double(), weights[0].gate.double())
        return routed_err(ids.long(), got, scores, bias, None if table is None else table[tokens].long())

    experts = len(table[tokens].unique()) if table is not None else E
    return work(
        [lambda w=w: fused.route(x, tokens, w, CONFIG) for w in weights],
        lambda: reference.route(x, tokens, weights[0], CONFIG), error, ROUTED, experts * C * 2 + x.nbytes + T * top * 8,
    )  # fmt: skip


def prepare(T: int, H: int, ratio: int, ends: bool) -> Work:
    """ends: every token completes an entry; else none does."""
    last = 8063 if ends else 8061
    case = prepare_inputs([last - 128 * (i % 7) for i in range(T)], ratio, H=H, device=cells.DEVICE)
    whole = replace(case, inputs=contiguous(case.inputs))

    def stored(case: PrepareInputs) -> list[Tensor]:
        rows = [read_rows(case.cache.window, case.step.window_write)]
        entry = case.step.entry_write.get(ratio)
        for cache in (case.cache.compressed, case.cache.index_keys):
            if cache is not None and entry is not None:
                rows.append(read_rows(cache, entry))
        return rows

    def error() -> dict[str, float]:
        mine, other = case.again(), whole.again()
        got, want = fused.attn_prepare(*mine.args()), reference.attn_prepare(*other.args())
        rows = max(rel_err(a, b) for a, b in zip(stored(mine), stored(other), strict=True))
        return {"rel_err": rel_err(got.q, want.q), "stored_err": rows}

    inputs = sum(t.nbytes for name, t in vars(case.inputs).items() if t is not None and name != "q_latent")
    # the state's own rows are written; where an entry ends, all of its block's are read
    states = [s for s in (case.cache.state, case.cache.index_state) if s is not None]
    state = sum(s.kv[0, 0].nbytes * 2 * T * (1 + (s.kv.shape[1] if ends else 0)) for s in states)
    queries = 2 * case.q.numel() * 2 + (0 if case.index_q is None else case.index_q.numel() * 3)
    return Work(
        [lambda: fused.attn_prepare(*case.args())], error, ("rel_err", 3e-3), inputs + state + queries,
        composed=lambda: reference.attn_prepare(*whole.args()), also=("stored_err", STORED),
    )  # fmt: skip


def norm(T: int) -> Work:
    wide = CONFIG.q_lora_rank + CONFIG.head_dim
    x, weight = normal(T, wide)[:, : CONFIG.q_lora_rank], normal(CONFIG.q_lora_rank)
    return work(
        [lambda: fused.rms_norm(x, weight, 1e-6)], lambda: reference.rms_norm(x, weight, 1e-6),
        lambda: rel_err(fused.rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6)),
        4e-3, 2 * x.numel() * 2,
    )  # fmt: skip


def back(T: int, H: int) -> Work:
    o, positions = normal(T, H, 512), torch.full((T,), 70000, dtype=torch.int32, device=cells.DEVICE)
    freqs = torch.rand(32, device=cells.DEVICE)

    def ours() -> Tensor:
        return launches.rope_back(o, positions, freqs)

    def composed() -> Tensor:
        return rope(o, positions, freqs, inverse=True)

    return work([ours], composed, lambda: rel_err(ours(), composed()), 2e-3, 2 * o.nbytes)


def places(T: int) -> Work:
    cache = KVCache(ModelConfig(num_layers=3, compress_ratios=(0, 4, 128)), slots=T, max_len=9000, device=cells.DEVICE)
    for _ in range(T):
        cache.reserve(cache.acquire(), 8500)
    tokens = torch.zeros(T, dtype=torch.int64, device=cells.DEVICE)
    positions = torch.full((T,), 8447, dtype=torch.int32, device=cells.DEVICE)
    slots = torch.arange(T, dtype=torch.int32, device=cells.DEVICE)
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

    return work([ours], composed, error, 0.0, T * (128 + 72 + 8) * 4)


def drawn_err(tokens: Tensor, logits: Tensor, temperature: float, top_p: float, uniform: Tensor) -> float:
    """How far outside of its token's share of (0, 1) a row's number lies at most; greedily, whether a token is another."""
    if temperature == 0:
        return float((tokens != logits.argmax(-1)).any())
    probs = (logits.double() / temperature).softmax(-1)
    if top_p < 1:
        probs = nucleus_ref(probs, torch.full_like(uniform, top_p))
    ends = probs.cumsum(-1)
    end, whole = ends.gather(1, tokens[:, None])[:, 0], ends[:, -1]
    start, at = end - probs.gather(1, tokens[:, None])[:, 0], uniform * whole
    return (torch.maximum(start - at, at - end).clamp(min=0) / whole).max().item()


def token(T: int, temperature: float, top_p: float) -> Work:
    logits = normal(T, CONFIG.vocab_size, dtype=torch.float32)
    heat, share = (torch.full((T,), value, dtype=torch.float64, device=cells.DEVICE) for value in (temperature, top_p))
    seeds = torch.arange(T, device=cells.DEVICE)
    args = (logits, heat, share, seeds, seeds)

    def error() -> float:
        return drawn_err(fused.sample(*args), logits, temperature, top_p, uniform_ref(seeds, seeds))

    return work([lambda: fused.sample(*args)], lambda: reference.sample(*args), error, DRAWN, logits.nbytes)


def jobs(peers: bool) -> Iterator[Cell]:
    def cell(op: str, T: int, make: Callable[[], Work], implementation: str = "deepdecode", **keys: Any) -> Cell:
        return Cell({"op": op, "implementation": implementation, "T": T, **keys}, make, limit_s=0.04)

    for T in TOKENS:
        yield cell("mhc_boundary", T, lambda T=T: boundary(T))
        for name in MIXES if peers else ("deepdecode",):
            yield cell("mhc_mix", T, lambda T=T, name=name: mixing(T, name), name)
        for hashed in (False, True):
            yield cell("route", T, lambda T=T, hashed=hashed: gate(T, hashed), hash=hashed)
        for H in (8, 64):
            for ratio, ends in ((0, False), (4, False), (4, True), (128, False), (128, True)):
                keys = {"H": H, "ratio": ratio, "ends": ends}
                yield cell("attn_prepare", T, lambda T=T, H=H, r=ratio, ends=ends: prepare(T, H, r, ends), **keys)
            yield cell("rope", T, lambda T=T, H=H: back(T, H), H=H)
        yield cell("rms_norm", T, lambda T=T: norm(T))
        yield cell("places", T, lambda T=T: places(T))
        for heat, share in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9)):
            yield cell("sample", T, lambda T=T, heat=heat, share=share: token(T, heat, share), temperature=heat, top_p=share)


def say(row: dict[str, Any]) -> str:
    if "T" not in row:
        return cells.line(row, row["implementation"], "")
    known = ("op", "implementation", "T", "rel_err", "error", "us_", "bytes", "flops", "floor")
    keys = " ".join(f"{name}={value}" for name, value in row.items() if not name.startswith(known))
    composed = f", composed {row['us_composed']:.1f} us" if "us_composed" in row else ""
    what = f"{row['op']:<13} {row['implementation']:<22} T={row['T']:<4} {keys:<30}"
    return cells.line(row, what, f"error {row.get('rel_err', 0):.1e}{composed}")


def main(argv: Sequence[str] | None = None) -> int:
    return command(parser_of("glue").parse_args(argv))


def command(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    return cells.run("glue", options, jobs(options.peers), say)


if __name__ == "__main__":
    sys.exit(told(main))
