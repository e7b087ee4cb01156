"""Seeded decode steps for the fused glue: a layer's projections, caches that hold rows already, and where each token stands."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepdecode.config import ModelConfig
from deepdecode.kvcache import KVCache
from deepdecode.ops.quant import Weight
from deepdecode.ops.rope import frequencies
from deepdecode.ops.table import AttnInputs, AttnWeights, CompressorWeights, LayerCache, Step

Tensor = torch.Tensor


@dataclass(frozen=True)
class PrepareInputs:
    """Arguments of `attn_prepare` by their names."""

    q: Tensor
    index_q: Tensor | None
    inputs: AttnInputs
    weights: AttnWeights
    cache: LayerCache
    step: Step
    freqs: Tensor
    config: ModelConfig
    ratio: int

    def args(self) -> tuple:
        return tuple(vars(self).values())

    def again(self) -> "PrepareInputs":
        """The same with caches of its own."""
        return replace(self, cache=copy.deepcopy(self.cache))


def prepare_inputs(
    positions: list[int],
    ratio: int,
    *,
    H: int = 64,
    fmt: str = "fp8_584",
    dtype: torch.dtype = torch.bfloat16,
    config: ModelConfig | None = None,
    padded: tuple[int, ...] = (),
    scale: float = 1.0,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PrepareInputs:
    """One token of each of len(positions) sequences, with states as if every earlier token had been there.

    padded: rows with slot -1. scale: of every product, so that codes reach both ends of their range.
    """
    config = config or ModelConfig()
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, to: torch.dtype = torch.float32) -> Tensor:
        return (scale * torch.randn(*shape, generator=g, device=device)).to(to)

    T, D, heads, d = len(positions), config.head_dim, config.index_heads, config.index_head_dim
    one = ModelConfig(**{**vars(config), "compress_ratios": (ratio,), "num_layers": 1})
    caches = KVCache(one, slots=T + 1, max_len=max(positions) + 1, fmt=fmt, device=device)
    slots = [caches.acquire() for _ in range(T)][::-1]
    for slot, position in zip(slots, positions, strict=True):
        caches.reserve(slot, position + 1)
    at = torch.tensor([-1 if i in padded else slot for i, slot in enumerate(slots)], dtype=torch.int32, device=device)
    step = caches.step(
        torch.zeros(T, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
        at,
        prefill=False,
    )
    cache = caches.layers[0]
    for state in (cache.state, cache.index_state):
        if state is not None:
            state.kv.copy_(normal(*state.kv.shape))
            state.score.copy_(normal(*state.score.shape))
    width, index_width = D * (2 if ratio == 4 else 1), 2 * d

    def compressor(width: int, d: int) -> CompressorWeights:
        ape = torch.randn(ratio, width, generator=g, device=device)
        return CompressorWeights(ape, (1 + 0.1 * normal(d) / scale).to(dtype))

    none = Weight(torch.empty(1, 1, dtype=dtype, device=device))
    weights = AttnWeights(
        q_kv=none, rest=None, q_norm=none.data[0], kv_norm=(1 + 0.1 * normal(D) / scale).to(dtype), q_b=none,
        sink=torch.zeros(H, device=device), wo_a=none, wo_b=none,
        compressor=compressor(width, D) if ratio else None,
        index_compressor=compressor(index_width, d) if ratio == 4 else None,
    )  # fmt: skip
    # as one product gives them: every part a view with the strides of the whole
    sizes = {0: [], 4: [width, width, index_width, index_width, heads], 128: [width, width]}[ratio]
    parts: list[Any] = list(normal(T, sum(sizes)).split(sizes, dim=-1)) if ratio else []
    parts += [None] * (5 - len(parts))
    inputs = AttnInputs(none.data, normal(T, D, to=dtype), *parts)
    q = normal(T, H * D + (heads * d if ratio == 4 else 0), to=dtype)
    index_q = q[:, H * D :].unflatten(1, (heads, d)) if ratio == 4 else None
    freqs = frequencies(config, ratio).to(device)
    return PrepareInputs(q[:, : H * D].unflatten(1, (H, D)), index_q, inputs, weights, cache, step, freqs, config, ratio)


def contiguous(inputs: AttnInputs) -> AttnInputs:
    """The same, each part by itself: what the references take."""
    parts: dict[str, Any] = {name: None if t is None else t.contiguous() for name, t in vars(inputs).items()}
    return AttnInputs(**parts)
