"""The noise floor of the load generator on this machine: what it measures of a server whose timing is known.

`python -m loadtest.self_check --streams 32` runs Locust as a load test does, against `mock_server`, and exits
with 1 where a figure is off by more than the tolerance. What is wrong then is the machine or the number of
streams per process, and a load test would measure that too.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.mock_server import Timing
from loadtest.record import Record, read_records
from loadtest.summary import Objective, summarize

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
TIMEOUT_S = 600.0
STAGGER_S = 1.0  # streams that begin together measure the queue of one another


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """Measured less true values of the median stream, in seconds; `worst_first` is the 99th percentile's."""

    num_streams: int
    first_token: float
    worst_first: float
    per_token: float
    num_failed: int

    def is_within(self, tolerance: float) -> bool:
        """Tell whether no request failed and both medians are off by the tolerance at most."""
        return not self.num_failed and max(abs(self.first_token), abs(self.per_token)) <= tolerance

    def lines(self) -> list[str]:
        """Return the figures for a reader."""
        median, worst = self.first_token * 1e3, self.worst_first * 1e3
        return [
            f"streams {self.num_streams}, failed {self.num_failed}",
            f"first token: off by {median:+.3f} ms at p50, {worst:+.3f} ms at p99",
            f"per token: off by {self.per_token * 1e3:+.4f} ms at p50",
        ]


def noise_floor(records: Sequence[Record], timing: Timing, num_streams: int) -> NoiseFloor:
    """Compare records with the timing that they were served by."""
    summary = summarize(records, Objective())
    return NoiseFloor(
        num_streams=num_streams,
        first_token=summary.time_to_first_token[0] - timing.first,
        worst_first=summary.time_to_first_token[-1] - timing.first,
        per_token=summary.time_per_output_token[0] - timing.time_per_output_token,
        num_failed=sum(summary.errors.values()),
    )


@contextmanager
def mock_server(timing: Timing) -> Iterator[str]:
    """Run a mock server as a process of its own, which shares no interpreter with the client."""
    command = [sys.executable, "-m", "loadtest.mock_server", "--first", str(timing.first)]
    command += ["--gap", str(timing.gap), "--events", str(timing.num_events), "--run", str(timing.run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def run_locust(url: str, records: Path, arguments: Sequence[str]) -> str:
    """Run Locust headless on our locustfile and return what it wrote; it must be over by itself.

    Raises `subprocess.CalledProcessError` where Locust itself fails, not where requests do.
    """
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"]
    command += ["--host", url, "--records", str(records), "--exit-code-on-error", "0", *arguments]
    done = subprocess.run(  # noqa: S603 - our own command
        command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
    )
    return done.stdout


def measure(num_streams: int, num_requests: int, timing: Timing) -> NoiseFloor:
    """Load a mock server with a closed loop of `num_streams` streams, `num_requests` each."""
    with tempfile.TemporaryDirectory() as folder, mock_server(timing) as url:
        records = Path(folder) / "records.jsonl"
        streams = ["-u", str(num_streams), "-r", str(num_streams), "--stagger", str(STAGGER_S)]
        run_locust(url, records, [*streams, "--requests", str(num_requests)])
        return noise_floor(list(read_records([records])), timing, num_streams)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the noise floor."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.self_check", description=__doc__)
    parser.add_argument("--streams", type=int, default=32, metavar="N")
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="per stream")
    parser.add_argument("--tolerance-ms", type=float, default=2.0, metavar="MS")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and take both processes along
    floor = measure(options.streams, options.requests, Timing())
    sys.stdout.write("\n".join(floor.lines()) + "\n")
    return int(not floor.is_within(options.tolerance_ms / 1e3))


if __name__ == "__main__":
    sys.exit(main())
