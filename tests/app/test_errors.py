"""Every error of the tree has a status of its own kind and the OpenAI body."""

import json

import pytest

from app.errors import ContextLengthError, NoReplicaError, UnknownModelError, event_for, reply_for
from engine import (
    CapacityError,
    ConfigError,
    DraftMismatchError,
    EngineDeadError,
    EyasError,
    ModelLoadError,
    RequestError,
    StepError,
)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("m", "p"), 400, None),
        (ContextLengthError("m", "p"), 400, "context_length_exceeded"),
        (UnknownModelError("m", "p"), 404, "model_not_found"),
        (CapacityError("m"), 429, "rate_limit_exceeded"),
        (StepError("m"), 500, "step_failed"),
        (EngineDeadError("m"), 503, "engine_unavailable"),
        (ModelLoadError("m"), 503, "model_unavailable"),
        (DraftMismatchError("m"), 503, "model_unavailable"),
        (ConfigError("m"), 500, "misconfigured"),
        (EyasError("m"), 500, None),
        (KeyError("secret"), 500, "internal_error"),
    ],
)
def test_error_has_its_status_and_body(error: Exception, status: int, code: str | None) -> None:
    reply = reply_for(error)
    body = json.loads(reply.body)["error"]
    assert (reply.status, body["code"]) == (status, code)
    assert body["param"] == ("p" if isinstance(error, RequestError) else None)
    assert "secret" not in body["message"]
    assert json.loads(event_for(error).removeprefix(b"data: ")) == json.loads(reply.body)


@pytest.mark.parametrize("error", [CapacityError("m"), EngineDeadError("m"), ModelLoadError("m")])
def test_what_may_pass_says_when_to_come_back(error: Exception) -> None:
    assert int(dict(reply_for(error).headers)["retry-after"]) >= 1


def test_message_that_is_no_text_can_be_sent() -> None:
    assert json.loads(reply_for(RequestError("\ud800", "\ud800")).body)["error"]["param"] == "\ud800"


def test_words_about_a_dead_engine_stay_in_the_log() -> None:
    error = EngineDeadError("the engine core is gone: AssertionError: [1, 2]")
    message = json.loads(reply_for(error).body)["error"]["message"]
    assert message.endswith("failed and is being replaced: send the request again")
    assert message in event_for(error).decode()
    assert b"within 10 s" in reply_for(NoReplicaError("no server replica answered within 10 s")).body
