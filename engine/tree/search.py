"""The best static tree for an acceptance profile.

Measuring a profile and choosing between trees at run time are left to others.
"""

import heapq
import math
from collections.abc import Sequence

from engine.errors import ConfigError
from engine.tree.topology import MAX_NODES, TreeTopology

# profile[d][r]: probability that a node at depth d, once accepted, has its (r + 1)-th child accepted. Depths
# beyond the last row behave as the last row.
Profile = Sequence[Sequence[float]]


def check_profile(profile: Profile) -> None:
    """Raise `ConfigError` unless every row is a non-increasing sub-distribution over ranks."""
    if not profile or not all(profile):
        raise ConfigError("an acceptance profile needs at least one depth, each with at least one rank")
    for depth, row in enumerate(profile):
        is_probability = all(math.isfinite(p) and 0.0 <= p <= 1.0 for p in row)
        if not is_probability or list(row) != sorted(row, reverse=True) or sum(row) > 1.0 + 1e-9:
            raise ConfigError(
                f"acceptance profile, depth {depth}: expected non-increasing probabilities of sum"
                f" at most 1, found {list(row)}"
            )


def acceptance_length(topology: TreeTopology, profile: Profile) -> float:
    """Return the expected tokens per call, 1 + the sum over drafts of the product along their path."""
    products = [1.0]
    for node in range(1, topology.num_nodes):
        row = _row(profile, topology.depths[node] - 1)
        rank = topology.ranks[node]
        products.append(products[topology.parents[node]] * (row[rank] if rank < len(row) else 0.0))
    return math.fsum(products)


def search(profile: Profile, num_nodes: int, max_depth: int) -> TreeTopology:
    """Return the tree of `num_nodes` nodes and at most `max_depth` levels of drafts with the longest expected
    acceptance.

    Greedy: the num_nodes - 1 candidates of largest path product. A candidate never beats its parent or its
    left sibling, so the greedy set is a tree, and no other set of that size sums to more. Ties prefer the
    shallower node, then the better rank. Raises `ConfigError` where the profile has too few candidates.
    """
    check_profile(profile)
    if not 1 <= num_nodes <= MAX_NODES:
        raise ConfigError(f"a tree needs 1 to {MAX_NODES} nodes, found {num_nodes}")
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {
        (): []
    }  # a node is named by the ranks of its path
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def offer(parent: tuple[int, ...], value: float, rank: int) -> None:
        row = _row(profile, len(parent))
        if len(parent) < max_depth and rank < len(row):
            heapq.heappush(heap, (-value * row[rank], len(parent) + 1, (*parent, rank)))

    values: dict[tuple[int, ...], float] = {(): 1.0}
    offer((), 1.0, 0)
    while len(values) < num_nodes:
        if not heap:
            raise ConfigError(
                f"the profile holds {len(values)} nodes within depth {max_depth}, {num_nodes} were asked"
            )
        negative, _, node = heapq.heappop(heap)
        parent, rank = node[:-1], node[-1]
        values[node] = -negative
        children[node] = []
        children[parent].append(node)
        offer(node, -negative, 0)
        offer(parent, values[parent], rank + 1)
    return TreeTopology(f"tree-{num_nodes}", _level_order(children))


def _level_order(children: dict[tuple[int, ...], list[tuple[int, ...]]]) -> tuple[int, ...]:
    """Return parents with nodes numbered level by level, then by parent, then by rank."""
    parents = [-1]
    order: list[tuple[int, ...]] = [()]
    for idx, node in enumerate(order):  # grows while it is read: a queue
        order.extend(children[node])
        parents.extend(idx for _ in children[node])
    return tuple(parents)


def _row(profile: Profile, depth: int) -> Sequence[float]:
    return profile[min(depth, len(profile) - 1)]
