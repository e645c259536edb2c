import dataclasses

import pytest
import torch

from engine.engine import Engine
from engine.errors import StepError
from engine.request import Request, SamplingParams
from engine.training.dialogue import Span, write_dialogues
from tests.exactness.tiny import EOS, EngineShape, build_engine, build_target, prompts, run

FRAME_END = 17


@pytest.fixture(scope="module")
def engine():
    return build_engine(build_target(), None, EngineShape(max_num_seqs=3))


def answer(given, **changes):
    fields = {"temperature": 0.0, "max_tokens": 20, **changes}
    return Span(tuple(given), is_answer=True, sampling=SamplingParams(**fields))


def user(given, **changes):
    fields = {"temperature": 1.0, "max_tokens": 200, "stop_token_ids": (FRAME_END,), "seed": 3, **changes}
    return Span(tuple(given), is_answer=False, sampling=SamplingParams(**fields))


def write(engine, *plans, max_length=250):
    written = dict(write_dialogues(engine, plans, max_length))
    assert sorted(written) == list(range(len(plans)))
    return [written[idx] for idx in range(len(plans))]


def continuation(engine, prompt, **sampling):
    return run(engine, [Request("alone", tuple(prompt), SamplingParams(**sampling))])["alone"]


def test_answers_are_those_of_the_engine_alone(engine):
    given = prompts(7)
    for prompt, dialogue in zip(given, write(engine, *[[answer(prompt)] for prompt in given]), strict=True):
        expected = continuation(engine, prompt, temperature=0.0, max_tokens=20)
        assert dialogue.token_ids == (*prompt, *expected)
        assert dialogue.is_answer == (False,) * len(prompt) + (True,) * len(expected)
        assert [a.token_ids for a in dialogue.answers] == [expected]


def test_a_later_turn_reads_all_before_it_and_its_frame_once(engine):
    prompt = prompts(1)[0]
    stop = continuation(engine, prompt, temperature=0.0, max_tokens=5)[-1]
    first = answer(prompt, stop_token_ids=(stop,))
    (dialogue,) = write(engine, [first, answer((stop, 40, 41))])
    one, two = dialogue.answers
    assert one.token_ids[-1] == stop
    history = (*prompt, *one.token_ids, 40, 41)
    assert dialogue.token_ids == (*history, *two.token_ids)
    assert two.token_ids == continuation(engine, history, temperature=0.0, max_tokens=20)


def test_an_answer_that_ends_in_another_way_than_the_frame_ends_the_dialogue(engine):
    prompt = prompts(1)[0]
    stop = continuation(engine, prompt, temperature=0.0, max_tokens=5)[-1]
    (dialogue,) = write(engine, [answer(prompt, stop_token_ids=(stop,)), answer((stop + 1, 40))])
    assert len(dialogue.answers) == 1
    (cut,) = write(engine, [answer(prompt, max_tokens=3), answer((stop, 40))])
    assert len(cut.answers) == 1, "an answer cut by length has no next turn"
    second = dataclasses.replace(answer((stop, 40)), follows_cut=True)
    (kept,) = write(engine, [answer(prompt, max_tokens=3), second])
    history = (*prompt, *kept.answers[0].token_ids, stop, 40)
    assert kept.token_ids == (*history, *kept.answers[1].token_ids)
    assert kept.is_answer[len(history) - 2 : len(history) + 1] == (False, False, True)


def test_an_invented_turn_ends_with_its_frame_and_is_no_answer(engine):
    prompt = prompts(1)[0]
    (dialogue,) = write(engine, [user(prompt), answer((FRAME_END, 30))])
    first = dialogue.is_answer.index(True)
    assert dialogue.token_ids[first - 2 : first] == (FRAME_END, 30)
    assert not {FRAME_END, EOS} & set(dialogue.token_ids[len(prompt) : first - 2])


def test_an_invented_turn_that_does_not_end_leaves_no_dialogue(engine):
    (dialogue,) = write(engine, [user(prompts(1)[0], max_tokens=2), answer((FRAME_END, 30))])
    assert dialogue.token_ids == ()
    assert dialogue.answers == ()


@pytest.mark.parametrize("max_length", [10, 14, 30])
def test_no_dialogue_is_longer_than_asked(engine, max_length):
    for dialogue in write(engine, *[[answer(prompt)] for prompt in prompts(5)], max_length=max_length):
        assert len(dialogue.token_ids) <= max_length


def test_a_sampled_dialogue_does_not_depend_on_its_neighbours():
    target = build_target()
    plans = [
        [user(p, seed=idx), answer((FRAME_END, 30), temperature=0.8, seed=idx)]
        for idx, p in enumerate(prompts(6))
    ]
    outputs = []
    for max_num_seqs in (1, 6):
        engine: Engine = build_engine(target, None, EngineShape(max_num_seqs=max_num_seqs))
        outputs.append(write(engine, *plans))
    assert outputs[0] == outputs[1]
    assert any(dialogue.answers for dialogue in outputs[0])


def test_an_engine_that_gives_up_is_an_error():
    target = build_target()
    with torch.no_grad():
        target.norm.weight[0] = torch.nan
    broken = build_engine(target, None, EngineShape())
    with pytest.raises(StepError):
        write(broken, [answer(prompts(1)[0])])
