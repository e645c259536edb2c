"""The client of an engine core process, for an asyncio program.

It starts the process, hands each request's deltas to its own generator, and fails them all if the process
dies.
"""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from engine.batch import SequenceDelta
from engine.config import EngineConfig
from engine.errors import EngineDeadError, RequestError
from engine.messages import (
    Abort,
    Add,
    AskStats,
    ClientMessage,
    CoreMessage,
    Deltas,
    Failed,
    Ready,
    Refused,
    Shutdown,
)
from engine.request import Request
from engine.stats import EngineFacts, EngineStats

_SHUTDOWN_SECONDS = 10.0


class AsyncEngine:
    """One engine core process. Made by `start`; every method belongs to the event loop that made it."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection, facts: EngineFacts) -> None:
        self.facts = facts
        self._process, self._connection = process, connection
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, asyncio.Queue[SequenceDelta | Exception]] = {}
        self._stats: list[asyncio.Future[EngineStats]] = []
        self._death: EngineDeadError | None = None
        self._reader = threading.Thread(target=self._read, name="engine-core-reader", daemon=True)
        self._reader.start()

    @staticmethod
    async def start(config: EngineConfig) -> "AsyncEngine":
        """Start a core and wait until it serves. Raises what stopped it: `ModelLoadError`, `ConfigError`, or
        `EngineDeadError` where it died without a word.
        """
        ours, theirs = socket.socketpair()
        process = _spawn(theirs)
        connection = Connection(ours.detach())
        try:
            answer = await asyncio.to_thread(_handshake, connection, config)
        except (EOFError, OSError) as error:
            raise EngineDeadError(
                f"the engine core died at its start, exit status {process.wait()}"
            ) from error
        except asyncio.CancelledError:
            process.kill()
            process.wait()  # a killed process ends at once; one never waited for stays a zombie
            raise
        if isinstance(answer, Failed):
            process.wait()
            raise answer.error
        assert isinstance(answer, Ready), answer
        return AsyncEngine(process, connection, answer.facts)

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        """Yield what each step gives this request, until one has a finish reason.

        Raises `RequestError` or `CapacityError` before the first delta, `EngineDeadError` at any time.
        Closing the generator early, by cancellation too, aborts the request and frees what it holds. Do not
        use the id of an aborted request again: deltas of its last step may still be on their way.
        """
        self.check_health()
        request_id = request.request_id
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use: ids must be unique", "request_id")
        queue: asyncio.Queue[SequenceDelta | Exception] = asyncio.Queue()
        self._streams[request_id] = queue
        is_open = True
        self._send(Add(request))
        try:
            while is_open:
                delta = await queue.get()
                if isinstance(delta, Exception):
                    is_open = False
                    raise delta
                is_open = delta.finish_reason is None
                yield delta
        finally:
            self._streams.pop(request_id, None)
            if is_open and self._death is None:
                self._send(Abort(request_id))

    async def stats(self) -> EngineStats:
        """Return the core's counters and gauges, read between two of its steps."""
        self.check_health()
        future: asyncio.Future[EngineStats] = self._loop.create_future()
        self._stats.append(future)
        self._send(AskStats())
        return await future

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the core is gone."""
        if self._death is not None:
            raise self._death

    async def shutdown(self) -> None:
        """End the core; requests still open fail with `EngineDeadError`. Safe to call twice."""
        if self._death is None:
            self._send(Shutdown())
        try:
            await asyncio.to_thread(self._process.wait, _SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._reader.join)
        self._connection.close()

    def _send(self, message: ClientMessage) -> None:
        # A core that has just died is reported by the reader, which also ends the streams.
        with suppress(OSError):
            self._connection.send(message)

    def _read(self) -> None:
        """Pass each message of the core to the loop; runs in a thread until the core is gone."""
        cause = "it ended"
        with suppress(RuntimeError):  # from a closed loop: nobody is left to tell
            with suppress(EOFError, OSError):
                while True:
                    message: CoreMessage = self._connection.recv()
                    if isinstance(message, Failed):
                        cause = str(message.error)
                    else:
                        self._loop.call_soon_threadsafe(self._dispatch, message)
            self._loop.call_soon_threadsafe(self._die, cause)

    def _dispatch(self, message: CoreMessage) -> None:
        match message:
            case Deltas(deltas):
                for delta in deltas:
                    if (queue := self._streams.get(delta.request_id)) is not None:
                        queue.put_nowait(delta)
            case Refused(request_id, error):
                if (queue := self._streams.get(request_id)) is not None:
                    queue.put_nowait(error)
            case EngineStats():
                future = self._stats.pop(0)
                if not future.done():
                    future.set_result(message)
            case _:
                raise AssertionError(message)

    def _die(self, cause: str) -> None:
        self._death = EngineDeadError(f"the engine core is gone: {cause}")
        for queue in self._streams.values():
            queue.put_nowait(self._death)
        for future in self._stats:
            if not future.done():
                future.set_exception(self._death)


def _spawn(core_end: socket.socket) -> subprocess.Popen[bytes]:
    """Start `python -m engine.core` with its end of the connection, and close that end here."""
    # The package may be on this process's path only, as in a test run from a checkout.
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "engine.core", str(core_end.fileno())]
    try:
        return subprocess.Popen(command, pass_fds=[core_end.fileno()], env=environment)  # noqa: S603
    finally:
        core_end.close()


def _handshake(connection: Connection, config: EngineConfig) -> CoreMessage:
    connection.send(config)
    answer: CoreMessage = connection.recv()
    return answer
