"""Damaged and hostile checkpoints: one sentence that names file and tensor, never anything else."""

import json
import os
import struct
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_checkpoint import SMALL, TINY, leaves, write_dir, write_file

from deepdecode.checkpoint import CheckpointError, load_model, open_checkpoint, seeded_tensors, write_checkpoint
from deepdecode.checkpoint.container import open_file
from deepdecode.checkpoint.open import INDEX
from deepdecode.config import config_json
from deepdecode.testing.numeric import same_bits

FILE = "model.safetensors"


def pack(header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DATA = bytes(16)
BOTH = {"a": entry(), "b": entry(offsets=(8, 16))}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.safetensors: is not a safetensors file: it has 0 bytes"),
        (b"\x01\x02\x03", "x.safetensors: is not a safetensors file: it has 3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n",
         "x.safetensors: is a Git LFS pointer, not the file itself, which `git lfs pull` fetches$"),
        (b"version https://git-l", "x.safetensors: header must be at most 100000000 bytes"),
        (pack({}, length=2**63), "x.safetensors: header must be at most 100000000 bytes, got 9223372036854775808"),
        (pack({}, length=100_000_001), "x.safetensors: header must be at most 100000000 bytes, got 100000001"),
        (pack({}, length=50), "x.safetensors: is cut short: the header has 50 bytes, the file 10"),
        (pack(b"\x80\x02}q\x00."), "x.safetensors: is not a safetensors file: its header is not a JSON object"),
        (pack(b'{"a": '), "x.safetensors: header: is not JSON: "),
        (pack(b'{"\xff": 1}'), "x.safetensors: header: is not JSON: "),
        (pack(b'{"a":' * 50000), "x.safetensors: header: is not JSON: nested too deeply"),
        (pack(b'{"a": {"dtype": "F32", "dtype": "F64"}}'), "header: is not JSON: key dtype stands twice"),
        (pack(b'{"a": 1, "a": 2}'), "header: is not JSON: key a stands twice"),
        (pack(b'{"a": Infinity}'), "header: is not JSON: Infinity is not JSON"),
        (pack({"a": 1}), "x.safetensors: a must have dtype, shape and data_offsets, got 1"),
        (pack({"a": entry() | {"code": "import os"}}, DATA), "a must have dtype, shape and data_offsets, got {'dtype'"),
        (pack({"a": {"dtype": "F32", "shape": [2]}}), "a must have dtype, shape and data_offsets, got {'dtype'"),
        (pack({"a": entry(dtype="F31")}, DATA), "x.safetensors: a: dtype must be one of F64, F32, .*, got F31"),
        (pack({"a": entry(dtype=["F32"])}, DATA), r"a: dtype must be one of .* got \['F32'\]"),
        (pack({"a": entry(shape=[-2])}, DATA), r"a: shape must be a list of at most 8 sizes, got \[-2\]"),
        (pack({"a": entry(shape=[2.0])}, DATA), r"a: shape must be a list of at most 8 sizes, got \[2.0\]"),
        (pack({"a": entry(shape=[True, 2])}, DATA), r"a: shape must be .* got \[True, 2\]"),
        (pack({"a": entry(shape="2")}, DATA), "a: shape must be a list of at most 8 sizes, got 2"),
        (pack({"a": entry(shape=[1] * 9)}, DATA), "a: shape must be a list of at most 8 sizes"),
        (pack({"a": entry(shape=[2**62])}, DATA), "a: shape must be a list of at most 8 sizes"),
        (pack({"a": entry(shape=[2**61] * 8)}, DATA), r"a: data_offsets must span \d+ bytes for F32 .*, got 8"),
        (pack({"a": entry(shape=[3])}, DATA), r"a: data_offsets must span 12 bytes for F32 \[3\], got 8"),
        (pack({"a": entry(offsets=[8, 0])}, DATA), r"a: data_offsets must be \[begin, end\], got \[8, 0\]"),
        (pack({"a": entry(offsets=[0, 8, 9])}, DATA), r"a: data_offsets must be \[begin, end\]"),
        (pack({"a": entry(offsets=[-8, 0])}, DATA), r"a: data_offsets must be \[begin, end\], got \[-8, 0\]"),
        (pack({"a": entry(), "b": entry()}, DATA), "x.safetensors: b overlaps the tensor before it"),
        (pack({"a": entry(), "b": entry(offsets=(4, 12))}, DATA), "x.safetensors: b overlaps the tensor before it"),
        (pack({"a": entry(offsets=(8, 16))}, DATA), "x.safetensors: a leaves a hole of 8 bytes"),
        (pack(BOTH, DATA[:-1]), r"x.safetensors: is cut short: its header describes \d+ bytes, the file has \d+"),
        (pack(BOTH, DATA + b"!"), r"x.safetensors: has 1 bytes after its tensors, the file has \d+"),
        (pack(BOTH | {"__metadata__": {"a": 1}}, DATA), "x.safetensors: __metadata__ must be strings under names"),
        (pack(BOTH | {"__metadata__": "x"}, DATA), "x.safetensors: __metadata__ must be strings under names, got x"),
        (pack({"\x1b[31mred\n" + "x" * 500: 1}), r"x.safetensors: \?\[31mred\?x{80,90}\.\.\. must have dtype"),
    ],
)  # fmt: skip
def test_container(content, message, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as problem:
        open_file(path)
    assert "\n" not in str(problem.value)
    assert str(problem.value).isprintable()


def test_a_good_file_for_comparison(tmp_path):
    path = tmp_path / "x.safetensors"
    # not aligned, empty, and without dimensions
    tensors = {"b": torch.arange(3, dtype=torch.uint8), "f": torch.randn(2, 2), "e": torch.empty(0, 4), "s": torch.tensor(2.5)}
    body = b"".join(t.numpy().tobytes() for t in tensors.values())
    header, at = {}, 0
    for (name, tensor), dtype in zip(tensors.items(), ("U8", "F32", "F32", "F32"), strict=True):
        end = at + tensor.numel() * tensor.element_size()
        header[name] = entry(dtype, list(tensor.shape), (at, end))
        at = end
    path.write_bytes(pack(header, body))
    found = open_file(path)
    for name, tensor in tensors.items():
        read = found.tensors[name].read()
        assert (read.shape, read.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(read, tensor)


@pytest.fixture(scope="module")
def tiny():
    return dict(seeded_tensors(TINY, 0))


@pytest.fixture(scope="module")
def small():
    return dict(seeded_tensors(SMALL, 0))


# (tensors to change, what the sentence says); a None removes the tensor
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm.weight": None}, "checkpoint: norm.weight is missing"),
        ({"layers.2.ffn.experts.3.w2.weight": None}, "checkpoint: layers.2.ffn.experts.3.w2.weight is missing"),
        ({"layers.2.ffn.experts.3.w2.scale": None}, "checkpoint: layers.2.ffn.experts.3.w2.scale is missing"),
        ({"layers.0.ffn.gate.tid2eid": None}, "checkpoint: layers.0.ffn.gate.tid2eid is missing"),
        ({"layers.7.attn_norm.weight": torch.ones(2)}, f"{FILE}: layers.7.attn_norm.weight is not a tensor of this config"),
        ({"engram.table": torch.ones(2)}, f"{FILE}: engram.table is not a tensor of this config"),
        ({"layers.0.attn.compressor.ape": torch.ones(2)}, "layers.0.attn.compressor.ape is not a tensor of this config"),
        ({"\x1b]0;x\x07": torch.ones(2)}, r"model.safetensors: \?\]0;x\? is not a tensor of this config"),
        ({"model.norm.weight": torch.ones(128)}, "model.safetensors: norm.weight stands twice, also in model.safetensors"),
        (
            {"layers.0.attn.wkv.weight": torch.ones(128, 64)},
            r"layers.0.attn.wkv.weight must be BF16 or F32 or F64 \[128, 128\], got F32 \[128, 64\]",
        ),
        (
            {"layers.0.attn.wkv.weight": torch.ones(128, 128, dtype=torch.float16)},
            r"layers.0.attn.wkv.weight must be F8_E4M3 \[128, 128\], got F16 \[128, 128\]",
        ),
        (
            {"layers.0.attn.wkv.weight": torch.ones(128, 128)},
            "layers.0.attn.wkv.scale must be missing beside a weight stored as F32",
        ),
        (
            {"layers.0.attn.wkv.scale": torch.ones(1, 1)},
            r"layers.0.attn.wkv.scale must be F8_E8M0 \[1, 1\], got F32 \[1, 1\]",
        ),
        (
            {"layers.0.attn.wkv.scale": torch.ones(4, 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)},
            r"layers.0.attn.wkv.scale must be F8_E8M0 \[1, 1\], got F8_E8M0 \[4, 4\]",
        ),
        (
            {"layers.1.ffn.experts.0.w1.weight": torch.ones(1024, 128).to(torch.float8_e4m3fn)},
            r"experts.0.w1.weight must be I8 \[1024, 64\] \(expert_dtype is fp4\), got F8_E4M3 \[1024, 128\]",
        ),
        (
            {"layers.1.ffn.experts.0.w1.scale": torch.ones(8, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)},
            r"experts.0.w1.scale must be F8_E8M0 \[1024, 4\], got F8_E8M0 \[8, 1\]",
        ),
        (
            {"layers.1.attn.compressor.ape": torch.ones(4, 256, dtype=torch.bfloat16)},
            r"layers.1.attn.compressor.ape must be F32 or F64 \[4, 256\], got BF16 \[4, 256\]",
        ),
        (
            {"layers.1.hc_attn_fn": torch.ones(24, 512, dtype=torch.bfloat16)},
            r"layers.1.hc_attn_fn must be F32 or F64 \[24, 512\], got BF16",
        ),
        (
            {"layers.1.attn.attn_sink": torch.ones(64)},
            r"layers.1.attn.attn_sink must be F32 or F64 \[8\], got F32 \[64\]",
        ),
        (
            {"layers.0.ffn.gate.tid2eid": torch.ones(64, 2)},
            r"layers.0.ffn.gate.tid2eid must be I64 or I32 \[64, 2\], got F32 \[64, 2\]",
        ),
        (
            {"layers.0.ffn.gate.tid2eid": torch.full((64, 2), 4)},
            "layers.0.ffn.gate.tid2eid must hold experts from 0 to 3, got 4 to 4",
        ),
        (
            {"layers.1.ffn.shared_experts.w2.scale": torch.full((1, 8), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)},
            r"model.safetensors: layers.1.ffn.shared_experts.w2.scale must not hold NaN \(code 255\)",
        ),
    ],
)
def test_wrong_tensors(changes, message, small, tmp_path):
    tensors = {name: tensor for name, tensor in (small | changes).items() if tensor is not None}
    path = write_dir(tmp_path / "c", config_json(SMALL), tensors)
    with pytest.raises(CheckpointError, match=message) as problem:
        load_model(path)
    assert str(problem.value).isprintable()


def test_mixed_storage_of_a_fused_weight(small, tmp_path):
    tensors = dict(small)
    tensors["layers.1.ffn.experts.2.w3.weight"] = torch.zeros(1024, 128)
    del tensors["layers.1.ffn.experts.2.w3.scale"]
    path = write_dir(tmp_path / "c", config_json(SMALL), tensors)
    message = (
        "layers.1.ffn.experts.2.w3.weight must be stored as layers.1.ffn.experts.0.w1.weight is, "
        "I8 with F8_E8M0 scales, got F32"
    )
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    "name",
    ["../evil.safetensors", "/etc/evil.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", "model.bin",
     "x.safetensors\n", ".hidden.safetensors", "", 7, None, ["model.safetensors"]],
)  # fmt: skip
def test_index_names_only_plain_files(name, tiny, tmp_path):
    path = write_dir(tmp_path / "c", config_json(TINY), tiny, index=True)
    write_file(tmp_path / "evil.safetensors", tiny)
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tiny, name)}))
    with pytest.raises(CheckpointError, match=f"{INDEX}: a file must be a plain name ending in .safetensors, got "):
        load_model(path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("", f"{INDEX}: is not JSON"),
        ("[]", f"{INDEX}: must be a JSON object, got list"),
        ("{}", f"{INDEX}: weight_map must name the file of each tensor, got None"),
        ('{"weight_map": {}}', f"{INDEX}: weight_map must name the file of each tensor, got {{}}"),
        ('{"weight_map": {"a": "b.safetensors"}}', "b.safetensors: must be a file, found none"),
        ('{"weight_map": {"a": "model.safetensors"}}', f"{INDEX}: a must be in {FILE}, which does not hold it"),
    ],
)
def test_index(index, message, tiny, tmp_path):
    path = write_dir(tmp_path / "c", config_json(TINY), tiny)
    (path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", lambda: b'{"a":[' + b"{}," * (2 << 20) + b"{}]}", "config.json: must be at most 4194304 bytes"),
        ("generation_config.json", lambda: b" " * (5 << 20), "generation_config.json: must be at most 4194304 bytes"),
        (INDEX, lambda: b" " * ((64 << 20) + 1), f"{INDEX}: must be at most 67108864 bytes"),
        (INDEX, lambda: b'{"weight_map":{' + b",".join(b'"%d":1' % i for i in range(700_001)) + b"}}",
         f"{INDEX}: weight_map must name at most 700000 tensors, got 700001"),
        (FILE, lambda: pack(b'{"__metadata__":{"a":[' + b"[]," * 30_000_000 + b"[]]}}"),
         f"{FILE}: header must describe at most 700000 tensors, got more"),
    ],
    ids=["config", "generation config", "index", "tensors", "header"],
)  # fmt: skip
def test_json_that_grows_when_it_is_read(file, content, message, tiny, tmp_path):
    path = write_dir(tmp_path / "c", config_json(TINY), tiny)
    (path / file).write_bytes(content())
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        load_model(path)
    # read whole, the last takes 3 GB and some 20 s
    assert time.process_time() - start < 5


def test_index_must_list_every_tensor(tiny, tmp_path):
    path = write_dir(tmp_path / "c", config_json(TINY), tiny, index=True)
    (path / INDEX).write_text(json.dumps({"weight_map": {name: FILE for name in tiny if name != "norm.weight"}}))
    with pytest.raises(CheckpointError, match=f"{FILE}: norm.weight is not listed there by {INDEX}"):
        load_model(path)


def test_missing_and_cut_shards(tmp_path):
    write_checkpoint(tmp_path / "c", TINY, seeded_tensors(TINY, 0), shard_bytes=20000)
    shards = sorted((tmp_path / "c").glob("*.safetensors"))
    assert len(shards) > 2
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{shards[1].name}: is cut short: its header describes {len(content)} bytes"):
        load_model(tmp_path / "c")
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name}: must be a file, found none"):
        load_model(tmp_path / "c")
    # before what the index says of a file that is there
    index = json.loads((tmp_path / "c" / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name != "embed.weight"}
    (tmp_path / "c" / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{shards[1].name}: must be a file, found none"):
        load_model(tmp_path / "c")
    found = []
    open_checkpoint(tmp_path / "c", found=found)
    assert found[:2] == [
        f"{shards[1].name}: must be a file, found none",
        f"{shards[0].name}: embed.weight is not listed there by {INDEX}",
    ]
    # without an index, the tensors that are gone are named
    (tmp_path / "c" / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint: \S+ is missing"):
        load_model(tmp_path / "c")


def test_pickles_are_refused(tmp_path):
    path = tmp_path / "c"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_json(TINY)))
    with pytest.raises(CheckpointError, match=r"c: holds no \*\.safetensors file"):
        load_model(path)
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    message = r"pytorch_model.bin: is a pickle, which can run code when it is read; a checkpoint must be \*\.safetensors files"
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_not_a_directory(tmp_path):
    with pytest.raises(CheckpointError, match="gone: must be a checkpoint's directory, found none"):
        load_model(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: must be a checkpoint's directory, found a file"):
        load_model(tmp_path / "file")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_hang(tmp_path, tiny):
    path = write_dir(tmp_path / "c", config_json(TINY), tiny)
    (path / FILE).unlink()
    os.mkfifo(path / FILE)
    with pytest.raises(CheckpointError, match=f"{FILE}: must be a file, found something else"):
        load_model(path)


def test_a_directory_and_a_dangling_link(tmp_path, tiny):
    path = write_dir(tmp_path / "c", config_json(TINY), tiny)
    (path / FILE).unlink()
    (path / FILE).symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=f"{FILE}: must be a file, found none"):
        load_model(path)
    (path / FILE).unlink()
    (path / FILE).mkdir()
    with pytest.raises(CheckpointError, match=f"{FILE}: must be a file, found something else"):
        load_model(path)


# a stack of experts is taken apart only where the config has such experts: a header cannot ask for a billion names
def test_stack_of_another_size(tiny, tmp_path):
    tensors = tiny | {"model.layers.0.mlp.experts.gate_up_proj": torch.empty(1 << 30, 0, 2)}
    path = write_dir(tmp_path / "c", config_json(TINY), tensors)
    with pytest.raises(CheckpointError, match=r"layers.0.ffn.experts.gate_up_proj is not a tensor of this config"):
        load_model(path)


def test_a_stack_without_a_middle(tiny, tmp_path):
    kept = {name: tensor for name, tensor in tiny.items() if not name.startswith("layers.0.ffn.experts.")}
    E, I, C = TINY.num_experts, TINY.expert_width, TINY.hidden_size
    at = "model.layers.0.mlp.experts."
    for rows, fits in ((2 * I, True), (2 * I + 1, False)):
        stacks = {at + "gate_up_proj": torch.randn(E, rows, C), at + "down_proj": torch.zeros(E, C, I)}
        path = write_dir(tmp_path / f"c{rows}", config_json(TINY), kept | stacks)
        if fits:
            assert same_bits(load_model(path).layers[0].moe.w13.data, stacks[at + "gate_up_proj"])
        else:
            with pytest.raises(CheckpointError, match=r"checkpoint: layers.0.ffn.experts.0.w1.weight is missing"):
                load_model(path)


def test_hidden_files_are_no_shards(tiny, tmp_path):
    """A Mac leaves `._model.safetensors` beside every file that it copies."""
    path = write_dir(tmp_path / "c", config_json(TINY), tiny)
    (path / "._model.safetensors").write_bytes(b"\0\5\x16\7" * 10)
    assert same_bits(load_model(path).embed, tiny["embed.weight"])


@pytest.mark.parametrize("name", ["\ud800", "a" * 5000, "\x9b31m", "\u202e", "\x7f"])
def test_shard_names_no_file_system_has(name, tiny, tmp_path):
    path = write_dir(tmp_path / "c", config_json(TINY), tiny)
    (path / INDEX).write_text(json.dumps({"weight_map": {"a": name + ".safetensors"}}))
    with pytest.raises(CheckpointError, match=r"(must be a file, found none|cannot be read: File name too long)$") as problem:
        load_model(path)
    assert str(problem.value).isprintable()


def test_every_fault_is_collected(small, tmp_path):
    tensors = dict(small)
    del tensors["norm.weight"], tensors["layers.0.attn.wq_b.scale"]
    tensors |= {"layers.1.attn.attn_sink": torch.ones(9), "extra": torch.ones(1)}
    found = []
    checkpoint = open_checkpoint(write_dir(tmp_path / "c", config_json(SMALL), tensors), found=found)
    assert found == [
        "checkpoint: layers.0.attn.wq_b.scale is missing",
        f"{FILE}: layers.1.attn.attn_sink must be F32 or F64 [8], got F32 [9]",
        "checkpoint: norm.weight is missing",
        f"{FILE}: extra is not a tensor of this config",
    ]
    assert same_bits(checkpoint.get("embed.weight"), small["embed.weight"])


@pytest.fixture(scope="module")
def damaged(tiny, tmp_path_factory):
    """(directory, file, its bytes, the weights it gives) of a checkpoint to be damaged."""
    path = write_dir(tmp_path_factory.mktemp("damage") / "c", config_json(TINY), tiny)
    return path, path / FILE, (path / FILE).read_bytes(), leaves(load_model(path))


def assert_equal_or_refused(path, want):
    try:
        got = leaves(load_model(path))
    except CheckpointError:
        with pytest.raises(CheckpointError, match=r"\A[^\n]+\Z") as problem:
            load_model(path)
        assert str(problem.value).isprintable()
        return False
    assert got.keys() == want.keys()
    assert all(same_bits(got[name], want[name]) for name in want)
    return True


SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.data())
@SETTINGS
def test_flipped_header_bytes(damaged, data):
    path, file, content, want = damaged
    end = 8 + struct.unpack("<Q", content[:8])[0]
    broken = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=4)):
        broken[at] = data.draw(st.integers(0, 255))
    file.write_bytes(broken)
    assert_equal_or_refused(path, want)


@given(st.data())
@SETTINGS
def test_cut_anywhere(damaged, data):
    path, file, content, want = damaged
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert not assert_equal_or_refused(path, want)


FIELDS = {
    "dtype": st.sampled_from(["F32", "F64", "BF16", "I32", "I8", "U8", "F8_E8M0", "BOOL", "", "F4"]) | st.integers(),
    "shape": st.lists(st.integers(-1, 100) | st.just(2**63), max_size=4),
    "data_offsets": st.lists(st.integers(-1, 20000), max_size=3),
}


@given(st.data())
@SETTINGS
def test_edited_header_fields(damaged, data):
    path, file, content, want = damaged
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    name = data.draw(st.sampled_from(sorted(header)))
    action = data.draw(st.sampled_from(["field", "rename", "remove", "swap"]))
    if action == "field" and name != "__metadata__":
        field = data.draw(st.sampled_from(sorted(FIELDS)))
        header[name][field] = data.draw(FIELDS[field])
    elif action == "rename":
        header[data.draw(st.text(max_size=20))] = header.pop(name)
    elif action == "remove":
        del header[name]
    else:
        # two tensors of another shape exchange their places
        header["embed.weight"], header["norm.weight"] = header["norm.weight"], header["embed.weight"]
    file.write_bytes(pack(header, content[end:]))
    assert_equal_or_refused(path, want)
