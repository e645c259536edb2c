"""The core's loop over one connection: what it answers, and what one bad request does to the others."""

import socket
import threading
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from engine.core import Core
from engine.errors import RequestError, StepError
from engine.messages import Add, AskStats, Deltas, Refused, Shutdown, Switch
from engine.stats import EngineStats
from tests.exactness.tiny import EngineShape, build_engine, build_target, prompts, request_of, run

TARGET = build_target()


@contextmanager
def running_core(engine):
    """Yield the client's end of a core that runs in a thread."""
    ours, theirs = socket.socketpair()
    core = threading.Thread(target=Core(engine, Connection(theirs.detach())).run)
    core.start()
    with Connection(ours.detach()) as connection:
        try:
            yield connection
        finally:
            connection.send(Shutdown())
            core.join(10)
            assert not core.is_alive()


def read_answers(connection, names):
    """Read until each of these requests has ended; return the tokens, or the error, of each."""
    tokens, answers = {name: [] for name in names}, {}
    while len(answers) < len(names):
        assert connection.poll(10), "the core says nothing"
        message = connection.recv()
        if isinstance(message, Refused):
            answers[message.request_id] = message.error
            continue
        assert isinstance(message, Deltas)
        for delta in message.deltas:
            tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                answers[delta.request_id] = tuple(tokens[delta.request_id])
    return answers


@pytest.mark.parametrize("broken", ["_check_token_ids", "_check_stops"])
def test_an_add_that_raises_refuses_its_request_alone(monkeypatch, caplog, broken):
    asked = [request_of(f"r{idx}", prompt, 100 + idx) for idx, prompt in enumerate(prompts(3))]
    expected = run(build_engine(TARGET, None, EngineShape()), asked)
    engine = build_engine(TARGET, None, EngineShape())
    check = getattr(engine, broken)
    num_calls = []

    def check_or_raise(*arguments):
        num_calls.append(1)
        if len(num_calls) == 4 if broken == "_check_token_ids" else len(num_calls) == 2:
            raise ZeroDivisionError("a check divided by zero")
        return check(*arguments)

    monkeypatch.setattr(engine, broken, check_or_raise)
    with running_core(engine) as connection:
        for request in asked:
            connection.send(Add(request))
        answers = read_answers(connection, expected)
        connection.send(AskStats())
        assert isinstance(stats := connection.recv(), EngineStats)
    error = answers.pop("r1")
    assert isinstance(error, StepError)
    assert "ZeroDivision" not in str(error)
    assert answers == {name: text for name, text in expected.items() if name != "r1"}
    assert (stats.num_finished, stats.num_held_blocks) == (2, 0)
    assert "a check divided by zero" in caplog.text


def test_the_core_speaks_after_every_step_of_a_long_prefill():
    engine = build_engine(TARGET, None, EngineShape(max_batched_tokens=12))
    with running_core(engine) as connection:
        connection.send(Add(request_of("r", tuple(range(10, 90)), 1, max_tokens=1)))
        gains = []
        while not any(gains):
            assert connection.poll(10)
            gains.append(connection.recv().deltas)
    assert len(gains) >= 80 // 12


def test_deltas_say_how_many_requests_the_core_had_read():
    with running_core(build_engine(TARGET, None, EngineShape())) as connection:
        for idx, prompt in enumerate([(7,), (-1,), (8,)], start=1):
            connection.send(Add(request_of("r", prompt, 1, max_tokens=1)))
            while not (isinstance(message := connection.recv(), Refused) or message.deltas):
                pass
            assert message.num_added == idx


def test_a_request_error_is_handed_on_with_its_parameter():
    with running_core(build_engine(TARGET, None, EngineShape())) as connection:
        connection.send(Add(request_of("r", (-1,), 1)))
        error = read_answers(connection, ["r"])["r"]
    assert isinstance(error, RequestError)
    assert error.parameter == "prompt"


def test_a_switch_changes_the_tree():
    engine = build_engine(TARGET, None, EngineShape())
    with running_core(engine) as connection:
        connection.send(Switch("off"))
        connection.send(Add(request_of("r0", prompts(1)[0], 100)))
        assert len(read_answers(connection, ["r0"])["r0"]) > 0
        connection.send(AskStats())
        stats = connection.recv()
    assert stats.dispatch.arm == "off"
    assert stats.dispatch.reason == "set by the operator"
