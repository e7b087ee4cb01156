"""What a rung must pass before its time is printed: attention and chosen entries against float64, logits against references."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from deepdecode.checkpoint import load_model
from deepdecode.config import ModelConfig
from deepdecode.kvcache import KVCache
from deepdecode.ladder.results import finite
from deepdecode.model import ModelWeights
from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.ops.indexer import index_logits_ref, index_topk_ref
from deepdecode.ops.reference import REFERENCE
from deepdecode.ops.rope import rope
from deepdecode.ops.rows import PagedRows, read_rows
from deepdecode.ops.table import Ops, Step
from deepdecode.runner import Runner
from deepdecode.testing.numeric import rel_err, worst_row_err
from deepdecode.tiny import CONFIG, EMBEDDED

Tensor = torch.Tensor
# Twice what the product's kernel is held to: the mirrors of engine code round each of two launches, their merge and the sink
# to bfloat16. Over the tensor, and in the worst (token, head) row.
MAX_ERR, MAX_ROW_ERR = 5e-3, 1e-2
# Entries that a token chooses and float64 does not, over all it chooses: sums in float32 may tip those next to the bar, and a
# single token chooses 512.
MAX_OTHERS = 5e-3
# and what of the scores' sum that may cost: an entry next to the bar is worth as much as the one that float64 has instead
MAX_LOST = 1e-4
# the float64 reference holds every gathered row, so a large batch is checked on its first tokens
CHECKED_TOKENS = 16
# A rounded score can tip a router or a choice of entries, which moves one row far; it does not happen to many.
ROWS_WITHIN, TIMES_REFERENCE = 7 / 8, 2.0
# between logits; where the reference's two best are nearer, either may win
CLEAR = 0.1
# beside, across and behind the borders of window (128), ratio-4 and ratio-128 entries
PROMPTS, DECODE_STEPS, PROMPT_SEED = (125, 70, 259), 8, 4


@dataclass(frozen=True)
class Gate:
    """One check: what it compared, how far apart it was, and how far it may be."""

    name: str
    error: float
    bound: float
    note: str = ""

    @property
    def passed(self) -> bool:
        # a NaN passes no comparison
        return self.error <= self.bound

    def told(self) -> dict[str, Any]:
        """What result files say of it."""
        return {**asdict(self), "error": finite(self.error), "passed": self.passed}


@dataclass(frozen=True)
class Captured:
    """The arguments of one call of sparse_attn, turn its positions and freqs, and what it gave; caches are not copied."""

    args: tuple[Any, ...]
    sink: Tensor | None
    scale: float
    turn: tuple[Tensor, Tensor]
    out: Tensor

    @property
    def keys(self) -> int:
        return self.args[2].shape[1] + (0 if self.args[5] is None else self.args[5].shape[1])

    def first(self, count: int) -> "Captured":
        q, window, indices, lens, extra, extra_indices, extra_lens = self.args
        more = (None, None) if extra is None else (extra_indices[:count], extra_lens[:count])
        return Captured(
            (q[:count], window, indices[:count], lens[:count], extra, *more), self.sink, self.scale,
            (self.turn[0][:count], self.turn[1]), self.out[:count],
        )  # fmt: skip

    def reference(self, dtype: torch.dtype = torch.float64) -> Tensor:
        q, *rest = self.args
        sink = None if self.sink is None else self.sink.to(dtype)
        return rope(sparse_attn_ref(q.to(dtype), *rest, sink=sink, scale=self.scale)[0], *self.turn, inverse=True)


def capturing(ops: Ops) -> tuple[Ops, list[Captured]]:
    """The same table, and the list that its sparse_attn fills: the first call of each number of keys."""
    found: list[Captured] = []

    def sparse_attn(q, window, indices, lens, extra=None, extra_indices=None, extra_lens=None, **options):
        args = (q, window, indices, lens, extra, extra_indices, extra_lens)
        given = ops.sparse_attn(*args, **options)
        one = Captured(args, options["sink"], options["scale"], (options["positions"].clone(), options["freqs"]), given)
        if all(one.keys != other.keys for other in found):
            copies = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
            found.append(replace(one, args=copies, out=given.clone()))
        return given

    return replace(ops, sparse_attn=sparse_attn), found


def step_gates(ops: Ops, run: Callable[[Ops], Any]) -> list[Gate]:
    """A whole step against float64, at the step's own shapes and on its own rows.

    Args:
        ops: the rung's table.
        run: runs one step on the table it is given, eagerly.

    Returns:
        Attention over the tensor and in the worst (token, head) row, each the worst over layers of different key counts; then,
        where a layer has an indexer, the entries that its first one chose, by number and by what they score.
    """
    table, found = capturing(ops)
    chosen: list[tuple[Any, ...]] = []

    def index_topk(index_q, index_weights, keys, step, topk):
        given = ops.index_topk(index_q, index_weights, keys, step, topk)
        if not chosen:
            chosen.append((index_q.clone(), index_weights.clone(), keys, step, topk, given[0].clone(), given[1].clone()))
        return given

    run(replace(table, index_topk=index_topk))
    if not found:
        raise ValueError("step gates: the step must call sparse_attn, got no call")
    # rows of the caches that the step itself wrote stay as they are until the next step, so the reference may read them now
    errors = [_errors(one.first(CHECKED_TOKENS)) for one in found]
    keys = ", ".join(str(one.keys) for one in found)
    note = f"{found[0].args[0].shape[0]} tokens, {found[0].args[0].shape[1]} heads, {keys} keys"
    gates = [
        Gate("attention against float64", max(tensor for tensor, _ in errors), MAX_ERR, note),
        Gate("its worst row", max(row for _, row in errors), MAX_ROW_ERR, note),
    ]
    return gates + [gate for call in chosen for gate in _selection(*call)]


def _selection(
    index_q: Tensor, index_weights: Tensor, keys: PagedRows, step: Step, topk: int, indices: Tensor, lens: Tensor
) -> list[Gate]:
    n = CHECKED_TOKENS
    query, weights = index_q[:n].float().double(), index_weights[:n].double()
    visible = step.entry_lens[4][:n]
    want, want_lens = index_topk_ref(query, weights, keys, step.block_tables, step.slots[:n], visible, topk)
    others = total = 0
    lost = 0.0
    for row, (mine, count, theirs, size) in enumerate(
        zip(indices[:n].tolist(), lens[:n].tolist(), want.tolist(), want_lens.tolist(), strict=True)
    ):
        chosen, right = set(mine[:count]), set(theirs[:size])
        others += len(right - chosen)
        total += size
        # sorted: the same sums whichever order the sets have
        scores = [
            index_logits_ref(query[row : row + 1], weights[row : row + 1], read_rows(keys, places).double())
            for places in (index_q.new_tensor(sorted(some), dtype=torch.int64) for some in (chosen, right))
        ]
        best = float(scores[1].sum())
        lost = max(lost, (best - float(scores[0].sum())) / max(float(scores[1].abs().sum()), 1e-30))
    note = f"{len(index_q)} tokens, top {topk} of {int(visible.max())}"
    return [
        Gate("chosen entries that float64 does not choose", others / max(1, total), MAX_OTHERS, note),
        Gate("scores lost by them", lost, MAX_LOST, note),
    ]


def _errors(one: Captured) -> tuple[float, float]:
    want = one.reference()
    return rel_err(one.out, want), worst_row_err(one.out, want)


@dataclass(frozen=True)
class Logits:
    """How far rows of logits are from the truth; others: rows whose best token is another, unclear ones counted apart."""

    error: float
    divergence: float
    others: float
    unclear: int


class LogitsGate:
    """Logits of the embedded model: a rung against the reference table in float32, all from the same caches.

    The bounds are what the reference table itself loses in bfloat16. Made once for all rungs.

    Args:
        device: where rungs run; the reference runs on the CPU.
        prompts: ids of each sequence that the caches hold; by default seeded ones.
        next: [steps][sequences], the ids that the steps feed; by default seeded ones.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        next: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.device = torch.device(device)
        generator = torch.Generator().manual_seed(PROMPT_SEED)

        def tokens(*shape: int) -> list:
            return torch.randint(4, CONFIG.vocab_size, shape, generator=generator).tolist()

        self.prompts: list[list[int]] = [tokens(n) for n in PROMPTS] if prompts is None else [list(ids) for ids in prompts]
        self.lengths = tuple(len(ids) for ids in self.prompts)
        self.next: list[list[int]] = tokens(DECODE_STEPS, len(self.lengths)) if next is None else [list(ids) for ids in next]

    @cached_property
    def weights(self) -> ModelWeights:
        return load_model(EMBEDDED)

    @cached_property
    def moved(self) -> ModelWeights:
        """The same numbers on the device; another generator would make others there."""
        return _to(self.weights, self.device)

    @cached_property
    def prefilled(self) -> Runner:
        return self.runner(self.weights, REFERENCE, None)

    @cached_property
    def truth(self) -> Tensor:
        return self.decode(replace(self.weights, embed=self.weights.embed.float()), REFERENCE)

    @cached_property
    def own(self) -> "Logits":
        """What the reference table itself is off in bfloat16."""
        return self._compare(self.decode(self.weights, REFERENCE))

    def prepare(self) -> None:
        """Do what does not depend on a rung, on one thread: products of this size wait for threads more than they gain."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert self.own.error > 0
        finally:
            torch.set_num_threads(threads)

    def __call__(self, ops: Ops) -> list[Gate]:
        """By norm, by Kullback-Leibler divergence, by the best token."""
        self.prepare()
        got, own = self._compare(self.decode(self.moved, ops).to(self.truth.device)), self.own
        note = f"{len(self.truth)} rows of the tiny model"
        kept = f"{note}; what {ROWS_WITHIN:.1%} of them keep"
        return [
            Gate("logits against the reference table", got.error, TIMES_REFERENCE * own.error, kept),
            # a divergence grows with the square
            Gate("their divergence in nats", got.divergence, TIMES_REFERENCE**2 * own.divergence, kept),
            Gate(
                "best tokens that the reference has not",
                got.others,
                1 - ROWS_WITHIN,
                f"{note} whose two best are {CLEAR} apart; {got.unclear} more among the others",
            ),
        ]

    def _compare(self, logits: Tensor) -> "Logits":
        want = self.truth
        place = int(ROWS_WITHIN * (len(want) - 1))
        errors = sorted(rel_err(a, b) for a, b in zip(logits, want, strict=True))
        a, b = want.double().log_softmax(-1), logits.double().log_softmax(-1)
        # NaN is the largest
        divergences = (a.exp() * (a - b)).sum(-1).nan_to_num(nan=float("inf")).sort().values
        best = want.topk(2, dim=-1).values
        clear = best[:, 0] - best[:, 1] >= CLEAR
        other = logits.argmax(-1) != want.argmax(-1)
        return Logits(
            errors[place], float(divergences[place]), float((other & clear).sum() / len(want)), int((other & ~clear).sum())
        )

    @torch.inference_mode()
    def step(self, ops: Ops) -> Tensor:
        """One decode step of all sequences on a copy of the prefilled caches, on the CPU; logits [sequences, vocab]."""
        return self.runner(self.weights, ops, self.prefilled.cache).decode(range(len(self.lengths)), self.next[0], self.lengths)

    @torch.inference_mode()
    def decode(self, weights: ModelWeights, ops: Ops) -> Tensor:
        """float32 [steps * sequences, vocab]: the same tokens, whatever was sampled, on a copy of the prefilled caches."""
        runner = self.runner(weights, ops, self.prefilled.cache)
        slots = range(len(self.lengths))
        steps = [
            runner.decode(slots, tokens, [length + i for length in self.lengths]).float() for i, tokens in enumerate(self.next)
        ]
        return torch.cat(steps)

    def runner(self, weights: ModelWeights, ops: Ops, cache: KVCache | None) -> Runner:
        """A runner whose slots hold the prompts, read by itself or copied from another cache."""
        runner = Runner(weights, max_len=max(self.lengths) + len(self.next), slots=len(self.lengths), ops=ops)
        for prompt in self.prompts:
            slot = runner.cache.acquire()
            runner.cache.reserve(slot, len(prompt) + len(self.next))
            if cache is None:
                runner.prefill(slot, prompt)
        if cache is not None:
            for mine, theirs in zip(_tensors(runner.cache.layers), _tensors(cache.layers), strict=True):
                mine.copy_(theirs)
        return runner


def _to(tree: Any, device: torch.device) -> Any:
    """The same dataclasses, their tensors on the device."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, list):
        return [_to(part, device) for part in tree]
    if not hasattr(tree, "__dataclass_fields__") or isinstance(tree, ModelConfig):
        return tree
    return replace(tree, **{f.name: _to(getattr(tree, f.name), device) for f in fields(tree) if f.init})


def _tensors(layers: Sequence[Any]) -> list[Tensor]:
    """Every tensor of the caches, in one order."""
    parts = [getattr(layer, f.name) for layer in layers for f in fields(layer)]
    held = [getattr(part, f.name) for part in parts if part is not None for f in fields(part)]
    return [tensor for tensor in held if isinstance(tensor, Tensor)]
