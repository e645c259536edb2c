"""Recording work of the device as CUDA graphs that share one pool of memory.

What is recorded, and when it is replayed, is left to `graphs` and `prefill_graphs`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine.layers.tuned_linear import choosing

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Recorded(Generic[R]):
    """A graph and what it writes, held here since a graph keeps no tensor alive."""

    graph: torch.cuda.CUDAGraph
    output: R


class _Address:
    """Tells torch where a tensor lies, and holds nothing of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def borrow(tensor: Tensor) -> Tensor:
    """Return what a graph writes into `tensor` without keeping its memory from other graphs of the recorder.

    It is good from that graph's replay to the next one's.
    """
    # As bytes: the protocol lacks bfloat16.
    return torch.as_tensor(_Address(tensor.view(torch.uint8)), device=tensor.device).view(tensor.dtype)


class GraphRecorder:
    """Records on a stream of its own. Graphs run one at a time: each finds room in what others free."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory_pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.num_graphs = 0

    def record(self, run: Callable[[], R]) -> Recorded[R]:
        """Run once, so that kernels are compiled, products chosen, and libraries have their workspaces, then
        capture."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            with choosing():
                run()
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            # By thread: another one may be loading a draft meanwhile.
            graph.capture_begin(pool=self._memory_pool, capture_error_mode="thread_local")
            try:
                output = run()
            finally:
                graph.capture_end()  # else the device goes on recording what comes next
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self.num_graphs += 1
        return Recorded(graph, output)
