"""The dispatcher that learns nothing: one tree, or a table by batch. What pays is left to the operator."""

from engine.batch import Load
from engine.config import SpeculationConfig, TreeTable
from engine.dispatch_stats import DispatchStats
from engine.dispatcher.totals import ArmTotals
from engine.step_stats import StepStats
from engine.tree.library import TreeLibrary
from engine.tree.topology import TreeTopology


class StaticDispatcher:
    """Follows `SpeculationConfig`: one tree for every step, or a table by running rows. Learns nothing.

    A library of plain decoding alone (no draft is loaded) leaves "auto" no choice.
    """

    def __init__(self, config: SpeculationConfig, table: TreeTable, library: TreeLibrary) -> None:
        self._rows, self._library = table, library
        self._totals = ArmTotals()
        self.switch(config.mode)

    def switch(self, mode: str) -> None:
        """Follow the table for "auto" and "table", else one tree."""
        follows_table = mode in ("auto", "table")
        self._otherwise = self._library.get("off" if follows_table else mode)
        table = self._rows if follows_table and self._library.max_depth else ()
        self._table = tuple((max_rows, self._library.get(name)) for max_rows, name in table)
        self._reason = "by the table" if follows_table else "set by the operator"
        self._chosen = self._otherwise

    def choose(self, load: Load) -> TreeTopology:
        """Return the first table entry wide enough for the running rows; beyond the table, decode plainly."""
        fitting = (tree for max_rows, tree in self._table if load.num_running <= max_rows)
        self._chosen = next(fitting, self._otherwise)
        return self._chosen

    def stats(self) -> DispatchStats:
        return DispatchStats(arm=self._chosen.name, reason=self._reason, totals=self._totals.all())

    def observe(self, stats: StepStats) -> None:
        """Count the step."""
        self._totals.observe(stats)

    def reachable(self, max_rows: int) -> tuple[tuple[TreeTopology, range], ...]:
        """Return the rows of the table, cut at `max_rows`."""
        found, first = [], 1
        for last, tree in (*self._table, (max_rows, self._otherwise)):
            if first <= min(last, max_rows):
                found.append((tree, range(first, min(last, max_rows) + 1)))
            first = last + 1
        return tuple(found)
