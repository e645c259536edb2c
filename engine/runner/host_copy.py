"""Copies from the device to the host that do not stall the stream. When to wait for them is left to
callers.
"""

import torch
from torch import Tensor

from engine.batch import RowResult


def to_host(tensor: Tensor) -> Tensor:
    """Return a host copy that is whole once the step has ended; enqueuing it does not stall the stream."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class HostCopy:
    """A host copy that can be waited for before what is enqueued after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = to_host(tensor)
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> Tensor:
        """Return the copy once it is whole: all that was enqueued before it is done by then."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def read_answer(row: list[int], reason: str | None = None) -> RowResult:
    """Return one row of the answer of `CommittedRows`; `reason` is why it may have failed."""
    width = (len(row) - 3) // 2  # D + 1
    num_tokens = width - row[:width].count(-1)
    next_rank, num_ranks, is_finite = row[-3:]
    return RowResult(
        tuple(row[:num_tokens]),
        is_finite == 1,
        tuple(row[width + 1 : width + num_tokens]),
        None if next_rank < 0 else next_rank,
        num_ranks,
        (),
        reason,
    )
