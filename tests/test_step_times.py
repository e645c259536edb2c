"""Timing a tiny runner: what counts is that steps are those asked for; their seconds are the machine's."""

import dataclasses
import math

import pytest

from engine.config import EngineConfig, SpeculationConfig
from engine.dispatcher.adaptive import AdaptiveDispatcher
from engine.dispatcher.static import StaticDispatcher
from engine.engine import assemble_engine
from engine.runner.graphs import CaptureMemoryError
from engine.runner.worker import Worker
from engine.step_times import StepTimes, candidates, measure_latency, plan_timing
from engine.tree.library import TreeLibrary
from tests.exactness.head import build_drafter
from tests.exactness.tiny import EngineShape, build_engine, build_target, prompts, request_of, run

TARGET = build_target()
LIBRARY = TreeLibrary.search(max_depth=15)


def engine_of(**shape):
    shape = EngineShape(**shape)
    return build_engine(TARGET, build_drafter(shape, TARGET), shape)


class Watched:
    """A runner that notes the trees of every step."""

    def __init__(self, engine, is_captured=False):
        self._runner, self.is_captured = engine._runner, is_captured
        self.steps, self.captured = [], []

    def capture(self, topology, num_rows):
        self.captured.append((topology.name, *num_rows))

    def launch(self, plan):
        assert not plan.chunks, "no prompt is run"
        self.steps.append((len(plan.rows), *{row.topology.name for row in plan.rows}))
        return self._runner.launch(plan)


def times_of(num_steps=2, **shape):
    engine = engine_of(**shape)
    runner = Watched(engine)
    return StepTimes(runner, engine.facts, num_steps), runner, engine


@pytest.mark.parametrize(("batch", "name"), [(1, "off"), (3, "tree-8"), (8, "chain-2")])
def test_steps_of_that_batch_and_tree_are_timed_once_they_are_captured(batch, name):
    times, runner, _ = times_of(3)
    assert 0.0 < times.time_step(batch, LIBRARY.get(name), 20) < 10.0
    assert runner.steps == [(batch, name)] * 4
    assert runner.captured == [(name, batch)]


def test_what_the_device_has_no_memory_to_capture_takes_for_ever():
    times, runner, _ = times_of()

    def refuse(topology, num_rows):
        raise CaptureMemoryError(f"no memory for {topology.name}")

    runner.capture = refuse
    assert math.isinf(times.time_step(1, LIBRARY.get("tree-8"), 20))
    assert math.isinf(times.time_catch_up(LIBRARY.get("off"), LIBRARY.get("chain-1"), 6, 1))
    assert not runner.steps


@pytest.mark.parametrize("shape", [{"max_num_seqs": 2}, {"num_blocks": 10}])
def test_a_batch_that_does_not_fit_takes_for_ever(shape):
    times, runner, _ = times_of(**shape)
    assert math.isinf(times.time_step(4, LIBRARY.get("off"), 30))
    assert math.isinf(times.time_catch_up(LIBRARY.get("off"), LIBRARY.get("chain-1"), 8, 4, 30))
    assert runner.steps == []
    assert times.time_step(1, LIBRARY.get("off"), 4) < 10.0, "and the next one is timed as ever"


def test_catching_up_is_timed_after_plain_steps():
    times, runner, _ = times_of()
    assert 0.0 <= times.time_catch_up(LIBRARY.get("off"), LIBRARY.get("chain-1"), 6, 2) < 10.0
    assert runner.steps == [(2, "off")] * 6 + [(2, "chain-1")] * 3


def test_requests_after_timing_find_nothing_of_it():
    asked = [
        request_of(f"r{idx}", prompt, 100 + idx, temperature=0.8, repetition_penalty=1.2)
        for idx, prompt in enumerate(prompts(6))
    ]
    fresh = run(engine_of(mode="tree-8"), asked)
    times, _, engine = times_of(mode="tree-8")
    for name in ("off", "tree-16", "chain-5"):
        times.time_step(8, LIBRARY.get(name), 60)
    assert run(engine, asked) == fresh


def config_of(**speculation):
    return EngineConfig(
        model="tiny", block_size=4, max_num_seqs=8, speculation=SpeculationConfig(**speculation)
    )


def worker_of(library=LIBRARY):
    engine = engine_of()
    return Worker(engine._runner, library, engine.facts)


def test_an_engine_that_was_timed_learns():
    worker = worker_of()
    table = measure_latency(config_of(), worker)
    assert table.names[0] == "off"
    assert math.isfinite(table.seconds("chain-1", 1, 16))
    assert not table.is_padded
    engine = assemble_engine(config_of(), worker, latency=table)
    assert type(engine._dispatcher) is AdaptiveDispatcher
    run(engine, [request_of("r", (7, 8, 9), 1)])
    assert engine.stats().dispatch.state is not None


@pytest.mark.parametrize(
    ("speculation", "library"),
    [
        ({"mode": "table"}, LIBRARY),
        ({"mode": "chain-3"}, LIBRARY),
        ({"table": ((8, "chain-2"),)}, LIBRARY),
        ({}, TreeLibrary((), max_depth=0)),
    ],
    ids=["a table", "a tree", "a table of its own", "no draft"],
)
def test_nothing_is_timed_where_nothing_would_be_chosen_by_it(speculation, library):
    worker = worker_of(library)
    assert measure_latency(config_of(**speculation), worker) is None
    engine = assemble_engine(config_of(**speculation), worker)
    assert type(engine._dispatcher) is StaticDispatcher


def test_candidates_are_the_trees_of_the_draft_and_short_chains():
    names = [tree.name for tree in candidates(LIBRARY)]
    assert names[0] == "off"
    assert {*names} == {*LIBRARY.names, "chain-1", "chain-2", "chain-3", "chain-5"}
    shallow = TreeLibrary.search(max_depth=2)
    assert {"chain-2"} <= {tree.name for tree in candidates(shallow)}
    assert all(tree.depth <= 2 for tree in candidates(shallow))


@pytest.mark.parametrize(
    ("is_captured", "most", "batches"),
    [
        (False, 1, (1,)),
        (False, 8, (1, 2, 4, 8)),
        (False, 11, (1, 2, 4, 8, 11)),
        (True, 30, (1, 2, 4, 8, 16, 24, 30)),
        (True, 96, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96)),
    ],
)
def test_every_number_of_rows_that_is_captured_is_timed(is_captured, most, batches):
    facts = dataclasses.replace(engine_of().facts, max_num_seqs=most, max_model_len=4000)
    assert plan_timing(facts, is_captured=is_captured).batches == batches
    assert plan_timing(facts, is_captured=is_captured).contexts == (64, 1024)
    short = dataclasses.replace(facts, max_model_len=100)
    assert plan_timing(short, is_captured=is_captured).contexts == (50,)
