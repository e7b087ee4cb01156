"""Where a decode step's tokens live in the caches: everything that `KVCache.step` computes, in one launch."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# entries of one program beside a token's other data
BLOCK = 1024


@dataclass(frozen=True)
class Places:
    """The step's tensors by their names in `Step`; write and lens by ratio, where the model has it."""

    tokens: torch.Tensor
    window_write: torch.Tensor
    window_indices: torch.Tensor
    window_lens: torch.Tensor
    entry_write: dict[int, torch.Tensor]
    entry_lens: dict[int, torch.Tensor]
    entry_indices: torch.Tensor


@triton.jit
def _entry_row(tables_ptr, slot, entry, pages, page_size, live):
    """Physical rows of a sequence's entries, -1 where it has no page for them."""
    page = entry // page_size
    inside = live & (page < pages)
    physical = tl.load(tables_ptr + slot * pages + page, mask=inside, other=-1)
    return tl.where(physical >= 0, physical * page_size + entry % page_size, -1)


@triton.jit(do_not_specialize=["slots", "pages", "width", "ring", "window"])
def step_index_kernel(
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    tables_ptr,
    tokens_out_ptr,
    window_write_ptr,
    window_indices_ptr,
    window_lens_ptr,
    write_4_ptr,
    lens_4_ptr,
    write_128_ptr,
    lens_128_ptr,
    entry_indices_ptr,
    vocab,
    slots,
    pages,
    width,
    ring,
    window,
    logical_page,
    HAS_4: tl.constexpr,
    HAS_128: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + t)
    live = (slot >= 0) & (slot < slots)
    slot = tl.where(live, slot, 0).to(tl.int64)
    position = tl.where(live, tl.load(positions_ptr + t), 0)
    if part == 0:
        token = tl.where(live, tl.load(tokens_ptr + t), 0)
        tl.store(tokens_out_ptr + t, tl.minimum(tl.maximum(token, 0), vocab - 1))
        length = tl.where(live, tl.minimum(position + 1, window), 0)
        tl.store(window_lens_ptr + t, length)
        tl.store(window_write_ptr + t, tl.where(live, slot * ring + position % ring, -1).to(tl.int32))
        lane = tl.arange(0, BLOCK_W)
        row = slot * ring + (position - length + 1 + lane) % ring
        tl.store(window_indices_ptr + t * window + lane, tl.where(lane < length, row, -1).to(tl.int32), mask=lane < window)
        if HAS_4:
            done = live & ((position + 1) % 4 == 0)
            tl.store(write_4_ptr + t, _entry_row(tables_ptr, slot, position // 4, pages, logical_page // 4, done))
            tl.store(lens_4_ptr + t, tl.where(live, (position + 1) // 4, 0))
        if HAS_128:
            done = live & ((position + 1) % 128 == 0)
            tl.store(write_128_ptr + t, _entry_row(tables_ptr, slot, position // 128, pages, logical_page // 128, done))
            tl.store(lens_128_ptr + t, tl.where(live, (position + 1) // 128, 0))
    elif HAS_128:
        entry = (part - 1) * BLOCK_E + tl.arange(0, BLOCK_E)
        seen = live & (entry < (position + 1) // 128)
        found = _entry_row(tables_ptr, slot, entry, pages, logical_page // 128, seen)
        tl.store(entry_indices_ptr + t * width + entry, found, mask=entry < width)


def launch(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    *,
    vocab: int,
    ring: int,
    window: int,
    logical_page: int,
    ratios: tuple[int, ...],
    width: int,
    arch: int,
) -> Places:
    """Places of T > 0 tokens, one of each sequence. tables: int32 [slots, pages]; width: columns of entry_indices."""
    T, device = tokens.shape[0], tokens.device

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    out = Places(
        tokens=torch.empty_like(tokens), window_write=ints(T), window_indices=ints(T, window), window_lens=ints(T),
        entry_write={r: ints(T) for r in ratios}, entry_lens={r: ints(T) for r in ratios}, entry_indices=ints(T, width),
    )  # fmt: skip
    pdl = arch >= 90
    step_index_kernel[T, 1 + triton.cdiv(width, BLOCK)](
        tokens, positions, slots, tables, out.tokens, out.window_write, out.window_indices, out.window_lens,
        out.entry_write.get(4), out.entry_lens.get(4), out.entry_write.get(128), out.entry_lens.get(128), out.entry_indices,
        vocab, *tables.shape, width, ring, window, logical_page, HAS_4=4 in ratios, HAS_128=128 in ratios,
        BLOCK_W=triton.next_power_of_2(window), BLOCK_E=BLOCK, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
