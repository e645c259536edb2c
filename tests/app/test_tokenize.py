"""/tokenize and /detokenize: the engine's own tokens, in the shapes of vLLM, and clear refusals."""

import httpx
import pytest

from app.tokenizer import Tokenizer
from tests.app.harness import SpokenEngine, chat_body


async def post(client: httpx.AsyncClient, path: str, **body: object) -> dict[str, object]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", ["Hello", "", "naïve 🦅", "x" * 9000])
async def test_text_goes_to_tokens_and_back(
    client: httpx.AsyncClient, tokenizer: Tokenizer, text: str
) -> None:
    answer = await post(client, "/tokenize", model="tiny", prompt=text)
    token_ids = list(tokenizer.encode(text, add_special_tokens=True))
    assert answer == {
        "count": len(token_ids),
        "max_model_len": 512,
        "tokens": token_ids,
        "token_strs": None,
    }
    assert await post(client, "/detokenize", tokens=token_ids) == {"prompt": text}


async def test_chat_has_the_tokens_that_the_engine_gets(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    await client.post("/v1/chat/completions", json=chat_body())
    messages = chat_body()["messages"]
    answer = await post(client, "/tokenize", messages=messages)
    assert tuple(answer["tokens"]) == engine.requests[0].prompt_token_ids
    bare = await post(client, "/tokenize", messages=messages, add_generation_prompt=False)
    assert answer["tokens"][: bare["count"]] == bare["tokens"]
    assert bare["count"] < answer["count"]
    text = await post(client, "/detokenize", tokens=answer["tokens"])
    assert text["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_spellings_are_given_where_asked_for(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/tokenize", prompt="<|im_start|>é", return_token_strs=True)
    assert answer["token_strs"] == ["<|im_start|>", "Ã", "©"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_fault_is_named(
    client: httpx.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "field"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})]
)
async def test_another_model_is_refused(
    client: httpx.AsyncClient, path: str, field: dict[str, object]
) -> None:
    response = await client.post(path, json={"model": "other"} | field)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
