"""The choice of one tree per step.

Deterministic given its history; measuring time and moving tensors are left to the engine and the runner.
"""

from typing import Protocol

from engine.batch import Load
from engine.dispatch_stats import DispatchStats
from engine.step_stats import StepStats
from engine.tree.topology import TreeTopology


class Dispatcher(Protocol):
    """Chooses a topology for the rows of a step that did not ask for their own."""

    def choose(self, load: Load) -> TreeTopology:
        """Return the topology of the next step."""

    def observe(self, stats: StepStats) -> None:
        """Learn from one collected step; steps arrive in order, one step late."""

    def reachable(self, max_rows: int) -> tuple[tuple[TreeTopology, range], ...]:
        """Return which trees it may choose for which numbers of rows: what is worth preparing."""

    def switch(self, mode: str) -> None:
        """Go on as if `SpeculationConfig.mode` were `mode`. Raises `ConfigError` for an unknown tree."""

    def stats(self) -> DispatchStats:
        """Return what was chosen last, and why."""
