"""Who may call: API keys from a file or the environment, pages of other origins, and no more than fits."""

import asyncio
import traceback
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import openai
import pytest

from app.api_keys import ENVIRONMENT_VARIABLE, ApiKeys, load_api_keys
from app.chat import ChatTemplate
from app.choices import Limits
from app.ingress import FrontDoor
from app.tokenizer import Tokenizer
from engine import CapacityError, ConfigError, Request, SequenceDelta
from tests.app.harness import SpokenEngine, chat_body, client_of, completion_body, make_application

CHAT = "/v1/chat/completions"


@pytest.fixture
def template(model_folder: Path) -> ChatTemplate:
    return ChatTemplate(model_folder)


@pytest.fixture
def guarded(engine: SpokenEngine, tokenizer: Tokenizer, template: ChatTemplate) -> httpx.AsyncClient:
    door = FrontDoor(100_000, ("https://page.example",), ApiKeys(["secret", "andere-ключ"]))
    return client_of(make_application(engine, tokenizer, template, door=door))


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer Secret",
        "Bearer secret2",
        "Bearer secre",
        "Basic secret",
        "secret",
        "Bearer secret, Bearer secret",
        b"Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", CHAT), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/nothing"), ("GET", "//health")],
)
async def test_call_without_a_known_key_is_refused(
    guarded: httpx.AsyncClient, engine: SpokenEngine, method: str, path: str, value: str | bytes | None
) -> None:
    headers = {} if value is None else {"authorization": value}
    response = await guarded.request(method, path, headers=headers, json=chat_body())
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert engine.requests == []


async def test_key_given_twice_is_refused(guarded: httpx.AsyncClient) -> None:
    headers = [("authorization", "Bearer secret"), ("authorization", "Bearer x")]
    assert (await guarded.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("value", ["Bearer secret", "bearer  secret ", "Bearer andere-ключ".encode()])
async def test_known_key_lets_a_call_through(guarded: httpx.AsyncClient, value: str | bytes) -> None:
    response = await guarded.post(CHAT, headers={"authorization": value}, json=chat_body())
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics"])
async def test_probes_and_scrapers_need_no_key(guarded: httpx.AsyncClient, path: str) -> None:
    assert (await guarded.get(path)).status_code == 200


async def test_page_of_a_listed_origin_may_call_and_its_preflight_needs_no_key(
    guarded: httpx.AsyncClient,
) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = await guarded.options(CHAT, headers={"origin": "https://page.example"} | asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    refused = await guarded.post(CHAT, headers={"origin": "https://page.example"}, json=chat_body())
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example", "else a page sees no 401"
    other = await guarded.options(CHAT, headers={"origin": "https://evil.example"} | asked)
    assert "access-control-allow-origin" not in other.headers


async def test_without_the_option_no_page_may_call(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, headers={"origin": "https://page.example"}, json=chat_body())
    assert "access-control-allow-origin" not in response.headers


def test_keys_come_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n\n  one \ntwo\n")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "three, four,")
    keys = load_api_keys(path)
    assert all(keys.allows(key) for key in (b"one", b"two", b"three", b"four"))
    assert not any(keys.allows(key) for key in (b"", b"# of the team", b"three, four,"))
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert load_api_keys(None).is_empty


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe"])
def test_key_file_without_keys_does_not_open_the_server(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        load_api_keys(path)


def test_no_dump_shows_a_key() -> None:
    keys = ApiKeys(["secret"])
    try:
        raise RuntimeError(keys)
    except RuntimeError:
        assert "secret" not in traceback.format_exc() + repr(keys)
    assert b"secret" not in b"".join(keys._digests)


async def test_prompt_beyond_the_limit_is_refused_by_name(
    engine: SpokenEngine, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    limits = Limits(64, max_prompt_tokens=5)
    async with client_of(make_application(engine, tokenizer, template, limits)) as client:
        fits = await client.post("/v1/completions", json=completion_body(prompt=["12345", [7] * 5]))
        assert fits.status_code == 200
        response = await client.post("/v1/completions", json=completion_body(prompt="123456"))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("is_stream", [True, False])
async def test_call_beyond_the_limit_is_told_when_to_come_back(
    engine: SpokenEngine, tokenizer: Tokenizer, template: ChatTemplate, is_stream: bool
) -> None:
    limits = Limits(64, max_concurrent_calls=2)
    engine.num_steps_before_stall = 1
    async with client_of(make_application(engine, tokenizer, template, limits)) as client:
        calls = [asyncio.create_task(client.post(CHAT, json=chat_body())) for _ in range(2)]
        while len(engine.running) < 2:
            await asyncio.sleep(0.001)
        refused = await client.post(CHAT, json=chat_body(stream=is_stream))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        engine.num_steps_before_stall = None
        assert (await client.post(CHAT, json=chat_body())).status_code == 200


async def test_queue_of_an_engine_that_says_nothing_is_bounded(
    engine: SpokenEngine, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    engine.num_steps_before_stall = 0  # as a core that hangs: it refuses nobody either
    max_open = engine.facts.max_num_seqs + 4
    async with client_of(make_application(engine, tokenizer, template, Limits(4))) as client:
        calls = [asyncio.create_task(client.post(CHAT, json=chat_body(n=4))) for _ in range(max_open // 4)]
        while len(engine.running) < max_open:
            await asyncio.sleep(0.001)
        refused = await client.post(CHAT, json=chat_body())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        impossible = await client.post(CHAT, json=chat_body(n=5))
        assert impossible.status_code == 429, "whoever comes now must wait"
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert not engine.running
        assert (await client.post(CHAT, json=chat_body(n=5))).status_code == 400
        engine.num_steps_before_stall = None
        assert (await client.post(CHAT, json=chat_body(n=4))).status_code == 200


async def test_official_client_comes_back_by_itself_when_the_server_was_full(
    engine: SpokenEngine, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    engine.start_error = CapacityError("the queue is full")
    async with client_of(make_application(engine, tokenizer, template)) as http:
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="none", http_client=http, max_retries=2
        )
        call = asyncio.create_task(client.chat.completions.create(**chat_body()))
        while not engine.requests:
            await asyncio.sleep(0.001)
        start = asyncio.get_running_loop().time()
        engine.start_error = None
        answer = await call
    assert answer.choices[0].message.content == "Hello, world"
    assert len(engine.requests) == 2
    assert asyncio.get_running_loop().time() - start > 0.7, "it waits as long as Retry-After says"


@pytest.mark.parametrize("refused", [0, 1, 2])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_call_that_is_refused_in_part_is_refused_before_it_begins(
    engine: SpokenEngine, tokenizer: Tokenizer, template: ChatTemplate, refused: int, is_stream: bool
) -> None:
    class PartlyFull(SpokenEngine):
        async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
            if request.request_id.endswith(f"-{refused}"):
                raise CapacityError("the queue is full")
            async for delta in super().generate(request):
                yield delta

    full = PartlyFull(tokenizer)
    async with client_of(make_application(full, tokenizer, template)) as client:
        response = await client.post(CHAT, json=chat_body(n=3, stream=is_stream))
    assert response.status_code == 429
    assert not full.running
