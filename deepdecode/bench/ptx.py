"""Run another arch's PTX on the GPU that is here: the driver compiles it. That code is then known to be right; its speed says
nothing of the card it is meant for."""

import ctypes
from typing import Any

import torch

from deepdecode.cards import CARDS
from deepdecode.kernels import attention as kernel
from deepdecode.kernels.attention_plan import case_of, plan
from deepdecode.testing.compiled import compile_kernel
from deepdecode.testing.inputs import AttentionInputs


def attention_as_ptx(inputs: AttentionInputs, arch: int) -> torch.Tensor:
    """Sparse attention with both caches as the first card of `arch` would launch it; the merge of splits is this GPU's own.

    Raises:
        ImportError: cuda.bindings is missing.
        RuntimeError: the driver refuses.
    """
    from cuda.bindings import driver

    def ok(answer: Any) -> Any:
        if answer[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"attention_as_ptx: the driver refuses the PTX of sm_{arch}: {answer[0].name}")
        return answer[1] if len(answer) > 1 else None

    q, window, indices, lens, extra, extra_indices, extra_lens = inputs.args()
    T, H, _ = q.shape
    card = next(card for card in CARDS if card.arch == arch)
    config = plan(case_of(q, window, indices, extra, extra_indices, gluon=False), card)
    types, constants = kernel.compile_args(config, window.fmt)
    made = compile_kernel(kernel.split_kernel, types, constants, arch, num_warps=config.num_warps, num_stages=1)
    if f".target sm_{arch}" not in made.ptx:
        raise RuntimeError(f"attention_as_ptx: Triton did not compile for sm_{arch}")
    name = next(line.split("(")[0].split()[-1] for line in made.ptx.splitlines() if ".entry" in line)
    function = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(made.ptx.encode() + b"\0")), name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    ok(driver.cuFuncSetAttribute(function, limit, made.shared))
    out = torch.full_like(q, float("nan"))
    parts = kernel.Parts.of(None, q, config.splits)
    words = kernel.words_view(window), kernel.words_view(extra)
    tensors = {
        "q_ptr": q, "window_ptr": words[0], "extra_ptr": words[1], "window_indices_ptr": indices,
        "extra_indices_ptr": extra_indices, "window_lens_ptr": lens, "extra_lens_ptr": extra_lens, "sink_ptr": inputs.sink,
        "out_ptr": out, "part_ptr": parts.out, "part_lse_ptr": parts.lse, "part_unit_ptr": parts.unit,
    }  # fmt: skip
    numbers = {
        "scale_log2": inputs.scale * kernel.LOG2E, "H": H, "window_keys": indices.shape[1],
        "extra_keys": extra_indices.shape[1], "window_rows": window.num_rows, "extra_rows": extra.num_rows,
        "window_page": window.page_size, "extra_page": extra.page_size, "window_stride": words[0].stride(0),
        "extra_stride": words[1].stride(0), "splits": config.splits, "split_keys": config.split_keys,
    }  # fmt: skip
    for name, size in (("window", window.page_size), ("extra", extra.page_size), ("splits", config.splits)):
        numbers[f"{name}_magic"], numbers[f"{name}_shift"] = kernel.reciprocal(size)
    values, kinds = [], []
    for argument in kernel.split_kernel.arg_names:
        kind = types.get(argument, "").partition(":")[0]
        if kind.startswith("*"):
            values.append(tensors[argument].data_ptr())
            kinds.append(ctypes.c_void_p)
        elif kind:
            values.append(numbers[argument])
            kinds.append(ctypes.c_float if kind == "fp32" else ctypes.c_int)
    # Triton's own two: scratch of the whole grid, and of its profiler
    entry = made.ptx[made.ptx.index(".entry") :]
    for _ in range(entry[: entry.index(")")].count(".param") - len(values)):
        values.append(0)
        kinds.append(ctypes.c_void_p)
    grid = -(-H // config.block_h), T, config.splits
    block = 32 * config.num_warps, 1, 1
    stream = torch.cuda.current_stream().cuda_stream
    ok(driver.cuLaunchKernel(function, *grid, *block, made.shared, stream, (tuple(values), tuple(kinds)), 0))
    if config.splits > 1:
        kernel.launch_merge(inputs.sink, out, None, parts, config)
    torch.cuda.synchronize()
    return out
