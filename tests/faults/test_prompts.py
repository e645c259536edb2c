"""What a prompt costs until its first token, of an engine that speculates and of one that does not."""

import pytest

from engine import Engine, EngineConfig, Request, SamplingParams, SpeculationConfig
from tests.app.tiny_model import write_random_draft, write_random_model

PROMPT = tuple(range(3, 203))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_random_model(folder)
    write_random_draft(folder / "draft")
    return folder, folder / "draft"


def cost_of_first_tokens(model, draft, mode):
    """Return the steps up to the first token and the tokens taken from the cache, of a new prompt and of the
    same one again.
    """
    speculation = SpeculationConfig(mode=mode)
    config = EngineConfig(model, draft=draft, speculation=speculation, max_batched_tokens=64, dtype="float32")
    engine = Engine.load(config)
    costs = []
    for name in ("cold", "warm"):
        before = engine.stats()
        engine.add(Request(name, PROMPT, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)))
        num_steps = 1
        while not any(delta.token_ids for delta in engine.step()):
            num_steps += 1
        while engine.has_work:
            engine.step()
        costs.append((num_steps, engine.stats().num_prefix_hit_tokens - before.num_prefix_hit_tokens))
    return costs


def test_speculation_adds_no_step_before_the_first_token_and_loses_no_prefix_hit(folders):
    """A draft that is prefilled beside its target, or anew where the prefix is cached, would."""
    model, draft = folders
    plain = cost_of_first_tokens(model, None, "off")
    (cold, no_hits), (warm, hits) = plain
    assert no_hits == 0
    assert hits >= 128
    assert warm < cold
    assert cost_of_first_tokens(model, draft, "chain-3") == plain
