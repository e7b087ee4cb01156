"""The checks every op makes before it runs, and who runs it: the kernel or the reference."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

log = logging.getLogger("deepdecode")
_said: set[str] = set()
# how often each op's kernel was launched, by the name of its entry in `Ops` (the runner's graphs count at each replay)
kernel_runs: Counter[str] = Counter()


def expect(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str],
    dtype: torch.dtype | Sequence[torch.dtype],
    device: torch.device,
    *,
    contiguous: bool = True,
) -> None:
    """Raise ValueError unless `tensor` has this shape (a letter stands for any size), dtype, device and layout.

    Sizes are compared with the letters' own first values, so ("T", "T") asks for a square.
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    sizes: dict[str, int] = {}
    if not isinstance(tensor, torch.Tensor):
        want = f"{_shape(shape)} {' or '.join(_dtype(d) for d in dtypes)} on {device}"
        raise ValueError(f"{name} must be {want}, got {type(tensor).__name__}")
    fits = tensor.dim() == len(shape) and all(
        sizes.setdefault(want, got) == got if isinstance(want, str) else want == got
        for want, got in zip(shape, tensor.shape, strict=False)
    )
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        want = f"{_shape(shape)} {' or '.join(_dtype(d) for d in dtypes)} on {device}"
        raise ValueError(f"{name} must be {want}, got {describe(tensor)}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def describe(tensor: torch.Tensor) -> str:
    return f"{_shape(tensor.shape)} {_dtype(tensor.dtype)} on {tensor.device}"


def _shape(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arch(tensor: torch.Tensor) -> int:
    """Compute capability of the tensor's GPU as one number: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def use_kernel(tensor: torch.Tensor) -> bool:
    """Kernels run on CUDA tensors only; DEEPDECODE_REFERENCE=1 forces the references there too."""
    return tensor.is_cuda and os.environ.get("DEEPDECODE_REFERENCE") != "1"


def readable(tensor: torch.Tensor) -> bool:
    """Whether a look at the tensor's values is free: on a GPU it would stop the host, and break a graph."""
    return tensor.device.type == "cpu"


def torch_op(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[..., Any]:
    """`function` of positional arguments as torch.ops.deepdecode.<name>, for torch.compile and whoever else traces the call.

    Where nobody does it is a plain call: the dispatcher costs the host 20 us, 100 us where a tensor is written, and imports
    torch._dynamo when it is first used (2 s and 150 MB).
    """
    op = torch.library.custom_op(f"deepdecode::{name}", function, mutates_args=mutates)
    op.register_fake(fake)

    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args) if _nobody_traces(args) else op(*args)

    return call


# what a plain call has; those that trace give tensors of their own kinds
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, torch.dtype))


def _nobody_traces(args: Sequence[Any]) -> bool:
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, args)):
        return False
    seen = torch._C._len_torch_dispatch_stack() > 0
    if not seen and not torch.is_grad_enabled():
        return True
    # off a GPU a mode sees the reference's ops, and gradients go through them; of a kernel neither is true, which the op says
    tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
    return all(not (seen or tensor.requires_grad) or readable(tensor) for tensor in tensors)


def fall_back(op: str, shape: str, reason: str) -> None:
    """Say once per op, shape and reason that the reference runs; DEEPDECODE_STRICT=1 makes it an error."""
    line = f"{op}: no kernel for {shape}: {reason}; the reference runs"
    if os.environ.get("DEEPDECODE_STRICT") == "1":
        raise RuntimeError(line)
    if line not in _said:
        _said.add(line)
        log.warning(line)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The float type a reference computes in: float32 for 16-bit inputs, float32 and float64 as they are."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in that type: a copy if that is another. For the type alone ask `wide_type`, which launches nothing."""
    return tensor.to(wide_type(tensor.dtype))


# what activations may be: bfloat16 in the product, the wider two in tests and on the CPU
FLOATS = (torch.bfloat16, torch.float32, torch.float64)
