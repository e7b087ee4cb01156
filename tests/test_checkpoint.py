import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from small_checkpoint import SMALL, TINY, leaves, write_dir

from deepdecode.checkpoint import (
    CheckpointError,
    load_model,
    open_checkpoint,
    seeded_model,
    seeded_tensors,
    write_checkpoint,
)
from deepdecode.config import config_json
from deepdecode.runner import Runner
from deepdecode.testing.numeric import same_bits

BASE = dataclasses.replace(SMALL, expert_dtype="fp8")
FLOAT = dataclasses.replace(SMALL, expert_dtype="float")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(directory, tensors) of SMALL in the official formats, in several shards."""
    path = tmp_path_factory.mktemp("checkpoint") / "small"
    write_checkpoint(path, SMALL, seeded_tensors(SMALL, 1), shard_bytes=1 << 20)
    return path, dict(seeded_tensors(SMALL, 1))


def rows(tensors, *names):
    return torch.cat([tensors[name].view(torch.uint8) for name in names])


def assert_same(a, b):
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for path in a:
        assert same_bits(a[path], b[path]), path


def test_every_tensor_stands_where_ops_want_it(small):
    path, t = small
    weights = load_model(path)
    assert weights.config == SMALL
    used = {"embed.weight", "head.weight", "norm.weight"}
    assert same_bits(weights.embed, t["embed.weight"])
    assert same_bits(weights.head.head.data, t["head.weight"])
    assert weights.head.head.scale is None
    assert same_bits(weights.head.norm, t["norm.weight"])

    def fused(weight, *names, at):
        used.update(at + name + ".weight" for name in names)
        assert same_bits(weight.data.view(torch.uint8), rows(t, *(at + name + ".weight" for name in names)))
        if weight.scale is None:
            assert weight.data.dtype == torch.bfloat16
        else:
            used.update(at + name + ".scale" for name in names)
            assert same_bits(weight.scale.view(torch.uint8), rows(t, *(at + name + ".scale" for name in names)))

    def plain(tensor, name):
        used.add(name)
        assert same_bits(tensor, t[name])

    def site(site, at):
        for field in ("fn", "base", "scale"):
            plain(getattr(site, field), at + field)

    site(weights.head.hc, "hc_head_")
    for i, (layer, ratio) in enumerate(zip(weights.layers, SMALL.compress_ratios, strict=True)):
        at = f"layers.{i}."
        site(layer.attn_hc, at + "hc_attn_")
        site(layer.ffn_hc, at + "hc_ffn_")
        plain(layer.attn_norm, at + "attn_norm.weight")
        plain(layer.ffn_norm, at + "ffn_norm.weight")
        attn, at_attn = layer.attn, at + "attn."
        compressor = ["compressor.wkv", "compressor.wgate"] if ratio else []
        indexer = ["indexer.compressor.wkv", "indexer.compressor.wgate", "indexer.weights_proj"] if ratio == 4 else []
        fused(attn.q_kv, "wq_a", "wkv", at=at_attn)
        fused(attn.q_b, "wq_b", *(["indexer.wq_b"] if ratio == 4 else []), at=at_attn)
        fused(attn.wo_a, "wo_a", at=at_attn)
        fused(attn.wo_b, "wo_b", at=at_attn)
        if ratio:
            fused(attn.rest, *compressor, *indexer, at=at_attn)
            plain(attn.compressor.ape, at_attn + "compressor.ape")
            plain(attn.compressor.norm, at_attn + "compressor.norm.weight")
        else:
            assert attn.rest is attn.compressor is None
        if ratio == 4:
            plain(attn.index_compressor.ape, at_attn + "indexer.compressor.ape")
            plain(attn.index_compressor.norm, at_attn + "indexer.compressor.norm.weight")
        else:
            assert attn.index_compressor is None
        plain(attn.q_norm, at_attn + "q_norm.weight")
        plain(attn.kv_norm, at_attn + "kv_norm.weight")
        plain(attn.sink, at_attn + "attn_sink")
        moe, at_ffn = layer.moe, at + "ffn."
        plain(moe.gate, at_ffn + "gate.weight")
        assert (moe.bias is None, moe.tid2eid is None) == (i < 1, i >= 1)
        if moe.tid2eid is None:
            plain(moe.bias, at_ffn + "gate.bias")
        else:
            used.add(at_ffn + "gate.tid2eid")
            assert same_bits(moe.tid2eid, t[at_ffn + "gate.tid2eid"].int())
        for e in range(SMALL.num_experts):
            one = [type(w)(w.data[e], w.scale[e]) for w in (moe.w13, moe.w2)]
            fused(one[0], "w1", "w3", at=f"{at_ffn}experts.{e}.")
            fused(one[1], "w2", at=f"{at_ffn}experts.{e}.")
        fused(moe.shared13, "w1", "w3", at=at_ffn + "shared_experts.")
        fused(moe.shared2, "w2", at=at_ffn + "shared_experts.")
        assert moe.first_expert == 0
    assert used == set(t), "a tensor is written that nothing loads"


def test_formats_are_the_official_ones(small):
    t = small[1]
    at = "layers.1."
    form = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in t.items()}
    assert form[at + "attn.wq_b.weight"] == (torch.float8_e4m3fn, [1024, 128])
    assert form[at + "attn.wq_b.scale"] == (torch.float8_e8m0fnu, [8, 1])
    assert form[at + "ffn.experts.3.w1.weight"] == (torch.int8, [1024, 64])
    assert form[at + "ffn.experts.3.w1.scale"] == (torch.float8_e8m0fnu, [1024, 4])
    assert form["layers.0.ffn.gate.tid2eid"] == (torch.int64, [64, 2])
    for name in ("attn.attn_sink", "attn.compressor.ape", "hc_attn_fn", "ffn.gate.bias"):
        assert form[at + name][0] == torch.float32
    for name in ("attn_norm.weight", "attn.compressor.wkv.weight", "ffn.gate.weight"):
        assert form[at + name][0] == torch.bfloat16


# the container is the public one: another reader gives the same bytes, and our reader reads another writer's files
def test_the_safetensors_library_agrees(small, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path, t = small
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(t)
    assert index["metadata"]["total_size"] == sum(x.numel() * x.element_size() for x in t.values())
    assert len(set(index["weight_map"].values())) > 2
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(path / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                assert index["weight_map"][key] == name
                assert same_bits(file.get_tensor(key), t[key]), key
    other = tmp_path / "other"
    other.mkdir()
    save_file(t, other / "model.safetensors")
    (other / "config.json").write_text((path / "config.json").read_text())
    assert_same(load_model(other), load_model(path))


@pytest.mark.parametrize("config", [SMALL, BASE, FLOAT, TINY], ids=["fp4", "fp8", "float", "tiny"])
def test_seeded_model_is_what_load_gives(config, tmp_path):
    write_checkpoint(tmp_path / "c", config, seeded_tensors(config, 3))
    assert_same(load_model(tmp_path / "c"), seeded_model(config, 3))


def test_unquantised_form_of_a_quantised_config(tmp_path):
    write_checkpoint(tmp_path / "c", SMALL, seeded_tensors(SMALL, 3, quantized=False))
    weights = load_model(tmp_path / "c")
    assert_same(weights, seeded_model(SMALL, 3, quantized=False))
    assert {t.dtype for t in leaves(weights).values()} == {torch.float32, torch.int32}


def test_seeds_differ_and_repeat():
    a, b, c = (dict(seeded_tensors(SMALL, seed)) for seed in (0, 0, 1))
    assert all(same_bits(a[name], b[name]) for name in a)
    same = [name for name in a if same_bits(a[name], c[name])]
    # a single block has few scales to choose from
    assert all(name.endswith(".scale") and a[name].numel() < 16 for name in same)
    assert set(dict(seeded_tensors(SMALL, 0, mtp=True))) - set(a) > {"mtp.0.enorm.weight", "mtp.0.h_proj.scale"}


# linears near in ** -0.5 whatever they are stored in; nothing is constant, zero or infinite
@pytest.mark.parametrize("config", [SMALL, BASE, FLOAT], ids=["fp4", "fp8", "float"])
def test_seeded_scale(config):
    from deepdecode.ops.quant import Weight, dequantize

    t = dict(seeded_tensors(config, 0))
    for name, tensor in t.items():
        if name.endswith(".scale") and not name.startswith("hc_"):
            continue
        if name.endswith("tid2eid"):
            assert all(len(set(row.tolist())) == config.experts_per_token for row in tensor)
            continue
        scale = t.get(name.removesuffix("weight") + "scale")
        packed = tensor.view(torch.uint8) if tensor.dtype == torch.int8 else tensor
        values = dequantize(Weight(packed, scale)).double() if scale is not None else tensor.double()
        assert values.isfinite().all()
        if values.numel() > 8:
            assert values.unique().numel() > 4, name
        if len(values.shape) == 2 and values.numel() > 4096 and not name.endswith("ape") and name != "embed.weight":
            assert 0.35 < values.std() * values.shape[1] ** 0.5 < 2.1, name


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
def test_tp_slices_make_the_whole(ways, small):
    path, _ = small
    whole = load_model(path)
    loaded = [load_model(path, slice=f"tp{ways}", rank=rank) for rank in range(ways)]
    assert_same(loaded[-1], load_model(path, slice=(ways, ways - 1)))
    # every head keeps its own sink
    assert [len(weights.layers[1].attn.sink) for weights in loaded] == [SMALL.num_heads // ways] * ways
    assert len(whole.layers[1].attn.sink.unique()) == SMALL.num_heads
    ranks = [leaves(weights) for weights in loaded]
    for name, want in leaves(whole).items():
        want = want.view(torch.uint8) if want.dtype.itemsize == 1 else want
        parts = [rank[name].view(want.dtype) for rank in ranks]
        weight = name.rsplit(".", 2)[-2]
        if name.endswith(("wo_a.data", "wo_a.scale", "head.data", "sink")):
            assert same_bits(torch.cat(parts), want), name
        elif weight in ("wo_b", "w2", "shared2"):
            assert same_bits(torch.cat(parts, -1), want), name
        elif weight in ("w13", "shared13"):
            # w1 above w3 on every rank
            halves = zip(*(part.chunk(2, -2) for part in parts), strict=True)
            assert same_bits(torch.cat([part for half in halves for part in half], -2), want), name
        elif weight == "q_b":
            # the indexer's rows, below the heads', are whole on every rank
            end = SMALL.num_heads * SMALL.head_dim // (1 if name.endswith("data") else 128)
            assert same_bits(torch.cat([part[: end // ways] for part in parts]), want[:end]), name
            assert all(same_bits(part[end // ways :], want[end:]) for part in parts), name
        else:
            assert all(same_bits(part, want) for part in parts), name


def test_ep_slices_make_the_whole(small):
    path, _ = small
    whole, ranks = load_model(path), [load_model(path, slice="dp4ep4", rank=rank) for rank in range(4)]
    for i, layer in enumerate(whole.layers):
        assert [rank.layers[i].moe.first_expert for rank in ranks] == [0, 1, 2, 3]
        for kind in ("w13", "w2"):
            for part in ("data", "scale"):
                parts = [getattr(getattr(rank.layers[i].moe, kind), part).view(torch.uint8) for rank in ranks]
                assert same_bits(torch.cat(parts), getattr(getattr(layer.moe, kind), part).view(torch.uint8))
    want = leaves(whole)
    for rank in ranks:
        for name, tensor in leaves(rank).items():
            if ".moe.w13." not in name and ".moe.w2." not in name:
                assert same_bits(tensor, want[name]), name


def test_seeded_slices_are_slices_of_the_seeded_whole(small):
    path, _ = small
    assert_same(seeded_model(SMALL, 1, slice="tp8", rank=5), load_model(path, slice="tp8", rank=5))
    assert_same(seeded_model(SMALL, 1, slice="dp4ep4", rank=3), load_model(path, slice="dp4ep4", rank=3))


@pytest.mark.parametrize(
    ("slice", "rank", "message"),
    [
        ("tp", 0, r"slice must be None, tpN, dpNepN or \(ways, rank\), got 'tp'"),
        ("dp8ep4", 0, "slice must be None, tpN, dpNepN .* got 'dp8ep4'"),
        ((2, 0, 1), 0, "slice must be None"),
        ("tp0", 0, "slice must be of at least one rank, got 'tp0'"),
        ("tp8", "1", "rank must be from 0 to 7, got '1'"),
        ("tp8", 8, "rank must be from 0 to 7, got 8"),
        ((8, -1), 0, "rank must be from 0 to 7, got -1"),
        ("tp3", 0, r"slice must divide the o_groups \(8\), got 'tp3'"),
        ("tp16", 0, r"slice must divide the o_groups \(8\), got 'tp16'"),
        ("dp16ep16", 0, r"slice must divide the experts \(4\), got 'dp16ep16'"),
    ],
)
def test_refuses_slices(slice, rank, message, small):
    with pytest.raises(ValueError, match="load_model: " + message):
        load_model(small[0], slice=slice, rank=rank)


def test_a_slice_keeps_scale_blocks_whole():
    narrow = dataclasses.replace(SMALL, expert_width=512)
    with pytest.raises(ValueError, match=r"slice must keep blocks of 128 rows whole, got 512 / 8 in layers.0.ffn.shared"):
        seeded_model(narrow, 0, slice="tp8")
    # unquantised weights have no blocks
    weights = seeded_model(narrow, 0, slice="tp8", rank=7, quantized=False)
    want = dict(seeded_tensors(narrow, 0, quantized=False))
    assert same_bits(weights.layers[2].moe.w2.data[3], want["layers.2.ffn.experts.3.w2.weight"][:, -64:].contiguous())


# what is float32 stays it, whatever the activations are
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype(dtype, small):
    path, t = small
    weights = load_model(path, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layer = weights.layers[1]
    for tensor, name in (
        (layer.attn_hc.fn, "hc_attn_fn"),
        (layer.ffn_hc.base, "hc_ffn_base"),
        (layer.attn.sink, "attn.attn_sink"),
        (layer.attn.compressor.ape, "attn.compressor.ape"),
        (layer.moe.bias, "ffn.gate.bias"),
    ):
        assert same_bits(tensor, t["layers.1." + name].to(wide)), name
    assert same_bits(weights.embed, t["embed.weight"].to(dtype))
    assert same_bits(layer.attn.kv_norm, t["layers.1.attn.kv_norm.weight"].to(dtype))
    assert same_bits(layer.attn.rest.data[:256], t["layers.1.attn.compressor.wkv.weight"].to(dtype))
    # packed weights stay packed
    whole = load_model(path).layers[1]
    assert_same(layer.moe.w13, whole.moe.w13)
    assert_same(layer.attn.q_b, whole.attn.q_b)


def test_widened_weights_give_the_same_bits(small):
    """In a step of one token and of several, packed or widened once."""
    stored, wide = (load_model(small[0], widen=widen) for widen in (False, True))
    assert wide.layers[1].moe.w13.data.dtype == torch.float32 and wide.layers[1].moe.w13.scale is None
    told = []
    for weights in (stored, wide):
        runner = Runner(weights, max_len=16, fmt="f32")
        slot = runner.cache.acquire()
        told.append((runner.prefill(slot, [0, 5, 9, 33, 20], every=True), runner.decode([slot], [7], [5])))
    assert all(same_bits(a, b) for a, b in zip(*told, strict=True))


def test_refuses_a_dtype(small):
    with pytest.raises(ValueError, match=r"dtype must be None, bfloat16, float32 or float64, got torch.float16"):
        load_model(small[0], dtype=torch.float16)


# E8M0 codes are read as exponents, never as numbers
def test_scales_are_reinterpreted(small):
    path, t = small
    scale = load_model(path, dtype=torch.float64).layers[0].moe.w13.scale[2, :1024]
    codes = t["layers.0.ffn.experts.2.w1.scale"].view(torch.uint8)
    assert scale.dtype == torch.float8_e8m0fnu
    assert torch.equal(scale.double(), 2.0 ** (codes.double() - 127))


# Flash-Base, with its float32 scales
def test_flash_base(tmp_path):
    write_checkpoint(tmp_path / "c", BASE, seeded_tensors(BASE, 2))
    t = dict(seeded_tensors(BASE, 2))
    moe = load_model(tmp_path / "c").layers[1].moe
    assert same_bits(moe.w2.data[2], t["layers.1.ffn.experts.2.w2.weight"])
    assert same_bits(moe.w2.scale[2], t["layers.1.ffn.experts.2.w2.scale"])
    assert moe.w2.scale.dtype == torch.float32
    # the same files under a config that says FP4
    raw = json.loads((tmp_path / "c" / "config.json").read_text())
    (tmp_path / "c" / "config.json").write_text(json.dumps(raw | {"expert_dtype": "fp4"}))
    message = r"layers.0.attn.wq_a.scale must be F8_E8M0 \[1, 1\], got F32 \[1, 1\]"
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "c")
    found = []
    open_checkpoint(tmp_path / "c", found=found)
    want = "layers.1.ffn.experts.2.w2.weight must be I8 [128, 512] (expert_dtype is fp4), got F8_E4M3 [128, 1024]"
    assert any(want in fault for fault in found)


# the 0731 checkpoint's mtp.* is a DSpark drafter, not an MTP block; neither is loaded
def test_draft_layers_are_skipped(tmp_path):
    t = dict(seeded_tensors(TINY, 0))
    t |= {f"mtp.{i}.dspark.weight": torch.randn(3, 3) for i in range(3)}
    t |= {"mtp.0.emb.tok_emb.weight": torch.randn(11, 32), "mtp.0.head.weight": torch.randn(11, 32)}
    path = write_dir(tmp_path / "c", config_json(TINY, draft_layers=3), t)
    checkpoint = open_checkpoint(path)
    assert checkpoint.notes == ["config.json: 3 DSpark draft layers: any mtp.* tensors are skipped"]
    assert len(checkpoint.drafts) == 5
    assert_same(load_model(path), seeded_model(TINY, 0))
    # a written MTP block is skipped alike
    write_checkpoint(tmp_path / "mtp", TINY, seeded_tensors(TINY, 0, mtp=True))
    assert_same(load_model(tmp_path / "mtp"), seeded_model(TINY, 0))


# the mixture of names that transformers saves, and its own names, against its own state
def test_transformers_names(tmp_path):
    from safetensors.torch import save_file
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(
        vocab_size=32, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=4, head_dim=16,
        partial_rotary_factor=0.25, q_lora_rank=16, o_groups=2, o_lora_rank=8, n_routed_experts=4, num_experts_per_tok=2,
        index_n_heads=2, index_head_dim=8, index_topk=4, mlp_layer_types=["hash_moe", "moe", "moe"],
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        max_position_embeddings=512, dtype="float32",
    )  # fmt: skip
    model = DeepseekV4ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(torch.randint(0, 4, tensor.shape) if name.endswith("tid2eid") else torch.randn(tensor.shape))
    model.save_pretrained(tmp_path / "saved")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    raw = tmp_path / "raw"
    raw.mkdir()
    save_file(state, raw / "model.safetensors")
    (raw / "config.json").write_text((tmp_path / "saved" / "config.json").read_text())
    saved, weights = load_model(tmp_path / "saved"), load_model(raw)
    assert_same(saved, weights)

    def cat(at, *names):
        return torch.cat([state[at + name + ".weight"] for name in names])

    assert same_bits(weights.embed, state["model.embed_tokens.weight"])
    assert same_bits(weights.head.head.data, state["lm_head.weight"])
    assert same_bits(weights.head.hc.fn, state["model.hc_head.hc_fn"])
    layer, at = weights.layers[1], "model.layers.1."
    assert same_bits(layer.attn_norm, state[at + "input_layernorm.weight"])
    assert same_bits(layer.ffn_norm, state[at + "post_attention_layernorm.weight"])
    assert same_bits(layer.attn_hc.scale, state[at + "attn_hc.scale"])
    at += "self_attn."
    assert same_bits(layer.attn.q_kv.data, cat(at, "q_a_proj", "kv_proj"))
    assert same_bits(layer.attn.q_b.data, cat(at, "q_b_proj", "compressor.indexer.q_b_proj"))
    rest = ["compressor." + name for name in ("kv_proj", "gate_proj", "indexer.kv_proj", "indexer.gate_proj")]
    assert same_bits(layer.attn.rest.data, cat(at, *rest, "compressor.indexer.scorer.weights_proj"))
    assert same_bits(layer.attn.kv_norm, state[at + "kv_norm.weight"])
    assert same_bits(layer.attn.compressor.norm, state[at + "compressor.kv_norm.weight"])
    assert same_bits(layer.attn.index_compressor.norm, state[at + "compressor.indexer.kv_norm.weight"])
    assert same_bits(layer.attn.index_compressor.ape, state[at + "compressor.indexer.position_bias"])
    assert same_bits(layer.attn.sink, state[at + "sinks"])
    assert same_bits(layer.moe.w13.data, state["model.layers.1.mlp.experts.gate_up_proj"])
    assert same_bits(layer.moe.w2.data, state["model.layers.1.mlp.experts.down_proj"])
    assert same_bits(layer.moe.shared13.data, cat("model.layers.1.mlp.shared_experts.", "gate_proj", "up_proj"))
    assert same_bits(layer.moe.bias, state["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert same_bits(weights.layers[0].moe.tid2eid, state["model.layers.0.mlp.gate.tid2eid"].int())


# vLLM's names for scales, DeepSeek-V3's for the rest of attention
def test_other_names(small, tmp_path):
    path, t = small
    renamed = {}
    for name, tensor in t.items():
        other = "model." + name if not name.startswith("head.") else "lm_head.weight"
        if name.endswith(".scale") and not name.startswith("hc"):
            other = other.replace(".scale", ".weight_scale" if ".experts." in name else ".weight_scale_inv")
        for ours, theirs in (
            (".attn.wq_a.", ".self_attn.q_a_proj."), (".attn.wq_b.", ".self_attn.q_b_proj."), (".ffn.gate.", ".mlp.gate."),
            (".attn.kv_norm.", ".self_attn.kv_a_layernorm."), (".attn.q_norm.", ".self_attn.q_a_layernorm."),
            (".attn.wkv.", ".self_attn.kv_a_proj_with_mqa."), ("gate.bias", "gate.e_score_correction_bias"),
            ("model.embed.", "model.embed_tokens."), (".shared_experts.w1.", ".shared_experts.gate_proj."),
            (".shared_experts.w2.", ".shared_experts.down_proj."), (".shared_experts.w3.", ".shared_experts.up_proj."),
        ):  # fmt: skip
            other = other.replace(ours, theirs)
        renamed[other] = tensor
    assert len(set(renamed) & set(t)) < 1
    assert_same(load_model(write_dir(tmp_path / "c", config_json(SMALL), renamed, index=True)), load_model(path))


def test_float64_and_mixed_plain_types(tmp_path):
    t = dict(seeded_tensors(TINY, 0))
    t = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in t.items()}
    weights = load_model(write_dir(tmp_path / "c", config_json(TINY), t))
    assert {x.dtype for x in leaves(weights).values()} == {torch.float64, torch.int32}
    assert_same(weights, seeded_model(TINY, 0, dtype=torch.float64))
    # a fused weight takes the widest of its parts' types, so nothing is rounded
    t["layers.1.attn.compressor.wkv.weight"] = t["layers.1.attn.compressor.wkv.weight"].bfloat16()
    rest = load_model(write_dir(tmp_path / "d", config_json(TINY), t)).layers[1].attn.rest.data
    assert rest.dtype == torch.float64
    assert torch.equal(rest[: 2 * TINY.head_dim], t["layers.1.attn.compressor.wkv.weight"].double())


def test_symbolic_links_are_followed(small, tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for i, file in enumerate(sorted(small[0].iterdir())):
        blob = tmp_path / "blobs" / f"{i:064x}"
        blob.write_bytes(file.read_bytes())
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{blob.name}")
    assert_same(load_model(tmp_path / "snapshot"), load_model(small[0]))


def test_device(small, device):
    on_device, on_cpu = leaves(load_model(small[0], device=device)), leaves(load_model(small[0]))
    assert all(t.device.type == device.type and same_bits(t.cpu(), on_cpu[path]) for path, t in on_device.items())


def test_loaded_weights_do_not_depend_on_the_files(tmp_path):
    write_checkpoint(tmp_path / "c", TINY, seeded_tensors(TINY, 0))
    weights = load_model(tmp_path / "c")
    for file in (tmp_path / "c").glob("*.safetensors"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert_same(weights, seeded_model(TINY, 0))


# packed weights and scales are held once, as they are packed, and loading needs one tensor more
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_peak_memory(tmp_path):
    large = dataclasses.replace(SMALL, num_experts=48, vocab_size=4096, num_layers=2, compress_ratios=(0, 4))
    write_checkpoint(tmp_path / "c", large, seeded_tensors(large, 0), shard_bytes=16 << 20)
    write_checkpoint(tmp_path / "tiny", TINY, seeded_tensors(TINY, 0))
    code = """if True:
        import sys, json
        sys.path.insert(0, sys.argv[2])
        from small_checkpoint import leaves
        from deepdecode.checkpoint import load_model, open_checkpoint
        def peak(): return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) * 1024
        def rss(): return int(next(x for x in open("/proc/self/status") if x.startswith("VmRSS")).split()[1]) * 1024
        # what the libraries themselves map when they are first used is not counted
        load_model(sys.argv[1] + "/../tiny")
        open_checkpoint(sys.argv[1])
        before = rss()
        open("/proc/self/clear_refs", "w").write("5")
        weights = load_model(sys.argv[1])
        used = {name: t.untyped_storage().nbytes() for name, t in leaves(weights).items()}
        experts = sum(n for name, n in used.items() if ".w13." in name or ".w2." in name)
        print(json.dumps([peak() - before, sum(used.values()), experts]))
    """
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c"), os.path.dirname(__file__)],
        capture_output=True, text=True, check=True, env=env,
    )  # fmt: skip
    peak, resident, experts = json.loads(out.stdout)
    stored = {name: t.numel() * t.element_size() for name, t in seeded_tensors(large, 0)}
    assert experts == sum(n for name, n in stored.items() if ".experts." in name)
    # expert ids are held as int32
    ids = sum(n for name, n in stored.items() if name.endswith("tid2eid"))
    assert resident == sum(stored.values()) - ids // 2
    # beside them, names and headers as Python objects, and the pages that the kernel maps around one it reads
    assert peak < resident + max(stored.values()) + (4 << 20)


def test_write_is_all_or_nothing(tmp_path):
    def broken():
        yield from list(seeded_tensors(TINY, 0))[:5]
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        write_checkpoint(tmp_path / "c", TINY, broken())
    tensors = dict(seeded_tensors(TINY, 0))
    del tensors["layers.1.attn.wkv.weight"]
    with pytest.raises(CheckpointError, match=r"checkpoint: layers.1.attn.wkv.weight is missing"):
        write_checkpoint(tmp_path / "c", TINY, tensors.items())
    tensors["layers.1.attn.wkv.weight"] = torch.zeros(3, 3)
    with pytest.raises(
        CheckpointError, match=r"layers.1.attn.wkv.weight must be BF16 or F32 or F64 \[16, 32\], got F32 \[3, 3\]"
    ):
        write_checkpoint(tmp_path / "c", TINY, tensors.items())
    with pytest.raises(CheckpointError, match=r"write_checkpoint: embed.weight must come once, got it twice"):
        write_checkpoint(tmp_path / "c", TINY, [*seeded_tensors(TINY, 0), ("embed.weight", torch.zeros(1))])
    with pytest.raises(CheckpointError, match=r"write_checkpoint: x must be of a checkpoint's dtype, got torch.complex64"):
        write_checkpoint(tmp_path / "c", TINY, [("x", torch.zeros(1, dtype=torch.complex64))])
    assert list(tmp_path.iterdir()) == []
    write_checkpoint(tmp_path / "c", TINY, seeded_tensors(TINY, 0))
    before = {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()}
    for error in (CheckpointError, FileExistsError):
        with pytest.raises(error, match=r"c: must not exist or be an empty directory, found something there"):
            write_checkpoint(tmp_path / "c", TINY, seeded_tensors(TINY, 1))
    assert {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    (tmp_path / "d").mkdir()
    write_checkpoint(tmp_path / "d", TINY, seeded_tensors(TINY, 0))
    assert {file.name: file.read_bytes() for file in (tmp_path / "d").iterdir()} == before


def test_interrupted_anywhere_the_target_is_whole_or_absent(tmp_path, monkeypatch):
    """Ctrl-C at the n-th sync, for every n: after each file, after the folder, and after it got its name."""
    real, left = os.fsync, 0

    def fsync(handle):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        real(handle)

    monkeypatch.setattr("os.fsync", fsync)
    want, outcomes = seeded_model(TINY, 0), []
    for n in range(100):
        left, target = n, tmp_path / f"c{n}"
        try:
            write_checkpoint(target, TINY, seeded_tensors(TINY, 0), shard_bytes=20000)
        except KeyboardInterrupt:
            outcomes.append(target.exists())
        else:
            break
        if target.exists():
            assert_same(load_model(target), want)
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    shards = len(list((tmp_path / f"c{n}").glob("*.safetensors")))
    # shards, index and config.json; the folder; its parent, when it has its name
    assert outcomes == [False] * (shards + 2) + [False, True]
    assert shards > 2


def test_a_full_disk_leaves_nothing(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1, 1000, 30_000, 60_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                write_checkpoint(tmp_path / "c", TINY, seeded_tensors(TINY, 0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.iterdir()) == [], limit
    write_checkpoint(tmp_path / "c", TINY, seeded_tensors(TINY, 0))
    assert_same(load_model(tmp_path / "c"), seeded_model(TINY, 0))


def test_two_writers_at_once(tmp_path):
    def meanwhile():
        yield from seeded_tensors(TINY, 1)
        write_checkpoint(tmp_path / "c", TINY, seeded_tensors(TINY, 0))

    with pytest.raises(FileExistsError, match=r"c: must not exist or be an empty directory"):
        write_checkpoint(tmp_path / "c", TINY, meanwhile())
    assert_same(load_model(tmp_path / "c"), seeded_model(TINY, 0))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_extra_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    write_checkpoint(tmp_path / "c", TINY, seeded_tensors(TINY, 0), extra_files=[tmp_path / "tokenizer.json"])
    assert (tmp_path / "c" / "tokenizer.json").read_text() == '{"model": 1}'
    assert_same(load_model(tmp_path / "c"), seeded_model(TINY, 0))
    with pytest.raises(FileNotFoundError):
        write_checkpoint(tmp_path / "d", TINY, seeded_tensors(TINY, 0), extra_files=[tmp_path / "gone.json"])
    assert not (tmp_path / "d").exists()


def test_writing_streams(tmp_path):
    alive = 0

    class Counted(torch.Tensor):
        def __del__(self):
            nonlocal alive
            alive -= 1

    def tensors():
        nonlocal alive
        for name, tensor in seeded_tensors(SMALL, 0):
            counted = tensor.as_subclass(Counted)
            alive += 1
            yield name, counted
            del counted
            # the writer's own two names may still hold the last two
            assert alive <= 2

    write_checkpoint(tmp_path / "c", SMALL, tensors(), shard_bytes=1 << 20)
    assert_same(load_model(tmp_path / "c"), seeded_model(SMALL, 0))


def test_quantised_seeds_need_a_quantised_config():
    with pytest.raises(ValueError, match=r"quantized must be False for a config whose expert_dtype is float, got True"):
        dict(seeded_tensors(TINY, 0, quantized=True))
    with pytest.raises(ValueError, match=r"layers.0.ffn.experts.0.w2.weight must be a multiple of 32 wide for FP4, got"):
        dict(seeded_tensors(dataclasses.replace(TINY, expert_dtype="fp4"), 0))
