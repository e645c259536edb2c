"""Runs the requests of one call and merges their steps into one stream of text.

Closing the stream closes every request, which makes the engine give back their blocks. How the text is
written as JSON is left to `streaming`.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from app.answer import FAILURES, Answer, AnswerEnd
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
    """What one step or several added to choice `index`: `num_tokens` is its total so far, `end` set on its
    last delta.

    `drafts` has the draft tokens that each step verified and kept. `tokens` are those of the steps where
    log-probabilities are asked for; a token may come before its text, which a stop string can hold back.
    `prompt_logprobs`, on the first delta, are those of a scored prompt. `started` is when the first step of
    the choice was planned, by the monotonic clock.
    """

    index: int
    text: str
    num_tokens: int
    num_cached: int
    end: AnswerEnd | None
    drafts: tuple[tuple[int, int], ...] = ()
    calls: tuple[CallDelta, ...] = ()
    tokens: tuple[ScoredToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    started: float = 0.0


async def run_choices(
    engine: TokenEngine,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    options: CallOptions,
    turn: Callable[[], Awaitable[None]],
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Yield what the choices gained, all that is there at a time; `turn` is awaited between two times. The
    first error ends them all.
    """
    news, may_pull = asyncio.Event(), asyncio.Event()
    may_pull.set()
    choices = [_Choice(engine, tokenizer, idx, request, options) for idx, request in enumerate(requests)]
    tasks = [asyncio.create_task(choice.pull(news, may_pull)) for choice in choices]
    try:
        while not all(choice.is_over for choice in choices):
            await news.wait()
            news.clear()
            for choice in choices:  # before the deltas: a call that is refused in part must not begin
                if choice.error is not None:
                    raise choice.error
            if deltas := [delta for choice in choices if (delta := choice.take(news)) is not None]:
                # Nobody is woken for the steps that come meanwhile: they wait in the engine's own queues.
                may_pull.clear()
                yield deltas
                await turn()
                may_pull.set()
                await asyncio.sleep(0)  # they are pulled now, and taken together
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Choice:
    """One choice: the steps that nobody has taken yet, and its text so far.

    A delta is made of all steps that are there, so that a slow client gets fewer and larger messages, never a
    growing number of them.
    """

    def __init__(
        self, engine: TokenEngine, tokenizer: Tokenizer, index: int, request: Request, options: CallOptions
    ) -> None:
        self.error: Exception | None = None
        self._engine, self._tokenizer, self._index, self._request = engine, tokenizer, index, request
        self._answer = Answer(
            tokenizer,
            request.prompt_token_ids,
            StopStrings(options.stops, options.includes_stop),
            min_tokens=request.sampling.min_tokens,
            stop_token_ids=(*request.sampling.stop_token_ids, *engine.facts.eos_token_ids),
            skip_special_tokens=options.skips_special_tokens,
        )
        self._steps: list[SequenceDelta] = []
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._num_drafted = 0
        self._is_pulled = False

    @property
    def is_over(self) -> bool:
        """True once there is nothing more to take."""
        return self._answer.is_over or (self._is_pulled and not self._steps)

    async def pull(self, news: asyncio.Event, may_pull: asyncio.Event) -> None:
        """Collect the steps of the engine; leaving early, as with a lost client, aborts the sequence."""
        try:
            async with aclosing(self._engine.generate(self._request)) as steps:
                async for step in steps:
                    if step.token_ids or step.finish_reason is not None:
                        self._steps.append(step)
                        news.set()
                    else:
                        self._prompt_logprobs += step.logprobs
                    await may_pull.wait()
                    if self.is_over:
                        return
        except Exception as error:  # handed to the reader, who raises it
            self.error = error
        finally:
            self._is_pulled = True
            news.set()

    def take(self, news: asyncio.Event) -> ChoiceDelta | None:
        """Return what the steps since the last time brought. Raises `StepError` where the engine gave the
        sequence up; what came before is taken first.
        """
        if self._answer.is_over or not self._steps:
            return None
        steps, self._steps = self._steps, []
        if len(steps) > 1 and steps[-1].finish_reason in FAILURES:
            self._steps = [steps.pop()]
            news.set()
        delta = self._delta(steps)
        self._prompt_logprobs = ()
        if delta.end is not None:
            self._engine.finish(self._request.request_id)  # a stop string is not seen by the engine
        return delta

    def _delta(self, steps: Sequence[SequenceDelta]) -> ChoiceDelta:
        answer, last, num_before = self._answer, steps[-1], self._answer.num_tokens
        totals = [self._num_drafted, *(step.num_drafted for step in steps)]
        self._num_drafted = last.num_drafted
        if len(steps) > 1:
            last = last._replace(
                token_ids=tuple(token_id for step in steps for token_id in step.token_ids),
                logprobs=tuple(entry for step in steps for entry in step.logprobs),
            )
        text = answer.append(last)
        return ChoiceDelta(
            self._index,
            text,
            answer.num_tokens,
            last.num_prefix_hits,
            answer.end,
            tuple(
                (after - before, step.num_accepted_in_step)
                for (before, after), step in zip(itertools.pairwise(totals), steps, strict=True)
            ),
            tokens=_scored(self._tokenizer, answer, num_before, last),
            prompt_logprobs=self._prompt_logprobs,
            started=last.started,
        )


def _scored(
    tokenizer: Tokenizer, answer: Answer, num_before: int, step: SequenceDelta
) -> tuple[ScoredToken, ...]:
    """Return the tokens of a delta that `answer` has counted, as many as were scored: all or none."""
    kept = zip(range(num_before, answer.num_tokens), step.token_ids, step.logprobs, strict=False)
    return tuple(
        scored_token(tokenizer, token_id, entry, answer.offset_of(idx)) for idx, token_id, entry in kept
    )
