"""Notes the times of traced calls as their steps pass, and hands them over as spans when they end.

It stands around an engine, so that neither the engine nor the writing of answers knows of tracing. What a
span looks like is left to `ops.tracing`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Protocol

from app.call import Call, ChatCall
from app.generation import TokenEngine
from app.outcomes import Ending
from engine import EngineStats, FinishReason, Request, SequenceDelta
from ops.tracing import names
from ops.tracing.context import TraceContext
from ops.tracing.request_spans import Attribute, ChoiceTimes, RequestTimes

FAILED = "failed"


class SpanSink(Protocol):
    """Takes what is known of requests that have ended; `ops.tracing.export.SpanExport` is one."""

    def emit(self, request: RequestTimes) -> None: ...
    def close(self) -> None: ...


class _CallTrace:
    """One traced call while it runs: the times of its choices and the totals of their last deltas."""

    def __init__(self, times: RequestTimes, num_choices: int) -> None:
        self.times = times
        self._num_choices = num_choices
        self._last: dict[str, SequenceDelta] = {}
        self._ends: dict[str, str] = {}
        self._num_prompt_tokens = self._num_cached = self._num_tokens = 0

    def queue(self, request: Request, now: float) -> ChoiceTimes:
        idx = int(request.request_id.rpartition("-")[2])
        choice = ChoiceTimes(idx, queued=now, last=now)
        self.times.choices.append(choice)
        if idx % self._num_choices == 0:  # a prompt counts once, however many choices it has
            self._num_prompt_tokens += len(request.prompt_token_ids)
        return choice

    def observe(self, choice: ChoiceTimes, delta: SequenceDelta, now: float) -> None:
        """Note what a step gave a choice; its clock is that of the engine core, on this machine."""
        choice.last = now
        choice.started = min(max(delta.started, choice.queued), now)
        if delta.token_ids and choice.first is None:
            choice.first = now
            if choice.idx % self._num_choices == 0:
                self._num_cached += delta.num_prefix_hits
        self._num_tokens += len(delta.token_ids)
        self._last[delta.request_id] = delta
        if delta.finish_reason is not None:
            self._ends[delta.request_id] = delta.finish_reason.value

    def finish(self, request_id: str) -> None:
        self._ends[request_id] = FinishReason.STOP.value

    def attributes(self) -> dict[str, Attribute]:
        """Return the totals over the choices."""
        last = self._last.values()
        num_calls = sum(delta.num_calls for delta in last)
        found: dict[str, Attribute] = {
            names.INPUT_TOKENS: self._num_prompt_tokens,
            names.OUTPUT_TOKENS: self._num_tokens,
            names.CACHED_TOKENS: self._num_cached,
            names.CALLS: num_calls,
            names.DRAFTED: sum(delta.num_drafted for delta in last),
            names.ACCEPTED: sum(delta.num_accepted for delta in last),
            names.RESPONSE_ENDS: tuple(self._ends.values()),
        }
        if num_calls:
            found[names.ACCEPTANCE_LENGTH] = self._num_tokens / num_calls
        if self.times.first_token is not None:
            found[names.RESPONSE_FIRST_CHUNK] = self.times.first_token - self.times.began
        return found


class TracedEngine:
    """An engine whose calls are traced where `watch` was told so; the others pass through."""

    def __init__(
        self, engine: TokenEngine, sink: SpanSink, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.facts = engine.facts
        self._engine = engine
        self._sink = sink
        self._clock = clock
        self._open: dict[str, _CallTrace] = {}
        # Then that of whatever `stats` told last: drafts are swapped.
        self._draft_digest = engine.facts.draft_digest

    @contextmanager
    def watch(self, call: Call, call_id: str, context: TraceContext, ending: Ending) -> Iterator[None]:
        """Trace one call, whose requests are named CALL_ID-NUMBER, until it ends as `ending` then says."""
        is_chat = isinstance(call, ChatCall)
        operation = "chat" if is_chat else "text_completion"
        times = RequestTimes(context, f"{operation} {call.options.model}", self._clock())
        trace = _CallTrace(times, call.options.num_choices)
        self._open[call_id] = trace
        try:
            yield
        finally:
            del self._open[call_id]
            times.ended = self._clock()
            asked = _asked(call, operation) | {
                names.RESPONSE_ID: f"{'chatcmpl' if is_chat else 'cmpl'}-{call_id}"
            }
            times.attributes = asked | trace.attributes() | {names.OUTCOME: ending.outcome}
            if self._draft_digest is not None:
                times.attributes[names.DRAFT_DIGEST] = self._draft_digest
            if ending.outcome != "answered":
                times.attributes[names.ERROR_TYPE] = ending.outcome
            if ending.outcome == FAILED:
                times.error = "the server failed; its log has the reason"
            self._sink.emit(times)

    def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        """Return the engine's deltas; of a traced call it is noted when they came."""
        trace = self._open.get(_call_id(request.request_id))
        return self._engine.generate(request) if trace is None else self._observe(trace, request)

    async def _observe(self, trace: _CallTrace, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        choice = trace.queue(request, self._clock())
        async with aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                trace.observe(choice, delta, self._clock())
                yield delta

    def finish(self, request_id: str) -> None:
        if (trace := self._open.get(_call_id(request_id))) is not None:
            trace.finish(request_id)
        self._engine.finish(request_id)

    async def stats(self) -> EngineStats:
        stats = await self._engine.stats()
        self._draft_digest = stats.draft.digest
        return stats

    def check_health(self) -> None:
        self._engine.check_health()

    async def shutdown(self) -> None:
        """End the engine, then send the last spans."""
        await self._engine.shutdown()
        await asyncio.to_thread(self._sink.close)


def _call_id(request_id: str) -> str:
    return request_id.rpartition("-")[0]


def _asked(call: Call, operation: str) -> dict[str, Attribute]:
    options = call.options
    sampling = options.sampling
    found: dict[str, Attribute] = {
        names.OPERATION: operation,
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_MODEL: options.model,
        names.RESPONSE_MODEL: options.model,
        names.REQUEST_STREAM: options.is_stream,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_TOP_K: sampling.top_k,
        names.REQUEST_CHOICES: options.num_choices,
        names.SPECULATION: sampling.speculation,
    }
    if options.max_tokens is not None:
        found[names.REQUEST_MAX_TOKENS] = options.max_tokens
    if sampling.seed is not None:
        found[names.REQUEST_SEED] = sampling.seed
    return found
