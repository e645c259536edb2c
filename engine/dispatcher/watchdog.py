"""A guard that trusts no model: tokens that came out against what plain decoding would have brought.

Measured plain decoding is given to it; what a trip means is left to `adaptive`.
"""

import math

_MEMORY = 128.0  # steps
_MIN_STEPS = 48.0
_TOLERANCE = 0.98  # of plain decoding
_DEVIATIONS = 2.0  # standard errors of the realised tokens
_FIRST_BLOCK = 256  # steps without speculation after a trip, doubled by each trip
_LONGEST_BLOCK = 16384
_HEALTHY_STEPS = 4096  # steps of speculation after which the next block is the first again


class Watchdog:
    """Blocks speculation for a while where it realised less than plain decoding, each time for longer."""

    def __init__(self) -> None:
        self._block = _FIRST_BLOCK
        self._num_healthy = 0
        self.num_blocked = 0  # steps still to come without speculation
        self.num_trips = 0
        self._clear()

    def _clear(self) -> None:
        self._steps = self._rows = self._tokens = self._squares = self._plain = 0.0

    def pass_step(self) -> None:
        """Count one step of any kind."""
        self.num_blocked = max(0, self.num_blocked - 1)

    def observe(self, row_tokens: list[int], plain_tokens: float) -> None:
        """Count a drafting step: what its rows emitted, and what plain decoding would have emitted in the
        same time.
        """
        fade = 1.0 - 1.0 / _MEMORY
        self._steps = self._steps * fade + 1.0
        self._rows = self._rows * fade + len(row_tokens)
        self._tokens = self._tokens * fade + sum(row_tokens)
        self._squares = self._squares * fade + sum([count * count for count in row_tokens])
        self._plain = self._plain * fade + plain_tokens
        self._num_healthy += 1
        if self._num_healthy >= _HEALTHY_STEPS:
            self._block = _FIRST_BLOCK
        variance = max(0.0, self._squares - self._tokens * self._tokens / self._rows)
        if self._steps < _MIN_STEPS:
            return
        if self._tokens + _DEVIATIONS * math.sqrt(variance) < _TOLERANCE * self._plain:
            self._trip()

    def _trip(self) -> None:
        self.num_trips += 1
        self.num_blocked = self._block
        self._block = min(2 * self._block, _LONGEST_BLOCK)
        self._num_healthy = 0
        self._clear()
