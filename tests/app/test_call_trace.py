"""What the application notes of traced calls: phases, counts and endings; and that it costs nothing when
off.
"""

import dataclasses

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan

from app.chat import ChatTemplate
from app.ingress import FrontDoor
from app.tokenizer import Tokenizer
from engine import CapacityError, DraftState, DraftStatus, FinishReason, SequenceDelta
from ops.tracing.context import TraceSource
from ops.tracing.request_spans import RequestTimes
from tests.app.harness import SpokenEngine, chat_body, client_of, completion_body, make_application

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
UNTRACED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}


class ListSink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.requests: list[RequestTimes] = []

    def emit(self, request: RequestTimes) -> None:
        self.requests.append(request)

    def close(self) -> None:
        return None


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


@pytest.fixture
def application(engine: SpokenEngine, tokenizer: Tokenizer, model_folder, sink: ListSink) -> FastAPI:
    engine.facts = dataclasses.replace(engine.facts, draft_digest="feed")
    door = FrontDoor(max_body_bytes=100_000, traces=TraceSource(0.0))
    return make_application(engine, tokenizer, ChatTemplate(model_folder), door=door, sink=sink)


async def test_a_chat_is_one_request_under_its_clients_span(client: httpx.AsyncClient, sink: ListSink):
    answer = await client.post("/v1/chat/completions", json=chat_body(seed=4), headers=TRACED)
    (request,) = sink.requests
    assert request.name == "chat tiny"
    assert (request.context.trace_id, request.context.parent_id) == (int(TRACE, 16), int(SPAN, 16))
    assert answer.headers["traceresponse"] == request.context.header()
    body, attributes = answer.json(), request.attributes
    assert attributes["gen_ai.response.id"] == body["id"]
    assert attributes["gen_ai.usage.input_tokens"] == body["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == body["usage"]["completion_tokens"]
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.seed"] == 4
    assert attributes["eyas.draft.digest"] == "feed"
    assert attributes["eyas.outcome"] == "answered"
    assert "error.type" not in attributes
    assert request.error is None


async def test_a_draft_that_was_swapped_is_the_one_that_is_told(client, engine: SpokenEngine, sink: ListSink):
    engine.draft = DraftStatus("beef", DraftState.SERVING)
    await client.get("/metrics")
    await client.post("/v1/chat/completions", json=chat_body(), headers=TRACED)
    assert sink.requests[-1].attributes["eyas.draft.digest"] == "beef"


async def test_speculation_is_counted_as_the_engine_counts(client: httpx.AsyncClient, sink: ListSink):
    """13 tokens in runs of 3: five calls of four drafts, all but a call's own token accepted."""
    await client.post("/v1/chat/completions", json=chat_body(speculation="tree-8"), headers=TRACED)
    attributes = sink.requests[0].attributes
    assert attributes["gen_ai.usage.output_tokens"] == 13
    assert attributes["eyas.speculation"] == "tree-8"
    assert attributes["eyas.speculation.calls"] == 5
    assert attributes["eyas.speculation.draft_tokens"] == 20
    assert attributes["eyas.speculation.accepted_tokens"] == 13 - 5
    assert attributes["eyas.speculation.acceptance_length"] == pytest.approx(13 / 5)


async def test_phases_follow_one_another(client: httpx.AsyncClient, sink: ListSink):
    await client.post(
        "/v1/completions", json=completion_body(prompt=["ab", "cd"], n=2, stream=True), headers=TRACED
    )
    (request,) = sink.requests
    assert [choice.idx for choice in request.choices] == [0, 1, 2, 3]
    for choice in request.choices:
        assert (
            request.began <= choice.queued <= choice.started <= choice.first <= choice.last <= request.ended
        )
    assert request.first_token == min(choice.first for choice in request.choices)
    assert request.attributes["gen_ai.usage.input_tokens"] == 4  # a prompt counts once, not per choice
    assert request.attributes["gen_ai.usage.output_tokens"] == 4 * 13
    assert request.attributes["gen_ai.request.choice.count"] == 2


async def test_a_stop_string_ends_a_choice_with_stop(client: httpx.AsyncClient, sink: ListSink):
    await client.post("/v1/completions", json=completion_body(stop=["o, w"]), headers=TRACED)
    assert sink.requests[0].attributes["gen_ai.response.finish_reasons"] == ("stop",)


@pytest.mark.parametrize(
    ("error", "outcome", "is_ours"),
    [(CapacityError("full"), "full", False), (RuntimeError("broken"), "failed", True)],
)
async def test_a_call_that_fails_says_how(
    client, engine: SpokenEngine, sink: ListSink, error, outcome, is_ours
):
    engine.start_error = error
    await client.post("/v1/chat/completions", json=chat_body(), headers=TRACED)
    (request,) = sink.requests
    assert request.attributes["error.type"] == request.attributes["eyas.outcome"] == outcome
    assert (request.error is not None) == is_ours
    assert "broken" not in str(request.error)


async def test_a_step_that_fails_in_a_stream_is_told(client, engine: SpokenEngine, sink: ListSink):
    engine.failure = SequenceDelta("r", (), 0, FinishReason.ERROR, 1, 0, 0, 0, message="no numbers")
    await client.post("/v1/chat/completions", json=chat_body(stream=True), headers=TRACED)
    assert sink.requests[0].attributes["eyas.outcome"] == "failed"


async def test_calls_that_are_not_traced_make_no_record(client: httpx.AsyncClient, sink: ListSink):
    for headers in (UNTRACED, {}):
        answer = await client.post("/v1/chat/completions", json=chat_body(), headers=headers)
        assert answer.status_code == 200
        assert "traceresponse" not in answer.headers
    assert sink.requests == []


async def test_a_server_without_tracing_makes_no_span_and_no_record(
    engine: SpokenEngine, tokenizer: Tokenizer, model_folder, monkeypatch
):
    """Counted: every constructor of what tracing is made of."""
    made: list[str] = []
    for kind in (ReadableSpan, RequestTimes):
        original = kind.__init__

        def count(self, *arguments, original=original, kind=kind, **more):
            made.append(kind.__name__)
            original(self, *arguments, **more)

        monkeypatch.setattr(kind, "__init__", count)
    application = make_application(engine, tokenizer, ChatTemplate(model_folder))
    async with client_of(application) as client:
        answer = await client.post("/v1/chat/completions", json=chat_body(stream=True), headers=TRACED)
    assert answer.status_code == 200
    assert made == []
    ReadableSpan("counted")
    assert made == ["ReadableSpan"], "the count itself must work"
