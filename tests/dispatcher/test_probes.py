"""Probes: what they look at, and the budget they keep."""

import dataclasses
import itertools
import math

import pytest

from engine.dispatcher.probes import BUDGET, Prober
from tests.dispatcher.situations import arm, situation

LATER = 1000  # a step at which a probe is due


def plan(*arms, held="off", **changes):
    prober = Prober()
    prober.plan(situation(), "off", 0, 0.0)  # the first budget
    return prober.plan(situation(*arms, held=held, **changes), held, LATER, 0.0)


def test_plain_decoding_is_measured_first_while_speculating():
    prober = Prober()
    now = situation(arm("chain-1", 1.5), arm("tree-8", 1.6, measured=False), held="chain-1")
    plain = dataclasses.replace(now.plain, is_measured=False)
    now = dataclasses.replace(now, arms=(plain, *now.arms[1:]))
    assert prober.plan(now, "chain-1", LATER, 0.0).name == "off"


def test_a_tree_that_may_be_better_is_timed():
    hopeful = arm("tree-8", 1.4, seconds=0.6, measured=False, least=0.5)
    assert plan(arm("chain-1", 1.5, seconds=0.6), hopeful, held="chain-1").name == "tree-8"
    hopeless = arm("tree-8", 1.1, seconds=0.6, measured=False, least=0.5)
    assert plan(arm("chain-1", 1.5, seconds=0.6), hopeless, held="chain-1") is None


def test_a_cliff_is_never_probed():
    cliff = arm("chain-7", 0.02, seconds=60.0, measured=False, least=51.0)
    assert plan(arm("chain-1", 1.5), cliff, held="chain-1") is None
    assert plan(cliff) is None, "not even when nothing else is there: it is not paid for"
    assert plan(arm("chain-7", 2.0, seconds=math.inf)) is None


def test_while_decoding_plainly_the_cheapest_tree_looks_for_a_recovery_ever_more_rarely():
    prober, starts = Prober(), []
    now = situation(arm("chain-1", 0.9, seconds=0.6), arm("tree-8", 0.7, seconds=0.9))
    for step in range(4000):
        prober.earn(0.5)
        probe = prober.plan(now, "off", step, 0.0)
        if probe is not None:
            assert probe.name == "chain-1"
            starts.append(step)
    gaps = [right - left for left, right in itertools.pairwise(starts)]
    assert len(starts) >= 4
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_a_blocked_dispatcher_does_not_probe():
    assert plan(arm("chain-1", 3.0), num_blocked=10) is None


def test_a_tree_over_the_cap_is_not_probed():
    assert plan(arm("chain-1", 3.0, seconds=0.8), max_seconds=0.7) is None


@pytest.mark.parametrize("error", [0.0, 0.4])
def test_probes_of_tokens_lose_no_more_than_their_budget(error):
    """Steps of 1 s, ten thousand of them: what probes cost by their own account stays within the share."""
    prober, lost = Prober(), 0.0
    now = situation(arm("chain-1", 1.5), arm("tree-8", 1.3, seconds=1.5, error=error), held="chain-1")
    for step in range(10_000):
        prober.earn(1.0)
        probe = prober.plan(now, "chain-1", step, 0.0)
        lost += probe.loss if probe else 0.0
    assert lost <= BUDGET * 10_000 + 4 * now.plain.seconds
    assert (lost > 0) == (error > 0), "and nothing is probed that cannot be better"


def test_a_probe_from_plain_decoding_pays_for_what_the_draft_has_to_catch_up_with():
    hopeful = arm("chain-1", 0.99, seconds=0.6, error=0.06)
    prober, dear = Prober(), Prober()
    for each in (prober, dear):
        each.plan(situation(), "off", 0, 0.0)
    alike = prober.plan(situation(hopeful), "off", LATER, 0.0)
    dearer = dear.plan(situation(hopeful), "off", LATER, catch_up=0.25)
    assert dearer.loss == pytest.approx(alike.loss + 0.25)
    held = situation(hopeful, arm("tree-8", 1.1, seconds=0.9, measured=False), held="chain-1")
    assert Prober().plan(held, "chain-1", LATER, 0.0).loss == Prober().plan(held, "chain-1", LATER, 0.25).loss
