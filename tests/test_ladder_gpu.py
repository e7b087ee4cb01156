"""The ladder's checks where they matter: kernels at V4-Flash's own sizes, and 200 tokens that follow the reference's."""

import pytest
import torch

from deepdecode.config import ModelConfig
from deepdecode.ladder.entries import entry_gates
from deepdecode.ladder.gates import CLEAR, LogitsGate, step_gates
from deepdecode.ops.reference import REFERENCE
from deepdecode.rungs import RUNGS
from deepdecode.slices import POSITIONS, RankSlice

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

# every kind of layer: ratios 0, 128 and 4, experts by token and by score
LAYERS = 5


@pytest.fixture(scope="module", params=["tp8", "dp8ep8"])
def cut(request):
    return RankSlice(ModelConfig(), request.param, layers=LAYERS, max_concurrency=64, device="cuda")


# torch.compile takes minutes for all of these
@pytest.mark.parametrize("rung", [rung for rung in RUNGS if not rung.asked], ids=lambda rung: rung.name)
@pytest.mark.parametrize("concurrency", [1, 16, 64])
def test_entries_at_full_size(cut, rung, concurrency):
    step = cut.graph(rung.ops, concurrency)
    step.seek(POSITIONS - 1)
    gates = step_gates(rung.ops, step.eager)
    step.seek(POSITIONS - 1)
    gates += entry_gates(rung.ops, step.eager)
    failed = [gate for gate in gates if not gate.passed]
    cut.reset()
    assert not failed
    # rounding shows, so something was compared
    assert all(gate.error > 1e-4 for gate in gates if gate.name.endswith("against float64"))


def test_the_top_rung_follows_the_reference():
    """200 tokens of 5 prompts, each given those that the reference chose in float32.

    Another token wins where two are near, or where rounding has tipped an expert, which random weights make no small thing:
    so the top rung may leave as often as the reference table in bfloat16 does.
    """
    gate = LogitsGate("cuda", lengths=(125, 70, 259, 33, 190), steps=200)
    gate.follow()
    top = [rung for rung in RUNGS if not rung.beside][-1]
    turns, own = gate.turns(top.ops), gate.turns(REFERENCE)
    for name, found in (("top", turns), ("reference", own)):
        clear = [turn for turn in found if turn.gap >= CLEAR]
        print(f"{name}: {len(found)} turns of {len(gate.truth)}, {len(clear)} of them {CLEAR} apart or more")
    assert len(own) < 0.1 * len(gate.truth)
    assert len(turns) <= 1.5 * len(own) + 5
