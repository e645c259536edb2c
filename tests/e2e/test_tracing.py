"""One request through real Serve processes arrives at a real receiver as one tree, under its client's span.

The wire itself is tested in `tests/ops`.
"""

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.app.harness import free_port
from tests.app.tiny_model import write_random_draft, write_random_model
from tests.e2e.server import START_SECONDS
from tests.ops.otlp_receiver import RECEIVERS, attributes_of

pytestmark = pytest.mark.e2e
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def serve(folder: Path, url: str, protocol: str, port: int, log: Path) -> subprocess.Popen[str]:
    write_random_model(folder)
    write_random_draft(folder / "draft")
    config = folder / "server.yaml"
    config.write_text(f"tracing: {{endpoint: '{url}', protocol: {protocol}, sample_ratio: 0}}\n")
    flags = ["--model", str(folder), "--served-model-name", "tiny", "--draft", str(folder / "draft")]
    flags += ["--port", str(port), "--dtype", "float32", "--config", str(config)]
    command = [sys.executable, "-m", "app.cli", "serve", *flags]
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("protocol", ["grpc", pytest.param("http", marks=pytest.mark.slow)])
def test_spans_of_one_request_are_one_tree(protocol, tmp_path):
    port, log = free_port(), tmp_path / "serve.txt"
    with RECEIVERS[protocol]() as receiver:
        process = serve(tmp_path, receiver.url, protocol, port, log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while "serving tiny at" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            body = {"model": "tiny", "prompt": [10, 20, 30], "max_tokens": 60, "ignore_eos": True, "seed": 1}
            url, statistics = f"http://127.0.0.1:{port}/v1/completions", {"speculation_stats": True}
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=x"}
            httpx.post(url, json=body, timeout=60)  # not traced by its client, nor by the ratio
            before = time.time_ns()
            answer = httpx.post(url, json=body | statistics, headers=headers, timeout=60)
            after = time.time_ns()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
            spans = receiver.wait_for(4)
        finally:
            if process.poll() is None:
                process.kill()
    assert answer.status_code == 200, answer.text
    assert len(spans) == 4
    own, *children = spans
    assert own.parent_span_id == bytes.fromhex(SPAN)
    assert {span.trace_id for span in spans} == {bytes.fromhex(TRACE)}
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{own.span_id.hex()}-01"
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    assert {child.parent_span_id for child in children} == {own.span_id}
    edges = [before, own.start_time_unix_nano]
    for child in children:
        edges += [child.start_time_unix_nano, child.end_time_unix_nano]
    # The client may have its answer before the server has left the call, so its clock bounds the decoding
    # only.
    for end in (own.end_time_unix_nano, after):
        # Two processes: the wall clock is read again for each request, so allow what it may be moved.
        assert all(b - a > -2_000_000 for a, b in itertools.pairwise([*edges, end])), (edges, end)
    assert own.events[0].time_unix_nano == children[1].end_time_unix_nano
    attributes, metrics = attributes_of(own), json.loads(answer.text)["metrics"]["speculative_decoding"]
    assert attributes["gen_ai.usage.output_tokens"] == 60
    assert attributes["eyas.speculation.draft_tokens"] == metrics["num_draft_tokens"]
    assert attributes["eyas.speculation.accepted_tokens"] == metrics["num_accepted_draft_tokens"]
    assert attributes["eyas.outcome"] == "answered"
    assert receiver.resources[0]["service.name"] == "eyas"
