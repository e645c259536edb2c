"""What a replica's counters say about its load and its capacity."""

import dataclasses

import pytest

from app.replica_load import LoadMeter, num_rows_within
from engine import EngineStats

ZERO = EngineStats(*(0,) * 17, (), (), 0.0)


def after(
    stats: EngineStats, batch: int, step_s: float, num_steps: int = 10, tokens: float = 2.0
) -> EngineStats:
    """Return the counters after steps of `batch` rows that emit `tokens` each."""
    return dataclasses.replace(
        stats,
        num_steps=stats.num_steps + num_steps,
        num_calls=stats.num_calls + num_steps * batch,
        num_output_tokens=stats.num_output_tokens + int(num_steps * batch * tokens),
        step_seconds=stats.step_seconds + num_steps * step_s,
    )


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], 64),
        ([(1, 0.01)], 64),  # good so far
        ([(8, 0.1)], 4),  # twice too slow
        ([(1, 0.011), (11, 0.021)], 40),  # 10 ms and 1 ms per row meet 50 ms at 40
        ([(1, 0.06), (11, 0.07)], 1),  # too slow even alone
        ([(1, 0.011), (2, 0.0111)], 64),
        ([(1, 0.02), (8, 0.01)], 64),  # larger was faster: no limit is in sight
    ],
)
def test_capacity_is_where_the_line_of_times_meets_the_objective(points, expected):
    assert num_rows_within(points, 0.05, 64) == pytest.approx(expected)


def test_a_stretch_is_measured_between_two_looks():
    meter = LoadMeter(0.05, 64)
    assert meter.observe(ZERO).time_per_token is None
    stats = after(ZERO, batch=4, step_s=0.02)
    assert meter.observe(stats).time_per_token == pytest.approx(0.01), "two tokens a step"
    assert meter.observe(stats).time_per_token == pytest.approx(0.01), "an idle stretch tells nothing"
    stats = after(stats, batch=4, step_s=0.02, tokens=1.0)
    assert meter.observe(stats).time_per_token == pytest.approx(0.02), "a draft that is worth nothing"


def test_capacity_follows_the_batches_that_ran():
    meter, stats = LoadMeter(0.05, 64), ZERO
    meter.observe(stats)
    for batch in (1, 4, 16, 1, 4, 16) * 10:
        stats = after(stats, batch, step_s=2 * (0.010 + 0.002 * batch))
        load = meter.observe(stats)
    assert load.capacity == pytest.approx(20, rel=0.02)


def test_load_counts_cache_and_queue():
    stats = dataclasses.replace(
        ZERO,
        num_running=3,
        num_waiting=2,
        num_finished=5,
        num_prompt_tokens=1000,
        num_free_blocks=10,
        num_held_blocks=30,
        num_cached_blocks=60,
    )
    load = LoadMeter(0.05, 64).observe(stats)
    assert (load.num_running, load.num_waiting) == (3, 2)
    assert load.kv_use == pytest.approx(0.3)
    assert load.waiting_tokens == pytest.approx(200), "two of ten requests with a hundred tokens each"
