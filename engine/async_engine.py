"""The client of an engine core process, for an asyncio program.

It hands each request's deltas to its own generator, and fails them all if the process dies. The process and
its socket are left to `core_link`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

from engine.batch import SequenceDelta
from engine.config import EngineConfig
from engine.core_link import CoreLink
from engine.errors import ConfigError, EngineDeadError, RequestError
from engine.messages import Abort, Add, AskStats, CoreMessage, Deltas, LoadDraft, Refused, Switch
from engine.request import Request
from engine.stats import EngineStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Stream:
    """The answer to the `idx`-th `Add`; None in its queue ends it."""

    idx: int
    queue: asyncio.Queue[SequenceDelta | Exception | None] = field(default_factory=asyncio.Queue)


class AsyncEngine:
    """One engine core process. Made by `start`; every method belongs to the event loop that made it."""

    def __init__(self, link: CoreLink, hang_seconds: float) -> None:
        self.facts = link.facts
        self._link, self._hang_seconds = link, hang_seconds
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}  # those whose end has not come
        self._num_added = 0
        self._asked: asyncio.Future[EngineStats | None] | None = None
        self._owing_since = 0.0
        self._is_dead = self._is_closing = False
        link.listen(self._dispatch, self._die)

    @staticmethod
    async def start(config: EngineConfig) -> "AsyncEngine":
        """Start a core and wait until it serves. Raises what stopped it: `ModelLoadError`, `ConfigError`, or
        `EngineDeadError` where it died without a word.
        """
        return AsyncEngine(await CoreLink.start(config), config.hang_seconds)

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        """Yield what each step gives this request, until one has a finish reason.

        Raises `RequestError` or `CapacityError` before the first delta, `EngineDeadError` at any time.
        Closing the generator early, by cancellation too, aborts the request and frees what it holds; see
        `finish` for an answer that is whole.
        """
        self._check_core()
        request_id = request.request_id
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use: ids must be unique", "request_id")
        stream = self._open(request)
        try:
            while (news := await stream.queue.get()) is not None:
                if isinstance(news, Exception):
                    raise news
                yield news
                if news.finish_reason is not None:
                    return
        finally:
            if self._streams.get(request_id) is stream:  # else it has ended
                self._close(request_id, is_finished=False)

    def finish(self, request_id: str) -> None:
        """End a request whose client has all it wants, as after a stop string: it counts as finished, where
        closing its generator alone would count it as aborted. Nothing happens where it has ended.
        """
        if (stream := self._streams.get(request_id)) is not None:
            stream.queue.put_nowait(None)
            self._close(request_id, is_finished=True)

    async def stats(self) -> EngineStats:
        """Return the core's counters and gauges, read between two of its steps. Callers that ask at one time
        share one answer. Raises `EngineDeadError` where none comes.
        """
        self._check_core()
        try:
            # Shielded: one reader that leaves must not take the answer from the others.
            stats = await asyncio.wait_for(asyncio.shield(self._ask()), self._hang_seconds)
        except TimeoutError:
            raise EngineDeadError(f"the engine core hangs: no answer in {self._hang_seconds:g} s") from None
        if stats is None:
            raise _gone()
        return stats

    def switch_speculation(self, mode: str) -> None:
        """Let the core use another mode from its next step on. Raises `ConfigError` for an unknown tree."""
        self._check_core()
        if mode not in ("auto", "table", *self.facts.trees):
            raise ConfigError(f"no tree is called {mode!r}: there are {', '.join(self.facts.trees)}")
        self._link.send(Switch(mode))

    def load_draft(self, folder: Path, digest: str | None = None) -> None:
        """Let the core load a draft beside the serving one and swap; `stats` tells what comes of it."""
        self._check_core()
        self._link.send(LoadDraft(folder, digest))

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the core is gone, or hangs: owes an answer and has said nothing for
        `EngineConfig.hang_seconds`. Each call asks for a sign of life that a later one looks for; a core that
        speaks again is healthy again.
        """
        self._check_core()
        self._ask()

    async def shutdown(self) -> None:
        """End the core; requests still open fail with `EngineDeadError`. Safe to call twice."""
        self._is_closing = True
        await self._link.close()

    def _check_core(self) -> None:
        if self._is_dead:
            raise _gone()
        silence = time.monotonic() - max(self._owing_since, self._link.last_heard)
        if self._is_owing and silence > self._hang_seconds:
            raise EngineDeadError(f"the engine core hangs: it has said nothing for {silence:.0f} s")

    @property
    def _is_owing(self) -> bool:
        """True while the core must speak: it does after every step, and between steps where it is asked."""
        return bool(self._streams) or self._asked is not None

    def _note_debt(self) -> None:
        if not self._is_owing:
            self._owing_since = time.monotonic()

    def _open(self, request: Request) -> _Stream:
        self._link.send(Add(request))
        self._note_debt()
        self._num_added += 1
        stream = self._streams[request.request_id] = _Stream(self._num_added)
        return stream

    def _close(self, request_id: str, is_finished: bool) -> None:
        del self._streams[request_id]
        self._link.send(Abort(request_id, is_finished))

    def _ask(self) -> asyncio.Future[EngineStats | None]:
        """Return the answer to the question on its way, or to a new one; None if the core dies first."""
        if self._asked is None:
            self._note_debt()
            self._asked = self._loop.create_future()
            self._link.send(AskStats())
        return self._asked

    def _dispatch(self, message: CoreMessage) -> None:
        match message:
            case Deltas(deltas, num_added):
                for delta in deltas:
                    self._hand(delta.request_id, delta, num_added)
            case Refused(request_id, error, num_added):
                self._hand(request_id, error, num_added)
            case EngineStats():
                self._answer(message)

    def _hand(self, request_id: str, news: SequenceDelta | Exception, num_added: int) -> None:
        """Give a stream its news, unless it is younger than they are: they are of an aborted namesake."""
        stream = self._streams.get(request_id)
        if stream is None or stream.idx > num_added:
            return
        stream.queue.put_nowait(news)
        if isinstance(news, Exception) or news.finish_reason is not None:
            del self._streams[request_id]

    def _answer(self, stats: EngineStats | None) -> None:
        if self._asked is not None:
            self._asked.set_result(stats)
            self._asked = None

    def _die(self, cause: str) -> None:
        if not self._is_closing:
            logger.error("engine core died cause=%s", cause)
        self._is_dead = True
        for stream in self._streams.values():
            stream.queue.put_nowait(_gone())
        self._streams.clear()
        self._answer(None)


def _gone() -> EngineDeadError:
    """Return what a client is told; why the core died is for the log."""
    return EngineDeadError("the engine core is gone: send the request again")
