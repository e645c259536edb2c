"""Times what the host does for one decode step, part by part, with made-up answers in place of a device.

What a runner adds to launch a step is measured on its device, by `step_profile`. Run:
python benchmarks/host_step.py
"""

import argparse
import pickle
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

# Run by its path, Python looks for modules beside this file only.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from engine.batch import NUM_RANKS, StepPlan
from engine.config import SpeculationConfig
from engine.dispatcher.adaptive import DECIDE_EVERY, AdaptiveDispatcher
from engine.dispatcher.dispatcher import Dispatcher
from engine.dispatcher.latency import LatencyTable, Timing
from engine.dispatcher.static import StaticDispatcher
from engine.engine import Engine
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.kv_cache import KVCache
from engine.messages import Deltas
from engine.request import Request, SamplingParams
from engine.runner.logprobs import StepLogprobs
from engine.runner.step_handle import StepHandle
from engine.runner.step_output import DecodedRows
from engine.scheduler.scheduler import Scheduler, SchedulerConfig
from engine.stats import EngineFacts
from engine.tree.library import TreeLibrary
from engine.tree.topology import TreeTopology

VOCAB_SIZE, BLOCK_SIZE, CONTEXT, MAX_MODEL_LEN = 49152, 64, 300, 8192
NUM_WARM_UP = 30  # steps
ARMS = ("off", "chain-1", "chain-2", "chain-3", "chain-5")
PROFILE = ((0.70, 0.12, 0.05, 0.02), (0.68, 0.12, 0.05, 0.02), (0.65, 0.10, 0.05, 0.02))
SECONDS = 1e-3  # of a device step

Clock = defaultdict[str, float]
R = TypeVar("R")


class Timed:
    """Stands for `inner`, and adds the seconds of each call of its methods to `clock`."""

    def __init__(self, inner: object, name: str, clock: Clock) -> None:
        self._inner, self._name, self._clock = inner, name, clock

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._inner, method)
        if not callable(found):
            return found
        label = f"{self._name}.{method}"

        def call(*arguments: object) -> object:
            started = time.perf_counter()
            answer = found(*arguments)
            self._clock[label] += time.perf_counter() - started
            return answer

        return call


class FakeTimer:
    """A step of the device that always takes as long."""

    def stop(self) -> None:
        """Nothing was enqueued."""

    def wait(self) -> float:
        return SECONDS


class NoGuides:
    """No request follows a grammar."""

    def check(self, sampling: SamplingParams) -> None:
        """Accept any."""


class FakeSite:
    """A draft that does not fail."""

    failure = ""


class FakeRunner:
    """Answers every step at once from tables of random ones, as a device would lay them out."""

    def __init__(self, max_rows: int, clock: Clock) -> None:
        self.guides, self.draft_site = NoGuides(), FakeSite()
        self._max_rows, self._clock = max_rows, clock
        self._tables: dict[str, list[torch.Tensor]] = {}
        self._random = random.Random(0)  # noqa: S311

    def launch(self, plan: StepPlan) -> Timed:
        tree = plan.rows[0].topology
        if tree.name not in self._tables:
            self._tables[tree.name] = [self._answers(tree) for _ in range(16)]
        answer = self._tables[tree.name][plan.step_idx % 16]
        nothing: Any = None
        decoded = DecodedRows(answer, nothing, nothing)
        timer: Any = FakeTimer()
        return Timed(StepHandle(plan, decoded, None, StepLogprobs(), timer, None), "handle", self._clock)

    def _answers(self, tree: TreeTopology) -> torch.Tensor:
        return torch.tensor([self._answer(tree) for _ in range(self._max_rows)])

    def _answer(self, chain: TreeTopology) -> list[int]:
        draw, num_accepted = self._random, 0
        while num_accepted < chain.depth and draw.random() < PROFILE[0][0]:
            num_accepted += 1
        tokens = [draw.randrange(VOCAB_SIZE) for _ in range(num_accepted + 1)]
        path = [min(node, num_accepted) for node in range(chain.depth + 1)]
        ranks = (draw.choice((1, 2, 4)), 4) if chain.depth else (-1, NUM_RANKS)
        return [*tokens, *[-1] * (chain.depth - num_accepted), *path, *ranks, 1]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: rows, the tree that all of them run, and whether it is learnt or fixed."""

    num_rows: int
    tree: str
    is_adaptive: bool

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.tree} {'adaptive' if self.is_adaptive else 'static'}"


def create_dispatcher(cell: Cell, library: TreeLibrary) -> Dispatcher:
    """Return a dispatcher that runs the cell's tree; one that learns finds it the fastest by far."""
    fixed = StaticDispatcher(SpeculationConfig(mode=cell.tree), (), library)
    if not cell.is_adaptive:
        return fixed
    arms = [library.get(name) for name in ARMS]
    timings = [
        Timing(arm.name, rows, context, SECONDS if arm.name == cell.tree else 2 * SECONDS * arm.num_nodes)
        for arm in arms
        for rows in (1, 64, 256)
        for context in (64, 4096)
    ]
    table = LatencyTable.fit(timings, {arm.name: arm.num_nodes for arm in arms}, is_padded=True)
    return AdaptiveDispatcher(arms, table, PROFILE, fixed, block_size=BLOCK_SIZE, max_num_seqs=cell.num_rows)


def open_engine(cell: Cell, clock: Clock) -> Engine:
    """Return an engine with the cell's rows in it, each part of it timed."""
    library = TreeLibrary.search(max_depth=5)
    num_blocks = cell.num_rows * (MAX_MODEL_LEN // BLOCK_SIZE)
    kv_cache = KVCache(BlockPool(num_blocks + 1, BLOCK_SIZE))
    max_tokens = 2 * cell.num_rows * CONTEXT
    config = SchedulerConfig(cell.num_rows, cell.num_rows, max_tokens, MAX_MODEL_LEN, frozenset({0}), 8)
    facts = EngineFacts(
        *("fake", "fake", "fake", "fake", "bfloat16", "cpu", "fake", 1, VOCAB_SIZE, (0,)),
        *(MAX_MODEL_LEN, cell.num_rows, max_tokens, BLOCK_SIZE, num_blocks, library.names),
    )
    scheduler: Any = Timed(Scheduler(config, kv_cache, library), "scheduler", clock)
    dispatcher: Any = Timed(create_dispatcher(cell, library), "dispatcher", clock)
    runner: Any = Timed(FakeRunner(cell.num_rows, clock), "runner", clock)
    engine = Engine(runner, kv_cache, scheduler, dispatcher, facts, seed=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    draw = random.Random(1)  # noqa: S311
    for idx in range(cell.num_rows):
        prompt = tuple(draw.randrange(VOCAB_SIZE) for _ in range(CONTEXT))
        engine.add(Request(f"request-{idx:032}", prompt, sampling))
    return engine


def run(cell: Cell, num_blocks: int) -> dict[str, list[float]]:
    """Return the microseconds per step of each part, in each of so many blocks of steps."""
    clock: Clock = defaultdict(float)
    engine = open_engine(cell, clock)
    for _ in range(NUM_WARM_UP):
        engine.step()
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_blocks):
        clock.clear()
        for _ in range(DECIDE_EVERY):
            _run_step(engine, clock)
        clock["rest of step"] = 2 * clock["step"] - sum(
            value for name, value in clock.items() if not name.startswith("message")
        )
        for name, seconds in clock.items():
            found[name].append(1e6 * seconds / DECIDE_EVERY)
    return found


def _run_step(engine: Engine, clock: Clock) -> None:
    deltas = _time(clock, "step", engine.step)
    data = _time(clock, "message.dumps", lambda: pickle.dumps(Deltas(deltas, 0)))
    _time(clock, "message.loads", lambda: pickle.loads(data))  # noqa: S301


def _time(clock: Clock, name: str, work: Callable[[], R]) -> R:
    started = time.perf_counter()
    answer = work()
    clock[name] += time.perf_counter() - started
    return answer


def cells() -> Iterator[Cell]:
    for num_rows in (1, 64, 256):
        for tree in ("off", "chain-3"):
            for is_adaptive in (False, True):
                yield Cell(num_rows, tree, is_adaptive)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5, help="runs of each cell, which take turns")
    parser.add_argument("--blocks", type=int, default=25, help=f"of {DECIDE_EVERY} steps each")
    parser.add_argument("--rows", type=int, help="only cells of so many rows")
    options = parser.parse_args()
    chosen = [cell for cell in cells() if options.rows in (None, cell.num_rows)]
    found: dict[tuple[str, Cell], list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for cell in chosen:
            for part, blocks in run(cell, options.blocks).items():
                found[part, cell] += blocks
    print("microseconds per step, lower quartile of blocks")
    print(" " * 24, *(f"{cell!s:>22}" for cell in chosen))
    for part in sorted({part for part, _ in found}):
        figures = [statistics.quantiles(found[part, cell], n=4)[0] for cell in chosen]
        print(f"{part:24}", *(f"{figure:22.1f}" for figure in figures))


if __name__ == "__main__":
    main()
