"""A run: steps, evaluations, and a state from which it goes on exactly where it was."""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from deepdecode.config import ModelConfig
from training.data import Tokens, batch, pieces
from training.forward import Model, Result
from training.optim import Optimiser
from training.weights import initial, rounded, specs

Tensor = torch.Tensor


@dataclass(frozen=True)
class Recipe:
    """What a run is; with the data and the seed it says every number of it.

    steps, warmup: the learning rate rises to `lr` over `warmup` steps, stays, and falls to 0 over the last `decay` of them.
    rows, length: sequences of a step and their tokens; in the last `long_from` of the steps half as many, twice as long.
    dense_until: until this part of the steps every visible entry is attended, while the indexer learns to choose.
    round_from: from this part on the forward sees the weights as they will be exported.
    draft_weight: of the MTP block's loss. bias_rate: what a step moves the bias of an expert that is taken too often, or too
    seldom (no auxiliary loss). clip: the largest norm of the gradient.
    """

    steps: int = 3000
    rows: int = 16
    length: int = 2048
    lr: float = 2e-3
    warmup: int = 100
    decay: float = 0.5
    weight_decay: float = 0.1
    dropout: float = 0.1
    optimiser: str = "muon"
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    dense_until: float = 0.2
    long_from: float = 0.8
    round_from: float = 0.5
    draft_weight: float = 0.2
    bias_rate: float = 1e-3
    seed: int = 4

    def __post_init__(self) -> None:
        if self.optimiser not in ("muon", "adamw"):
            raise ValueError(f"train: optimiser must be muon or adamw, got {self.optimiser}")
        if min(self.steps, self.rows, self.length) < 1:
            raise ValueError(f"train: steps, rows and length must be >= 1, got {self.steps}, {self.rows} and {self.length}")

    def rate(self, step: int) -> float:
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup), left)

    def shape(self, step: int) -> tuple[int, int]:
        long = step >= self.long_from * self.steps
        return (max(1, self.rows // 2), 2 * self.length) if long else (self.rows, self.length)


def losses(result: Result, tokens: Tensor) -> dict[str, Tensor]:
    """tokens [B, S + 1]: what was read, and after it what was to be told. In nats."""
    told = F.cross_entropy(result.logits.flatten(0, 1), tokens[:, 1:].flatten())
    found = {"told": told, "kl": result.kl}
    if result.draft is not None:
        found["draft"] = F.cross_entropy(result.draft.flatten(0, 1), tokens[:, 2:].flatten())
    return found


class Run:
    """One run in its folder: state.pt (to go on from), best.pt (the parameters that told `valid` best), log.jsonl."""

    def __init__(
        self, folder: Path, config: ModelConfig, recipe: Recipe, data: dict[str, Tokens], device: torch.device, compiled: bool
    ) -> None:
        self.folder, self.config, self.recipe, self.data, self.device = folder, config, recipe, data, device
        # TF32 holds products of bfloat16 numbers exactly, and what is float32 by nature here is small
        torch.set_float32_matmul_precision("high")
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model, self.plain = Model(config, compiled=compiled), Model(config)
        self.specs = specs(config)
        self.params = {name: p.to(device) for name, p in initial(config, recipe.seed).items()}
        for name, p in self.params.items():
            p.requires_grad_(self.specs[name].kind != "ids" and not name.endswith(".bias"))
        self.optimiser = Optimiser(self.params, self.specs, recipe.optimiser, betas=recipe.betas)
        self.step, self.best, self.seconds = 0, float("inf"), 0.0
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
        rows, length = r.shape(step)
        tokens = torch.from_numpy(batch(self.data["train"], step, r.seed, rows, length)).to(self.device, non_blocking=True)
        # dropout's draws, the same when a run goes on from here
        torch.manual_seed(r.seed * 1_000_003 + step)
        topk = None if step < r.dense_until * r.steps else self.config.index_topk
        result = self.model(
            self.prepared(step >= r.round_from * r.steps),
            tokens[:, :-1],
            topk=topk,
            dropout=r.dropout,
            draft=r.draft_weight > 0,
        )
        found = losses(result, tokens)
        (found["told"] + r.draft_weight * found.get("draft", 0.0) + found["kl"]).backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in self.params.values() if p.grad is not None], r.clip)
        self.optimiser.step(r.rate(step), r.weight_decay)
        loads = torch.stack(list(result.loads.values()))
        with torch.no_grad():
            for name, load in result.loads.items():
                self.params[name] += r.bias_rate * torch.sign(load.mean() - load)
        self.step += 1
        busiest = (loads.amax(dim=1) / loads.mean(dim=1)).max()
        return {name: value.detach() for name, value in found.items()} | {"norm": norm, "busiest": busiest}

    @torch.no_grad()
    def evaluate(self, split: str, *, length: int, most: int | None = None, round_weights: bool = True) -> dict[str, float]:
        """Bits of every token of a split's files, in pieces of at most `length` tokens; `most` pieces, spread over them."""
        cut = pieces(self.data[split], length)
        cut = cut[:: -(-len(cut) // most)] if most else cut
        p = self.prepared(round_weights)
        bits, drafted, agreed, told = 0.0, 0.0, 0, 0
        for piece in cut:
            tokens = torch.from_numpy(piece)[None].to(self.device)
            result = self.plain(p, tokens[:, :-1], topk=self.config.index_topk, draft=tokens.shape[1] > 2)
            count = tokens.shape[1] - 1
            bits += float(losses(Result(result.logits, None, result.kl, {}, {}), tokens)["told"]) * count / math.log(2)
            told += count
            if result.draft is not None:
                drafted += count - 1
                agreed += int((result.draft[0].argmax(-1) == result.logits[0, 1:].argmax(-1)).sum())
        return {"bits_per_token": bits / told, "tokens": told, "draft_agrees": agreed / max(1.0, drafted)}

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
        for what, here in (("config", repr(self.config)), ("recipe", dataclasses.asdict(self.recipe))):
            if state[what] != here:
                raise ValueError(f"train: {self.folder} must hold a run of this {what}, got {state[what]}")
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(state["params"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.best, self.seconds = state["step"], state["best"], state["seconds"]

    def go(
        self,
        *,
        until: int | None = None,
        seconds: float = float("inf"),
        log_every: int = 20,
        eval_every: int = 250,
        say: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> bool:
        """Train to the end, to a step, or for so long; the state is saved. Whether the run is over."""
        end = min(self.recipe.steps, until or self.recipe.steps)
        began, mark, marked = time.monotonic(), time.monotonic(), self.step
        with (self.folder / "log.jsonl").open("a") as log:
            while self.step < end and time.monotonic() - began < seconds:
                found = self.train_step()
                row: dict[str, Any] = {}
                if self.step % log_every == 0 or self.step == end:
                    row = {"step": self.step, "lr": self.recipe.rate(self.step - 1)}
                    # this waits for the device
                    row |= {name: round(float(value), 5) for name, value in found.items()}
                    now, (rows, length) = time.monotonic(), self.recipe.shape(self.step - 1)
                    row["tokens_per_s"] = round(rows * length * (self.step - marked) / (now - mark))
                    mark, marked = now, self.step
                if self.step % eval_every == 0 or self.step == self.recipe.steps:
                    valid = self.evaluate("valid", length=2 * self.recipe.length)
                    row |= {"step": self.step} | {f"valid_{name}": value for name, value in valid.items()}
                    if valid["bits_per_token"] < self.best:
                        self.best = valid["bits_per_token"]
                        torch.save({n: p.detach() for n, p in self.params.items()}, self.folder / "best.pt")
                    mark, marked = time.monotonic(), self.step
                if row:
                    log.write(json.dumps(row) + "\n")
                    log.flush()
                    say(row)
        self.seconds += time.monotonic() - began
        self.save()
        return self.step >= self.recipe.steps
