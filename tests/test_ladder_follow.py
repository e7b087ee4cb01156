"""The tokens that the top rung must choose: what the reference chose, what is kept of it, and who is refused."""

from dataclasses import replace

import pytest
import torch

from deepdecode.checkpoint import seeded_model
from deepdecode.ladder.follow import FILE, Followed, ModelGates, Turn, digest, follow, read, turn_gates
from deepdecode.ladder.gates import CLEAR, LogitsGate
from deepdecode.ops.fused import FUSED
from deepdecode.ops.reference import REFERENCE
from deepdecode.rungs import RUNGS

PROMPTS = [[5, 17, 900, 44, 3, 8, 61], list(range(40, 53))]
STEPS = 12


@pytest.fixture(scope="module")
def followed():
    return follow(PROMPTS, STEPS)


@pytest.fixture(scope="module")
def model(followed, tmp_path_factory):
    file = tmp_path_factory.mktemp("kept") / "followed.json"
    file.write_text(followed.written())
    return ModelGates("cpu", file=file)


def test_every_token_is_the_best_after_those_before(followed):
    gate = followed.gate("cpu")
    logits = gate.decode(replace(gate.weights, embed=gate.weights.embed.float()), REFERENCE)
    assert logits.shape == (STEPS * 2, gate.weights.config.vocab_size)
    assert torch.equal(logits.argmax(-1), torch.tensor(followed.best).flatten())
    # fed are the prompts' last tokens, then what was chosen
    assert gate.next == [[61, 52], *followed.best[:-1]]
    best = logits.topk(2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    assert torch.tensor(followed.gaps).flatten().tolist() == pytest.approx(gaps, abs=1e-5)
    assert followed.turns(logits) == []
    turned = followed.turns(-logits)
    assert [(turn.prompt, turn.step) for turn in turned] == [(row % 2, row // 2) for row in range(2 * STEPS)]
    assert turned[5].gap == followed.gaps[2][1]
    logits = logits.clone()
    logits[3, 7] = float("nan")
    assert [(turn.prompt, turn.step) for turn in followed.turns(logits)] == [(1, 1)]


def test_another_precision_passes_and_other_experts_are_refused(model):
    """On the reference table in bfloat16, whose rounding is what a rung has too."""
    assert all(gate.passed for gate in model.follows(REFERENCE))
    sure, _ = model.follows(replace(REFERENCE, moe=lambda *args: -4 * REFERENCE.moe(*args)))
    assert not sure.passed
    assert f"{2 * STEPS} tokens of 2 prompts; prompt " in sure.note


def test_models_are_told_apart_and_last_bits_are_not(model):
    weights = model.logits.weights
    nudged = replace(weights, head=replace(weights.head, norm=(weights.head.norm.float() * (1 + 2.0**-22))))
    assert digest(nudged) == digest(weights)
    assert digest(seeded_model(weights.config, 5)) != digest(weights)
    swapped = replace(weights, layers=[weights.layers[1], weights.layers[0], *weights.layers[2:]])
    assert digest(swapped) != digest(weights)


def test_only_the_top_rung_is_held_to_them(model, monkeypatch):
    monkeypatch.setattr(LogitsGate, "__call__", lambda self, ops: [])
    top = [rung for rung in RUNGS if not rung.beside][-1]
    assert model.top is top
    assert [gate.passed for gate in model(top.ops)] == [True, True]
    assert model(replace(FUSED)) == []


def test_what_is_kept_is_of_the_embedded_model(followed, model, tmp_path):
    kept = read(FILE.read_text())
    # where this fails the model has changed: run `python tools/follow.py`
    assert kept.model == followed.model == digest(model.logits.weights)
    assert (len(kept.prompts), {len(row) for row in kept.best}, len(kept.best)) == (5, {5}, 200)
    # the short ones again; rows do not see one another
    assert follow([kept.prompts[1], kept.prompts[3]], 3).best == [[row[1], row[3]] for row in kept.best[:3]]
    assert read(followed.written()) == followed
    # a model that the file does not stand for is followed anew
    other = tmp_path / "other.json"
    other.write_text(replace(followed, model="another", best=[[1, 1]] * 4, gaps=[[0.0, 0.0]] * 4).written())
    fresh = ModelGates("cpu", file=other).followed
    assert fresh.best == followed.best[:4]
    assert fresh.model == followed.model


@pytest.mark.parametrize(
    ("own", "turns", "passed"),
    [
        ([], [], (True, True)),
        # one near tie for each prompt, none where the reference is sure
        ([], [Turn(0, 1, CLEAR / 2), Turn(1, 3, 0.0)], (True, True)),
        ([], [Turn(0, 1, CLEAR / 2), Turn(0, 3, 0.0)], (True, False)),
        ([], [Turn(0, 1, CLEAR)], (False, True)),
        # what the reference does itself in bfloat16 is allowed twice
        ([Turn(0, 1, 0.4), Turn(0, 2, 0.05), Turn(0, 3, 0.05)], [Turn(1, 1, 0.4)] * 2 + [Turn(0, 1, 0.01)] * 4, (True, True)),
        ([Turn(0, 1, 0.4), Turn(0, 2, 0.05), Turn(0, 3, 0.05)], [Turn(1, 1, 0.4)] * 3 + [Turn(0, 1, 0.01)] * 5, (False, False)),
    ],
)
def test_bounds(own, turns, passed):
    gates = turn_gates(Followed("", [[1, 2]] * 2, [[0, 0]] * 8, [[0.0, 0.0]] * 8, own), turns)
    assert tuple(gate.passed for gate in gates) == passed
    for turn in turns:
        assert f"prompt {turn.prompt} token {turn.step} ({turn.gap:.3f})" in gates[turn.gap < CLEAR].note


def test_a_long_list_is_cut():
    sure, _ = turn_gates(Followed("", [[1, 2]], [[0]] * 20, [[0.5]] * 20, []), [Turn(0, step, 0.5) for step in range(13)])
    assert sure.note.count("token ") == 10
    assert "3 more; the reference in bfloat16: 0" in sure.note
