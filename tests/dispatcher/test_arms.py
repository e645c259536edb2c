import itertools
import random

import pytest

from benchmarks.dispatcher_world import h200_world, published_world
from engine.dispatcher.arms import MAX_ARMS, hull, reach, select_arms
from engine.dispatcher.latency import ArmTimes, LatencyTable
from engine.dispatcher.posterior import tilt
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import acceptance_length, search
from engine.tree.topology import chain, root_only

WORLD = h200_world()


@pytest.mark.parametrize("seed", range(30))
def test_the_hull_holds_the_best_ratio_whatever_the_overhead(seed):
    source = random.Random(seed)
    points = [(source.uniform(1, 5), source.uniform(1, 4)) for _ in range(source.randint(1, 12))]
    corners = hull(points)
    for overhead in (0.0, 0.1, 1.0, 10.0, 1000.0):
        best = max(tokens / (seconds + overhead) for seconds, tokens in points)
        assert max(points[idx][1] / (points[idx][0] + overhead) for idx in corners) == pytest.approx(best)
    corner_points = [points[idx] for idx in corners]
    assert corner_points == sorted(corner_points)


def many_trees():
    """Return three dozen trees and the synthetic costs of them all."""
    sizes = itertools.product((4, 6, 8, 12, 16, 24, 32, 48, 64), (2, 3, 5, 7))
    trees = {"off": root_only()} | {f"chain-{count}": chain(count) for count in (1, 2, 3, 5)}
    trees |= {f"tree-{size}": search(DEFAULT_PROFILE, size, depth) for size, depth in sizes}

    def seconds(tree, batch):
        return 4.0 + max(0.0, batch * tree.num_nodes - 128) / 40 + 0.3 * tree.depth

    times = tuple(
        ArmTimes(name, tree.num_nodes, tuple(seconds(tree, batch) for batch in (1, 8, 64)), (0.0,) * 3)
        for name, tree in trees.items()
    )
    return list(trees.values()), LatencyTable((1, 8, 64), times, (0.0,) * 3)


@pytest.mark.parametrize("lean", [-1.5, -0.5, 0.0, 0.5])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_few_arms_lose_little_against_all_trees(lean, batch):
    trees, table = many_trees()
    kept = select_arms(trees, DEFAULT_PROFILE, table)
    assert len(kept) <= MAX_ARMS
    assert kept[0].name == "off"
    profile = [tilt(row, lean) for row in DEFAULT_PROFILE]

    def best(candidates):
        return max(acceptance_length(t, profile) / table.seconds(t.name, batch, 0) for t in candidates)

    assert best(kept) >= 0.98 * best(trees)


def test_an_arm_beyond_its_reach_could_not_pay_even_if_nearly_always_right():
    for tree in WORLD.arms[1:]:
        last = reach(tree, WORLD.table)
        beyond = [batch for batch in WORLD.table.batches if batch > last]
        for batch in beyond:
            best = sum(0.9**depth for depth in range(tree.depth + 1)) / WORLD.seconds(tree.name, batch, 0)
            assert best < 1.0 / WORLD.seconds("off", batch, 0)
    assert reach(WORLD.arms[1], WORLD.table) == 256
    assert reach(published_world().arms[-1], published_world().table) == 32, "the cliff at 64 is not prepared"
