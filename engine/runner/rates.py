"""How fast this machine moves and multiplies numbers: what the time of a step is held against.

What a step has to move and multiply is left to its caller.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.runner.calibrate import choose_device

_NUM_ROUNDS = 5
_NUM_REPEATS = 10


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Bytes per second of a copy, reads and writes counted, and operations per second of a large product."""

    bandwidth: float
    flops: float

    @staticmethod
    def measure(config: EngineConfig) -> "MachineRates":
        """Time a copy and a matrix product of random numbers on the device of `config`, best of a few rounds.

        In bfloat16 on CUDA, in float32 elsewhere; under a second on a GPU, and gigabytes of its memory.
        """
        device = choose_device(config)
        is_cuda = device.type == "cuda"
        num_bytes, size = (1 << 31, 8192) if is_cuda else (1 << 26, 512)
        dtype = torch.bfloat16 if is_cuda else torch.float32
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        copy = torch.empty_like(source)
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        product = torch.empty_like(left)
        copy_seconds = _best_seconds(lambda: copy.copy_(source), device)
        product_seconds = _best_seconds(lambda: torch.mm(left, right, out=product), device)
        return MachineRates(2 * num_bytes / copy_seconds, 2 * size**3 / product_seconds)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the least mean time of a run of `work`, over a few runs."""
    work()
    times = []
    for _ in range(_NUM_ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(_NUM_REPEATS):
            work()
        synchronize(device)
        times.append((time.perf_counter() - start) / _NUM_REPEATS)
    return min(times)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
