import dataclasses

import pytest
import torch

from engine.errors import ConfigError, ModelLoadError, RequestError
from engine.training.data_card import DataCard
from engine.training.dataset import content_keys, load_conversations, shard_paths
from engine.training.dialogue import TurnFrame
from engine.training.synth import (
    PROGRESS,
    SynthRun,
    SynthSettings,
    find_loop,
    plan_given,
    plan_invented,
)
from tests.exactness.tiny import EOS, EngineShape, build_engine, build_target

FRAME = TurnFrame((1, 8), (EOS, 30), (EOS, 31), ((50, 51), (52,)))
SETTINGS = SynthSettings(
    temperatures=(0.0, 0.9),
    min_p=0.0,
    max_user_tokens=40,
    max_answer_tokens=30,
    max_length=120,
    wave_size=10,
    seed=4,
)
CARD = DataCard("digest", {"made": "by a test"})


@pytest.fixture(scope="module")
def engine():
    target = build_target()
    with torch.no_grad():
        target.lm_head.weight[EOS] *= 1.6  # turns of this random target seldom end
    return build_engine(target, None, EngineShape(max_num_seqs=6))


def make_run(folder, num_dialogues=30, card=CARD, settings=SETTINGS):
    return SynthRun(folder, card, settings, lambda idx: plan_invented(FRAME, settings, idx), num_dialogues)


def finish(run, engine):
    while not run.is_done:
        run.write_wave(engine)
    return run.counts


def test_dialogues_are_frames_around_turns_and_every_answer_is_marked(engine, tmp_path):
    counts = finish(make_run(tmp_path), engine)
    data = load_conversations(tmp_path)
    assert data.num_conversations == counts.num_kept > 5
    assert data.token_ids.numel() == counts.num_tokens
    assert int(data.is_answer.sum()) == counts.num_answer_tokens
    for token_ids, is_answer in data:
        first = int(is_answer.int().argmax())
        assert token_ids[:2].tolist() == [1, 8]
        assert token_ids[first - 2 : first].tolist() == [EOS, 30]
        assert not torch.isin(token_ids[2 : first - 2], EOS).any()
    assert counts.num_kept + counts.num_unanswered + counts.num_repeated == 30


def test_a_run_that_is_killed_in_a_wave_ends_as_one_that_is_not(engine, tmp_path):
    whole = finish(make_run(tmp_path / "whole"), engine)
    first = make_run(tmp_path / "cut")
    first.write_wave(engine)
    first._save = lambda: None
    first.write_wave(engine)  # its shard is there, its end is not recorded
    assert len(shard_paths(tmp_path / "cut")) == 2
    second = make_run(tmp_path / "cut")
    assert second.num_written == 10
    assert finish(second, engine) == whole
    left, right = (load_conversations(tmp_path / name) for name in ("whole", "cut"))
    assert torch.equal(left.token_ids, right.token_ids)
    assert torch.equal(left.is_answer, right.is_answer)


def test_more_dialogues_may_follow_and_no_conversation_occurs_twice(engine, tmp_path):
    finish(make_run(tmp_path, 12), engine)
    finish(make_run(tmp_path, 25), engine)
    data = load_conversations(tmp_path)
    assert content_keys(data).unique().numel() == data.num_conversations


def test_a_first_turn_may_be_used_twice(engine, tmp_path):
    settings = dataclasses.replace(SETTINGS, temperatures=(0.9,))
    run = SynthRun(tmp_path, CARD, settings, lambda idx: plan_given([(1, 8, 40, 30)], settings, idx), 9)
    assert finish(run, engine).num_kept == 2


@pytest.mark.parametrize("card", [DataCard("other", CARD.source), DataCard("digest", {"made": "otherwise"})])
def test_a_folder_of_other_data_is_refused(engine, tmp_path, card):
    finish(make_run(tmp_path, 5), engine)
    with pytest.raises(ConfigError, match="fresh folder"):
        make_run(tmp_path, card=card)


def test_shards_that_no_run_left_are_refused(engine, tmp_path):
    finish(make_run(tmp_path, 5), engine)
    (tmp_path / PROGRESS).unlink()
    with pytest.raises(ConfigError, match="another kind"):
        make_run(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"next_idx": 3}', '{"next_idx": 3, "counts": {"num_kept": 1}}'])
def test_a_damaged_record_of_progress_is_a_clear_error(engine, tmp_path, text):
    finish(make_run(tmp_path, 5), engine)
    (tmp_path / PROGRESS).write_text(text)
    with pytest.raises(ModelLoadError, match=PROGRESS):
        make_run(tmp_path)


def test_plans_are_functions_of_the_seed_and_the_index():
    plans = [
        [plan_invented(FRAME, dataclasses.replace(SETTINGS, seed=seed), idx) for idx in range(40)]
        for seed in (1, 1, 2)
    ]
    assert plans[0] == plans[1] != plans[2]
    answers = [span for plan in plans[0] for span in plan if span.is_answer]
    assert {span.sampling.temperature for span in answers} == {0.0, 0.9}
    assert len({span.sampling.seed for span in answers}) == len(answers)
    assert {plan[0].given for plan in plans[0]} == {(1, 8), (1, 8, 50, 51), (1, 8, 52)}
    assert {len(plan) for plan in plans[0]} >= {2, 4}


@pytest.mark.parametrize(
    ("token_ids", "end"),
    [
        ([], 0),
        (list(range(100)), 100),
        (list(range(40)) + list(range(31)), 71 - 15),
        (list(range(40)) + list(range(30)), 70),
        ([7] * 90, 17),
    ],
)
def test_a_loop_is_cut_where_thirty_one_tokens_are_said_again(token_ids, end):
    assert find_loop(token_ids) == end


@pytest.mark.parametrize(
    "change", [{"temperatures": ()}, {"opening_share": 1.5}, {"max_length": 0}, {"temperatures": (-1.0,)}]
)
def test_impossible_settings_are_refused(change):
    with pytest.raises((ConfigError, RequestError)):
        SynthSettings(**change)


@pytest.mark.parametrize("text", ["nonsense", "{}", '{"tokenizer_digest": 3, "source": {}}'])
def test_a_damaged_card_is_a_clear_error(tmp_path, text):
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"data\.json"):
        DataCard.load(tmp_path)
