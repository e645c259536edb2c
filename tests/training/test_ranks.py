import pytest
import torch

from engine.errors import ConfigError
from engine.training.ranks import ALONE, Ranks


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
