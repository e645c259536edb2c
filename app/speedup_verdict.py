"""Whether a measured speed-up is as good as it should be: pass, regression or inconclusive.

It decides from its arguments alone; where they come from is left to `cli_validate`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "regression", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio with its interval; a declared one is exact: low = value = high."""

    value: float
    low: float
    high: float


def declared(value: float) -> Estimate:
    """Return a floor that somebody set, which has no uncertainty of its own."""
    return Estimate(value, value, value)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and what it was taken from: measured over floor, to be at least `threshold`."""

    verdict: Verdict
    relative: Estimate
    threshold: float


def judge(measured: Estimate, floor: Estimate, margin: float) -> Judgement:
    """Compare measured / floor with 1 - `margin`: pass where its whole interval is at or above, regression
    where all of it is below, else inconclusive.

    The interval of the quotient adds both in squares on the log scale, as for independent estimates.
    """
    relative = Estimate(
        measured.value / floor.value,
        math.exp(math.log(measured.value / floor.value) - math.hypot(_below(measured), _above(floor))),
        math.exp(math.log(measured.value / floor.value) + math.hypot(_above(measured), _below(floor))),
    )
    threshold = 1 - margin
    if relative.low >= threshold:
        return Judgement("pass", relative, threshold)
    return Judgement("regression" if relative.high < threshold else "inconclusive", relative, threshold)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst: one regression is one, else one doubt is one."""
    found = set(verdicts)
    if "regression" in found:
        return "regression"
    return "inconclusive" if "inconclusive" in found else "pass"


def _below(estimate: Estimate) -> float:
    return math.log(estimate.value / estimate.low)


def _above(estimate: Estimate) -> float:
    return math.log(estimate.high / estimate.value)
