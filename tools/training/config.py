"""The embedded model's shape: every layer kind of V4-Flash, its head dim, window, ratios and streams, in under 20 MB.

The real kernels run on it: head dim 512, index head dim 128. An indexer chooses 64 entries of at most 1024 within 4096 tokens.
"""

from deepdecode.config import ModelConfig, Yarn

CONFIG = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    num_layers=5,
    num_heads=4,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    compress_ratios=(0, 0, 4, 128, 4),
    index_heads=4,
    index_topk=64,
    num_experts=16,
    experts_per_token=4,
    expert_width=128,
    num_hash_layers=1,
    yarn=Yarn(original_max_positions=1024),
    max_positions=16384,
    bos_id=0,
    eos_ids=(1,),
)
