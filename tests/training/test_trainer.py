import pytest
import torch

from engine.errors import ConfigError, TrainingError
from engine.training.checkpoint import checkpoint_paths
from engine.training.dataset import pack
from engine.training.losses import LossWeights
from engine.training.online import Objective
from engine.training.train_log import read_log
from engine.training.trainer import Trainer, TrainingConfig
from engine.training.unroll import is_drafted
from tests.training.cases import conversations, tiny_head, tiny_target

ROWS = pack(conversations([9, 14, 20, 6, 11, 17, 8, 24]), 24)


def config(**changes):
    settings = {
        "num_steps": 6,
        "batch_rows": 2,
        "objective": Objective(unroll_steps=3),
        "warmup_steps": 1,
        "learning_rate": 3e-3,
        "log_every": 2,
        "checkpoint_every": 3,
    }
    return TrainingConfig(**settings | changes)


def trainer(folder, **changes):
    target = tiny_target()
    return Trainer(target, tiny_head(target), ROWS, config(**changes), folder)


def test_training_lowers_the_loss_and_touches_only_the_head(tmp_path):
    run = trainer(tmp_path, num_steps=24, checkpoint_every=24)
    before = {name: value.clone() for name, value in run._distillation.target.state_dict().items()}
    embedding = run.head.embed_rows.clone()
    run.train()
    entries = read_log(tmp_path)
    assert entries[-1]["loss"] < 0.9 * entries[0]["loss"]
    assert all(
        torch.equal(before[name], value) for name, value in run._distillation.target.state_dict().items()
    )
    assert torch.equal(run.head.embed_rows, embedding)
    assert all(0.0 <= share <= 1.0 for entry in entries for share in entry["acceptance"])


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    first = trainer(tmp_path / "cut")
    for _ in range(3):
        first.train_step()
    first._save()
    first.train_step()  # lost: the run is killed before its next checkpoint
    second = trainer(tmp_path / "cut")
    assert second.step == 3
    second.train()
    for name, value in whole.head.state_dict().items():
        assert torch.equal(value, second.head.state_dict()[name]), name
    fresh = trainer(tmp_path / "fresh")
    assert not torch.equal(fresh.head.fc.weight, whole.head.fc.weight)


def test_a_loss_that_is_not_finite_stops_and_leaves_the_earlier_checkpoint(tmp_path):
    run = trainer(tmp_path)
    for _ in range(3):
        run.train_step()
    run._save()
    good = checkpoint_paths(tmp_path)[-1].read_bytes()
    with torch.no_grad():
        run.head.fc.weight[0, 0] = torch.nan
    with pytest.raises(TrainingError, match="step 3"):
        run.train()
    assert [path.read_bytes() for path in checkpoint_paths(tmp_path)] == [good]
    assert trainer(tmp_path).step == 3


def test_only_the_newest_checkpoints_stay(tmp_path):
    trainer(tmp_path, checkpoint_every=1).train()
    assert [path.name for path in checkpoint_paths(tmp_path)] == [
        "checkpoint-0000005.safetensors",
        "checkpoint-0000006.safetensors",
    ]


def test_other_settings_do_not_resume(tmp_path):
    trainer(tmp_path).train()
    with pytest.raises(ConfigError, match="other settings"):
        trainer(tmp_path, learning_rate=1e-3)


def test_a_batch_needs_enough_rows(tmp_path):
    with pytest.raises(ConfigError, match="do not fill"):
        trainer(tmp_path, batch_rows=ROWS.num_rows + 1)


def test_the_rate_rises_then_falls_to_its_final_share():
    settings = config(num_steps=100, warmup_steps=10, final_share=0.1)
    rates = [settings.rate(step) for step in range(101)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert max(rates) == pytest.approx(3e-3)
    assert rates[100] == pytest.approx(3e-4)


def test_the_feature_loss_changes_the_gradient(tmp_path):
    plain, featured = (
        trainer(tmp_path / name, objective=Objective(losses=LossWeights(*weights)))
        for name, weights in (("plain", (1.0, 0.0)), ("featured", (0.1, 1.0)))
    )
    plain.train_step()
    featured.train_step()
    assert not torch.equal(plain.head.fc.weight, featured.head.fc.weight)


def test_rows_whose_path_left_every_tree_are_not_trained(tmp_path):
    """With one rank allowed, a deep step learns only where all earlier drafts were the best."""
    strict, loose = (
        trainer(tmp_path / str(rank), objective=Objective(max_parent_rank=rank)) for rank in (1, 1000)
    )
    losses = []
    for run in (strict, loose):
        tokens, noise_seeds = run._batch()
        loss, survivors = run._distillation.loss(tokens, is_drafted(tokens, 0).sum(), noise_seeds)
        losses.append(float(loss.detach()))
        assert survivors[0] > survivors[-1] >= 0
    assert losses[0] < losses[1]


@pytest.mark.parametrize("change", [{"num_steps": 0}, {"learning_rate": 0.0}, {"log_every": 0}])
def test_impossible_settings_are_refused(change):
    with pytest.raises(ConfigError):
        config(**change)
