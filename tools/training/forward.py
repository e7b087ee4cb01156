"""A forward that can be differentiated: whole sequences from position 0, no cache, the same numbers as `deepdecode.model`.

Everything is dense, so that shapes are static and every product is large: the experts are one wide product whose hidden
units are switched off where the router did not choose them, and the indexer's choice is a mask over all entries.

The indexer learns from a signal of its own, the KL divergence from its softmax to the attention's distribution over the
entries: the probabilities of all heads added up and normalised, with every visible entry attended. Its inputs are detached,
so that nothing else is moved by it, and the choice passes no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from deepdecode.config import ModelConfig
from deepdecode.ops._check import wide
from deepdecode.ops.gate import score_ref, weigh_ref
from deepdecode.ops.mhc import mhc_head_ref, mhc_post_ref, mix_ref, sinkhorn_ref
from deepdecode.ops.moe import swiglu_ref
from deepdecode.ops.norm import head_norm_ref, rms_norm_ref
from deepdecode.ops.rope import frequencies

if torch.cuda.is_available():
    from training.sinkhorn import sinkhorn
else:
    sinkhorn = sinkhorn_ref

Tensor = torch.Tensor
Params = dict[str, Tensor]
# how the names of the MTP block begin
DRAFT = "mtp.0."


@dataclass
class Result:
    """What a forward gives.

    logits: [B, S, V] float32 (float64). draft: the MTP block's [B, S - 1, V]; row i, from token i + 1, is about token i + 2.
    kl: the indexer's loss, mean over tokens and layers. loads: for each scored router, how often each expert was taken [E].
    chosen: for each ratio-4 layer, the entries attended, bool [B, S, S // 4].
    """

    logits: Tensor
    draft: Tensor | None
    kl: Tensor
    loads: dict[str, Tensor]
    chosen: dict[str, Tensor]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    inner = wide(x)
    return rms_norm_ref(inner, weight.to(inner.dtype), eps).to(x.dtype)


def turns_of(config: ModelConfig, ratio: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, R / 2] of a layer's rotations."""
    angles = torch.arange(length, device=device, dtype=dtype)[:, None] * frequencies(config, ratio).to(device, dtype)
    return angles.cos(), angles.sin()


def _turn(x: Tensor, turns: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    """Rotate the last channels of x [B, S, ..., D]; turns: cosines and sines [S, R / 2]."""
    inner = wide(x)
    cos, sin = (t.view(t.shape[0], *[1] * (x.dim() - 3), t.shape[1]) for t in turns)
    if inverse:
        sin = -sin
    R = 2 * cos.shape[-1]
    still, even, odd = inner[..., :-R], inner[..., -R::2], inner[..., -R + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((still, turned), dim=-1).to(x.dtype)


def _entries(p: Params, at: str, x: Tensor, turns: tuple[Tensor, Tensor], config: ModelConfig, ratio: int) -> Tensor:
    """The compressed entries [B, S // ratio, d] of x [B, S, C], normed, and rotated as the first token of their block."""
    N = x.shape[1] // ratio
    x = x[:, : N * ratio]
    inner = wide(x).dtype
    kv = (x @ p[at + "wkv.weight"].mT).to(inner).unflatten(1, (N, ratio))
    score = (x @ p[at + "wgate.weight"].mT).to(inner).unflatten(1, (N, ratio)) + p[at + "ape"].to(inner)
    if ratio == 4:
        # the block before speaks through the first half of its channels; before the first block there is none
        d = kv.shape[-1] // 2
        before = F.pad(kv[:, :-1, :, :d], (0, 0, 0, 0, 1, 0))
        before_score = F.pad(score[:, :-1, :, :d], (0, 0, 0, 0, 1, 0), value=float("-inf"))
        kv, score = torch.cat((before, kv[..., d:]), dim=2), torch.cat((before_score, score[..., d:]), dim=2)
    pooled = (score.softmax(dim=2) * kv).sum(dim=2).to(x.dtype)
    entries = _norm(pooled, p[at + "norm.weight"], config.norm_eps)
    cos, sin = turns
    return _turn(entries, (cos[: N * ratio : ratio], sin[: N * ratio : ratio]))


def index_scores(p: Params, x: Tensor, q_latent: Tensor, turns: tuple[Tensor, Tensor], config: ModelConfig) -> Tensor:
    """[B, S, S // 4]: what the indexer thinks of every entry, visible or not.

    Query and keys go without the Hadamard rotation, which cancels in their product.
    """
    heads, width = config.index_heads, config.index_head_dim
    q = _turn((q_latent @ p["indexer.wq_b.weight"].mT).unflatten(-1, (heads, width)), turns)
    keys = _entries(p, "indexer.compressor.", x, turns, config, 4)
    weights = wide(x @ p["indexer.weights_proj.weight"].mT) * (width**-0.5 * heads**-0.5)
    dots = q.flatten(1, 2) @ keys.mT
    return (wide(dots).unflatten(1, (-1, heads)).relu() * weights[..., None]).sum(dim=2)


def choose(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """bool, as scores [..., N]: each row's topk largest visible, the lower entry where two are equal."""
    if topk >= scores.shape[-1]:
        return visible.expand_as(scores)
    scores = scores.masked_fill(~visible, float("-inf"))
    bar = scores.topk(topk, dim=-1).values[..., -1:]
    above = scores > bar
    tied = (scores == bar) & visible
    return above | (tied & (tied.cumsum(dim=-1) <= topk - above.sum(dim=-1, keepdim=True)))


def _logits(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    """float32 [..., heads and queries, rows]: products of bfloat16 numbers, which TF32 holds exactly."""
    return (wide(q) @ wide(rows).mT) * scale


def attention(
    p: Params, x: Tensor, turns: tuple[Tensor, Tensor], config: ModelConfig, ratio: int, topk: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One layer's attention of x [B, S, C]: its output, the indexer's loss (0 without one), and the entries attended.

    topk None: every visible entry is attended, as before the indexer can be trusted.
    """
    B, S, _ = x.shape
    H, D, W, device, inner = config.num_heads, config.head_dim, config.window, x.device, wide(x).dtype
    q_latent = _norm(x @ p["wq_a.weight"].mT, p["q_norm.weight"], config.norm_eps)
    q = (q_latent @ p["wq_b.weight"].mT).unflatten(-1, (H, D))
    q = _turn(head_norm_ref(wide(q), config.norm_eps).to(x.dtype), turns)
    kv = _turn(_norm(x @ p["wkv.weight"].mT, p["kv_norm.weight"], config.norm_eps), turns)

    # the window by chunks of queries, which see their own chunk and the one before
    chunks = -(-S // W)
    padded = F.pad(kv, (0, 0, W, chunks * W - S)).unflatten(1, (chunks + 1, W))
    near = torch.cat((padded[:, :-1], padded[:, 1:]), dim=2)  # [B, chunks, 2W, D]
    q_chunks = F.pad(q, (0, 0, 0, 0, 0, chunks * W - S)).unflatten(1, (chunks, W))  # [B, chunks, W, H, D]
    logits = _logits(q_chunks.flatten(2, 3), near, D**-0.5).unflatten(2, (W, H))  # [B, chunks, W, H, 2W]
    query, key = torch.arange(W, device=device)[:, None], torch.arange(2 * W, device=device) - W
    seen = (key <= query) & (key > query - W)
    seen = seen & ((key >= 0) | (torch.arange(chunks, device=device) > 0)[:, None, None])  # [chunks, W, 2W]
    logits = logits.masked_fill(~seen[None, :, :, None], float("-inf")).flatten(1, 2)[:, :S]

    sink = p["attn_sink"].to(inner).view(1, 1, H, 1).expand(B, S, H, 1)
    kl, chosen = x.new_zeros((), dtype=inner), None
    if ratio:
        entries = _entries(p, "compressor.", x, turns, config, ratio)
        N = entries.shape[1]
        far = _logits(q.flatten(1, 2), entries, D**-0.5).unflatten(1, (S, H))  # [B, S, H, N]
        done = (torch.arange(S, device=device) + 1) // ratio
        visible = torch.arange(N, device=device) < done[:, None]  # [S, N]
        far = far.masked_fill(~visible[None, :, None], float("-inf"))
        if ratio == 4:
            scores = index_scores(p, x.detach(), q_latent.detach(), turns, config)
            kl = index_loss(scores, torch.cat((logits, sink, far), dim=-1).detach(), visible)
            chosen = choose(scores.detach(), visible, N if topk is None else topk)
            far = far.masked_fill(~chosen[:, :, None], float("-inf"))
        weights = torch.cat((logits, sink, far), dim=-1).softmax(dim=-1)
        out = (weights[..., 2 * W + 1 :].to(x.dtype).flatten(1, 2) @ entries).unflatten(1, (S, H))
    else:
        weights, out = torch.cat((logits, sink), dim=-1).softmax(dim=-1), 0
    near_weights = F.pad(weights[..., : 2 * W].to(x.dtype), (0, 0, 0, 0, 0, chunks * W - S)).unflatten(1, (chunks, W))
    out = out + (near_weights.flatten(2, 3) @ near).unflatten(2, (W, H)).flatten(1, 2)[:, :S]

    groups = config.o_groups
    o = _turn(out, turns, inverse=True).reshape(B, S, groups, -1)
    wo_a = p["wo_a.weight"].unflatten(0, (groups, -1))
    return torch.einsum("bsgi,goi->bsgo", o, wo_a).flatten(2) @ p["wo_b.weight"].mT, kl, chosen


def index_loss(scores: Tensor, logits: Tensor, visible: Tensor) -> Tensor:
    """KL(attention || indexer) over the visible entries, mean over the tokens that see one.

    scores [B, S, N]; logits [B, S, H, anything, then N]: all that the softmax runs over; visible [S, N].
    """
    N = scores.shape[-1]
    target = logits.softmax(dim=-1)[..., -N:].sum(dim=2)
    target = target / target.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    some = visible.any(dim=-1)
    # a row that sees nothing keeps its scores: a softmax over nothing has no gradient but NaN
    told = scores.masked_fill(~visible & some[:, None], float("-inf")).log_softmax(dim=-1).masked_fill(~visible, 0.0)
    each = torch.xlogy(target, target) - target * told
    return each.masked_fill(~visible, 0.0).sum(dim=-1).sum() / (scores.shape[0] * some.sum()).clamp(min=1)


def experts(p: Params, x: Tensor, tokens: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Routed and shared experts of x [T, C], and how often each expert was taken [E]."""
    inner = wide(x)
    scores = score_ref(inner, p["gate.weight"].to(inner.dtype))
    if "gate.tid2eid" in p:
        ids = p["gate.tid2eid"][tokens].long()
    else:
        ids = (scores.detach() + p["gate.bias"].to(inner.dtype)).topk(config.experts_per_token, dim=-1).indices
    share = torch.zeros_like(scores).scatter(1, ids, weigh_ref(scores, ids, config.routed_scale))

    def product(w: str) -> Tensor:
        return wide(x @ p[f"experts.{w}.weight"].flatten(0, 1).mT).unflatten(-1, (config.num_experts, -1))

    hidden = swiglu_ref(product("w1"), product("w3"), config.swiglu_limit) * share[..., None]
    y = hidden.to(x.dtype).flatten(1) @ p["experts.w2.weight"].transpose(1, 2).flatten(0, 1)
    gate, up = (wide(x @ p[f"shared_experts.{w}.weight"].mT) for w in ("w1", "w3"))
    y = y + swiglu_ref(gate, up, config.swiglu_limit).to(x.dtype) @ p["shared_experts.w2.weight"].mT
    return y, torch.zeros_like(scores[0]).index_add(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=scores.dtype))


def read(site: tuple[Tensor, Tensor, Tensor], norm: Tensor, flat: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """What a sublayer takes from the streams [T, 4, C], normed [T, C], and the gates that `write` needs."""
    inner = wide(flat)
    fn, base, scale = (t.to(inner.dtype) for t in site)
    m = mix_ref(inner, fn, config.norm_eps)
    gates = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + config.hc_eps
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    comb = sinkhorn((m[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4)), config.hc_iters, config.hc_eps)
    x = torch.einsum("tj,tjc->tc", gates, inner).to(flat.dtype)
    return _norm(x, norm, config.norm_eps), post, comb


def write(y: Tensor, flat: Tensor, post: Tensor, comb: Tensor, dropout: float) -> Tensor:
    """The streams with a sublayer's output y [T, C] in them."""
    y = F.dropout(y, dropout) if dropout else y
    return mhc_post_ref(wide(y), wide(flat), post, comb).to(flat.dtype)


def _head(p: Params, at: str, streams: Tensor, config: ModelConfig) -> Tensor:
    """Logits [B, S, V] float32: the streams read once more, normed and multiplied with the vocabulary."""
    inner = wide(streams.flatten(0, 1))
    fn, base, scale = (p[f"{at}hc_head_{part}"].to(inner.dtype) for part in ("fn", "base", "scale"))
    x = mhc_head_ref(inner, fn, base, scale, config.norm_eps, config.hc_eps).to(streams.dtype)
    x = _norm(x, p[f"{at}norm.weight"], config.norm_eps)
    return (wide(x) @ wide(p["head.weight"]).mT).unflatten(0, streams.shape[:2])


def part(p: Params, at: str) -> Params:
    """The parameters whose names begin so, without that."""
    return {name.removeprefix(at): t for name, t in p.items() if name.startswith(at)}


class Model:
    """The parts of a config's layers, compiled if asked for: each once for each kind of layer and shape.

    Parts and not whole layers, since what several layers share is then compiled once for all.
    """

    def __init__(self, config: ModelConfig, *, compiled: bool = False) -> None:
        def part_of(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False, fullgraph=True) if compiled else function

        if compiled:
            # kinds of layer, times lengths, times what a run turns on as it goes; the default is 8
            torch._dynamo.config.recompile_limit = 64
        self.config = config
        self.read, self.write, self.attention, self.experts = map(part_of, (read, write, attention, experts))

    def __call__(
        self, p: Params, tokens: Tensor, *, topk: int | None, dropout: float = 0.0, draft: bool = True, keep: bool = False
    ) -> Result:
        """Tell what follows each token.

        tokens: int64 [B, S], every row a sequence from position 0. topk: entries that a ratio-4 layer attends; None for all.
        dropout: of the embedding and of every sublayer's output. draft: run the MTP block too. keep: give `chosen`.
        """
        config = self.config
        x = F.embedding(tokens, p["embed.weight"])
        streams = (F.dropout(x, dropout) if dropout else x).unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()
        turns = {r: turns_of(config, r, tokens.shape[1], tokens.device, wide(x).dtype) for r in {0, *config.compress_ratios}}
        kls, loads, kept = [], {}, {}
        for i, ratio in enumerate(config.compress_ratios):
            own = part(p, f"layers.{i}.")
            streams, kl, load, chosen = self._layer(own, streams, tokens, turns[ratio], ratio, topk, dropout)
            if "ffn.gate.bias" in own:
                loads[f"layers.{i}.ffn.gate.bias"] = load
            if ratio == 4:
                kls.append(kl)
                if keep and chosen is not None:
                    kept[f"layers.{i}"] = chosen
        logits = _head(p, "", streams, config)
        kl = torch.stack(kls).mean() if kls else logits.new_zeros(())
        if not draft:
            return Result(logits, None, kl, loads, kept)
        own = part(p, DRAFT)
        # a last row that means nothing, so that shapes are those of the layers
        told = _norm(x.roll(-1, dims=1), own["enorm.weight"], config.norm_eps) @ own["e_proj.weight"].mT
        seen = _norm(streams, own["hnorm.weight"], config.norm_eps) @ own["h_proj.weight"].mT
        streams, _, load, _ = self._layer(own, told[:, :, None] + seen, tokens, turns[0], 0, None, dropout)
        loads[DRAFT + "ffn.gate.bias"] = load
        return Result(logits, _head(p, DRAFT, streams[:, :-1], config), kl, loads, kept)

    def _layer(
        self,
        p: Params,
        streams: Tensor,
        tokens: Tensor,
        turns: tuple[Tensor, Tensor],
        ratio: int,
        topk: int | None,
        dropout: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """One layer of the streams [B, S, 4, C]: they, the indexer's loss, the experts' loads, the entries attended."""
        shape, flat = tokens.shape, streams.flatten(0, 1)
        sites = {name: tuple(p[f"hc_{name}_{each}"] for each in ("fn", "base", "scale")) for name in ("attn", "ffn")}
        x, post, comb = self.read(sites["attn"], p["attn_norm.weight"], flat, self.config)
        topk = topk if ratio == 4 else None
        y, kl, chosen = self.attention(part(p, "attn."), x.unflatten(0, shape), turns, self.config, ratio, topk)
        flat = self.write(y.flatten(0, 1), flat, post, comb, dropout)
        x, post, comb = self.read(sites["ffn"], p["ffn_norm.weight"], flat, self.config)
        y, load = self.experts(part(p, "ffn."), x, tokens.flatten(), self.config)
        return self.write(y, flat, post, comb, dropout).unflatten(0, shape), kl, load, chosen
