"""Metrics of a replica's start and of its draft, beside those of `metrics`, in the same labels.

The PromQL beside a name is what it is for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.ready import ReadyTimes
from app.step_histograms import Told as StepsTold
from engine import DraftState, DraftStatus


class Told(StepsTold, Protocol):
    """The part of a replica's snapshot that these metrics read."""

    @property
    def ready(self) -> ReadyTimes: ...


@dataclass(frozen=True, slots=True)
class Source:
    """A metric, and its values as (label value, number) pairs; without a label there is one pair."""

    name: str
    kind: type[GaugeMetricFamily | CounterMetricFamily]
    text: str
    label: str | None
    values: Callable[[Told], Iterable[tuple[str, float]]]


def _of_digest(read: Callable[[DraftStatus], float]) -> Callable[[Told], Iterable[tuple[str, float]]]:
    return lambda told: (
        [] if told.stats.draft.digest is None else [(told.stats.draft.digest, read(told.stats.draft))]
    )


SOURCES = (
    # max(sum by (replica) (eyas_ready_seconds)) is how far ahead replicas must be asked for
    Source(
        "eyas_ready_seconds",
        GaugeMetricFamily,
        "how long the start took, by phase",
        "phase",
        lambda told: asdict(told.ready).items(),
    ),
    # eyas_draft_state{state=~"broken|collapsed|refused"} == 1 asks for a look
    Source(
        "eyas_draft_state",
        GaugeMetricFamily,
        "1 for what became of the draft asked for last",
        "state",
        lambda told: ((known, float(told.stats.draft.state is known)) for known in DraftState),
    ),
    Source(
        "eyas_draft_off",
        GaugeMetricFamily,
        "1 where a failing draft was given up",
        None,
        lambda told: [("", told.stats.draft.is_off)],
    ),
    Source(
        "eyas_draft_swaps_total",
        CounterMetricFamily,
        "drafts replaced while running",
        None,
        lambda told: [("", told.stats.draft.num_swaps)],
    ),
    Source(
        "eyas_draft_refusals_total",
        CounterMetricFamily,
        "drafts that could not be loaded",
        None,
        lambda told: [("", told.stats.draft.num_refused)],
    ),
    # 1 + rate(eyas_draft_accepted_tokens_total[5m]) / rate(eyas_draft_trees_total[5m]) is the acceptance
    # length of a draft
    Source(
        "eyas_draft_trees_total",
        CounterMetricFamily,
        "trees of a draft that were verified",
        "draft_digest",
        _of_digest(lambda draft: draft.num_drafts),
    ),
    Source(
        "eyas_draft_accepted_tokens_total",
        CounterMetricFamily,
        "tokens of a draft that were kept",
        "draft_digest",
        _of_digest(lambda draft: draft.num_accepted),
    ),
)


def replica_families(replicas: Sequence[Told]) -> Iterator[Metric]:
    """Yield the families of all replicas."""
    for source in SOURCES:
        own = [] if source.label is None else [source.label]
        family = source.kind(source.name, source.text, labels=["model", "replica", *own])
        for told in replicas:
            for value, number in source.values(told):
                family.add_metric([told.model, told.replica, *([value] if own else [])], number)
        yield family
