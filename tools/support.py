"""Write deepdecode/data/support.json: which launches compile for which arch, and which archs results/ has runs of.

    python tools/support.py              # compile every launch that a default plan returns (minutes), and read results/
    python tools/support.py --results    # read results/ only

A result file counts for the arch of its device where one of its rows of the op, by deepdecode, has a time and no error. A row
with `ptx_arch` counts for that arch as run through the driver's compiler.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from deepdecode.cards import CARDS
from deepdecode.kernels.attention_plan import Case, plan
from deepdecode.support import AS_PTX, MEASURED, SCHEMA, source_hash

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "deepdecode" / "data" / "support.json"
# DeepSeek-V4-Flash's key counts, the heads of a rank, and batches
KEYS = ((128, 0), (128, 512), (128, 1024), (128, 8192))
LAUNCH = ("kernel", "block_h", "block_n", "num_warps")
HEADS, TOKENS = (1, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128, 256)


def runs(op: str, results: Path = ROOT / "results") -> dict[str, list[dict[str, Any]]]:
    """Where an op ran, as result files tell it."""
    found: dict[str, dict[tuple[int, str], dict[str, Any]]] = {MEASURED: {}, AS_PTX: {}}
    for path in sorted(results.glob("*/*.json")):
        document = json.loads(path.read_text())
        device = document.get("device", {})
        for row in document.get("rows", ()):
            right = row.get("op") == op and "error" not in row
            ours = right and row.get("implementation") == "deepdecode"
            if right and "ptx_arch" in row and "rel_err" in row:
                word, arch = AS_PTX, row["ptx_arch"]
            elif ours and "us_warm" in row:
                word, arch = MEASURED, device["arch"]
            else:
                continue
            entry = {"arch": arch, "device": device["name"], "file": str(path.relative_to(results.parent))}
            found[word].setdefault((arch, device["name"]), entry)
    return {word: list(entries.values()) for word, entries in found.items()}


def launches() -> Iterator[dict[str, Any]]:
    """Every form of the attention kernel that a plan returns for the sizes above, for any card of the table.

    With them, what `deterministic` takes, and what a Hopper card runs where pages or Triton keep it from its own kernels.
    """
    seen = set()
    for card, fmt, keys, H in product(CARDS, ("fp8_584", "bf16"), KEYS, HEADS):
        cases = [Case(T, H, *keys, fmt, fmt if keys[1] else None) for T in TOKENS]
        cases.append(replace(cases[0], deterministic=True))
        if card.arch == 90:
            cases += [replace(case, gluon=False) for case in cases]
        for case in cases:
            config = plan(case, card)
            form = {"arch": card.arch, **{name: getattr(config, name) for name in LAUNCH}, "fmt": fmt}
            form["split"] = config.splits > 1
            if tuple(form.values()) not in seen:
                seen.add(tuple(form.values()))
                yield form


def compiled(form: dict[str, Any]) -> dict[str, Any]:
    """One form with what the compiler made of it: registers and bytes of local memory a thread, bytes of shared memory."""
    from deepdecode.kernels import attention
    from deepdecode.kernels.attention_plan import Config
    from deepdecode.testing.compiled import compile_kernel

    config = Config(
        kernel=form["kernel"],
        block_h=form["block_h"],
        block_n=form["block_n"],
        splits=4 if form["split"] else 1,
        split_keys=0,
        num_warps=form["num_warps"],
        align=16,
        pdl=form["arch"] >= 90,
        merge_warps=2,
        convert=form["arch"] >= 89,
    )
    types, constants = attention.compile_args(config, form["fmt"])
    kernel: Any = attention.split_kernel
    options = {"num_warps": config.num_warps, "num_stages": 1}
    if form["kernel"] != "mma":
        from deepdecode.kernels import attention_sm90

        kernel = attention_sm90.KERNELS[form["kernel"]]
        types |= {"window_shift": "i32", "extra_shift": "i32"}
        options = attention_sm90.options(config)
    names = set(kernel.arg_names)
    made = compile_kernel(
        kernel,
        {name: kind for name, kind in types.items() if name in names},
        {name: value for name, value in constants.items() if name in names},
        form["arch"],
        **options,
    )
    return form | {"registers": made.registers, "local": made.local, "shared": made.shared}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--results", action="store_true", help="keep what was compiled, read results/ again")
    if p.parse_args().results:
        document = json.loads(FILE.read_text())
        for op, known in document["ops"].items():
            known |= runs(op)
    else:
        import triton

        known: dict[str, Any] = {"source": source_hash("attention"), **runs("attention")}
        known["compiled"] = [compiled(form) for form in launches()]
        document = {"schema": SCHEMA, "command": "python tools/support.py", "triton": triton.__version__}
        document |= {"ops": {"attention": known}}
    FILE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
