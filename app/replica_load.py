"""How loaded one replica is and how much it can carry, from the counters of its engine.

What follows for the number of replicas is left to `autoscaling`, for the way of a call to `routing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine import EngineStats

_MEMORY = 0.8  # of an older measurement of the same batch that a new one leaves


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """`capacity` is how many sequences decode at once within the time-per-token objective. `waiting_tokens`
    are estimated by the mean length of all prompts so far. `time_per_token` is that of one sequence, in
    seconds, None before the first step.
    """

    num_running: int
    num_waiting: int
    waiting_tokens: float
    kv_use: float
    capacity: float
    time_per_token: float | None


class LoadMeter:
    """Compares counters between two looks. The capacity is learned from the batches that really ran."""

    def __init__(self, objective_s: float, max_rows: int) -> None:
        self._objective_s, self._max_rows = objective_s, max_rows
        self._before: EngineStats | None = None
        self._time_per_token: float | None = None
        self._by_batch: dict[int, tuple[float, float]] = {}  # power of two -> mean batch, time per token

    def observe(self, stats: EngineStats) -> ReplicaLoad:
        """Return the load now; each look ends the stretch that the next one measures."""
        self._measure(stats)
        num_blocks = stats.num_free_blocks + stats.num_held_blocks + stats.num_cached_blocks
        num_ended = stats.num_finished + stats.num_aborted + stats.num_failed
        num_requests = num_ended + stats.num_running + stats.num_waiting
        return ReplicaLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            waiting_tokens=stats.num_waiting * stats.num_prompt_tokens / max(1, num_requests),
            kv_use=stats.num_held_blocks / max(1, num_blocks),
            capacity=num_rows_within(list(self._by_batch.values()), self._objective_s, self._max_rows),
            time_per_token=self._time_per_token,
        )

    def _measure(self, stats: EngineStats) -> None:
        before, self._before = self._before, stats
        if before is None or stats.num_steps <= before.num_steps or stats.num_calls <= before.num_calls:
            return
        num_steps, num_calls = stats.num_steps - before.num_steps, stats.num_calls - before.num_calls
        batch = max(1.0, num_calls / num_steps)
        tokens_per_call = max(1.0, (stats.num_output_tokens - before.num_output_tokens) / num_calls)
        time = (stats.step_seconds - before.step_seconds) / num_steps / tokens_per_call
        self._time_per_token = time
        bucket = int(batch).bit_length()
        old_batch, old_time = self._by_batch.get(bucket, (batch, time))
        self._by_batch[bucket] = (
            _MEMORY * old_batch + (1 - _MEMORY) * batch,
            _MEMORY * old_time + (1 - _MEMORY) * time,
        )


def num_rows_within(points: Sequence[tuple[float, float]], objective_s: float, max_rows: int) -> float:
    """Return how many rows keep the time per token within the objective, 1 to `max_rows`: where the line
    through (batch, time per token) meets it. A single point that keeps it says nothing of larger batches,
    which then count as good until one is measured.
    """
    if not points:
        return float(max_rows)
    mean_batch = sum(batch for batch, _ in points) / len(points)
    mean_time = sum(time for _, time in points) / len(points)
    spread = sum((batch - mean_batch) ** 2 for batch, _ in points)
    slope = 0.0
    if spread > 0:
        slope = sum((batch - mean_batch) * (time - mean_time) for batch, time in points) / spread
    if slope <= 0:  # no step of a larger batch was slower: only the objective itself tells
        rows = float(max_rows) if mean_time <= objective_s else mean_batch * objective_s / mean_time
    else:
        rows = mean_batch + (objective_s - mean_time) / slope
    return min(float(max_rows), max(1.0, rows))
