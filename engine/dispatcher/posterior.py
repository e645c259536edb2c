"""Acceptance probabilities from counts: estimates by depth and rank, and what they say of a tree.

Which counts belong together is left to `acceptance`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.dispatcher.evidence import Counts
from engine.dispatcher.isotonic import falling
from engine.tree.topology import TreeTopology

_FOLLOW = 0.5  # of a depth's shift in log odds that the next depth is expected to share
_DOUBT = 4.0  # how fast a shift at one depth devalues the prior of the next


@dataclass(frozen=True, slots=True)
class Estimate:
    """`profile[d][r]` as in `tree.search`, and `num_nodes[d]`, the evidence behind row d in visited nodes,
    the prior's included.
    """

    profile: tuple[tuple[float, ...], ...]
    num_nodes: tuple[float, ...]


def tilt(row: Sequence[float], log_odds: float) -> list[float]:
    """Return a row of a profile whose odds of any acceptance are exp(log_odds) times higher, its ranks in the
    same proportions.
    """
    if log_odds == 0.0:
        return list(row)
    factor = math.exp(log_odds)
    scale = factor / (1.0 + sum(row) * (factor - 1.0))
    return [p * scale for p in row]


def log_odds(p: float) -> float:
    """Return ln(p / (1 - p)), kept finite."""
    p = min(max(p, 1e-4), 1.0 - 1e-4)
    return math.log(p / (1.0 - p))


def estimate(counts: Counts, prior: Estimate, strength: float) -> Estimate:
    """Return the posterior of `counts` under a prior worth `strength` visited nodes a depth, or what is
    behind it where that is less.

    A depth without evidence of its own leans towards the depth before it: the prior's odds are shifted half
    as much as they turned out shifted there, and the prior counts for less the more they did. Ranks are made
    monotone.
    """
    profile, num_nodes = [], []
    shift = 0.0
    for depth, (prior_row, most) in enumerate(zip(prior.profile, prior.num_nodes, strict=True)):
        worth = min(strength, most) / (1.0 + _DOUBT * shift * shift)
        tries, hits = counts.tries(depth), counts.hits(depth)
        row = _posterior_row(tries, hits, tilt(prior_row, _FOLLOW * shift), worth)
        profile.append(row)
        num_nodes.append(tries[0] + worth)
        shift = log_odds(sum(row)) - log_odds(sum(prior_row))
    return Estimate(tuple(profile), tuple(num_nodes))


def _posterior_row(
    tries: Sequence[float], hits: Sequence[float], mean: Sequence[float], strength: float
) -> tuple[float, ...]:
    """Combine by hazards, the chance of a rank once those before it failed: their trials may differ, since
    trees differ in width. Where they do not it is the mean of a Dirichlet posterior.
    """
    row = []
    is_open = prior_open = 1.0  # probability that no rank so far was right
    for num_tries, num_hits, p in zip(tries, hits, mean, strict=True):
        hazard = (num_hits + strength * p) / (num_tries + strength * prior_open)
        row.append(is_open * min(hazard, 1.0))
        is_open -= row[-1]
        prior_open = max(prior_open - p, 1e-9)
    return tuple(falling(row, [num_tries + strength for num_tries in tries]))


def variance_of_tokens(topology: TreeTopology, estimate: Estimate) -> float:
    """Return the variance of `acceptance_length` that the uncertainty of the estimate leaves (delta method).

    Ranks of one depth vary together, as the parts of a Dirichlet do; depths are independent.
    """
    profile, last = estimate.profile, len(estimate.profile) - 1
    reach, below = [1.0], [1.0] * topology.num_nodes
    steps = []
    for node in range(1, topology.num_nodes):
        depth, rank = min(topology.depths[node] - 1, last), topology.ranks[node]
        row = profile[depth]
        p = row[rank] if rank < len(row) else 0.0
        steps.append((depth, rank, p))
        reach.append(reach[topology.parents[node]] * p)
    slopes: dict[tuple[int, int], tuple[float, float]] = {}
    for node in range(topology.num_nodes - 1, 0, -1):
        depth, rank, p = steps[node - 1]
        parent = topology.parents[node]
        below[parent] += p * below[node]
        _, slope = slopes.get((depth, rank), (p, 0.0))
        slopes[depth, rank] = (p, slope + reach[parent] * below[node])
    means, squares = [0.0] * (last + 1), [0.0] * (last + 1)
    for (depth, _), (p, slope) in slopes.items():
        means[depth] += p * slope
        squares[depth] += p * slope * slope
    parts = zip(squares, means, estimate.num_nodes, strict=True)
    return math.fsum((square - mean * mean) / (num_nodes + 1.0) for square, mean, num_nodes in parts)
