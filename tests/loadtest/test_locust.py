"""Locust with our file, as a process, against servers whose behaviour is known."""

import itertools
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest.mock_server import Timing
from loadtest.record import read_records
from loadtest.self_check import measure, run_locust


class CountingServer(ThreadingHTTPServer):
    """Answers after `delay` seconds and remembers how many requests were open at once."""

    daemon_threads = True

    def __init__(self, delay: float) -> None:
        super().__init__(("127.0.0.1", 0), _Counting)
        self.delay = delay
        self.lock = threading.Lock()
        self.num_open = 0
        self.open_at_arrival: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Counting(BaseHTTPRequestHandler):
    server: CountingServer

    def do_POST(self) -> None:
        server = self.server
        with server.lock:
            server.num_open += 1
            server.open_at_arrival.append(server.num_open)
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(server.delay)
        with server.lock:
            server.num_open -= 1
        self.send_response(200)
        self.end_headers()
        usage = b'"usage": {"prompt_tokens": 1, "completion_tokens": 1}'
        self.wfile.write(b'data: {"choices": [{"text": "a"}], ' + usage + b"}\n\ndata: [DONE]\n\n")

    def log_message(self, *arguments: object) -> None:
        del arguments


@pytest.fixture
def slow_server():
    with CountingServer(delay=0.6) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_closed_loop_keeps_exactly_as_many_streams(slow_server, tmp_path):
    records = tmp_path / "records.jsonl"
    run_locust(slow_server.url, records, ["-u", "3", "-r", "3", "--requests", "3"])
    assert len(slow_server.open_at_arrival) == 9
    assert max(slow_server.open_at_arrival) == 3
    assert [record.error for record in read_records([records])] == [None] * 9


def test_open_loop_does_not_wait_for_a_slow_server(slow_server, tmp_path):
    records = tmp_path / "records.jsonl"
    arguments = ["-u", "1", "--arrivals", "constant", "--rate", "10", "--requests", "10"]
    run_locust(slow_server.url, records, arguments)
    found = sorted(read_records([records]), key=lambda record: record.intended)
    gaps = [right.intended - left.intended for left, right in itertools.pairwise(found)]
    assert gaps == pytest.approx([0.1] * 9, abs=1e-6)
    # At 10 a second and 0.6 s each about six are open at once; a closed loop of one user never has two.
    assert max(slow_server.open_at_arrival) >= 4
    assert all(record.time_to_first_token >= 0.6 for record in found)


def test_failed_requests_are_recorded_and_counted(tmp_path):
    records = tmp_path / "records.jsonl"
    output = run_locust("http://127.0.0.1:9", records, ["-u", "1", "--requests", "2"])
    assert [record.error for record in read_records([records])] == ["connect", "connect"]
    assert "errors: connect 2" in output


class RefusingServer(CountingServer):
    """Answers 429 with `retry-after: 1`, but every third request with a token."""

    def finish_request(self, request, address):
        self.RequestHandlerClass = _Refusing
        super().finish_request(request, address)


class _Refusing(_Counting):
    server: RefusingServer

    def do_POST(self) -> None:
        self.server.open_at_arrival.append(0)
        if len(self.server.open_at_arrival) % 3 == 0:
            super().do_POST()
            return
        self.send_response(429)
        self.send_header("retry-after", "1")
        self.send_header("content-length", "0")
        self.end_headers()


def test_a_stream_that_is_refused_waits_as_it_is_told(tmp_path):
    records = tmp_path / "records.jsonl"
    with RefusingServer(delay=0.0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run_locust(server.url, records, ["-u", "1", "--requests", "3"])
        server.shutdown()
    found = list(read_records([records]))
    assert [record.error for record in found] == ["full", "full", None]
    assert all(right.sent - left.end >= 1.0 for left, right in itertools.pairwise(found))
    # The clock of another machine would say the same: records of several go together.
    assert time.time() - 60 < found[0].sent < found[2].end < time.time()


REFUSED = (
    *(("--rate", "0"), ("--rate", "nan"), ("--max-tokens", "0"), ("--silence", "-1"), ("--requests", "-1")),
    *(("--ttft", "0"), ("--temperature", "inf"), ("--records", "/proc/none/x"), ("--host", "nowhere")),
)
# In a process of its own, as Locust patches the one that imports it.
CHECK = """
import sys
from types import SimpleNamespace
from locust.argument_parser import get_parser
from loadtest import locustfile
for flags in [*zip(sys.argv[2::2], sys.argv[3::2]), ()]:
    arguments = ["--host", "http://h", "--records", sys.argv[1], *flags]
    options = get_parser(default_config_files=[]).parse_args(arguments)
    try:
        locustfile.check_options(SimpleNamespace(parsed_options=options, host=options.host, runner=None))
        print("accepted")
    except SystemExit as refusal:
        print(refusal)
"""


def test_options_that_make_no_sense_are_told_before_anything_is_sent(tmp_path, pytestconfig):
    command = [sys.executable, "-c", CHECK, str(tmp_path / "records"), *itertools.chain(*REFUSED)]
    told = subprocess.run(
        command, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=True
    ).stdout
    *lines, last = told.splitlines()
    assert last == "accepted"
    for (flag, _), line in zip(REFUSED, lines, strict=True):
        assert line.startswith(f"error: {'the server must be' if flag == '--host' else flag}"), line


def test_unknown_class_of_prompts_is_told_before_anything_is_sent(tmp_path):
    with pytest.raises(Exception, match="returned non-zero") as failure:
        run_locust("http://127.0.0.1:9", tmp_path / "records.jsonl", ["--prompts", "poetry"])
    assert "unknown classes of prompts ['poetry']" in failure.value.stdout


def test_figures_of_a_known_server_are_near_the_truth():
    """On a busy machine: the strict figures are those of the test below."""
    timing = Timing(first=0.2, gap=0.05, num_events=10, run=2)
    floor = measure(num_streams=4, num_requests=2, timing=timing)
    assert floor.num_failed == 0
    assert -0.001 < floor.first_token < 0.25 * timing.first
    assert abs(floor.per_token) < 0.25 * timing.time_per_output_token


@pytest.mark.slow
def test_figures_at_32_streams_are_within_two_milliseconds():
    """For a quiet machine; `python -m loadtest.self_check` is the same."""
    floor = measure(num_streams=32, num_requests=8, timing=Timing())
    assert floor.is_within(0.002), floor
