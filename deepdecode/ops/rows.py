"""Paged rows: the byte layouts of the caches (SPEC 3.1, 3.4), and how rows are read and written."""

from dataclasses import dataclass

import torch

# bytes of one fp8_584 row: 448 E4M3 codes, 64 bfloat16 rope values, 7 E8M0 scales and one byte of padding
ROW_584 = 584


@dataclass(frozen=True)
class PagedRows:
    """A paged cache of rows, one for each cached token or compressed entry.

    Row i stands in page i // page_size at place i % page_size ("physical row" everywhere). The page stride is
    `data.stride(0)`, so padded pages and views of a larger pool are fine.

    fmt and data:
        "fp8_584": uint8 [pages, bytes]. First page_size rows of 576 bytes (448 E4M3 codes, 64 bfloat16 rope values),
            then page_size * 8 bytes of scales (7 E8M0, one for 64 codes each, and a byte of padding).
        "fp8_132": uint8 [pages, bytes], indexer keys. First page_size rows of 128 E4M3 codes, then page_size float32 scales.
        "bf16", "f32", "f64": [pages, page_size, width] of that type; the last two only on the reference path.
    """

    data: torch.Tensor
    page_size: int
    fmt: str

    @property
    def num_rows(self) -> int:
        return self.data.shape[0] * self.page_size
