"""One request as the client saw it, and the figures that follow from it; one JSON object a line on disk.

Sending requests is left to `sse_client`, figures over many of them to `summary`.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ErrorClass = Literal[
    "full",  # 429: the server takes no more now
    "refused",  # another 4xx
    "unavailable",  # 503
    "failed",  # another 5xx, or an error event in a stream that had begun
    "connect",  # no connection
    "timeout",  # connected, then silent for too long
    "truncated",  # the stream ended without [DONE]
    "malformed",  # not server-sent events of JSON
]


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are seconds of the client's monotonic clock, which Locust's file begins at the wall
    clock's so that records of several machines go together; tokens are counted by the server.

    `intended` is when the request was due: in a closed loop when it was sent. `chunks` holds, for each event
    that brought tokens, its arrival and the tokens so far; a run of tokens that one step accepted is one
    event. A server that does not count as it streams is taken to begin with one token. `tokens_per_call` is
    the acceptance length that the server gave where it was asked for `speculation_stats`.
    """

    prompt_class: str
    prompt_idx: int
    speculation: str
    intended: float
    sent: float
    end: float
    chunks: tuple[tuple[float, int], ...] = ()
    status: int | None = None
    error: ErrorClass | None = None
    message: str = ""
    retry_after: float | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    tokens_per_call: float | None = None
    trace_id: str = ""

    @property
    def lag(self) -> float:
        """How late the client itself was."""
        return self.sent - self.intended

    @property
    def time_to_first_token(self) -> float | None:
        return self.chunks[0][0] - self.intended if self.chunks else None

    @property
    def time_per_output_token(self) -> float | None:
        """Mean time per token after the first event; None where all tokens came with it."""
        if not self.chunks:
            return None
        (first, num_first), last = self.chunks[0], self.chunks[-1][0]
        num_later = self.num_output_tokens - num_first
        return (last - first) / num_later if num_later > 0 else None

    @property
    def end_to_end(self) -> float:
        return self.end - self.intended

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, separators=(",", ":")) + "\n"


def parse_record(line: str) -> Record:
    """Return the record that `Record.to_line` wrote."""
    values = json.loads(line)
    return Record(**{**values, "chunks": tuple((when, count) for when, count in values["chunks"])})


def read_records(paths: Iterable[Path]) -> Iterator[Record]:
    """Yield the records of files, such as those of several load generators."""
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            yield from (parse_record(line) for line in lines if line.strip())


class RecordFile:
    """Appends records to a file that other writers, in other processes too, append to as well."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)  # unbuffered: one write a line keeps lines whole

    def append(self, record: Record) -> None:
        self._file.write(record.to_line().encode())

    def close(self) -> None:
        self._file.close()
