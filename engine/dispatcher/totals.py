"""What each arm realised since the start. Judging it is left to its readers."""

from engine.dispatch_stats import ArmTotal
from engine.step_stats import StepStats


class ArmTotals:
    """Adds up the steps whose time and tokens are those of one tree."""

    def __init__(self) -> None:
        self._totals: dict[str, ArmTotal] = {}

    def observe(self, stats: StepStats) -> str | None:
        """Count a step; return the tree that all of it ran, None where there is no such."""
        names = {row.topology.name for row in stats.rows}
        if len(names) != 1 or stats.num_prefill_tokens:
            return None
        name = names.pop()
        before = self._totals.get(name, ArmTotal(name, 0, 0, 0.0))
        num_tokens = sum([row.num_rows * (row.num_accepted + 1) for row in stats.rows])
        self._totals[name] = ArmTotal(
            name, before.num_steps + 1, before.num_tokens + num_tokens, before.seconds + stats.seconds
        )
        return name

    def all(self) -> tuple[ArmTotal, ...]:
        """Return the totals by name."""
        return tuple(self._totals[name] for name in sorted(self._totals))
