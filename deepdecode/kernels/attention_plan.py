"""Which launch sparse attention takes: pure functions of the case and the card, importable without Triton or a GPU.

A launch is a shape (which kernel, how many heads and keys a program takes) and a number of splits. `predict` gives its time
from a linear model whose coefficients were fitted to a sweep on one card, corrected by what the model misses at the sweep's
launches nearby (`deepdecode/data/attention_*.json` holds both with their evidence), and `plan` takes the launch with the
smallest prediction.
"""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from deepdecode.cards import CARDS, Card

if TYPE_CHECKING:
    import torch

    from deepdecode.ops.rows import PagedRows

ROW_BYTES = {"fp8_584": 584, "bf16": 1024}
TUNED = "attention_h200.json"
TUNED_CARD = "H200"
# bfloat16 products a second that a tensor core of one SM sustains, TFLOP/s: 790 measured on the H200's 132
_TFLOPS_PER_SM = {90: 6.0, 100: 12.0}
_TFLOPS_OTHER = 1.6
# how far a measured launch counts, in powers of two of what `_place` gives, and what the model's own word weighs
_NEAR = (0.7, 0.5, 0.7, 1.0)
_FAR = 0.05
# each part of the workspace starts on this, so that 16-byte stores stay aligned
_PART_ALIGN = 128


@dataclass(frozen=True)
class Case:
    """Everything that a launch depends on. Keys are the widths of the index tensors; extra_fmt is None without an extra set.

    align: the largest of 16, 4, 2 and 1 that divides both caches' addresses and page strides, in bytes. q_align: the same of
        the addresses of q and out, up to 16.
    gluon: whether this Triton has the Gluon that the Hopper kernels are written in.
    """

    T: int
    H: int
    window_keys: int
    extra_keys: int = 0
    window_fmt: str = "fp8_584"
    extra_fmt: str | None = "fp8_584"
    window_page: int = 64
    extra_page: int = 64
    D: int = 512
    dtype: str = "bfloat16"
    sink_dtype: str = "float32"
    align: int = 16
    deterministic: bool = False
    gluon: bool = True
    q_align: int = 16

    @property
    def keys(self) -> int:
        return self.window_keys + self.extra_keys


@dataclass(frozen=True)
class Config:
    """block_h heads and tiles of block_n keys for each program; split_keys 0: a row's keys are cut evenly into `splits`.

    convert: E4M3 codes are widened by the arch's instruction (sm_89 and later), not by integer arithmetic.
    """

    kernel: str
    block_h: int
    block_n: int
    splits: int
    split_keys: int
    num_warps: int
    align: int
    pdl: bool
    merge_warps: int
    convert: bool = False


@dataclass(frozen=True)
class Shape:
    """A compiled form of a kernel: bytes of shared memory, programs that registers let stand on one SM, and its cost in us.

    cost: a call; each thousand (split, token, head) merged; each split; each wave; each tile of a wave, alone on its SM;
    what such a tile takes more beside a second program; each tile that an SM computes, over all waves.
    seen: measured launches of this shape, (T, H, keys, splits, us) each.
    """

    kernel: str
    block_h: int
    block_n: int
    num_warps: int
    fmt: str
    shared: int
    per_sm: int
    cost: tuple[float, ...]
    seen: tuple[tuple[float, ...], ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def misses(self) -> tuple[np.ndarray, np.ndarray]:
        """`_place` of each measured launch, and what the model misses there, in powers of two."""
        card = next(card for card in CARDS if card.name == TUNED_CARD)
        launches = [(int(splits), int(T), int(H), int(keys), us) for T, H, keys, splits, us in self.seen]
        places = [_place(self, splits, T, H, keys, card.sms) for splits, T, H, keys, _ in launches]
        missed = [math.log2(us / model(self, splits, Case(T, H, keys), card)) for splits, T, H, keys, us in launches]
        return np.array(places), np.array(missed)


@cache
def shapes() -> tuple[Shape, ...]:
    table = json.loads((files("deepdecode") / "data" / TUNED).read_text())
    return tuple(
        Shape(**(shape | {"cost": tuple(shape["cost"]), "seen": tuple(map(tuple, shape.get("seen", ())))}))
        for shape in table["shapes"]
    )


def supports(case: Case, card: Card) -> str | None:
    """None if a kernel covers the case on the card, else the reason why not. The dispatcher asks nothing else."""
    if card.arch < 80:
        return f"sm_{card.arch} has no bfloat16 tensor cores; sm_80 is the first that has"
    if case.D != 512:
        return f"rows of {case.D}, not 512"
    if case.dtype != "bfloat16":
        return f"q in {case.dtype}, not bfloat16"
    if case.sink_dtype != "float32":
        return f"a sink in {case.sink_dtype}, not float32"
    if case.window_fmt not in ROW_BYTES:
        return f"{case.window_fmt} rows"
    if case.extra_fmt not in (None, case.window_fmt):
        return f"window rows in {case.window_fmt} and extra rows in {case.extra_fmt}"
    if case.align < 4:
        return "pages that do not start on multiples of 4 bytes"
    if case.q_align < 16:
        return "q or out that does not start on a multiple of 16 bytes"
    return None


@cache
def plan(case: Case, card: Card) -> Config:
    """Choose the launch. The same case and card give the same launch, so a captured graph and its replay agree."""
    fitting = [shape for shape in shapes() if _fits(shape, case, card)]
    if case.deterministic:
        return _deterministic(case, card, fitting)
    best = min(
        (predict(shape, splits, case, card), n, splits)
        for n, shape in enumerate(fitting)
        for splits in split_counts(case.keys, shape.block_n)
    )
    return _config(fitting[best[1]], best[2], 0, case, card)


def plan_unsplit(case: Case, card: Card) -> Config:
    """Rung 1: tensor cores and rows read once for a block of heads, one program for all keys, on mma.sync."""
    fitting = [shape for shape in shapes() if _fits(shape, replace(case, gluon=False), card)]
    return _config(max(fitting, key=lambda shape: shape.block_h), 1, 0, case, card)


def predict(shape: Shape, splits: int, case: Case, card: Card) -> float:
    """Microseconds of a warm call: measured on the H200, for other cards its coefficients with their SMs and shared memory."""
    return model(shape, splits, case, card) * 2 ** _missed(shape, splits, case, card)


def model(shape: Shape, splits: int, case: Case, card: Card) -> float:
    """The linear part of `predict`."""
    call, merged, split, wave, tile, beside, shared_tile = shape.cost
    programs = case.T * math.ceil(case.H / shape.block_h) * splits
    tiles = math.ceil(math.ceil(case.keys / splits) / shape.block_n)
    per_sm = min(shape.per_sm, max(1, (card.shared << 10) // shape.shared))
    # a grid that fills the last SMs waits for those that the merge before it still holds
    waves = _waves(programs / (int(0.97 * card.sms) * per_sm))
    us = call + waves * (wave + tiles * tile) + programs * tiles / card.sms * shared_tile
    if min(math.ceil(programs / card.sms), per_sm) > 1:
        us += waves * tiles * beside
    if splits > 1:
        us += splits * case.T * case.H / 1e3 * merged + splits * split
    return us


def _waves(rounds: float) -> float:
    """What a grid of so many times the programs that the card holds counts as.

    Up to four the last wave costs most of a whole one; of more it hides among the others, whose programs end at many times.
    Both numbers were chosen on the H200's sweep, each T and each H left out of the fit in turn: the mean loss at what was left
    out is 0.51 % with them and 0.55 % with whole waves.
    """
    return rounds if rounds > 4 else 0.8 * math.ceil(rounds) + 0.2 * max(1.0, rounds)


def _missed(shape: Shape, splits: int, case: Case, card: Card) -> float:
    """Powers of two that the model misses by, averaged over the launches of this shape that were measured near this one."""
    if not shape.seen:
        return 0.0
    places, missed = shape.misses
    apart = (places - np.array(_place(shape, splits, case.T, case.H, case.keys, card.sms))) / _NEAR
    weight = np.exp2(-(apart * apart).sum(1))
    return float((weight * missed).sum() / (weight.sum() + _FAR))


def _place(shape: Shape, splits: int, T: int, H: int, keys: int, sms: int) -> tuple[float, ...]:
    """Where a launch stands among others, in powers of two: programs on an SM, tiles of a program, splits, rows to merge."""
    programs = T * math.ceil(H / shape.block_h) * splits / sms
    tiles = math.ceil(math.ceil(keys / splits) / shape.block_n)
    return math.log2(programs), math.log2(max(1, tiles)), math.log2(splits), math.log2(T * H)


def programs(case: Case, config: Config) -> tuple[int, int, int]:
    """The grid of the split kernel."""
    return math.ceil(case.H / config.block_h), case.T, config.splits


def work(case: Case) -> tuple[int, int]:
    """Bytes that must move (each row, q, out and the indices once) and floating-point operations."""
    row = ROW_BYTES[case.window_fmt]
    return case.T * (case.keys * (row + 4) + 2 * case.H * 512 * 2 + 8), 4 * case.T * case.H * case.keys * 512


def floor_us(case: Case, card: Card) -> float:
    """No launch is faster: the bytes over the memory's bandwidth, or the operations over the tensor cores' rate."""
    nbytes, flops = work(case)
    rate = _TFLOPS_PER_SM.get(card.arch, _TFLOPS_OTHER) * card.sms
    return max(nbytes / card.bandwidth, flops / rate) / 1e6


def explain(case: Case, card: Card) -> dict[str, Any]:
    """What `deepdecode plan` prints: the launch, what it takes and what it may reach. `reason` if no kernel covers the case."""
    reason = supports(case, card)
    if reason:
        return {"card": card.name, "supported": False, "reason": reason}
    config = plan(case, card)
    shape = next(s for s in shapes() if (s.kernel, s.block_h, s.block_n, s.fmt) == _key(config, case.window_fmt))
    grid = programs(case, config)
    per_sm = min(shape.per_sm, max(1, (card.shared << 10) // shape.shared))
    nbytes, flops = work(case)
    return {
        "card": card.name,
        "supported": True,
        "config": asdict(config),
        "grid": grid,
        "waves": round(math.prod(grid) / (card.sms * per_sm), 2),
        "keys_per_split": config.split_keys or math.ceil(case.keys / config.splits),
        "shared_bytes": shape.shared,
        "workspace_bytes": workspace_layout(case.T, case.H, config.splits)[0],
        "bytes": nbytes,
        "flops": flops,
        "floor_us": round(floor_us(case, card), 2),
        "predicted_us": round(predict(shape, config.splits, case, card), 2),
        "prediction": "measured card" if TUNED_CARD in card.name else f"the {TUNED_CARD}'s model; never measured on this card",
    }


def workspace_layout(T: int, H: int, splits: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes, and where the partial outputs (float16), their lse and their units (float32) stand. 0 without splits."""
    if splits <= 1:
        return 0, [(0, 0)] * 3
    rows = T * H * splits
    parts, at = [], 0
    for size in (rows * 512 * 2, rows * 4, rows * 4):
        parts.append((at, at + size))
        at += math.ceil(size / _PART_ALIGN) * _PART_ALIGN
    return at, parts


def case_of(
    q: "torch.Tensor",
    window: "PagedRows",
    window_indices: "torch.Tensor",
    extra: "PagedRows | None",
    extra_indices: "torch.Tensor | None",
    sink: "torch.Tensor | None" = None,
    deterministic: bool = False,
    gluon: bool = True,
    out: "torch.Tensor | None" = None,
) -> Case:
    T, H, D = q.shape
    align = 16
    for rows in (window, extra):
        if rows is not None:
            align = math.gcd(align, rows.data.data_ptr(), rows.data.stride(0) * rows.data.element_size())
    return Case(
        T=T,
        H=H,
        window_keys=window_indices.shape[1],
        extra_keys=0 if extra_indices is None else extra_indices.shape[1],
        window_fmt=window.fmt,
        extra_fmt=None if extra is None else extra.fmt,
        window_page=window.page_size,
        extra_page=window.page_size if extra is None else extra.page_size,
        D=D,
        dtype=str(q.dtype).removeprefix("torch."),
        sink_dtype="float32" if sink is None else str(sink.dtype).removeprefix("torch."),
        align=4 if align == 8 else align,
        deterministic=deterministic,
        gluon=gluon,
        q_align=math.gcd(16, q.data_ptr(), 0 if out is None else out.data_ptr()),
    )


@cache
def card_of(device: "torch.device") -> Card:
    """The card of this GPU with what the device itself reports; what it does not report is the nearest card's of the table."""
    import torch

    have = torch.cuda.get_device_properties(device)
    arch = 10 * have.major + have.minor
    words = have.name.lower().split()
    named = [card for card in CARDS if all(word in words for word in card.name.lower().replace("-", " ").split()[:1])]
    near = next((card for card in (*named, *CARDS) if card.arch == arch), CARDS[0])
    shared = getattr(have, "shared_memory_per_block_optin", near.shared << 10) >> 10
    l2 = getattr(have, "L2_cache_size", near.l2 << 20) >> 20
    return replace(
        near, name=have.name, arch=arch, sms=have.multi_processor_count, l2=l2, shared=shared, memory=have.total_memory >> 30
    )


def _fits(shape: Shape, case: Case, card: Card) -> bool:
    if shape.fmt != case.window_fmt or shape.shared > card.shared << 10:
        return False
    pages = (case.window_page, case.extra_page)
    hopper = card.arch == 90 and case.gluon and case.align == 16 and all(page & (page - 1) == 0 for page in pages)
    if hopper and case.window_fmt == "fp8_584":
        # tiles of heads more than half empty never win, except the wide kernel's from 16 heads on
        return shape.kernel != "mma" and (shape.block_h < 2 * max(8, case.H) or (shape.kernel == "wide" and case.H >= 16))
    # where the compiler takes wgmma or tcgen05, 64 keys of 16 heads spill: 688 to 960 and 328 to 384 bytes a thread (Triton 3.6
    # and 3.7); wgmma with 32 keys of 16 heads was never timed
    spilling = (card.arch == 90 and shape.block_h > 8) or (card.arch == 100 and shape.block_h > 8 and shape.block_n > 32)
    spilling = spilling and shape.fmt == "fp8_584"
    return shape.kernel == "mma" and shape.block_h < 2 * max(8, case.H) and not spilling


def split_counts(keys: int, block_n: int) -> list[int]:
    """Numbers of splits that cut the widths into other numbers of tiles, each a tenth more than the one before at least."""
    tiles = max(1, math.ceil(keys / block_n))
    counts: list[int] = []
    for splits in sorted({math.ceil(tiles / each) for each in range(1, tiles + 1)}):
        if not counts or splits >= 1.1 * counts[-1]:
            counts.append(splits)
    return counts


def _deterministic(case: Case, card: Card, fitting: list[Shape]) -> Config:
    """The shape and the cut must not depend on T; so the splits are what a small batch wants, at most about 16."""
    one = replace(case, T=1, deterministic=False)
    wanted = {"narrow": case.H <= 16, "piped": False, "wide": case.H > 16, "mma": True}
    able = [s for s in fitting if wanted[s.kernel] and s.block_h < 2 * max(8, case.H)] or fitting
    shape = min(able, key=lambda s: (s.kernel == "mma", predict(s, 1, one, card)))
    tiles = math.ceil(case.keys / shape.block_n)
    if shape.kernel == "mma":
        # its tiles hold keys of one set
        tiles = math.ceil(case.window_keys / shape.block_n) + math.ceil(case.extra_keys / shape.block_n)
    each = max(2, math.ceil(tiles / 16))
    return _config(shape, max(1, math.ceil(tiles / each)), each * shape.block_n, case, card)


def merge_warps(T: int, H: int, splits: int) -> int:
    """Warps of each merge program: more where there are few programs, or where splits would not fit the registers of two.

    H200, FP8 rows, 128+512 keys, us of a call with 2 / 4 warps: 8 heads T=1 5.4 / 5.0, T=16 7.4 / 7.1, T=64 13.5 / 13.1; 64
    heads T=8 10.5 / 11.2, T=16 12.3 / 13.3, T=64 23.9 / 24.3 (a development run; T H splits: 80, 640, 1024; 5120, 5120, 8192).
    """
    return 4 if splits > 32 or T * H * splits <= 2048 else 2


def _config(shape: Shape, splits: int, split_keys: int, case: Case, card: Card) -> Config:
    return Config(
        kernel=shape.kernel,
        block_h=shape.block_h,
        block_n=shape.block_n,
        splits=splits,
        split_keys=split_keys,
        num_warps=shape.num_warps,
        align=min(case.align, 16),
        pdl=card.arch >= 90,
        merge_warps=merge_warps(1 if case.deterministic else case.T, case.H, splits),
        convert=card.arch >= 89,
    )


def _key(config: Config, fmt: str) -> tuple[str, int, int, str]:
    return config.kernel, config.block_h, config.block_n, fmt
