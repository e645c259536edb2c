"""A client of streamed OpenAI answers that times every event on a monotonic clock of its own.

It reads what has arrived and no more, as a load tester must: a client that waits for a full buffer measures
its buffer. Which requests are sent, and when, is left to `locustfile`.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from loadtest.record import ErrorClass, Record

READ_BYTES = 65536
DONE = "[DONE]"
_NO_EVENT = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_STATUS_ERRORS: Mapping[int, ErrorClass] = {429: "full", 503: "unavailable"}


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask: a path such as /v1/chat/completions, the body without `stream`, and what to note."""

    path: str
    body: Mapping[str, object]
    prompt_class: str = ""
    prompt_idx: int = 0


class StreamError(Exception):
    """A stream that cannot go on, by its class."""

    def __init__(self, error: ErrorClass, message: str) -> None:
        super().__init__(message)
        self.error = error


@dataclass(slots=True)
class _Answer:
    """A stream as it comes in."""

    status: int | None = None
    retry_after: float | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    tokens_per_call: float | None = None
    is_done: bool = False

    def add(self, event: Mapping[str, object], when: float) -> None:
        """Take one event: its text and, where the server counts, the tokens so far."""
        if event.get("error") is not None:
            raise StreamError("failed", json.dumps(event["error"])[:200])
        text = ""
        for choice in event.get("choices") or ():  # type: ignore[attr-defined]
            delta = choice.get("delta") or choice
            text += delta.get("content") or delta.get("text") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        usage = event.get("usage")
        num_tokens = self.num_output_tokens
        if isinstance(usage, Mapping):
            num_tokens = int(usage["completion_tokens"])
            self.num_prompt_tokens = int(usage["prompt_tokens"])
        is_counted = num_tokens > self.num_output_tokens and bool(event.get("choices"))
        if isinstance(metrics := event.get("metrics"), Mapping):
            self.tokens_per_call = metrics["speculative_decoding"]["mean_acceptance_length"]
        if text or is_counted:
            self.texts.append(text)
            self.chunks.append((when, max(num_tokens, 1)))
        self.num_output_tokens = num_tokens


class SSEClient:
    """Sends one request at a time, each on a connection of its own: a stream that fails harms no other.

    A silence of `timeout_s` ends a request. Safe to share between threads or greenlets.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        parts = urlsplit(url)
        is_spaced = any(letter <= " " for letter in parts.netloc)
        if parts.scheme not in ("http", "https") or not parts.hostname or is_spaced:
            raise ValueError(f"the server must be http://HOST:PORT or https://HOST:PORT, found {url!r}")
        api_key = api_key and api_key.strip()  # a file's line ends with a newline
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key has characters that no HTTP header may hold")
        self._connection_type = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._clock = clock

    def ask(self, question: Question, intended: float | None = None) -> Record:
        """Return the record of one streamed answer; errors are records too. Without `intended` a request is
        due when it is sent, which is when its connection stands.
        """
        answer = _Answer()
        error: ErrorClass | None = None
        message = ""
        is_connected = False
        trace_id = secrets.token_hex(16)
        sent = self._clock()
        connection = self._connection_type(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.connect()
            is_connected = True
            sent = self._clock()
            self._receive(self._send(connection, question, trace_id), answer)
        except StreamError as failure:
            error, message = failure.error, str(failure)
        except (OSError, HTTPException) as failure:
            is_late = isinstance(failure, TimeoutError)
            error = "connect" if not is_connected else "timeout" if is_late else "truncated"
            message = f"{type(failure).__name__}: {failure}"
        finally:
            connection.close()
        return Record(
            prompt_class=question.prompt_class,
            prompt_idx=question.prompt_idx,
            speculation=str(question.body.get("speculation", "auto")),
            intended=sent if intended is None else intended,
            sent=sent,
            end=self._clock(),
            chunks=tuple(answer.chunks),
            status=answer.status,
            error=error,
            message=message,
            retry_after=answer.retry_after,
            finish_reason=answer.finish_reason,
            num_prompt_tokens=answer.num_prompt_tokens,
            num_output_tokens=answer.num_output_tokens,
            text="".join(answer.texts),
            tokens_per_call=answer.tokens_per_call,
            trace_id=trace_id,
        )

    def _send(self, connection: HTTPConnection, question: Question, trace_id: str) -> HTTPResponse:
        counting = {"include_usage": True, "continuous_usage_stats": True}
        body = {**question.body, "stream": True, "stream_options": counting}
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            # The server's trace of this request is found by the record's `trace_id`.
            "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01",
        }
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        connection.request("POST", self._prefix + question.path, json.dumps(body).encode(), headers)
        return connection.getresponse()

    def _receive(self, response: HTTPResponse, answer: _Answer) -> None:
        answer.status = response.status
        if response.status != 200:
            answer.retry_after = _seconds(response.headers.get("retry-after"))
            raise StreamError(_class_of(response.status), response.read(500).decode(errors="replace"))
        for when, data in self._events(response):
            if data == DONE:
                answer.is_done = True
                break
            try:
                answer.add(json.loads(data), when)
            except _NO_EVENT as error:
                raise StreamError("malformed", f"{type(error).__name__}: {data[:200]}") from error
        if not answer.is_done:
            raise StreamError("truncated", "the stream ended without [DONE]")
        if not answer.chunks:
            raise StreamError("malformed", "the stream brought no token")

    def _events(self, response: HTTPResponse) -> Iterator[tuple[float, str]]:
        """Yield the data of each event with the time at which its last byte had arrived (HTML, 9.2.6)."""
        rest = b""
        while piece := response.read1(READ_BYTES):
            now = self._clock()
            *blocks, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
            for block in blocks:
                # The other lines are comments, such as those that keep a connection, and fields like `event`.
                lines = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    yield now, b"\n".join(lines).decode(errors="replace").strip()


def _class_of(status: int) -> ErrorClass:
    return _STATUS_ERRORS.get(status, "refused" if 400 <= status < 500 else "failed")


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isdecimal() else None
