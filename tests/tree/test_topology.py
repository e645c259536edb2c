"""The derived facts of a tree, and the shapes it refuses."""

import random

import pytest

from engine.errors import ConfigError
from engine.tree.topology import MAX_NODES, TreeTopology, chain, root_only

WIDE = TreeTopology("wide", (-1, 0, 0, 0, 1, 1, 3, 3, 6, 7, 7))


def random_topology(rng: random.Random) -> TreeTopology:
    """Return a tree grown a level at a time, each node with up to three children."""
    parents, level = [-1], [0]
    while level and len(parents) < MAX_NODES:
        following = []
        for node in level:
            for _ in range(rng.randint(0, 3)):
                if len(parents) < MAX_NODES:
                    following.append(len(parents))
                    parents.append(node)
        level = following
    return TreeTopology("random", tuple(parents))


def test_wide_tree_has_its_known_facts() -> None:
    assert WIDE.num_nodes == 11
    assert WIDE.num_drafts == 10
    assert WIDE.depths == (0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3)
    assert WIDE.depth == 3
    assert WIDE.ranks == (0, 0, 1, 2, 0, 1, 0, 1, 0, 0, 1)
    assert WIDE.max_rank == 2
    assert WIDE.levels == (range(1), range(1, 4), range(4, 8), range(8, 11))
    assert WIDE.children[3] == (6, 7)
    assert WIDE.children[2] == ()
    assert WIDE.ancestor_bits[9] == 1 << 0 | 1 << 3 | 1 << 7 | 1 << 9


@pytest.mark.parametrize("seed", range(20))
def test_derived_facts_agree_on_random_trees(seed: int) -> None:
    topology = random_topology(random.Random(seed))
    assert [node for level in topology.levels for node in level] == list(range(topology.num_nodes))
    for node in range(1, topology.num_nodes):
        parent = topology.parents[node]
        assert topology.children[parent][topology.ranks[node]] == node
        assert node in topology.levels[topology.depths[parent] + 1]
        path, ancestor = 0, node
        while ancestor >= 0:
            path |= 1 << ancestor
            ancestor = topology.parents[ancestor]
        assert topology.ancestor_bits[node] == path
    assert sum(len(children) for children in topology.children) == topology.num_drafts


def test_corner_shapes_are_trees() -> None:
    assert root_only().depth == 0
    assert root_only().max_rank == 0
    assert root_only().levels == (range(1),)
    assert chain(3).parents == (-1, 0, 1, 2)
    assert chain(0).parents == root_only().parents
    longest = chain(MAX_NODES - 1)
    assert longest.ancestor_bits[-1] == 2**64 - 1
    star = TreeTopology("star", (-1, *[0] * (MAX_NODES - 1)))
    assert star.depth == 1
    assert star.max_rank == MAX_NODES - 2
    assert star.ancestor_bits[-1] == 1 | 1 << 63


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "1 to 64 nodes"),
        ((-1, *[0] * MAX_NODES), "1 to 64 nodes"),
        ((0,), "node 0 is the root"),
        ((-1, -1), "needs a parent before it"),
        ((-1, 1), "needs a parent before it"),
        ((-1, 0, 3, 0), "needs a parent before it"),
        ((-1, 0, 1, 0), "level by level"),
        ((-1, 0, 0, 2, 1), "level by level"),
    ],
)
def test_shapes_that_are_no_tree_are_refused(parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TreeTopology("bad", parents)
