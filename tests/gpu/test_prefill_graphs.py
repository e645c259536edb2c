"""Captured prefills emit the tokens of uncaptured ones and leave the same cache: by the exact reference, and
by Triton's kernels in float32.

Without a GPU, under TRITON_INTERPRET=1, a replay runs again, and only prefills are Triton's.
"""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.triton import TritonAttention
from engine.logprobs import WantedLogprobs
from engine.request import Request
from engine.runner.draft_site import NextDraft
from engine.runner.worker import create_drafter, use_kernels
from tests.exactness.head import DRAFT, build_drafter
from tests.exactness.tiny import (
    CONFIG,
    EngineShape,
    build_engine,
    build_target,
    collect,
    prompts,
    request_of,
    run,
    runner_shape,
)
from tests.runner.prefill_cases import (
    SCENARIOS,
    DeviceReference,
    check_scenario,
    replaying_engine,
    requests_of,
    shape_of,
)

pytestmark = pytest.mark.gpu

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Triton's attention serves head dims and pages from 16 on.
WIDE, WIDE_DRAFT = dataclasses.replace(CONFIG, head_dim=16), dataclasses.replace(DRAFT, head_dim=16)
BLOCK_SIZE = 16
NUM_REQUESTS = None if ON_GPU else 2  # the interpreter takes a second for a step


def wide_target():
    target = build_target(config=WIDE).to(DEVICE)
    if ON_GPU:
        use_kernels(target, None, DEVICE)
    return target


@pytest.mark.parametrize("name", SCENARIOS)
def test_replays_of_the_reference_change_no_token_and_no_cache(name):
    check_scenario(name, build_target().to(DEVICE), DeviceReference())


class TritonPrefill(DeviceReference):
    """Triton's prefill beside decode steps that need no interpreter."""

    def bind_prefill(self, layout, block_size):
        return TritonAttention().bind_prefill(layout, block_size)


def triton_backend():
    return TritonAttention() if ON_GPU else TritonPrefill()


@pytest.mark.parametrize("name", SCENARIOS if ON_GPU else ["in chunks"])
def test_replays_of_triton_change_no_token_and_no_cache(name):
    check_scenario(name, wide_target(), triton_backend(), BLOCK_SIZE, NUM_REQUESTS, config=WIDE_DRAFT)


def test_prompts_are_scored_from_replays():
    target, backend = wide_target(), triton_backend()
    wanted = WantedLogprobs(2, scores_prompt=True)
    asked = requests_of("in chunks", NUM_REQUESTS, logprobs=wanted)
    asked[1] = requests_of("in chunks", 2)[1]
    shape = dataclasses.replace(shape_of("in chunks", BLOCK_SIZE), enable_prefix_cache=False)
    exact = build_engine(target, None, dataclasses.replace(shape, mode="off"), backend=backend)
    engine = replaying_engine(dataclasses.replace(shape, mode="off"), target, None, backend)
    found, right = scores_of(engine, asked), scores_of(exact, asked)
    assert engine._runner.prefill.num_replays > 0
    assert found.keys() == right.keys() == {request.request_id for request in asked} - {"r1"}
    for name, scores in found.items():
        size = next(len(request.prompt_token_ids) for request in asked if request.request_id == name)
        assert len(scores) == len(right[name]) == size - 1 + 10
        assert scores == pytest.approx(right[name], abs=1e-3)


def scores_of(engine, asked: list[Request]) -> dict[str, list[float]]:
    scores: dict[str, list[float]] = {}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            assert delta.message is None, delta.message
            if delta.logprobs:
                scores.setdefault(delta.request_id, []).extend(entry.logprob for entry in delta.logprobs)
    return scores


@pytest.mark.skipif(not ON_GPU, reason="drafts are swapped under real graphs only")
@pytest.mark.parametrize("mode", ["chain-3", "tree-8"])
def test_a_swapped_draft_is_filled_by_graphs_of_its_own(mode):
    target, backend = wide_target(), triton_backend()
    asked = [
        request_of(f"r{idx}", prompt, 100 + idx, max_tokens=40)
        for idx, prompt in enumerate(prompts(9, length=25, shared=9))
    ]
    shape = EngineShape(mode=mode, max_batched_tokens=48, block_size=BLOCK_SIZE)
    plain = run(build_engine(target, None, dataclasses.replace(shape, mode="off"), backend=backend), asked)
    heads = [build_drafter(shape, target, backend, WIDE_DRAFT).head for _ in range(2)]
    heads[1].fc.weight.data.mul_(0.5)
    for head in heads:
        use_kernels(target, head, DEVICE)
    drafter = create_drafter(heads[0], backend, runner_shape(shape, shape.feature_window - 1))
    engine = replaying_engine(shape, target, drafter, backend)
    prefill = engine._runner.prefill
    outputs = {request.request_id: [] for request in asked}
    waiting, num_steps, num_swaps = list(asked), 0, 0
    while engine.has_work or waiting:
        if waiting and num_steps % 3 == 0:
            engine.add(waiting.pop(0))
        if num_steps in (5, 14):
            num_swaps += 1
            engine.drafts._install(NextDraft(heads[num_swaps % 2], drafter.pool, str(num_swaps)))
            assert all(found.draft is None for found in prefill._sets.values())
        for delta in engine.step():
            collect(outputs, delta)
        num_steps += 1
    assert {name: tuple(text) for name, text in outputs.items()} == plain
    assert num_swaps == 2
    assert any(found.draft is not None for found in prefill._sets.values())
    assert prefill.num_replays >= len(asked)
    assert not engine._runner.draft_site.failure
