"""Configs and helpers that the checkpoint tests share."""

import dataclasses
import json

import torch

from deepdecode.checkpoint.container import DTYPE_NAMES, append, header_bytes
from deepdecode.checkpoint.open import INDEX
from deepdecode.config import ModelConfig, Yarn

# every ratio, a hash layer, and sizes that 8 ranks can share in whole blocks of scales
SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=128,
    num_layers=3,
    num_heads=8,
    head_dim=128,
    rope_dim=16,
    q_lora_rank=128,
    o_groups=8,
    o_lora_rank=128,
    compress_ratios=(0, 4, 128),
    index_heads=4,
    index_head_dim=32,
    index_topk=16,
    num_experts=4,
    experts_per_token=2,
    expert_width=1024,
    num_hash_layers=1,
    max_positions=4096,
    expert_dtype="fp4",
)
# as small as a model gets
TINY = dataclasses.replace(
    SMALL, hidden_size=32, num_layers=2, head_dim=16, rope_dim=4, num_heads=2, q_lora_rank=16, o_groups=2, o_lora_rank=8,
    compress_ratios=(0, 4), index_heads=1, index_head_dim=8, num_experts=3, expert_width=16, vocab_size=11,
    expert_dtype="float",
)  # fmt: skip
# V4-Flash's head dims, window and ratios, which its kernels and caches are for
HEADS = ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    compress_ratios=(0, 4, 128, 4),
    index_heads=4,
    index_topk=32,
    num_experts=16,
    experts_per_token=2,
    expert_width=256,
    num_hash_layers=1,
    yarn=Yarn(original_max_positions=1024),
    max_positions=16384,
)

# every ratio and kind of router in float32, entries dropped early
PLAIN = ModelConfig(
    vocab_size=256,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    head_dim=64,
    rope_dim=16,
    q_lora_rank=64,
    o_groups=2,
    o_lora_rank=32,
    compress_ratios=(0, 4, 128, 4),
    index_heads=4,
    index_head_dim=32,
    index_topk=16,
    num_experts=8,
    experts_per_token=2,
    expert_width=64,
    num_hash_layers=1,
    yarn=Yarn(original_max_positions=256),
    max_positions=2048,
    expert_dtype="float",
    eos_ids=(),
)


def leaves(weights, at=""):
    """Every tensor of a tree of dataclasses, by path."""
    if isinstance(weights, torch.Tensor):
        return {at: weights}
    if isinstance(weights, list):
        children = enumerate(weights)
    elif dataclasses.is_dataclass(weights):
        children = ((f.name, getattr(weights, f.name)) for f in dataclasses.fields(weights))
    else:
        return {}
    return {path: t for key, child in children for path, t in leaves(child, f"{at}.{key}").items()}


def write_file(path, tensors, metadata=None):
    """A safetensors file with these tensors, whatever they are called."""
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    with path.open("wb") as file:
        file.write(header_bytes(((n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in order), metadata))
        for _, tensor in order:
            append(file, tensor)


def write_dir(path, raw_config, tensors, *, index=False):
    """A checkpoint that `write_checkpoint` would refuse to write: one file, any config."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw_config))
    write_file(path / "model.safetensors", tensors)
    if index:
        (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    return path
