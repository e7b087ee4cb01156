"""Entries of two tables on the same inputs: whether a fused entry differs by rounding, whatever the step makes of that later.

A step run freely cannot tell: a router's near tie tips on one rounding, another expert answers, and from there on the two
steps see different inputs. Here every entry is handed what the other table's step hands it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from deepdecode.ladder.gates import Gate
from deepdecode.ops.indexer import index_topk_ref
from deepdecode.ops.reference import REFERENCE
from deepdecode.ops.rope import rope
from deepdecode.ops.rows import PagedRows, read_rows
from deepdecode.ops.table import AttnInputs, AttnReady, CompressorState, LayerCache, Ops, Step
from deepdecode.testing.numeric import rel_err

Tensor = torch.Tensor
ENTRIES = tuple(field.name for field in fields(Ops))
# parts that are choices: their error is the share of what one chose and the other did not
CHOICES = ("ids", "entries")
# What is stored in FP8: a rounding before it moves few values by a whole step of 2**-4 to 2**-3.
FP8_PARTS = ("window row", "compressed row", "index row", "scaled index_q")
# Of bfloat16 results: three roundings to 1.7e-3 each, as the mirrors of engine code have on their way, and room. Of FP8 rows,
# twice what the reference table in bfloat16 is off. Of experts: sums in float32 tip ties only, of which a token has few.
MAX_ENTRY_ERR, MAX_ROW_ERR, MAX_OTHERS = 8e-3, 4e-2, 5e-3
# Of the gates that hyper-connections write with: what the mixing product keeps with its weights in two bfloat16 parts, or in
# float32. One part would be a hundred times as far off, and TF32 ten times.
MIXED, MAX_MIX_ERR = ("post", "comb"), 1e-5


@dataclass(frozen=True)
class Apart:
    """One part of what one call gave: how far `table` is from `other`.

    call: how often the entry had been called before. error: relative; of a choice, the share chosen otherwise.
    """

    entry: str
    call: int
    part: str
    table: str
    other: str
    error: float


def compared(
    drive: Ops, others: Mapping[str, Ops], wanted: Callable[[str, tuple[Any, ...]], bool], *, name: str = "drive"
) -> tuple[Ops, list[Apart]]:
    """The table `drive`, whose entries first run on every other table too, and the list that its steps fill.

    Args:
        drive: what the step goes on with.
        others: other tables by name, each handed the inputs that drive's entry gets. What they write into caches, drive's
            own entry writes again.
        wanted: of an entry and the arguments of one call, whether to compare; a comparison with `FLOAT64` takes time.
        name: what the list calls drive.

    Differences of every pair of tables are listed, later tables against earlier ones, drive last.
    """
    found: list[Apart] = []

    def wrap(entry: str) -> Callable[..., Any]:
        calls = 0

        def run(*args: Any, **options: Any) -> Any:
            nonlocal calls
            call, calls = calls, calls + 1
            mine = getattr(drive, entry)
            if not wanted(entry, args):
                return mine(*args, **options)
            tables = {other: getattr(ops, entry) for other, ops in others.items()} | {name: mine}
            given: Any = None
            parts: dict[str, dict[str, Tensor]] = {}
            for table, function in tables.items():
                given = function(*args, **options)
                parts[table] = {part: value.clone() for part, value in _parts(entry, given, args).items()}
            names = list(tables)
            for i, table in enumerate(names):
                for other in names[:i]:
                    for part, value in parts[table].items():
                        error = _apart(part, value, parts[other][part])
                        found.append(Apart(entry, call, part, table, other, error))
            return given

        return run

    return Ops(**{entry: wrap(entry) for entry in ENTRIES}), found


def first_of_kind() -> Callable[[str, tuple[Any, ...]], bool]:
    """Says yes to the first call of every kind: layers of one kind launch the same kernels on the same shapes."""
    seen: set[tuple[Any, ...]] = set()

    def wanted(entry: str, args: tuple[Any, ...]) -> bool:
        key = (entry, *_kind(entry, args))
        if key in seen:
            return False
        seen.add(key)
        return True

    return wanted


def _kind(entry: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What makes two calls of an entry differ in more than their values."""
    if entry == "mhc_boundary":
        return (args[0] is None,)
    if entry in ("attn_in", "attn_prepare"):
        # the layer's ratio
        return (args[-1],)
    if entry == "q_proj":
        return tuple(args[1].q_b.shape)
    if entry == "sparse_attn":
        return (args[2].shape[1], None if len(args) < 6 or args[5] is None else args[5].shape[1])
    if entry in ("route", "moe"):
        # by score or by token
        return (args[{"route": 2, "moe": 3}[entry]].tid2eid is None,)
    return ()


def entry_gates(ops: Ops, run: Callable[[Ops], Any]) -> list[Gate]:
    """A step of the rung, each kind of entry beside float64 on the very inputs that the step hands it.

    Args:
        ops: the rung's table.
        run: runs one step on the table it is given, eagerly; best one in which every compressor completes an entry.
    """
    first = first_of_kind()
    embedded: list[tuple[Any, ...]] = []

    def wanted(entry: str, args: tuple[Any, ...]) -> bool:
        # a draw is a choice between neighbours; the entries chosen have a gate of their own
        if entry in ("sample", "index_topk") or not first(entry, args):
            return False
        if entry == "mhc_boundary" and args[0] is None:
            embedded.append(args)
        return True

    table, found = compared(ops, {"float64": FLOAT64}, wanted)
    run(table)
    gates = []
    for title, bound, parts in (
        ("entries against float64", MAX_ENTRY_ERR, None),
        ("rows written against float64", MAX_ROW_ERR, FP8_PARTS),
        ("experts that float64 does not choose", MAX_OTHERS, ("ids",)),
    ):
        mine = [one for one in found if (one.part in parts if parts else one.part not in (*FP8_PARTS, *CHOICES))]
        worst = max(mine, key=lambda one: float("inf") if one.error != one.error else one.error, default=None)
        if worst is not None:
            gates.append(Gate(title, worst.error, bound, f"{len(mine)} results, the worst {worst.part} of {worst.entry}"))
    # before the first sublayer nothing has been rounded: what differs is the mixing product, and what is made of it
    mixed = [one.error for one in found if (one.entry, one.call) == ("mhc_boundary", 0) and one.part in MIXED]
    if embedded and mixed:
        note = f"with weights in one bfloat16 part {_mixed_in_bfloat16(embedded[0]):.1e}"
        worst = max(mixed, key=lambda error: float("inf") if error != error else error)
        gates.append(Gate("hyper-connections' gates against float64", worst, MAX_MIX_ERR, note))
    return gates


def _mixed_in_bfloat16(args: tuple[Any, ...]) -> float:
    """How far the gates of a boundary are off in float64 when nothing but the mixing product's weights is rounded, once."""
    *before, site, norm, config = args
    rounded = replace(site, fn=site.fn.bfloat16().to(site.fn.dtype))
    right, off = (_parts("mhc_boundary", FLOAT64.mhc_boundary(*before, of, norm, config), args) for of in (site, rounded))
    return max(rel_err(off[part], right[part]) for part in MIXED)


def _apart(part: str, value: Tensor, other: Tensor) -> float:
    if part not in CHOICES:
        return rel_err(value, other)
    alone = total = 0
    for mine, theirs in zip(value.tolist(), other.tolist(), strict=True):
        chosen = {x for x in theirs if x >= 0}
        alone += len(chosen - set(mine))
        total += len(chosen)
    return alone / max(1, total)


def _parts(entry: str, given: Any, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """What an entry gave and wrote, as tensors that another table's can be compared with."""
    if entry == "mhc_boundary":
        return dict(zip(("streams", "x", "post", "comb"), given, strict=True))
    if entry == "attn_in":
        parts = {name: value for name, value in vars(given).items() if value is not None}
        # float64's table leaves that to q_proj
        return {"q_scaled": given.q_latent * args[1].q_norm} | parts
    if entry == "q_proj":
        return {"q": given[0]} | ({} if given[1] is None else {"index_q": given[1]})
    if entry == "attn_prepare":
        _, _, _, _, cache, step, _, _, ratio = args
        return _prepared(given, cache, step, ratio)
    if entry == "index_topk":
        indices, lens = given
        return {"entries": torch.where(torch.arange(indices.shape[1], device=lens.device) < lens[:, None], indices, -1)}
    if entry == "route":
        ids, weights = given
        size = args[2].gate.shape[0]
        return {"ids": ids, "weights": weights.new_zeros(len(ids), size).scatter_(1, ids.long(), weights)}
    if entry == "sparse_attn":
        return {"o": given}
    return {{"embed": "streams", "attn_out": "y", "moe": "y", "head": "logits", "sample": "tokens"}[entry]: given}


def _prepared(ready: AttnReady, cache: LayerCache, step: Step, ratio: int) -> dict[str, Tensor]:
    """q, the indexer's query with its scale, and every row of the caches that this step wrote."""
    parts = {"q": ready.q, "window row": _written(cache.window, step.window_write)}
    if ready.index_q is not None and ready.index_weights is not None:
        # the query's FP8 scale is folded into the weights
        parts["scaled index_q"] = ready.index_q.float() * ready.index_weights.unsqueeze(-1)
    rows: tuple[tuple[str, PagedRows | None], ...] = (("compressed row", cache.compressed), ("index row", cache.index_keys))
    for name, kept in rows:
        if kept is not None:
            parts[name] = _written(kept, step.entry_write[ratio])
    states: tuple[tuple[str, CompressorState | None], ...] = (("state", cache.state), ("index state", cache.index_state))
    for name, state in states:
        if state is not None:
            at = (step.slots.clamp(min=0).long(), step.positions.long() % state.kv.shape[1])
            parts[name] = torch.cat([state.kv[at], state.score[at]], dim=1)
    return parts


def _written(rows: PagedRows, at: Tensor) -> Tensor:
    # a row that no token completes reads as zeros
    return read_rows(rows, at)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@contextlib.contextmanager
def _by_reference() -> Iterator[None]:
    """No kernel is looked for: float64 has none, which would be said call by call."""
    before = os.environ.get("DEEPDECODE_REFERENCE")
    os.environ["DEEPDECODE_REFERENCE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DEEPDECODE_REFERENCE"]
        else:
            os.environ["DEEPDECODE_REFERENCE"] = before


def _float64() -> Ops:
    """The reference table in float64 on whatever it is handed; weights are widened as they are stored."""
    from deepdecode.ops.attention import sparse_attn_ref
    from deepdecode.ops.moe import moe_ref

    def plain(entry: str) -> Callable[..., Any]:
        function = getattr(REFERENCE, entry)

        def run(*args: Any, **options: Any) -> Any:
            return function(*(_wide(arg) for arg in args), **options)

        return run

    def q_proj(inputs: AttnInputs, *args: Any) -> tuple[Tensor, Tensor | None]:
        return REFERENCE.q_proj(replace(inputs, q_latent=inputs.q_latent.double(), q_scaled=_wide(inputs.q_scaled)), *args)

    def attn_prepare(q: Tensor, index_q: Any, inputs: AttnInputs, *args: Any) -> AttnReady:
        # parts may be views of one product; the compressors' rings are float32, and so is what they are fed
        parts: dict[str, Any] = {name: None if t is None else t.contiguous() for name, t in vars(inputs).items()}
        own = AttnInputs(**(parts | {"kv": inputs.kv.double()}))
        return REFERENCE.attn_prepare(q.double(), _wide(index_q), own, *args)

    def index_topk(index_q: Tensor, index_weights: Tensor, keys: PagedRows, step: Step, topk: int) -> tuple[Tensor, Tensor]:
        query = index_q.float().double()
        visible = step.entry_lens[4]
        return index_topk_ref(query, index_weights.double(), keys, step.block_tables, step.slots, visible, topk)

    def sparse_attn(q: Tensor, *args: Any, sink: Tensor, scale: float, positions: Tensor, freqs: Tensor) -> Tensor:
        return rope(sparse_attn_ref(q.double(), *args, sink=sink.double(), scale=scale)[0], positions, freqs, inverse=True)

    def moe(x: Tensor, ids: Tensor, expert_weights: Tensor, weights: Any, config: Any, shared_rows: int | None) -> Tensor:
        return moe_ref(x.double(), ids, expert_weights.double(), weights, config.swiglu_limit, shared_rows)

    special = {"q_proj": q_proj, "attn_prepare": attn_prepare, "index_topk": index_topk, "sparse_attn": sparse_attn, "moe": moe}
    # what only looks up or draws has no precision of its own
    same = {"embed": REFERENCE.embed, "sample": REFERENCE.sample}

    def referred(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            with _by_reference():
                return function(*args, **options)

        return run

    table: dict[str, Any] = {entry: referred(special.get(entry) or same.get(entry) or plain(entry)) for entry in ENTRIES}
    return Ops(**table)


FLOAT64 = _float64()
