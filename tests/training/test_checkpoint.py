import errno
import os

import pytest
import torch

from engine.errors import ConfigError, ModelLoadError, TrainingError
from engine.training.checkpoint import checkpoint_paths, load_checkpoint, save_checkpoint
from tests.training.test_trainer import trainer

SETTINGS = {"rate": 0.1, "head": {"taps": (1, 2)}}


def stepped():
    """Two masters and an optimizer that has made one step."""
    torch.manual_seed(0)
    masters = [torch.randn(3, 2), torch.randn(4)]
    optimizer = torch.optim.AdamW(masters)
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.step()
    return masters, optimizer


def test_masters_and_moments_survive_the_disk(tmp_path):
    masters, optimizer = stepped()
    save_checkpoint(tmp_path, 7, SETTINGS, masters, optimizer)
    again = [torch.zeros_like(master) for master in masters]
    other = torch.optim.AdamW(again)
    assert load_checkpoint(checkpoint_paths(tmp_path)[-1], SETTINGS, again, other) == 7
    for left, right in zip(masters, again, strict=True):
        assert torch.equal(left, right)
        assert torch.equal(optimizer.state[left]["exp_avg_sq"], other.state[right]["exp_avg_sq"])
        assert other.state[right]["step"] == 7


def test_other_settings_are_named(tmp_path):
    masters, optimizer = stepped()
    save_checkpoint(tmp_path, 7, SETTINGS, masters, optimizer)
    path = checkpoint_paths(tmp_path)[0]
    with pytest.raises(ConfigError, match=r"rate was 0\.1 and is now 0\.2"):
        load_checkpoint(path, {**SETTINGS, "rate": 0.2}, masters, optimizer)


@pytest.mark.parametrize("num_cut", [1, 200])
def test_a_truncated_checkpoint_is_a_clear_error(tmp_path, num_cut):
    masters, optimizer = stepped()
    save_checkpoint(tmp_path, 7, SETTINGS, masters, optimizer)
    path = checkpoint_paths(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-num_cut])
    with pytest.raises(ModelLoadError, match="checkpoint-0000007"):
        load_checkpoint(path, SETTINGS, masters, optimizer)


def test_a_checkpoint_of_another_head_is_a_clear_error(tmp_path):
    masters, optimizer = stepped()
    save_checkpoint(tmp_path, 7, SETTINGS, masters, optimizer)
    with pytest.raises(ModelLoadError, match="tensors of this head"):
        load_checkpoint(checkpoint_paths(tmp_path)[0], SETTINGS, masters[:1], optimizer)


def test_a_full_disk_stops_the_run_and_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    run = trainer(tmp_path, num_steps=9)
    fsync, calls = os.fsync, []

    def full_at_the_second(file_descriptor):
        calls.append(file_descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file_descriptor)

    monkeypatch.setattr(os, "fsync", full_at_the_second)
    with pytest.raises(TrainingError, match="No space left on device"):
        run.train()
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-0000003.safetensors"]
    assert trainer(tmp_path, num_steps=9).step == 3
