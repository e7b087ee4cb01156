import dataclasses
import json
import time

import pytest
import torch
from small_checkpoint import SMALL, TINY, write_dir

from deepdecode.cards import find_card
from deepdecode.checkpoint import CheckpointError, load_model, seeded_tensors, write_checkpoint
from deepdecode.checkpoint.container import DTYPE_NAMES, DTYPES, header_bytes
from deepdecode.checkpoint.layout import packed_shapes, packing, scale_name, tensor_specs
from deepdecode.checkpoint.open import INDEX
from deepdecode.config import ModelConfig, config_json
from deepdecode.inspect import inspect_dir

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
    return path


@pytest.fixture(scope="module")
def flash(tmp_path_factory):
    path = sparse_checkpoint(tmp_path_factory.mktemp("flash") / "DeepSeek-V4-Flash", FLASH, 46)
    start = time.perf_counter()
    return inspect_dir(path, scale_bytes=1 << 20), time.perf_counter() - start, path


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
    assert f"scales searched for NaN: {report.scale_bytes_read / 1e6:.2f} MB of 8.66 GB" in report.to_text()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect") / "small"
    write_checkpoint(path, SMALL, seeded_tensors(SMALL, 0, mtp=True), shard_bytes=1 << 20)
    return path


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
    report = inspect_dir(tmp_path / "c")
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
    path = write_dir(tmp_path / "c", config_json(SMALL), t)
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
    path = write_dir(tmp_path / "c", config_json(config), t)
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


def test_a_huge_tensor_under_a_small_name_is_not_read(tmp_path):
    path = write_dir(tmp_path / "c", config_json(TINY), dict(seeded_tensors(TINY, 0)))
    forms = [("layers.0.x.norm.weight", "F32", (1 << 36,)), ("layers.0.x.scale", "F8_E8M0", (1 << 36,))]
    header = header_bytes(forms)
    with (path / "huge.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 5 * (1 << 36))
    start = time.perf_counter()
    assert inspect_dir(path).faults == [f"huge.safetensors: {name} is not a tensor of this config" for name, _, _ in forms]
    assert time.perf_counter() - start < 5


def test_untrusted_text_is_cleaned(tmp_path):
    from small_checkpoint import write_file

    path = write_dir(tmp_path / "c", config_json(TINY), {})
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


def test_many_faults_are_cut_in_text_only(tmp_path):
    path = write_dir(tmp_path / "c", config_json(TINY), {f"extra.{i}": torch.ones(1) for i in range(300)})
    report = inspect_dir(path)
    assert len(report.faults) > 300
    assert f"and {len(report.faults) - 100} more; --json lists them all" in report.to_text()


def test_not_a_directory(tmp_path):
    with pytest.raises(CheckpointError, match=r"inspect: path must be a directory, got .*gone"):
        inspect_dir(tmp_path / "gone")


def test_dtype_names_are_each_others_inverse():
    assert {DTYPES[name]: name for name in DTYPES} == DTYPE_NAMES
