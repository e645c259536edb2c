"""The spans of one request, made when it has ended from the times that were noted on the way.

Nothing is made while a request runs: that costs a step nothing. Sending the spans is left to `export`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from ops.tracing import names
from ops.tracing.context import TraceContext, new_span_id

Attribute = str | bool | int | float | Sequence[str]
SCOPE = InstrumentationScope("eyas")


@dataclass(slots=True)
class ChoiceTimes:
    """When one choice was queued, began its prefill, gave its first tokens and its last, in seconds of the
    machine's monotonic clock; `started` and `first` are None where it did not come to that.
    """

    idx: int
    queued: float
    last: float
    started: float | None = None
    first: float | None = None


@dataclass(slots=True)
class RequestTimes:
    """One request: its span's name, begin and end, what is known of it, and its choices. `error` describes a
    failure of ours; a refusal is not one.
    """

    context: TraceContext
    name: str
    began: float
    ended: float = 0.0
    error: str | None = None
    attributes: dict[str, Attribute] = field(default_factory=dict)
    choices: list[ChoiceTimes] = field(default_factory=list)

    @property
    def first_token(self) -> float | None:
        return min((choice.first for choice in self.choices if choice.first is not None), default=None)


@dataclass(frozen=True, slots=True)
class WallClock:
    """Turns times of the monotonic clock into nanoseconds since 1970, by one reading of both clocks."""

    monotonic: float
    wall_ns: int

    def at(self, time: float) -> int:
        return self.wall_ns + round((time - self.monotonic) * 1e9)


def make_spans(request: RequestTimes, resource: Resource, clock: WallClock) -> list[ReadableSpan]:
    """Return the request's own span and, for each choice, those of its phases."""
    context = request.context
    state = TraceState.from_header([context.tracestate])
    flags = TraceFlags(TraceFlags.SAMPLED)

    def place(span_id: int, is_remote: bool = False) -> SpanContext:
        return SpanContext(context.trace_id, span_id, is_remote, flags, state)

    def span(
        name: str,
        own: SpanContext,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Mapping[str, Attribute],
        kind: SpanKind = SpanKind.INTERNAL,
        events: Sequence[Event] = (),
        status: Status | None = None,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            own,
            parent,
            resource,
            attributes,
            events,
            kind=kind,
            status=status or Status(),
            start_time=clock.at(times[0]),
            end_time=clock.at(times[1]),
            instrumentation_scope=SCOPE,
        )

    own = place(context.span_id)
    parent = None if context.parent_id is None else place(context.parent_id, is_remote=True)
    first = request.first_token
    events = () if first is None else (Event(names.FIRST_TOKEN, timestamp=clock.at(first)),)
    status = None if request.error is None else Status(StatusCode.ERROR, request.error)
    times = (request.began, request.ended)
    found = [span(request.name, own, parent, times, request.attributes, SpanKind.SERVER, events, status)]
    for choice in request.choices:
        for name, phase in _phases(choice):
            found.append(span(name, place(new_span_id()), own, phase, {names.CHOICE: choice.idx}))
    return found


def _phases(choice: ChoiceTimes) -> list[tuple[str, tuple[float, float]]]:
    """Cut a choice into the phases that it came to; the first decode step counts to the prefill."""
    if choice.started is None:
        return [(names.QUEUE, (choice.queued, choice.last))]
    phases = [(names.QUEUE, (choice.queued, choice.started))]
    if choice.first is None:
        return [*phases, (names.PREFILL, (choice.started, choice.last))]
    return [
        *phases,
        (names.PREFILL, (choice.started, choice.first)),
        (names.DECODE, (choice.first, choice.last)),
    ]
