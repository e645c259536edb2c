"""The node table of a batch against the topologies it was built from."""

import pytest
import torch

from engine.speculation import TreeTensors
from engine.tree.topology import TreeTopology, chain, root_only

CPU = torch.device("cpu")
WIDE = TreeTopology("wide", (-1, 0, 0, 0, 1, 1, 3, 3, 6, 7, 7))
FULL = TreeTopology("full", (-1, *sorted(i // 3 for i in range(63))))


@pytest.mark.parametrize("num_nodes", [11, 16, 64])
def test_rows_hold_their_topology_and_padding_holds_nothing(num_nodes: int) -> None:
    topologies = (WIDE, root_only(), chain(5))
    tree = TreeTensors.build(topologies, num_nodes, CPU)
    assert (tree.num_rows, tree.num_nodes, tree.depth, tree.max_rank) == (3, num_nodes, 5, 2)
    for row, topology in enumerate(topologies):
        pad = [0] * (num_nodes - topology.num_nodes)
        assert tree.parents[row].tolist() == [0, *topology.parents[1:], *pad]
        assert tree.depths[row].tolist() == [*topology.depths, *pad]
        assert tree.ranks[row].tolist() == [*topology.ranks, *pad]
        assert tree.is_node[row].tolist() == [True] * topology.num_nodes + [False] * len(pad)


def test_levels_list_their_nodes_then_the_padding_id() -> None:
    tree = TreeTensors.build((WIDE, root_only(), chain(2)), 12, CPU)
    assert [tree.level_nodes(depth).tolist() for depth in (1, 2, 3)] == [
        [[1, 2, 3], [12, 12, 12], [1, 12, 12]],
        [[4, 5, 6, 7], [12, 12, 12, 12], [2, 12, 12, 12]],
        [[8, 9, 10], [12, 12, 12], [12, 12, 12]],
    ]


@pytest.mark.parametrize("num_nodes", [63, 64])
@pytest.mark.parametrize("topology", [FULL, chain(62), chain(63), root_only()], ids=lambda t: t.name)
def test_ancestor_mask_is_the_reachability_of_each_node(topology: TreeTopology, num_nodes: int) -> None:
    if topology.num_nodes > num_nodes:
        with pytest.raises(AssertionError):
            TreeTensors.build((topology,), num_nodes, CPU)
        return
    tree = TreeTensors.build((topology, root_only()), num_nodes, CPU)
    expected = torch.eye(num_nodes, dtype=torch.bool).repeat(2, 1, 1)
    for node in range(1, topology.num_nodes):
        expected[0, node] |= expected[0, topology.parents[node]]
    mask = tree.ancestor_mask
    assert torch.equal(mask, expected)
    # Every row of the mask sees something, padding too: a softmax over it is finite.
    assert mask.any(-1).all()
    assert tree.ancestor_bits.dtype == torch.int64


def test_bit_63_is_the_sign_of_the_mask() -> None:
    bits = TreeTensors.build((chain(63), root_only()), 64, CPU).ancestor_bits
    assert bits[0, 63] == -1
    assert bits[0, 62] == 2**63 - 1
    assert bits[1, 63] == -(2**63)


def test_plain_decoding_is_a_table_without_levels() -> None:
    tree = TreeTensors.build((root_only(), root_only()), 1, CPU)
    assert tree.columns.shape == (2, 0)
    assert tree.depth == 0
    assert tree.ancestor_mask.tolist() == [[[True]], [[True]]]
