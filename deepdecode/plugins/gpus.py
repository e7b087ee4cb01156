"""Which GPUs stand in this machine, asked of NVIDIA's management library: no CUDA context is made and a fork stays safe."""

import ctypes
from functools import cache


@cache
def archs() -> frozenset[int] | None:
    """90 for sm_90, of each GPU; None where it cannot be told (no driver, no permission)."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return None
        try:
            return _archs(nvml)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None


def _archs(nvml: ctypes.CDLL) -> frozenset[int] | None:
    count, found = ctypes.c_uint(), set()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    for n in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(n, ctypes.byref(device)):
            return None
        if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
            return None
        found.add(10 * major.value + minor.value)
    return frozenset(found) or None
