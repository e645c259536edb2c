"""A server whose two arms have known speeds, and a proxy that slows down the speculative one.

`python -m tests.app.arm_server --upstream URL --factor 1.25` runs the proxy in front of a real server: what
`eyas validate speedup` finds behind it must be a regression. What must be found is left to the tests.
"""

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

METRICS = 'eyas_engine_info{{model="tiny",model_digest="{digest}",draft_digest="d",dtype="{dtype}"}} 1.0\n'


class ArmServer(ThreadingHTTPServer):
    """A token every `gaps[arm]` seconds; the text depends on the prompt, and on the arm where they differ."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, gaps: dict[str, float], dtype: str = "float32", digest: str = "m", differs: bool = False
    ):
        super().__init__(("127.0.0.1", 0), _Arm)
        self.gaps, self.differs = gaps, differs
        self.metrics = METRICS.format(digest=digest, dtype=dtype).encode()
        self.bodies: list[dict] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def begin(self, media_type: str) -> None:
        self.send_response(200)
        self.send_header("content-type", media_type)
        self.send_header("connection", "close")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        del arguments


class _Arm(_Answering):
    server: ArmServer

    def do_GET(self) -> None:
        self.begin("text/plain")
        self.wfile.write(self.server.metrics)

    def do_POST(self) -> None:
        began = time.perf_counter()
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        arm, prompt = body["speculation"], body["messages"][0]["content"]
        self.begin("text/event-stream")
        for idx in range(body["max_tokens"]):
            time.sleep(max(0.0, began + (idx + 1) * self.server.gaps[arm] - time.perf_counter()))
            text = f"{len(prompt)}{arm if self.server.differs else ''} "
            usage = {"prompt_tokens": 1, "completion_tokens": idx + 1}
            event = {"choices": [{"delta": {"content": text}}], "usage": usage}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        metrics = {"speculative_decoding": {"mean_acceptance_length": None if arm == "off" else 2.5}}
        event = {"choices": [], "usage": usage, "metrics": metrics}
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")


class SlowProxy(ThreadingHTTPServer):
    """Passes everything through, but stretches the time of speculative answers by `factor`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: str, factor: float) -> None:
        super().__init__(("127.0.0.1", 0), _Slow)
        self.upstream, self.factor = urlsplit(upstream), factor

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Slow(_Answering):
    server: SlowProxy

    def do_GET(self) -> None:
        self._pass(None, 1.0)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self._pass(body, 1.0 if json.loads(body).get("speculation") == "off" else self.server.factor)

    def _pass(self, body: bytes | None, factor: float) -> None:
        began = time.perf_counter()
        upstream = http.client.HTTPConnection(self.server.upstream.hostname, self.server.upstream.port)
        upstream.request(self.command, self.path, body, {"content-type": "application/json"})
        response = upstream.getresponse()
        self.begin(response.headers["content-type"])
        arrivals: list[tuple[float, bytes]] = []
        is_over = threading.Event()

        def read() -> None:
            while piece := response.read1(65536):
                arrivals.append((time.perf_counter() - began, piece))
            is_over.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        for due, piece in self._in_order(arrivals, is_over):
            time.sleep(max(0.0, began + due * factor - time.perf_counter()))
            self.wfile.write(piece)
        upstream.close()

    @staticmethod
    def _in_order(
        arrivals: list[tuple[float, bytes]], is_over: threading.Event
    ) -> Iterator[tuple[float, bytes]]:
        idx = 0
        while not is_over.is_set() or idx < len(arrivals):
            if idx < len(arrivals):
                yield arrivals[idx]
                idx += 1
            else:
                time.sleep(0.0005)


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """Serve in a thread and yield the address."""
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.url  # type: ignore[attr-defined]
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--factor", type=float, default=1.25, help="1.25: 20%% fewer tokens a second")
    options = parser.parse_args()
    with SlowProxy(options.upstream, options.factor) as proxy:
        sys.stdout.write(proxy.url + "\n")
        sys.stdout.flush()
        proxy.serve_forever()


if __name__ == "__main__":
    main()
