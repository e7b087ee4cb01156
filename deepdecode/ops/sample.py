"""Next tokens from logits: greedy, or by temperature and nucleus, each row by its own seed and position alone."""

import torch

from deepdecode.ops._check import FLOATS, expect, readable

# odd 64-bit multipliers as signed numbers: of the splitmix64 stream, of a second stream for positions, and of its finaliser
SEED_STEP, POSITION_STEP = 0x9E3779B97F4A7C15 - 2**64, 0xD1B54A32D192ED03 - 2**64
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# one bit fewer than a float64 holds, so that u * total < total also after rounding
UNIFORM_BITS = 52


def uniform_ref(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [T] in [0, 1): a pure function of each row's seed and position.

    The splitmix64 finaliser over the seed, and again over that plus the position, both stepped by odd constants:
    int64 arithmetic that wraps, the same on every device. The top 52 bits are the number.
    """
    mixed = _finalise(_finalise(seeds.long() * SEED_STEP) + positions.long() * POSITION_STEP)
    return _shift_right(mixed, 64 - UNIFORM_BITS).double() * 2.0**-UNIFORM_BITS


def _finalise(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """The logical shift; torch's own keeps the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def nucleus_ref(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """probs with all but the nucleus at 0: the most probable tokens up to the one that brings their sum to top_p.

    Of equally probable tokens the lower id is taken first.
    """
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = ordered * (before < top_p[:, None])
    return torch.zeros_like(probs).scatter(1, ids, kept)


def sample_ref(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """int64 [T]: where the cumulated probabilities, in the order of token ids, pass the row's uniform number."""
    greedy = temperature == 0
    # the largest becomes 0 before the division: a tiny temperature then gives 0 and -inf, never NaN
    centred = logits - logits.amax(-1, keepdim=True)
    probs = (centred / temperature.masked_fill(greedy, 1.0)[:, None]).softmax(-1)
    # a CPU skips the sort where no row has a nucleus; the result is the same
    if not readable(logits) or bool((top_p < 1).any()):
        probs = torch.where((top_p < 1)[:, None], nucleus_ref(probs, top_p), probs)
    cumulated = probs.cumsum(-1)
    goal = uniform_ref(seeds, positions)[:, None] * cumulated[:, -1:]
    drawn = torch.searchsorted(cumulated, goal, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return torch.where(greedy, logits.argmax(-1), drawn)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token for each row. What a row gives depends on nothing outside it, so runs repeat and batches change nothing.

    Args:
        logits: [T, V] bfloat16, float32 or float64, V > 0. -inf is never chosen.
        temperature: float32 or float64 [T], finite. 0: the largest logit, ties to the lower id. Else logits are divided
            by it.
        top_p: float32 or float64 [T] in (0, 1]: sample among the most probable tokens, up to and with the one that
            brings their sum to top_p. 1: among all.
        seeds: int64 [T].
        positions: int32 or int64 [T], the position of the token to be made; with the seed it fixes the random number.

    Returns:
        int64 [T]. T == 0 gives an empty tensor.

    Raises:
        ValueError: an argument has another shape, dtype or device. On a CPU also: a row of logits with a NaN or +inf or
            only -inf, a temperature below 0 or not finite, top_p outside (0, 1]. On a GPU, where looking would make the
            host wait, such a row gives some token in [0, V).
    """
    expect("sample: logits", logits, ("T", "V"), FLOATS, logits.device, contiguous=False)
    T, V = logits.shape
    if V == 0:
        raise ValueError(f"sample: logits must have at least one column, got {list(logits.shape)}")
    expect("sample: temperature", temperature, (T,), FLOATS[1:], logits.device, contiguous=False)
    expect("sample: top_p", top_p, (T,), FLOATS[1:], logits.device, contiguous=False)
    expect("sample: seeds", seeds, (T,), torch.int64, logits.device, contiguous=False)
    expect("sample: positions", positions, (T,), (torch.int32, torch.int64), logits.device, contiguous=False)
    if T == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    if readable(logits):
        _expect_values("temperature must be finite and >= 0", temperature, (temperature >= 0) & temperature.isfinite())
        _expect_values("top_p must be in (0, 1]", top_p, (top_p > 0) & (top_p <= 1))
        largest = logits.amax(-1)
        _expect_values("the largest logit must be finite", largest, largest.isfinite())
    # float64: over 129280 tokens a float32 sum would lose those of small probability
    return sample_ref(logits.double(), temperature.double(), top_p.double(), seeds, positions)


def _expect_values(what: str, values: torch.Tensor, good: torch.Tensor) -> None:
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise ValueError(f"sample: {what} in every row, got {values[row].item()} in row {row}")
