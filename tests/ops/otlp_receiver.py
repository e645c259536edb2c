"""Real receivers of the OpenTelemetry protocol, over gRPC and over HTTP, that keep what they are sent.

What the spans must say is left to the tests.
"""

import gzip
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Receiver:
    """What has arrived so far."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)

    def take(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            attributes = of_resource.resource.attributes
            self.resources.append({item.key: item.value.string_value for item in attributes})
            for of_scope in of_resource.scope_spans:
                self.spans.extend(of_scope.spans)

    def wait_for(self, num_spans: int, seconds: float = 15.0) -> list[Span]:
        """Return the spans once there are as many, failing where they do not come."""
        deadline = time.monotonic() + seconds
        while len(self.spans) < num_spans:
            assert time.monotonic() < deadline, f"{len(self.spans)} spans came of {num_spans}"
            time.sleep(0.02)
        return list(self.spans)


@contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Servicer(TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802 - the protocol names it
            receiver.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            is_known = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if is_known:
                receiver.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if is_known else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            del arguments

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


RECEIVERS = {"grpc": grpc_receiver, "http": http_receiver}


def attributes_of(span: Span) -> dict[str, object]:
    """Return a span's attributes as plain values."""
    found: dict[str, object] = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [entry.string_value for entry in value.values] if kind == "array_value" else value
    return found
