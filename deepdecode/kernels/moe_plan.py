"""Which launches the experts take: pure functions of the case and the card, importable without Triton or a GPU."""

from dataclasses import dataclass
from functools import cache

from deepdecode.cards import Card


@dataclass(frozen=True)
class Case:
    """Everything a launch depends on: T tokens of top_k experts each, E experts here of width I, a shared one, C channels.

    dtype: of x. weight, shared: "fp8", "fp4", "bfloat16" or "float32". expert_weights: dtype of the routing weights.
    """

    T: int
    top_k: int
    E: int
    C: int
    I: int
    shared_I: int
    weight: str = "fp4"
    shared: str = "fp8"
    dtype: str = "bfloat16"
    expert_weights: str = "float32"


@dataclass(frozen=True)
class Config:
    """w13 takes block_i columns of h and block_k of K at a time, w2 block_m and block_k2; block_t pairs, shared_t tokens.

    slices: parts of K, each a warp's; 1: all warps take all of K, for rows of their own.
    pdl: each kernel starts while the one before it ends.
    """

    block_i: int
    block_k: int
    block_m: int
    block_k2: int
    block_t: int
    shared_t: int
    slices: int
    num_warps: int
    num_stages: int
    pdl: bool = False


def supports(case: Case, card: Card) -> str | None:
    """None if the kernels cover the case on the card, else the reason why not. The dispatcher asks nothing else."""
    if card.arch < 80:
        return f"sm_{card.arch} has no bfloat16 tensor cores; sm_80 is the first that has"
    if case.dtype != "bfloat16":
        return f"x in {case.dtype}, not bfloat16"
    if "float64" in (case.weight, case.shared):
        return "weights in float64"
    if case.expert_weights != "float32":
        return f"routing weights in {case.expert_weights}, not float32"
    if not case.T or not case.E or not case.I or not case.shared_I:
        return "no token, no expert or an expert of width 0"
    return None


@cache
def plan(case: Case, card: Card) -> Config:
    """Choose the launches. The same case and card give the same ones, so a captured graph and its replay agree."""
    # tokens that an expert meets on average, if all are as likely
    block_t = 8 if case.T * case.top_k <= 4 * case.E else 16
    shared_t = next((size for size in (8, 16) if size >= case.T), 32)
    return Config(32, 128, 64, 128, block_t, shared_t, slices=1, num_warps=4, num_stages=4)
