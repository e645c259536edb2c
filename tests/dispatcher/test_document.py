"""The numbers that `docs/dispatcher.md` states are those of the code."""

import re

import pytest

from engine.dispatcher import acceptance, adaptive, arms, control, correction, probes, watchdog

STATED = [
    (f"At most {arms.MAX_ARMS}, from the trees", "arms"),
    (f"half-life of {acceptance.HALF_LIFE:,.0f} nodes", "memory"),
    (f"in batches of up to {acceptance.MAX_TILTED_ROWS}", "requests"),
    (f"Decisions are taken every {adaptive.DECIDE_EVERY} steps", "decisions"),
    (f"spread over {adaptive._AMORTISED}\nsteps", "catching up"),
    (f"*sure of* {control.MARGIN:.1%} more", "margin"),
    (
        f"tokens {control.OPTIMISM:g} errors higher, and with {correction.TABLE_ERROR:.0%} less time",
        "optimism",
    ),
    (f"brings less than {control.GAIN:.0%} more", "gain"),
    (f"In the first {adaptive._SETTLING} steps at a load", "timing"),
    (f"After {control.MAX_SWITCHES} changes at one load in {adaptive._SWITCH_WINDOW:,} steps", "changes"),
    (f"has led {control.PATIENCE} decisions in a row", "patience"),
    (f"older than {correction._STALE_AFTER} steps", "staleness"),
    (f"once {acceptance._LEAST_KNOWN:.0f} roots of a kind", "something to break"),
    (f"a budget of {probes.BUDGET:.1%} of the time", "budget"),
    (f"less than {watchdog._TOLERANCE:.0%} of it", "watchdog"),
    (f"a window of {watchdog._MEMORY:.0f} steps", "window"),
    (f"blocked for {watchdog._FIRST_BLOCK} steps", "first block"),
    (f"up to {watchdog._LONGEST_BLOCK:,}", "longest block"),
]


@pytest.mark.parametrize(("sentence", "about"), STATED, ids=[about for _, about in STATED])
def test_the_document_states_what_the_code_does(sentence, about, pytestconfig):
    text = (pytestconfig.rootpath / "docs/dispatcher.md").read_text(encoding="utf-8")
    assert re.sub(r"\s+", " ", sentence) in re.sub(r"\s+", " ", text)
