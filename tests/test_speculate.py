"""Speculation: the text is the model's own whatever the draft says, and a refused proposal leaves nothing behind."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from small_checkpoint import PLAIN

from deepdecode.checkpoint import CheckpointError, load_draft, load_model, open_checkpoint, seeded_tensors, write_checkpoint
from deepdecode.kvcache import CacheFull
from deepdecode.ops.reference import REFERENCE
from deepdecode.runner import Runner, Sampling
from deepdecode.speculate import Speculator
from deepdecode.testing.numeric import rel_err
from deepdecode.text import Text
from deepdecode.tiny import EMBEDDED

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from training.forward import Model
from training.prompts import PROMPTS
from training.weights import from_tensors

# float32, the same products in another order
SAME = 5e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft") / "m"
    write_checkpoint(folder, PLAIN, seeded_tensors(PLAIN, 3, quantized=False, mtp=True))
    return folder


@pytest.fixture(scope="module")
def model(folder):
    weights = load_model(folder)
    return weights, load_draft(folder, weights)


def random_ids(n, seed=0):
    return torch.randint(0, PLAIN.vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_text(weights, prompt, new, max_len=400, **options):
    runner = Runner(weights, max_len=max_len, fmt="f32", **options)
    return [token.id for token in runner.generate([prompt], Sampling(new))]


class Oracle(Speculator):
    """Proposes what the model will say, but where `wrong` says otherwise."""

    def __init__(self, runner, draft, text, wrong):
        super().__init__(runner, draft)
        self.text, self.wrong = text, wrong

    def _propose(self, slot, streams, following, start):
        super()._propose(slot, streams, following, start)
        # the block has been fed up to here, and tells the token after the next
        at = start + len(following)
        right = self.text[at + 1] if at + 1 < len(self.text) else 0
        return [(right + self.wrong(at)) % PLAIN.vocab_size]


WRONG = {
    "always right": lambda at: 0,
    "always wrong": lambda at: 1,
    "now and then": lambda at: int(at % 3 == 0),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("length", [1, 249])
def test_the_text_is_the_models_own(model, wrong, length):
    """Accepted or refused at every place that a block, a window or an entry can end: ids, and the logits of what follows."""
    weights, draft = model
    prompt, new = random_ids(length), 15
    text = prompt + plain_text(weights, prompt, new)
    runner = Runner(weights, max_len=400, fmt="f32")
    oracle = Oracle(runner, draft, text, WRONG[wrong])
    stream = oracle.generate([prompt], Sampling(new))
    # the stream stays open, and its slot with the sequence in it
    assert [next(stream).id for _ in range(new)] == text[length:]
    rate = oracle.counts.acceptance
    assert {"always right": rate == 1, "always wrong": rate == 0}.get(wrong, 0 < rate < 1)
    # the prompt's own step makes one token, the others the 14 that follow
    assert oracle.counts.steps == {"always right": 7, "always wrong": 14}.get(wrong, oracle.counts.steps)
    assert oracle.counts.tokens_per_step == 14 / oracle.counts.steps
    # the sequence goes on as one that was never speculated on
    fresh = Runner(weights, max_len=400, fmt="f32")
    slot = fresh.cache.acquire()
    fed = len(text) - 1
    fresh.prefill(slot, text[:fed])
    for token in random_ids(9, seed=1):
        # the other one read the whole text as a prompt
        ours, theirs = runner.decode([0], [token], [fed]), fresh.decode([slot], [token], [fed])
        assert rel_err(ours, theirs) < SAME
        fed += 1


def test_states_after_a_refusal_are_those_of_plain_decoding(model):
    """Every row of every ring that a later token can read, and every entry: the same bits."""
    weights, draft = model
    prompt = random_ids(250)
    text = prompt + plain_text(weights, prompt, 12)
    for wrong in (lambda at: 1, lambda at: at % 2):
        runner = Runner(weights, max_len=400, fmt="f32")
        stream = Oracle(runner, draft, text, wrong).generate([prompt], Sampling(12))
        for _ in range(12):
            next(stream)
        fed = len(text) - 1
        plain = Runner(weights, max_len=400, fmt="f32")
        plain.prefill(plain.cache.acquire(), prompt)
        for at in range(len(prompt), fed):
            plain.decode([0], [text[at]], [at])
        for ours, theirs, ratio in zip(runner.cache.layers, plain.cache.layers, PLAIN.compress_ratios, strict=True):
            near = torch.arange(fed - 127, fed) % 128
            assert torch.equal(ours.window.data.flatten(0, 1)[near], theirs.window.data.flatten(0, 1)[near])
            for mine, other in ((ours.state, theirs.state), (ours.index_state, theirs.index_state)):
                if mine is not None:
                    ring = mine.kv.shape[1]
                    rows = torch.arange(fed - ring + 1, fed) % ring
                    assert torch.equal(mine.kv[0, rows], other.kv[0, rows])
                    assert torch.equal(mine.score[0, rows], other.score[0, rows])
            if ratio:
                pages = [c.block_tables[0, : fed // 256 + 1].long() for c in (runner.cache, plain.cache)]
                done = fed // ratio
                a, b = (layer.compressed.data[p].flatten(0, 1)[:done] for layer, p in zip((ours, theirs), pages, strict=True))
                assert torch.equal(a, b)


@pytest.fixture(scope="module")
def embedded():
    """The trained model as `generate` runs it: bfloat16 between ops, FP8 rows, one thread."""
    checkpoint = open_checkpoint(EMBEDDED)
    weights = load_model(checkpoint, widen=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield weights, load_draft(checkpoint, weights, widen=True), Text(EMBEDDED, checkpoint.config.bos_id)
    torch.set_num_threads(threads)


def heads_of(runner, weights):
    """What the model's own head says from here on, one row a call."""
    told = []

    def head(*args):
        logits = REFERENCE.head(*args)
        if args[-2] is weights.head:
            told.append(logits)
        return logits

    runner.ops = dataclasses.replace(REFERENCE, head=head)
    return told


# 12: its text once parted, from two tokens that were fed at once
@pytest.mark.parametrize("which", [7, 12])
def test_default_precision_gives_the_same_bits(embedded, which):
    """Every logit of an accepted token is that of decoding it alone, and so is the text."""
    weights, draft, text = embedded
    prompt = text.encode(PROMPTS[which])
    runners = [Runner(weights, max_len=len(prompt) + 24) for _ in range(2)]
    plain, ours = (heads_of(runner, weights) for runner in runners)
    want = [token.id for token in runners[0].generate([prompt], Sampling(24))]
    speculator = Speculator(runners[1], draft)
    assert [token.id for token in speculator.generate([prompt], Sampling(24))] == want
    assert speculator.counts.accepted > 0
    # those behind a refused proposal are told in vain
    at = 0
    for logits in plain:
        at = next(i for i in range(at, len(ours)) if torch.equal(ours[i], logits)) + 1


@pytest.mark.slow
def test_default_precision_gives_the_same_text(embedded):
    weights, draft, text = embedded
    for prompt in map(text.encode, PROMPTS):
        runner = Runner(weights, max_len=len(prompt) + 40)
        plain = list(runner.generate([prompt], Sampling(40)))
        assert list(Speculator(runner, draft).generate([prompt], Sampling(40))) == plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_text_is_the_graphs():
    """Verified by kernels launch by launch, decoded by the same kernels as one graph a step."""
    checkpoint = open_checkpoint(EMBEDDED)
    weights = load_model(checkpoint, device="cuda")
    text = Text(EMBEDDED, checkpoint.config.bos_id)
    runner = Runner(weights, max_len=200)
    speculator = Speculator(runner, load_draft(checkpoint, weights))
    for prompt in (text.encode(PROMPTS[which]) for which in (0, 7, 12)):
        plain = list(runner.generate([prompt], Sampling(40)))
        assert list(speculator.generate([prompt], Sampling(40))) == plain


def test_the_draft_is_the_trained_one(folder, model):
    """What the block proposes along a text is what the trainer's forward says it is."""
    weights, draft = model
    prompt = random_ids(140, seed=2)
    params = from_tensors(PLAIN, seeded_tensors(PLAIN, 3, quantized=False, mtp=True))
    runner = Runner(weights, max_len=300, fmt="f32", prefill_chunk=50)
    seen = []

    def head(*args):
        logits = REFERENCE.head(*args)
        if args[-2] is draft.head:
            seen.append(logits[-1])
        return logits

    runner.ops = dataclasses.replace(REFERENCE, head=head)
    speculator = Speculator(runner, draft)
    made = [token.id for token in speculator.generate([prompt], Sampling(6))]
    assert made == plain_text(weights, prompt, 6)
    ids = torch.tensor([prompt + made])
    with torch.no_grad():
        told = Model(PLAIN)(params, ids, topk=PLAIN.index_topk).draft_logits[0]
    # chunks of the prompt end at 50 and 100; then a proposal for each token made, but for the ones that were accepted
    assert rel_err(seen[0], told[49]) < SAME and rel_err(seen[1], told[99]) < SAME
    assert rel_err(seen[2], told[139]) < SAME
    assert len(seen) == 2 + speculator.counts.proposed


def test_ends_as_plain_decoding_does(model):
    """Ids and reasons of every row, whether its number, the context or a stop id ends it; slots come back."""
    weights, draft = model
    prompts = [random_ids(20), random_ids(17, seed=3)]
    stop = plain_text(weights, prompts[0], 9)[3]
    for max_len, sampling in (
        (25, Sampling(9)),
        (60, Sampling(9, stop_ids=(stop,))),
        (60, Sampling(5)),
        (60, Sampling(1)),
        (60, Sampling(0)),
    ):
        runner = Runner(weights, max_len=max_len, fmt="f32")
        speculator = Speculator(runner, draft)
        told = sorted(speculator.generate(prompts, sampling), key=lambda token: token.row)
        plain = sorted(runner.generate(prompts, sampling), key=lambda token: token.row)
        assert told == plain, (max_len, sampling)
        assert runner.cache.free_slots == speculator.cache.free_slots == 1


def test_a_text_that_is_refused_holds_no_slot(model):
    """A second text while the first is being made: refused, and the slots that are free stay free."""
    weights, draft = model
    runner = Runner(weights, max_len=60, slots=2, fmt="f32")
    speculator = Speculator(runner, draft)
    first = speculator.generate([random_ids(5)], Sampling(9))
    next(first)
    with pytest.raises(CacheFull, match="all 1 slots are taken"):
        next(speculator.generate([random_ids(6)], Sampling(9)))
    assert runner.cache.free_slots == 1
    first.close()
    assert runner.cache.free_slots == 2 and speculator.cache.free_slots == 1


def test_refuses(model):
    weights, draft = model
    speculator = Speculator(Runner(weights, max_len=60, fmt="f32"), draft)
    with pytest.raises(ValueError, match="prompt 0 must have at least one token, got none"):
        list(speculator.generate([[]], Sampling(3)))
    with pytest.raises(ValueError, match=r"speculate: temperature must be 0 \(greedy\), got 0.5"):
        list(speculator.generate([[1]], Sampling(3, temperature=0.5)))


def test_a_checkpoint_without_the_block_is_refused(folder, model, tmp_path):
    write_checkpoint(tmp_path / "m", PLAIN, seeded_tensors(PLAIN, 3, quantized=False))
    with pytest.raises(CheckpointError, match=r"m must hold an MTP block \(mtp.0.\*\), got none"):
        load_draft(tmp_path / "m", model[0])
    checkpoint = open_checkpoint(folder)
    del checkpoint.drafts["mtp.0.e_proj.weight"]
    with pytest.raises(CheckpointError, match=r"mtp.0.e_proj.weight is missing"):
        load_draft(checkpoint, model[0])
