import dataclasses
import itertools
import math
import random

import pytest

from engine.dispatcher.latency import ArmTimes, Experts, LatencyTable, Timing
from engine.errors import ConfigError

NODES = {"off": 1, "chain-1": 2, "tree-8": 8}
BATCHES = (1, 4, 16)


def true_seconds(name, batch, context):
    return 1e-3 * (4 + NODES[name] * batch / 16) + 2e-8 * NODES[name] * batch * context


def timings(noise=0.0, seed=0, contexts=(512, 4096)):
    source = random.Random(seed)
    return [
        Timing(name, batch, context, true_seconds(name, batch, context) * source.lognormvariate(0, noise))
        for name in NODES
        for batch in BATCHES
        for context in contexts
        for _ in range(5)
    ]


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("context", [0, 512, 2000, 10_000])
def test_exact_timings_give_the_line_back(name, batch, context):
    table = LatencyTable.fit(timings(), NODES)
    expected = true_seconds(name, batch, context)
    assert table.seconds(name, batch, batch * context) == pytest.approx(expected)


def test_between_batches_it_interpolates_or_pads():
    low, high = true_seconds("tree-8", 4, 0), true_seconds("tree-8", 16, 0)
    table = LatencyTable.fit(timings(), NODES)
    assert table.seconds("tree-8", 7, 0) == pytest.approx(low + (high - low) / 4)
    assert LatencyTable.fit(timings(), NODES, is_padded=True).seconds("tree-8", 7, 0) == pytest.approx(high)


@pytest.mark.parametrize("seed", range(8))
def test_noise_does_not_break_monotony(seed):
    table = LatencyTable.fit(timings(noise=0.3, seed=seed), NODES)
    for name in NODES:
        seconds = [table.seconds(name, batch, 0) for batch in range(1, 17)]
        assert all(left <= right + 1e-12 for left, right in itertools.pairwise(seconds))
        assert table.seconds(name, 4, 100) <= table.seconds(name, 4, 5000)
        assert all(table.seconds("off", batch, 0) <= table.seconds(name, batch, 0) for batch in BATCHES)


def test_what_was_not_timed_is_unreachable():
    timed = [t for t in timings() if not (t.tree == "tree-8" and t.batch == 16)]
    table = LatencyTable.fit(timed, NODES)
    assert math.isfinite(table.seconds("tree-8", 4, 0))
    assert math.isinf(table.seconds("tree-8", 5, 0))
    assert math.isinf(table.seconds("chain-1", 17, 0))
    assert math.isfinite(table.seconds("off", 64, 0))


@pytest.mark.parametrize("seconds", [(1.0, 100.0), (1.0, 1.0), (100.0, 1.0)])
def test_no_step_is_free_however_noisy_its_timings(seconds):
    timed = [
        Timing(name, 1, context, each)
        for name in NODES
        for context, each in zip((64, 4096), seconds, strict=True)
    ]
    table = LatencyTable.fit(timed, NODES)
    for name in NODES:
        assert table.seconds(name, 1, 0) >= 0.05 * min(seconds)
        assert table.arm(name).per_token[0] >= 0.0


def test_one_context_gives_no_slope():
    table = LatencyTable.fit(timings(contexts=(512,)), NODES)
    assert table.arm("off").per_token == (0.0, 0.0, 0.0)


def test_experts_fill_up_between_batches():
    """Reading experts is a concave function of tokens: half way in tokens is more than half way in time."""
    experts = Experts(num_experts=128, num_active=1)
    assert [round(experts.distinct(n), 1) for n in (1, 4, 8, 16, 32, 64)] == [1.0, 4.0, 7.8, 15.1, 28.4, 50.5]
    arm = ArmTimes("off", 1, (1.0, 2.0), (0.0, 0.0))
    dense = LatencyTable((1, 129), (arm,), (0.0, 0.0))
    sparse = dataclasses.replace(dense, experts=experts)
    assert dense.seconds("off", 65, 0) == pytest.approx(1.5)
    assert sparse.seconds("off", 65, 0) > 1.6


def test_a_table_survives_json_with_its_unreachable_cells():
    timed = [t for t in timings() if not (t.tree == "tree-8" and t.batch == 16)]
    table = LatencyTable.fit(timed, NODES, [(4, 1e-3)], is_padded=True, experts=Experts(16, 1))
    assert LatencyTable.from_json(table.to_json()) == table
    assert table.catch_up == (0.0, 1e-3, 1e-3)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"batches": [1], "arms": [], "catch_up": [0]}', "null"])
def test_other_json_is_refused(text):
    with pytest.raises(ConfigError, match="latency table"):
        LatencyTable.from_json(text)


@pytest.mark.parametrize(
    ("batches", "base", "catch_up"),
    [((), (), ()), ((4, 1), (1.0, 1.0), (0.0, 0.0)), ((1,), (math.inf,), (0.0,)), ((1,), (1.0,), ())],
)
def test_an_impossible_table_is_refused(batches, base, catch_up):
    with pytest.raises(ConfigError, match=r"latency table|batches"):
        LatencyTable(batches, (ArmTimes("off", 1, base, base),), catch_up)
