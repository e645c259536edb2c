"""One engine core process and the two threads that talk with it, so that its client never waits for a socket.

What is said is left to `messages`; who is waiting for an answer to `async_engine`.
"""

import asyncio
import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.messages import ClientMessage, CoreMessage, Failed, Ready, Shutdown
from engine.stats import EngineFacts

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 10.0


class CoreLink:
    """Made by `start`, used once by `listen`. Its callbacks run in the event loop that called `listen`."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection, facts: EngineFacts) -> None:
        self.process, self.facts = process, facts
        self.last_heard = time.monotonic()
        self._connection = connection
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @staticmethod
    async def start(config: EngineConfig) -> "CoreLink":
        """Start a core and wait until it serves. Raises what stopped it, or `EngineDeadError` where it died
        without a word.
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
        return CoreLink(process, connection, answer.facts)

    def listen(self, on_message: Callable[[CoreMessage], None], on_end: Callable[[str], None]) -> None:
        """Pass each message of the core to `on_message`, in order, and at last why it fell silent to
        `on_end`, once.
        """
        loop = asyncio.get_running_loop()
        read = threading.Thread(
            target=self._read, args=(loop, on_message, on_end), name="engine-core-reader", daemon=True
        )
        write = threading.Thread(target=self._write, name="engine-core-writer", daemon=True)
        self._threads = [read, write]
        for thread in self._threads:
            thread.start()

    def send(self, message: ClientMessage) -> None:
        """Queue a message: a core that does not read cannot stop its client. To a core that is gone nothing
        is sent.
        """
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    async def close(self) -> None:
        """End the core, gently first, and both threads. Safe to call twice."""
        self.send(Shutdown())
        try:
            await asyncio.to_thread(self.process.wait, _SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._connection.close()

    def _write(self) -> None:
        with suppress(OSError):  # a core that has just died is reported by the reader
            while (data := self._outbox.get()) is not None:
                self._connection.send_bytes(data)

    def _read(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[CoreMessage], None],
        on_end: Callable[[str], None],
    ) -> None:
        cause = "it closed the connection"
        try:
            while True:
                message: object = self._connection.recv()
                self.last_heard = time.monotonic()
                if isinstance(message, Failed):
                    cause = str(message.error)
                elif isinstance(message, CoreMessage):
                    loop.call_soon_threadsafe(on_message, message)
                else:
                    raise TypeError(f"the core sent a {type(message).__name__}")
        except (EOFError, OSError):
            pass
        except Exception as error:  # the thread's edge: whatever it was, nobody hears the core any more
            if not loop.is_closed():  # then nobody is left to tell, and the core ends with this process
                logger.exception("engine core is not understood")
                cause = f"{type(error).__name__}: {error}"
                self.process.kill()
        self._outbox.put(None)
        with suppress(RuntimeError):  # from a closed loop
            loop.call_soon_threadsafe(on_end, cause)


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
