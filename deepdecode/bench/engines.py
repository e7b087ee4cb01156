"""deepdecode bench engines: what stands at SGLang's boundaries, called as SGLang calls it, with its own layouts.

Window pages of 256 tokens with SGLang's stride, compressed pages of 64 or 2, windows that run on in their pages, and a last row
that pads the batch. Each of our hooks runs around SGLang's function (from its wheel, in $DEEPDECODE_PEERS, where there is one),
is checked against float64, then captured, fed other inputs and replayed, and checked again; and only then timed.

What tells most comes first, so that a run that is cut has it; --resume goes on where one stopped.
"""

import argparse
import math
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepdecode.bench import indexer as index_bench
from deepdecode.bench import peers
from deepdecode.bench.files import read_results, set_aside
from deepdecode.bench.options import parser_of
from deepdecode.bench.timing import current_commit, need_gpu, time_graph, write_results
from deepdecode.errors import told
from deepdecode.kernels.attention_plan import card_of
from deepdecode.ops.attention import sparse_attn_ref
from deepdecode.ops.mhc import mhc_post_ref, mhc_pre_ref
from deepdecode.ops.moe import moe_ref
from deepdecode.testing.experts import random_experts, random_routes
from deepdecode.testing.index_keys import index_inputs
from deepdecode.testing.inputs import AttentionInputs, attention_inputs
from deepdecode.testing.numeric import rel_err

Tensor = torch.Tensor
DEVICE = "cuda"
WINDOW, WINDOW_PAGE = 128, 256
# ratio, keys and page of the compressed set: 512 chosen of any context, 64 at 8k tokens, 1024 at 128k
SETS = ((4, 512, 64), (128, 1024, 2), (0, 0, 64), (128, 64, 2))
# tokens of a step; and of those that are timed past L2 too, for which one token takes thousands of calls
TOKENS, ROTATED = (1, 8, 16, 64), (16, 64)
# of what is measured first: tokens, and tokens and entries of the indexer
FIRST, INDEXED = (1, 64, 16, 8), ((1, 32768), (64, 2048), (16, 2048), (16, 32768), (1, 2048))
# tokens; experts, their input and their width: an eighth of each of V4-Flash's
ROUTED, EXPERTS = (1, 16), (256, 4096, 256)
HIDDEN = 4096
# bfloat16 output; hyper-connections' gates are kept to 16 bits
MAX_ERR = {"attention": 3e-3, "mhc": 4e-3, "moe": 4e-3}
OURS = "deepdecode through the hook"
# as SGLang gives them: V4-Flash at tensor parallelism 8, whose heads FlashMLA wants padded to 64
OWN_HEADS, PADDED = 8, 64
HOST_CALLS, ROTATED_S = 200, 0.05
PAST_L2 = index_bench.PAST_L2
# what a result file must have for a run to go on with it
FACTS = {"commit": str, "device": dict}
ROW = {"boundary": str, "implementation": str, "T": int}


@dataclass(frozen=True)
class Cell:
    """One boundary at one size.

    make: of a seed, the call to measure, a function that says how wrong its result is, and the tensors that it reads.
    rotated: calls over inputs that together pass L2, None where another benchmark has that time.
    """

    row: dict[str, Any]
    make: Callable[[int], tuple[Callable[[], Any], Callable[[Any], float], list[Tensor]]]
    limit: float
    seconds: float = 0.1
    rotated: Callable[[], list[Callable[[], Any]]] | None = None


def attention_cells(with_peers: bool) -> list[Cell]:
    cells = []
    for ratio, keys, page in SETS:
        for T in TOKENS:
            sizes = {"ratio": ratio, "T": T, "keys": WINDOW + keys}
            for heads in (OWN_HEADS, PADDED):
                row = {"boundary": "flash_mla_with_kvcache_sm120", "H": heads, **sizes}
                # SGLang's Triton kernel takes up to 14 ms
                seconds = {OURS: 0.1, **({"SGLang, triton": 0.03} if with_peers and (T in (1, 64) or ratio == 4) else {})}
                cells += [_attention(row, name, _sm120, heads, keys, page, limit) for name, limit in seconds.items()]
            row = {"boundary": "flash_mla_with_kvcache", "H": OWN_HEADS, "padded": PADDED, **sizes}
            hopper = with_peers and torch.cuda.get_device_capability()[0] == 9
            names = (OURS, "FlashMLA") if hopper else (OURS,)
            cells += [_attention(row, name, _flash_mla, PADDED, keys, page, 0.1) for name in names]
    return cells


def _attention(row: dict[str, Any], name: str, call_of: Any, heads: int, keys: int, page: int, seconds: float) -> Cell:
    """call_of: gives the call of some inputs, through our hook or not."""
    T, hook = row["T"], name == OURS

    def make(seed: int) -> Any:
        inputs = engine_inputs(T, heads, keys, page, seed)
        return call_of(inputs, hook=hook), _attention_judge(inputs, row["H"]), _written(inputs)

    def rotated() -> list[Callable[[], Any]]:
        return [call_of(inputs, hook=hook) for inputs in past_l2(T, heads, keys, page)]

    # SGLang's Triton kernel takes as long whatever L2 holds
    slow = name == "SGLang, triton" or T not in ROTATED
    return Cell(row | {"implementation": name}, make, MAX_ERR["attention"], seconds, None if slow else rotated)


def past_l2(T: int, heads: int, keys: int, page: int) -> list[AttentionInputs]:
    """Steps of T tokens whose rows together pass L2 three times; they share caches and no row of one."""
    count = max(2, math.ceil(PAST_L2 / (T * (WINDOW + keys) * 584)))
    many = engine_inputs(T * count, heads, keys, page, seed=0)
    per_token = ("q", "window_indices", "window_lens", "extra_indices", "extra_lens")
    steps = []
    for n in range(count):
        parts = {name: getattr(many, name) for name in per_token}
        part = slice(n * T, (n + 1) * T)
        steps.append(replace(many, **{name: None if value is None else value[part] for name, value in parts.items()}))
    return steps


def engine_inputs(T: int, heads: int, keys: int, page: int, seed: int) -> AttentionInputs:
    """Each token's window runs on over its own two pages; the last of several is padding: slot 0 alone, no compressed entry."""
    pages = 2 * T + 1
    made = attention_inputs(
        T, heads, WINDOW, keys, window_page=WINDOW_PAGE, extra_page=page, rows=max(pages * WINDOW_PAGE, T * keys),
        device=DEVICE, seed=seed,
    )  # fmt: skip
    generator = torch.Generator(DEVICE).manual_seed(seed)
    start = torch.randint(0, 2 * WINDOW_PAGE - WINDOW, (T, 1), generator=generator, device=DEVICE)
    first = torch.arange(T, device=DEVICE)[:, None] * 2 * WINDOW_PAGE
    made.window_indices.copy_(first + start + torch.arange(WINDOW, device=DEVICE))
    if made.extra_indices is not None:
        made.extra_indices.copy_(made.extra_indices.sort(dim=1).values)
    if T > 1:
        made.window_indices[-1], made.window_lens[-1] = -1, 1
        made.window_indices[-1, 0] = 0
        if made.extra_indices is not None and made.extra_lens is not None:
            made.extra_indices[-1], made.extra_lens[-1] = -1, 1
    return made


def _call_of(inputs: AttentionInputs) -> dict[str, Any]:
    """The keywords of SGLang's backend."""
    call = {"q": inputs.q.unsqueeze(1), "k_cache": _view(inputs.window), "head_dim_v": 512, "softmax_scale": inputs.scale}
    call |= {"indices": inputs.window_indices.unsqueeze(1), "topk_length": inputs.window_lens, "attn_sink": inputs.sink}
    extra = None if inputs.extra is None else _view(inputs.extra)
    indices = None if inputs.extra_indices is None else inputs.extra_indices.unsqueeze(1)
    return call | {"extra_k_cache": extra, "extra_indices_in_kvcache": indices, "extra_topk_length": inputs.extra_lens}


def _view(rows: Any) -> Tensor:
    return peers.engine_view(rows).view(torch.float8_e4m3fn)


def _attention_judge(inputs: AttentionInputs, heads: int) -> Callable[[Any], float]:
    def judge(result: Any) -> float:
        narrow = replace(inputs, q=inputs.q[:, :heads].double())
        sink = None if inputs.sink is None else inputs.sink[:heads].double()
        want, _ = sparse_attn_ref(*narrow.args(), sink=sink, scale=inputs.scale)
        return rel_err(result[0][:, 0, :heads], want)

    return judge


def _written(inputs: AttentionInputs) -> list[Tensor]:
    found = [inputs.q, inputs.window.data, inputs.window_indices, inputs.window_lens, inputs.sink]
    if inputs.extra is not None:
        found += [inputs.extra.data, inputs.extra_indices, inputs.extra_lens]
    return [tensor for tensor in found if tensor is not None]


def _sm120(inputs: AttentionInputs, *, hook: bool) -> Callable[[], Any]:
    from deepdecode.plugins import sglang_ops

    call = _call_of(inputs)
    if hook:
        return lambda: sglang_ops.attention_sm120(_refuse, **call)
    original = peers.sglang_sm120().flash_mla_with_kvcache_sm120
    return lambda: original(**call)


def _flash_mla(inputs: AttentionInputs, *, hook: bool) -> Callable[[], Any]:
    from deepdecode.plugins import sglang_ops

    # SGLang leaves the padding as it was allocated
    inputs.q[:, OWN_HEADS:] = 100.0
    call = _call_of(inputs) | {"block_table": None, "cache_seqlens": None, "is_fp8_kvcache": True, "use_legacy": True}
    if not hook:
        peers.add_peers()
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        call["tile_scheduler_metadata"] = get_mla_metadata()[0]
        return lambda: flash_mla_with_kvcache(**call)
    call["tile_scheduler_metadata"] = None

    def run() -> Any:
        with sglang_ops.decode_step(OWN_HEADS, captured=True):
            return sglang_ops.flash_mla(_refuse, **call)

    return run


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the call went to SGLang's own function")


def indexer_cells() -> list[Cell]:
    cells = []
    for T, entries in INDEXED:
        row = {"boundary": "fp8_paged_mqa_logits and topk_transform_paged", "implementation": OURS, "T": T, "entries": entries}
        cells.append(Cell(row, _indexer(T, entries), index_bench.MAX_GAP))
    return cells


def _indexer(T: int, entries: int) -> Callable[[int], Any]:
    def make(seed: int) -> Any:
        from deepdecode.plugins import sglang_ops

        (inputs,) = index_inputs(T, entries, 512, device=DEVICE, seed=seed)
        # SGLang's page table has a row for each token
        table = inputs.block_tables[inputs.slots.long()].contiguous()
        keys = inputs.keys.data.view(-1, 64, 1, 132)
        out = torch.empty(T, 512, dtype=torch.int32, device=DEVICE)
        deferred = sglang_ops.Deferred(
            _refuse, (inputs.index_q[:, None], keys, inputs.index_weights, inputs.lens, table, None, entries, False)
        )

        def run() -> Tensor:
            sglang_ops.topk(_refuse, deferred, inputs.lens, table, out, 64)
            return out

        def judge(result: Tensor) -> float:
            return index_bench.judge(inputs, result)["gap"]

        return run, judge, [inputs.index_q, inputs.keys.data, inputs.index_weights]

    return make


def mhc_cells() -> list[Cell]:
    rows = ({"boundary": "apply_mhc_post_pre_boundary", "implementation": OURS, "T": T, "C": HIDDEN} for T in TOKENS)
    return [Cell(row, _mhc(row["T"], row["C"]), MAX_ERR["mhc"]) for row in rows]


def _mhc(T: int, C: int) -> Callable[[int], Any]:
    def make(seed: int) -> Any:
        from deepdecode.plugins import sglang_ops

        generator = torch.Generator(DEVICE).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE)

        y, streams, norm = random(T, C).bfloat16(), random(T, 4, C).bfloat16(), random(C).bfloat16()
        post, comb = 2 * random(T, 4).sigmoid(), random(T, 4, 4).softmax(-1)
        fn, scale, base, eps = random(24, 4 * C) / (4 * C) ** 0.5, random(3), random(24), 1e-6

        def run() -> Any:
            return sglang_ops.mhc_boundary(
                _refuse, y, streams, post, comb, fn, scale, base, 4, eps, eps, 2.0, 20, norm, eps, fn_transpose=False
            )

        def judge(result: Any) -> float:
            wide = mhc_post_ref(y.double(), streams.double(), post.double(), comb.double())
            x, new_post, new_comb = mhc_pre_ref(wide, fn.double(), base.double(), scale.double(), eps, eps, 20)
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.double()
            want = (wide, x, new_post, new_comb)
            return max(rel_err(got, value) for got, value in zip(result[:4], want, strict=True))

        return run, judge, [y, streams, post, comb]

    return make


def moe_cells() -> list[Cell]:
    rows = ({"boundary": "Mxfp4FlashinferCutlassMoEMethod.apply", "implementation": OURS, "T": T} for T in ROUTED)
    return [Cell(row | {"experts": EXPERTS[0], "width": EXPERTS[2]}, _moe(row["T"], *EXPERTS), MAX_ERR["moe"]) for row in rows]


def _moe(T: int, E: int, C: int, I: int) -> Callable[[int], Any]:
    """Weights as SGLang loads them, up above gate, through both of the part's hooks."""

    def make(seed: int) -> Any:
        from deepdecode.plugins import sglang_ops

        class Combine:
            def __init__(self, hidden_states: Tensor) -> None:
                self.hidden_states = hidden_states

        dispatcher = types.ModuleType("sglang.srt.layers.moe.token_dispatcher.standard")
        dispatcher.StandardCombineInput = Combine  # type: ignore[attr-defined]
        sys.modules.setdefault(dispatcher.__name__, dispatcher)
        w = random_experts(E, C, I, 16, device=DEVICE, seed=seed)
        assert w.w13.scale is not None and w.w2.scale is not None
        layer = types.SimpleNamespace(
            w13_weight=w.w13.data.roll(I, dims=1), w13_weight_scale_inv=w.w13.scale.view(torch.uint8).roll(I, dims=1),
            w2_weight=w.w2.data, w2_weight_scale_inv=w.w2.scale,
        )  # fmt: skip
        layer.w13_weight_scale_inv = layer.w13_weight_scale_inv.view(torch.float8_e8m0fnu)
        config = types.SimpleNamespace(moe_ep_size=1, gemm1_clamp_limit=None, swiglu_limit=10.0)
        before = types.SimpleNamespace(process_weights_after_loading=lambda layer: None)
        method = types.SimpleNamespace(moe_runner_config=config, _fp8=before)
        sglang_ops.moe_load(_refuse, method, layer)
        x = torch.randn(T, C, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).bfloat16()
        ids, weights = random_routes(T, E, 6, device=DEVICE, seed=seed)
        step = types.SimpleNamespace(hidden_states=x, topk_output=types.SimpleNamespace(topk_ids=ids, topk_weights=weights))

        def judge(result: Any) -> float:
            none = replace(layer._deepdecode_experts, w13=w.w13, w2=w.w2)
            return rel_err(result.hidden_states, moe_ref(x.double(), ids, weights.double(), none, 10.0))

        return lambda: sglang_ops.moe_apply(_refuse, method, layer, step), judge, [x, ids, weights]

    return make


def measure(cell: Cell, *, check_only: bool = False) -> dict[str, Any]:
    """One row of a result file. A cell that fails a check, or that the implementation cannot run, has no time."""
    row: dict[str, Any] = {"op": "engines", **cell.row}
    try:
        run, judge, inputs = cell.make(0)
        row["rel_err"] = judge(run())
        if row["rel_err"] < cell.limit:
            row["replay_err"] = _replayed(cell, run, judge, inputs)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"[:200]}
    if not max(row["rel_err"], row.get("replay_err", 1.0)) < cell.limit:
        return row | {"error": "outside the error bound"}
    if check_only:
        return row
    timing = time_graph([run], limit_s=cell.seconds)
    row |= {"us_warm": timing.us, "us_warm_low": timing.low, "us_warm_high": timing.high}
    row["host_us"] = _host_us(run, timing.us)
    if cell.rotated is not None:
        calls = cell.rotated()
        timing = time_graph(calls, calls_per_graph=len(calls), limit_s=ROTATED_S)
        row |= {"us_rotated": timing.us, "us_rotated_low": timing.low, "us_rotated_high": timing.high}
    return row


def _replayed(cell: Cell, run: Callable[[], Any], judge: Callable[[Any], float], inputs: list[Tensor]) -> float:
    """How wrong a replay is whose inputs came after the capture: the second seed's, in the places of the first's."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for old, new in zip(inputs, cell.make(1)[2], strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    return judge(result)


def _host_us(run: Callable[[], Any], us: float) -> float:
    """Microseconds that the host takes to make the call; calls that the GPU would hold up are not made in a row."""
    count = max(5, min(HOST_CALLS, int(20_000 / us)))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / count * 1e6


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The attention's rows as markdown: microseconds of SGLang's way and of ours, by the tokens of a step."""
    lines = [
        "| what SGLang calls | heads | keys | " + " | ".join(f"T = {T}" for T in TOKENS) + " |",
        "|---" * (3 + len(TOKENS)) + "|",
    ]
    groups = dict.fromkeys((row["boundary"], row["H"], row["keys"]) for row in rows if "ratio" in row)
    # the Triton kernel was not timed past L2
    kinds = {"flash_mla_with_kvcache": ("us_warm", "us_rotated"), "flash_mla_with_kvcache_sm120": ("us_warm",)}
    for boundary, H, keys in sorted(groups):
        same = [row for row in rows if (row["boundary"], row.get("H"), row.get("keys")) == (boundary, H, keys)]
        for time_of in kinds[boundary]:
            name = "FlashMLA, padded to 64" if boundary == "flash_mla_with_kvcache" else "its Triton kernel for sm_120"
            name += ", warm" if time_of == "us_warm" else ", past L2"
            timed = [row for row in same if time_of in row]
            if timed:
                lines.append(f"| {name} | {H} | {keys} | " + " | ".join(_pair(timed, T, time_of) for T in TOKENS) + " |")
    return "\n".join(lines)


def _pair(rows: Sequence[dict[str, Any]], T: int, time_of: str) -> str:
    ours = [row[time_of] for row in rows if row["T"] == T and row["implementation"] == OURS]
    theirs = [row[time_of] for row in rows if row["T"] == T and row["implementation"] != OURS]
    return " → ".join(f"{us[0]:.1f}" if us else "–" for us in (theirs, ours))


def cells(with_peers: bool) -> list[Cell]:
    """By tokens, as FIRST has them; the two sides of a comparison stand together."""
    made = [*attention_cells(with_peers), *mhc_cells(), *indexer_cells(), *moe_cells()]
    return sorted(made, key=lambda cell: FIRST.index(cell.row["T"]))


def _measured(found: dict[str, Any], commit: str) -> list[dict[str, Any]]:
    """A result file's rows, if this commit measured them on this card; those that failed are tried again."""
    same = found["commit"] == commit and found["device"].get("name") == torch.cuda.get_device_properties(0).name
    return [row for row in found["rows"] if "error" not in row] if same and not commit.endswith("+") else []


def main(argv: Sequence[str] | None = None) -> int:
    return command(parser_of("engines").parse_args(argv))


def command(options: argparse.Namespace) -> int:
    if options.table:
        print(table(read_results(options.table, row=ROW)["rows"]))
        return 0
    need_gpu()
    part, parts = options.check or (0, 1)
    chosen = cells(options.peers)[part::parts]
    card, start, rows = card_of(torch.device(DEVICE, 0)), time.monotonic(), []
    path = options.out / card.name.lower().removeprefix("nvidia ").replace(" ", "-") / "engines.json"
    commit, left, written = options.commit or current_commit(), 0, False
    command = "python -m deepdecode.bench.engines" + (" --peers" if options.peers else "")
    before = read_results(path, facts=FACTS, row=ROW) if path.exists() and options.check is None else {"rows": []}
    if options.resume and before["rows"]:
        rows = _measured(before, commit)
        chosen = [cell for cell in chosen if not any(cell.row.items() <= row.items() for row in rows)]
    for n, cell in enumerate(chosen, start=1):
        if time.monotonic() - start > options.seconds:
            left += 1
            continue
        row = measure(cell, check_only=options.check is not None)
        rows.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items() if key != "op"), flush=True)
        if options.check is None:
            if not written:
                set_aside(path, before["rows"], rows[:-1])
            written = True
            write_results(path, rows, command=command, commit=commit, left=len(chosen) - n)
    print(f"{len(rows)} rows" + (f", {left} left out for time" if left else ""))
    return 1 if any("error" in row and row["implementation"] == OURS for row in rows) else 0


if __name__ == "__main__":
    sys.exit(told(main))
