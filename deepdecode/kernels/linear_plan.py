"""Which launch a product takes: pure functions of the case and the card, importable without Triton or a GPU."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Config:
    """Programs take block_m rows for block_t tokens, block_k columns at a time.

    slices: parts of K, each a warp's; 1: all warps take all of K, for rows of their own.
    """

    block_m: int
    block_t: int
    block_k: int
    slices: int
    num_warps: int
    num_stages: int


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
def plan(case: Case, card: Card) -> Config:
    """Choose the launch. The same case and card give the same launch, so a captured graph and its replay agree.

    The forms that won on an H200, Triton 3.6, weights rotated past L2 (us at T = 1 / 16 / 64; a copy of the bytes takes): q_kv
    6.2 / 8.3 / 14.2 (1.5); q_b whole 14.6 / 16.8 (9.9), of 8 ranks 6.6 / 8.3 / 16.7 (3.0); wo_a whole 13.4 / 16.7 (7.9);
    head whole 242 / 249 (249). Rows for each warp instead of slices of K cost q_kv 14.4 at T = 1, and save q_b 7 at T = 16.
    """
    rows = case.out * case.groups
    stages = 3 if case.weight == "float32" else 4
    block_k = 64 if case.weight == "float32" else 128
    if case.T > 16:
        if rows <= 2048:
            # tiles of tokens share the few rows in L2
            return Config(16, 16, block_k, slices=4, num_warps=4, num_stages=3)
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
