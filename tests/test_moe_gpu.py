"""Experts on a GPU: the compiled kernels through the op, against float64, whatever the router says."""

from dataclasses import replace

import pytest
import torch

from deepdecode.kernels.moe_plan import Few, Stage, Stream
from deepdecode.ops.moe import moe, moe_ref
from deepdecode.ops.quant import E8M0, Weight
from deepdecode.testing.experts import random_experts, random_routes
from deepdecode.testing.numeric import rel_err, same_bits, worst_row_err

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

moe_stream = pytest.importorskip("deepdecode.kernels.moe_stream", reason="Triton's Gluon, from 3.6 on")

pytestmark = pytest.mark.gpu

# h is rounded to bfloat16 between the two products (1.7e-3 of its norm), and the sum once at the end
MAX_ERR, MAX_ROW_ERR = 3e-3, 4e-3
LIMIT = 10.0


@pytest.fixture(autouse=True)
def _kernels_only(monkeypatch):
    monkeypatch.setenv("DEEPDECODE_STRICT", "1")


def inputs(T, C, seed=0):
    return torch.randn(T, C, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def check(x, ids, weights, w):
    got = moe(x, ids, weights, w, LIMIT)
    want = moe_ref(x.double(), ids, weights.double(), w, LIMIT)
    # of one token, the error is that of a row
    assert rel_err(got, want) < (MAX_ERR if len(x) > 1 else MAX_ROW_ERR)
    assert worst_row_err(got, want) < MAX_ROW_ERR
    return got


@pytest.fixture(scope="module")
def flash():
    """48 of V4-Flash's experts whole, beside the shared one."""
    return random_experts(48, 4096, 2048, 2048, device="cuda")


@pytest.mark.parametrize("T", [1, 2, 3, 8, 16, 33, 64, 200])
def test_flash_sizes(flash, T):
    check(inputs(T, 4096), *random_routes(T, 48, 6, device="cuda", seed=T), flash)


@pytest.mark.parametrize("T", [1, 5, 16, 64, 256, 520])
def test_a_rank_of_eight(T):
    """All experts an eighth as wide (tp8); and 32 of the 256 whole, whose tokens mostly go elsewhere (ep8)."""
    w = random_experts(256, 4096, 256, 256, device="cuda")
    check(inputs(T, 4096), *random_routes(T, 256, 6, device="cuda", seed=T), w)
    w = random_experts(32, 1024, 512, 512, first=96, device="cuda")
    check(inputs(T, 1024), *random_routes(T, 256, 6, device="cuda", seed=T), w)


@pytest.mark.parametrize(("kind", "shared"), [("fp4", "fp8"), ("fp8", "fp8"), ("fp8_f32", "fp8_f32"), ("bf16", "bf16")])
# odd widths, a shared expert of another width, more tokens than experts
@pytest.mark.parametrize(
    ("T", "E", "k", "C", "I", "shared_I"), [(1, 4, 2, 64, 32, 64), (7, 5, 3, 160, 96, 32), (50, 8, 6, 192, 160, 96)]
)
def test_kinds(kind, shared, T, E, k, C, I, shared_I):
    w = random_experts(E, C, I, shared_I, kind=kind, shared=shared, first=2, device="cuda")
    ids, weights = random_routes(T, E + 3, k, device="cuda")
    check(inputs(T, C), ids, weights, w)
    check(4 * inputs(T, C), ids.long(), weights, w)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="the streaming kernels are for sm_90")
@pytest.mark.parametrize("stage", [Stage(4, 2), Stage(2, 2, 2), Stage(1, 4, 8), Stage(2, 4)])
def test_streams_in_every_form(stage):
    """The same sums, whatever part of the rows and columns a warp has; more tokens of an expert than a tile takes.

    With four slices of 1024 columns, the ring has the steps of two tiles.
    """
    w = random_experts(12, 1024, 1024, 512, first=3, device="cuda")
    x, (ids, weights) = inputs(40, 1024), random_routes(40, 20, 6, device="cuda")
    want = moe_ref(x.double(), ids, weights.double(), w, LIMIT)
    stored = [part for weight in (w.w13, w.w2, w.shared13, w.shared2) for part in (weight.data, weight.scale)]
    for block_t, shared_t in ((4, 8), (2, 16), (8, 16)):
        out = torch.full_like(x, float("nan"))
        moe_stream.launch(x, ids, weights, *stored, 3, LIMIT, out, Stream(stage, stage, block_t=block_t, shared_t=shared_t))
        assert rel_err(out, want) < MAX_ERR
        assert worst_row_err(out, want) < MAX_ROW_ERR


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="planned for sm_90 only")
@pytest.mark.parametrize(("I", "shared_I"), [(256, 512), (512, 256), (1024, 1024)])
def test_few_tokens_in_every_form(I, shared_I):
    """Programs that take pairs in turn or one each, of experts here, elsewhere and nowhere; a NaN stays alone."""
    from deepdecode.kernels import moe_few

    w = random_experts(12, 1024, I, shared_I, first=3, device="cuda")
    stored = [part for weight in (w.w13, w.w2, w.shared13, w.shared2) for part in (weight.data, weight.scale)]
    for T, turns, together in ((1, False, 8), (5, True, 1024 // I)):
        x, (ids, weights) = inputs(T, 1024), random_routes(T, 20, 6, device="cuda")
        ids[-1, 1:3] = torch.tensor([-1, 2**31 - 1], device="cuda")
        config = Few(ahead=1, turns=turns, block_c=16, together=together)

        def run(x, out, ids=ids, weights=weights, config=config):
            moe_few.launch(x, ids, weights, *stored, 3, LIMIT, out.fill_(float("nan")), config)
            return out

        got = run(x, torch.empty_like(x))
        assert worst_row_err(got, moe_ref(x.double(), ids, weights.double(), w, LIMIT)) < MAX_ROW_ERR
        if T > 1:
            x[1, 77] = float("nan")
            bad = run(x, torch.empty_like(x))
            assert bad[1].isnan().all()
            assert same_bits(bad[[0, 2, 3, 4]], got[[0, 2, 3, 4]])


@pytest.mark.parametrize(("C", "I", "shared_I"), [(1536, 384, 384), (3072, 1024, 512), (512, 128, 384)])
def test_widths_that_are_no_power_of_two(C, I, shared_I):
    """Tokens come to shared memory a piece at a time there."""
    w = random_experts(12, C, I, shared_I, device="cuda")
    for T in (1, 20):
        check(inputs(T, C), *random_routes(T, 12, 6, device="cuda", seed=T), w)


@pytest.mark.parametrize("power", [-30, -15, 15])
def test_scales_far_from_one(power):
    """Weights of w13 and w2 in units of 2**power and 2**-power, beside a shared expert that adds nothing."""
    w = random_experts(8, 256, 128, 128, device="cuda")
    scale13, scale2 = w.w13.scale.view(torch.uint8) + power, w.w2.scale.view(torch.uint8) - power
    w = replace(w, w13=Weight(w.w13.data, scale13.view(E8M0)), w2=Weight(w.w2.data, scale2.view(E8M0)))
    w.shared2.data.view(torch.uint8).zero_()
    x, (ids, weights) = inputs(5, 256), random_routes(5, 8, 3, device="cuda")
    want = moe_ref(x.double(), ids, weights.double(), w, 1e30)
    assert rel_err(moe(x, ids, weights, w, 1e30), want) < MAX_ERR


@pytest.mark.parametrize("shared_rows", [0, 1, 5, 8, 40])
def test_the_shared_expert_of_some_rows(shared_rows):
    w = random_experts(32, 1024, 512, 512, first=96, device="cuda")
    for T in (40, 300):
        x, (ids, weights) = inputs(T, 1024), random_routes(T, 256, 6, device="cuda")
        got = moe(x, ids, weights, w, LIMIT, shared_rows)
        want = moe_ref(x.double(), ids, weights.double(), w, LIMIT, shared_rows)
        assert rel_err(got, want) < MAX_ERR
        nobody = torch.full_like(ids, -1)
        assert not moe(x, nobody, weights, w, LIMIT, shared_rows)[shared_rows:].any()


def test_hostile_routes():
    w = random_experts(16, 256, 128, 128, first=4, device="cuda")
    for T in (1, 2, 40):
        x = inputs(T, 256)
        ids, weights = random_routes(T, 24, 6, device="cuda")
        nobody = torch.full_like(ids, -1)
        none = check(x, nobody, weights * float("nan"), w)
        assert same_bits(check(x, torch.full_like(ids, 4 + 16), weights, w), none)
        assert same_bits(moe(x, ids[:, :0], weights[:, :0], w, LIMIT), none)
        check(x, torch.full_like(ids, 7), weights, w)
        wild = ids.clone()
        wild[:, 1], wild[:, 3] = 2**31 - 1, -(2**31)
        check(x, wild, torch.where(wild == ids, weights, float("nan")), w)
        far = torch.where(wild == ids, ids.long(), 2**32 + 7)
        check(x, far, torch.where(wild == ids, weights, float("nan")), w)
    x = inputs(64, 256)
    ids = torch.full((64, 6), -1, dtype=torch.int32, device="cuda")
    ids[:, 2] = 9
    check(x, ids, torch.ones(64, 6, device="cuda"), w)


def test_only_the_experts_hit_are_read():
    """The others' scales are NaN, which would show."""
    w = random_experts(12, 256, 128, 128, device="cuda")
    scale13, scale2 = w.w13.scale.view(torch.uint8).clone(), w.w2.scale.view(torch.uint8).clone()
    off = [e for e in range(12) if e not in (3, 8)]
    scale13[off], scale2[off] = 255, 255
    w = replace(w, w13=Weight(w.w13.data, scale13.view(E8M0)), w2=Weight(w.w2.data, scale2.view(E8M0)))
    ids = torch.tensor([[3, 8], [8, -1], [3, 3]], device="cuda")
    x, weights = inputs(3, 256), torch.ones(3, 2, device="cuda")
    assert check(x, ids, weights, w).isfinite().all()
    assert moe(x, ids + 1, weights, w, LIMIT).isnan().all(1).tolist() == [True, True, True]


def test_a_nan_token_stays_alone():
    w = random_experts(8, 256, 128, 128, device="cuda")
    x, (ids, weights) = inputs(9, 256), random_routes(9, 8, 3, device="cuda")
    clean = moe(x, ids, weights, w, LIMIT)
    x[4, 100] = float("nan")
    got = moe(x, ids, weights, w, LIMIT)
    rows = [0, 1, 2, 3, 5, 6, 7, 8]
    assert got[4].isnan().all()
    assert same_bits(got[rows], clean[rows])


def test_the_same_bits_every_time_and_in_a_graph_with_other_routes():
    w = random_experts(64, 512, 256, 256, device="cuda")
    for T in (1, 16, 64):
        x, (ids, weights) = inputs(T, 512), random_routes(T, 64, 6, device="cuda")
        first = moe(x, ids, weights, w, LIMIT)
        assert all(same_bits(moe(x, ids, weights, w, LIMIT), first) for _ in range(20))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = moe(x, ids, weights, w, LIMIT)
        for seed in (1, 2):
            ids.copy_(random_routes(T, 64, 6, device="cuda", seed=seed)[0])
            if seed == 2:
                ids[:, ::2] = -1
            out.fill_(float("nan"))
            graph.replay()
            assert same_bits(out, moe(x, ids, weights, w, LIMIT))


def test_opcheck_and_compile():
    w = random_experts(8, 256, 128, 128, device="cuda")
    x, (ids, weights) = inputs(3, 256), random_routes(3, 8, 3, device="cuda")
    stored = [part for weight in (w.w13, w.w2, w.shared13, w.shared2) for part in (weight.data, weight.scale)]
    # the schema's check compares what was given before and after, which torch cannot for E8M0: plain weights stand for them
    others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.deepdecode.moe.default, (x, ids, weights, *stored, 0, LIMIT), test_utils=others)
    plain = random_experts(8, 256, 128, 128, kind="bf16", shared="bf16", device="cuda")
    bare = [part for weight in (plain.w13, plain.w2, plain.shared13, plain.shared2) for part in (weight.data, weight.scale)]
    torch.library.opcheck(torch.ops.deepdecode.moe.default, (x, ids, weights, *bare, 0, LIMIT))
    compiled = torch.compile(lambda a: moe(a, ids, weights, w, LIMIT), fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x), moe(x, ids, weights, w, LIMIT))
