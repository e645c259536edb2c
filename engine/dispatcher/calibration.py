"""What to time at the start, so that a latency table can be fitted. Running and timing steps is its caller's.

Batches rise, so that a tree that cannot pay at one of them need not be timed at larger ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.dispatcher.arms import could_pay
from engine.dispatcher.latency import PLAIN, Experts, LatencyTable, Timing
from engine.errors import ConfigError
from engine.tree.topology import TreeTopology

TimeStep = Callable[[int, TreeTopology, int], float]  # (batch, tree, cached tokens of a row) -> seconds
TimeCatchUp = Callable[[int], float]  # batch -> seconds that a first drafting step costs more


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """The grid to time: each step `num_repeats` times, trees only while all steps so far lasted less than
    `max_seconds` in sum. Plain decoding is timed whatever it takes.
    """

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
    *,
    is_padded: bool = False,
    experts: Experts | None = None,
) -> LatencyTable:
    """Time `trees`, plain decoding among them, and return what steps cost.

    Trees of a batch and context are timed in turns, so that a machine that slows down slows all of them. What
    was not timed is unreachable: a tree that could not pay at a smaller batch, and what `max_seconds` left
    out, largest batches first.
    """
    plain = next(tree for tree in trees if tree.name == PLAIN)
    timings = [timing for batch in plan.batches for timing in _time(batch, (plain,), plan, time_step)]
    left = [tree for tree in trees if tree is not plain]
    for batch in plan.batches:
        if sum(timing.seconds for timing in timings) >= plan.max_seconds:
            break
        timings += _time(batch, left, plan, time_step)
        fitted = LatencyTable.fit(timings, {tree.name: tree.num_nodes for tree in trees})
        left = [tree for tree in left if could_pay(tree, fitted, batch)]
    return LatencyTable.fit(
        timings,
        {tree.name: tree.num_nodes for tree in trees},
        [(batch, time_catch_up(batch)) for batch in plan.batches],
        is_padded=is_padded,
        experts=experts,
    )


def _time(
    batch: int, trees: Sequence[TreeTopology], plan: CalibrationPlan, time_step: TimeStep
) -> list[Timing]:
    return [
        Timing(tree.name, batch, context, time_step(batch, tree, context))
        for context in plan.contexts
        for _ in range(plan.num_repeats)
        for tree in trees
    ]
