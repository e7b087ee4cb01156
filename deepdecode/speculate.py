"""Speculation: the MTP block proposes one token, the model tells it and its own next one in one step, and keeps what agrees.

The text is the model's own greedy text, whatever the block proposes. A step takes the last token and the proposal, as two
consecutive tokens of the sequence; if the model would have said another, the step was worth one token, else two.

It is so bit for bit. A product of two tokens rounds differently from one token's, which can tip a choice that is as good as
even; so each layer takes the two one behind the other, by the very calls that decoding them makes.

Nothing has to be undone for a proposal that is refused. What it left stands at its own position in every cache: its window
row and its compressor rows are overwritten by the token that is then fed there, before anything reads them, and an entry that
it completed lies past every later length until the true one is written over it. What a ring had in its place belonged to a
position that no query from the true token on can see, and that no entry still to come pools.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import torch

from deepdecode.kvcache import KVCache
from deepdecode.model import DraftWeights, Last, run_layer, run_layers
from deepdecode.ops.linear import linear
from deepdecode.ops.mhc import mhc_post
from deepdecode.ops.norm import rms_norm
from deepdecode.ops.table import HeadWeights, Step
from deepdecode.runner import Runner, Sampling, Token, check_prompts

Tensor = torch.Tensor


@dataclass
class Counts:
    """What speculation took and gave: steps of the model after the prompts, proposals, those it agreed with, tokens made.

    texts: prompts begun; each one's own step makes its first token.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    tokens: int = 0
    texts: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.proposed)

    @property
    def tokens_per_step(self) -> float:
        """Of the tokens that these steps made; 1 without speculation."""
        return (self.tokens - self.texts) / max(1, self.steps)


class Speculator:
    """Greedy generation of one sequence at a time with a draft block.

    Args:
        runner: the model, alone on its device; one of its slots is taken while a text is made.
        draft: its MTP block, from `load_draft`.
    """

    def __init__(self, runner: Runner, draft: DraftWeights) -> None:
        self.runner, self.draft = runner, draft
        self.config = replace(runner.weights.config, num_layers=1, compress_ratios=(0,))
        fmt = runner.cache.layers[0].window.fmt
        self.cache = KVCache(self.config, slots=1, max_len=runner.max_len, fmt=fmt, device=runner.device)
        self.counts = Counts()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[Token]:
        """What `Runner.generate` gives for greedy sampling, one prompt after another.

        Raises:
            ValueError: the temperature is not 0, or a prompt cannot be generated from.
            CacheFull: every slot of the runner is held.
        """
        if sampling.temperature:
            raise ValueError(f"speculate: temperature must be 0 (greedy), got {sampling.temperature}")
        check_prompts(prompts, self.runner.weights.config.vocab_size, self.runner.max_len)
        for row, prompt in enumerate(prompts):
            if sampling.max_new_tokens == 0:
                yield Token(row, None, "length")
                continue
            with closing(self._tokens(prompt)) as tokens:
                for made, token in enumerate(tokens, 1):
                    self.counts.tokens += 1
                    finish = None
                    if token in sampling.stop_ids:
                        finish = "stop"
                    elif made >= sampling.max_new_tokens:
                        finish = "length"
                    elif len(prompt) + made > self.runner.max_len:
                        finish = "context"
                    yield Token(row, token, finish)
                    if finish:
                        break

    @torch.inference_mode()
    def _tokens(self, prompt: Sequence[int]) -> Generator[int, None, None]:
        """Greedy tokens without end; whoever takes them must stop at the context's."""
        runner = self.runner
        with ExitStack() as held:
            slot, own = (held.enter_context(_slot(cache)) for cache in (runner.cache, self.cache))
            self.counts.texts += 1
            # the model has been fed `fed` tokens, the block `drafted` of them; `streams` are those of the ones between
            ids, fed, drafted = list(prompt), 0, 0
            while True:
                chunk = ids[fed : fed + runner.prefill_chunk]
                last = self._feed(slot, chunk, fed)
                streams = _written(last)
                fed += len(chunk)
                if fed == len(prompt):
                    break
                self._propose(own, streams, ids[drafted + 1 : fed + 1], drafted)
                drafted = fed
            new = self._greedy(last, runner.weights.head)
            while True:
                for token in new:
                    ids.append(token)
                    yield token
                feed = [ids[-1], *self._propose(own, streams, ids[drafted + 1 : fed + 1], drafted)]
                drafted = fed
                told, streams = self._verify(slot, feed[: runner.max_len - fed], fed)
                agreed = told[0] == feed[1]
                self.counts.steps += 1
                self.counts.proposed += 1
                self.counts.accepted += agreed
                new = told if agreed else told[:1]
                fed, streams = fed + len(new), streams[: len(new)]

    def _feed(self, slot: int, tokens: Sequence[int], start: int) -> Last:
        """Feed consecutive tokens to the model, all at once."""
        runner, weights, ops = self.runner, self.runner.weights, self.runner.ops
        step = self._step(runner.cache, slot, tokens, start)
        streams = ops.embed(step.tokens, weights.embed, weights.config.hc_mult)
        return run_layers(weights.layers, streams, runner.cache.layers, step, ops, weights.config)

    def _verify(self, slot: int, tokens: Sequence[int], start: int) -> tuple[list[int], Tensor]:
        """Feed one or two tokens: the id that the model tells after each, and the streams [T, 4, C] behind them."""
        runner, weights, ops = self.runner, self.runner.weights, self.runner.ops
        steps = [self._step(runner.cache, slot, [token], start + i, prefill=False) for i, token in enumerate(tokens)]
        lasts: list[Last] = [(None, ops.embed(s.tokens, weights.embed, weights.config.hc_mult), None, None) for s in steps]
        for i, (layer, cache) in enumerate(zip(weights.layers, runner.cache.layers, strict=True)):
            ratio = weights.config.ratio(i)
            for row, step in enumerate(steps):
                lasts[row] = run_layer(layer, lasts[row], cache, step, ops, weights.config, ratio)
        told = [id for last in lasts for id in self._greedy(last, weights.head)]
        return told, torch.cat([_written(last) for last in lasts])

    def _propose(self, slot: int, streams: Tensor, following: Sequence[int], start: int) -> list[int]:
        """Feed the block the streams [T, 4, C] behind consecutive tokens, and the tokens after them; the id it then tells."""
        draft, config, ops = self.draft, self.config, self.runner.ops
        step = self._step(self.cache, slot, following, start)
        told = rms_norm(self.runner.weights.embed[step.tokens], draft.enorm, config.norm_eps)
        seen = rms_norm(streams, draft.hnorm, config.norm_eps)
        both = linear(told, draft.e_proj)[:, None] + linear(seen, draft.h_proj)
        last = run_layers([draft.layer], both, self.cache.layers, step, ops, config)
        return self._greedy(last, draft.head)

    def _step(self, cache: KVCache, slot: int, tokens: Sequence[int], start: int, *, prefill: bool = True) -> Step:
        cache.reserve(slot, start + len(tokens))
        fed = torch.tensor(tokens, device=self.runner.device)
        positions = torch.arange(start, start + len(tokens), dtype=torch.int32, device=self.runner.device)
        return cache.step(fed, positions, torch.full_like(positions, slot), prefill=prefill)

    def _greedy(self, last: Last, head: HeadWeights) -> list[int]:
        """The id told after the last row, alone in a list."""
        ops = self.runner.ops
        logits = ops.head(*(None if t is None else t[-1:] for t in last), head, self.config)
        zeros = torch.zeros(1, dtype=torch.int64, device=logits.device)
        return ops.sample(logits, zeros.double(), zeros.double() + 1, zeros, zeros).tolist()


@contextmanager
def _slot(cache: KVCache) -> Iterator[int]:
    slot = cache.acquire()
    try:
        yield slot
    finally:
        cache.release(slot)


def _written(last: Last) -> Tensor:
    """The streams once the last sublayer's output stands in them."""
    y, streams, post, comb = last
    return streams if y is None or post is None or comb is None else mhc_post(y, streams, post, comb)
