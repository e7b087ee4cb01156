"""What is known of each op's kernel on each arch: measured, run as PTX, or compiled only.

`deepdecode/data/support.json` holds the evidence. `python tools/support.py` writes it from the files in `results/` and from the
compiler; `tests/test_env.py` holds it against both.
"""

import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

SCHEMA = 1
MEASURED, AS_PTX, COMPILED, UNKNOWN = "measured", "run as PTX", "compiled only", "no evidence"
# the files that an op's compiled forms come from
_HOPPER = ("attention_sm90.py", "attention_sm90_piped.py", "attention_sm90_rows.py", "attention_sm90_wide.py")
SOURCES = {"attention": ("attention.py", *_HOPPER, "attention_codes.py", "attention_merge.py")}


@cache
def evidence() -> dict[str, Any]:
    return json.loads((files("deepdecode") / "data" / "support.json").read_text())


def status(op: str, arch: int) -> dict[str, Any]:
    """What is known of an op's kernel on an arch.

    Returns:
        status: one of the four words above, the best that holds. device: what it ran on, None where it did not run.
        forms: how many launches were compiled. local: bytes of local memory (spills, stack) a thread in the worst of them.
        current: whether what was compiled is the kernel that is installed.
    """
    known = evidence()["ops"].get(op, {})
    forms = [form for form in known.get("compiled", ()) if form["arch"] == arch]
    ran = [(word, run["device"]) for word in (MEASURED, AS_PTX) for run in known.get(word, ()) if run["arch"] == arch]
    word, device = ran[0] if ran else (COMPILED if forms else UNKNOWN, None)
    local = max((form["local"] for form in forms), default=0)
    return {"status": word, "device": device, "forms": len(forms), "local": local, "current": is_current(op)}


def compiled_form(op: str, arch: int, **launch: Any) -> dict[str, Any] | None:
    """Registers, local and shared memory of one launch's kernel; None if the installed kernel was not compiled so."""
    known = evidence()["ops"].get(op, {})
    forms = (form for form in known.get("compiled", ()) if form["arch"] == arch)
    return next((form for form in forms if launch.items() <= form.items()), None) if is_current(op) else None


def is_current(op: str) -> bool:
    return evidence()["ops"].get(op, {}).get("source") == source_hash(op)


@cache
def source_hash(op: str) -> str:
    folder = files("deepdecode") / "kernels"
    text = "".join((folder / name).read_text() for name in SOURCES[op])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
