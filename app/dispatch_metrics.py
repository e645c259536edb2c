"""Metrics of the choice of trees, beside those of `metrics`, in the same labels.

How the choice is made is left to the engine. The PromQL beside a name is what it is for.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine import EngineStats


class Choosing(Protocol):
    """The part of a replica's snapshot that these metrics read."""

    @property
    def model(self) -> str: ...
    @property
    def replica(self) -> str: ...
    @property
    def stats(self) -> EngineStats: ...


def dispatch_families(replicas: Sequence[Choosing]) -> Iterator[Metric]:
    """Yield the families of all replicas."""
    labels = ["model", "replica"]
    # sum(rate(eyas_arm_tokens_total[5m])) / sum(rate(eyas_arm_seconds_total[5m])) is the realised rate
    tokens = CounterMetricFamily(
        "eyas_arm_tokens_total", "tokens of steps in which every row ran one tree", labels=[*labels, "arm"]
    )
    seconds = CounterMetricFamily(
        "eyas_arm_seconds_total", "device time of those steps", labels=[*labels, "arm"]
    )
    # eyas_expected_tokens_per_second / eyas_plain_tokens_per_second is the speed-up of the chosen tree
    expected = GaugeMetricFamily(
        "eyas_expected_tokens_per_second", "of the chosen tree at this load, where estimated", labels=labels
    )
    plain = GaugeMetricFamily(
        "eyas_plain_tokens_per_second", "of plain decoding at this load, where estimated", labels=labels
    )
    # increase(eyas_dispatch_trips_total[15m]) > 0: speculation cost time and was blocked
    counts = {
        "num_switches": CounterMetricFamily(
            "eyas_dispatch_switches_total", "changes of the chosen tree", labels=labels
        ),
        "num_probes": CounterMetricFamily(
            "eyas_dispatch_probes_total", "steps spent on another tree to learn", labels=labels
        ),
        "num_alarms": CounterMetricFamily(
            "eyas_dispatch_alarms_total", "sudden changes of acceptance", labels=labels
        ),
        "num_trips": CounterMetricFamily(
            "eyas_dispatch_trips_total", "blocks of speculation that was slower than none", labels=labels
        ),
    }
    for replica in replicas:
        names, dispatch = [replica.model, replica.replica], replica.stats.dispatch
        for arm in dispatch.totals:
            tokens.add_metric([*names, arm.name], arm.num_tokens)
            seconds.add_metric([*names, arm.name], arm.seconds)
        for gauge, rate in (
            (expected, dispatch.tokens_per_second),
            (plain, dispatch.plain_tokens_per_second),
        ):
            if rate is not None:
                gauge.add_metric(names, rate)
        for field, counter in counts.items():
            counter.add_metric(names, getattr(dispatch, field))
    yield from (tokens, seconds, expected, plain, *counts.values())
