"""The page `docs/metrics.md`: every metric that a running server exports, and what to ask of it.

`python -m app.metrics_page > docs/metrics.md` writes it; the numbers themselves are in `metrics`.
"""

import sys
from collections.abc import Iterator

from app.http_counts import RESPONSES, RESPONSES_LABELS
from app.metrics import (
    BUSY,
    CALLS,
    COUNTERS,
    GAUGES,
    HISTOGRAM_ALIASES,
    HISTOGRAMS,
    INFO,
    INFO_LABELS,
    LABELS,
    Labelled,
)
from app.replica_metrics import replica_families
from app.step_histograms import STEP_HISTOGRAMS

Row = tuple[str, str, str, str]  # name, type, labels, meaning

_HEAD = """# Metrics

`/metrics` is Prometheus text. This page is written by `python -m app.metrics_page` and a test holds it
against what a server exports. Samples of replicas carry `model` and `replica`; those of the HTTP front carry
`ingress`. Counters start at zero with their process. Names that begin with `vllm:` are for dashboards made
for vLLM; they count the same.

A replica's numbers are read between two steps of its engine, so they belong together.
"""
_QUERIES = (
    ("Tokens per second", "sum(rate(eyas_generation_tokens_total[1m]))"),
    (
        "Time to first token, 95th percentile",
        "histogram_quantile(0.95, sum by (le) (rate(eyas_time_to_first_token_seconds_bucket[5m])))",
    ),
    (
        "Time per token, median",
        "histogram_quantile(0.5, sum by (le) (rate(eyas_time_per_output_token_seconds_bucket[5m])))",
    ),
    (
        "Acceptance length: tokens per verification, plain steps included",
        "rate(eyas_generation_tokens_total[1m]) / rate(eyas_verification_calls_total[1m])",
    ),
    (
        "Acceptance length of the rows that drafted",
        "1 + rate(eyas_accepted_draft_tokens_total[1m]) / rate(eyas_drafts_total[1m])",
    ),
    (
        "The same by draft (`draft_digest`), as two drafts are compared",
        "1 + rate(eyas_accepted_path_length_sum[5m]) / rate(eyas_accepted_path_length_count[5m])",
    ),
    (
        "Share of drafts kept",
        "rate(eyas_accepted_draft_tokens_total[1m]) / rate(eyas_draft_tokens_total[1m])",
    ),
    (
        "Time in the queue, 95th percentile",
        "histogram_quantile(0.95, sum by (le) (rate(eyas_queue_time_seconds_bucket[5m])))",
    ),
    (
        "Batch size: rows per step that decodes",
        "rate(eyas_batch_size_sum[1m]) / rate(eyas_batch_size_count[1m])",
    ),
    (
        "The largest batches: exceeded by one step in twenty",
        "histogram_quantile(0.95, sum by (le) (rate(eyas_batch_size_bucket[5m])))",
    ),
    ("Share of each tree", "sum by (tree) (rate(eyas_steps_by_tree_total[1m]))"),
    ("Device time per step", "rate(eyas_step_seconds_total[1m]) / rate(eyas_steps_total[1m])"),
    (
        "Device time of a step, 99th percentile",
        "histogram_quantile(0.99, sum by (le) (rate(eyas_step_time_seconds_bucket[5m])))",
    ),
    (
        "Host gap: share of busy time in which the device waits",
        "1 - rate(eyas_step_seconds_total[1m]) / rate(eyas_busy_seconds_total[1m])",
    ),
    ("Prefix hit rate", "rate(eyas_prefix_hit_tokens_total[5m]) / rate(eyas_prompt_tokens_total[5m])"),
    ("KV use", "vllm:kv_cache_usage_perc"),
    ("Blocks lost (0)", "delta(sum by (replica) (eyas_kv_blocks)[1h:1m])"),
    ("More replicas are needed", 'rate(eyas_calls_total{outcome="full"}[5m]) > 0'),
    ("Clients that leave", 'rate(eyas_calls_total{outcome="left"}[5m])'),
    (
        "Refused at the door, by reason",
        'sum by (status) (rate(eyas_http_responses_total{status=~"4.."}[5m]))',
    ),
)


def rows() -> Iterator[Row]:
    """Yield every metric of the catalogue; a counter or histogram by its family's name."""
    yield INFO[0], "gauge", _code(INFO_LABELS), INFO[1]
    for kind, metrics in (("gauge", GAUGES), ("counter", COUNTERS)):
        for metric in metrics:
            labels = [metric.label] if isinstance(metric, Labelled) else []
            yield metric.name, kind, _code(labels), metric.text
    for family in replica_families(()):
        labels = [label for label in vars(family)["_labelnames"] if label not in LABELS]
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield name, family.type, _code(labels), family.documentation
    yield CALLS[0], "counter", _code(["outcome"]), CALLS[1]
    yield BUSY[0], "counter", "", BUSY[1]
    for step in STEP_HISTOGRAMS:
        yield step.name, "histogram", _code([] if step.label is None else [step.label]), step.text
    for name, (text, _) in HISTOGRAMS.items():
        yield name, "histogram", "", text
    for alias, name in HISTOGRAM_ALIASES.items():
        yield alias, "histogram", "", f"alias of {name}"
    yield (
        RESPONSES[0],
        "counter",
        _code(label for label in RESPONSES_LABELS if label not in LABELS),
        RESPONSES[1],
    )


def page() -> str:
    """Return the text of `docs/metrics.md`."""
    lines = [_HEAD, "## Catalogue", "", "| metric | type | labels | |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in rows()]
    lines += ["", "## What to ask", "", "| | PromQL |", "|---|---|"]
    lines += [f"| {text} | `{query}` |" for text, query in _QUERIES]
    return "\n".join(lines) + "\n"


def _code(labels: Iterator[str] | list[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


if __name__ == "__main__":
    sys.stdout.write(page())
