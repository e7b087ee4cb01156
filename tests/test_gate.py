"""The router against its formula in Python floats, its ties, its table, and what precision decides."""

import math

import pytest
import torch

from deepdecode.ops.gate import gate
from deepdecode.testing.numeric import rel_err, same_bits

FP32_STEP = 2e-6  # a logit of up to 4096 products, softplus, root and quotient
NO_TOKENS = torch.empty(0, dtype=torch.int64)


def route(z, bias=None, top_k=6, scale=1.5, dtype=torch.float64):
    """Logits handed in: x is the identity's rows scaled, so that x @ weight^T is z exactly."""
    z = torch.as_tensor(z, dtype=dtype)
    tokens = torch.zeros(len(z), dtype=torch.int64)
    eye = torch.eye(z.shape[1], dtype=dtype)
    return gate(z, eye, None if bias is None else torch.as_tensor(bias), None, tokens, top_k, scale)


def score(z):
    return math.sqrt(math.log1p(math.exp(z))) if z < 30 else math.sqrt(z)


# V4-Flash: 256 experts, 6 taken; odd; all taken; one of one
@pytest.mark.parametrize(("E", "top_k", "scale"), [(256, 6, 1.5), (7, 3, 2.5), (4, 4, 1.0), (1, 1, 1.5)])
@pytest.mark.parametrize("biased", [False, True])
def test_matches_the_formula(E, top_k, scale, biased):
    """sqrt(log(1 + exp(z))), not log(1 + exp(sqrt(z))). The bias chooses and never weighs."""
    z = 4 * torch.randn(5, E, dtype=torch.float64)
    bias = torch.randn(E) if biased else None
    ids, weights = route(z, bias, top_k, scale)
    assert ids.dtype == torch.int32
    for row, got, weight in zip(z.tolist(), ids.tolist(), weights, strict=True):
        s = [score(v) for v in row]
        key = [v + bias[e].item() for e, v in enumerate(s)] if biased else s
        want = sorted(range(E), key=lambda e: (-key[e], e))[:top_k]
        assert got == want
        total = sum(s[e] for e in want)
        assert rel_err(weight, torch.tensor([s[e] / total * scale for e in want], dtype=torch.float64)) < 1e-13


def test_ties_go_to_the_lower_index():
    ids, weights = route([[0.0] * 8, [1, 2, 2, 1, 2, 0, 2, 2]], top_k=3)
    assert ids.tolist() == [[0, 1, 2], [1, 2, 4]]
    assert torch.allclose(weights, torch.full((2, 3), 0.5, dtype=torch.float64))
    assert route(torch.zeros(1, 256), torch.zeros(256), top_k=6, dtype=torch.float32)[0].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_float32_logits_decide():
    """Two experts whose logits differ in float32 and are one number in bfloat16."""
    C = 64
    x, weight = torch.ones(1, C).bfloat16(), torch.zeros(3, C).bfloat16()
    weight[1, :2], weight[2, 0], weight[2, 1] = 8.0, 16.0, 2.0**-6
    ids, weights = gate(x, weight, None, None, torch.zeros(1, dtype=torch.int64), 1, 1.5)
    assert (x @ weight.T)[0, 1] == (x @ weight.T)[0, 2]
    assert ids.tolist() == [[2]]
    assert weights.dtype == torch.float32


def test_flash_size_in_every_type():
    x, weight, bias = torch.randn(9, 4096), torch.randn(256, 4096) / 64, torch.randn(256)
    tokens = torch.zeros(9, dtype=torch.int64)
    ids, weights = gate(x, weight, bias, None, tokens, 6, 1.5)
    exact_ids, exact = gate(x.double(), weight.double(), bias, None, tokens, 6, 1.5)
    assert exact.dtype == torch.float64
    assert torch.equal(ids, exact_ids)
    assert rel_err(weights, exact) < FP32_STEP
    assert torch.allclose(weights.sum(1), torch.full((9,), 1.5), rtol=1e-5)
    low = gate(x.bfloat16(), weight.bfloat16(), bias, None, tokens, 6, 1.5)
    full = gate(x.bfloat16().float(), weight.bfloat16().float(), bias, None, tokens, 6, 1.5)
    assert torch.equal(low[0], full[0])
    assert same_bits(low[1], full[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash_layers_route_by_token_id(dtype):
    """The ids are the table's, the weights the same formula on x's scores."""
    E, V, k = 16, 40, 6
    table = torch.stack([torch.randperm(E)[:k] for _ in range(V)]).to(dtype)
    x, weight, tokens = torch.randn(5, 32), torch.randn(E, 32), torch.tensor([0, 39, 7, 7, 20]).to(dtype)
    ids, weights = gate(x, weight, None, table, tokens, k, 1.5)
    assert torch.equal(ids, table[tokens.long()].int())
    for t in range(5):
        s = [score(v) for v in (weight.double() @ x[t].double())[ids[t].long()].tolist()]
        assert rel_err(weights[t], torch.tensor([v / sum(s) * 1.5 for v in s])) < FP32_STEP
    assert torch.equal(ids[2], ids[3])
    assert not torch.equal(weights[2], weights[3])


def test_scores_that_are_all_zero_give_zero_weights():
    """softplus(-200) is 0 in float32: the sum's guard keeps 0 / 0 away."""
    ids, weights = route([[-200.0] * 4], top_k=2, dtype=torch.float32)
    assert ids.tolist() == [[0, 1]]
    assert torch.equal(weights, torch.zeros(1, 2))
    # -60 gives scores of 9e-14, far above the guard
    assert torch.allclose(route([[-60.0] * 4], top_k=2)[1], torch.full((1, 2), 0.75, dtype=torch.float64))


def test_large_logits_and_nan():
    ids, weights = route([[1e4, 1e4, 0, 0], [float("nan")] * 4, [0, 1, 2, 3]], top_k=2, dtype=torch.float32)
    assert weights[0].tolist() == [0.75, 0.75]
    assert weights[1].isnan().all()
    assert ((ids >= 0) & (ids < 4)).all()
    assert ids[2].tolist() == [3, 2]


def test_no_tokens():
    ids, weights = gate(torch.empty(0, 8), torch.randn(4, 8), None, None, NO_TOKENS, 2, 1.5)
    assert (ids.shape, weights.shape, ids.dtype) == ((0, 2), (0, 2), torch.int32)
    assert gate(torch.empty(0, 8), torch.randn(4, 8), None, torch.zeros(9, 2).int(), NO_TOKENS, 2, 1.5)[0].shape == (0, 2)


TABLE = torch.zeros(9, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 8).half()}, r"gate: x must be \[T, C\] bfloat16, float32 or float64, got \[3, 8\] float16"),
        ({"weight": torch.zeros(4, 9)}, r"gate: weight must be \[E, 8\] .* got \[4, 9\]"),
        ({"bias": torch.zeros(5)}, r"gate: bias must be \[4\] float32 or float64 on cpu, got \[5\]"),
        ({"bias": torch.zeros(4).bfloat16()}, r"gate: bias must be \[4\] .* got \[4\] bfloat16"),
        ({"bias": torch.zeros(4), "tid2eid": TABLE}, r"gate: bias must be None where tid2eid is given, got both"),
        ({"top_k": 0}, r"gate: top_k must be from 1 to 4, got 0"),
        ({"top_k": 5}, r"gate: top_k must be from 1 to 4, got 5"),
        ({"tid2eid": TABLE[:, :1].contiguous()}, r"gate: tid2eid must be \[V, 2\] .* got \[9, 1\]"),
        ({"tid2eid": TABLE.float()}, r"gate: tid2eid must be \[V, 2\] int32 or int64 on cpu, got \[9, 2\] float32"),
        ({"tid2eid": TABLE, "tokens": torch.zeros(2).long()}, r"gate: tokens must be \[3\] .* got \[2\]"),
        ({"tid2eid": TABLE, "tokens": torch.tensor([0, 9, 1])}, r"gate: token ids must be in \[0, 9\), got 9"),
        ({"tid2eid": TABLE, "tokens": torch.tensor([0, 1, -1])}, r"gate: token ids must be in \[0, 9\), got -1"),
        ({"tid2eid": TABLE + 4}, r"gate: tid2eid's expert ids must be in \[0, 4\), got 4"),
    ],
)
def test_rejects(change, message):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(4, 8), "bias": None, "tid2eid": None}
    arguments |= {"tokens": torch.zeros(3, dtype=torch.int64), "top_k": 2, "routed_scale": 1.5}
    with pytest.raises(ValueError, match=message):
        gate(**(arguments | change))


def test_wild_ids_are_the_nearest_where_nobody_looks(monkeypatch):
    monkeypatch.setattr("deepdecode.ops.gate.readable", lambda tensor: False)
    table = torch.tensor([[0, 1], [2, 99], [-7, 3]])
    ids, weights = gate(torch.randn(3, 8), torch.randn(4, 8), None, table, torch.tensor([-5, 1, 2**40]), 2, 1.5)
    assert ids.tolist() == [[0, 1], [2, 3], [0, 3]]
    assert weights.isfinite().all()
