"""Locust's figures of a real server against those of a client that shares no code with it.

Beside other streams a first token waits for their steps, by 60 ms more or less: of two clients one after the
other 200 answers each would differ by 3% by chance. So there the other client relays Locust's own requests
and times them.

For a quiet machine with the default model pulled: `python -m pytest -m slow tests/e2e/test_load_client.py`.
"""

import asyncio
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from loadtest.prompts import CLASSES, Prompt, cycle
from loadtest.record import read_records
from loadtest.self_check import run_locust
from tests.app.harness import free_port, serving
from tests.e2e.server import START_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOLERANCE = 0.03


@dataclass(frozen=True)
class Load:
    """What each client does in a round, and what is compared."""

    num_streams: int
    num_requests: int
    max_tokens: int
    num_rounds: int
    figures: tuple[str, ...]


CROWD = Load(4, 4, 48, 4, ("first", "per_token", "end_to_end"))
ALONE = Load(1, 12, 16, 12, ("first", "per_token", "end_to_end"))


@dataclass(frozen=True)
class Figures:
    """Seconds of each answer, in the order they ended."""

    first: list[float]
    per_token: list[float]
    end_to_end: list[float]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "serve.txt"
    port = free_port()
    with log.open("w") as out:
        command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port)]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while "serving smollm2 at" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def body_of(prompt: Prompt, max_tokens: int) -> dict[str, object]:
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def timed(client: httpx.AsyncClient, body: dict[str, object], figures: Figures) -> AsyncIterator[str]:
    """Yield the lines of an answer as they come; before the last event its times are put into `figures`."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    counts: list[int] = []
    sent = loop.time()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if event["choices"] and event["usage"]["completion_tokens"] > (counts[-1] if counts else 0):
                    times.append(loop.time())
                    counts.append(event["usage"]["completion_tokens"])
            elif line == "data: [DONE]":
                figures.end_to_end.append(loop.time() - sent)
                figures.first.append(times[0] - sent)
                figures.per_token.append((times[-1] - times[0]) / (counts[-1] - counts[0]))
            yield line


async def ask(client: httpx.AsyncClient, prompt: Prompt, max_tokens: int, figures: Figures) -> None:
    async for _ in timed(client, body_of(prompt, max_tokens), figures):
        pass


@contextmanager
def relay(url: str, figures: Figures) -> Iterator[str]:
    """Yield the address of a server that passes chats on to `url` and times them."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            yield {"client": client}

    async def pass_on(request: Request) -> StreamingResponse:
        lines = timed(request.state.client, await request.json(), figures)
        return StreamingResponse((f"{line}\n" async for line in lines), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", pass_on, methods=["POST"])], lifespan=lifespan)
    with serving(app) as address:
        yield address


async def closed_loop(url: str, load: Load) -> Figures:
    """Ask as Locust's users do: stream k begins with the k-th prompt."""
    figures = Figures([], [], [])
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def stream(idx: int) -> None:
            for prompt in islice(cycle(list(CLASSES), start=idx), load.num_requests):
                await ask(client, prompt, load.max_tokens, figures)

        await asyncio.gather(*(stream(idx) for idx in range(load.num_streams)))
    return figures


def locust_loop(url: str, path: Path, load: Load) -> Figures:
    streams = ["-u", str(load.num_streams), "-r", str(load.num_streams), "--requests", str(load.num_requests)]
    run_locust(url, path, [*streams, "--max-tokens", str(load.max_tokens)])
    records = list(read_records([path]))
    assert [record.error for record in records] == [None] * (load.num_streams * load.num_requests)
    return Figures(
        [record.time_to_first_token for record in records],
        [record.time_per_output_token for record in records],
        [record.end_to_end for record in records],
    )


def assert_equal(found: dict[str, list[Figures]], names: tuple[str, ...]) -> None:
    for name in names:
        left, right = (
            statistics.median(value for run in found[client] for value in getattr(run, name))
            for client in ("locust", "asyncio")
        )
        assert left == pytest.approx(right, rel=TOLERANCE), name


def test_locust_agrees_with_an_independent_client_about_the_same_requests(url, tmp_path):
    asyncio.run(closed_loop(url, CROWD))  # every prompt is then in the prefix cache
    found: dict[str, list[Figures]] = {"locust": [], "asyncio": []}
    for _ in range(CROWD.num_rounds):
        figures = Figures([], [], [])
        with relay(url, figures) as address:
            found["locust"].append(locust_loop(address, tmp_path / "load.jsonl", CROWD))
        assert len(figures.first) == CROWD.num_streams * CROWD.num_requests
        found["asyncio"].append(figures)
    assert_equal(found, CROWD.figures)


def test_locust_agrees_with_an_independent_client_that_takes_turns_with_it(url, tmp_path):
    asyncio.run(closed_loop(url, ALONE))
    found: dict[str, list[Figures]] = {"locust": [], "asyncio": []}
    for idx in range(ALONE.num_rounds):
        for name in ("locust", "asyncio") if idx % 2 else ("asyncio", "locust"):
            found[name].append(
                locust_loop(url, tmp_path / "load.jsonl", ALONE)
                if name == "locust"
                else asyncio.run(closed_loop(url, ALONE))
            )
    assert_equal(found, ALONE.figures)
