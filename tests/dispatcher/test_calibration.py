"""Calibration with a machine made of a formula."""

import math

import pytest

from engine.dispatcher.calibration import CalibrationPlan, calibrate
from engine.errors import ConfigError
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import search
from engine.tree.topology import chain, root_only

TREES = (root_only(), chain(1), chain(3), search(DEFAULT_PROFILE, 32, 6))
PLAN = CalibrationPlan(batches=(1, 4, 16, 64), contexts=(256, 4096))


def time_step(batch, tree, context):
    work = 4.0 + 0.1 * max(0, batch * tree.num_nodes - 64) + 0.3 * tree.depth
    return 1e-3 * work + 1e-8 * batch * context


def run(plan=PLAN, clock=time_step):
    timed = []

    def watched(batch, tree, context):
        timed.append((batch, tree.name))
        return clock(batch, tree, context)

    return calibrate(TREES, plan, watched, lambda batch: 1e-4 * batch), timed


@pytest.mark.parametrize(("batch", "name"), [(1, "tree-32"), (16, "off"), (64, "chain-1"), (4, "chain-3")])
def test_the_table_says_what_was_timed(batch, name):
    table, _ = run()
    tree = next(tree for tree in TREES if tree.name == name)
    expected = time_step(batch, tree, 1000)
    assert table.seconds(name, batch, batch * 1000) == pytest.approx(expected)
    assert table.catch_up_seconds(batch) == pytest.approx(1e-4 * batch)


def test_a_tree_that_cannot_pay_is_not_timed_at_larger_batches():
    table, timed = run()
    assert (16, "tree-32") in timed
    assert (64, "tree-32") not in timed
    assert math.isinf(table.seconds("tree-32", 64, 0))
    assert (64, "off") in timed


def test_out_of_time_it_keeps_plain_decoding_and_small_batches():
    def slow(*step):
        return 100 * time_step(*step)

    table, timed = run(CalibrationPlan(PLAN.batches, PLAN.contexts, max_seconds=20.0), slow)
    assert {batch for batch, name in timed if name == "off"} == {1, 4, 16, 64}
    assert {batch for batch, name in timed if name != "off"} == {1, 4}
    assert math.isinf(table.seconds("chain-1", 16, 0))


@pytest.mark.parametrize("batches", [(), (4, 1), (1, 1)])
def test_a_grid_that_does_not_rise_is_refused(batches):
    with pytest.raises(ConfigError, match="rising batches"):
        CalibrationPlan(batches=batches, contexts=(1,))
