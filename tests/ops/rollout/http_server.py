"""A web server on this machine whose answers a test writes as a function.

What it stands for, a dashboard or an API server, is left to the tests.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    content_type: str
    body: Any
    token: str | None


Answer = tuple[int, Any]


@contextmanager
def served(answer: Callable[[Asked], Answer]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            text = self.rfile.read(length)
            asked = Asked(
                self.command,
                self.path.partition("?")[0],
                self.headers.get("content-type", ""),
                json.loads(text) if text else None,
                self.headers.get("authorization"),
            )
            status, body = answer(asked)
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_PATCH = reply  # noqa: N815 - the names that the base class calls

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
