"""Sends spans to a receiver of the OpenTelemetry protocol, in the background and within bounds.

A receiver that is slow or gone costs the oldest waiting spans, never a request. What a span holds is left to
`request_spans`.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from engine import ConfigError
from ops.tracing.request_spans import RequestTimes, WallClock, make_spans

Protocol = Literal["grpc", "http"]

MAX_WAITING_SPANS = 2048
MAX_BATCH_SPANS = 512
DELAY_S = 1.0
SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
CLOCK_READS, CLOCK_GAP_S = 10, 50e-6
HTTP_PATH = "/v1/traces"


def read_clocks() -> WallClock:
    """Read both clocks as one: again where this thread was put aside in between, which would shift all spans
    of a request.
    """
    for _ in range(CLOCK_READS):
        began, wall_ns, ended = time.monotonic(), time.time_ns(), time.monotonic()
        if ended - began <= CLOCK_GAP_S:
            break
    return WallClock((began + ended) / 2, wall_ns)


class SpanExport:
    """Where the spans of one process go. `emit` never blocks and never raises for the receiver's sake."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._resource = resource
        self._processor = BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_WAITING_SPANS,
            schedule_delay_millis=DELAY_S * 1e3,
            max_export_batch_size=MAX_BATCH_SPANS,
        )

    def emit(self, request: RequestTimes) -> None:
        """Queue the spans of a request that has ended."""
        for span in make_spans(request, self._resource, read_clocks()):
            self._processor.on_end(span)

    def close(self) -> None:
        """Send what is queued, for a few seconds at most; what is left then is dropped."""
        flushing = threading.Thread(target=self._processor.shutdown, daemon=True)
        flushing.start()
        flushing.join(CLOSE_TIMEOUT_S)
        if flushing.is_alive():
            self._exporter.shutdown()


def open_export(endpoint: str, protocol: Protocol, version: str, instance: str) -> SpanExport:
    """Return an export to `endpoint`, http://HOST:PORT or https://...; nothing is sent yet, so the receiver
    need not be there. Raises `ConfigError` where the exporter is not installed.

    The exporter itself reads OTEL_EXPORTER_OTLP_HEADERS and the like, the resource OTEL_SERVICE_NAME.
    """
    resource = Resource.create({SERVICE_VERSION: version, SERVICE_INSTANCE_ID: instance})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "eyas"}))
    return SpanExport(_exporter(endpoint, protocol), resource)


def check_export(protocol: Protocol) -> None:
    """Raise `ConfigError` where the exporter of a protocol is not installed."""
    _exporter_class(protocol)


def _exporter(endpoint: str, protocol: Protocol) -> SpanExporter:
    kind = _exporter_class(protocol)
    if protocol == "grpc":
        return kind(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=SEND_TIMEOUT_S)
    has_path = urlsplit(endpoint).path not in ("", "/")
    url = endpoint if has_path else endpoint.rstrip("/") + HTTP_PATH
    return kind(endpoint=url, timeout=SEND_TIMEOUT_S)


def _exporter_class(protocol: Protocol) -> Callable[..., SpanExporter]:
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            return Grpc
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http
    except ImportError as error:
        raise ConfigError(
            f"tracing over {protocol} needs OpenTelemetry's exporter: pip install 'eyas[tracing]'"
        ) from error
    return Http
