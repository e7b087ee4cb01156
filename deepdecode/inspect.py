"""`deepdecode inspect`: what a checkpoint holds, on which cards it fits, and everything that is wrong with it.

Only headers are read, the tokenizer, the expert tables of hash layers, and a bounded part of the scales and plain weights.
"""

import math
import re
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepdecode.cards import CARDS, Card
from deepdecode.checkpoint.container import DTYPES, CheckpointError, TensorFile
from deepdecode.checkpoint.layout import PLAIN, shard, unsound
from deepdecode.checkpoint.load import unfusable
from deepdecode.checkpoint.open import Checkpoint, Piece, open_checkpoint
from deepdecode.config import ConfigError, ModelConfig, shown
from deepdecode.kvcache import default_format, plan_cache
from deepdecode.text import Text

SCHEMA = 1
WAYS = (1, 2, 4, 8, 16)
FORMATS = ("fp8_584", "bf16", "f32")
DEFAULT_TOKENS = 32768
READ_BYTES = 256 << 20
MAX_LINES = 100
# of the faults of one cause, how many the text shows where there are more still
SHOWN = 3
# no scale, norm, sink or hyper-connection is larger; what is larger under such a name is a fault without being read
MAX_READ = 64 << 20
# of a plain weight, what is searched at a time
CHUNK = 64 << 10
# of a name under its layer, for its layer's ratio; the first that fits
_COMPONENTS = (
    (r"ffn\.experts\.", "routed experts"),
    (r"attn\.(wq_b|wo_a|wo_b|attn_sink)\b", "attention, cut by heads"),
    (r"attn\.indexer\.", "indexer"),
    (r"attn\.compressor\.", "compressors of ratio {ratio}"),
    (r"attn\.|attn_norm|ffn_norm", "attention, on every rank"),
    (r"hc_", "hyper-connections"),
    (r"ffn\.gate\.tid2eid", "hash tables"),
    (r"ffn\.gate\.", "gate"),
    (r"ffn\.shared_experts\.", "shared experts"),
)
_PATTERNS = [(re.compile(pattern), title) for pattern, title in _COMPONENTS]
_LAYER = re.compile(r"^layers\.(\d+)\.(.*)$")


@dataclass(frozen=True)
class Fit:
    """How a model stands on a kind of card: the fewest cards that hold it by tensor parallelism, None if none do.

    weights: bytes a rank. tokens: the context that one sequence could have in what is left of a card.
    """

    card: str
    memory: int
    cards: int | None
    weights: int | None
    tokens: int | None


@dataclass
class Report:
    """What `inspect_dir` found. Sizes in bytes; names are cleaned of control characters.

    plain_bytes: of weights stored as numbers, without scales. *_read: what of it was searched for NaN.
    """

    path: str
    kind: str = "unknown"
    config: ModelConfig | None = None
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    shards: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    components: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    scale_bytes: int = 0
    scale_bytes_read: int = 0
    plain_bytes: int = 0
    plain_bytes_read: int = 0
    cache_tokens: int = 0
    cache_format: str = ""
    cache_bytes: int = 0
    fits: list[Fit] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def to_text(self) -> str:
        return _text(self)


def inspect_dir(
    path: str | Path,
    *,
    cache_tokens: int | None = None,
    cache_format: str | None = None,
    read_bytes: int | None = READ_BYTES,
) -> Report:
    """Read a checkpoint's directory and report on it.

    Args:
        path: the directory.
        cache_tokens: context of the one sequence for which a card must have room beside the weights; None: 32768, or
            what the model has.
        cache_format: of its cache, fp8_584, bf16 or f32; None: fp8_584 where the model's heads have its sizes, else bf16.
        read_bytes: how many bytes of scales, and as many of plain weights, are searched for NaN; None: all of them.

    Returns:
        The report; its `faults` are empty if `generate` can use the checkpoint, and no NaN was found in what was searched.
        A config that cannot be used is a fault too.

    Raises:
        CheckpointError: `path` is no directory.
        ValueError: cache_tokens is beyond the model's context, or the model has no cache of this format.
    """
    if cache_tokens is not None and cache_tokens < 1:
        raise ValueError(f"inspect: --context must be >= 1, got {cache_tokens}")
    if cache_format not in (None, *FORMATS):
        raise ValueError(f"inspect: --cache must be one of {', '.join(FORMATS)}, got {cache_format}")
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"inspect: path must be a directory, got {shown(str(path))}")
    report = Report(_clean(str(path.absolute())))
    try:
        checkpoint = open_checkpoint(path, found=report.faults)
    except ConfigError as problem:
        report.faults.append(str(problem))
        return report
    config = report.config = checkpoint.config
    _choose_cache(config, report, cache_tokens, cache_format)
    report.kind = _kind(config)
    report.notes = [shown(note) for note in checkpoint.notes]
    for file in checkpoint.files:
        report.shards.append({"name": shown(file.path.name), "bytes": file.size, "tensors": len(file.tensors)})
        report.metadata |= {shown(key): shown(value) for key, value in list(file.metadata.items())[:20]}
    sums = _count(checkpoint, report)
    _read_values(checkpoint, report, read_bytes)
    if not report.faults:
        report.faults += unfusable(checkpoint)
    if not report.faults:
        _fit(config, sums, report)
    _read_tokenizer(checkpoint, report)
    return report


def _choose_cache(config: ModelConfig, report: Report, tokens: int | None, fmt: str | None) -> None:
    if tokens is not None and tokens > config.max_positions:
        raise ValueError(f"inspect: --context must be at most {config.max_positions} (the model's limit), got {tokens}")
    report.cache_tokens = min(DEFAULT_TOKENS, config.max_positions) if tokens is None else tokens
    report.cache_format = fmt or default_format(config)
    report.cache_bytes = plan_cache(config, max_len=report.cache_tokens, fmt=report.cache_format).total


def _read_tokenizer(checkpoint: Checkpoint, report: Report) -> None:
    config = checkpoint.config
    try:
        last = Text(checkpoint.path, config.bos_id).highest_id()
    except ValueError as problem:
        report.faults.append(_clean(str(problem)))
        return
    if last >= config.vocab_size:
        report.faults.append(f"tokenizer.json: token ids must be below {config.vocab_size} (vocab_size), got {last}")


def _kind(config: ModelConfig) -> str:
    sizes = (config.hidden_size, config.num_layers, config.num_experts)
    name = {(4096, 43, 256): "DeepSeek-V4-Flash", (7168, 61, 384): "DeepSeek-V4-Pro"}.get(sizes)
    if name is None:
        return "DeepSeek-V4 in sizes of its own"
    return name + {"fp4": "", "fp8": "-Base (FP8 experts)", "float": " (not quantised)"}[config.expert_dtype]


def component(name: str, config: ModelConfig) -> str:
    """The part of the model that a tensor, under its official name, belongs to."""
    match = _LAYER.match(name)
    if match is None or int(match[1]) >= config.num_layers:
        return "embedding" if name.startswith("embed.") else "head"
    ratio = config.ratio(int(match[1]))
    title = next((title for pattern, title in _PATTERNS if pattern.match(match[2])), "other")
    return title.format(ratio=ratio)


@dataclass
class _Sums:
    """Bytes of the weights that are loaded: what tensor parallelism cuts, and what is whole on every rank."""

    cut: int = 0
    whole: int = 0


def _count(checkpoint: Checkpoint, report: Report) -> _Sums:
    components, dtypes, sums = Counter[str](), Counter[str](), _Sums()
    for file in checkpoint.files:
        for stored in file.tensors.values():
            dtypes[stored.dtype] += stored.end - stored.begin
    for name, piece in checkpoint.tensors.items():
        numel, size = math.prod(piece.shape), _bytes(piece)
        components[component(name, checkpoint.config)] += size
        if shard(name):
            sums.cut += size
        else:
            sums.whole += size
        if not name.endswith((".scale", ".tid2eid")):
            # two codes in a byte
            report.parameters += numel * (2 if piece.dtype == "I8" else 1)
    if drafts := sum(stored.end - stored.begin for stored in checkpoint.drafts.values()):
        components["draft layers (skipped)"] = drafts
    report.tensors = len(checkpoint.tensors) + len(checkpoint.drafts)
    report.bytes = sum(file.size - file.header_bytes for file in checkpoint.files)
    report.components, report.dtypes = dict(components.most_common()), dict(dtypes.most_common())
    return sums


def _read_values(checkpoint: Checkpoint, report: Report, limit: int | None) -> None:
    """Look for what a header cannot show: experts that do not exist, NaN in scales and in what every token meets."""
    scales: list[tuple[str, Piece]] = []
    weights: list[tuple[str, Piece]] = []
    for name, piece in checkpoint.tensors.items():
        if name.endswith(".scale") and piece.dtype in ("F8_E8M0", *PLAIN):
            scales.append((name, piece))
        elif piece.dtype in PLAIN:
            if not name.endswith(".weight") or len(piece.shape) < 2:
                if _bytes(piece) <= MAX_READ:
                    _read_value(name, piece, report)
            elif _bytes(piece):
                weights.append((name, piece))
        elif name.endswith(".tid2eid") and piece.dtype in ("I64", "I32") and math.prod(piece.shape):
            low, high = (int(end) for end in torch.aminmax(piece.read()))
            if low < 0 or high >= checkpoint.config.num_experts:
                want = f"experts from 0 to {checkpoint.config.num_experts - 1}"
                report.faults.append(f"{_file(piece.stored.file)}: {name} must hold {want}, got {low} to {high}")
            piece.stored.release()
    report.scale_bytes = sum(_bytes(piece) for _, piece in scales)
    # where not all are read, spread over the layers
    if limit is not None and report.scale_bytes > limit:
        step = -(-report.scale_bytes // max(limit, 1))
        scales = scales[::step]
    for name, piece in scales:
        if limit is None or _bytes(piece) <= MAX_READ:
            report.scale_bytes_read += _bytes(piece)
            _read_value(name, piece, report)
    _read_weights(weights, report, limit)


def _read_weights(weights: list[tuple[str, Piece]], report: Report, limit: int | None) -> None:
    """Search plain weights for NaN and infinity: whole where the limit allows, else in chunks that lie evenly over each."""
    report.plain_bytes = sum(_bytes(piece) for _, piece in weights)
    share = 1.0 if limit is None else min(1.0, limit / max(report.plain_bytes, 1))
    # a chunk that is owed to several small weights is taken from the last of them
    owed = 0.0
    for name, piece in weights:
        size = CHUNK // DTYPES[piece.dtype].itemsize
        chunks = -(-math.prod(piece.shape) // size)
        owed += share * chunks
        take = chunks if share == 1 else min(int(owed), chunks)
        if not take:
            continue
        owed -= take
        flat = piece.read().flatten()
        bad = searched = 0
        for i in range(take):
            begin = i * chunks // take * size
            part = flat[begin : begin + size]
            bad, searched = bad + int((~part.isfinite()).sum()), searched + part.numel()
            if i % 256 == 255:
                piece.stored.release()
        piece.stored.release()
        report.plain_bytes_read += searched * flat.element_size()
        if bad:
            report.faults.append(f"{_file(piece.stored.file)}: {name} must not hold NaN or infinity, got {bad} in {searched}")


def _read_value(name: str, piece: Piece, report: Report) -> None:
    if bad := unsound(name, piece.read()):
        report.faults.append(f"{_file(piece.stored.file)}: {name} must not hold {bad}")
    piece.stored.release()


def _bytes(piece: Piece) -> int:
    return math.prod(piece.shape) * DTYPES[piece.dtype].itemsize


def _file(file: TensorFile) -> str:
    return shown(file.path.name)


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _fit(config: ModelConfig, sums: _Sums, report: Report) -> None:
    sizes = (config.o_groups, config.expert_width, config.vocab_size)
    ranks = {ways: sums.whole + sums.cut // ways for ways in WAYS if all(size % ways == 0 for size in sizes)}
    report.fits = [_fit_card(card, config, ranks, report) for card in CARDS]


def _fit_card(card: Card, config: ModelConfig, ranks: dict[int, int], report: Report) -> Fit:
    memory = card.memory * 10**9
    for ways, weights in ranks.items():
        left = memory - weights
        if left >= report.cache_bytes:
            plan = plan_cache(config, fmt=report.cache_format, memory_bytes=left)
            return Fit(card.name, card.memory, ways, weights, plan.longest)
    return Fit(card.name, card.memory, None, None, None)


def _text(report: Report) -> str:
    lines = [f"{shown(Path(report.path).name)}: {report.kind}"]
    config = report.config
    if config is not None:
        ratios = Counter(config.compress_ratios)
        experts = {"fp4": "FP4", "fp8": "FP8", "float": "not quantised"}[config.expert_dtype]
        lines += [
            f"  {config.num_layers} layers (ratio 0: {ratios[0]}, 4: {ratios[4]}, 128: {ratios[128]}),"
            f" hidden {config.hidden_size}, {config.num_heads} heads of {config.head_dim}, vocabulary {config.vocab_size}",
            f"  {config.num_experts} experts of {config.expert_width}, {config.experts_per_token} a token, {experts};"
            f" {config.num_hash_layers} hash layer{'s' * (config.num_hash_layers != 1)}; context {config.max_positions}",
            f"  {report.parameters:,} parameters, {report.tensors:,} tensors"
            f" in {len(report.shards)} file{'s' * (len(report.shards) != 1)},"
            f" {_gb(report.bytes)} of tensors",
        ]
    lines += [f"  note: {note}" for note in report.notes]
    if report.components:
        lines += ["", "bytes by component"]
        lines += [f"  {title:<28}{_gb(size):>12}" for title, size in report.components.items()]
        lines += ["", "bytes by type"]
        lines += [f"  {dtype:<28}{_gb(size):>12}" for dtype, size in report.dtypes.items()]
    if report.fits:
        lines += [
            "",
            f"fits by tensor parallelism, with one sequence of {report.cache_tokens} tokens"
            f" ({_gb(report.cache_bytes)} of {report.cache_format} cache) on every card",
            f"  {'card':<16}{'memory':>10}{'cards':>8}{'weights each':>15}{'longest context':>18}",
        ]
        for fit in report.fits:
            row = f"  {fit.card:<16}{f'{fit.memory} GB':>10}"
            if fit.cards is None or fit.weights is None:
                lines.append(row + f"{'-':>8}   not on {max(WAYS)} or fewer")
            else:
                lines.append(row + f"{fit.cards:>8}{_gb(fit.weights):>15}{fit.tokens or 0:>18,}")
        lines.append("  GB are 1e9 bytes; the few percent that a card has beyond its figure are left to workspace and driver")
        if not report.faults:
            lines += _start(report)
    lines.append("")
    for what, read, size in (
        ("scales searched for NaN", report.scale_bytes_read, report.scale_bytes),
        ("plain weights searched for NaN and infinity", report.plain_bytes_read, report.plain_bytes),
    ):
        if read < size:
            lines.append(f"{what}: {_gb(read)} of {_gb(size)} (--full: all)")
    if report.faults:
        lines += [f"{len(report.faults)} fault{'s' if len(report.faults) > 1 else ''}", *_fault_lines(report.faults)]
    else:
        lines.append("no faults")
    return "\n".join(lines)


def _start(report: Report) -> list[str]:
    """How to run it, on as many cards as the table says."""
    rest = f"generate PROMPT --checkpoint {shlex.quote(report.path)}"
    if report.cache_format != FORMATS[0]:
        rest += f" --cache {report.cache_format}"
    numbers = {fit.cards for fit in report.fits if fit.cards is not None}
    lines = [f"  start on one card: deepdecode {rest}"] if 1 in numbers else []
    if numbers - {1}:
        lines.append(f"  start on N cards: torchrun --nproc-per-node N -m deepdecode {rest}")
    return lines


# what follows the names of file and tensor, without sizes and counts
_CAUSE = re.compile(r"\b(?:must|is|has|stands|overlaps|leaves|cannot)\b.*")
_SIZES = re.compile(r"\[[\d, ]*\]|\d+")


def _cause(fault: str) -> str:
    match = _CAUSE.search(fault)
    return _SIZES.sub("#", match[0] if match else fault)


def _fault_lines(faults: list[str]) -> list[str]:
    """The faults, those of one cause together and, where they are many, the first of them alone."""
    causes: dict[str, list[str]] = {}
    for fault in faults:
        causes.setdefault(_cause(fault), []).append(fault)
    lines, told, cut = [], 0, False
    for same in causes.values():
        if len(lines) >= MAX_LINES:
            break
        told += len(same)
        # one more line says no less than "and 1 more"
        shown_of_it = len(same) if len(same) <= SHOWN + 1 else SHOWN
        lines += [f"  {fault}" for fault in same[:shown_of_it]]
        if shown_of_it < len(same):
            lines.append(f"  and {len(same) - SHOWN} more like it")
            cut = True
    if told < len(faults):
        lines.append(f"  and {len(faults) - told} more of other kinds")
        cut = True
    return [*lines, "  --json lists them all"] if cut else lines


def _gb(size: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"
