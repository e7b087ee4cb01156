"""`deepdecode env`: versions, GPUs, which kernels cover them, and the variables in effect.

Made to be pasted into a report: no path, user or host name leaves it unless asked. Everything here may be missing or broken.
"""

import csv
import getpass
import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from deepdecode import __version__, support
from deepdecode.cards import CARDS, Card
from deepdecode.config import ModelConfig
from deepdecode.engines import engines_text, model_sizes, names_parts, read_engines
from deepdecode.kernels.attention_plan import Case, plan, supports

SCHEMA = 1
PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "sglang", "vllm", "sgl-flash-mla")
# what deepdecode reads; a test compares it with the sources
VARIABLES = (
    "DEEPDECODE_CHECK",
    "DEEPDECODE_ENABLE",
    "DEEPDECODE_LOG",
    "DEEPDECODE_PEERS",
    "DEEPDECODE_REFERENCE",
    "DEEPDECODE_SGLANG",
    "DEEPDECODE_STRICT",
    "DEEPDECODE_TRACEBACK",
    "DEEPDECODE_VLLM",
)
# what else changes how kernels are compiled or run
OTHER_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SGLANG_SM120_MMA_FLASHMLA",
    "TRITON_CACHE_DIR",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_INTERPRET",
    "TRITON_PTXAS_PATH",
)
# values that say nothing of who or where: switches, numbers, levels, settings of an allocator
_PLAIN_VALUE = re.compile(r"(?:[\d,.:-]{1,32}|true|false|on|off|yes|no|debug|info|warning|error|[a-z_]+:[a-z0-9.]{1,12})", re.I)
_HIDDEN, _ANSWER = "<path>", "deepdecode env: "
TOOL_SECONDS, TORCH_SECONDS = 10, 120
# the decode step that coverage is told for: DeepSeek-V4-Flash at tensor parallelism 8
V4_CASE = Case(T=1, H=8, window_keys=128, extra_keys=512)


def read_env(
    *, paths: bool = False, engines: tuple[str, ...] = (), model: ModelConfig | None = None, tp: int = 8
) -> dict[str, Any]:
    """What `deepdecode env --json` prints.

    Args:
        paths: show paths and free-form values too.
        engines: also what our plug-ins would do in these, for this model (V4-Flash by default) at this tensor parallelism.

    Raises:
        ValueError: tp does not divide the model's heads.
    """
    model = model or ModelConfig()
    if tp < 1 or model.num_heads % tp:
        raise ValueError(f"env: --tp must divide the model's {model.num_heads} heads, got {tp}")
    clean = str if paths else hidden
    torch_said = _torch()
    driver, listed = _nvidia_smi()
    seen = torch_said.pop("gpus")
    unable = None if seen else "torch does not see this GPU"
    if _version("triton") is None:
        unable = "Triton is not installed"
    gpus = seen or listed
    for gpu in gpus:
        gpu["kernels"] = {op: _coverage(op, gpu, unable) for op in support.evidence()["ops"]}
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "deepdecode": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "torch": torch_said | {"problems": [clean(problem) for problem in torch_said["problems"]]},
        "driver": driver,
        "ptxas": _ptxas(),
        "gpus": gpus,
        "support": {op: _matrix(op) for op in support.evidence()["ops"]},
        "variables": dict(_variables(paths)),
    }
    if engines:
        cards = [_card(gpu) for gpu in seen]
        told = read_engines(engines, cards, model, tp, _gluon())
        # the text of a changed engine's source may be in it
        found["engines"] = json.loads(json.dumps(told), object_hook=lambda o: {k: _clean(v, clean) for k, v in o.items()})
        found["model"] = model_sizes(model, tp)
    if paths:
        found["paths"] = {"python": sys.executable, "deepdecode": str(Path(__file__).parent)}
    return found


def _clean(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_clean(one, clean) for one in value]
    return clean(value) if isinstance(value, str) else value


def hidden(text: str) -> str:
    """The text without what may name a person or a machine: paths, this user, this host."""
    text = re.sub(r"""(['"])(?:~?/|[A-Za-z]:[\\/]|\\\\)[^'"]*\1""", _HIDDEN, text)
    home = os.path.expanduser("~")
    text = text.replace(home, _HIDDEN) if len(home) > 1 else text
    text = re.sub(r"""(?<![\w/])(?:~?/|[A-Za-z]:[\\/]|\\\\)[^\s'":,;()]+""", _HIDDEN, text)
    for name, stands_for in ((_user(), "<user>"), (platform.node(), "<host>"), (platform.node().split(".")[0], "<host>")):
        if len(name) > 1:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stands_for, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    """What torch says, asked in a process of its own: a broken one may take its process down."""
    # no module of the current folder stands in for torch
    code = "import json, sys; sys.path = [p for p in sys.path if p] + sys.argv[1:]; import deepdecode.env as env; "
    command = [sys.executable, "-c", code + "print(env._ANSWER + json.dumps(env.ask_torch()))", str(Path(__file__).parents[1])]
    died: dict[str, Any] = {"works": False, "cuda": None, "gpus": [], "problems": []}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TORCH_SECONDS)
    except subprocess.TimeoutExpired:
        return died | {"problems": [f"torch does not start within {TORCH_SECONDS} s"]}
    except OSError as error:
        return died | {"problems": [f"torch was not asked: {error}"]}
    if done.returncode < 0:
        return died | {"problems": [f"torch does not start: its process died of signal {-done.returncode}"]}
    # torch may print as it starts and ends
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return died | {"problems": [f"torch does not start: {last[:300]}"]}
    return json.loads(answers[-1].removeprefix(_ANSWER))


def ask_torch() -> dict[str, Any]:
    """What torch says, and what went wrong on the way: it may be missing, broken, without CUDA or without a driver."""
    said: dict[str, Any] = {"works": False, "cuda": None, "gpus": [], "problems": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch

            said |= {"works": True, "cuda": torch.version.cuda}
            if torch.version.cuda is None:
                said["problems"].append("torch is built without CUDA, so it runs on the CPU only")
            elif torch.cuda.is_available():
                said["gpus"] = [_gpu(torch.cuda.get_device_properties(n)) for n in range(torch.cuda.device_count())]
            else:
                said["problems"].append("torch is built for CUDA and finds no GPU that it can use")
        # a broken torch raises whatever its loader raises
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                said["problems"].append("torch is not installed")
            else:
                what = "work" if said["works"] else "start"
                said["problems"].append(f"torch does not {what}: {type(error).__name__}: {error}"[:300])
                said["works"] = False
    said["problems"] += [str(warning.message)[:300] for warning in caught if "cuda" in str(warning.message).lower()]
    return said


def _gpu(have: Any) -> dict[str, Any]:
    return {
        "name": have.name,
        "arch": 10 * have.major + have.minor,
        "sms": have.multi_processor_count,
        "memory_gib": round(have.total_memory / 2**30, 1),
        "shared_kib": getattr(have, "shared_memory_per_block_optin", 0) >> 10 or None,
    }


def _nvidia_smi() -> tuple[str | None, list[dict[str, Any]]]:
    """The driver's version and its GPUs, for where torch sees none."""
    told = _tool(["nvidia-smi", "--query-gpu=driver_version,name,compute_cap,memory.total", "--format=csv,noheader,nounits"])
    driver, gpus = None, []
    for fields in csv.reader((told or "").splitlines(), skipinitialspace=True):
        if len(fields) == 4 and re.fullmatch(r"\d+\.\d+", fields[2]):
            driver = fields[0]
            # "[N/A]" where the memory is the host's
            memory = round(int(fields[3]) / 1024, 1) if fields[3].isdigit() else None
            arch = int(fields[2].replace(".", ""))
            gpus.append({"name": fields[1], "arch": arch, "sms": None, "memory_gib": memory, "shared_kib": None})
    return driver, gpus


def _ptxas() -> str | None:
    """The version of the assembler that Triton calls."""
    tool = os.environ.get("TRITON_PTXAS_PATH")
    if not tool:
        try:
            tool = str(metadata.distribution("triton").locate_file("triton/backends/nvidia/bin/ptxas"))
        except metadata.PackageNotFoundError:
            return None
    found = re.search(r"release ([\d.]+)", _tool([tool, "--version"]) or "")
    return found[1] if found else None


def _tool(command: list[str]) -> str | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=TOOL_SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _coverage(op: str, gpu: dict[str, Any], unable: str | None) -> str:
    """What runs for an op on the GPU: the kernel with its evidence, or the reference with the reason."""
    case = replace(V4_CASE, gluon=_gluon())
    reason = unable or supports(case, _card(gpu))
    if not reason and os.environ.get("DEEPDECODE_REFERENCE") == "1":
        reason = "DEEPDECODE_REFERENCE=1"
    if reason:
        return f"reference: {reason}"
    return f"kernel {plan(case, _card(gpu)).kernel} ({_status_words(support.status(op, gpu['arch']))})"


def _gluon() -> bool:
    """The kernels of sm_90 are written in Gluon, which Triton has from 3.6 on."""
    digits = re.match(r"(\d+)\.(\d+)", _version("triton") or "")
    return digits is not None and (int(digits[1]), int(digits[2])) >= (3, 6)


def _card(gpu: dict[str, Any]) -> Card:
    near = next((card for card in CARDS if card.arch == gpu["arch"]), CARDS[0])
    sms, shared = gpu["sms"] or near.sms, gpu["shared_kib"] or near.shared
    return Card(gpu["name"], gpu["arch"], sms, near.bandwidth, near.l2, shared, near.memory)


def _matrix(op: str) -> list[dict[str, Any]]:
    """One row for each arch of the card table."""
    rows = []
    for arch in dict.fromkeys(card.arch for card in CARDS):
        cards = [card.name for card in CARDS if card.arch == arch]
        rows.append({"arch": arch, "cards": cards, **support.status(op, arch)})
    return rows


def _variables(paths: bool) -> Iterator[tuple[str, str]]:
    for name in sorted({*OTHER_VARIABLES, *(name for name in os.environ if name.startswith("DEEPDECODE_"))}):
        value = os.environ.get(name)
        if value is not None:
            shown = (
                value
                if paths or not value or _PLAIN_VALUE.fullmatch(value) or names_parts(value)
                else "(set; --paths shows it)"
            )
            yield name, shown + ("" if name in (*VARIABLES, *OTHER_VARIABLES) else " (not a variable of deepdecode)")


def env_text(found: dict[str, Any]) -> str:
    torch = found["torch"]
    packages = [f"{name} {version}" for name, version in found["packages"].items() if version]
    missing = [name for name in ("torch", "triton") if not found["packages"][name]]
    tools = [("CUDA of torch", torch["cuda"]), ("driver", found["driver"]), ("ptxas of Triton", found["ptxas"])]
    lines = [
        f"deepdecode {found['deepdecode']}, {found['python']}, {found['system']}",
        ", ".join(packages + [f"no {name}" for name in missing]),
        ", ".join(f"{name} {version or 'none'}" for name, version in tools),
        *torch["problems"],
        "",
        *(_gpu_lines(found["gpus"]) or ["GPUs: none found, the references run on the CPU"]),
    ]
    for op, rows in found["support"].items():
        lines += [
            "",
            f"{op}: its kernel by arch; the other ops' kernels have no such table yet" if len(found["support"]) == 1 else op,
        ]
        lines += [f"  {'sm_' + str(row['arch']):<7} {', '.join(row['cards']):<26} {_status_words(row)}" for row in rows]
    if found["variables"]:
        lines += ["", "variables", *(f"  {name}={value}" for name, value in found["variables"].items())]
    if "engines" in found:
        lines += ["", engines_text(found["engines"], found["model"])]
    if "paths" in found:
        lines += ["", "paths", *(f"  {name:<11} {path}" for name, path in found["paths"].items())]
    return "\n".join(lines)


def _gpu_lines(gpus: list[dict[str, Any]]) -> list[str]:
    lines = []
    for n, gpu in enumerate(gpus):
        facts = [f"{gpu['sms']} SMs"] * bool(gpu["sms"]) + [f"{gpu['memory_gib']} GiB"] * bool(gpu["memory_gib"])
        lines.append(", ".join([f"GPU {n}: {gpu['name']}, sm_{gpu['arch']}", *facts]))
        lines += [f"  {op}: {words}" for op, words in gpu["kernels"].items()]
    return lines


def _status_words(row: dict[str, Any]) -> str:
    words = row["status"] + (f" on {row['device']}" if row["device"] else "")
    if row["forms"]:
        local = f"up to {row['local']} B of local memory a thread" if row["local"] else "no spill"
        words += f"; {row['forms']} forms compiled, {local}" + ("" if row["current"] else ", from other sources than these")
    return words
