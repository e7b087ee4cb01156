"""The KV cache of a whole model: where every sequence's rows stand, and how many bytes that takes.

A sequence has a slot. The slot owns, in every layer,
    a window ring: `ring` rows (the window rounded up to whole pages); the token at position t stands in row t % ring;
    the compressor states (see `CompressorState`): ring of 8 or 128 positions;
and it owns pages. A page stands for `logical_page` (256) tokens in all layers at once: 64 entries of every ratio-4 cache,
64 index keys beside them, 2 entries of every ratio-128 cache. One block table, int32 [slots, pages], serves all layers.

What a row's bytes are: `deepdecode/ops/rows.py`. Nothing is ever cleared: lengths and positions alone say what is read, so a
slot or a page that is used again shows nothing of what it held before.
"""

from dataclasses import dataclass

import torch

from deepdecode.config import ModelConfig
from deepdecode.ops._check import expect, readable
from deepdecode.ops.places import decode_places
from deepdecode.ops.rows import FLOAT_FORMATS, PagedRows, allocate, page_bytes, row_bytes
from deepdecode.ops.table import CompressorState, LayerCache, Step

Tensor = torch.Tensor
# format of the index keys beside each format of the other rows
INDEX_FORMATS = {"fp8_584": "fp8_132", "bf16": "bf16", "f32": "f32", "f64": "f64"}


class CacheFull(RuntimeError):
    """No slot or not enough pages are free; what was there before the call still is."""


@dataclass(frozen=True)
class CachePlan:
    """Bytes of a cache, all layers together. Pages come padded, as `allocate` lays them out.

    window, states: fixed, for all slots; compressed_4, compressed_128, index_keys: `pages` pages; block_table.
    page: bytes one page takes in all layers. token: payload bytes one more token of context takes on average, unpadded.
    longest: the longest max_len for which all slots fit into the memory given; None if none was given.
    """

    slots: int
    max_len: int
    pages: int
    window: int
    compressed_4: int
    compressed_128: int
    index_keys: int
    states: int
    block_table: int
    page: int
    token: float
    longest: int | None

    @property
    def total(self) -> int:
        return self.window + self.compressed_4 + self.compressed_128 + self.index_keys + self.states + self.block_table


def plan_cache(
    config: ModelConfig,
    *,
    max_len: int | None = None,
    slots: int = 1,
    fmt: str = "fp8_584",
    index_fmt: str | None = None,
    window_page: int = 64,
    logical_page: int = 256,
    num_pages: int | None = None,
    memory_bytes: int | None = None,
) -> CachePlan:
    """The bytes that `KVCache` with these arguments allocates, without a device.

    With `memory_bytes`, `longest` is the max_len that fits for every slot; max_len None plans for just that.

    Raises:
        ValueError: an argument is out of range, or the memory does not hold one page for each slot.
    """
    if max_len is None and memory_bytes is None:
        raise ValueError("plan_cache: max_len or memory_bytes must be given, got neither")
    index_fmt = _formats("plan_cache", config, fmt, index_fmt)
    _sizes("plan_cache", config, config.max_positions if max_len is None else max_len, slots, window_page, logical_page)
    count = {ratio: config.compress_ratios.count(ratio) for ratio in (4, 128)}
    ring_pages = -(-config.window // window_page)
    window = config.num_layers * slots * ring_pages * page_bytes(fmt, window_page, config.head_dim)
    # what one page takes in all layers: entries of ratio 4, of ratio 128, index keys
    entries = {r: n * page_bytes(fmt, logical_page // r, config.head_dim) if n else 0 for r, n in count.items()}
    keys = count[4] * page_bytes(index_fmt, logical_page // 4, config.index_head_dim) if count[4] else 0
    # kv and score: 8 positions of twice the width for ratio 4, 128 of one width for ratio 128
    floats = 2 * count[4] * 8 * 2 * (config.head_dim + config.index_head_dim) + 2 * count[128] * 128 * config.head_dim
    states = slots * floats * (8 if fmt == "f64" else 4)
    # one more page of a sequence also takes a place in the block table
    per_page = entries[4] + entries[128] + keys
    longest = None
    if memory_bytes is not None:
        fit = (memory_bytes - window - states) // (slots * (per_page + 4))
        if fit < 1:
            need = window + states + slots * (per_page + 4)
            what = f"{need} bytes (one page of {logical_page} tokens for each of {slots} slots)"
            raise ValueError(f"plan_cache: memory_bytes must be at least {what}, got {memory_bytes}")
        longest = min(fit * logical_page, config.max_positions) if per_page else config.max_positions
    if max_len is None:
        assert longest is not None
        max_len = longest
    table = -(-max_len // logical_page)
    pages = slots * table if num_pages is None else num_pages
    if pages < 1:
        raise ValueError(f"plan_cache: num_pages must be >= 1, got {pages}")
    row, index_row = row_bytes(fmt, config.head_dim), row_bytes(index_fmt, config.index_head_dim)
    return CachePlan(
        slots=slots,
        max_len=max_len,
        pages=pages,
        window=window,
        compressed_4=pages * entries[4],
        compressed_128=pages * entries[128],
        index_keys=pages * keys,
        states=states,
        block_table=slots * table * 4,
        page=per_page,
        token=count[4] * (row + index_row) / 4 + count[128] * row / 128,
        longest=longest,
    )


class KVCache:
    """Caches of all layers, and who owns which part of them.

    Args:
        slots: sequences that live at once.
        max_len: tokens of the longest sequence.
        window_page: rows of a page of the window caches.
        fmt: of window and compressed rows, "fp8_584", "bf16", "f32" or "f64"; index_fmt: of index keys, by default what
            goes with fmt ("fp8_132" with "fp8_584").
        logical_page: tokens of a page, a multiple of the model's ratios.
        num_pages: pages for all sequences together; by default enough for every slot at max_len.

    Raises:
        ValueError: an argument is out of range, or the format does not hold the model's rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        max_len: int,
        window_page: int = 64,
        fmt: str = "fp8_584",
        index_fmt: str | None = None,
        logical_page: int = 256,
        num_pages: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        index_fmt = _formats("KVCache", config, fmt, index_fmt)
        _sizes("KVCache", config, max_len, slots, window_page, logical_page)
        table = -(-max_len // logical_page)
        num_pages = slots * table if num_pages is None else num_pages
        if num_pages < 1:
            raise ValueError(f"KVCache: num_pages must be >= 1, got {num_pages}")
        self.config, self.slots, self.max_len, self.logical_page = config, slots, max_len, logical_page
        self.ring = -(-config.window // window_page) * window_page
        self.ratios = tuple(sorted({ratio for ratio in config.compress_ratios if ratio}))
        self.block_tables = torch.full((slots, table), -1, dtype=torch.int32, device=device)
        self.device = self.block_tables.device

        def rows(pages: int, page_size: int, fmt: str, width: int) -> PagedRows:
            return allocate(pages, page_size, fmt, width, device=device)

        def state(ratio: int, d: int) -> CompressorState:
            shape = (slots, 8, 2 * d) if ratio == 4 else (slots, ratio, d)
            dtype = torch.float64 if fmt == "f64" else torch.float32
            kv, score = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            return CompressorState(kv, score, ratio)

        self.layers = [
            LayerCache(
                window=rows(slots * self.ring // window_page, window_page, fmt, config.head_dim),
                compressed=rows(num_pages, logical_page // ratio, fmt, config.head_dim) if ratio else None,
                index_keys=rows(num_pages, logical_page // 4, index_fmt, config.index_head_dim) if ratio == 4 else None,
                state=state(ratio, config.head_dim) if ratio else None,
                index_state=state(4, config.index_head_dim) if ratio == 4 else None,
            )
            for ratio in config.compress_ratios
        ]
        # the lowest are taken first
        self._free_slots = list(reversed(range(slots)))
        self._free_pages = list(reversed(range(num_pages)))
        self._num_pages = num_pages
        # pages of each slot in order, and tokens reserved for it; 0 for a slot that nobody holds
        self._pages: dict[int, list[int]] = {}
        self._reserved = torch.zeros(slots, dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches, states and the block table."""
        layers = [part for layer in self.layers for part in vars(layer).values() if part is not None]
        held = [t for part in layers for t in ([part.data] if isinstance(part, PagedRows) else [part.kv, part.score])]
        return sum(t.nbytes for t in [*held, self.block_tables])

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def acquire(self) -> int:
        """Take a free slot for a new sequence. CacheFull if there is none."""
        if not self._free_slots:
            raise CacheFull(f"acquire: all {self.slots} slots are taken")
        slot = self._free_slots.pop()
        self._pages[slot] = []
        return slot

    def reserve(self, slot: int, length: int) -> None:
        """Make room for positions 0 to length - 1 of a slot's sequence; room already there stays.

        Raises:
            ValueError: nobody holds the slot, or length is not 0 to max_len.
            CacheFull: not enough pages are free; nothing has changed.
        """
        self._expect_held("reserve", slot)
        if not 0 <= length <= self.max_len:
            raise ValueError(f"reserve: length must be 0 to {self.max_len}, got {length}")
        pages = self._pages[slot]
        need = -(-length // self.logical_page) - len(pages)
        if need > len(self._free_pages):
            raise CacheFull(
                f"reserve: slot {slot} needs {need} more pages for {length} tokens, "
                f"{self.free_pages} of {self._num_pages} are free"
            )
        if need > 0:
            new = [self._free_pages.pop() for _ in range(need)]
            self.block_tables[slot, len(pages) : len(pages) + need] = torch.tensor(new, dtype=torch.int32, device=self.device)
            pages += new
        self._reserved[slot] = max(int(self._reserved[slot]), length)

    def release(self, slot: int) -> None:
        """Give a slot and its pages back. ValueError if nobody holds it."""
        self._expect_held("release", slot)
        self._free_pages += reversed(self._pages.pop(slot))
        self._free_slots.append(slot)
        self._reserved[slot] = 0
        self.block_tables[slot] = -1

    def _expect_held(self, op: str, slot: int) -> None:
        if slot not in self._pages:
            raise ValueError(f"{op}: slot must be one that acquire gave, got {slot}")

    def step(self, tokens: Tensor, positions: Tensor, slots: Tensor, prefill: bool, *, width: int | None = None) -> Step:
        """Where a step's tokens live, for all layers. Everything is computed on the cache's device.

        A decode step does not synchronise the host, so it can be part of a CUDA graph; a prefill step reads its first position.

        Args:
            tokens: int64 [T], T >= 1; positions, slots: int32 [T]. Slot -1: a padded row, whose other values mean nothing.
            prefill: consecutive tokens of one sequence, padded rows last; else one token of each of T sequences.
            width: columns of `entry_indices`, at least every token's ratio-128 entries. By default what the step needs, and
                on a GPU what max_len needs when decoding.

        Raises:
            ValueError: an argument has another shape, dtype or device. Off the GPU also: a token outside the vocabulary, a slot
                that nobody holds, a position that is not reserved, a prefill step that is not consecutive, a width too small.
        """
        device, ring, window = self.device, self.ring, self.config.window
        expect("step: tokens", tokens, ("T",), torch.int64, device)
        T = tokens.shape[0]
        if T < 1:
            raise ValueError(f"step: tokens must have at least one row, got {T}")
        expect("step: positions", positions, (T,), torch.int32, device)
        expect("step: slots", slots, (T,), torch.int32, device)
        if readable(positions):
            self._check_step(tokens, positions, slots, prefill)
        if not prefill:
            if 128 not in self.ratios:
                columns = 0
            else:
                columns = self.block_tables.shape[1] * self.logical_page // 128 if width is None else width
            places = decode_places(
                tokens, positions, slots, self.block_tables, vocab=self.config.vocab_size, ring=ring, window=window,
                logical_page=self.logical_page, ratios=self.ratios, width=columns,
            )  # fmt: skip
            if places is not None:
                return Step(
                    positions=positions, slots=slots, prefill=False, window_history=None, block_tables=self.block_tables,
                    **vars(places),
                )  # fmt: skip
        live = (slots >= 0) & (slots < self.slots)
        # nothing that a padded row holds may fault, nor a wild id where nobody looks
        tokens = torch.where(live, tokens, 0).clamp(0, self.config.vocab_size - 1)
        at, slot = torch.where(live, positions, 0).long(), torch.where(live, slots, 0).long()

        def ring_rows(slot: Tensor, position: Tensor) -> Tensor:
            return slot * ring + position % ring

        window_lens = torch.where(live, (at + 1).clamp(max=window), 0)
        lane = torch.arange(window, device=device)
        # [T, window]: the positions in sight, oldest first
        seen = (at - window_lens + 1)[:, None] + lane
        history = None
        keep = live
        if prefill:
            start = int(at[0])
            past = min(window - 1, start)
            history = ring_rows(slot[:1], torch.arange(start - past, start, device=device)).int()
            window_rows = seen - (start - past)
            # a ring holds the last tokens only
            keep = live & (at > torch.where(live, at, -1).max() - ring)
        else:
            window_rows = ring_rows(slot[:, None], seen)
        entry_write, entry_lens = {}, {}
        entries = torch.zeros(T, dtype=torch.int64, device=device)
        for ratio in self.ratios:
            done = live & ((at + 1) % ratio == 0)
            entry_write[ratio] = torch.where(
                done, self._entry_rows(slot, at.div(ratio, rounding_mode="floor"), ratio), -1
            ).int()
            entry_lens[ratio] = torch.where(live, (at + 1).div(ratio, rounding_mode="floor"), 0).int()
        if 128 in self.ratios:
            entries = entry_lens[128]
        width = self._width(entries, prefill, at, width)
        entry = torch.arange(width, device=device)
        entry_rows = self._entry_rows(slot[:, None], entry, 128) if width else entry[None].expand(T, 0)
        return Step(
            tokens=tokens,
            positions=positions,
            slots=slots,
            prefill=prefill,
            window_write=torch.where(keep, ring_rows(slot, at), -1).int(),
            window_indices=torch.where(lane < window_lens[:, None], window_rows, -1).int(),
            window_lens=window_lens.int(),
            window_history=history,
            block_tables=self.block_tables,
            entry_write=entry_write,
            entry_lens=entry_lens,
            entry_indices=torch.where(entry < entries[:, None], entry_rows, -1).int(),
        )

    def _entry_rows(self, slot: Tensor, entry: Tensor, ratio: int) -> Tensor:
        """Physical rows of a sequence's entries; -1 where it has no page for them."""
        page_size = self.logical_page // ratio
        page = entry.div(page_size, rounding_mode="floor")
        inside = page < self.block_tables.shape[1]
        page = torch.where(inside, self.block_tables[slot, torch.where(inside, page, 0)], -1)
        return torch.where(page >= 0, page.long() * page_size + entry % page_size, -1)

    def _width(self, entries: Tensor, prefill: bool, positions: Tensor, width: int | None) -> int:
        """Columns of entry_indices."""
        if 128 not in self.ratios:
            return 0
        if readable(entries) or (prefill and width is None):
            need = int(entries.max())
            if width is not None and width < need:
                raise ValueError(f"step: width must be at least {need}, the most entries a token sees, got {width}")
            return need if width is None else width
        return self.block_tables.shape[1] * self.logical_page // 128 if width is None else width

    def _check_step(self, tokens: Tensor, positions: Tensor, slots: Tensor, prefill: bool) -> None:
        live = slots != -1
        ids, used, at = tokens[live], slots[live].long(), positions[live].long()
        wrong = (ids < 0) | (ids >= self.config.vocab_size)
        if wrong.any():
            raise ValueError(f"step: tokens must be in [0, {self.config.vocab_size}), got {int(ids[wrong][0])}")
        wrong = (used < 0) | (used >= self.slots)
        wrong = wrong | (self._reserved[torch.where(wrong, 0, used)] == 0)
        if wrong.any():
            raise ValueError(f"step: slots must be held and reserved, or -1, got {int(used[wrong][0])}")
        wrong = (at < 0) | (at >= self._reserved[used])
        if wrong.any():
            slot = int(used[wrong][0])
            want = f"0 to {int(self._reserved[slot]) - 1}, what slot {slot} has reserved"
            raise ValueError(f"step: positions must be {want}, got {int(at[wrong][0])}")
        if prefill:
            rows = torch.arange(len(at))
            if not (live[: len(at)].all() and (used == used[:1]).all() and (at == at[:1] + rows).all()):
                raise ValueError("step: a prefill step must be consecutive tokens of one slot, padded rows last, got others")
        elif len(used.unique()) < len(used):
            raise ValueError(f"step: slots must differ in a decode step, got {slots.tolist()}")


def default_format(config: ModelConfig) -> str:
    """The format of a cache that nobody named: FP8 rows where the model has their widths, else bfloat16."""
    return "fp8_584" if (config.head_dim, config.rope_dim, config.index_head_dim) == (512, 64, 128) else "bf16"


def _formats(op: str, config: ModelConfig, fmt: str, index_fmt: str | None) -> str:
    """Check both formats against the model's widths, and give the index format."""
    if fmt not in INDEX_FORMATS:
        raise ValueError(f"{op}: fmt must be one of {', '.join(INDEX_FORMATS)}, got {fmt!r}")
    index_fmt = INDEX_FORMATS[fmt] if index_fmt is None else index_fmt
    if index_fmt not in ("fp8_132", *FLOAT_FORMATS):
        raise ValueError(f"{op}: index_fmt must be one of fp8_132, {', '.join(FLOAT_FORMATS)}, got {index_fmt!r}")
    if fmt == "fp8_584" and (config.head_dim, config.rope_dim) != (512, 64):
        raise ValueError(
            f"{op}: head_dim and rope_dim must be 512 and 64 for fp8_584, got {config.head_dim} and {config.rope_dim}"
        )
    if index_fmt == "fp8_132" and 4 in config.compress_ratios and config.index_head_dim != 128:
        raise ValueError(f"{op}: index_head_dim must be 128 for fp8_132, got {config.index_head_dim}")
    return index_fmt


def _sizes(op: str, config: ModelConfig, max_len: int, slots: int, window_page: int, logical_page: int) -> None:
    for name, value in (("max_len", max_len), ("slots", slots), ("window_page", window_page)):
        if value < 1:
            raise ValueError(f"{op}: {name} must be >= 1, got {value}")
    ratio = max(config.compress_ratios, default=0) or 1
    if logical_page < 1 or logical_page % ratio:
        raise ValueError(f"{op}: logical_page must be a multiple of {ratio}, the model's largest ratio, got {logical_page}")
