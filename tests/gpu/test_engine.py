"""Law 1 on a CUDA device: the engine of the CPU tests, with its tensors there."""

import pytest

from tests.exactness.head import build_drafter
from tests.exactness.oracle import VARYING, OracleDrafter
from tests.exactness.tiny import EngineShape, build_engine, build_target, prompts, request_of, run

pytestmark = pytest.mark.gpu
SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 0.8, "top_p": 0.9}}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("mode", ["chain-1", "chain-5", "tree-8", "tree-64"])
@pytest.mark.parametrize("draft", ["oracle", "random head"])
def test_speculation_on_a_gpu_changes_no_token(draft, mode, sampling):
    target = build_target().cuda()
    asked = [
        request_of(f"r{idx}", prompt, 100 + idx, **SAMPLINGS[sampling])
        for idx, prompt in enumerate(prompts(6))
    ]
    plain = run(build_engine(target, None, EngineShape()), asked)
    shape = EngineShape(mode=mode)
    texts = {r.sampling.seed: (*r.prompt_token_ids, *plain[r.request_id]) for r in asked}
    drafter = OracleDrafter(texts, VARYING) if draft == "oracle" else build_drafter(shape, target)
    engine = build_engine(target, drafter, shape)
    assert run(engine, asked) == plain
    stats = engine.stats()
    assert stats.num_drafted > 0
    assert stats.step_seconds > 0
    if draft == "oracle":
        assert stats.num_accepted > 0
