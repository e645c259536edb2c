"""`eyas serve` from outside: a tiny random model behind Ray Serve, asked by the official client.

The server is shared by all tests of this folder.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import openai
import pytest

from tests.app.harness import events
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

NUM_TOKENS = 200


def stream_body(seed: int, **fields: object) -> dict[str, object]:
    body = {
        "model": "tiny",
        "prompt": [10, 20, 30, seed + 40],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | fields


async def stream_pieces(client: httpx.AsyncClient, url: str, body: dict[str, object]) -> AsyncIterator[str]:
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for piece in response.aiter_text():
            yield piece


async def read_stream(
    client: httpx.AsyncClient, url: str, body: dict[str, object]
) -> list[dict[str, object]]:
    return events("".join([piece async for piece in stream_pieces(client, url, body)]))


def scrape(url: str) -> dict[str, float]:
    """Return the samples of /metrics without model and replica labels."""
    samples = {}
    for line in httpx.get(f"{url}/metrics", timeout=20).text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[re.sub(r'(model|replica)="[^"]*",?', "", name).replace(",}", "}")] = float(value)
    return samples


def num_blocks(samples: dict[str, float], state: str) -> float:
    return samples[f'eyas_kv_blocks{{state="{state}"}}']


def until(is_true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def test_client_that_polls_during_the_start_reads_no_foreign_words(server: Server) -> None:
    refused = [answer for answer in server.answers_at_start if answer.status_code != 200]
    assert refused, "the port opened only when everything was ready: the poll saw nothing"
    for answer in refused:
        assert answer.status_code == 503
        # From the proxy while no route is there, from the ingress while its replica still loads.
        assert answer.json()["error"]["code"] in ("server_unavailable", "engine_unavailable")
        assert int(answer.headers["retry-after"]) > 0


async def test_official_client_gets_the_same_chat_streamed_and_whole(server: Server) -> None:
    async with server.client() as client:
        arguments = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_completion_tokens": 40,
            "seed": 3,
            "extra_body": {"ignore_eos": True},
        }
        whole = await client.chat.completions.create(**arguments)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 40
        stream = await client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage == whole.usage.model_copy(
            update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
        )


async def test_official_client_gets_the_same_completion_streamed_and_whole(server: Server) -> None:
    async with server.client() as client:
        arguments = {"model": "tiny", "prompt": ["ab", "cd"], "n": 2, "max_tokens": 20, "seed": 5}
        whole = await client.completions.create(**arguments)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        texts = dict.fromkeys(range(4), "")
        async for chunk in await client.completions.create(**arguments, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == {choice.index: choice.text for choice in whole.choices}


async def test_official_client_raises_the_right_errors(server: Server) -> None:
    async with server.client() as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="x")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="tiny", prompt="x" * 2000, stream=True)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as tree:
            await client.completions.create(model="tiny", prompt="x", extra_body={"speculation": "oak"})
        assert tree.value.param == "speculation"
        # The router sees a call before the replica checks it: where it raises, nobody answers.
        with pytest.raises(openai.BadRequestError, match="token") as token:
            await client.completions.create(model="tiny", prompt=[2**31], timeout=20)
        assert token.value.param == "prompt"
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_sixteen_streams_equal_the_same_answers_alone(server: Server) -> None:
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=32)) as client:
        together = await asyncio.gather(
            *(read_stream(client, server.url, stream_body(seed)) for seed in range(16))
        )
        alone = [await read_stream(client, server.url, stream_body(seed)) for seed in (0, 15)]
    for chunks in together:
        assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    for left, right in ((together[0], alone[0]), (together[15], alone[1])):
        assert text_of(left) == text_of(right)


def text_of(chunks: list[dict[str, object]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


async def test_clients_that_leave_give_their_blocks_back_and_the_others_end(server: Server) -> None:
    before = await asyncio.to_thread(scrape, server.url)
    total = sum(num_blocks(before, state) for state in ("free", "held", "cached"))
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=32)) as client:

        async def leave_early(seed: int) -> None:
            num_pieces = 0
            async for _ in stream_pieces(client, server.url, stream_body(seed, max_tokens=900)):
                num_pieces += 1
                if num_pieces == 3:
                    return

        def all_arrived() -> bool:
            arrived = scrape(server.url)["eyas_prompt_tokens_total{}"] - before["eyas_prompt_tokens_total{}"]
            return arrived == 18 * 4

        async def give_up_waiting(seed: int) -> None:
            body = stream_body(seed, max_tokens=900, stream=False, stream_options=None)
            waiting = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body))
            await asyncio.to_thread(until, all_arrived, 20)  # who leaves before ends no sequence
            assert not waiting.done(), "the answer was there before its client could give it up"
            waiting.cancel()

        survivors = [
            asyncio.create_task(read_stream(client, server.url, stream_body(seed))) for seed in range(8)
        ]
        await asyncio.gather(
            *(leave_early(seed) for seed in range(100, 108)),
            *(give_up_waiting(seed) for seed in range(200, 202)),
        )
        for chunks in await asyncio.gather(*survivors):
            assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS

    def is_idle() -> bool:
        samples = scrape(server.url)
        return samples["eyas_requests_running{}"] == 0 and samples["eyas_requests_waiting{}"] == 0

    await asyncio.to_thread(until, is_idle, 5)
    after = await asyncio.to_thread(scrape, server.url)
    assert num_blocks(after, "held") == 0
    assert sum(num_blocks(after, state) for state in ("free", "held", "cached")) == total
    finished, aborted = (
        after[name] - before[name]
        for name in ('eyas_sequences_total{outcome="finished"}', 'eyas_sequences_total{outcome="aborted"}')
    )
    assert (finished, aborted) == (8, 10)


async def test_answer_that_a_stop_string_ends_counts_as_finished(server: Server) -> None:
    def ends() -> dict[str, float]:
        samples = scrape(server.url)
        return {
            name: samples[f'eyas_sequences_total{{outcome="{name}"}}'] for name in ("finished", "aborted")
        }

    async with httpx.AsyncClient(timeout=60) as client:
        text = text_of(await read_stream(client, server.url, stream_body(7, max_tokens=60)))
        before = await asyncio.to_thread(ends)
        body = stream_body(7, max_tokens=400, stop=[text[20:26]])
        stopped = await read_stream(client, server.url, body)
    assert [chunk["choices"][0]["finish_reason"] for chunk in stopped if chunk["choices"]][-1] == "stop"
    await asyncio.to_thread(until, lambda: ends()["finished"] == before["finished"] + 1, 5)
    assert ends()["aborted"] == before["aborted"]


async def test_tokens_and_statistics_come_through_serve(server: Server) -> None:
    async with httpx.AsyncClient(timeout=60, base_url=server.url) as client:
        tokens = (await client.post("/tokenize", json={"prompt": "Hello"})).json()
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
        chat = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "?"}],
            "tools": [tool],
            "max_tokens": 5,
        }
        called = await client.post("/v1/chat/completions", json=chat)
        api = (await client.get("/openapi.json")).json()
        body = stream_body(3, prompt="Hello", echo=True, speculation_stats=True, stream=False)
        body["speculation"] = "tree-8"  # a random draft would soon be left alone
        answer = (await client.post("/v1/completions", json=body | {"stream_options": None})).json()
    assert (tokens["count"], text) == (5, {"prompt": "Hello"})
    assert called.status_code == 200, called.text
    assert called.json()["usage"]["prompt_tokens"] > 300, "the tools are in the prompt"
    assert "/v1/chat/completions" in api["paths"]
    assert answer["choices"][0]["text"].startswith("Hello")
    assert answer["usage"]["prompt_tokens"] == 5
    stats = answer["metrics"]["speculative_decoding"]
    assert 0 < stats["num_accepted_draft_tokens"] < stats["num_draft_tokens"]
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"]


async def test_request_id_of_a_client_comes_back_once(server: Server) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        given = await client.get(f"{server.url}/v1/models", headers={"x-request-id": "mine-1"})
        made = await client.get(f"{server.url}/v1/models")
    assert given.headers.get_list("x-request-id") == ["mine-1"]
    assert len(made.headers["x-request-id"]) > 8


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGKILL, "engine core died cause="), (signal.SIGSTOP, "the engine core hangs")],
)
async def test_core_that_dies_or_hangs_ends_its_streams_with_one_error_and_is_replaced(
    server: Server, number: signal.Signals, cause: str
) -> None:
    told_before = len(server.log.read_text())
    core = core_of(server.process.pid)
    async with httpx.AsyncClient(timeout=60) as client:
        pieces = []
        # Seconds of work, so that it is under way however late this process is told of the third piece.
        async for piece in stream_pieces(client, server.url, stream_body(1, max_tokens=1000, n=16)):
            pieces.append(piece)
            if len(pieces) == 3:
                os.kill(core, number)
        *_, last = events("".join(pieces))
        assert last["error"]["code"] == "engine_unavailable"
        assert last["error"]["message"].endswith("is being replaced: send the request again")

    def is_back() -> bool:
        body = stream_body(1, max_tokens=5)
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200

    def told() -> str:
        return server.log.read_text()[told_before:]

    await asyncio.to_thread(until, is_back, 90)
    await asyncio.to_thread(until, lambda: "1 of 1 server replicas serve again" in told(), 10)
    assert not Path(f"/proc/{core}").exists(), "the old core holds its memory"
    failed = re.search(r"^1 of 1 server replicas failed and .* in (\S+)$", told(), re.MULTILINE)
    assert failed is not None
    logs = [path.read_text() for path in Path(failed[1]).glob("replica_*llm-server*.log")]
    assert any(cause in text and "replica ends cause=" in text for text in logs)


def core_of(server_pid: int) -> int:
    """Return the engine core among the descendants of the server's process."""
    parents, cores = {}, []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
                command = (folder / "cmdline").read_bytes()
            except OSError:  # it ended while we looked
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
            if b"engine.core" in command:
                cores.append(int(folder.name))

    def descends(pid: int) -> bool:
        while pid in parents and pid != server_pid:
            pid = parents[pid]
        return pid == server_pid

    (core,) = [pid for pid in cores if descends(pid)]
    return core
