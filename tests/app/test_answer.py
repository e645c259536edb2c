"""An answer's text, token count and end are cut at one place, however its tokens were cut into steps."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.answer import Answer
from app.tokenizer import Tokenizer
from engine import FinishReason, SequenceDelta, StepError, StopStrings

EOS = 1


def deltas_of(token_ids: list[int], cuts: list[int], reason: FinishReason) -> list[SequenceDelta]:
    bounds = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    runs = [tuple(token_ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [
        SequenceDelta("r", run, 0, reason if idx == len(runs) - 1 else None, idx + 1, 0, 0, 0)
        for idx, run in enumerate(runs)
    ]


def answer_text(answer: Answer, deltas: list[SequenceDelta]) -> str:
    text = ""
    for delta in deltas:
        text += answer.append(delta)
        if answer.is_over:
            break
    return text


def make_answer(tokenizer: Tokenizer, stops: list[str], **options: object) -> Answer:
    return Answer(tokenizer, [2, 3], StopStrings(stops), stop_token_ids=(EOS,), **options)


@pytest.mark.parametrize("stop", ["lo", "o, w", "d", "Hello, wor", "é", "🦅"])
@pytest.mark.parametrize("run_len", [1, 2, 3, 5, 8, 40])
def test_stop_string_cuts_text_and_count_at_its_last_token(
    tokenizer: Tokenizer, stop: str, run_len: int
) -> None:
    text = "Hello, world é 🦅 end"
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    answer = make_answer(tokenizer, [stop])
    cuts = list(range(0, len(token_ids), run_len))
    visible = answer_text(answer, deltas_of(token_ids, cuts, FinishReason.STOP))
    before = text[: text.index(stop)]
    assert visible == before
    assert answer.end == "stop"
    # One token per byte, so the token that completes the stop string is its last byte.
    assert answer.num_tokens == len((before + stop).encode())


def test_stop_string_in_the_last_allowed_token_wins_over_length(tokenizer: Tokenizer) -> None:
    token_ids = list(tokenizer.encode("one two", add_special_tokens=False))
    answer = make_answer(tokenizer, ["two"])
    assert answer_text(answer, deltas_of(token_ids, [3], FinishReason.LENGTH)) == "one "
    assert (answer.end, answer.num_tokens) == ("stop", 7)


@pytest.mark.parametrize("stops", [[], ["zzz"], ["d!"]])
def test_nothing_held_back_is_lost_at_the_end(tokenizer: Tokenizer, stops: list[str]) -> None:
    token_ids = list(tokenizer.encode("world", add_special_tokens=False))
    answer = make_answer(tokenizer, stops)
    assert answer_text(answer, deltas_of(token_ids, [1, 2], FinishReason.LENGTH)) == "world"
    assert (answer.end, answer.num_tokens) == ("length", 5)


def test_end_token_is_counted_but_has_no_text(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("Hi", add_special_tokens=False), EOS]
    answer = make_answer(tokenizer, [], skip_special_tokens=False)
    assert answer_text(answer, deltas_of(token_ids, [], FinishReason.STOP)) == "Hi"
    assert (answer.end, answer.num_tokens) == ("stop", 3)


def test_stop_string_counts_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    token_ids = list(tokenizer.encode("ab.cd.ef", add_special_tokens=False))
    for run_len in (1, 3, 8):
        answer = make_answer(tokenizer, ["."], min_tokens=4)
        cuts = list(range(0, 8, run_len))
        assert answer_text(answer, deltas_of(token_ids, cuts, FinishReason.LENGTH)) == "ab.cd"
        assert answer.num_tokens == 6


@given(
    text=st.text(alphabet="ab🦅é ", max_size=12),
    stops=st.lists(st.text(alphabet="ab🦅é ", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_answer_does_not_depend_on_how_steps_were_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    tokenizer = _TOKENIZERS[0]
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    whole = make_answer(tokenizer, stops)
    whole_text = answer_text(whole, deltas_of(token_ids, list(range(len(token_ids))), FinishReason.STOP))
    cut = make_answer(tokenizer, stops)
    assert answer_text(cut, deltas_of(token_ids, cuts, FinishReason.STOP)) == whole_text
    assert (cut.num_tokens, cut.end) == (whole.num_tokens, whole.end)


_TOKENIZERS: list[Tokenizer] = []


@pytest.fixture(autouse=True, scope="module")
def shared_tokenizer(tokenizer: Tokenizer) -> None:
    _TOKENIZERS.append(tokenizer)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_sequence_that_the_engine_gave_up_raises_its_message(
    tokenizer: Tokenizer, reason: FinishReason
) -> None:
    delta = SequenceDelta("r", (), 0, reason, 1, 0, 0, 0, message="logits are not finite")
    with pytest.raises(StepError, match="not finite"):
        make_answer(tokenizer, []).append(delta)
