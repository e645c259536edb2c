import itertools
import random

import pytest

from engine.dispatcher.isotonic import falling, rising


def by_max_min(values, weights):
    """The closed form of isotonic regression: the largest, over starts, of the least mean, over ends."""

    def mean(first, last):
        part = range(first, last + 1)
        return sum(values[idx] * weights[idx] for idx in part) / sum(weights[idx] for idx in part)

    size = len(values)
    return [
        max(min(mean(first, last) for last in range(idx, size)) for first in range(idx + 1))
        for idx in range(size)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_both_directions_equal_the_closed_form(seed):
    source = random.Random(seed)
    size = source.randint(1, 9)
    values = [source.uniform(-1, 1) for _ in range(size)]
    weights = [source.uniform(0.1, 3) for _ in range(size)]
    found = rising(values, weights)
    assert found == pytest.approx(by_max_min(values, weights))
    assert all(left <= right for left, right in itertools.pairwise(found))
    mirrored = falling(values, weights)
    assert mirrored == pytest.approx(by_max_min(values[::-1], weights[::-1])[::-1])


def test_nothing_is_monotone_already():
    assert rising([], []) == []
