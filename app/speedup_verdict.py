"""Whether a measured speed-up is as good as it should be: pass, regression or inconclusive.

It decides from its arguments alone; where they come from is left to `cli_validate`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from app.intervals import bootstrap, ratio

Verdict = Literal["pass", "regression", "inconclusive"]
Seconds = tuple[float, float]  # of one block: plain, speculative


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio with its interval; a declared one is exact: low = value = high."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Floor:
    """What a speed-up is held against. `blocks` are those of a stored run that asked the same prompts."""

    estimate: Estimate
    blocks: tuple[Seconds, ...] = ()


def declared(value: float) -> Floor:
    """Return a floor that somebody set, which has no uncertainty of its own."""
    return Floor(Estimate(value, value, value))


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and what it was taken from: measured over floor, to be at least `threshold`."""

    verdict: Verdict
    relative: Estimate
    threshold: float


def relative_to(floor: Floor, measured: Estimate, blocks: Sequence[Seconds]) -> Estimate:
    """Return measured / floor: block for block where both runs asked the same, `blocks` being the
    measured.
    """
    num_blocks = min(len(blocks), len(floor.blocks))
    if num_blocks == 0:
        return quotient(measured, floor.estimate)
    return paired_quotient(blocks[:num_blocks], floor.blocks[:num_blocks])


def quotient(measured: Estimate, floor: Estimate) -> Estimate:
    """Return measured / floor; its interval adds both in squares on the log scale, as for independent
    estimates.
    """
    return Estimate(
        measured.value / floor.value,
        math.exp(math.log(measured.value / floor.value) - math.hypot(_below(measured), _above(floor))),
        math.exp(math.log(measured.value / floor.value) + math.hypot(_above(measured), _below(floor))),
    )


def paired_quotient(now: Sequence[Seconds], then: Sequence[Seconds]) -> Estimate:
    """Return the speed-up now over that of a run whose blocks asked the same prompts, block for block.

    Prompts differ in speed-up far more than runs do; resampling blocks with both runs in them leaves that
    out.
    """
    blocks = list(zip(now, then, strict=True))
    return Estimate(
        *bootstrap(blocks, lambda some: ratio([one for one, _ in some]) / ratio([one for _, one in some]))
    )


def judge(relative: Estimate, margin: float) -> Judgement:
    """Compare a quotient with 1 - `margin`: pass where its whole interval is at or above, regression where
    all of it is below, else inconclusive.
    """
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
