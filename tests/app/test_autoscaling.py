"""`decide` over traces of figures: replicas follow demand, cache and queue, and nothing that only
flickers.
"""

import dataclasses
from types import SimpleNamespace

import pytest

from app.autoscaling import (
    ReplicaFigures,
    ReplicaPolicy,
    ScalingMemory,
    ScalingRule,
    decide,
    read_figures,
)

RULE = ScalingRule(up_use=0.8, down_use=0.5, max_waiting_tokens=1000.0, downscale_after_s=60.0)


def replica(**changes: float) -> ReplicaFigures:
    figures = ReplicaFigures(
        num_running=0, num_waiting=0, waiting_tokens=0, kv_use=0, capacity=10, ready_seconds=5
    )
    return dataclasses.replace(figures, **changes)


def spread(demand: float, num_replicas: int, **changes: float) -> list[ReplicaFigures]:
    return [replica(num_running=demand / num_replicas, **changes) for _ in range(num_replicas)]


def play(trace, target=1, rule=RULE, step_s=2.0, **changes) -> list[int]:
    """Return the target after each demand of a trace; replicas are there at once."""
    memory, targets = ScalingMemory(), []
    for idx, demand in enumerate(trace):
        target, memory = decide(spread(demand, target, **changes), target, memory, idx * step_s, rule)
        targets.append(target)
    return targets


@pytest.mark.parametrize(("demand", "expected"), [(0, 1), (8, 1), (8.1, 2), (16, 2), (40, 5), (41, 6)])
def test_a_steady_demand_fills_each_replica_to_its_use(demand, expected):
    assert play([demand] * 3)[-1] == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_use": 0.79}, 2),
        ({"kv_use": 0.81}, 3),
        ({"waiting_tokens": 1000}, 2),
        ({"waiting_tokens": 1600}, 4),
        ({"num_waiting": 9}, 3),
    ],
)
def test_cache_and_queue_ask_for_replicas_as_well(changes, expected):
    figures = [replica(**changes), replica(**changes)]
    assert decide(figures, 2, ScalingMemory(), 0.0, RULE)[0] == expected


def test_growth_is_answered_ahead_by_the_time_that_a_start_takes():
    trace = [float(idx) for idx in range(8)]  # half a sequence more per second
    early, late = play(trace, ready_seconds=20), play(trace, ready_seconds=0)
    assert late == [1] * 8
    assert early[-1] == 2
    assert max(early) == 2, "a trend promises no more than twice the demand"


def test_fewer_replicas_come_one_by_one_and_only_after_a_long_calm():
    targets = play([40] + [1] * 130)
    assert targets[0] == 5
    changes = [idx * 2 for idx in range(1, len(targets)) if targets[idx] != targets[idx - 1]]
    assert changes == [62, 122, 182, 242]
    assert targets[-1] == 1


def test_one_peak_begins_the_calm_anew():
    trace = [16] + [1] * 29 + [16] + [1] * 29
    assert play(trace, ready_seconds=0) == [2] * 60


def test_a_replica_that_starts_slowly_is_kept_longer():
    assert play([16] + [1] * 35, ready_seconds=5)[-1] == 1
    assert play([16] + [1] * 35, ready_seconds=60)[-1] == 2


@pytest.mark.parametrize("low", [6.0, 7.9])
def test_a_capacity_that_flickers_moves_no_replica(low):
    """The choice of a tree changes a replica's capacity; between the two uses nothing follows from that."""
    memory, target = ScalingMemory(), 2
    for idx in range(200):
        figures = spread(10, target, capacity=10 if idx % 2 else low + 2)
        target, memory = decide(figures, target, memory, idx * 2.0, RULE)
        assert target == 2


def test_replicas_that_say_nothing_yet_are_neither_load_nor_reason():
    assert decide([], 3, ScalingMemory(), 0.0, RULE) == (3, ScalingMemory())
    assert decide(spread(30, 2), 4, ScalingMemory(), 0.0, RULE)[0] == 4, "two more are starting"


def test_every_decision_is_at_least_one_replica():
    target, memory = 2, ScalingMemory()
    for idx in range(500):
        target, memory = decide(spread(0, target), target, memory, idx * 10.0, RULE)
    assert target == 1


def context(metrics, target, now, state=None):
    return SimpleNamespace(
        aggregated_metrics=metrics,
        target_num_replicas=target,
        current_time=now,
        policy_state=state or {},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=6,
    )


def columns(figures):
    return {
        f.name: {f"replica-{idx}": getattr(r, f.name) for idx, r in enumerate(figures)}
        for f in dataclasses.fields(ReplicaFigures)
    }


def test_the_policy_of_serve_remembers_only_what_it_returned():
    demand = spread(1, 2)
    state: dict[str, object] = {}
    targets = []
    for now in range(0, 70, 10):
        policy = ReplicaPolicy(up_use=0.8, down_use=0.5, max_waiting_tokens=1000.0, downscale_after_s=60.0)
        target, state = policy(context(columns(demand), 2, float(now), state))
        targets.append(target)
    assert targets == [2] * 6 + [1]


def test_the_policy_keeps_the_bounds_and_says_nothing_there(caplog):
    with caplog.at_level("INFO", "ray.serve"):
        assert ReplicaPolicy()(context(columns(spread(500, 6)), 6, 1.0))[0] == 6
        assert not caplog.records
        assert ReplicaPolicy()(context(columns(spread(500, 5)), 5, 1.0))[0] == 6
    assert len(caplog.records) == 1


def test_the_policy_holds_without_figures():
    assert ReplicaPolicy()(context(None, 4, 1.0))[0] == 4
    assert ReplicaPolicy()(context({"kv_use": {"a": 1.0}}, 4, 1.0))[0] == 4, "not all of them"


def test_figures_are_read_of_replicas_that_gave_all():
    metrics = columns([replica(num_running=1), replica(num_running=2)])
    del metrics["kv_use"]["replica-0"]
    assert read_figures(metrics) == [replica(num_running=2)]
