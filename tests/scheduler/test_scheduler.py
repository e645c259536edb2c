import dataclasses
import random

import pytest

from engine.batch import RowResult, StepResult
from engine.errors import CapacityError, ConfigError, RequestError
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.kv_cache import KVCache
from engine.request import Request, SamplingParams, Sequence, SequenceStatus
from engine.scheduler.scheduler import Scheduler
from engine.tree.library import TreeLibrary
from tests.scheduler.fake_device import EOS, LIBRARY, Simulation, make_config


def num_tokens_of(plan) -> int:
    return sum(len(chunk.token_ids) for chunk in plan.chunks) + sum(
        row.topology.num_nodes for row in plan.rows
    )


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "prompt"])
@pytest.mark.parametrize(("max_batched_tokens", "max_num_seqs"), [(5, 4), (48, 4), (20, 12), (400, 12)])
def test_the_next_load_counts_whom_the_next_step_admits(is_late, max_batched_tokens, max_num_seqs):
    simulation = Simulation(
        num_blocks=600,
        is_late=is_late,
        cache=False,
        max_batched_tokens=max_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_num_waiting=1000,
    )
    scheduler, rng = simulation.scheduler, random.Random(0)
    num_admitted = 0
    for idx in range(1500):
        for burst in range(rng.choice([0, 0, 0, 1, 6]) if idx < 60 else 0):
            simulation.add(f"{idx}-{burst}", [burst] * rng.randint(1, 30), max_tokens=rng.randint(1, 20))
        load, before = scheduler.next_load(), scheduler.load()
        assert load.num_running + load.num_waiting == before.num_running + before.num_waiting
        plan = scheduler.schedule(LIBRARY.get("off"))
        assert scheduler.load().num_running == load.num_running
        if plan is not None:
            num_admitted += len(plan.admissions)
            simulation.pending.append(simulation.device.run(plan))
        if len(simulation.pending) > (is_late and plan is not None):
            simulation.commit()
    assert num_admitted == len(simulation.sequences) > 60


def test_the_next_load_leaves_out_whom_no_blocks_are_left_for():
    simulation = Simulation(num_blocks=11, block_size=4, max_num_seqs=4)
    simulation.add("first", [1] * 24, max_tokens=10)
    simulation.add("second", [2] * 24, max_tokens=10)
    simulation.add("third", [3], max_tokens=10)
    assert simulation.scheduler.next_load().num_running == 1
    simulation.step()
    assert simulation.scheduler.next_load().num_running == simulation.scheduler.load().num_running == 1
    simulation.run()


@pytest.mark.parametrize("max_batched_tokens", [1, 4])
def test_a_budget_that_lets_a_full_batch_starve_prompts_is_refused(max_batched_tokens):
    with pytest.raises(ConfigError, match="max_batched_tokens"):
        make_config(max_num_seqs=4, max_batched_tokens=max_batched_tokens)


@pytest.mark.parametrize(
    ("num_prompt", "sampling", "parameter"),
    [
        (160, {"max_tokens": 1}, "prompt"),
        (500, {"max_tokens": 1}, "prompt"),
        (30, {"max_tokens": 12}, "max_tokens"),
        (42, {"max_tokens": 1}, "max_tokens"),
        (5, {"speculation": "tree-9"}, "speculation"),
        (5, {"speculation": "chain-64"}, "speculation"),
    ],
)
def test_a_request_that_can_never_run_is_refused_and_leaves_nothing(num_prompt, sampling, parameter):
    simulation = Simulation(num_blocks=11, block_size=4)
    with pytest.raises(RequestError) as error:
        simulation.add("r", [1] * num_prompt, **sampling)
    assert error.value.parameter == parameter
    assert not simulation.scheduler.has_work
    simulation.check_idle()


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(30, 11), (40, 1), (1, 40)])
def test_a_request_that_fills_the_pool_exactly_runs(num_prompt, max_tokens):
    simulation = Simulation(num_blocks=11, block_size=4)
    simulation.add("r", [1] * num_prompt, max_tokens=max_tokens, ignore_eos=True)
    simulation.run(lambda _: "chain-7")
    simulation.check_outputs()


@pytest.mark.parametrize("tree", ["off", "chain-7", "tree-16"])
@pytest.mark.parametrize("num_prompt", [1, 100, 150, 158, 159])
def test_a_sequence_may_run_to_the_very_length_of_the_model(tree, num_prompt):
    simulation = Simulation(num_blocks=64, block_size=4)
    sequence = simulation.add("r", [3] * num_prompt, max_tokens=1000, ignore_eos=True)
    simulation.run(lambda _: tree)
    assert len(sequence.tokens) == 160
    simulation.check_outputs()


def test_a_full_queue_refuses_until_there_is_room():
    simulation = Simulation(max_num_waiting=2, max_num_seqs=1)
    for idx in range(2):
        simulation.add(f"r{idx}", [1, 2], max_tokens=3)
    with pytest.raises(CapacityError):
        simulation.add("late", [1, 2], max_tokens=3)
    simulation.step()
    simulation.add("late", [1, 2], max_tokens=3)
    simulation.run()
    simulation.check_outputs()


def test_a_request_id_in_use_is_refused_and_free_again_at_its_end():
    simulation = Simulation()
    simulation.add("r", [1, 2], max_tokens=3)
    with pytest.raises(RequestError, match="in use"):
        simulation.scheduler.add(Sequence(Request("r", (1,), SamplingParams()), seed=0, arrival_idx=9))
    assert simulation.scheduler.abort("r").status is SequenceStatus.FINISHED
    assert simulation.scheduler.abort("r") is None
    assert simulation.scheduler.abort("unknown") is None
    simulation.check_idle()


@pytest.mark.parametrize("max_batched_tokens", [5, 6, 7, 13, 48])
@pytest.mark.parametrize("num_prompt", [1, 2, 5, 6, 7, 14, 30])
def test_a_prompt_is_prefilled_within_the_budget_and_decodes_with_its_last_chunk(
    max_batched_tokens, num_prompt
):
    simulation = Simulation(max_batched_tokens=max_batched_tokens)
    simulation.add("r", range(num_prompt), max_tokens=1)
    simulation.run()
    positions = [
        chunk.start + idx
        for plan in simulation.plans
        for chunk in plan.chunks
        for idx, _ in enumerate(chunk.token_ids)
    ]
    assert positions == list(range(num_prompt - 1))
    assert [len(plan.rows) for plan in simulation.plans] == [0] * (len(simulation.plans) - 1) + [1]
    # Every step but the last is full, but for the room of a root.
    assert all(num_tokens_of(plan) >= max_batched_tokens - 1 for plan in simulation.plans[:-1])
    simulation.check_outputs()


def test_several_prompts_share_a_step_with_decode_rows():
    simulation = Simulation(max_batched_tokens=32)
    simulation.add("old", range(4), max_tokens=30, ignore_eos=True)
    simulation.step("chain-3")
    for idx in range(3):
        simulation.add(f"r{idx}", range(idx, idx + 10), max_tokens=4)
    plan = simulation.step("chain-3")
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [9, 9, 2]
    assert [row.topology.name for row in plan.rows] == ["chain-3"] * 3


def test_trees_leave_a_share_of_the_budget_to_prompts():
    simulation = Simulation(max_batched_tokens=30, num_blocks=100)
    for idx in range(3):
        simulation.add(f"r{idx}", [idx], max_tokens=60, ignore_eos=True)
    plan = simulation.step("tree-16")
    simulation.add("long", range(30), max_tokens=2)
    plan = simulation.step("tree-8")
    assert [row.topology.name for row in plan.rows] == ["tree-8", "tree-8", "off"]
    assert len(plan.chunks[0].token_ids) == 13
    simulation.run(lambda _: "tree-16")
    simulation.check_outputs()


def test_a_request_uses_its_own_tree():
    simulation = Simulation()
    for name in ("auto", "off", "tree-8", "chain-2"):
        simulation.add(name, [1, 2, 3], max_tokens=5, speculation=name)
    plan = simulation.step("chain-3")
    assert [row.topology.name for row in plan.rows] == ["chain-3", "off", "tree-8", "chain-2"]


def test_a_sequence_sure_to_end_in_flight_is_not_planned_again():
    simulation = Simulation()
    simulation.add("r", [1, 2, 3], max_tokens=2, ignore_eos=True)
    simulation.step()
    simulation.step()
    assert simulation.step() is None
    assert len(simulation.plans) == 2
    simulation.check_idle()


def test_an_admission_leaves_the_watermark_to_running_sequences():
    simulation = Simulation(num_blocks=12, block_size=4)
    simulation.add("first", range(16), max_tokens=4, ignore_eos=True)
    simulation.add("fits", [5] * 24, max_tokens=4, ignore_eos=True)
    assert len(simulation.step().admissions) == 2
    simulation = Simulation(num_blocks=12, block_size=4)
    simulation.add("first", range(16), max_tokens=4, ignore_eos=True)
    simulation.add("waits", [5] * 28, max_tokens=4, ignore_eos=True)
    assert len(simulation.step().admissions) == 1
    simulation.run()
    simulation.check_outputs()


def test_a_head_that_does_not_fit_is_not_overtaken():
    simulation = Simulation(num_blocks=12, block_size=4)
    simulation.add("first", range(24), max_tokens=3)
    simulation.add("big", range(30), max_tokens=3)
    simulation.add("small", [1], max_tokens=3)
    plan = simulation.step()
    assert [len(admission.tokens) for admission in plan.admissions] == [24]


@pytest.mark.parametrize("num_prompt", range(9, 19))
def test_a_hit_starts_one_position_early_and_writes_behind_the_shared_blocks(num_prompt):
    simulation = Simulation()
    simulation.add("cold", range(16), max_tokens=8, ignore_eos=True)
    simulation.run(lambda _: "chain-3")
    prompt = [*range(16), 30, 31][:num_prompt]
    warm = simulation.add("warm", prompt, max_tokens=8, ignore_eos=True)
    simulation.run(lambda _: "chain-3")
    num_hit = min((num_prompt - 1) // 4 * 4, 16)
    chunk = next(plan.chunks[0] for plan in reversed(simulation.plans) if plan.chunks)
    assert warm.num_prefix_hits == chunk.store_from == num_hit
    assert chunk.start == num_hit - 1
    simulation.check_outputs()


def test_stops_cut_counters_and_output_inside_a_path():
    simulation = Simulation(accept=lambda depth: depth)
    scheduler = simulation.scheduler
    sequence = simulation.add("r", [1, 2, 3], max_tokens=20)
    scheduler.schedule(LIBRARY.get("chain-7"))
    (delta,) = scheduler.commit(StepResult(0, (RowResult((1, 2, EOS, 4, 5, 6, 8, 9)),)))
    assert delta.token_ids == (1, 2, EOS)
    assert delta.finish_reason == "stop"
    assert (delta.num_calls, delta.num_drafted, delta.num_accepted, delta.num_accepted_in_step) == (
        1,
        7,
        3,
        3,
    )
    assert sequence.tokens == [1, 2, 3, 1, 2, EOS]
    simulation.check_idle()


def test_the_token_after_the_accepted_drafts_is_not_counted_as_accepted():
    simulation = Simulation()
    simulation.add("r", [1, 2, 3], max_tokens=20)
    simulation.scheduler.schedule(LIBRARY.get("tree-8"))
    (delta,) = simulation.scheduler.commit(StepResult(0, (RowResult((1, 2, 3)),)))
    assert (delta.num_drafted, delta.num_accepted, delta.num_accepted_in_step) == (7, 2, 2)


def test_a_row_that_is_not_finite_fails_alone_and_its_blocks_are_never_found_again():
    simulation = Simulation()
    prompt = list(range(20))
    simulation.add("good", [9] * 20, max_tokens=2)
    simulation.add("bad", prompt, max_tokens=20)
    simulation.step()
    result = simulation.pending.popleft()
    deltas = simulation.scheduler.commit(
        StepResult(result.step_idx, (result.rows[0], RowResult((), is_finite=False)))
    )
    assert [delta.finish_reason for delta in deltas] == [None, "error"]
    assert deltas[1].token_ids == ()
    assert "finite" in deltas[1].message
    again = simulation.add("again", prompt, max_tokens=2)
    simulation.run()
    assert again.num_prefix_hits == 0


@pytest.mark.parametrize("size", [20, 100])
def test_a_chunk_that_is_not_finite_fails_its_sequence_before_its_blocks_are_found(size):
    """In the step of the last chunk, and with chunks to come."""
    simulation = Simulation(max_batched_tokens=50)
    prompt = [token % 40 for token in range(size)]
    bad = simulation.add("bad", prompt, max_tokens=20)
    simulation.step()
    result = simulation.pending.popleft()
    (delta,) = simulation.scheduler.commit(dataclasses.replace(result, failed_chunks=(0,)))
    assert (delta.finish_reason, delta.token_ids) == ("error", ())
    assert "finite" in delta.message
    assert bad.num_calls == 0
    again = simulation.add("again", prompt, max_tokens=2)
    simulation.run()
    assert again.num_prefix_hits == 0
    assert simulation.pool.counts().num_held == 0


def test_a_new_draft_forgets_the_prefix_cache_and_keeps_the_output():
    simulation = Simulation()
    simulation.add("old", range(20), max_tokens=8, ignore_eos=True)
    simulation.run(lambda _: "chain-3")
    simulation.add("running", range(30), max_tokens=30, ignore_eos=True)
    simulation.step("chain-3")
    simulation.scheduler.forget_draft()
    simulation.check_blocks()
    assert simulation.pool.counts().num_cached == 0
    simulation.run(lambda _: "off")
    again = simulation.add("again", range(30), max_tokens=8, ignore_eos=True)
    simulation.run(lambda _: "chain-3")
    assert again.num_prefix_hits == 0
    simulation.check_outputs()


def test_load_counts_running_waiting_blocks_and_cached_tokens():
    simulation = Simulation(num_blocks=33, max_num_seqs=2)
    for idx in range(3):
        simulation.add(f"r{idx}", [idx] * 8, max_tokens=20, ignore_eos=True)
    simulation.step()
    simulation.step()
    load = simulation.scheduler.load()
    assert (load.num_running, load.num_waiting) == (2, 1)
    assert load.num_cached_tokens == 2 * 8
    assert load.num_free_blocks == simulation.pool.num_available


def test_two_steps_may_not_be_planned_ahead():
    simulation = Simulation()
    simulation.add("r", [1, 2], max_tokens=20)
    off = LIBRARY.get("off")
    simulation.scheduler.schedule(off)
    simulation.scheduler.schedule(off)
    assert simulation.scheduler.num_in_flight == 2
    with pytest.raises(AssertionError, match="one step late"):
        simulation.scheduler.schedule(off)


def test_an_engine_without_a_draft_schedules_plain_decoding():
    scheduler = Scheduler(make_config(), KVCache(BlockPool(16, 4)), TreeLibrary.search(max_depth=0))
    scheduler.add(Sequence(Request("r", (1, 2), SamplingParams()), seed=0, arrival_idx=0))
    plan = scheduler.schedule(TreeLibrary([]).get("off"))
    assert [row.topology.name for row in plan.rows] == ["off"]
    with pytest.raises(RequestError, match="no tree is called"):
        scheduler.add(
            Sequence(Request("s", (1,), SamplingParams(speculation="tree-8")), seed=0, arrival_idx=1)
        )
