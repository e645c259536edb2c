"""Plays rounds of concurrent streams, on an engine or over HTTP, in a process of its own.

Reads one JSON array of asks a line and answers with one JSON object: the seconds until all streams had ended,
and until half of them had begun. It parses no event, so that the client is not what is measured. Which rounds
are played, and what they are compared with, is left to `serve_overhead`. Run by it:

python -m benchmarks.stream_player http URL | core CONFIG | engine CONFIG
"""

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from app.call import Message
from app.chat import ChatTemplate
from app.config import load_config
from app.tokenizer import Tokenizer
from benchmarks.timed_core import install
from engine import AsyncEngine, Engine, EngineConfig, Request, SamplingParams

READ_BYTES, TAIL_BYTES = 65536, 2048
SETTLE_SECONDS = 0.2  # in which a server lets go of streams that were left


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


@dataclass(slots=True)
class Heard:
    """What the streams of a round brought: the pieces they came in, and how long each first one took."""

    num_pieces: int = 0
    first_seconds: list[float] = field(default_factory=list)


class Player(Protocol):
    """A side of the comparison."""

    async def num_tokens(self) -> int:
        """Return how many tokens the engine has emitted so far."""

    async def play(self, ask: Ask, heard: Heard) -> None: ...


class HttpPlayer:
    """Streams of a server, each on a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port or 80

    async def num_tokens(self) -> int:
        reader, writer = await self._send("GET", "/metrics", b"")
        page = (await reader.read()).decode()
        writer.close()
        lines = [line for line in page.splitlines() if line.startswith("eyas_generation_tokens_total{")]
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)

    async def play(self, ask: Ask, heard: Heard) -> None:
        start = time.perf_counter()
        reader, writer = await self._send("POST", "/v1/chat/completions", json.dumps(ask.body()).encode())
        try:
            tail, is_first = b"", True
            while b"data: [DONE]" not in tail and (piece := await reader.read(READ_BYTES)):
                if is_first:
                    heard.first_seconds.append(time.perf_counter() - start)
                tail, is_first = (tail + piece)[-TAIL_BYTES:], False
                heard.num_pieces += 1
        finally:
            writer.close()
        if b'"completion_tokens":%d,' % ask.num_tokens not in tail:
            raise RuntimeError(f"a stream was cut: {tail.decode(errors='replace')[-600:]}")

    async def _send(
        self, method: str, path: str, body: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        return reader, writer


class CorePlayer:
    """Streams of an engine core process, without text and HTTP."""

    def __init__(self, engine: AsyncEngine, prompts: "Prompts") -> None:
        self._engine, self._prompts = engine, prompts

    async def num_tokens(self) -> int:
        return (await self._engine.stats()).num_output_tokens

    async def play(self, ask: Ask, heard: Heard) -> None:
        start, is_first, num_tokens = time.perf_counter(), True, 0
        async with aclosing(self._engine.generate(self._prompts.request(ask))) as deltas:
            async for delta in deltas:
                if is_first:
                    heard.first_seconds.append(time.perf_counter() - start)
                is_first = False
                num_tokens += len(delta.token_ids)
                heard.num_pieces += 1
        assert num_tokens == ask.num_tokens, num_tokens


class LoopPlayer:
    """Streams of an engine in this process, stepped between the other tasks."""

    def __init__(self, engine: Engine, prompts: "Prompts") -> None:
        self._engine, self._prompts = engine, prompts
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._num_tokens = self._num_pieces = 0
        self._stepping: asyncio.Task[None] | None = None

    async def num_tokens(self) -> int:
        return self._num_tokens

    async def play(self, ask: Ask, heard: Heard) -> None:
        request = self._prompts.request(ask)
        self._engine.add(request)
        end = self._ends[request.request_id] = asyncio.get_running_loop().create_future()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            await end
        finally:
            self._engine.abort(request.request_id)
            del self._ends[request.request_id]
        heard.num_pieces += ask.num_tokens
        heard.first_seconds.append(0.0)

    async def _step(self) -> None:
        while self._engine.has_work:
            for delta in self._engine.step():
                self._num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None and delta.request_id in self._ends:
                    self._ends[delta.request_id].set_result(None)
            await asyncio.sleep(0)


class Prompts:
    """Makes an engine's requests of asks, as a server would."""

    def __init__(self, model: Path) -> None:
        self._tokenizer, self._template = Tokenizer(model), ChatTemplate(model)
        self._known: dict[str, tuple[int, ...]] = {}
        self._num_made = 0

    def request(self, ask: Ask) -> Request:
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
        yield LoopPlayer(Engine.load(config), prompts)
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
        order = json.loads(line)
        chains = [[Ask(**fields) for fields in chain] for chain in order["chains"]]
        say(await play_window(player, chains, order["warm_seconds"], order["seconds"]))


async def play_window(
    player: Player, chains: list[list[Ask]], warm_seconds: float, seconds: float
) -> dict[str, float]:
    """Keep a stream of each chain busy, and count the tokens of `seconds` behind the first ones."""
    heard = Heard()

    async def repeat(chain: list[Ask]) -> None:
        for ask in itertools.cycle(chain):
            await player.play(ask, heard)

    streams = [asyncio.create_task(repeat(chain)) for chain in chains]
    try:
        counts = []
        for pause in (warm_seconds, seconds):
            await asyncio.wait(streams, timeout=pause, return_when=asyncio.FIRST_EXCEPTION)
            counts.append((time.perf_counter(), await player.num_tokens(), heard.num_pieces))
        heard.first_seconds.append(math.inf)  # the median stands where none has begun
    finally:
        for stream in streams:
            stream.cancel()
        ends = await asyncio.gather(*streams, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    await asyncio.sleep(SETTLE_SECONDS)
    (start, first, pieces), (stop, last, all_pieces) = counts
    return {
        "seconds": stop - start,
        "num_tokens": last - first,
        "num_pieces": all_pieces - pieces,
        "first_seconds": statistics.median_low(heard.first_seconds),
    }


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
