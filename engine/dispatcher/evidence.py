"""What verified trees say about acceptance, and the counts they add up to.

At a visited node with drafted children exactly one thing happens: the child of some rank is kept, or none is.
What the counts mean for a tree is left to `acceptance`.
"""

import functools
from typing import NamedTuple

from engine.batch import NUM_RANKS
from engine.tree.topology import TreeTopology

NUM_DEPTHS = 8  # deeper nodes count as the last of these
_MAX_WEIGHT = 1e9  # far from where adding one to a count would be lost


class Outcome(NamedTuple):
    """What happened at one visited node: the child of `rank` was right, or, with rank `width`, none of the
    first `width` ranks was.
    """

    depth: int
    rank: int
    width: int

    @property
    def is_hit(self) -> bool:
        return self.rank < self.width


class Seen(NamedTuple):
    """An outcome that a step saw `times` over, at nodes whose first `width` children together are right with
    probability `predicted`, by what was known before.
    """

    outcome: Outcome
    times: int
    predicted: float


@functools.lru_cache(maxsize=4096)  # the same few come again and again
def outcomes_of(
    topology: TreeTopology,
    path_ranks: tuple[int, ...],
    next_rank: int | None,
    num_ranks: int = NUM_RANKS,
) -> tuple[Outcome, ...]:
    """Return what one verified row says, from the root down.

    `path_ranks` are the ranks of its accepted drafts. The token after them was drawn at the last node of the
    path: `next_rank` is its rank among the draft's best `num_ranks` there, `num_ranks` for none of them,
    which says more than the tree was wide enough to try. None where nobody looked; then the node only says
    that no child of it was right.
    """
    found = []
    node = 0
    for depth, rank in enumerate(path_ranks):
        found.append(Outcome(min(depth, NUM_DEPTHS - 1), min(rank, NUM_RANKS), NUM_RANKS))
        node = topology.children[node][rank]
    depth = min(len(path_ranks), NUM_DEPTHS - 1)
    num_children = min(len(topology.children[node]), NUM_RANKS)
    if next_rank is not None:
        width = min(num_ranks, NUM_RANKS)
        found.append(Outcome(depth, min(next_rank, width), width))
    elif num_children:
        found.append(Outcome(depth, num_children, num_children))
    return tuple(found)


class Counts:
    """Per depth and rank, how often a node got as far as that rank, and how often that rank was right.

    Evidence fades: `fade` makes all of it count less than what comes next. Reaching rank r without a hit says
    something about ranks up to r only, so trees of any width add up (Kaplan and Meier 1958).
    """

    def __init__(self) -> None:
        self._tries = [[0.0] * NUM_RANKS for _ in range(NUM_DEPTHS)]
        self._hits = [[0.0] * NUM_RANKS for _ in range(NUM_DEPTHS)]
        self._weight = 1.0  # of the next observation: growing it is cheaper than shrinking every count

    def add(self, outcome: Outcome, times: int) -> None:
        """Count one outcome `times` over."""
        amount = self._weight * times
        depth, hit, width = outcome
        tries = self._tries[depth]
        for rank in range(min(hit + 1, width)):
            tries[rank] += amount
        if outcome.is_hit:
            self._hits[depth][hit] += amount

    def fade(self, share: float) -> None:
        """Let what was counted so far weigh `share` of what it did."""
        self._weight /= share
        if self._weight > _MAX_WEIGHT:
            for table in (self._tries, self._hits):
                for row in table:
                    row[:] = [value / self._weight for value in row]
            self._weight = 1.0

    def tries(self, depth: int) -> list[float]:
        """Return how often a node of this depth got as far as each rank."""
        return [value / self._weight for value in self._tries[depth]]

    def hits(self, depth: int) -> list[float]:
        """Return how often each rank was right at a node of this depth."""
        return [value / self._weight for value in self._hits[depth]]
