"""Every kind of bad input: a 4xx with the OpenAI body that names the parameter, and the engine goes on."""

import json

import httpx
import pytest

from app.tokenizer import Tokenizer
from engine import CapacityError, EngineDeadError
from tests.app.harness import MAX_MODEL_LEN, SpokenEngine, chat_body, completion_body

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT_MESSAGE = {"role": "user", "content": "Hi"}


async def expect_error(
    response: httpx.Response, status: int, param: str | None, code: str | None = None
) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param
    assert body["error"]["code"] == code
    assert body["error"]["message"]
    return str(body["error"]["message"])


CHAT_FIELDS = [
    ("max_tokens", "10"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", 1e9),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", -1),
    ("top_p", 1e-300),
    ("top_k", -2),
    ("top_k", 2.5),
    ("top_k", 2**31),
    ("top_k", 2**63),
    ("min_p", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-45),
    ("n", 0),
    ("n", 129),
    ("n", "2"),
    ("seed", 2**70),
    ("seed", "x"),
    ("stream", "yes"),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", "x" * 1001),
    ("stop", ["x"] * 10_000),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"258": 1}),
    ("logit_bias", {str(idx): 1 for idx in range(301)}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [258]),
    ("min_tokens", -1),
    ("speculation", 8),
    ("speculation_stats", "yes"),
    ("priority", 2**31),
    ("priority", 1.5),
    ("user", 5),
    ("stream_options", {"include_usage": True}),
    ("logprobs", True),
    ("top_logprobs", 3),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 129),
    ("tools", {"type": "function"}),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tool_choice", "sometimes"),
    ("parallel_tool_calls", "no"),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema"}),
    ("guided_json", {}),
    ("reasoning_effort", "low"),
    ("continue_final_message", True),
    ("continue_final_message", "yes"),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", []),
    ("chat_template", "{{ 5 }}"),
    ("messages", []),
    ("messages", "Hi"),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), CHAT_FIELDS)
async def test_bad_chat_field_is_refused_by_name(
    client: httpx.AsyncClient, engine: SpokenEngine, field: str, value: object
) -> None:
    response = await client.post(CHAT, json=chat_body(**{field: value}))
    await expect_error(response, 400, field)
    assert engine.requests == []
    assert (await client.post(CHAT, json=chat_body())).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stop", [1], "stop[0]"),
        ("stop", {"a": 1}, "stop"),
        ("logit_bias", {"5": "x"}, "logit_bias.5"),
        ("stop_token_ids", ["a"], "stop_token_ids[0]"),
        ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
        ("messages", [{"role": "king", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "tool", "content": "x"}], "messages[0]"),
        ("messages", [{"role": "tool", "tool_call_id": "c"}], "messages[0]"),
        ("messages", [{"role": "user", "content": "x", "tool_calls": [TOOL_CALL]}], "messages[0]"),
        (
            "messages",
            [{"role": "assistant", "tool_calls": [{"id": "c"}]}],
            "messages[0].tool_calls[0].function",
        ),
        ("tools", [{"type": "function"}], "tools[0].function"),
        ("tools", [{"type": "web_search", "function": {"name": "f"}}], "tools[0].type"),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        (
            "tools",
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            "tools[0].function.parameters",
        ),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": True}}], "tools[0].function"),
        ("messages", [{"content": "x"}], "messages[0].role"),
        ("messages", [TEXT_MESSAGE, {"role": "user", "content": 5}], "messages[1].content"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ("messages", [{"role": "user"}], "messages[0]"),
    ],
)
async def test_fault_inside_a_field_is_named_with_its_path(
    client: httpx.AsyncClient, field: str, value: object, param: str
) -> None:
    await expect_error(await client.post(CHAT, json=chat_body(**{field: value})), 400, param)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", ["a", ""]),
        ("prompt", 5),
        ("prompt", None),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", ["a", 5]),
        ("prompt", [[5], ["a"]]),
        ("prompt", [-1]),
        ("prompt", [258]),
        ("prompt", [[5], [5, 258]]),
        ("prompt", [10**30]),
        ("echo", "yes"),
        ("suffix", "end"),
        ("best_of", 2),
        ("logprobs", 0),
        ("max_tokens", "10"),
        ("max_tokens", 0),
    ],
)
async def test_bad_completion_field_is_refused_by_name(
    client: httpx.AsyncClient, engine: SpokenEngine, field: str, value: object
) -> None:
    await expect_error(await client.post(COMPLETIONS, json=completion_body(**{field: value})), 400, field)
    assert engine.requests == []


@pytest.mark.parametrize("field", ["model", "messages"])
async def test_missing_field_is_refused_by_name(client: httpx.AsyncClient, field: str) -> None:
    body = chat_body()
    del body[field]
    await expect_error(await client.post(CHAT, json=body), 400, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": "x" * 50_000}, "prompt"),
        ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        ({"max_tokens": 10**15}, "max_tokens"),
    ],
)
async def test_what_does_not_fit_the_context_says_so(
    client: httpx.AsyncClient, fields: dict[str, object], param: str
) -> None:
    response = await client.post(COMPLETIONS, json=completion_body(**fields))
    await expect_error(response, 400, param, "context_length_exceeded")


async def test_overlong_chat_names_messages(client: httpx.AsyncClient) -> None:
    body = chat_body(messages=[{"role": "user", "content": "x" * 600}])
    await expect_error(await client.post(CHAT, json=body), 400, "messages", "context_length_exceeded")


async def test_min_tokens_beyond_the_context_are_refused(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=chat_body(min_tokens=MAX_MODEL_LEN))
    await expect_error(response, 400, "min_tokens", "context_length_exceeded")


async def test_prompt_that_leaves_room_for_one_token_is_served(client: httpx.AsyncClient) -> None:
    body = completion_body(prompt=[5] * (MAX_MODEL_LEN - 1), max_tokens=1)
    response = await client.post(COMPLETIONS, json=body)
    assert response.json()["usage"]["completion_tokens"] == 1


async def test_too_many_prompts_are_refused_before_they_are_tokenized(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("a prompt was tokenized"))
    response = await client.post(COMPLETIONS, json=completion_body(prompt=["x"] * 10_000))
    await expect_error(response, 400, "prompt")


async def test_too_many_answers_in_one_call_are_refused(client: httpx.AsyncClient) -> None:
    await expect_error(await client.post(CHAT, json=chat_body(n=65)), 400, "n")
    many = completion_body(prompt=["a"] * 33, n=2)
    await expect_error(await client.post(COMPLETIONS, json=many), 400, "prompt")


async def test_unknown_model_is_404(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=chat_body(model="gpt-x"))
    await expect_error(response, 404, "model", "model_not_found")
    await expect_error(await client.get("/v1/models/gpt-x"), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[1, 2]",
        b"5",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b"[" * 50_000,
        b'{"model": ' + b'{"a":' * 10_000,
    ],
)
async def test_body_that_is_no_json_object_is_400(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_other_content_type_is_415(client: httpx.AsyncClient) -> None:
    body = json.dumps(chat_body()).encode()
    response = await client.post(CHAT, content=body, headers={"content-type": "text/plain"})
    await expect_error(response, 415, None, "unsupported_media_type")


async def test_json_with_a_charset_is_taken(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = await client.post(CHAT, content=json.dumps(chat_body()), headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("is_declared", [True, False])
async def test_large_body_is_413_before_it_was_read(client: httpx.AsyncClient, is_declared: bool) -> None:
    num_sent = 0

    async def chunks():
        nonlocal num_sent
        for _ in range(50):
            num_sent += 1
            yield b"x" * 1_000_000

    headers = {"content-type": "application/json"}
    if is_declared:
        headers["content-length"] = str(50_000_000)
    response = await client.post(CHAT, content=chunks(), headers=headers)
    await expect_error(response, 413, None, "request_too_large")
    assert num_sent <= 2


async def test_unknown_path_is_404(client: httpx.AsyncClient) -> None:
    await expect_error(await client.get("/nothing"), 404, None, "unknown_url")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
async def test_path_with_too_much_or_too_little_is_told_the_right_one(
    client: httpx.AsyncClient, path: str, meant: str
) -> None:
    message = await expect_error(await client.post(path, json={}), 404, None, "unknown_url")
    assert message.endswith(f"did you mean {meant}?")


async def test_wrong_method_is_405_with_the_right_one(client: httpx.AsyncClient) -> None:
    response = await client.get(CHAT)
    await expect_error(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    response = await client.delete("/health")
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize("is_stream", [True, False])
async def test_full_engine_is_429_with_retry_after(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool
) -> None:
    engine.start_error = CapacityError("the queue is full")
    response = await client.post(CHAT, json=chat_body(stream=is_stream))
    await expect_error(response, 429, None, "rate_limit_exceeded")
    assert int(response.headers["retry-after"]) >= 1


async def test_dead_engine_is_503_and_health_says_so(client: httpx.AsyncClient, engine: SpokenEngine) -> None:
    engine.start_error = engine.health_error = EngineDeadError("the engine core is gone")
    await expect_error(await client.post(CHAT, json=chat_body()), 503, None, "engine_unavailable")
    await expect_error(await client.get("/health"), 503, None, "engine_unavailable")


async def test_unexpected_error_is_500_and_keeps_its_text_inside(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    engine.start_error = ZeroDivisionError("a secret")
    response = await client.post(CHAT, json=chat_body())
    message = await expect_error(response, 500, None, "internal_error")
    assert "secret" not in message
