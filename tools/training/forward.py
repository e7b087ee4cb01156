"""A forward that can be differentiated: whole sequences from position 0, no cache, the same numbers as `deepdecode.model`.

Everything is dense, so that shapes are static and every product is large: the experts are one wide product whose hidden
units are switched off where the router did not choose them, and the indexer's choice is a mask over all entries.

The indexer learns from a signal of its own, the KL divergence from its softmax to the attention's distribution over the
entries: the probabilities of all heads added up and normalised, with every visible entry attended. Its inputs are detached,
so that nothing else is moved by it, and the choice passes no gradient.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deepdecode.config import ModelConfig
from deepdecode.ops._check import wide
from deepdecode.ops.gate import score_ref, weigh_ref
from deepdecode.ops.rope import frequencies
from training.parts import REFERENCE, Parts

Tensor = torch.Tensor
Params = dict[str, Tensor]
# how the names of the MTP block begin
DRAFT = "mtp.0."


@dataclass
class Hidden:
    """What a forward gives, but for the vocabulary.

    x: [B, S, C], normed. draft: the MTP block's; row i, from token i + 1, is about token i + 2, and the last means nothing.
    kl: the indexer's loss, mean over tokens and layers. loads: for each scored router, how often each expert was taken [E].
    chosen: for each ratio-4 layer, the entries attended, bool [B, S, S // 4].
    """

    x: Tensor
    draft: Tensor | None
    kl: Tensor
    loads: dict[str, Tensor]
    chosen: dict[str, Tensor]


@dataclass
class Result(Hidden):
    """logits: [B, S, V] float32 (float64). draft_logits: [B, S - 1, V]."""

    logits: Tensor
    draft_logits: Tensor | None


def choose(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """bool, as scores [..., N]: each row's topk largest visible, the lower entry where two are equal."""
    if topk >= scores.shape[-1]:
        return visible.expand_as(scores)
    scores = scores.masked_fill(~visible, float("-inf"))
    bar = scores.topk(topk, dim=-1).values[..., -1:]
    above = scores > bar
    tied = (scores == bar) & visible
    return above | (tied & (tied.cumsum(dim=-1) <= topk - above.sum(dim=-1, keepdim=True)))


def part(p: Params, at: str) -> Params:
    """The parameters whose names begin so, without that."""
    return {name.removeprefix(at): t for name, t in p.items() if name.startswith(at)}


class Embed(torch.autograd.Function):
    """Rows of a table; the gradient is added up in float32 without sorting the ids."""

    @staticmethod
    def forward(ctx, tokens: Tensor, table: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(tokens)
        ctx.like = table
        return table[tokens]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        table, grad = ctx.like, grad.flatten(0, -2)
        inner = wide(grad)
        made = torch.zeros(table.shape, dtype=inner.dtype, device=table.device)
        return None, made.index_add_(0, ctx.saved_tensors[0].flatten(), inner).to(table.dtype)


class Model:
    """The layers of a config on a table of parts."""

    def __init__(self, config: ModelConfig, parts: Parts = REFERENCE) -> None:
        self.config, self.parts = config, parts
        # made once: a step that is captured may copy nothing from the host
        self._turns: dict[tuple[int, int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def turns(self, ratio: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, R / 2] of a layer's rotations, float32 (float64 for float64)."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = (ratio, length, like.device, dtype)
        if key not in self._turns:
            angles = torch.arange(length, device=like.device, dtype=dtype)[:, None]
            angles = angles * frequencies(self.config, ratio).to(like.device, dtype)
            self._turns[key] = angles.cos(), angles.sin()
        return self._turns[key]

    def __call__(
        self, p: Params, tokens: Tensor, *, topk: int | None, dropout: float = 0.0, draft: bool = True, keep: bool = False
    ) -> Result:
        """`hidden` and the logits."""
        hidden = self.hidden(p, tokens, topk=topk, dropout=dropout, draft=draft, keep=keep)
        head = wide(p["head.weight"])
        drafted = None if hidden.draft is None else wide(hidden.draft[:, :-1]) @ head.mT
        return Result(**vars(hidden), logits=wide(hidden.x) @ head.mT, draft_logits=drafted)

    def losses(
        self, p: Params, tokens: Tensor, targets: Tensor | None = None, *, topk: int | None, dropout: float, draft: bool
    ) -> tuple[dict[str, Tensor], Hidden]:
        """tokens [B, S + 1]: what is read, and after it what is to be told; targets: the same, -1 what is not. In nats."""
        targets = tokens if targets is None else targets
        hidden = self.hidden(p, tokens[:, :-1], topk=topk, dropout=dropout, draft=draft)
        B, S = hidden.x.shape[:2]
        told = self.parts.tell(hidden.x.flatten(0, 1), p["head.weight"], targets[:, 1:].flatten(), B * S)
        found = {"told": told, "kl": hidden.kl}
        if hidden.draft is not None:
            after = F.pad(targets[:, 2:], (0, 1), value=-1).flatten()
            found["draft"] = self.parts.tell(hidden.draft.flatten(0, 1), p["head.weight"], after, B * (S - 1))
        return found, hidden

    def hidden(
        self, p: Params, tokens: Tensor, *, topk: int | None, dropout: float = 0.0, draft: bool = True, keep: bool = False
    ) -> Hidden:
        """What the layers make of the tokens.

        tokens: int64 [B, S], every row a sequence from position 0. topk: entries that a ratio-4 layer attends; None for all.
        dropout: of the embedding and of every sublayer's output. draft: run the MTP block too. keep: give `chosen`.
        """
        config = self.config
        x = Embed.apply(tokens, p["embed.weight"])
        streams = (F.dropout(x, dropout) if dropout else x).unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()
        turns = {ratio: self.turns(ratio, tokens.shape[1], x) for ratio in {0, *config.compress_ratios}}
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
        told = self._head(p, "", streams)
        kl = torch.stack(kls).mean() if kls else turns[0][0].new_zeros(())
        if not draft:
            return Hidden(told, None, kl, loads, kept)
        own = part(p, DRAFT)
        # a last row that means nothing, so that shapes are those of the layers
        following = self.parts.rows(x.roll(-1, dims=1), own["enorm.weight"], None, config.norm_eps, False)
        seen = self.parts.rows(streams, own["hnorm.weight"], None, config.norm_eps, False)
        both = (following @ own["e_proj.weight"].mT)[:, :, None] + seen @ own["h_proj.weight"].mT
        streams, _, load, _ = self._layer(own, both, tokens, turns[0], 0, None, dropout)
        loads[DRAFT + "ffn.gate.bias"] = load
        return Hidden(told, self._head(p, DRAFT, streams), kl, loads, kept)

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
        shape, flat, config = tokens.shape, streams.flatten(0, 1), self.config

        def read(site: str) -> tuple[Tensor, Tensor, Tensor]:
            own = (p[f"hc_{site}_{each}"] for each in ("fn", "base", "scale"))
            x, post, z = self.parts.read(flat, *own, p[f"{site}_norm.weight"], config.norm_eps, config.hc_eps)
            return x, post, self.parts.sinkhorn(z, config.hc_iters, config.hc_eps)

        def write(y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
            return self.parts.write(F.dropout(y, dropout) if dropout else y, flat, post, comb)

        x, post, comb = read("attn")
        y, kl, chosen = self._attention(part(p, "attn."), x.unflatten(0, shape), turns, ratio, topk)
        flat = write(y.flatten(0, 1), post, comb)
        x, post, comb = read("ffn")
        y, load = self._experts(part(p, "ffn."), x, tokens.flatten())
        return write(y, post, comb).unflatten(0, shape), kl, load, chosen

    def _attention(
        self, p: Params, x: Tensor, turns: tuple[Tensor, Tensor], ratio: int, topk: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attention of x [B, S, C]: its output, the indexer's loss (0 without one), and the entries attended.

        topk None: every visible entry is attended, as before the indexer can be trusted.
        """
        (B, S, _), config, rows = x.shape, self.config, self.parts.rows
        eps, N = config.norm_eps, S // ratio if ratio else 0
        q_latent = rows(x @ p["wq_a.weight"].mT, p["q_norm.weight"], None, eps, False)
        q = rows((q_latent @ p["wq_b.weight"].mT).unflatten(-1, (config.num_heads, config.head_dim)), None, turns, eps, False)
        kv = rows(x @ p["wkv.weight"].mT, p["kv_norm.weight"], turns, eps, False)
        entries = self._entries(p, "compressor.", x, turns, ratio) if N else None
        scores = chosen = None
        if ratio == 4 and N:
            scores = self._index_scores(p, x.detach(), q_latent.detach(), turns)
            done = (torch.arange(S, device=x.device) + 1) // ratio
            visible = torch.arange(N, device=x.device) < done[:, None]  # [S, N]
            chosen = choose(scores.detach(), visible, N if topk is None else topk)
        sink = p["attn_sink"].to(turns[0].dtype)
        out, kl = self.parts.attend(q, kv, entries, sink, scores, chosen, config.window, ratio)
        # a token sees an entry once its first block is done
        kl = kl / (B * max(1, S - ratio + 1))
        groups = config.o_groups
        o = rows(out, None, turns, None, True).reshape(B * S, groups, -1)
        wo_a = p["wo_a.weight"].unflatten(0, (groups, -1))
        o = torch.bmm(o.transpose(0, 1), wo_a.mT).transpose(0, 1).reshape(B, S, -1)
        return o @ p["wo_b.weight"].mT, kl, chosen

    def _entries(self, p: Params, at: str, x: Tensor, turns: tuple[Tensor, Tensor], ratio: int) -> Tensor:
        """The compressed entries [B, S // ratio, d] of x [B, S, C], normed, and rotated as the first token of their block."""
        whole = x.shape[1] // ratio * ratio
        kv, score = (x @ p[f"{at}{name}.weight"].mT for name in ("wkv", "wgate"))
        pooled = self.parts.pool(kv, score, p[at + "ape"], ratio)
        cos, sin = (t[:whole:ratio].contiguous() for t in turns)
        return self.parts.rows(pooled, p[at + "norm.weight"], (cos, sin), self.config.norm_eps, False)

    def _index_scores(self, p: Params, x: Tensor, q_latent: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """[B, S, S // 4]: what the indexer thinks of every entry, visible or not.

        Query and keys go without the Hadamard rotation, which cancels in their product.
        """
        heads, width = self.config.index_heads, self.config.index_head_dim
        q = self.parts.rows((q_latent @ p["indexer.wq_b.weight"].mT).unflatten(-1, (heads, width)), None, turns, None, False)
        keys = self._entries(p, "indexer.compressor.", x, turns, 4)
        weights = wide(x @ p["indexer.weights_proj.weight"].mT) * (width**-0.5 * heads**-0.5)
        return self.parts.index_sum(q.flatten(1, 2) @ keys.mT, weights)

    def _experts(self, p: Params, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Routed and shared experts of x [T, C], and how often each expert was taken [E]."""
        config, inner, glu = self.config, wide(x), self.parts.glu
        scores = score_ref(inner, p["gate.weight"].to(inner.dtype))
        if "gate.tid2eid" in p:
            ids = p["gate.tid2eid"][tokens].long()
        else:
            ids = (scores.detach() + p["gate.bias"].to(inner.dtype)).topk(config.experts_per_token, dim=-1).indices
        share = torch.zeros_like(scores).scatter(1, ids, weigh_ref(scores, ids, config.routed_scale))

        gate, up = (
            (x @ p[f"experts.{w}.weight"].flatten(0, 1).mT).unflatten(-1, (config.num_experts, -1)) for w in ("w1", "w3")
        )
        hidden = glu(gate, up, share, config.swiglu_limit)
        y = hidden.flatten(1) @ p["experts.w2.weight"].transpose(1, 2).flatten(0, 1)
        gate, up = (x @ p[f"shared_experts.{w}.weight"].mT for w in ("w1", "w3"))
        y = y + glu(gate, up, None, config.swiglu_limit) @ p["shared_experts.w2.weight"].mT
        return y, torch.zeros_like(scores).scatter(1, ids, 1.0).sum(0)

    def _head(self, p: Params, at: str, streams: Tensor) -> Tensor:
        """The streams read once more and normed [B, S, C]: with no write behind it, the rows of its gates are 0."""
        flat = streams.flatten(0, 1)
        fn, base, scale = (p[f"{at}hc_head_{each}"] for each in ("fn", "base", "scale"))
        fn, base = F.pad(fn, (0, 0, 0, 20)), F.pad(base, (0, 20))
        read = self.parts.read(flat, fn, base, scale.expand(3), p[f"{at}norm.weight"], self.config.norm_eps, self.config.hc_eps)
        return read[0].unflatten(0, streams.shape[:2])
