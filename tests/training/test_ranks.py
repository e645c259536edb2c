import subprocess
import sys

import pytest
import torch

from engine.errors import ConfigError
from engine.training.checkpoint import checkpoint_paths
from engine.training.ranks import ALONE, Ranks
from engine.training.train_log import read_log
from engine.weights.safetensors import SafetensorsFile
from tests.training.test_trainer import trainer


def test_shares_are_disjoint_equal_and_cover_the_batch():
    rows = torch.arange(12)
    shares = [Ranks(index, 4).share(rows) for index in range(4)]
    assert torch.equal(torch.cat(shares), rows)
    assert {len(share) for share in shares} == {3}


def test_a_batch_that_cannot_be_shared_equally_is_refused():
    Ranks(0, 3).check_batch(6)
    with pytest.raises(ConfigError, match="multiple of the 3 processes"):
        Ranks(0, 3).check_batch(7)


def test_one_process_alone_has_all_and_adds_nothing():
    values = torch.ones(3)
    ALONE.add([values])
    ALONE.wait()
    assert Ranks.current() == ALONE
    assert ALONE.is_first
    assert values.tolist() == [1.0, 1.0, 1.0]


def test_two_processes_train_as_one(tmp_path):
    trainer(tmp_path / "one", num_steps=8, checkpoint_every=5).train()
    store, two = tmp_path / "store", tmp_path / "two"
    script = ["-m", "tests.training.two_ranks", str(store)]
    ranks = [subprocess.Popen([sys.executable, *script, str(rank), str(two)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    for alone, shared in zip(read_log(tmp_path / "one"), read_log(two), strict=True):
        assert shared["step"] == alone["step"]
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert shared["acceptance"] == alone["acceptance"]
    left, right = (SafetensorsFile(checkpoint_paths(tmp_path / name)[-1]) for name in ("one", "two"))
    for name in left.names():
        torch.testing.assert_close(left.read(name), right.read(name), rtol=1e-3, atol=1e-6)
