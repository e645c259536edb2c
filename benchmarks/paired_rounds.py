"""Rounds of several modes in turns: their rates, what is left out early, and means that hiccups do not move.

How a round runs is left to the caller, what a call of a tree is worth too.
"""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.steady_steps import SteadySteps

Rounds = dict[str, list[SteadySteps]]  # by mode, as many of each
Lengths = Mapping[str, float]  # tokens per call of every tree

AUTO = "auto"
_TRIMMED = 0.2  # of the values, at either end
# Rounds, and the share of the best below which a tree is left out then; later one that is surely worse, by so
# many standard errors.
_SCREENED_AFTER, _SCREEN = 3, 0.93
_SURE_AFTER, _SURE = 8, 3.0


def rates_of(rounds: Mapping[str, Sequence[SteadySteps]], lengths: Lengths) -> dict[str, list[float]]:
    """Return tokens per second by mode and round; `lengths` are the tokens per call of every tree."""
    return {mode: [steps.rate(lengths) for steps in found] for mode, found in rounds.items()}


def screened(rounds: Rounds, lengths: Lengths) -> Rounds:
    """Leave out the fixed trees that are not the best, so that the time goes to those that may be."""
    rates = rates_of(rounds, lengths)
    best = best_fixed(rates)

    def may_be_best(mode: str) -> bool:
        share, error = trimmed_mean(
            [one / other for one, other in zip(rates[mode], rates[best], strict=True)]
        )
        if len(rates[best]) >= _SURE_AFTER and share + _SURE * error < 1.0:
            return False
        return len(rates[best]) != _SCREENED_AFTER or share >= _SCREEN

    return {mode: found for mode, found in rounds.items() if mode in (AUTO, best) or may_be_best(mode)}


def best_fixed(rates: Mapping[str, Sequence[float]]) -> str:
    """Return the fixed mode with the highest mean rate."""
    fixed = [mode for mode in rates if mode != AUTO]
    return max(fixed, key=lambda mode: trimmed_mean(rates[mode])[0])


def whole_rate(rounds: Sequence[SteadySteps], lengths: Lengths) -> float:
    """Return tokens per second over all rounds."""
    tokens = sum(steps.rate(lengths) * steps.seconds for steps in rounds)
    return tokens / sum(steps.seconds for steps in rounds)


def trimmed_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean without the highest and the lowest fifth, and its standard error: that of the values
    with those replaced by the nearest that are kept (Tukey and McLaughlin 1963).
    """
    ordered, num = sorted(values), len(values)
    cut = int(_TRIMMED * num)
    kept = ordered[cut : num - cut]
    if num < 2:
        return kept[0], float("inf")
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(winsorised) / ((1.0 - 2.0 * cut / num) * num**0.5)
    return statistics.fmean(kept), error
