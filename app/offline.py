"""Runs requests to their end on an engine in this process, without HTTP and text.

What is measured on it is left to `bench` and `evaluation`.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from engine import EngineFacts, EngineStats, FinishReason, Request, SequenceDelta, StepError


class StepEngine(Protocol):
    """What offline use asks of an engine; `engine.Engine` is one."""

    facts: EngineFacts

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> Sequence[SequenceDelta]: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer; `num_calls` verification calls brought its tokens."""

    token_ids: tuple[int, ...]
    num_calls: int


def run_to_end(
    engine: StepEngine, requests: Sequence[Request], on_delta: Callable[[], None] = lambda: None
) -> list[Completion]:
    """Return the answers in the order of `requests`; `on_delta` is called whenever one has gained something.
    Raises what the engine raises, `StepError` included.
    """
    token_ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    num_calls = dict.fromkeys(token_ids, 0)
    for request in requests:
        engine.add(request)
    for delta in deltas(engine):
        on_delta()
        token_ids[delta.request_id] += delta.token_ids
        num_calls[delta.request_id] = delta.num_calls
    return [Completion(tuple(token_ids[key]), num_calls[key]) for key in token_ids]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep collections of garbage from what is loaded by now, as a server does: one that walks all of it
    would stop a measurement for long.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def deltas(engine: StepEngine) -> Iterator[SequenceDelta]:
    """Yield what each sequence gains until the engine has no work left."""
    while engine.has_work:
        for delta in engine.step():
            if delta.finish_reason is FinishReason.ERROR:
                raise StepError(delta.message or "the engine gave a request up")
            yield delta
