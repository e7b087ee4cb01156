"""Which launch a product takes: pure functions of the case and the card, importable without Triton or a GPU."""

from dataclasses import dataclass, replace
from functools import cache

from deepdecode.cards import Card

# programs in a grid's second and third direction
MAX_GRID = 65535


@dataclass(frozen=True)
class Case:
    """Everything a launch depends on: x [T, groups, K], groups * out rows of weights of this kind and dtype.

    dtype: of x. weight: "fp8", "fp4", "bfloat16" or "float32". scale: dtype of FP8 scales. out_dtype: of the result.
    """

    T: int
    groups: int
    out: int
    K: int
    weight: str
    dtype: str = "bfloat16"
    scale: str = "float8_e8m0fnu"
    out_dtype: str = "bfloat16"
    beside: int = 0


@dataclass(frozen=True)
class Config:
    """Programs take block_m rows for block_t tokens, block_k columns at a time.

    slices: parts of K, each a warp's; 1: all warps take all of K, for rows of their own.
    convert: E4M3 is widened by the card's own conversion.
    """

    block_m: int
    block_t: int
    block_k: int
    slices: int
    num_warps: int
    num_stages: int
    convert: bool = False


@dataclass(frozen=True)
class Gemv:
    """The launch without tensor cores: programs take block_m rows, or beside_m of the weight beside, for `tokens` tokens.

    block_k: columns at a time, 256 of them a warp's or more. pdl: weights are loaded while the launch in front still runs.
    """

    block_m: int
    beside_m: int
    block_k: int
    tokens: int
    num_warps: int
    pdl: bool = False


def supports(case: Case, card: Card) -> str | None:
    """None if the kernel covers the case on the card, else the reason why not. The dispatcher asks nothing else."""
    if card.arch < 80:
        return f"sm_{card.arch} has no bfloat16 tensor cores; sm_80 is the first that has"
    if case.dtype != "bfloat16":
        return f"x in {case.dtype}, not bfloat16"
    if case.weight == "float64":
        return "weights in float64"
    if case.out_dtype == "float64":
        return "a result in float64"
    # every tile has 16 rows or more
    if case.groups > MAX_GRID or case.out > 16 * MAX_GRID:
        return f"{case.groups} groups of {case.out} rows, more than a grid holds"
    return None


@cache
def plan(case: Case, card: Card) -> Config | Gemv:
    """Choose the launch. The same case and card give the same launch, so a captured graph and its replay agree.

    Measured on an H200, Triton 3.6, weights rotated past L2. Without tensor cores at T = 1 / 2 (us; a copy of the bytes takes):
    q_kv 3.5 / 3.6 (1.5), q_kv and rest of ratio 4 8.7 / 10.4 (6.5), q_b whole 13.7 / 19.5 (9.9), wo_a whole 10.8 / 15.6 (7.9);
    that took a step of the tp8 slice from 3.66 to 3.05 ms. At T = 4 tensor cores are as fast, and faster for q_b.
    With them at T = 1 / 16 / 64: q_kv 6.2 / 8.3 / 14.2; q_b whole 14.6 / 16.8, of 8 ranks 6.6 / 8.3 / 16.7 (3.0); wo_a whole
    13.4 / 16.7; head whole 242 / 249 (249). Rows for each warp instead of slices of K save q_b 7 at T = 16. Started before the
    launch in front has ended, these take longer (a step of 16 tokens 9.57 instead of 9.44 ms), so they are not. The card's
    conversion of E4M3 takes a step of the tp8 slice from 5.92 to 5.81 ms at 16 tokens, from 10.64 to 10.37 at 64.
    """
    if few := _few(case, card):
        return few
    tile = _tile(case, card)
    return replace(tile, convert=True) if case.weight == "fp8" and card.arch >= 89 else tile


def _few(case: Case, card: Card) -> Gemv | None:
    """The launch for so few tokens that tensor cores cost more than they save, if there is one."""
    # E4M3 is widened by an instruction that sm_89 is the first to have; rows of a tile share their scales
    widened = case.weight == "bfloat16" or (case.weight == "fp8" and card.arch >= 89)
    if case.T > 2 or not widened or case.K % 128 or not 256 <= case.K <= 16384 or (case.groups > 1 and case.out % 16):
        return None
    # for two tokens of 32 MB and more, twice the instructions of a weight weigh more than an early start (a dp8ep8 step of two
    # tokens a rank takes 6.96 ms instead of 7.47 on an H200)
    if case.T == 2 and case.weight == "fp8" and case.groups * case.out * case.K >= 1 << 25:
        return None
    block_k = min(4096, 1 << (case.K - 1).bit_length())
    rows = 1 if case.weight == "fp8" else 2
    tokens = 1 if case.T == 1 else 2
    block_m = max(1, min(16, 32768 // block_k) // rows // tokens)
    warps = max(1, min(8 // tokens, block_k // 256))
    return Gemv(block_m, max(1, block_m // 2), block_k, tokens, warps, pdl=card.arch >= 90)


def _beside(case: Case, card: Card, block_k: int) -> Config:
    """The launch of tiles for a weight and one beside it.

    Past 16 tokens a program's 4096 columns take 14000 instructions of a warp if its rows are 64, and that long whatever the
    bytes; in tiles of 16 rows each warp has a quarter of the columns. They win where one wave of programs holds them: q_kv and
    rest at 24 and 32 tokens take 16.5 us instead of 21.7 (ratio 4) and 15.5 instead of 21.3 (ratio 128) on an H200, Triton 3.6,
    past L2. Two waves of 16 tokens each take 21.5 (ratio 4), and at 64 tokens such tiles 23.5 or more where these take 21.8.
    """
    tiles = -(-case.out // 16) + -(-case.beside // 16)
    if case.T <= 16:
        return Config(16, 8 if case.T <= 8 else 16, block_k, slices=4, num_warps=4, num_stages=3)
    # so many programs fit an SM by their tiles in shared memory, 64 KB with 16 tokens and 96 KB with 32
    for block_t, resident in ((16, card.shared // 66), (32, card.shared // 98)):
        if case.T <= 32 and tiles * -(-case.T // block_t) <= resident * card.sms:
            return Config(16, block_t, block_k, slices=4, num_warps=4, num_stages=3)
    return Config(64, 32, block_k, slices=1, num_warps=4, num_stages=3)


def _tile(case: Case, card: Card) -> Config:
    rows = case.out * case.groups
    stages = 3 if case.weight == "float32" else 4
    block_k = 64 if case.weight == "float32" else 128
    if case.beside:
        return _beside(case, card, block_k)
    if case.T > 16:
        if rows <= 2048:
            # tiles of tokens share the few rows in L2
            return Config(16, 16, block_k, slices=4, num_warps=4, num_stages=3)
        if case.T <= 32 and rows < 8192 and case.K > 4096 and case.weight == "fp8":
            # wo_b whole: 64 rows are 64 programs, on half of the SMs; 19.5 us instead of 36.0
            return Config(16, 32, block_k, slices=4, num_warps=4, num_stages=3)
        block_t = 32 if case.T <= 32 or rows < 8192 else 64
        return Config(64, block_t, block_k, slices=1, num_warps=4, num_stages=stages if block_t == 32 else 3)
    block_t = 8 if case.T <= 8 else 16
    if rows >= 65536 or (block_t == 16 and rows >= 8192 and case.K < 2048):
        return Config(64, block_t, block_k, slices=1, num_warps=4, num_stages=stages)
    if case.K < 2048:
        if rows >= 32768:
            return Config(32, block_t, block_k, slices=2, num_warps=2, num_stages=2)
        return Config(16, block_t, block_k, slices=2, num_warps=2, num_stages=3)
    return Config(16 if rows < 8192 or block_t == 8 else 32, block_t, block_k, slices=4, num_warps=4, num_stages=3)
