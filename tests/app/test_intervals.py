"""Intervals cover the truth as often as they say, and not a wrong value."""

import random

import pytest

from app.intervals import ratio_interval, share_interval


def test_interval_is_the_same_on_every_call_and_holds_the_ratio() -> None:
    seconds = [(2.0, 1.0), (2.2, 1.3), (1.9, 0.8), (2.1, 1.1), (2.0, 1.2)]
    ratio, low, high = ratio_interval(seconds)
    assert ratio_interval(seconds) == (ratio, low, high)
    assert low < ratio < high
    assert ratio == pytest.approx(10.2 / 5.4)


@pytest.mark.parametrize(("shift", "is_covered"), [(1.0, True), (1.3, False)])
def test_interval_covers_the_true_ratio_and_not_a_wrong_one(shift: float, is_covered: bool) -> None:
    """Over 200 repetitions of 12 noisy rounds; the wrong ratio is the control that must fail."""
    source = random.Random(7)
    truth = 1.5
    num_covered = 0
    for _ in range(200):
        rounds = []
        for _ in range(12):
            mood = source.uniform(0.8, 1.2)  # a busy machine slows both arms of a round
            rounds.append((truth * mood * source.gauss(1, 0.05), mood * source.gauss(1, 0.05)))
        _, low, high = ratio_interval(rounds, num_resamples=200)
        num_covered += low <= truth * shift <= high
    assert (num_covered >= 170) == is_covered


@pytest.mark.parametrize(("count", "total"), [(0, 0), (0, 9), (9, 9), (3, 10), (700, 1000)])
def test_share_lies_in_its_interval_and_the_interval_in_zero_to_one(count: int, total: int) -> None:
    low, high = share_interval(count, total)
    assert 0.0 <= low < high <= 1.0
    if total:
        assert low <= count / total <= high


@pytest.mark.parametrize(("shift", "is_covered"), [(0.0, True), (0.15, False)])
def test_share_interval_covers_the_true_share_and_not_a_wrong_one(shift: float, is_covered: bool) -> None:
    source = random.Random(3)
    num_covered = 0
    for _ in range(400):
        low, high = share_interval(sum(source.random() < 0.2 for _ in range(80)), 80)
        num_covered += low <= 0.2 + shift <= high
    assert (num_covered >= 370) == is_covered
