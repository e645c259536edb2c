"""The waiting queue: lower priority number first, then arrival, so a preempted sequence resumes its place.

When its head may run is left to the scheduler.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from engine.request import Sequence

_sort_key = attrgetter("sort_key")


class WaitingQueue:
    """Sequences by `sort_key`, each at most once. A sorted list: simpler than a heap with lazy removal, and
    moving a few thousand pointers costs microseconds.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_sort_key)

    def peek(self) -> Sequence:
        """Return the next sequence to admit; the queue must not be empty."""
        return self._sequences[0]

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is queued, wherever it stands."""
        idx = bisect_left(self._sequences, sequence.sort_key, key=_sort_key)
        assert self._sequences[idx] is sequence, f"{sequence.request.request_id} is not queued"
        del self._sequences[idx]
