"""Compiles grammars in a process of their own, within limits, and remembers them.

What a grammar means is left to the backend in that process.
"""

import asyncio
import socket
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from engine.environment import core_environment
from engine.errors import EyasError, ModelLoadError, RequestError
from engine.grammar.vocabulary import ModelTokens
from engine.guidance import Grammar

START_SECONDS = 60.0  # importing the library, on a busy machine
COMPILE_SECONDS = 10.0
MAX_COMPILED_BYTES = 8 << 20  # loading it in the core holds up a step for a few hundred milliseconds
MAX_CACHE_BYTES = 128 << 20


class CompileCache:
    """Compiled grammars by kind, text and tokenizer, the latest used, up to a size in all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[Grammar, str], bytes] = OrderedDict()

    def get(self, grammar: Grammar, digest: str) -> bytes | None:
        """Return what was kept, which counts as used now."""
        compiled = self._entries.get((grammar, digest))
        if compiled is not None:
            self._entries.move_to_end((grammar, digest))
        return compiled

    def put(self, grammar: Grammar, digest: str, compiled: bytes) -> None:
        """Keep `compiled`, and drop what was used longest ago where that is too much."""
        self._entries[grammar, digest] = compiled
        self._num_bytes += len(compiled)
        while self._num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= len(dropped)


class GrammarCompiler:
    """A process for one model, started with its first grammar and again after one that broke it.

    One grammar is compiled at a time. It belongs to one event loop, and never holds it up.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        digest: str,
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        """`digest` names the model's tokens."""
        self._model = ModelTokens(folder, vocab_size, eos_token_ids)
        self._digest = digest
        self._compile_seconds = compile_seconds
        self._turn = asyncio.Lock()
        self._cache = CompileCache(MAX_CACHE_BYTES)
        self._tasks: dict[Grammar, asyncio.Task[bytes]] = {}
        self._worker: _Worker | None = None

    async def compile(self, grammar: Grammar) -> Grammar:
        """Return `grammar` compiled. Raises `RequestError` with the reason for one that is malformed, takes
        too long or grows too large, or where no library is installed.
        """
        compiled = self._cache.get(grammar, self._digest)
        if compiled is None:
            if grammar not in self._tasks:
                task = asyncio.create_task(self._compile_in_turn(grammar))
                task.add_done_callback(_note_error)
                self._tasks[grammar] = task
            # A caller that leaves must not stop it: the process has one conversation, and others may wait.
            compiled = await asyncio.shield(self._tasks[grammar])
        return replace(grammar, compiled=compiled)

    def close(self) -> None:
        """End the process. Safe to call twice."""
        for task in self._tasks.values():
            task.cancel()
        self._stop()

    async def _compile_in_turn(self, grammar: Grammar) -> bytes:
        try:
            async with self._turn:
                compiled = await asyncio.to_thread(self._compile, grammar)
            self._cache.put(grammar, self._digest, compiled)
            return compiled
        finally:
            del self._tasks[grammar]

    def _compile(self, grammar: Grammar) -> bytes:
        if self._worker is None:
            self._worker = _Worker(self._model)
        try:
            answer = self._worker.ask(grammar, self._compile_seconds)
        except TimeoutError as error:
            self._stop()
            raise RequestError(
                f"{grammar.parameter} takes longer than {self._compile_seconds:g} s to compile: simplify it",
                grammar.parameter,
            ) from error
        except OSError as error:
            self._stop()
            raise RequestError(
                f"{grammar.parameter} broke the grammar compiler, or takes more memory than it may: simplify"
                " it",
                grammar.parameter,
            ) from error
        if isinstance(answer, EyasError):
            raise answer
        if len(answer) > MAX_COMPILED_BYTES:
            raise RequestError(
                f"{grammar.parameter} grows to {len(answer)} bytes, of {MAX_COMPILED_BYTES} allowed:"
                " simplify it",
                grammar.parameter,
            )
        return answer

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _Worker:
    """One process that is ready to compile."""

    def __init__(self, model: ModelTokens) -> None:
        """Raises what stopped it."""
        ours, theirs = socket.socketpair()
        self._process = _spawn(theirs)
        self._connection = Connection(ours.detach())
        try:
            self._connection.send(model)
            refusal = self._receive(START_SECONDS)
        except (TimeoutError, OSError) as error:
            self.stop()
            raise ModelLoadError("the grammar compiler did not start; the log has the reason") from error
        if isinstance(refusal, EyasError):
            self.stop()
            raise refusal

    def ask(self, grammar: Grammar, seconds: float) -> bytes | EyasError:
        """Return its bytes or why not; raises `TimeoutError` or `OSError`, after which it must be stopped."""
        self._connection.send(grammar)
        answer = self._receive(seconds)
        assert answer is not None
        return answer

    def _receive(self, seconds: float) -> bytes | EyasError | None:
        if not self._connection.poll(seconds):
            raise TimeoutError
        try:
            answer: bytes | EyasError | None = self._connection.recv()
        except EOFError as error:
            raise ConnectionError("the process is gone") from error
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


def _note_error(task: asyncio.Task[bytes]) -> None:
    """Count the error of a compilation as seen: those who wait for it have it, and they may have left."""
    if not task.cancelled():
        task.exception()


def _spawn(its_end: socket.socket) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "engine.grammar.compile_worker", str(its_end.fileno())]
    try:
        return subprocess.Popen(command, pass_fds=[its_end.fileno()], env=core_environment())  # noqa: S603
    finally:
        its_end.close()
