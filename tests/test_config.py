import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoint import SMALL, TINY

from deepdecode.config import ConfigError, ModelConfig, Yarn, config_json, read_config, read_config_notes

FLASH = ModelConfig()
# the official inference/config.json: other names, no context length, no epsilons, no token ids
INFERENCE = {
    "vocab_size": 129280, "dim": 4096, "moe_inter_dim": 2048, "n_layers": 43, "n_hash_layers": 3, "n_heads": 64,
    "n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 6, "score_func": "sqrtsoftplus",
    "route_scale": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 1024, "head_dim": 512, "rope_head_dim": 64, "o_groups": 8,
    "o_lora_rank": 1024, "window_size": 128, "original_seq_len": 65536, "rope_theta": 10000, "rope_factor": 16,
    "beta_fast": 32, "beta_slow": 1, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4", "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}  # fmt: skip


def official(**changes):
    raw = config_json(FLASH, draft_layers=1) | changes
    return {name: value for name, value in raw.items() if value != "gone"}


def test_official_flash_is_the_default():
    assert read_config(official()) == FLASH


def test_inference_names_give_the_same_model():
    config, notes = read_config_notes(INFERENCE)
    assert config == FLASH
    assert any("norm_eps is missing, taken as 1e-6" in note for note in notes)
    assert any("bos 0, eos 1" in note for note in notes)


def test_0731_draft_entries_are_dropped_and_said():
    config, notes = read_config_notes(official(compress_ratios=[*FLASH.compress_ratios, 0, 0, 0], dspark_block_size=5))
    assert len(config.compress_ratios) == 43
    assert notes == ["config: 3 DSpark draft layers: any mtp.* tensors are skipped"]
    assert read_config_notes(official())[1] == ["config: 1 MTP draft layer: any mtp.* tensors are skipped"]


def test_pro():
    raw = official(
        hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, q_lora_rank=1536, o_groups=16, index_topk=1024,
        n_routed_experts=384, moe_intermediate_size=3072, routed_scaling_factor=2.5,
        compress_ratios=[128, 128, *[4, 128] * 29, 4, 0],
    )  # fmt: skip
    config = read_config(raw)
    assert (config.num_layers, config.compress_ratios[0], config.compress_ratios[-1]) == (61, 128, 4)
    assert (config.routed_scale, config.o_groups, config.num_experts) == (2.5, 16, 384)


# the experts' format is expert_dtype's, not the model's
def test_expert_dtype():
    assert read_config(official(expert_dtype="fp8")).expert_dtype == "fp8"
    config, notes = read_config_notes(official(expert_dtype="gone"))
    assert config.expert_dtype == "fp4"
    assert "config: expert_dtype is missing, taken as fp4" in notes
    inside = official(expert_dtype="gone")
    inside["quantization_config"] = inside["quantization_config"] | {"expert_dtype": "fp8"}
    assert read_config(inside).expert_dtype == "fp8"
    assert read_config(official(expert_dtype="gone", quantization_config="gone")).expert_dtype == "float"
    with pytest.raises(ConfigError, match=r"expert_dtype must be missing where nothing else is quantised, got fp4"):
        read_config(official(quantization_config="gone"))


@pytest.mark.parametrize(
    "config",
    [
        FLASH,
        SMALL,
        TINY,
        replace(FLASH, expert_dtype="fp8", yarn=None, bos_id=None, eos_ids=()),
        replace(FLASH, yarn=Yarn(4.0, 16.0, 2.0, 512), eos_ids=(1, 5), norm_eps=1e-20, num_hash_layers=0),
    ],
    ids=["flash", "small", "tiny", "base", "odd"],
)
def test_round_trip(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    assert read_config(tmp_path) == config
    assert read_config(tmp_path / "config.json") == config


def test_transformers_config_round_trip(tmp_path):
    from transformers import DeepseekV4Config

    ours = replace(FLASH, expert_dtype="float")
    theirs = DeepseekV4Config(
        rope_scaling={
            "type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 65536,
        },
        layer_types=[
            {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}[ratio]
            for ratio in FLASH.compress_ratios
        ],
    )  # fmt: skip
    assert read_config(theirs.to_dict()) == ours
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path) == ours
    # without YaRN, with other sizes
    plain = DeepseekV4Config(
        num_hidden_layers=3, head_dim=64, partial_rotary_factor=0.25, mlp_layer_types=["hash_moe", "moe", "moe"],
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"], eos_token_id=[1, 7],
    )  # fmt: skip
    config = read_config(plain.to_dict())
    assert (config.yarn, config.rope_dim, config.num_hash_layers, config.eos_ids) == (None, 16, 1, (1, 7))
    assert config.compress_ratios == (0, 4, 128)
    assert (config.rope_theta, config.compress_rope_theta) == (10000.0, 160000.0)


def test_generation_config_adds_stop_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(FLASH)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 128803]}))
    assert read_config(tmp_path).eos_ids == (1, 128803)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 129280}))
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id must be token ids below 129280, got 129280"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "gone"}, "config: hidden_size is missing"),
        ({"eos_token_id": "gone"}, "config: eos_token_id is missing"),
        ({"rope_scaling": "gone"}, "config: rope_scaling is missing"),
        ({"compress_ratios": "gone"}, "config: layer_types is missing"),
        ({"num_hash_layers": "gone"}, "config: num_hash_layers is missing"),
        ({"rms_norm_eps": "gone"}, "config: rms_norm_eps is missing"),
        ({"model_type": "gone"}, "config: model_type is missing"),
        ({"hidden_size": -4096}, "hidden_size must be an integer from 1 to 131072, got -4096"),
        ({"hidden_size": 4096.0}, "hidden_size must be an integer .* got 4096.0"),
        ({"hidden_size": True}, "hidden_size must be an integer .* got True"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer .* got 0"),
        ({"num_attention_heads": 60}, r"num_attention_heads must be divisible by o_groups \(8\), got 60"),
        ({"n_routed_experts": 10**9}, "n_routed_experts must be an integer .* got 1000000000"),
        ({"n_routed_experts": 60000}, "n_routed_experts must be at most 100000 in all layers together, got 60000"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok must be at most 256, got 257"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even and at most 512, got 63"),
        ({"index_head_dim": 96}, "index_head_dim must be a power of two, got 96"),
        ({"index_head_dim": 32}, r"index_head_dim must be at least the rope dim \(64\), got 32"),
        ({"swiglu_limit": 0}, "swiglu_limit must be a positive number, got 0"),
        ({"swiglu_limit": "10"}, "swiglu_limit must be a positive number, got 10"),
        ({"compress_ratios": [0, 4, 8] * 15}, "not a DeepSeek-V4 config: it has compress ratio 8"),
        ({"compress_ratios": [0, 4, 256] * 15}, r"compress_ratios must be a list of 0, 4 and 128, got \[0, 4, 256"),
        ({"compress_ratios": [0, 4]}, "compress_ratios must be a list of 43 or more, one a layer, got 2 entries"),
        ({"compress_ratios": [4] * 44}, r"compress_ratios must be 0 after the first 43 entries.* got \[4\]"),
        ({"hc_mult": 2}, "hc_mult must be 4, the only one V4 has, got 2"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sqrtsoftplus', the only one V4 has, got softmax"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, .* got True"),
        ({"num_hash_layers": 44}, "num_hash_layers must be an integer from 0 to 43, got 44"),
        ({"expert_dtype": "int4"}, "expert_dtype must be fp4 or fp8, got int4"),
        ({"eos_token_id": 129280}, "eos_token_id must be token ids below 129280, got 129280"),
        ({"rope_scaling": {"type": "linear"}}, "config: rope_scaling: type must be yarn or default, got linear"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "config: rope_scaling: beta_fast is missing"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: quant_method must be fp8, got awq"),
        ({"sliding_window": 1 << 20}, "sliding_window must be an integer from 1 to 16384, got 1048576"),
        ({"index_topk": 1 << 20}, "index_topk must be an integer from 1 to 65536, got 1048576"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings must be an integer from 1 to 2147483647, got"),
        ({"rope_theta": 1}, "config: rope_theta must be a number above 1, got 1"),
        ({"compress_rope_theta": 1.0}, "config: compress_rope_theta must be a number above 1, got 1.0"),
        ({"num_hash_layers": "gone", "mlp_layer_types": ["hash_moe"] * 44}, "mlp_layer_types must be 43 entries"),
        ({"model_type": "llama"}, "not a DeepSeek-V4 config: it has model_type llama"),
        ({"model_type": "deepseek_v4\x1b[2J"}, r"model_type deepseek_v4\?\[2J"),
    ],
)  # fmt: skip
def test_refuses(changes, message):
    with pytest.raises(ConfigError, match=message):
        read_config(official(**changes))


def test_inference_config_has_a_context_that_positions_can_count():
    for factor, positions in ((1e-9, 0), (1e9, 65536 * 10**9)):
        message = rf"rope_factor \* original_seq_len must be from 1 to 2147483647, got {positions}"
        with pytest.raises(ConfigError, match=message):
            read_config(INFERENCE | {"rope_factor": factor})


# V4 multiplies no attention temperature in
def test_refuses_an_attention_factor():
    scaling = official()["rope_scaling"]
    for name in ("attention_factor", "mscale"):
        with pytest.raises(ConfigError, match=f"{name} must be .* V4 scales no attention, got 1.277"):
            read_config(official(rope_scaling=scaling | {name: 1.277}))


def test_v41_is_refused_with_what_differs():
    raw = official(
        num_hidden_layers=40, compress_ratios=[0, 0, *[2] * 18, *[1] * 20, 0, 0, 0], q_head_norm=False,
        engram_vocab_size=1000, vision_config={"depth": 2},
    )  # fmt: skip
    raw["quantization_config"] = raw["quantization_config"] | {"weight_block_size": [32, 32]}
    message = (
        "not a DeepSeek-V4 config: it has Engram tables, a vision tower, no RMS norm of the query heads, "
        r"compress ratios 1, 2, FP8 blocks of \[32, 32\]"
    )
    with pytest.raises(ConfigError, match=message):
        read_config(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "config.json: is not JSON"),
        (b"\xff\xfe{}", "config.json: is not JSON"),
        (b"[1]", "config.json: must be a JSON object, got list"),
        (b'{"a": 1, "a": 2}', "config.json: is not JSON: key a stands twice"),
        (b'{"a": NaN}', "config.json: is not JSON: NaN is not JSON"),
        (b'{"a": ' + b"[" * 100000, "config.json: is not JSON: nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "config.json: "),
    ],
    ids=["empty", "binary", "list", "twice", "nan", "deep", "huge"],
)
def test_refuses_files(text, message, tmp_path):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json: must be a file, found none in "):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere: must be a checkpoint's directory or its config.json, found none"):
        read_config(tmp_path / "nowhere")


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)


@given(name=st.sampled_from(sorted(official())), value=VALUES | st.just("gone"))
@settings(max_examples=200, deadline=None)
def test_any_field_is_right_or_refused(name, value):
    raw = official(**{name: value})
    try:
        config = read_config(raw)
    except ConfigError:
        with pytest.raises(ConfigError, match=r"\Aconfig: [^\n]+\Z"):
            read_config(raw)
    else:
        assert read_config(config_json(config)) == config
