"""Compile a Triton kernel for a GPU that is not here, and read what the compiler made of it."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# shared memory that one block may use, in bytes, by arch
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376, 121: 101376}


@dataclass(frozen=True)
class Compiled:
    """registers of a thread, bytes of local memory (spills and stack) of a thread, bytes of shared memory of a block.

    ttgir: the kernel in Triton's own terms, with the layout of every tile.
    """

    registers: int
    local: int
    shared: int
    ptx: str
    cubin: bytes
    ttgir: str

    def sass(self) -> str:
        return _cuobjdump(self.cubin, "-sass")


def compile_kernel(function: Any, types: dict[str, str], constants: dict[str, Any], arch: int, **options: Any) -> Compiled:
    """Compile a `triton.jit` (or Gluon) function.

    types: argument name -> "*bf16", "i32", "fp32", ...; a trailing ":16" says that the value divides by 16.
        The name of an argument left out is a constant None.
    constants: constexpr arguments. options: num_warps, num_stages, ...
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource
    if function.__class__.__name__ == "GluonJITFunction":
        from triton.experimental.gluon._runtime import GluonASTSource as source

    signature, constexprs, attributes = {}, dict(constants), {}
    for position, name in enumerate(function.arg_names):
        if name in types:
            kind, _, divides = types[name].partition(":")
            signature[name] = kind
            if divides:
                attributes[position,] = [["tt.divisibility", int(divides)]]
        else:
            signature[name] = "constexpr"
            # Gluon kernels may take num_warps as an argument too
            constexprs.setdefault(name, options.get(name))
    kernel = triton.compile(source(function, signature, constexprs, attributes), GPUTarget("cuda", arch, 32), options)
    usage = _cuobjdump(kernel.asm["cubin"], "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    if not found:
        raise RuntimeError(f"cuobjdump -res-usage said nothing about registers: {usage[-300:]}")
    registers, stack, local = map(int, found.groups())
    asm = kernel.asm
    return Compiled(registers, max(stack, local), kernel.metadata.shared, asm["ptx"], asm["cubin"], asm["ttgir"])


def _cuobjdump(cubin: bytes, what: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], check=True, capture_output=True, text=True).stdout
