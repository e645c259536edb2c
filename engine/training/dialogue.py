"""Dialogues that the target takes part in: given tokens, then tokens of its own, turn by turn, many at once.

What is given, and which dialogues are kept, is left to `synth` and to whoever asks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.batch import SequenceDelta
from engine.errors import StepError
from engine.request import FinishReason, Request, SamplingParams
from engine.stats import EngineFacts

_MIN_ROOM = 4  # tokens; a span with less is not begun


class StepEngine(Protocol):
    """What writing asks of an engine; `engine.Engine` is one."""

    facts: EngineFacts

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> Sequence[SequenceDelta]: ...


@dataclass(frozen=True, slots=True)
class TurnFrame:
    """Tokens around turns: `opening` before the first of the user, and what follows each turn and answer.

    `beginnings` are tokens that first turns of the user may begin with.
    """

    opening: tuple[int, ...]
    answer_opening: tuple[int, ...]
    user_opening: tuple[int, ...]
    beginnings: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """`given` tokens, then what the target writes by `sampling` until it stops.

    A span that is no answer is a turn of the user that the target invents; one that does not stop is dropped
    and ends its dialogue. A span that `follows_cut` also begins after an answer that did not stop, or not as
    the turns of this template do; for training data, nothing follows such an answer.
    """

    given: tuple[int, ...]
    is_answer: bool
    sampling: SamplingParams
    follows_cut: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target wrote in one span that is an answer, in `num_calls` verification calls."""

    token_ids: tuple[int, ...]
    num_calls: int


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The tokens of a dialogue; `is_answer` marks those of `answers`, end-of-text tokens among them."""

    token_ids: tuple[int, ...]
    is_answer: tuple[bool, ...]
    answers: tuple[Answer, ...]


@dataclass(slots=True)
class _Draft:
    """A dialogue while it grows; written by `_Writer` only."""

    spans: Sequence[Span]
    token_ids: list[int] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    written: list[int] = field(default_factory=list)  # of the span that is running
    span_idx: int = 0

    def next_request(self, name: str, max_length: int) -> Request | None:
        """Append what the next span is given and return its request; None where the dialogue is over."""
        if self.span_idx == len(self.spans):
            return None
        span = self.spans[self.span_idx]
        given = span.given
        if self.is_answer and self.is_answer[-1]:
            if self.token_ids[-1] == given[0]:
                given = given[1:]
            elif not span.follows_cut:
                return None
        room = max_length - len(self.token_ids) - len(given)
        if room < _MIN_ROOM:
            return None
        self._append(given, is_answer=False)
        sampling = replace(span.sampling, max_tokens=min(span.sampling.max_tokens, room))
        return Request(name, tuple(self.token_ids), sampling)

    def end_span(self, delta: SequenceDelta) -> bool:
        """Take over what the running span wrote; return whether another may follow."""
        span, written = self.spans[self.span_idx], tuple(self.written)
        self.written.clear()
        self.span_idx += 1
        has_stopped = delta.finish_reason is FinishReason.STOP
        if span.is_answer:
            self._append(written, is_answer=True)
            self.answers.append(Answer(written, delta.num_calls))
            return True
        self._append(written[:-1], is_answer=False)  # the next span is given the end of this turn
        return has_stopped and len(written) > 1

    def finished(self) -> Dialogue:
        """Return the dialogue up to its last answer."""
        end = len(self.is_answer)
        while end > 0 and not self.is_answer[end - 1]:
            end -= 1
        return Dialogue(tuple(self.token_ids[:end]), tuple(self.is_answer[:end]), tuple(self.answers))

    def _append(self, token_ids: Sequence[int], *, is_answer: bool) -> None:
        self.token_ids += token_ids
        self.is_answer += [is_answer] * len(token_ids)


def write_dialogues(
    engine: StepEngine, plans: Sequence[Sequence[Span]], max_length: int
) -> Iterator[tuple[int, Dialogue]]:
    """Yield (index of its plan, dialogue) as dialogues end, as many in flight as the engine has rows.

    None is longer than `max_length` tokens. A dialogue without an answer has no tokens. Raises `StepError`
    where the engine gives a request up.
    """
    max_length = min(max_length, engine.facts.max_model_len)
    waiting = iter(enumerate(plans))
    running: dict[str, tuple[int, _Draft]] = {}
    while True:
        while len(running) < engine.facts.max_num_seqs and (entry := next(waiting, None)) is not None:
            plan_idx, draft = entry[0], _Draft(entry[1])
            request = draft.next_request(f"dialogue-{plan_idx}-0", max_length)
            if request is None:
                yield plan_idx, draft.finished()
                continue
            running[request.request_id] = (plan_idx, draft)
            engine.add(request)
        if not engine.has_work:
            return
        for delta in engine.step():
            yield from _advance(engine, running, delta, max_length)


def _advance(
    engine: StepEngine, running: dict[str, tuple[int, _Draft]], delta: SequenceDelta, max_length: int
) -> Iterator[tuple[int, Dialogue]]:
    """Note what one sequence gained, and begin its dialogue's next span or yield the dialogue."""
    plan_idx, draft = running[delta.request_id]
    draft.written += delta.token_ids
    if delta.finish_reason is None:
        return
    if delta.finish_reason is FinishReason.ERROR:
        raise StepError(delta.message or "the engine gave a request up")
    del running[delta.request_id]
    request = None
    if draft.end_span(delta):
        request = draft.next_request(f"dialogue-{plan_idx}-{draft.span_idx}", max_length)
    if request is None:
        yield plan_idx, draft.finished()
        return
    running[request.request_id] = (plan_idx, draft)
    engine.add(request)
