"""Worlds to try a dispatcher in: what steps cost there, and which drafts turn out right.

Published and measured numbers are fixtures; how a dispatcher fares is left to `simulate_dispatcher`.
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engine.batch import NUM_RANKS
from engine.dispatcher.latency import ArmTimes, LatencyTable
from engine.dispatcher.posterior import tilt
from engine.row_kind import RowKind
from engine.step_stats import RowStats
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import Profile, acceptance_length, search
from engine.tree.topology import TreeTopology, chain, root_only

Verdict = tuple[tuple[int, ...], int | None]  # ranks of the accepted path, rank of the token after it

# vLLM's dynamic speculative decoding, a Llama-3.1-8B-class model: ms of a step by number of drafts and batch.
# 7 drafts at batch 64 leave the captured graphs: a cliff.
PUBLISHED_MS = {
    0: (6.87, 7.3, 7.64, 8.53),
    1: (7.97, 8.39, 8.97, 10.44),
    3: (9.41, 9.95, 10.78, 13.16),
    4: (9.91, 10.8, 11.79, 15.7),
    5: (10.8, 11.59, 12.81, 17.54),
    7: (12.29, 13.11, 14.86, 120.57),
}
PUBLISHED_BATCHES = (1, 16, 32, 64)
# The same source: share of steps that accept at least k drafts, k = 1 to 7.
PUBLISHED_SURVIVAL = {
    "eagle": (0.68, 0.39, 0.20, 0.10, 0.06, 0.03, 0.02),
    "eagle3": (0.76, 0.54, 0.39, 0.28, 0.21, 0.15, 0.12),
    "eagle-low": (0.17, 0.15, 0.12, 0.01, 0.0, 0.0, 0.0),
}
# One H200, Llama-3.1-8B shapes, bfloat16, matrix products in a CUDA graph (lab notes): ms by tokens.
H200_MS = (
    *((1, 4.06), (8, 4.10), (32, 4.23), (64, 4.31), (96, 4.50), (128, 4.72), (192, 5.86), (256, 7.22)),
    *((384, 10.04), (512, 12.23), (768, 17.97), (1024, 23.61)),
)
H200_KV_MS = 131072 / 4.3e9  # per cached token: 128 KiB read at 4.3 TB/s
H200_DRAFT_SHARE = 0.07  # of the target's time, per drafted level: a draft of one layer and a short head
H200_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class World:
    """Trees and what their steps truly cost."""

    name: str
    arms: tuple[TreeTopology, ...]
    table: LatencyTable

    def seconds(self, name: str, batch: int, num_cached: float) -> float:
        return self.table.seconds(name, batch, num_cached)

    def mistaken(self, source: random.Random, error: float) -> LatencyTable:
        """Return a table that is wrong by `error` up or down, each tree by itself."""
        arms = []
        for arm in self.table.arms:
            factor = 1.0 + source.choice((-error, error))
            base = tuple(factor * value for value in arm.base)
            arms.append(ArmTimes(arm.name, arm.num_nodes, base, tuple(factor * v for v in arm.per_token)))
        return LatencyTable(self.table.batches, tuple(arms), self.table.catch_up, self.table.is_padded)


def published_world() -> World:
    """Return the published cost table: chains only, batches 1 to 64, no context term."""
    trees = {count: chain(count) if count else root_only() for count in PUBLISHED_MS}
    times = tuple(
        ArmTimes(trees[count].name, count + 1, tuple(ms / 1e3 for ms in row), (0.0,) * len(row))
        for count, row in PUBLISHED_MS.items()
    )
    table = LatencyTable(PUBLISHED_BATCHES, times, (0.0,) * len(PUBLISHED_BATCHES))
    return World("published", tuple(trees.values()), table)


def h200_world() -> World:
    """Return synthetic steps made of measured matrix products and bandwidth (no step was timed as a whole):
    products of all nodes, reading the K/V, and the draft's levels.
    """
    sizes = ((8, 4), (16, 5), (32, 6))
    searched = [search(DEFAULT_PROFILE, num_nodes, depth) for num_nodes, depth in sizes]
    trees = (root_only(), chain(1), chain(2), chain(3), chain(5), *searched)
    times = []
    for tree in trees:
        base = tuple(1e-3 * _h200_ms(tree, batch) for batch in H200_BATCHES)
        reads = 1e-3 * H200_KV_MS * (1.0 + 0.03 * (tree.num_nodes - 1))
        times.append(ArmTimes(tree.name, tree.num_nodes, base, (reads,) * len(H200_BATCHES)))
    catch_up = tuple(1e-3 * H200_DRAFT_SHARE * _products_ms(16 * batch) for batch in H200_BATCHES)
    return World("h200", trees, LatencyTable(H200_BATCHES, tuple(times), catch_up))


def _h200_ms(tree: TreeTopology, batch: int) -> float:
    widths = [len(level) for level in tree.levels[1:]]
    drafting = sum(H200_DRAFT_SHARE * _products_ms(width * batch) for width in widths)
    return _products_ms(tree.num_nodes * batch) + drafting


def _products_ms(num_tokens: int) -> float:
    for (low, low_ms), (high, high_ms) in itertools.pairwise(H200_MS):
        if num_tokens <= high:
            return low_ms + (high_ms - low_ms) * max(0, num_tokens - low) / (high - low)
    return H200_MS[-1][1] * num_tokens / H200_MS[-1][0]


def chain_profile(survival: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Return the profile of a draft whose first child alone is ever right, from the shares of steps that
    accept at least k drafts.
    """
    rows, before = [], 1.0
    for share in survival:
        rows.append((share / before if before else 0.0,) + (0.0,) * (NUM_RANKS - 1))
        before = share
    return tuple(rows)


@dataclass(slots=True)
class SimulatedRow:
    """A request that runs. `lean` is its log odds of acceptance around the profile of the moment."""

    sequence_idx: int
    context: int
    num_left: int
    lean: float
    num_emitted: int = 0
    kind: RowKind = field(default_factory=RowKind)


class Acceptance:
    """Independent draws from a profile that may change with the step, and differ by request."""

    def __init__(self, profile_at: Callable[[int], Profile], spread: float = 0.0) -> None:
        self._profile_at = profile_at
        self.spread = spread  # standard deviation of requests' log odds
        self._lengths: dict[tuple[str, float, int], float] = {}
        self._profiles: dict[tuple[float, int], Profile] = {}

    def verify(self, row: SimulatedRow, tree: TreeTopology, step: int, source: random.Random) -> Verdict:
        """Return which drafts of a row are right. The rank of the token after them is seen wherever the draft
        ran: on every level but the last.
        """
        profile = self._leaning(self._profile_at(step), row.lean)
        node = 0
        ranks: list[int] = []
        while True:
            depth = len(ranks)
            rank = self._draw(profile[min(depth, len(profile) - 1)], source)
            if rank >= len(tree.children[node]):
                return tuple(ranks), rank if depth < tree.depth else None
            ranks.append(rank)
            node = tree.children[node][rank]

    def expected(self, rows: Sequence[SimulatedRow], tree: TreeTopology, step: int) -> float:
        """Return the tokens that a tree truly brings the rows on average, in all."""
        profile = self._profile_at(step)
        leans = Counter(row.lean for row in rows) if self.spread else {0.0: len(rows)}
        total = 0.0
        for lean, count in leans.items():
            key = (tree.name, lean, id(profile))
            if key not in self._lengths:
                self._lengths[key] = acceptance_length(tree, self._leaning(profile, lean))
            total += count * self._lengths[key]
        return total

    def _leaning(self, profile: Profile, lean: float) -> Profile:
        if lean == 0.0:
            return profile
        key = (lean, id(profile))
        if key not in self._profiles:
            self._profiles[key] = scaled(profile, lean)
        return self._profiles[key]

    @staticmethod
    def _draw(ranks: Sequence[float], source: random.Random) -> int:
        u = source.random()
        for rank, p in enumerate(ranks):
            u -= p
            if u < 0.0:
                return rank
        return NUM_RANKS


class Process(Protocol):
    """Which drafts of a row turn out right."""

    spread: float

    def verify(self, row: SimulatedRow, tree: TreeTopology, step: int, source: random.Random) -> Verdict: ...

    def expected(self, rows: Sequence[SimulatedRow], tree: TreeTopology, step: int) -> float: ...


class Replay:
    """Recorded answers of a real model and draft, told apart by request: `answers[i][t][d]` is the draft's
    rank of token t + d of answer i once the draft has read the tokens before.
    """

    spread = 0.0

    def __init__(self, path: Path) -> None:
        record = json.loads(path.read_text(encoding="utf-8"))
        depth = record["depth"]
        self.answers = [
            [tuple(map(int, text[start : start + depth])) for start in range(0, len(text), depth)]
            for text in record["answers"]
        ]
        self._lengths: dict[tuple[int, str], float] = {}

    def verify(self, row: SimulatedRow, tree: TreeTopology, *_: object) -> Verdict:
        """Walk the tree along the recorded text, which begins anew where it ends."""
        answer = self.answers[row.sequence_idx % len(self.answers)]
        verdict = _walk(answer[row.num_emitted % len(answer)], tree)
        row.num_emitted += len(verdict[0]) + 1
        return verdict

    def expected(self, rows: Sequence[SimulatedRow], tree: TreeTopology, *_: object) -> float:
        """Return the tokens that a tree brings on average over the texts of the rows, in all."""
        return sum(self._length(row.sequence_idx % len(self.answers), tree) for row in rows)

    def _length(self, idx: int, tree: TreeTopology) -> float:
        if (idx, tree.name) not in self._lengths:
            answer, position, num_calls = self.answers[idx], 0, 0
            while position < len(answer):
                position += len(_walk(answer[position], tree)[0]) + 1
                num_calls += 1
            self._lengths[idx, tree.name] = position / num_calls
        return self._lengths[idx, tree.name]


def _walk(ranks: Sequence[int], tree: TreeTopology) -> Verdict:
    """Return the verdict on a tree where the text's next tokens have these ranks, one for each depth."""
    node = 0
    path: list[int] = []
    for rank in ranks[: tree.depth]:
        if rank >= len(tree.children[node]):
            return tuple(path), rank
        path.append(rank)
        node = tree.children[node][rank]
    return tuple(path), None


def stats_of(row: SimulatedRow, tree: TreeTopology, verdict: Verdict) -> RowStats:
    ranks, next_rank = verdict
    return RowStats(tree, len(ranks), ranks, next_rank, kind=row.kind, sequence_idxs=(row.sequence_idx,))


def scaled(profile: Profile, lean: float) -> Profile:
    """Return a profile whose odds of acceptance are exp(lean) times higher."""
    return tuple(tuple(tilt(row, lean)) for row in profile)


def never(profile: Profile) -> Profile:
    """Return a profile of the same shape in which no draft is ever right."""
    return tuple((0.0,) * len(row) for row in profile)
