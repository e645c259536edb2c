"""How calls ended, counted for `metrics`.

Calls that never reach a replica, as with a broken body or without a key, are not seen here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["answered", "refused", "full", "failed", "left"]
OUTCOMES: tuple[Outcome, ...] = ("answered", "refused", "full", "failed", "left")


@dataclass(slots=True)
class Ending:
    """How one call ends; a call of which nobody says more has lost its client."""

    outcome: Outcome = "left"


class Outcomes:
    """Calls since the start, by outcome."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(OUTCOMES, 0)

    @contextmanager
    def watch(self) -> Iterator[Ending]:
        """Count one call by what its `Ending` says when it is over."""
        ending = Ending()
        try:
            yield ending
        finally:
            self._counts[ending.outcome] += 1

    def snapshot(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._counts.items())


def outcome_of(status: int) -> Outcome:
    """Return how a call ends that an error answers with `status`."""
    if status == 429:
        return "full"
    return "refused" if status < 500 else "failed"
