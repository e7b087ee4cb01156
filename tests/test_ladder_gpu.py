"""The ladder's checks where they matter: kernels at V4-Flash's own sizes, logits and 200 tokens on the embedded model."""

import pytest
import torch

from deepdecode.config import ModelConfig
from deepdecode.ladder.entries import entry_gates
from deepdecode.ladder.follow import ModelGates
from deepdecode.ladder.gates import step_gates
from deepdecode.rungs import RUNGS
from deepdecode.slices import POSITIONS, RankSlice

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

# every kind of layer: ratios 0, 128 and 4, experts by token and by score
LAYERS = 5
# torch.compile takes minutes for all of these
RUNGS_RUN = [rung for rung in RUNGS if not rung.asked]


@pytest.fixture(scope="module", params=["tp8", "dp8ep8"])
def cut(request):
    return RankSlice(ModelConfig(), request.param, layers=LAYERS, max_concurrency=64, device="cuda")


@pytest.mark.parametrize("rung", RUNGS_RUN, ids=lambda rung: rung.name)
@pytest.mark.parametrize("concurrency", [1, 16, 32, 64])
def test_entries_at_full_size(cut, rung, concurrency):
    step = cut.graph(rung.ops, concurrency)
    step.seek(POSITIONS - 1)
    gates = step_gates(rung.ops, step.eager)
    step.seek(POSITIONS - 1)
    gates += entry_gates(rung.ops, step.eager)
    failed = [gate for gate in gates if not gate.passed]
    cut.reset()
    assert not failed
    # rounding shows, so something was compared; the gates of hyper-connections are rounded to nothing less than float32
    least = {gate.name: 1e-8 if gate.name.startswith("hyper-connections") else 1e-4 for gate in gates}
    assert all(gate.error > least[gate.name] for gate in gates if gate.name.endswith("against float64"))


@pytest.fixture(scope="module")
def model():
    return ModelGates("cuda")


@pytest.mark.parametrize("rung", RUNGS_RUN, ids=lambda rung: rung.name)
def test_logits_of_the_embedded_model(model, rung):
    assert [gate for gate in model.logits(rung.ops) if not gate.passed] == []


def test_the_top_rung_follows_the_reference(model):
    """200 tokens of 5 prompts, each given those that the reference chose in float32."""
    gates = model.follows(model.top.ops)
    for gate in gates:
        print(gate)
    assert [gate for gate in gates if not gate.passed] == []
