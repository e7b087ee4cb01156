"""Cases that tests and benchmarks share: seeded tensors, and the corners by name."""

from dataclasses import dataclass, replace

import torch

from deepdecode.ops.rows import PagedRows, allocate, write_rows

# (window, extra) widths of V4: window alone, top-512 and top-1024 of ratio 4, ratio 128 at a context of one million
KEY_COUNTS = ((128, 0), (128, 512), (128, 1024), (128, 8192))


@dataclass(frozen=True)
class AttentionInputs:
    """Arguments of `sparse_attn_decode`, by its names."""

    q: torch.Tensor
    window: PagedRows
    window_indices: torch.Tensor
    window_lens: torch.Tensor
    extra: PagedRows | None
    extra_indices: torch.Tensor | None
    extra_lens: torch.Tensor | None
    sink: torch.Tensor | None
    scale: float

    def args(self) -> tuple:
        window = (self.window, self.window_indices, self.window_lens)
        return (self.q, *window, self.extra, self.extra_indices, self.extra_lens)


def random_rows(pages: int, page_size: int, fmt: str, generator: torch.Generator, device, spread: int = 0) -> PagedRows:
    """A cache of unit normal rows, each times a power of two from 2**-spread to 2**spread."""
    cache = allocate(pages, page_size, fmt, device=device)
    count = pages * page_size
    rows = torch.randn(count, 512, generator=generator, device=device)
    if spread:
        rows *= torch.exp2(torch.randint(-spread, spread + 1, (count, 1), generator=generator, device=device).float())
    write_rows(cache, torch.arange(count, device=device), rows)
    return cache


def attention_inputs(
    T: int,
    H: int,
    window_keys: int = 128,
    extra_keys: int = 512,
    *,
    fmt: str = "fp8_584",
    window_page: int = 64,
    extra_page: int = 64,
    full: bool = True,
    holes: bool = False,
    spread: int = 0,
    q_scale: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    rows: int | None = None,
    caches: tuple[PagedRows, PagedRows] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> AttentionInputs:
    """Seeded inputs. Every token has its own distinct rows, as sequences have.

    full: every lane holds a key; else lengths are random, 0 included. holes: every 17th lane is -1.
    rows: rows of each cache; by default as many as T tokens need, at most 65536.
    caches: window and extra whose first pages stand for new ones; fmt, spread and the page sizes are theirs.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)

    def indices_of(keys: int, page: int, large: PagedRows | None) -> tuple[PagedRows, torch.Tensor, torch.Tensor]:
        count = min(65536, max(keys, T * keys, 1)) if rows is None else rows
        if large is None:
            cache = random_rows(-(-count // page), page, fmt, generator, device, spread)
        else:
            cache = replace(large, data=large.data[: -(-count // large.page_size)])
        indices = torch.randint(cache.num_rows, (T, keys), generator=generator, device=device, dtype=torch.int32)
        if T * keys <= cache.num_rows:
            indices = torch.randperm(cache.num_rows, generator=generator, device=device)[: T * keys].view(T, keys).int()
        if holes:
            indices[:, ::17] = -1
        low = keys if full else 0
        lens = torch.randint(low, keys + 1, (T,), generator=generator, device=device, dtype=torch.int32)
        return cache, indices, lens

    large_window, large_extra = caches or (None, None)
    window = indices_of(window_keys, window_page, large_window)
    extra = indices_of(extra_keys, extra_page, large_extra) if extra_keys else (None, None, None)
    q = (q_scale * torch.randn(T, H, 512, generator=generator, device=device)).to(dtype)
    sink = torch.randn(H, generator=generator, device=device)
    return AttentionInputs(q, *window, *extra, sink, 512**-0.5)


def attention_corners(device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> dict[str, AttentionInputs]:
    """The hostile inputs by name. Small enough for the interpreter; what each must give is the reference's answer."""

    def make(T: int, H: int, *keys: int, **options) -> AttentionInputs:
        return attention_inputs(T, H, *keys, device=device, dtype=dtype, rows=options.pop("rows", 256), **options)

    base = make(3, 5, 40, 70)
    lens = base.window_lens
    assert base.extra_indices is not None
    assert base.extra_lens is not None
    assert base.sink is not None
    few = base.window_indices.clone()
    few[0, ::2] = -1
    few[1] = -1
    wild = base.extra_indices.clone()
    wild[0, 3], wild[1, 5], wild[2, 0] = 2**31 - 1, -(2**31), 256
    same = base.window_indices.clone()
    same[:] = same[:, :1]
    cut = torch.tensor([0, 1, 40], dtype=torch.int32, device=device)
    no_key = {"window_lens": torch.zeros_like(lens), "extra_lens": torch.zeros_like(lens)}
    odd = make(2, 3, 33, 17, window_page=3)
    gaps = {gap: PagedRows(_in_a_pool(odd.window.data, gap), 3, odd.window.fmt) for gap in (48, 4)}
    return {
        "odd heads and keys": base,
        "one of each": make(1, 1, 1, 1),
        "window only": make(2, 8, 128, 0),
        "holes": replace(base, window_indices=few),
        "a row without a key": replace(base, window_lens=cut, extra_lens=torch.zeros_like(lens)),
        "no key at all": replace(base, **no_key),
        "no key and no sink": replace(base, **no_key, sink=None),
        "lengths out of range": replace(base, window_lens=lens + 1000, extra_lens=base.extra_lens * 0 - 7),
        "indices out of range": replace(base, extra_indices=wild),
        "one row named many times": replace(base, window_indices=same),
        "random lengths and holes": make(4, 8, 100, 60, full=False, holes=True),
        "pages of 1 and 2": make(2, 4, 20, 30, window_page=1, extra_page=2),
        "pages of 256 and 16": make(2, 4, 20, 30, window_page=256, extra_page=16),
        "pages of 3 in a pool with gaps": replace(odd, window=gaps[48]),
        "page stride a multiple of 4 only": replace(odd, window=gaps[4]),
        "rows from 2**-40 to 2**40": make(4, 8, 64, 64, spread=40),
        "large rows": make(2, 8, 64, 64, spread=3, q_scale=1e4),
        "tiny q": make(2, 8, 64, 64, q_scale=1e-4),
        "a heavy sink": replace(base, sink=torch.full_like(base.sink, 40.0)),
        "a sink of -inf": replace(base, sink=torch.full_like(base.sink, float("-inf"))),
        "bfloat16 rows": make(3, 5, 40, 70, fmt="bf16", full=False, holes=True),
        "bfloat16 rows from 2**-40 to 2**40": make(2, 8, 64, 64, fmt="bf16", spread=40),
        "17 heads": make(1, 17, 30, 0),
    }


def _in_a_pool(data: torch.Tensor, gap: int) -> torch.Tensor:
    """The same pages, `gap` bytes of 0xff further apart."""
    pool = torch.full((data.shape[0], data.shape[1] + gap), 0xFF, dtype=torch.uint8, device=data.device)
    pool[:, : data.shape[1]] = data
    return pool[:, : data.shape[1]]
