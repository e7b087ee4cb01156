"""The cards that plans and checkpoints are reckoned for: vendor figures unless marked."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """One GPU.

    arch: 90 for sm_90. bandwidth: of its memory, TB/s. l2: MB. shared: KB that one CTA can have. memory: GB.
    """

    name: str
    arch: int
    sms: int
    bandwidth: float
    l2: int
    shared: int
    memory: int


CARDS = (
    Card("A100-80", 80, 108, 2.04, 40, 163, 80),
    Card("RTX 3090", 86, 82, 0.94, 6, 99, 24),
    Card("L40S", 89, 142, 0.86, 96, 99, 48),
    Card("RTX 4090", 89, 128, 1.01, 72, 99, 24),
    Card("H100 SXM", 90, 132, 3.35, 50, 227, 80),
    # bandwidth: 4.3 TB/s was measured
    Card("H200", 90, 132, 4.8, 60, 227, 141),
    Card("B200", 100, 148, 8.0, 126, 227, 180),
    Card("RTX PRO 6000", 120, 188, 1.79, 128, 99, 96),
    Card("RTX 5090", 120, 170, 1.79, 96, 99, 32),
    Card("DGX Spark GB10", 121, 48, 0.27, 24, 99, 128),
)


def find_card(name: str) -> Card:
    """The card of this name, however it is spelled ("rtx-4090", "H100"), or the first of an arch ("sm_90").

    Raises:
        ValueError: no card, or several, answer to the name.
    """
    word = _plain(name)
    archs = [card for card in CARDS if word == f"sm{card.arch}"]
    if archs:
        return archs[0]
    exact = [card for card in CARDS if word == _plain(card.name)]
    near = exact or [card for card in CARDS if word and word in _plain(card.name)]
    if len(near) != 1:
        got = "several" if near else "none"
        raise ValueError(
            f"find_card: name must be one of {', '.join(card.name for card in CARDS)}, got {name!r}, which is {got}"
        )
    return near[0]


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
