"""A launched step on its way back to the host, and the time the device spent on it.

What the step computes is left to `runner`.
"""

import time

import torch
from torch import Tensor

from engine.batch import RowResult, StepResult


class StepTimer:
    """Times one step of a device: by the host's clock on a CPU, by events of the stream on CUDA.

    A step that is launched before the one `before` it was waited for takes turns with it: on a CPU the one
    before lasts until this launch, on CUDA this one from the end of the one before. So the seconds of steps
    in a row add up to the time that passes, whatever else the host does in it.
    """

    def __init__(self, device: torch.device, before: "StepTimer | None" = None) -> None:
        self._started, self._stopped, self._is_over = time.perf_counter(), 0.0, False
        self._last = _event() if device.type == "cuda" else None
        self._first = None if before is None else before.next_began(self._started)
        if self._last is not None and self._first is None:
            self._first = _event()
            self._first.record()

    def next_began(self, started: float) -> torch.cuda.Event | None:
        """Learn when the next step was launched; return the event that ends this one where nobody waited for
        it yet.
        """
        if self._is_over:
            return None
        self._stopped = started
        return self._last

    def stop(self) -> None:
        """Mark the end of what was enqueued; on a CPU it is done by then."""
        self._stopped = time.perf_counter()
        if self._last is not None:
            self._last.record()

    def wait(self) -> float:
        """Wait for the end and return the seconds from the start to it."""
        self._is_over = True
        if self._first is None or self._last is None:
            return self._stopped - self._started
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) * 1e-3


class StepHandle:
    """The answer of one step on its way: rows [B, 2 D + 5] int64 as `CommittedRows` has them, and
    is_chunk_finite [C] bool of its chunks.
    """

    def __init__(self, step_idx: int, rows: Tensor, is_chunk_finite: Tensor, timer: StepTimer) -> None:
        self._step_idx = step_idx
        self._rows, self._is_chunk_finite = _to_host(rows), _to_host(is_chunk_finite)
        self._timer = timer
        timer.stop()

    def collect(self) -> StepResult:
        """Wait for the step and return what it emitted."""
        seconds = self._timer.wait()
        answers: list[list[int]] = self._rows.tolist()
        rows = tuple(_row_result(row) for row in answers)
        is_chunk_finite: list[bool] = self._is_chunk_finite.tolist()
        failed = tuple(idx for idx, is_finite in enumerate(is_chunk_finite) if not is_finite)
        return StepResult(self._step_idx, rows, seconds, failed)


def _row_result(row: list[int]) -> RowResult:
    """Return one row of `DecodeStep.commit`."""
    width = (len(row) - 3) // 2  # D + 1
    token_ids = tuple([token for token in row[:width] if token >= 0])
    path = tuple(row[width + 1 : width + len(token_ids)])
    return RowResult(token_ids, bool(row[-1]), path, None if row[-3] < 0 else row[-3], row[-2])


def _to_host(tensor: Tensor) -> Tensor:
    """Return a host copy that is whole once the step has ended; enqueuing it does not stall the stream."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
