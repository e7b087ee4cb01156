"""A training run's parameters: made from a seed, taken from a checkpoint, quantised as a checkpoint is, and written as one.

Names are the checkpoint's, but that the experts of a layer stand in one stack: `layers.0.ffn.experts.w1.weight` [E, I, C].
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch

from deepdecode.checkpoint.layout import Spec, packing, scale_name, tensor_specs
from deepdecode.config import ModelConfig
from deepdecode.ops.quant import Weight, dequantize, quantize_fp4, quantize_fp8

Tensor = torch.Tensor
Params = dict[str, Tensor]
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(w[123]\.weight)$")


def specs(config: ModelConfig) -> dict[str, Spec]:
    """Names and shapes of the parameters, the MTP block's among them."""
    found: dict[str, Spec] = {}
    for name, spec in tensor_specs(config, mtp=True).items():
        if match := _EXPERT.match(name):
            found[f"{match[1]}.{match[3]}"] = Spec((config.num_experts, *spec.shape), spec.kind)
        else:
            found[name] = spec
    return found


def initial(config: ModelConfig, seed: int) -> Params:
    """Parameters to start from, float32.

    Products start with a standard deviation of in ** -0.5, those that write into the streams smaller by the root of twice the
    depth. The hyper-connections start as a residual network: each sublayer reads the mean of the streams (gates of a quarter),
    writes to all of them (gates of one) and lets each stream go on as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * config.num_layers) ** -0.5
    made = {}
    for name, spec in specs(config).items():
        if spec.kind == "ids":
            # distinct experts for each token
            order = torch.rand(spec.shape[0], config.num_experts, generator=generator)
            made[name] = order.topk(spec.shape[1]).indices.int()
            continue
        normal = torch.randn(spec.shape, generator=generator)
        if name.endswith("norm.weight"):
            made[name] = torch.ones(spec.shape)
        elif name.endswith(("_scale",)):
            # what the streams hold moves the gates little at first
            made[name] = torch.full(spec.shape, 0.01)
        elif name.endswith("_base"):
            made[name] = _gates(spec.shape[0])
        elif name.endswith((".bias", "attn_sink", ".ape")):
            made[name] = torch.zeros(spec.shape)
        elif name == "embed.weight":
            made[name] = normal
        else:
            made[name] = normal * spec.shape[-1] ** -0.5 * (depth if name.endswith(("wo_b.weight", "w2.weight")) else 1.0)
    return made


def _gates(rows: int) -> Tensor:
    base = torch.zeros(rows)
    # sigmoid(-1.1) is a quarter: the mean of four streams
    base[:4] = -1.1
    if rows > 4:
        # twice the sigmoid of 0 is one; a softmax of 4 against 0 keeps 95 % of a stream where it is
        base[8:] = 4.0 * torch.eye(4).flatten()
    return base


def from_tensors(config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> Params:
    """Parameters from a checkpoint's tensors, FP8 and FP4 widened; scales must come after their weights."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors:
        weight = name.removesuffix(".scale") + ".weight"
        if name.endswith(".scale") and weight in found:
            codes = found[weight]
            found[weight] = dequantize(Weight(codes.view(torch.uint8) if codes.dtype == torch.int8 else codes, tensor))
        else:
            found[name] = tensor
    made = {}
    for name, spec in specs(config).items():
        if name in found:
            made[name] = found[name]
        else:
            head, tail = re.fullmatch(r"(.*\.experts)\.(w[123]\.weight)", name).groups()
            made[name] = torch.stack([found[f"{head}.{e}.{tail}"] for e in range(config.num_experts)])
        assert made[name].shape == spec.shape, name
    return made


def to_tensors(config: ModelConfig, params: Params) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors, packed as the config says: FP8 and FP4 with their scales, the rest bfloat16 or float32."""
    for name, spec in tensor_specs(config, mtp=True).items():
        match = _EXPERT.match(name)
        value = params[f"{match[1]}.{match[3]}"][int(match[2])] if match else params[name]
        value, how = value.detach().cpu(), packing(spec, config.expert_dtype)
        if how:
            weight = quantize_fp4(value) if how == "fp4" else quantize_fp8(value)
            assert weight.scale is not None
            yield name, weight.data.view(torch.int8) if how == "fp4" else weight.data
            yield scale_name(name), weight.scale
        elif spec.kind == "ids":
            yield name, value.long()
        else:
            yield name, value.float() if spec.kind == "f32" or config.expert_dtype == "float" else value.bfloat16()


def rounded(config: ModelConfig, params: Params) -> Params:
    """What the parameters are once they are exported, in float32; the gradient passes through as if nothing had happened."""
    alike = defaultdict[tuple[str, torch.Size], list[str]](list)
    for name, spec in specs(config).items():
        how = packing(spec, config.expert_dtype) or ("bf16" if spec.kind == "plain" and config.expert_dtype != "float" else "")
        if how:
            alike[how, params[name].shape].append(name)
    made = dict(params)
    for (how, _), names in alike.items():
        with torch.no_grad():
            # equal shapes at once: each takes some thirty launches
            stack = torch.stack([params[name].detach() for name in names])
            stored = _STORED[how](stack)
        for name, value in zip(names, stored, strict=True):
            made[name] = params[name] + (value - params[name]).detach()
    return made


_STORED: dict[str, Callable[[Tensor], Tensor]] = {
    "fp4": lambda w: dequantize(quantize_fp4(w)),
    "fp8": lambda w: dequantize(quantize_fp8(w)),
    "bf16": lambda w: w.bfloat16().float(),
}


def nbytes(config: ModelConfig) -> int:
    """Bytes of the exported tensors."""
    size = 0
    for spec in tensor_specs(config, mtp=True).values():
        count, how = torch.Size(spec.shape).numel(), packing(spec, config.expert_dtype)
        if how == "fp4":
            size += count // 2 + count // 32
        elif how == "fp8":
            size += count + -(-spec.shape[0] // 128) * -(-spec.shape[1] // 128)
        else:
            size += count * {"ids": 8, "f32": 4, "plain": 4 if config.expert_dtype == "float" else 2}[spec.kind]
    return size
