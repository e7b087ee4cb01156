"""Seeded weights in the checkpoint's formats, and routes: what tests and benchmarks of products and experts share."""

import math

import torch

from deepdecode.ops.quant import E4M3, E8M0, Weight
from deepdecode.ops.table import MoeWeights


def random_weight(*shape: int, kind: str, device: torch.device | str, generator: torch.Generator) -> Weight:
    """[..., out, in] of about 1 / sqrt(in), made from random codes: fast at any size, and every code occurs but NaN.

    kind: "fp8", "fp8_f32" (float32 scales), "fp4", "bf16" or "f32".
    """
    *lead, out, width = shape
    if kind in ("bf16", "f32"):
        values = torch.randn(*shape, generator=generator, device=device) / math.sqrt(width)
        return Weight(values.bfloat16() if kind == "bf16" else values)
    # the root mean square of uniform codes: 112 for E4M3 without NaN, 2.6 for E2M1
    power = round(-math.log2(math.sqrt(width) * (2.6 if kind == "fp4" else 112)))

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, device=device, dtype=torch.uint8)

    if kind == "fp4":
        scale = integers(126 + power, 129 + power, *lead, out, width // 32)
        return Weight(integers(0, 256, *lead, out, width // 2), scale.view(E8M0))
    codes = integers(0, 256, *shape)
    codes = torch.where((codes & 0x7F) == 0x7F, codes ^ 1, codes).view(E4M3)
    blocks = (*lead, -(-out // 128), -(-width // 128))
    scale = integers(126 + power, 129 + power, *blocks)
    if kind == "fp8":
        return Weight(codes, scale.view(E8M0))
    return Weight(codes, torch.exp2(scale.float() - 127) * 1.1)


def random_experts(
    E: int,
    C: int,
    I: int,
    shared_I: int,
    *,
    kind: str = "fp4",
    shared: str = "fp8",
    first: int = 0,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> MoeWeights:
    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape: int, kind: str) -> Weight:
        return random_weight(*shape, kind=kind, device=device, generator=generator)

    router = torch.zeros(0, C, device=device)
    return MoeWeights(
        router,
        None,
        None,
        make(E, 2 * I, C, kind=kind),
        make(E, C, I, kind=kind),
        make(2 * shared_I, C, kind=shared),
        make(C, shared_I, kind=shared),
        first,
    )


def random_routes(T: int, experts: int, top_k: int, *, device: torch.device | str = "cpu", seed: int = 0):
    """Distinct experts of each token, all as likely: ids int32 [T, top_k], and weights that sum to 1.5."""
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.rand(T, experts, generator=generator, device=device).topk(top_k).indices.int()
    weights = torch.rand(T, top_k, generator=generator, device=device) + 0.1
    return ids, weights / weights.sum(-1, keepdim=True) * 1.5
