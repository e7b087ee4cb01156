"""What `supports` says is what the dispatcher does: the whole way of a call without a GPU, with the kernels interpreted."""

import contextlib
import os
import random
from dataclasses import replace

import pytest
import torch

from deepdecode.ops import _check, attention
from deepdecode.ops.attention import sparse_attn_decode, sparse_attn_ref, sparse_attn_turned, workspace_bytes
from deepdecode.ops.rope import rope
from deepdecode.ops.rows import PagedRows
from deepdecode.testing.inputs import AttentionInputs, attention_inputs
from deepdecode.testing.numeric import rel_err, worst_row_err

if torch.cuda.is_available():
    pytest.skip("tests/test_attention_gpu.py does this with compiled kernels", allow_module_level=True)

# Triton reads it when a kernel is defined, so before the import below
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from deepdecode.kernels import attention_plan, launching
from deepdecode.kernels.attention_plan import CARDS, case_of, supports

# the interpreter multiplies in float32: only the float16 partial outputs round
MAX_ERR, MAX_ROW_ERR = 6e-4, 2.5e-3
OLDER = [card for card in CARDS if card.arch < 90]


def as_bfloat16(*args, **kwargs):
    """The interpreter multiplies no bfloat16, so q comes in float32 and is taken for bfloat16."""
    case = case_of(*args, **kwargs)
    return replace(case, dtype="bfloat16") if case.dtype == "float32" else case


@pytest.fixture
def on(monkeypatch):
    """Calls run as on a card, interpreted."""

    def choose(card):
        monkeypatch.setattr(attention, "use_kernel", lambda q: True)
        monkeypatch.setattr(launching, "gluon_ready", lambda: False)
        monkeypatch.setattr(launching, "card_of", lambda device: card)
        monkeypatch.setattr(attention_plan, "card_of", lambda device: card)
        monkeypatch.setattr(launching, "case_of", as_bfloat16)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(_check, "_said", set())

    return choose


def apart(cache: PagedRows, gap: int, shift: int) -> PagedRows:
    """The same rows in a pool: pages `gap` bytes further apart, the first one `shift` bytes in; poison between."""
    size = cache.data.element_size()
    rows = cache.data.flatten(1).view(torch.uint8)
    whole = torch.full((shift + len(rows) * (rows.shape[1] + gap),), 0xFF, dtype=torch.uint8)
    spaced = whole[shift:].view(len(rows), -1)[:, : rows.shape[1]]
    spaced.copy_(rows)
    if size > 1:
        spaced = spaced.view(cache.data.dtype).unflatten(1, cache.data.shape[1:])
    return PagedRows(spaced, cache.page_size, cache.fmt)


def drawn(draw: random.Random, fmt: str, gaps: list[int]) -> AttentionInputs:
    """A call that an engine may make: odd sizes, pages and strides, -1 lanes, wild lengths and indices in a padded row."""
    T, H = draw.choice([1, 2, 3]), draw.choice([1, 5, 8, 17])
    window, extra = draw.choice([0, 1, 63, 65, 128]), draw.choice([0, 1, 5, 100])
    inputs = attention_inputs(
        T, H, window, extra, fmt=fmt, window_page=draw.choice([1, 2, 3, 64, 256]), extra_page=draw.choice([1, 2, 48, 64]),
        full=draw.random() < 0.3, holes=draw.random() < 0.5, rows=draw.choice([1, 70, 300]), dtype=torch.float32,
        seed=draw.randrange(1000),
    )  # fmt: skip
    if T > 1 and draw.random() < 0.5:
        inputs.window_lens[-1] = draw.choice([-1, -(2**31), 2**31 - 1, 0])
        inputs.window_indices[-1] = torch.randint(-(2**31), 2**31 - 1, (window,)).int()
    if draw.random() < 0.2:
        inputs.window_indices[:] = -1
    inputs = inputs if draw.random() < 0.7 else replace(inputs, sink=None)
    return replace(inputs, window=apart(inputs.window, draw.choice(gaps), draw.choice(gaps)))


def double_sink(inputs: AttentionInputs) -> torch.Tensor | None:
    return None if inputs.sink is None else inputs.sink.double()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
@pytest.mark.parametrize(("fmt", "gaps"), [("fp8_584", [0, 16, 4]), ("fp8_584", [1, 2]), ("bf16", [0, 2, 8])])
def test_what_supports_says_is_what_a_call_does(on, seed, fmt, gaps, caplog):
    """The kernel runs and is right, or the reference does, which one line says with the words of `supports`."""
    draw = random.Random(f"{seed} {fmt} {gaps}")
    for _ in range(2):
        card, inputs = draw.choice(OLDER), drawn(draw, fmt, gaps)
        on(card)
        caplog.clear()
        q, window, indices, _, extra, extra_indices, _ = inputs.args()
        case = as_bfloat16(q, window, indices, extra, extra_indices, inputs.sink, gluon=False)
        reason = supports(case, card)
        ran = _check.kernel_runs["sparse_attn"]
        out, lse = sparse_attn_decode(*inputs.args(), sink=inputs.sink, scale=inputs.scale, return_lse=True)
        assert _check.kernel_runs["sparse_attn"] - ran == (reason is None)
        lines = [record.getMessage() for record in caplog.records if "no kernel" in record.getMessage()]
        assert len(lines) == (reason is not None)
        assert all(f": {reason}; the reference runs" in line for line in lines)
        want, want_lse = sparse_attn_ref(q.double(), *inputs.args()[1:], sink=double_sink(inputs), scale=inputs.scale)
        assert rel_err(out, want) < MAX_ERR
        assert worst_row_err(out, want) < MAX_ROW_ERR
        assert rel_err(lse, want_lse) < 1e-5


@pytest.mark.parametrize("name", ["q", "out"])
def test_q_and_out_off_16_bytes_are_left_to_the_reference(on, name, caplog):
    """The kernels read and write them 16 bytes at a time; views of a caller's other buffers may start anywhere."""
    on(OLDER[0])
    inputs = attention_inputs(3, 5, 40, 70, rows=256, dtype=torch.float32)
    want = sparse_attn_decode(*inputs.args(), scale=inputs.scale, return_lse=True)[0]
    assert not caplog.records

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        return buffer[1:].view_as(tensor).copy_(tensor)

    views = {"window_indices", "window_lens", "extra_indices", "extra_lens", "sink"}
    moved = replace(inputs, **{view: shifted(getattr(inputs, view)) for view in views})
    assert rel_err(sparse_attn_decode(*moved.args(), scale=moved.scale, return_lse=True)[0], want) == 0
    assert not caplog.records
    q, *rest = moved.args()
    out = torch.empty_like(q)
    q, out = (shifted(q), out) if name == "q" else (q, shifted(out))
    got = sparse_attn_decode(q, *rest, scale=moved.scale, out=out, return_lse=True)[0]
    assert rel_err(got, want) < MAX_ERR
    assert "q or out that does not start on a multiple of 16 bytes; the reference runs" in caplog.text


class Cuda:
    """Stands for a GPU where only its type is asked for."""

    type = "cuda"


@pytest.mark.parametrize(
    ("T", "H", "keys", "pages", "deterministic"),
    [(1, 8, (70, 130), (64, 2), False), (2, 5, (70, 130), (64, 2), True), (1, 3, (130, 0), (3, 64), False)],
)
def test_the_workspace_that_is_asked_for_is_the_one_that_is_used(on, T, H, keys, pages, deterministic):
    """A byte less is refused with the number; with the query's own bytes nothing around them is written."""
    on(OLDER[0])
    inputs = attention_inputs(T, H, *keys, window_page=pages[0], extra_page=pages[1], full=False, rows=300, dtype=torch.float32)
    need = workspace_bytes(T, H, *keys, device=Cuda(), deterministic=deterministic, pages=pages)  # type: ignore[arg-type]
    assert need > 0

    def call(workspace: torch.Tensor) -> torch.Tensor:
        options = {"scale": inputs.scale, "deterministic": deterministic, "workspace": workspace}
        return sparse_attn_decode(*inputs.args(), return_lse=True, **options)[0]

    space = torch.full((need + 256,), 0xAB, dtype=torch.uint8)
    out = call(space[128 : 128 + need])
    assert (space[:128] == 0xAB).all()
    assert (space[128 + need :] == 0xAB).all()
    assert rel_err(out, sparse_attn_ref(inputs.q.double(), *inputs.args()[1:], scale=inputs.scale)[0]) < MAX_ERR
    for begin, size in ((128, need - 1), (120, need)):
        with pytest.raises(ValueError, match=f"workspace must be at least {need} bytes from a multiple of 16, got {size} at"):
            call(space[begin : begin + size])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("extra_keys", [0, 100])
def test_out_is_turned_back_by_a_kernel_or_the_reference(on, extra_keys, dtype, caplog):
    """In one piece and split; the kernels take float32 frequencies only."""
    on(OLDER[0])
    inputs = attention_inputs(2, 8, 16, extra_keys, rows=70, dtype=torch.float32)
    positions, freqs = torch.tensor([9, -70000], dtype=torch.int32), torch.rand(32).to(dtype)
    got = sparse_attn_turned(*inputs.args(), sink=inputs.sink, scale=inputs.scale, positions=positions, freqs=freqs)
    q, *rest = inputs.args()
    want = rope(
        sparse_attn_ref(q.double(), *rest, sink=double_sink(inputs), scale=inputs.scale)[0], positions, freqs, inverse=True
    )
    assert rel_err(got, want) < MAX_ERR
    assert ("freqs must be float32, got torch.float64" in caplog.text) == (dtype is torch.float64)
