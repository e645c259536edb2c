"""Grammars from request to answer, over HTTP and through a real engine core with a random model.

A random model says anything that it may, so that a valid answer is the grammar's merit alone.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import jsonschema
import pytest
import pytest_asyncio

from app.call import Tool
from app.config import ServerConfig
from app.forced_calls import call_grammar
from app.ingress import FrontDoor, Ingress
from app.replica import Replica
from tests.app.harness import LocalBackend, chat_body, client_of, completion_body, events
from tests.app.tiny_model import write_random_draft, write_random_model

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["rot", "grün"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["color", "sizes", "inner"],
    "$defs": {
        "inner": {"type": "object", "properties": {"is_it": {"type": "boolean"}}, "required": ["is_it"]}
    },
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
PARAMETERS = {
    "type": "object",
    "properties": {"day": {"$ref": "#/$defs/day"}},
    "required": ["day"],
    "$defs": {"day": {"enum": ["today", "tomorrow"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    root: Path = tmp_path_factory.mktemp("models")
    for name, write in (("model", write_random_model), ("draft", write_random_draft)):
        (root / name).mkdir()
        write(root / name)
    config = ServerConfig(
        model=str(root / "model"),
        draft=str(root / "draft"),
        served_model_name="tiny",
        engine={"dtype": "float32", "device": "cpu", "num_blocks": 400, "speculation": {"mode": "tree-8"}},
    )
    server = (await Replica.start(config)).server
    application = Ingress(LocalBackend(server), "0.1.0", FrontDoor(max_body_bytes=1_000_000)).build()
    async with client_of(application) as client:
        client.timeout = httpx.Timeout(60)
        yield client
    await server.shutdown()


async def ask(client: httpx.AsyncClient, **fields: object) -> list[str]:
    """Return the contents of a chat that must end by itself."""
    response = await client.post(CHAT, json=chat_body(**fields))
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}, choices
    return [choice["message"]["content"] for choice in choices]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}])
async def test_a_schema_is_kept_by_every_choice_and_speculation_changes_nothing(
    client: httpx.AsyncClient, sampling: dict[str, object]
) -> None:
    answers = await ask(client, response_format=FORMAT, n=3, **sampling)
    for answer in answers:
        jsonschema.validate(json.loads(answer), SCHEMA)
    assert await ask(client, response_format=FORMAT, n=3, speculation="off", **sampling) == answers
    assert await ask(client, guided_json=SCHEMA, n=3, speculation="chain-3", **sampling) == answers


async def test_thirty_guided_calls_among_plain_ones_and_broken_ones_are_all_answered(
    client: httpx.AsyncClient,
) -> None:
    bodies = [
        {"response_format": FORMAT, "temperature": 1.0, "seed": idx}
        if idx % 3 == 0
        else {"guided_regex": "[a-c]{4}", "seed": idx}
        if idx % 3 == 1
        else {"max_tokens": 12}
        for idx in range(45)
    ] + [{"guided_regex": "("}] * 3
    answers = await asyncio.gather(*(client.post(CHAT, json=chat_body(**body)) for body in bodies))
    assert [answer.status_code for answer in answers] == [200] * 45 + [400] * 3
    for idx, answer in enumerate(answers[:45]):
        text = answer.json()["choices"][0]["message"]["content"]
        if idx % 3 == 0:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif idx % 3 == 1:
            assert re.fullmatch("[a-c]{4}", text)


async def test_a_stream_says_what_the_whole_answer_says(client: httpx.AsyncClient) -> None:
    fields = {"response_format": FORMAT, "temperature": 1.0, "seed": 5}
    (whole,) = await ask(client, **fields)
    response = await client.post(CHAT, json=chat_body(stream=True, **fields))
    chunks = [chunk["choices"][0] for chunk in events(response.text)]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == whole
    assert chunks[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}-(x|y)"}, "[a-f]{3}-(x|y)"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "<" [0-9] [0-9]? ">"'}, "<[0-9]{1,2}>"),
        ({"structured_outputs": {"regex": "a{4}"}}, "aaaa"),
        ({"structured_outputs": {"choice": ["ü", "ö"]}}, "ü|ö"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "[12]"),
        ({"structured_outputs": {"json": '{"enum": [3]}'}}, "3"),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "x"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
    ],
)
async def test_every_way_to_ask_for_a_grammar(
    client: httpx.AsyncClient, fields: dict[str, object], pattern: str
) -> None:
    (answer,) = await ask(client, **fields)
    assert re.fullmatch(pattern, answer), answer
    response = await client.post(COMPLETIONS, json=completion_body(**fields))
    assert re.fullmatch(pattern, response.json()["choices"][0]["text"]), response.text


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
async def test_any_object_begins_as_one(client: httpx.AsyncClient, fields: dict[str, object]) -> None:
    response = await client.post(CHAT, json=chat_body(max_tokens=40, temperature=1.0, seed=1, **fields))
    choice = response.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize("fields", [{"response_format": {"type": "text"}}, {"structured_outputs": None}])
async def test_a_format_of_text_asks_for_nothing(
    client: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    body = {"max_tokens": 8, "temperature": 0}
    plain, same = [(await client.post(CHAT, json=chat_body(**body, **f))).json() for f in ({}, fields)]
    assert plain["choices"] == same["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"type": "strin"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": [5]}, "guided_choice[0]"),
        ({"guided_grammar": "root ::="}, "guided_grammar"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"if": {}}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_grammar_that_cannot_be_kept_is_one_400(
    client: httpx.AsyncClient, fields: dict[str, object], param: str, is_stream: bool
) -> None:
    response = await client.post(CHAT, json=chat_body(stream=is_stream, **fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"]
    assert await ask(client, guided_choice=["on"]) == ["on"]


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "now"}), (NAMED, {"weather"})])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_forced_call_is_a_call_that_fits_its_parameters(
    client: httpx.AsyncClient, choice: object, names: set[str], is_stream: bool
) -> None:
    called = set()
    for seed in range(4):
        body = chat_body(tools=TOOLS, tool_choice=choice, temperature=1.5, seed=seed, stream=is_stream)
        response = await client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        call, end = read_call(response, is_stream)
        assert end == "tool_calls"
        arguments = json.loads(call["arguments"])
        jsonschema.validate(arguments, PARAMETERS if call["name"] == "weather" else {"maxProperties": 0})
        called.add(call["name"])
    assert called <= names


def read_call(response: httpx.Response, is_stream: bool) -> tuple[dict[str, str], str]:
    """Return the one call of an answer without content, and why it ended."""
    if not is_stream:
        choice = response.json()["choices"][0]
        assert not choice["message"]["content"]
        (call,) = choice["message"]["tool_calls"]
        return call["function"], choice["finish_reason"]
    chunks = [chunk["choices"][0] for chunk in events(response.text)]
    assert not "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    deltas = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert {delta["index"] for delta in deltas} == {0}
    name = "".join(delta["function"].get("name", "") for delta in deltas)
    arguments = "".join(delta["function"].get("arguments", "") for delta in deltas)
    return {"name": name, "arguments": arguments}, chunks[-1]["finish_reason"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools[0].function"),
        ({"tools": TOOLS, "tool_choice": NAMED | {"function": {"name": "none"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_a_call_that_cannot_be_forced_is_one_400(
    client: httpx.AsyncClient, fields: dict[str, object], param: str
) -> None:
    response = await client.post(CHAT, json=chat_body(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_references_of_parameters_are_moved_with_them() -> None:
    tool = Tool(
        "f", "", {"properties": {"a": {"$ref": "#"}, "$ref": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}
    )
    schema = json.loads(call_grammar([Tool("g", "", {}), tool]).text)
    arguments = schema["anyOf"][1]["properties"]["arguments"]
    assert arguments["properties"]["a"] == {"$ref": "#/anyOf/1/properties/arguments"}
    assert arguments["properties"]["$ref"] == {"$ref": "#/anyOf/1/properties/arguments/$defs/b"}
    assert schema["anyOf"][0]["properties"]["arguments"] == {"type": "object", "additionalProperties": False}
