"""A prompt's scores are told once and in order, whatever the chunks, and however often they run again."""

from hypothesis import given
from hypothesis import strategies as st

from engine.logprobs import PromptScores, TokenLogprob


@given(
    num_prompt=st.integers(1, 30),
    num_emitted=st.integers(0, 10),
    runs=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), max_size=4),
)
def test_every_token_behind_the_first_is_told_once_and_in_order(
    num_prompt: int, num_emitted: int, runs: list[list[int]]
) -> None:
    scores, told = PromptScores(), []
    for idx, sizes in enumerate([*runs, [12] * 4]):  # the last run is long enough for any prompt
        # A sequence that has emitted was told of whole before, so only later runs may hold emitted tokens.
        length = num_prompt if len(told) < num_prompt - 1 else num_prompt + num_emitted
        start = 0
        for size in sizes:
            end = min(start + size, length - 1)  # a prefill ends before the last known token
            if end > start:
                entries = tuple(TokenLogprob(-float(position + 1), ()) for position in range(start, end))
                told += scores.take(entries, end, num_prompt)
            start = end
        assert len(told) <= num_prompt - 1, idx
    assert [entry.logprob for entry in told] == [-float(token) for token in range(1, num_prompt)]


def test_a_chunk_that_nobody_scores_tells_nothing() -> None:
    assert PromptScores().take((), end=5, num_prompt=9) == ()
