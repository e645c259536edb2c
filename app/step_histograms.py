"""Histograms of decode steps, made of the engine's own counts: kept drafts, batch sizes and times.

What calls took is observed by `server`; the other metrics and their text are left to `metrics`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import HistogramMetricFamily

from engine import STEP_SECONDS, EngineStats


class Told(Protocol):
    """The part of a replica's snapshot that these metrics read."""

    @property
    def model(self) -> str: ...
    @property
    def replica(self) -> str: ...
    @property
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class Counts:
    """`within[i]` observations were at most the i-th bound, `num` there were in all, of the sum `total`."""

    within: Sequence[float]
    num: float
    total: float


@dataclass(frozen=True, slots=True)
class StepHistogram:
    """A metric over `bounds`, and its counts; with a label, its value, None where nothing is to be told."""

    name: str
    text: str
    bounds: Sequence[float]
    counts: Callable[[EngineStats], Counts]
    label: str | None = None
    value: Callable[[EngineStats], str | None] = lambda _: ""


PATH_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 15)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _path_lengths(stats: EngineStats) -> Counts:
    """Count rows by the drafts that they kept; those that kept k + 1 or more are in the counter by depth."""
    beyond = dict(enumerate(stats.accepted_by_depth))
    within = [stats.num_drafts - beyond.get(length, 0) for length in PATH_LENGTHS]
    return Counts(within, stats.num_drafts, stats.num_accepted)


def _batch_sizes(stats: EngineStats) -> Counts:
    sizes = stats.steps_by_rows
    within = [sum(num for size, num in sizes if size <= bound) for bound in BATCH_SIZES]
    return Counts(within, sum(num for _, num in sizes), sum(size * num for size, num in sizes))


def _step_seconds(stats: EngineStats) -> Counts:
    return Counts([*accumulate(stats.steps_by_time[:-1])], sum(stats.steps_by_time), stats.step_seconds)


STEP_HISTOGRAMS = (
    StepHistogram(
        "eyas_accepted_path_length",
        "drafts kept by a row that drafted, the token that each step adds itself not counted",
        PATH_LENGTHS,
        _path_lengths,
        "draft_digest",
        lambda stats: stats.draft.digest,
    ),
    StepHistogram(
        "eyas_batch_size", "rows of a step that decodes, a sequence is one row", BATCH_SIZES, _batch_sizes
    ),
    StepHistogram("eyas_step_time_seconds", "device time of a step", STEP_SECONDS, _step_seconds),
)


def step_families(replicas: Sequence[Told]) -> Iterator[HistogramMetricFamily]:
    """Yield the families of all replicas."""
    for source in STEP_HISTOGRAMS:
        own = [] if source.label is None else [source.label]
        family = HistogramMetricFamily(source.name, source.text, labels=["model", "replica", *own])
        edges = [*(f"{bound:g}" for bound in source.bounds), "+Inf"]
        for told in replicas:
            if (value := source.value(told.stats)) is not None:
                counts = source.counts(told.stats)
                buckets = [*zip(edges, [*counts.within, counts.num], strict=True)]
                family.add_metric(
                    [told.model, told.replica, *([value] if own else [])], buckets, counts.total
                )
        yield family
