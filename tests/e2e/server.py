"""`eyas serve` as a process of its own: over a tiny random model and a draft, or over the default model as
`make serve` starts it.

What is asked of it is left to the tests.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

from tests.app.harness import free_port
from tests.app.tiny_model import VOCAB, write_random_draft, write_random_model

START_SECONDS = 120
HANG_SECONDS = 8
# A whole call in one token: what a random model says of itself calls nothing.
TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOL_CALL_ID = VOCAB


@dataclass(frozen=True)
class Server:
    model: str
    process: subprocess.Popen[str]
    url: str
    log: Path
    answers_at_start: list[httpx.Response]

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Run a server of a tiny model until the block ends; it must then exit with 0."""
    write_random_model(folder, [TOOL_CALL])
    draft = folder / "draft"
    write_random_draft(draft, VOCAB + 1)
    config = folder / "server.yaml"
    config.write_text(f"engine: {{hang_seconds: {HANG_SECONDS}}}\n")
    flags = ["--model", str(folder), "--served-model-name", "tiny", "--draft", str(draft)]
    flags += ["--dtype", "float32", "--config", str(config)]
    with launched("tiny", flags, folder / "serve.txt") as server:
        yield server


@contextmanager
def launched(model: str, flags: list[str], log: Path) -> Iterator[Server]:
    """Run `eyas serve` with `flags`, which serves as `model`, until the block ends; it must then exit
    with 0.
    """
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "serve", "--port", str(port), *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
    url = f"http://127.0.0.1:{port}"
    answers: list[httpx.Response] = []
    is_started = threading.Event()
    poller = threading.Thread(target=poll, args=(url, answers, is_started))
    poller.start()
    try:
        deadline = time.monotonic() + START_SECONDS
        while f"serving {model} at {url}/v1" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        is_started.set()
        poller.join()
        yield Server(model, process, url, log, answers)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
        assert "raylet" not in log.read_text(), "Ray's own words are not for an operator"
    finally:
        is_started.set()
        if process.poll() is None:
            process.kill()
            process.wait()


def poll(url: str, answers: list[httpx.Response], is_over: threading.Event) -> None:
    """Ask as a client does that waits for the server, and keep what it is told."""
    while not is_over.wait(0.02):
        with suppress(httpx.TransportError):
            answers.append(httpx.get(f"{url}/v1/models", timeout=30))
