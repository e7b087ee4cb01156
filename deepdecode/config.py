"""ModelConfig: what a checkpoint's config.json says, under one set of names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Yarn:
    """YaRN as V4 uses it: frequencies of the compressed layers only, no attention temperature (SPEC 2.0)."""

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
