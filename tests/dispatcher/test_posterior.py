"""Estimates against the closed forms they stand for."""

import itertools
import math
import random

import pytest

from engine.batch import NUM_RANKS
from engine.dispatcher.evidence import NUM_DEPTHS, Counts, Outcome
from engine.dispatcher.posterior import Estimate, estimate, log_odds, tilt, variance_of_tokens
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import acceptance_length, search
from engine.tree.topology import chain

ROW = tuple(0.4 * 0.5**rank for rank in range(NUM_RANKS))
PRIOR = Estimate((ROW,) * NUM_DEPTHS, (50.0,) * NUM_DEPTHS)


def counted(*outcomes):
    counts = Counts()
    for outcome, times in outcomes:
        counts.add(outcome, times)
    return counts


def test_without_evidence_the_prior_stands():
    found = estimate(Counts(), PRIOR, 50.0)
    for row in found.profile:
        assert row == pytest.approx(ROW)


def test_seen_ranks_give_the_mean_of_a_dirichlet():
    numbers = (60, 20, 9, 5, 2, 1, 1, 1)  # falling, as is the prior: nothing needs smoothing
    outcomes = [(Outcome(0, rank, NUM_RANKS), count) for rank, count in enumerate(numbers)]
    found = estimate(counted(*outcomes, (Outcome(0, NUM_RANKS, NUM_RANKS), 41)), PRIOR, 50.0)
    total = sum(numbers) + 41 + 50
    assert found.profile[0] == pytest.approx(
        [(n + 50 * p) / total for n, p in zip(numbers, ROW, strict=True)]
    )
    assert found.num_nodes[0] == pytest.approx(total)


@pytest.mark.parametrize("seed", range(20))
def test_an_estimate_is_a_falling_sub_distribution(seed):
    source = random.Random(seed)
    outcomes = [
        (Outcome(source.randrange(NUM_DEPTHS), source.randint(0, width), width), source.randint(1, 40))
        for width in source.choices(range(1, NUM_RANKS + 1), k=60)
    ]
    for row in estimate(counted(*outcomes), PRIOR, 5.0).profile:
        assert all(left >= right - 1e-12 for left, right in itertools.pairwise(row))
        assert row[-1] >= -1e-12
        assert sum(row) <= 1.0 + 1e-9


def test_a_depth_without_evidence_follows_the_one_before_it_half_way():
    for is_hit in (True, False):
        found = estimate(counted((Outcome(0, 0 if is_hit else 1, 1), 10_000)), PRIOR, 50.0)
        first, second = (log_odds(sum(row)) - log_odds(sum(ROW)) for row in found.profile[:2])
        assert second == pytest.approx(first / 2, rel=0.05)
        assert found.num_nodes[1] < 50.0 / 4, "a prior that was wrong here is doubted there"


def test_a_prior_is_worth_no_more_than_what_is_behind_it():
    thin = Estimate(PRIOR.profile, (3.0,) * NUM_DEPTHS)
    found = estimate(counted((Outcome(0, NUM_RANKS, NUM_RANKS), 30)), thin, 1000.0)
    assert sum(found.profile[0]) < 0.2 * sum(ROW)


@pytest.mark.parametrize("shift", [-3.0, -0.5, 0.0, 0.5, 3.0])
def test_a_tilt_multiplies_the_odds_and_keeps_the_shares(shift):
    found = tilt(ROW, shift)
    assert log_odds(sum(found)) - log_odds(sum(ROW)) == pytest.approx(shift)
    assert [p / found[0] for p in found] == pytest.approx([p / ROW[0] for p in ROW])


@pytest.mark.parametrize("tree", [chain(1), chain(4), search(DEFAULT_PROFILE, 16, 5)], ids=lambda t: t.name)
def test_the_error_of_a_tree_is_the_spread_over_the_posterior(tree):
    """Rows are drawn from their Dirichlet; the delta method must tell how far the expected tokens spread."""
    num_nodes = 400.0
    known = Estimate(PRIOR.profile, (num_nodes,) * NUM_DEPTHS)
    source = random.Random(1)
    draws = []
    for _ in range(1500):
        rows = []
        for row in known.profile:
            parts = [source.gammavariate(num_nodes * p, 1.0) for p in (*row, 1.0 - sum(row))]
            rows.append([part / sum(parts) for part in parts[:-1]])
        draws.append(acceptance_length(tree, rows))
    mean = sum(draws) / len(draws)
    spread = math.sqrt(sum((draw - mean) ** 2 for draw in draws) / len(draws))
    assert math.sqrt(variance_of_tokens(tree, known)) == pytest.approx(spread, rel=0.1)
