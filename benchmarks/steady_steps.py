"""Times a fixed number of an engine's steps at a full batch, which neither fills nor drains meanwhile.

Which requests run, over which trees, and what a call of a tree is worth is left to the caller.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine import EngineFacts, EngineStats, Request, SequenceDelta

_MAX_FILL_CALLS = 4  # within which every row emits its first token, its context being cached
_LEAD_STEPS = 4  # before the clock starts, so that the host's lead on the device is what it stays


class SteppedEngine(Protocol):
    """What is asked of the engine under the clock; `engine.Engine` is one."""

    facts: EngineFacts

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self) -> Sequence[SequenceDelta]: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class SteadySteps:
    """The time of some steps and the calls that they made: one for each row and step, by the tree's name."""

    seconds: float
    calls: Mapping[str, int]

    def rate(self, tokens_per_call: Mapping[str, float]) -> float:
        """Return tokens per second, each call counted with what its tree brings on average."""
        return sum(num * tokens_per_call[tree] for tree, num in self.calls.items()) / self.seconds


def most_tokens(num_steps: int, depth: int) -> int:
    """Return a `max_tokens` that no row reaches in a round of `num_steps` timed steps over trees of up to
    `depth` levels.
    """
    return (_MAX_FILL_CALLS + _LEAD_STEPS + num_steps + 1) * (depth + 1) + 1


def time_steps(
    engine: SteppedEngine,
    requests: Sequence[Request],
    num_steps: int,
    wait: Callable[[], None],
    clock: Callable[[], float],
) -> SteadySteps:
    """Run `num_steps` steps of all `requests` under the clock, then abort them.

    `wait` returns once the device is idle. The device is idle when the clock starts and when it stops, so the
    time is that of the steps launched between; their counts are read one call after either, since the call
    that launches a step collects the one before it. Reading takes up to 0.2 ms of the host (a
    dispatcher that learns has more to tell), which a device that is the slower of the two hides.
    """
    _fill(engine, requests)
    wait()
    started = clock()
    engine.step()
    before = engine.stats()
    for _ in range(num_steps - 1):
        engine.step()
    wait()
    seconds = clock() - started
    engine.step()
    after = engine.stats()
    _clear(engine, requests)
    calls = Counter(dict(after.steps_by_tree))
    calls.subtract(dict(before.steps_by_tree))
    expected = num_steps * len(requests)
    found = (after.num_steps - before.num_steps, calls.total(), after.num_calls - before.num_calls)
    assert found == (num_steps, expected, expected), f"rows came or went: {found}, {expected} calls expected"
    return SteadySteps(seconds, +calls)


def _fill(engine: SteppedEngine, requests: Sequence[Request]) -> None:
    """Add the requests and step until all have emitted a token, and a few steps more."""
    for request in requests:
        engine.add(request)
    silent = {request.request_id for request in requests}
    for _ in range(_MAX_FILL_CALLS):
        silent -= {delta.request_id for delta in engine.step() if delta.token_ids}
        if not silent:
            break
    assert not silent, f"no token in {_MAX_FILL_CALLS} steps, though their contexts are cached: {silent}"
    for _ in range(_LEAD_STEPS):
        engine.step()


def _clear(engine: SteppedEngine, requests: Sequence[Request]) -> None:
    """Abort the requests and collect the step in flight; every block is given back."""
    for request in requests:
        engine.abort(request.request_id)
    engine.step()
    stats = engine.stats()
    kept = (stats.num_running, stats.num_waiting, stats.num_held_blocks)
    assert kept == (0, 0, 0), f"running, waiting and held blocks after the end: {kept}"
    num_blocks = stats.num_free_blocks + stats.num_cached_blocks
    assert num_blocks == engine.facts.num_blocks, (num_blocks, engine.facts.num_blocks)
