"""Timing a tiny engine: what counts is that steps are those asked for; their seconds are the machine's."""

import math

import pytest

from engine.dispatcher.calibration import CalibrationPlan, calibrate
from engine.step_times import StepTimes
from engine.tree.library import TreeLibrary
from tests.exactness.head import build_drafter
from tests.exactness.tiny import EngineShape, build_engine, build_target

TARGET = build_target()
LIBRARY = TreeLibrary.search(max_depth=15)


def engine_of(**shape):
    shape = EngineShape(**shape)
    return build_engine(TARGET, build_drafter(shape, TARGET), shape)


@pytest.mark.parametrize(("batch", "name"), [(1, "off"), (3, "tree-8"), (8, "chain-2")])
def test_steps_of_that_batch_and_tree_are_timed_and_nothing_is_left_behind(batch, name):
    engine = engine_of()
    assert 0.0 < StepTimes(engine, num_steps=3).time_step(batch, LIBRARY.get(name), 20) < 10.0
    stats = engine.stats()
    assert {tree for tree, _ in stats.steps_by_tree} == {name}
    assert dict(stats.steps_by_tree)[name] >= 5 * batch
    assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)


@pytest.mark.parametrize("shape", [{"max_num_seqs": 2}, {"num_blocks": 10}])
def test_a_batch_that_does_not_fit_takes_for_ever(shape):
    times = StepTimes(engine_of(**shape), num_steps=2)
    assert math.isinf(times.time_step(4, LIBRARY.get("off"), 30))
    assert times.time_step(1, LIBRARY.get("off"), 4) < 10.0, "and the next one is timed as ever"


def test_catching_up_is_timed_after_plain_steps():
    engine = engine_of()
    assert 0.0 <= StepTimes(engine, num_steps=2).time_catch_up(2, LIBRARY.get("chain-1"), 6) < 10.0
    assert {tree for tree, _ in engine.stats().steps_by_tree} == {"off", "chain-1"}


def test_an_engine_can_be_calibrated():
    times = StepTimes(engine_of(), num_steps=2)
    trees = [LIBRARY.get(name) for name in ("off", "chain-1", "tree-8")]
    plan = CalibrationPlan(batches=(1, 4), contexts=(16,), num_repeats=1)
    table = calibrate(trees, plan, times.time_step, lambda batch: times.time_catch_up(batch, trees[1], 4))
    assert table.names == ("off", "chain-1", "tree-8")
    assert all(math.isfinite(table.seconds(name, 1, 16)) for name in ("off", "chain-1"))
