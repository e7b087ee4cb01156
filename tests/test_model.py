"""The whole model against an independent implementation (transformers), and against itself in every way it can be run."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoint import PLAIN

from deepdecode.checkpoint import load_model, open_checkpoint, seeded_tensors, write_checkpoint
from deepdecode.ops.reference import REFERENCE
from deepdecode.runner import Runner, Sampling
from deepdecode.testing.numeric import rel_err, same_bits

# float32 end to end, two implementations: 2e-6 is seen
ORACLE_ERR = 5e-6
# the same float32 products in another order
ORDER_ERR = 2e-6

CSA, HCA, SWA = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"

# Head counts, groups, top-k, hash layers, layer order and YaRN differ; index_topk is small, so entries are dropped at most
# positions. Many index heads: with few, all of them may be negative for several entries, whose scores then tie at zero.
ORACLES = {
    "eight heads": {
        "layer_types": [SWA, SWA, CSA, HCA, CSA],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"],
    },
    "four heads, all groups, yarn": {
        "num_attention_heads": 4,
        "o_groups": 4,
        "o_lora_rank": 16,
        "num_experts_per_tok": 3,
        "index_topk": 8,
        "index_n_heads": 24,
        "layer_types": [CSA, HCA, CSA, HCA],
        "mlp_layer_types": ["hash_moe", "hash_moe", "hash_moe", "moe"],
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 128,
        },
    },
    "six heads, no hash": {
        "num_attention_heads": 6,
        "o_groups": 3,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "index_topk": 24,
        "index_n_heads": 32,
        "routed_scaling_factor": 2.5,
        "layer_types": [SWA, CSA, CSA, HCA],
        "mlp_layer_types": ["moe"] * 4,
    },
}
PROMPT, NEW = 300, 40


def hf_model(name, seed):
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    sizes = {
        "vocab_size": 384,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "partial_rotary_factor": 16 / 64,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "sliding_window": 128,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": None,
        "initializer_range": 0.05,
        **ORACLES[name],
    }
    config = DeepseekV4Config(num_hidden_layers=len(sizes["layer_types"]), **sizes)
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).eval().float()
    with torch.no_grad():
        for key, t in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("tid2eid"):
                rows = torch.rand(len(t), config.n_routed_experts).topk(t.shape[1]).indices
                t.copy_(rows.to(t.dtype))
            elif key.endswith(("sinks", "position_bias", ".base", "hc_base", "correction_bias")):
                # zero after init: make them matter
                t.copy_(0.5 * torch.randn(t.shape))
            elif key.endswith("norm.weight"):
                t.copy_(1 + 0.2 * torch.randn(t.shape))
    return model


@pytest.fixture
def twins(request, tmp_path):
    """A transformers model, and ours with its weights after a pass through our reader, our writer and our reader."""
    name, seed = request.param
    model = hf_model(name, seed)
    theirs, ours = tmp_path / "hf", tmp_path / "ours"
    theirs.mkdir()
    save_file({k: v.contiguous() for k, v in model.state_dict().items() if "rotary" not in k}, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    checkpoint = open_checkpoint(theirs)
    write_checkpoint(ours, checkpoint.config, ((name, checkpoint.get(name)) for name in checkpoint.tensors))
    return model, load_model(ours)


def all_cases():
    """One seed of each shape at once, two more in the slow stage."""
    slow = pytest.mark.slow
    return [
        pytest.param((name, seed), id=f"{name}-{seed}", marks=slow if seed else ()) for name in ORACLES for seed in range(3)
    ]


def logical(indices, tables, slot, per_page=64):
    """Entry numbers of physical rows, -1 as it is."""
    page_of = {int(page): i for i, page in enumerate(tables[slot]) if page >= 0}
    return [{page_of[r // per_page] * per_page + r % per_page for r in row if r >= 0} for row in indices.tolist()]


@pytest.mark.parametrize("twins", all_cases(), indirect=True)
def test_equals_transformers(twins):
    """300 prompt tokens and 40 decoded ones: logits at every position, greedy ids, and the entries the indexer chose."""
    hf, weights = twins
    V = weights.config.vocab_size
    prompt = torch.randint(0, V, (PROMPT,), generator=torch.Generator().manual_seed(7)).tolist()
    chosen, hf_chosen, hooks = [], [], []

    def spy(index_q, index_weights, keys, step, topk):
        indices, lens = REFERENCE.index_topk(index_q, index_weights, keys, step, topk)
        chosen.extend(logical(indices, step.block_tables, int(step.slots[0])))
        return indices, lens

    runner = Runner(weights, max_len=PROMPT + NEW, fmt="f32", ops=dataclasses.replace(REFERENCE, index_topk=spy))
    slot = runner.cache.acquire()
    logits = [runner.prefill(slot, prompt, every=True)]
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(logits[-1][-1].argmax()))
        logits.append(runner.decode([slot], [ids[-1]], [len(ids) - 1]))
    ours = torch.cat(logits)

    for module in hf.modules():
        if type(module).__name__ == "DeepseekV4Indexer":
            hooks.append(module.register_forward_hook(lambda m, a, out: hf_chosen.append(out[0])))
    with torch.no_grad():
        theirs = hf(torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    worst = max(rel_err(a, b) for a, b in zip(ours, theirs, strict=True))
    assert worst < ORACLE_ERR

    with torch.no_grad():
        out = hf.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, PROMPT), max_new_tokens=NEW, do_sample=False)
    assert out[0].tolist() == ids

    # ours came layer by layer for the prompt, then layer by layer for each decoded token
    layers, topk = len(hf_chosen), weights.config.index_topk
    dropped = 0
    for layer, theirs_of_layer in enumerate(hf_chosen):
        mine = chosen[layer * PROMPT : (layer + 1) * PROMPT] + chosen[layers * PROMPT + layer :: layers]
        for t, (a, b) in enumerate(zip(mine, theirs_of_layer.tolist(), strict=True)):
            assert a == {i for i in b if i >= 0}, f"layer {layer}, position {t}"
            dropped += (t + 1) // 4 > topk
    assert dropped > 0.5 * layers * len(ids)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A float32 model of every layer kind."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    write_checkpoint(folder, PLAIN, seeded_tensors(PLAIN, 3, quantized=False))
    return load_model(folder)


def random_ids(n, seed=0):
    return torch.randint(0, PLAIN.vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_by_one(runner, slot, ids, start=0):
    return torch.cat([runner.decode([slot], [token], [start + i]) for i, token in enumerate(ids)])


@pytest.mark.slow
def test_decode_equals_prefill_through_600_tokens(plain):
    ids = random_ids(600)
    runner = Runner(plain, max_len=600, slots=2, fmt="f32")
    a, b = runner.cache.acquire(), runner.cache.acquire()
    whole = runner.prefill(a, ids, every=True)
    steps = one_by_one(runner, b, ids)
    assert max(rel_err(x, y) for x, y in zip(steps, whole, strict=True)) < ORDER_ERR


@pytest.mark.parametrize("ratio", [0, pytest.param(4, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)])
def test_decode_equals_prefill_for_one_layer_kind(ratio, tmp_path):
    config = dataclasses.replace(PLAIN, num_layers=2, compress_ratios=(ratio, ratio))
    write_checkpoint(tmp_path / "m", config, seeded_tensors(config, 5, quantized=False))
    runner = Runner(load_model(tmp_path / "m"), max_len=300, slots=2, fmt="f32")
    a, b = runner.cache.acquire(), runner.cache.acquire()
    ids = random_ids(300)
    assert rel_err(one_by_one(runner, b, ids), runner.prefill(a, ids, every=True)) < ORDER_ERR


@pytest.mark.parametrize("chunk", [3, 100, 128, 257])
def test_chunked_prefill_equals_whole(plain, chunk):
    ids = random_ids(300)
    whole = Runner(plain, max_len=300, fmt="f32")
    parts = Runner(plain, max_len=300, fmt="f32", prefill_chunk=chunk)
    a, b = whole.cache.acquire(), parts.cache.acquire()
    assert rel_err(parts.prefill(b, ids, every=True), whole.prefill(a, ids, every=True)) < ORDER_ERR


# Prompts around every boundary: the window, both ratios, and the overlap of ratio 4
@pytest.mark.parametrize(
    ("fmt", "lengths"), [pytest.param("f32", (1, 3, 4, 5, 127, 128, 129), marks=pytest.mark.slow), ("bf16", (4, 129))]
)
def test_a_prompt_continues_in_decode(plain, fmt, lengths):
    for n in lengths:
        ids = random_ids(n + 9, seed=n)
        runner = Runner(plain, max_len=n + 9, slots=2, fmt=fmt)
        a, b = runner.cache.acquire(), runner.cache.acquire()
        last = runner.prefill(a, ids[:n])
        rest = one_by_one(runner, a, ids[n:], start=n)
        steps = one_by_one(runner, b, ids)
        # a bfloat16 cache rounds values that differ in the last bit of float32 to different sides
        assert rel_err(torch.cat([last[None], rest]), steps[n - 1 :]) < (ORDER_ERR if fmt == "f32" else 2e-2), n


def test_a_row_in_a_batch_is_the_row_alone(plain):
    """Rows of different lengths, one of them just beginning."""
    prompts = [random_ids(n, seed=n) for n in (1, 5, 130, 261)]
    batch = Runner(plain, max_len=300, slots=4, fmt="f32")
    slots = [batch.cache.acquire() for _ in prompts]
    for slot, ids in zip(slots, prompts, strict=True):
        batch.prefill(slot, ids)
    tokens = [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]]
    together = [batch.decode(slots, step, [len(ids) + i for ids in prompts]) for i, step in enumerate(tokens)]
    for row, ids in enumerate(prompts):
        alone = Runner(plain, max_len=300, fmt="f32")
        slot = alone.cache.acquire()
        alone.prefill(slot, ids)
        for i, step in enumerate(tokens):
            assert rel_err(together[i][row : row + 1], alone.decode([slot], [step[row]], [len(ids) + i])) < ORDER_ERR


def test_a_reused_slot_is_a_fresh_one(plain):
    """A long sequence leaves its rows, entries and states behind; the next one in its slot must not see them."""
    used = Runner(plain, max_len=400, fmt="f32")
    slot = used.cache.acquire()
    used.prefill(slot, random_ids(397, seed=9))
    used.cache.release(slot)
    for n in (1, 2, 6, 140):
        ids = random_ids(n + 8, seed=n)
        slot = used.cache.acquire()
        fresh = Runner(plain, max_len=400, fmt="f32")
        other = fresh.cache.acquire()
        assert same_bits(used.prefill(slot, ids[:n], every=True), fresh.prefill(other, ids[:n], every=True))
        assert same_bits(one_by_one(used, slot, ids[n:], n), one_by_one(fresh, other, ids[n:], n))
        used.cache.release(slot)


def test_nothing_unwritten_is_read(plain):
    """Caches and states full of NaN: only what a sequence wrote may reach its logits."""
    clean, dirty = (Runner(plain, max_len=300, fmt="f32") for _ in range(2))
    for layer in dirty.cache.layers:
        tensors = [rows.data for rows in (layer.window, layer.compressed, layer.index_keys) if rows is not None]
        tensors += [t for s in (layer.state, layer.index_state) if s is not None for t in (s.kv, s.score)]
        for t in tensors:
            t.fill_(float("nan"))
    a, b = clean.cache.acquire(), dirty.cache.acquire()
    ids = random_ids(280)
    assert same_bits(clean.prefill(a, ids[:270], every=True), dirty.prefill(b, ids[:270], every=True))
    assert same_bits(one_by_one(clean, a, ids[270:], 270), one_by_one(dirty, b, ids[270:], 270))


def test_window_pages_do_not_matter(plain):
    ids = random_ids(300)
    out = []
    for page in (64, 256):
        runner = Runner(plain, max_len=310, fmt="f32", window_page=page)
        slot = runner.cache.acquire()
        out.append(torch.cat([runner.prefill(slot, ids, every=True), one_by_one(runner, slot, ids[:8], 300)]))
    assert rel_err(*out) < ORDER_ERR


def generated(runner, prompts, **options):
    rows = [[] for _ in prompts]
    finish = [None] * len(prompts)
    for token in runner.generate(prompts, Sampling(**options)):
        rows[token.row].append(token.id)
        finish[token.row] = token.finish
    return rows, finish


def test_generate_many_prompts_in_few_slots_is_each_alone(plain):
    prompts = [random_ids(n, seed=n) for n in (3, 150, 1, 40, 129)]
    options = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    rows, finish = generated(Runner(plain, max_len=200, slots=2, fmt="f32"), prompts, **options)
    assert finish == ["length"] * 5
    for i, prompt in enumerate(prompts):
        alone, _ = generated(Runner(plain, max_len=200, fmt="f32"), [prompt], **{**options, "seed": 5 + i})
        assert rows[i] == alone[0]


def test_generate_ends_at_stop_length_and_context(plain):
    prompt = random_ids(20)
    rows, finish = generated(Runner(plain, max_len=200, fmt="f32"), [prompt], max_new_tokens=5)
    assert (len(rows[0]), finish) == (5, ["length"])
    stop = rows[0][2]
    first = rows[0].index(stop)
    rows, finish = generated(Runner(plain, max_len=200, fmt="f32"), [prompt], max_new_tokens=5, stop_ids=(stop,))
    assert (len(rows[0]), finish) == (first + 1, ["stop"])
    rows, finish = generated(Runner(plain, max_len=24, fmt="f32"), [prompt], max_new_tokens=50)
    # 24 positions hold 20 prompt tokens and 4 answers; the fifth answer comes from the last position
    assert (len(rows[0]), finish) == (5, ["context"])
    rows, finish = generated(Runner(plain, max_len=24, fmt="f32"), [prompt], max_new_tokens=0)
    assert (rows[0], finish) == ([None], ["length"])


def test_generate_gives_its_slots_back(plain):
    runner = Runner(plain, max_len=64, slots=2, fmt="f32")
    stream = runner.generate([random_ids(4), random_ids(5)], Sampling(max_new_tokens=30))
    for _ in range(7):
        next(stream)
    stream.close()
    assert len({runner.cache.acquire(), runner.cache.acquire()}) == 2


@pytest.mark.parametrize(
    ("prompts", "want"),
    [
        ([[]], r"prompt 0 must have at least one token, got none"),
        ([[1], [2] * 65], r"prompt 1 must have at most 64 tokens \(the context\), got 65"),
        ([[1, 256]], r"prompt 0 must have token ids in \[0, 256\), got 256"),
        ([[-1]], r"got -1"),
    ],
)
def test_generate_refuses(plain, prompts, want):
    with pytest.raises(ValueError, match=want):
        list(Runner(plain, max_len=64, slots=2, fmt="f32").generate(prompts, Sampling()))


def test_runner_refuses_a_context_past_the_model(plain):
    with pytest.raises(ValueError, match=r"max_len must be in \[1, 2048\] \(the model's limit\), got 2049"):
        Runner(plain, max_len=2049)
