"""`deepdecode quality`: each choice rounds what it says and nothing else, and the comparison is what its words say."""

import dataclasses
import json
import logging
import math
import shlex
import sys
from pathlib import Path

import pytest
import torch
from small_checkpoint import PLAIN

from deepdecode.checkpoint import load_model, seeded_tensors, write_checkpoint
from deepdecode.ops.reference import REFERENCE
from deepdecode.ops.table import MhcSite
from deepdecode.quality import choices as made
from deepdecode.quality.choices import BASE, CHOICES, Choice
from deepdecode.quality.command import Request, choose, choose_contexts, choose_device, not_meant, quality_command, quality_doc
from deepdecode.quality.measure import Loss, Told, find, random_entries, runner_for, tell
from deepdecode.quality.text import Needle, Piece, held_out, needles, pieces
from deepdecode.runner import Runner
from deepdecode.testing.numeric import rel_err, worst_row_err
from deepdecode.text import Text
from deepdecode.tiny import CONFIG, TOKENIZER
from deepdecode.trace.render import plain as plain_text

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from training.forward import Model
from training.weights import from_tensors

# every ratio and router, with the tokenizer's vocabulary, sizes in groups of 128, and index keys as fp8_132 has them
SMALL = dataclasses.replace(
    PLAIN,
    vocab_size=CONFIG.vocab_size,
    index_head_dim=128,
    hidden_size=128,
    q_lora_rank=128,
    o_lora_rank=64,
    expert_width=128,
    eos_ids=(1,),
)
# float32, the same products in another order
SAME = 5e-6
IDS = torch.randint(3, 1024, (260,), generator=torch.Generator().manual_seed(2)).tolist()
CONTEXTS = (100, 260)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality") / "m"
    tensors = seeded_tensors(SMALL, 3, quantized=False, mtp=True)
    write_checkpoint(folder, SMALL, tensors, extra_files=[TOKENIZER])
    return folder


@pytest.fixture(scope="module")
def weights(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def base(weights):
    return tell(weights, BASE, IDS, CONTEXTS, scores=True)


def test_a_witness_changes_nothing_and_sees_the_choices(weights, base):
    """Logits are the model's own; entries and experts those of the trainer's forward, which shares no cache with it."""
    runner = Runner(weights, max_len=260, fmt="f32")
    assert torch.equal(base.logits, runner.prefill(runner.cache.acquire(), IDS, every=True))
    params = from_tensors(SMALL, seeded_tensors(SMALL, 3, quantized=False, mtp=True))
    with torch.no_grad():
        result = Model(SMALL)(params, torch.tensor([IDS]), topk=SMALL.index_topk, keep=True)
    assert sorted(base.chosen) == [(layer, t) for layer in (1, 3) for t in (*range(84, 100), *range(244, 260))]
    for (layer, t), entries in base.chosen.items():
        assert entries.tolist() == result.chosen[f"layers.{layer}"][0, t, : (t + 1) // 4].tolist(), (layer, t)
        # the chosen ones are those of the highest probability
        scores = base.scores[layer, t]
        assert float(scores[entries].min()) >= float(scores[~entries].max()) and float(scores.sum()) == pytest.approx(
            1, abs=1e-5
        )
    for layer in (1, 2, 3):
        counted = torch.bincount(base.experts[layer].flatten().long(), minlength=8)
        assert counted.tolist() == result.loads[f"layers.{layer}.ffn.gate.bias"].int().tolist()


def exact(x):
    return x


@pytest.mark.parametrize(
    "table",
    [
        pytest.param({"index_topk": made.index_topk(exact, True)}, id="index rotated"),
        pytest.param({"index_topk": made.index_topk(exact, False)}, id="index not rotated"),
        pytest.param({"sparse_attn": made.sparse_attn(exact)}, id="partials"),
    ],
)
def test_a_choice_that_rounds_nothing_is_the_base(weights, base, table):
    choice = Choice("exact", "", ops=dataclasses.replace(REFERENCE, **table))
    assert worst_row_err(tell(weights, choice, IDS, CONTEXTS).logits, base.logits) < SAME


def test_the_official_linears_round_their_inputs_alone(weights, base, monkeypatch):
    official = Choice("official", "", ops=made.OFFICIAL)
    rounded = tell(weights, official, IDS, CONTEXTS).logits
    assert 1e-2 < rel_err(rounded, base.logits) < 1
    seen = []
    monkeypatch.setattr(made, "fake_quant_fp8", lambda x: seen.append(x.shape[1]) or x)
    assert worst_row_err(tell(weights, official, IDS, CONTEXTS).logits, base.logits) < SAME
    # x, the latent, the grouped output; then x and hidden values of the shared expert and of those that tokens take
    assert seen[:3] == [SMALL.hidden_size, SMALL.q_lora_rank, SMALL.o_groups * SMALL.o_lora_rank]
    assert set(seen[3:]) == {SMALL.hidden_size, SMALL.expert_width}


def test_index_keys_round_as_the_cache_does(weights, base):
    """Rounded in the choice, or by the cache that stores FP8 keys and queries: the same entries; without either, others."""
    by_choice = next(choice for choice in CHOICES if choice.name == "index fp8")
    by_cache = Choice("cache", "", index_fmt="fp8_132")
    a, b = (tell(weights, choice, IDS, CONTEXTS) for choice in (by_choice, by_cache))
    assert all(torch.equal(a.chosen[at], b.chosen[at]) for at in a.chosen)
    assert any(not torch.equal(a.chosen[at], base.chosen[at]) for at in a.chosen)


def test_mixing_in_two_bfloat16_parts_keeps_float32(weights):
    """On streams that are bfloat16 numbers the two-part product is the float32 one; the plain one is not."""
    layer = weights.layers[1]
    streams = torch.randn(40, 4, SMALL.hidden_size).bfloat16().float()
    site = MhcSite(layer.attn_hc.fn, layer.attn_hc.base, layer.attn_hc.scale)
    expected = REFERENCE.mhc_boundary(None, streams, None, None, site, layer.attn_norm, SMALL)
    for round_fn, low, high in ((made.split_bf16, 0.0, 1e-5), (made.bf16, 1e-4, 1e-2)):
        found = made.mhc_boundary(round_fn)(None, streams, None, None, site, layer.attn_norm, SMALL)
        worst = max(rel_err(a, b) for a, b in zip(found[1:], expected[1:], strict=True))
        assert low <= worst < high
    y = torch.randn(40, SMALL.hidden_size)
    again = REFERENCE.mhc_boundary(y, streams, expected[2], expected[3], site, layer.attn_norm, SMALL)
    found = made.mhc_boundary(made.split_bf16)(y, streams, expected[2], expected[3], site, layer.attn_norm, SMALL)
    assert torch.equal(found[0], again[0])


def test_a_loss_is_what_its_words_say():
    """Bits, divergence, agreement, overlap and mass of two made-up tellings, by their definitions."""
    piece = Piece("p", [0, 2, 1, 1], 7)
    theirs, ours = torch.randn(4, 3), torch.randn(4, 3)
    entries = {(1, 2): torch.tensor([True, True, False]), (1, 3): torch.tensor([True, False, True])}
    told = Told(ours, [torch.tensor([[0, 1], [2, 3], [0, 1], [0, 1]])], {at: ~mask for at, mask in entries.items()})
    experts = [torch.tensor([[1, 0], [3, 4], [5, 6], [1, 0]])]
    base = Told(theirs, experts, entries, dict.fromkeys(entries, torch.tensor([0.5, 0.2, 0.3])))
    loss = Loss((4,))
    loss.add(piece, told, base)
    loss.add(piece, told, base)
    row = loss.row()
    p, q = theirs[:3].double().softmax(1), ours[:3].double().softmax(1)
    assert row["tokens"] == 6
    assert row["bits_per_byte"] == pytest.approx(-sum(math.log2(float(q[t, i])) for t, i in enumerate((2, 1, 1))) / 7)
    assert row["kl_bits"] == pytest.approx(float((p * (p / q).log2()).sum(1).mean()))
    assert row["top1"] == pytest.approx(float((p.argmax(1) == q.argmax(1)).float().mean()))
    assert row["experts"] == pytest.approx((1 + 0.5 + 0 + 1) / 4)
    # none of two; then none of two
    assert row["contexts"] == {"4": {"overlap": 0.0, "score_mass": pytest.approx((0.3 / 0.7 + 0.2 / 0.8) / 2)}}


def test_random_entries_are_visible_and_as_many(weights):
    seen = []

    def spy(*args):
        indices, lens = random_entries(5)(*args)
        want = REFERENCE.index_topk(*args)[1]
        assert torch.equal(lens, want)
        step = args[3]
        for t, row in enumerate(indices.tolist()):
            entries = row[: int(lens[t])]
            assert len(set(entries)) == len(entries) and all(0 <= e < int(step.entry_lens[4][t]) for e in entries)
            assert set(row[int(lens[t]) :]) <= {-1}
            seen.append(entries)
        return indices, lens

    choice = Choice("random", "", ops=dataclasses.replace(REFERENCE, index_topk=spy))
    tell(weights, choice, IDS[:200], ())
    assert any(entries != list(range(len(entries))) for entries in seen if len(entries) == SMALL.index_topk)


def test_find_reads_the_second_telling(weights):
    """Against one prefill of everything."""
    hay = [Needle(IDS[:90], list(range(80, 90)), 70), Needle(IDS[90:200], list(range(100, 110)), 70)]
    right = bits = 0
    for needle in hay:
        runner = runner_for(weights, BASE, len(needle.ids), REFERENCE)
        logits = runner.prefill(runner.cache.acquire(), needle.ids, every=True)
        for t in needle.told:
            right += int(logits[t - 1].argmax()) == needle.ids[t]
            bits -= float(logits[t - 1].double().log_softmax(0)[needle.ids[t]]) / math.log(2)
    found = find(weights, BASE, hay)
    assert found["needles"] == 2 and found["tokens_right"] == right / 20
    assert found["bits_per_token"] == pytest.approx(bits / 20, rel=1e-5)
    assert find(weights, BASE, hay, seed=1)["bits_per_token"] != pytest.approx(bits / 20, rel=1e-5)


def test_needles_are_told_twice(folder):
    text = Text(folder, 0)
    documents = held_out([])
    for needle in needles(text, documents, 200, 3):
        told = [needle.ids[t] for t in needle.told]
        assert told == [needle.ids[t - 200] for t in needle.told] and needle.told[-1] == len(needle.ids) - 1
        words = text.decode(needle.ids)
        name = words.rsplit("def compute_", 1)[1].split("(")[0]
        assert words.count(f"def compute_{name}(self, ") == 2 and text.decode(told).startswith("(self, ")
        assert needle.ids[0] == 0 and 0 not in needle.ids[1:]
    assert needles(text, documents, 200, 2) == needles(text, documents, 200, 2)
    with pytest.raises(ValueError, match="the distance of a needle must be"):
        needles(text, documents, 3, 1)


def test_pieces_are_beginnings(folder):
    text = Text(folder, 0)
    documents = [("short", "x = 1\n"), ("long", "def f(x):\n    return x\n" * 40)]
    [piece] = pieces(text, documents, 50, 60)
    assert piece.name == "long" and len(piece.ids) == 50
    assert text.decode(piece.ids[1:]) == documents[1][1][: piece.size]
    assert [p.name for p in pieces(text, documents, 50, 100)] == ["long", "short"]
    with pytest.raises(ValueError, match="must have two tokens or more"):
        pieces(text, [("empty", "")], 50, 60)


def test_the_command_measures_what_a_model_can_have(folder, tmp_path, capsys):
    request = Request(
        checkpoint=folder, tokens=200, contexts="64,200", needles=1, device="cpu", out=tmp_path, commit="abc", json=True,
        only="kv fp8; kv bf16; mhc split bf16; activations bf16",
    )  # fmt: skip
    assert quality_command(request) == 0
    out = capsys.readouterr().out
    document = json.loads(out)
    assert document == json.loads((tmp_path / "quality.json").read_text())
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    assert document["left_out"] == {"kv fp8": "needs head, rope and index dims of 512, 64 and 128, got (64, 16, 128)"}
    rows = {row["choice"]: row for row in document["rows"]}
    assert list(rows) == ["fp32", "kv bf16", "mhc split bf16", "activations bf16"]
    assert rows["fp32"]["kl_bits"] == 0 and rows["fp32"]["top1"] == rows["fp32"]["experts"] == 1
    assert 0 < rows["kv bf16"]["kl_bits"] < rows["activations bf16"]["kl_bits"] < 0.1
    assert rows["activations bf16"]["contexts"]["200"]["score_mass"] <= 1.001
    assert [(n["context"], n["choice"]) for n in document["needles"]] == [(200, "indexer"), (200, "random entries")]
    assert document["drafts"]["same"] and document["drafts"]["tokens_per_step"] >= 1
    told = plain_text(quality_doc(document))
    assert f"{rows['kv bf16']['bits_per_byte']:.4f}" in told and "kv fp8: needs head" in told and "the same text" in told


def test_what_cannot_be_had_is_left_out(tmp_path, capsys):
    """A text too short for its needles, and a model without an MTP block: the rest is measured, and the reasons are said."""
    (tmp_path / "short.py").write_text("def add(a, b):\n    return a + b\n" * 9)
    write_checkpoint(tmp_path / "m", SMALL, seeded_tensors(SMALL, 3, quantized=False), extra_files=[TOKENIZER])
    request = Request(
        checkpoint=tmp_path / "m", text=(tmp_path / "short.py",), contexts="64,1024", needles=2, device="cpu", only="kv bf16",
        json=True,
    )  # fmt: skip
    assert quality_command(request) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["choice"] for row in document["rows"]] == ["fp32", "kv bf16"] and document["rows"][1]["kl_bits"] > 0
    assert document["needles"] == [] and document["drafts"] is None
    reasons = document["left_out"]
    assert list(reasons) == ["needles at 1024", "drafts"]
    assert reasons["needles at 1024"].endswith("the definition and the text there is, got 960")
    assert reasons["drafts"].endswith("m must hold an MTP block (mtp.0.*), got none")
    assert "drafts: load_draft: m must hold" in plain_text(quality_doc(document))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("linear: no kernel for x [5, 1, 256], weight [640, 256] fp8: x in float32, not bfloat16; the reference runs", False),
        ("index_topk: no kernel for index_q [5, 4, 128], 1024 entries, top 64, f32 keys: f32 keys; the reference runs", False),
        ("linear: no kernel for x [5, 1, 250], weight [640, 250] plain: in no multiple of 8; the reference runs", True),
        ("float32 is what a file says", True),
    ],
)
def test_float32_on_references_is_no_news(line, said):
    record = logging.LogRecord("deepdecode", logging.WARNING, "", 0, line, None, None)
    assert not_meant(record) == said


def test_what_was_read_is_kept(folder, tmp_path, monkeypatch, capsys):
    """A run that is cut has the rows of the pieces before, in its file and in its table; an earlier file stays until then."""
    calls = []
    monkeypatch.setattr("signal.signal", lambda *args: None)
    (tmp_path / "quality.json").write_text("an earlier result")

    def cut(*args, **kwargs):
        calls.append(1)
        if len(calls) in (1, 5):
            raise KeyboardInterrupt
        return tell(*args, **kwargs)

    monkeypatch.setattr("deepdecode.quality.command.tell", cut)
    request = Request(checkpoint=folder, tokens=128, contexts="64", device="cpu", out=tmp_path, only="kv bf16")
    with pytest.raises(KeyboardInterrupt):
        quality_command(request)
    assert [each.name for each in tmp_path.iterdir()] == ["quality.json"]
    assert (tmp_path / "quality.json").read_text() == "an earlier result"
    assert quality_command(request) == 130
    shown = capsys.readouterr()
    assert "63 tokens, 1 of 2 pieces." in shown.out and "interrupted: what follows was measured" in shown.err
    document = json.loads((tmp_path / "quality.json").read_text())
    rows = document["rows"]
    assert document["pieces"] == {"read": 1, "of": 2} and "63 tokens, 1 of 2 pieces." in plain_text(quality_doc(document))
    assert [(row["choice"], row["tokens"]) for row in rows] == [("fp32", 63), ("kv bf16", 63)]
    assert rows[0]["kl_bits"] == 0 < rows[1]["kl_bits"]


def test_the_command_of_a_result_can_be_run():
    request = Request(text=(Path("a b.py"), Path("c.py")), only="kv fp8; index fp4", needles=0)
    assert shlex.split(request.command) == [
        *("deepdecode", "quality", "--text", "a b.py", "--text", "c.py", "--only", "kv fp8; index fp4", "--needles", "0")
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: choose_contexts("1,x", on_gpu=False), "--contexts must be lengths >= 2 with commas between, got 1,x"),
        (lambda: choose("kv fp8; nothing"), "--only must name choices with semicolons between, got 'nothing'"),
        (lambda: choose_device("tpu"), "--device must be cpu.*, got tpu"),
        (lambda: quality_command(Request(needles=-1)), "--needles must be 0 to 1000, got -1"),
        (lambda: quality_command(Request(needles=10**8)), "--needles must be 0 to 1000, got 100000000"),
        (lambda: quality_command(Request(tokens=1)), "--tokens must be >= 2, got 1"),
        (lambda: held_out([Path("/nowhere/at/all.py")]), "--text must be a file to read, got /nowhere/at/all.py"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
