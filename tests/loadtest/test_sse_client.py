"""The streaming client: what it times and counts, and how it names what goes wrong."""

import json
import socket

import pytest

from loadtest.record import Record, RecordFile, parse_record, read_records
from loadtest.sse_client import Question, SSEClient
from tests.loadtest.scripted_server import HEAD, scripted_server

QUESTION = Question("/v1/completions", {"model": "m", "speculation": "off"}, "chat", 3)


def event(text: str, num_tokens: int | None = None, finish_reason: str | None = None) -> bytes:
    body: dict[str, object] = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}
    if num_tokens is not None:
        body["usage"] = {"prompt_tokens": 7, "completion_tokens": num_tokens}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def ask(url: str, timeout_s: float = 5.0) -> Record:
    return SSEClient(url, timeout_s=timeout_s).ask(QUESTION)


def test_a_token_is_timed_when_it_arrives_not_when_a_buffer_is_full():
    pause = 0.15
    with scripted_server(HEAD, pause, event("a", 1), pause, event("bcd", 4, "length"), pause, DONE) as server:
        record = ask(server.url)
    first, last = (when - record.sent for when, _ in record.chunks)
    # Never early; late by what a busy machine takes, which a client that fills buffers exceeds by a pause.
    assert pause <= first < 2 * pause
    assert 2 * pause <= last < 3 * pause
    assert record.end_to_end >= 3 * pause
    assert record.error is None


def test_time_per_token_divides_by_the_servers_count_of_later_tokens():
    record = Record(
        "chat", 0, "auto", 0.5, 1.0, 9.0, chunks=((2.0, 3), (4.0, 7), (6.0, 8)), num_output_tokens=8
    )
    assert record.time_per_output_token == pytest.approx((6.0 - 2.0) / (8 - 3))
    assert record.time_to_first_token == pytest.approx(1.5)  # from when it was due
    assert record.end_to_end == pytest.approx(8.5)
    assert record.lag == pytest.approx(0.5)


def test_counts_text_and_ending_are_the_servers():
    events = (event("", 2), event("ab", 4), event("c", 5, "length"), b": a comment\n\n", DONE)
    with scripted_server(HEAD, *events) as server:
        record = ask(server.url)
    assert [count for _, count in record.chunks] == [2, 4, 5]
    assert (record.text, record.num_output_tokens, record.num_prompt_tokens) == ("abc", 5, 7)
    assert (record.finish_reason, record.status, record.speculation) == ("length", 200, "off")
    assert (record.prompt_class, record.prompt_idx) == ("chat", 3)


def test_opening_of_a_chat_is_no_token():
    opening = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None}
    delta = {"choices": [{"delta": {"content": "Hi"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    parts = [b"data: " + json.dumps(body).encode() + b"\n\n" for body in (opening, delta)]
    with scripted_server(HEAD, parts[0], 0.05, parts[1] + DONE) as server:
        record = ask(server.url)
    assert [count for _, count in record.chunks] == [2]
    assert record.text == "Hi"


def test_an_event_split_over_reads_is_one_event():
    whole = event("ü", 1)
    middle = whole.index(b"\\u") + 3
    with scripted_server(HEAD, whole[:middle], 0.05, whole[middle:] + DONE) as server:
        record = ask(server.url)
    assert (record.text, len(record.chunks)) == ("ü", 1)


CRLF = tuple(part.replace(b"\n", b"\r\n") for part in (event("ab", 1), event("c", 4), DONE))


@pytest.mark.parametrize(
    "script",
    [
        CRLF,
        tuple(b"".join(CRLF)[idx : idx + 1] for idx in range(len(b"".join(CRLF)))),
        (b": alive\n" + event("ab", 1), b"event: message\nid: 3\n" + event("c", 4), DONE),
        (event("ab", 1).replace(b", ", b",\ndata: "), event("c", 4), b"retry: 10\n\n", DONE),
    ],
)
def test_events_are_read_in_every_form_that_the_standard_allows(script):
    with scripted_server(HEAD, *script) as server:
        record = ask(server.url)
    assert (record.error, record.text, [count for _, count in record.chunks]) == (None, "abc", [1, 4])


def test_a_key_from_a_file_may_end_its_line_and_one_that_no_header_holds_is_not_shown():
    with scripted_server(HEAD, event("a", 1), DONE) as server:
        assert SSEClient(server.url, api_key="secret\n").ask(QUESTION).error is None
    assert b"Bearer secret\r\n" in server.asked[0]
    for key in ("sec\nret", "secr\u20act"):
        with pytest.raises(ValueError, match="API key") as refusal:
            SSEClient(server.url, api_key=key)
        assert "sec" not in str(refusal.value)


def test_the_request_asks_for_counts_and_carries_its_trace():
    with scripted_server(HEAD, event("a", 1), DONE) as server:
        record = SSEClient(server.url, api_key="secret").ask(QUESTION)
    head, _, body = server.asked[0].partition(b"\r\n\r\n")
    sent = json.loads(body)
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert b"authorization: Bearer secret" in head
    assert f"traceparent: 00-{record.trace_id}-".encode() in head


def status(code: int, headers: bytes = b"") -> bytes:
    body = b'{"error": {"message": "no"}}'
    return b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n%s" % (code, headers, len(body), body)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ((status(429, b"retry-after: 7\r\n"),), "full"),
        ((status(400),), "refused"),
        ((status(503),), "unavailable"),
        ((status(500),), "failed"),
        ((HEAD, event("a", 1), b'data: {"error": {"message": "step"}}\n\n', DONE), "failed"),
        ((HEAD, event("a", 1)), "truncated"),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nda",), "truncated"),
        ((b"",), "truncated"),
        ((HEAD, b"data: {no json\n\n"), "malformed"),
        ((HEAD, b'data: {"choices": [1]}\n\n'), "malformed"),
        ((HEAD, b"data: " + b"[" * 100_000 + b"\n\n"), "malformed"),
        ((HEAD, event("a", 1).replace(b": 1}", b": Infinity}")), "malformed"),
        ((HEAD, DONE), "malformed"),
        ((HEAD, b": alive\n\n", DONE), "malformed"),
        ((HEAD, event("a", 1), 1.0), "timeout"),
        ((1.0,), "timeout"),
    ],
)
def test_every_failure_has_its_class(script, error):
    with scripted_server(*script) as server:
        record = ask(server.url, timeout_s=0.4)
    assert record.error == error, record.message
    assert record.message or error == "truncated"
    assert record.retry_after == (7.0 if error == "full" else None)


def test_a_port_that_nobody_listens_on_is_no_connection():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        record = ask(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert (record.error, record.status, record.chunks) == ("connect", None, ())


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        SSEClient(url)


def test_records_come_back_from_their_file_as_they_were(tmp_path):
    records = [
        Record(
            "chat", 0, "off", 0.1, 0.2, 3.0, ((1.0, 2), (2.0, 5)), 200, None, num_output_tokens=5, text="ü\n"
        ),
        Record("code", 1, "auto", 0.1, 0.2, 3.0, error="full", message="no", retry_after=1.0, trace_id="ab"),
    ]
    path = tmp_path / "records.jsonl"
    for record in records:  # two writers of one file
        writer = RecordFile(path)
        writer.append(record)
        writer.close()
    assert list(read_records([path])) == records
    assert parse_record(records[0].to_line()) == records[0]
