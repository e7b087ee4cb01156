"""One layer of the quantised model against its dequantised float32 twin: what the storage formats and bfloat16 cost.

Whole quantised models diverge by nature (an error of a rounding step moves a choice further up), so single layers are
compared, on the same input, with every entry chosen.
"""

import dataclasses

import pytest
import torch

from deepdecode.checkpoint import seeded_model
from deepdecode.kvcache import KVCache
from deepdecode.model import ModelWeights, attention
from deepdecode.ops.quant import Weight, dequantize
from deepdecode.ops.reference import REFERENCE
from deepdecode.testing.numeric import rel_err
from deepdecode.tiny import CONFIG

# the embedded model's sizes; all entries of 220 tokens fit into the choice
WIDE = dataclasses.replace(CONFIG, index_topk=64)
# bfloat16 keeps 8 bits: a chain of a few roundings stays under one percent
BF16_ERR = 1e-2
# E4M3 keeps 4 bits: half a step is at most 1/16 of a value, 2.6 percent in the mean square. A mean over keys of random sign
# shrinks values and their errors alike
FP8_CACHE_ERR = 4e-2


def widened(part):
    """The same weights in float32: stored ones widened exactly, the rest converted."""
    if isinstance(part, Weight):
        return Weight(dequantize(part))
    if isinstance(part, torch.Tensor):
        return part.float() if part.is_floating_point() else part
    if isinstance(part, list):
        return [widened(p) for p in part]
    if dataclasses.is_dataclass(part) and not isinstance(part, type(CONFIG)):
        return type(part)(**{f.name: widened(getattr(part, f.name)) for f in dataclasses.fields(part)})
    return part


@pytest.fixture(scope="module")
def twins() -> tuple[ModelWeights, ModelWeights]:
    stored = seeded_model(WIDE, 6)
    return stored, widened(stored)


def attend(weights, layer, x, fmt):
    """The attention of one layer over 200 prefilled tokens and 20 decoded ones."""
    cache = KVCache(WIDE, slots=1, max_len=256, fmt=fmt)
    slot = cache.acquire()
    cache.reserve(slot, len(x))
    out = []
    for begin, end in [(0, 200), *((t, t + 1) for t in range(200, len(x)))]:
        positions = torch.arange(begin, end, dtype=torch.int32)
        step = cache.step(
            torch.zeros(end - begin, dtype=torch.int64), positions, torch.zeros_like(positions) + slot, end == 200
        )
        layer_weights = weights.layers[layer].attn
        out.append(attention(x[begin:end], layer_weights, cache.layers[layer], step, REFERENCE, WIDE, WIDE.ratio(layer)))
    return torch.cat(out)


@pytest.mark.parametrize(("fmt", "bound"), [("bf16", BF16_ERR), ("fp8_584", FP8_CACHE_ERR)])
@pytest.mark.parametrize("layer", [0, 1, 2], ids=["window", "ratio 4", "ratio 128"])
def test_attention_layer(twins, layer, fmt, bound):
    x = torch.randn(220, WIDE.hidden_size).bfloat16()
    stored, twin = twins
    err = rel_err(attend(stored, layer, x, fmt), attend(twin, layer, x.float(), "f32"))
    # not zero either: a twin that were the same thing would compare nothing
    assert bound / 20 < err < bound


@pytest.mark.parametrize("layer", [0, 3], ids=["hash", "scored"])
def test_moe_layer(twins, layer):
    stored, twin = twins
    x = torch.randn(64, WIDE.hidden_size).bfloat16()
    tokens = torch.randint(0, WIDE.vocab_size, (64,))
    ids, expert_weights = REFERENCE.route(x, tokens, stored.layers[layer].moe, WIDE)
    twin_ids, twin_weights = REFERENCE.route(x.float(), tokens, twin.layers[layer].moe, WIDE)
    # the router computes in float32 on the same input: the same experts
    assert torch.equal(ids, twin_ids)
    out = REFERENCE.moe(x, ids, expert_weights, stored.layers[layer].moe, WIDE)
    assert rel_err(out, REFERENCE.moe(x.float(), twin_ids, twin_weights, twin.layers[layer].moe, WIDE)) < BF16_ERR


def test_hyper_connection_and_head(twins):
    stored, twin = twins
    streams = torch.randn(40, 4, WIDE.hidden_size).bfloat16()
    layer, twin_layer = stored.layers[1], twin.layers[1]
    got = REFERENCE.mhc_boundary(None, streams, None, None, layer.attn_hc, layer.attn_norm, WIDE)
    want = REFERENCE.mhc_boundary(None, streams.float(), None, None, twin_layer.attn_hc, twin_layer.attn_norm, WIDE)
    assert rel_err(got[1], want[1]) < BF16_ERR
    # post and comb stay float32
    assert max(rel_err(got[2], want[2]), rel_err(got[3], want[3])) < 1e-6
    y = torch.randn(40, WIDE.hidden_size).bfloat16()
    logits = REFERENCE.head(y, streams, got[2], got[3], stored.head, WIDE)
    assert rel_err(logits, REFERENCE.head(y.float(), streams.float(), want[2], want[3], twin.head, WIDE)) < BF16_ERR
