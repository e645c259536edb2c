"""Timed steps and counted calls are those of the same steps, on devices that run ahead of the host or not."""

from dataclasses import dataclass, replace

import pytest

from benchmarks.paired_rounds import screened, trimmed_mean
from benchmarks.steady_steps import SteadySteps, most_tokens, time_steps
from engine.batch import SequenceDelta
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.synthetic import SyntheticEngine, SyntheticWeights
from engine.tree.library import DEFAULT_PROFILE
from tests.synthetic_cases import TINY, engine_config

BATCH, CONTEXT, NUM_STEPS = 4, 64, 12
FIRST = 6  # launched when the clock starts: one more than the calls that fill and lead


def step_seconds(step: int) -> float:
    """Return a time that no other set of steps adds up to."""
    return 2.0**step


class TimedEngine:
    """An engine whose n-th step takes 2^n seconds over tree-n, on a device that is as late as `is_ahead`
    says.

    As in the real one a call launches a step, then collects the one before it.
    """

    def __init__(self, real: Engine, is_ahead: bool) -> None:
        self.facts, self._empty = real.facts, real.stats()
        self._is_ahead = is_ahead
        self.now = self._idle_at = 0.0
        self._ids: list[str] = []
        self._launched: tuple[int, float, tuple[str, ...]] | None = None
        self._num_launched = 0
        self._collected: list[tuple[str, int]] = []

    def add(self, request: Request) -> None:
        self._ids.append(request.request_id)

    def abort(self, request_id: str) -> bool:
        self._ids.remove(request_id)
        return True

    def wait(self) -> None:
        self.now = max(self.now, self._idle_at)

    def clock(self) -> float:
        return self.now

    def step(self) -> list[SequenceDelta]:
        before, self._launched = self._launched, None
        if self._ids:
            self._idle_at = max(self.now, self._idle_at) + step_seconds(self._num_launched)
            self._launched = (self._num_launched, self._idle_at, tuple(self._ids))
            self._num_launched += 1
            if not self._is_ahead:
                self.wait()
        if before is None:
            return []
        step, over_at, ids = before
        self.now = max(self.now, over_at)
        self._collected.append((f"tree-{step}", len(ids)))
        return [SequenceDelta(name, (1,), 0, None, 1, 0, 0, 0) for name in ids if name in self._ids]

    def stats(self):
        return replace(
            self._empty,
            num_steps=len(self._collected),
            num_calls=sum(num for _, num in self._collected),
            steps_by_tree=tuple(self._collected),
            num_running=len(self._ids),
        )


@dataclass(frozen=True)
class Bench:
    synthetic: SyntheticEngine
    prompts: tuple[tuple[int, ...], ...]

    def requests(self, tree: str, max_tokens: int) -> list[Request]:
        self.synthetic.cache(self.prompts)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculation=tree)
        return [
            Request(f"row-{row}", prompt, replace(params, seed=row))
            for row, prompt in enumerate(self.prompts)
        ]


@pytest.fixture(scope="module")
def bench():
    config: EngineConfig = engine_config()
    weights = SyntheticWeights.create("tiny", TINY, config)
    synthetic = SyntheticEngine(config, weights, DEFAULT_PROFILE, [(8, 4)])
    return Bench(synthetic, synthetic.random_prompts(BATCH, CONTEXT))


@pytest.mark.parametrize("is_ahead", [True, False], ids=["a device that runs behind", "a device that blocks"])
def test_time_and_calls_are_of_the_same_steps(bench, is_ahead):
    engine = TimedEngine(bench.synthetic.engine, is_ahead)
    found = time_steps(engine, bench.requests("off", 99), NUM_STEPS, engine.wait, engine.clock)
    timed = range(FIRST, FIRST + NUM_STEPS)
    assert found.calls == {f"tree-{step}": BATCH for step in timed}
    assert found.seconds == sum(map(step_seconds, timed))


def test_rate_counts_each_call_with_what_its_tree_brings():
    steps = SteadySteps(0.5, {"off": 6, "chain-3": 4})
    assert steps.rate({"off": 1.0, "chain-3": 2.25, "tree-8": 9.0}) == (6 * 1.0 + 4 * 2.25) / 0.5


@pytest.mark.parametrize(("tree", "depth"), [("off", 0), ("chain-3", 3), ("tree-8", 4)])
def test_every_step_of_a_round_holds_every_row_and_gives_its_blocks_back(bench, tree, depth):
    engine, ticks = bench.synthetic.engine, iter(range(100))
    for _ in range(2):  # a round leaves blocks of its own in the index
        requests = bench.requests(tree, most_tokens(NUM_STEPS, depth))
        found = time_steps(engine, requests, NUM_STEPS, bench.synthetic.synchronize, lambda: next(ticks))
        assert found == SteadySteps(1, {tree: NUM_STEPS * BATCH})
        assert not engine.has_work
        assert engine.stats().num_held_blocks == 0


def test_a_round_whose_rows_end_within_is_refused(bench):
    engine = bench.synthetic.engine
    requests = bench.requests("off", NUM_STEPS)
    with pytest.raises(AssertionError, match="rows came or went"):
        time_steps(engine, requests, NUM_STEPS, bench.synthetic.synchronize, lambda: 0.0)


def test_a_stall_moves_neither_the_mean_nor_its_error():
    mean, error = trimmed_mean([3.0, 100.0, 1.0, 4.0, 2.0])
    assert mean == 3.0
    assert error == pytest.approx(1.0 / (0.6 * 5**0.5))  # the deviation of 2, 2, 3, 4, 4 is 1
    assert trimmed_mean([5.0]) == (5.0, float("inf"))


def rounds_at(*rates):
    """Return rounds of one call each, of trees that bring one token a call."""
    return [SteadySteps(1.0 / rate, {"off": 1}) for rate in rates]


def test_what_cannot_be_the_best_is_left_out_and_what_is_compared_stays():
    lengths = {"off": 1.0}
    few = {"auto": rounds_at(1, 1, 1), "off": rounds_at(100, 101, 99), "chain-1": rounds_at(90, 91, 89)}
    assert list(screened(few, lengths)) == ["auto", "off"], "far behind"
    near = few | {"chain-1": rounds_at(97, 98, 96)}
    assert list(screened(near, lengths)) == ["auto", "off", "chain-1"], "too early to say"
    noise = (0.99, 1.01) * 8
    surely = {
        "auto": rounds_at(*noise),
        "off": rounds_at(*[100 * share for share in noise]),
        "chain-1": rounds_at(*[97 * share for share in reversed(noise)]),
        "chain-2": rounds_at(*[99.7 * share for share in reversed(noise)]),
    }
    assert list(screened(surely, lengths)) == ["auto", "off", "chain-2"]
