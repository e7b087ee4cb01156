"""What tests and measurements of the indexer share: seeded queries and paged keys, and the corners by name."""

import math
from dataclasses import dataclass, replace

import torch

from deepdecode.ops.rows import PagedRows, allocate, write_rows

E4M3 = torch.float8_e4m3fn
Args = tuple[torch.Tensor, torch.Tensor, PagedRows, torch.Tensor, torch.Tensor, torch.Tensor, int]


@dataclass(frozen=True)
class IndexInputs:
    """Arguments of `index_topk`, by its names."""

    index_q: torch.Tensor
    index_weights: torch.Tensor
    keys: PagedRows
    block_tables: torch.Tensor
    slots: torch.Tensor
    lens: torch.Tensor
    topk: int

    def args(self) -> Args:
        return self.index_q, self.index_weights, self.keys, self.block_tables, self.slots, self.lens, self.topk

    def wide(self) -> Args:
        """The same for the reference in float64."""
        return replace(self, index_q=self.index_q.double(), index_weights=self.index_weights.double()).args()


def random_keys(pages: int, page_size: int, generator: torch.Generator, device: torch.device | str) -> PagedRows:
    """Normal E4M3 codes under scales that differ, written as bytes: caches too large to be held in float32 are fine."""
    keys = allocate(pages, page_size, "fp8_132", 128, device=device)
    step = max(1, (1 << 20) // page_size)
    for part in keys.data.split(step):
        codes = 100 * torch.randn(len(part), page_size * 128, generator=generator, device=device)
        scales = 0.005 + 0.01 * torch.rand(len(part), page_size, generator=generator, device=device)
        part[:, : page_size * 128] = codes.clamp(-448, 448).to(E4M3).view(torch.uint8)
        part[:, page_size * 128 :] = scales.view(torch.uint8)
    return keys


def index_inputs(
    T: int,
    entries: int,
    topk: int = 512,
    *,
    heads: int = 64,
    page_size: int = 64,
    copies: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[IndexInputs]:
    """T sequences of `entries` keys each, on pages of their own; `copies` inputs that share no page."""
    generator = torch.Generator(device).manual_seed(seed)
    pages = math.ceil(entries / page_size)
    keys = random_keys(pages * T * copies, page_size, generator, device)
    tables = torch.randperm(pages * T * copies, generator=generator, device=device).int().view(copies, T, pages)
    q = (50 * torch.randn(T, heads, 128, generator=generator, device=device)).clamp(-448, 448).to(E4M3)
    weights = 0.01 * torch.randn(T, heads, generator=generator, device=device)
    slots = torch.arange(T, device=device, dtype=torch.int32)
    lens = torch.full((T,), entries, device=device, dtype=torch.int32)
    return [IndexInputs(q, weights, keys, table, slots, lens, topk) for table in tables]


def exact_inputs(
    T: int,
    heads: int,
    pages: int,
    page_size: int,
    topk: int,
    *,
    values: int = 3,
    fmt: str = "fp8_132",
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> IndexInputs:
    """Whole numbers up to `values`, so that float32 sums are exact in any order and many scores are equal.

    Two table rows, with a page that is missing and one outside the cache; wild slots and lengths; token 0 sees all there is.
    """
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    keys = allocate(pages, page_size, fmt, 128, device=device)
    rows = whole(-values, values, keys.num_rows, 128).float()
    # the row's largest value makes its scale 1; the query does not look at it
    rows[:, 0] = 448
    write_rows(keys, torch.arange(keys.num_rows, device=device), rows.to(device))
    q = whole(-values, values, T, heads, 128).float()
    q[..., 0] = 0
    tables = torch.stack([torch.randperm(pages, generator=generator) for _ in range(2)]).int()
    if pages > 3:
        tables[0, 1], tables[1, 2] = -1, pages
    slots, lens = whole(-1, 2, T).int(), whole(-1, pages * page_size + 2, T).int()
    slots[0], lens[0] = 0, pages * page_size
    q = q.to(E4M3 if fmt == "fp8_132" else keys.data.dtype)
    weights = whole(-3, 3, T, heads).float()
    return IndexInputs(q.to(device), weights.to(device), keys, tables.to(device), slots.to(device), lens.to(device), topk)


def index_corners(device: torch.device | str = "cpu", fmt: str = "fp8_132") -> dict[str, IndexInputs]:
    """The hostile inputs by name, small enough for the interpreter; what each must give is the reference's answer."""

    def make(T: int, heads: int, pages: int, page_size: int, topk: int, values: int = 3) -> IndexInputs:
        return exact_inputs(T, heads, pages, page_size, topk, values=values, fmt=fmt, device=device)

    base = make(4, 5, 9, 16, 20)
    full = replace(base, slots=base.slots * 0, lens=base.lens * 0 + 144)
    corners = {
        "holes, wild slots and lengths": base,
        "one of each": make(1, 1, 1, 1, 1),
        "one head": make(3, 1, 5, 16, 7),
        "64 heads, V4-Flash's page": make(2, 64, 5, 64, 100),
        "100 heads": make(2, 100, 4, 16, 9),
        "most scores equal": make(4, 3, 9, 16, 20, values=1),
        "every score zero": replace(full, index_weights=base.index_weights * 0),
        "zeros of both signs": replace(full, index_q=torch.zeros_like(full.index_q), index_weights=-base.index_weights.abs()),
        "fewer entries than topk": make(3, 4, 5, 16, 100),
        "as many entries as topk": replace(full, topk=128, block_tables=full.block_tables[:, 2:].contiguous()),
        "no entry": replace(base, lens=base.lens * 0),
        "no page": replace(base, block_tables=base.block_tables * 0 - 1),
        "pages of 1": make(3, 4, 40, 1, 5),
        "pages of 3": make(3, 4, 40, 3, 17),
        "pages of 256": make(3, 4, 4, 256, 70),
        "a weight of infinity": replace(full, index_weights=base.index_weights.masked_fill(base.index_weights == 3, math.inf)),
        "a NaN weight": replace(full, index_weights=torch.where(full.slots[:, None] == 0, math.nan, base.index_weights)),
    }
    if fmt != "fp8_132":
        return corners
    for name, scale in (("a NaN scale", math.nan), ("a scale of infinity", math.inf), ("a scale of zero", 0.0)):
        corners[name] = replace(full, keys=_with_scale(full.keys, 50, scale))
    for code in (0x7F, 0xFF):
        keys = PagedRows(full.keys.data.clone(), 16, fmt)
        keys.data[4, 3 * 128 + 77] = code
        corners[f"a code of {code:#x}"] = replace(full, keys=keys)
    pool = torch.full((9, 16 * 132 + 4), 0xFF, dtype=torch.uint8, device=device)
    pool[:, : 16 * 132] = full.keys.data
    corners["page stride a multiple of 4 only"] = replace(full, keys=PagedRows(pool[:, : 16 * 132], 16, fmt))
    return corners


def _with_scale(keys: PagedRows, row: int, scale: float) -> PagedRows:
    data = keys.data.clone()
    page, place = divmod(row, keys.page_size)
    start = keys.page_size * 128 + 4 * place
    data[page, start : start + 4] = torch.tensor([scale], device=data.device).view(torch.uint8)
    return PagedRows(data, keys.page_size, keys.fmt)
