"""Runs the requests of one call and merges their steps into one stream of text.

Closing the stream closes every request, which makes the engine give back their blocks. How the text is
written as JSON is left to `streaming`.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from app.answer import Answer, AnswerEnd
from app.call import CallOptions
from app.logprobs import ScoredToken, scored_token
from app.tokenizer import Tokenizer
from engine import EngineFacts, EngineStats, Request, SequenceDelta, StopStrings, TokenLogprob


class TokenEngine(Protocol):
    """What the application asks of an engine; `engine.AsyncEngine` is one."""

    facts: EngineFacts

    def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]: ...
    def finish(self, request_id: str) -> None: ...
    async def stats(self) -> EngineStats: ...
    def check_health(self) -> None: ...
    async def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a step added to call `call_idx` of a choice; the first one has its id and the function's name."""

    call_idx: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What a step added to choice `index`: `num_tokens` is its total so far, `end` set on its last delta.

    `tokens` are those of the step where log-probabilities are asked for; a token may come before its text,
    which a stop string can hold back. `prompt_logprobs`, on the first delta, are those of a scored prompt.
    `started` is when the first step of the choice was planned, by the monotonic clock.
    """

    index: int
    text: str
    num_tokens: int
    num_cached: int
    end: AnswerEnd | None
    num_drafted_in_step: int = 0
    num_accepted_in_step: int = 0
    calls: tuple[CallDelta, ...] = ()
    tokens: tuple[ScoredToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    started: float = 0.0


@dataclass(frozen=True, slots=True)
class _Ended:
    """A choice has no more deltas: it is complete, or `error` stopped it."""

    error: Exception | None


async def run_choices(
    engine: TokenEngine, tokenizer: Tokenizer, requests: Sequence[Request], options: CallOptions
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Yield what the choices gained, all that is ready at a time. The first error ends them all."""
    # One queue, so that a slow client gets fewer and larger messages, never a growing number of them.
    queue: asyncio.Queue[ChoiceDelta | _Ended] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_pump(_run_choice(engine, tokenizer, idx, request, options), queue))
        for idx, request in enumerate(requests)
    ]
    num_open = len(tasks)
    try:
        while num_open:
            ready = [await queue.get()]
            while not queue.empty():
                ready.append(queue.get_nowait())
            for item in ready:  # before the deltas: a call that is refused in part must not begin
                if isinstance(item, _Ended):
                    num_open -= 1
                    if item.error is not None:
                        raise item.error
            if deltas := [item for item in ready if isinstance(item, ChoiceDelta)]:
                yield deltas
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    deltas: AsyncGenerator[ChoiceDelta, None], queue: asyncio.Queue[ChoiceDelta | _Ended]
) -> None:
    error: Exception | None = None
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                queue.put_nowait(delta)
    except Exception as caught:  # handed to the reader of the queue, who raises it
        error = caught
    queue.put_nowait(_Ended(error))


async def _run_choice(
    engine: TokenEngine, tokenizer: Tokenizer, index: int, request: Request, options: CallOptions
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield the text of one choice; leaving early, as with a lost client, aborts its sequence."""
    answer = Answer(
        tokenizer,
        request.prompt_token_ids,
        StopStrings(options.stops, options.includes_stop),
        min_tokens=request.sampling.min_tokens,
        stop_token_ids=(*request.sampling.stop_token_ids, *engine.facts.eos_token_ids),
        skip_special_tokens=options.skips_special_tokens,
    )
    num_drafted = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    async with aclosing(engine.generate(request)) as steps:
        async for step in steps:
            if not step.token_ids and step.finish_reason is None:
                prompt_logprobs += step.logprobs
                continue
            num_before = answer.num_tokens
            text = answer.append(step)
            yield ChoiceDelta(
                index,
                text,
                answer.num_tokens,
                step.num_prefix_hits,
                answer.end,
                step.num_drafted - num_drafted,
                step.num_accepted_in_step,
                tokens=_scored(tokenizer, answer, num_before, step),
                prompt_logprobs=prompt_logprobs,
                started=step.started,
            )
            prompt_logprobs = ()
            num_drafted = step.num_drafted
            if answer.end is not None:
                engine.finish(request.request_id)  # a stop string is not seen by the engine
                return


def _scored(
    tokenizer: Tokenizer, answer: Answer, num_before: int, step: SequenceDelta
) -> tuple[ScoredToken, ...]:
    """Return the tokens of a step that `answer` has counted, as many as were scored: all or none."""
    kept = zip(range(num_before, answer.num_tokens), step.token_ids, step.logprobs, strict=False)
    return tuple(
        scored_token(tokenizer, token_id, entry, answer.offset_of(idx)) for idx, token_id, entry in kept
    )
