"""The rules of the choice, one situation each, and what must hold in any."""

import math

import pytest

from engine.dispatcher.control import (
    DEVIATIONS,
    GAIN,
    LEAVING,
    MARGIN,
    MAX_SWITCHES,
    PATIENCE,
    Reason,
    choose_arm,
)
from tests.dispatcher.situations import arm, random_situation, situation

CHEAP, DEAR = arm("chain-1", 1.5, seconds=0.6), arm("tree-8", 1.8, seconds=0.9)
BETTER_CHEAP = arm("chain-1", 2.0, seconds=0.6)
UNSURE_CHEAP = arm("chain-1", 2.0, seconds=0.6, error=0.6 * 0.19)  # sure of 1.81: 0.6% over DEAR


@pytest.mark.parametrize(
    ("now", "name", "reason"),
    [
        (situation(CHEAP, DEAR, is_new_load=True), "tree-8", Reason.NEW_LOAD),
        (situation(CHEAP, DEAR), "off", Reason.WAITING),
        (situation(CHEAP, DEAR, leader="tree-8", num_leading=PATIENCE - 1), "tree-8", Reason.GAIN),
        (situation(CHEAP, DEAR, leader="chain-1", num_leading=9), "off", Reason.WAITING),
        (situation(BETTER_CHEAP, DEAR, held="tree-8"), "chain-1", Reason.CHEAPER),
        (situation(CHEAP, DEAR, held="tree-8"), "tree-8", Reason.BEST),
        (situation(arm("chain-1", 1.81), DEAR, held="tree-8"), "tree-8", Reason.BEST),
        (situation(UNSURE_CHEAP, DEAR, held="tree-8", num_switches=MAX_SWITCHES), "tree-8", Reason.TOO_MANY),
        (situation(UNSURE_CHEAP, DEAR, held="tree-8"), "chain-1", Reason.CHEAPER),
        (situation(BETTER_CHEAP, DEAR, held="tree-8", num_switches=MAX_SWITCHES), "chain-1", Reason.CHEAPER),
        (situation(arm("chain-1", 0.9), held="chain-1"), "off", Reason.LOSING),
        (situation(arm("chain-1", 0.9), held="chain-1", num_switches=9), "off", Reason.LOSING),
        (situation(arm("chain-1", 0.9), DEAR, held="chain-1", num_switches=9), "tree-8", Reason.LOSING),
        (situation(arm("chain-1", 1.007)), "off", Reason.BEST),
        (situation(CHEAP, DEAR, held="tree-8", num_blocked=5), "off", Reason.WATCHDOG),
        (situation(arm("chain-1", 1.5, error=1.0)), "off", Reason.NOT_SURE),
        (situation(arm("chain-1", 1.5, seconds=math.inf)), "off", Reason.ONLY_PLAIN),
        (situation(DEAR, max_seconds=0.7), "off", Reason.TOO_SLOW),
        (
            situation(CHEAP, DEAR, held="tree-8", max_seconds=0.7, is_new_load=True),
            "chain-1",
            Reason.NEW_LOAD,
        ),
    ],
)
def test_each_rule_decides_its_situation(now, name, reason):
    choice = choose_arm(now)
    assert (choice.name, choice.reason) == (name, reason)


def test_a_tree_is_taken_when_sure_to_win_and_left_when_sure_to_lose():
    unsure = arm("tree-8", 0.9, error=0.2)
    assert choose_arm(situation(unsure, held="tree-8")).name == "tree-8"
    assert choose_arm(situation(unsure, held="tree-8", is_broken=True)).name == "off"
    assert choose_arm(situation(unsure, held="tree-8", is_new_load=True)).name == "off"
    assert choose_arm(situation(arm("tree-8", 1.1, error=0.2), is_new_load=True)).name == "off"


def test_changes_wait_while_a_tree_that_may_be_better_is_timed():
    untimed = arm("tree-16", 1.7, seconds=1.2, measured=False, least=1.0)
    assert choose_arm(situation(BETTER_CHEAP, DEAR, untimed, held="tree-8")).name == "chain-1"
    now = situation(BETTER_CHEAP, DEAR, untimed, held="tree-8", is_settled=False)
    assert choose_arm(now).reason is Reason.TIMING


def test_single_requests_count_until_the_arm_was_changed_for_one():
    """The request at hand accepts little, its kind much: leave once, then stay."""
    poor = arm("tree-8", 0.8, settled=1.8)
    assert choose_arm(situation(poor, held="tree-8")).name == "off"
    assert choose_arm(situation(poor, held="tree-8", num_switches=1)).name == "tree-8"


@pytest.mark.parametrize("seed", range(400))
def test_whatever_the_situation_a_choice_may_run_and_keeps_the_law(seed):
    now = random_situation(seed)
    choice = choose_arm(now)
    chosen = now.arm(choice.name)
    if chosen is now.plain:
        return
    assert not now.num_blocked
    assert chosen.seconds <= now.max_seconds
    assert not math.isinf(chosen.seconds)
    tokens = chosen.settled if now.num_switches else chosen.tokens
    error = chosen.error / chosen.seconds
    if choice.name != now.held or now.is_new_load:
        least = tokens / chosen.seconds - DEVIATIONS * error
        assert least >= (1 + MARGIN) * now.plain.rate, "taken where it is sure to win"
    else:
        most = max(tokens, chosen.settled) / chosen.seconds + (0 if now.is_broken else LEAVING * error)
        assert most >= now.plain.rate, "held until it is sure to lose"
    if not now.is_new_load and choice.name != now.held and now.num_switches >= MAX_SWITCHES:
        held = now.arm(now.held)
        held_rate = (held.settled if now.num_switches else held.tokens) / held.seconds
        can_hold = held.seconds <= now.max_seconds and not math.isinf(held.seconds)
        lead = least / ((1 + GAIN) * held_rate) if can_hold else math.inf
        assert choice.reason is Reason.LOSING or lead >= 1, "more changes only where they are sure to pay"
