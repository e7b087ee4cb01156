"""The router: which experts a token takes, and with what weight."""

import torch
import torch.nn.functional as F

from deepdecode.ops._check import FLOATS, describe, expect, readable, wide

# what a row of scores that are all zero is divided by; the serving stacks' guard
SUM_FLOOR = 1e-20


def score_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(x @ weight^T)): [T, E]."""
    return F.softplus(x @ weight.mT).sqrt()


def top_ref(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """The top_k largest of each row, largest first; of equal ones the smaller index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def weigh_ref(scores: torch.Tensor, ids: torch.Tensor, routed_scale: float) -> torch.Tensor:
    """The chosen scores over their sum, times routed_scale. A bias takes no part."""
    chosen = scores.gather(1, ids)
    return chosen / (chosen.sum(-1, keepdim=True) + SUM_FLOOR) * routed_scale


def gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tid2eid: torch.Tensor | None,
    tokens: torch.Tensor,
    top_k: int,
    routed_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose top_k of E experts for each token: by score plus bias, or by token id where the layer has a table.

    Scores are sqrt(softplus(logits)); logits and scores are float32 (float64 for float64 x), since rounding them changes
    the choice. Both kinds of layer weigh by the same formula: score over the sum of the chosen scores, times routed_scale.

    Args:
        x: [T, C] bfloat16, float32 or float64.
        weight: [E, C], of any of these types.
        bias: float32 or float64 [E], added for the choice only; None on hash layers.
        tid2eid: int32 or int64 [vocabulary, top_k], the experts of each token id; None on scored layers.
        tokens: int32 or int64 [T], the input token ids; read on hash layers only.

    Returns:
        ids int32 [T, top_k], on scored layers by falling score, ties to the lower index; weights float32 (float64 for
        float64 x) [T, top_k]. T == 0 gives empty tensors. A token with a NaN gets NaN weights.

    Raises:
        ValueError: an argument has another shape, dtype or device; bias and tid2eid both given; on a CPU, a token id or
            an expert id out of range. A GPU takes the nearest valid one instead, without waiting for the host.
    """
    if x.dim() != 2 or x.shape[1] == 0 or x.dtype not in FLOATS:
        raise ValueError(f"gate: x must be [T, C] bfloat16, float32 or float64, got {describe(x)}")
    T, C = x.shape
    expect("gate: weight", weight, ("E", C), FLOATS, x.device)
    E = weight.shape[0]
    if not 1 <= top_k <= E:
        raise ValueError(f"gate: top_k must be from 1 to {E}, got {top_k}")
    if bias is not None:
        if tid2eid is not None:
            raise ValueError("gate: bias must be None where tid2eid is given, got both")
        expect("gate: bias", bias, (E,), FLOATS[1:], x.device)
    inner = wide(x)
    scores = score_ref(inner, weight.to(inner.dtype))
    if tid2eid is None:
        ids = top_ref(scores if bias is None else scores + bias.to(inner.dtype), top_k)
    else:
        expect("gate: tid2eid", tid2eid, ("V", top_k), (torch.int32, torch.int64), x.device)
        expect("gate: tokens", tokens, (T,), (torch.int32, torch.int64), x.device, contiguous=False)
        known = _in_range("token ids", tokens, len(tid2eid))
        ids = _in_range("tid2eid's expert ids", tid2eid[known].long(), E)
    return ids.int(), weigh_ref(scores, ids, routed_scale)


def _in_range(what: str, ids: torch.Tensor, size: int) -> torch.Tensor:
    """ids, proven to be in [0, size) on a CPU and forced to be on a GPU."""
    if not readable(ids):
        return ids.clamp(0, size - 1)
    bad = ids[(ids < 0) | (ids >= size)]
    if bad.numel():
        raise ValueError(f"gate: {what} must be in [0, {size}), got {int(bad[0])}")
    return ids
