import math
import random

import pytest

from engine.dispatcher.correction import CLIPS, TABLE_ERROR, LatencyModel
from engine.dispatcher.latency import ArmTimes, LatencyTable

TABLE = LatencyTable(
    (1, 8, 32),
    (
        ArmTimes("off", 1, (1.0, 1.2, 2.0), (1e-6,) * 3),
        ArmTimes("chain-2", 3, (1.5, 1.9, 3.0), (1e-6,) * 3),
        ArmTimes("tree-8", 8, (2.0, 3.0, math.inf), (1e-6,) * 3),
    ),
    (0.0,) * 3,
)


def observe(model, name, factor, batch=8, times=8, source=None):
    for _ in range(times):
        noise = source.lognormvariate(0, 0.02) if source else 1.0
        model.observe(name, batch, 100, noise * factor * TABLE.seconds(name, batch, 100))


def test_before_any_step_the_table_stands():
    model = LatencyModel(TABLE)
    for name in TABLE.names:
        assert model.seconds(name, 4, 50) == TABLE.seconds(name, 4, 50)
        assert not model.is_measured(name, 4)


def test_a_tree_that_was_seen_costs_what_was_seen():
    model = LatencyModel(TABLE)
    observe(model, "off", 1.0)
    observe(model, "chain-2", 1.15, times=40, source=random.Random(0))
    assert model.seconds("chain-2", 8, 100) == pytest.approx(
        1.15 * TABLE.seconds("chain-2", 8, 100), rel=0.01
    )
    assert model.seconds("off", 8, 100) == pytest.approx(TABLE.seconds("off", 8, 100), rel=0.01)


def test_a_machine_that_is_slow_for_all_slows_what_was_not_seen():
    model = LatencyModel(TABLE)
    observe(model, "off", 1.4)
    observe(model, "chain-2", 1.4)
    ratio = model.seconds("tree-8", 8, 100) / TABLE.seconds("tree-8", 8, 100)
    assert 1.2 < ratio < 1.4


@pytest.mark.parametrize(("factor", "believed"), [(9.0, math.exp(CLIPS[1])), (0.2, math.exp(-CLIPS[0]))])
def test_a_tree_is_corrected_within_clips_around_plain_decoding_which_is_not_clipped(factor, believed):
    model = LatencyModel(TABLE)
    observe(model, "off", 1.0, times=40)
    observe(model, "chain-2", factor, times=40)
    plain = model.seconds("off", 8, 100) / TABLE.seconds("off", 8, 100)
    assert plain == pytest.approx(1.0, abs=0.03)
    expected = believed * plain * TABLE.seconds("chain-2", 8, 100)
    assert model.seconds("chain-2", 8, 100) == pytest.approx(expected)


@pytest.mark.parametrize("num_before", [0, 1, 20])
def test_one_hiccup_hardly_moves_the_mean(num_before):
    model = LatencyModel(TABLE)
    observe(model, "off", 1.0, times=num_before)
    observe(model, "off", 50.0, times=1)
    observe(model, "off", 1.0, times=2)
    assert model.seconds("off", 8, 100) < 1.02 * TABLE.seconds("off", 8, 100)


def test_what_cannot_run_stays_unreachable():
    model = LatencyModel(TABLE)
    observe(model, "off", 0.5)
    model.observe("tree-8", 32, 0, 3.0)
    assert math.isinf(model.seconds("tree-8", 32, 0))
    assert not model.is_measured("tree-8", 32)


def test_a_tree_not_measured_may_be_cheaper_than_table_and_model_say():
    model = LatencyModel(TABLE)
    observe(model, "off", 1.3)
    tabled = TABLE.seconds("chain-2", 8, 100)
    assert model.least_seconds("chain-2", 8, 100) == pytest.approx((1 - TABLE_ERROR) * tabled)
    observe(model, "chain-2", 1.0)
    assert model.least_seconds("chain-2", 8, 100) == model.seconds("chain-2", 8, 100)


def test_plain_decoding_must_be_measured_again_after_a_while():
    model = LatencyModel(TABLE)
    observe(model, "off", 1.0)
    assert model.is_measured("off", 8)
    observe(model, "chain-2", 1.0, times=600)
    assert not model.is_measured("off", 8)
    assert model.is_measured("chain-2", 8)


def test_what_catching_up_takes_is_learnt_by_batch_and_cut_where_the_machine_stood_still():
    model = LatencyModel(TABLE)
    assert model.catch_up_seconds(1) == 0.0, "not in the table"
    name = TABLE.names[1]
    expected = model.seconds(name, 1, 0)
    for _ in range(40):
        model.observe_catch_up(name, 1, 0, 1.5 * expected)
    assert model.catch_up_seconds(1) == pytest.approx(0.5 * expected, rel=0.02)
    assert model.seconds(name, 1, 0) == expected, "it is no part of a step"
    model.observe_catch_up(name, 1, 0, 1000 * expected)
    assert model.catch_up_seconds(1) <= 0.57 * expected
    model.observe_catch_up(name, 1, 0, 0.1 * expected)
    assert 0.0 < model.catch_up_seconds(1) < 0.5 * expected
