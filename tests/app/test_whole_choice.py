"""The likeliest of several drawn answers: by the mean over their own tokens, prompt by prompt."""

import pytest

from app.call import CallOptions
from app.logprobs import ScoredToken
from app.whole_choice import WholeChoice, likeliest
from engine import SamplingParams


def choice(index: int, own: list[float], echoed: list[float | None] | None = None) -> WholeChoice:
    tokens = [ScoredToken(b"x", logprob, (), idx) for idx, logprob in enumerate([*(echoed or ()), *own])]
    return WholeChoice(index, text=f"answer {index}", num_tokens=len(own), end="stop", tokens=tokens)


def options(num_drawn: int, num_best: int | None, shows_logprobs: bool = True) -> CallOptions:
    return CallOptions(
        model="tiny",
        sampling=SamplingParams(),
        max_tokens=8,
        num_choices=num_drawn,
        stops=(),
        includes_stop=False,
        skips_special_tokens=True,
        is_stream=False,
        includes_usage=False,
        has_continuous_usage=False,
        num_best=num_best,
        shows_logprobs=shows_logprobs,
    )


def texts(choices: list[WholeChoice]) -> list[str]:
    return [choice.text for choice in choices]


def test_a_longer_answer_is_not_worse_for_its_length() -> None:
    drawn = [choice(0, [-1.0] * 2), choice(1, [-0.9] * 4), choice(2, [-1.1])]
    assert texts(likeliest(drawn, options(3, 2))) == ["answer 1", "answer 0"]


def test_the_echo_of_an_unlikely_prompt_does_not_count() -> None:
    drawn = [choice(0, [-0.5] * 3, [None, -9.0, -9.0]), choice(1, [-0.1], [None, -9.0, -9.0])]
    assert texts(likeliest(drawn, options(2, 1))) == ["answer 1"]


def test_each_prompt_has_its_own_best_and_numbers_follow_on() -> None:
    drawn = [choice(idx, [logprob]) for idx, logprob in enumerate([-2.0, -1.0, -3.0, -0.1, -0.3, -0.2])]
    best = likeliest(drawn, options(3, 2))
    assert texts(best) == ["answer 1", "answer 0", "answer 3", "answer 5"]
    assert [c.index for c in best] == [0, 1, 2, 3]


def test_ties_keep_the_order_drawn() -> None:
    drawn = [choice(0, [-1.0]), choice(1, [-0.5, -1.5]), choice(2, [-1.0] * 3)]
    assert texts(likeliest(drawn, options(3, 2))) == ["answer 0", "answer 1"]


@pytest.mark.parametrize("shows_logprobs", [True, False])
def test_tokens_are_shown_only_where_asked_for(shows_logprobs: bool) -> None:
    (best,) = likeliest([choice(0, [-1.0]), choice(1, [-2.0])], options(2, 1, shows_logprobs))
    assert bool(best.tokens) == shows_logprobs


def test_without_a_choice_to_make_all_stay_as_they_are() -> None:
    drawn = [choice(0, [-2.0]), choice(1, [-1.0])]
    assert likeliest(drawn, options(2, None)) == drawn
