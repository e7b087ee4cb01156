"""Where a rung likes another token best than the reference does, both given the tokens that the reference chose.

200 tokens of 5 prompts. What the reference table in float32 chooses takes it some ten seconds, so for the embedded model it is
kept in data/tiny/followed.json, which `python tools/follow.py` writes; another model is followed when it is first asked for.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from deepdecode.config import ModelConfig
from deepdecode.ladder.gates import CLEAR, TIMES_REFERENCE, Gate, LogitsGate
from deepdecode.model import ModelWeights
from deepdecode.ops.reference import REFERENCE
from deepdecode.ops.table import Ops
from deepdecode.rungs import RUNGS

Tensor = torch.Tensor
FILE = Path(__file__).parent.parent / "data" / "tiny" / "followed.json"
# of each prompt; what a result says of one by one
STEPS, TOLD = 200, 10


@dataclass(frozen=True)
class Turn:
    """A prompt's step at which another token won; gap: between the reference's two best logits."""

    prompt: int
    step: int
    gap: float


@dataclass(frozen=True)
class Followed:
    """What the reference table in float32 chose.

    model: `digest` of its weights. prompts: the ids before. best, gaps: [steps][prompts], the token it likes best after those
    before, and by how much in logits. own: where the reference table in bfloat16, given the same tokens, likes another.
    """

    model: str
    prompts: list[list[int]]
    best: list[list[int]]
    gaps: list[list[float]]
    own: list[Turn]

    def gate(self, device: torch.device | str) -> LogitsGate:
        """Caches that hold the prompts but for their last tokens, and steps that feed these and what was chosen after."""
        given = [[prompt[-1] for prompt in self.prompts], *self.best[:-1]]
        return LogitsGate(device, prompts=[prompt[:-1] for prompt in self.prompts], next=given)

    def turns(self, logits: Tensor) -> list[Turn]:
        """Where logits [steps * prompts, vocab] are highest at another token; a row with a NaN in it is such a place."""
        rows, best = logits.float(), torch.tensor(self.best, device=logits.device).flatten()
        other = (rows.argmax(-1) != best) | rows.isnan().any(-1)
        count = len(self.prompts)
        return [
            Turn(row % count, row // count, self.gaps[row // count][row % count]) for row in other.nonzero().flatten().tolist()
        ]

    def written(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


def read(text: str) -> Followed:
    """What `Followed.written` gave."""
    document = json.loads(text)
    return Followed(**{**document, "own": [Turn(**turn) for turn in document["own"]]})


def digest(weights: ModelWeights) -> str:
    """Of every tensor's shape and rough size: seeded weights may differ in last bits from machine to machine."""
    told = [(list(tensor.shape), f"{float(tensor.float().abs().mean()):.2e}") for tensor in _leaves(weights)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list):
        for part in tree:
            yield from _leaves(part)
    elif hasattr(tree, "__dataclass_fields__") and not isinstance(tree, ModelConfig):
        for field in fields(tree):
            yield from _leaves(getattr(tree, field.name))


@torch.inference_mode()
def follow(prompts: Sequence[Sequence[int]], steps: int = STEPS) -> Followed:
    """Let the reference table go on from the prompts, of two tokens at least, on the CPU."""
    start = Followed("", [list(ids) for ids in prompts], [[0] * len(prompts)] * steps, [], [])
    gate = start.gate("cpu")
    weights = gate.weights
    runner = gate.runner(replace(weights, embed=weights.embed.float()), REFERENCE, gate.prefilled.cache)
    given, best, gaps = gate.next[0], [], []
    for i in range(steps):
        logits = runner.decode(range(len(given)), given, [length + i for length in gate.lengths]).float()
        two = logits.topk(2, dim=-1).values
        given = logits.argmax(-1).tolist()
        best.append(given)
        gaps.append([round(gap, 5) for gap in (two[:, 0] - two[:, 1]).tolist()])
    found = replace(start, model=digest(weights), best=best, gaps=gaps)
    gate.next = found.gate("cpu").next
    return replace(found, own=found.turns(gate.decode(weights, REFERENCE)))


class ModelGates:
    """What the logits of a rung must pass on the embedded model: near the reference's; of the top rung also its tokens.

    Where the reference's two best logits are 0.1 apart, the top rung must choose the same; where they are nearer, it may choose
    another once for each prompt. A model on which the reference table in bfloat16 does not keep to that, as random weights
    make one, allows twice what that table does.
    """

    def __init__(self, device: torch.device | str, *, file: Path = FILE) -> None:
        self.device, self.file = torch.device(device), file
        self.logits = LogitsGate(device)
        self.top = [rung for rung in RUNGS if not rung.beside][-1]

    @cached_property
    def followed(self) -> Followed:
        kept = read(self.file.read_text())
        return kept if kept.model == digest(self.logits.weights) else follow(kept.prompts, len(kept.best))

    @cached_property
    def following(self) -> LogitsGate:
        return self.followed.gate(self.device)

    def prepare(self) -> None:
        """Do what does not depend on a rung, on one thread: products of this size wait for threads more than they gain."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self.logits.prepare()
            assert self.following.prefilled
        finally:
            torch.set_num_threads(threads)

    def __call__(self, ops: Ops) -> list[Gate]:
        gates = self.logits(ops)
        return gates + self.follows(ops) if ops is self.top.ops else gates

    def follows(self, ops: Ops) -> list[Gate]:
        """Tokens chosen otherwise, where the reference is sure and where it is not."""
        return turn_gates(self.followed, self.followed.turns(self.following.decode(self.following.moved, ops)))


def turn_gates(followed: Followed, turns: Sequence[Turn]) -> list[Gate]:
    def told(found: Sequence[Turn], own: Sequence[Turn]) -> str:
        places = [f"prompt {turn.prompt} token {turn.step} ({turn.gap:.3f})" for turn in found[:TOLD]]
        more = [f"{len(found) - TOLD} more"] if len(found) > TOLD else []
        size = f"{len(followed.best) * len(followed.prompts)} tokens of {len(followed.prompts)} prompts"
        return f"{size}; {', '.join(places + more) or 'none'}; the reference in bfloat16: {len(own)}"

    def most(found: Sequence[Turn]) -> int:
        return max(Counter(turn.prompt for turn in found).values(), default=0)

    sure, own_sure = ([turn for turn in some if turn.gap >= CLEAR] for some in (turns, followed.own))
    near, own_near = ([turn for turn in some if turn.gap < CLEAR] for some in (turns, followed.own))
    allowed = 1 if most(own_near) <= 1 else TIMES_REFERENCE * most(own_near)
    return [
        Gate(
            f"tokens chosen otherwise, two best {CLEAR} apart", len(sure), TIMES_REFERENCE * len(own_sure), told(sure, own_sure)
        ),
        Gate("tokens chosen otherwise, of one prompt at near ties", most(near), allowed, told(near, own_near)),
    ]
