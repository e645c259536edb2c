import pytest

from engine.request import FinishReason, SamplingParams
from engine.scheduler.stopping import Cut, StopRule

EOS = 7


def rule(num_prompt: int = 3, max_model_len: int = 1000, **sampling) -> StopRule:
    return StopRule.build(SamplingParams(**sampling), num_prompt, frozenset({EOS}), max_model_len)


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("stop", [EOS, 30])
def test_stop_inside_path_cuts_output_behind_it(position, stop):
    path = [1, 2, 3, 4, 5, 6, 8, 9]
    path[position] = stop
    cut = rule(max_tokens=50, stop_token_ids=(30,)).cut(5, path)
    assert cut == Cut(tuple(path[: position + 1]), FinishReason.STOP)


def test_ignore_eos_goes_on_past_eos_but_not_past_other_stops():
    assert rule(max_tokens=50, ignore_eos=True).cut(0, [1, EOS, 2]) == Cut((1, EOS, 2), None)
    cut = rule(max_tokens=50, ignore_eos=True, stop_token_ids=(30,)).cut(0, [EOS, 30, 2])
    assert cut == Cut((EOS, 30), FinishReason.STOP)


@pytest.mark.parametrize("max_tokens", range(1, 13))
@pytest.mark.parametrize("depth", range(8))
def test_exactly_max_tokens_are_delivered(max_tokens, depth):
    stop_rule = rule(max_tokens=max_tokens)
    output: list[int] = []
    reason = None
    while reason is None:
        cut = stop_rule.cut(len(output), [1] * (depth + 1))
        output.extend(cut.token_ids)
        reason = cut.finish_reason
    assert len(output) == max_tokens
    assert reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("offset", "num_kept", "reason"),
    [(-1, 3, FinishReason.STOP), (0, 4, FinishReason.STOP), (1, 4, FinishReason.LENGTH)],
)
def test_the_cap_does_not_mask_a_stop(offset, num_kept, reason):
    max_tokens = 10
    path = [1] * 8
    path[3 + offset] = EOS  # the path starts after 6 tokens, so index 3 is the last allowed token
    cut = rule(max_tokens=max_tokens).cut(6, path)
    assert cut == Cut(tuple(path[:num_kept]), reason)


@pytest.mark.parametrize("num_output", range(9))
@pytest.mark.parametrize("path", [(1,), (1, 2), (EOS, 1), (1, 30, 2, 3)])
def test_a_path_that_may_not_end_is_kept_whole(num_output, path):
    stop_rule = rule(max_tokens=10, min_tokens=4, stop_token_ids=(30,))
    if not stop_rule.may_end(num_output, path):
        assert stop_rule.cut(num_output, path) == Cut(path, None)
    has_stop = bool({EOS, 30}.intersection(path))
    assert stop_rule.may_end(num_output, path) == (has_stop or num_output + len(path) >= 10)


@pytest.mark.parametrize("num_output", range(8))
def test_a_stop_before_min_tokens_does_not_end(num_output):
    cut = rule(max_tokens=20, min_tokens=5).cut(num_output, [EOS])
    assert cut.finish_reason == (FinishReason.STOP if num_output + 1 >= 5 else None)


def test_the_length_of_the_model_ends_a_sequence():
    stop_rule = rule(num_prompt=10, max_model_len=13, max_tokens=50)
    assert stop_rule.cut(0, [1, 2]) == Cut((1, 2), None)
    assert stop_rule.cut(2, [1, 2]) == Cut((1,), FinishReason.LENGTH)
