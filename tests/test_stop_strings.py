"""Laws of the stop scanner: the answer does not depend on how its text was cut, and nothing held is lost.

A plain search over the whole text is the reference; tokens are left to the detokenizer's tests.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.stop_strings import MAX_STOPS, StopStrings


def scan(stops, pieces, include_in_output=False):
    """Feed `pieces` until a match: (text of the answer, matched, end, text out before the last piece)."""
    scanner = StopStrings(stops, include_in_output)
    texts = []
    for piece in pieces:
        found = scanner.feed(piece)
        texts.append(found.text)
        if found.matched is not None:
            return "".join(texts), found.matched, found.end
    return "".join(texts) + scanner.flush(), None, None


def search(stops, text, include_in_output=False):
    """The definition: the match that ends first, and of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            matched = max(ending, key=len)
            return text[: end if include_in_output else end - len(matched)], matched, end
    return text, None, None


def all_cuts(text):
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        bounds = [0, *(idx for idx, is_cut in enumerate(cuts, start=1) if is_cut), len(text)]
        yield [text[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("include_in_output", [False, True])
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["STOP"], "xxSTOPyy"),
        (["日本"], "語日日本語"),
        (["🦅🦅"], "a🦅🦅🦅"),
        (["aab"], "aaaabaab"),
        (["abcd", "bc"], "xabcdx"),
        (["she", "he", "hers"], "ushers"),
        (["\n\n", "\nQ:"], "A\nB\nQ: C"),
        (["none"], "nonono"),
    ],
)
def test_answer_is_the_same_for_all_ways_to_cut_the_text(stops, text, include_in_output):
    expected = search(stops, text, include_in_output)
    for pieces in all_cuts(text):
        assert scan(stops, pieces, include_in_output) == expected


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=5),
    st.lists(st.text("abc", max_size=6), max_size=8),
    st.booleans(),
)
def test_answer_is_that_of_a_plain_search(stops, pieces, include_in_output):
    assert scan(stops, pieces, include_in_output) == search(stops, "".join(pieces), include_in_output)


@pytest.mark.parametrize("position", range(6))
def test_stop_at_each_position_of_a_run_cuts_there(position):
    run = "abcdef"[:position] + "##" + "ghijkl"[position:]
    assert scan(["##"], ["before ", run]) == ("before " + run[:position], "##", 7 + position + 2)


def test_only_what_may_begin_a_stop_string_is_held_back():
    scanner = StopStrings(["</end>", "enough"])
    assert scanner.feed("text <").text == "text "
    assert scanner.feed("/e").text == ""
    assert scanner.feed("no").text == "</"  # "eno" still begins "enough"
    assert scanner.feed("rm").text == "enorm"
    assert scanner.flush() == ""


def test_held_back_text_is_flushed_at_the_end():
    scanner = StopStrings(["a long stop string"])
    assert scanner.feed("a long stop").text == ""
    assert scanner.flush() == "a long stop"


def test_nothing_is_held_back_where_the_match_is_part_of_the_answer():
    scanner = StopStrings(["STOP"], include_in_output=True)
    assert scanner.feed("xS").text == "xS"
    found = scanner.feed("TOPy")
    assert (found.text, found.matched, found.end) == ("TOP", "STOP", 5)


def test_no_stop_strings_let_everything_through():
    assert scan([], ["a", "", "b"]) == ("ab", None, None)


def test_text_after_the_match_is_refused():
    scanner = StopStrings(["x"])
    scanner.feed("x")
    with pytest.raises(AssertionError, match="after the end"):
        scanner.feed("y")
    with pytest.raises(AssertionError, match="ended"):
        scanner.flush()


@pytest.mark.parametrize("stops", [[""], ["ok", ""], ["x"] * (MAX_STOPS + 1)])
def test_impossible_stops_name_the_parameter(stops):
    with pytest.raises(RequestError) as error:
        StopStrings(stops)
    assert error.value.parameter == "stop"
