"""The benchmarks of products and experts without a GPU: their sizes are the model's, and rivals compute the same."""

import pytest
import torch

from deepdecode.bench import linear as bench
from deepdecode.bench import moe as bench_moe
from deepdecode.config import ModelConfig
from deepdecode.testing.experts import random_weight
from deepdecode.testing.numeric import rel_err

BF16_STEP = 4e-3


def test_sets_are_the_models():
    c = ModelConfig()
    whole = {case.name: (case.groups * case.out, case.width) for case in bench.SETS if case.ways == 1}
    index = c.index_heads * c.index_head_dim
    assert whole["q_kv"] == (c.q_lora_rank + c.head_dim, c.hidden_size)
    beside = {case.name: case.beside for case in bench.SETS if case.beside}
    assert beside["q_kv and rest, ratio 4"] == 4 * c.head_dim + 4 * c.index_head_dim + c.index_heads
    assert beside["q_kv and rest, ratio 128"] == 2 * c.head_dim
    assert all(whole[name] == whole["q_kv"] for name in beside)
    assert whole["q_b"] == (c.num_heads * c.head_dim + index, c.q_lora_rank)
    assert whole["wo_a"] == (c.o_groups * c.o_lora_rank, c.num_heads * c.head_dim // c.o_groups)
    assert whole["wo_b"] == (c.hidden_size, c.o_groups * c.o_lora_rank)
    assert whole["head"] == (c.vocab_size, c.hidden_size)
    # a rank of 8 has an eighth of the heads, and the whole indexer
    part = {case.name: (case.groups * case.out, case.width) for case in bench.SETS if case.ways == 8}
    assert part["q_b"] == (c.num_heads * c.head_dim // 8 + index, c.q_lora_rank)
    assert part["wo_b"] == (c.hidden_size, c.o_groups * c.o_lora_rank // 8)
    assert part["head"] == (c.vocab_size // 8, c.hidden_size)


def test_ranks_are_the_models():
    c = ModelConfig()
    widths = {rank.name: (rank.E, rank.width, rank.experts) for rank in bench_moe.RANKS}
    assert widths == {
        "tp1": (c.num_experts, c.expert_width, c.num_experts),
        "tp8": (c.num_experts, c.expert_width // 8, c.num_experts),
        "ep8": (c.num_experts // 8, c.expert_width, c.num_experts),
    }


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["deepdecode", "torch.matmul, bfloat16 copy", "dequantise, torch.matmul"])
def test_implementations_of_products_agree(name, groups):
    case = bench.Set("some", 1, groups, 640, 128)
    weight = random_weight(groups * 640, 128, kind="fp8", device="cpu", generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, groups, 128).bfloat16()
    want = torch.einsum("tgk,gok->tgo", x.double(), bench._first_rows(case, weight))
    (got,) = bench.IMPLEMENTATIONS[name](x, weight, None, torch.bfloat16)()
    assert rel_err(got[:, :, :512], want) < BF16_STEP
    if groups == 1:
        beside = random_weight(70, 128, kind="bf16", device="cpu", generator=torch.Generator().manual_seed(1))
        got, other = bench.IMPLEMENTATIONS[name](x, weight, beside, torch.bfloat16)()
        assert rel_err(got[:, :, :512], want) < BF16_STEP
        assert rel_err(other[:, 0], x[:, 0].double() @ beside.data.double().T) < BF16_STEP
