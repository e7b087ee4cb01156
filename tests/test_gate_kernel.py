"""The router's kernels against float64: interpreted without a GPU, compiled with one."""

import os

import pytest
import torch

from deepdecode.ops.gate import score_ref, top_ref, weigh_ref
from deepdecode.testing.numeric import rel_err, same_bits

# Triton reads it when a kernel is defined, so before the import below
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from deepdecode.kernels import gate as kernel  # noqa: E402

F32 = 2e-6  # float32 sums in another order
# scores nearer than this may change places: bfloat16 products are exact, their float32 sum is not
NEAR = 1e-5
ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 80
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


def inputs(T, C, E, device):
    dtype = DTYPE[device.type]
    x = torch.randn(T, C, device=device).to(dtype)
    weight = (torch.randn(E, C, device=device) * 2 / C**0.5).to(dtype)
    return x, weight, 0.1 * torch.randn(E, device=device)


def scored(x, weight, bias, top_k, scale=1.5):
    return kernel.launch(x, weight, bias, None, None, top_k, scale, kernel.plan(ARCH))


# V4-Flash, V4-Pro's experts, odd sizes over two blocks of tokens, all experts chosen, one expert
@pytest.mark.parametrize(
    ("T", "C", "E", "top_k"), [(1, 4096, 256, 6), (1, 640, 384, 6), (19, 192, 37, 5), (3, 64, 8, 8), (2, 64, 1, 1)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_matches_float64(T, C, E, top_k, biased, device):
    x, weight, bias = inputs(T, C, E, device)
    bias = bias if biased else None
    ids, weights = scored(x, weight, bias, top_k)
    scores = score_ref(x.double(), weight.double())
    choice = scores if bias is None else scores + bias.double()
    want = top_ref(choice, top_k)
    # the chosen are the best, but for scores that float32 cannot tell apart
    assert ((choice.gather(1, ids.long()) - choice.gather(1, want)).abs() < NEAR).all()
    assert all(len(set(row)) == top_k and min(row) >= 0 and max(row) < E for row in ids.tolist())
    assert rel_err(weights, weigh_ref(scores, ids.long(), 1.5)) < F32


def test_equal_scores_go_to_the_lower_id(device):
    x, weight, _ = inputs(2, 64, 16, device)
    weight[5:] = weight[5].clone()
    bias = torch.zeros(16, device=device)
    bias[9] = bias[7] = bias[12] = 10.0
    ids, _ = scored(x, weight, bias, 6)
    assert ids[:, :3].tolist() == [[7, 9, 12]] * 2
    rest = score_ref(x.double(), weight.double())
    for row, s in zip(ids[:, 3:].tolist(), rest, strict=True):
        assert row == [int(i) for i in top_ref((s - 100 * (bias > 0))[None], 3)[0]]


def test_bias_takes_no_part_in_the_weight(device):
    x, weight, bias = inputs(3, 64, 16, device)
    ids, weights = scored(x, weight, bias + 50, 4)
    plain_ids, plain = scored(x, weight, bias, 4)
    assert rel_err(weights, weigh_ref(score_ref(x.double(), weight.double()), ids.long(), 1.5)) < F32
    # 50 leaves fewer bits of the score: ids may differ where they are near, weights of the same ids not
    same = (ids == plain_ids).all(1)
    assert same.any()
    assert rel_err(weights[same], plain[same]) < F32


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_shows(device):
    x, weight, bias = inputs(3, 64, 16, device)
    x[1, 7] = float("nan")
    ids, weights = scored(x, weight, bias, 4)
    assert weights.isnan().all(1).tolist() == [False, True, False]
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert not weights[[0, 2]].isnan().any()


def test_a_token_does_not_see_its_batch(device):
    x, weight, bias = inputs(18, 192, 37, device)
    ids, weights = scored(x, weight, bias, 5)
    alone = scored(x[17:], weight, bias, 5)
    assert same_bits(ids[17:], alone[0])
    assert same_bits(weights[17:], alone[1])


@pytest.mark.parametrize(("T", "C", "E", "top_k"), [(1, 4096, 256, 6), (5, 192, 37, 3)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_hash_layers_read_their_experts_only(T, C, E, top_k, kind, device):
    x, weight, _ = inputs(T, C, E, device)
    table = torch.stack([torch.randperm(E, device=device)[:top_k] for _ in range(11)]).to(kind)
    tokens = torch.randint(11, (T,), device=device)
    unread = torch.ones(E, dtype=torch.bool, device=device)
    unread[table[tokens].flatten().long()] = False
    weight[unread] = float("nan")
    ids, weights = kernel.launch(x, weight, None, table, tokens, top_k, 2.5, kernel.plan(ARCH))
    assert ids.tolist() == table[tokens].tolist()
    scores = score_ref(x.double(), weight.double())
    assert rel_err(weights, weigh_ref(scores, ids.long(), 2.5)) < F32


def test_wild_token_ids_take_the_nearest(device):
    x, weight, _ = inputs(2, 64, 16, device)
    table = torch.tensor([[3, 99], [-4, 2]], dtype=torch.int32, device=device)
    ids, _ = kernel.launch(x, weight, None, table, torch.tensor([-7, 1 << 40], device=device), 2, 1.0, kernel.plan(ARCH))
    assert ids.tolist() == [[3, 15], [0, 2]]


@triton.jit
def score_kernel(z_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, kernel._score(tl.load(z_ptr + i)))


def test_score_keeps_its_digits(device):
    z = torch.cat([torch.linspace(-80, 80, 4001), torch.tensor([0.0, 1e-30, -1e-30, 3e4, float("inf"), float("-inf")])])
    z = torch.cat([z, torch.full((8192 - len(z),), 1.0)]).to(device)
    out = torch.empty_like(z)
    score_kernel[1,](z, out, 8192)
    want = torch.nn.functional.softplus(z.double(), threshold=1000).sqrt()
    near = z.abs() < 80.5
    # exp rounds its argument, which is a relative error of 80 * 2**-24
    assert ((out - want).abs() <= 6e-6 * want)[near].all()
    assert out[~near].tolist() == pytest.approx(want[~near].tolist())


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"dtype": "float32"}, "float32"), ({"weight": "float32"}, "float32"), ({"C": 100}, "100"), ({"top_k": 17}, "17")],
)
def test_supports_says_why_not(change, reason):
    base = {"T": 1, "C": 4096, "E": 256, "top_k": 6, "dtype": "bfloat16", "weight": "bfloat16"}
    assert kernel.supports(**base) is None
    assert reason in kernel.supports(**{**base, **change})
