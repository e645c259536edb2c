"""The dispatcher that learns: live acceptance, measured steps and load choose the tree.

Deterministic given its history. The rules of the choice are in `control`; it only keeps what they need.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from engine.batch import Load
from engine.dispatch_stats import NOT_CHOSEN, DispatchStats
from engine.dispatcher.acceptance import PRIOR_STRENGTH, AcceptanceModel
from engine.dispatcher.arms import reach
from engine.dispatcher.control import ArmEstimate, Situation, choose_arm
from engine.dispatcher.correction import LatencyModel
from engine.dispatcher.latency import PLAIN, UNREACHABLE, LatencyTable
from engine.dispatcher.probes import Probe, Prober
from engine.dispatcher.state import DispatchState
from engine.dispatcher.static import StaticDispatcher
from engine.dispatcher.totals import ArmTotals
from engine.dispatcher.watchdog import Watchdog
from engine.errors import ConfigError
from engine.step_stats import StepStats
from engine.tree.search import Profile
from engine.tree.topology import TreeTopology

DECIDE_EVERY = 8  # steps
_SWITCH_WINDOW = 1000  # steps in which few changes at one load are allowed
_SETTLING = 128  # steps at a load within which trees are timed before an arm is changed
_AMORTISED = 64  # steps over which catching up counts
_ALARM, _ALARM_OFF = 10.0, 5.0  # nats, speculating and not: there, one wrong alarm costs little
MIN_PLAIN_RUN = 2  # plain steps after which the draft has to catch up
_LONG_PLAIN_RUN = 16  # plain steps after which it has to catch up with about as much as it ever looks back


class AdaptiveDispatcher:
    """Chooses among `arms`, plain decoding first, by expected accepted tokens per second.

    `prior` is the acceptance to begin with, worth `prior_strength` visited nodes a depth. `fixed` says what
    is chosen while the mode is not "auto"; the learning goes on.
    """

    def __init__(
        self,
        arms: Sequence[TreeTopology],
        table: LatencyTable,
        prior: Profile,
        fixed: StaticDispatcher,
        *,
        block_size: int,
        max_num_seqs: int,
        max_step_seconds: float = math.inf,
        prior_strength: float = PRIOR_STRENGTH,
    ) -> None:
        missing = [tree.name for tree in arms if tree.name not in table.names]
        if missing or not arms or arms[0].name != PLAIN:
            raise ConfigError(f"arms must be off and trees of the latency table, which lacks {missing}")
        self._arms = {tree.name: tree for tree in arms}
        self._reach = {tree.name: reach(tree, table) for tree in arms}
        self._fixed, self._is_fixed = fixed, False
        self._block_size, self._max_num_seqs = block_size, max_num_seqs
        self._max_step_seconds = max_step_seconds
        self._acceptance = AcceptanceModel(prior, prior_strength)
        self._latency = LatencyModel(table)
        self._watchdog = Watchdog()
        self._totals = ArmTotals()
        self._prober = Prober()
        self._probe: Probe | None = None
        self._num_probe_steps = 0
        self._held = PLAIN
        self._batch = 0  # when the load was last new
        self._step = self._decided_at = 0
        self._arrived_at = 0  # the step at which it was
        self._is_urgent, self._is_broken = True, False
        self._leader, self._num_leading = PLAIN, 0
        self._switched_at: deque[int] = deque()  # steps of recent changes at one load and acceptance
        self._num_plain_run = 0  # plain steps observed in a row
        self._num_switches = 0
        self._state: DispatchState | None = None

    @property
    def held(self) -> str:
        """The arm in use between probes."""
        return self._held

    def switch(self, mode: str) -> None:
        if mode != "auto":
            self._fixed.switch(mode)
        self._is_fixed = mode != "auto"
        self._batch = self._num_probe_steps = 0  # whatever comes next is a new load

    def reachable(self, max_rows: int) -> tuple[tuple[TreeTopology, range], ...]:
        found = [(tree, range(1, min(max_rows, self._reach[name]) + 1)) for name, tree in self._arms.items()]
        found = [(tree, rows) for tree, rows in found if tree.num_drafts and rows]
        return (*found, *self._fixed.reachable(max_rows)) if self._is_fixed else tuple(found)

    def stats(self) -> DispatchStats:
        if self._is_fixed:
            return replace(self._fixed.stats(), totals=self._totals.all())
        state = self._state
        if state is None:
            return NOT_CHOSEN
        arm = state.situation.arm(self._held)
        return DispatchStats(
            arm=self._held,
            reason=state.choice.reason,
            tokens_per_second=None if arm is None else arm.rate,
            plain_tokens_per_second=state.situation.plain.rate,
            num_switches=self._num_switches,
            num_probes=self._prober.num_probes,
            num_alarms=self._acceptance.num_alarms,
            num_trips=self._watchdog.num_trips,
            state=state.to_json(),
            totals=self._totals.all(),
        )

    def choose(self, load: Load) -> TreeTopology:
        if self._is_fixed:
            return self._fixed.choose(load)
        self._step += 1
        self._watchdog.pass_step()
        is_new_load = self._note_load(max(1, load.num_running))
        if is_new_load or self._is_urgent or self._step - self._decided_at >= DECIDE_EVERY:
            self._decide(load, is_new_load)
        if self._num_probe_steps and self._probe is not None:
            self._num_probe_steps -= 1
            return self._arms[self._probe.name]
        return self._arms[self._held]

    def observe(self, stats: StepStats) -> None:
        self._prober.earn(stats.seconds)
        if not stats.rows:
            return
        is_off = self._held == PLAIN
        threshold = (_ALARM_OFF if is_off else _ALARM) + math.log(stats.num_rows)
        if self._acceptance.observe(stats.rows, threshold):
            self._is_urgent = self._is_broken = True
            self._switched_at.clear()  # they were changes among rates that are no more
            self._prober.hurry()
        name = self._totals.observe(stats)
        if name is not None:
            self._observe_time(name, stats)
        self._num_plain_run = 0 if stats.rows[0].topology.num_drafts else self._num_plain_run + 1

    def _note_load(self, batch: int) -> bool:
        """Return whether the batch left its bucket, or a quarter of what it was there; then changes of the
        arm are counted anew.
        """
        table = self._latency.table
        is_near = 0.8 * self._batch <= batch <= 1.25 * self._batch
        if is_near and table.bucket(batch) == table.bucket(self._batch):
            return False
        self._batch, self._arrived_at = batch, self._step
        self._switched_at.clear()
        return True

    def _observe_time(self, name: str, stats: StepStats) -> None:
        """Learn from a step whose time is that of one tree."""
        if name not in self._arms:
            return
        batch, num_cached = stats.num_rows, stats.load.num_cached_tokens
        is_catching_up = name != PLAIN and self._num_plain_run >= MIN_PLAIN_RUN
        if not is_catching_up:
            self._latency.observe(name, batch, num_cached, stats.seconds)
        elif self._num_plain_run >= _LONG_PLAIN_RUN:
            self._latency.observe_catch_up(name, batch, num_cached, stats.seconds)
        is_judged = name == self._held != PLAIN and not self._is_fixed
        if not is_judged or not self._latency.is_measured(PLAIN, batch):
            return
        plain_tokens = batch * stats.seconds / self._latency.seconds(PLAIN, batch, num_cached)
        row_tokens = [row.num_accepted + 1 for row in stats.rows for _ in row.sequence_idxs]
        self._watchdog.observe(row_tokens, plain_tokens)
        self._is_urgent = self._is_urgent or self._watchdog.num_blocked > 0

    def _decide(self, load: Load, is_new_load: bool) -> None:
        """Weigh the arms anew; a probe under way ends where the load or the held arm changes."""
        self._decided_at, self._is_urgent = self._step, False
        now = self._weigh(load, is_new_load)
        self._is_broken = False
        choice = choose_arm(now)
        self._num_leading = self._num_leading + 1 if choice.leader == self._leader else 1
        self._leader = choice.leader
        if choice.name != self._held:
            self._change(choice.name, is_new_load)
        elif is_new_load:
            self._num_probe_steps = 0
        if not self._num_probe_steps:
            catch_up = self._latency.catch_up_seconds(now.plain.batch)
            self._probe = self._prober.plan(now, self._held, self._step, catch_up)
            self._num_probe_steps = self._probe.num_steps if self._probe else 0
        known = self._acceptance.estimate(None)
        self._state = DispatchState(self._step, now, choice, self._probe, known.profile, known.num_nodes)

    def _change(self, name: str, is_new_load: bool) -> None:
        self._num_switches += 1
        if not is_new_load:
            self._switched_at.append(self._step)
        self._held = name
        self._prober.hurry()
        self._num_probe_steps = 0

    def _weigh(self, load: Load, is_new_load: bool) -> Situation:
        self._acceptance.refresh()
        while self._switched_at and self._switched_at[0] <= self._step - _SWITCH_WINDOW:
            self._switched_at.popleft()
        return Situation(
            arms=tuple(self._estimate(tree, load) for tree in self._arms.values()),
            held=self._held,
            is_new_load=is_new_load,
            leader=self._leader,
            num_leading=self._num_leading,
            num_switches=len(self._switched_at),
            num_blocked=self._watchdog.num_blocked,
            is_settled=self._step - self._arrived_at >= _SETTLING,
            is_broken=self._is_broken,
            max_seconds=self._max_step_seconds,
        )

    def _estimate(self, tree: TreeTopology, load: Load) -> ArmEstimate:
        batch = self._num_rows(tree, load)
        num_cached = load.num_cached_tokens * batch / max(1, load.num_running)
        seconds = self._latency.seconds(tree.name, batch, num_cached)
        if batch > self._reach[tree.name]:
            seconds = UNREACHABLE
        catch_up = 0.0
        if tree.num_drafts and self._held == PLAIN:
            catch_up = self._latency.catch_up_seconds(batch) / _AMORTISED
        prospect = self._acceptance.prospect(tree)
        return ArmEstimate(
            name=tree.name,
            batch=batch,
            tokens=prospect.tokens,
            settled=prospect.settled,
            error=prospect.error,
            seconds=seconds + catch_up,
            least_seconds=self._latency.least_seconds(tree.name, batch, num_cached) + catch_up,
            is_measured=self._latency.is_measured(tree.name, batch),
        )

    def _num_rows(self, tree: TreeTopology, load: Load) -> int:
        """Return how many rows would run with a tree: where requests queue for cache blocks, a deep tree's
        reserve of 2 (depth + 1) tokens a row keeps some of them out.
        """
        running = max(1, load.num_running)
        if not load.num_waiting or running >= self._max_num_seqs:
            return running
        per_row = load.num_cached_tokens / running
        if load.num_free_blocks * self._block_size > per_row:
            return running
        held = 2 * (self._arms[self._held].depth + 1)
        room = load.num_cached_tokens + running * held + load.num_free_blocks * self._block_size
        fitting = int(room / (per_row + 2 * (tree.depth + 1)))
        return max(1, min(fitting, running + load.num_waiting, self._max_num_seqs))
