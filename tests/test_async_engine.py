"""The client of the core process: streams, refusals, aborts, and every way a core can end."""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import aclosing
from multiprocessing.connection import Connection

import pytest
import pytest_asyncio

import engine.core
import engine.core_link
from engine.async_engine import AsyncEngine
from engine.batch import SequenceDelta
from engine.config import SpeculationConfig
from engine.core_link import CoreLink
from engine.errors import CapacityError, ConfigError, EngineDeadError, ModelLoadError, RequestError
from engine.messages import Abort, Add, AskStats, Deltas, Failed, Ready, Refused
from engine.request import FinishReason
from tests.exactness.folder import engine_config, write_draft, write_target
from tests.exactness.tiny import VOCAB, EngineShape, build_engine, build_target, prompts, request_of, run

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of the tiny target and of a head for it."""
    root = tmp_path_factory.mktemp("models")
    write_target(root / "target")
    write_draft(root / "draft", root / "target")
    return root / "target", root / "draft"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(folders):
    """Return one core for the tests that leave it alive."""
    config = engine_config(
        *folders, max_num_seqs=4, max_num_waiting=8, speculation=SpeculationConfig(mode="chain-3")
    )
    engine = await AsyncEngine.start(config)
    yield engine
    await engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def doomed(folders):
    """Return a core of the test's own, to be killed."""
    engine = await AsyncEngine.start(engine_config(folders[0]))
    yield engine
    await engine.shutdown()


async def collect(engine, request):
    """Return the tokens of one request and why it ended."""
    tokens, reason = [], None
    async with aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            assert delta.request_id == request.request_id
            tokens += delta.token_ids
            reason = delta.finish_reason
    return tuple(tokens), reason


def long_request(name="long"):
    return request_of(name, (10, 11, 12), 1, max_tokens=250)


async def settle(engine):
    """Wait until nothing runs; return the counters."""
    for _ in range(500):
        stats = await engine.stats()
        if not stats.num_running and not stats.num_waiting:
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError(stats)


async def test_streams_of_a_batch_equal_plain_decoding_alone(served):
    asked = [request_of(f"r{idx}", prompt, 100 + idx) for idx, prompt in enumerate(prompts(6))]
    answers = await asyncio.gather(*(collect(served, request) for request in asked))
    target = build_target()
    for request, (tokens, reason) in zip(asked, answers, strict=True):
        assert tokens == run(build_engine(target, None, EngineShape()), [request])[request.request_id]
        assert reason is FinishReason.LENGTH
    stats = await served.stats()
    assert stats.num_accepted > 0
    assert stats.num_held_blocks == 0


@pytest.mark.parametrize(
    ("sampling", "parameter"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"stop_token_ids": (VOCAB,), "min_tokens": 1}, "stop_token_ids"),
        ({"speculation": "tree-99"}, "speculation"),
    ],
)
async def test_a_refusal_names_the_field_and_leaves_the_core_serving(served, sampling, parameter):
    with pytest.raises(RequestError) as refusal:
        await collect(served, request_of("refused", (7,), 1, **sampling))
    assert refusal.value.parameter == parameter
    tokens, _ = await collect(served, request_of("refused", (7,), 1, max_tokens=3))
    assert len(tokens) == 3


async def test_a_full_queue_refuses_and_the_rest_is_served(served):
    asked = [request_of(f"q{idx}", (10, idx), idx, max_tokens=60) for idx in range(30)]
    answers = await asyncio.gather(*(collect(served, request) for request in asked), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, CapacityError)]
    served_answers = [answer for answer in answers if isinstance(answer, tuple)]
    assert refused
    assert len(refused) + len(served_answers) == 30
    assert all(len(tokens) == 60 for tokens, _ in served_answers)


async def test_a_second_stream_of_one_name_is_refused_and_the_first_goes_on(served):
    async with aclosing(served.generate(long_request())) as deltas:
        tokens = [*(await anext(deltas)).token_ids]
        with pytest.raises(RequestError, match="in use") as refusal:
            await anext(served.generate(long_request()))
        assert refusal.value.parameter == "request_id"
        async for delta in deltas:
            tokens += delta.token_ids
    assert len(tokens) == 250


async def test_closing_a_stream_aborts_its_request_and_frees_its_blocks(served):
    before = await served.stats()
    async with aclosing(served.generate(long_request("closed"))) as deltas:
        await anext(deltas)
        assert (await served.stats()).num_held_blocks > 0
    after = await settle(served)
    assert after.num_aborted == before.num_aborted + 1
    assert after.num_finished == before.num_finished
    assert after.num_held_blocks == 0


async def test_cancelling_a_reader_aborts_its_request(served):
    before = await served.stats()
    task = asyncio.create_task(collect(served, long_request("cancelled")))
    while not (await served.stats()).num_running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = await settle(served)
    assert after.num_aborted == before.num_aborted + 1
    assert after.num_held_blocks == 0


async def test_stats_asked_by_a_reader_that_left_do_not_answer_the_next(served):
    lost = asyncio.create_task(served.stats())
    await asyncio.sleep(0)
    lost.cancel()
    first = await served.stats()
    await collect(served, request_of("counted", (7,), 1, max_tokens=2))
    assert (await served.stats()).num_output_tokens == first.num_output_tokens + 2


async def test_a_killed_core_fails_every_stream_and_the_health_check(doomed):
    streams = [asyncio.create_task(collect(doomed, long_request(f"s{idx}"))) for idx in range(3)]
    while not (await doomed.stats()).num_running:
        await asyncio.sleep(0)
    doomed.check_health()
    os.kill(doomed._link.process.pid, signal.SIGSTOP)
    await asyncio.sleep(0.05)
    asked = asyncio.create_task(doomed.stats())
    await asyncio.sleep(0.05)
    os.kill(doomed._link.process.pid, signal.SIGKILL)
    for answer in await asyncio.gather(asked, *streams, return_exceptions=True):
        assert isinstance(answer, EngineDeadError)
    with pytest.raises(EngineDeadError, match="gone"):
        doomed.check_health()
    with pytest.raises(EngineDeadError):
        await collect(doomed, long_request("late"))
    with pytest.raises(EngineDeadError):
        await doomed.stats()


async def test_a_shutdown_fails_open_streams_and_is_safe_twice(doomed):
    stream = asyncio.create_task(collect(doomed, long_request()))
    while not (await doomed.stats()).num_running:
        await asyncio.sleep(0)
    await doomed.shutdown()
    with pytest.raises(EngineDeadError):
        await stream
    assert doomed._link.process.returncode == 0
    await doomed.shutdown()
    with pytest.raises(EngineDeadError):
        await collect(doomed, long_request())


async def test_a_core_whose_client_is_gone_ends(doomed):
    stream = asyncio.create_task(collect(doomed, long_request()))
    while not (await doomed.stats()).num_running:
        await asyncio.sleep(0)
    with socket.socket(fileno=os.dup(doomed._link._connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)
    assert await asyncio.to_thread(doomed._link.process.wait, 10) == 0
    with pytest.raises(EngineDeadError):
        await stream


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"model": "absent"}, ModelLoadError, "absent"),
        ({"speculation": SpeculationConfig(mode="tree-8")}, ConfigError, "tree-8"),
        ({"draft": "no path"}, EngineDeadError, "TypeError"),
    ],
)
async def test_what_stopped_a_start_is_raised(folders, tmp_path, changes, error, named):
    fields = {name: tmp_path / value if name == "model" else value for name, value in changes.items()}
    config = engine_config(**({"model": folders[0]} | fields), num_blocks=20)
    with pytest.raises(error, match=named):
        await AsyncEngine.start(config)


async def test_a_core_that_dies_without_a_word_is_an_error_with_its_status(folders, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDeadError, match="exit status 1"):
        await AsyncEngine.start(engine_config(folders[0]))


async def test_a_cancelled_start_leaves_no_process(folders, monkeypatch):
    processes = []
    spawn = engine.core_link._spawn

    def watch(core_end):
        processes.append(spawn(core_end))
        return processes[-1]

    monkeypatch.setattr(engine.core_link, "_spawn", watch)
    task = asyncio.create_task(AsyncEngine.start(engine_config(folders[0])))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes[0].returncode == -signal.SIGKILL


class BrokenEngine:
    """An engine whose first step raises what nobody foresaw."""

    facts = None

    def __init__(self):
        self.has_work = False

    def add(self, request):
        self.has_work = True

    def step(self):
        raise ZeroDivisionError("a step divided by zero")


async def test_an_unforeseen_error_of_a_step_is_the_last_word_of_the_core(monkeypatch, caplog):
    monkeypatch.setattr(engine.core.Engine, "load", lambda config: BrokenEngine())
    ours, theirs = socket.socketpair()
    statuses = []
    core = threading.Thread(target=lambda: statuses.append(engine.core.main(theirs.detach())))
    core.start()
    with Connection(ours.detach()) as connection:
        connection.send("config")
        assert isinstance(connection.recv(), Ready)
        connection.send(Add(long_request()))
        last = await asyncio.to_thread(connection.recv)
    await asyncio.to_thread(core.join)
    assert isinstance(last, Failed)
    assert isinstance(last.error, EngineDeadError)
    assert str(last.error) == "ZeroDivisionError: a step divided by zero"
    assert statuses == [1]
    assert "engine core died" in caplog.text


@pytest_asyncio.fixture(loop_scope="module")
async def stoppable(folders):
    """Return a core that hangs after a second of silence, to be stopped and continued."""
    engine = await AsyncEngine.start(engine_config(folders[0], hang_seconds=1.0, num_blocks=200))
    yield engine
    os.kill(engine._link.process.pid, signal.SIGCONT)
    await engine.shutdown()


def is_healthy(engine):
    try:
        engine.check_health()
    except EngineDeadError as error:
        return "hangs" not in str(error)
    return True


async def wait_for_health(engine, expected):
    async with asyncio.timeout(20):
        while is_healthy(engine) != expected:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_stopped_core_is_unhealthy_until_it_goes_on(stoppable, is_busy):
    stream = asyncio.create_task(collect(stoppable, long_request())) if is_busy else None
    while is_busy and not (await stoppable.stats()).num_running:
        await asyncio.sleep(0)
    os.kill(stoppable._link.process.pid, signal.SIGSTOP)
    assert is_healthy(stoppable), "a second has not passed"
    await wait_for_health(stoppable, expected=False)
    with pytest.raises(EngineDeadError, match="hangs"):
        await collect(stoppable, long_request("late"))
    os.kill(stoppable._link.process.pid, signal.SIGCONT)
    await wait_for_health(stoppable, expected=True)
    assert len((await collect(stoppable, request_of("after", (7,), 1, max_tokens=3)))[0]) == 3
    if stream is not None:
        assert len((await stream)[0]) == 250


async def test_silence_of_an_idle_core_or_an_unread_answer_is_no_hang(stoppable):
    async with aclosing(stoppable.generate(long_request())) as deltas:
        await anext(deltas)
        while (await stoppable.stats()).num_running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.2)
        assert is_healthy(stoppable), "its end is in the queue, so the core owes nothing"
        assert sum([len(delta.token_ids) async for delta in deltas]) > 0
    await asyncio.sleep(1.2)
    assert is_healthy(stoppable)


async def test_readers_of_stats_share_one_question_and_are_told_when_no_answer_comes(stoppable, monkeypatch):
    sent = []
    send = stoppable._link.send
    monkeypatch.setattr(stoppable._link, "send", lambda message: (sent.append(message), send(message)))
    os.kill(stoppable._link.process.pid, signal.SIGSTOP)
    asked = [asyncio.create_task(stoppable.stats()) for _ in range(100)]
    answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
    assert all(isinstance(answer, EngineDeadError) and "hangs" in str(answer) for answer in answers)
    with pytest.raises(EngineDeadError, match="hangs"):
        await stoppable.stats()
    assert sent == [AskStats()]
    os.kill(stoppable._link.process.pid, signal.SIGCONT)
    await wait_for_health(stoppable, expected=True)
    first, second = await asyncio.gather(stoppable.stats(), stoppable.stats())
    assert first == second


async def test_a_core_that_does_not_read_stops_nobody_and_loses_nothing(stoppable):
    os.kill(stoppable._link.process.pid, signal.SIGSTOP)
    before = asyncio.get_running_loop().time()
    # More than the socket holds.
    asked = [request_of(f"r{idx}", tuple(range(10, 90)) * 3, 1, max_tokens=1) for idx in range(600)]
    streams = [asyncio.create_task(collect(stoppable, request)) for request in asked]
    while len(stoppable._streams) < len(asked):
        await asyncio.sleep(0)
    assert asyncio.get_running_loop().time() - before < 1.0
    assert stoppable._link._outbox.qsize() > 0, "the socket is full"
    os.kill(stoppable._link.process.pid, signal.SIGCONT)
    answers = await asyncio.gather(*streams)
    assert len({tokens for tokens, _ in answers}) == 1
    assert (await settle(stoppable)).num_held_blocks == 0


async def test_an_answer_that_its_client_finished_counts_as_finished(served):
    before = await served.stats()
    tokens = []
    async with aclosing(served.generate(long_request("cut"))) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            served.finish("cut")
            served.finish("cut")
    after = await settle(served)
    assert 0 < len(tokens) < 250
    assert after.num_finished == before.num_finished + 1
    assert after.num_aborted == before.num_aborted
    assert after.num_held_blocks == 0
    served.finish("nobody")
    served.check_health()


async def test_a_name_may_be_used_again_at_once(served):
    target = build_target()
    for idx in range(30):
        async with aclosing(served.generate(long_request("again"))) as deltas:
            await anext(deltas)
        asked = request_of("again", (20 + idx, 7), 1, max_tokens=5)
        tokens, _ = await collect(served, asked)
        assert tokens == run(build_engine(target, None, EngineShape()), [asked])["again"]


@pytest_asyncio.fixture(loop_scope="module")
async def spoken():
    """Return a client and the core's end of its connection, for a core that says what the test says."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "1000"])
    engine = AsyncEngine(CoreLink(process, Connection(ours.detach()), facts=None), hang_seconds=100.0)
    with Connection(theirs.detach()) as core:
        yield engine, core
    process.kill()
    await engine.shutdown()


def delta_of(name, *token_ids, reason=None):
    return SequenceDelta(name, token_ids, 0, reason, 1, 0, 0, 0)


@pytest.mark.parametrize(
    "late",
    [
        Deltas((delta_of("r", 1), delta_of("other", 2)), num_added=1),
        Deltas((delta_of("r", 1, reason=FinishReason.STOP),), num_added=1),
        Refused("r", CapacityError("the first was refused"), num_added=1),
    ],
)
async def test_news_of_an_aborted_request_never_reach_its_namesake(spoken, late):
    engine, core = spoken
    first = asyncio.create_task(collect(engine, long_request("r")))
    assert isinstance(await asyncio.to_thread(core.recv), Add)
    first.cancel()
    assert await asyncio.to_thread(core.recv) == Abort("r")
    second = asyncio.create_task(collect(engine, long_request("r")))
    assert isinstance(await asyncio.to_thread(core.recv), Add)
    core.send(late)
    core.send(Deltas((delta_of("r", 8, 9, reason=FinishReason.STOP),), num_added=2))
    assert await second == ((8, 9), FinishReason.STOP)


class BrokenPickle:
    """Raises where it is read."""

    def __reduce__(self):
        return exec, ("raise RuntimeError('no such class')",)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (b"no pickle", "UnpicklingError"),
        (pickle.dumps(BrokenPickle()), "no such class"),
        (pickle.dumps("a word"), "TypeError: the core sent a str"),
        (pickle.dumps(Failed(EngineDeadError("ZeroDivisionError: in a step"))), "ZeroDivisionError"),
    ],
)
async def test_a_core_that_is_not_understood_fails_all_and_its_log_says_why(spoken, caplog, said, cause):
    engine, core = spoken
    stream = asyncio.create_task(collect(engine, long_request()))
    asked = asyncio.create_task(engine.stats())
    await asyncio.to_thread(core.recv)
    core.send_bytes(said)
    if b"Failed" in said:
        core.close()
    for answer in await asyncio.wait_for(asyncio.gather(stream, asked, return_exceptions=True), 10):
        assert isinstance(answer, EngineDeadError)
        assert str(answer) == "the engine core is gone: send the request again"
    assert cause in caplog.text
    with pytest.raises(EngineDeadError, match="gone"):
        engine.check_health()
    assert b"Failed" in said or await asyncio.to_thread(engine._link.process.wait, 10) == -signal.SIGKILL


async def left_behind(config):
    engine = await AsyncEngine.start(config)
    await collect(engine, request_of("r0", (7,), 1, max_tokens=2))
    return engine


def close_loop_first(config):
    """Close the event loop of a live engine, let its core speak once more, and end it."""
    engine = asyncio.run(left_behind(config))
    link = engine._link
    link.send(Add(long_request()))
    for thread in link._threads:
        thread.join(10)
        assert not thread.is_alive(), "no thread goes on when nobody listens"
    link.process.kill()
    link.process.wait()
    link._connection.close()


async def test_a_loop_that_closes_first_ends_the_reader_quietly(folders):
    await asyncio.to_thread(close_loop_first, engine_config(folders[0]))


async def test_the_mode_is_switched_while_the_core_serves_and_an_unknown_one_is_refused(served):
    asked = request_of("switched", (10, 11, 12), 1, max_tokens=30)
    before = await collect(served, asked)
    for mode in ("off", "tree-8", "table", "auto"):
        served.switch_speculation(mode)
        assert await collect(served, asked) == before
        steps = dict((await settle(served)).steps_by_tree)
        assert mode not in ("off", "tree-8") or steps[mode] > 0
    with pytest.raises(ConfigError, match="no tree is called 'tree-9'"):
        served.switch_speculation("tree-9")
    served.switch_speculation("chain-3")
