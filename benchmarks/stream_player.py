"""Plays rounds of concurrent streams, on an engine or over HTTP, in a process of its own.

Reads one JSON array of asks a line and answers with one JSON object: the seconds until all streams had ended,
and until half of them had begun. It parses no event, so that the client is not what is measured. Which rounds
are played, and what they are compared with, is left to `serve_overhead`. Run by it:

python -m benchmarks.stream_player http URL | core CONFIG | engine CONFIG
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from app.call import Message
from app.chat import ChatTemplate
from app.config import load_config
from app.tokenizer import Tokenizer
from benchmarks.timed_core import install
from engine import AsyncEngine, Engine, EngineConfig, FinishReason, Request, SamplingParams

READ_BYTES, TAIL_BYTES = 65536, 2048


@dataclass(frozen=True, slots=True)
class Ask:
    """One stream: a chat of one message, answered with exactly `num_tokens` tokens."""

    text: str
    num_tokens: int
    temperature: float
    seed: int
    speculation: str

    def body(self) -> dict[str, Any]:
        return {
            "model": "served",
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.num_tokens,
            "ignore_eos": True,
            "temperature": self.temperature,
            "seed": self.seed,
            "speculation": self.speculation,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.num_tokens,
            ignore_eos=True,
            seed=self.seed,
            speculation=self.speculation,
        )


@dataclass(frozen=True, slots=True)
class Times:
    """When a stream began to answer and when it ended, and in how many pieces it came."""

    first: float
    end: float
    num_pieces: int


class Player(Protocol):
    """A side of the comparison."""

    async def play(self, asks: list[Ask]) -> list[Times]: ...


class HttpPlayer:
    """Streams of a server, each on a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port or 80

    async def play(self, asks: list[Ask]) -> list[Times]:
        return await asyncio.gather(*map(self._stream, asks))

    async def _stream(self, ask: Ask) -> Times:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        body = json.dumps(ask.body()).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}:{self._port}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        first, tail, num_pieces = 0.0, b"", 0
        while b"data: [DONE]" not in tail and (piece := await reader.read(READ_BYTES)):
            first = first or time.perf_counter()
            tail = (tail + piece)[-TAIL_BYTES:]
            num_pieces += 1
        end = time.perf_counter()
        writer.close()
        if b'"completion_tokens":%d,' % ask.num_tokens not in tail:
            raise RuntimeError(f"a stream was cut: {tail.decode(errors='replace')[-600:]}")
        return Times(first, end, num_pieces)


class CorePlayer:
    """Streams of an engine core process, without text and HTTP."""

    def __init__(self, engine: AsyncEngine, prompts: "Prompts") -> None:
        self._engine, self._prompts = engine, prompts

    async def play(self, asks: list[Ask]) -> list[Times]:
        requests = self._prompts.requests(asks)
        return await asyncio.gather(*map(self._stream, requests))

    async def _stream(self, request: Request) -> Times:
        first, num_tokens, num_pieces = 0.0, 0, 0
        async for delta in self._engine.generate(request):
            first = first or time.perf_counter()
            num_tokens += len(delta.token_ids)
            num_pieces += 1
        assert num_tokens == request.sampling.max_tokens, num_tokens
        return Times(first, time.perf_counter(), num_pieces)


class EnginePlayer:
    """Streams of an engine in this process: the loop alone."""

    def __init__(self, engine: Engine, prompts: "Prompts") -> None:
        self._engine, self._prompts = engine, prompts

    async def play(self, asks: list[Ask]) -> list[Times]:
        return list(self._play(self._prompts.requests(asks)))

    def _play(self, requests: list[Request]) -> Iterator[Times]:
        first: dict[str, float] = {}
        num_pieces = dict.fromkeys((request.request_id for request in requests), 0)
        for request in requests:
            self._engine.add(request)
        while self._engine.has_work:
            for delta in self._engine.step():
                now = time.perf_counter()
                first.setdefault(delta.request_id, now)
                num_pieces[delta.request_id] += 1
                if delta.finish_reason is not None:
                    assert delta.finish_reason is FinishReason.LENGTH, delta
                    yield Times(first[delta.request_id], now, num_pieces[delta.request_id])


class Prompts:
    """Makes an engine's requests of asks, as a server would."""

    def __init__(self, model: Path) -> None:
        self._tokenizer, self._template = Tokenizer(model), ChatTemplate(model)
        self._known: dict[str, tuple[int, ...]] = {}
        self._num_made = 0

    def requests(self, asks: list[Ask]) -> list[Request]:
        return [self._request(ask) for ask in asks]

    def _request(self, ask: Ask) -> Request:
        if ask.text not in self._known:
            text = self._template.render([Message("user", ask.text)])
            self._known[ask.text] = self._tokenizer.encode(text, add_special_tokens=False)
        self._num_made += 1
        return Request(f"bare-{self._num_made}", self._known[ask.text], ask.sampling())


@asynccontextmanager
async def opened(kind: str, place: str, step_times: list[tuple[int, float]]) -> AsyncIterator[Player]:
    """Yield the player of one side, ready to play."""
    if kind == "http":
        yield HttpPlayer(place)
        return
    config: EngineConfig = load_config(Path(place), {}).engine_config()
    prompts = Prompts(config.model)
    if kind == "engine":
        if step_times:
            install(step_times)
        yield EnginePlayer(Engine.load(config), prompts)
        return
    engine = await AsyncEngine.start(config)
    try:
        yield CorePlayer(engine, prompts)
    finally:
        await engine.shutdown()


async def play_rounds(player: Player) -> None:
    """Answer each line of the standard input until it ends; the first line out says that all is ready."""
    say({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        asks = [Ask(**fields) for fields in json.loads(line)]
        start = time.perf_counter()
        times = await player.play(asks)
        say(
            {
                "seconds": max(item.end for item in times) - start,
                "first_seconds": statistics.median(item.first for item in times) - start,
                "num_tokens": sum(ask.num_tokens for ask in asks),
                "num_pieces": sum(item.num_pieces for item in times),
            }
        )


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def run(options: argparse.Namespace) -> None:
    async with opened(options.kind, options.place, json.loads(options.step_times)) as player:
        await play_rounds(player)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("http", "core", "engine"))
    parser.add_argument("place", help="the server's URL, or its configuration file")
    parser.add_argument("--step-times", default="[]", help="of an engine in this process without weights")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
