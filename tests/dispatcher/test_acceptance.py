"""What is learnt of acceptance from rows drawn at random from a known truth."""

import random

import pytest

from benchmarks.dispatcher_world import Acceptance, SimulatedRow, chain_profile, scaled, stats_of
from engine.dispatcher.acceptance import MAX_TILTED_ROWS, AcceptanceModel
from engine.row_kind import RowKind
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import acceptance_length, search
from engine.tree.topology import chain, root_only

TREE = search(DEFAULT_PROFILE, 16, 5)
GREEDY, SAMPLED = RowKind(), RowKind(temperature_class=2)


def feed(model, profile, num_steps, batch=8, tree=TREE, kind=GREEDY, seed=0, lean=0.0, first=0):
    """Observe steps of rows drawn from `profile`; return how many alarms were raised."""
    source, truth = random.Random(seed), Acceptance(lambda _: profile)
    rows = [SimulatedRow(first + idx, 0, 1, lean, kind=kind) for idx in range(batch)]
    num_alarms = 0
    for step in range(num_steps):
        stats = [stats_of(row, tree, truth.verify(row, tree, step, source)) for row in rows]
        num_alarms += model.observe(stats, 12.0)
        if step % 8 == 0:
            model.refresh()
    model.refresh()
    return num_alarms


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("lean", [-1.0, 0.0, 0.8])
def test_expected_tokens_come_to_the_truth_within_their_error(batch, lean):
    profile = scaled(DEFAULT_PROFILE, lean)
    model = AcceptanceModel(DEFAULT_PROFILE)
    feed(model, profile, 3000 // batch + 40, batch)
    for tree in (chain(1), chain(3), TREE):
        found = model.prospect(tree)
        assert abs(found.settled - acceptance_length(tree, profile)) < 4 * found.error + 0.02
        assert found.error < 0.1


def test_a_narrow_tree_teaches_what_a_wide_one_would_bring():
    """The rank of the token after a miss is seen, so a chain learns the ranks that it does not draft."""
    profile = ((0.3, 0.25, 0.2, 0.1),) * 3
    model = AcceptanceModel(chain_profile((0.5,) * 3))
    feed(model, profile, 800, tree=chain(2))
    wide = search(profile, 5, 1)
    assert model.prospect(wide).settled == pytest.approx(acceptance_length(wide, profile), abs=0.06)


def test_kinds_of_rows_are_told_apart_and_a_new_one_begins_at_the_whole():
    good, bad = scaled(DEFAULT_PROFILE, 0.8), scaled(DEFAULT_PROFILE, -1.2)
    model = AcceptanceModel(DEFAULT_PROFILE)
    for round_idx in range(20):
        feed(model, good, 10, 64, kind=GREEDY, seed=round_idx)
        feed(model, bad, 10, 64, kind=SAMPLED, seed=100 + round_idx)
    rates = {kind: sum(model.estimate(kind).profile[0]) for kind in (GREEDY, SAMPLED, None)}
    assert rates[GREEDY] == pytest.approx(sum(good[0]), abs=0.03)
    assert rates[SAMPLED] == pytest.approx(sum(bad[0]), abs=0.03)
    assert rates[SAMPLED] < rates[None] < rates[GREEDY]
    assert sum(model.estimate(RowKind(1)).profile[0]) == pytest.approx(rates[None], abs=0.02)


@pytest.mark.parametrize("lean", [-1.5, 1.5])
def test_a_request_that_accepts_less_lowers_its_tokens_but_hardly_its_kind(lean):
    model = AcceptanceModel(DEFAULT_PROFILE)
    feed(model, DEFAULT_PROFILE, 400)
    before = model.prospect(TREE)
    feed(model, DEFAULT_PROFILE, 30, batch=1, lean=lean, first=1000, seed=3)
    after = model.prospect(TREE)
    assert abs(after.settled - before.settled) < 0.1
    if lean < 0:
        assert after.tokens < after.settled - 0.3
    else:
        assert after.tokens == after.settled, "requests end; a good one is no reason to change the arm"


def test_the_next_request_begins_at_its_kind():
    model = AcceptanceModel(DEFAULT_PROFILE)
    feed(model, DEFAULT_PROFILE, 400)
    feed(model, DEFAULT_PROFILE, 30, batch=1, lean=-1.5, first=1000)
    feed(model, DEFAULT_PROFILE, 1, batch=1, first=2000)
    found = model.prospect(TREE)
    assert found.tokens == pytest.approx(found.settled, abs=0.3)


def test_in_large_batches_single_requests_are_left_aside():
    model = AcceptanceModel(DEFAULT_PROFILE)
    feed(model, scaled(DEFAULT_PROFILE, -1.0), 20, batch=MAX_TILTED_ROWS + 1)
    found = model.prospect(TREE)
    assert found.tokens == found.settled


@pytest.mark.parametrize(("batch", "num_rows"), [(1, 60), (8, 64), (64, 128)])
def test_a_collapse_is_noticed_and_believed_at_once(batch, num_rows):
    model = AcceptanceModel(DEFAULT_PROFILE)
    feed(model, DEFAULT_PROFILE, 4000 // batch, batch)
    assert feed(model, chain_profile((0.0,) * 4), num_rows // batch, batch, first=500) >= 1
    assert model.prospect(TREE).settled < 1.35


def test_plain_rows_teach_nothing():
    model = AcceptanceModel(DEFAULT_PROFILE)
    before = model.estimate(None)
    feed(model, DEFAULT_PROFILE, 50, tree=root_only())
    assert model.estimate(None) == before
