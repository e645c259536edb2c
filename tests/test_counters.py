"""What is counted of an engine's steps adds up."""

import pytest

from engine.stats import STEP_SECONDS
from tests.exactness.head import build_drafter
from tests.exactness.tiny import EngineShape, build_engine, build_target, prompts, request_of, run


@pytest.mark.parametrize("mode", ["off", "tree-8"])
def test_steps_are_counted_once_by_rows_and_once_by_time(mode):
    target, shape = build_target(), EngineShape(mode=mode, max_batched_tokens=8, max_num_seqs=3)
    engine = build_engine(target, None if mode == "off" else build_drafter(shape, target), shape)
    run(engine, [request_of(f"r{idx}", prompt, idx, max_tokens=6) for idx, prompt in enumerate(prompts(5))])
    stats = engine.stats()
    assert sum(stats.steps_by_time) == stats.num_steps
    assert len(stats.steps_by_time) == len(STEP_SECONDS) + 1
    sizes = dict(stats.steps_by_rows)
    assert sum(size * num for size, num in sizes.items()) == sum(num for _, num in stats.steps_by_tree)
    assert sum(sizes.values()) < stats.num_steps, "the first step runs prompts only"
    assert (min(sizes), max(sizes)) == (1, 3)
