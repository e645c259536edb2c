"""Which requests are traced, and as whose child: W3C trace context."""

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from ops.tracing.context import TraceContext, TraceSource
from ops.tracing.request_spans import RequestTimes, WallClock, make_spans

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_clients_decision_wins_over_the_ratio(ratio):
    source = TraceSource(ratio)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1,b=2"}
    context = source.open(headers)
    assert context is not None
    assert (context.trace_id, context.parent_id) == (int(TRACE, 16), int(SPAN, 16))
    assert context.tracestate == "a=1,b=2"
    assert context.span_id not in (0, int(SPAN, 16))
    assert source.open({"traceparent": f"00-{TRACE}-{SPAN}-00"}) is None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_a_broken_header_is_as_none(header):
    context = TraceSource(1.0).open({"traceparent": header, "tracestate": "a=1"})
    assert context is not None
    assert context.parent_id is None
    assert context.tracestate == ""
    assert TraceSource(0.0).open({"traceparent": header}) is None


STATES = [
    *(
        ("vendor=x", True),
        ("a=1, b=2\t,c=3", True),
        ("1tenant@sys=a b", True),
        ("", False),
        ("novalue", False),
    ),
    *(("a=1,,b=2", True), ("a=1,a=2", False), ("\u00fc=1", False), ("A=1", False), ("a=1\x00", False)),
    *((",".join(f"k{idx}=v" for idx in range(33)), False), ("a=" + "x" * 70_000, False)),
]


@pytest.mark.parametrize(("state", "is_kept"), STATES)
def test_a_state_of_the_client_goes_on_or_is_dropped_without_a_word(state, is_kept, caplog):
    """A client must not write into the log of a server, least of all what is as long as it likes."""
    context = TraceSource(0.0).open({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": state})
    assert context is not None
    assert context.tracestate == (state if is_kept else "")
    own, *_ = make_spans(RequestTimes(context, "chat tiny", 0, 1), Resource({}), WallClock(0, 0))
    assert bool(len(own.context.trace_state)) == is_kept
    assert caplog.records == []


def test_a_later_version_may_say_more():
    context = TraceSource(0.0).open({"traceparent": f"01-{TRACE}-{SPAN}-01-more"})
    assert context is not None
    assert context.parent_id == int(SPAN, 16)


def test_the_ratio_is_the_share_of_requests_without_a_parent():
    source = TraceSource(0.25)
    share = sum(source.open({}) is not None for _ in range(8000)) / 8000
    # Six standard errors of a share of 0.25 over 8,000.
    assert share == pytest.approx(0.25, abs=6 * (0.25 * 0.75 / 8000) ** 0.5)


def test_a_span_that_runs_here_is_nearer_than_the_clients():
    running = SpanContext(7, 9, is_remote=False, trace_flags=TraceFlags(1))
    with use_span(NonRecordingSpan(running)):
        context = TraceSource(0.0).open({"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert context is not None
    assert (context.trace_id, context.parent_id) == (7, 9)


def test_the_answers_header_names_the_span():
    assert TraceContext(0xAB, 0xCD).header() == f"00-{0xAB:032x}-{0xCD:016x}-01"
