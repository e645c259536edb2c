"""Scoring rows of logits: log_softmax at the emitted token and at the largest, in one fixed order."""

import math

import pytest
import torch

from engine.sampling.logprobs import score


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_scores_are_log_softmax_in_falling_order(dtype, num_top):
    torch.manual_seed(0)
    logits = (torch.randn(7, 300) * 5).to(dtype)
    token_ids = torch.randint(300, (7,))
    values, best = score(logits, token_ids, num_top)
    truth = logits.double().log_softmax(-1)
    assert values.dtype == torch.float32
    assert torch.allclose(values[:, 0].double(), truth.gather(1, token_ids[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(values[:, 1:].double(), truth.gather(1, best), atol=1e-5)
    assert torch.equal(truth.gather(1, best), truth.topk(num_top).values)


@pytest.mark.parametrize("scale", [1.0, 1e-3, -40.0])
def test_ties_go_by_id(scale):
    logits = torch.full((1, 200_000), scale, dtype=torch.bfloat16)
    logits[0, 5] = scale + 2 * abs(scale)
    _, best = score(logits, torch.tensor([0]), 4)
    assert best.tolist() == [[5, 0, 1, 2]]


def test_neighbouring_numbers_keep_their_order():
    low = torch.tensor(17.3)
    logits = torch.full((1, 200_000), low.item())
    logits[0, -1] = torch.nextafter(low, torch.tensor(math.inf))
    _, best = score(logits, torch.tensor([0]), 2)
    assert best.tolist() == [[199_999, 0]]


def test_a_token_without_probability_has_minus_infinity():
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    values, best = score(logits, torch.tensor([1]), 3)
    assert values[0].tolist() == pytest.approx([-math.inf, -math.log(2), -math.log(2), -math.inf])
    assert best[0].tolist() == [0, 2, 1]


def test_a_small_vocabulary_gives_all_of_it():
    values, best = score(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([0]), 20)
    assert best.tolist() == [[1, 0, 2]]
    assert values.shape == (1, 4)
