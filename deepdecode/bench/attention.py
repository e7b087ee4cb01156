"""Sparse attention: each case checked against float64, timed warm and past L2, and set against its floor and its rivals."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from deepdecode.bench.timing import time_graph
from deepdecode.cards import Card
from deepdecode.kernels.attention_plan import Case, Config, card_of, case_of, plan, work, workspace_layout
from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.ops.rows import PagedRows, allocate, write_rows
from deepdecode.testing.inputs import KEY_COUNTS, AttentionInputs, attention_inputs
from deepdecode.testing.numeric import rel_err, worst_row_err

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HEADS = (8, 16, 32, 64, 128)
# the contract's bounds: over the tensor, and in the worst (token, head) row
MAX_ERR, MAX_ROW_ERR = 2.5e-3, 5e-3
# what a row of ours says of its launch
LAUNCH = ("kernel", "block_h", "block_n", "num_warps", "splits")
# what the bounds hold for; rivals and rung 0 show their error
BOUND = ("deepdecode", "deepdecode portable", "deepdecode portable, no FP8 type", "deepdecode rung 1")
# the reference holds every gathered row in float64, so a large batch is checked on its first tokens
CHECKED_TOKENS = 16
# a rotated run touches at least this many times L2 before it meets a row again
ROTATE_L2 = 2.5
DEVICE = "cuda"
# rows of each cache, and how many are made at once
ROWS, ROWS_AT_ONCE, PAGE = 1 << 20, 1 << 16, 64


@dataclass(frozen=True)
class Sized:
    T: int
    H: int
    window_keys: int
    extra_keys: int
    fmt: str


def sized_cases() -> Iterator[Sized]:
    """The whole table of the product: every T, H, key count and cache form."""
    for fmt in ("fp8_584", "bf16"):
        for keys in KEY_COUNTS:
            for H in HEADS:
                for T in TOKENS:
                    yield Sized(T, H, *keys, fmt)


@lru_cache(maxsize=2)
def caches(fmt: str) -> tuple[PagedRows, PagedRows]:
    """Window and extra rows that all cases of a form share: each takes the first ones, as many as it needs."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    made = []
    for _ in range(2):
        cache = allocate(ROWS // PAGE, PAGE, fmt, device=torch.device(DEVICE))
        for begin in range(0, ROWS, ROWS_AT_ONCE):
            at = torch.arange(begin, min(ROWS, begin + ROWS_AT_ONCE), device=DEVICE)
            write_rows(cache, at, torch.randn(len(at), cache.width, generator=generator, device=DEVICE))
        made.append(cache)
    return made[0], made[1]


def inputs_for(case: Sized, rows: int | None = None) -> AttentionInputs:
    keys = case.window_keys, case.extra_keys
    options = {"rows": rows, "caches": caches(case.fmt), "device": DEVICE, "seed": case.T + case.H}
    return attention_inputs(case.T, case.H, *keys, fmt=case.fmt, **options)


def reference(inputs: AttentionInputs) -> torch.Tensor:
    """float64 outputs of the first CHECKED_TOKENS tokens."""
    n = CHECKED_TOKENS
    q, window, indices, lens, extra, extra_indices, extra_lens = inputs.args()
    sink = None if inputs.sink is None else inputs.sink.double()
    more = None if extra is None else extra_indices[:n], None if extra is None else extra_lens[:n]
    return sparse_attn_ref(q[:n].double(), window, indices[:n], lens[:n], extra, *more, sink=sink, scale=inputs.scale)[0]


Runner = Callable[[AttentionInputs, torch.Tensor], Callable[[], Any]]
"""Takes inputs and an output to fill, gives the call to time; raises if the implementation cannot run the case."""


def ours(inputs: AttentionInputs, out: torch.Tensor, config: Config | None = None) -> Callable[[], Any]:
    """The product's call, with its own plan unless a config is given; workspace preallocated as an engine would."""
    from deepdecode.kernels import attention as kernel

    q, window, indices, _, extra, extra_indices, _ = inputs.args()
    if config is None:
        config = plan(case_of(q, window, indices, extra, extra_indices), card_of(q.device))
    T, H, _ = q.shape
    need, _ = workspace_layout(T, H, config.splits)
    workspace = torch.empty(need, dtype=torch.uint8, device=q.device)

    def call() -> None:
        kernel.launch(
            *inputs.args(), sink=inputs.sink, scale=inputs.scale, out=out, lse=None, workspace=workspace, config=config
        )

    call.config = config  # type: ignore[attr-defined]
    return call


def rung0(inputs: AttentionInputs, out: torch.Tensor) -> Callable[[], Any]:
    from deepdecode.fallback.attention import sparse_attn_per_head

    def call() -> torch.Tensor:
        return sparse_attn_per_head(*inputs.args(), sink=inputs.sink, scale=inputs.scale)[0]

    out.copy_(call())
    return call


@contextlib.contextmanager
def mma_sync() -> Iterator[None]:
    """On Hopper Triton takes wgmma for the portable kernel; other cards have mma.sync. Read by the compiler at a first call."""
    before = os.environ.get("DISABLE_MMA_V3")
    os.environ["DISABLE_MMA_V3"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MMA_V3"]
        else:
            os.environ["DISABLE_MMA_V3"] = before


def _stand_in(card: Card, arch: int) -> Card:
    """This GPU as a card of `arch`: what the portable kernel takes of shared memory fits the 99 KB of any."""
    return replace(card, arch=arch)


def rung1(inputs: AttentionInputs, out: torch.Tensor) -> Callable[[], Any]:
    from deepdecode.kernels.attention_plan import plan_unsplit

    q, window, indices, _, extra, extra_indices, _ = inputs.args()
    case = case_of(q, window, indices, extra, extra_indices, gluon=False)
    call = ours(inputs, out, plan_unsplit(case, _stand_in(card_of(q.device), 120)))
    with mma_sync():
        call()
    return call


def portable(inputs: AttentionInputs, out: torch.Tensor, *, arch: int = 120) -> Callable[[], Any]:
    """The kernel that other cards run, planned for one of `arch` that is otherwise this one, with that card's instructions."""
    q, window, indices, _, extra, extra_indices, _ = inputs.args()
    case = case_of(q, window, indices, extra, extra_indices, gluon=False)
    call = ours(inputs, out, plan(case, _stand_in(card_of(q.device), arch)))
    with mma_sync():
        call()
    return call


def portable_placed(inputs: AttentionInputs, out: torch.Tensor) -> Callable[[], Any]:
    """As sm_80 and sm_86 run it: FP8 codes widened by integer arithmetic, no early start of the merge."""
    return portable(inputs, out, arch=80)


def measure(
    case: Sized, name: str, runner: Runner, *, rotate: bool = True, limit_s: float = 0.5, **note: Any
) -> dict[str, Any]:
    """One row of a result file. A case that fails its check, or that the implementation cannot run, has no time."""
    row: dict[str, Any] = {"op": "attention", "implementation": name, **vars(case), **note}
    inputs, want = _checked(case)
    out = torch.full_like(inputs.q, float("nan"))
    try:
        call = runner(inputs, out)
        call()
        torch.cuda.synchronize()
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"[:200]}
    config = getattr(call, "config", None)
    if config is not None:
        row["launch"] = {name: getattr(config, name) for name in LAUNCH}
    row["rel_err"] = rel_err(out[: len(want)], want)
    row["worst_row_err"] = worst_row_err(out[: len(want)], want)
    if not (row["rel_err"] < MAX_ERR and row["worst_row_err"] < MAX_ROW_ERR) and name in BOUND:
        return row | {"error": "outside the error bounds"}
    warm = time_graph([call], limit_s=limit_s)
    row |= {"us_warm": warm.us, "us_warm_low": warm.low, "us_warm_high": warm.high}
    if rotate:
        rotated = time_graph([runner(pool, out) for pool in _pools(case)], limit_s=limit_s)
        row |= {"us_rotated": rotated.us, "us_rotated_low": rotated.low, "us_rotated_high": rotated.high}
    return row


def ptx_name(arch: int) -> str:
    return f"deepdecode, PTX of sm_{arch}"


def measure_as_ptx(case: Sized, arch: int) -> dict[str, Any]:
    """One row of a result file for another arch's code, run here through the driver's compiler: its error, no time."""
    from deepdecode.bench.ptx import attention_as_ptx

    row: dict[str, Any] = {"op": "attention", "implementation": ptx_name(arch), **vars(case), "ptx_arch": arch}
    inputs, want = _checked(case)
    try:
        out = attention_as_ptx(inputs, arch)
    except (ImportError, RuntimeError) as error:
        return row | {"error": f"{type(error).__name__}: {error}"[:200]}
    row["rel_err"] = rel_err(out[: len(want)], want)
    row["worst_row_err"] = worst_row_err(out[: len(want)], want)
    good = row["rel_err"] < MAX_ERR and row["worst_row_err"] < MAX_ROW_ERR
    return row if good else row | {"error": "outside the error bounds"}


# an implementation and its rivals are measured one after the other, on the same tensors
@lru_cache(maxsize=1)
def _checked(case: Sized) -> tuple[AttentionInputs, torch.Tensor]:
    inputs = inputs_for(case)
    return inputs, reference(inputs)


@lru_cache(maxsize=1)
def _pools(case: Sized) -> list[AttentionInputs]:
    """Inputs that together are larger than L2 several times over, without a row twice where the caches hold enough of them."""
    nbytes, _ = work(Case(case.T, case.H, case.window_keys, case.extra_keys, case.fmt))
    l2 = card_of(caches(case.fmt)[0].data.device).l2 << 20
    count = max(2, min(400, math.ceil(ROTATE_L2 * l2 / nbytes)))
    pool = inputs_for(case, rows=min(ROWS, max(case.window_keys, case.extra_keys) * case.T * count))
    generator = torch.Generator(DEVICE).manual_seed(0)

    def fresh(cache: PagedRows, keys: int) -> torch.Tensor:
        shape = (count, case.T, keys)
        lanes, options = math.prod(shape), {"generator": generator, "device": DEVICE}
        if lanes <= cache.num_rows:
            return torch.randperm(cache.num_rows, **options)[:lanes].int().view(shape)
        return torch.randint(cache.num_rows, shape, dtype=torch.int32, **options)

    changed: dict[str, torch.Tensor] = {"window_indices": fresh(pool.window, case.window_keys)}
    if pool.extra is not None:
        changed["extra_indices"] = fresh(pool.extra, case.extra_keys)
    return [replace(pool, **{name: indices[n] for name, indices in changed.items()}) for n in range(count)]


def best_of(case: Sized, configs: Iterable[Config], *, limit_s: float = 0.1) -> list[tuple[float, Config]]:
    """Warm time of every config that passes the check, fastest first."""
    inputs, want = _checked(case)
    timed = []
    for config in configs:
        out = torch.full_like(inputs.q, float("nan"))
        call = ours(inputs, out, config)
        call()
        if rel_err(out[: len(want)], want) < MAX_ERR:
            timed.append((time_graph([call], repeats=3, limit_s=limit_s).us, config))
    return sorted(timed, key=lambda pair: pair[0])
