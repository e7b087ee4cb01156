"""The runner: prefill, batched decode and sampling of one model in one process (or one rank of a tensor-parallel group).

On a GPU a decode step, sampling included, is one CUDA graph for each size of batch: what varies is read from the device.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from deepdecode.graphs import Captured
from deepdecode.kvcache import KVCache
from deepdecode.model import ALONE, Collectives, ModelWeights, forward
from deepdecode.ops._check import kernel_runs
from deepdecode.ops.fused import FUSED
from deepdecode.ops.table import Ops

log = logging.getLogger("deepdecode")
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


def bucket(batch: int, most: int) -> int:
    """Rows of the graph that decodes a batch: powers of two to 8, multiples of 8 to 64, of 32 beyond; `most` at the most."""
    if batch <= 8:
        return min(most, 1 << (batch - 1).bit_length())
    step = 8 if batch <= 64 else 32
    return min(most, -(-batch // step) * step)


class Runner:
    """A model, its caches and its table of ops.

    Args:
        weights: of this rank.
        max_len: longest sequence, prompt and answer together; at most the model's own limit.
        slots: sequences decoded at once; more prompts wait for a free slot.
        fmt: cache format, "fp8_584", "bf16", "f32" or "f64".
        ops: the table to run on; by default the product's, which is the references off a GPU.
        ranks: collectives of the tensor-parallel group.
        progress: called with the tokens of a prompt that are done, and all of them, after each chunk.
        graphs: decode by CUDA graphs; None: on a GPU, where one rank is alone. A table that cannot be captured, as one with
            a reference that asks the host, is said in the log and runs launch by launch.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        max_len: int,
        slots: int = 1,
        fmt: str = "fp8_584",
        window_page: int = 64,
        ops: Ops = FUSED,
        ranks: Collectives = ALONE,
        prefill_chunk: int = PREFILL_CHUNK,
        progress: Callable[[int, int], None] | None = None,
        graphs: bool | None = None,
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
        on_gpu = self.device.type == "cuda"
        if graphs and not on_gpu:
            raise ValueError(f"runner: graphs must be False or None off a GPU, got {graphs}")
        self.graphs = on_gpu and ranks is ALONE if graphs is None else graphs
        self._buckets: dict[int, _Bucket] = {}

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
        if self.graphs and len(slots):
            found = self._replay(slots, tokens, positions, [0] * len(slots), Sampling())
            if found is not None:
                # the next replay writes the same place
                return found.logits[: len(slots)].clone()
        step = self.cache.step(
            torch.tensor(tokens, device=self.device),
            torch.tensor(positions, dtype=torch.int32, device=self.device),
            torch.tensor(slots, dtype=torch.int32, device=self.device),
            prefill=False,
        )
        return forward(self.weights, self.cache.layers, step, self.ops, ranks=self.ranks)

    def _replay(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        positions: Sequence[int],
        seeds: Sequence[int],
        sampling: Sampling,
    ) -> "_Bucket | None":
        """Run the step's graph, captured at its first use; None where this table has none."""
        T = bucket(len(slots), self.cache.slots)
        # rows beyond the batch are padded ones
        more = [0] * (T - len(slots))
        ints = torch.tensor([[*tokens, *more], [*positions, *more], [*slots, *(-1 for _ in more)], [*seeds, *more]])
        try:
            if T not in self._buckets:
                self._buckets[T] = _Bucket(self, ints, sampling)
        except RuntimeError as error:
            # leaving a capture that failed raises once more; what failed it stands behind
            reason = str(error.__context__ or error).splitlines()[0]
            log.warning("runner: decode runs launch by launch, since a step of %d rows cannot be captured: %s", T, reason)
            self.graphs = False
            return None
        self._buckets[T].run(ints, sampling)
        return self._buckets[T]

    @torch.inference_mode()
    def _next(self, batch: list[Row], sampling: Sampling) -> list[int]:
        """Decode one step of the batch and sample a token for each sequence."""
        slots, tokens = [s.slot for s in batch], [s.ids[-1] for s in batch]
        positions = [len(s.ids) - 1 for s in batch]
        if self.graphs:
            for slot, position in zip(slots, positions, strict=True):
                self.cache.reserve(slot, position + 1)
            found = self._replay(slots, tokens, positions, [_seed(s, sampling) for s in batch], sampling)
            if found is not None:
                return found.sampled[: len(batch)].tolist()
        return self._sample(batch, self.decode(slots, tokens, positions), sampling)

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
                    logits = self.prefill(seq.slot, seq.ids)[None]
                    yield from self._take([seq], self._sample([seq], logits, sampling), sampling)
                    running = self._drop_finished(running)
                if running:
                    yield from self._take(running, self._next(running, sampling), sampling)
                    running = self._drop_finished(running)
        finally:
            for seq in running:
                self.cache.release(seq.slot)

    def _sample(self, batch: list[Row], logits: torch.Tensor, sampling: Sampling) -> list[int]:
        B, device = len(batch), logits.device
        return self.ops.sample(
            logits,
            # float64: in float32 an accepted temperature or top_p could become 0 or infinite
            torch.full((B,), sampling.temperature, dtype=torch.float64, device=device),
            torch.full((B,), sampling.top_p, dtype=torch.float64, device=device),
            torch.tensor([_seed(s, sampling) for s in batch], device=device),
            torch.tensor([len(s.ids) for s in batch], device=device),
        ).tolist()

    def _take(self, batch: list[Row], tokens: list[int], sampling: Sampling) -> Iterator[Token]:
        """Note each sequence's new token and why the row ends, if it does."""
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


def _seed(row: Row, sampling: Sampling) -> int:
    return (sampling.seed + row.row + 2**63) % 2**64 - 2**63


def _pair(sampling: Sampling, T: int) -> torch.Tensor:
    return torch.tensor([[sampling.temperature] * T, [sampling.top_p] * T], dtype=torch.float64)


class _Bucket:
    """The decode step of a fixed number of rows as a graph: inputs and outputs that stay where they are.

    inputs: int64 [4, T], rows of tokens, positions, slots and seeds; sampling: float64 [2, T], temperature and top_p.
    logits: [T, vocab], sampled: int64 [T], of the last run.
    """

    def __init__(self, runner: Runner, ints: torch.Tensor, sampling: Sampling) -> None:
        device, T = runner.device, ints.shape[1]
        self.inputs = ints.to(device)
        self.sampling = _pair(sampling, T).to(device)
        self.sampled = torch.zeros(T, dtype=torch.int64, device=device)
        self.logits = torch.empty(0)
        # kernels of a replay, by entry
        self.kernels: Counter[str] = Counter()

        def work() -> None:
            before = kernel_runs.copy()
            tokens, positions, slots, seeds = self.inputs
            where = runner.cache.step(tokens, positions.int(), slots.int(), prefill=False)
            # the graph's own memory: every replay writes the same place
            self.logits = forward(runner.weights, runner.cache.layers, where, runner.ops, ranks=runner.ranks)
            temperature, top_p = self.sampling
            self.sampled.copy_(runner.ops.sample(self.logits, temperature, top_p, seeds, positions + 1))
            self.kernels = kernel_runs - before

        before = kernel_runs.copy()
        self._captured = Captured(work, device)
        # what the capture took to make is nobody's step
        kernel_runs.clear()
        kernel_runs.update(before)

    def run(self, ints: torch.Tensor, sampling: Sampling) -> None:
        self.inputs.copy_(ints)
        self.sampling.copy_(_pair(sampling, len(self.sampled)))
        self._captured.replay()
        if self._captured.launches is not None:
            kernel_runs.update(self.kernels)
