"""E4M3, E2M1 and E8M0 codes, their scales, and weights as they are stored."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Weight:
    """A matrix [..., out, in] as the checkpoint stores it. Leading dimensions stack experts.

    float8_e4m3fn with `scale` [..., ceil(out / 128), ceil(in / 128)]: FP8, the scale float8_e8m0fnu or float32 (Flash-Base).
    uint8 [..., out, in / 2] with `scale` float8_e8m0fnu [..., out, in / 32]: FP4 E2M1, low nibble = even column.
    bfloat16, float32 or float64 with `scale` None: plain.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
