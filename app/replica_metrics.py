"""Metrics of a replica's start and of its draft, beside those of `metrics`, in the same labels.

The PromQL beside a name is what it is for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.ready import ReadyTimes
from engine import DraftState, EngineStats


class Told(Protocol):
    """The part of a replica's snapshot that these metrics read."""

    @property
    def model(self) -> str: ...
    @property
    def replica(self) -> str: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def ready(self) -> ReadyTimes: ...


def replica_families(replicas: Sequence[Told]) -> Iterator[Metric]:
    """Yield the families of all replicas."""
    labels = ["model", "replica"]
    # max(sum by (replica) (eyas_ready_seconds)) is how far ahead replicas must be asked for
    ready = GaugeMetricFamily(
        "eyas_ready_seconds", "how long the start took, by phase", labels=[*labels, "phase"]
    )
    # eyas_draft_state{state=~"broken|collapsed|refused"} == 1 asks for a look
    state = GaugeMetricFamily(
        "eyas_draft_state", "1 for what became of the draft asked for last", labels=[*labels, "state"]
    )
    is_off = GaugeMetricFamily("eyas_draft_off", "1 where a failing draft was given up", labels=labels)
    swaps = CounterMetricFamily("eyas_draft_swaps_total", "drafts replaced while running", labels=labels)
    refused = CounterMetricFamily(
        "eyas_draft_refusals_total", "drafts that could not be loaded", labels=labels
    )
    # 1 + rate(eyas_draft_accepted_tokens_total[5m]) / rate(eyas_draft_trees_total[5m]) is the acceptance
    # length of a draft
    trees = CounterMetricFamily(
        "eyas_draft_trees_total", "trees of a draft that were verified", labels=[*labels, "draft_digest"]
    )
    accepted = CounterMetricFamily(
        "eyas_draft_accepted_tokens_total",
        "tokens of a draft that were kept",
        labels=[*labels, "draft_digest"],
    )
    for replica in replicas:
        names, draft = [replica.model, replica.replica], replica.stats.draft
        for phase, seconds in asdict(replica.ready).items():
            ready.add_metric([*names, phase], seconds)
        for known in DraftState:
            state.add_metric([*names, known], float(draft.state is known))
        is_off.add_metric(names, float(draft.is_off))
        swaps.add_metric(names, draft.num_swaps)
        refused.add_metric(names, draft.num_refused)
        if draft.digest is not None:
            trees.add_metric([*names, draft.digest], draft.num_drafts)
            accepted.add_metric([*names, draft.digest], draft.num_accepted)
    yield from (ready, state, is_off, swaps, refused, trees, accepted)
