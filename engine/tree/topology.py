"""The shape of one draft tree: which node continues which, and in what sibling order.

Node ids run level by level from the root, so a level is one slice; token ids and tensors are left to others.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

from engine.errors import ConfigError

MAX_NODES = 64  # an ancestor mask is one 64-bit integer


@dataclass(frozen=True)
class TreeTopology:
    """A tree of at most 64 nodes; node 0 is the root (the last committed token), every other node is a draft.

    `parents[i]` is the parent of node i, with `parents[0] == -1`. Nodes are numbered level by level, and
    inside a level by parent, then by sibling rank, so `rank` follows from the order. Raises `ConfigError`
    where that does not hold.
    """

    name: str
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        parents = self.parents
        if not 1 <= len(parents) <= MAX_NODES:
            raise ConfigError(f"tree {self.name!r} needs 1 to {MAX_NODES} nodes, found {len(parents)}")
        if parents[0] != -1:
            raise ConfigError(f"tree {self.name!r}: node 0 is the root and has parent -1, found {parents[0]}")
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ConfigError(f"tree {self.name!r}: node {node} needs a parent before it, found {parent}")
        # Rising parents are exactly a level order: children of an earlier node come earlier.
        if any(left > right for left, right in itertools.pairwise(parents)):
            raise ConfigError(
                f"tree {self.name!r}: nodes must be numbered level by level, found parents {parents}"
            )

    def __hash__(self) -> int:
        return hash(self.name)  # the generated one hashes the parents anew for every row of every step

    @cached_property
    def num_nodes(self) -> int:
        return len(self.parents)

    @cached_property
    def num_drafts(self) -> int:
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """The longest path, in drafts; 0 for plain decoding."""
        return self.depths[-1]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Sibling order of each node: rank r is the (r+1)-th child of its parent in draw order. The root has
        rank 0.
        """
        ranks = [0]
        for node in range(1, self.num_nodes):
            ranks.append(ranks[-1] + 1 if self.parents[node] == self.parents[node - 1] else 0)
        return tuple(ranks)

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """`levels[d]` is the slice of node ids at depth d."""
        starts = [self.depths.index(depth) for depth in range(self.depth + 1)] + [self.num_nodes]
        return tuple(range(start, end) for start, end in itertools.pairwise(starts))

    @cached_property
    def ancestor_bits(self) -> tuple[int, ...]:
        """`ancestor_bits[i]` has bit j set where node j is node i or an ancestor of it."""
        bits = [1]
        for node in range(1, self.num_nodes):
            bits.append(bits[self.parents[node]] | 1 << node)
        return tuple(bits)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """`children[i]` lists the children of node i in rank order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, self.num_nodes):
            children[self.parents[node]].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def max_rank(self) -> int:
        """The largest sibling rank: the drafter needs the best `max_rank + 1` tokens of a node."""
        return max(self.ranks)


def root_only() -> TreeTopology:
    """Return plain decoding: a tree of one node."""
    return TreeTopology("off", (-1,))


def chain(num_drafts: int) -> TreeTopology:
    """Return a chain of `num_drafts` drafts, a tree of width one."""
    return TreeTopology(f"chain-{num_drafts}", tuple(range(-1, num_drafts)))
