import random

import pytest

from engine.scheduler.progress import Progress
from tests.scheduler.fake_device import LIBRARY, VOCAB_SIZE, Simulation

TREES = ("off", "chain-1", "chain-3", "chain-7", "tree-8", "tree-16")


def prompts(rng: random.Random, num_prompts: int, max_len: int) -> list[list[int]]:
    """Prompts of which many share a prefix, of any length."""
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(max_len)]
    return [
        stem[: rng.randrange(max_len // 2)]
        + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, max_len // 2))]
        for _ in range(num_prompts)
    ]


def add_random(simulation: Simulation, rng: random.Random, prompt: list[int]) -> None:
    max_tokens = rng.randint(1, 40)
    simulation.add(
        f"r{len(simulation.sequences)}",
        prompt,
        priority=rng.choice((0, 0, 0, 1, -1)),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.3 else (),
        speculation=rng.choice(("auto", "auto", "off", "tree-8", "chain-2")),
    )


def run_random(simulation: Simulation, rng: random.Random, abort_rate: float = 0.0) -> None:
    """Requests arrive while others run; the tree changes at random; some are aborted at random moments."""
    todo = prompts(rng, 14, 60)
    tree = "off"
    for _ in range(3000):
        if not todo and not simulation.scheduler.has_work:
            break
        if todo and rng.random() < 0.4:
            add_random(simulation, rng, todo.pop())
        if rng.random() < 0.3:
            tree = rng.choice(TREES)
        if rng.random() < abort_rate and simulation.sequences:
            simulation.scheduler.abort(rng.choice(list(simulation.sequences)))
            simulation.check_blocks()
        simulation.step(tree)
    simulation.check_idle()
    simulation.check_outputs()


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "prompt"])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 130), (4, 40), (16, 12), (64, 5)])
@pytest.mark.parametrize("seed", range(4))
def test_outputs_equal_plain_decoding_whatever_happens(is_late, block_size, num_blocks, seed):
    rng = random.Random(seed)
    simulation = Simulation(num_blocks, block_size, seed, is_late)
    run_random(simulation, rng)
    assert len(simulation.ends) == 14


@pytest.mark.parametrize("seed", range(12))
def test_aborts_at_random_moments_give_everything_back(seed):
    simulation = Simulation(num_blocks=30, block_size=4, seed=seed)
    run_random(simulation, random.Random(seed), abort_rate=0.25)
    assert any(sequence.finish_reason == "abort" for sequence in simulation.sequences.values())


def test_random_runs_do_preempt_and_do_hit_the_prefix_cache():
    simulation = Simulation(num_blocks=34, block_size=4, seed=1)
    run_random(simulation, random.Random(1))
    sequences = simulation.sequences.values()
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    assert sum(sequence.num_prefix_hits for sequence in sequences) > 0
    assert max(simulation.device.drafts_readable) == 1.0


@pytest.mark.parametrize("tree", ["off", "chain-3", "tree-8"])
@pytest.mark.parametrize("preempt_at", range(24))
def test_preemption_at_every_step_changes_nothing(tree, preempt_at):
    simulation = Simulation(num_blocks=60, block_size=4)
    for idx in range(3):
        simulation.add(f"r{idx}", range(idx, idx + 20), max_tokens=30, ignore_eos=True)
    for step_idx in range(400):
        if step_idx >= preempt_at and step_idx < preempt_at + 6 and simulation.scheduler._running:
            simulation.scheduler._preempt(simulation.scheduler._running[-1])
            simulation.check_blocks()
        simulation.step(tree)
    simulation.check_idle()
    simulation.check_outputs()


def test_a_sequence_preempted_in_flight_keeps_its_tokens_and_waits_for_them():
    simulation = Simulation(accept=lambda depth: depth)
    sequence = simulation.add("r", [1, 2, 3], max_tokens=20, ignore_eos=True)
    simulation.step("chain-3")
    simulation.scheduler._preempt(simulation.scheduler._running[0])
    assert simulation.scheduler.schedule(LIBRARY.get("chain-3")) is None
    simulation.commit()
    assert len(simulation.outputs["r"]) == 4
    plan = simulation.step("chain-3")
    assert plan.admissions[0].tokens == tuple(sequence.tokens)
    simulation.run(lambda _: "chain-3")
    simulation.check_outputs()


def test_a_sequence_preempted_in_flight_may_finish_while_it_waits():
    simulation = Simulation()
    simulation.add("r", [1, 2, 3], max_tokens=1)
    simulation.step()
    simulation.scheduler._preempt(simulation.scheduler._running[0])
    simulation.commit()
    simulation.check_idle()
    simulation.check_outputs()


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("depth", range(8))
def test_lookahead_blocks_come_back_for_every_block_size_and_depth(block_size, depth):
    simulation = Simulation(num_blocks=1 + -(-400 // block_size), block_size=block_size)
    for idx in range(4):
        simulation.add(f"r{idx}", [idx] * (15 + idx), max_tokens=25, ignore_eos=True)
    simulation.run(lambda _: f"chain-{depth}" if depth else "off")
    simulation.check_outputs()


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("tree", ["off", "chain-7"])
def test_a_pool_filled_to_the_last_block_makes_progress(block_size, tree):
    # One sequence alone needs the whole pool at its end: 40 + 24 - 1 cached tokens.
    simulation = Simulation(num_blocks=1 + -(-63 // block_size), block_size=block_size)
    for idx in range(4):
        simulation.add(f"r{idx}", [idx] * 10, max_tokens=54, ignore_eos=True)
    simulation.run(lambda _: tree, max_steps=1200)
    simulation.check_outputs()
    assert sum(sequence.num_preemptions for sequence in simulation.sequences.values()) > 0


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "prompt"])
def test_a_step_that_preempts_or_stalls_admits_nobody(is_late):
    simulation = Simulation(num_blocks=17, block_size=4, is_late=is_late, max_num_seqs=2)
    for idx in range(2):
        simulation.add(f"r{idx}", [idx] * 8, max_tokens=50, ignore_eos=True)
    simulation.step("chain-3")
    simulation.add("urgent", [3], priority=-1, max_tokens=8)  # would fit as soon as a slot is free
    num_preemptions = 0
    while simulation.scheduler.has_work:
        plan = simulation.step("chain-3")
        total = sum(sequence.num_preemptions for sequence in simulation.sequences.values())
        assert total == num_preemptions or not plan.admissions
        num_preemptions = total
    assert num_preemptions > 0
    simulation.check_outputs()


def test_the_best_sequence_is_never_preempted():
    simulation = Simulation(num_blocks=17, block_size=4, seed=3)
    first = simulation.add("first", [9] * 8, priority=-1, max_tokens=55, ignore_eos=True)
    for idx in range(5):
        simulation.add(f"r{idx}", [idx] * 8, max_tokens=50, ignore_eos=True)
    simulation.run(lambda _: "chain-3")
    assert first.num_preemptions == 0
    assert next(iter(simulation.ends)) == "first"
    simulation.check_outputs()


def test_equal_prompts_admitted_in_one_step_do_not_read_each_other():
    simulation = Simulation()
    prompt = list(range(17))
    for idx in range(2):
        simulation.add(f"r{idx}", prompt, max_tokens=12, ignore_eos=True)
    plan = simulation.step("chain-3")
    assert [admission.tokens for admission in plan.admissions] == [tuple(prompt)] * 2
    assert [chunk.store_from for chunk in plan.chunks] == [0, 0]
    simulation.run(lambda _: "chain-3")
    simulation.check_outputs()
    assert simulation.outputs["r0"] == simulation.outputs["r1"]


def test_a_slot_freed_in_flight_may_have_a_new_owner_at_once():
    simulation = Simulation(max_num_seqs=1)
    simulation.add("old", [1, 2, 3], max_tokens=30, ignore_eos=True)
    simulation.add("new", [4, 5, 6], max_tokens=30, ignore_eos=True)
    simulation.step("chain-3")
    assert simulation.scheduler.abort("old").finish_reason == "abort"
    plan = simulation.step("chain-3")
    assert [admission.tokens for admission in plan.admissions] == [(4, 5, 6)]
    simulation.run(lambda _: "chain-3")
    assert simulation.outputs["old"] == []
    simulation.check_outputs()


@pytest.mark.parametrize("period", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_drafts_never_read_a_hole_left_by_plain_steps(period, block_size):
    simulation = Simulation(
        num_blocks=400 // block_size, block_size=block_size, draft_window=6, max_model_len=250
    )
    tokens = list(range(21))
    for turn in range(4):
        sequence = simulation.add(f"t{turn}", tokens, max_tokens=40, ignore_eos=True)
        simulation.run(lambda step_idx: "off" if step_idx // period % 2 else "chain-2")
        tokens = [*sequence.tokens, turn]
    simulation.check_outputs()
    assert all(simulation.sequences[f"t{turn}"].num_prefix_hits > 0 for turn in (1, 2, 3))
    if period <= 3:  # at most 3 tokens of a tree and 3 plain ones: the window of 6 closes every gap
        assert set(simulation.device.drafts_readable) == {1.0}
    if period == 9:
        assert min(simulation.device.drafts_readable) < 0.5


def test_the_device_notices_blocks_flagged_with_draft_they_do_not_have(monkeypatch):
    everything = range(10_000)
    publish = Simulation().kv_cache.__class__.publish
    monkeypatch.setattr(
        "engine.kvcache.kv_cache.KVCache.publish",
        lambda self, sequence, num_tokens, draft_valid: publish(self, sequence, num_tokens, everything),
    )
    with pytest.raises(AssertionError, match="draft K/V is wrong"):
        test_drafts_never_read_a_hole_left_by_plain_steps(9, 4)


def test_the_device_notices_blocks_published_before_they_are_written(monkeypatch):
    start = Progress.start

    def start_and_publish(self, num_hit, draft_start):
        start(self, num_hit, draft_start)
        simulation.kv_cache.publish(self.sequence, self.prefill_end, range(0))

    simulation = Simulation()
    monkeypatch.setattr(Progress, "start", start_and_publish)
    for idx in range(2):
        simulation.add(f"r{idx}", range(17), max_tokens=4)
    with pytest.raises(AssertionError):
        simulation.run()


def test_a_run_without_prefix_cache_is_equal():
    simulation = Simulation(num_blocks=34, block_size=4, seed=2, cache=False)
    run_random(simulation, random.Random(2))
    assert simulation.pool.counts().num_cached == 0
    assert all(sequence.num_prefix_hits == 0 for sequence in simulation.sequences.values())
