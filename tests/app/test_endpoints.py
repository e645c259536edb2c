"""What the endpoints answer: whole bodies, streams byte for byte, usage, and clients that leave."""

import asyncio
import dataclasses
import json

import httpx
import pytest
from fastapi import FastAPI

from engine import FinishReason, SequenceDelta
from tests.app.harness import SpokenEngine, chat_body, completion_body, events

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
NUM_CHAT_TOKENS = len("<user\nHi>\n<assistant\n")  # each special token is one


async def test_chat_answer_has_the_documented_shape(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=chat_body())
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["system_fingerprint"].endswith("-01234567")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": NUM_CHAT_TOKENS,
        "completion_tokens": 13,
        "total_tokens": NUM_CHAT_TOKENS + 13,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def test_completion_answer_has_the_documented_shape(client: httpx.AsyncClient) -> None:
    body = (await client.post(COMPLETIONS, json=completion_body(max_tokens=5))).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["completion_tokens"] == 5


async def test_completion_takes_sixteen_tokens_by_default(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    engine.text = "x" * 40
    body = completion_body()
    del body["max_tokens"]
    assert (await client.post(COMPLETIONS, json=body)).json()["usage"]["completion_tokens"] == 16


async def test_default_of_sixteen_shrinks_to_the_room_left(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    engine.text = "x" * 40
    body = completion_body(prompt=[5] * 509)
    del body["max_tokens"]
    assert (await client.post(COMPLETIONS, json=body)).json()["usage"]["completion_tokens"] == 3


async def test_chat_takes_the_rest_of_the_context_by_default(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    await client.post(CHAT, json=chat_body())
    assert engine.requests[0].sampling.max_tokens == 512 - NUM_CHAT_TOKENS


async def test_chat_takes_no_more_than_the_cache_holds_by_default(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    engine.facts = dataclasses.replace(engine.facts, num_blocks=4)  # of 16 tokens, and one that is not cached
    assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 65
    assert (await client.post(CHAT, json=chat_body())).status_code == 200
    assert engine.requests[0].sampling.max_tokens == 65 - NUM_CHAT_TOKENS
    too_many = await client.post(CHAT, json=chat_body(max_tokens=66 - NUM_CHAT_TOKENS))
    error = too_many.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"].startswith("the KV cache of this server holds 65 tokens")
    long = chat_body(messages=[{"role": "user", "content": "x" * 65}])
    assert (await client.post(CHAT, json=long)).json()["error"]["param"] == "messages"


async def test_max_completion_tokens_wins_over_max_tokens(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    await client.post(CHAT, json=chat_body(max_tokens=9, max_completion_tokens=4))
    assert engine.requests[0].sampling.max_tokens == 4


async def test_chat_stream_is_exact_to_the_byte(client: httpx.AsyncClient, engine: SpokenEngine) -> None:
    engine.text = "Hé"
    response = await client.post(CHAT, json=chat_body(stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    first = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
    head = (
        f'{{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},"model":"tiny",'
        f'"system_fingerprint":"{first["system_fingerprint"]}","choices":[{{"index":0,"delta":'
    )
    assert response.content.decode() == (
        f'data: {head}{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {head}{{"content":"Hé"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {head}{{}},"logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_completion_stream_is_exact_to_the_byte(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    engine.text = "Hi"
    response = await client.post(COMPLETIONS, json=completion_body(stream=True))
    first = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
    head = (
        f'{{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},"model":"tiny",'
        f'"system_fingerprint":"{first["system_fingerprint"]}","choices":[{{"index":0,"text":'
    )
    assert response.content.decode() == (
        f'data: {head}"Hi","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {head}"","logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_usage_comes_last_and_only_when_asked_for(client: httpx.AsyncClient) -> None:
    plain = events((await client.post(CHAT, json=chat_body(stream=True))).text)
    assert all("usage" not in event and event["choices"] for event in plain)
    options = {"include_usage": True}
    chunks = events((await client.post(CHAT, json=chat_body(stream=True, stream_options=options))).text)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 13
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


async def test_continuous_usage_counts_every_chunk(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events((await client.post(CHAT, json=chat_body(stream=True, stream_options=options))).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 3, 6, 9, 12, 13, 13]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("run_len", [1, 4, 50])
async def test_stream_and_whole_answer_hold_the_same_text(
    client: httpx.AsyncClient, engine: SpokenEngine, path: str, run_len: int
) -> None:
    engine.text = 'It said "naïve" 🦅, 日本語 and "quotes".'
    engine.run_len = run_len
    body = chat_body() if path == CHAT else completion_body()
    whole = (await client.post(path, json=body)).json()["choices"][0]
    chunks = events((await client.post(path, json=body | {"stream": True})).text)
    pieces = [chunk["choices"][0] for chunk in chunks]
    streamed = "".join(p["delta"].get("content", "") if path == CHAT else p["text"] for p in pieces)
    assert streamed == engine.text
    assert streamed == (whole["message"]["content"] if path == CHAT else whole["text"])
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert "\ufffd" not in streamed


@pytest.mark.parametrize("is_stream", [True, False])
async def test_stop_string_cuts_text_usage_and_reason_and_finishes(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool
) -> None:
    body = chat_body(stop=["wor", "zzz"], stream=is_stream)
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    response = await client.post(CHAT, json=body)
    if is_stream:
        chunks = events(response.text)
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        reason, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        choice = response.json()["choices"][0]
        text, reason, usage = choice["message"]["content"], choice["finish_reason"], response.json()["usage"]
    assert (text, reason, usage["completion_tokens"]) == ("Hello, ", "stop", 10)
    assert engine.finished == [engine.requests[0].request_id]
    assert not engine.aborted
    assert not engine.running


async def test_stop_may_be_one_string_and_may_be_kept_in_the_text(client: httpx.AsyncClient) -> None:
    body = chat_body(stop=", ", include_stop_str_in_output=True)
    choice = (await client.post(CHAT, json=body)).json()["choices"][0]
    assert choice["message"]["content"] == "Hello, "


async def test_choices_get_seeds_of_their_own_and_the_first_keeps_the_given_one(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    body = (await client.post(CHAT, json=chat_body(n=4, seed=7))).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 4 * 13
    assert body["usage"]["prompt_tokens"] == NUM_CHAT_TOKENS
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    engine.requests.clear()
    await client.post(CHAT, json=chat_body(n=4, seed=7))
    assert [request.sampling.seed for request in engine.requests] == seeds


async def test_several_prompts_are_numbered_prompt_by_prompt(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    body = completion_body(prompt=["a", "bc"], n=2, stream=True, stream_options={"include_usage": True})
    chunks = events((await client.post(COMPLETIONS, json=body)).text)
    texts: dict[int, str] = {}
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(4), "Hello, world")
    assert [len(request.prompt_token_ids) for request in engine.requests] == [1, 1, 2, 2]
    assert chunks[-1]["usage"]["prompt_tokens"] == 3
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]], [[5, 6], [7]]])
async def test_token_ids_reach_the_engine_as_they_are(
    client: httpx.AsyncClient, engine: SpokenEngine, prompt: list[object]
) -> None:
    assert (await client.post(COMPLETIONS, json=completion_body(prompt=prompt))).status_code == 200
    assert engine.requests[0].prompt_token_ids == (5, 6)


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, engine: SpokenEngine) -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "6": 2.5},
        "min_tokens": 2,
        "max_tokens": 20,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "seed": -5,
        "speculation": "tree-8",
    }
    response = await client.post(CHAT, json=chat_body(**fields))
    assert response.status_code == 200, response.text
    sampling = engine.requests[0].sampling
    for name, value in fields.items():
        expected = {"logit_bias": ((5, -100.0), (6, 2.5)), "stop_token_ids": (9,)}.get(name, value)
        assert getattr(sampling, name) == expected, name


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "nobody_knows": [1]},
        {"tools": [], "tool_choice": "none", "logprobs": False, "response_format": {"type": "text"}},
        {"temperature": None, "n": None, "stop": None, "stream": None, "ignore_eos": None, "seed": None},
        {"top_k": -1},
    ],
)
async def test_fields_that_ask_for_nothing_are_taken(
    client: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    response = await client.post(CHAT, json=chat_body(**fields))
    assert response.status_code == 200, response.text


async def test_content_parts_are_joined_and_developer_is_system(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    await client.post(CHAT, json=chat_body(messages=messages))
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_token_ids)
    assert prompt == "system\ns\nuser\nab\nassistant\n"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_line_ends_of_unicode_do_not_cut_an_event(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool
) -> None:
    engine.text = "a\u2028b\u2029c\x85d\ne"
    response = await client.post(CHAT, json=chat_body(stream=is_stream))
    lines = list(response.iter_lines())  # as many clients read a stream
    if not is_stream:
        assert lines == [response.text]
        assert response.json()["choices"][0]["message"]["content"] == engine.text
        return
    assert all(line == "" or line.startswith("data: ") for line in lines)
    chunks = events(response.text)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == engine.text


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/version"])
async def test_head_is_answered_as_get(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.head(path)).status_code == 200


async def test_error_inside_a_stream_is_an_event(client: httpx.AsyncClient, engine: SpokenEngine) -> None:
    engine.failure = SequenceDelta(
        "r", (), 0, FinishReason.ERROR, 2, 0, 0, 0, message="logits are not finite"
    )
    response = await client.post(CHAT, json=chat_body(stream=True))
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert last["error"]["message"] == "logits are not finite"
    assert last["error"]["code"] == "step_failed"


async def test_error_of_a_whole_answer_is_a_status(client: httpx.AsyncClient, engine: SpokenEngine) -> None:
    engine.failure = SequenceDelta(
        "r", (), 0, FinishReason.ERROR, 2, 0, 0, 0, message="logits are not finite"
    )
    response = await client.post(CHAT, json=chat_body(n=3))
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert not engine.running


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_client_that_leaves_a_stream_ends_its_sequences(
    application: FastAPI, engine: SpokenEngine, num_choices: int
) -> None:
    engine.num_steps_before_stall = 2
    body = json.dumps(chat_body(stream=True, n=num_choices)).encode()
    inbox: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[dict[str, object]] = []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    call = asyncio.create_task(application(scope, inbox.get, send))
    while len(engine.running) < num_choices or len(sent) < 2:
        await asyncio.sleep(0.001)
    inbox.put_nowait({"type": "http.disconnect"})
    await asyncio.wait_for(call, 2)
    assert not engine.running
    assert len(engine.aborted) == num_choices


async def test_client_that_leaves_before_a_whole_answer_ends_its_sequence(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    engine.num_steps_before_stall = 1
    call = asyncio.create_task(client.post(CHAT, json=chat_body()))
    while not engine.running:
        await asyncio.sleep(0.001)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not engine.running


async def test_models_health_and_version_answer(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card == (await client.get("/v1/models/tiny")).json()
    assert listed == (await client.get("/v1/models/")).json()
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
    health = await client.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert (await client.get("/version")).json() == {"version": "0.1.0"}


async def test_last_message_of_the_assistant_is_continued_where_asked_for(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, "}]
    response = await client.post(CHAT, json=chat_body(messages=messages, continue_final_message=True))
    assert response.status_code == 200, response.text
    await client.post(CHAT, json=chat_body(messages=messages))
    await client.post(CHAT, json=chat_body(messages=messages, add_generation_prompt=False))
    prompts = [
        engine.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        for request in engine.requests
    ]
    begin = "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\none, "
    assert prompts == [
        begin,
        f"{begin}<|im_end|>\n<|im_start|>assistant\n",
        f"{begin}<|im_end|>\n",
    ]
