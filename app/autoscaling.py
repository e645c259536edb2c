"""How many replicas a deployment needs, by the figures that its replicas give.

`decide` is a pure function; measuring the figures is left to `replica_load`, bounds and starting replicas to
Serve, whose controller runs this module: it imports nothing but the standard library.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

logger = logging.getLogger("ray.serve")

_TREND_SECONDS = 10.0  # over which growth is measured
_MOST_AHEAD = 2.0  # a trend may promise at most so many times the demand of now


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """What one replica says of itself.

    `capacity` is how many sequences it can decode at once within the time-per-token objective: the headroom
    is what lies between that and `num_running` with `num_waiting`. `waiting_tokens` are prompt tokens in its
    queue, `kv_use` the share of its cache that sequences hold, `ready_seconds` what its start took.
    """

    num_running: float
    num_waiting: float
    waiting_tokens: float
    kv_use: float
    capacity: float
    ready_seconds: float


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """When to scale. More replicas start where the present ones are filled beyond `up_use`; one ends where
    the others would be filled to `down_use` at most, for `downscale_after_s` without a break. The gap between
    the two keeps a choice of trees that moves the capacity from moving replicas.
    """

    up_use: float = 0.85
    down_use: float = 0.6
    max_waiting_tokens: float = 8192.0
    downscale_after_s: float = 300.0


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """What a decision hands to the next one: the demand at `trend_time`, and since when less would do."""

    trend_time: float | None = None
    trend_demand: float = 0.0
    low_since: float | None = None


def decide(
    figures: Sequence[ReplicaFigures], target: int, memory: ScalingMemory, now: float, rule: ScalingRule
) -> tuple[int, ScalingMemory]:
    """Return how many replicas there shall be, and what to remember. Without figures nothing changes."""
    if not figures:
        return target, memory
    demand = sum(replica.num_running + replica.num_waiting for replica in figures)
    ready_seconds = max(replica.ready_seconds for replica in figures)
    growth, memory = _growth(demand, memory, now)
    coming = min(demand + growth * ready_seconds, demand * _MOST_AHEAD)
    wanted = _num_needed(figures, coming, rule.up_use, rule)
    if wanted > target:
        return wanted, _remember(memory, low_since=None)
    if _num_needed(figures, coming, rule.down_use, rule) >= target:
        return target, _remember(memory, low_since=None)
    low_since = now if memory.low_since is None else memory.low_since
    if now - low_since < max(rule.downscale_after_s, 2 * ready_seconds):
        return target, _remember(memory, low_since=low_since)
    # One at a time: what the others then carry is measured before the next.
    return target - 1, _remember(memory, low_since=now)


def _num_needed(figures: Sequence[ReplicaFigures], demand: float, use: float, rule: ScalingRule) -> int:
    """Return how many replicas, filled to `use`, carry this demand, the cached tokens and the queue."""
    capacity = sum(replica.capacity for replica in figures) / len(figures)
    held = sum(replica.kv_use for replica in figures)
    waiting = sum(replica.waiting_tokens for replica in figures)
    needs = (demand / (max(1.0, capacity) * use), held / use, waiting / rule.max_waiting_tokens)
    return max(1, math.ceil(max(needs) - 1e-9))


def _growth(demand: float, memory: ScalingMemory, now: float) -> tuple[float, ScalingMemory]:
    """Return by how much the demand rises per second, 0 where it falls or too little is known."""
    if memory.trend_time is None:
        return 0.0, ScalingMemory(now, demand, memory.low_since)
    seconds = now - memory.trend_time
    growth = max(0.0, demand - memory.trend_demand) / max(seconds, _TREND_SECONDS)
    if seconds >= _TREND_SECONDS:
        memory = ScalingMemory(now, demand, memory.low_since)
    return growth, memory


def _remember(memory: ScalingMemory, low_since: float | None) -> ScalingMemory:
    return ScalingMemory(memory.trend_time, memory.trend_demand, low_since)


class ReplicaPolicy:
    """`decide` as Serve calls it. It is made anew by every deployment, so all memory is in what it
    returns.
    """

    def __init__(self, **rule: float) -> None:
        self._rule = ScalingRule(**rule)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas within Serve's bounds, and the memory."""
        memory = ScalingMemory(**{f.name: context.policy_state.get(f.name) for f in fields(ScalingMemory)})
        if memory.trend_time is None:
            memory = ScalingMemory(low_since=memory.low_since)
        figures = read_figures(context.aggregated_metrics)
        target = context.target_num_replicas
        wanted, memory = decide(figures, target, memory, context.current_time, self._rule)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        wanted = max(least, min(wanted, most))
        if wanted != target:  # Serve asks ten times a second: nothing is said of what is there already
            logger.info("autoscaling from=%d to=%d figures=%s", target, wanted, figures)
        return wanted, asdict(memory)


def read_figures(metrics: Mapping[str, Mapping[Any, float]] | None) -> list[ReplicaFigures]:
    """Return the figures of every replica that gave all of them."""
    columns = [(metrics or {}).get(f.name, {}) for f in fields(ReplicaFigures)]
    replicas = set.intersection(*(set(column) for column in columns))
    return [ReplicaFigures(*(column[replica] for column in columns)) for replica in sorted(replicas, key=str)]
