"""Log-probabilities beside captured steps: those of a dense pass on the CPU, and every step still a
replay.
"""

import pytest
import torch

from engine.logprobs import WantedLogprobs
from engine.sampling.logprobs import score
from tests.exactness.test_logprobs import check, requests, run, run_scored, silent
from tests.exactness.tiny import EngineShape, build_engine, build_target
from tests.gpu.test_graphs import captured_engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
@pytest.mark.parametrize("mode", ["off", "chain-3", "tree-8", "tree-64"])
def test_replayed_steps_tell_the_targets_own_logprobs(mode, sampling):
    target = build_target().cuda()
    asked = requests(sampling, num=5, max_tokens=40)
    asked = [*asked[:3], *silent(asked[3:])]
    plain, _ = run(build_engine(target, None, EngineShape()), silent(asked))
    engine = captured_engine(EngineShape(mode=mode), target)
    outputs, logprobs = run(engine, asked)
    assert outputs == plain
    for request in asked[:3]:
        check(request, outputs[request.request_id], logprobs[request.request_id])
    assert engine._runner._graphs.num_replays == engine.stats().num_steps


def test_prompts_are_scored_on_a_gpu():
    target = build_target().cuda()
    asked = requests("greedy", num=3, logprobs=WantedLogprobs(3, scores_prompt=True))
    engine = captured_engine(EngineShape(mode="chain-3", max_batched_tokens=16), target)
    outputs, logprobs, scores = run_scored(engine, asked)
    for request in asked:
        name, prompt = request.request_id, request.prompt_token_ids
        check(request, outputs[name], logprobs[name])
        assert len(scores[name]) == len(prompt) - 1


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_scores_of_a_large_vocabulary_are_those_of_the_cpu(num_top):
    torch.manual_seed(0)
    logits = (torch.randn(9, 128_256) * 4).bfloat16()
    token_ids = torch.randint(128_256, (9,))
    values, best = score(logits.cuda(), token_ids.cuda(), num_top)
    expected, expected_best = score(logits, token_ids, num_top)
    assert torch.equal(best.cpu(), expected_best)
    assert torch.allclose(values.cpu(), expected, atol=1e-5)
