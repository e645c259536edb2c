"""A token whose numbers are not finite fails the requests that hold it, and shows nowhere else."""

import pytest
import torch

from engine.request import FinishReason, Request
from tests.exactness.head import build_drafter
from tests.exactness.oracle import VARYING, OracleDrafter
from tests.exactness.tiny import EngineShape, build_engine, build_target, prompts, request_of, run

POISON = 95


def poisoned_target(token_id: int = POISON):
    """Return a target whose embedding of one token is NaN."""
    target = build_target()
    target.embed_tokens.weight[token_id] = torch.nan
    return target


def run_all(engine, requests: list[Request], num_between: int = 0):
    """Add requests some steps apart and run them; return the tokens and the end of each."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ends: dict[str, FinishReason | None] = {}
    num_gains = 0

    def step():
        nonlocal num_gains
        for delta in engine.step():
            num_gains += len(delta.token_ids) > 0
            outputs[delta.request_id] += delta.token_ids
            ends[delta.request_id] = delta.finish_reason
            assert (delta.message is not None) == (delta.finish_reason is FinishReason.ERROR)

    for request in requests:
        engine.add(request)
        for _ in range(num_between):
            step()
    while engine.has_work:
        step()
    stats = engine.stats()
    assert stats.num_held_blocks == 0
    assert stats.num_calls == num_gains
    assert stats.num_failed == sum(end is FinishReason.ERROR for end in ends.values())
    return {name: tuple(tokens) for name, tokens in outputs.items()}, ends


@pytest.mark.parametrize("mode", ["off", "chain-3", "tree-8"])
def test_a_request_with_nan_logits_fails_alone_and_leaves_no_trace(mode):
    target = poisoned_target()
    shape = EngineShape(mode=mode, num_blocks=60)
    healthy = [request_of(f"h{idx}", prompt, 100 + idx) for idx, prompt in enumerate(prompts(3))]
    healthy = [r for r in healthy if POISON not in r.prompt_token_ids]
    plain = run(build_engine(target, None, EngineShape()), healthy)
    engine = build_engine(target, build_drafter(shape, target), shape)
    poisoned = [
        request_of("root", (10, 11, 12, POISON), 7),
        request_of("prompt", (POISON, *range(10, 30)), 8),
        request_of("alone", (POISON,), 9),
    ]
    outputs, ends = run_all(engine, [*poisoned, *healthy])
    assert {ends[r.request_id] for r in poisoned} == {FinishReason.ERROR}
    assert not any(outputs[r.request_id] for r in poisoned)
    assert {name: outputs[name] for name in plain} == plain
    again = [request_of(f"a{r.request_id}", r.prompt_token_ids, r.sampling.seed) for r in healthy]
    assert list(run(engine, again).values()) == list(plain.values())


@pytest.mark.parametrize("mode", ["off", "chain-3"])
def test_a_token_emitted_along_the_way_can_fail_a_request(mode):
    """The poison is emitted, by a bias, after some healthy tokens: its own root fails."""
    target = poisoned_target()
    shape = EngineShape(mode=mode)
    asked = request_of("r0", prompts(1)[0], 100, logit_bias=((POISON, 60.0),), frequency_penalty=-2.0)
    outputs, ends = run_all(build_engine(target, build_drafter(shape, target), shape), [asked])
    assert outputs["r0"] == (POISON,)
    assert ends["r0"] is FinishReason.ERROR


class PoisoningDrafter(OracleDrafter):
    """Drafts the true text, and the poison at one node off its path."""

    poison = POISON

    def _draft_row(self, row, tree, seed, root_position, root):
        tokens = super()._draft_row(row, tree, seed, root_position, root)
        text = self.texts[seed]
        depths = tree.depths[row].tolist()
        for node in range(1, len(tokens)):
            position = root_position + depths[node]
            if tokens[node] != -1 and position < len(text) and tokens[node] != text[position]:
                tokens[node] = self.poison
                break
        return tokens


@pytest.mark.parametrize("poison", [POISON, 0])  # 0 is also what padding of a batch of trees runs
@pytest.mark.parametrize("mode", ["tree-8", "tree-64"])
def test_a_poisoned_draft_off_the_path_changes_no_token(mode, poison):
    target = poisoned_target(poison)
    never = {"logit_bias": ((poison, -100.0),)}
    asked = [
        request_of(f"r{idx}", (10, 11, 20 + idx), 100 + idx, speculation=tree, **never)
        for idx, tree in enumerate(("auto", "off", "auto"))
    ]
    plain = run(build_engine(target, None, EngineShape()), asked)
    texts = {r.sampling.seed: (*r.prompt_token_ids, *plain[r.request_id]) for r in asked}
    drafter = PoisoningDrafter(texts, VARYING)
    drafter.poison = poison
    engine = build_engine(target, drafter, EngineShape(mode=mode))
    assert run(engine, asked) == plain
    assert engine.stats().num_accepted > 0


@pytest.mark.parametrize("mode", ["off", "chain-3"])
def test_a_failing_request_leaves_a_shared_prefix_to_the_next(mode):
    target = poisoned_target()
    shape = EngineShape(mode=mode)
    engine = build_engine(target, build_drafter(shape, target), shape)
    start = tuple(range(10, 40))
    expected = run(engine, [request_of("first", start, 1)])["first"]
    engine.add(request_of("bad", (*start, 50, POISON), 2))
    ends = []
    while engine.has_work:
        ends += [delta.finish_reason for delta in engine.step()]
    assert ends == [FinishReason.ERROR]
    before = engine.stats()
    assert before.num_prefix_hit_tokens == 28, "the bad one hit the good prefix"
    assert run(engine, [request_of("next", start, 1)])["next"] == expected
    assert engine.stats().num_prefix_hit_tokens == before.num_prefix_hit_tokens + 28


@pytest.mark.parametrize("num_between", [1, 2, 3])
def test_a_failing_prompt_lends_none_of_its_blocks_while_it_is_prefilled(num_between):
    """A prompt that shares the poisoned start fails as well, where reading the blocks would hide it."""
    target = poisoned_target()
    shape = EngineShape(max_num_seqs=4, max_batched_tokens=12, block_size=4)
    start = (POISON, *range(10, 40))
    asked = [request_of("first", (*start, 50, 51), 1), request_of("second", (*start, 60, 61), 2)]
    _, ends = run_all(build_engine(target, None, shape), asked, num_between)
    assert ends == {"first": FinishReason.ERROR, "second": FinishReason.ERROR}
