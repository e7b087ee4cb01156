"""The runner: prefill, batched decode and sampling of one model in one process (or one rank of a tensor-parallel group)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from deepdecode.kvcache import KVCache
from deepdecode.model import ALONE, Collectives, ModelWeights, forward
from deepdecode.ops.reference import REFERENCE
from deepdecode.ops.table import Ops

# tokens of a prompt in one forward: bounds the activations, changes no result
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. Row i draws with seed + i (modulo 2**64) and its own positions, whatever stands beside it."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"sampling: max_new_tokens must be >= 0, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"sampling: temperature must be >= 0 and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling: top_p must be in (0, 1], got {self.top_p}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"sampling: seed must be a signed 64-bit integer, got {self.seed}")


@dataclass
class Row:
    """One prompt on its way: its tokens so far, its slot in the caches, and why it ended."""

    row: int
    ids: list[int]
    prompt_len: int
    slot: int = -1
    finish: str | None = None


@dataclass(frozen=True)
class Token:
    """One generated token of one row; `finish` is "stop", "length" or "context" on the row's last, else None."""

    row: int
    id: int | None
    finish: str | None


def check_prompts(prompts: Sequence[Sequence[int]], vocab: int, max_len: int) -> None:
    """ValueError unless every prompt can be generated from: it has tokens, all in the vocabulary, and fits the context."""
    for row, ids in enumerate(prompts):
        if not ids:
            raise ValueError(f"generate: prompt {row} must have at least one token, got none")
        if len(ids) > max_len:
            raise ValueError(f"generate: prompt {row} must have at most {max_len} tokens (the context), got {len(ids)}")
        bad = next((i for i in ids if not 0 <= i < vocab), None)
        if bad is not None:
            raise ValueError(f"generate: prompt {row} must have token ids in [0, {vocab}), got {bad}")


class Runner:
    """A model, its caches and its table of ops.

    Args:
        weights: of this rank.
        max_len: longest sequence, prompt and answer together; at most the model's own limit.
        slots: sequences decoded at once; more prompts wait for a free slot.
        fmt: cache format, "fp8_584", "bf16", "f32" or "f64".
        ops: the table to run on.
        ranks: collectives of the tensor-parallel group.
        progress: called with the tokens of a prompt that are done, and all of them, after each chunk.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        max_len: int,
        slots: int = 1,
        fmt: str = "fp8_584",
        window_page: int = 64,
        ops: Ops = REFERENCE,
        ranks: Collectives = ALONE,
        prefill_chunk: int = PREFILL_CHUNK,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        config = weights.config
        if not 1 <= max_len <= config.max_positions:
            raise ValueError(f"runner: max_len must be in [1, {config.max_positions}] (the model's limit), got {max_len}")
        if slots < 1 or prefill_chunk < 1:
            raise ValueError(f"runner: slots and prefill_chunk must be >= 1, got {slots} and {prefill_chunk}")
        self.weights, self.ops, self.ranks = weights, ops, ranks
        self.max_len, self.prefill_chunk, self.progress = max_len, prefill_chunk, progress
        self.device = weights.embed.device
        self.cache = KVCache(config, slots=slots, max_len=max_len, window_page=window_page, fmt=fmt, device=self.device)

    @torch.inference_mode()
    def prefill(self, slot: int, ids: Sequence[int], *, start: int = 0, every: bool = False) -> torch.Tensor:
        """Feed consecutive tokens of one sequence from position `start`.

        Returns the last token's logits [vocab], or with `every` those of all tokens [T, vocab].
        """
        if not len(ids):
            raise ValueError("prefill: ids must have at least one token, got none")
        self.cache.reserve(slot, start + len(ids))
        logits = []
        for at in range(0, len(ids), self.prefill_chunk):
            chunk = torch.tensor(ids[at : at + self.prefill_chunk], device=self.device)
            T = len(chunk)
            positions = torch.arange(start + at, start + at + T, dtype=torch.int32, device=self.device)
            step = self.cache.step(chunk, positions, torch.full_like(positions, slot), prefill=True)
            rows = None if every else torch.tensor([T - 1], device=self.device)
            logits.append(forward(self.weights, self.cache.layers, step, self.ops, rows=rows, ranks=self.ranks))
            if self.progress:
                self.progress(at + T, len(ids))
        return torch.cat(logits) if every else logits[-1][0]

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """One token of each of B sequences, at its position. Returns logits [B, vocab]."""
        for slot, position in zip(slots, positions, strict=True):
            self.cache.reserve(slot, position + 1)
        step = self.cache.step(
            torch.tensor(tokens, device=self.device),
            torch.tensor(positions, dtype=torch.int32, device=self.device),
            torch.tensor(slots, dtype=torch.int32, device=self.device),
            prefill=False,
        )
        return forward(self.weights, self.cache.layers, step, self.ops, ranks=self.ranks)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[Token]:
        """Generate for every prompt and yield tokens as they come, rows of a step in order.

        A prompt joins the batch when a slot is free and leaves it when it ends; neither changes another row's
        logits but for rounding: products of another size round differently, which can tip a choice.
        A row ends at a stop id ("stop"), after max_new_tokens ("length") or at the context limit ("context").
        Slots are given back however the caller leaves the iteration.

        Raises:
            ValueError: a prompt is empty, does not fit the context, or has an id outside the vocabulary.
            CacheFull: every slot is held outside this call.
        """
        check_prompts(prompts, self.weights.config.vocab_size, self.max_len)
        waiting = [Row(row, list(ids), len(ids)) for row, ids in enumerate(prompts)]
        running: list[Row] = []
        try:
            while waiting or running:
                # with nothing running, a prompt that finds all slots held by others is refused by acquire
                while waiting and (self.cache.free_slots or not running):
                    seq = waiting.pop(0)
                    if sampling.max_new_tokens == 0:
                        yield Token(seq.row, None, "length")
                        continue
                    seq.slot = self.cache.acquire()
                    running.append(seq)
                    yield from self._take([seq], self.prefill(seq.slot, seq.ids)[None], sampling)
                    running = self._drop_finished(running)
                if running:
                    logits = self.decode(
                        [s.slot for s in running], [s.ids[-1] for s in running], [len(s.ids) - 1 for s in running]
                    )
                    yield from self._take(running, logits, sampling)
                    running = self._drop_finished(running)
        finally:
            for seq in running:
                self.cache.release(seq.slot)

    def _take(self, batch: list[Row], logits: torch.Tensor, sampling: Sampling) -> Iterator[Token]:
        """Sample one token for each sequence of the batch, note it and why the row ends, if it does."""
        B, device = len(batch), logits.device
        tokens = self.ops.sample(
            logits,
            # float64: in float32 an accepted temperature or top_p could become 0 or infinite
            torch.full((B,), sampling.temperature, dtype=torch.float64, device=device),
            torch.full((B,), sampling.top_p, dtype=torch.float64, device=device),
            torch.tensor([(sampling.seed + s.row + 2**63) % 2**64 - 2**63 for s in batch], device=device),
            torch.tensor([len(s.ids) for s in batch], device=device),
        ).tolist()
        for seq, token in zip(batch, tokens, strict=True):
            seq.ids.append(token)
            made = len(seq.ids) - seq.prompt_len
            if token in sampling.stop_ids:
                seq.finish = "stop"
            elif made >= sampling.max_new_tokens:
                seq.finish = "length"
            elif len(seq.ids) > self.max_len:
                # the token just made is the last that could be scored; feeding it would need one position more
                seq.finish = "context"
            yield Token(seq.row, token, seq.finish)

    def _drop_finished(self, running: list[Row]) -> list[Row]:
        for seq in running:
            if seq.finish:
                self.cache.release(seq.slot)
        return [s for s in running if not s.finish]
