"""Which tensors a checkpoint has: official names, shapes and formats, and the names others give them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from deepdecode.config import ModelConfig, shown

# plain: BF16, or unquantised in F32 or F64. f32: F32 (or F64) always: rounding these spoils the model.
# dense: FP8 with scales, or plain. expert: as config.expert_dtype says, or plain. ids: I64 or I32.
Kind = Literal["plain", "f32", "dense", "expert", "ids"]
PLAIN = ("BF16", "F32", "F64")


@dataclass(frozen=True)
class Spec:
    """What is expected under a name: the logical shape ([out, in] unpacked), and how it may be stored."""

    shape: tuple[int, ...]
    kind: Kind


class Form(Protocol):
    """What is found under a name."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def scale_name(weight: str) -> str:
    return weight.removesuffix(".weight") + ".scale"


def tensor_specs(config: ModelConfig, *, mtp: bool = False) -> dict[str, Spec]:
    """Every tensor of the backbone but the scales, in checkpoint order; with `mtp` the MTP block's too."""
    C, V = config.hidden_size, config.vocab_size
    specs = {"embed.weight": Spec((V, C), "plain")}
    for i, ratio in enumerate(config.compress_ratios):
        specs |= _block(config, f"layers.{i}.", ratio, hashed=i < config.num_hash_layers)
    specs |= {"norm.weight": Spec((C,), "plain"), "head.weight": Spec((V, C), "plain")}
    specs |= _hc(config, "hc_head_", config.hc_mult, 1)
    if mtp:
        specs |= _block(config, "mtp.0.", 0, hashed=False)
        specs |= {f"mtp.0.{name}.weight": Spec((C, C), "dense") for name in ("e_proj", "h_proj")}
        specs |= {f"mtp.0.{name}.weight": Spec((C,), "plain") for name in ("enorm", "hnorm", "norm")}
        specs |= _hc(config, "mtp.0.hc_head_", config.hc_mult, 1)
    return specs


def _hc(config: ModelConfig, prefix: str, rows: int, scales: int) -> dict[str, Spec]:
    return {
        prefix + "fn": Spec((rows, config.hc_mult * config.hidden_size), "f32"),
        prefix + "base": Spec((rows,), "f32"),
        prefix + "scale": Spec((scales,), "f32"),
    }


def _block(config: ModelConfig, prefix: str, ratio: int, *, hashed: bool) -> dict[str, Spec]:
    C, D, E, I = config.hidden_size, config.head_dim, config.num_experts, config.expert_width
    n, group = config.hc_mult, config.num_heads // config.o_groups * config.head_dim
    mixes = 2 * n + n * n
    specs = _hc(config, "hc_attn_", mixes, 3) | _hc(config, "hc_ffn_", mixes, 3)
    specs |= {
        "attn_norm.weight": Spec((C,), "plain"),
        "ffn_norm.weight": Spec((C,), "plain"),
        "attn.wq_a.weight": Spec((config.q_lora_rank, C), "dense"),
        "attn.q_norm.weight": Spec((config.q_lora_rank,), "plain"),
        "attn.wq_b.weight": Spec((config.num_heads * D, config.q_lora_rank), "dense"),
        "attn.wkv.weight": Spec((D, C), "dense"),
        "attn.kv_norm.weight": Spec((D,), "plain"),
        "attn.attn_sink": Spec((config.num_heads,), "f32"),
        "attn.wo_a.weight": Spec((config.o_groups * config.o_lora_rank, group), "dense"),
        "attn.wo_b.weight": Spec((C, config.o_groups * config.o_lora_rank), "dense"),
    }
    if ratio:
        specs |= _compressor(config, "attn.compressor.", ratio, D)
    if ratio == 4:
        width = config.index_heads * config.index_head_dim
        specs["attn.indexer.wq_b.weight"] = Spec((width, config.q_lora_rank), "dense")
        specs["attn.indexer.weights_proj.weight"] = Spec((config.index_heads, C), "plain")
        specs |= _compressor(config, "attn.indexer.compressor.", ratio, config.index_head_dim)
    specs["ffn.gate.weight"] = Spec((E, C), "plain")
    if hashed:
        specs["ffn.gate.tid2eid"] = Spec((config.vocab_size, config.experts_per_token), "ids")
    else:
        specs["ffn.gate.bias"] = Spec((E,), "f32")
    up, down = Spec((I, C), "expert"), Spec((C, I), "expert")
    for e in range(E):
        specs |= {f"ffn.experts.{e}.{w}.weight": down if w == "w2" else up for w in ("w1", "w2", "w3")}
    for w in ("w1", "w2", "w3"):
        shape = down.shape if w == "w2" else up.shape
        specs[f"ffn.shared_experts.{w}.weight"] = Spec(shape, "dense")
    return {prefix + name: spec for name, spec in specs.items()}


def _compressor(config: ModelConfig, prefix: str, ratio: int, dim: int) -> dict[str, Spec]:
    width = 2 * dim if ratio == 4 else dim
    return {
        prefix + "wkv.weight": Spec((width, config.hidden_size), "plain"),
        prefix + "wgate.weight": Spec((width, config.hidden_size), "plain"),
        prefix + "ape": Spec((ratio, width), "f32"),
        prefix + "norm.weight": Spec((dim,), "plain"),
    }


_SHARDS = (
    (re.compile(r"^layers\.\d+\.ffn\.(?:experts\.\d+|shared_experts)\.w[13]\."), "width", 0),
    (re.compile(r"^layers\.\d+\.ffn\.(?:experts\.\d+|shared_experts)\.w2\."), "width", 1),
    (re.compile(r"^layers\.\d+\.attn\.(?:wq_b\.|wo_a\.|attn_sink)"), "heads", 0),
    (re.compile(r"^layers\.\d+\.attn\.wo_b\."), "heads", 1),
    (re.compile(r"^head\."), "vocab", 0),
)


def shard(name: str) -> tuple[str, int] | None:
    """What tensor parallelism cuts this tensor by, and along which dimension; None: it is whole on every rank."""
    return next(((what, dim) for pattern, what, dim in _SHARDS if pattern.match(name)), None)


_FOR_EVERY_TOKEN = re.compile(r"(?:\.scale|norm\.weight|hc_\w+_(?:fn|base|scale)|attn_sink|gate\.bias|\.ape)$")


def unsound(name: str, tensor: torch.Tensor) -> str | None:
    """What a tensor that every token meets holds and must not, in words; None if it is sound.

    Scales must be finite. Norms and what is float32 in every checkpoint must not be NaN; infinity means something there: a
    head without a sink, an expert nobody takes. Not looked at are the weights, whose bytes are most of a checkpoint.
    """
    if not _FOR_EVERY_TOKEN.search(name):
        return None
    if tensor.dtype == torch.float8_e8m0fnu:
        count, what = int((tensor.view(torch.uint8) == 255).sum()), "NaN (code 255)"
    elif name.endswith(".scale"):
        count, what = int((~tensor.isfinite()).sum()), "NaN or infinity"
    else:
        count, what = int(tensor.isnan().sum()), "NaN"
    return f"{what}, got {count} in {tensor.numel()}" if count else None


def packing(spec: Spec, expert_dtype: str) -> Literal["fp4", "fp8", None]:
    """How the official checkpoint packs this weight; None: not at all."""
    if spec.kind not in ("dense", "expert") or expert_dtype == "float":
        return None
    return "fp4" if spec.kind == "expert" and expert_dtype == "fp4" else "fp8"


def packed_shapes(shape: tuple[int, ...], how: Literal["fp4", "fp8"]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and of the scales of a [out, in] weight."""
    rows, cols = shape
    if how == "fp4":
        return (rows, cols // 2), (rows, cols // 32)
    return (rows, cols), (-(-rows // 128), -(-cols // 128))


def faults(config: ModelConfig, found: Mapping[str, Form], where: Mapping[str, str], *, mtp: bool = False) -> Iterator[str]:
    """Everything in which the tensors found differ from what the config asks for, a sentence each.

    Args:
        found: tensors under official names, scales included.
        where: the file of each, for the sentence.
        mtp: whether tensors of the MTP block belong to it.
    """
    specs = tensor_specs(config, mtp=mtp)
    known = set[str]()
    for name, spec in specs.items():
        scale = scale_name(name)
        known.add(name)
        if packing(spec, "fp4"):
            known.add(scale)
        if name not in found:
            yield f"checkpoint: {name} is missing"
            continue
        form, how = found[name], packing(spec, config.expert_dtype)
        tell = f"{where[name]}: {name} must be"
        if spec.kind == "ids":
            yield from _differs(tell, form, ("I64", "I32"), spec.shape)
        elif spec.kind == "f32":
            yield from _differs(tell, form, PLAIN[1:], spec.shape)
        elif how is None or form.dtype in PLAIN:
            yield from _differs(tell, form, PLAIN, spec.shape)
            if scale in known and scale in found:
                yield f"{where[scale]}: {scale} must be missing beside a weight stored as {form.dtype}"
        else:
            data_shape, scale_shape = packed_shapes(spec.shape, how)
            if how == "fp4" and spec.shape[1] % 32:
                yield f"{tell} a multiple of 32 wide for FP4, got {list(spec.shape)}"
            said = f" (expert_dtype is {config.expert_dtype})" if spec.kind == "expert" else ""
            yield from _differs(tell, form, ("I8",) if how == "fp4" else ("F8_E4M3",), data_shape, said)
            if scale not in found:
                yield f"checkpoint: {scale} is missing"
            else:
                # Flash-Base has float32 scales
                kinds = ("F8_E8M0", "F32") if config.expert_dtype == "fp8" else ("F8_E8M0",)
                yield from _differs(f"{where[scale]}: {scale} must be", found[scale], kinds, scale_shape)
    for name in found:
        if name not in known:
            yield f"{where[name]}: {shown(name)} is not a tensor of this config"


def _differs(tell: str, form: Form, dtypes: tuple[str, ...], shape: tuple[int, ...], said: str = "") -> Iterator[str]:
    if form.dtype not in dtypes or tuple(form.shape) != shape:
        yield f"{tell} {' or '.join(dtypes)} {list(shape)}{said}, got {form.dtype} {list(form.shape)}"


_EXPERT = re.compile(r"^(?:model\.)?(layers\.\d+\.ffn\.experts\.\d+\.w[123]\.(?:weight|scale))$")
_SWAPS = [
    (re.compile(pattern), to)
    for pattern, to in (
        (r"^model\.", ""),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"(?:\.weight)?[._](?:weight_scale_inv|weight_scale|scale_inv)$", ".scale"),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
        (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.compressor\.indexer\.(?:scorer\.)?weights_proj\.", ".indexer.weights_proj."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.position_bias$", ".ape"),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.attn\.(?:kv_a_layernorm|norm)\.", ".attn.kv_norm."),
        (r"\.(?:q_a_layernorm|q_a_norm)\.", ".q_norm."),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.(?:kv_a_proj_with_mqa|kv_proj)\.", ".wkv."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.(?:e_score_correction_bias|e_score_correction\.bias)$", ".bias"),
        (r"\.gate_proj\.", ".w1."),
        (r"\.down_proj\.", ".w2."),
        (r"\.up_proj\.", ".w3."),
    )
]


def official_name(name: str) -> str | None:
    """The official name of a tensor under any of the schemes we read; None for what every reader skips.

    Skipped are the MTP block's copies of embedding and head, and rotary tables that some writers store.
    """
    # nearly all of a checkpoint's names are these
    if match := _EXPERT.match(name):
        return match[1]
    for pattern, to in _SWAPS:
        name = pattern.sub(to, name)
    if name.startswith("mtp.") and ("emb" in name or name.endswith("head.weight")):
        return None
    return None if name.endswith("rotary_emb.inv_freq") else name


_STACK = re.compile(r"^layers\.(0|[1-9]\d{0,3})\.ffn\.experts\.(gate_up_proj|down_proj)(\.weight|\.scale)?$")


def stacked(name: str) -> tuple[int, tuple[str, ...], str] | None:
    """(layer, parts, suffix) of a stack of all experts as transformers stores it, else None."""
    match = _STACK.match(name)
    if match is None:
        return None
    parts = ("w1", "w3") if match[2] == "gate_up_proj" else ("w2",)
    return int(match[1]), parts, match[3] or ".weight"
