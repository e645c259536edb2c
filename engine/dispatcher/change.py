"""Noticing that acceptance is not what it was: a cumulative sum test on verified drafts (Page 1954).

What is predicted, and what follows from an alarm, are left to `acceptance`.
"""

import functools
import math

from engine.dispatcher.evidence import Counts, Outcome

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
        self._gains = [0.0, 0.0]  # of the step so far: its rows have no order
        self._outcomes: list[tuple[Outcome, int]] = []

    def observe(self, outcome: Outcome, predicted: float, times: int) -> None:
        """Note an outcome that a step saw `times` over, at nodes whose first `width` children together are
        right with probability `predicted`.
        """
        fallen, risen = _log_ratios(outcome.is_hit, predicted)
        self._gains[0] += times * fallen
        self._gains[1] += times * risen
        self._outcomes.append((outcome, times))

    def alarm(self, threshold: float) -> Counts | None:
        """End a step. Return the outcomes since acceptance broke, where a sum passed `threshold`, and start
        anew then.
        """
        for side in (0, 1):
            self._sums[side] = max(0.0, self._sums[side] + self._gains[side])
            if self._sums[side] == 0.0:
                self._since[side] = None
            else:
                since = self._since[side] or Counts()
                self._since[side] = since
                # What lies far back may be from before the break.
                num_outcomes = sum(times for _, times in self._outcomes)
                since.fade(max(_RECENCY**num_outcomes, 1e-6))
                for outcome, times in self._outcomes:
                    since.add(outcome, times)
        self._gains, self._outcomes = [0.0, 0.0], []
        side = 0 if self._sums[0] >= self._sums[1] else 1
        if self._sums[side] < threshold:
            return None
        found = self._since[side]
        self._sums, self._since = [0.0, 0.0], [None, None]
        return found


@functools.lru_cache(maxsize=1024)
def _log_ratios(is_hit: bool, predicted: float) -> tuple[float, float]:
    """Return the log-likelihood ratios of one outcome: that acceptance fell, and that it rose."""
    p = min(max(predicted, 0.01), 0.99)
    fallen, risen = (
        (math.log(ratio) if is_hit else 0.0) - math.log1p((ratio - 1.0) * p)
        for ratio in (1.0 / _ODDS_RATIO, _ODDS_RATIO)
    )
    return fallen, risen
