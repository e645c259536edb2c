"""The choice of one tree per step.

Deterministic given its history; measuring time and moving tensors are left to the engine and the runner.
"""

from typing import Protocol

from engine.batch import Load, StepStats
from engine.config import SpeculationConfig, TreeTable
from engine.tree.library import TreeLibrary
from engine.tree.topology import TreeTopology


class Dispatcher(Protocol):
    """Chooses a topology for the rows of a step that did not ask for their own."""

    def choose(self, load: Load) -> TreeTopology:
        """Return the topology of the next step."""

    def observe(self, stats: StepStats) -> None:
        """Learn from one collected step; steps arrive in order, one step late."""

    def reachable(self, max_rows: int) -> tuple[tuple[TreeTopology, range], ...]:
        """Return which trees it may choose and for which numbers of rows, up to `max_rows`: what is worth
        preparing.
        """


class StaticDispatcher:
    """Follows `SpeculationConfig`: one tree for every step, or a table by running rows. Learns nothing.

    A library of plain decoding alone (no draft is loaded) leaves "auto" no choice.
    """

    def __init__(self, config: SpeculationConfig, table: TreeTable, library: TreeLibrary) -> None:
        self._otherwise = library.get("off" if config.mode == "auto" else config.mode)
        table = table if config.mode == "auto" and library.max_depth else ()
        self._table = tuple((max_rows, library.get(name)) for max_rows, name in table)

    def choose(self, load: Load) -> TreeTopology:
        """Return the first table entry wide enough for the running rows; beyond the table, decode plainly."""
        return next((tree for max_rows, tree in self._table if load.num_running <= max_rows), self._otherwise)

    def observe(self, stats: StepStats) -> None:
        """Ignore the step."""

    def reachable(self, max_rows: int) -> tuple[tuple[TreeTopology, range], ...]:
        """Return the rows of the table, cut at `max_rows`."""
        found, first = [], 1
        for last, tree in (*self._table, (max_rows, self._otherwise)):
            if first <= min(last, max_rows):
                found.append((tree, range(first, min(last, max_rows) + 1)))
            first = last + 1
        return tuple(found)
