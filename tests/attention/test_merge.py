"""Merging attention over disjoint keys equals attention over all of them."""

import pytest
import torch

from engine.attention.merge import merge


def partial(scores, values):
    """Return (out [..., D], lse [...]) of softmax over the last dimension of scores."""
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    scores = 20 * torch.randn(3, 7, 12, generator=generator)
    return scores, torch.randn(3, 12, 5, generator=generator)


@pytest.mark.parametrize("split", [1, 6, 11])
@pytest.mark.parametrize("shift", [0.0, 80.0, -200.0])
def test_two_parts_make_the_whole(problem, split, shift):
    scores, values = problem[0] + shift, problem[1]
    whole, _ = partial(scores, values)
    left = partial(scores[..., :split], values[:, :split])
    right = partial(scores[..., split:], values[:, split:])
    torch.testing.assert_close(merge(*left, *right), whole, atol=1e-4, rtol=1e-4)
    assert torch.equal(merge(*left, *right), merge(*right, *left))


@pytest.mark.parametrize("garbage", [0.0, torch.nan, torch.inf])
def test_an_empty_side_has_no_weight_whatever_it_holds(problem, garbage):
    out, lse = partial(*problem)
    empty = torch.full_like(out, garbage), torch.full_like(lse, -torch.inf)
    assert torch.equal(merge(out, lse, *empty), out)
    assert torch.equal(merge(*empty, out, lse), out)


def test_a_side_may_be_empty_for_some_queries_only(problem):
    scores, values = problem
    left = partial(scores[..., :4], values[:, :4])
    out, lse = partial(scores[..., 4:], values[:, 4:])
    out[:, 2], lse[:, 2] = torch.nan, -torch.inf
    merged = merge(*left, out, lse)
    assert torch.equal(merged[:, 2], left[0][:, 2])
    assert merged.isfinite().all()
