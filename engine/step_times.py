"""Timing decode steps of a running engine by tree, batch and context: what a latency table is fitted to.

Which steps are worth timing is left to `dispatcher/calibration`; an engine is seen only from outside.
"""

import contextlib
import math
import statistics
from typing import Protocol

from engine.errors import CapacityError, RequestError
from engine.request import Request, SamplingParams
from engine.stats import EngineFacts, EngineStats
from engine.tree.topology import TreeTopology

_NUM_WARM_UP = 2  # steps: the first may compile or catch up
_MOST_STEPS = 10_000  # with prompts that long, an engine is not for serving
_PRIMES = (7919, 104729)  # spread the token ids of made-up prompts


class TimedEngine(Protocol):
    """What timing asks of an engine that has no other work and follows no table of its own."""

    facts: EngineFacts

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self) -> object: ...
    def stats(self) -> EngineStats: ...
    def switch_speculation(self, mode: str) -> None: ...


class StepTimes:
    """Runs made-up requests. Their drafts are hardly ever right, which changes no step's time."""

    def __init__(self, engine: TimedEngine, num_steps: int = 4) -> None:
        self._engine, self._num_steps = engine, num_steps
        self._num_added = 0

    def time_step(self, batch: int, tree: TreeTopology, context: int) -> float:
        """Return the median seconds of a step of `batch` rows over `tree`, each behind about `context` cached
        tokens; infinity where so many do not fit.
        """
        num_steps = _NUM_WARM_UP + self._num_steps
        names = self._start(batch, tree.name, context, (num_steps + 3) * (tree.depth + 1))
        seconds = self._run(tree.name, batch, num_steps)[_NUM_WARM_UP:]
        self._end(names)
        return statistics.median(seconds) if len(seconds) == self._num_steps else math.inf

    def time_catch_up(self, batch: int, tree: TreeTopology, num_plain: int, context: int = 64) -> float:
        """Return how many seconds more the first step over `tree` takes after `num_plain` steps of plain
        decoding than the steps after it; infinity where the batch does not fit.
        """
        num_tokens = num_plain + (self._num_steps + 4) * (tree.depth + 1)
        names = self._start(batch, "off", context, num_tokens)
        has_run = bool(self._run("off", batch, num_plain))
        self._engine.switch_speculation(tree.name)
        seconds = self._run(tree.name, batch, 1 + self._num_steps)
        self._end(names)
        if not has_run or len(seconds) <= self._num_steps:
            return math.inf
        return max(0.0, seconds[0] - statistics.median(seconds[1:]))

    def _start(self, batch: int, mode: str, context: int, num_tokens: int) -> list[str]:
        """Queue requests that emit `num_tokens`; fewer than `batch`, or none, where they can never fit."""
        self._engine.switch_speculation(mode)
        facts = self._engine.facts
        length = max(1, min(context, facts.max_model_len - num_tokens))
        names: list[str] = []
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        with contextlib.suppress(CapacityError, RequestError):
            for _ in range(batch):
                start = self._num_added * _PRIMES[1]
                prompt = tuple((start + idx * _PRIMES[0]) % facts.vocab_size for idx in range(length))
                self._engine.add(Request(f"step-times-{self._num_added}", prompt, params))
                names.append(f"step-times-{self._num_added}")
                self._num_added += 1
        return names

    def _run(self, name: str, batch: int, num_steps: int) -> list[float]:
        """Step until `num_steps` steps of `batch` rows over a tree and nothing else were collected; return
        their seconds, fewer where requests end or wait for good.
        """
        found: list[float] = []
        for _ in range(_MOST_STEPS):
            before = self._engine.stats()
            if not self._engine.has_work or before.num_running + before.num_waiting < batch:
                break
            self._engine.step()
            after = self._engine.stats()
            seconds = _seconds(after, name) - _seconds(before, name)
            if seconds > 0.0 and before.num_running == batch:
                found.append(seconds)
            if len(found) == num_steps or (seconds > 0.0 and before.num_running < batch):
                break
        return found

    def _end(self, names: list[str]) -> None:
        for name in names:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()


def _seconds(stats: EngineStats, name: str) -> float:
    return next((total.seconds for total in stats.dispatch.totals if total.name == name), 0.0)
