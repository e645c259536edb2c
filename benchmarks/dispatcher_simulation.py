"""A dispatcher in simulated traffic, against an oracle that knows every cost and every chance.

The real dispatcher is driven as the engine drives it, one step late. Costs and acceptance come from
`dispatcher_world`, what is simulated from `simulate_dispatcher`.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.dispatcher_world import Process, SimulatedRow, World, stats_of
from engine.batch import Load
from engine.config import SpeculationConfig
from engine.dispatcher.acceptance import PRIOR_STRENGTH
from engine.dispatcher.adaptive import MIN_PLAIN_RUN, AdaptiveDispatcher
from engine.dispatcher.latency import PLAIN, LatencyTable
from engine.dispatcher.static import StaticDispatcher
from engine.request import SamplingParams
from engine.row_kind import RowKind
from engine.step_stats import StepStats
from engine.tree.library import DEFAULT_PROFILE, TreeLibrary
from engine.tree.search import Profile
from engine.tree.topology import TreeTopology

JITTER = 0.02  # relative noise of a step's time
BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 20  # never short
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Traffic:
    """How many rows run at a step, and how long the context and the answer of a new request are."""

    batch_at: Callable[[int], int]
    context_of: Callable[[random.Random], int] = lambda _: 512
    answer_of: Callable[[random.Random], int] = lambda source: 1 + int(source.expovariate(1 / 300))


@dataclass
class Outcome:
    """What came of a run. Tokens are expected ones, so that luck is left out."""

    tokens: float = 0.0
    seconds: float = 0.0
    oracle_tokens: float = 0.0
    oracle_seconds: float = 0.0
    plain_seconds: float = 0.0  # of plain decoding at the same loads
    plain_tokens: float = 0.0
    steps_by_arm: Counter[str] = field(default_factory=Counter)
    oracle_by_arm: Counter[str] = field(default_factory=Counter)
    num_probe_steps: int = 0
    switches: list[int] = field(default_factory=list)  # steps at which the held arm changed

    @property
    def efficiency(self) -> float:
        """Tokens per second over the oracle's."""
        return self.tokens / self.seconds / (self.oracle_tokens / self.oracle_seconds)

    @property
    def over_plain(self) -> float:
        """Tokens per second over those of plain decoding throughout."""
        return self.tokens / self.seconds / (self.plain_tokens / self.plain_seconds)

    def most_switches(self, window: int = 1000) -> int:
        """Return the most switches within `window` steps."""
        return max(
            (sum(first <= step < first + window for step in self.switches) for first in self.switches),
            default=0,
        )


class Simulation:
    """One run of a dispatcher in a world."""

    def __init__(
        self, world: World, acceptance: Process, traffic: Traffic, dispatcher: AdaptiveDispatcher, seed: int
    ) -> None:
        self._world, self._acceptance, self._traffic = world, acceptance, traffic
        self._dispatcher = dispatcher
        self._source = random.Random(seed)  # noqa: S311 - a simulation
        self._rows: list[SimulatedRow] = []
        self._num_requests = 0
        self._trees = {tree.name: tree for tree in world.arms}
        self._late: deque[StepStats] = deque()
        self._num_plain_run = 0

    def run(self, num_steps: int, start: int = 0) -> Outcome:
        """Run `num_steps` steps, of which those before `start` are not counted."""
        outcome = Outcome()
        for step in range(num_steps):
            held = self._dispatcher.held
            self._admit(self._traffic.batch_at(step))
            load = self._load()
            tree = self._dispatcher.choose(load)
            if self._late:
                self._dispatcher.observe(self._late.popleft())
            extra = self._catch_up_seconds(tree, load)
            if step >= start:
                self._score(outcome, tree, load, step, extra)
                outcome.num_probe_steps += tree.name != self._dispatcher.held
                outcome.switches += [step] if self._dispatcher.held != held else []
            self._late.append(self._execute(tree, load, step, extra))
        return outcome

    def _admit(self, batch: int) -> None:
        """End requests that are done or too many, and start new ones."""
        self._rows = [row for row in self._rows if row.num_left > 0][:batch]
        while len(self._rows) < batch:
            context = self._traffic.context_of(self._source)
            lean = self._source.gauss(0.0, self._acceptance.spread) if self._acceptance.spread else 0.0
            num_left = self._traffic.answer_of(self._source)
            kind = RowKind.of(GREEDY, context)
            self._rows.append(SimulatedRow(self._num_requests, context, num_left, lean, kind=kind))
            self._num_requests += 1

    def _load(self) -> Load:
        return Load(len(self._rows), 0, NUM_BLOCKS, sum(row.context for row in self._rows))

    def _catch_up_seconds(self, tree: TreeTopology, load: Load) -> float:
        """Return what this step takes more since the draft missed the steps before it."""
        num_missed = self._num_plain_run
        self._num_plain_run = 0 if tree.num_drafts else num_missed + 1
        is_behind = tree.num_drafts > 0 and num_missed >= MIN_PLAIN_RUN
        return self._world.table.catch_up_seconds(load.num_running) if is_behind else 0.0

    def _score(self, outcome: Outcome, tree: TreeTopology, load: Load, step: int, extra: float) -> None:
        batch, num_cached = load.num_running, load.num_cached_tokens
        tokens = {
            name: self._acceptance.expected(self._rows, other, step) for name, other in self._trees.items()
        }
        seconds = {name: self._world.seconds(name, batch, num_cached) for name in self._trees}
        best = max(tokens, key=lambda name: tokens[name] / seconds[name])
        outcome.tokens += tokens[tree.name]
        outcome.seconds += seconds[tree.name] + extra
        outcome.oracle_tokens += tokens[best]
        outcome.oracle_seconds += seconds[best]
        outcome.plain_tokens += batch
        outcome.plain_seconds += seconds[PLAIN]
        outcome.steps_by_arm[tree.name] += 1
        outcome.oracle_by_arm[best] += 1

    def _execute(self, tree: TreeTopology, load: Load, step: int, extra: float) -> StepStats:
        rows = []
        for row in self._rows:
            verdict = self._acceptance.verify(row, tree, step, self._source)
            rows.append(stats_of(row, tree, verdict))
            row.context += len(verdict[0]) + 1
            row.num_left -= len(verdict[0]) + 1
        seconds = self._world.seconds(tree.name, load.num_running, load.num_cached_tokens) + extra
        seconds *= self._source.lognormvariate(0.0, JITTER)
        return StepStats(step, load, tuple(rows), 0, seconds)


def build_dispatcher(
    world: World,
    table: LatencyTable | None = None,
    prior: Profile = DEFAULT_PROFILE,
    prior_strength: float = PRIOR_STRENGTH,
    max_step_seconds: float = math.inf,
) -> AdaptiveDispatcher:
    """Return a dispatcher over the trees of a world that believes `table`, by default the true one."""
    library = TreeLibrary([tree for tree in world.arms if tree.name.startswith("tree")])
    return AdaptiveDispatcher(
        world.arms,
        table or world.table,
        prior,
        StaticDispatcher(SpeculationConfig(), (), library),
        block_size=BLOCK_SIZE,
        max_num_seqs=256,
        prior_strength=prior_strength,
        max_step_seconds=max_step_seconds,
    )
