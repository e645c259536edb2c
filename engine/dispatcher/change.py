"""Noticing that acceptance is not what it was: a cumulative sum test on verified drafts (Page 1954).

What is predicted, and what follows from an alarm, are left to `acceptance`.
"""

import functools
import math
from collections.abc import Sequence

from engine.dispatcher.evidence import Counts, Seen

_ODDS_RATIO = 4.0  # the break it is tuned for: odds of acceptance this many times higher or lower
_RECENCY = 0.97  # what evidence for after an alarm still weighs one outcome later


class ChangeDetector:
    """Two one-sided tests, for acceptance that falls and that rises.

    Each adds up log-likelihood ratios of "broken" over "as predicted" and starts anew at zero; the outcomes
    since then are the evidence from which to begin again after an alarm. With a threshold of h nats, false
    alarms are about exp(h) outcomes apart.
    """

    def __init__(self) -> None:
        self._sums = [0.0, 0.0]
        self._since: list[Counts | None] = [None, None]

    def observe(self, step: Sequence[Seen], threshold: float) -> Counts | None:
        """Note one step, whose rows have no order. Return the outcomes since acceptance broke, where a sum
        passed `threshold`, and start anew then.
        """
        fallen = risen = 0.0
        for outcome, times, predicted in step:
            ratios = _log_ratios(outcome.is_hit, predicted)
            fallen += times * ratios[0]
            risen += times * ratios[1]
        for side, gain in enumerate((fallen, risen)):
            self._sums[side] = max(0.0, self._sums[side] + gain)
            self._since[side] = _extended(self._since[side] or Counts(), step) if self._sums[side] else None
        side = 0 if self._sums[0] >= self._sums[1] else 1
        if self._sums[side] < threshold:
            return None
        found = self._since[side]
        self._sums, self._since = [0.0, 0.0], [None, None]
        return found


def _extended(since: Counts, step: Sequence[Seen]) -> Counts:
    """Add the outcomes of a step, before which what lies far back fades: it may be from before the break."""
    since.fade(max(_RECENCY ** sum([seen.times for seen in step]), 1e-6))
    for seen in step:
        since.add(seen.outcome, seen.times)
    return since


@functools.lru_cache(maxsize=1024)
def _log_ratios(is_hit: bool, predicted: float) -> tuple[float, float]:
    """Return the log-likelihood ratios of one outcome: that acceptance fell, and that it rose."""
    p = min(max(predicted, 0.01), 0.99)
    fallen, risen = (
        (math.log(ratio) if is_hit else 0.0) - math.log1p((ratio - 1.0) * p)
        for ratio in (1.0 / _ODDS_RATIO, _ODDS_RATIO)
    )
    return fallen, risen
