"""The law of what a verified step emits, on a toy model whose probabilities are known exactly.

Every event of a step (first token, acceptance and rejection at each sibling order, the token after an
acceptance, the token after a rejection, the bonus token) is counted over many seeds and held against its
exact probability by a chi-square test. Each biased variant of the method must fail where its bias shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.sampling import verify as verify_module
from engine.sampling.noise import Stream, uniform
from engine.speculation import Verification
from tests.exactness.toy import (
    MODEL,
    NEUTRAL,
    NUM_SIBLINGS,
    TREE,
    TRUNCATIONS,
    VOCAB,
    Drafts,
    draft_trees,
    node_law,
    target_law,
    verify_rows,
)
from tests.sampling.laws import count_pairs, law_p_value

ACCEPTED, REJECTED = 1e-4, 1e-6
NUM_DEEP_DRAWS = 200_000
NUM_SAMPLED_ROWS = 125_000
NUM_CONTROL_ROWS = 40_000
FIRST, SECOND, THIRD, RESIDUAL = "sibling 1", "sibling 2", "sibling 3", "rejected"
SIBLINGS = (FIRST, SECOND, THIRD)
ROOT, BELOW = "at the root", "below"
TOKENS = {"first token", "after an acceptance"}

DRAFT_PROBS = MODEL.draft.softmax(-1)


@dataclass(frozen=True)
class Event:
    """How often each cell came, by group, and its law: both [G, K]. Groups are conditions."""

    counts: Tensor
    law: Tensor

    @property
    def p_value(self) -> float:
        return law_p_value(self.counts, self.law)


def events_of(
    answer: Verification, mode: str, has_probs: bool, truncations: tuple[dict[str, float], ...] = ({},)
) -> dict[str, Event]:
    """Return every event of the answers by name, row b being of truncation b % len(truncations)."""
    targets = [target_law(**fields) for fields in truncations]
    nodes = [node_law(mode, has_probs, **fields) for fields in truncations]
    kind = torch.arange(len(answer.num_accepted)) % len(truncations)
    tokens, path, deep = answer.token_ids, answer.path, answer.num_accepted >= 1
    events = {"first token": event(kind, tokens[:, 0], [p[:1] for p in targets])}
    rank = accepted_rank(path[:, 0], path[:, 1], answer.num_accepted >= 1)
    events |= node_events(ROOT, kind, rank, tokens[:, 0], torch.stack([law[:1] for law in nodes]))

    after = kind[deep] * VOCAB + tokens[deep, 0]
    events["after an acceptance"] = event(after, tokens[deep, 1], [p[1 : 1 + VOCAB] for p in targets])
    rank = accepted_rank(path[deep, 1], path[deep, 2], answer.num_accepted[deep] == 2)
    events |= node_events(BELOW, after, rank, tokens[deep, 1], torch.stack([law[1:] for law in nodes]))

    whole = answer.num_accepted == 2
    text = (kind[whole] * VOCAB + tokens[whole, 0]) * VOCAB + tokens[whole, 1]
    events["bonus"] = event(text, tokens[whole, 2], [p[1 + VOCAB :] for p in targets])
    return events


def event(groups: Tensor, cells: Tensor, laws: list[Tensor]) -> Event:
    law = torch.cat(laws)
    return Event(count_pairs(groups, cells, *law.shape), law)


def accepted_rank(node: Tensor, child: Tensor, is_accepted: Tensor) -> Tensor:
    """Return [B] the rank of the accepted sibling, NUM_SIBLINGS where all were rejected."""
    return torch.where(is_accepted & (child != node), torch.tensor(TREE.ranks)[child], NUM_SIBLINGS)


def node_events(where: str, groups: Tensor, ranks: Tensor, tokens: Tensor, law: Tensor) -> dict[str, Event]:
    """Return the events at one node [B]: each sibling accepted (as which token) or not, given that none
    before it was, and the token drawn after all were rejected. law: [..., NUM_SIBLINGS + 1, V].
    """
    law = law.flatten(0, -3)
    events = {}
    for rank, name in enumerate((*SIBLINGS, RESIDUAL)):
        is_reached = ranks >= rank
        cells = torch.where(ranks == rank, tokens, VOCAB)[is_reached]
        rest = law[:, rank + 1 :].sum((1, 2))[:, None]
        given = torch.cat((law[:, rank], rest), 1)
        given /= given.sum(1, keepdim=True).clamp(min=torch.finfo(given.dtype).tiny)
        events[f"{name} {where}"] = Event(count_pairs(groups[is_reached], cells, *given.shape), given)
    return events


def both(*names: str) -> set[str]:
    """Return the events of these names at the root and below."""
    return {f"{name} {where}" for name in names for where in (ROOT, BELOW)}


def check(
    drafting: str, has_probs: bool, num_rows: int, truncations: tuple[dict[str, float], ...] = ({},)
) -> None:
    """Every event has its exact probability, and each of them is seen often."""
    values = [{**NEUTRAL, **truncation} for truncation in truncations]
    kind = torch.arange(num_rows) % len(values)
    fields = {name: torch.tensor([row[name] for row in values])[kind] for name in NEUTRAL}
    answer = verify_rows(draft_trees(drafting, num_rows), DRAFT_PROBS if has_probs else None, fields)
    events = events_of(answer, drafting, has_probs, truncations)
    num_draws = {name: int(event.counts.sum()) for name, event in events.items()}
    assert num_draws["after an acceptance"] + num_draws["bonus"] >= NUM_DEEP_DRAWS
    assert min(num_draws[name] for name in both(*SIBLINGS)) >= 20_000, num_draws
    assert min(num_draws[name] for name in both(RESIDUAL)) >= 4_000, num_draws
    p_values = {name: event.p_value for name, event in events.items()}
    assert min(p_values.values()) > ACCEPTED, p_values


@pytest.mark.parametrize("truncations", [({},), TRUNCATIONS], ids=["plain", "truncated"])
@pytest.mark.parametrize(
    ("drafting", "has_probs", "num_rows"),
    [
        pytest.param("best", False, 210_000, id="greedy drafts"),
        pytest.param("drawn", True, NUM_SAMPLED_ROWS, id="sampled drafts"),
    ],
)
def test_every_event_of_a_step_has_its_exact_probability(
    drafting: str, has_probs: bool, num_rows: int, truncations: tuple[dict[str, float], ...]
) -> None:
    check(drafting, has_probs, num_rows, truncations)


def test_sampled_drafts_may_be_matched_as_if_deterministic() -> None:
    check("drawn", False, 260_000)


def test_repeated_siblings_keep_the_law() -> None:
    # Independent draws from q may repeat a token: a repetition has no probability left and is passed over.
    token_ids = draft_trees("repeated", 175_000).token_ids
    assert (token_ids[:, 1] == token_ids[:, 2]).any()
    check("repeated", True, len(token_ids))


def test_the_exact_laws_add_up_to_that_of_the_target() -> None:
    p = target_law()[: 1 + VOCAB]
    for mode, has_probs in (("best", False), ("drawn", True), ("drawn", False), ("repeated", True)):
        torch.testing.assert_close(node_law(mode, has_probs).sum(1), p)


Residual = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def assert_rejected(
    biased: set[str], drafts: Drafts | None = None, q: Tensor = DRAFT_PROBS, fields: dict | None = None, **how
) -> None:
    """The events called `biased` do not have the law of sampled drafts; `fields` are those of the law."""
    drafts = drafts or draft_trees("drawn", NUM_CONTROL_ROWS)
    events = events_of(verify_rows(drafts, q, {}, **how), "drawn", True, (fields or {},))
    p_values = {name: events[name].p_value for name in biased}
    assert max(p_values.values()) < REJECTED, p_values


def test_control_best_children_scored_as_if_drawn() -> None:
    assert_rejected(TOKENS | both(*SIBLINGS), draft_trees("best", NUM_CONTROL_ROWS))


def test_control_drawn_children_dropped_by_their_own_confidence() -> None:
    drafts = draft_trees("drawn", NUM_CONTROL_ROWS)
    above = drafts.texts[:, list(TREE.parents)]
    own = DRAFT_PROBS[above].gather(2, drafts.token_ids.clamp(min=0)[..., None])[..., 0]
    # What a dropping verifier accepts at each rank has another law even where it is sound.
    assert_rejected(TOKENS, replace(drafts, token_ids=drafts.token_ids.masked_fill(own < 0.15, -1)))


def test_control_draft_probabilities_of_another_node() -> None:
    assert_rejected(TOKENS | both(*SIBLINGS, RESIDUAL), q=DRAFT_PROBS.roll(1, 0))


def test_control_children_drawn_with_the_noise_of_the_target() -> None:
    drafts = draft_trees("target's noise", NUM_CONTROL_ROWS)
    assert_rejected(both(RESIDUAL), drafts)


@pytest.mark.parametrize("mode", ["best", "drawn"])
def test_control_bonus_drawn_from_the_node_above_it(mode: str) -> None:
    leaves = torch.arange(1 + VOCAB, len(MODEL.target))
    above = MODEL.target.index_copy(0, leaves, MODEL.target[(leaves - 1) // VOCAB])
    q = DRAFT_PROBS if mode == "drawn" else None
    answer = verify_rows(draft_trees(mode, NUM_CONTROL_ROWS), q, {}, target=above)
    events = events_of(answer, mode, q is not None)
    assert {name for name, event in events.items() if event.p_value < REJECTED} == {"bonus"}


def unnormalised_residual(p: Tensor, q: Tensor, x: Tensor, is_missed: Tensor) -> tuple[Tensor, Tensor]:
    rest = q.scatter(1, x, 0.0)
    rest = rest / rest.sum(-1, keepdim=True)
    return torch.where(is_missed, (p - q).relu(), p), torch.where(is_missed, rest, q)


def unconditioned_draft(p: Tensor, q: Tensor, x: Tensor, is_missed: Tensor) -> tuple[Tensor, Tensor]:
    residual = (p - q).relu()
    return torch.where(is_missed, residual / residual.sum(-1, keepdim=True), p), q


def kept_target(p: Tensor, q: Tensor, x: Tensor, is_missed: Tensor) -> tuple[Tensor, Tensor]:
    rest = q.scatter(1, x, 0.0)
    return p, torch.where(is_missed, rest / rest.sum(-1, keepdim=True), q)


@pytest.mark.parametrize("broken", [unnormalised_residual, unconditioned_draft, kept_target])
def test_control_wrong_residual(broken: Residual, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_residual", broken)
    assert_rejected(TOKENS | both(SECOND, THIRD))


def test_control_one_uniform_for_all_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeated(seed: Tensor, position: Tensor, count: int, stream: Stream) -> Tensor:
        return uniform(seed, position, 1, stream).expand(-1, count)

    monkeypatch.setattr(verify_module, "uniform", repeated)
    assert_rejected(TOKENS | both(SECOND, THIRD), draft_trees("drawn", NUM_SAMPLED_ROWS))


@pytest.mark.parametrize("rank", range(NUM_SIBLINGS))
def test_control_one_sibling_accepted_a_tenth_too_often(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def smaller(seed: Tensor, position: Tensor, count: int, stream: Stream) -> Tensor:
        uniforms = uniform(seed, position, count, stream)
        uniforms[:, rank : rank + 1] /= 1.1
        return uniforms

    monkeypatch.setattr(verify_module, "uniform", smaller)
    assert_rejected(both(SIBLINGS[rank]), draft_trees("drawn", NUM_SAMPLED_ROWS))


@pytest.mark.parametrize("is_strict", [True, False])
def test_control_forbidden_tokens_pass_a_uniform_of_zero(
    is_strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_zeros(seed: Tensor, position: Tensor, count: int, stream: Stream) -> Tensor:
        uniforms = uniform(seed, position, count, stream)
        # Just below 0, the strict comparison answers as one that lets 0 pass.
        return uniforms.where(uniforms >= 2**-10, 0.0 if is_strict else -1e-30)

    monkeypatch.setattr(verify_module, "uniform", with_zeros)
    fields = {"top_p": 0.8}
    answer = verify_rows(draft_trees("drawn", NUM_CONTROL_ROWS), DRAFT_PROBS, fields)
    events = events_of(answer, "drawn", True, (fields,))
    p_values = {name: events[name].p_value for name in TOKENS | both(*SIBLINGS)}
    assert min(p_values.values()) > ACCEPTED if is_strict else max(p_values.values()) < REJECTED, p_values


def test_control_target_verified_before_its_truncation() -> None:
    assert_rejected(TOKENS | both(*SIBLINGS) | {"bonus"}, fields={"top_p": 0.8})
