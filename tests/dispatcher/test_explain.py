"""The printed derivation must lead to the very choice, and a state must survive its file."""

import math

import pytest

from engine.dispatcher.control import choose_arm
from engine.dispatcher.explain import explain
from engine.dispatcher.probes import Probe
from engine.dispatcher.state import DispatchState
from engine.errors import ConfigError
from tests.dispatcher.situations import arm, random_situation, situation


def state_of(now, probe=None):
    return DispatchState(7, now, choose_arm(now), probe, ((0.5, 0.1),), (40.0,))


@pytest.mark.parametrize("seed", range(100))
def test_it_names_the_choice_and_says_of_every_tree_whether_it_may_run(seed):
    now = random_situation(seed)
    state = state_of(now)
    text = explain(state)
    assert f"Choice: {state.choice.name} ({state.choice.reason})." in text
    if now.num_blocked:
        assert "watchdog" in text
        return
    lines = text.splitlines()
    for found in now.arms[1:]:
        (line,) = [line for line in lines if line.partition(". ")[2].startswith(f"{found.name} ")][:1]
        may = "may run:" in line
        is_barred = math.isinf(found.seconds) or found.seconds > now.max_seconds
        assert not (may and is_barred)


def test_the_numbers_of_a_rule_are_those_it_compares():
    text = explain(state_of(situation(arm("chain-1", 1.5, error=0.2), held="off", is_new_load=True)))
    assert "a tree must be sure of 1.005 to run" in text
    assert "chain-1 may run: it is sure of 1.300." in text
    assert "At a new load the leader is taken at once." in text


def test_a_held_tree_that_can_no_longer_run_is_compared_as_plain_decoding():
    now = situation(arm("chain-1", 1.5), arm("tree-8", 2.0, seconds=3.0), held="tree-8", max_seconds=2.0)
    text = explain(state_of(now))
    assert "The held tree-8 can no longer run: off counts as held." in text
    assert "chain-1 over the held off: +50.00%" in text
    assert "Choice: off (a better tree must stay so)." in text


def test_a_probe_is_told():
    text = explain(state_of(situation(), Probe("tree-8", 4, 0.0125)))
    assert "runs tree-8 for 4 steps, at an expected loss of 12.50 ms" in text


@pytest.mark.parametrize("seed", range(50))
def test_a_state_survives_its_file(seed):
    state = state_of(random_situation(seed), Probe("tree-8", 2, 0.5) if seed % 2 else None)
    assert DispatchState.from_json(state.to_json()) == state


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"step": 1}'])
def test_another_file_is_refused(text):
    with pytest.raises(ConfigError, match="state of a dispatcher"):
        DispatchState.from_json(text)
