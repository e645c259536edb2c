"""The HTTP front: reads and limits bodies, routes them to a server, and sends what it answers.

Parsing is left to `protocol`, wording of errors to `errors`; Ray is not known here.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.access import KeyGuard
from app.admin import status_body
from app.api_keys import ApiKeys
from app.call import Call, Reply, TokenCall
from app.dispatch_body import DISPATCHER, dispatch_body
from app.errors import (
    BodyTooLargeError,
    MediaTypeError,
    UnknownModelError,
    UnknownRouteError,
    WrongMethodError,
    event_for,
    reply_for,
)
from app.http_counts import CountResponses, ResponseCounts
from app.keep_alive import with_keep_alive
from app.metrics import CONTENT_TYPE, ReplicaSnapshot, render
from app.openapi import document
from app.protocol import parse_chat, parse_completion
from app.server import ModelCard
from app.streaming import DONE
from app.token_protocol import parse_detokenize, parse_tokenize
from engine import EyasError, RequestError
from ops.tracing.context import RESPONSE_HEADER, TraceContext, TraceSource

Messages = AsyncGenerator[bytes | Reply, None]

_GET = ["GET", "HEAD"]  # load balancers probe by HEAD
# Proxies must pass every event on at once.
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Backend(Protocol):
    """The servers behind an ingress, wherever they run."""

    def answer(self, call: Call, call_id: str, trace: TraceContext | None = None) -> Messages: ...
    async def reply(self, call: TokenCall) -> Reply: ...
    async def card(self) -> ModelCard: ...
    async def snapshots(self) -> list[ReplicaSnapshot]: ...
    async def check_health(self) -> None: ...


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed as soon as the client is gone, not when it is collected."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**STREAM_HEADERS, **headers})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """Whom the ingress lets in: size of a body, origins of web pages ("*" for all), API keys; after how
    many seconds a stream without a first message gets a comment; and which requests are traced, if any.
    """

    max_body_bytes: int
    cors_origins: tuple[str, ...] = ()
    keys: ApiKeys = field(default_factory=lambda: ApiKeys(()))
    keep_alive_s: float = 15.0
    traces: TraceSource | None = None


class Ingress:
    """The endpoints of one backend."""

    def __init__(
        self, backend: Backend, version: str, door: FrontDoor, configuration: dict[str, Any] | None = None
    ) -> None:
        self._backend = backend
        self._version = version
        self._door = door
        self._configuration = configuration or {}
        self._counts = ResponseCounts(uuid.uuid4().hex[:8], _PATHS)

    def build(self) -> FastAPI:
        """Return the ASGI application."""
        app = FastAPI(
            title="Eyas",
            version=self._version,
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            # A redirect names the host as we see it, which behind a proxy is not the client's.
            redirect_slashes=False,
            # FastAPI's own spans would fork the trace that Ray Serve began.
            telemetry={"tracing": False},
            exception_handlers={HTTPException: _routing_error},
        )
        # The last one added is the first one asked: a browser's preflight carries no key.
        if not self._door.keys.is_empty:
            app.add_middleware(KeyGuard, keys=self._door.keys)
        if self._door.cors_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self._door.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after", "x-should-retry"],
            )
        app.add_api_route(DISPATCHER, self.dispatcher, methods=_GET)
        app.add_middleware(CountResponses, counts=self._counts)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/models", self.models, methods=_GET)
        app.add_api_route("/v1/models/{name:path}", self.model, methods=_GET)
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        app.add_api_route("/health", self.health, methods=_GET)
        app.add_api_route("/version", self.version, methods=_GET)
        app.add_api_route("/openapi.json", self.openapi, methods=_GET)
        app.add_api_route("/metrics", self.metrics, methods=_GET)
        app.add_api_route("/admin/status", self.status, methods=_GET)
        return app

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion)

    async def tokenize(self, request: Request) -> Response:
        return await self._reply(request, parse_tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._reply(request, parse_detokenize)

    async def models(self) -> Response:
        try:
            return JSONResponse({"object": "list", "data": [_card_body(await self._backend.card())]})
        except EyasError as error:
            return _response(reply_for(error))

    async def model(self, name: str) -> Response:
        if not name:
            return await self.models()
        try:
            card = await self._backend.card()
            if name != card.name:
                raise UnknownModelError(f"the model {name[:80]!r} does not exist here", "model")
            return JSONResponse(_card_body(card))
        except EyasError as error:
            return _response(reply_for(error))

    async def health(self) -> Response:
        try:
            await self._backend.check_health()
        except EyasError as error:
            return _response(reply_for(error))
        return Response()

    async def version(self) -> Response:
        return JSONResponse({"version": self._version})

    async def openapi(self) -> Response:
        return JSONResponse(document(self._version, has_keys=not self._door.keys.is_empty))

    async def metrics(self) -> Response:
        try:
            text = render(await self._backend.snapshots(), self._counts)
            return Response(text, headers={"content-type": CONTENT_TYPE})
        except EyasError as error:
            return _response(reply_for(error))

    async def status(self) -> Response:
        try:
            return JSONResponse(status_body(await self._backend.snapshots(), self._configuration))
        except EyasError as error:
            return _response(reply_for(error))

    async def dispatcher(self) -> Response:
        try:
            return JSONResponse(dispatch_body(await self._backend.snapshots()))
        except EyasError as error:
            return _response(reply_for(error))

    async def _reply(self, request: Request, parse: Callable[[bytes], TokenCall]) -> Response:
        try:
            return _response(await self._backend.reply(parse(await self._read(request))))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:  # the edge of a call: every error becomes an answer
            return _response(reply_for(error))

    async def _answer(self, request: Request, parse: Callable[[bytes], Call]) -> Response:
        try:
            call = parse(await self._read(request))
            traces = self._door.traces
            trace = None if traces is None else traces.open(request.headers)
            messages = self._backend.answer(call, uuid.uuid4().hex, trace)
            if call.options.is_stream:
                messages = with_keep_alive(messages, self._door.keep_alive_s)
            # The first message is awaited before any status is sent, so that an error is a status.
            first = await anext(messages)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:  # the edge of a call: every error becomes an answer
            return _response(reply_for(error))
        headers = {} if trace is None else {RESPONSE_HEADER: trace.header()}
        if isinstance(first, Reply):
            await messages.aclose()
            return _response(first, headers)
        return EventStream(_relay(first, messages), headers)

    async def _read(self, request: Request) -> bytes:
        """Return the body, reading no more of it than is allowed."""
        _check_media_type(request.headers)
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._door.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._door.max_body_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body may have {self._door.max_body_bytes} bytes at most")


async def _relay(first: bytes, messages: Messages) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream that has begun; a server that dies under it ends it with one event."""
    async with aclosing(messages):
        yield first
        try:
            async for message in messages:
                # An error that came after the first comment could not be a status any more.
                yield message if isinstance(message, bytes) else b"data: " + message.body + b"\n\n" + DONE
        except Exception as error:  # the status is out: the error can only be an event
            yield event_for(error) + DONE


def _check_media_type(headers: Mapping[str, str]) -> None:
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise MediaTypeError(
            f"the body must be sent as content-type application/json, found {media_type[:80]!r}"
        )


def _card_body(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "eyas",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }


def _response(reply: Reply, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    return Response(reply.body, reply.status, {**dict(reply.headers), **headers}, "application/json")


async def _routing_error(request: Request, error: Exception) -> Response:
    """Word the errors of the router itself as OpenAI does."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        text = f"no such path: {request.method} {path[:200]}{_advice(path)}"
        return _response(reply_for(UnknownRouteError(text)))
    if error.status_code == 405:
        response = _response(reply_for(WrongMethodError(f"{path} does not take {request.method}")))
        response.headers.update(error.headers or {})
        return response
    return _response(reply_for(RequestError(str(error.detail))))


def _advice(path: str) -> str:
    """Name the path that a base URL with too much or too little in it was meant to give."""
    end = path.rstrip("/")
    for candidate in (end, f"/v1{end}", end.removeprefix("/v1")):
        if candidate in _PATHS:
            return f"; did you mean {candidate}?"
    return ""


_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"),
        *("/health", "/version", "/metrics", "/openapi.json"),
    }
)
