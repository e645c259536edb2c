"""Answers of the HTTP front, counted by path and status: also those that no replica ever sees.

A broken body, a missing key and an unknown path end here. How calls end at a replica is left to `outcomes`.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RESPONSES = (
    "eyas_http_responses_total",
    "answers of the HTTP front that have begun, by path and status",
)
RESPONSES_LABELS = ["ingress", "path", "status"]
OTHER = "other"


class ResponseCounts(Collector):
    """Counts of one ingress; paths that are not `known` are one, so that nobody can make more of them."""

    def __init__(self, ingress: str, known: frozenset[str]) -> None:
        self._ingress = ingress
        self._known = known
        self._counts: Counter[tuple[str, int]] = Counter()

    def observe(self, path: str, status: int) -> None:
        self._counts[path if path in self._known else OTHER, status] += 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(*RESPONSES, labels=RESPONSES_LABELS)
        for (path, status), count in self._counts.items():
            family.add_metric([self._ingress, path, str(status)], count)
        yield family


class CountResponses:
    """ASGI middleware that tells a `ResponseCounts` of every answer as it begins."""

    def __init__(self, app: ASGIApp, counts: ResponseCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.observe(scope["path"], message["status"])
            await send(message)

        await self._app(scope, receive, send_counted)
