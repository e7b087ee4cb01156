"""The indexer: which compressed entries a token attends.

    score_n = sum over heads of w_h * relu(q_h . k_n),  the topk largest win, the lower entry where two are equal

The weights are signed and raw: no softmax, no sigmoid. Query and keys carry the same Hadamard rotation, or neither does.
"""

import torch

from deepdecode.ops._check import FLOATS, expect, fall_back, kernel_runs, readable, torch_op, use_kernel
from deepdecode.ops.rows import PagedRows, read_rows

Tensor = torch.Tensor
# bytes of intermediate values (keys, scores of each head, scores) that the reference holds at once, roughly
_CHUNK_BYTES = 32 << 20


def index_logits_ref(index_q: Tensor, index_weights: Tensor, keys: Tensor) -> Tensor:
    """Scores [T, N] of index_q [T, heads, 128] and weights [T, heads] over keys [N, 128], or [T, N, 128] of each token."""
    return torch.einsum("th,thn->tn", index_weights, (index_q @ keys.mT).relu())


def index_topk_ref(
    index_q: Tensor,
    index_weights: Tensor,
    keys: PagedRows,
    block_tables: Tensor,
    slots: Tensor,
    lens: Tensor,
    topk: int,
    logical: bool = False,
) -> tuple[Tensor, Tensor]:
    """Indices [T, topk] and lengths [T] of `index_topk`, in float64 for a float64 query, else float32."""
    T, device = len(index_q), index_q.device
    live = (slots >= 0) & (slots < block_tables.shape[0])
    N = block_tables.shape[1] * keys.page_size
    lens = torch.where(live, lens, 0).clamp(0, N)
    if readable(lens):
        # leave out what no token sees
        N = int(lens.max()) if T else 0
    indices = torch.full((T, topk), -1, dtype=torch.int32, device=device)
    found = torch.zeros(T, dtype=torch.int32, device=device)
    if not T or not N:
        return indices, found
    # a prefill's tokens share their sequence's keys
    shared = readable(slots) and T > 1 and bool((slots == slots[0]).all())
    dtype = torch.float64 if index_q.dtype == torch.float64 else torch.float32
    # [T, N] at most: physical rows, scores, and a few masks
    step = max(1, _CHUNK_BYTES // (32 * N))
    for start in range(0, T, step):
        part = slice(start, start + step)
        table = block_tables[torch.where(live, slots, 0)[part].long()]
        rows = _physical(table[:1] if shared else table, keys, N)
        entry = torch.arange(N, device=device)
        visible = (entry < lens[part, None]) & (rows >= 0)
        if topk >= N:
            # all that is visible is chosen: no score can change that
            chosen = visible
        else:
            logits = _scores(index_q[part].to(dtype), index_weights[part].to(dtype), keys, rows)
            chosen = _choose(logits, visible, topk)
        # each chosen entry's place among the chosen; the others go to a column that is cut off
        place = torch.where(chosen, chosen.cumsum(dim=1) - 1, topk)
        packed = torch.full((len(place), topk + 1), -1, dtype=torch.int32, device=device)
        names = entry.int()[None] if logical else rows
        indices[part] = packed.scatter_(1, place, names.expand_as(place))[:, :topk]
        found[part] = chosen.sum(dim=1)
    return indices, found


def index_topk(
    index_q: Tensor,
    index_weights: Tensor,
    keys: PagedRows,
    block_tables: Tensor,
    slots: Tensor,
    lens: Tensor,
    topk: int,
    *,
    logical: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose each token's topk best entries among those visible to it.

    Args:
        index_q: [T, heads, 128] float8_e4m3fn, bfloat16, float32 or float64, rotated and in the keys' frame, contiguous.
        index_weights: [T, heads] float32 (float64 on the reference path); every constant and the query's scale folded in.
        keys: paged index keys, one a compressed entry. Entry n of a sequence stands in place n % page_size of the page that
            its table row names at n // page_size.
        block_tables: int32 [slots, pages]; -1: no page.
        slots: int32 [T], each token's row of the table; one outside the table sees nothing.
        lens: int32 [T], entries visible to the token, clamped to what the table row can hold.
        topk: >= 1.
        logical: name an entry by its number n in the sequence, not by its physical row.

    Returns:
        indices int32 [T, topk], physical rows (of `keys`, and of every cache with the same pages), ascending in entry order,
        -1 from the token's length on; lengths int32 [T].
        A token that sees no more than topk entries gets all of them, and one that sees none length 0. Entries on a page
        that is -1 or outside the cache are not visible, and not counted. Equal scores: the lower entry wins. A NaN score
        counts as the largest, so that it shows. T == 0 gives empty tensors.

    Raises:
        ValueError: an argument has another shape, dtype, layout or device, or topk < 1.
    """
    device = index_q.device
    expect("index_topk: index_q", index_q, ("T", "heads", keys.width), (*FLOATS, torch.float8_e4m3fn), device)
    T, heads, _ = index_q.shape
    expect("index_topk: index_weights", index_weights, (T, heads), (torch.float32, torch.float64), device)
    expect("index_topk: block_tables", block_tables, ("slots", "pages"), torch.int32, device)
    expect("index_topk: slots", slots, (T,), torch.int32, device)
    expect("index_topk: lens", lens, (T,), torch.int32, device)
    if keys.data.device != device:
        raise ValueError(f"index_topk: keys must be on {device}, got {keys.data.device}")
    if topk < 1:
        raise ValueError(f"index_topk: topk must be >= 1, got {topk}")
    if not T:
        return lens.new_empty(0, topk), lens.new_empty(0)
    return _index_topk_op(index_q, index_weights, keys.data, keys.page_size, keys.fmt, block_tables, slots, lens, topk, logical)


def _index_topk(
    index_q: Tensor,
    index_weights: Tensor,
    keys: Tensor,
    page_size: int,
    fmt: str,
    block_tables: Tensor,
    slots: Tensor,
    lens: Tensor,
    topk: int,
    logical: bool,
) -> tuple[Tensor, Tensor]:
    """What `index_topk` gives, of arguments that it has checked: the kernel where there is one, else the reference."""
    args = (index_q, index_weights, PagedRows(keys, page_size, fmt), block_tables, slots, lens, topk, logical)
    if use_kernel(index_q):
        from deepdecode.kernels import indexer as kernel  # the only import of Triton on this path

        chosen = kernel.choose(*args)
        if not isinstance(chosen, str):
            kernel_runs["index_topk"] += 1
            return chosen
        shape = f"index_q {list(index_q.shape)}, {block_tables.shape[1] * page_size} entries, top {topk}, {fmt} keys"
        fall_back("index_topk", shape, chosen)
    return index_topk_ref(*args)


def _index_topk_fake(index_q, index_weights, keys, page_size, fmt, block_tables, slots, lens, topk, logical):
    return lens.new_empty(len(index_q), topk), lens.new_empty(len(index_q))


_index_topk_op = torch_op("index_topk", _index_topk, _index_topk_fake)


def _physical(table: Tensor, keys: PagedRows, N: int) -> Tensor:
    """Physical rows int32 [T, N] of the first N entries; -1 where the table has no page of the cache."""
    entry = torch.arange(N, device=table.device)
    page = table[:, entry.div(keys.page_size, rounding_mode="floor")]
    inside = (page >= 0) & (page < keys.data.shape[0])
    return torch.where(inside, page * keys.page_size + (entry % keys.page_size).int(), -1)


def _scores(index_q: Tensor, index_weights: Tensor, keys: PagedRows, rows: Tensor) -> Tensor:
    """[T, N] scores, some entries at a time; rows [T, N], or [1, N] if all tokens read the same."""
    T, heads, width = index_q.shape
    own = len(rows) > 1 or T == 1
    per_entry = 8 * (T * heads + len(rows) * width)
    step = max(1, _CHUNK_BYTES // per_entry)
    parts = []
    for start in range(0, rows.shape[1], step):
        part = read_rows(keys, rows[:, start : start + step] if own else rows[0, start : start + step])
        parts.append(index_logits_ref(index_q, index_weights, part.to(index_q.dtype)))
    return torch.cat(parts, dim=1)


def _choose(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """bool [T, N]: the topk largest scores of each row among the visible, the lower entry where two are equal."""
    scores = torch.where(scores.isnan(), float("inf"), scores).masked_fill(~visible, float("-inf"))
    bar = scores.topk(min(topk, scores.shape[1]), dim=1).values[:, -1:]
    above = scores > bar
    tied = (scores == bar) & visible
    return above | (tied & (tied.cumsum(dim=1) <= topk - above.sum(dim=1, keepdim=True)))
