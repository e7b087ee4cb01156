"""Which launches the experts take: pure functions of the case and the card, importable without Triton or a GPU."""

from dataclasses import dataclass, replace
from functools import cache

from deepdecode.cards import Card
from deepdecode.kernels.linear_plan import MAX_GRID


@dataclass(frozen=True)
class Case:
    """Everything a launch depends on: T tokens of top_k experts each, E experts here of width I, a shared one, C channels.

    dtype: of x. weight, shared: "fp8", "fp4", "bfloat16" or "float32". expert_weights: dtype of the routing weights.
    shared_rows: tokens that meet the shared expert; None: all.
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
    shared_rows: int | None = None

    @property
    def few_shared(self) -> bool:
        """Whether the shared expert's tokens are no more than the columns of one product."""
        return (self.T if self.shared_rows is None else self.shared_rows) <= 8


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
    shared_t = 8 if case.few_shared else 16
    many = Tile(64, 128, slices=1, num_warps=4, num_stages=3)
    # a rank's eighth of few experts would not fill the card: finer tiles, and K among the warps
    tiles = min(case.T * case.top_k, case.E) * -(-2 * case.I // 64)
    w13 = many if tiles >= 2 * card.sms else Tile(16, 128, slices=4, num_warps=4, num_stages=3)
    # a narrow expert's rows end before a program has found its tokens: it takes more of them
    turns = 8 if case.I <= 512 and tiles >= 2 * card.sms else 1
    return Config(w13, many, block_t, shared_t, turns)


@dataclass(frozen=True)
class Stage:
    """A launch of the streaming kernel: what a program's warps share, slices of K times 16 * warps rows; steps that a ring in
    shared memory holds (that registers hold, of the shared expert's weights: shared_depth); programs of an SM, which stay;
    registers of a thread.
    """

    slices: int
    warps: int
    depth: int = 4
    shared_depth: int = 1
    per_sm: int = 3
    registers: int = 168


@dataclass(frozen=True)
class Stream:
    """block_t pairs of an expert, 2, 4 or 8, or shared_t tokens of the shared one, 8 or 16, at a time.

    An expert of more pairs stands as several. cost: of a tile of the shared expert, where one of a routed expert is 1.
    """

    w13: Stage
    w2: Stage
    block_t: int = 4
    shared_t: int = 8
    cost: int = 4
    pdl: bool = True


@cache
def plan_stream(case: Case, card: Card) -> Stream | None:
    """The launches of the streaming kernels; None where they do not cover the case or are not known to be faster.

    Measured on an H200, Triton 3.6, with other routes in each call, an eighth of 256 experts at 16 / 32 tokens and 32 of 256
    whole: 63 / 95 and 73 / 108 us, where steps ahead in registers, and all of 8 tokens in shared memory, took 79 / 122 and
    98 / 151. Whole experts take rows of their own for each warp where a program has many tiles, and slices where it has few.
    """
    if case.weight != "fp4" or case.shared != "fp8" or card.arch != 90 or case.T * case.top_k > 16 * case.E:
        return None
    slices, rows, small = Stage(4, 1), Stage(1, 4), Stage(1, 2)
    tiles = min(case.T * case.top_k, case.E) * case.I // 64
    w13 = (rows, slices) if tiles >= 6 * rows.per_sm * card.sms else (slices, rows)
    widths = (case.I, case.shared_I)
    first = _fitting((*w13, small), case.C, case.C, widths, 1)
    second = _fitting(
        (Stage(2, 2, per_sm=4, registers=128), replace(rows, per_sm=4, registers=128), small), *widths, (case.C,), 2
    )
    if first is None or second is None:
        return None
    if case.T > 128:
        # most experts have more than four tokens; twice as many in shared memory leave room for fewer programs
        return Stream(replace(first, per_sm=2), replace(second, per_sm=3), block_t=8, shared_t=16)
    return Stream(first, second, shared_t=8 if case.few_shared else 16, cost=3 if case.few_shared else 4)


@dataclass(frozen=True)
class Few:
    """Launches of a few tokens, each pair for itself.

    ahead: steps of the shared expert's first weights that are on their way at the start. turns: one program a tile takes all
    pairs in turn, most of which are other ranks'; else each pair has its own. block_c: channels of a program of the second
    launch, whose warps have `together` experts at a time.
    """

    ahead: int
    turns: bool
    block_c: int
    together: int


@cache
def plan_few(case: Case, card: Card) -> Few | None:
    """The launches of one token; None where they do not cover the case or are not known to be faster.

    Measured on an H200, Triton 3.6, one token, other routes in each call: an eighth of 256 experts 13.2 us, 17.2 without tensor
    cores; 32 of 256 whole 19.7, 34.2 with the streaming kernels. 32 channels a program instead of 16 cost 1.5 us a layer.
    """
    if case.weight != "fp4" or case.shared != "fp8" or card.arch != 90 or case.T > 1 or case.shared_rows not in (None, case.T):
        return None
    # eight warps have slices of 128 columns or more, which a thread's registers hold
    if case.C not in (1024, 2048, 4096) or case.I not in (256, 512, 1024, 2048) or case.shared_I not in (256, 512, 1024, 2048):
        return None
    together = min(8, 2048 // case.I)
    if case.I <= 512:
        return Few(ahead=2, turns=False, block_c=16, together=together)
    # most of a token's experts are other ranks'; where all are here, these launches have not been measured
    return Few(ahead=4, turns=True, block_c=16, together=together) if case.E < 128 else None


def _fitting(stages: tuple[Stage, ...], K: int, shared_K: int, rows: tuple[int, ...], each: int) -> Stage | None:
    """The first launch whose steps divide the columns, and its tiles, each * 16 * warps rows, so many rows.

    A step's place in the ring is a constant: the steps of a tile are a multiple of the places, or divide them.
    """
    for form in stages:
        for depth in (form.depth, 3, 2):
            steps = K // (128 * form.slices)
            if K % (128 * form.slices) or shared_K % (128 * form.slices * form.shared_depth) or steps < min(2, form.slices):
                continue
            if max(steps, depth) % min(steps, depth) == 0 and not any(count % (16 * each * form.warps) for count in rows):
                return replace(form, depth=depth)
    return None
