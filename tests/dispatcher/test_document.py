"""What `docs/dispatcher.md` says is what the code does: its numbers, its states, and its rules as a reader
applies them.
"""

import math
import random
import re
from dataclasses import replace

import pytest

from engine.dispatcher import acceptance, adaptive, arms, control, correction, probes, watchdog
from engine.dispatcher.control import Reason, choose_arm
from engine.dispatcher.explain import explain
from engine.dispatcher.state import DispatchState
from tests.dispatcher.reader import predict, read, situation_of
from tests.dispatcher.situations import random_situation

STATED = [
    (f"At most {arms.MAX_ARMS}, from the trees", "arms"),
    (f"half-life of {acceptance.HALF_LIFE:,.0f} nodes", "memory"),
    (f"in batches of up to {acceptance.MAX_TILTED_ROWS}", "requests"),
    (f"commonly differ ({acceptance._COMMON_LEAN:g} standard", "leaning"),
    (f"Decisions are taken every {adaptive.DECIDE_EVERY} steps", "decisions"),
    (f"spread over {adaptive._AMORTISED}\nsteps", "catching up"),
    (f"*sure of* {control.MARGIN:.1%} more", "margin"),
    (f"tokens {control.DEVIATIONS:g} error lower", "doubt"),
    (f"tokens {control.LEAVING:g} errors higher would bring less", "leaving"),
    (f"*settled* {control.OPTIMISM:g} errors higher", "optimism"),
    (f"{correction.TABLE_ERROR:.0%} less than the table", "unseen steps"),
    (f"{correction._MIN_SAMPLES} live steps were seen", "timed"),
    (f"brings less than {control.GAIN:.0%} more", "gain"),
    (f"in the first {adaptive._SETTLING} steps at a load", "timing"),
    (f"After {control.MAX_SWITCHES} *changes*, hold", "changes"),
    (f"of the arm in the last {adaptive._SWITCH_WINDOW:,} steps at this load", "window of changes"),
    (f"has led {control.PATIENCE} decisions in a row", "patience"),
    (f"older than {correction._STALE_AFTER} steps", "staleness"),
    (f"the last one at most {correction._STALE_AFTER} steps ago", "timed plain decoding"),
    (f"once {acceptance._LEAST_KNOWN:.0f} roots of a kind", "something to break"),
    (f"a budget of {probes.BUDGET:.1%} of the time", "budget"),
    (f"less than {watchdog._TOLERANCE:.0%} of it", "watchdog"),
    (f"a window of {watchdog._MEMORY:.0f} steps", "window"),
    (f"blocked for {watchdog._FIRST_BLOCK} steps", "first block"),
    (f"up to {watchdog._LONGEST_BLOCK:,}", "longest block"),
]


SEEDS = range(600)
# What an input says most of the time, so that a reader who takes it for granted is wrong at others.
USUAL = {
    "leader before": "off",
    "in a row": "0",
    "changes": "0",
    "timing": "over",
    "broken": "no",
    "blocked": "0",
    "cap ms": "-",
}


@pytest.fixture(scope="module")
def document(pytestconfig):
    return (pytestconfig.rootpath / "docs/dispatcher.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("sentence", "about"), STATED, ids=[about for _, about in STATED])
def test_the_document_states_what_the_code_does(sentence, about, document):
    assert re.sub(r"\s+", " ", sentence) in re.sub(r"\s+", " ", document)


def printed(now, step=7):
    return explain(DispatchState(step, now, choose_arm(now), None, (), ()))


def in_milliseconds(seed):
    """Return a random situation with rows and times as they are in a server; in some no tree can run, in some
    all are within a percent or so of plain decoding.
    """
    now, source = random_situation(seed), random.Random(seed)
    if seed % 7 == 0:
        now = replace(now, arms=(now.plain, *(_close(arm, now.plain.rate, source) for arm in now.arms[1:])))
    slowness = math.inf if seed % 50 == 0 else 0.01
    rows = source.choice((1, 4, 64))
    arms = tuple(
        replace(arm, batch=rows, seconds=arm.seconds * factor, least_seconds=arm.least_seconds * factor)
        for arm, factor in zip(now.arms, (0.01, *4 * [slowness]), strict=True)
    )
    return replace(now, arms=arms, max_seconds=now.max_seconds / 100)


def _close(arm, rate, source):
    tokens = arm.tokens if math.isinf(arm.seconds) else rate * source.uniform(0.99, 1.012) * arm.seconds
    return replace(arm, tokens=tokens, settled=tokens, error=0.001)


def test_a_reader_of_the_document_predicts_every_choice_and_its_reason():
    seen = set()
    for seed in SEEDS:
        now = in_milliseconds(seed)
        state, _, answer = printed(now).rpartition("\n\nChoice: ")
        name, reason = predict(read(state))
        assert answer == f"{name} ({reason}).\n", seed
        seen.add(reason)
    assert seen == {str(reason) for reason in Reason} - {str(Reason.FIXED), str(Reason.PROBE)}


@pytest.mark.parametrize(("column", "usual"), USUAL.items())
def test_a_reader_needs_every_input_that_is_printed(column, usual):
    states = [(read(printed(now)), choose_arm(now)) for now in map(in_milliseconds, SEEDS)]
    blind = [
        (predict(replace(state, inputs=state.inputs | {column: usual})), choice) for state, choice in states
    ]
    assert any(told != (choice.name, choice.reason) for told, choice in blind)


def test_the_rule_named_last_is_the_one_that_has_the_reason_in_italics(document):
    rules = document.partition("## The rules")[2].partition("**Probes.**")[0]
    for seed in SEEDS:
        now = in_milliseconds(seed)
        number = printed(now).rpartition("\n\n")[0].splitlines()[-1].partition(". ")[0]
        rule = re.search(rf"^{number}\. (.*?)(?=^\d+\. |\Z)", rules, re.DOTALL | re.MULTILINE)
        assert rule is not None
        assert f"*{choose_arm(now).reason}*" in re.sub(r"\s+", " ", rule[1]), seed


def test_every_state_in_the_document_is_what_its_numbers_print_and_leads_to_its_choice(document):
    states = re.findall(r"```\n(step (\d+): .*?)\n```\n(.*?)(?=```|## )", document, re.DOTALL)
    assert len(states) == 2
    for state, step, below in states:
        text = printed(situation_of(read(state)), int(step))
        assert text.startswith(state + "\n\n2. ")
        assert f"`{text.splitlines()[-1]}`" in re.sub(r"\s+", " ", below)
