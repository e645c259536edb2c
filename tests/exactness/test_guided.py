"""A grammar holds at every emitted token, and speculation changes no token of guided and unguided rows.

Grammars are tables of tokens that the tests follow by themselves; a grammar library has its own tests.
"""

import functools

import pytest
import torch

from engine.errors import RequestError
from engine.request import FinishReason, Request
from engine.runner.guides import BROKEN, DEAD_END
from engine.runner.runner import ModelRunner
from tests.exactness.head import build_drafter
from tests.exactness.oracle import FIRST, VARYING, AdversarialDrafter, OracleDrafter
from tests.exactness.tiny import EOS, VOCAB, EngineShape, build_engine, build_target, prompts, request_of
from tests.grammar.automaton import (
    END,
    AutomatonBackend,
    AutomatonMatcher,
    Table,
    follow,
    grammar_of,
    random_table,
)

TARGET = build_target()
MODES = ("off", "chain-3", "tree-8", "tree-64")
SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 1.0},
    "truncated": {"temperature": 0.9, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    "penalized": {"temperature": 0.7, "repetition_penalty": 1.3, "logit_bias": ((7, 5.0), (EOS, -3.0))},
}
FORCED: Table = [{10 + idx: idx + 1} for idx in range(12)] + [{EOS: END}]


def guided(name: str, prompt: tuple[int, ...], seed: int, table: Table, **params: object) -> Request:
    return request_of(name, prompt, seed, ignore_eos=False, grammar=grammar_of(table), **params)


def mixed(sampling: str, num: int = 6, shared: int = 0) -> dict[Request, Table | None]:
    """Return requests of which two in three follow a grammar of their own."""
    asked: dict[Request, Table | None] = {}
    for idx, prompt in enumerate(prompts(num, shared=shared)):
        table = random_table(idx, VOCAB, EOS) if idx % 3 else None
        make = request_of if table is None else functools.partial(guided, table=table)
        asked[make(f"r{idx}", prompt, 100 + idx, **SAMPLINGS[sampling])] = table
    return asked


def build(drafter, shape: EngineShape, backend: AutomatonBackend | None = None):
    runner = functools.partial(ModelRunner, open_grammars=lambda: backend or AutomatonBackend())
    return build_engine(TARGET, drafter, shape, runner)


def run(engine, requests, num_between: int = 0):
    """Return the tokens and the last delta of each request, added some steps apart."""
    outputs: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    ends = {}

    def step():
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
            ends[delta.request_id] = delta

    for request in requests:
        engine.add(request)
        for _ in range(num_between):
            step()
    while engine.has_work:
        step()
    assert engine.stats().num_held_blocks == 0
    return outputs, ends


@functools.cache
def plain(sampling: str, num: int = 6, shared: int = 0) -> dict[str, tuple[int, ...]]:
    """Return what plain decoding gives each request alone."""
    engine = build(None, EngineShape(enable_prefix_cache=False))
    return {
        name: tokens
        for request in mixed(sampling, num, shared)
        for name, tokens in run(engine, [request])[0].items()
    }


def texts(asked, outputs) -> dict[int, tuple[int, ...]]:
    return {r.sampling.seed: (*r.prompt_token_ids, *outputs[r.request_id]) for r in asked}


def check_law(asked, outputs, ends) -> None:
    """Check every guided answer by its table: each prefix, and that it ends only where it may."""
    for request, table in asked.items():
        tokens, end = outputs[request.request_id], ends[request.request_id]
        assert end.message is None
        if table is None:
            continue
        state = follow(table, tokens)
        assert (state == END) == (end.finish_reason is FinishReason.STOP)
        if end.finish_reason is FinishReason.LENGTH:
            assert len(tokens) == request.sampling.max_tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("mode", MODES)
def test_guided_and_plain_rows_side_by_side_equal_plain_decoding_alone(mode, sampling):
    asked = mixed(sampling)
    expected = plain(sampling)
    drafter = None if mode == "off" else OracleDrafter(texts(asked, expected), VARYING)
    engine = build(drafter, EngineShape(mode=mode))
    outputs, ends = run(engine, asked, num_between=1)
    assert outputs == expected
    check_law(asked, outputs, ends)
    if mode != "off":
        assert engine.stats().tokens_per_call > 1.3


def test_a_grammar_changes_what_is_said():
    """The control of the tests here: without its grammar, an answer breaks it at once."""
    asked = mixed("greedy")
    unguided = [request_of(r.request_id, r.prompt_token_ids, r.sampling.seed) for r in asked]
    outputs, _ = run(build(None, EngineShape()), unguided)
    for request, table in asked.items():
        if table is None:
            assert outputs[request.request_id] == plain("greedy")[request.request_id]
        else:
            with pytest.raises(KeyError):
                follow(table, outputs[request.request_id])


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
@pytest.mark.parametrize("mode", MODES[1:])
def test_drafts_that_are_all_wrong_change_nothing(mode, sampling):
    asked = mixed(sampling)
    expected = plain(sampling)
    engine = build(AdversarialDrafter(texts(asked, expected)), EngineShape(mode=mode))
    outputs, ends = run(engine, asked)
    assert outputs == expected
    check_law(asked, outputs, ends)


@pytest.mark.parametrize("draft_mode", ["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES[1:])
def test_a_draft_head_with_a_cut_vocabulary_keeps_the_grammar(mode, draft_mode):
    asked = mixed("seeded")
    shape = EngineShape(mode=mode, draft_mode=draft_mode)
    outputs, ends = run(build(build_drafter(shape, TARGET), shape), asked)
    check_law(asked, outputs, ends)
    if draft_mode == "greedy":
        assert outputs == plain("seeded")


@pytest.mark.parametrize("mode", ["chain-3", "tree-8"])
def test_preempted_rows_go_on_where_their_grammar_was(mode):
    asked = mixed("seeded")
    drafter = OracleDrafter(texts(asked, plain("seeded")), FIRST)
    engine = build(drafter, EngineShape(mode=mode, num_blocks=30, enable_prefix_cache=False))
    outputs, ends = run(engine, asked)
    assert outputs == plain("seeded")
    check_law(asked, outputs, ends)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("mode", ["off", "tree-8"])
def test_prefix_hits_change_nothing(mode):
    asked = mixed("greedy", shared=22)
    expected = plain("greedy", shared=22)
    engine = build(OracleDrafter(texts(asked, expected), VARYING), EngineShape(mode=mode))
    outputs, _ = run(engine, asked, num_between=8)
    assert outputs == expected
    assert engine.stats().num_prefix_hit_tokens > 0


@pytest.mark.parametrize("mode", MODES)
def test_slots_pass_from_guided_to_plain_rows_and_back(mode):
    asked = mixed("greedy", num=9)
    drafter = None if mode == "off" else OracleDrafter(texts(asked, plain("greedy", num=9)), VARYING)
    engine = build(drafter, EngineShape(mode=mode, max_num_seqs=2))
    outputs, _ = run(engine, asked)
    assert outputs == plain("greedy", num=9)


def test_forced_tokens_are_drafted_and_all_accepted():
    """Where the grammar leaves one token the draft takes it, whatever its head says."""
    shape = EngineShape(mode="chain-3")
    drafter = build_drafter(shape, TARGET)
    drafter.head.target_ids.copy_(torch.arange(40))
    engine = build(drafter, shape)
    outputs, ends = run(engine, [guided("r0", prompts(1)[0], 1, FORCED)])
    assert outputs["r0"] == (*range(10, 22), EOS)
    assert ends["r0"].finish_reason is FinishReason.STOP
    assert ends["r0"].num_calls == 4  # 13 tokens, four at a time


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_may_be_empty_and_must_end_where_nothing_else_may_follow(mode):
    shape = EngineShape(mode=mode)
    drafter = None if mode == "off" else build_drafter(shape, TARGET)
    outputs, ends = run(build(drafter, shape), [guided("r0", prompts(1)[0], 1, [{EOS: END}])])
    assert outputs["r0"] == (EOS,)
    assert ends["r0"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_max_tokens_cuts_a_guided_answer_anywhere(max_tokens):
    shape = EngineShape(mode="tree-8")
    engine = build(build_drafter(shape, TARGET), shape)
    outputs, ends = run(engine, [guided("r0", prompts(1)[0], 1, FORCED, max_tokens=max_tokens)])
    assert outputs["r0"] == (*range(10, 22), EOS)[:max_tokens]
    is_whole = max_tokens == 13
    assert ends["r0"].finish_reason is (FinishReason.STOP if is_whole else FinishReason.LENGTH)


class _FailsToAdvance(AutomatonMatcher):
    def advance(self, token_id):
        if len(self.states) > 4:
            raise OSError("the library crashed")
        return super().advance(token_id)


class _FailsToFill(AutomatonMatcher):
    def fill(self, mask):
        if len(self.states) > 4:
            raise OSError("the library crashed")
        super().fill(mask)


class _ForgetsToRollBack(AutomatonMatcher):
    def rollback(self, num_tokens):
        pass


class _Lies(AutomatonMatcher):
    """Allows all and takes nothing."""

    def fill(self, mask):
        mask.fill_(-1)

    def advance(self, token_id):
        return False


BREAKS = [(matcher, mode) for matcher in (_FailsToAdvance, _FailsToFill, _Lies) for mode in MODES]
BREAKS += [(_ForgetsToRollBack, mode) for mode in MODES[1:]]  # a tree of one node takes nothing back


@pytest.mark.parametrize(("matcher", "mode"), BREAKS)
def test_a_grammar_that_breaks_fails_its_request_alone(matcher, mode):
    asked = mixed("greedy")
    victim = next(request for request, table in asked.items() if table is not None)
    shape = EngineShape(mode=mode)
    drafter = None if mode == "off" else build_drafter(shape, TARGET)
    engine = build(drafter, shape, AutomatonBackend({victim.sampling.grammar: matcher}))
    outputs, ends = run(engine, asked)
    end = ends[victim.request_id]
    assert (end.finish_reason, end.message) == (FinishReason.ERROR, BROKEN)
    others = {name: tokens for name, tokens in plain("greedy").items() if name != victim.request_id}
    assert {name: outputs[name] for name in others} == others
    if matcher is not _Lies:
        said = outputs[victim.request_id]
        assert said == plain("greedy")[victim.request_id][: len(said)]
    assert engine.stats().num_failed == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_dead_end_fails_its_request_alone_and_says_so(mode):
    asked = mixed("greedy")
    shape = EngineShape(mode=mode)
    engine = build(None if mode == "off" else build_drafter(shape, TARGET), shape)
    dead = guided("dead", prompts(1)[0], 1, [{10: 1}, {11: 2}, {}])
    outputs, ends = run(engine, [dead, *asked])
    assert (ends["dead"].finish_reason, ends["dead"].message) == (FinishReason.ERROR, DEAD_END)
    said = outputs.pop("dead")
    assert said == (10, 11)[: len(said)]  # a step that comes to the end of the road gives nothing
    assert outputs == plain("greedy")


@pytest.mark.parametrize("field", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_fields_that_forbid_the_end_are_refused(field):
    engine = build(None, EngineShape())
    params = {"ignore_eos": False, **field}
    with pytest.raises(RequestError, match="grammar") as refusal:
        engine.add(request_of("r0", (7, 8), 1, grammar=grammar_of(FORCED), **params))
    assert refusal.value.parameter == next(iter(field))
    assert not engine.has_work


def test_an_engine_without_a_tokenizer_refuses_a_grammar():
    engine = build_engine(TARGET, None, EngineShape())
    with pytest.raises(RequestError, match="tokenizer"):
        engine.add(guided("r0", (7, 8), 1, FORCED))
    assert not engine.has_work
