"""Captured steps emit what uncaptured ones do: law 1 again, with every decode step a replay."""

import pytest
import torch

from engine.runner import graphs
from engine.runner.graphs import CaptureMemoryError
from tests.exactness.head import build_drafter
from tests.exactness.tiny import EngineShape, build_engine, build_target, prompts, request_of, run
from tests.runner.prefill_cases import DeviceReference

pytestmark = pytest.mark.gpu
SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 0.8}, "truncated": {"temperature": 0.8, "top_p": 0.9}}


def requests(sampling, trees=("auto",), num=9):
    return [
        request_of(
            f"r{idx}",
            prompt,
            100 + idx,
            speculation=trees[idx % len(trees)],
            max_tokens=40,
            **SAMPLINGS[sampling],
        )
        for idx, prompt in enumerate(prompts(num))
    ]


def captured_engine(shape: EngineShape, target):
    drafter = build_drafter(shape, target, DeviceReference())
    engine = build_engine(target, drafter, shape, backend=DeviceReference())
    engine.prepare()
    return engine


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("mode", ["off", "chain-3", "tree-8", "tree-64"])
def test_every_replayed_step_emits_the_tokens_of_plain_decoding(mode, sampling):
    target = build_target().cuda()
    plain = run(build_engine(target, None, EngineShape()), requests(sampling))
    engine = captured_engine(EngineShape(mode=mode), target)
    assert run(engine, requests(sampling)) == plain
    assert engine._runner._graphs.num_replays == engine.stats().num_steps
    assert (engine.stats().num_drafted > 0) == (mode != "off")


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_with_trees_of_their_own_share_a_replay(sampling):
    target = build_target().cuda()
    trees = ("off", "auto", "chain-2")
    plain = run(build_engine(target, None, EngineShape()), requests(sampling))
    engine = captured_engine(EngineShape(mode="tree-64"), target)
    assert run(engine, requests(sampling, trees)) == plain
    assert engine._runner._graphs.num_replays > 0
    assert {"off", "tree-64", "chain-2"} <= {name for name, _ in engine.stats().steps_by_tree}


def test_a_capture_without_memory_is_refused_and_leaves_the_engine_as_it_was():
    target, shape = build_target().cuda(), EngineShape(mode="tree-64")
    plain = run(build_engine(target, None, EngineShape()), requests("greedy"))
    drafter = build_drafter(shape, target, DeviceReference())
    engine = build_engine(target, drafter, shape, backend=DeviceReference())
    engine.capture("tree-64", 1)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        with pytest.raises(CaptureMemoryError, match=r"over tree-64: lower max_num_seqs.*out of memory"):
            engine.capture("tree-64", 8)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert run(engine, requests("greedy")) == plain
    engine.prepare()  # nothing of the failed capture is in the way
    assert run(engine, requests("greedy")) == plain
    assert engine._runner._graphs.num_replays > 0


def test_sets_share_the_memory_of_their_logits(monkeypatch):
    target, shape = build_target().cuda(), EngineShape(mode="tree-64", max_num_seqs=64)

    def allocated():
        drafter = build_drafter(shape, target, DeviceReference())
        engine = build_engine(target, drafter, shape, backend=DeviceReference())
        engine.capture("tree-64", 1)
        before = torch.cuda.memory_allocated()
        tree = engine._scheduler.library.get("tree-64")
        engine._runner.capture(tree, range(33, 65))
        return torch.cuda.memory_allocated() - before

    shared = allocated()
    monkeypatch.setattr(graphs, "borrow", lambda tensor: tensor)
    logits = [rows * 64 * target.config.vocab_size * 4 for rows in (64, 56, 48, 40)]
    assert allocated() - shared >= sum(logits)


def test_preempted_rows_go_on_in_replays():
    target = build_target().cuda()
    plain = run(build_engine(target, None, EngineShape()), requests("seeded"))
    engine = captured_engine(EngineShape(mode="tree-8", num_blocks=60), target)
    assert run(engine, requests("seeded")) == plain
    assert engine.stats().num_preemptions > 0


def test_penalties_which_are_not_captured_run_beside_replays():
    target = build_target().cuda()
    asked = [
        *requests("seeded", num=2),
        request_of("p", prompts(1)[0], 7, presence_penalty=1.5, max_tokens=9),
    ]
    plain = run(build_engine(target, None, EngineShape()), asked)
    engine = captured_engine(EngineShape(mode="chain-3"), target)
    assert run(engine, asked) == plain
    assert 0 < engine._runner._graphs.num_replays < engine.stats().num_steps
