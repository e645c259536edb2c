"""The one place where an error becomes an HTTP status and an OpenAI body.

Raising the right error is left to everybody else.
"""

import logging
from dataclasses import dataclass

from app.call import Reply
from app.error_body import error_body
from engine import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    EyasError,
    ModelLoadError,
    RequestError,
    StepError,
)

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
RETRY_SOON = (("retry-after", "1"),)
RETRY_LATER = (("retry-after", "5"),)
ASK_FOR_KEY = (("www-authenticate", "Bearer"),)
# The official clients retry every 5xx twice; a request that breaks the model would break it three times.
NO_RETRY = (("x-should-retry", "false"),)


class AuthenticationError(RequestError):
    """No API key was given where one is needed, or an unknown one."""


class ContextLengthError(RequestError):
    """Prompt and answer do not fit into the model's context."""


class UnknownModelError(RequestError):
    """A model was asked for that is not served here."""


class MediaTypeError(RequestError):
    """A body is not declared as JSON."""


class BodyTooLargeError(RequestError):
    """A body is larger than the server takes; it was not read to its end."""


class UnknownRouteError(RequestError):
    """No such path."""


class WrongMethodError(RequestError):
    """The path exists, but not for this HTTP method."""


class NoReplicaError(EngineDeadError):
    """No server replica answered in time; its text is for clients."""


@dataclass(frozen=True, slots=True)
class Wording:
    """How one kind of error reads over HTTP. `message` stands in for texts that are meant for the log."""

    status: int
    kind: str
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    message: str | None = None


_ENGINE_GONE = "the server replica that had this request failed and is being replaced: send the request again"
_FAILED = "the server failed; its log has the reason"
# The most derived class comes first: the first match counts.
_WORDINGS: tuple[tuple[type[EyasError], Wording], ...] = (
    (AuthenticationError, Wording(401, INVALID_REQUEST, "invalid_api_key", ASK_FOR_KEY)),
    (ContextLengthError, Wording(400, INVALID_REQUEST, "context_length_exceeded")),
    (UnknownModelError, Wording(404, INVALID_REQUEST, "model_not_found")),
    (UnknownRouteError, Wording(404, INVALID_REQUEST, "unknown_url")),
    (WrongMethodError, Wording(405, INVALID_REQUEST, "method_not_allowed")),
    (MediaTypeError, Wording(415, INVALID_REQUEST, "unsupported_media_type")),
    (BodyTooLargeError, Wording(413, INVALID_REQUEST, "request_too_large")),
    (RequestError, Wording(400, INVALID_REQUEST)),
    (CapacityError, Wording(429, "rate_limit_error", "rate_limit_exceeded", RETRY_SOON)),
    (NoReplicaError, Wording(503, "server_error", "engine_unavailable", RETRY_LATER)),
    (EngineDeadError, Wording(503, "server_error", "engine_unavailable", RETRY_LATER, _ENGINE_GONE)),
    (StepError, Wording(500, "server_error", "step_failed", NO_RETRY)),
    (ModelLoadError, Wording(503, "server_error", "model_unavailable", RETRY_LATER)),
    (ConfigError, Wording(500, "server_error", "misconfigured", NO_RETRY)),
    (EyasError, Wording(500, "server_error")),
)
_INTERNAL = Wording(500, "server_error", "internal_error", message=_FAILED)


def reply_for(error: Exception) -> Reply:
    """Return the HTTP answer for `error`. An error of no known kind is logged and its text kept inside."""
    wording = _wording(error)
    _log_unknown(error, wording)
    return Reply(wording.status, _body(error, wording), wording.headers)


def status_of(error: Exception) -> int:
    """Return the HTTP status of `error`, which a stream that has begun cannot tell any more."""
    return _wording(error).status


def event_for(error: Exception) -> bytes:
    """Return `error` as the last event but one of a stream that has begun; `[DONE]` is left to the caller."""
    wording = _wording(error)
    _log_unknown(error, wording)
    return b"data: " + _body(error, wording) + b"\n\n"


def _wording(error: Exception) -> Wording:
    return next((wording for kind, wording in _WORDINGS if isinstance(error, kind)), _INTERNAL)


def _log_unknown(error: Exception, wording: Wording) -> None:
    if wording is _INTERNAL:
        logger.error("unexpected error", exc_info=error)


def _body(error: Exception, wording: Wording) -> bytes:
    parameter = error.parameter if isinstance(error, RequestError) else None
    return error_body(wording.message or str(error), wording.kind, parameter, wording.code)
