"""ModelConfig: what a checkpoint's config.json says, under one set of names; reading and writing it.

Three forms are read: the official config.json, the official inference/config.json (other names, fewer fields) and what
transformers writes (`layer_types` instead of `compress_ratios`). One is written: the official config.json.
"""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("deepdecode")

# of config.json, and of the largest other files; small enough that what JSON expands to fits in memory
MAX_CONFIG_BYTES, MAX_JSON_BYTES = 4 << 20, 64 << 20


class ConfigError(ValueError):
    """A config that cannot be read, or that is of another architecture. One sentence, naming file and field."""


@dataclass(frozen=True)
class Yarn:
    """YaRN as V4 uses it: frequencies of the compressed layers only, no attention temperature."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_positions: int = 65536


@dataclass(frozen=True)
class ModelConfig:
    """One DeepSeek-V4 backbone. Defaults are V4-Flash."""

    vocab_size: int = 129280
    hidden_size: int = 4096
    num_layers: int = 43
    num_heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    window: int = 128
    # one per backbone layer: 0 window only, 4 (with an indexer) or 128
    compress_ratios: tuple[int, ...] = (0, 0, *(4, 128) * 20, 4)
    index_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    hc_mult: int = 4
    hc_iters: int = 20
    hc_eps: float = 1e-6
    num_experts: int = 256
    num_shared_experts: int = 1
    experts_per_token: int = 6
    expert_width: int = 2048
    routed_scale: float = 1.5
    num_hash_layers: int = 3
    swiglu_limit: float = 10.0
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    # None: no YaRN on the compressed layers
    yarn: Yarn | None = Yarn()
    max_positions: int = 1048576
    # "fp4" or "fp8": how the routed experts are stored; "float" in checkpoints that are not quantised
    expert_dtype: str = "fp4"
    bos_id: int | None = 0
    # generation stops at any of these
    eos_ids: tuple[int, ...] = (1,)

    def ratio(self, layer: int) -> int:
        return self.compress_ratios[layer]


# field of ModelConfig: name in config.json, name in inference/config.json, smallest and largest value; what a step
# allocates grows with the largest window and index_topk
_INTEGERS = {
    "vocab_size": ("vocab_size", "vocab_size", 1, 1 << 24),
    "hidden_size": ("hidden_size", "dim", 1, 1 << 17),
    "num_layers": ("num_hidden_layers", "n_layers", 1, 1024),
    "num_heads": ("num_attention_heads", "n_heads", 1, 1024),
    "head_dim": ("head_dim", "head_dim", 2, 1 << 14),
    "rope_dim": ("qk_rope_head_dim", "rope_head_dim", 2, 1 << 14),
    "q_lora_rank": ("q_lora_rank", "q_lora_rank", 1, 1 << 17),
    "o_groups": ("o_groups", "o_groups", 1, 1024),
    "o_lora_rank": ("o_lora_rank", "o_lora_rank", 1, 1 << 17),
    "window": ("sliding_window", "window_size", 1, 1 << 14),
    "index_heads": ("index_n_heads", "index_n_heads", 1, 1024),
    "index_head_dim": ("index_head_dim", "index_head_dim", 2, 1 << 14),
    "index_topk": ("index_topk", "index_topk", 1, 1 << 16),
    "hc_iters": ("hc_sinkhorn_iters", "hc_sinkhorn_iters", 1, 1000),
    "num_experts": ("n_routed_experts", "n_routed_experts", 1, 1 << 16),
    "experts_per_token": ("num_experts_per_tok", "n_activated_experts", 1, 1024),
    "expert_width": ("moe_intermediate_size", "moe_inter_dim", 1, 1 << 17),
}
_NUMBERS = {
    "routed_scale": ("routed_scaling_factor", "route_scale"),
    "swiglu_limit": ("swiglu_limit", "swiglu_limit"),
    "compress_rope_theta": ("compress_rope_theta", "compress_rope_theta"),
}
# fields of which V4 has one value; a config that leaves them out means it
_FIXED: dict[str, Any] = {
    "hc_mult": 4,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "score_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_LAYER_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
# a checkpoint of more experts than this is not V4, and its table of tensors would not fit in memory
_MAX_EXPERTS_IN_ALL = 100_000
# positions are int32
_MAX_POSITIONS = 2**31 - 1


def read_config(source: str | os.PathLike[str] | dict[str, Any]) -> ModelConfig:
    """Read a config; what was assumed or left out is logged.

    Args:
        source: a checkpoint's directory, a config.json, or its contents. Beside a file, the stop tokens of
            generation_config.json are merged in.

    Raises:
        ConfigError: the file is missing or not JSON, a field is missing or absurd, or the architecture is not V4's.
    """
    config, notes = read_config_notes(source)
    for note in notes:
        log.info(note)
    return config


def read_config_notes(source: str | os.PathLike[str] | dict[str, Any]) -> tuple[ModelConfig, list[str]]:
    """`read_config`, and what was assumed or left out as sentences."""
    if isinstance(source, dict):
        return _parse(_Fields(source, "config"))
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"{shown(str(path))}: must be a checkpoint's directory or its config.json, found none")
    path = path / "config.json" if path.is_dir() else path
    fields = _Fields(read_json(path), path.name)
    generation = path.with_name("generation_config.json")
    more = _Fields(read_json(generation), generation.name) if path.name == "config.json" and generation.exists() else None
    return _parse(fields, more)


def read_json(path: Path, error: type[ValueError] = ConfigError, most: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file of bounded size; `error` with one sentence for anything else."""
    try:
        if not path.is_file():
            raise error(f"{path.name}: must be a file, found none in {path.parent}")
        with path.open("rb") as file:
            text = file.read(most + 1)
    except OSError as problem:
        raise error(f"{path.name}: cannot be read: {problem.strerror}") from None
    if len(text) > most:
        raise error(f"{path.name}: must be at most {most} bytes")
    return parse_json(text, path.name, error)


def parse_json(text: bytes, name: str, error: type[ValueError]) -> dict[str, Any]:
    """A JSON object without duplicate keys, NaN or bottomless nesting; `error` with one sentence for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"key {shown(twice)} stands twice")
        return found

    def constant(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise error(f"{name}: is not JSON: nested too deeply") from None
    except ValueError as problem:
        raise error(f"{name}: is not JSON: {shown(str(problem))}") from None
    if not isinstance(value, dict):
        raise error(f"{name}: must be a JSON object, got {type(value).__name__}")
    return value


def shown(value: object) -> str:
    """Untrusted text for a message: one line, no control characters, at most 100 characters."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= 100 and text.isprintable():
        return text
    text = "".join(c if c.isprintable() else "?" for c in text[:400])
    return text if len(text) <= 100 else text[:97] + "..."


class _Fields:
    """The fields of one JSON object, taken out with a check each."""

    def __init__(self, raw: dict[str, Any], name: str):
        self.raw, self.name = raw, name

    def fail(self, field: str, want: str, got: object) -> ConfigError:
        return ConfigError(f"{self.name}: {field} must be {want}, got {shown(got)}")

    def get(self, field: str) -> Any:
        if field not in self.raw:
            raise ConfigError(f"{self.name}: {field} is missing")
        return self.raw[field]

    def integer(self, field: str, low: int, high: int) -> int:
        value = self.get(field)
        if type(value) is not int or not low <= value <= high:
            raise self.fail(field, f"an integer from {low} to {high}", value)
        return value

    def number(self, field: str, above: float = 0) -> float:
        value = self.get(field)
        if type(value) not in (int, float) or not above < value < 1e30:
            raise self.fail(field, f"a number above {above}" if above else "a positive number", value)
        return float(value)

    def inside(self, field: str) -> "_Fields":
        value = self.get(field)
        if not isinstance(value, dict):
            raise self.fail(field, "an object", value)
        return _Fields(value, f"{self.name}: {field}")

    def has(self, field: str) -> bool:
        return self.raw.get(field) is not None


def _parse(fields: _Fields, generation: _Fields | None = None) -> tuple[ModelConfig, list[str]]:
    _refuse_other_architectures(fields)
    raw, notes = fields.raw, list[str]()
    inference = "dim" in raw and "hidden_size" not in raw
    names = {ours: theirs if inference else hf for ours, (hf, theirs, _, _) in _INTEGERS.items()}
    values: dict[str, Any] = {
        ours: fields.integer(names[ours], low, high)
        for ours, (_, _, low, high) in _INTEGERS.items()
        if ours != "rope_dim" or names[ours] in raw or "partial_rotary_factor" not in raw
    }
    # a base of 1 turns nothing, and YaRN divides by its logarithm
    values |= {ours: fields.number(entry[inference], above=int("theta" in ours)) for ours, entry in _NUMBERS.items()}
    for name, want in _FIXED.items():
        if name in raw and (raw[name] != want or type(raw[name]) is not type(want)):
            raise fields.fail(name, f"{want!r}, the only one V4 has", raw[name])
    if "rope_dim" not in values:
        rope = fields.number("partial_rotary_factor") * values["head_dim"]
        if rope != int(rope):
            raise fields.fail("partial_rotary_factor", "a whole number of channels", raw["partial_rotary_factor"])
        values["rope_dim"] = int(rope)

    layers = values["num_layers"]
    values["compress_ratios"], drafts = _ratios(fields, layers)
    values["num_hash_layers"] = _hash_layers(fields, layers, "n_hash_layers" if inference else "num_hash_layers")
    drafts = max(drafts, fields.integer("num_nextn_predict_layers", 0, 64) if fields.has("num_nextn_predict_layers") else 0)
    if drafts:
        kind = "DSpark draft" if drafts > 1 or any("dspark" in key.lower() for key in raw) else "MTP draft"
        notes.append(f"{fields.name}: {drafts} {kind} layer{'s' if drafts > 1 else ''}: any mtp.* tensors are skipped")

    for ours, name in (("norm_eps", "norm_eps" if inference else "rms_norm_eps"), ("hc_eps", "hc_eps")):
        if inference and name not in raw:
            values[ours] = 1e-6
            notes.append(f"{fields.name}: {name} is missing, taken as 1e-6")
        else:
            values[ours] = fields.number(name)
    values |= _inference_rope(fields) if inference else _rope(fields)
    values["expert_dtype"] = _expert_dtype(fields, inference, notes)
    values |= _ids(fields, generation, inference, notes, values["vocab_size"])
    config = ModelConfig(**values)
    _check_sizes(config, fields, names)
    return config, notes


def _refuse_other_architectures(fields: _Fields) -> None:
    """One sentence with everything that is not V4's: V4.1 shares the file's form, and most of its names."""
    raw = fields.raw
    found = []
    for word, what in (("engram", "Engram tables"), ("vision", "a vision tower")):
        if any(word in key.lower() and value not in (None, False) for key, value in raw.items()):
            found.append(what)
    if raw.get("q_head_norm") is False:
        found.append("no RMS norm of the query heads")
    if raw.get("hc_head") is False:
        found.append("hyper-connections without hc_head")
    ratios = raw.get("compress_ratios")
    if isinstance(ratios, list) and (odd := sorted({r for r in ratios if type(r) is int and 0 < r < 128 and r != 4})):
        found.append(f"compress ratio{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd[:8]))}")
    quantization = raw.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if block is not None and block != [128, 128]:
        found.append(f"FP8 blocks of {shown(block)}")
    kind = raw.get("model_type")
    if kind is not None and kind != "deepseek_v4":
        found.insert(0, f"model_type {shown(kind)}")
    if found:
        raise ConfigError(f"{fields.name}: is not a DeepSeek-V4 config: it has {', '.join(found)}")
    if kind is None and "dim" not in raw:
        raise ConfigError(f"{fields.name}: model_type is missing")


def _ratios(fields: _Fields, layers: int) -> tuple[tuple[int, ...], int]:
    """Ratios of the backbone's layers, and how many entries of draft layers follow them."""
    if "compress_ratios" in fields.raw:
        field, ratios = "compress_ratios", fields.get("compress_ratios")
    else:
        field, kinds = "layer_types", fields.get("layer_types")
        if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in _LAYER_RATIOS for kind in kinds):
            raise fields.fail(field, f"a list of {', '.join(_LAYER_RATIOS)}", kinds)
        ratios = [_LAYER_RATIOS[kind] for kind in kinds]
        if fields.has("compress_rates"):
            rates = fields.inside("compress_rates")
            for kind in ("compressed_sparse_attention", "heavily_compressed_attention"):
                if rates.get(kind) != _LAYER_RATIOS[kind]:
                    raise rates.fail(kind, str(_LAYER_RATIOS[kind]), rates.get(kind))
    if not isinstance(ratios, list) or not all(type(ratio) is int and ratio in (0, 4, 128) for ratio in ratios):
        raise fields.fail(field, "a list of 0, 4 and 128", ratios)
    if len(ratios) < layers:
        raise fields.fail(field, f"a list of {layers} or more, one a layer", f"{len(ratios)} entries")
    if any(ratios[layers:]):
        raise fields.fail(field, f"0 after the first {layers} entries, where draft layers stand", ratios[layers:])
    return tuple(ratios[:layers]), len(ratios) - layers


def _hash_layers(fields: _Fields, layers: int, name: str) -> int:
    if name in fields.raw or "mlp_layer_types" not in fields.raw:
        return fields.integer(name, 0, layers)
    kinds = fields.get("mlp_layer_types")
    hashed = kinds.count("hash_moe") if isinstance(kinds, list) else 0
    if hashed > layers or kinds != ["hash_moe"] * hashed + ["moe"] * (layers - hashed):
        raise fields.fail("mlp_layer_types", f"{layers} entries, hash_moe first, then moe", kinds)
    return hashed


def _inference_rope(fields: _Fields) -> dict[str, Any]:
    yarn = Yarn(
        fields.number("rope_factor"),
        fields.number("beta_fast"),
        fields.number("beta_slow"),
        fields.integer("original_seq_len", 1, 1 << 40),
    )
    # the file has no context length: it is YaRN's
    positions = int(yarn.factor * yarn.original_max_positions)
    if not 1 <= positions <= _MAX_POSITIONS:
        raise fields.fail("rope_factor * original_seq_len", f"from 1 to {_MAX_POSITIONS}", positions)
    return {"rope_theta": fields.number("rope_theta", above=1), "yarn": yarn, "max_positions": positions}


def _rope(fields: _Fields) -> dict[str, Any]:
    values: dict[str, Any] = {"max_positions": fields.integer("max_position_embeddings", 1, _MAX_POSITIONS)}
    scaling = None
    if fields.has("rope_parameters") and "main" in fields.inside("rope_parameters").raw:
        nested = fields.inside("rope_parameters")
        main, scaling = nested.inside("main"), nested.inside("compress")
        if main.raw.get("rope_type", "default") != "default":
            raise main.fail("rope_type", "default", main.raw["rope_type"])
        values["rope_theta"] = main.number("rope_theta", above=1)
        values["compress_rope_theta"] = scaling.number("rope_theta", above=1)
    else:
        values["rope_theta"] = fields.number("rope_theta", above=1)
        name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
        scaling = fields.inside(name) if fields.get(name) is not None else None
    values["yarn"] = None
    if scaling is not None:
        field = "rope_type" if "rope_type" in scaling.raw else "type"
        kind = scaling.get(field)
        if kind not in ("yarn", "default"):
            raise scaling.fail(field, "yarn or default", kind)
        for name, want in (("attention_factor", 1), ("mscale", None), ("mscale_all_dim", None), ("truncate", True)):
            if scaling.raw.get(name, want) not in (want, None):
                raise scaling.fail(name, f"{want} or missing: V4 scales no attention", scaling.raw[name])
        if kind == "yarn":
            values["yarn"] = Yarn(
                scaling.number("factor"),
                scaling.number("beta_fast"),
                scaling.number("beta_slow"),
                scaling.integer("original_max_position_embeddings", 1, 1 << 40),
            )
    return values


def _expert_dtype(fields: _Fields, inference: bool, notes: list[str]) -> str:
    named = fields.raw.get("expert_dtype")
    if inference:
        quantised = fields.get("dtype") == "fp8"
        if not quantised and fields.raw["dtype"] not in ("bf16", "fp32"):
            raise fields.fail("dtype", "fp8, bf16 or fp32", fields.raw["dtype"])
    else:
        quantised = fields.has("quantization_config")
        if quantised:
            quantization = fields.inside("quantization_config")
            for name, want in (("quant_method", "fp8"), ("fmt", "e4m3"), ("scale_fmt", "ue8m0")):
                if name == "quant_method" or quantization.has(name):
                    got = quantization.get(name)
                    if got != want:
                        raise quantization.fail(name, want, got)
            quantization.get("weight_block_size")
            named = quantization.raw.get("expert_dtype") if named is None else named
    if named is not None and named not in ("fp4", "fp8"):
        raise fields.fail("expert_dtype", "fp4 or fp8", named)
    if named is not None and not quantised:
        raise fields.fail("expert_dtype", "missing where nothing else is quantised", named)
    if not quantised:
        return "float"
    if named is None:
        notes.append(f"{fields.name}: expert_dtype is missing, taken as fp4")
        return "fp4"
    return named


def _ids(fields: _Fields, generation: _Fields | None, inference: bool, notes: list[str], vocab: int) -> dict[str, Any]:
    if inference and "eos_token_id" not in fields.raw:
        notes.append(f"{fields.name}: token ids are missing, taken as V4's: bos 0, eos 1")
        return {"bos_id": 0, "eos_ids": (1,)}
    bos = fields.integer("bos_token_id", 0, vocab - 1) if fields.has("bos_token_id") else None
    eos = _eos(fields, fields.get("eos_token_id"), vocab)
    if generation is not None:
        eos += [i for i in _eos(generation, generation.raw.get("eos_token_id"), vocab) if i not in eos]
    return {"bos_id": bos, "eos_ids": tuple(eos)}


def _eos(fields: _Fields, value: Any, vocab: int) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < vocab for i in ids):
        raise fields.fail("eos_token_id", f"token ids below {vocab}", value)
    return list(dict.fromkeys(ids))


def _check_sizes(config: ModelConfig, fields: _Fields, names: dict[str, str]) -> None:
    def need(fits: bool, ours: str, want: str) -> None:
        if not fits:
            raise fields.fail(names[ours], want, getattr(config, ours))

    def power_of_two(n: int) -> bool:
        return n & (n - 1) == 0

    need(config.num_heads % config.o_groups == 0, "num_heads", f"divisible by o_groups ({config.o_groups})")
    need(config.rope_dim % 2 == 0 and config.rope_dim <= config.head_dim, "rope_dim", f"even and at most {config.head_dim}")
    need(config.experts_per_token <= config.num_experts, "experts_per_token", f"at most {config.num_experts}")
    need(power_of_two(config.index_head_dim), "index_head_dim", "a power of two")
    need(config.rope_dim <= config.index_head_dim, "index_head_dim", f"at least the rope dim ({config.rope_dim})")
    need(
        config.num_experts * config.num_layers <= _MAX_EXPERTS_IN_ALL,
        "num_experts",
        f"at most {_MAX_EXPERTS_IN_ALL} in all layers together",
    )


def config_json(config: ModelConfig, *, draft_layers: int = 0) -> dict[str, Any]:
    """The official config.json of a checkpoint with `draft_layers` MTP blocks; `read_config` of it gives an equal config."""
    raw: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    raw |= {entry[0]: getattr(config, ours) for ours, entry in (_INTEGERS | _NUMBERS).items()}
    raw |= {name: want for name, want in _FIXED.items() if name not in ("score_func", "mlp_bias")}
    yarn = config.yarn
    raw |= {
        "num_hash_layers": config.num_hash_layers,
        "num_nextn_predict_layers": draft_layers,
        "compress_ratios": [*config.compress_ratios, *[0] * draft_layers],
        "rms_norm_eps": config.norm_eps,
        "hc_eps": config.hc_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": yarn
        and {
            "type": "yarn",
            "factor": yarn.factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "original_max_position_embeddings": yarn.original_max_positions,
        },
        "max_position_embeddings": config.max_positions,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None,
        "torch_dtype": "bfloat16",
    }
    if config.expert_dtype != "float":
        raw["expert_dtype"] = config.expert_dtype
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        } | ({"scale_fmt": "ue8m0"} if config.expert_dtype == "fp4" else {})
    return raw
