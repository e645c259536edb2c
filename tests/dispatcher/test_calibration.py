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

    spent = [0.0]

    def watched(batch, tree, context):
        timed.append((batch, tree.name, context))
        seconds = clock(batch, tree, context)
        spent[0] += seconds if seconds < math.inf else 0.0
        return seconds

    return calibrate(TREES, plan, watched, lambda batch: 1e-4 * batch, lambda: spent[0]), timed


@pytest.mark.parametrize(("batch", "name"), [(1, "tree-32"), (16, "off"), (64, "chain-1"), (4, "chain-3")])
def test_the_table_says_what_was_timed(batch, name):
    table, _ = run()
    tree = next(tree for tree in TREES if tree.name == name)
    expected = time_step(batch, tree, 1000)
    assert table.seconds(name, batch, batch * 1000) == pytest.approx(expected)
    assert table.catch_up_seconds(batch) == pytest.approx(1e-4 * batch)


def test_a_tree_that_cannot_pay_is_not_timed_at_larger_batches():
    table, timed = run()
    cells = {(batch, name) for batch, name, _ in timed}
    assert (16, "tree-32") in cells
    assert (64, "tree-32") not in cells
    assert math.isinf(table.seconds("tree-32", 64, 0))
    assert (64, "off") in cells


def timed_in(seconds):
    """Return the table and the cells timed where a step takes 0.4 s and more, within `seconds`."""
    plan = CalibrationPlan(PLAN.batches, PLAN.contexts, num_repeats=1, max_seconds=seconds)
    return run(plan, lambda *step: 100 * time_step(*step))


@pytest.mark.parametrize(
    ("seconds", "batches"), [(1e-9, (1,)), (1.0, (1,)), (2.0, (1, 4)), (50.0, (1, 4, 16, 64))]
)
def test_it_begins_no_step_when_its_time_is_over_and_no_plain_one_when_half_is(seconds, batches):
    table, timed = timed_in(seconds)
    assert table.batches == batches
    spent = [
        100 * time_step(batch, next(t for t in TREES if t.name == name), context)
        for batch, name, context in timed
    ]
    assert sum(spent[:-1]) <= max(seconds, spent[0])
    plain = [seconds for seconds, (_, name, _) in zip(spent, timed, strict=True) if name == "off"]
    assert sum(plain[:-1]) <= max(seconds / 2, spent[0])


def test_what_time_left_out_grows_as_plain_decoding_does():
    def by_token(batch, tree, context):
        return 0.4 + 0.02 * batch * tree.num_nodes

    plan = CalibrationPlan(PLAN.batches, PLAN.contexts, num_repeats=1, max_seconds=5.5)
    table, timed = run(plan, by_token)
    cells = {(batch, name) for batch, name, _ in timed}
    assert {(4, "chain-1"), (1, "chain-3"), (1, "tree-32")} <= cells
    assert not {(16, "chain-1"), (4, "chain-3")} & cells, "there was no time"
    assert table.batches == (1, 4, 16)
    for name, batch in (("chain-1", 16), ("chain-3", 4), ("chain-3", 16)):
        tree = next(tree for tree in TREES if tree.name == name)
        assert table.seconds(name, batch, 0) == pytest.approx(by_token(batch, tree, 0))


def test_rows_that_do_not_fit_are_left_out():
    def small(batch, tree, context):
        return math.inf if batch * context > 20_000 else time_step(batch, tree, context)

    table, _ = run(clock=small)
    assert table.batches == (1, 4, 16, 64)
    # At 64 rows only the short context fits: what a cached token adds is that of 16.
    assert table.seconds("off", 64, 64 * 4096) == pytest.approx(time_step(64, TREES[0], 4096), rel=0.01)
    assert run(clock=lambda *step: math.inf)[0] is None


def test_a_step_without_room_in_memory_is_neither_guessed_nor_tried_again():
    def small(batch, tree, context):
        return math.inf if batch * tree.num_nodes > 200 else time_step(batch, tree, context)

    table, timed = run(clock=small)
    assert math.isinf(table.seconds("tree-32", 16, 0))
    assert table.seconds("tree-32", 4, 4 * 256) == pytest.approx(time_step(4, TREES[3], 256))
    assert table.seconds("chain-1", 16, 16 * 256) == pytest.approx(time_step(16, TREES[1], 256))
    assert timed.count((16, "tree-32", 256)) == 1
    assert (16, "tree-32", 4096) not in timed


@pytest.mark.parametrize("batches", [(), (4, 1), (1, 1)])
def test_a_grid_that_does_not_rise_is_refused(batches):
    with pytest.raises(ConfigError, match="rising batches"):
        CalibrationPlan(batches=batches, contexts=(1,))
