"""Storms a deployment with clients that vanish, read slowly, or are refused, and says what it left behind.

    python -m benchmarks.disconnect_storm --seconds 600

Most clients leave at a random point: inside their request, before the answer, inside it. Beside them some
read a few bytes at a time, and some are the official client, which waits as long as a 429 tells it to and
must be answered in the end. Prints one JSON object; the exit status is 1 where a limit under `holds` is not
met. Changes of a deployment under load are left to `serve_changes`. Run it alone on a machine.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai

from benchmarks.serve_changes import Plan, Site, blocks_are_free, running

MAX_GROWTH = 0.02  # of a process, from the second fifth of the storm to the last
NUM_SLOW, NUM_PATIENT = 8, 4
SLOW_BYTES, SLOW_SECONDS = 256, 0.1
PAUSE_SECONDS = 10.0  # between two lives of a client that vanishes, in the mean
MAX_RETRIES = 1000
SETTLE_SECONDS = 60.0
MAX_ANSWER_BYTES = 8000
# The processes whose memory counts, by a part of their command lines.
PROCESSES = {
    "replica": b"ServeReplica:eyas:llm-server",
    "ingress": b"ServeReplica:eyas:ingress",
    "proxy": b"ProxyActor",
    "core": b"engine.core",
}


@dataclass
class Storm:
    """One storm over a deployment, and what became of its clients."""

    site: Site
    seconds: float
    ends: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    num_early_retries: int = 0
    errors: list[str] = field(default_factory=list)
    memory: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    until: float = 0.0

    async def run(self) -> None:
        """Let clients come and go until the time is over; those that want their answer get it."""
        self.until = time.monotonic() + self.seconds
        plan = self.site.plan
        tasks = [self.vanish(seed) for seed in range(plan.num_streams)]
        tasks += [self.read_slowly(seed) for seed in range(NUM_SLOW)]
        tasks += [self.wait_patiently(seed) for seed in range(NUM_PATIENT)]
        await asyncio.gather(self.watch(), *tasks)

    async def vanish(self, seed: int) -> None:
        """Call again and again, and leave at a random point each time."""
        rng = random.Random(seed)  # noqa: S311 - chance, not secrets
        while True:
            pause = rng.expovariate(1 / PAUSE_SECONDS)
            if time.monotonic() + pause > self.until:
                return
            await asyncio.sleep(pause)
            request = self.request(rng.randrange(10_000))
            point = rng.choice(("in the request", "before the answer", "in the answer"))
            try:
                async with self.connection() as (reader, writer):
                    writer.write(
                        request[: rng.randrange(len(request))] if point == "in the request" else request
                    )
                    if point == "before the answer":
                        await asyncio.sleep(rng.random())
                    elif point == "in the answer":
                        self.statuses[await status_of(reader)] += 1
                        num_left = rng.randrange(MAX_ANSWER_BYTES)
                        while num_left > 0 and (piece := await reader.read(num_left)):
                            num_left -= len(piece)
                    if rng.random() < 0.5:
                        writer.transport.abort()  # a reset, where closing says good-bye
                self.ends[f"vanished {point}"] += 1
            except OSError as error:
                self.note("connection", error)

    async def read_slowly(self, seed: int) -> None:
        """Read whole answers a few bytes at a time."""
        while time.monotonic() < self.until:
            try:
                answer = await self.slow_answer(seed)
            except OSError as error:
                self.note("connection", error)
                continue
            if answer is None:
                await asyncio.sleep(1)
                continue
            is_whole = b"[DONE]" in answer and b'"error"' not in answer
            self.ends["slow and whole" if is_whole else "slow and cut"] += 1

    async def slow_answer(self, seed: int) -> bytes | None:
        """Return an answer up to its last event or its cut, None where the call is refused."""
        async with self.connection() as (reader, writer):
            writer.write(self.request(seed))
            status = await status_of(reader)
            self.statuses[status] += 1
            answer = b""
            while status == "200" and b"[DONE]" not in answer and (piece := await reader.read(SLOW_BYTES)):
                answer += piece
                await asyncio.sleep(SLOW_SECONDS)
        return answer if status == "200" else None

    async def wait_patiently(self, seed: int) -> None:
        """Ask by the official client, which retries by itself; see that it waits as long as it is told to."""
        refused_until = 0.0

        async def note_request(_: httpx.Request) -> None:
            self.num_early_retries += time.monotonic() < refused_until - 0.05

        async def note_response(response: httpx.Response) -> None:
            nonlocal refused_until
            self.statuses[f"{response.status_code} to the patient"] += 1
            refused_until = 0.0
            if response.status_code == 429:
                refused_until = time.monotonic() + float(response.headers["retry-after"])

        hooks = {"request": [note_request], "response": [note_response]}
        async with (
            httpx.AsyncClient(event_hooks=hooks, timeout=120) as transport,
            openai.AsyncOpenAI(
                base_url=f"{self.site.url}/v1", api_key="none", max_retries=MAX_RETRIES, http_client=transport
            ) as client,
        ):
            while time.monotonic() < self.until:
                try:
                    answer = await client.completions.create(
                        **self.fields(seed), extra_body={"ignore_eos": True}
                    )
                    is_whole = (
                        answer.usage is not None
                        and answer.usage.completion_tokens == self.site.plan.num_tokens
                    )
                    self.ends["patient and whole" if is_whole else "patient and cut"] += 1
                except openai.OpenAIError as error:
                    self.note("patient and failed", error)

    async def watch(self) -> None:
        """Note how much memory every process has, once a second."""
        while time.monotonic() < self.until:
            for name, size in resident().items():
                self.memory[name].append(size)
            await asyncio.sleep(1)

    def fields(self, seed: int) -> dict[str, Any]:
        prompt = [10, 20, 30, seed % 200 + 40]
        return {"model": "served", "prompt": prompt, "max_tokens": self.site.plan.num_tokens, "seed": seed}

    def request(self, seed: int) -> bytes:
        """Return the bytes of a call for a stream."""
        body = json.dumps(self.fields(seed) | {"ignore_eos": True, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nhost: storm\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect with buffers so small that a client that does not read is felt by the server."""
        place = urlsplit(self.site.url)
        plug = socket.socket()
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        plug.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(plug, (place.hostname, place.port))
        except OSError:
            plug.close()
            raise
        reader, writer = await asyncio.open_connection(sock=plug, limit=SLOW_BYTES)
        try:
            yield reader, writer
        finally:
            writer.close()

    def note(self, end: str, error: Exception) -> None:
        self.ends[end] += 1
        self.errors.append(repr(error)[:300])


async def status_of(reader: asyncio.StreamReader) -> str:
    """Return the status of an answer, empty where there is none."""
    return (await reader.readline()).decode().partition(" ")[2][:3]


def resident() -> dict[str, int]:
    """Return the resident bytes of the processes of our Ray."""
    found: dict[str, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            pages = int((folder / "statm").read_text().split()[1])
        except OSError:  # it ended while we looked
            continue
        if f"EYAS_CHANGES={os.getpid()}".encode() in environment:
            for name, part in PROCESSES.items():
                if part in command:
                    found[name] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


def growth(sizes: list[int]) -> float:
    """Return by which share memory grew from the second fifth of the time to the last."""
    fifth = max(1, len(sizes) // 5)
    return statistics.median(sizes[-fifth:]) / statistics.median(sizes[fifth : 2 * fifth]) - 1


async def settled(site: Site) -> dict[str, float]:
    """Return the sequences that are left once the engine rests, or when it should."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        async with httpx.AsyncClient(timeout=30) as client:
            lines = (await client.get(f"{site.url}/metrics")).text.splitlines()
        left = {
            name: sum(
                float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"eyas_requests_{name}{{")
            )
            for name in ("running", "waiting")
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


async def play(site: Site, seconds: float) -> dict[str, Any]:
    """Wait for the deployment, let the storm pass, and say what it left."""
    await site.until(lambda status: len(status["replicas"]) == 1, 180)
    storm = Storm(site, seconds)
    await storm.run()
    left = await settled(site)
    grown = {name: growth(sizes) for name, sizes in storm.memory.items()}
    ends = storm.ends
    return {
        "seconds": seconds,
        "ends": dict(ends),
        "statuses": dict(storm.statuses),
        "errors": storm.errors[:3],
        "mebibytes": {
            name: [size >> 20 for size in (sizes[0], sizes[-1])] for name, sizes in storm.memory.items()
        },
        "growth": {name: round(share, 4) for name, share in grown.items()},
        "left": left,
        "holds": {
            "clients vanished at every point": sum(name.startswith("vanished") for name in ends) == 3,
            "calls were refused": storm.statuses["429"] > 0 and storm.statuses["429 to the patient"] > 0,
            "the patient were answered": ends["patient and whole"] > 0
            and not ends["patient and cut"] + ends["patient and failed"],
            "nobody came back before he was told to": storm.num_early_retries == 0,
            "slow readers got all": ends["slow and whole"] > 0 and not ends["slow and cut"],
            "no connection failed": not ends["connection"],
            f"memory grew by at most {MAX_GROWTH:.0%}": len(grown) == len(PROCESSES)
            and max(grown.values()) <= MAX_GROWTH,
            "no sequence is left": not any(left.values()),
            "no block is lost": blocks_are_free(await site.status()),
        },
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=32)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    engine = {"max_num_seqs": 8, "max_num_waiting": 8, "num_threads": 1}
    plan = Plan(options.model, options.draft, "", options.clients, options.tokens, engine)
    with running(plan, {"num_replicas": 1}) as site:
        result = asyncio.run(play(site, options.seconds))
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0 if all(result["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
