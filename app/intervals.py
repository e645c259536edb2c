"""Confidence intervals of measured ratios and shares.

What is measured is left to `bench` and `evaluation`.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
_Z = 1.959964  # of a two-sided normal interval of 95%


def ratio_interval(
    pairs: Sequence[tuple[float, float]], num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float, float]:
    """Return sum of lefts over sum of rights, and its bootstrap interval over the pairs."""
    return bootstrap(pairs, ratio, num_resamples)


def bootstrap(
    units: Sequence[T], statistic: Callable[[Sequence[T]], float], num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float, float]:
    """Return a statistic of some units, and its bootstrap interval over them (fixed seed).

    Efron 1979, percentile interval: resampling units keeps what the parts of one unit share.
    """
    source = random.Random(0)  # noqa: S311 - statistics, not secrets
    found = sorted(statistic(source.choices(units, k=len(units))) for _ in range(num_resamples))
    tail = int(num_resamples * (1 - CONFIDENCE) / 2)
    return statistic(units), found[tail], found[-1 - tail]


def share_interval(count: int, total: int) -> tuple[float, float]:
    """Return the interval of a share, count of total (Wilson 1927); (0, 1) where nothing was seen."""
    if total == 0:
        return 0.0, 1.0
    share, spread = count / total, _Z**2 / total
    centre = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return sum of lefts over sum of rights."""
    return sum(left for left, _ in pairs) / sum(right for _, right in pairs)
