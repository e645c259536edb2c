"""A server of streamed completions whose timing is known: what a load generator measures can be checked.

It answers whatever is asked. The first token comes `first` seconds after the request, then an event of
`run` tokens every `gap` seconds, on a schedule that does not drift. Comparing is left to `self_check`.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, slots=True)
class Timing:
    """`num_events` events of `run` tokens each, in seconds."""

    first: float = 0.05
    gap: float = 0.02
    num_events: int = 50
    run: int = 2

    @property
    def time_per_output_token(self) -> float:
        return self.gap / self.run


class MockServer(ThreadingHTTPServer):
    """A thread per connection: its sleeps are finer than an event loop's timers."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, timing: Timing) -> None:
        super().__init__(("127.0.0.1", port), _Stream)
        self.timing = timing

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Stream(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: MockServer

    def do_POST(self) -> None:
        began = time.perf_counter()
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("connection", "close")
        self.end_headers()
        timing = self.server.timing
        for idx in range(timing.num_events):
            due = began + timing.first + idx * timing.gap
            time.sleep(max(0.0, due - time.perf_counter()))
            self.wfile.write(_chunk(_event(timing, idx)))
        self.wfile.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class names it
        del format, arguments  # nobody reads a line per request


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(timing: Timing, idx: int) -> bytes:
    num_tokens = (idx + 1) * timing.run
    is_last = idx + 1 == timing.num_events
    choice = {"index": 0, "text": "ab " * timing.run, "finish_reason": "length" if is_last else None}
    usage = {"prompt_tokens": 3, "completion_tokens": num_tokens, "total_tokens": 3 + num_tokens}
    return b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until killed; the first line of output is the address."""
    defaults = Timing()
    parser = argparse.ArgumentParser(prog="python -m loadtest.mock_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--first", type=float, default=defaults.first, metavar="SECONDS")
    parser.add_argument("--gap", type=float, default=defaults.gap, metavar="SECONDS")
    parser.add_argument("--events", type=int, default=defaults.num_events, metavar="N")
    parser.add_argument("--run", type=int, default=defaults.run, metavar="N", help="tokens per event")
    options = parser.parse_args(arguments)
    timing = Timing(options.first, options.gap, options.events, options.run)
    with MockServer(options.port, timing) as server:
        sys.stdout.write(server.url + "\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
