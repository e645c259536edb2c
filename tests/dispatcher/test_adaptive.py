"""The adaptive dispatcher against published costs and acceptance, and against an oracle in simulated
traffic.
"""

import dataclasses

import pytest

from benchmarks.dispatcher_simulation import Simulation, Traffic, build_dispatcher
from benchmarks.dispatcher_world import (
    PUBLISHED_BATCHES,
    PUBLISHED_SURVIVAL,
    Acceptance,
    chain_profile,
    h200_world,
    never,
    published_world,
)
from engine.batch import Load
from engine.config import SpeculationConfig
from engine.dispatcher.adaptive import DECIDE_EVERY, AdaptiveDispatcher
from engine.dispatcher.control import choose_arm
from engine.dispatcher.state import DispatchState
from engine.dispatcher.static import StaticDispatcher
from engine.errors import ConfigError
from engine.step_stats import RowStats, StepStats
from engine.tree.library import DEFAULT_PROFILE, TreeLibrary
from engine.tree.search import acceptance_length
from engine.tree.topology import TreeTopology

WORLD = published_world()


def load_of(batch: int) -> Load:
    return Load(num_running=batch, num_waiting=0, num_free_blocks=1000, num_cached_tokens=512 * batch)


def oracle(profile, batch):
    return max(
        WORLD.arms, key=lambda tree: acceptance_length(tree, profile) / WORLD.seconds(tree.name, batch, 0)
    ).name


def knowing(profile, world=WORLD) -> AdaptiveDispatcher:
    """Return a dispatcher that has seen so much of `profile` that it is sure of it."""
    return build_dispatcher(world, prior=profile, prior_strength=1e6)


@pytest.mark.parametrize("batch", PUBLISHED_BATCHES)
@pytest.mark.parametrize("head", PUBLISHED_SURVIVAL)
def test_the_chosen_arm_is_the_oracles_in_every_published_cell(head, batch):
    profile = chain_profile(PUBLISHED_SURVIVAL[head])
    assert knowing(profile).choose(load_of(batch)).name == oracle(profile, batch)


def test_low_acceptance_at_batch_64_decodes_plainly():
    profile = chain_profile(PUBLISHED_SURVIVAL["eagle-low"])
    assert knowing(profile).choose(load_of(64)).name == "off"


@pytest.mark.parametrize("head", PUBLISHED_SURVIVAL)
def test_the_cliff_is_never_chosen_on_the_way_to_it(head):
    dispatcher = knowing(chain_profile(PUBLISHED_SURVIVAL[head]))
    chosen = {dispatcher.choose(load_of(batch)).name for batch in range(33, 65)}
    assert "chain-7" not in chosen


H200 = h200_world()
FREE = {"num_waiting": 0, "num_free_blocks": 1000}


def drive(dispatcher, num_steps=200, batch=8, seed=0, traffic=None, profile=DEFAULT_PROFILE):
    process = Acceptance(lambda _: profile)
    traffic = traffic or Traffic(lambda _: batch)
    return Simulation(H200, process, traffic, dispatcher, seed).run(num_steps)


def test_the_same_history_gives_the_same_choices():
    outcomes = [drive(build_dispatcher(H200), 400, batch=3, seed=5) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0].steps_by_arm) > 2, "a history of one arm would prove nothing"


def test_a_cap_on_the_step_time_bars_slower_trees_but_never_plain_decoding():
    free = drive(build_dispatcher(H200), 200, batch=64)
    dispatcher = build_dispatcher(H200, max_step_seconds=5.2e-3)
    capped = drive(dispatcher, 200, batch=64)
    assert free.seconds / 200 > 5.8e-3
    assert set(capped.steps_by_arm) == {"off"}, "even the shortest chain takes longer"
    assert dispatcher.stats().reason == "every better tree is over the cap on the step time"


def test_where_requests_queue_for_blocks_a_deep_tree_holds_fewer_rows():
    """Rows of 32 tokens: the reserve of 14 tokens of a tree of 6 levels keeps a fifth of them out."""
    dispatcher = build_dispatcher(H200)
    queued = Load(num_running=40, num_waiting=100, num_free_blocks=1, num_cached_tokens=40 * 32)
    dispatcher.choose(queued)
    batches = {arm.name: arm.batch for arm in state_of(dispatcher).situation.arms}
    assert batches["off"] > batches["chain-3"] > batches["tree-32"]
    assert batches["tree-32"] == int((40 * 32 + 40 * 2 + 16) / (32 + 14))
    roomy = Load(num_running=40, num_waiting=100, num_free_blocks=1000, num_cached_tokens=40 * 32)
    for _ in range(DECIDE_EVERY):
        dispatcher.choose(roomy)
    assert {arm.batch for arm in state_of(dispatcher).situation.arms} == {40}


def test_catching_up_is_priced_when_speculation_comes_back():
    table = dataclasses.replace(H200.table, catch_up=(1.0,) * len(H200.table.batches))
    dispatcher = build_dispatcher(H200, table)
    assert dispatcher.choose(Load(8, **FREE, num_cached_tokens=4096)).name == "off"
    assert build_dispatcher(H200).choose(Load(8, **FREE, num_cached_tokens=4096)).name != "off"


def test_long_contexts_favour_larger_trees():
    """Reading the cache takes most of the time then, and nodes share it."""
    nodes = [
        knowing(DEFAULT_PROFILE, H200).choose(Load(32, **FREE, num_cached_tokens=32 * context)).num_nodes
        for context in (256, 30_000)
    ]
    assert nodes[0] < nodes[1]


def test_the_operator_can_fix_the_arm_and_give_it_back():
    dispatcher = build_dispatcher(H200)
    dispatcher.switch("off")
    assert drive(dispatcher, 50).steps_by_arm == {"off": 50}
    assert dispatcher.stats().reason == "set by the operator"
    dispatcher.switch("tree-8")
    assert drive(dispatcher, 50).steps_by_arm == {"tree-8": 50}
    dispatcher.switch("auto")
    assert drive(dispatcher, 50, batch=1).steps_by_arm["off"] < 50
    with pytest.raises(ConfigError, match="no tree is called"):
        dispatcher.switch("tree-99")


def test_what_it_reports_is_what_it_did():
    dispatcher = build_dispatcher(H200)
    outcome = drive(dispatcher, 600, batch=4)
    stats, state = dispatcher.stats(), state_of(dispatcher)
    assert stats.arm == dispatcher.held
    assert stats.num_switches == len(outcome.switches)
    assert stats.num_probes > 0
    assert stats.tokens_per_second > stats.plain_tokens_per_second > 0
    assert choose_arm(state.situation) == state.choice
    truth = outcome.tokens / outcome.seconds
    assert stats.tokens_per_second == pytest.approx(truth, rel=0.1)


def test_only_steps_of_one_tree_and_no_prompt_teach_times():
    dispatcher = build_dispatcher(H200)
    load = Load(2, **FREE, num_cached_tokens=1024)
    plain, tree = H200.arms[0], dispatcher.choose(load)
    mixed = (RowStats(plain, 0), RowStats(tree, 0))
    for step in range(50):
        dispatcher.observe(StepStats(step, load, mixed, 0, 9.0))
        dispatcher.observe(StepStats(step, load, (RowStats(tree, 0),) * 2, 100, 9.0))
        dispatcher.observe(StepStats(step, load, (), 100, 9.0))
    dispatcher.choose(load)
    assert not any(arm.is_measured for arm in state_of(dispatcher).situation.arms)


def test_trees_that_cost_three_times_what_the_table_says_are_left_within_a_few_steps():
    times = [
        arm if arm.name == "off" else dataclasses.replace(arm, base=tuple(3 * base for base in arm.base))
        for arm in H200.table.arms
    ]
    slow = dataclasses.replace(H200, table=dataclasses.replace(H200.table, arms=tuple(times)))
    process, traffic = Acceptance(lambda _: DEFAULT_PROFILE), Traffic(lambda _: 16)
    outcome = Simulation(slow, process, traffic, build_dispatcher(H200), 0).run(2000)
    assert outcome.over_plain > 0.95


def test_changes_of_the_arm_are_counted_anew_where_acceptance_breaks():
    """Ties before it may have used up the few changes, which would hold a wrong arm after it."""
    profile = [DEFAULT_PROFILE]
    dispatcher = build_dispatcher(H200)
    simulation = Simulation(H200, Acceptance(lambda _: profile[0]), Traffic(lambda _: 16), dispatcher, 0)
    simulation.run(300)
    dispatcher._switched_at.extend([dispatcher._step] * 9)
    simulation.run(DECIDE_EVERY)
    assert state_of(dispatcher).situation.num_switches >= 9
    profile[0] = never(DEFAULT_PROFILE)
    simulation.run(200)
    assert dispatcher.stats().num_alarms == 1
    assert state_of(dispatcher).situation.num_switches <= 2


def test_the_watchdog_stops_what_no_model_explains():
    """Evidence says that every draft is right, but nothing of it is emitted."""
    dispatcher = build_dispatcher(H200)
    load = Load(8, **FREE, num_cached_tokens=4096)
    chosen = []
    for step in range(600):
        tree = dispatcher.choose(load)
        ranks = () if tree.name == "off" else (0,)
        rows = tuple(RowStats(tree, 0, ranks, sequence_idxs=(row,)) for row in range(8))
        seconds = H200.seconds(tree.name, 8, load.num_cached_tokens)
        dispatcher.observe(StepStats(step, load, rows, 0, seconds))
        chosen.append(tree.name)
    assert chosen.count("off") > 300
    assert dispatcher.stats().num_trips >= 1
    assert any(reason in dispatcher.stats().reason for reason in ("realised less", "stay so", "gain"))


@pytest.mark.parametrize("missing", [(), ("tree-9",)])
def test_arms_without_times_are_refused(missing):
    arms = (*H200.arms[:1], *(TreeTopology(name, (-1, *range(8))) for name in missing)) if missing else ()
    with pytest.raises(ConfigError, match="arms must be off"):
        AdaptiveDispatcher(
            arms,
            H200.table,
            DEFAULT_PROFILE,
            StaticDispatcher(SpeculationConfig(mode="off"), (), TreeLibrary(())),
            block_size=16,
            max_num_seqs=4,
        )


def state_of(dispatcher) -> DispatchState:
    return DispatchState.from_json(dispatcher.stats().state)
