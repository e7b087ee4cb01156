import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdecode.ops.rows import FORMATS, PagedRows, allocate, page_bytes, read_rows, row_bytes, write_rows
from deepdecode.testing.numeric import rel_err, same_bits

# half a step of 3 mantissa bits, at the bottom of a binade: 2**-4
E4M3_STEP = 0.0625
BF16_STEP = 2**-9 * 1.01


def width(fmt):
    return 128 if fmt == "fp8_132" else 512


def at(*rows, device="cpu"):
    return torch.tensor(rows, dtype=torch.int32, device=device)


def view_of_pool(pages, page_size, fmt, device, offset=5, gap=3):
    """Pages inside a larger pool of NaNs, at an odd offset and an odd stride: nothing outside a page may be touched."""
    if fmt in ("bf16", "f32", "f64"):
        pool = allocate(pages, page_size + 1, fmt, width(fmt), device=device).data.fill_(float("nan"))
        return pool, PagedRows(pool[:, 1:], page_size, fmt)
    stride = page_size * row_bytes(fmt) + gap
    pool = torch.full((offset + pages * stride,), 255, dtype=torch.uint8, device=device)
    data = pool[offset:].view(pages, stride)
    return pool, PagedRows(data[:, : stride - gap], page_size, fmt)


def e4m3(code):
    """The value of a code, from its definition."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (2.0**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


@pytest.mark.parametrize("fmt", ["fp8_584", "fp8_132"])
def test_reads_every_code(fmt, device):
    """All 256 codes in one row, at a scale of 4."""
    rows = allocate(1, 2, fmt, width(fmt), device=device)
    rows.data[0] = 0
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    if fmt == "fp8_584":
        rows.data[0, 576 : 576 + 256] = codes
        rows.data[0, 2 * 576 + 8 :][:7] = 129
        got = read_rows(rows, at(1, device=device))[0, :256].tolist()
    else:
        rows.data[0, :256] = codes
        rows.data[0, 256:264] = torch.tensor([4.0, 4.0], device=device).view(torch.uint8)
        got = read_rows(rows, at(0, 1, device=device)).flatten().tolist()
    for code in range(256):
        want = 4 * e4m3(code)
        assert struct.pack("f", got[code]) == struct.pack("f", want) or (math.isnan(want) and math.isnan(got[code])), code


def test_page_bytes_are_those_of_the_layouts():
    """Each format by its own row: a planner that sizes one by another's wastes memory or runs past it."""
    assert [page_bytes("fp8_584", P) for P in (2, 64, 128, 256)] == [1728, 37440, 74880, 149760]
    assert [page_bytes("fp8_584", P, stride_pad=False) for P in (2, 64)] == [1168, 37376]
    assert page_bytes("fp8_132", 64) == 8448
    assert [row_bytes(fmt, 512) for fmt in FORMATS] == [584, 132, 1024, 2048, 4096]
    for fmt in FORMATS:
        rows = allocate(3, 2, fmt, width(fmt))
        assert rows.data[0].nbytes == page_bytes(fmt, 2, width(fmt))
        assert (rows.num_rows, rows.width) == (6, width(fmt))


@pytest.mark.parametrize(("page_size", "place"), [(64, 0), (64, 63), (2, 1), (256, 200)])
def test_fp8_584_bytes_stand_where_the_layout_says(page_size, place, device):
    """A page is planar, the scales of all rows behind the codes of all rows."""
    values = torch.randn(512, device=device)
    rows = allocate(3, page_size, "fp8_584", device=device)
    write_rows(rows, at(2 * page_size + place, device=device), values[None])
    page = rows.data[2].cpu()
    body, tail = page[place * 576 : (place + 1) * 576], page[page_size * 576 + place * 8 :][:8].tolist()
    assert tail[7] == 0
    for group in range(7):
        x = values[64 * group : 64 * group + 64].cpu()
        scale = 2.0 ** math.ceil(math.log2(x.abs().max().item() / 448))
        assert tail[group] == math.log2(scale) + 127
        read = torch.tensor([e4m3(code) * scale for code in body[64 * group : 64 * group + 64].tolist()])
        assert (read - x).abs().max() <= E4M3_STEP * x.abs().max()
        # no code nearer: the gap to the value is at most half a step of its own binade, or of the subnormals
        assert ((read - x).abs() <= torch.maximum(x.abs() * E4M3_STEP, torch.tensor(scale * 2.0**-10))).all()
    assert same_bits(body[448:].view(torch.bfloat16), values[448:].cpu().bfloat16())


@pytest.mark.parametrize("place", [0, 1, 63])
def test_fp8_132_bytes_stand_where_the_layout_says(place, device):
    """Read as 132 interleaved bytes, every place but the first is wrong and nothing says so."""
    values = torch.randn(128, device=device)
    rows = allocate(2, 64, "fp8_132", 128, device=device)
    write_rows(rows, at(64 + place, device=device), values[None])
    page = rows.data[1].cpu()
    scale = page[64 * 128 + 4 * place :][:4].clone().view(torch.float32).item()
    # a GPU multiplies by 1 / 448: the last bit may differ
    assert scale == pytest.approx((values.abs().max().cpu() / 448).item(), rel=2**-23 if device.type == "cuda" else 0, abs=0)
    read = torch.tensor([e4m3(code) * scale for code in page[place * 128 : (place + 1) * 128].tolist()])
    assert rel_err(read, values.cpu()) < E4M3_STEP
    assert same_bits(read.float(), read_rows(rows, at(64 + place, device=device))[0].cpu())


# every page size, each as a view of a larger pool with an odd stride
@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("fmt", FORMATS)
def test_reads_what_it_wrote(fmt, page_size, device):
    pool, rows = view_of_pool(5, page_size, fmt, device)
    before = pool.clone()
    values = torch.randn(5, rows.width, device=device, dtype=torch.float64)
    # rows of every page, out of order, with three that are skipped
    where = at(3 * page_size, -1, page_size - 1, rows.num_rows, 5 * page_size - 1, device=device)
    write_rows(rows, where, values)
    got = read_rows(rows, where)
    assert got.dtype == (torch.float64 if fmt == "f64" else torch.float32)
    limit = {"f64": 0.0, "f32": 1e-7, "bf16": BF16_STEP}.get(fmt, E4M3_STEP)
    assert rel_err(got[[0, 2, 4]], values[[0, 2, 4]]) <= limit
    assert got[[1, 3]].eq(0).all()
    # everything that was not written is as it was
    others = torch.ones(rows.num_rows, dtype=torch.bool)
    others[where[[0, 2, 4]].long().cpu()] = False
    unwritten = read_rows(rows, others.nonzero().flatten().to(device))
    assert unwritten.isnan().all()
    changed = (pool.view(torch.uint8) != before.view(torch.uint8)).sum()
    assert changed <= 3 * row_bytes(fmt, rows.width)


def test_pages_of_64_and_256_hold_the_same_rows(device):
    """The page size is an argument, not a property of the bytes of a row."""
    values = torch.randn(512, 512, device=device)
    where = torch.arange(512, device=device)
    got = []
    for page_size in (64, 256):
        rows = allocate(512 // page_size, page_size, "fp8_584", device=device)
        write_rows(rows, where, values)
        got.append(read_rows(rows, where))
    assert same_bits(*got)


@pytest.mark.parametrize("fmt", FORMATS)
def test_skips_rows_outside_the_cache(fmt, device):
    rows = allocate(2, 4, fmt, width(fmt), device=device)
    write_rows(rows, torch.arange(8, device=device), torch.randn(8, rows.width, device=device))
    before = rows.data.clone()
    outside = at(-1, 8, 2**31 - 1, -(2**31), device=device)
    write_rows(rows, outside, torch.ones(4, rows.width, device=device))
    assert same_bits(rows.data, before)
    rows.data.view(torch.uint8).fill_(255)
    assert read_rows(rows, outside).eq(0).all()
    assert read_rows(rows, at(0, device=device)).isnan().all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_empty(fmt, device):
    rows = allocate(2, 4, fmt, width(fmt), device=device)
    before = rows.data.clone()
    write_rows(rows, at(device=device), torch.empty(0, rows.width, device=device))
    assert same_bits(rows.data, before)
    assert read_rows(rows, at(device=device)).shape == (0, rows.width)
    nothing = allocate(0, 4, fmt, width(fmt), device=device)
    write_rows(nothing, at(0, -1, device=device), torch.ones(2, rows.width, device=device))
    assert read_rows(nothing, at(0, -1, device=device)).tolist() == [[0.0] * rows.width] * 2


def test_reads_any_shape_and_layout(device):
    rows = allocate(2, 8, "f32", 3, device=device)
    write_rows(rows, torch.arange(16, device=device), torch.arange(48.0, device=device).view(16, 3))
    where = torch.arange(16, device=device).view(2, 2, 4).permute(2, 0, 1)[:, :, 0]
    assert torch.equal(read_rows(rows, where)[..., 0], 3.0 * where)


def special_rows():
    """Groups of 64 at the edges of the scale: the amax an exact power of two times 448, just above, tiny, zero."""
    return [448.0, 448.0 * (1 + 2**-20), 224.0, 1.0, 2.0**-30, 1e-4, 9.9e-5, 0.0, 3e38]


@pytest.mark.parametrize("amax", special_rows())
@pytest.mark.parametrize("fmt", ["fp8_584", "fp8_132"])
def test_scale_follows_the_largest_value(fmt, amax, device):
    """An exact power of two stays, the floor of 1e-4 is on the amax, nothing overflows."""
    rows = allocate(1, 2, fmt, width(fmt), device=device)
    values = torch.zeros(1, rows.width, device=device)
    values[0, :4] = torch.tensor([amax, -amax, amax / 2, amax / 3])
    write_rows(rows, at(1, device=device), values)
    got = read_rows(rows, at(1, device=device))
    # clamped at 448 * s, which is the amax or just above
    step = E4M3_STEP * values.abs() + max(amax, 1e-4) * 2.0**-17
    assert ((got - values).abs() <= step).all()
    if fmt == "fp8_584":
        byte = int(rows.data[0, 2 * 576 + 8])
        ratio = torch.tensor(max(amax, 1e-4), dtype=torch.float32).item() / 448
        assert 2.0 ** (byte - 127) >= ratio * (1 - 1e-7)
        assert 2.0 ** (byte - 128) < ratio


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_with_nan_or_infinity_reads_as_nan(bad, device):
    rows = allocate(1, 2, "fp8_584", device=device)
    values = torch.ones(1, 512, device=device)
    values[0, 70] = bad
    write_rows(rows, at(0, device=device), values)
    got = read_rows(rows, at(0, device=device))[0]
    assert got[64:128].isnan().all()
    assert torch.equal(got[:64], values[0, :64])
    assert torch.equal(got[128:], values[0, 128:])
    keys = allocate(1, 2, "fp8_132", 128, device=device)
    write_rows(keys, at(0, device=device), values[:, :128])
    assert read_rows(keys, at(0, device=device))[0, 70].isnan()


@settings(max_examples=60, deadline=None)
@given(st.integers(-60, 60), st.integers(0, 2**31 - 1), st.sampled_from(["fp8_584", "bf16", "f32", "f64"]))
def test_a_row_read_back_and_written_again_is_the_same(exponent, seed, fmt):
    """What a prefill step does with the window's history."""
    generator = torch.Generator().manual_seed(seed)
    rows = allocate(1, 2, fmt)
    write_rows(rows, at(0), torch.randn(1, 512, generator=generator, dtype=torch.float64) * 2.0**exponent)
    once = read_rows(rows, at(0))
    write_rows(rows, at(1), once)
    assert same_bits(read_rows(rows, at(1)), once)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 40), min_size=1, max_size=12, unique=True), st.integers(1, 9))
def test_physical_row_is_page_and_place(where, page_size):
    pages = 5
    rows = allocate(pages, page_size, "f64", 2)
    rows.data.fill_(-1)
    values = torch.arange(2.0 * len(where), dtype=torch.float64).view(-1, 2)
    write_rows(rows, at(*where), values)
    flat = rows.data.view(-1, 2)
    for row, value in zip(where, values, strict=True):
        if 0 <= row < pages * page_size:
            assert torch.equal(flat[row], value)
    inside = sum(0 <= row < pages * page_size for row in where)
    assert (flat[:, 0] >= 0).sum() == inside


@pytest.mark.parametrize("fmt", ["fp8_584", "fp8_132", "bf16"])
def test_rows_past_two_to_the_31_bytes(fmt, device):
    """Offsets of pages beyond 2 GiB, in the writer and in the reader."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    stride = 2**20 + 576
    pages = 2200
    if fmt == "bf16":
        data = torch.empty(pages * stride // 2, dtype=torch.bfloat16, device=device)
        data = data.as_strided((pages, 4, 512), (stride // 2, 512, 1))
    else:
        data = torch.empty(pages * stride, dtype=torch.uint8, device=device).as_strided((pages, stride), (stride, 1))
    assert data.stride(0) * data.element_size() * (pages - 1) > 2**31
    rows = PagedRows(data, 4, fmt)
    data[0] = 0
    values = torch.randn(2, rows.width, device=device)
    last = rows.num_rows - 1
    write_rows(rows, at(1, last, device=device), values[[0, 0]])
    got = read_rows(rows, at(1, last, 0, device=device))
    assert same_bits(got[0], got[1])
    assert rel_err(got[0], values[0]) < E4M3_STEP
    assert got[2].eq(0).all()


@pytest.mark.parametrize(
    ("data", "page_size", "fmt", "message"),
    [
        (torch.zeros(2, 4, 8), 4, "fp4", "fmt must be one of fp8_584, .* got 'fp4'"),
        (torch.zeros(2, 4, 8), 0, "f32", "page_size must be >= 1, got 0"),
        (torch.zeros(2, 4, 8), 8, "f32", r"data must be float32 \[pages, 8, width\] for f32, got \[2, 4, 8\] float32"),
        (torch.zeros(2, 4, 8), 4, "bf16", r"data must be bfloat16 \[pages, 4, width\] for bf16, got .* float32"),
        (torch.zeros(2, 1100, dtype=torch.uint8), 2, "fp8_584", r"data must be uint8 \[pages, >= 1168\] .* got \[2, 1100\]"),
        (torch.zeros(2, 8, 4).mT, 4, "f32", r"contiguous inside a page, got strides \(32, 1, 4\)"),
        (torch.zeros(2, 600, dtype=torch.uint8)[:, ::2], 2, "fp8_132", r"inside a page, got strides \(600, 2\)"),
    ],
)
def test_rejects_data_that_is_not_such_a_cache(data, page_size, fmt, message):
    with pytest.raises(ValueError, match=message):
        PagedRows(data, page_size, fmt)


def test_rejects_more_rows_than_an_index_can_name():
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 rows, got 2147483648"):
        PagedRows(torch.empty(1, 1).as_strided((2**25, 64, 1), (0, 0, 1)), 64, "f32")


def test_rejects_bad_arguments():
    rows = allocate(2, 4, "fp8_584")
    with pytest.raises(
        ValueError, match=r"write_rows: values must be \[1, 512\] floating point on cpu, got \[1, 128\] float32"
    ):
        write_rows(rows, at(0), torch.zeros(1, 128))
    with pytest.raises(ValueError, match=r"write_rows: rows must be \[T\] int32 or int64 on cpu, got \[1\] float32"):
        write_rows(rows, torch.zeros(1), torch.zeros(1, 512))
    with pytest.raises(ValueError, match="allocate: width must be 512 for fp8_584, got 128"):
        allocate(2, 4, "fp8_584", 128)
    with pytest.raises(ValueError, match="allocate: pages must be >= 0 and page_size >= 1, got 2 and 0"):
        allocate(2, 0, "bf16")
