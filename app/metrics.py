"""The catalogue of our metrics, and their Prometheus text.

Counters come from the engine and end in `_total`, units are base units. Every sample carries `model` and
`replica`. What a name is for is said in `metrics_page`; scraping and storing are left to Prometheus.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from app.live import LiveStatus
from app.ready import NOT_TIMED, ReadyTimes
from app.replica_metrics import replica_families
from app.step_histograms import step_families
from engine import EngineFacts, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ["model", "replica"]

_Value = Callable[[EngineStats], float]
_Values = Callable[[EngineStats], Sequence[tuple[str, float]]]


@dataclass(frozen=True, slots=True)
class Plain:
    """One number of `EngineStats` under a name."""

    name: str
    text: str
    value: _Value


@dataclass(frozen=True, slots=True)
class Labelled:
    """Several numbers of `EngineStats` under one name, told apart by `label`."""

    name: str
    text: str
    label: str
    values: _Values


def _by_depth(stats: EngineStats) -> list[tuple[str, float]]:
    return [(str(idx + 1), count) for idx, count in enumerate(stats.accepted_by_depth)]


def _by_position(stats: EngineStats) -> list[tuple[str, float]]:
    return [(str(idx), count) for idx, count in enumerate(stats.accepted_by_depth)]


def _num_rows(stats: EngineStats) -> int:
    return sum(count for _, count in stats.steps_by_tree)


def _num_blocks(stats: EngineStats) -> int:
    return stats.num_free_blocks + stats.num_held_blocks + stats.num_cached_blocks


# In use: held blocks; cached ones are given back on demand.
def _kv_usage(stats: EngineStats) -> float:
    return stats.num_held_blocks / max(1, _num_blocks(stats))


def _expected_rates(stats: EngineStats) -> list[tuple[str, float]]:
    """The dispatcher that learns has both; where nothing is estimated there is none."""
    dispatch = stats.dispatch
    rates = {"off": dispatch.plain_tokens_per_second, dispatch.arm: dispatch.tokens_per_second}
    return [(tree, rate) for tree, rate in rates.items() if rate is not None]


def _by_arm() -> tuple[Labelled, ...]:
    """Of steps in which every row ran one tree and no prompt ran: what the dispatcher compares."""
    # rate(eyas_arm_tokens_total[5m]) / rate(eyas_arm_seconds_total[5m]) is the realised rate of a tree
    return (
        Labelled(
            "eyas_arm_steps_total",
            "steps of one tree alone",
            "tree",
            lambda s: [(total.name, total.num_steps) for total in s.dispatch.totals],
        ),
        Labelled(
            "eyas_arm_tokens_total",
            "tokens that steps of one tree alone emitted",
            "tree",
            lambda s: [(total.name, total.num_tokens) for total in s.dispatch.totals],
        ),
        Labelled(
            "eyas_arm_seconds_total",
            "seconds of steps of one tree alone",
            "tree",
            lambda s: [(total.name, total.seconds) for total in s.dispatch.totals],
        ),
    )


GAUGES: tuple[Plain | Labelled, ...] = (
    Plain("eyas_requests_running", "sequences that own a slot", lambda s: s.num_running),
    Plain("eyas_requests_waiting", "sequences in the queue", lambda s: s.num_waiting),
    Labelled(
        "eyas_kv_blocks",
        "blocks of the KV cache by state",
        "state",
        lambda s: [
            ("free", s.num_free_blocks),
            ("held", s.num_held_blocks),
            ("cached", s.num_cached_blocks),
        ],
    ),
    Labelled("eyas_dispatch_arm", "1 for the tree in use", "tree", lambda s: [(s.dispatch.arm, 1)]),
    Labelled("eyas_dispatch_reason", "1 for why it is", "reason", lambda s: [(s.dispatch.reason, 1)]),
    Labelled(
        "eyas_dispatch_expected_tokens_per_second",
        "accepted tokens per second that the tree in use, and plain decoding (off), are expected to bring",
        "tree",
        _expected_rates,
    ),
    Plain("vllm:num_requests_running", "alias of eyas_requests_running", lambda s: s.num_running),
    Plain("vllm:num_requests_waiting", "alias of eyas_requests_waiting", lambda s: s.num_waiting),
    Plain("vllm:kv_cache_usage_perc", "share of the KV blocks that sequences hold, 0 to 1", _kv_usage),
)

COUNTERS: tuple[Plain | Labelled, ...] = (
    Plain("eyas_steps_total", "decode steps", lambda s: s.num_steps),
    Plain("eyas_decode_rows_total", "rows of decode steps, a sequence once per step", _num_rows),
    Plain("eyas_step_seconds_total", "seconds spent in steps", lambda s: s.step_seconds),
    Plain("eyas_verification_calls_total", "(sequence, verification) pairs", lambda s: s.num_calls),
    Plain("eyas_generation_tokens_total", "tokens emitted", lambda s: s.num_output_tokens),
    Plain("eyas_drafts_total", "(sequence, step) pairs that drafted", lambda s: s.num_drafts),
    Plain("eyas_draft_tokens_total", "draft tokens verified", lambda s: s.num_drafted),
    Plain("eyas_accepted_draft_tokens_total", "draft tokens kept", lambda s: s.num_accepted),
    Labelled("eyas_accepted_draft_tokens_by_depth_total", "draft tokens kept, by depth", "depth", _by_depth),
    Labelled(
        "eyas_steps_by_tree_total",
        "decode rows by topology, a row once per step",
        "tree",
        lambda s: s.steps_by_tree,
    ),
    *_by_arm(),
    Plain("eyas_dispatch_switches_total", "changes of the tree in use", lambda s: s.dispatch.num_switches),
    Plain("eyas_dispatch_probes_total", "excursions from the tree in use", lambda s: s.dispatch.num_probes),
    Plain("eyas_dispatch_alarms_total", "sudden breaks of acceptance", lambda s: s.dispatch.num_alarms),
    # increase(eyas_dispatch_trips_total[1h]) > 0 says that the dispatcher was wrong and noticed
    Plain(
        "eyas_dispatch_trips_total",
        "times that speculation was blocked since it brought less than plain decoding",
        lambda s: s.dispatch.num_trips,
    ),
    Plain("eyas_prompt_tokens_total", "prompt tokens", lambda s: s.num_prompt_tokens),
    Plain(
        "eyas_prefix_hit_tokens_total", "prompt tokens in the prefix cache", lambda s: s.num_prefix_hit_tokens
    ),
    Plain(
        "eyas_preemptions_total", "sequences that lost their blocks to others", lambda s: s.num_preemptions
    ),
    Labelled(
        "eyas_sequences_total",
        "sequences that ended, by outcome",
        "outcome",
        lambda s: [("finished", s.num_finished), ("aborted", s.num_aborted), ("failed", s.num_failed)],
    ),
    Plain("vllm:prompt_tokens_total", "alias of eyas_prompt_tokens_total", lambda s: s.num_prompt_tokens),
    Plain(
        "vllm:generation_tokens_total", "alias of eyas_generation_tokens_total", lambda s: s.num_output_tokens
    ),
    Plain(
        "vllm:prefix_cache_queries_total", "alias of eyas_prompt_tokens_total", lambda s: s.num_prompt_tokens
    ),
    Plain(
        "vllm:prefix_cache_hits_total",
        "alias of eyas_prefix_hit_tokens_total",
        lambda s: s.num_prefix_hit_tokens,
    ),
    Plain("vllm:num_preemptions_total", "alias of eyas_preemptions_total", lambda s: s.num_preemptions),
    Plain("vllm:spec_decode_num_drafts_total", "alias of eyas_drafts_total", lambda s: s.num_drafts),
    Plain(
        "vllm:spec_decode_num_draft_tokens_total", "alias of eyas_draft_tokens_total", lambda s: s.num_drafted
    ),
    Plain(
        "vllm:spec_decode_num_accepted_tokens_total",
        "alias of eyas_accepted_draft_tokens_total",
        lambda s: s.num_accepted,
    ),
    Labelled(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "alias of eyas_accepted_draft_tokens_by_depth_total; positions start at 0",
        "position",
        _by_position,
    ),
)

CALLS = (
    "eyas_calls_total",
    "calls at a replica, by how they ended: answered, refused (4xx), full (429), failed (5xx), left",
)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "eyas_queue_time_seconds": (
        "from the end of a call's tokenizing to the first step of a choice",
        (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    ),
    "eyas_time_to_first_token_seconds": (
        "from the call's arrival to its first text",
        (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    ),
    "eyas_time_per_output_token_seconds": (
        "mean time per token of a choice after its first step",
        (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
    ),
    "eyas_call_duration_seconds": (
        "from the call's arrival to its end",
        (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    ),
}
HISTOGRAM_ALIASES = {
    "vllm:request_queue_time_seconds": "eyas_queue_time_seconds",
    "vllm:time_to_first_token_seconds": "eyas_time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds": "eyas_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "eyas_call_duration_seconds",
}
BUSY = ("eyas_busy_seconds_total", "seconds in which at least one answer ran or waited")
INFO = ("eyas_engine_info", "what runs, always 1")
INFO_LABELS = ["version", "model_digest", "draft_digest", "dtype", "device", "attention_backend"]


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """`counts[i]` observations were at most `bounds[i]` and above the bound before; the last is the rest."""

    name: str
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """All that one server replica has to say to Prometheus."""

    replica: str
    version: str
    model: str
    facts: EngineFacts
    stats: EngineStats
    calls: tuple[tuple[str, int], ...]
    histograms: tuple[HistogramSnapshot, ...]
    busy_seconds: float
    ready: ReadyTimes = NOT_TIMED
    live: LiveStatus | None = None


class Histogram:
    """Observations counted into the buckets of one name of `HISTOGRAMS`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bounds = HISTOGRAMS[name][1]
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._name, tuple(self._counts), self._total)


class _Snapshots(Collector):
    """Turns snapshots into metric families when they are written."""

    def __init__(self, replicas: Sequence[ReplicaSnapshot]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        yield self._info()
        for gauge in GAUGES:
            yield self._fill(GaugeMetricFamily(gauge.name, gauge.text, labels=_labels(gauge)), gauge)
        for counter in COUNTERS:
            yield self._fill(
                CounterMetricFamily(counter.name, counter.text, labels=_labels(counter)), counter
            )
        yield self._calls()
        busy = CounterMetricFamily(*BUSY, labels=LABELS)
        for replica in self._replicas:
            busy.add_metric([replica.model, replica.replica], replica.busy_seconds)
        yield busy
        yield from step_families(self._replicas)
        yield from replica_families(self._replicas)
        for name, (text, _) in HISTOGRAMS.items():
            yield self._histogram(name, text, name)
        for alias, name in HISTOGRAM_ALIASES.items():
            yield self._histogram(alias, f"alias of {name}", name)

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, source: Plain | Labelled
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for replica in self._replicas:
            labels = [replica.model, replica.replica]
            if isinstance(source, Plain):
                family.add_metric(labels, source.value(replica.stats))
            else:
                for label, value in source.values(replica.stats):
                    family.add_metric([*labels, label], value)
        return family

    def _calls(self) -> CounterMetricFamily:
        family = CounterMetricFamily(*CALLS, labels=[*LABELS, "outcome"])
        for replica in self._replicas:
            for outcome, count in replica.calls:
                family.add_metric([replica.model, replica.replica, outcome], count)
        return family

    def _histogram(self, name: str, text: str, source: str) -> HistogramMetricFamily:
        """Return the family `name` of the observations counted under `source`."""
        family = HistogramMetricFamily(name, text, labels=LABELS)
        edges = [*(f"{bound:g}" for bound in HISTOGRAMS[source][1]), "+Inf"]
        for replica in self._replicas:
            for histogram in replica.histograms:
                if histogram.name == source:
                    buckets = zip(edges, accumulate(map(float, histogram.counts)), strict=True)
                    family.add_metric([replica.model, replica.replica], list(buckets), histogram.total)
        return family

    def _info(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(*INFO, labels=LABELS + INFO_LABELS)
        for replica in self._replicas:
            facts = replica.facts
            values = [replica.version, facts.model_digest, replica.stats.draft.digest or ""]
            values += [facts.dtype, facts.device, facts.attention_backend]
            family.add_metric([replica.model, replica.replica, *values], 1)
        return family


def render(replicas: Sequence[ReplicaSnapshot], more: Collector) -> bytes:
    """Return the Prometheus text of all replicas, and of what else is counted in this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshots(replicas))
    registry.register(more)
    return generate_latest(registry)


def _labels(source: Plain | Labelled) -> list[str]:
    return LABELS if isinstance(source, Plain) else [*LABELS, source.label]
