import dataclasses
import json
import time

import pytest
import torch
from small_checkpoint import SMALL, TINY, write_dir, write_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deepdecode.cards import find_card
from deepdecode.checkpoint import CheckpointError, load_model, seeded_tensors, write_checkpoint
from deepdecode.checkpoint.container import DTYPE_NAMES, DTYPES, header_bytes
from deepdecode.checkpoint.layout import packed_shapes, packing, scale_name, tensor_specs
from deepdecode.checkpoint.open import INDEX
from deepdecode.cli import main
from deepdecode.config import ModelConfig, config_json
from deepdecode.inspect import MAX_LINES, inspect_dir
from deepdecode.kvcache import plan_cache
from deepdecode.tiny import CONFIG, EMBEDDED

FLASH = ModelConfig()
GB = 1e9


def official_forms(config, *, mtp=True):
    """(name, dtype, shape) of the official checkpoint, without a byte of it."""
    for name, spec in tensor_specs(config, mtp=mtp).items():
        how = packing(spec, config.expert_dtype)
        if how is None:
            yield name, {"plain": "BF16", "ids": "I64"}.get(spec.kind, "F32"), spec.shape
        else:
            data, scale = packed_shapes(spec.shape, how)
            yield name, "I8" if how == "fp4" else "F8_E4M3", data
            yield scale_name(name), "F8_E8M0", scale


def with_tokenizer(path, tokens=11):
    """The folder, with a tokenizer of so many words."""
    Tokenizer(WordLevel({f"w{i}": i for i in range(tokens)}, unk_token="w0")).save(str(path / "tokenizer.json"))
    return path


def sparse_checkpoint(path, config, shards):
    """The official headers over files that are all hole: true sizes, no bytes on disk."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_json(config, draft_layers=1)))
    forms = list(official_forms(config))
    listed = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = forms[i * len(forms) // shards : (i + 1) * len(forms) // shards]
        header = header_bytes(part)
        size = sum(torch.Size(shape).numel() * DTYPES[dtype].itemsize for _, dtype, shape in part)
        with (path / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + size)
        listed |= {tensor: name for tensor, _, _ in part}
    (path / INDEX).write_text(json.dumps({"weight_map": listed}))
    return with_tokenizer(path)


@pytest.fixture(scope="module")
def flash(tmp_path_factory):
    path = sparse_checkpoint(tmp_path_factory.mktemp("flash") / "DeepSeek-V4-Flash", FLASH, 46)
    start = time.perf_counter()
    return inspect_dir(path, read_bytes=1 << 20), time.perf_counter() - start, path


# the official checkpoint has 159.6 GB, 3.6 GB of it MTP
def test_flash_sizes(flash):
    report, seconds, path = flash
    assert report.faults == []
    assert report.kind == "DeepSeek-V4-Flash"
    assert round(report.bytes / GB, 1) == 159.6
    assert round(report.components["draft layers (skipped)"] / GB, 1) == 3.6
    assert round(report.components["routed experts"] / GB, 2) == 147.17
    assert round(report.parameters / GB) == 284
    assert len(report.shards) == 46
    apparent = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert apparent == sum(shard["bytes"] for shard in report.shards) > 159e9
    # 140 thousand tensors; a loaded machine has several times what this takes
    assert seconds < 30


# by hand from the official shapes: GB of a step that touches everything but the routed experts, TP1
@pytest.mark.parametrize(
    ("component", "gb"),
    [
        ("attention, cut by heads", 4.329),
        ("attention, on every rank", 0.271),
        ("compressors of ratio 4", 0.353),
        ("indexer", 0.275),
        ("compressors of ratio 128", 0.173),
        ("hyper-connections", 0.135),
        ("gate", 0.091),
        ("shared experts", 1.082),
        ("head", 1.059),
    ],
)
def test_flash_components(component, gb, flash):
    assert abs(flash[0].components[component] / GB - gb) <= 0.0011


def test_components_add_up(flash):
    assert sum(flash[0].components.values()) == flash[0].bytes == sum(flash[0].dtypes.values())


# worked by hand: what is cut over the ranks, and what is not
def test_flash_fits(flash):
    report = flash[0]
    c = report.components
    cut = c["attention, cut by heads"] + c["routed experts"] + c["shared experts"] + FLASH.vocab_size * FLASH.hidden_size * 2
    whole = report.bytes - c["draft layers (skipped)"] - cut
    fits = {fit.card: fit for fit in report.fits}
    assert {name: fit.cards for name, fit in fits.items()} == {
        "A100-80": 2, "RTX 3090": 8, "L40S": 4, "RTX 4090": 8, "H100 SXM": 2, "H200": 2, "B200": 1, "RTX PRO 6000": 2,
        "RTX 5090": 8, "DGX Spark GB10": 2,
    }  # fmt: skip
    for fit in fits.values():
        assert abs(fit.weights - (whole + cut / fit.cards)) < 1e4
        assert fit.weights + report.cache_bytes <= fit.memory * GB
        assert fit.tokens >= report.cache_tokens == 32768
    # 3850 bytes a token beside 12 MB of state
    assert 3850 * 32768 < report.cache_bytes < 1.05 * 3850 * 32768 + 20e6


def test_what_was_not_searched_is_said(flash):
    report = flash[0]
    assert 0 < report.scale_bytes_read < 4e6
    assert round(report.scale_bytes / GB, 2) == 8.66
    assert f"scales searched for NaN: {report.scale_bytes_read / 1e6:.2f} MB of 8.66 GB (--full: all)" in report.to_text()
    # 64 KiB at a time, no more than the limit
    assert 15 * 65536 <= report.plain_bytes_read <= 16 * 65536
    plain = ("embedding", "head", "gate", "compressors of ratio 4", "compressors of ratio 128")
    assert sum(report.components[name] for name in plain) * 0.98 < report.plain_bytes < 3e9
    assert f"plain weights searched for NaN and infinity: 1.05 MB of {report.plain_bytes / 1e9:.2f} GB" in report.to_text()


def test_how_to_start_is_said(flash):
    report, _, path = flash
    command = f"-m deepdecode generate PROMPT --checkpoint {path}"
    assert f"start on N cards: torchrun --nproc-per-node N {command}\n" in report.to_text()
    # a B200 holds it alone
    assert f"start on one card: deepdecode generate PROMPT --checkpoint {path}\n" in report.to_text()
    assert report.to_json()["path"] == str(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect") / "small"
    write_checkpoint(path, SMALL, seeded_tensors(SMALL, 0, mtp=True), shard_bytes=1 << 20)
    return with_tokenizer(path)


def test_small(small):
    report = inspect_dir(small)
    t = dict(seeded_tensors(SMALL, 0, mtp=True))
    assert report.faults == []
    assert report.tensors == len(t)
    assert report.bytes == sum(tensor.numel() * tensor.element_size() for tensor in t.values())
    drafts = sum(tensor.numel() * tensor.element_size() for name, tensor in t.items() if name.startswith("mtp."))
    assert report.components["draft layers (skipped)"] == drafts
    assert report.dtypes["I8"] == sum(tensor.numel() for tensor in t.values() if tensor.dtype == torch.int8)
    # what is loaded has as many numbers as the report says parameters, two in a byte of FP4
    kept = sum(
        tensor.numel() * (1 + (tensor.dtype == torch.int8))
        for name, tensor in t.items()
        if not name.startswith("mtp.") and not name.endswith((".scale", ".tid2eid"))
    )
    assert report.parameters == kept
    assert report.scale_bytes_read == report.scale_bytes > 0
    assert (
        report.plain_bytes_read
        == report.plain_bytes
        == sum(
            tensor.nbytes
            for name, tensor in t.items()
            if not name.startswith("mtp.") and name.endswith(".weight") and tensor.dtype == torch.bfloat16 and tensor.dim() == 2
        )
    )
    assert report.notes == ["config.json: 1 MTP draft layer: any mtp.* tensors are skipped"]
    assert report.kind == "DeepSeek-V4 in sizes of its own"


def test_cards_that_are_too_small(small, monkeypatch):
    # 11 MB of weights, of which a rank of 8 still has 2: none fits in nothing
    card = dataclasses.replace(find_card("H100"), name="none", memory=0)
    monkeypatch.setattr("deepdecode.inspect.CARDS", (card, find_card("H100")))
    report = inspect_dir(small)
    assert [fit.cards for fit in report.fits] == [None, 1]
    assert "none                  0 GB       -   not on 16 or fewer" in report.to_text()


def test_json_and_text(small):
    report = inspect_dir(small)
    document = json.loads(json.dumps(report.to_json()))
    assert document["schema"] == 1
    assert document["config"]["compress_ratios"] == [0, 4, 128]
    assert document["components"] == report.components
    text = report.to_text()
    assert "3 layers (ratio 0: 1, 4: 1, 128: 1), hidden 128, 8 heads of 128, vocabulary 64" in text
    assert text.endswith("no faults")
    assert f"{report.parameters:,} parameters" in text


def test_unquantised(tmp_path):
    flat = dataclasses.replace(TINY, expert_dtype="float")
    write_checkpoint(tmp_path / "c", flat, seeded_tensors(flat, 0))
    report = inspect_dir(with_tokenizer(tmp_path / "c"))
    assert (report.faults, report.scale_bytes) == ([], 0)
    assert set(report.dtypes) == {"F32", "I64"}
    assert "16, 2 a token, not quantised" in report.to_text()


def test_every_fault_is_reported(tmp_path):
    t = dict(seeded_tensors(SMALL, 0))
    nan = t["layers.1.ffn.experts.2.w2.scale"].view(torch.uint8).clone()
    nan[3, 5] = nan[0, 0] = 255
    t["layers.1.ffn.experts.2.w2.scale"] = nan.view(torch.float8_e8m0fnu)
    t["layers.0.ffn.gate.tid2eid"] = t["layers.0.ffn.gate.tid2eid"] - 1
    del t["layers.2.attn.compressor.ape"]
    t["surprise\x1b[2J"] = torch.ones(1)
    path = with_tokenizer(write_dir(tmp_path / "c", config_json(SMALL), t))
    report = inspect_dir(path)
    assert report.faults == [
        "checkpoint: layers.2.attn.compressor.ape is missing",
        "model.safetensors: surprise?[2J is not a tensor of this config",
        "model.safetensors: layers.0.ffn.gate.tid2eid must hold experts from 0 to 3, got -1 to 2",
        "model.safetensors: layers.1.ffn.experts.2.w2.scale must not hold NaN (code 255), got 2 in 4096",
    ]
    text = report.to_text()
    assert "4 faults" in text
    assert all(fault in text for fault in report.faults)
    assert text.replace("\n", "").isprintable()
    assert report.fits == []
    with pytest.raises(CheckpointError, match=r"layers.2.attn.compressor.ape is missing"):
        load_model(path)


def test_nan_where_every_token_meets_it_is_a_fault(tmp_path):
    config = dataclasses.replace(SMALL, expert_dtype="fp8")
    t = dict(seeded_tensors(config, 0))
    t["layers.0.attn.wkv.scale"][0, 0] = float("inf")
    for name in ("norm.weight", "layers.1.hc_ffn_fn", "layers.2.attn.attn_sink", "layers.2.ffn.gate.bias"):
        t[name].view(-1)[1] = float("nan")
    # a sink and an expert that are switched off
    t["layers.1.attn.attn_sink"][0] = t["layers.1.ffn.gate.bias"][0] = float("-inf")
    path = with_tokenizer(write_dir(tmp_path / "c", config_json(config), t))
    found = [fault.removeprefix("model.safetensors: ") for fault in inspect_dir(path).faults]
    assert sorted(found) == [
        "layers.0.attn.wkv.scale must not hold NaN or infinity, got 1 in 1",
        "layers.1.hc_ffn_fn must not hold NaN, got 1 in 12288",
        "layers.2.attn.attn_sink must not hold NaN, got 1 in 8",
        "layers.2.ffn.gate.bias must not hold NaN, got 1 in 4",
        "norm.weight must not hold NaN, got 1 in 128",
    ]
    # what inspect finds, loading refuses
    with pytest.raises(CheckpointError, match=r"model.safetensors: layers.0.attn.wkv.scale must not hold NaN or infinity"):
        load_model(path)


# (what is done to the file, what is said of it); generate refuses it, or the prompts with such an id
@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda file: file.unlink(), "tokenizer: {path} must have a tokenizer.json, got none"),
        (lambda file: file.write_text("{}"), "tokenizer: {path}/tokenizer.json must be a tokenizers file, got: "),
        (lambda file: with_tokenizer(file.parent, 12), "tokenizer.json: token ids must be below 11 (vocab_size), got 11"),
    ],
    ids=["none", "broken", "of another model"],
)
def test_a_tokenizer_that_does_not_fit_is_a_fault(spoil, fault, tmp_path):
    path = with_tokenizer(write_dir(tmp_path / "c\x1b", config_json(TINY), dict(seeded_tensors(TINY, 0))))
    assert inspect_dir(path).faults == []
    spoil(path / "tokenizer.json")
    report = inspect_dir(path)
    (found,) = report.faults
    assert found.startswith(fault.format(path=f"{tmp_path}/c?"))
    # the cards are still told, the command that would fail is not
    assert report.fits
    assert "start on" not in report.to_text()


def test_nan_in_plain_weights_is_a_fault(tmp_path):
    t = dict(seeded_tensors(SMALL, 0))
    t["embed.weight"] = torch.full_like(t["embed.weight"], float("nan"))
    t["head.weight"][-1, -1] = float("inf")
    path = with_tokenizer(write_dir(tmp_path / "c", config_json(SMALL), t))
    assert inspect_dir(path).faults == [
        "model.safetensors: embed.weight must not hold NaN or infinity, got 8192 in 8192",
        "model.safetensors: head.weight must not hold NaN or infinity, got 1 in 8192",
    ]


def test_a_large_weight_is_searched_in_chunks_over_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr("deepdecode.inspect.CHUNK", 64)
    weight = torch.ones(64, 32)
    # in chunk 96 of 128, of 16 numbers each: every second chunk finds it, the first half or the first chunk does not
    weight.view(-1)[96 * 16 + 5] = float("nan")
    t = dict(seeded_tensors(TINY, 0)) | {"extra.weight": weight}
    path = with_tokenizer(write_dir(tmp_path / "c", config_json(TINY), t))
    size = inspect_dir(path, read_bytes=None).plain_bytes

    def found(chunks):
        # other weights take their share of the limit
        faults = inspect_dir(path, read_bytes=size * chunks // 128 + 1).faults
        return [fault.removeprefix("model.safetensors: ") for fault in faults if "infinity" in fault]

    assert found(128) == ["extra.weight must not hold NaN or infinity, got 1 in 2048"]
    assert found(64) == ["extra.weight must not hold NaN or infinity, got 1 in 1024"]
    assert found(1) == []
    assert inspect_dir(path, read_bytes=0).plain_bytes_read == 0
    for limit in (64, 1000, 10000):
        assert limit - 64 * 8 <= inspect_dir(path, read_bytes=limit).plain_bytes_read <= limit + 64


def test_context_and_cache_format(small, tmp_path, capsys):
    assert inspect_dir(small).cache_tokens == 4096
    short = inspect_dir(small, cache_tokens=512, cache_format="f32")
    assert (short.cache_tokens, short.cache_format) == (512, "f32")
    assert short.cache_bytes == plan_cache(SMALL, max_len=512, fmt="f32").total
    assert inspect_dir(small, cache_tokens=512).cache_bytes == plan_cache(SMALL, max_len=512, fmt="bf16").total
    # 128 channels a head are not what a row of 584 bytes holds
    for wrong, message in (
        ({"cache_tokens": 4097}, r"inspect: --context must be at most 4096 \(the model's limit\), got 4097"),
        ({"cache_tokens": 0}, "inspect: --context must be >= 1, got 0"),
        ({"cache_format": "int4"}, "inspect: --cache must be one of fp8_584, bf16, f32, got int4"),
        ({"cache_format": "fp8_584"}, "head_dim and rope_dim must be 512 and 64 for fp8_584, got 128 and 16"),
    ):
        with pytest.raises(ValueError, match=message):
            inspect_dir(small, **wrong)
    assert main(["inspect", str(small), "--context", "512", "--cache", "f32", "--full", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(short.to_json()))
    assert main(["inspect", str(small), "--cache", "f32"]) == 0
    assert f"--checkpoint {small} --cache f32\n" in capsys.readouterr().out
    assert main(["inspect"]) == 0
    said = f"{EMBEDDED.name}: DeepSeek-V4 in sizes of its own\n  {CONFIG.num_layers} layers"
    assert capsys.readouterr().out.startswith(said)


def test_full_searches_everything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("deepdecode.inspect.READ_BYTES", 0)
    t = dict(seeded_tensors(SMALL, 0))
    t["head.weight"][0, 0] = float("nan")
    path = with_tokenizer(write_dir(tmp_path / "c", config_json(SMALL), t))
    assert main(["inspect", str(path)]) == 0
    assert "NaN and infinity: 0 B of" in capsys.readouterr().out
    assert main(["inspect", str(path), "--full"]) == 1
    assert "head.weight must not hold NaN or infinity, got 1 in 8192" in capsys.readouterr().out


def test_sizes_that_loading_refuses_are_faults(tmp_path):
    """FP8 weights are fused by whole blocks of 128 rows; a header shows where that cannot be."""
    config = dataclasses.replace(SMALL, q_lora_rank=192, num_layers=1, compress_ratios=(0,), num_hash_layers=1)
    path = with_tokenizer(write_dir(tmp_path / "c", config_json(config), dict(seeded_tensors(config, 0))))
    want = "layers.0.attn.wq_a.weight must have a multiple of 128 rows to stand above layers.0.attn.wkv.weight, got 192"
    assert inspect_dir(path).faults == [want]
    with pytest.raises(CheckpointError, match=want):
        load_model(path)


def test_a_huge_tensor_under_a_small_name_is_not_read(tmp_path):
    path = with_tokenizer(write_dir(tmp_path / "c", config_json(TINY), dict(seeded_tensors(TINY, 0))))
    forms = [("layers.0.x.norm.weight", "F32", (1 << 36,)), ("layers.0.x.scale", "F8_E8M0", (1 << 36,))]
    header = header_bytes(forms)
    with (path / "huge.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 5 * (1 << 36))
    start = time.perf_counter()
    assert inspect_dir(path).faults == [f"huge.safetensors: {name} is not a tensor of this config" for name, _, _ in forms]
    assert time.perf_counter() - start < 5


def test_untrusted_text_is_cleaned(tmp_path):
    path = with_tokenizer(write_dir(tmp_path / "c", config_json(TINY), {}))
    (path / "model.safetensors").unlink()
    write_file(path / "a\x1b[31m.safetensors", dict(seeded_tensors(TINY, 0)), {"note\x07": "x\r\n\x1b]0;owned\x07" * 50})
    report = inspect_dir(path)
    assert report.faults == []
    assert report.shards[0]["name"] == "a?[31m.safetensors"
    ((key, value),) = report.metadata.items()
    assert key == "note?"
    assert value.isprintable()
    assert len(value) == 100


def test_a_broken_config_is_a_fault(tmp_path):
    raw = config_json(TINY) | {"hidden_size": -1}
    report = inspect_dir(write_dir(tmp_path / "c", raw, dict(seeded_tensors(TINY, 0))))
    assert report.faults == ["config.json: hidden_size must be an integer from 1 to 131072, got -1"]
    assert report.to_text().endswith(report.faults[0])
    assert json.dumps(report.to_json())


def test_broken_files_are_faults_beside_the_others(tmp_path):
    write_checkpoint(tmp_path / "c", TINY, seeded_tensors(TINY, 0), shard_bytes=20000)
    names = sorted(file.name for file in (tmp_path / "c").glob("*.safetensors"))
    (tmp_path / "c" / names[0]).write_bytes(b"cut")
    (tmp_path / "c" / names[2]).unlink()
    report = inspect_dir(tmp_path / "c")
    assert report.faults[:2] == [
        f"{names[0]}: is not a safetensors file: it has 3 bytes",
        f"{names[2]}: must be a file, found none",
    ]
    assert "checkpoint: embed.weight is missing" in report.faults
    assert len(report.shards) == len(names) - 2


def test_faults_of_one_cause_are_told_together(tmp_path):
    t = dict(seeded_tensors(SMALL, 0))
    rounded = [name for name in t if "hc_" in name or name.endswith((".ape", "attn_sink"))]
    t |= {name: t[name].bfloat16() for name in rounded} | {"extra": torch.ones(1)}
    del t["layers.1.attn.wkv.weight"], t["norm.weight"]
    path = with_tokenizer(write_dir(tmp_path / "c", config_json(SMALL), t))
    report = inspect_dir(path)
    assert len(report.faults) == len(rounded) + 3
    lines = report.to_text().split("\n")
    lines = lines[lines.index(f"{len(report.faults)} faults") + 1 :]
    assert lines[:3] == [
        f"  model.safetensors: layers.0.hc_attn_{name} must be F32 or F64 {shape}, got BF16 {shape}"
        for name, shape in (("fn", [24, 512]), ("base", [24]), ("scale", [3]))
    ]
    assert lines[3:] == [
        f"  and {len(rounded) - 3} more like it",
        "  checkpoint: layers.1.attn.wkv.weight is missing",
        "  checkpoint: norm.weight is missing",
        "  model.safetensors: extra is not a tensor of this config",
        "  --json lists them all",
    ]
    assert all(any(name in fault for fault in report.to_json()["faults"]) for name in rounded)


def test_faults_of_many_kinds_are_cut_in_text_only(tmp_path):
    names = [f"x is {chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(300)]
    t = dict(seeded_tensors(TINY, 0)) | {name: torch.ones(1) for name in names}
    report = inspect_dir(with_tokenizer(write_dir(tmp_path / "c", config_json(TINY), t)))
    assert report.faults == [f"model.safetensors: {name} is not a tensor of this config" for name in names]
    text = report.to_text()
    assert text.endswith(f"  and {300 - MAX_LINES} more of other kinds\n  --json lists them all")
    assert text.count("is not a tensor") == MAX_LINES


def test_not_a_directory(tmp_path):
    with pytest.raises(CheckpointError, match=r"inspect: path must be a directory, got .*gone"):
        inspect_dir(tmp_path / "gone")


def test_dtype_names_are_each_others_inverse():
    assert {DTYPES[name]: name for name in DTYPES} == DTYPE_NAMES
