"""Noticing that acceptance is not what it was: a cumulative sum test on verified drafts (Page 1954).

What is predicted, and what follows from an alarm, are left to `acceptance`.
"""

import math

from engine.dispatcher.evidence import Counts, Outcome

_ODDS_RATIO = 4.0  # the break it is tuned for: odds of acceptance this many times higher or lower
_LOG_ODDS_RATIO = math.log(_ODDS_RATIO)


class ChangeDetector:
    """Two one-sided tests, for acceptance that falls and that rises.

    Each adds up log-likelihood ratios of "broken" over "as predicted" and starts anew at zero; the outcomes
    since then are the evidence from which to begin again after an alarm. With a threshold of h nats, false
    alarms are about exp(h) outcomes apart.
    """

    def __init__(self) -> None:
        self._sums = [0.0, 0.0]
        self._since = [Counts(), Counts()]

    def observe(self, outcome: Outcome, predicted: float, times: int) -> None:
        """Count an outcome that was seen `times`, of a node whose first `width` children together are right
        with probability `predicted`.
        """
        p = min(max(predicted, 0.01), 0.99)
        for side, log_ratio in enumerate((-_LOG_ODDS_RATIO, _LOG_ODDS_RATIO)):
            gain = -math.log1p((math.exp(log_ratio) - 1.0) * p)
            gain += log_ratio if outcome.is_hit else 0.0
            self._sums[side] += gain * times
            if self._sums[side] <= 0.0:
                self._sums[side] = 0.0
                self._since[side] = Counts()
            else:
                self._since[side].add(outcome, times)

    def alarm(self, threshold: float) -> Counts | None:
        """Return the outcomes since acceptance broke, where a sum passed `threshold`; then start anew."""
        side = 0 if self._sums[0] >= self._sums[1] else 1
        if self._sums[side] < threshold:
            return None
        since = self._since[side]
        self._sums = [0.0, 0.0]
        self._since = [Counts(), Counts()]
        return since
