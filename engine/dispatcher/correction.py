"""How far steps on this machine are from their latency table: learnt live, held within clips.

The table itself is in `latency`.
"""

import math
import statistics
from dataclasses import dataclass, field

from engine.dispatcher.latency import PLAIN, LatencyTable

# Of a tree against plain decoding, in logs: how much cheaper and dearer than tabled it may be believed to be.
# Two errors of 15% either way make 1.35; to be dear is believed more readily, since it cannot cost speed.
CLIPS = (math.log(1.5), math.log(4.0))
TABLE_ERROR = 0.15  # of a tree whose steps were not seen yet, relative
_MIN_SAMPLES = 3
_MAX_SAMPLES = 32  # of the running mean, so that it follows slow changes
_MAX_SURPRISE = 0.3  # by which one step may differ from the mean before it is cut: hiccups
_STALE_AFTER = 512  # steps
_MAX_CATCH_UPS = 8  # of the running mean of what catching up takes


@dataclass(slots=True)
class _Ratio:
    """Mean log of measured over tabled seconds, and how many steps are in it; a median while they are few."""

    mean: float = 0.0
    num_samples: int = 0
    last_step: int = 0
    first: list[float] = field(default_factory=list)

    def observe(self, log_ratio: float, step: int) -> None:
        self.num_samples = min(self.num_samples + 1, _MAX_SAMPLES)
        self.last_step = step
        if self.num_samples <= _MIN_SAMPLES:
            self.first.append(log_ratio)
            self.mean = statistics.median(self.first)
            return
        log_ratio = min(max(log_ratio, self.mean - _MAX_SURPRISE), self.mean + _MAX_SURPRISE)
        self.mean += (log_ratio - self.mean) / self.num_samples


class LatencyModel:
    """A table times a factor per tree and measured batch.

    What was not seen leans on what was: a batch on the other batches of its tree, a tree on all trees, each
    counting one imaginary sample that says the table is right.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.table = table
        self._ratios: dict[str, dict[int, _Ratio]] = {arm.name: {} for arm in table.arms}
        self._catch_up: dict[int, tuple[float, int]] = {}  # by measured batch: mean seconds, samples in it
        self._whole: float | None = 0.0  # None where a step has changed it
        self._step = 0

    def observe(self, name: str, batch: int, num_cached: int, seconds: float) -> None:
        """Learn from a step in which all rows ran one tree and nothing else happened."""
        self._step += 1
        expected = self.table.seconds(name, batch, num_cached)
        if seconds <= 0.0 or math.isinf(expected):
            return
        ratio = self._ratios[name].setdefault(self.table.bucket(batch), _Ratio())
        ratio.observe(math.log(seconds / expected), self._step)
        self._whole = None

    def observe_catch_up(self, name: str, batch: int, num_cached: int, seconds: float) -> None:
        """Learn from the first step over a tree after long plain decoding; what is over twice such a step
        is cut.
        """
        expected = self.seconds(name, batch, num_cached)
        if seconds <= 0.0 or math.isinf(expected):
            return
        extra = min(max(0.0, seconds - expected), expected)
        bucket = self.table.bucket(batch)
        mean, num_samples = self._catch_up.get(bucket, (self.table.catch_up_seconds(batch), 1))
        num_samples = min(num_samples + 1, _MAX_CATCH_UPS)
        self._catch_up[bucket] = (mean + (extra - mean) / num_samples, num_samples)

    def catch_up_seconds(self, batch: int) -> float:
        """Return what the first step over a tree after plain decoding takes more than those after it."""
        known = self._catch_up.get(self.table.bucket(batch))
        return self.table.catch_up_seconds(batch) if known is None else known[0]

    def seconds(self, name: str, batch: int, num_cached: float) -> float:
        """Return the seconds that a step is expected to take; infinity where it cannot run."""
        tabled = self.table.seconds(name, batch, num_cached)
        return tabled if math.isinf(tabled) else tabled * math.exp(self._log_ratio(name, batch))

    def least_seconds(self, name: str, batch: int, num_cached: float) -> float:
        """Return what a step may turn out to take: for a tree not measured yet the table may be wrong, and so
        may what other trees suggest.
        """
        expected = self.seconds(name, batch, num_cached)
        if self.is_measured(name, batch):
            return expected
        return (1.0 - TABLE_ERROR) * min(expected, self.table.seconds(name, batch, num_cached))

    def is_measured(self, name: str, batch: int) -> bool:
        """True where enough steps of this tree and batch were seen; of plain decoding, lately."""
        ratio = self._ratios[name].get(self.table.bucket(batch))
        if ratio is None or ratio.num_samples < _MIN_SAMPLES:
            return False
        return name != PLAIN or self._step - ratio.last_step < _STALE_AFTER

    def _log_ratio(self, name: str, batch: int) -> float:
        learnt = self._learnt(name, batch)
        if name == PLAIN:
            return learnt
        plain = self._learnt(PLAIN, batch)
        return min(max(learnt, plain - CLIPS[0]), plain + CLIPS[1])

    def _learnt(self, name: str, batch: int) -> float:
        ratios = self._ratios[name]
        mean = (_sum(ratios) + self._mean()) / (len(ratios) + 1)
        ratio = ratios.get(self.table.bucket(batch))
        if ratio is None:
            return mean
        return (ratio.num_samples * ratio.mean + mean) / (ratio.num_samples + 1)

    def _mean(self) -> float:
        """The mean over trees that were seen, and of one that the table has right."""
        if self._whole is None:
            means = [_sum(ratios) / len(ratios) for ratios in self._ratios.values() if ratios]
            self._whole = sum(means) / (len(means) + 1)
        return self._whole


def _sum(ratios: dict[int, _Ratio]) -> float:
    return sum([ratio.mean for ratio in ratios.values()])
