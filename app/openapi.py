"""The HTTP API as an OpenAPI document, made of the bodies that are really parsed.

Ranges that depend on the model, as of token ids, are not in it: they are refused with 400.
"""

from typing import Any

from pydantic.json_schema import models_json_schema

from app.body import Body
from app.dispatch_body import DISPATCHER
from app.protocol import ChatBody, CompletionBody
from app.token_protocol import DetokenizeBody, TokenizeBody

Schema = dict[str, Any]

_BODIES: tuple[type[Body], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
_REF = "#/components/schemas/"
JSON_TYPE, EVENTS_TYPE, TEXT_TYPE = "application/json", "text/event-stream", "text/plain"


def document(version: str, has_keys: bool) -> Schema:
    """Return the document; `has_keys` says that calls need an API key."""
    _, definitions = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=f"{_REF}{{model}}"
    )
    schemas = definitions["$defs"] | _ANSWERS
    api: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Eyas", "version": version},
        "paths": _paths(),
        "components": {"schemas": schemas},
    }
    if has_keys:
        api["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        api["security"] = [{"key": []}]
    return api


def _paths() -> Schema:
    model_name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/chat/completions": {"post": _generating(ChatBody, "Answer a chat", "ChatAnswer")},
        "/v1/completions": {"post": _generating(CompletionBody, "Continue prompts", "CompletionAnswer")},
        "/v1/models": {"get": _operation("List the served model", _content(JSON_TYPE, "Models"))},
        "/v1/models/{name}": {
            "get": _operation("Describe a model", _content(JSON_TYPE, "Model")) | {"parameters": [model_name]}
        },
        "/tokenize": {"post": _posting(TokenizeBody, "Split a text or chat into tokens", "Tokens")},
        "/detokenize": {"post": _posting(DetokenizeBody, "Join tokens to a text", "Text")},
        "/health": {"get": _open("Tell whether the engine runs", {})},
        "/version": {"get": _open("Tell the version", _content(JSON_TYPE, "Version"))},
        DISPATCHER: {
            "get": _operation("Tell which tree is drafted, and why", _content(JSON_TYPE, "Dispatchers"))
        },
        "/metrics": {"get": _open("Prometheus text", {TEXT_TYPE: {"schema": {"type": "string"}}})},
    }


def _open(summary: str, content: Schema) -> Schema:
    """Describe an operation that needs no key."""
    return _operation(summary, content) | {"security": []}


def _generating(body: type[Body], summary: str, answer: str) -> Schema:
    events = {EVENTS_TYPE: {"schema": {"type": "string"}}}
    return _operation(summary, _content(JSON_TYPE, answer) | events) | _request(body)


def _posting(body: type[Body], summary: str, answer: str) -> Schema:
    return _operation(summary, _content(JSON_TYPE, answer)) | _request(body)


def _request(body: type[Body]) -> Schema:
    return {"requestBody": {"required": True, "content": _content(JSON_TYPE, body.__name__)}}


def _operation(summary: str, content: Schema) -> Schema:
    answer: Schema = {"description": "The answer"} | ({"content": content} if content else {})
    error = {"description": "OpenAI's form of an error", "content": _content(JSON_TYPE, "Error")}
    return {"summary": summary, "responses": {"200": answer, "4XX": error, "5XX": error}}


def _content(media_type: str, name: str) -> Schema:
    return {media_type: {"schema": {"$ref": f"{_REF}{name}"}}}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    return {"type": "object", "required": list(required), "properties": required | (optional or {})}


_TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_END: Schema = {"enum": ["stop", "length", "tool_calls"]}
_CALL = _object(
    {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})}
)
_CALLS: Schema = {"type": "array", "minItems": 1, "items": _CALL}
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)


def _answer(object_name: str, choice: Schema) -> Schema:
    return _object(
        {
            "id": _TEXT,
            "object": {"const": object_name},
            "created": _COUNT,
            "model": _TEXT,
            "system_fingerprint": _TEXT,
            "choices": {"type": "array", "minItems": 1, "items": choice},
            "usage": _USAGE,
        },
        {"metrics": _object({"speculative_decoding": {"type": "object"}})},
    )


_CHOICE: Schema = {"index": _COUNT, "finish_reason": _END, "logprobs": {"type": "null"}}
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _TEXT_OR_NULL, "refusal": {"type": "null"}},
    {"tool_calls": _CALLS},
)
_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "max_model_len": {"type": "integer", "minimum": 1},
    }
)
_DISPATCHER = _object(
    {
        "replica": _TEXT,
        "model": _TEXT,
        "arm": _TEXT,
        "reason": _TEXT,
        "tokens_per_second": {"type": ["number", "null"]},
        "plain_tokens_per_second": {"type": ["number", "null"]},
        "num_switches": _COUNT,
        "num_probes": _COUNT,
        "num_alarms": _COUNT,
        "num_trips": _COUNT,
        "state": {"type": ["object", "null"]},
        "totals": {"type": "array", "items": {"type": "object"}},
    }
)
_ANSWERS: Schema = {
    "ChatAnswer": _answer("chat.completion", _object(_CHOICE | {"message": _MESSAGE})),
    "CompletionAnswer": _answer("text_completion", _object(_CHOICE | {"text": _TEXT})),
    "Model": _MODEL,
    "Models": _object(
        {"object": {"const": "list"}, "data": {"type": "array", "items": {"$ref": f"{_REF}Model"}}}
    ),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": {"type": "integer", "minimum": 1},
            "tokens": {"type": "array", "items": _COUNT},
            "token_strs": {"type": ["array", "null"], "items": _TEXT},
        }
    ),
    "Text": _object({"prompt": _TEXT}),
    "Version": _object({"version": _TEXT}),
    "Dispatchers": _object({"replicas": {"type": "array", "items": _DISPATCHER}}),
    "Error": _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL})}
    ),
}
