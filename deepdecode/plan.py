"""`deepdecode plan`: which launch sparse attention takes on a card, what it moves and how long it should take.

Pure arithmetic on the card table and the shipped tuning table: neither torch nor a GPU is needed.
"""

import re
from dataclasses import asdict
from typing import Any

from deepdecode import support
from deepdecode.cards import CARDS, Card, find_card
from deepdecode.kernels.attention_plan import TUNED_CARD, Case, Config, explain, floor_us

SCHEMA = 1
FORMATS = ("fp8_584", "bf16", "f32")
# the second and third number of a launch's grid end here, and the search for the best split stays quick
MAX_BATCH, MAX_KEYS = 65535, 1 << 20


def read_case(
    *, heads: int, batch: int, keys: str, fmt: str = "fp8_584", page_size: str = "64", deterministic: bool = False
) -> Case:
    """The case that words of a command line ask for; "A+B" is the window cache and the extra cache, "A" both (keys: no extra).

    Raises:
        ValueError: a word means nothing, or a size that the op refuses.
    """
    window_keys, extra_keys = _numbers("keys", keys, 0, MAX_KEYS, "128 or 128+512", alone=0)
    window_page, extra_page = _numbers("page-size", page_size, 1, MAX_KEYS, "64 or 64+2", alone=None)
    formats = fmt.split("+")
    if not 1 <= len(formats) <= 2 or not set(formats) <= set(FORMATS):
        raise ValueError(f"plan: fmt must be one of {', '.join(FORMATS)}, or two of them joined by +, got {fmt!r}")
    if not 1 <= heads <= 128:
        raise ValueError(f"plan: heads must be 1 to 128, got {heads}")
    if not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"plan: batch must be 1 to {MAX_BATCH}, got {batch}")
    return Case(
        T=batch,
        H=heads,
        window_keys=window_keys,
        extra_keys=extra_keys,
        window_fmt=formats[0],
        extra_fmt=formats[-1] if extra_keys else None,
        window_page=window_page,
        extra_page=extra_page if extra_keys else window_page,
        deterministic=deterministic,
    )


def _numbers(name: str, text: str, low: int, high: int, example: str, *, alone: int | None) -> tuple[int, int]:
    """One or two numbers; `alone` is the second where only one is given, None: the first once more."""
    found = re.fullmatch(r"(\d{1,9})(?:\+(\d{1,9}))?", text)
    if found:
        first = int(found[1])
        second = int(found[2]) if found[2] else (first if alone is None else alone)
        if low <= min(first, second) and max(first, second) <= high:
            return first, second
    raise ValueError(f"plan: {name} must be numbers from {low} to {high} such as {example}, got {text!r}")


def find_cards(arch: str | None, card: str | None) -> list[Card]:
    """The card of a name, the first card of an arch, or every card of the table where neither is given.

    Raises:
        ValueError: the table has no such card or arch, or the card is of another arch.
    """
    archs = {f"sm_{known.arch}": known for known in reversed(CARDS)}
    word = None if arch is None else "sm_" + re.sub(r"^sm_?", "", arch.strip().lower())
    if word is not None and word not in archs:
        raise ValueError(f"plan: arch must be one of {', '.join(reversed(archs))}, got {arch!r}")
    if card is None:
        return list(CARDS) if word is None else [archs[word]]
    try:
        found = find_card(card)
    except ValueError:
        names = ", ".join(known.name for known in CARDS)
        raise ValueError(f"plan: card must be one of {names}, got {card!r}") from None
    if word not in (None, f"sm_{found.arch}"):
        raise ValueError(f"plan: card must be of {word}, got {found.name}, which is sm_{found.arch}")
    return [found]


def plan_case(case: Case, card: Card, *, lse: bool = False) -> dict[str, Any]:
    """What `deepdecode plan --json` says of one card.

    Times in microseconds, sizes in bytes. With `supported` false there is a `reason` and no launch: the reference runs.
    """
    told = explain(case, card)
    row: dict[str, Any] = {"card": card.name, "arch": card.arch, "sms": card.sms, "supported": told["supported"]}
    if not told["supported"]:
        return row | {"reason": told["reason"]}
    config = Config(**told["config"])
    launch = {name: getattr(config, name) for name in ("kernel", "block_h", "block_n", "num_warps")}
    form = support.compiled_form("attention", card.arch, **launch, fmt=case.window_fmt, split=config.splits > 1)
    # lse: a float32 for each token and head
    nbytes = told["bytes"] + (4 * case.T * case.H if lse else 0)
    bytes_us = nbytes / card.bandwidth / 1e6
    floor = max(bytes_us, floor_us(case, card))
    predicted, prediction = told["predicted_us"], f"scaled from the {TUNED_CARD}, never measured here"
    if TUNED_CARD in card.name:
        prediction = "fitted to measurements of this card"
    elif predicted < floor:
        # the model knows the card's SMs and not its bandwidth
        predicted, prediction = floor, f"the floor: the model of the {TUNED_CARD} gives less"
    return row | {
        "config": asdict(config),
        "grid": list(told["grid"]),
        "merge_grid": [case.T, case.H] if config.splits > 1 else None,
        "waves": told["waves"],
        "keys_per_split": told["keys_per_split"],
        "shared_bytes": form["shared"] if form else told["shared_bytes"],
        "shared_limit": card.shared << 10,
        "registers": form and form["registers"],
        "local_bytes": form and form["local"],
        "workspace_bytes": told["workspace_bytes"],
        "bandwidth": card.bandwidth,
        "bytes": nbytes,
        "flops": told["flops"],
        "bytes_us": round(bytes_us, 3),
        "floor_us": round(floor, 3),
        "bound": "bytes" if floor == bytes_us else "operations",
        "predicted_us": round(predicted, 2),
        "prediction": prediction,
        "support": support.status("attention", card.arch)["status"],
    }


def plan_json(case: Case, plans: list[dict[str, Any]], *, lse: bool = False) -> dict[str, Any]:
    return {"schema": SCHEMA, "op": "attention", "case": asdict(case) | {"lse": lse}, "plans": plans}


def plan_text(case: Case, plans: list[dict[str, Any]], *, lse: bool = False) -> str:
    """One card in full, several as a table."""
    title = f"attention: {_case_words(case, lse)}"
    if len(plans) > 1:
        return "\n".join([title, "", *_table(plans)])
    told = plans[0]
    lines = [("card", f"{told['card']}: sm_{told['arch']}, {told['sms']} SMs")]
    if told["supported"]:
        lines += _launch_lines(case, told)
    else:
        lines.append(("supported", f"no: {told['reason']}; the reference runs"))
    return "\n".join([title, "", *(f"  {name:<10} {value}" for name, value in lines)])


def _case_words(case: Case, lse: bool) -> str:
    keys = f"{case.window_keys}+{case.extra_keys}" if case.extra_keys else f"{case.window_keys}"
    formats = " and ".join(dict.fromkeys(fmt for fmt in (case.window_fmt, case.extra_fmt) if fmt))
    pages = "+".join(map(str, dict.fromkeys((case.window_page, case.extra_page))))
    words = [f"batch {case.T}, {case.H} heads, {keys} keys, {formats} rows, pages of {pages}"]
    return ", ".join(words + ["deterministic"] * case.deterministic + ["with lse"] * lse)


def _launch_lines(case: Case, told: dict[str, Any]) -> list[tuple[str, str]]:
    config = told["config"]
    splits = config["splits"]
    parts = f"{splits}, of {told['keys_per_split']} keys at most" if splits > 1 else "none: one program reads all keys of a row"
    merge = ", merge " + " x ".join(map(str, told["merge_grid"])) if told["merge_grid"] else ""
    if told["registers"] is None:
        registers = "not known: this form of the kernel was not compiled for the shipped table"
    else:
        beside = f"and {told['local_bytes']} B of local memory" if told["local_bytes"] else "and no local memory"
        registers = f"{told['registers']} {beside} a thread"
    bytes_alone = f"the bytes at {told['bandwidth']} TB/s"
    if told["bound"] != "bytes":
        bytes_alone = f"the operations; {bytes_alone} take {told['bytes_us']:.2f} us"
    return [
        ("supported", f"yes ({told['support']})"),
        ("kernel", f"{config['kernel']}: {config['block_h']} heads and tiles of {config['block_n']} keys a program"),
        ("warps", f"{config['num_warps']} a program" + (f", {config['merge_warps']} in the merge" if splits > 1 else "")),
        ("splits", parts),
        ("grid", " x ".join(map(str, told["grid"])) + " (head blocks x tokens x splits)" + merge),
        ("waves", f"{told['waves']:.2f}"),
        ("shared", f"{told['shared_bytes']:,} B of {told['shared_limit']:,}"),
        ("registers", registers),
        ("workspace", f"{told['workspace_bytes']:,} B"),
        ("work", f"{told['bytes']:,} B, {told['flops']:,} operations"),
        ("floor", f"{told['floor_us']:.2f} us, from {bytes_alone}"),
        ("predicted", f"{told['predicted_us']:.2f} us warm, {told['prediction']}"),
    ]


def _table(plans: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"  {'card':<14} {'arch':<7} {'launch':<18} {'grid':<14} {'waves':>6} {'floor us':>9} {'predicted':>10}  prediction"
    ]
    for told in plans:
        start = f"  {told['card']:<14} sm_{told['arch']:<4} "
        if not told["supported"]:
            lines.append(f"{start}reference: {told['reason']}")
            continue
        config = told["config"]
        launch = f"{config['kernel']} {config['block_h']} x {config['block_n']}"
        grid = " x ".join(map(str, told["grid"]))
        times = f"{told['waves']:>6.2f} {told['floor_us']:>9.2f} {told['predicted_us']:>10.2f}"
        lines.append(f"{start}{launch:<18} {grid:<14} {times}  {told['prediction']}")
    return lines
