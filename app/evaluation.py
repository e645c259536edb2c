"""Measures how much of a draft a model accepts: its answers once, then every tree on them.

With deterministic drafts a tree accepts exactly the nodes that spell the model's own answer, at any
temperature, so ranks along known answers give the tokens per call of every tree
(`engine/training/evaluate.py`). Speed is left to `bench`, printing to `cli_eval`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from app.intervals import ratio_interval, share_interval
from engine import EngineStats, SamplingParams
from engine.training.dataset import Conversations
from engine.training.dialogue import Dialogue, Span, StepEngine, write_dialogues
from engine.training.evaluate import AcceptanceProfile, count_calls, measure_perfect_ranks, measure_ranks
from engine.training.pair import MEASURED_DEPTH, NetworkPair
from engine.tree.topology import TreeTopology

REPEAT_LEN = 16  # tokens; an answer that repeats this many is a loop, which any draft predicts
NUM_RANKS = 8


@dataclass(frozen=True, slots=True)
class Question:
    """One chat to answer: what the model is given before each of its answers, and the chat's category."""

    turns: tuple[tuple[int, ...], ...]
    category: str


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers at one temperature, in the order of the questions, and what the engine's own tree accepted.

    `accepted_by_depth[d]` counts kept drafts at depth d + 1.
    """

    temperature: float
    dialogues: tuple[Dialogue, ...]
    categories: tuple[str, ...]
    accepted_by_depth: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeMeasure:
    """Tokens per call of one tree, the model's own token counted, and its interval over answers."""

    tree: str
    num_answers: int
    num_tokens: int
    num_calls: int
    tokens_per_call: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class DepthMeasure:
    """At `depth`, `reached` paths had drafts; `accepted[r]` continued by the draft of rank r.

    A path reaches a depth where all its ranks before were counted ones. `top` is the share of rank 0.
    """

    depth: int
    reached: int
    accepted: tuple[int, ...]
    top: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a draft does at one temperature.

    `engine` is what the engine itself did with its tree. `trees` are those asked for, `unrepeated` the same
    without the answers that loop, `ceiling` the same for a draft that ranks tokens as the model does.
    """

    temperature: float
    num_repeating: int
    engine: TreeMeasure
    engine_accepted_by_depth: tuple[int, ...]
    trees: tuple[TreeMeasure, ...]
    unrepeated: tuple[TreeMeasure, ...]
    ceiling: tuple[TreeMeasure, ...]
    categories: tuple[tuple[str, tuple[TreeMeasure, ...]], ...]
    depths: tuple[DepthMeasure, ...]


class StatsEngine(StepEngine, Protocol):
    """An engine that counts; `engine.Engine` is one."""

    def stats(self) -> EngineStats: ...


def answer(engine: StatsEngine, questions: Sequence[Question], sampling: SamplingParams) -> Answers:
    """Let the engine answer; question i has seed `sampling.seed` + i. Raises what the engine raises."""
    before = engine.stats().accepted_by_depth
    plans = [_plan(question, sampling, idx) for idx, question in enumerate(questions)]
    written = dict(write_dialogues(engine, plans, engine.facts.max_model_len))
    after = engine.stats().accepted_by_depth
    earlier = (*before, *[0] * len(after))
    return Answers(
        temperature=sampling.temperature,
        dialogues=tuple(written[idx] for idx in range(len(plans))),
        categories=tuple(question.category for question in questions),
        accepted_by_depth=tuple(count - earlier[idx] for idx, count in enumerate(after)),
    )


def evaluate(
    answers: Answers, pair: NetworkPair, tree: str, trees: Sequence[TreeTopology]
) -> tuple[Evaluation, AcceptanceProfile]:
    """Return what the draft does on `answers`, which the engine drew with `tree`, and its profile."""
    data = as_conversations(answers.dialogues)
    ranks = measure_ranks(pair.target, pair.head, data, MEASURED_DEPTH)
    ceiling = measure_perfect_ranks(pair.target, data, MEASURED_DEPTH)
    said = [one for dialogue in answers.dialogues for one in dialogue.answers]
    assert len(ranks) == len(said), (len(ranks), len(said))
    is_loop = [repeats(one.token_ids) for one in said]
    paired = zip(answers.dialogues, answers.categories, strict=True)
    labels = [category for dialogue, category in paired for _ in dialogue.answers]
    steady = [rows for rows, loops in zip(ranks, is_loop, strict=True) if not loops]
    profile = AcceptanceProfile.measure(ranks, min(NUM_RANKS, pair.head.config.draft_vocab_size))
    calls = [(len(one.token_ids), one.num_calls) for one in said]
    evaluation = Evaluation(
        temperature=answers.temperature,
        num_repeating=sum(is_loop),
        engine=_measure(tree, calls),
        engine_accepted_by_depth=answers.accepted_by_depth,
        trees=measure_trees(ranks, trees),
        unrepeated=measure_trees(steady, trees),
        ceiling=measure_trees(ceiling, trees),
        categories=tuple(
            (label, measure_trees([r for r, own in zip(ranks, labels, strict=True) if own == label], trees))
            for label in sorted(set(labels))
            if label
        ),
        depths=_depths(profile),
    )
    return evaluation, profile


def measure_trees(ranks: Sequence[Tensor], trees: Sequence[TreeTopology]) -> tuple[TreeMeasure, ...]:
    """Return what each tree would do on answers given as ranks [n, D]; nothing where there are no answers."""
    if not ranks:
        return ()
    listed = [rows.tolist() for rows in ranks]
    return tuple(
        _measure(tree.name, [(len(rows), count_calls(rows, tree)) for rows in listed]) for tree in trees
    )


def as_conversations(dialogues: Iterable[Dialogue]) -> Conversations:
    """Return dialogues as one store of tokens."""
    parts = list(dialogues)
    return Conversations(
        torch.tensor([token for part in parts for token in part.token_ids], dtype=torch.int32),
        torch.tensor([flag for part in parts for flag in part.is_answer], dtype=torch.bool),
        torch.tensor([len(part.token_ids) for part in parts]),
    )


def repeats(token_ids: Sequence[int]) -> bool:
    """Say whether some run of 16 tokens occurs twice."""
    seen = set()
    for start in range(len(token_ids) - REPEAT_LEN + 1):
        gram = tuple(token_ids[start : start + REPEAT_LEN])
        if gram in seen:
            return True
        seen.add(gram)
    return False


def _plan(question: Question, sampling: SamplingParams, idx: int) -> list[Span]:
    seeded = replace(sampling, seed=(sampling.seed or 0) + idx)
    return [Span(given, is_answer=True, sampling=seeded, follows_cut=True) for given in question.turns]


def _measure(tree: str, calls: Sequence[tuple[int, int]]) -> TreeMeasure:
    """Sum (tokens, calls) of answers."""
    tokens_per_call, low, high = ratio_interval(calls)
    num_tokens, num_calls = (sum(column) for column in zip(*calls, strict=True))
    return TreeMeasure(tree, len(calls), num_tokens, num_calls, tokens_per_call, low, high)


def _depths(profile: AcceptanceProfile) -> tuple[DepthMeasure, ...]:
    return tuple(
        DepthMeasure(depth, total, row, row[0] / max(total, 1), *share_interval(row[0], total))
        for depth, (row, total) in enumerate(zip(profile.counts, profile.totals, strict=True), start=1)
    )
