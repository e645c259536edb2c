"""`eyas validate speedup`: is speculation on this server as fast as it should be? The exit status says so.

The server is a running one (`--url`), or one that is started for the time. Measuring is left to `speedup`.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TextIO

from prometheus_client.parser import text_string_to_metric_families

from app.machine import cpu_name
from app.speedup import SpeedupCell, SpeedupPlan, ask_together, measure
from app.speedup_report import HTML_NAME, JSON_NAME, SpeedupReport, stored_floors
from app.speedup_verdict import Estimate, Floor, Judgement, Verdict, declared, judge, relative_to
from engine import ConfigError, ModelLoadError, StepError
from loadtest.sse_client import SSEClient

EXIT_STATUS: dict[Verdict, int] = {"pass": 0, "regression": 3, "inconclusive": 4}
KEY_VARIABLE = "EYAS_API_KEY"
START_SECONDS = 300.0
STOP_SECONDS = 60.0
LOG_NAME = "server.txt"


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure, judge and write the report. Raises `StepError` where float32 answers differ between arms."""
    _check_options(options)
    with _server(options) as url:
        facts = _facts(url)
        model = facts["model"]
        plan = SpeedupPlan(model, options.tree, options.batch, options.blocks, options.max_tokens)
        # Before the minutes that measuring takes: a stored run that does not compare is told at once.
        floors, source = _floors(options, plan, facts)

        def tell(cell: SpeedupCell) -> None:
            out.write(f"batch {cell.batch}: {cell.speedup:.2f} [{cell.low:.2f}, {cell.high:.2f}]\n")
            out.flush()

        client = SSEClient(url, os.environ.get(KEY_VARIABLE))
        cells = measure(ask_together(client), plan, tell)
    judgements = [_judgement(*pair, options.margin) for pair in zip(cells, floors, strict=True)]
    estimates = [floor.estimate for floor in floors]
    report = SpeedupReport(plan, facts, source, cells, estimates, judgements)
    out.write("\n".join([*report.lines(), ""]))
    try:
        report.write(options.out)
    except OSError as error:
        raise ConfigError(f"cannot write the report: {error}") from error
    out.write(f"report: {options.out / HTML_NAME}, {options.out / JSON_NAME}\n")
    _check_equality(cells, facts["dtype"])
    return EXIT_STATUS[report.verdict]


def _check_options(options: argparse.Namespace) -> None:
    """Refuse what can be refused before a server is started."""
    missing = [batch for batch in options.batch if None not in options.floor and batch not in options.floor]
    if options.baseline is None and missing:
        raise ConfigError(f"--floor has no value for the batch size {missing[0]}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot make the folder {options.out}: {error.strerror}") from error


def _judgement(cell: SpeedupCell, floor: Floor, margin: float) -> Judgement:
    blocks = [(block.plain, block.speculative) for block in cell.blocks]
    return judge(relative_to(floor, Estimate(cell.speedup, cell.low, cell.high), blocks), margin)


def _check_equality(cells: Sequence[SpeedupCell], dtype: str) -> None:
    """In bfloat16 and float16 near-ties may flip and are only counted."""
    num_pairs = sum(cell.num_pairs for cell in cells)
    num_equal = sum(cell.num_equal for cell in cells)
    if dtype == "float32" and num_equal < num_pairs:
        raise StepError(f"{num_pairs - num_equal} of {num_pairs} float32 answers differ between the arms")


def _floors(options: argparse.Namespace, plan: SpeedupPlan, facts: dict[str, str]) -> tuple[list[Floor], str]:
    if options.baseline is not None:
        return stored_floors(options.baseline, plan, facts), f"the stored run {options.baseline.name}"
    floors = [declared(options.floor.get(batch, options.floor.get(None))) for batch in plan.batches]
    return floors, "declared"


def _facts(url: str) -> dict[str, str]:
    """Return what the server says of itself, and this machine's processor."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:  # noqa: S310 - http(s)
            text = answer.read().decode()
    except (OSError, ValueError, HTTPException) as error:
        raise ConfigError(f"no Eyas server answers at {url}: {error}") from error
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "eyas_engine_info":
                return {**sample.labels, "url": url, "client_cpu": cpu_name(Path("/proc/cpuinfo"))}
    raise ConfigError(f"{url} is no Eyas server: its metrics lack eyas_engine_info")


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    """Yield the address of the server that was named, or of one that runs as long as this."""
    if options.url is not None:
        try:
            SSEClient(options.url)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        yield options.url.rstrip("/")
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), "--model", options.model]
    command += ["--draft", options.draft, "--dtype", options.dtype]
    log = options.out / LOG_NAME
    before = signal.signal(signal.SIGTERM, _leave)  # else the server would outlive a `kill` of this process
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)  # noqa: S603 - our own
    try:
        _wait(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        signal.signal(signal.SIGTERM, before)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ModelLoadError(f"the server did not start: {log.read_text().strip()[-500:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 - our own address
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise ModelLoadError(f"the server was not ready within {START_SECONDS:.0f} s: see {log}")
