"""Log-probabilities of guided rows are those of the model without its grammar, whatever was drafted.

That answers keep their grammar is left to `test_guided`, rows without one to `test_logprobs`.
"""

import dataclasses
import math

import pytest
import torch

from engine.logprobs import WantedLogprobs
from engine.request import Request
from engine.runner.guides import GuidedStep
from tests.exactness.head import build_drafter
from tests.exactness.oracle import VARYING, AdversarialDrafter, OracleDrafter
from tests.exactness.test_guided import MODES, SAMPLINGS, build, mixed, texts
from tests.exactness.test_logprobs import (
    NUM_TOP,
    TARGET,
    TOLERANCE,
    Logprobs,
    Outputs,
    check,
    dense_logprobs,
    run,
)
from tests.exactness.tiny import EngineShape
from tests.grammar.automaton import Table


def scored(sampling: str) -> dict[Request, Table | None]:
    """Return guided requests and plain ones, all but one of which ask for logprobs."""
    asked = mixed(sampling)
    wanted = [WantedLogprobs(NUM_TOP) if idx != 4 else None for idx in range(len(asked))]
    return {
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, logprobs=logprobs)): table
        for (request, table), logprobs in zip(asked.items(), wanted, strict=True)
    }


def check_all(asked: dict[Request, Table | None], outputs: Outputs, logprobs: Logprobs) -> None:
    """Compare every entry with a pass over prompt and answer in which no grammar takes part."""
    for request in asked:
        if request.sampling.logprobs is not None:
            check(request, outputs[request.request_id], logprobs[request.request_id])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_guided_tokens_have_the_logprobs_of_the_unmasked_model_with_speculation_and_without(sampling):
    asked = scored(sampling)
    plain, plain_logprobs = run(build(None, EngineShape()), list(asked))
    check_all(asked, plain, plain_logprobs)
    for mode in MODES[1:]:
        engine = build(OracleDrafter(texts(asked, plain), VARYING), EngineShape(mode=mode))
        outputs, logprobs = run(engine, list(asked))
        assert engine.stats().num_accepted > 0
        assert outputs == plain
        check_all(asked, outputs, logprobs)
        for name, entries in plain_logprobs.items():
            values, others = ([entry.logprob for entry in found] for found in (entries, logprobs[name]))
            assert others == pytest.approx(values, abs=TOLERANCE)


@pytest.mark.parametrize("mode", ["chain-3", "tree-16"])
def test_rejected_drafts_leave_no_trace_of_their_masks(mode):
    asked = scored("seeded")
    plain, _ = run(build(None, EngineShape()), list(asked))
    engine = build(AdversarialDrafter(texts(asked, plain)), EngineShape(mode=mode))
    outputs, logprobs = run(engine, list(asked))
    assert outputs == plain
    check_all(asked, outputs, logprobs)


def test_drafts_that_are_drawn_and_masked_give_logprobs_of_what_came():
    asked = scored("seeded")
    shape = EngineShape(mode="tree-8", draft_mode="sampled")
    outputs, logprobs = run(build(build_drafter(shape, TARGET), shape), list(asked))
    check_all(asked, outputs, logprobs)


def test_the_likeliest_tokens_hold_some_that_the_grammar_forbids():
    """Else the tests here would also pass for masked logits."""
    asked = scored("greedy")
    outputs, logprobs = run(build(None, EngineShape()), list(asked))
    shares = []
    for request, table in asked.items():
        if table is None or request.sampling.logprobs is None:
            continue
        state = 0
        for token, entry in zip(outputs[request.request_id], logprobs[request.request_id], strict=True):
            shares += [best not in table[state] for best, _ in entry.top]
            state = table[state][token]
    assert sum(shares) / len(shares) > 0.5


def test_masked_logits_would_be_noticed(monkeypatch):
    """The broken control: without the undoing, reported values are those of the masked target."""
    monkeypatch.setattr(GuidedStep, "unmask_target", lambda self, logits: None)
    asked = {request: table for request, table in scored("greedy").items() if table is not None}
    outputs, logprobs = run(build(None, EngineShape()), list(asked))
    request, table = next(iter(asked.items()))
    entries, tokens = logprobs[request.request_id], outputs[request.request_id]
    with pytest.raises(AssertionError):
        check(request, tokens, entries)
    first = dense_logprobs(request.prompt_token_ids)[-1]
    allowed = torch.tensor(sorted(table[0]))
    assert entries[0].logprob == pytest.approx(
        (first[tokens[0]] - first[allowed].logsumexp(0)).item(), abs=TOLERANCE
    )
    assert not math.isclose(entries[0].logprob, first[tokens[0]].item(), abs_tol=TOLERANCE)
