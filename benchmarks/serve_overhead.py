"""What Serve and HTTP cost: tokens a second of streams through `eyas serve` against the same engine without
them.

The bare side is an engine core in a process of its own, its deltas read by an asyncio client; with --inside
the loop of an engine in one process is measured too. Each side has a client process of its own, and both
answer the same asks in turns, in an order that alternates, each with a fixed number of streams that begin
anew when they end. Without --model the networks take a given time and no processor (`timed_core`), and
everything else is real. Starts a Ray of its own: run it alone on a machine.

python -m benchmarks.serve_overhead --cells 1,16,64                              # needs no GPU
python -m benchmarks.serve_overhead --model FOLDER --draft FOLDER --prompts FILE.jsonl --temperatures 0,0.8
    --speculation auto,off --num-gpus 1
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.bench_prompts import QUESTIONS
from app.intervals import ratio_interval
from app.prompt_file import read_chats
from benchmarks.stream_player import Ask
from benchmarks.timed_core import StepTimes, write_site

BARE, SERVED, INSIDE = "core", "http", "engine"
ROOT = Path(__file__).parents[1]
NUM_TURNS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """What is asked at a time."""

    num_streams: int
    temperature: float
    speculation: str

    def chains(self, texts: list[str], num_tokens: int, first: int) -> list[list[Ask]]:
        """Return what each stream asks one after the other, from prompt `first` on. First answers are cut at
        different places, so that streams end apart ever after.
        """
        return [
            [
                Ask(
                    texts[(first + stream + turn * self.num_streams) % len(texts)],
                    num_tokens if turn else max(1, num_tokens * (stream + 1) // self.num_streams),
                    self.temperature,
                    stream + turn * self.num_streams,
                    self.speculation,
                )
                for turn in range(NUM_TURNS)
            ]
            for stream in range(self.num_streams)
        ]


@dataclass(slots=True)
class Rounds:
    """What was measured in a cell, by side; round k of one side asked what round k of the others did."""

    sides: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def median(self, side: str, figure: str) -> float:
        return statistics.median(item[figure] for item in self.sides[side])

    def rate(self, side: str) -> float:
        return statistics.median(item["num_tokens"] / item["seconds"] for item in self.sides[side])

    def ratio(self, side: str, base: str) -> tuple[float, float, float]:
        """Return the tokens a second of a side over those of a base, and the interval."""
        pairs = zip(self.sides[base], self.sides[side], strict=True)
        return ratio_interval(
            [
                (right["num_tokens"] / right["seconds"], left["num_tokens"] / left["seconds"])
                for left, right in pairs
            ]
        )


class Client:
    """A `stream_player` process, started at once and asked when it is ready."""

    def __init__(self, kind: str, place: str, step_times: StepTimes) -> None:
        command = [sys.executable, "-m", "benchmarks.stream_player", kind, place]
        command += ["--step-times", json.dumps(list(step_times))]
        self._process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._read()

    def play(self, chains: list[list[Ask]], warm_seconds: float, seconds: float) -> dict[str, float]:
        assert self._process.stdin is not None
        asks = [[asdict(ask) for ask in chain] for chain in chains]
        order = {"chains": asks, "warm_seconds": warm_seconds, "seconds": seconds}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a client ended, status {self._process.wait()}")
        return dict(json.loads(line))


@contextmanager
def serving(config: Path) -> Iterator[None]:
    """Run `eyas serve` until it serves; the streams have ended when it is told to stop."""
    command = [sys.executable, "-m", "app.cli", "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:  # noqa: S603
        assert process.stdout is not None
        try:
            if not any(line.startswith("serving") for line in process.stdout):
                raise RuntimeError(f"the server ended, status {process.wait()}")
            yield
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def server_config(options: argparse.Namespace, port: int) -> dict[str, Any]:
    engine: dict[str, Any] = {"max_num_seqs": max(options.cells)}
    if options.model is not None:
        engine |= {"num_blocks": options.num_blocks, "speculation": {"mode": options.mode}}
    pace = options.messages_per_second
    return ({} if pace is None else {"messages_per_second": pace}) | {
        "model": options.model or "smollm2",
        "draft": options.draft if options.model is not None else "none",
        "served_model_name": "served",
        "port": port,
        "num_gpus": options.num_gpus,
        "engine": engine,
    }


def measure(
    clients: dict[str, Client], cells: list[Cell], texts: list[str], options: argparse.Namespace
) -> Iterator[dict[Cell, Rounds]]:
    """Play all cells on all sides until the time is used, and yield what was measured after each pass; a
    short window of each before does not count.
    """
    found = {cell: Rounds({side: [] for side in clients}) for cell in cells}
    for cell, client in itertools.product(cells, clients.values()):
        client.play(cell.chains(texts, options.tokens, 0), options.warm, 0.1)
    start = time.monotonic()
    for idx in itertools.count():
        for cell in cells:
            sides = list(clients) if idx % 2 else list(clients)[::-1]
            chains = cell.chains(texts, options.tokens, idx * cell.num_streams)
            for side in sides:
                found[cell].sides[side].append(clients[side].play(chains, options.warm, options.window))
        yield found
        used = time.monotonic() - start
        if used * (idx + 2) / (idx + 1) > options.seconds or idx + 1 == options.rounds:
            return


def rows_of(found: dict[Cell, Rounds]) -> Iterator[dict[str, Any]]:
    for cell, rounds in found.items():
        row: dict[str, Any] = asdict(cell) | {"num_rounds": len(rounds.sides[BARE])}
        for side in rounds.sides:
            row[f"{side}_tokens_per_second"] = round(rounds.rate(side), 1)
            row[f"{side}_first_ms"] = round(1e3 * rounds.median(side, "first_seconds"), 2)
            row[f"{side}_tokens_per_piece"] = round(
                rounds.median(side, "num_tokens") / rounds.median(side, "num_pieces"), 2
            )
            if side != SERVED:
                row[f"http_over_{side}"] = [round(value, 3) for value in rounds.ratio(SERVED, side)]
        yield row


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "streams  temp  spec  rounds  bare tok/s  http tok/s  ratio [95%]           first ms     tokens/piece"
    )
    for row in rows:
        ratio, low, high = row["http_over_core"]
        cell = f"{row['num_streams']:7d}  {row['temperature']:4.1f}  {row['speculation']:4s}"
        rates = f"{row['core_tokens_per_second']:10.1f}  {row['http_tokens_per_second']:10.1f}"
        first = f"{row['core_first_ms']:5.1f} {row['http_first_ms']:6.1f}"
        print(
            f"{cell}  {row['num_rounds']:6d}  {rates}  {ratio:.3f} [{low:.3f}, {high:.3f}]  {first}"
            f"  {row['http_tokens_per_piece']:6.2f}",
            flush=True,
        )
        if f"http_over_{INSIDE}" in row:
            rate, over = row["engine_tokens_per_second"], row["http_over_engine"]
            print(
                f"         over the loop alone ({rate:.0f}/s): {over[0]:.3f} [{over[1]:.3f}, {over[2]:.3f}]"
            )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", type=integers, default=[1, 16, 64], help="streams at a time")
    parser.add_argument("--temperatures", type=numbers, default=[0.0])
    parser.add_argument("--speculation", type=lambda text: text.split(","), default=["off"])
    parser.add_argument("--tokens", type=int, default=128, help="of every stream")
    parser.add_argument("--warm", type=float, default=0.7, help="seconds of a round that do not count")
    parser.add_argument("--window", type=float, default=2.0, help="seconds of a round that count")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-ms", default="16:2,64:12", help="MOST_ROWS:MS of a step without --model")
    parser.add_argument("--inside", action="store_true", help="measure an engine in one process too")
    parser.add_argument("--model", help="a folder; without it networks take a given time")
    parser.add_argument("--draft", default="none", help="a folder")
    parser.add_argument("--mode", default="auto", help="speculation.mode of the engine")
    parser.add_argument("--prompts", type=Path, help="JSONL of chats, whose first turns are asked")
    parser.add_argument("--num-gpus", type=float, default=0)
    parser.add_argument("--num-blocks", type=int, default=3072)
    parser.add_argument("--messages-per-second", type=float, help="of the server, where not its default")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def numbers(text: str) -> list[float]:
    return [float(item) for item in text.split(",")]


def step_times(options: argparse.Namespace) -> list[tuple[int, float]]:
    if options.model is not None:
        return []
    pairs = [item.split(":") for item in options.step_ms.split(",")]
    return [(int(most), float(milliseconds) * 1e-3) for most, milliseconds in pairs]


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[dict[str, Client]]:
    """Start all sides, one after the other, and yield their clients."""
    times, start = step_times(options), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        if times:
            write_site(Path(folder), times)
            paths.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        port, config = free_port(), Path(folder) / "server.yaml"
        config.write_text(yaml.safe_dump(server_config(options, port)), encoding="utf-8")
        clients: dict[str, Client] = {}
        for kind in [BARE, INSIDE] if options.inside else [BARE]:
            clients[kind] = Client(kind, str(config), times)
            stack.callback(clients[kind].close)
        stack.enter_context(serving(config))
        clients[SERVED] = Client(SERVED, f"http://127.0.0.1:{port}", times)
        stack.callback(clients[SERVED].close)
        print(f"all sides ready after {time.monotonic() - start:.0f} s", flush=True)
        yield clients


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    chats = read_chats(options.prompts) if options.prompts else []
    texts = [chat.first_turn[-1].content for chat in chats] or list(QUESTIONS)
    cells = [
        Cell(*values)
        for values in itertools.product(options.cells, options.temperatures, options.speculation)
    ]
    rows: list[dict[str, Any]] = []
    with opened(options) as clients:
        for found in measure(clients, cells, texts, options):
            rows = list(rows_of(found))
            if options.out is not None:  # after every pass: a run that is cut has something to show
                report = {"arguments": arguments, "cells": rows}
                options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
