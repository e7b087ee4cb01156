"""The ladder without a GPU: what can be checked and counted there, and nothing that could be taken for a time.

The embedded tiny model decodes on the reference table. Attention kernels run interpreted, in float16, on what its layers hand
to sparse_attn; the operations that a step dispatches are counted by entry of the table. Everything else is "not run".
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from deepdecode.ladder.gates import PROMPTS, Gate, LogitsGate
from deepdecode.ladder.instruments import Dispatched
from deepdecode.ladder.interpreted import Calls
from deepdecode.ladder.table import size
from deepdecode.ops.reference import REFERENCE
from deepdecode.ops.table import Ops
from deepdecode.tiny import CONFIG
from deepdecode.trace.render import Bullets, Doc, Table

NOT_RUN = "not run"
SAID = "no CUDA device: nothing was timed"
Row = dict[str, Any]


def run_offline(progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Check and count; a document in the form of the result files, with no time in it."""
    gate = LogitsGate()
    progress(1, 4)
    reference = gate(REFERENCE)
    calls = Calls(REFERENCE)
    counter = Dispatched()
    progress(2, 4)
    gate.step(calls.table)
    counted = counter.table(REFERENCE)
    with counter:
        logits = gate.step(counted)
        ones, rows = torch.ones(len(logits)), torch.arange(len(logits))
        counted.sample(logits, ones, ones, rows, rows)
    progress(3, 4)
    checks = [*(("all", gate.name, _told(gate)) for gate in reference), *_kernel_checks(calls)]
    return {
        "device": {"name": "CPU"},
        "versions": {"torch": torch.__version__, "triton": _triton_version()},
        "model": "embedded tiny model",
        "timed": False,
        "checks": [{"op": op, "implementation": name, **told} for op, name, told in checks],
        "dispatched": {name: counter.counts[name] for name in (*_entries(), *sorted(set(counter.counts) - set(_entries())))},
    }


def offline_doc(document: dict[str, Any], rungs: list[str]) -> Doc:
    checks = tuple(
        (
            check["op"],
            check["implementation"],
            size(check["error"]) if "error" in check else "failed" if check["passed"] is False else NOT_RUN,
            f"{check['bound']:.2e}" if "error" in check else "-",
            check["note"],
        )
        for check in document["checks"]
    )
    counts = document["dispatched"]
    launches = (*((name, str(count)) for name, count in counts.items()), ("all", str(sum(counts.values()))))
    heads = ("rung", "gates", "tokens/s", "TPOT", "launches", "GPU time", "floor")
    note = "Operations that torch would launch one by one on a GPU; views do not count."
    return Doc(
        f"Ladder, {document['model']} on the {document['device']['name']}",
        (
            Table("Checks", ("entry", "implementation", "error", "bound", "on"), "llrrl", checks),
            Table("Dispatched operations of a step, by entry of the table", ("entry", "operations"), "lr", launches, note),
            Table("The campaign", heads, "l" * len(heads), tuple((name, *[NOT_RUN] * 6) for name in rungs)),
            Bullets(
                "How", (SAID, f"a step is of {len(PROMPTS)} sequences and {CONFIG.num_layers} layers, on the reference table")
            ),
        ),
    )


def _entries() -> list[str]:
    return [f.name for f in fields(Ops)]


def _told(gate: Gate) -> Row:
    return {name: value for name, value in gate.told().items() if name != "name"}


def _kernel_checks(calls: Calls) -> list[tuple[str, str, Row]]:
    """Each kernel on the captured calls. In a process of its own: Triton chooses to interpret when it is first imported."""
    if _triton_version() is None:
        return [("kernels", "all", {"passed": None, "note": "Triton is not installed"})]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calls.pt"
        torch.save(calls.pack(), file)
        command = [sys.executable, "-m", "deepdecode.ladder.interpreted", str(file)]
        ran = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    if ran.returncode:
        why = ran.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        return [("kernels", "all", {"passed": False, "note": why[0][:200]})]
    found = []
    for op, name, error, bound, note in json.loads(ran.stdout):
        told = {"passed": False, "note": note} if error is None else _told(Gate(name, error, bound, note))
        found.append((op, name, told))
    return found


def _triton_version() -> str | None:
    return version("triton") if importlib.util.find_spec("triton") else None
