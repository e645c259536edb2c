"""FlashAttention with merged diagonal keys against dense scores, forward and backward."""

import pytest
import torch

from engine.training.packed_attention import Documents, attend_dense, attend_packed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_diagonals", [0, 1, 4])
def test_flash_equals_dense_forward_and_backward(num_diagonals):
    torch.manual_seed(num_diagonals)
    offsets = torch.tensor([0, 100, 101, 350, 512], dtype=torch.int32, device="cuda")
    documents = Documents(offsets, 256)

    def tensor(num_heads):
        return torch.randn(512, num_heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v, *flat = tensor(9), *(tensor(3) for _ in range(2 + 2 * num_diagonals))
    diagonals = list(zip(flat[::2], flat[1::2], strict=True))
    grad = torch.randn(512, 9, 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for attend in (attend_packed, attend_dense):
        out = attend(q, k, v, diagonals, documents)
        results.append((out, *torch.autograd.grad(out, (q, k, v, *flat), grad)))
    for found, reference in zip(*results, strict=True):
        error = (found.float() - reference.float()).norm() / reference.float().norm()
        assert error < 0.01
