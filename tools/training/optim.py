"""Muon for the matrices, AdamW for the rest, one learning rate for both.

Muon: momentum, then the nearest orthogonal matrix to it, near enough, by five Newton-Schulz steps; scaled so that an update has
the root mean square that AdamW's has, 0.2 of the learning rate.
"""

from collections import defaultdict
from typing import Any

import torch

from deepdecode.checkpoint.layout import Spec

Tensor = torch.Tensor
# root mean square of AdamW's updates, which Muon's are given too
RMS = 0.2
# quintic whose iteration drives singular values from (0, 1] to near 1
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonal(m: Tensor, steps: int = 5) -> Tensor:
    """[..., rows, columns]: singular vectors kept, singular values brought to 0.7 to 1.2."""
    a, b, c = QUINTIC
    tall = m.shape[-2] > m.shape[-1]
    x = m.mT if tall else m
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def is_matrix(name: str, spec: Spec) -> bool:
    """Whether Muon takes it: products, but not the vocabulary's, the router's, or what mixes the streams."""
    if name in ("embed.weight", "head.weight") or name.endswith("gate.weight"):
        return False
    return len(spec.shape) >= 2 and spec.kind in ("plain", "dense", "expert")


class Muon:
    """Over matrices [rows, columns] and stacks of them; equal shapes are updated in one batch."""

    def __init__(self, params: dict[str, Tensor], *, momentum: float = 0.95) -> None:
        self.params, self.momentum = params, momentum
        self.buffers = {name: torch.zeros_like(p) for name, p in params.items()}

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        shapes = defaultdict[torch.Size, list[str]](list)
        for name, p in self.params.items():
            shapes[p.shape[-2:]].append(name)
        buffers, grads = list(self.buffers.values()), [p.grad for p in self.params.values()]
        torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
        torch._foreach_mul_(list(self.params.values()), 1 - lr * weight_decay)
        for shape, names in shapes.items():
            # Nesterov: the gradient once more, as if the momentum had already moved
            each = [self.params[n].grad.lerp(self.buffers[n], self.momentum).reshape(-1, *shape) for n in names]
            stack = torch.cat(each)
            update = orthogonal(stack.bfloat16() if stack.is_cuda else stack).float() * (RMS * max(shape) ** 0.5)
            for name, own in zip(names, update.split([len(e) for e in each]), strict=True):
                self.params[name].sub_(own.view_as(self.params[name]), alpha=lr)

    def state_dict(self) -> dict[str, Tensor]:
        return self.buffers

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, buffer in self.buffers.items():
            buffer.copy_(state[name])


class Optimiser:
    """kind "muon", or "adamw" for everything. No decay of norms, gates, sinks and positions."""

    def __init__(self, params: dict[str, Tensor], specs: dict[str, Spec], kind: str, *, betas: tuple[float, float]) -> None:
        self.all = {name: p for name, p in params.items() if p.requires_grad}
        mine = {n: p for n, p in self.all.items() if kind == "muon" and is_matrix(n, specs[n])}
        rest = {n: p for n, p in self.all.items() if n not in mine}
        self.muon = Muon(mine) if mine else None
        decayed = [p for n, p in rest.items() if p.dim() > 1 and specs[n].kind != "f32"]
        others = [p for n, p in rest.items() if not (p.dim() > 1 and specs[n].kind != "f32")]
        fused = all(p.is_cuda for p in rest.values())
        self.adamw = torch.optim.AdamW([{"params": decayed}, {"params": others}], lr=0.0, betas=betas, fused=fused)

    def step(self, lr: float, weight_decay: float) -> None:
        if self.muon:
            self.muon.step(lr, weight_decay)
        for group, decay in zip(self.adamw.param_groups, (weight_decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = lr, decay
        self.adamw.step()
        for p in self.all.values():
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state_dict(), "muon": self.muon.state_dict() if self.muon else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        if self.muon:
            self.muon.load_state_dict(state["muon"])
