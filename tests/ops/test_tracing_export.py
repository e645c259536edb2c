"""Spans over the real wire: as they were made, whatever the receiver does."""

import builtins
import gc
import itertools
import time
import tracemalloc
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

import ops.tracing.export as export_module
from app.config import ServerConfig, load_config
from engine import ConfigError
from ops.tracing import names
from ops.tracing.context import TraceContext
from ops.tracing.export import MAX_BATCH_SPANS, MAX_WAITING_SPANS, SpanExport, open_export
from ops.tracing.request_spans import ChoiceTimes, RequestTimes, WallClock, make_spans
from tests.ops.otlp_receiver import RECEIVERS, attributes_of

KEY = "eyas.test.idx"


def request(idx: int = 0, began: float = 100.0) -> RequestTimes:
    choice = ChoiceTimes(0, queued=began + 1, started=began + 2, first=began + 4, last=began + 8)
    return RequestTimes(
        TraceContext(0xABC, 0x10 + idx, 0x5, "vendor=x"),
        "chat tiny",
        began=began,
        ended=began + 9,
        attributes={KEY: idx, "list": ("a", "b")},
        choices=[choice],
    )


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_request_arrives_as_one_tree_with_its_times(protocol):
    now = time.monotonic()
    with RECEIVERS[protocol]() as receiver:
        export = open_export(receiver.url, protocol, "1.2", "replica-7")
        export.emit(request(began=now - 10))
        wall_ns = time.time_ns()
        export.close()
        own, *children = receiver.wait_for(4)
    assert (own.name, own.kind) == ("chat tiny", own.SPAN_KIND_SERVER)
    assert own.trace_id == (0xABC).to_bytes(16, "big")
    assert (own.span_id, own.parent_span_id) == ((0x10).to_bytes(8, "big"), (0x5).to_bytes(8, "big"))
    assert own.trace_state == "vendor=x"
    assert attributes_of(own) == {KEY: 0, "list": ["a", "b"]}
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    assert {child.parent_span_id for child in children} == {own.span_id}
    assert {child.trace_id for child in children} == {own.trace_id}
    assert len({child.span_id for child in (own, *children)}) == 4
    # 10 s ago by the wall clock, within the time that this test needs; then to the nanosecond's rounding.
    began = own.start_time_unix_nano
    assert began == pytest.approx(wall_ns - 10_000_000_000, abs=2_000_000_000)
    edges = [
        (span.start_time_unix_nano - began, span.end_time_unix_nano - began) for span in (own, *children)
    ]
    seconds = [(0, 9), (1, 2), (2, 4), (4, 8)]
    for found, expected in zip(edges, seconds, strict=True):
        assert found == pytest.approx([edge * 1e9 for edge in expected], abs=1000)
    assert [(event.name, event.time_unix_nano - began) for event in own.events] == [
        ("first_token", pytest.approx(4e9, abs=1000))
    ]
    (resource,) = receiver.resources
    assert (resource["service.name"], resource["service.version"]) == ("eyas", "1.2")
    assert resource["service.instance.id"] == "replica-7"


@pytest.mark.parametrize(
    ("choice", "phases"),
    [
        (ChoiceTimes(0, queued=1, last=5), [("queue", 1, 5)]),
        (ChoiceTimes(0, queued=1, started=2, last=5), [("queue", 1, 2), ("prefill", 2, 5)]),
    ],
)
def test_a_request_that_ends_early_has_the_phases_it_came_to(choice, phases):
    times = RequestTimes(TraceContext(1, 2), "chat tiny", 0, 6, choices=[choice], error="it broke")
    own, *children = make_spans(times, Resource({}), WallClock(0, 0))
    found = [(span.name, span.start_time / 1e9, span.end_time / 1e9) for span in children]
    assert found == phases
    assert own.parent is None
    assert own.events == ()
    assert (own.status.is_ok, own.status.description) == (False, "it broke")


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_receiver_that_is_down_blocks_nobody_and_memory_is_bounded(protocol, monkeypatch):
    monkeypatch.setattr(export_module, "SEND_TIMEOUT_S", 0.5)
    monkeypatch.setattr(export_module, "CLOSE_TIMEOUT_S", 0.5)
    export = open_export("http://127.0.0.1:9", protocol, "1", "r")
    for idx in range(MAX_WAITING_SPANS):  # four spans each
        export.emit(request(idx))
    gc.collect()
    num_spans = sum(type(thing) is ReadableSpan for thing in gc.get_objects())
    assert 0 < num_spans <= MAX_WAITING_SPANS + MAX_BATCH_SPANS  # what waits, and what is being sent
    start = time.monotonic()
    export.close()
    assert time.monotonic() - start < 5


def test_memory_that_spans_hold_does_not_grow_with_requests(monkeypatch):
    class Stuck:
        """A receiver that never answers."""

        def export(self, spans):
            time.sleep(30)

        def shutdown(self) -> None:
            return None

    export = SpanExport(Stuck(), Resource({}))
    monkeypatch.setattr(export_module, "CLOSE_TIMEOUT_S", 0.1)
    tracemalloc.start()
    sizes = []
    for _ in range(2):
        for idx in range(MAX_WAITING_SPANS):
            export.emit(request(idx))
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    export.close()
    assert sizes[1] < 1.2 * sizes[0]


def test_a_pause_between_the_clocks_does_not_shift_the_spans(monkeypatch):
    """Wall and monotonic clock are 100 s apart; the thread is put aside for half a second in two readings."""
    now = itertools.accumulate(
        [1.0, 0.5, 1e-6, 1e-3, 1e-6, 0.5, 1e-3, *([1e-6] * 3)]  # before each reading of any clock
    )
    clocks = SimpleNamespace(monotonic=lambda: next(now), time_ns=lambda: round((next(now) + 100) * 1e9))
    monkeypatch.setattr(export_module, "time", clocks)
    assert export_module.read_clocks().at(7.0) == pytest.approx(107e9, abs=10_000)
    assert next(now, None) is not None, "the third reading was whole: no fourth is needed"


def test_names_are_unique_and_ours_are_marked():
    constants = {
        name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)
    }
    assert len(set(constants.values())) == len(constants)
    assert all(
        "." not in value or value.split(".")[0] in ("gen_ai", "eyas", "error") for value in constants.values()
    )


def test_configuration_names_the_missing_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments):
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"eyas\[tracing\]"):
        load_config(None, {"tracing.endpoint": "http://127.0.0.1:4317"})
    assert ServerConfig().tracing.source() is None  # off asks for nothing


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://host", "http://"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint):
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        load_config(None, {"tracing.endpoint": endpoint})
