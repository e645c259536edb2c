"""Draws against the laws they must have."""

import itertools

import pytest
import torch

from engine.sampling.noise import Stream, gumbel
from engine.sampling.sampler import draw, sample_children
from tests.sampling.cases import sampling_tensors
from tests.sampling.laws import law_p_value

NUM_DRAWS = 200_000
LOGITS = torch.tensor([1.5, 0.0, -torch.inf, 0.7, -2.0, 0.7, -4.0])


@pytest.mark.parametrize("is_mixed", [False, True])
def test_zero_temperature_is_the_lowest_argmax(is_mixed: bool) -> None:
    logits = torch.randint(0, 4, (64, 301), generator=torch.Generator().manual_seed(0)).float()
    temperature = [0.0] * 63 + [1.0 if is_mixed else 0.0]
    sampling = sampling_tensors(64, 301, temperature=temperature)
    tokens = draw(logits, sampling, torch.arange(64))
    for row in range(63):
        assert int(tokens[row]) == logits[row].tolist().index(float(logits[row].max()))


def test_draws_follow_the_tempered_softmax() -> None:
    sampling = sampling_tensors(NUM_DRAWS, 7, temperature=0.7, seed=torch.arange(NUM_DRAWS))
    tokens = draw(LOGITS.expand(NUM_DRAWS, -1), sampling, torch.full((NUM_DRAWS,), 5))
    counts = torch.bincount(tokens, minlength=7)[None]
    assert law_p_value(counts, (LOGITS.double() / 0.7).softmax(-1)[None]) > 1e-3
    assert law_p_value(counts, (LOGITS.double() / 0.75).softmax(-1)[None]) < 1e-6


def test_one_seed_draws_its_law_along_positions() -> None:
    position = torch.arange(NUM_DRAWS)
    sampling = sampling_tensors(NUM_DRAWS, 7, temperature=1.0, seed=11)
    tokens = draw(LOGITS.expand(NUM_DRAWS, -1), sampling, position)
    pairs = torch.bincount(tokens[:-1] * 7 + tokens[1:], minlength=49)[None]
    law = LOGITS.double().softmax(-1)
    assert law_p_value(pairs, torch.outer(law, law).flatten()[None]) > 1e-3


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    logits = torch.randn(9, 1000, generator=torch.Generator().manual_seed(2))
    temperature = [0.5, 0.0, 1.0] * 3
    position = torch.arange(9) * 17
    batch = draw(logits, sampling_tensors(9, 1000, temperature=temperature, seed=torch.arange(9)), position)
    for row in range(9):
        sampling = sampling_tensors(1, 1000, temperature=temperature[row], seed=row)
        assert draw(logits[row : row + 1], sampling, position[row : row + 1])[0] == batch[row]


def children_law(log_q: torch.Tensor, count: int) -> torch.Tensor:
    """Return the probability of every ordered draw of `count` different tokens, flat over V**count."""
    q = log_q.double().softmax(-1)
    law = torch.zeros((len(q),) * count, dtype=torch.float64)
    for tokens in itertools.permutations(range(len(q)), count):
        rest, prob = 1.0, 1.0
        for token in tokens:
            prob *= float(q[token]) / rest if rest > 0 else 0.0
            rest -= float(q[token])
        law[tokens] = prob
    return law.flatten()


def test_children_are_drawn_without_replacement_in_order() -> None:
    log_q = torch.tensor([0.5, -0.5, 0.0, 1.0, -2.0])
    position = torch.full((NUM_DRAWS,), 3)
    tokens = sample_children(log_q.expand(NUM_DRAWS, -1), 3, torch.arange(NUM_DRAWS), position)
    counts = torch.bincount(tokens @ torch.tensor([25, 5, 1]), minlength=125)[None]
    assert law_p_value(counts, children_law(log_q, 3)[None]) > 1e-3
    assert law_p_value(counts, children_law(log_q + torch.tensor([0.0, 0, 0, 0, 0.1]), 3)[None]) < 1e-6


def test_children_outside_the_support_are_none() -> None:
    log_q = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf], [torch.nan] * 5])
    tokens = sample_children(log_q, 4, torch.tensor([1, 2]), torch.tensor([4, 4]))
    assert sorted(tokens[0, :2].tolist()) == [1, 3]
    assert tokens[0, 2:].tolist() == [-1, -1]
    assert tokens[1].tolist() == [-1] * 4


def test_children_use_other_noise_than_the_target() -> None:
    seed, position = torch.tensor([4]), torch.tensor([9])
    log_q = torch.zeros(1, 4000)
    children = sample_children(log_q, 3, seed, position)[0].tolist()
    of_target = gumbel(seed, position, 4000, Stream.TARGET)[0].topk(3).indices.tolist()
    assert not set(children) & set(of_target)
