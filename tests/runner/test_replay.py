"""Replayed acceptance has the law of its profile, on paths of the real trees, with the drafted tokens."""

import itertools

import pytest
import torch

from engine.runner.replay import ReplayedVerify, edge_table, replay
from engine.speculation import DraftOutput, TreeTensors, Verification
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import acceptance_length, search
from engine.tree.topology import TreeTopology, chain, root_only
from tests.sampling.cases import sampling_tensors

CPU = torch.device("cpu")
NUM_ROWS = 20_000
NEXT = 10**6
TREES = [
    chain(3),
    search(DEFAULT_PROFILE, 8, 4),
    search(DEFAULT_PROFILE, 24, 6),
    TreeTopology("flat", (-1, 0, 0, 0)),
]


def play(topologies, position=17, seed=0, profile=DEFAULT_PROFILE):
    """Replay one step of these rows; the drafted token of node i of row b is 100 b + i."""
    num_rows, num_nodes = len(topologies), max(t.num_nodes for t in topologies)
    tree = TreeTensors.build(tuple(topologies), num_nodes, CPU)
    rows = torch.arange(num_rows)
    draft = DraftOutput(100 * rows[:, None] + torch.arange(num_nodes))
    real = Verification(torch.zeros(1), torch.zeros(1), rows + NEXT, torch.zeros(1), rows >= 0)
    return replay(real, draft, tree, edge_table(profile), rows + seed, torch.full((num_rows,), position))


@pytest.mark.parametrize("topology", TREES, ids=lambda t: t.name)
def test_mean_length_is_that_of_the_profile_within_a_percent(topology):
    """A profile of another draft is the control that must fail."""
    found = play([topology] * NUM_ROWS).num_accepted.double().mean() + 1
    assert float(found) == pytest.approx(acceptance_length(topology, DEFAULT_PROFILE), rel=0.01)
    worse = [[p * 0.9 for p in row] for row in DEFAULT_PROFILE]
    assert float(found) != pytest.approx(acceptance_length(topology, worse), rel=0.01)


def test_every_node_is_reached_as_often_as_the_profile_says():
    topology = search(DEFAULT_PROFILE, 16, 5)
    found = play([topology] * NUM_ROWS)
    is_reached = (found.path[..., None] == torch.arange(16)).any(1).double().mean(0)
    expected = [1.0]
    for node in range(1, 16):
        row = DEFAULT_PROFILE[min(topology.depths[node] - 1, len(DEFAULT_PROFILE) - 1)]
        expected.append(expected[topology.parents[node]] * row[topology.ranks[node]])
    deviation = torch.tensor(expected, dtype=torch.float64)
    deviation = (deviation * (1 - deviation) / NUM_ROWS).sqrt()
    assert ((is_reached - torch.tensor(expected)).abs() <= 4 * deviation + 1e-9).all()


def test_paths_and_tokens_are_those_of_each_row_s_own_tree():
    topologies = [root_only(), chain(2), search(DEFAULT_PROFILE, 32, 6), chain(7), TREES[-1]] * 40
    found = play(topologies)
    lengths = set()
    for row, topology in enumerate(topologies):
        num_accepted = int(found.num_accepted[row])
        path = found.path[row].tolist()
        assert path[0] == 0
        for above, node in itertools.pairwise(path[: num_accepted + 1]):
            assert topology.parents[node] == above
        assert path[num_accepted:] == [path[num_accepted]] * (len(path) - num_accepted)
        drafted = [100 * row + node for node in path[1 : num_accepted + 1]]
        padding = [-1] * (len(path) - num_accepted - 1)
        assert found.token_ids[row].tolist() == [*drafted, row + NEXT, *padding]
        lengths.add(num_accepted)
    assert lengths >= {0, 1, 2, 3}


def test_the_draw_is_a_function_of_seed_and_position():
    rows = [search(DEFAULT_PROFILE, 16, 5)] * 64
    first, again = play(rows, position=5), play(rows, position=5)
    assert torch.equal(first.path, again.path)
    assert not torch.equal(first.path, play(rows, position=6).path)
    assert torch.equal(play(rows, position=5, seed=1).path[:-1], first.path[1:])


def test_a_step_of_roots_emits_what_the_target_drew():
    found = play([root_only()] * 3)
    assert found.token_ids.tolist() == [[NEXT], [NEXT + 1], [NEXT + 2]]
    assert found.num_accepted.tolist() == [0, 0, 0]


def test_depths_beyond_the_profile_behave_as_its_last_row():
    table = edge_table([[0.5], [0.25, 0.125]])
    assert table[0, 0] == 1.0
    assert table[1, :2].tolist() == [0.5, 0.0]
    assert table[2, :3].tolist() == table[63, :3].tolist() == [0.25, 0.125, 0.0]


def test_the_checksum_is_that_of_the_real_verifications():
    real = Verification(
        path=torch.zeros(2, 4, dtype=torch.int64),
        num_accepted=torch.zeros(2, dtype=torch.int64),
        next_token=torch.tensor([5, 6]),
        token_ids=torch.tensor([[5, -1, -1, -1], [6, -1, -1, -1]]),
        is_finite=torch.tensor([True, False]),
    )
    calls = []

    def inner(logits, draft, tree, sampling, root_positions):
        calls.append((logits, draft, tree, sampling, root_positions))
        return real

    verify = ReplayedVerify(((1.0,),), CPU, inner)
    tree = TreeTensors.build((chain(3),) * 2, 4, CPU)
    draft = DraftOutput(torch.arange(8).view(2, 4))
    given = (torch.zeros(2), draft, tree, sampling_tensors(2, 10), torch.zeros(2, dtype=torch.int64))
    for _ in range(3):
        found = verify(*given)
    assert verify.checksum() == 3 * (5 - 3 + 6 - 3)
    assert len(calls) == 3
    assert all(passed is asked for passed, asked in zip(calls[0], given, strict=True))
    assert found.token_ids.tolist() == [[1, 2, 3, 5], [5, 6, 7, 6]]
    assert found.is_finite is real.is_finite
