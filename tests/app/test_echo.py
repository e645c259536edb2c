"""Echo: each choice begins with its prompt, whatever the prompt's form, streamed or whole."""

import httpx
import pytest

from tests.app.harness import SpokenEngine, completion_body, events

PATH = "/v1/completions"


async def texts(client: httpx.AsyncClient, is_stream: bool, **fields: object) -> dict[int, str]:
    response = await client.post(PATH, json=completion_body(echo=True, stream=is_stream, **fields))
    assert response.status_code == 200, response.text
    bodies = events(response.text) if is_stream else [response.json()]
    found: dict[int, str] = {}
    for body in bodies:
        for choice in body["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


@pytest.mark.parametrize("is_stream", [True, False])
async def test_every_choice_begins_with_its_own_prompt(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool
) -> None:
    found = await texts(client, is_stream, prompt=["Öne: ", "Two: "], n=2)
    assert found == {
        0: "Öne: Hello, world",
        1: "Öne: Hello, world",
        2: "Two: Hello, world",
        3: "Two: Hello, world",
    }


@pytest.mark.parametrize("is_stream", [True, False])
async def test_token_ids_are_echoed_as_text_special_tokens_included(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool
) -> None:
    ids = engine.tokenizer.encode("<|im_start|>né", add_special_tokens=False)
    assert await texts(client, is_stream, prompt=list(ids)) == {0: "<|im_start|>néHello, world"}


@pytest.mark.parametrize("is_stream", [True, False])
async def test_prompt_can_be_echoed_and_not_continued(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool
) -> None:
    assert await texts(client, is_stream, prompt=["ab", "c"], max_tokens=0) == {0: "ab", 1: "c"}
    assert engine.requests == []
    whole = (await client.post(PATH, json=completion_body(echo=True, prompt="ab", max_tokens=0))).json()
    assert whole["choices"][0]["finish_reason"] == "length"
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (2, 0)


async def test_stop_string_is_not_looked_for_in_the_echo(client: httpx.AsyncClient) -> None:
    assert await texts(client, False, prompt="a wor", stop="wor") == {0: "a worHello, "}


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": 0, "echo": False}])
async def test_no_tokens_without_echo_is_refused(
    client: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    response = await client.post(PATH, json=completion_body(**fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"


async def test_echo_of_a_chat_is_refused(client: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "echo": True}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.json()["error"]["param"] == "echo"
