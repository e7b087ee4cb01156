import pytest

from deepdecode.cards import CARDS, find_card


# what the vendors say of each card
@pytest.mark.parametrize(
    ("name", "arch", "sms", "bandwidth", "l2", "shared", "memory"),
    [
        ("A100-80", 80, 108, 2.04, 40, 163, 80),
        ("RTX 3090", 86, 82, 0.94, 6, 99, 24),
        ("L40S", 89, 142, 0.86, 96, 99, 48),
        ("RTX 4090", 89, 128, 1.01, 72, 99, 24),
        ("H100 SXM", 90, 132, 3.35, 50, 227, 80),
        ("H200", 90, 132, 4.8, 60, 227, 141),
        ("B200", 100, 148, 8.0, 126, 227, 180),
        ("RTX PRO 6000", 120, 188, 1.79, 128, 99, 96),
        ("RTX 5090", 120, 170, 1.79, 96, 99, 32),
        ("DGX Spark GB10", 121, 48, 0.27, 24, 99, 128),
    ],
)
def test_table(name, arch, sms, bandwidth, l2, shared, memory):
    card = find_card(name)
    assert (card.arch, card.sms, card.bandwidth, card.l2, card.shared, card.memory) == (
        arch,
        sms,
        bandwidth,
        l2,
        shared,
        memory,
    )
    assert len(CARDS) == 10


def test_names_however_spelled():
    assert find_card("rtx-4090").name == find_card("4090").name == "RTX 4090"
    assert find_card("h100").name == "H100 SXM"
    assert find_card("spark").name == "DGX Spark GB10"
    # an arch gives its first card
    assert [find_card(arch).name for arch in ("sm_89", "sm90", "SM_120")] == ["L40S", "H100 SXM", "RTX PRO 6000"]


@pytest.mark.parametrize(("name", "got"), [("rtx", "several"), ("V100", "none"), ("", "none"), ("sm_75", "none")])
def test_refuses(name, got):
    with pytest.raises(ValueError, match=rf"find_card: name must be one of A100-80, .*, got '{name}', which is {got}"):
        find_card(name)
