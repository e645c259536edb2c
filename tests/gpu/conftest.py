"""What all tests on a GPU share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _exact_float32():
    """Matrix products of float32 in float32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
