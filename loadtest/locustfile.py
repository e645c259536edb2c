"""What Locust runs: users that ask for streamed answers, in a closed loop or as an open loop's source.

    locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000 -u 8 -r 8 -t 60s

asks in exactly 8 streams. With `--arrivals poisson --rate 4 -u 1` one user sends 4 requests a second whether
or not the server keeps up. Timing is left to `sse_client`, figures to `summary`.
"""

import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gevent
from gevent.pool import Pool
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import WorkerRunner

from loadtest.arrivals import KINDS, arrivals
from loadtest.prompts import CLASSES, cycle
from loadtest.record import Record, RecordFile, read_records
from loadtest.sse_client import Question, SSEClient
from loadtest.summary import Objective, summarize

CLOSED = "closed"
KEY_VARIABLE = "EYAS_API_KEY"  # not a flag: those are shown in the web page and in process lists
SEED_STEP = 1_000_003  # keeps the sources of several users apart
RETRY_S = 1.0  # before a stream asks again that was not answered, where the server does not say
_EPOCH = time.time() - time.perf_counter()

_TINY = sys.float_info.min
_LEAST = {
    **dict.fromkeys(("rate", "max_tokens", "silence", "ttft", "tpot", "e2e"), _TINY),
    **dict.fromkeys(("temperature", "requests", "stagger", "warm_up"), 0.0),
}

logger = logging.getLogger(__name__)


def clock() -> float:
    """Return seconds since 1970 that never go back, as the wall clock is read once: the records of several
    machines go together.
    """
    return _EPOCH + time.perf_counter()


class RequestFailedError(Exception):
    """What Locust counts as a failure; the class of the error stands first."""


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser, **_: Any) -> None:
    """Add our options to Locust's, each with a variable for deployments."""
    group = parser.add_argument_group("Eyas")

    def add(flag: str, **arguments: Any) -> None:
        variable = "EYAS_LOAD_" + flag.removeprefix("--").replace("-", "_").upper()
        group.add_argument(flag, env_var=variable, **arguments)

    add("--model", default="smollm2", help="what to ask for")
    add("--arrivals", choices=(CLOSED, *KINDS), default=CLOSED, help="closed loop, or an open one")
    add("--rate", type=float, default=1.0, help="requests per second of an open loop, all users together")
    add("--prompts", default=",".join(CLASSES), help="classes of prompts, separated by commas")
    add("--max-tokens", type=int, default=64, help="tokens per answer; every answer has as many")
    add("--speculation", default="auto", help="auto, off or a tree name")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0, help="of arrivals and sampling")
    add("--requests", type=int, default=0, help="per user, then it stops, and a lone process ends")
    add("--stagger", type=float, default=0.0, help="seconds over which the streams begin, evenly")
    add("--records", default="load.jsonl", help="file for one JSON object per request")
    add("--silence", type=float, default=120.0, help="seconds without a byte that end a request")
    add("--warm-up", type=float, default=0.0, help="seconds at the start that the summary leaves out")
    add("--ttft", type=float, default=None, help="objective: seconds to the first token")
    add("--tpot", type=float, default=None, help="objective: seconds per token after it")
    add("--e2e", type=float, default=None, help="objective: seconds for the whole answer")
    # Answers under way are awaited: a cut one would be missing from the records.
    parser.set_defaults(stop_timeout="120")


@events.init.add_listener
def check_options(environment: Environment, **_: Any) -> None:
    """Refuse what cannot be sent before anything is."""
    unknown = set(_classes(environment)) - CLASSES.keys()
    if unknown:
        raise SystemExit(f"error: unknown classes of prompts {sorted(unknown)}; there are {list(CLASSES)}")
    options = environment.parsed_options
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            flag = "--" + name.replace("_", "-")
            raise SystemExit(
                f"error: {flag} must be {'above 0' if least == _TINY else 'at least 0'}, found {value}"
            )
    try:
        SSEClient(environment.host or "http://none", os.environ.get(KEY_VARIABLE))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    try:
        RecordFile(Path(options.records)).close()
    except OSError as error:
        raise SystemExit(f"error: --records: cannot write {options.records}: {error.strerror}") from error


@events.test_start.add_listener
def begin_records(environment: Environment, **_: Any) -> None:
    """Begin an empty file; workers of this machine append to the one that their master began."""
    if not isinstance(environment.runner, WorkerRunner):
        Path(environment.parsed_options.records).write_bytes(b"")


@events.quitting.add_listener
def report(environment: Environment, **_: Any) -> None:
    """Log the summary of the records on this machine."""
    options = environment.parsed_options
    path = Path(options.records)
    if isinstance(environment.runner, WorkerRunner) or not path.is_file():
        return
    # The web page hands over text, and an empty one for what is not asked.
    objective = Objective(*(float(one) if one else None for one in (options.ttft, options.tpot, options.e2e)))
    for line in summarize(list(read_records([path])), objective, options.warm_up).lines():
        logger.info(line)


class StreamingUser(User):  # type: ignore[misc]  # Locust has no types
    """One stream of a closed loop, or one source of an open loop with its share of the rate."""

    _pause_s = 0.0
    _ordinals: ClassVar[Iterator[int]] = itertools.count()
    _endings: ClassVar[Iterator[int]] = itertools.count(1)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        runner = self.environment.runner
        worker_idx = runner.worker_index if isinstance(runner, WorkerRunner) else 0
        ordinal = next(self._ordinals) + SEED_STEP * worker_idx
        self._options = options
        self._client = SSEClient(self.host, os.environ.get(KEY_VARIABLE), options.silence, clock)
        self._prompts = cycle(_classes(self.environment), start=ordinal)
        self._records = RecordFile(Path(options.records))
        self._open_requests = Pool()
        self._num_sent = 0
        num_users = options.num_users or 1
        share = options.rate / num_users
        self._schedule = (
            None
            if options.arrivals == CLOSED
            else arrivals(options.arrivals, share, options.seed + SEED_STEP * ordinal)
        )
        gevent.sleep(options.stagger * (ordinal % num_users) / num_users)
        self._begin = clock()

    def on_stop(self) -> None:
        self._open_requests.join()
        self._records.close()
        if self._options.requests and next(self._endings) == (self._options.num_users or 1):
            self.environment.runner.quit()

    @task
    def send(self) -> None:
        """Ask once and wait for the answer, or wait for the next arrival and ask without waiting."""
        if self._schedule is None:
            record = self._ask(None)
            if record.error is not None:  # else thousands a second, to a server in need
                self._pause_s = RETRY_S if record.retry_after is None else record.retry_after
        else:
            due = self._begin + next(self._schedule)
            gevent.sleep(max(0.0, due - clock()))
            self._open_requests.spawn(self._ask, due)
        self._num_sent += 1
        if self._num_sent == self._options.requests:
            raise StopUser

    def wait_time(self) -> float:
        """Return how long to wait before the next question: not at all, but after an error."""
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s

    def _ask(self, due: float | None) -> Record:
        options, prompt = self._options, next(self._prompts)
        body = {
            "model": options.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": options.max_tokens,
            "ignore_eos": True,
            "temperature": options.temperature,
            "seed": options.seed,
            "speculation": options.speculation,
        }
        question = Question("/v1/chat/completions", body, prompt.prompt_class, prompt.idx)
        record = self._client.ask(question, due)
        self._records.append(record)
        self._fire(record)
        return record

    def _fire(self, record: Record) -> None:
        """Give Locust's own tables what they can show: rounded, and in milliseconds."""
        failure = None if record.error is None else RequestFailedError(f"{record.error}: {record.message}")
        values = {"end to end": record.end_to_end}
        if record.time_to_first_token is not None:
            values["first token"] = record.time_to_first_token
        if record.time_per_output_token is not None:
            values["per token"] = record.time_per_output_token
        for kind, seconds in values.items():
            self.environment.events.request.fire(
                request_type=kind,
                name=record.prompt_class,
                response_time=seconds * 1e3,
                response_length=record.num_output_tokens,
                exception=failure if kind == "end to end" else None,
                context={},
            )


def _classes(environment: Environment) -> list[str]:
    return [name.strip() for name in environment.parsed_options.prompts.split(",")]
