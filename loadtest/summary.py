"""Figures over the records of a load test: latencies, throughput, goodput under an objective, errors.

`python -m loadtest.summary RECORDS...` prints them, and exits with 1 where a stated objective is missed by
more than the allowed share of requests. What one record says is left to `record`.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.record import Record, read_records

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to count as good, in seconds; None asks for nothing."""

    time_to_first_token: float | None = None
    time_per_output_token: float | None = None
    end_to_end: float | None = None

    def is_met(self, record: Record) -> bool:
        """Tell whether a request was answered, and in time."""
        pairs = (
            (record.time_to_first_token, self.time_to_first_token),
            (record.time_per_output_token, self.time_per_output_token),
            (record.end_to_end, self.end_to_end),
        )
        return record.error is None and all(
            value is None or limit is None or value <= limit for value, limit in pairs
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Rates are per second of the window from the first request to the last one sent, after the warm-up.

    Quantiles are of `QUANTILES`, in seconds, over the answered requests; `lag` is the client's own lateness.
    """

    num_requests: int
    num_good: int
    errors: dict[str, int]
    window: float
    requests_per_second: float
    good_per_second: float
    tokens_per_second: float
    time_to_first_token: tuple[float, ...]
    time_per_output_token: tuple[float, ...]
    end_to_end: tuple[float, ...]
    lag: tuple[float, ...]

    @property
    def good_share(self) -> float:
        return self.num_good / self.num_requests if self.num_requests else 0.0

    def lines(self) -> list[str]:
        """Return the summary for a reader."""
        errors = ", ".join(f"{name} {count}" for name, count in sorted(self.errors.items())) or "none"
        table = [f"{'ms':<22}" + "".join(f"{f'p{quantile * 100:g}':>10}" for quantile in QUANTILES)]
        for name in ("time_to_first_token", "time_per_output_token", "end_to_end", "lag"):
            values = "".join(f"{value * 1e3:>10.2f}" for value in getattr(self, name))
            table.append(f"{name.replace('_', ' '):<22}{values}")
        per_second = (
            f"per second over {self.window:.1f} s: {self.requests_per_second:.2f} requests, "
            f"{self.good_per_second:.2f} good, {self.tokens_per_second:.1f} tokens"
        )
        return [
            f"requests {self.num_requests}, good {self.num_good} ({self.good_share:.1%}), errors: {errors}",
            per_second,
            *table,
        ]


def summarize(records: Sequence[Record], objective: Objective, warm_up: float = 0.0) -> Summary:
    """Return the figures of the requests that were due after the first `warm_up` seconds."""
    begin = min((record.intended for record in records), default=0.0) + warm_up
    kept = [record for record in records if record.intended >= begin]
    finish = max((record.sent for record in kept), default=begin)
    if len(kept) == 1:
        finish = kept[0].end
    window = finish - begin
    answered = [record for record in kept if record.error is None]
    num_good = sum(objective.is_met(record) for record in kept)
    num_done = sum(begin <= record.end <= finish for record in answered)
    num_good_done = sum(begin <= record.end <= finish for record in kept if objective.is_met(record))
    num_tokens = sum(tokens_between(record, begin, finish) for record in records)
    return Summary(
        num_requests=len(kept),
        num_good=num_good,
        errors=dict(Counter(record.error for record in kept if record.error is not None)),
        window=window,
        requests_per_second=_rate(num_done, window),
        good_per_second=_rate(num_good_done, window),
        tokens_per_second=_rate(num_tokens, window),
        time_to_first_token=_quantiles([record.time_to_first_token for record in answered]),
        time_per_output_token=_quantiles([record.time_per_output_token for record in answered]),
        end_to_end=_quantiles([record.end_to_end for record in answered]),
        lag=_quantiles([record.lag for record in kept]),
    )


def tokens_between(record: Record, begin: float, finish: float) -> int:
    """Count the tokens that arrived in a window. What a server counts only at the end came with the last."""
    counts = [0, *(count for _, count in record.chunks)]
    gains = zip(record.chunks, counts, strict=False)
    num_told = sum(count - before for (when, count), before in gains if begin <= when <= finish)
    is_last_in = bool(record.chunks) and begin <= record.chunks[-1][0] <= finish
    return num_told + (max(0, record.num_output_tokens - counts[-1]) if is_last_in else 0)


def _rate(count: int, window: float) -> float:
    return count / window if window > 0 else 0.0


def _quantiles(values: Sequence[float | None]) -> tuple[float, ...]:
    """Return the nearest-rank quantiles; NaN where there is no value."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return tuple(math.nan for _ in QUANTILES)
    return tuple(known[math.ceil(quantile * len(known)) - 1] for quantile in QUANTILES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary of record files."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.summary", description="Summarise load records.")
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORDS")
    parser.add_argument("--ttft", type=float, metavar="SECONDS", help="objective of the first token")
    parser.add_argument("--tpot", type=float, metavar="SECONDS", help="objective of the time per token")
    parser.add_argument("--e2e", type=float, metavar="SECONDS", help="objective of the whole answer")
    parser.add_argument("--warm-up", type=float, default=0.0, metavar="SECONDS", help="left out at the start")
    parser.add_argument("--good-share", type=float, default=0.0, metavar="X", help="least share of good ones")
    options = parser.parse_args(arguments)
    objective = Objective(options.ttft, options.tpot, options.e2e)
    summary = summarize(list(read_records(options.records)), objective, options.warm_up)
    sys.stdout.write("\n".join(summary.lines()) + "\n")
    return int(summary.good_share < options.good_share)


if __name__ == "__main__":
    sys.exit(main())
