"""When the requests of an open loop are due, as seconds from its start.

A closed loop has no arrivals: each stream asks again when it has its answer.
"""

import itertools
import random
from collections.abc import Iterator

KINDS = ("constant", "poisson")


def constant(rate: float) -> Iterator[float]:
    """Yield `rate` arrivals a second in even steps, the first at once."""
    return (idx / rate for idx in itertools.count())


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield arrivals of a Poisson process: independent exponential gaps of mean 1 / rate."""
    source = random.Random(seed)  # noqa: S311 - statistics, not secrets
    return itertools.accumulate(source.expovariate(rate) for _ in itertools.count())


def arrivals(kind: str, rate: float, seed: int) -> Iterator[float]:
    """Return the arrivals of a kind of `KINDS`."""
    return constant(rate) if kind == "constant" else poisson(rate, seed)
