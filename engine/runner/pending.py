"""How many positions of each slot may lack draft K/V, as far as the host knows.

Filling them is left to the drafter.
"""

from collections.abc import Sequence


class PendingDraft:
    """Per slot an upper bound of the positions whose draft K/V is missing, the root included; a step fills at
    most `window`.
    """

    def __init__(self, num_slots: int, window: int) -> None:
        self._window = window
        self._bounds = [1] * num_slots

    def admit(self, slot: int) -> None:
        """Note that a sequence takes a slot: its prompt is filled as it is cached."""
        self._bounds[slot] = 1

    def plan(self, slots: Sequence[int], depth: int) -> int:
        """Return the bound of a step over these slots, and note the step: one of roots only does no draft
        work, so its positions stay pending.
        """
        num_pending = max([self._bounds[slot] for slot in slots])
        for slot in slots:
            self._bounds[slot] = depth + 1 if depth else self._bounds[slot] + 1
        return num_pending

    def forget(self) -> None:
        """Note that all draft K/V is lost."""
        self._bounds = [self._window] * len(self._bounds)
