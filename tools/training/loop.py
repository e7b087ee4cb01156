"""A run: steps, evaluations, and a state from which it goes on exactly where it was."""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepdecode.config import ModelConfig
from training.data import EOS, Mix, Tokens, batch, pieces
from training.forward import Model
from training.optim import Optimiser
from training.parts import REFERENCE, fused
from training.weights import initial, rounded, specs

Tensor = torch.Tensor
log = logging.getLogger("training")
# the steps whose speed says how many there will be, where a recipe leaves it to the time there is
TIMED = range(20, 40)
# of the planned time what evaluations and slower steps may take
SPARE = 0.08


@dataclass(frozen=True)
class Recipe:
    """What a run is; with the data and the seed it says every number of it.

    steps, warmup: the learning rate rises to `lr` over `warmup` steps, stays, and falls to 0 over the last `decay` of them.
    steps 0: as many as the planned time allows, fixed after the first forty and kept in the state; from there on the run is
    that of a recipe with that number.
    rows, length: sequences of a step and their tokens. dense_until: until this step every visible entry is attended, while the
    indexer learns to choose. round_from: from this part of the steps on the forward sees the weights as they will be exported.
    draft_weight: of the MTP block's loss. bias_rate: what a step moves the bias of an expert that is taken too often, or too
    seldom (no auxiliary loss). clip: the largest norm of the gradient. told: of the sequences, the part in which made-up
    definitions are told again. copied, until half of dense_until: the part that is stretches told again and again, in which
    the tokens of `exchanged` of the vocabulary stand for others.
    """

    steps: int = 1600
    rows: int = 4
    length: int = 4096
    lr: float = 1e-2
    warmup: int = 100
    decay: float = 0.7
    weight_decay: float = 0.2
    dropout: float = 0.15
    optimiser: str = "muon"
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    dense_until: int = 300
    round_from: float = 0.7
    draft_weight: float = 0.2
    bias_rate: float = 1e-3
    told: float = 0.45
    copied: float = 0.35
    exchanged: float = 0.4
    seed: int = 4

    def __post_init__(self) -> None:
        if self.optimiser not in ("muon", "adamw"):
            raise ValueError(f"train: optimiser must be muon or adamw, got {self.optimiser}")
        if self.steps < 0 or min(self.rows, self.length) < 1:
            got = f"{self.steps}, {self.rows} and {self.length}"
            raise ValueError(f"train: steps must be >= 0, rows and length >= 1, got {got}")
        if self.steps == 0 and self.warmup < TIMED.stop:
            raise ValueError(f"train: warmup must be >= {TIMED.stop} where steps is 0, got {self.warmup}")

    def rate(self, step: int) -> float:
        left = (self.steps - step) / max(1.0, self.decay * self.steps) if self.steps else 1.0
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup), left)

    def mix(self, step: int) -> Mix:
        return Mix(self.told, self.copied if 2 * step < self.dense_until else 0.0, self.exchanged)

    def rounds(self, step: int) -> bool:
        return self.steps > 0 and step >= self.round_from * self.steps


class Run:
    """One run in its folder: state.pt (to go on from), best.pt (the parameters that told `valid` best), log.jsonl."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        recipe: Recipe,
        data: dict[str, Tokens],
        device: torch.device,
        graphs: bool = True,
    ) -> None:
        self.folder, self.config, self.recipe, self.data, self.device = folder, config, recipe, data, device
        # TF32 holds products of bfloat16 numbers exactly, and what is float32 by nature here is small
        torch.set_float32_matmul_precision("high")
        on_gpu = device.type == "cuda"
        if on_gpu and recipe.length % config.window:
            raise ValueError(f"train: length must be a multiple of {config.window} on a GPU, got {recipe.length}")
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.model = Model(config, fused() if on_gpu else REFERENCE)
        self.specs = specs(config)
        self.params = {name: p.to(device) for name, p in initial(config, recipe.seed).items()}
        for name, p in self.params.items():
            p.requires_grad_(self.specs[name].kind != "ids" and not name.endswith(".bias"))
        self.learnt = {name: p for name, p in self.params.items() if p.requires_grad}
        self.optimiser = Optimiser(self.learnt, self.specs, recipe.optimiser, betas=recipe.betas)
        self.step, self.best, self.seconds = 0, float("inf"), 0.0
        self.graphs = graphs and on_gpu
        self._captured: dict[tuple[bool, bool], tuple[torch.cuda.CUDAGraph, dict[str, Tensor]] | None] = {}
        self._tokens = torch.zeros(recipe.rows, recipe.length + 1, dtype=torch.int64, device=device)
        self._lr = torch.zeros((), device=device)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "state.pt").exists():
            self._load()

    def prepared(self, round_weights: bool) -> dict[str, Tensor]:
        """The parameters as a forward takes them."""
        p = rounded(self.config, self.params) if round_weights else self.params
        return {n: t.to(self.dtype) if self.specs[n].kind not in ("f32", "ids") else t for n, t in p.items()}

    def train_step(self) -> dict[str, Tensor]:
        """One step; its losses, the norm of its gradient, and the load of the busiest expert over the mean."""
        r, step = self.recipe, self.step
        self._tokens.copy_(torch.from_numpy(batch(self.data["train"], step, r.seed, r.rows, r.length, r.mix(step))))
        self._lr.fill_(r.rate(step))
        # dropout's draws, the same when a run goes on from here
        torch.manual_seed(r.seed * 1_000_003 + step)
        found = self._replayed(step < r.dense_until, r.rounds(step)) if self.graphs else None
        if found is None:
            found = self._update(step < r.dense_until, r.rounds(step))
        self.step += 1
        return found

    def _update(self, dense: bool, round_weights: bool) -> dict[str, Tensor]:
        """What a step does with the tokens and the rate that are set: nothing waits for the device, so it can be captured."""
        r = self.recipe
        p = self.prepared(round_weights)
        topk = None if dense else self.config.index_topk
        tokens = torch.where(self._tokens < 0, -1 - self._tokens, self._tokens)
        targets = self._tokens.clamp(min=-1)
        found, hidden = self.model.losses(p, tokens, targets, topk=topk, dropout=r.dropout, draft=r.draft_weight > 0)
        total = found["told"] + found["kl"] + (r.draft_weight * found["draft"] if "draft" in found else 0.0)
        grads = torch.autograd.grad(total, list(self.learnt.values()), allow_unused=True)
        with torch.no_grad():
            # without its loss the MTP block has none
            grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, self.learnt.values(), strict=True)]
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            torch._foreach_mul_(grads, (r.clip / (norm + 1e-6)).clamp(max=1.0))
            self.optimiser.step(dict(zip(self.learnt, grads, strict=True)), self._lr, r.weight_decay)
            for name, load in hidden.loads.items():
                self.params[name] += r.bias_rate * torch.sign(load.mean() - load)
            busiest = torch.stack([norm.new_ones(()), *(load.max() / load.mean() for load in hidden.loads.values())]).max()
        # losses are means over all tokens; those that are not to be told count for nothing
        asked = (targets[:, 1:] >= 0).float().mean()
        said = {name: value.detach() / (1.0 if name == "kl" else asked) for name, value in found.items()}
        return said | {"norm": norm, "busiest": busiest}

    def _replayed(self, *kind: bool) -> dict[str, Tensor] | None:
        """The step as a graph: the first of a kind runs as it is, the second is captured; None where that failed."""
        if kind not in self._captured:
            self._captured[kind] = None
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                found = self._update(*kind)
            torch.cuda.current_stream().wait_stream(aside)
            return found
        if self._captured[kind] is None:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    found = self._update(*kind)
            except RuntimeError as error:
                log.warning("no graph of a step, so steps are launched one by one: %s", str(error).splitlines()[0])
                torch.cuda.synchronize()
                self.graphs = False
                return None
            self._captured[kind] = graph, found
        graph, found = self._captured[kind]
        graph.replay()
        return found

    @torch.no_grad()
    def evaluate(
        self, split: str, *, length: int, most: int | None = None, round_weights: bool = True, exact: bool = False
    ) -> dict[str, float]:
        """Bits of every token of a split's files, in pieces of at most `length` tokens; `most` pieces, spread over them.

        exact: in float32 throughout, as a CPU evaluates in any case.
        """
        cut = pieces(self.data[split], length)
        cut = cut[:: -(-len(cut) // most)] if most else cut
        p, sums, model = self.prepared(round_weights), [0.0] * 4, self.model
        if exact:
            p, model = rounded(self.config, self.params) if round_weights else self.params, Model(self.config)
            torch.set_float32_matmul_precision("highest")
        # a GPU reads eight at once, filled up to one length: what follows a text changes nothing before it
        at_once, size = (8, -(-length // self.config.window) * self.config.window) if self.device.type == "cuda" else (1, 0)
        for at in range(0, len(cut), at_once):
            group = cut[at : at + at_once]
            tokens = np.full((len(group), 1 + max(size, *(len(ids) - 1 for ids in group))), EOS)
            for row, ids in zip(tokens, group, strict=True):
                row[: len(ids)] = ids
            told = torch.tensor([len(ids) - 1 for ids in group], device=self.device)[:, None]
            ids = torch.from_numpy(tokens).to(self.device)
            result = model(p, ids[:, :-1], topk=self.config.index_topk, draft=ids.shape[1] > 2)
            place = torch.arange(ids.shape[1] - 1, device=self.device)
            nats = torch.nn.functional.cross_entropy(result.logits.mT, ids[:, 1:], reduction="none")
            found = [(nats * (place < told)).sum(dtype=torch.float64), told.sum()]
            if result.draft_logits is not None:
                same = result.draft_logits.argmax(-1) == result.logits[:, 1:].argmax(-1)
                found += [(same & (place[1:] < told)).sum(), (told - 1).sum()]
            sums = [old + float(new) for old, new in zip(sums, [*found, 0, 0], strict=False)]
        torch.set_float32_matmul_precision("high")
        bits = sums[0] / sums[1] / math.log(2)
        return {"bits_per_token": bits, "tokens": int(sums[1]), "draft_agrees": sums[2] / max(1.0, sums[3])}

    def save(self) -> None:
        state = {
            "step": self.step, "best": self.best, "seconds": self.seconds, "recipe": dataclasses.asdict(self.recipe),
            "config": repr(self.config), "params": self.params, "optimiser": self.optimiser.state_dict(),
        }  # fmt: skip
        scratch = self.folder / "state.pt.new"
        torch.save(state, scratch)
        scratch.rename(self.folder / "state.pt")

    def _load(self) -> None:
        state = torch.load(self.folder / "state.pt", map_location=self.device, weights_only=True)
        here = dataclasses.asdict(self.recipe)
        if self.recipe.steps == 0 and here | {"steps": state["recipe"]["steps"]} == state["recipe"]:
            here = state["recipe"]
            self.recipe = Recipe(**here)
        for what, own in (("config", repr(self.config)), ("recipe", here)):
            if state[what] != own:
                raise ValueError(f"train: {self.folder} must hold a run of this {what}, got {state[what]}")
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(state["params"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.best, self.seconds = state["step"], state["best"], state["seconds"]

    def _settle(self, seconds: float, planned: float) -> None:
        """Fix the number of steps: TIMED took so long, and `planned` is left for the rest."""
        more = int(planned * (1 - SPARE) * len(TIMED) / seconds)
        self.recipe = dataclasses.replace(self.recipe, steps=self.step + max(1, more))

    def go(
        self,
        *,
        until: int | None = None,
        seconds: float = float("inf"),
        planned: float | None = None,
        log_every: int = 20,
        eval_every: int = 160,
        say: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> bool:
        """Train to the end, to a step, or for so long; the state is saved. Whether the run is over.

        planned: the seconds in which a run whose steps are 0 is to end.
        """
        if self.recipe.steps == 0 and not planned:
            raise ValueError("train: planned must be given where steps is 0, got none")
        began, mark, marked, timed = time.monotonic(), time.monotonic(), self.step, time.monotonic()
        with (self.folder / "log.jsonl").open("a") as kept:
            while self.step < min(self.recipe.steps or math.inf, until or math.inf) and time.monotonic() - began < seconds:
                found = self.train_step()
                row: dict[str, Any] = {}
                if not self.recipe.steps and self.step in (TIMED.start, TIMED.stop):
                    # this waits for the device
                    float(found["told"])
                    spent, timed = time.monotonic() - timed, time.monotonic()
                    if self.step == TIMED.stop:
                        self._settle(spent, (planned or 0.0) - (timed - began))
                        row["steps"] = self.recipe.steps
                over = self.step == self.recipe.steps
                if self.step % log_every == 0 or over:
                    row |= {"step": self.step, "lr": self.recipe.rate(self.step - 1)}
                    row |= {name: round(float(value), 5) for name, value in found.items()}
                    now = time.monotonic()
                    each = max(1e-9, now - mark) / max(1, self.step - marked)
                    row["tokens_per_s"] = round(self.recipe.rows * self.recipe.length / each)
                    mark, marked = now, self.step
                if self.step % eval_every == 0 or over:
                    valid = self.evaluate("valid", length=self.recipe.length)
                    row |= {"step": self.step} | {f"valid_{name}": value for name, value in valid.items()}
                    if valid["bits_per_token"] < self.best:
                        self.best = valid["bits_per_token"]
                        torch.save({n: p.detach() for n, p in self.params.items()}, self.folder / "best.pt")
                    mark, marked = time.monotonic(), self.step
                if row:
                    kept.write(json.dumps(row) + "\n")
                    kept.flush()
                    say(row)
        self.seconds += time.monotonic() - began
        self.save()
        return self.step == self.recipe.steps
