"""Paged rows: the byte layouts of the caches, and how rows are read and written.

One page, P = page_size; the page stride is `data.stride(0)`, so padded pages and views of a larger pool are fine:

    fp8_584  [P x 576: 448 E4M3 codes, 64 bfloat16 rope values][P x 8: 7 E8M0 scales, one for 64 codes each, and a 0 byte]
             Payload P * 584 bytes; `allocate` rounds the stride up to a multiple of 576, as FlashMLA wants it:
             P = 2: 1728, P = 64: 37440, P = 128: 74880, P = 256: 149760.
    fp8_132  [P x 128 E4M3 codes][P x one float32 scale]; indexer keys. P * 132 bytes; P = 64: 8448.
    bf16, f32, f64  [P x width values].

So a page is planar: the scales of all its rows stand behind the codes of all its rows.
"""

from dataclasses import dataclass

import torch

from deepdecode.ops._check import describe, expect
from deepdecode.ops.quant import E4M3_MAX, FP8_FLOOR, e4m3_decode, e4m3_encode, e8m0_decode, per_token_cast

# bytes of one fp8_584 row: 448 E4M3 codes, 64 bfloat16 rope values, 7 E8M0 scales and one byte of padding
ROW_584 = 584
ROW_132 = 132
FLOAT_FORMATS = {"bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
FORMATS = ("fp8_584", "fp8_132", *FLOAT_FORMATS)

_FP8_WIDTH = {"fp8_584": 512, "fp8_132": 128}


@dataclass(frozen=True)
class PagedRows:
    """A paged cache of rows, one for each cached token or compressed entry.

    Row i stands in page i // page_size at place i % page_size ("physical row" everywhere).

    fmt and data (layouts: top of this file):
        "fp8_584": uint8 [pages, at least page_size * 584], rows of 512
        "fp8_132": uint8 [pages, at least page_size * 132], rows of 128
        "bf16", "f32", "f64": [pages, page_size, width] of that type; the last two only on the reference path
    Inside a page the data is contiguous.

    Raises:
        ValueError: data does not fit fmt and page_size.
    """

    data: torch.Tensor
    page_size: int
    fmt: str

    def __post_init__(self) -> None:
        data, page_size = self.data, self.page_size
        if self.fmt not in FORMATS:
            raise ValueError(f"PagedRows: fmt must be one of {', '.join(FORMATS)}, got {self.fmt!r}")
        if page_size < 1:
            raise ValueError(f"PagedRows: page_size must be >= 1, got {page_size}")
        if data.dim() and data.shape[0] * page_size >= 2**31:
            raise ValueError(f"PagedRows: data must hold fewer than 2**31 rows, got {data.shape[0] * page_size}")
        if self.fmt in FLOAT_FORMATS:
            want = f"{str(FLOAT_FORMATS[self.fmt]).removeprefix('torch.')} [pages, {page_size}, width]"
            fits = data.dim() == 3 and data.shape[1] == page_size and data.dtype == FLOAT_FORMATS[self.fmt]
            inner = fits and (data.numel() == 0 or data[0].is_contiguous())
        else:
            payload = row_bytes(self.fmt) * page_size
            want = f"uint8 [pages, >= {payload}]"
            fits = data.dim() == 2 and data.shape[1] >= payload and data.dtype == torch.uint8
            inner = fits and data.stride(1) == 1
        if not fits:
            raise ValueError(f"PagedRows: data must be {want} for {self.fmt}, got {describe(data)}")
        if not inner:
            raise ValueError(f"PagedRows: data must be contiguous inside a page, got strides {data.stride()}")

    @property
    def num_rows(self) -> int:
        return self.data.shape[0] * self.page_size

    @property
    def width(self) -> int:
        """Values of a row once read."""
        return self.data.shape[2] if self.fmt in FLOAT_FORMATS else _FP8_WIDTH[self.fmt]


def row_bytes(fmt: str, width: int = 512) -> int:
    """Payload bytes of one row; `width` counts for the float formats only."""
    return {"fp8_584": ROW_584, "fp8_132": ROW_132}[fmt] if fmt not in FLOAT_FORMATS else width * FLOAT_FORMATS[fmt].itemsize


def page_bytes(fmt: str, page_size: int, width: int = 512, *, stride_pad: bool = True) -> int:
    """Bytes from one page to the next, as `allocate` lays pages out."""
    payload = row_bytes(fmt, width) * page_size
    return -(-payload // 576) * 576 if fmt == "fp8_584" and stride_pad else payload


def allocate(
    pages: int,
    page_size: int,
    fmt: str,
    width: int = 512,
    *,
    device: torch.device | str = "cpu",
    stride_pad: bool = True,
) -> PagedRows:
    """Room for `pages` pages, not cleared: a row means nothing before it is written.

    Args:
        fmt: see `PagedRows`; the FP8 formats have one width, 512 and 128.
        stride_pad: round the page stride of fp8_584 up to a multiple of 576 bytes.
    """
    if fmt not in FORMATS:
        raise ValueError(f"allocate: fmt must be one of {', '.join(FORMATS)}, got {fmt!r}")
    if pages < 0 or page_size < 1:
        raise ValueError(f"allocate: pages must be >= 0 and page_size >= 1, got {pages} and {page_size}")
    if width != _FP8_WIDTH.get(fmt, width):
        raise ValueError(f"allocate: width must be {_FP8_WIDTH[fmt]} for {fmt}, got {width}")
    if fmt in FLOAT_FORMATS:
        data = torch.empty(pages, page_size, width, dtype=FLOAT_FORMATS[fmt], device=device)
    else:
        stride = page_bytes(fmt, page_size, width, stride_pad=stride_pad)
        data = torch.empty(pages, stride, dtype=torch.uint8, device=device)
    return PagedRows(data, page_size, fmt)


def read_rows(cache: PagedRows, rows: torch.Tensor) -> torch.Tensor:
    """Read physical rows and widen them exactly: float32, float64 from an f64 cache.

    Args:
        rows: [...] int32 or int64, any shape and layout.

    Returns:
        [..., width]. A row below 0 or past the cache reads as zeros, whatever the memory holds.
    """
    valid = (rows >= 0) & (rows < cache.num_rows)
    if cache.num_rows == 0 or rows.numel() == 0:
        dtype = torch.float64 if cache.fmt == "f64" else torch.float32
        return torch.zeros(*rows.shape, cache.width, dtype=dtype, device=rows.device)
    hole = ~valid.reshape(-1, 1)
    flat = torch.where(valid, rows, 0).long().flatten()
    page = flat.div(cache.page_size, rounding_mode="floor")
    place = flat - page * cache.page_size
    start = page * cache.data.stride(0)
    if cache.fmt in FLOAT_FORMATS:
        values = _take(cache.data, start + place * cache.width, cache.width).masked_fill_(hole, 0)
        values = values if cache.fmt == "f64" else values.float()
        return values.view(*rows.shape, cache.width)
    codes, scale_bytes = (576, 8) if cache.fmt == "fp8_584" else (128, 4)
    body = _take(cache.data, start + place * codes, codes)
    tail = _take(cache.data, start + (cache.page_size * codes + place * scale_bytes), scale_bytes)
    # bytes of 0 read as 0 in both formats; filled four at a time, before they are widened
    for part in (body, tail):
        part.view(torch.int32).masked_fill_(hole, 0)
    if cache.fmt == "fp8_132":
        return (e4m3_decode(body) * tail.view(torch.float32)).view(*rows.shape, 128)
    scale = e8m0_decode(tail[:, :7])
    # [rows, 7, 64] x [rows, 7, 1]
    nope = e4m3_decode(body[:, :448]).view(-1, 7, 64) * scale[:, :, None]
    rope = body[:, 448:].view(torch.bfloat16).float()
    return torch.cat([nope.view(-1, 448), rope], dim=1).view(*rows.shape, 512)


def write_rows(cache: PagedRows, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Quantise rows and write them, in place and without a host sync.

    fp8_584: on the first 448 values in groups of 64: a = max(max|x|, 1e-4), s = 2**ceil(log2(a / 448)),
        code = e4m3(clamp(x / s, -448, 448)); the last 64 values round to bfloat16.
    fp8_132: one scale a row, s = max(max|x|, 1e-4) / 448 in float32; code = e4m3(clamp(x / s, -448, 448)).
    A group with a NaN or infinity reads back as NaN (fp8_132: where the NaN or infinity was). Rounding is to nearest even.

    Args:
        rows: [T] int32 or int64. A row below 0 or past the cache is skipped. If a row is named twice, either value wins.
        values: [T, width] floating point.

    Raises:
        ValueError: values do not have the cache's width, or rows another length or device.
    """
    expect("write_rows: rows", rows, ("T",), (torch.int32, torch.int64), cache.data.device, contiguous=False)
    if values.shape != (*rows.shape, cache.width) or not values.is_floating_point() or values.device != rows.device:
        want = f"[{rows.shape[0]}, {cache.width}] floating point on {rows.device}"
        raise ValueError(f"write_rows: values must be {want}, got {describe(values)}")
    if rows.numel() == 0 or cache.num_rows == 0:
        return
    page_size = cache.page_size
    valid = (rows >= 0) & (rows < cache.num_rows)
    flat = torch.where(valid, rows, 0).long()
    page = flat.div(page_size, rounding_mode="floor")
    at = (page, flat - page * page_size)
    if cache.fmt in FLOAT_FORMATS:
        put_rows(cache.data, at, values.to(cache.data.dtype), valid)
        return
    values = values.float()
    if cache.fmt == "fp8_584":
        codes, scale = per_token_cast(values[:, :448], 64)
        body = torch.cat([codes.view(torch.uint8), values[:, 448:].bfloat16().view(torch.uint8)], dim=1)
        tail = torch.nn.functional.pad(scale.view(torch.uint8), (0, 1))
    else:
        scale = values.abs().amax(dim=1, keepdim=True).clamp(min=FP8_FLOOR) / E4M3_MAX
        body, tail = e4m3_encode(values / scale).view(torch.uint8), scale.view(torch.uint8)
    split, end = page_size * body.shape[1], page_size * (body.shape[1] + tail.shape[1])
    put_rows(cache.data[:, :split].unflatten(1, (page_size, -1)), at, body, valid)
    put_rows(cache.data[:, split:end].unflatten(1, (page_size, -1)), at, tail, valid)


def put_rows(target: torch.Tensor, at: tuple[torch.Tensor, ...], values: torch.Tensor, valid: torch.Tensor) -> None:
    """target[at] = values where `valid`, without a host sync. `at` must be in range everywhere; T > 0."""
    # An invalid row repeats the first valid one, or rewrites what stands there if none is: nothing changes either way.
    first = valid.int().argmax()
    source = torch.where(valid, torch.arange(valid.numel(), device=valid.device), first)
    at = tuple(index[source] for index in at)
    target[at] = torch.where(valid.any(), values[source], target[at])


def _take(data: torch.Tensor, offsets: torch.Tensor, length: int) -> torch.Tensor:
    """[len(offsets), length]: `length` elements from each int64 offset, which count from the tensor's first element."""
    span = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True)) + 1
    # every window of `length` elements, overlapping: nothing is copied but what index_select takes
    return data.as_strided((span - length + 1, length), (1, 1)).index_select(0, offsets)
