"""Rung 0 of the indexer: a sequence's pages gathered and widened, a full float32 product with every head, torch's top-k."""

import torch
import torch.nn.functional as F

from deepdecode.fallback.mhc import full_product
from deepdecode.ops.rows import PagedRows
from deepdecode.ops.table import Step

Tensor = torch.Tensor


def index_logits(index_q: Tensor, index_weights: Tensor, keys: PagedRows, pages: Tensor) -> Tensor:
    """Scores [T, pages * page_size] float32 of the keys on each token's pages, those past its length included."""
    if keys.fmt != "fp8_132":
        raise ValueError(f"index_logits: keys must be fp8_132, got {keys.fmt}")
    T, P = pages.shape
    codes = keys.page_size * 128
    gathered = keys.data[pages]
    values = gathered[..., :codes].contiguous().view(torch.float8_e4m3fn).float().view(T, P * keys.page_size, 128)
    scales = gathered[..., codes : codes + keys.page_size * 4].contiguous().view(torch.float32).view(T, -1)
    scores = _products(values, index_q.float())
    scores = (F.relu(scores) * index_weights.unsqueeze(1)).sum(2)
    return scores * scales


def _products(values: Tensor, q: Tensor) -> Tensor:
    """[T, N, 128] and [T, heads, 128] -> [T, N, heads], as full as `full_product`."""
    if len(values) == 1:
        return full_product(values[0], q[0]).unsqueeze(0)
    if values.is_cuda and torch.get_float32_matmul_precision() != "highest":
        raise RuntimeError("fallback: float32 products must be full ones, got torch.set_float32_matmul_precision below highest")
    return torch.bmm(values, q.transpose(1, 2))


def index_topk(index_q: Tensor, index_weights: Tensor, keys: PagedRows, step: Step, topk: int) -> tuple[Tensor, Tensor]:
    """As the reference of this name, but for equal scores, whose order is torch's, and for the order of the indices."""
    pages = step.block_tables[step.slots.clamp(min=0)].clamp(min=0)
    scores = index_logits(index_q, index_weights, keys, pages)
    N = scores.shape[1]
    lens = step.entry_lens[4]
    seen = torch.arange(N, device=scores.device) < lens[:, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    # the best first, so that what is not visible comes last
    top = scores.topk(min(topk, N), dim=1)
    page = pages.gather(1, top.indices.div(keys.page_size, rounding_mode="floor"))
    rows = page * keys.page_size + (top.indices % keys.page_size).int()
    rows = rows.masked_fill(top.values == float("-inf"), -1)
    if topk > N:
        rows = F.pad(rows, (0, topk - N), value=-1)
    return rows, lens.clamp(max=topk)
