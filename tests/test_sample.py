"""Sampling: the random number by its definition, distributions by count, nuclei by hand, rows on their own."""

import pytest
import torch

from deepdecode.ops.sample import sample, uniform_ref

V4_VOCAB = 129280


def draw(logits, temperature=1.0, top_p=1.0, seeds=0, positions=0):
    T = len(logits)

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(T).contiguous()

    f, i = torch.float32, torch.int64
    return sample(logits, column(temperature, f), column(top_p, f), column(seeds, i), column(positions, i))


def mixed(seed, position):
    """The documented mixing, in Python's unbounded integers."""
    mask = 2**64 - 1

    def finalise(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    z = finalise(seed * 0x9E3779B97F4A7C15 & mask)
    return (finalise((z + position * 0xD1B54A32D192ED03) & mask) >> 12) / 2**52


def test_the_random_number_is_a_function_of_seed_and_position():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345])
    positions = torch.tensor([0, 7, 2**31 - 1, 1, 1_048_575, -3])
    want = [mixed(s % 2**64, p % 2**64) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert uniform_ref(seeds, positions).tolist() == want
    assert uniform_ref(seeds[:2], positions[:2].int()).tolist() == want[:2]


def test_random_numbers_are_uniform_and_unrelated():
    """Along positions, along seeds, and along neighbours of both: mean 1/2, variance 1/12, no correlation (4 sigma)."""
    n = 40_000
    count = torch.arange(n)
    zero = torch.zeros_like(count)
    streams = [
        uniform_ref(zero + 7, count),
        uniform_ref(count, zero + 7),
        uniform_ref(zero + 8, count),
        uniform_ref(count, count),
    ]
    for u in streams:
        assert ((u >= 0) & (u < 1)).all()
        assert abs(u.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
        assert abs(u.var() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
        assert u.unique().numel() == n
        assert abs(torch.corrcoef(torch.stack((u[1:], u[:-1])))[0, 1]) < 4 / n**0.5
    assert (torch.corrcoef(torch.stack(streams)) - torch.eye(4)).abs().max() < 4.5 / n**0.5


def test_greedy_takes_the_largest_and_the_lower_id_of_equals():
    logits = torch.tensor([[0.0, 3, 1, 3], [-5, -5, -5, -5], [float("-inf"), float("-inf"), -1e30, float("-inf")]])
    assert draw(logits, temperature=0.0).tolist() == [1, 0, 2]
    assert draw(logits.bfloat16(), temperature=0.0, top_p=0.1).tolist() == [1, 0, 2]
    big = torch.zeros(2, V4_VOCAB)
    big[0, 129_279], big[1, [77_000, 99]] = 1.0, 2.0
    assert draw(big, temperature=0.0).tolist() == [129_279, 99]


# plain, hot, cold, a nucleus that keeps three, one that keeps one
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (2.0, 1.0), (0.5, 1.0), (1.0, 0.85), (1.0, 0.3)])
def test_counts_follow_the_distribution(temperature, top_p):
    """20000 draws of six tokens, one of them impossible: chi-square below its 0.999 quantile."""
    n = 20_000
    logits = torch.tensor([1.0, 2.0, float("-inf"), 0.0, 2.5, -1.0])
    p = (logits.double() / temperature).softmax(0)
    order = p.argsort(descending=True)
    kept, total = [], 0.0
    for i in order.tolist():
        kept.append(i)
        total += p[i].item()
        if total >= top_p:
            break
    counts = draw(logits.expand(n, -1), temperature, top_p, seeds=3, positions=torch.arange(n)).bincount(minlength=6)
    outside = [i for i in range(6) if i not in kept or p[i] == 0]
    assert counts[outside].sum() == 0
    kept = [i for i in kept if p[i] > 0]
    expected = n * p[kept] / p[kept].sum()
    chi2 = ((counts[kept] - expected) ** 2 / expected).sum()
    # quantiles for 0 to 4 degrees of freedom
    assert chi2 <= [0.0, 10.83, 13.82, 16.27, 18.47][len(kept) - 1]


def test_the_nucleus_includes_the_token_that_crosses():
    """Probabilities 1/2, 1/4, 1/8, 1/8: exact in binary, so the borders are exact too."""
    logits = torch.tensor([0.125, 0.5, 0.125, 0.25]).log().expand(2000, -1)
    chosen = lambda p: set(draw(logits, top_p=p, positions=torch.arange(2000)).tolist())  # noqa: E731
    assert chosen(1e-6) == {1}
    assert chosen(0.5 - 1e-6) == {1}
    assert chosen(0.5 + 1e-6) == {1, 3}
    # of two equally probable tokens the lower id is taken first
    assert chosen(0.75 + 1e-6) == {0, 1, 3}
    assert chosen(1.0 - 1e-6) == {0, 1, 2, 3}


def test_a_nucleus_of_everything_changes_no_draw():
    logits = 2 * torch.randn(500, 300)
    kept = draw(logits, top_p=1 - 6e-8, positions=torch.arange(500))
    assert torch.equal(kept, draw(logits, positions=torch.arange(500)))


def test_rows_do_not_depend_on_their_batch_and_runs_repeat():
    T = 64
    logits = 3 * torch.randn(T, 1000)
    arguments = {
        "temperature": torch.linspace(0, 2, T),
        "top_p": torch.linspace(0.05, 1, T),
        "seeds": torch.randint(-(2**62), 2**62, (T,)),
        "positions": torch.randint(0, 10**6, (T,)),
    }
    whole = draw(logits, **arguments)
    assert torch.equal(draw(logits, **arguments), whole)
    for row in range(T):
        alone = draw(logits[row : row + 1], **{name: value[row : row + 1] for name, value in arguments.items()})
        assert alone.item() == whole[row]
    order = torch.randperm(T)
    assert torch.equal(draw(logits[order], **{name: value[order] for name, value in arguments.items()}), whole[order])
    assert not torch.equal(draw(logits, **(arguments | {"seeds": arguments["seeds"] + 1})), whole)


def test_extreme_temperatures():
    logits = torch.tensor([[10.0, 11, 9, 11]]).expand(400, -1)
    cold = draw(logits, temperature=1e-38, positions=torch.arange(400))
    assert set(cold.tolist()) == {1, 3}
    n, positions = 400, torch.arange(400)
    # 11 / 1e-310 overflows even in float64
    coldest = torch.full((n,), 1e-310, dtype=torch.float64)
    assert torch.equal(sample(logits, coldest, torch.ones(n), torch.zeros(n, dtype=torch.int64), positions), cold)
    hot = draw(logits, temperature=1e30, positions=torch.arange(400)).bincount(minlength=4)
    assert hot.min() > 60


def test_the_whole_vocabulary():
    """The last id is reachable, and a nucleus over 129280 equal tokens ends where it should."""
    flat = torch.zeros(3, V4_VOCAB)
    flat[1, :-1] = float("-inf")
    out = draw(flat, positions=torch.tensor([1, 2, 3]))
    assert out[1] == V4_VOCAB - 1
    assert ((out >= 0) & (out < V4_VOCAB)).all()
    halves = draw(flat[:1].expand(8, -1), top_p=0.5, positions=torch.arange(8))
    assert (halves <= V4_VOCAB // 2).all()
    assert halves.max() > V4_VOCAB // 4


def test_no_tokens():
    assert draw(torch.empty(0, 9)).tolist() == []


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3)}, r"sample: logits must be \[T, V\] .* got \[3\]"),
        ({"logits": torch.zeros(3, 4).half()}, r"sample: logits must be \[T, V\] bfloat16 or float32 or float64 .* float16"),
        ({"logits": torch.zeros(3, 0)}, r"sample: logits must have at least one column, got \[3, 0\]"),
        ({"temperature": torch.ones(2)}, r"sample: temperature must be \[3\] .* got \[2\]"),
        ({"top_p": torch.ones(3).long()}, r"sample: top_p must be \[3\] float32 or float64 on cpu, got \[3\] int64"),
        ({"seeds": torch.ones(3).int()}, r"sample: seeds must be \[3\] int64 on cpu, got \[3\] int32"),
        ({"positions": torch.ones(3)}, r"sample: positions must be \[3\] int32 or int64 on cpu, got \[3\] float32"),
        (
            {"temperature": torch.tensor([1.0, 0.0, -0.5])},
            r"temperature must be finite and >= 0 in every row, got -0\.5 in row 2",
        ),
        ({"temperature": torch.tensor([1.0, NAN, 1.0])}, r"temperature must be finite and >= 0 in every row, got nan in row 1"),
        ({"temperature": torch.tensor([INF, 1.0, 1.0])}, r"temperature must be finite and >= 0 in every row, got inf in row 0"),
        ({"top_p": torch.tensor([1.0, 0.0, 1.0])}, r"sample: top_p must be in \(0, 1\] in every row, got 0\.0 in row 1"),
        ({"top_p": torch.tensor([1.0, 1.0, 1.5])}, r"sample: top_p must be in \(0, 1\] in every row, got 1\.5 in row 2"),
        (
            {"logits": torch.tensor([[0.0, 1], [NAN, 0], [0, 0]])},
            r"the largest logit must be finite in every row, got nan in row 1",
        ),
        (
            {"logits": torch.tensor([[0.0, 1], [0, 0], [INF, 0]])},
            r"the largest logit must be finite in every row, got inf in row 2",
        ),
        ({"logits": torch.full((3, 2), -INF)}, r"the largest logit must be finite in every row, got -inf in row 0"),
    ],
)
def test_rejects(change, message):
    arguments = {"logits": torch.zeros(3, 4), "temperature": torch.ones(3), "top_p": torch.ones(3)}
    arguments |= {"seeds": torch.zeros(3, dtype=torch.int64), "positions": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        sample(**(arguments | change))
