"""Run a model under a choice, and compare what it says, which entries and experts it takes, and what it can find again."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepdecode.kvcache import KVCache
from deepdecode.model import DraftWeights, ModelWeights
from deepdecode.ops.indexer import index_logits_ref
from deepdecode.ops.rows import PagedRows, read_rows
from deepdecode.ops.table import Ops, Step
from deepdecode.quality.choices import Choice
from deepdecode.quality.text import Needle, Piece
from deepdecode.runner import PREFILL_CHUNK, Runner, Sampling
from deepdecode.speculate import Speculator

Tensor = torch.Tensor
# positions before each context length whose chosen entries are compared
SAMPLED = 16
# rows of logits compared at a time
ROWS = 512
# tokens read in one forward on a GPU, where an op costs its launch
GPU_CHUNK = 4096


@dataclass
class Told:
    """What a model said of one piece.

    logits: float32 [T, V], where the model is. experts: for each layer, ids [T, k]. chosen: for each ratio-4 layer and sampled
    position, its entries as bool [N]; scores: the same for the index scores as probabilities, where they were asked for.
    """

    logits: Tensor
    experts: list[Tensor] = field(default_factory=list)
    chosen: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    scores: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class Witness:
    """A table of ops that does what another does and notes the choices it makes at these positions."""

    def __init__(self, ops: Ops, ratios: Sequence[int], positions: set[int], scores: bool) -> None:
        self.inner, self.positions, self.keep_scores = ops, positions, scores
        self.sparse, self.layers = [i for i, ratio in enumerate(ratios) if ratio == 4], len(ratios)
        self.calls = self.routed = 0
        self.experts: list[list[Tensor]] = [[] for _ in ratios]
        self.chosen: dict[tuple[int, int], Tensor] = {}
        self.scores: dict[tuple[int, int], Tensor] = {}
        self.ops = replace(ops, index_topk=self.index_topk, route=self.route)

    def index_topk(self, index_q: Tensor, weights: Tensor, keys: PagedRows, step: Step, topk: int) -> tuple[Tensor, Tensor]:
        indices, lens = self.inner.index_topk(index_q, weights, keys, step, topk)
        layer = self.sparse[self.calls % len(self.sparse)]
        self.calls += 1
        positions = step.positions.tolist()
        rows = [t for t, position in enumerate(positions) if position in self.positions]
        if not rows:
            return indices, lens
        # where each entry stands, and what stands there; all sampled tokens at once
        at, lens_seen = torch.tensor(rows, device=indices.device), step.entry_lens[4].tolist()
        pages = step.block_tables[int(step.slots[0])]
        entry = torch.arange(max(lens_seen[t] for t in rows), device=pages.device)
        physical = pages[entry // keys.page_size].long() * keys.page_size + entry % keys.page_size
        # lanes past a token's length hold -1, which marks a row that no entry has
        marks = torch.zeros(len(rows), keys.num_rows + 1, dtype=torch.bool, device=pages.device)
        taken = marks.scatter_(1, indices[at].long() % (keys.num_rows + 1), True)[:, physical].cpu()
        told = None
        if self.keep_scores and len(physical):
            values = read_rows(keys, physical)
            logits = index_logits_ref(index_q[at].to(values.dtype), weights[at].to(values.dtype), values)
            unseen = entry >= step.entry_lens[4][at][:, None]
            told = logits.masked_fill(unseen, float("-inf")).softmax(dim=1).cpu()
        for i, t in enumerate(rows):
            where, seen = (layer, positions[t]), lens_seen[t]
            self.chosen[where] = taken[i, :seen]
            if told is not None and seen:
                self.scores[where] = told[i, :seen]
        return indices, lens

    def route(self, x: Tensor, tokens: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        ids, weights = self.inner.route(x, tokens, *args)
        self.experts[self.routed % self.layers].append(ids.cpu())
        self.routed += 1
        return ids, weights


def runner_for(weights: ModelWeights, choice: Choice, length: int, ops: Ops) -> Runner:
    """A runner whose caches are the choice's."""
    config, device = weights.config, weights.embed.device
    chunk = GPU_CHUNK if device.type == "cuda" else PREFILL_CHUNK
    runner = Runner(weights, max_len=length, fmt=choice.fmt, ops=ops, graphs=False, prefill_chunk=chunk)
    runner.cache = KVCache(config, slots=1, max_len=length, fmt=choice.fmt, index_fmt=choice.index_fmt, device=device)
    return runner


def tell(weights: ModelWeights, choice: Choice, ids: Sequence[int], contexts: Sequence[int], *, scores: bool = False) -> Told:
    """Read a piece under a choice."""
    positions = {at for context in contexts for at in range(context - SAMPLED, context) if 0 <= at < len(ids)}
    witness = Witness(choice.ops, weights.config.compress_ratios, positions, scores)
    runner = runner_for(weights, choice, len(ids), witness.ops)
    logits = runner.prefill(runner.cache.acquire(), list(ids), every=True)
    return Told(logits.float(), [torch.cat(layer) for layer in witness.experts], witness.chosen, witness.scores)


@dataclass
class Loss:
    """Sums over pieces of what a choice says beside what the base says."""

    contexts: Sequence[int]
    tokens: int = 0
    size: int = 0
    bits: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    experts: list[float] = field(default_factory=list)
    overlap: dict[int, list[float]] = field(default_factory=dict)
    mass: dict[int, list[float]] = field(default_factory=dict)

    def add(self, piece: Piece, told: Told, base: Told) -> None:
        ids = torch.tensor(piece.ids[1:], device=told.logits.device)
        for at in range(0, len(ids), ROWS):
            part, here = slice(at, min(at + ROWS, len(ids))), ids[at : at + ROWS]
            ours, theirs = (t.logits[part].double().log_softmax(dim=1) for t in (told, base))
            self.bits -= float(ours.gather(1, here[:, None]).sum()) / math.log(2)
            self.kl += float((theirs.exp() * (theirs - ours)).sum()) / math.log(2)
            self.agreed += int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())
        self.tokens += len(ids)
        self.size += piece.size
        for ours, theirs in zip(told.experts, base.experts, strict=True):
            self.experts.append(float((ours[:, :, None] == theirs[:, None, :]).any(dim=2).float().mean()))
        for (layer, position), theirs in base.chosen.items():
            ours, context = told.chosen[layer, position], next(c for c in self.contexts if c - SAMPLED <= position < c)
            if not bool(theirs.any()):
                continue
            self.overlap.setdefault(context, []).append(float((ours & theirs).sum()) / float(theirs.sum()))
            scores = base.scores[layer, position]
            self.mass.setdefault(context, []).append(float(scores[ours].sum() / scores[theirs].sum()))

    def row(self) -> dict[str, Any]:
        def mean(values: list[float]) -> float:
            return sum(values) / len(values)

        return {
            "tokens": self.tokens,
            "bits_per_byte": self.bits / self.size,
            "kl_bits": self.kl / self.tokens,
            "top1": self.agreed / self.tokens,
            "experts": mean(self.experts),
            "contexts": {
                str(context): {"overlap": mean(self.overlap[context]), "score_mass": mean(self.mass[context])}
                for context in sorted(self.overlap)
            },
        }


def random_entries(seed: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """An indexer that chooses as many entries as the real one, any of the visible ones."""

    def choose(index_q: Tensor, weights: Tensor, keys: PagedRows, step: Step, topk: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed + int(step.positions[0]))
        seen = step.entry_lens[4].long()
        pages = step.block_tables[int(step.slots[0])].long()
        order = torch.rand(len(seen), len(pages) * keys.page_size, generator=generator).to(seen.device)
        entry = torch.arange(order.shape[1], device=seen.device)
        order = order.masked_fill(entry >= seen[:, None], 2.0).topk(min(topk, order.shape[1]), largest=False).indices
        lens = seen.clamp(max=topk)
        rows = pages[order // keys.page_size] * keys.page_size + order % keys.page_size
        lane = torch.arange(order.shape[1], device=seen.device)
        return torch.where(lane < lens[:, None], rows, -1).int(), lens.int()

    return choose


def find(weights: ModelWeights, choice: Choice, hay: Sequence[Needle], seed: int | None = None) -> dict[str, Any]:
    """How well what a definition's second telling repeats is known: tokens told right, whole tellings right, bits a token.

    seed: the indexer's choice is random, from this seed.
    """
    right = whole = told = 0
    bits = 0.0
    for needle in hay:
        ops = choice.ops if seed is None else replace(choice.ops, index_topk=random_entries(seed))
        runner = runner_for(weights, choice, len(needle.ids), ops)
        slot = runner.cache.acquire()
        before = needle.told[0] - 1
        if before:
            runner.prefill(slot, needle.ids[:before])
        logits = runner.prefill(slot, needle.ids[before:-1], start=before, every=True).float().cpu()
        wanted = torch.tensor(needle.ids[before + 1 :])
        hits = logits.argmax(dim=1) == wanted
        right, whole, told = right + int(hits.sum()), whole + int(hits.all()), told + len(wanted)
        bits -= float(logits.log_softmax(dim=1).gather(1, wanted[:, None]).sum()) / math.log(2)
    return {"needles": len(hay), "tokens_right": right / told, "whole_right": whole / len(hay), "bits_per_token": bits / told}


def speculation(weights: ModelWeights, draft: DraftWeights, choice: Choice, texts: Sequence[Piece], new: int) -> dict[str, Any]:
    """Greedy text behind the first half of each piece, with the draft block and without.

    same: whether both are the same token for token. tokens_per_step: of the model's steps after the prompt, 1 without.
    """
    steps = proposed = accepted = made = 0
    same = True
    for piece in texts:
        prompt = piece.ids[: max(1, len(piece.ids) // 2)]
        runner = runner_for(weights, choice, len(prompt) + new, choice.ops)
        speculator = Speculator(runner, draft)
        with_drafts, plain = (list(each.generate([prompt], Sampling(new))) for each in (speculator, runner))
        same &= with_drafts == plain
        counts = speculator.counts
        steps, proposed, accepted = steps + counts.steps, proposed + counts.proposed, accepted + counts.accepted
        made += counts.tokens - counts.texts
    return {
        "texts": len(texts),
        "tokens": made,
        "same": same,
        "acceptance": accepted / max(1, proposed),
        "tokens_per_step": made / max(1, steps),
    }
