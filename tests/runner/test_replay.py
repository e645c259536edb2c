"""Replayed acceptance has the law of its profile, on paths of the real trees, through verification."""

import itertools

import pytest
import torch

from engine.runner.replay import ReplayedVerify, draw_path, edge_table
from engine.sampling.verify import verify
from engine.speculation import DraftOutput, TreeTensors
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import acceptance_length, search
from engine.tree.topology import TreeTopology, chain, root_only
from tests.sampling.cases import sampling_tensors

CPU = torch.device("cpu")
NUM_ROWS = 20_000
TREES = [
    chain(3),
    search(DEFAULT_PROFILE, 8, 4),
    search(DEFAULT_PROFILE, 24, 6),
    TreeTopology("flat", (-1, 0, 0, 0)),
]


def play(topologies, position=17, seed=0, profile=DEFAULT_PROFILE):
    """Draw the paths of one step of these rows."""
    tree = TreeTensors.build(tuple(topologies), max(t.num_nodes for t in topologies), CPU)
    seeds = torch.arange(len(topologies)) + seed
    return draw_path(tree, edge_table(profile), seeds, torch.full_like(seeds, position))


@pytest.mark.parametrize("topology", TREES, ids=lambda t: t.name)
def test_mean_length_is_that_of_the_profile_within_a_percent(topology):
    """A profile of another draft is the control that must fail."""
    _, num_accepted = play([topology] * NUM_ROWS)
    found = num_accepted.double().mean() + 1
    assert float(found) == pytest.approx(acceptance_length(topology, DEFAULT_PROFILE), rel=0.01)
    worse = [[p * 0.9 for p in row] for row in DEFAULT_PROFILE]
    assert float(found) != pytest.approx(acceptance_length(topology, worse), rel=0.01)


def test_every_node_is_reached_as_often_as_the_profile_says():
    topology = search(DEFAULT_PROFILE, 16, 5)
    path, _ = play([topology] * NUM_ROWS)
    is_reached = (path[..., None] == torch.arange(16)).any(1).double().mean(0)
    expected = [1.0]
    for node in range(1, 16):
        row = DEFAULT_PROFILE[min(topology.depths[node] - 1, len(DEFAULT_PROFILE) - 1)]
        expected.append(expected[topology.parents[node]] * row[topology.ranks[node]])
    deviation = torch.tensor(expected, dtype=torch.float64)
    deviation = (deviation * (1 - deviation) / NUM_ROWS).sqrt()
    assert ((is_reached - torch.tensor(expected)).abs() <= 4 * deviation + 1e-9).all()


def test_paths_are_those_of_each_row_s_own_tree():
    topologies = [root_only(), chain(2), search(DEFAULT_PROFILE, 32, 6), chain(7), TREES[-1]] * 40
    paths, lengths = play(topologies)
    for topology, path, num_accepted in zip(topologies, paths.tolist(), lengths.tolist(), strict=True):
        assert path[0] == 0
        assert num_accepted <= topology.depth
        for above, node in itertools.pairwise(path[: num_accepted + 1]):
            assert topology.parents[node] == above
        assert path[num_accepted:] == [path[num_accepted]] * (len(path) - num_accepted)
    assert set(lengths.tolist()) >= {0, 1, 2, 3}


def test_the_draw_is_a_function_of_seed_and_position():
    rows = [search(DEFAULT_PROFILE, 16, 5)] * 64
    first, _ = play(rows, position=5)
    assert torch.equal(first, play(rows, position=5)[0])
    assert not torch.equal(first, play(rows, position=6)[0])
    assert torch.equal(play(rows, position=5, seed=1)[0][:-1], first[1:])


def test_depths_beyond_the_profile_behave_as_its_last_row():
    table = edge_table([[0.5], [0.25, 0.125]])
    assert table[0, 0] == 1.0
    assert table[1, :2].tolist() == [0.5, 0.0]
    assert table[2, :3].tolist() == table[63, :3].tolist() == [0.25, 0.125, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "drawn", "cut"]
)
def test_verification_keeps_the_drawn_path_and_draws_the_next_token_itself(sampling, dtype):
    topologies = (root_only(), chain(3), search(DEFAULT_PROFILE, 16, 5), TREES[-1]) * 8
    num_rows = len(topologies)
    tree = TreeTensors.build(topologies, 16, CPU)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_rows, 16, 4000, generator=generator).to(dtype)
    drafted = torch.stack([torch.randperm(4000, generator=generator)[:16] for _ in topologies])
    tensors = sampling_tensors(num_rows, 4000, seed=torch.arange(num_rows), **sampling)
    positions = torch.full((num_rows,), 9)
    path, num_accepted = draw_path(tree, edge_table(DEFAULT_PROFILE), tensors.seed, positions)
    untouched = logits.clone()
    found = ReplayedVerify(DEFAULT_PROFILE, CPU)(logits, DraftOutput(drafted), tree, tensors, positions)
    assert torch.equal(found.path, path)
    assert torch.equal(found.num_accepted, num_accepted)
    assert int((logits != untouched).sum()) == int(num_accepted.sum())
    rows = torch.arange(num_rows)
    ends = TreeTensors.build((root_only(),) * num_rows, 1, CPU)
    last = untouched[rows, path[:, -1]][:, None]
    alone = verify(last, DraftOutput(drafted[:, :1]), ends, tensors, positions + num_accepted)
    assert torch.equal(found.next_token, alone.next_token)
    assert len(set(num_accepted.tolist())) > 2


def test_the_checksum_sums_what_verification_found():
    tree = TreeTensors.build((root_only(),) * 2, 1, CPU)
    logits = torch.zeros(2, 1, 50)
    logits[0, 0, 5] = logits[1, 0, 44] = 1.0
    replayed = ReplayedVerify(((0.5,),), CPU)
    for _ in range(3):
        whole = torch.zeros(2, dtype=torch.int64)
        replayed(logits, DraftOutput(whole[:, None]), tree, sampling_tensors(2, 50), whole)
    assert replayed.checksum() == 3 * (5 + 44)
