"""A draft swapped between replays: the draft's graphs are captured anew, the others stay, no token
changes.
"""

import pytest

from engine.runner.draft_site import NextDraft
from engine.runner.worker import create_drafter
from tests.exactness.head import build_drafter
from tests.exactness.tiny import (
    EngineShape,
    build_engine,
    build_target,
    collect,
    prompts,
    request_of,
    run,
    runner_shape,
)
from tests.runner.prefill_cases import DeviceReference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["chain-3", "tree-8"])
def test_replays_across_swaps_emit_what_plain_decoding_does(mode, temperature):
    target = build_target().cuda()
    asked = [
        request_of(f"r{idx}", prompt, 100 + idx, temperature=temperature, max_tokens=60)
        for idx, prompt in enumerate(prompts(8, length=5, shared=9))
    ]
    plain = run(build_engine(target, None, EngineShape()), asked)
    shape = EngineShape(mode=mode, max_batched_tokens=48)
    heads = [build_drafter(shape, target).head for _ in range(3)]
    for scale, head in zip((1.0, 0.5, 2.0), heads, strict=True):
        head.fc.weight.data.mul_(scale)
    backend = DeviceReference()
    drafter = create_drafter(heads[0], backend, runner_shape(shape, shape.feature_window - 1))
    engine = build_engine(target, drafter, shape, backend=backend)
    engine.prepare()
    graphs = engine._runner._graphs
    num_captured, outputs = graphs.recorder.num_graphs, {request.request_id: [] for request in asked}
    waiting, num_steps, num_swaps = list(asked), 0, 0
    while engine.has_work or waiting:
        if waiting and num_steps % 4 == 0:
            engine.add(waiting.pop(0))
        if num_steps % 9 == 7 and num_swaps < 4:
            num_swaps += 1
            draft = NextDraft(heads[num_swaps % 3], drafter.pool, str(num_swaps))
            engine.drafts._install(draft)
        for delta in engine.step():
            collect(outputs, delta)
        num_steps += 1
    assert {name: tuple(text) for name, text in outputs.items()} == plain
    assert num_swaps == 4
    assert graphs.num_replays > 20
    assert graphs.recorder.num_graphs > num_captured, "drafts are captured anew"
    assert engine.stats().num_accepted > 0
