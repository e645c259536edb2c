"""Whether a request is traced, and as which span: W3C trace context, in and out.

The span's id is chosen where the request comes in, so that the answer's header can name it; the span itself
is made where the request ends, by `request_spans`.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.trace import SpanContext, get_current_span

SAMPLED = 0x01
RESPONSE_HEADER = "traceresponse"
_LOW_BITS = 2**64 - 1  # the part of a trace id that samplers read
MAX_MEMBERS, MAX_STATE = 32, 8192  # of a `tracestate`: members by the standard, characters by us
_MEMBER = re.compile(  # W3C, 3.3.1.3
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A sampled request: the trace, its span there, and the span that caused it. Plain and picklable."""

    trace_id: int
    span_id: int
    parent_id: int | None = None
    tracestate: str = ""

    def header(self) -> str:
        """Return the span in the form of `traceparent` and `traceresponse`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{SAMPLED:02x}"


@dataclass(frozen=True, slots=True)
class _Parent:
    trace_id: int
    span_id: int
    is_sampled: bool
    tracestate: str


class TraceSource:
    """Decides which requests are traced: as their parent was, else `sample_ratio` of them by trace id."""

    def __init__(self, sample_ratio: float) -> None:
        self._bound = round(sample_ratio * 2**64)

    def open(self, headers: Mapping[str, str]) -> TraceContext | None:
        """Return the context of a request that is traced, else None.

        The parent is the span that runs here, as where Ray Serve traces as well, else that of the client.
        """
        parent = _running() or _of_client(headers)
        if parent is None:
            trace_id = secrets.randbits(128) or 1
            return TraceContext(trace_id, new_span_id()) if trace_id & _LOW_BITS < self._bound else None
        if not parent.is_sampled:
            return None
        return TraceContext(parent.trace_id, new_span_id(), parent.span_id, parent.tracestate)


def new_span_id() -> int:
    """Return a random id, never 0."""
    return secrets.randbits(64) or 1


def _running() -> _Parent | None:
    context: SpanContext = get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return _Parent(
        context.trace_id, context.span_id, context.trace_flags.sampled, context.trace_state.to_header()
    )


def _of_client(headers: Mapping[str, str]) -> _Parent | None:
    """Read `traceparent` and `tracestate`; a header that breaks the rules is as none (W3C, 4.3)."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    is_valid = (
        version != "ff" and (version != "00" or more is None) and int(trace_id, 16) and int(span_id, 16)
    )
    if not is_valid:
        return None
    is_sampled = bool(int(flags, 16) & SAMPLED)
    return _Parent(int(trace_id, 16), int(span_id, 16), is_sampled, _state(headers.get("tracestate", "")))


def _state(header: str) -> str:
    """Return a `tracestate` as it came, or none where it breaks the rules: the SDK would write all of it into
    the log, as long as it is and for each span.
    """
    members = [member for part in header.split(",") if (member := part.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    is_sound = 0 < len(keys) == len(members) <= MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return header if is_sound and len(header) <= MAX_STATE else ""
