"""A launched step on its way back to the host, and the time the device spent on it.

What the step computes is left to `runner`.
"""

import time

import torch
from torch import Tensor

from engine.batch import RowResult, StepResult
from engine.sampling.logprobs import LogprobRows


class StepTimer:
    """Times one step on its own device: by the host's clock on a CPU, by events of the stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._started = time.perf_counter()
        self._seconds = 0.0
        if self._is_cuda:
            self._first, self._last = _event(), _event()
            self._first.record()

    def stop(self) -> None:
        """Mark the end of what was enqueued; on a CPU it is done by then."""
        self._seconds = time.perf_counter() - self._started
        if self._is_cuda:
            self._last.record()

    def wait(self) -> float:
        """Wait for the end and return the seconds from the start to it."""
        if self._is_cuda:
            self._last.synchronize()
            return float(self._first.elapsed_time(self._last)) * 1e-3
        return self._seconds


class StepHandle:
    """The answer of one step on its way: rows [B, D + 2] int64 as `DecodeStep.commit` returns them, and
    is_chunk_finite [C] bool of its chunks; beside them the log-probabilities that some rows and chunks ask
    for.
    """

    def __init__(
        self,
        step_idx: int,
        rows: Tensor,
        is_chunk_finite: Tensor,
        timer: StepTimer,
        scored_rows: LogprobRows | None = None,
        scored_chunks: tuple[LogprobRows, ...] = (),
    ) -> None:
        self._step_idx = step_idx
        self._rows, self._is_chunk_finite = _to_host(rows), _to_host(is_chunk_finite)
        self._scored_rows = None if scored_rows is None else scored_rows.moved(_to_host)
        self._scored_chunks = [chunk.moved(_to_host) for chunk in scored_chunks]
        self._timer = timer
        timer.stop()

    def collect(self) -> StepResult:
        """Wait for the step and return what it emitted."""
        seconds = self._timer.wait()
        answers: list[list[int]] = self._rows.tolist()
        rows = tuple(
            RowResult(tuple([token for token in row[:-1] if token >= 0]), bool(row[-1])) for row in answers
        )
        if self._scored_rows is not None:
            rows = self._scored_rows.join(rows)
        is_chunk_finite: list[bool] = self._is_chunk_finite.tolist()
        failed = tuple(idx for idx, is_finite in enumerate(is_chunk_finite) if not is_finite)
        scored = tuple((chunk.row_idxs[0], chunk.entries(0)) for chunk in self._scored_chunks)
        return StepResult(self._step_idx, rows, seconds, failed, scored)


def _to_host(tensor: Tensor) -> Tensor:
    """Return a host copy that is whole once the step has ended; enqueuing it does not stall the stream."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
