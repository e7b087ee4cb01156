import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdecode import kvcache
from deepdecode.config import ModelConfig
from deepdecode.kvcache import CacheFull, KVCache, plan_cache
from deepdecode.ops.rows import read_rows, write_rows

FLASH = ModelConfig()
SMALL = ModelConfig(num_layers=3, compress_ratios=(0, 4, 128), head_dim=8, index_head_dim=4, window=10)


def ints(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def make(config=SMALL, **kwargs):
    """A float64 cache whose every row reads NaN until it is written."""
    args = {"slots": 3, "max_len": 700, "window_page": 4, "fmt": "f64"} | kwargs
    return KVCache(config, **args)


def poison(cache):
    for layer in cache.layers:
        for rows in (layer.window, layer.compressed, layer.index_keys):
            if rows is not None:
                rows.data.view(torch.uint8).fill_(255)


@pytest.fixture(params=[True, False], ids=["looks", "blind"])
def looks_at_steps(request, monkeypatch):
    """Off the GPU a step is checked and as narrow as it can be; what a GPU runs is tested here too."""
    if not request.param:
        monkeypatch.setattr(kvcache, "readable", lambda tensor: False)


class Sequence:
    """A sequence that writes who it is into every row it owns, and reads back what its steps say it sees."""

    def __init__(self, cache, name):
        self.cache, self.name, self.length, self.slot = cache, name, 0, cache.acquire()

    def marks(self, numbers, kind, width):
        """Rows that say name, position or entry number, and kind of row."""
        numbers = torch.as_tensor(numbers, dtype=torch.float64, device=self.cache.device)
        rows = torch.zeros(len(numbers), width, dtype=torch.float64, device=self.cache.device)
        rows[:, 0], rows[:, 1], rows[:, 2] = self.name, numbers, kind
        return rows

    def read(self, rows, indices, kind):
        """Numbers of the rows at these indices, which are this sequence's own."""
        values = read_rows(rows, indices)
        assert values[:, 0].eq(self.name).all()
        assert values[:, 2].eq(kind).all()
        return values[:, 1].tolist()

    def prefill(self, n):
        cache, start = self.cache, self.length
        self.length += n
        cache.reserve(self.slot, self.length)
        at = torch.arange(start, start + n, dtype=torch.int32, device=cache.device)
        step = cache.step(at.long(), at, torch.full_like(at, self.slot), True)
        window = cache.layers[0].window
        # what a model does: history, then the new rows
        history = read_rows(window, step.window_history)
        rows = torch.cat([history, self.marks(at, 0, window.width)])
        assert rows[:, 0].eq(self.name).all()
        for i, t in enumerate(at.tolist()):
            length = int(step.window_lens[i])
            index = step.window_indices[i]
            assert rows[index[:length].long(), 1].tolist() == list(range(max(0, t - 9), t + 1))
            assert index[length:].eq(-1).all()
        write_rows(window, step.window_write, self.marks(at, 0, window.width))
        for i in range(n):
            self.entries(step, i)
        return step

    def entries(self, step, i):
        """Write the entries that row i completes, and see what it sees: all entries up to its own."""
        cache, t = self.cache, int(step.positions[i])
        for ratio, layer in ((4, cache.layers[1]), (128, cache.layers[2])):
            count = (t + 1) // ratio
            assert int(step.entry_lens[ratio][i]) == count
            where = step.entry_write[ratio][i : i + 1]
            assert (int(where) >= 0) == ((t + 1) % ratio == 0)
            write_rows(layer.compressed, where, self.marks([count - 1], ratio, 8))
            if ratio == 4:
                write_rows(layer.index_keys, where, self.marks([count - 1], 5, 4))
                entry = torch.arange(count, device=cache.device)
                page_size = layer.compressed.page_size
                index = step.block_tables[self.slot][entry // page_size] * page_size + entry % page_size
                assert self.read(layer.index_keys, index, 5) == list(range(count))
            else:
                index = step.entry_indices[i, :count]
                assert step.entry_indices[i, count:].eq(-1).all()
            assert self.read(layer.compressed, index, ratio) == list(range(count))

    def release(self):
        self.cache.release(self.slot)


def decode(cache, sequences, padded=0):
    """One token of each, with padded rows full of nonsense behind."""
    for sequence in sequences:
        cache.reserve(sequence.slot, sequence.length + 1)
    at = ints(*[s.length for s in sequences], *[10**9, -7][:padded], device=cache.device)
    slots = ints(*[s.slot for s in sequences], *[-1] * padded, device=cache.device)
    step = cache.step(at.long(), at, slots, False)
    assert step.window_history is None
    window = cache.layers[0].window
    for i, sequence in enumerate(sequences):
        write_rows(window, step.window_write[i : i + 1], sequence.marks(at[i : i + 1], 0, window.width))
        length, t = int(step.window_lens[i]), sequence.length
        assert sequence.read(window, step.window_indices[i, :length], 0) == list(range(max(0, t - 9), t + 1))
        assert step.window_indices[i, length:].eq(-1).all()
        sequence.entries(step, i)
        sequence.length += 1
    rest = slice(len(sequences), None)
    for tensor in (step.window_write, step.window_indices, *step.entry_write.values(), step.entry_indices):
        assert tensor[rest].eq(-1).all()
    for tensor in (step.window_lens, *step.entry_lens.values()):
        assert tensor[rest].eq(0).all()
    return step


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_sequence_finds_its_own_rows(data):
    """Prefill steps of any size, decode batches, slots and pages given back and used again: everyone sees exactly its own.

    The rows of those who left stay where they are, so that what a new sequence sees of them shows.
    """
    window_page = data.draw(st.sampled_from([1, 2, 4, 16]))
    cache = make(window_page=window_page, max_len=400, logical_page=128)
    poison(cache)
    live, names = [], 0
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(kvcache, "readable", lambda tensor: False)
        for _ in range(data.draw(st.integers(2, 8))):
            action = data.draw(st.sampled_from(["new", "more", "decode", "release"]))
            if action == "new" and len(live) < 3:
                names += 1
                live.append(Sequence(cache, names))
                live[-1].prefill(data.draw(st.integers(1, 140)))
            elif action == "more" and live:
                data.draw(st.sampled_from(live)).prefill(data.draw(st.integers(1, 20)))
            elif action == "decode" and live:
                for _ in range(data.draw(st.integers(1, 6))):
                    decode(cache, live, data.draw(st.integers(0, 2)))
            elif action == "release" and live:
                live.pop(data.draw(st.integers(0, len(live) - 1))).release()
    assert cache.free_slots == 3 - len(live)
    assert cache.free_pages == 12 - sum(math.ceil(s.length / 128) for s in live)


def test_long_sequence(device, looks_at_steps):
    """Over the edges of pages and rings: 128, 256 and 512 tokens, prefilled and decoded."""
    cache = make(device=device)
    poison(cache)
    other = Sequence(cache, 1)
    other.prefill(300)
    sequence = Sequence(cache, 2)
    for n in (126, 1, 1, 1, 126, 2):
        sequence.prefill(n)
    for _ in range(3):
        decode(cache, [sequence, other], padded=2)
    sequence.prefill(253)
    for _ in range(3):
        decode(cache, [other, sequence], padded=1)


def test_flash_pages_and_ring():
    """A page of 256 tokens holds 64 ratio-4 entries, 64 index keys and 2 ratio-128 entries."""
    config = dataclasses.replace(FLASH, num_layers=3, compress_ratios=(0, 4, 128))
    cache = KVCache(config, slots=2, max_len=1000, window_page=64)
    swa, c4, c128 = cache.layers
    assert (c4.compressed.page_size, c4.index_keys.page_size, c128.compressed.page_size) == (64, 64, 2)
    assert [rows.data.shape[0] for rows in (c4.compressed, c4.index_keys, c128.compressed)] == [8, 8, 8]
    assert (swa.window.num_rows, swa.window.page_size, cache.ring) == (256, 64, 128)
    assert cache.block_tables.shape == (2, 4)
    # rings of 8 positions of twice the width, and of 128
    assert [list(s.kv.shape) for s in (c4.state, c4.index_state, c128.state)] == [[2, 8, 1024], [2, 8, 256], [2, 128, 512]]
    assert c4.state.kv.dtype == torch.float32
    # a ratio-0 layer sees its window and nothing else
    assert [swa.compressed, swa.index_keys, swa.state, swa.index_state] == [None] * 4
    assert c128.index_keys is None
    assert KVCache(config, slots=1, max_len=10, window_page=256).ring == 256


def test_only_the_model_s_ratios(device):
    for ratios, keys in (((0, 0), []), ((128, 0), [128]), ((4, 4), [4])):
        cache = make(dataclasses.replace(SMALL, num_layers=2, compress_ratios=ratios), device=device)
        slot = cache.acquire()
        cache.reserve(slot, 400)
        step = cache.step(torch.zeros(1, device=device).long(), ints(399, device=device), ints(slot, device=device), False)
        assert sorted(step.entry_write) == sorted(step.entry_lens) == keys
        # a graph's width cannot depend on positions, so on a GPU it is what the cache could hold
        width = 3 if device.type == "cpu" else -(-cache.max_len // 128)
        assert step.entry_indices.shape == (1, width if 128 in keys else 0)


def test_width_of_entry_indices(device, monkeypatch):
    """Metadata made for a capture with short dummy lengths is as wide as the longest replay needs."""
    cache = make(device=device)
    slot = cache.acquire()
    cache.reserve(slot, 700)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    args = (one, ints(300, device=device), ints(slot, device=device), False)
    monkeypatch.setattr(kvcache, "readable", lambda tensor: False)
    step = cache.step(*args)
    assert step.entry_indices.shape == (1, 3 * 256 // 128)
    assert cache.step(*args, width=5).entry_indices.tolist() == [[*step.entry_indices[0, :2].tolist(), -1, -1, -1]]
    monkeypatch.undo()
    if device.type == "cpu":
        assert cache.step(*args).entry_indices.shape == (1, 2)
        with pytest.raises(ValueError, match="step: width must be at least 2, the most entries a token sees, got 1"):
            cache.step(*args, width=1)


def test_acquire_reserve_release():
    cache = make(slots=2, max_len=1000, num_pages=5)
    a, b = cache.acquire(), cache.acquire()
    assert {a, b} == {0, 1}
    with pytest.raises(CacheFull, match="acquire: all 2 slots are taken"):
        cache.acquire()
    cache.reserve(a, 257)
    cache.reserve(a, 512)
    cache.reserve(a, 3)
    assert (cache.free_pages, cache.block_tables[a].tolist()) == (3, [0, 1, -1, -1])
    before = cache.block_tables.clone()
    with pytest.raises(CacheFull, match="reserve: slot 1 needs 4 more pages for 1000 tokens, 3 of 5 are free"):
        cache.reserve(b, 1000)
    # nothing changed
    assert cache.free_pages == 3
    assert torch.equal(cache.block_tables, before)
    with pytest.raises(ValueError, match="step: slots must be held and reserved, or -1, got 1"):
        cache.step(torch.zeros(1).long(), ints(0), ints(b), False)
    cache.reserve(b, 768)
    assert cache.block_tables[b].tolist() == [2, 3, 4, -1]
    cache.release(a)
    assert (cache.free_pages, cache.free_slots, cache.block_tables[a].tolist()) == (2, 1, [-1] * 4)
    cache.reserve(b, 1000)
    assert cache.block_tables[b].tolist() == [2, 3, 4, 0]
    with pytest.raises(ValueError, match="release: slot must be one that acquire gave, got 0"):
        cache.release(a)
    with pytest.raises(ValueError, match="reserve: slot must be one that acquire gave, got 7"):
        cache.reserve(7, 1)
    with pytest.raises(ValueError, match="reserve: length must be 0 to 1000, got 1001"):
        cache.reserve(b, 1001)
    assert cache.acquire() == a
    # what the sequence before had reserved is not the next one's
    with pytest.raises(ValueError, match="step: slots must be held and reserved, or -1, got 0"):
        cache.step(torch.zeros(1).long(), ints(0), ints(a), False)


@pytest.mark.parametrize(
    ("positions", "slots", "prefill", "message"),
    [
        ([5], [1], False, "slots must be held and reserved, or -1, got 1"),
        ([5], [3], False, "slots must be held and reserved, or -1, got 3"),
        ([5], [-2], False, "slots must be held and reserved, or -1, got -2"),
        ([20], [0], False, "positions must be 0 to 19, what slot 0 has reserved, got 20"),
        ([-1], [0], False, "positions must be 0 to 19, what slot 0 has reserved, got -1"),
        ([5, 6], [0, 0], False, r"slots must differ in a decode step, got \[0, 0\]"),
        ([5, 7], [0, 0], True, "a prefill step must be consecutive tokens of one slot, padded rows last, got others"),
        ([5, 6], [0, 2], True, "a prefill step must be consecutive tokens of one slot"),
        ([5, 6], [-1, 0], True, "a prefill step must be consecutive tokens of one slot"),
        ([], [], False, "tokens must have at least one row, got 0"),
    ],
)
def test_step_says_what_is_wrong(positions, slots, prefill, message):
    cache = make()
    for _ in range(3):
        cache.acquire()
    for slot in (0, 2):
        cache.reserve(slot, 20)
    with pytest.raises(ValueError, match=f"step: {message}"):
        cache.step(torch.zeros(len(slots)).long(), ints(*positions), ints(*slots), prefill)


def test_step_rejects_other_tensors():
    cache = make()
    cache.reserve(cache.acquire(), 20)
    with pytest.raises(ValueError, match=r"step: tokens must be \[T\] int64 on cpu, got \[1\] int32"):
        cache.step(ints(1), ints(1), ints(0), False)
    with pytest.raises(ValueError, match=r"step: positions must be \[1\] int32 on cpu, got \[1\] int64"):
        cache.step(ints(1).long(), ints(1).long(), ints(0), False)
    with pytest.raises(ValueError, match=r"step: slots must be \[1\] int32 on cpu, got \[2\] int32"):
        cache.step(ints(1).long(), ints(1), ints(0, -1), False)


def test_padded_rows_behind_a_prefill(looks_at_steps):
    cache = make()
    sequence = Sequence(cache, 1)
    sequence.prefill(20)
    cache.reserve(sequence.slot, 33)
    at, slots = ints(*range(20, 33), 0, 99), ints(*[sequence.slot] * 13, -1, -1)
    step = cache.step(at.long(), at, slots, True)
    # a ring of 12 holds the last 12 real tokens; the first is not stored
    assert step.window_write.tolist() == [-1, *[t % 12 for t in range(21, 33)], -1, -1]
    assert step.window_lens.tolist() == [10] * 13 + [0, 0]
    assert len(step.window_history) == 9
    assert step.entry_lens[4].tolist() == [(t + 1) // 4 for t in range(20, 33)] + [0, 0]
    assert step.entry_write[4][-2:].tolist() == [-1, -1]


def test_a_wild_slot_counts_as_padded_where_nobody_looks(monkeypatch):
    """Stale rows of a graph's buffers reach no one's rows."""
    cache = make()
    cache.reserve(cache.acquire(), 200)
    monkeypatch.setattr(kvcache, "readable", lambda tensor: False)
    step = cache.step(torch.zeros(4).long(), ints(127, 127, 127, 2**31 - 1), ints(0, 3, -(2**31), 2**31 - 1), False)
    assert step.window_write.tolist() == [127 % 12, -1, -1, -1]
    assert step.window_lens.tolist() == [10, 0, 0, 0]
    assert [lens.tolist() for lens in step.entry_lens.values()] == [[32, 0, 0, 0], [1, 0, 0, 0]]
    for tensor in (step.window_indices, *step.entry_write.values(), step.entry_indices):
        assert tensor[1:].eq(-1).all()
        assert tensor[0].ge(0).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_decode_step_can_be_captured():
    cache = make(device="cuda")
    slot = cache.acquire()
    cache.reserve(slot, 600)
    tokens, at, slots = torch.zeros(2, device="cuda").long(), ints(5, 0, device="cuda"), ints(slot, -1, device="cuda")
    cache.step(tokens, at, slots, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cache.step(tokens, at, slots, False)
    at[0] = 599
    graph.replay()
    fresh = cache.step(tokens, at, slots, False)
    for name in ("window_write", "window_indices", "window_lens", "entry_indices"):
        assert torch.equal(getattr(captured, name), getattr(fresh, name))
    for ratio in (4, 128):
        assert torch.equal(captured.entry_write[ratio], fresh.entry_write[ratio])


def allocated(cache):
    """Bytes by part, as they are."""
    parts = {"window": 0, "compressed_4": 0, "compressed_128": 0, "index_keys": 0, "states": 0}
    for layer, ratio in zip(cache.layers, cache.config.compress_ratios, strict=True):
        parts["window"] += layer.window.data.nbytes
        if ratio:
            parts[f"compressed_{ratio}"] += layer.compressed.data.nbytes
        parts["index_keys"] += layer.index_keys.data.nbytes if layer.index_keys is not None else 0
        for state in (layer.state, layer.index_state):
            parts["states"] += state.kv.nbytes + state.score.nbytes if state is not None else 0
    return parts


@pytest.mark.parametrize("fmt", ["fp8_584", "bf16", "f32", "f64"])
@pytest.mark.parametrize(
    ("slots", "max_len", "window_page", "logical_page"), [(1, 1, 64, 256), (3, 700, 256, 128), (2, 257, 32, 256)]
)
def test_the_plan_is_what_is_allocated(fmt, slots, max_len, window_page, logical_page):
    """Every pool is sized by its own row, format and page."""
    config = dataclasses.replace(FLASH, num_layers=5, compress_ratios=(0, 4, 128, 4, 0))
    args = {"slots": slots, "max_len": max_len, "window_page": window_page, "fmt": fmt, "logical_page": logical_page}
    plan, cache = plan_cache(config, **args), KVCache(config, **args)
    parts = allocated(cache)
    assert {name: getattr(plan, name) for name in parts} == parts
    assert plan.block_table == cache.block_tables.nbytes
    assert plan.total == cache.num_bytes == sum(parts.values()) + plan.block_table
    assert plan.pages == cache.free_pages == slots * math.ceil(max_len / logical_page)


def test_v4_flash_costs_what_its_rows_add_up_to():
    """FP8 rows of 584 bytes and FP8 index keys of 132 (68 would be FP4's)."""
    plan = plan_cache(FLASH, max_len=1 << 20)
    assert plan.token == 21 * (584 + 132) / 4 + 20 * 584 / 128 == 3850.25
    assert plan.window == 43 * 2 * 37440
    assert plan.states == 21 * (65536 + 16384) + 20 * 524288
    # 64 and 2 rows a page, padded to 37440 and 1728 bytes
    assert plan.page == 21 * (37440 + 8448) + 20 * 1728
    padding = plan.page / 256 - plan.token
    assert padding == 21 * 64 / 256 + 20 * (1728 - 1168) / 256
    # about 4.04 GB a sequence at a million tokens, before padding
    assert round(plan.token * 2**20 / 1e9, 2) == 4.04
    assert plan.total == plan.window + plan.states + 4096 * (plan.page + 4)
    bf16 = plan_cache(FLASH, max_len=1 << 20, fmt="bf16")
    assert bf16.token == 21 * (1024 + 256) / 4 + 20 * 1024 / 128
    mixed = plan_cache(FLASH, max_len=1 << 20, fmt="bf16", index_fmt="fp8_132")
    assert mixed.index_keys == plan.index_keys


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**36), st.sampled_from(["fp8_584", "bf16"]), st.sampled_from([64, 256]))
def test_longest_fits_and_one_page_more_does_not(slots, spare, fmt, window_page):
    args = {"slots": slots, "fmt": fmt, "window_page": window_page}
    least = plan_cache(FLASH, max_len=1, **args).total
    plan = plan_cache(FLASH, memory_bytes=least + spare, **args)
    assert plan.max_len == plan.longest
    assert plan.total <= least + spare
    if plan.longest < FLASH.max_positions:
        assert plan.longest % 256 == 0
        assert plan_cache(FLASH, max_len=plan.longest + 1, **args).total > least + spare
    with pytest.raises(ValueError, match=f"memory_bytes must be at least {least} bytes .* got {least - 1}"):
        plan_cache(FLASH, memory_bytes=least - 1, **args)


def test_the_plan_refuses_a_pool_of_nothing():
    """A budget that rounds to no page is an error, not a pool of size 0."""
    with pytest.raises(ValueError, match=r"plan_cache: memory_bytes must be at least \d+ bytes \(one page of 256 tokens"):
        plan_cache(FLASH, max_len=4096, memory_bytes=3 << 20)
    with pytest.raises(ValueError, match="plan_cache: num_pages must be >= 1, got 0"):
        plan_cache(FLASH, max_len=4096, num_pages=0)
    with pytest.raises(ValueError, match="KVCache: num_pages must be >= 1, got 0"):
        make(num_pages=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_len": 0}, "max_len must be >= 1, got 0"),
        ({"slots": 0}, "slots must be >= 1, got 0"),
        ({"window_page": 0}, "window_page must be >= 1, got 0"),
        ({"logical_page": 64}, "logical_page must be a multiple of 128, the model's largest ratio, got 64"),
        ({"fmt": "fp8"}, "fmt must be one of fp8_584, bf16, f32, f64, got 'fp8'"),
        ({"index_fmt": "fp8_584"}, "index_fmt must be one of fp8_132, bf16, f32, f64, got 'fp8_584'"),
        ({"fmt": "fp8_584"}, "head_dim and rope_dim must be 512 and 64 for fp8_584, got 8 and 64"),
        ({"index_fmt": "fp8_132"}, "index_head_dim must be 128 for fp8_132, got 4"),
    ],
)
def test_rejects_bad_sizes(changes, message):
    args = {"slots": 1, "max_len": 100, "fmt": "f32"} | changes
    with pytest.raises(ValueError, match=f"KVCache: {message}"):
        KVCache(SMALL, **args)
    with pytest.raises(ValueError, match=f"plan_cache: {message}"):
        plan_cache(SMALL, **args)
    with pytest.raises(ValueError, match="plan_cache: max_len or memory_bytes must be given"):
        plan_cache(SMALL)
