"""What rows say, counted: trees of any width must add up to the ranks that the draft really has."""

import random

import pytest

from engine.batch import NUM_RANKS
from engine.dispatcher.evidence import NUM_DEPTHS, Counts, Outcome, outcomes_of
from engine.tree.topology import TreeTopology, chain, root_only

FORK = TreeTopology("tree-4", (-1, 0, 0, 1))  # the root has two children, the first of them one


@pytest.mark.parametrize(
    ("tree", "path_ranks", "next_rank", "expected"),
    [
        (FORK, (), None, [Outcome(0, 2, 2)]),
        (FORK, (), 5, [Outcome(0, 5, NUM_RANKS)]),
        (FORK, (), NUM_RANKS, [Outcome(0, NUM_RANKS, NUM_RANKS)]),
        (FORK, (0,), None, [Outcome(0, 0, NUM_RANKS), Outcome(1, 1, 1)]),
        (FORK, (1,), None, [Outcome(0, 1, NUM_RANKS)]),  # a leaf has no children to be wrong
        (FORK, (1,), 3, [Outcome(0, 1, NUM_RANKS), Outcome(1, 3, NUM_RANKS)]),
        (root_only(), (), None, []),
        (root_only(), (), 2, [Outcome(0, 2, NUM_RANKS)]),  # another row of its step was drafted
    ],
)
def test_a_row_says_what_happened_at_each_visited_node(tree, path_ranks, next_rank, expected):
    assert list(outcomes_of(tree, path_ranks, next_rank)) == expected


def test_depths_beyond_the_last_that_is_told_apart_count_there():
    found = outcomes_of(chain(12), (0,) * 12, None)
    assert [outcome.depth for outcome in found] == [min(d, NUM_DEPTHS - 1) for d in range(12)]


def hazards(counts):
    return [counts.hits(0)[rank] / counts.tries(0)[rank] for rank in range(4)]


@pytest.mark.parametrize("is_seen", [True, False], ids=["rank seen", "censored at the width"])
def test_trees_of_any_width_find_the_same_ranks(is_seen):
    """Narrow trees are far more frequent; to count their misses as misses of every rank would be wrong."""
    chances, source, counts = (0.4, 0.2, 0.1, 0.05), random.Random(0), Counts()
    for _ in range(40_000):
        width = source.choice((1, 1, 1, 1, 2, 4))
        u, rank = source.random(), 0
        while rank < 4 and u >= sum(chances[: rank + 1]):
            rank += 1
        tree = TreeTopology(f"tree-{width + 1}", (-1, *(0,) * width))
        path = (rank,) if rank < width else ()
        next_rank = (rank if rank < 4 else NUM_RANKS) if is_seen and not path else None
        for outcome in outcomes_of(tree, path, next_rank):
            counts.add(outcome, 1)
    expected = [p / (1 - sum(chances[:rank])) for rank, p in enumerate(chances)]
    assert hazards(counts) == pytest.approx(expected, abs=0.02)


def test_faded_evidence_weighs_less_and_keeps_its_shares():
    counts = Counts()
    for rank in (0, 0, 1, NUM_RANKS):
        counts.add(Outcome(0, rank, NUM_RANKS), 10)
    before = hazards(counts)[:2]
    for _ in range(200):
        counts.fade(0.5 ** (1 / 100))
    assert counts.tries(0)[0] == pytest.approx(10.0)
    assert hazards(counts)[:2] == pytest.approx(before)


def test_evidence_survives_any_number_of_fadings():
    counts = Counts()
    for _ in range(3000):
        counts.add(Outcome(0, 0, 1), 1)
        counts.fade(0.9)
    assert counts.tries(0)[0] == pytest.approx(9.0)
    assert counts.hits(0)[0] == pytest.approx(9.0)
