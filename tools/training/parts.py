"""What the forward is made of, as a table: REFERENCE in torch on any device and type, `fused()` the kernels of a GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deepdecode.ops._check import wide
from deepdecode.ops.mhc import mhc_post_ref, mix_ref, sinkhorn_ref
from deepdecode.ops.moe import swiglu_ref
from deepdecode.ops.norm import head_norm_ref

Tensor = torch.Tensor


@dataclass(frozen=True)
class Parts:
    """Each as its reference below; products are the forward's own, but those of attention, mixing and vocabulary."""

    rows: Callable[[Tensor, Tensor | None, tuple[Tensor, Tensor] | None, float | None, bool], Tensor]
    pool: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    index_sum: Callable[[Tensor, Tensor], Tensor]
    attend: Callable[
        [Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, int, int],
        tuple[Tensor, Tensor],
    ]
    glu: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    read: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, ...]]
    sinkhorn: Callable[[Tensor, int, float], Tensor]
    write: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    tell: Callable[[Tensor, Tensor, Tensor, int], Tensor]


def rows(
    x: Tensor, weight: Tensor | None, turns: tuple[Tensor, Tensor] | None, eps: float | None, inverse: bool = False
) -> Tensor:
    """x [B, L, ..., D]: normed if there is an eps, times the weight if there is one, its last channels rotated if there are
    turns, cosines and sines [L, R / 2]."""
    y = wide(x)
    if eps is not None:
        y = head_norm_ref(y, eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if turns is not None:
        cos, sin = (t.view(t.shape[0], *[1] * (x.dim() - 3), t.shape[1]) for t in turns)
        if inverse:
            sin = -sin
        R = 2 * cos.shape[-1]
        still, even, odd = y[..., :-R], y[..., -R::2], y[..., -R + 1 :: 2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
        y = torch.cat((still, turned), dim=-1)
    return y.to(x.dtype)


def pool(kv: Tensor, score: Tensor, ape: Tensor, ratio: int) -> Tensor:
    """[B, S // ratio, d] of kv and score [B, S, width]: the softmax over each block's scores, channel by channel.

    Ratio 4: width is 2 d, and the block before speaks through the first half of its channels; before the first there is none.
    """
    N, dtype, inner = kv.shape[1] // ratio, kv.dtype, wide(kv).dtype
    kv, score = (t[:, : N * ratio].to(inner).unflatten(1, (N, ratio)) for t in (kv, score))
    score = score + ape.to(inner)
    if ratio == 4:
        d = kv.shape[-1] // 2
        before = F.pad(kv[:, :-1, :, :d], (0, 0, 0, 0, 1, 0))
        before_score = F.pad(score[:, :-1, :, :d], (0, 0, 0, 0, 1, 0), value=float("-inf"))
        kv, score = torch.cat((before, kv[..., d:]), dim=2), torch.cat((before_score, score[..., d:]), dim=2)
    return (score.softmax(dim=2) * kv).sum(dim=2).to(dtype)


def index_sum(dots: Tensor, weights: Tensor) -> Tensor:
    """[B, S, N]: dots [B, S * H, N], negative ones as 0, times weights [B, S, H], added up over heads."""
    return (wide(dots).unflatten(1, (-1, weights.shape[-1])).relu() * weights[..., None]).sum(dim=2)


def _logits(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    """float32 [..., heads and queries, rows]: products of bfloat16 numbers, which TF32 holds exactly."""
    return (wide(q) @ wide(rows).mT) * scale


def attend(
    q: Tensor,
    kv: Tensor,
    entries: Tensor | None,
    sink: Tensor,
    scores: Tensor | None,
    chosen: Tensor | None,
    W: int,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    """One softmax over the window of W rows of kv, a sink, and the entries that are done and chosen.

    q [B, S, H, D]; kv [B, S, D]; entries [B, N, D] or None; sink [H]; chosen bool [B, S, N], or None for all.
    Returns the output [B, S, H, D], and for the indexer's scores [B, S, N] its loss, summed over tokens (0 without them).
    """
    B, S, H, D = q.shape
    # by chunks of queries, which see their own chunk and the one before
    chunks, device = -(-S // W), q.device
    padded = F.pad(kv, (0, 0, W, chunks * W - S)).unflatten(1, (chunks + 1, W))
    near = torch.cat((padded[:, :-1], padded[:, 1:]), dim=2)  # [B, chunks, 2W, D]
    q_chunks = F.pad(q, (0, 0, 0, 0, 0, chunks * W - S)).unflatten(1, (chunks, W))  # [B, chunks, W, H, D]
    logits = _logits(q_chunks.flatten(2, 3), near, D**-0.5).unflatten(2, (W, H))  # [B, chunks, W, H, 2W]
    query, key = torch.arange(W, device=device)[:, None], torch.arange(2 * W, device=device) - W
    seen = (key <= query) & (key > query - W)
    seen = seen & ((key >= 0) | (torch.arange(chunks, device=device) > 0)[:, None, None])  # [chunks, W, 2W]
    logits = logits.masked_fill(~seen[None, :, :, None], float("-inf")).flatten(1, 2)[:, :S]
    sinks, loss, out = sink.to(logits.dtype).view(1, 1, H, 1).expand(B, S, H, 1), logits.new_zeros(()), 0
    every = [logits, sinks]
    if entries is not None:
        N = entries.shape[1]
        far = _logits(q.flatten(1, 2), entries, D**-0.5).unflatten(1, (S, H))  # [B, S, H, N]
        visible = torch.arange(N, device=device) < ((torch.arange(S, device=device) + 1) // ratio)[:, None]  # [S, N]
        far = far.masked_fill(~visible[None, :, None], float("-inf"))
        if scores is not None:
            loss = index_loss(scores, torch.cat((*every, far), dim=-1).detach(), visible)
        every.append(far if chosen is None else far.masked_fill(~chosen[:, :, None], float("-inf")))
    weights = torch.cat(every, dim=-1).softmax(dim=-1)
    if entries is not None:
        out = (weights[..., 2 * W + 1 :].to(q.dtype).flatten(1, 2) @ entries).unflatten(1, (S, H))
    near_weights = F.pad(weights[..., : 2 * W].to(q.dtype), (0, 0, 0, 0, 0, chunks * W - S)).unflatten(1, (chunks, W))
    return out + (near_weights.flatten(2, 3) @ near).unflatten(2, (W, H)).flatten(1, 2)[:, :S], loss


def index_loss(scores: Tensor, logits: Tensor, visible: Tensor) -> Tensor:
    """KL(attention || indexer) over the visible entries, summed over the tokens that see one.

    scores [B, S, N]; logits [B, S, H, anything, then N]: all that the softmax runs over; visible [S, N].
    """
    N = scores.shape[-1]
    target = logits.softmax(dim=-1)[..., -N:].sum(dim=2)
    target = target / target.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    some = visible.any(dim=-1)
    # a row that sees nothing keeps its scores: a softmax over nothing has no gradient but NaN
    told = scores.masked_fill(~visible & some[:, None], float("-inf")).log_softmax(dim=-1).masked_fill(~visible, 0.0)
    return (torch.xlogy(target, target) - target * told).masked_fill(~visible, 0.0).sum()


def glu(gate: Tensor, up: Tensor, share: Tensor | None, limit: float) -> Tensor:
    """Hidden units [..., I]: SwiGLU with V4's clamp, times share [...] where there is one."""
    hidden = swiglu_ref(wide(gate), wide(up), limit)
    return (hidden if share is None else hidden * share[..., None]).to(gate.dtype)


def read(
    flat: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, ...]:
    """From the streams [T, 4, C]: a sublayer's input [T, C], normed; gates of the write [T, 4]; Sinkhorn's logits [T, 4, 4]."""
    inner = wide(flat)
    fn, base, scale = (t.to(inner.dtype) for t in (fn, base, scale))
    m = mix_ref(inner, fn, eps)
    gates = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + hc_eps
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    x = torch.einsum("tj,tjc->tc", gates, inner)
    return rows(x, weight, None, eps).to(flat.dtype), post, (m[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4))


def write(y: Tensor, flat: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams [T, 4, C] with a sublayer's output y [T, C] in them."""
    return mhc_post_ref(wide(y), wide(flat), post, comb).to(flat.dtype)


def tell(x: Tensor, head: Tensor, targets: Tensor, count: int) -> Tensor:
    """Nats a token: x [T, C], targets int64 [T], of which -1 counts for nothing; `count` do count."""
    return F.cross_entropy(wide(x) @ wide(head).mT, targets, ignore_index=-1, reduction="sum") / count


REFERENCE = Parts(rows, pool, index_sum, attend, glu, read, sinkhorn_ref, write, tell)


def fused() -> Parts:
    """The kernels: lengths must be multiples of the window, heads and windows powers of two."""
    # torch alone is enough for everything else
    from training.kernels import attend, glu, pool, rows, streams, tell
    from training.sinkhorn import sinkhorn

    return Parts(
        rows.rows, pool.pool, attend.index_sum, attend.attend, glu.glu, streams.read, sinkhorn, streams.write, tell.tell
    )
