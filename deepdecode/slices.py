"""One rank of an 8-GPU model on one GPU: real shapes, seeded weights and caches, one decode step as a CUDA graph.

tp8: 8 of 64 heads and an eighth of every expert; every rank sees all sequences. dp8ep8: all heads, 32 of 256 experts; a rank
attends an eighth of the sequences, and its experts see the rows of all ranks, of which those of the other ranks are seeded; the
shared expert, which every rank has, sees its own.
Collectives are left out. Sizes are the config's, so a small model makes a small slice, also on a CPU.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from deepdecode.checkpoint.load import assemble, parse_cut
from deepdecode.checkpoint.write import Seeded
from deepdecode.config import ModelConfig
from deepdecode.graphs import Captured
from deepdecode.kvcache import KVCache, default_format
from deepdecode.model import ALONE, Collectives, forward
from deepdecode.ops.rows import PagedRows, row_bytes, write_rows
from deepdecode.ops.table import AttnWeights, CompressorState, Ops

Tensor = torch.Tensor
SLICES = ("tp8", "dp8ep8")
RANKS = 8
# consecutive positions that the timed steps cover: every compressor boundary comes at its natural rate
POSITIONS = 128
# the index arrays of ratio-128 layers are padded to this, as serving engines do
WIDTH_PAD = 64
_CHUNK_ROWS = 1 << 16


class RankSlice:
    """Weights and caches of one rank, and the decode step on them.

    Args:
        config: of the whole model.
        name: "tp8" or "dp8ep8".
        context: tokens of every sequence at the last timed position, at least 128.
        layers: only the first n layers; None for all.
        max_concurrency: sequences of the whole service that the caches have room for.
        device: where everything is; the current device may be another.
        seed: of weights, caches and tokens.
        progress: called with the layers whose weights are made, and all of them.

    Raises:
        ValueError: an argument is out of range, or the slice does not divide the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        *,
        context: int = 8192,
        layers: int | None = None,
        max_concurrency: int = 64,
        device: torch.device | str = "cuda",
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if name not in SLICES:
            raise ValueError(f"slice: name must be one of {', '.join(SLICES)}, got {name!r}")
        if not POSITIONS <= context <= config.max_positions:
            raise ValueError(f"slice: context must be in [{POSITIONS}, {config.max_positions}], got {context}")
        if layers is not None and not 1 <= layers <= config.num_layers:
            raise ValueError(f"slice: layers must be in [1, {config.num_layers}], got {layers}")
        if max_concurrency < 1:
            raise ValueError(f"slice: max_concurrency must be >= 1, got {max_concurrency}")
        if layers is not None:
            config = replace(config, num_layers=layers, compress_ratios=config.compress_ratios[:layers])
        self.config, self.name, self.context, self.max_concurrency, self.seed = config, name, context, max_concurrency, seed
        self.start = context - POSITIONS
        self.device = torch.empty(0, device=device).device
        # columns of the ratio-128 index arrays
        self.width = -(-(context // 128) // WIDTH_PAD) * WIDTH_PAD
        with torch.inference_mode():
            source = Seeded(config, seed, self.device)
            self.weights = assemble(source, parse_cut(config, name), self.device, None, progress)
            for layer in self.weights.layers:
                if layer.moe.bias is not None:
                    # a trained bias evens out the load; with the seeded one 64 sequences hit 170 of 256 experts, not 200
                    layer.moe.bias.zero_()
            self.cache = self._empty_cache()
            self.reset()
            generator = torch.Generator(self.device).manual_seed(seed + 1)
            # a rank's own sequences first
            size = (POSITIONS, max_concurrency)
            self._tokens = torch.randint(config.vocab_size, size, device=self.device, generator=generator)
            # normed inputs of the experts that the other ranks' sequences would bring
            others = torch.randn(max_concurrency, config.hidden_size, device=self.device, generator=generator)
            self._others = others.to(self.weights.embed.dtype)
        # expert ids of the last step at each concurrency
        self._routed: dict[int, Tensor] = {}

    def sequences(self, concurrency: int) -> int:
        """Sequences that this rank attends when the service holds `concurrency`, whose rows its experts all see."""
        return concurrency if self.name == "tp8" else -(-concurrency // RANKS)

    def graph(self, ops: Ops, concurrency: int) -> "StepGraph":
        """The decode step of `concurrency` sequences on a table of ops, captured on a GPU.

        Raises:
            ValueError: concurrency is not 1 to max_concurrency.
        """
        if not 1 <= concurrency <= self.max_concurrency:
            raise ValueError(f"slice: concurrency must be in [1, {self.max_concurrency}], got {concurrency}")
        return StepGraph(self, ops, concurrency)

    def experts_hit(self, concurrency: int) -> list[int]:
        """Distinct experts of this rank that the last step at this concurrency took, layer by layer.

        Raises:
            ValueError: no step has run.
        """
        if concurrency not in self._routed:
            raise ValueError(f"slice: concurrency must be one that a step has run at, got {concurrency}")
        hit = []
        for layer, ids in zip(self.weights.layers, self._routed[concurrency].cpu(), strict=True):
            local = ids - layer.moe.first_expert
            hit.append(len(local[(local >= 0) & (local < layer.moe.w13.shape[0])].unique()))
        return hit

    def bytes(self, concurrency: int) -> dict[str, int]:
        """Bytes that must move in a step, by entry of `Ops`: weights once (of the experts, those hit), rows read and written.

        The mean over the timed positions. Activations and index arrays, which stay in the L2 cache, are left out.
        """
        config, weights, cache = self.config, self.weights, self.cache
        T = self.sequences(concurrency)
        mean = self.context - (POSITIONS - 1) / 2
        total: dict[str, float] = {field.name: 0.0 for field in fields(Ops)}
        total["embed"] = T * weights.embed.shape[1] * weights.embed.element_size()
        for layer, kept, hit in zip(weights.layers, cache.layers, self.experts_hit(concurrency), strict=True):
            attn, moe = layer.attn, layer.moe
            total["mhc_boundary"] += sum(
                _nbytes(site.fn, site.base, site.scale) for site in (layer.attn_hc, layer.ffn_hc)
            ) + _nbytes(layer.attn_norm, layer.ffn_norm)
            total["attn_in"] += attn.q_kv.nbytes + (attn.rest.nbytes if attn.rest else 0)
            total["q_proj"] += attn.q_b.nbytes + _nbytes(attn.q_norm)
            total["attn_prepare"] += self._prepare_bytes(attn, kept.state, kept.index_state, T)
            total["attn_out"] += attn.wo_a.nbytes + attn.wo_b.nbytes
            row = row_bytes(kept.window.fmt, kept.window.width)
            keys = min(mean, config.window)
            if kept.index_keys is not None:
                entries = mean / 4
                if self.context // 4 > config.index_topk:
                    total["index_topk"] += T * entries * row_bytes(kept.index_keys.fmt, kept.index_keys.width)
                keys += min(entries, config.index_topk)
            elif kept.compressed is not None:
                keys += mean / 128
            total["sparse_attn"] += T * keys * row + _nbytes(attn.sink)
            total["route"] += moe.gate.nbytes + (moe.bias.nbytes if moe.bias is not None else 0)
            if moe.tid2eid is not None:
                total["route"] += concurrency * moe.tid2eid[0].nbytes
            total["moe"] += hit * (moe.w13.nbytes + moe.w2.nbytes) / moe.w13.shape[0]
            total["moe"] += moe.shared13.nbytes + moe.shared2.nbytes
        head = weights.head
        total["head"] = _nbytes(head.hc.fn, head.hc.base, head.hc.scale, head.norm) + head.head.nbytes
        return {name: round(value) for name, value in total.items()}

    def _prepare_bytes(
        self, attn: AttnWeights, state: CompressorState | None, index_state: CompressorState | None, T: int
    ) -> float:
        """Rows that attn_prepare writes, and what it reads of the compressors' states, a step on average."""
        cache = self.cache.layers[0].window
        row = row_bytes(cache.fmt, cache.width)
        total: float = T * row + _nbytes(attn.kv_norm)
        for ring, weights in ((state, attn.compressor), (index_state, attn.index_compressor)):
            if ring is None or weights is None:
                continue
            width = ring.kv.shape[-1] * ring.kv.element_size()
            # kv and score: a row written each token, the ring read at each boundary, where blocks overlap half of its channels
            read = ring.kv.shape[1] * width * (0.5 if ring.ratio == 4 else 1.0) / ring.ratio
            total += T * 2 * (width + read) + _nbytes(weights.ape, weights.norm)
            kept = self.cache.layers[self.config.compress_ratios.index(ring.ratio)]
            rows = kept.compressed if ring is state else kept.index_keys
            assert rows is not None
            total += T * row_bytes(rows.fmt, rows.width) / ring.ratio
        return total

    def _empty_cache(self) -> KVCache:
        slots = self.sequences(self.max_concurrency)
        cache = KVCache(self.config, slots=slots, max_len=self.context, fmt=default_format(self.config), device=self.device)
        taken = [cache.acquire() for _ in range(slots)]
        # pages of all sequences alternate, as they do where sequences grow side by side
        for length in range(cache.logical_page, self.context + cache.logical_page, cache.logical_page):
            for slot in taken:
                cache.reserve(slot, min(length, self.context))
        return cache

    @torch.inference_mode()
    def reset(self) -> None:
        """Fill every place of the caches with the rows it began with: seeded normal values, as norms leave them."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 2)
        for layer in self.cache.layers:
            for rows in (layer.window, layer.compressed, layer.index_keys):
                if rows is not None:
                    _fill(rows, generator)
            for state in (layer.state, layer.index_state):
                if state is not None:
                    state.kv.normal_(generator=generator)
                    state.score.normal_(generator=generator)


class StepGraph:
    """One decode step of a slice: embedding to sampled tokens, captured once, with everything that varies on the device.

    Step n feeds seeded tokens at position `start + n % 128` of every sequence. A step run again at once gives the same result:
    it writes its cache rows again with what they held. After 128 steps the window holds the rows of the round before.

    tokens: int64 [sequences], sampled by the last step; logits: [sequences, vocabulary of the rank].
    """

    def __init__(self, slice: RankSlice, ops: Ops, concurrency: int) -> None:
        self.slice, self.ops, self.concurrency = slice, ops, concurrency
        device, T = slice.device, slice.sequences(concurrency)
        config = slice.config
        self.steps = 0
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._slots = torch.arange(T, dtype=torch.int32, device=device)
        # temperature and top_p as the model's generation_config has them
        self._ones = torch.ones(T, device=device)
        self._seeds = torch.arange(T, device=device)
        self._tokens = slice._tokens[:, :concurrency].contiguous()
        self.tokens = torch.zeros(T, dtype=torch.int64, device=device)
        vocab = slice.weights.head.head.shape[0]
        self.logits = torch.zeros(T, vocab, dtype=torch.float32, device=device)
        shape = (config.num_layers, concurrency, config.experts_per_token)
        self._routed = slice._routed.setdefault(concurrency, torch.full(shape, -1, dtype=torch.int32, device=device))
        with torch.inference_mode():
            self._captured = Captured(lambda: self._step(ops), device)
        self.seek(0)

    @property
    def launches(self) -> int | None:
        """Kernels, copies and fills in the graph; None off the GPU."""
        return self._captured.launches

    @property
    def nodes(self) -> dict[str, int]:
        """The graph's nodes by kind."""
        return dict(self._captured.nodes or {})

    def seek(self, step: int) -> None:
        """Choose the step that runs next."""
        self.steps = step
        self._counter.fill_(step % POSITIONS)

    def replay(self) -> None:
        """One step, without waiting for it."""
        with torch.inference_mode():
            self._captured.replay()
        self.steps += 1

    def eager(self, ops: Ops | None = None) -> None:
        """The same step launch by launch, on another table if one is given; each entry in a profiler range "ops.<entry>"."""
        table = named(ops or self.ops)
        with torch.inference_mode():
            if self.slice.device.type == "cuda":
                with torch.cuda.device(self.slice.device):
                    self._step(table)
            else:
                self._step(table)
        self.steps += 1

    def _step(self, ops: Ops) -> None:
        slice, T = self.slice, len(self._slots)
        tokens = self._tokens.index_select(0, self._counter)[0]
        positions = (self._counter + slice.start).int().expand(T).contiguous()
        step = slice.cache.step(tokens[:T].contiguous(), positions, self._slots, prefill=False, width=slice.width)
        routed: list[Tensor] = []

        def route(*args: Any) -> tuple[Tensor, Tensor]:
            ids, weights = ops.route(*args)
            routed.append(ids)
            return ids, weights

        ranks = ALONE
        if len(tokens) > T:
            others = slice._others[T : len(tokens)]
            ranks = Collectives(
                dispatch=lambda x, _: (torch.cat([x, others]), tokens),
                combine=lambda y: y[:T],
            )
        logits = forward(slice.weights, slice.cache.layers, step, replace(ops, route=route), ranks=ranks)
        self.logits.copy_(logits)
        self.tokens.copy_(ops.sample(logits, self._ones, self._ones, self._seeds, positions + 1))
        torch.stack(routed, out=self._routed)
        self._counter.add_(1).remainder_(POSITIONS)


def named(ops: Ops) -> Ops:
    """The table with each entry in a profiler range "ops.<entry>"."""

    def wrap(name: str, entry: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(f"ops.{name}"):
                return entry(*args, **kwargs)

        return run

    return Ops(**{field.name: wrap(field.name, getattr(ops, field.name)) for field in fields(Ops)})


def _fill(rows: PagedRows, generator: torch.Generator) -> None:
    device = rows.data.device
    for start in range(0, rows.num_rows, _CHUNK_ROWS):
        at = torch.arange(start, min(start + _CHUNK_ROWS, rows.num_rows), device=device)
        write_rows(rows, at, torch.randn(len(at), rows.width, generator=generator, device=device))


def _nbytes(*tensors: Tensor) -> int:
    return sum(t.nbytes for t in tensors)
