"""The precision choices: each is the float32 model with one thing rounded, then what the product and the official code round.

A choice is a cache format and a table of ops. The base computes in float32 on the weights as they are stored, with nothing else
rounded; a choice differs from it in what its name says, so its loss is that thing's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from deepdecode.config import ModelConfig
from deepdecode.ops import reference
from deepdecode.ops.attention import sparse_attn_decode
from deepdecode.ops.fused import FUSED
from deepdecode.ops.linear import grouped_linear, linear
from deepdecode.ops.mhc import mhc_post, mix_ref, sinkhorn_ref
from deepdecode.ops.moe import swiglu_ref
from deepdecode.ops.norm import rms_norm
from deepdecode.ops.quant import BLOCK, E4M3_MAX, e4m3_decode, e4m3_encode, fake_quant_fp4, fake_quant_fp8, hadamard
from deepdecode.ops.reference import FP8_FLOOR, REFERENCE
from deepdecode.ops.rope import rope
from deepdecode.ops.rows import PagedRows
from deepdecode.ops.table import AttnInputs, AttnWeights, MhcSite, MoeWeights, Ops, Step

Tensor = torch.Tensor
# entries that share a partial result of split attention
SPLIT = 64


@dataclass(frozen=True)
class Choice:
    """fmt, index_fmt: of the caches. dtype: of the activations between ops. needs: why a config cannot have it, or None."""

    name: str
    what: str
    fmt: str = "f32"
    index_fmt: str = "f32"
    dtype: torch.dtype = torch.float32
    ops: Ops = REFERENCE
    needs: Callable[[ModelConfig], str | None] = lambda config: None


def fp8_row(x: Tensor) -> Tensor:
    """Rounded to E4M3 under one float32 scale a row, as index keys and queries are stored."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=FP8_FLOOR) / E4M3_MAX
    return e4m3_decode(e4m3_encode(x / scale)) * scale


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def index_topk(round_: Callable[[Tensor], Tensor], rotated: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """The indexer on queries and keys that are rounded behind the Hadamard rotation, or with `rotated` False before it."""

    def choose(index_q: Tensor, weights: Tensor, keys: PagedRows, step: Step, topk: int) -> tuple[Tensor, Tensor]:
        # the rotation is its own inverse
        q, rows = (index_q, keys.data) if rotated else (hadamard(index_q), hadamard(keys.data))
        # rows past a sequence's end hold anything, NaN too, and nobody sees them
        return reference.index_topk(round_(q), weights, PagedRows(round_(rows), keys.page_size, keys.fmt), step, topk)

    return choose


def mhc_boundary(round_fn: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The boundary with the mixing product in tensor-core form: its weights rounded so, the streams to bfloat16."""

    def boundary(
        y: Tensor | None,
        streams: Tensor,
        post: Tensor | None,
        comb: Tensor | None,
        site: MhcSite,
        norm: Tensor,
        config: ModelConfig,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if y is not None:
            assert post is not None and comb is not None
            streams = mhc_post(y, streams, post, comb)
        m = mix_ref(bf16(streams), round_fn(site.fn), config.norm_eps)
        read = torch.sigmoid(m[:, :4] * site.scale[0] + site.base[:4]) + config.hc_eps
        post = 2 * torch.sigmoid(m[:, 4:8] * site.scale[1] + site.base[4:8])
        comb = sinkhorn_ref((m[:, 8:] * site.scale[2] + site.base[8:]).unflatten(-1, (4, 4)), config.hc_iters, config.hc_eps)
        return streams, rms_norm(torch.einsum("tj,tjc->tc", read, streams), norm, config.norm_eps), post, comb

    return boundary


def split_bf16(fn: Tensor) -> Tensor:
    """The sum of two bfloat16 numbers, as near as that comes."""
    high = bf16(fn)
    return high + bf16(fn - high)


def fp8_inputs(config: ModelConfig) -> str | None:
    """What keeps the official simulation from a model: it rounds in groups of 128 channels."""
    sizes = (config.hidden_size, config.q_lora_rank, config.o_groups * config.o_lora_rank, config.expert_width)
    return None if not any(size % BLOCK for size in sizes) else f"needs sizes that are multiples of {BLOCK}, got {sizes}"


# the official code's linears: what enters an FP8 or FP4 product is rounded to E4M3, 128 channels to a scale


def _attn_in(x: Tensor, weights: AttnWeights, config: ModelConfig, ratio: int) -> AttnInputs:
    found = reference.attn_in(x, weights, config, ratio)
    q_latent, kv = linear(fake_quant_fp8(x), weights.q_kv).split([config.q_lora_rank, config.head_dim], dim=-1)
    return replace(found, q_latent=q_latent.contiguous(), kv=kv.contiguous())


def _q_proj(inputs: AttnInputs, weights: AttnWeights, config: ModelConfig) -> tuple[Tensor, Tensor | None]:
    latent = fake_quant_fp8(rms_norm(inputs.q_latent, weights.q_norm, config.norm_eps))
    out = linear(latent, weights.q_b)
    q, index_q = out.split([len(weights.sink) * config.head_dim, out.shape[1] - len(weights.sink) * config.head_dim], dim=-1)
    q = q.reshape(len(q), -1, config.head_dim)
    return q, index_q.reshape(len(q), -1, config.index_head_dim) if index_q.shape[1] else None


def _attn_out(o: Tensor, weights: AttnWeights) -> Tensor:
    T, H, D = o.shape
    per_group = weights.wo_a.shape[-1]
    o = o.reshape(T, H * D // per_group, per_group)
    return linear(fake_quant_fp8(grouped_linear(o, weights.wo_a).reshape(T, -1)), weights.wo_b)


def _moe(x: Tensor, ids: Tensor, weights: Tensor, w: MoeWeights, config: ModelConfig, shared_rows: int | None = None) -> Tensor:
    x_in, limit = fake_quant_fp8(x), config.swiglu_limit
    gate, up = linear(x_in, w.shared13, torch.float32).chunk(2, dim=-1)
    y = linear(fake_quant_fp8(swiglu_ref(gate, up, limit).to(x.dtype)), w.shared2, torch.float32)
    if shared_rows is not None:
        y[shared_rows:] = 0
    for e in ids.unique().tolist():
        rows, lanes = (ids == e).nonzero(as_tuple=True)
        gate, up = linear(x_in[rows], w.w13[e], torch.float32).chunk(2, dim=-1)
        v = (swiglu_ref(gate, up, limit) * weights[rows, lanes, None]).to(x.dtype)
        y.index_add_(0, rows, linear(fake_quant_fp8(v), w.w2[e], torch.float32))
    return y.to(x.dtype)


def sparse_attn(round_: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Attention over splits of keys, each one's result rounded before they are merged."""

    def attend(
        q: Tensor,
        window: PagedRows,
        window_indices: Tensor,
        window_lens: Tensor,
        extra: PagedRows | None = None,
        extra_indices: Tensor | None = None,
        extra_lens: Tensor | None = None,
        *,
        sink: Tensor,
        scale: float,
        positions: Tensor,
        freqs: Tensor,
    ) -> Tensor:
        outs, lses = [], []
        none = window_lens.new_zeros(window_lens.shape)

        def add(*args: PagedRows | Tensor | None) -> None:
            out, lse = sparse_attn_decode(q, *args, scale=scale, return_lse=True)  # pyright: ignore[reportArgumentType]
            outs.append(round_(out))
            lses.append(lse)

        for at in range(0, window_indices.shape[1], SPLIT):
            add(window, window_indices[:, at : at + SPLIT].contiguous(), (window_lens - at).clamp(0, SPLIT))
        if extra is not None and extra_indices is not None and extra_lens is not None:
            for at in range(0, extra_indices.shape[1], SPLIT):
                near = window_indices[:, :0].contiguous()
                add(
                    window, near, none, extra, extra_indices[:, at : at + SPLIT].contiguous(), (extra_lens - at).clamp(0, SPLIT)
                )
        lse = torch.stack(lses)
        # the sink takes weight and gives nothing
        shares = torch.cat((lse, sink.to(lse.dtype).expand(1, *lse.shape[1:]))).softmax(dim=0)[:-1]
        return rope((torch.stack(outs) * shares[..., None]).sum(dim=0).to(q.dtype), positions, freqs, inverse=True)

    return attend


BASE = Choice("fp32", "weights as stored, all else float32")
OFFICIAL = replace(REFERENCE, attn_in=_attn_in, q_proj=_q_proj, attn_out=_attn_out, moe=_moe)


def _fp8_caches(config: ModelConfig) -> str | None:
    widths = (config.head_dim, config.rope_dim, config.index_head_dim)
    return None if widths == (512, 64, 128) else f"needs head, rope and index dims of 512, 64 and 128, got {widths}"


def _fp4_keys(config: ModelConfig) -> str | None:
    return None if config.index_head_dim % 32 == 0 else f"needs an index head dim in groups of 32, got {config.index_head_dim}"


CHOICES = (
    Choice("kv fp8", "window and compressed rows in fp8_584", fmt="fp8_584", needs=_fp8_caches),
    Choice("kv bf16", "window and compressed rows in bfloat16", fmt="bf16"),
    Choice("index fp8", "index queries and keys E4M3, rotated", ops=replace(REFERENCE, index_topk=index_topk(fp8_row, True))),
    Choice(
        "index fp8, no Hadamard", "the same without the rotation", ops=replace(REFERENCE, index_topk=index_topk(fp8_row, False))
    ),
    Choice(
        "index fp4",
        "index queries and keys E2M1, 32 to a scale, rotated",
        ops=replace(REFERENCE, index_topk=index_topk(fake_quant_fp4, True)),
        needs=_fp4_keys,
    ),
    Choice(
        "index fp4, no Hadamard",
        "the same without the rotation",
        ops=replace(REFERENCE, index_topk=index_topk(fake_quant_fp4, False)),
        needs=_fp4_keys,
    ),
    Choice("index bf16", "index queries and keys bfloat16", ops=replace(REFERENCE, index_topk=index_topk(bf16, True))),
    Choice(
        "mhc split bf16",
        "mixing product: weights as two bfloat16 numbers, streams bfloat16",
        ops=replace(REFERENCE, mhc_boundary=mhc_boundary(split_bf16)),
    ),
    Choice("mhc bf16", "mixing product: weights and streams bfloat16", ops=replace(REFERENCE, mhc_boundary=mhc_boundary(bf16))),
    Choice(
        "partials bf16", f"results of {SPLIT} keys rounded to bfloat16", ops=replace(REFERENCE, sparse_attn=sparse_attn(bf16))
    ),
    Choice("activations bf16", "bfloat16 between ops (W8A16, W4A16)", dtype=torch.bfloat16),
    Choice("activations fp8", "what enters a stored weight rounded to E4M3, 128 to a scale", ops=OFFICIAL, needs=fp8_inputs),
    Choice(
        "product", "what deepdecode runs: bfloat16, FP8 rows and keys", "fp8_584", "fp8_132", torch.bfloat16, FUSED, _fp8_caches
    ),
    Choice(
        "official",
        "the official code's roundings: bfloat16, FP8 rows and activations, FP4 keys",
        "fp8_584",
        "bf16",
        torch.bfloat16,
        replace(OFFICIAL, index_topk=index_topk(fake_quant_fp4, True)),
        lambda config: _fp8_caches(config) or fp8_inputs(config),
    ),
)
