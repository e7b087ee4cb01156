"""Which launches the experts take: pure functions of the case and the card, importable without Triton or a GPU."""

from dataclasses import dataclass
from functools import cache

from deepdecode.cards import Card
from deepdecode.kernels.linear_plan import MAX_GRID


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
class Tile:
    """What a program of one kernel takes: `rows` of the weight (of w13: half of the gate, half of up), block_k columns a step.

    slices: parts of K, each a warp's; 1: all warps take all of K, for rows of their own.
    """

    rows: int
    block_k: int
    slices: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Config:
    """block_t pairs of an expert, or shared_t tokens of the shared one, at a time. w2_turns: tiles of rows of a w2 program."""

    w13: Tile
    w2: Tile
    block_t: int
    shared_t: int
    w2_turns: int = 1


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
    if -(-case.T // 16) + min(case.T * case.top_k, case.E) > MAX_GRID:
        return f"{case.T} tokens and {case.E} experts, more than a grid holds"
    return None


@cache
def plan(case: Case, card: Card) -> Config:
    """Choose the launches. The same case and card give the same ones, so a captured graph and its replay agree.

    The tiles that won on an H200, Triton 3.6, V4-Flash's experts whole, other routes in each call: 60 / 525 / 1360 us at
    T = 1 / 16 / 64, where a copy of the bytes takes 25 / 260 / 643; slices of K instead of rows cost 1440 at T = 64. With an
    eighth of each expert, in a step of 32 tokens: 197 us, where a copy takes 55. The busiest part is integer arithmetic.
    """
    # tokens that an expert meets on average, if all are as likely
    block_t = 8 if case.T * case.top_k <= 4 * case.E else 16
    shared_t = 8 if case.T <= 8 else 16
    many = Tile(64, 128, slices=1, num_warps=4, num_stages=3)
    # a rank's eighth of few experts would not fill the card: finer tiles, and K among the warps
    tiles = min(case.T * case.top_k, case.E) * -(-2 * case.I // 64)
    w13 = many if tiles >= 2 * card.sms else Tile(16, 128, slices=4, num_warps=4, num_stages=3)
    # a narrow expert's rows end before a program has found its tokens: it takes more of them
    turns = 8 if case.I <= 512 and tiles >= 2 * card.sms else 1
    return Config(w13, many, block_t, shared_t, turns)


@dataclass(frozen=True)
class Stage:
    """A launch of the streaming kernel: what a program's warps share, slices of K times 16 * warps rows; steps under way
    ahead (of the shared expert's weights: shared_depth); programs of an SM, which stay; registers of a thread.
    """

    slices: int
    warps: int
    depth: int = 2
    shared_depth: int = 1
    per_sm: int = 2
    registers: int = 128
    ahead: int = 0


@dataclass(frozen=True)
class Stream:
    """block_t pairs of an expert, or shared_t tokens of the shared one, at a time.

    cost: of a tile of the shared expert, where one of a routed expert is 1.
    """

    w13: Stage
    w2: Stage
    block_t: int = 8
    shared_t: int = 8
    cost: int = 2
    pdl: bool = True


def _fits(stage: Stage, K: int, rows: int, each: int) -> bool:
    """Whether a launch's tiles divide a product of `rows` rows, `each` * 16 * warps a tile."""
    steps = 128 * stage.slices
    return K % (steps * stage.depth) == 0 and K % (steps * stage.shared_depth) == 0 and rows % (16 * each * stage.warps) == 0


@cache
def plan_stream(case: Case, card: Card) -> Stream | None:
    """The launches of the streaming kernels; None where they do not cover the case or are not known to be faster."""
    if case.weight != "fp4" or case.shared != "fp8" or card.arch != 90 or case.T * case.top_k > 16 * case.E:
        return None
    w13 = (Stage(4, 1, per_sm=3), Stage(2, 2, per_sm=3), Stage(1, 4, per_sm=3), Stage(1, 2, 1, per_sm=4))
    w2 = (Stage(2, 2, per_sm=4), Stage(1, 8), Stage(1, 4, per_sm=4), Stage(1, 2, 1, per_sm=4))
    first = [s for s in w13 if all(_fits(s, case.C, I, 1) for I in (case.I, case.shared_I))]
    second = [s for s in w2 if all(_fits(s, I, case.C, 2) for I in (case.I, case.shared_I))]
    if not first or not second:
        return None
    return Stream(first[0], second[0], shared_t=8 if case.T <= 8 else 16)
