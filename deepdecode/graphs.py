"""Work captured once in a CUDA graph and replayed; off the GPU the same work is called instead."""

import ctypes
from collections import Counter
from collections.abc import Callable

import torch

# of CUgraphNodeType
_KINDS = {0: "kernel", 1: "copy", 2: "set"}


class Captured:
    """`work`, which reads and writes tensors that stay where they are, as one launch of the host.

    Args:
        work: must not wait for the device nor copy from the host. It is called `warmup` times before the capture, on the
            stream of the capture, so that kernels are compiled and tables made; on a CPU it is never called here.
        device: where all its tensors are; the current device may be another.

    The graph's own memory lives as long as this object.
    """

    def __init__(self, work: Callable[[], object], device: torch.device, *, warmup: int = 2) -> None:
        self._work, self._device, self._graph = work, device, None
        if device.type != "cuda":
            return
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(warmup):
                    work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            # other threads may use the device meanwhile
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                work()
            self.nodes = _count(graph)
            graph.instantiate()
            torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = graph

    nodes: Counter[str] | None = None

    @property
    def launches(self) -> int | None:
        """Kernels, copies and fills of one replay; None where there is no graph."""
        return None if self.nodes is None else sum(self.nodes.values())

    def replay(self) -> None:
        """Do the work once, on the device's current stream."""
        if self._graph is None:
            self._work()
            return
        with torch.cuda.device(self._device):
            self._graph.replay()


def _count(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    """How many nodes of each kind a captured graph has."""
    cuda = ctypes.CDLL("libcuda.so.1")
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    if cuda.cuGraphGetNodes(raw, None, ctypes.byref(count)):
        raise RuntimeError("graphs: the driver does not list the nodes of a captured graph")
    nodes = (ctypes.c_void_p * count.value)()
    cuda.cuGraphGetNodes(raw, nodes, ctypes.byref(count))
    kinds: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        if cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)):
            raise RuntimeError("graphs: the driver does not give the type of a graph's node")
        kinds[_KINDS.get(kind.value, "other")] += 1
    return kinds
