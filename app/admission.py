"""How much a server takes at once: calls in flight, and sequences that run or wait.

The engine has a queue limit of its own, but one that hangs refuses nobody. Sizes of one call are left to
`choices`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine import CapacityError


class Admission:
    """Counts what is in flight, and for how long anything is."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_calls = 0
        self._num_sequences = 0
        self._past_seconds = 0.0
        self._busy_since = 0.0

    @property
    def busy_seconds(self) -> float:
        """How long at least one call was in flight since the start."""
        return self._past_seconds + (self._clock() - self._busy_since if self._num_calls else 0.0)

    @contextmanager
    def hold(self, num_sequences: int, max_sequences: int, max_calls: int | None) -> Iterator[None]:
        """Count a call and its sequences. Raises `CapacityError` where one is more than fits; `max_calls`
        None lets the sequences decide alone.
        """
        if max_calls is not None and self._num_calls >= max_calls:
            raise CapacityError(
                f"the server is full, it takes {max_calls} calls at once: try again in a moment"
            )
        if self._num_sequences + num_sequences > max_sequences:
            raise CapacityError(
                f"the server is full, {self._num_sequences} answers run or wait: try again in a moment"
            )
        if not self._num_calls:
            self._busy_since = self._clock()
        self._num_calls += 1
        self._num_sequences += num_sequences
        try:
            yield
        finally:
            self._past_seconds, self._busy_since = self.busy_seconds, self._clock()
            self._num_calls -= 1
            self._num_sequences -= num_sequences
