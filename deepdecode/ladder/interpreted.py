"""Kernels in Triton's interpreter, on calls captured from a model: `python -m deepdecode.ladder.interpreted FILE`.

Prints a list of [entry, implementation, error, bound, note]. TRITON_INTERPRET=1 must be set before Triton is imported.
"""

import json
import sys
from typing import Any

import torch

from deepdecode.ladder.gates import Captured
from deepdecode.ops.rows import PagedRows
from deepdecode.testing.numeric import rel_err

# float16 queries and partial results; the interpreter's products are float32
MAX_ERR = 2e-3
# the kernel's smallest tile
BLOCK_H, BLOCK_N = 8, 32
SPLITS = {"one program for all keys": 1, "split over keys, merged": 3}


def pack(call: Captured) -> dict[str, Any]:
    """A captured call as tensors and numbers, which `torch.save` writes and its safe reader takes."""
    caches = [arg and (arg.data, arg.page_size, arg.fmt) for arg in (call.args[1], call.args[4])]
    args = [arg for arg in call.args if not isinstance(arg, PagedRows)]
    return {"args": args, "caches": caches, "sink": call.sink, "scale": call.scale, "out": call.out}


def unpack(packed: dict[str, Any]) -> Captured:
    window, extra = (cache and PagedRows(*cache) for cache in packed["caches"])
    q, indices, lens, *more = packed["args"]
    extra_args = (extra, *more) if extra else (None, None, None)
    return Captured((q, window, indices, lens, *extra_args), packed["sink"], packed["scale"], packed["out"])


def attention_checks(calls: list[Captured]) -> list[tuple[str, str, float, float, str]]:
    """The attention kernel, in one piece and split, against float64."""
    from deepdecode.kernels import attention as kernel
    from deepdecode.kernels.attention_plan import Config

    found = []
    for name, splits in SPLITS.items():
        config = Config("mma", BLOCK_H, BLOCK_N, splits, 0, num_warps=4, align=16, pdl=False, merge_warps=2)
        errors = []
        for call in calls:
            q, *rest = call.args
            half = q.half().contiguous()
            out = torch.full_like(half, float("nan"))
            kernel.launch(half, *rest, sink=call.sink, scale=call.scale, out=out, lse=None, workspace=None, config=config)
            errors.append(rel_err(out, Captured((half, *rest), call.sink, call.scale, out).reference()))
        keys = ", ".join(str(call.keys) for call in calls)
        found.append(("sparse_attn", name, max(errors), MAX_ERR, f"float16, interpreted, {keys} keys"))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(attention_checks([unpack(packed) for packed in torch.load(sys.argv[1], weights_only=True)])))
