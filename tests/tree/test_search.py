import itertools
import math
import random

import pytest

from engine.errors import ConfigError
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import acceptance_length, search
from engine.tree.topology import TreeTopology


def random_profile(rng: random.Random, num_depths: int, num_ranks: int) -> list[list[float]]:
    profile = []
    for _ in range(num_depths):
        weights = sorted((rng.random() ** 2 for _ in range(num_ranks)), reverse=True)
        scale = rng.random() / sum(weights)
        profile.append([weight * scale for weight in weights])
    return profile


def best_by_exhaustion(profile: list[list[float]], num_nodes: int) -> float:
    """Try every set of path names; a set counts if it is closed under parents and left siblings."""
    num_ranks = len(profile[0])
    names = [
        path
        for depth in range(1, len(profile) + 1)
        for path in itertools.product(range(num_ranks), repeat=depth)
    ]
    best = -1.0
    for chosen in itertools.combinations(names, num_nodes - 1):
        nodes = {(), *chosen}
        has_parents = all(path[:-1] in nodes for path in chosen)
        has_siblings = all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in nodes for path in chosen)
        if has_parents and has_siblings:
            products = [math.prod(profile[depth][rank] for depth, rank in enumerate(path)) for path in nodes]
            best = max(best, sum(products))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_greedy_search_equals_exhaustive_search(seed):
    rng = random.Random(seed)
    num_depths, num_ranks = rng.choice([(1, 6), (2, 3), (3, 2)])
    profile = random_profile(rng, num_depths, num_ranks)
    num_nodes = rng.randint(1, 7)
    tree = search(profile, num_nodes, num_depths)
    assert tree.num_nodes == num_nodes
    assert acceptance_length(tree, profile) == pytest.approx(
        best_by_exhaustion(profile, num_nodes), abs=1e-12
    )


@pytest.mark.parametrize("num_nodes", [2, 9, 33, 64])
@pytest.mark.parametrize("max_depth", [2, 3, 7])
def test_a_searched_tree_is_valid_and_no_deeper_than_allowed(num_nodes, max_depth):
    tree = search(DEFAULT_PROFILE, num_nodes, max_depth)
    assert tree.num_nodes == num_nodes
    assert tree.depth <= max_depth


def test_more_nodes_and_more_depth_never_shorten_acceptance():
    lengths = [
        acceptance_length(search(DEFAULT_PROFILE, num_nodes, 6), DEFAULT_PROFILE)
        for num_nodes in range(1, 65)
    ]
    assert lengths == sorted(lengths)
    lengths = [
        acceptance_length(search(DEFAULT_PROFILE, 32, depth), DEFAULT_PROFILE) for depth in range(2, 9)
    ]
    assert lengths == sorted(lengths)


def test_acceptance_length_of_plain_decoding_and_of_a_chain():
    assert acceptance_length(TreeTopology("off", (-1,)), [[0.5]]) == 1.0
    assert (
        acceptance_length(TreeTopology("chain-3", (-1, 0, 1, 2)), [[0.5], [0.25]])
        == 1 + 0.5 + 0.125 + 0.03125
    )


def test_a_certain_draft_is_a_chain_and_a_hopeless_one_goes_wide():
    assert search([[1.0, 0.0]], 5, 4).parents == (-1, 0, 1, 2, 3)
    assert search([[0.2, 0.2, 0.2, 0.2]], 5, 4).parents == (-1, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "profile",
    [[], [[]], [[0.2, 0.3]], [[0.7, 0.4]], [[-0.1]], [[float("nan")]], [[1.5]], [[0.5], [0.1, 0.2]]],
)
def test_an_impossible_profile_is_refused(profile):
    with pytest.raises(ConfigError, match="profile"):
        search(profile, 4, 3)


@pytest.mark.parametrize("num_nodes", [0, 65])
def test_an_impossible_size_is_refused(num_nodes):
    with pytest.raises(ConfigError, match="1 to 64 nodes"):
        search(DEFAULT_PROFILE, num_nodes, 3)


def test_a_profile_with_too_few_candidates_is_refused():
    with pytest.raises(ConfigError, match="holds 3 nodes"):
        search([[0.5, 0.2]], 4, 1)
