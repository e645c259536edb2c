"""RMSNorm equals its formula, rounded once."""

import pytest
import torch

from engine.layers.norm import RMSNorm
from tests.layers.plain import plain_norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_it_equals_the_formula(dtype, tolerance, scale):
    torch.manual_seed(0)
    norm = RMSNorm(40, 1e-5)
    norm.weight.data.uniform_(-2, 2)
    norm.to(dtype)
    x = (scale * torch.randn(3, 5, 40)).to(dtype)
    found = norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), plain_norm(norm, x), atol=1e-12, rtol=tolerance)


def test_a_row_of_zeros_stays_zero():
    assert torch.equal(RMSNorm(8, 1e-5)(torch.zeros(2, 8)), torch.zeros(2, 8))


def test_it_leaves_its_input_alone():
    x = torch.randn(2, 8)
    before = x.clone()
    RMSNorm(8, 1e-5)(x)
    assert torch.equal(x, before)
