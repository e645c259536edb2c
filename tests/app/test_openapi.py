"""The served OpenAPI document: it holds every path and field, and all answers and errors keep to it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from app.chat import ChatTemplate
from app.openapi import document
from app.protocol import ChatBody, CompletionBody
from app.tokenizer import Tokenizer
from tests.app.harness import SpokenEngine, chat_body, client_of, completion_body, events, make_application

DOCUMENT = document("0.1.0", has_keys=False)
TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CHAT = chat_body(
    messages=[
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    tools=[TOOL],
    tool_choice="none",
    stop=["x"],
    n=2,
)
COMPLETION = completion_body(
    prompt=["a", [5]], stop="x", echo=True, logit_bias={"5": 1}, speculation_stats=True
)
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/tokenize": {"messages": CHAT["messages"], "tools": [TOOL], "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
}


def check(body: object, path: str, method: str, status: str) -> None:
    """Hold a body against the schema that the document gives for it."""
    responses = DOCUMENT["paths"][path][method]["responses"]
    schema = responses[status]["content"]["application/json"]["schema"]
    jsonschema.validate(body, {"components": DOCUMENT["components"]} | schema)


async def test_document_is_served_and_names_every_route(
    application: FastAPI, client: httpx.AsyncClient
) -> None:
    served = (await client.get("/openapi.json")).json()
    assert served == json.loads(json.dumps(DOCUMENT))
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in application.routes
        for method in route.methods
        if route.path not in ("/openapi.json", "/admin/status")
    }
    listed = {
        (path, method)
        for path, item in DOCUMENT["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert listed == {route for route in routes if route[1] != "head"}
    assert "security" not in DOCUMENT
    assert document("0", has_keys=True)["security"] == [{"key": []}]


@pytest.mark.parametrize(("name", "body"), [("ChatBody", ChatBody), ("CompletionBody", CompletionBody)])
def test_document_shows_every_field_that_is_read(name: str, body: Any) -> None:
    assert set(DOCUMENT["components"]["schemas"][name]["properties"]) == set(body.model_fields)


def bounds() -> list[tuple[str, float, float]]:
    fields = DOCUMENT["components"]["schemas"]["ChatBody"]["properties"].items()
    return [
        (name, field["minimum"], field["maximum"])
        for name, field in fields
        if {"minimum", "maximum"} <= field.keys() and name != "min_tokens"  # which a context bounds as well
    ]


def test_most_sampling_fields_show_their_bounds() -> None:
    names = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed"}
    assert names <= {name for name, _, _ in bounds()}


@pytest.mark.parametrize(("name", "low", "high"), bounds())
async def test_field_is_taken_at_its_bounds_and_refused_beyond(
    client: httpx.AsyncClient, name: str, low: float, high: float
) -> None:
    step = 1 if isinstance(low, int) else low / 2
    for value, status in ((low, 200), (high, 200), (low - step, 400), (high + step, 400)):
        response = await client.post("/v1/chat/completions", json=chat_body(**{name: value}))
        assert response.status_code == status, (value, response.text)
        if status == 400:
            assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("path", BODIES)
async def test_answer_keeps_to_the_document(client: httpx.AsyncClient, path: str) -> None:
    request = {"components": DOCUMENT["components"]} | DOCUMENT["paths"][path]["post"]["requestBody"][
        "content"
    ]["application/json"]["schema"]
    jsonschema.validate(BODIES[path], request)
    response = await client.post(path, json=BODIES[path])
    assert response.status_code == 200, response.text
    check(response.json(), path, "post", "200")


@pytest.mark.parametrize("path", ["/v1/models", "/version"])
async def test_answer_to_get_keeps_to_the_document(client: httpx.AsyncClient, path: str) -> None:
    check((await client.get(path)).json(), path, "get", "200")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: object) -> list[tuple[str | int, ...]]:
    """Return the path of every place inside a body."""
    found: list[tuple[str | int, ...]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(key,), *((key, *rest) for rest in places(inner))]
    return found


def replaced(body: Any, place: tuple[str | int, ...], value: object) -> Any:
    if not place:
        return value
    copy = dict(body) if isinstance(body, dict) else list(body)
    copy[place[0]] = replaced(copy[place[0]], place[1:], value)
    return copy


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=60)
@given(data=st.data())
def test_body_with_any_value_anywhere_gets_an_answer_or_a_documented_error(
    path: str, model_folder: Path, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    fields = DOCUMENT["components"]["schemas"][
        DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"][
            "$ref"
        ].rpartition("/")[2]
    ]["properties"]
    whole = dict.fromkeys(fields) | BODIES[path]
    body = replaced(whole, data.draw(st.sampled_from(places(whole))), data.draw(JSON_VALUES))
    application = make_application(SpokenEngine(tokenizer), tokenizer, ChatTemplate(model_folder))
    response = asyncio.run(post(application, path, body))
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        check(response.json(), path, "post", "4XX")
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert events(response.text)
    else:
        check(response.json(), path, "post", "200")


async def post(application: FastAPI, path: str, body: object) -> httpx.Response:
    async with client_of(application) as client:
        return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
