"""Which trees a deployment keeps as arms: few, since each costs calibration and graph memory.

Searching trees is left to `tree.search`, choosing between arms at run time to `control`.
"""

from collections.abc import Sequence

from engine.dispatcher.correction import TABLE_ERROR
from engine.dispatcher.latency import PLAIN, LatencyTable
from engine.dispatcher.posterior import tilt
from engine.tree.search import Profile, acceptance_length
from engine.tree.topology import TreeTopology

MAX_ARMS = 8  # plain decoding included
# Acceptance that arms should serve, as log odds around the profile: drafts age, and requests differ.
_LEANS = (-1.5, -0.7, 0.0, 0.7)
_LEAST_WORTH = 1e-3  # what a further arm must add to the mean share of the best rate
_NEARLY_ALWAYS = 0.9  # the best acceptance that is counted on, at every depth
_LONG_CONTEXT = 8192  # reading the cache hides the work of trees: they pay at larger batches


def select_arms(
    trees: Sequence[TreeTopology],
    profile: Profile,
    table: LatencyTable,
    context: int = 0,
    max_arms: int = MAX_ARMS,
) -> tuple[TreeTopology, ...]:
    """Return plain decoding and the trees that are worth keeping, in rising number of nodes.

    A tree can be the best choice at some batch only as a corner of the hull of (seconds, expected tokens)
    there. Where corners are too many, those stay that lose the least in accepted tokens per second over all
    batches of the table and acceptance around `profile`. `context` is the cached tokens of a row.
    """
    plain = next(tree for tree in trees if tree.name == PLAIN)
    gains = _gains(trees, profile, table, context)
    kept = [plain]
    while len(kept) < max_arms:
        best = max(trees, key=lambda tree: (_worth([*kept, tree], gains), -tree.num_nodes))
        if _worth([*kept, best], gains) < _worth(kept, gains) + _LEAST_WORTH:
            break
        kept.append(best)
    return tuple(sorted(kept, key=lambda tree: (tree.num_nodes, tree.depth)))


def reach(tree: TreeTopology, table: LatencyTable) -> int:
    """Return the largest batch of the table at which a tree could pay; 0 where there is none. Beyond it,
    nothing need be prepared.
    """
    return max((batch for batch in table.batches if could_pay(tree, table, batch)), default=0)


def could_pay(tree: TreeTopology, table: LatencyTable, batch: int) -> bool:
    """Return whether a tree could beat plain decoding at some context, were the draft nearly always right and
    the table wrong in its disfavour.
    """
    most = sum(_NEARLY_ALWAYS**depth for depth in range(tree.depth + 1))
    return any(
        most * table.seconds(PLAIN, batch, batch * context)
        >= (1.0 - TABLE_ERROR) * table.seconds(tree.name, batch, batch * context)
        for context in (0, _LONG_CONTEXT)
    )


def hull(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the corners of the upper left hull of (seconds, tokens) points, by seconds.

    Only they can have the highest tokens / (seconds + overhead), whatever the overhead.
    """
    corners: list[int] = []
    for idx in sorted(range(len(points)), key=lambda idx: (points[idx][0], -points[idx][1])):
        if corners and points[idx][1] <= points[corners[-1]][1]:
            continue
        while len(corners) >= 2 and _slope(points, corners[-2], corners[-1]) <= _slope(
            points, corners[-2], idx
        ):
            corners.pop()
        corners.append(idx)
    return corners


def _slope(points: Sequence[tuple[float, float]], left: int, right: int) -> float:
    seconds = points[right][0] - points[left][0]
    return (points[right][1] - points[left][1]) / max(seconds, 1e-12)


def _gains(
    trees: Sequence[TreeTopology], profile: Profile, table: LatencyTable, context: int
) -> list[dict[str, float]]:
    """Return, for each batch and acceptance, tokens per second of every tree on the hull, relative to the
    best.
    """
    found = []
    for lean in _LEANS:
        leaning = [tilt(row, lean) for row in profile]
        lengths = [acceptance_length(tree, leaning) for tree in trees]
        for batch in table.batches:
            seconds = [table.seconds(tree.name, batch, batch * context) for tree in trees]
            points = list(zip(seconds, lengths, strict=True))
            able = [idx for idx in range(len(trees)) if seconds[idx] < float("inf")]
            corners = [able[idx] for idx in hull([points[idx] for idx in able])]
            rates = {trees[idx].name: lengths[idx] / seconds[idx] for idx in corners}
            best = max(rates.values())
            found.append({name: rate / best for name, rate in rates.items()})
    return found


def _worth(kept: Sequence[TreeTopology], gains: Sequence[dict[str, float]]) -> float:
    return sum(max(gain.get(tree.name, 0.0) for tree in kept) for gain in gains) / len(gains)
