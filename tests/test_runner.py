"""What a hostile caller hands the runner and forward: padded and poisoned rows, wild tokens, slots held elsewhere."""

import dataclasses

import pytest
import torch
from small_checkpoint import PLAIN

from deepdecode import runner as runner_module
from deepdecode.checkpoint import seeded_model
from deepdecode.kvcache import CacheFull
from deepdecode.model import forward
from deepdecode.ops._check import kernel_runs
from deepdecode.ops.reference import REFERENCE
from deepdecode.runner import Runner, Sampling, bucket
from deepdecode.testing.numeric import rel_err, same_bits
from deepdecode.tiny import CONFIG

# the same float32 products in another order: a batch of another size, experts with other rows
ORDER_ERR = 2e-6
WILD = [(-1, -1), (2**62, 2**31 - 1), (-(2**63), -(2**31)), (5, 141)]


@pytest.fixture(scope="module")
def plain():
    return seeded_model(PLAIN, 3, quantized=False)


def ids_of(n, seed=0, low=4):
    return torch.randint(low, PLAIN.vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@torch.inference_mode()
def with_padding(weights, fmt, pad, n=130):
    """Logits of a prefill and five decode steps of two sequences, rows of slot -1 among them."""
    runner = Runner(weights, max_len=n + 5, slots=3, fmt=fmt)
    cache, ids, out = runner.cache, ids_of(n), []
    slots = [cache.acquire(), cache.acquire()]
    tokens, positions = [token for token, _ in pad], [position for _, position in pad]

    def step(tokens, positions, slots, prefill):
        where = cache.step(torch.tensor(tokens), int32(positions), int32(slots), prefill=prefill)
        return forward(weights, cache.layers, where, REFERENCE)

    for slot in slots:
        cache.reserve(slot, n + 5)
        logits = step(ids + tokens, [*range(n), *positions], [slot] * n + [-1] * len(pad), True)
        out += [logits[:n], logits[n:]]
    for i in range(5):
        logits = step([*tokens, ids[i], ids[i + 1]], [*positions, n + i, n + i], [-1] * len(pad) + slots, False)
        out += [logits[-2:], logits[:-2]]
    return torch.cat(out[::2]), torch.cat(out[1::2])


@pytest.mark.parametrize(("config", "fmt"), [(PLAIN, "f32"), (PLAIN, "f64"), (CONFIG, "fp8_584")])
def test_what_a_padded_row_holds_means_nothing(config, fmt):
    dtype = torch.float64 if fmt == "f64" else None
    weights = seeded_model(config, 3, quantized=config is CONFIG, dtype=dtype)
    length = 130 if config is PLAIN else 20
    calm, _ = with_padding(weights, fmt, [(0, 0)] * len(WILD), length)
    wild, padded = with_padding(weights, fmt, WILD, length)
    # the batch has the same size, so only values could differ; experts do not see padded rows apart
    assert rel_err(wild, calm) < (ORDER_ERR if fmt != "f64" else 1e-14)
    assert padded.isfinite().all()


@pytest.mark.parametrize("prefill", [False, True])
@torch.inference_mode()
def test_nothing_but_padded_rows(plain, prefill):
    cache = Runner(plain, max_len=20, fmt="f32").cache
    step = cache.step(torch.tensor([-5, 9**15]), int32([7, -3]), int32([-1, -1]), prefill=prefill)
    assert forward(plain, cache.layers, step, REFERENCE).isfinite().all()
    assert step.tokens.tolist() == [0, 0]


@pytest.mark.parametrize("poison", ["nan", "inf", "-inf"])
def test_a_poisoned_row_poisons_no_other(plain, poison):
    """Token 3 of one sequence is NaN or infinite: through experts, indexer and caches it reaches that sequence alone."""
    bad = dataclasses.replace(plain, embed=plain.embed.clone())
    bad.embed[3] = float(poison)
    ids, out = ids_of(150), []
    for weights in (plain, bad):
        runner = Runner(weights, max_len=200, slots=3, fmt="f32")
        a, b, c = (runner.cache.acquire() for _ in range(3))
        for slot, n in ((a, 150), (b, 133), (c, 5)):
            runner.prefill(slot, ids[:n])
        steps = [runner.decode([a, b, c], [ids[i], 3, ids[i + 1]], [150 + i, 133 + i, 5 + i]) for i in range(5)]
        runner.cache.release(b)
        reused = runner.prefill(runner.cache.acquire(), ids[:60])
        out.append((torch.stack(steps), reused))
    (clean, clean_reused), (dirty, dirty_reused) = out
    assert dirty[:, 1].isnan().all()
    assert rel_err(dirty[:, [0, 2]], clean[:, [0, 2]]) < ORDER_ERR
    assert same_bits(clean_reused, dirty_reused)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, s: r.prefill(s, []), "prefill: ids must have at least one token, got none"),
        (lambda r, s: r.prefill(s, [1, -1]), r"step: tokens must be in \[0, 256\), got -1"),
        (lambda r, s: r.prefill(s, [256]), r"step: tokens must be in \[0, 256\), got 256"),
        (lambda r, s: r.prefill(s, [1.5]), r"step: tokens must be \[T\] int64 on cpu, got \[1\] float32 on cpu"),
        (lambda r, s: r.prefill(s, [1] * 51), "reserve: length must be 0 to 50, got 51"),
        (lambda r, s: r.prefill(s + 1, [1]), "reserve: slot must be one that acquire gave, got 1"),
        (lambda r, s: r.decode([s], [-1], [0]), r"step: tokens must be in \[0, 256\), got -1"),
        (lambda r, s: r.decode([s], [1], [-1]), "step: "),
        (lambda r, s: r.decode([s], [1, 2], [0]), r"step: positions must be \[2\] int32 on cpu, got \[1\] int32 on cpu"),
        (lambda r, s: r.decode([s, s], [1, 2], [0, 1]), r"step: slots must differ in a decode step, got \[0, 0\]"),
        (lambda r, s: r.decode([], [], []), r"step: tokens must be \[T\] int64"),
    ],
)
def test_misuse_is_refused_and_forgotten(plain, call, message):
    runner, ids = Runner(plain, max_len=50, slots=2, fmt="f32"), ids_of(50)
    slot = runner.cache.acquire()
    with pytest.raises(ValueError, match="^" + message):
        call(runner, slot)
    fresh = Runner(plain, max_len=50, fmt="f32")
    assert same_bits(runner.prefill(slot, ids), fresh.prefill(fresh.cache.acquire(), ids))


def test_a_wild_token_is_the_nearest_where_nobody_looks(plain, monkeypatch):
    cache = Runner(plain, max_len=20, slots=3, fmt="f32").cache
    slots = [cache.acquire() for _ in range(3)]
    for slot in slots:
        cache.reserve(slot, 1)
    monkeypatch.setattr("deepdecode.kvcache.readable", lambda tensor: False)
    step = cache.step(torch.tensor([-7, 255, 2**40]), int32([0, 0, 0]), int32(slots), prefill=False)
    assert step.tokens.tolist() == [0, 255, 255]


def ids_alone(plain, prompt):
    return [t.id for t in Runner(plain, max_len=60, fmt="f32").generate([prompt], Sampling(max_new_tokens=8))]


def test_iterations_share_a_runner_and_runners_share_weights(plain):
    prompts = [ids_of(n, seed=n) for n in (3, 20, 9)]
    one, other = Runner(plain, max_len=60, slots=2, fmt="f32"), Runner(plain, max_len=60, fmt="f32")
    sampling = Sampling(max_new_tokens=8)
    streams = [
        one.generate([prompts[0]], sampling),
        one.generate([prompts[1]], sampling),
        other.generate([prompts[2]], sampling),
    ]
    rows = list(zip(*streams, strict=True))
    assert [[step[i].id for step in rows] for i in range(3)] == [ids_alone(plain, prompt) for prompt in prompts]


def test_slots_held_elsewhere_are_waited_around(plain):
    runner = Runner(plain, max_len=60, slots=2, fmt="f32")
    held = [runner.cache.acquire()]
    prompts = [ids_of(n, seed=n) for n in (3, 20, 9)]
    rows = [[], [], []]
    for token in runner.generate(prompts, Sampling(max_new_tokens=8)):
        rows[token.row].append(token.id)
    assert rows == [ids_alone(plain, prompt) for prompt in prompts]
    held.append(runner.cache.acquire())
    with pytest.raises(CacheFull, match=r"acquire: all 2 slots are taken"):
        next(runner.generate(prompts, Sampling()))
    for slot in held:
        runner.cache.release(slot)
    assert [t.id for t in runner.generate(prompts[:1], Sampling(max_new_tokens=8))] == rows[0]


def test_a_failure_within_a_step_gives_the_slots_back(plain):
    """An op that fails, and a model whose logits are NaN: the iteration ends in that error, and the runner goes on."""
    fail = []

    def head(*args):
        if fail:
            raise fail.pop()
        return REFERENCE.head(*args)

    runner = Runner(plain, max_len=60, slots=2, fmt="f32", ops=dataclasses.replace(REFERENCE, head=head))
    prompts = [ids_of(n, seed=n) for n in (3, 20, 9)]
    for after in (0, 1, 3):
        stream = runner.generate(prompts, Sampling(max_new_tokens=8))
        for _ in range(after):
            next(stream)
        fail.append(RuntimeError("out of memory"))
        with pytest.raises(RuntimeError, match="out of memory"):
            list(stream)
        assert runner.cache.free_slots == 2
    assert [t.id for t in runner.generate(prompts[:1], Sampling(max_new_tokens=8))] == ids_alone(plain, prompts[0])


def test_a_prompt_of_the_whole_context_gets_one_token(plain):
    runner = Runner(plain, max_len=50, fmt="f32")
    made = [(t.row, t.finish) for t in runner.generate([ids_of(50), ids_of(49)], Sampling(max_new_tokens=5))]
    assert made == [(0, "context"), (1, None), (1, "context")]


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_seeds_are_64_bits(seed):
    with pytest.raises(ValueError, match=f"sampling: seed must be a signed 64-bit integer, got {seed}"):
        Sampling(seed=seed)


def test_buckets():
    assert [bucket(n, 64) for n in (1, 2, 3, 5, 8, 9, 17, 33, 63, 64)] == [1, 2, 4, 8, 8, 16, 24, 40, 64, 64]
    assert [bucket(n, 1000) for n in (65, 97, 1000)] == [96, 128, 1000]
    assert [bucket(n, 5) for n in (3, 5)] == [4, 5]


PROMPTS = [ids_of(n, seed=n) for n in (3, 20, 9, 40, 11)]


def made_by(runner, **sampling):
    rows = [[] for _ in PROMPTS]
    for token in runner.generate(PROMPTS, Sampling(max_new_tokens=8, **sampling)):
        rows[token.row].append(token.id)
    return rows


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_decoding_by_buckets(plain, temperature):
    """The step of a graph, padded rows and sampling included, called without one: batches of 3 and of 2."""
    buckets = Runner(plain, max_len=60, slots=3, fmt="f32")
    buckets.graphs = True
    options = {"temperature": temperature, "top_p": 0.9, "seed": 7}
    assert made_by(buckets, **options) == made_by(Runner(plain, max_len=60, slots=3, fmt="f32"), **options)
    assert sorted(buckets._buckets) == [2, 3]


def test_logits_of_a_bucket_stay(plain):
    """What decode gives is the caller's: the next step of the same bucket does not change it."""
    runner, eager = (Runner(plain, max_len=60, slots=4, fmt="f32") for _ in range(2))
    runner.graphs = True
    for one in (runner, eager):
        for slot, ids in enumerate(PROMPTS[:3]):
            assert one.cache.acquire() == slot
            one.prefill(slot, ids)
    given = [([0, 1, 2], [4, 5, 6], [3, 20, 9]), ([0, 1, 2], [7, 8, 9], [4, 21, 10])]
    first, second = (runner.decode(*step) for step in given)
    assert first.shape == (3, PLAIN.vocab_size)
    assert sorted(runner._buckets) == [4]
    for got, step in zip((first, second), given, strict=True):
        assert rel_err(got, eager.decode(*step)) < ORDER_ERR


def test_a_step_that_cannot_be_captured_runs_launch_by_launch(plain, monkeypatch, caplog):
    def refuse(work, device):
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        finally:
            raise RuntimeError("a previous error during capture")

    monkeypatch.setattr(runner_module, "Captured", refuse)
    runner = Runner(plain, max_len=60, slots=3, fmt="f32")
    runner.graphs = True
    assert made_by(runner) == made_by(Runner(plain, max_len=60, slots=3, fmt="f32"))
    (record,) = caplog.records
    assert "a step of 3 rows cannot be captured: operation not permitted when stream is capturing" in record.message
    assert "more" not in record.message


def test_graphs_need_a_gpu(plain):
    with pytest.raises(ValueError, match="runner: graphs must be False or None off a GPU, got True"):
        Runner(plain, max_len=60, fmt="f32", graphs=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_graphs_give_what_launches_give(temperature):
    weights = seeded_model(CONFIG, 3, device="cuda")
    options = {"temperature": temperature, "top_p": 0.9, "seed": 7}
    runners = [Runner(weights, max_len=60, slots=3, graphs=graphs) for graphs in (True, False)]
    kernels = []
    rows = []
    for runner in runners:
        before = kernel_runs.copy()
        rows.append(made_by(runner, **options))
        kernels.append(kernel_runs - before)
    assert rows[0] == rows[1]
    assert kernels[0] == kernels[1]
    assert runners[0].graphs, "a step was not captured"
    assert all(found._captured.launches for found in runners[0]._buckets.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
def test_references_that_ask_the_host_are_not_captured(caplog):
    weights = seeded_model(PLAIN, 3, quantized=False, device="cuda")
    runner = Runner(weights, max_len=60, slots=3, fmt="f32")
    rows = made_by(runner)
    assert rows == made_by(Runner(weights, max_len=60, slots=3, fmt="f32", graphs=False))
    assert not runner.graphs
    assert "cannot be captured" in caplog.text
