"""How many tokens a tree will bring: acceptance learnt from verified drafts, by kind of row and by request.

What a step costs is left to `latency`, the choice of a tree to `control`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.batch import NUM_RANKS
from engine.dispatcher.change import ChangeDetector
from engine.dispatcher.evidence import NUM_DEPTHS, Counts, Outcome, Seen, outcomes_of
from engine.dispatcher.posterior import Estimate, estimate, tilt, variance_of_tokens
from engine.row_kind import RowKind
from engine.step_stats import RowStats
from engine.tree.search import Profile, acceptance_length
from engine.tree.topology import TreeTopology

PRIOR_STRENGTH = 32.0  # visited nodes a depth
DISTRUST = 4.0  # the same, once an alarm has shown that what came before no longer holds
HALF_LIFE = 8192.0  # visited nodes; a break is left to the change detector
_LEAST_KNOWN = 128.0  # visited roots from which on there is something that can break
_FADE = 0.5 ** (1.0 / HALF_LIFE)
MAX_TILTED_ROWS = 8  # in larger batches requests average out
_FIRST_SPREAD = 0.3  # variance of requests' log odds around their kind's, before any has ended
_SPREADS = (0.02, 1.0)  # bounds of what is learnt for it
_SPREAD_SHARE = 0.05  # of it that one ended request replaces
_COMMON_LEAN = 1.25  # standard deviations between requests, up to which a lean surprises nobody
_DRIFT_NODES = 256  # visited nodes in which a text may change as much as two texts differ


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a tree is expected to bring per row: `settled` leaving aside what is known of single requests,
    `tokens` less where the running ones accept less than their kind; `error` is the standard error of both.

    Requests that accept more do not count: they end soon, and the arm must not change with each.
    """

    tokens: float
    settled: float
    error: float


@dataclass(slots=True)
class Tilt:
    """How much more a request accepts than its kind, in log odds, and how sure that is."""

    variance: float
    mean: float = 0.0

    def observe(self, is_hit: bool, predicted: float, total: float, spread: float) -> None:
        """Learn from one visited node by a Kalman step on the log odds.

        `predicted` is the probability of a hit under this tilt, `total` that of any rank being right, wide
        enough a tree or not, and `spread` the variance between requests.
        """
        slope = predicted * (1.0 - total)
        noise = max(predicted * (1.0 - predicted), 1e-3)
        variance = min(self.variance + spread / _DRIFT_NODES, spread)
        gain = variance * slope / (slope * slope * variance + noise)
        self.mean += gain * (is_hit - predicted)
        self.variance = variance * (1.0 - gain * slope)


class _Cell:
    """Evidence of the rows of one kind, or of all."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.strength = PRIOR_STRENGTH
        self.detector = ChangeDetector()

    def observe(self, step: Sequence[Seen], threshold: float) -> bool:
        """Learn from one step, whose outcomes have no order: what was known before them fades at once. Where
        acceptance broke, begin again from what was seen since, and return True.
        """
        self.counts.fade(_FADE ** sum([seen.times for seen in step]))
        for seen in step:
            self.counts.add(seen.outcome, seen.times)
        since = self.detector.observe(step, threshold)
        if since is None or self.counts.tries(0)[0] < _LEAST_KNOWN:
            return False
        self.counts = since
        self.strength = DISTRUST
        return True


class AcceptanceModel:
    """Kinds of rows are shrunk to the whole, the whole to a prior profile, a request to its kind."""

    def __init__(self, prior: Profile, strength: float = PRIOR_STRENGTH) -> None:
        padding = (0.0,) * NUM_RANKS
        rows = [(*prior[min(depth, len(prior) - 1)], *padding)[:NUM_RANKS] for depth in range(NUM_DEPTHS)]
        self._prior = Estimate(tuple(rows), (strength,) * NUM_DEPTHS)
        self._whole = _Cell()
        self._whole.strength = strength
        self._cells: dict[RowKind, _Cell] = {}
        self._tilts: dict[int, Tilt] = {}
        self._spread = _FIRST_SPREAD
        self._mix: Counter[RowKind] = Counter()  # of the latest step
        self._kind_of: dict[int, RowKind] = {}
        self._estimates: dict[RowKind | None, Estimate] = {}
        self.num_alarms = 0

    def observe(self, rows: Sequence[RowStats], threshold: float) -> bool:
        """Learn from the rows of a step; return whether acceptance turned out to have broken. `threshold` is
        the evidence in nats that this takes.
        """
        self._meet(rows)
        step = self._see_each(rows) if self._tilts else self._see_all(rows)
        alarms = [self._cell(kind).observe(step.get(kind, ()), threshold) for kind in {*self._cells, *step}]
        alarms.append(self._whole.observe([seen for kind in step.values() for seen in kind], threshold))
        if any(alarms):
            self.num_alarms += 1
            self._tilts = {idx: Tilt(self._spread) for idx in self._tilts}
            self.refresh()
        return any(alarms)

    def refresh(self) -> None:
        """Let coming estimates count all that was observed; between calls they stay as they are."""
        self._estimates.clear()

    def prospect(self, topology: TreeTopology) -> Prospect:
        """Return what `topology` is expected to bring the rows of the latest step."""
        total = sum(self._mix.values())
        if not total:
            whole = self.estimate(None)
            tokens = acceptance_length(topology, whole.profile)
            return Prospect(tokens, tokens, math.sqrt(variance_of_tokens(topology, whole)))
        tokens = settled = variance = 0.0
        for kind, count in self._mix.items():
            share, known = count / total, self.estimate(kind)
            length = acceptance_length(topology, known.profile)
            settled += share * length
            lean = self._lean(kind)
            tilted = [tilt(row, lean) for row in known.profile] if lean else known.profile
            tokens += share * (acceptance_length(topology, tilted) if lean else length)
            variance += share * share * variance_of_tokens(topology, known)
        return Prospect(min(tokens, settled), settled, math.sqrt(variance))

    def estimate(self, kind: RowKind | None) -> Estimate:
        """Return what is known of rows of `kind`, None for all rows."""
        if kind not in self._estimates:
            if kind is None:
                self._estimates[None] = estimate(self._whole.counts, self._prior, self._whole.strength)
            else:
                cell = self._cell(kind)
                self._estimates[kind] = estimate(cell.counts, self.estimate(None), cell.strength)
        return self._estimates[kind]

    def _meet(self, rows: Sequence[RowStats]) -> None:
        """Note who runs; requests that ended are forgotten."""
        self._mix.clear()
        for row in rows:
            self._mix[row.kind] += row.num_rows
        if self._mix.total() > MAX_TILTED_ROWS:
            self._tilts.clear()
            return
        self._kind_of = {idx: row.kind for row in rows for idx in row.sequence_idxs}
        old = self._tilts
        self._tilts = {idx: old.get(idx) or Tilt(self._spread) for idx in self._kind_of}
        for idx in old.keys() - self._tilts.keys():
            # One step of expectation maximisation for the variance of a random effect.
            found = old[idx].mean ** 2 + old[idx].variance
            self._spread += _SPREAD_SHARE * (found - self._spread)
            self._spread = min(max(self._spread, _SPREADS[0]), _SPREADS[1])

    def _see_each(self, rows: Sequence[RowStats]) -> dict[RowKind, list[Seen]]:
        """Return what was seen of each kind of row; each request learns of itself.

        What a request leans explains what it accepts as far as requests commonly differ, no further: else
        it would explain a break away, too.
        """
        step: dict[RowKind, list[Seen]] = defaultdict(list)
        limit = _COMMON_LEAN * math.sqrt(self._spread)
        for row in rows:
            profile = self.estimate(row.kind).profile
            outcomes = outcomes_of(row.topology, row.path_ranks, row.next_rank, row.num_ranks)
            for known in [self._tilts[idx] for idx in row.sequence_idxs]:
                for outcome in outcomes:
                    leaning = tilt(profile[outcome.depth], known.mean)
                    predicted = explained = sum(leaning[: outcome.width])
                    if abs(known.mean) > limit:
                        common = tilt(profile[outcome.depth], math.copysign(limit, known.mean))
                        explained = sum(common[: outcome.width])
                    step[row.kind].append(Seen(outcome, 1, explained))
                    known.observe(outcome.is_hit, predicted, sum(leaning), self._spread)
        return step

    def _see_all(self, rows: Sequence[RowStats]) -> dict[RowKind, list[Seen]]:
        """Return what was seen of each kind of row, where requests are not told apart."""
        times: dict[RowKind, Counter[Outcome]] = defaultdict(Counter)
        for row in rows:
            of_kind, num_rows = times[row.kind], row.num_rows
            for outcome in outcomes_of(row.topology, row.path_ranks, row.next_rank, row.num_ranks):
                of_kind[outcome] += num_rows
        return {kind: [*self._seen(kind, of_kind)] for kind, of_kind in times.items()}

    def _seen(self, kind: RowKind, times: Counter[Outcome]) -> Iterator[Seen]:
        profile = self.estimate(kind).profile
        for outcome, num_times in times.items():
            yield Seen(outcome, num_times, sum(profile[outcome.depth][: outcome.width]))

    def _cell(self, kind: RowKind) -> _Cell:
        if kind not in self._cells:
            self._cells[kind] = _Cell()
        return self._cells[kind]

    def _lean(self, kind: RowKind) -> float:
        """Return by how many log odds the running requests of a kind are sure to accept less than it."""
        known = [found for idx, found in self._tilts.items() if self._kind_of[idx] == kind]
        if not known:
            return 0.0
        mean = sum(found.mean for found in known) / len(known)
        error = math.sqrt(sum(found.variance for found in known)) / len(known)
        return min(0.0, mean + error)
