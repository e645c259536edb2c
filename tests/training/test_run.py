import dataclasses

import pytest
import torch

from engine.draft.loader import load_draft
from engine.errors import ConfigError, ModelLoadError
from engine.model.config import ModelConfig
from engine.training.checkpoint import last_step
from engine.training.data_card import DataCard
from engine.training.dataset import ShardWriter
from engine.training.run import DRAFT_FOLDER, HeadSettings, RunSettings, TrainingRun, _load_data
from engine.training.trainer import TrainingConfig
from tests.exactness.folder import write_target
from tests.exactness.tiny import CONFIG, VOCAB
from tests.training.cases import conversations


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A run over random conversations for a tiny model in a folder."""
    folder = tmp_path_factory.mktemp("run")
    write_target(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")
    DataCard.of(folder / "model", {}).save(folder / "data")
    with ShardWriter(folder / "data") as writer:
        for token_ids, is_answer in conversations([5 + idx % 20 for idx in range(200)]):
            writer.add(token_ids, is_answer)
    training = TrainingConfig(num_steps=2, batch_rows=2)
    return RunSettings(
        folder / "model",
        folder / "data",
        folder / "out",
        training,
        row_length=32,
        device="cpu",
        num_threads=1,
    )


def trained_keys(settings, **changes):
    train, held_out = _load_data(dataclasses.replace(settings, **changes), CONFIG)
    return {tuple(ids.tolist()) for ids, _ in train}, {tuple(ids.tolist()) for ids, _ in held_out}


def test_a_smaller_share_is_part_of_every_larger_one_and_none_is_held_out(settings):
    shares = [trained_keys(settings, held_out_share=0.1, train_share=share) for share in (0.2, 0.5, 1.0)]
    assert 20 <= len(shares[0][0]) <= 60
    assert 70 <= len(shares[1][0]) <= 120
    assert shares[0][0] < shares[1][0] < shares[2][0]
    assert all(held == shares[0][1] and not held & train for train, held in shares)


def test_a_run_leaves_a_draft_with_its_profile_and_trees(settings):
    TrainingRun(settings).run()
    draft = load_draft(settings.folder / DRAFT_FOLDER)
    draft.config.check_target(ModelConfig.load(settings.model), draft.config.base_model_digest)
    assert draft.trees is not None
    assert last_step(settings.folder) == 2
    head = draft.build(torch.zeros(VOCAB, 32), torch.zeros(VOCAB, 32), 8, torch.float32, torch.device("cpu"))
    assert all(parameter.isfinite().all() for parameter in head.parameters())


@pytest.mark.parametrize(
    ("size", "vocab_size", "expected"), [(None, 96, 96), (None, 49152, 12288), (40, 96, 40)]
)
def test_a_large_vocabulary_is_reduced_to_a_quarter(size, vocab_size, expected):
    assert HeadSettings(vocab_size=size).draft_vocab_size(vocab_size) == expected


@pytest.mark.parametrize(
    "change",
    [{"row_length": 1}, {"held_out_share": 1.0}, {"train_share": 0.0}, {"train_share": float("nan")}],
)
def test_impossible_settings_are_refused(settings, change):
    with pytest.raises(ConfigError):
        dataclasses.replace(settings, **change)


def test_heads_that_no_model_has_are_refused(settings):
    for head in (HeadSettings(taps=(9,)), HeadSettings("eagle1", taps=(0,)), HeadSettings(num_layers=4)):
        with pytest.raises(ModelLoadError):
            TrainingRun(dataclasses.replace(settings, head=head))
