"""A stream whose first token takes long gets comments, and nothing else of it changes."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from app.chat import ChatTemplate
from app.ingress import FrontDoor
from app.keep_alive import COMMENT, with_keep_alive
from app.tokenizer import Tokenizer
from engine import FinishReason, Request, SequenceDelta
from tests.app.harness import SpokenEngine, chat_body, client_of, events, make_application

CHAT = "/v1/chat/completions"


class SlowEngine(SpokenEngine):
    """Thinks for five comments before its first step."""

    async def _say(self, request: Request) -> AsyncIterator[SequenceDelta]:
        await asyncio.sleep(0.11)
        async for delta in super()._say(request):
            yield delta


@pytest.fixture
def slow_engine(tokenizer: Tokenizer) -> SlowEngine:
    return SlowEngine(tokenizer)


@pytest.fixture
async def slow(slow_engine: SlowEngine, tokenizer: Tokenizer, model_folder: Path) -> httpx.AsyncClient:
    door = FrontDoor(100_000, keep_alive_s=0.02)
    return client_of(make_application(slow_engine, tokenizer, ChatTemplate(model_folder), door=door))


async def test_comments_stand_before_the_first_event_only(slow: httpx.AsyncClient) -> None:
    response = await slow.post(CHAT, json=chat_body(stream=True))
    comment = COMMENT.decode()
    num_comments = response.text.count(comment)
    assert 2 <= num_comments <= 5
    assert response.text.startswith(comment * num_comments)
    chunks = events(response.text.removeprefix(comment * num_comments))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_official_client_reads_past_comments(slow: httpx.AsyncClient) -> None:
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=slow)
    stream = await client.chat.completions.create(**chat_body(), stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello, world"


async def test_error_after_a_comment_is_an_event(slow: httpx.AsyncClient, slow_engine: SlowEngine) -> None:
    slow_engine.failure = SequenceDelta("r", (), 0, FinishReason.ERROR, 1, 0, 0, 0, message="no numbers")
    slow_engine.run_len = 1
    response = await slow.post(CHAT, json=chat_body(stream=True))
    assert response.status_code == 200
    *_, last = events(response.text[response.text.index("data: ") :])
    assert last["error"]["message"] == "no numbers"


async def test_whole_answer_gets_no_comment(slow: httpx.AsyncClient) -> None:
    response = await slow.post(CHAT, json=chat_body())
    assert json.loads(response.content)["object"] == "chat.completion"


async def test_refusal_that_comes_at_once_keeps_its_status(slow: httpx.AsyncClient) -> None:
    assert (await slow.post(CHAT, json=chat_body(stream=True, model="other"))).status_code == 404


async def test_reader_that_leaves_while_it_waits_closes_the_source() -> None:
    is_closed = asyncio.Event()

    async def source() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b"never"
        finally:
            is_closed.set()

    messages = with_keep_alive(source(), 0.001)
    assert await anext(messages) == COMMENT
    await messages.aclose()
    assert is_closed.is_set()


async def test_empty_source_ends() -> None:
    async def source() -> AsyncGenerator[bytes, None]:
        for message in ():
            yield message

    assert [message async for message in with_keep_alive(source(), 1)] == []
