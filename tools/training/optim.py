"""Muon for the matrices, AdamW for the rest, one learning rate for both.

Muon: momentum, then the nearest orthogonal matrix to it, near enough, by five Newton-Schulz steps; scaled so that an update has
the root mean square that AdamW's has, 0.2 of the learning rate. Rates and counts are tensors, so that a step can be replayed.
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
        self.state = {name: torch.zeros_like(p) for name, p in params.items()}

    def step(self, grads: dict[str, Tensor], lr: Tensor, weight_decay: float) -> None:
        shapes = defaultdict[torch.Size, list[str]](list)
        for name, p in self.params.items():
            shapes[p.shape[-2:]].append(name)
        torch._foreach_lerp_(list(self.state.values()), [grads[name] for name in self.params], 1 - self.momentum)
        torch._foreach_mul_(list(self.params.values()), 1 - lr * weight_decay)
        for shape, names in shapes.items():
            # Nesterov: the gradient once more, as if the momentum had already moved
            each = [grads[name].lerp(self.state[name], self.momentum).reshape(-1, *shape) for name in names]
            stack = torch.cat(each)
            update = orthogonal(stack.bfloat16() if stack.is_cuda else stack).float() * (-RMS * max(shape) ** 0.5 * lr)
            own = [u.view_as(self.params[name]) for name, u in zip(names, update.split([len(e) for e in each]), strict=True)]
            torch._foreach_add_([self.params[name] for name in names], own)


class AdamW:
    """Over tensors of any shape; `decayed` are the names that weight decay shrinks."""

    def __init__(self, params: dict[str, Tensor], decayed: set[str], betas: tuple[float, float], eps: float = 1e-8) -> None:
        self.params, self.decayed, self.betas, self.eps = (
            params,
            [params[name] for name in params if name in decayed],
            betas,
            eps,
        )
        self.state = {f"{name} {what}": torch.zeros_like(p) for what in ("mean", "square") for name, p in params.items()}
        self.count = torch.zeros((), device=next(iter(params.values())).device)

    def step(self, grads: dict[str, Tensor], lr: Tensor, weight_decay: float) -> None:
        own, found, moments = list(self.params.values()), [grads[name] for name in self.params], list(self.state.values())
        means, squares = moments[: len(own)], moments[len(own) :]
        self.count += 1
        if self.decayed:
            torch._foreach_mul_(self.decayed, 1 - lr * weight_decay)
        torch._foreach_lerp_(means, found, 1 - self.betas[0])
        torch._foreach_mul_(squares, self.betas[1])
        torch._foreach_addcmul_(squares, found, found, 1 - self.betas[1])
        # both moments begin at 0, which is divided out
        root = torch._foreach_sqrt(squares)
        torch._foreach_mul_(root, (1 - self.betas[1] ** self.count).rsqrt())
        torch._foreach_add_(root, self.eps)
        update = torch._foreach_div(means, root)
        torch._foreach_mul_(update, -lr / (1 - self.betas[0] ** self.count))
        torch._foreach_add_(own, update)


class Optimiser:
    """kind "muon", or "adamw" for everything. No decay of norms, gates, sinks and positions."""

    def __init__(self, params: dict[str, Tensor], specs: dict[str, Spec], kind: str, *, betas: tuple[float, float]) -> None:
        mine = {n: p for n, p in params.items() if kind == "muon" and is_matrix(n, specs[n])}
        rest = {n: p for n, p in params.items() if n not in mine}
        self.muon = Muon(mine) if mine else None
        self.adamw = AdamW(rest, {n for n, p in rest.items() if p.dim() > 1 and specs[n].kind != "f32"}, betas)

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], lr: Tensor, weight_decay: float) -> None:
        """grads: float32, one for each parameter. lr: float32 []."""
        if self.muon:
            self.muon.step(grads, lr, weight_decay)
        self.adamw.step(grads, lr, weight_decay)

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state, "count": self.adamw.count, "muon": self.muon.state if self.muon else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own, kept in ((self.adamw.state, state["adamw"]), (self.muon.state if self.muon else {}, state["muon"])):
            for name, value in own.items():
                value.copy_(kept[name])
        self.adamw.count.copy_(state["count"])
