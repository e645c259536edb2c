"""No head changes what is said, and the simulation on known answers counts the calls that the engine made.

Heads are random ones of every kind, a half-trained one, and ones that mean harm.
"""

import dataclasses
from functools import cache

import pytest
import torch

from engine.draft.network import create_network
from engine.request import Request, SamplingParams
from engine.training.dataset import Conversations, pack
from engine.training.dialogue import Span, write_dialogues
from engine.training.evaluate import count_calls, measure_ranks
from engine.training.head_init import create_head
from engine.training.trainer import Trainer, TrainingConfig
from engine.tree.library import TreeLibrary
from tests.exactness.head import DRAFT, make_drafter
from tests.exactness.tiny import MAX_LEN, VOCAB, EngineShape, build_engine, build_target, prompts, run

SHAPE = EngineShape()
DEPTH = 8
NUM_TOKENS = 26
TREES = ("chain-3", "tree-16")
LIBRARY = TreeLibrary.search(max_depth=15)
# Answers that keep to few words are guessed by a random head that knows no others.
WORDS = (7, 19, 23, 42, 58, 61, 77, 90)
VARIANTS = {
    "eagle3": {},
    "raw feedback": {"is_feedback_normed": False},
    "eagle1": {"style": "eagle1", "taps": (2,), "is_feedback_normed": False, "has_fc_bias": True},
    "no first pair": {"has_first_pair": False},
    "norms": {"tap_norm": "each", "is_residual_normed": True},
    "own rows": {"has_own_embedding": True, "has_own_head": True, "tap_norm": "joint"},
}


def random_head(target, words=None, **changes):
    """Return a random head, which drafts `words` alone where they are given."""
    torch.manual_seed(3)
    config = dataclasses.replace(DRAFT, **changes)
    if words:
        config = dataclasses.replace(config, draft_vocab_size=len(words))
    head = create_network(config, num_positions=MAX_LEN + 128, dtype=torch.float32)
    for parameter in (*head.parameters(), head.embed_rows, head.head_rows):
        if parameter.dim() == 2 and len(parameter):
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    ids = torch.tensor(words) if words else torch.randperm(VOCAB)[: config.draft_vocab_size]
    head.target_ids.copy_(ids)
    head.requires_grad_(False).bind(target.embed_tokens.weight, target.head_weight)
    return head


def half_trained(folder):
    """Train a fresh head on what the target says, and stop half-way."""
    target = build_target()
    config = dataclasses.replace(DRAFT, num_layers=1, draft_vocab_size=VOCAB)
    head = create_head(config, target, torch.arange(VOCAB), MAX_LEN + 128, seed=0)
    plain = build_engine(target, None, SHAPE)
    sampling = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True)
    plans = [[Span(prompt, is_answer=True, sampling=sampling)] for prompt in prompts(24, seed=5)]
    rows = pack(as_conversations([dialogue for _, dialogue in write_dialogues(plain, plans, 120)]), 128)
    trainer = Trainer(target, head, rows, TrainingConfig(60, batch_rows=4, warmup_steps=5), folder)
    for _ in range(30):
        trainer.train_step()
    return head.requires_grad_(False)


def as_conversations(dialogues):
    return Conversations(
        torch.tensor([token for dialogue in dialogues for token in dialogue.token_ids], dtype=torch.int32),
        torch.tensor([flag for dialogue in dialogues for flag in dialogue.is_answer]),
        torch.tensor([len(dialogue.token_ids) for dialogue in dialogues]),
    )


def reverse(head):
    """Rank the tokens the other way round: what the head thinks least of comes first."""
    head.norm.weight.neg_()
    return head


def poison(head, value):
    head.layers[0].down_proj.weight[0] = value
    return head


def repeat_one(head):
    """Propose the same few tokens whatever was said."""
    head.norm.weight.zero_()
    return head


HARM = {
    "reversed": lambda target: reverse(random_head(target)),
    "nan": lambda target: poison(random_head(target), torch.nan),
    "inf": lambda target: poison(random_head(target), torch.inf),
    "huge": lambda target: poison(random_head(target), 1e30),
    "constant": lambda target: repeat_one(random_head(target)),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return half_trained(tmp_path_factory.mktemp("half-trained"))


def answer(target, head, mode, words=()):
    """Return the answers of a batch, greedy and seeded rows mixed, and the engine's counters."""
    engine = build_engine(target, head and make_drafter(SHAPE, head), dataclasses.replace(SHAPE, mode=mode))
    bias = tuple((word, 12.0) for word in words)
    samplings = [
        SamplingParams(
            temperature=0.8 * (idx % 2),
            top_p=0.9,
            seed=idx,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            logit_bias=bias,
        )
        for idx in range(6)
    ]
    asked = zip(prompts(6), samplings, strict=True)
    requests = [Request(str(idx), prompt, sampling) for idx, (prompt, sampling) in enumerate(asked)]
    return run(engine, requests), engine.stats()


@cache
def plain(words=()):
    """Return the answers without a draft."""
    said, _ = answer(build_target(), None, "off", words)
    return said


def check(head, mode, words=()):
    """The head changes nothing, and its drafts are accepted as often as the simulation says; return the
    tokens per call.
    """
    target = build_target()
    target.taps = head.config.taps
    said, stats = answer(target, head, mode, words)
    assert said == plain(words)
    assert stats.num_accepted > 0
    assert simulate(target, head, said, LIBRARY.get(mode)) == stats.num_calls
    return stats.tokens_per_call


def simulate(target, head, said, topology):
    """Return the calls that ranks along the answers give."""
    texts = [(prompt, said[str(idx)]) for idx, prompt in enumerate(prompts(6))]
    data = Conversations(
        torch.tensor([token for prompt, text in texts for token in (*prompt, *text)], dtype=torch.int32),
        torch.tensor([flag for p, t in texts for flag in (*[False] * len(p), *[True] * len(t))]),
        torch.tensor([len(prompt) + len(text) for prompt, text in texts]),
    )
    return sum(count_calls(rows.tolist(), topology) for rows in measure_ranks(target, head, data, DEPTH))


@pytest.mark.parametrize("mode", TREES)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_random_head_changes_nothing(name, mode):
    head = random_head(build_target(), WORDS, **VARIANTS[name])
    assert check(head, mode, WORDS) > {"chain-3": 1.05, "tree-16": 1.3}[mode]


@pytest.mark.parametrize("mode", TREES)
@pytest.mark.parametrize("name", HARM)
def test_a_head_that_means_harm_changes_nothing(name, mode):
    target = build_target()
    said, stats = answer(target, HARM[name](target), mode)
    assert said == plain()
    assert stats.num_drafted > 0
    assert stats.tokens_per_call < 1.5, "it should not help"


@pytest.mark.parametrize("mode", TREES)
def test_a_half_trained_head_changes_nothing_and_saves_calls(trained, mode):
    assert check(trained, mode) > 1.05
