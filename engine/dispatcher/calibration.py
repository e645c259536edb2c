"""What to time at the start, so that a latency table can be fitted. Running and timing steps is its caller's.

Batches rise, so that a tree that cannot pay at one of them need not be timed at larger ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.dispatcher.arms import could_pay
from engine.dispatcher.latency import PLAIN, Experts, LatencyTable, Timing
from engine.errors import ConfigError
from engine.tree.topology import TreeTopology

TimeStep = Callable[[int, TreeTopology, int], float]  # (batch, tree, cached tokens of a row) -> seconds
TimeCatchUp = Callable[[int], float]  # batch -> seconds that a first drafting step costs more
_PLAIN_SHARE = 0.5  # of the time, after which no larger batch is begun


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """The grid to time: each step `num_repeats` times, in `max_seconds` all in all."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    num_repeats: int = 3
    max_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("batches", "contexts"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)):
                raise ConfigError(f"calibration needs rising {name}, found {values}")


def calibrate(
    trees: Sequence[TreeTopology],
    plan: CalibrationPlan,
    time_step: TimeStep,
    time_catch_up: TimeCatchUp,
    elapsed: Callable[[], float],
    *,
    is_padded: bool = False,
    experts: Experts | None = None,
) -> LatencyTable | None:
    """Time `trees`, plain decoding among them, and return what steps cost; None where not even one row of
    plain decoding fits.

    Plain decoding comes first, at rising batches while half of the time is left; then the trees, at all
    batches behind the shortest context, then behind longer ones. A tree that could not pay at a smaller batch
    is unreachable. What `max_seconds` left out follows from how plain decoding grows, or is
    unreachable where the tree was never timed. `elapsed` tells the seconds since the start.
    """
    plain = next(tree for tree in trees if tree.name == PLAIN)
    num_nodes = {tree.name: tree.num_nodes for tree in trees}
    timer = _Timer(plan, time_step, elapsed)
    timings: list[Timing] = []
    for batch in plan.batches:
        most = _PLAIN_SHARE * plan.max_seconds if timings else math.inf
        for context in plan.contexts:
            timings += timer.time((plain,), batch, context, most)
    if not timings:
        return None
    batches = sorted({timing.batch for timing in timings})
    for context in plan.contexts:
        left = [tree for tree in trees if tree is not plain]
        for batch in batches:
            timings += timer.time(left, batch, context, plan.max_seconds)
            fitted = LatencyTable.fit(timings, num_nodes)
            timings += _guesses(timer.fitting(left, batch), batch, context, fitted)
            fitted = LatencyTable.fit(timings, num_nodes)
            left = [tree for tree in left if could_pay(tree, fitted, batch)]
    catch_up = [(batch, time_catch_up(batch)) for batch in batches if elapsed() < plan.max_seconds]
    return LatencyTable.fit(timings, num_nodes, catch_up, is_padded=is_padded, experts=experts)


class _Timer:
    """Times trees of one plan, and remembers what memory has no room for."""

    def __init__(self, plan: CalibrationPlan, time_step: TimeStep, elapsed: Callable[[], float]) -> None:
        self._plan, self._time_step, self._elapsed = plan, time_step, elapsed
        self._no_room: dict[str, int] = {}  # by tree, the batch that does not fit behind the shortest context

    def fitting(self, trees: Sequence[TreeTopology], batch: int) -> list[TreeTopology]:
        """Return those that have not been without room at this batch or a smaller one."""
        return [tree for tree in trees if batch < self._no_room.get(tree.name, math.inf)]

    def time(self, trees: Sequence[TreeTopology], batch: int, context: int, most: float) -> list[Timing]:
        """Return what was timed of the trees, in turns, before `most` seconds were over."""
        found: list[Timing] = []
        for _ in range(self._plan.num_repeats):
            for tree in self.fitting(trees, batch):
                if self._elapsed() >= most:
                    return found
                seconds = self._time_step(batch, tree, context)
                if seconds < math.inf:
                    found.append(Timing(tree.name, batch, context, seconds))
                elif context == self._plan.contexts[0]:
                    self._no_room[tree.name] = batch
        return found


def _guesses(
    trees: Sequence[TreeTopology], batch: int, context: int, table: LatencyTable
) -> Iterator[Timing]:
    """Yield what steps may take at a batch at which `table` has no time of a tree, but at the one below:
    their tokens cost more as rows of plain decoding do from its smallest to its largest batch.
    """
    idx, plain = table.batches.index(batch), table.arm(PLAIN).base
    for tree in trees if idx else ():
        below = table.batches[idx - 1]
        known = table.seconds(tree.name, below, below * context)
        if math.isinf(table.arm(tree.name).base[idx]) and known < math.inf:
            per_row = (plain[-1] - plain[0]) / (table.batches[-1] - table.batches[0])
            added = per_row * (batch - below) * tree.num_nodes
            yield Timing(tree.name, batch, context, known + added)
