"""Whether a canary's draft is as good as the stable one: a pure function from windows of counters to a
verdict.

Gathering windows is left to `observation`, acting on the verdict to `controller`.

Replicas see different load, so arms are compared within batch buckets, and the log ratios of the buckets are
combined by inverse variance. A window of one replica is a cluster: ratios of sums over windows, variance by
the delta method, Student's quantile. Looks share the error rate evenly, so that looking often finds no more.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

BUCKETS = (1, 4, 8, 16, 32, 64)  # the largest mean batch of each; the rest is one more
NUM_METRICS = 2
_MIN_VARIANCE = 1e-12  # of a log ratio: counters that agree to the last digit still are a sample


class Verdict(enum.StrEnum):
    """What is known of the candidate. Missing data is never a pass."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Window:
    """What one replica did in one stretch of time: differences of its counters, all positive.

    `seconds` were spent in `steps` decode steps, which verified `calls` (sequence, step) pairs and emitted
    `tokens`.
    """

    seconds: float
    steps: int
    calls: int
    tokens: int

    @property
    def batch(self) -> float:
        """Mean sequences per step."""
        return self.calls / self.steps

    @property
    def tokens_per_sequence(self) -> float:
        return self.tokens / self.batch


@dataclass(frozen=True, slots=True)
class Limits:
    """`margin` is the share of acceptance length whose loss is put up with, `time_margin` the share that a
    token may take longer; hosts that differ need a wider one. A bucket counts from `min_windows` in each arm.
    """

    margin: float = 0.03
    time_margin: float = 0.03
    error_rate: float = 0.05
    max_looks: int = 10
    min_windows: int = 5


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio, candidate over stable, with its simultaneous confidence bounds."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Analysis:
    """`buckets` are those that counted, by the largest batch; without one there are no intervals."""

    verdict: Verdict
    reason: str
    acceptance: Interval | None = None
    time_per_token: Interval | None = None
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _LogRatio:
    value: float
    variance: float
    freedom: int


def judge(
    candidate: Sequence[Window], stable: Sequence[Window], problems: Sequence[str], limits: Limits
) -> Analysis:
    """Return the verdict of one look at all windows so far; `problems` are faults seen in a canary
    replica.
    """
    if problems:
        return Analysis(Verdict.ERROR, "; ".join(problems))
    arms = [_by_bucket(windows) for windows in (candidate, stable)]
    buckets = tuple(
        bucket
        for bucket in (*BUCKETS, 0)
        if min(len(arm.get(bucket, ())) for arm in arms) >= max(2, limits.min_windows)
    )
    if not buckets:
        return Analysis(
            Verdict.INCONCLUSIVE,
            f"no batch bucket has {limits.min_windows} windows of both drafts: "
            f"{len(candidate)} of the candidate, {len(stable)} of the stable one",
        )
    pairs = [(arms[0][bucket], arms[1][bucket]) for bucket in buckets]
    acceptance = _interval([_acceptance(*pair) for pair in pairs], limits)
    time = _interval([_time_per_token(*pair) for pair in pairs], limits)
    verdict, reason = _decide(acceptance, time, 1 - limits.margin, 1 + limits.time_margin)
    return Analysis(verdict, reason, acceptance, time, buckets)


def _decide(acceptance: Interval, time: Interval, least: float, most: float) -> tuple[Verdict, str]:
    text = (
        f"acceptance length {acceptance.estimate:.3f} of stable "
        f"({acceptance.low:.3f} to {acceptance.high:.3f}), "
        f"time per token {time.estimate:.3f} ({time.low:.3f} to {time.high:.3f})"
    )
    if acceptance.high < least or time.low > most:
        return Verdict.FAIL, text
    if acceptance.low >= least and time.high <= most:
        return Verdict.PASS, text
    return Verdict.INCONCLUSIVE, text


def bucket_of(batch: float) -> int:
    """Return the largest batch of the bucket, 0 for the last, which has none."""
    return next((most for most in BUCKETS if round(batch) <= most), 0)


def _by_bucket(windows: Sequence[Window]) -> dict[int, list[Window]]:
    found: dict[int, list[Window]] = {}
    for window in windows:
        found.setdefault(bucket_of(window.batch), []).append(window)
    return found


def _acceptance(candidate: Sequence[Window], stable: Sequence[Window]) -> _LogRatio:
    arms = [([float(w.tokens) for w in arm], [float(w.calls) for w in arm]) for arm in (candidate, stable)]
    return _difference(_log_ratio(*arms[0]), _log_ratio(*arms[1]))


def _time_per_token(candidate: Sequence[Window], stable: Sequence[Window]) -> _LogRatio:
    arms = [([w.seconds for w in arm], [w.tokens_per_sequence for w in arm]) for arm in (candidate, stable)]
    return _difference(_log_ratio(*arms[0]), _log_ratio(*arms[1]))


def _log_ratio(tops: Sequence[float], bottoms: Sequence[float]) -> _LogRatio:
    """Return log(sum tops / sum bottoms); its variance is that of the mean of the residuals t - R b."""
    count, top, bottom = len(tops), sum(tops), sum(bottoms)
    ratio = top / bottom
    squares = sum((t - ratio * b) ** 2 for t, b in zip(tops, bottoms, strict=True))
    variance = squares * count / (count - 1) / top**2
    return _LogRatio(math.log(ratio), max(variance, _MIN_VARIANCE), count - 1)


def _difference(left: _LogRatio, right: _LogRatio) -> _LogRatio:
    return _LogRatio(
        left.value - right.value, left.variance + right.variance, min(left.freedom, right.freedom)
    )


def _interval(strata: Sequence[_LogRatio], limits: Limits) -> Interval:
    weights = [1 / stratum.variance for stratum in strata]
    mean = sum(w * stratum.value for w, stratum in zip(weights, strata, strict=True)) / sum(weights)
    tail = limits.error_rate / (2 * NUM_METRICS * limits.max_looks)
    half = student_quantile(1 - tail, sum(stratum.freedom for stratum in strata)) / math.sqrt(sum(weights))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def student_quantile(probability: float, freedom: int) -> float:
    """Return Student's quantile by the expansion in 1/freedom (Abramowitz and Stegun 26.7.5, four terms)."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
