"""The torch ops equal their formulas, rounded where they say, and leave their inputs alone."""

import pytest
import torch

from engine.layers.norm import RMSNorm
from engine.layers.ops import FLOAT8_MAX, TorchOps
from engine.layers.rotary import Rotary, rotate_qkv
from tests.layers.plain import plain_norm

OPS = TorchOps()
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


def make_norm(size, dtype):
    norm = RMSNorm(size, 1e-5).requires_grad_(False)
    norm.weight.uniform_(-2, 2)
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm_equals_the_formula(dtype, scale):
    torch.manual_seed(0)
    norm = make_norm(40, dtype)
    x = (scale * torch.randn(15, 40)).to(dtype)
    found = OPS.norm(x, norm.weight, norm.eps)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), plain_norm(norm, x), atol=1e-12, rtol=TOLERANCE[dtype])


def test_a_row_of_zeros_stays_zero():
    assert torch.equal(OPS.norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_add_norm_normalises_the_rounded_sum(dtype):
    torch.manual_seed(0)
    norm = make_norm(40, dtype)
    delta, residual = (torch.randn(2, 7, 40)).to(dtype)
    before = delta.clone(), residual.clone()
    normed, total = OPS.add_norm(delta, residual, norm.weight, norm.eps)
    assert torch.equal(total, (residual.double() + delta.double()).to(dtype))
    torch.testing.assert_close(normed.double(), plain_norm(norm, total), atol=1e-12, rtol=TOLERANCE[dtype])
    assert torch.equal(delta, before[0])
    assert torch.equal(residual, before[1])


def test_embed_looks_up_rows_and_angles_and_reads_padding_as_token_0():
    torch.manual_seed(0)
    norm, rows, rotary = (
        make_norm(24, torch.float32),
        torch.randn(9, 24),
        Rotary(8, 1e4, None, 50, torch.float32),
    )
    positions = torch.tensor([3, 49, 0])
    normed, embedded, angles = OPS.embed(
        torch.tensor([8, -1, 2]), positions, rows, rotary.table, norm.weight, norm.eps
    )
    assert torch.equal(embedded, rows[[8, 0, 2]])
    torch.testing.assert_close(normed.double(), plain_norm(norm, embedded), atol=1e-12, rtol=1e-6)
    for found, expected in zip(angles, rotary(positions), strict=True):
        assert torch.equal(found, expected)


def test_silu_mul_gates_the_second_half_by_the_first():
    torch.manual_seed(0)
    x = 5 * torch.randn(6, 20)
    gate, up = x.double().split(10, -1)
    torch.testing.assert_close(OPS.silu_mul(x).double(), gate / (1 + (-gate).exp()) * up, atol=0, rtol=1e-5)


def heads(dtype):
    """Return (qkv [5, 4 + 2 * 2, 8] with NaN and infinities among K and V, angles)."""
    torch.manual_seed(0)
    qkv = torch.randn(5, 8, 8).to(dtype)
    qkv[1, 4, 2], qkv[2, 6, 0], qkv[3, 7, 7] = torch.nan, torch.inf, -torch.inf
    return qkv, Rotary(8, 10000.0, None, 40, dtype)(torch.arange(30, 35))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [None, [3, 0, 8, 5, 1]])
def test_rope_store_keeps_finite_turned_keys_and_values(dtype, rows):
    qkv, angles = heads(dtype)
    expected_q, *expected = rotate_qkv(qkv, angles, 2)
    dests = torch.full((2, 9, 2, 8), 7.0, dtype=dtype)
    q = OPS.rope_store(qkv, angles, *dests, None if rows is None else torch.tensor(rows))
    assert torch.equal(q, expected_q)
    kept = list(range(5)) if rows is None else rows
    for dest, x in zip(dests, expected, strict=True):
        assert torch.equal(dest[kept], torch.where(x.isfinite(), x, 0.0))
        others = [row for row in range(9) if row not in kept]
        assert (dest[others] == 7.0).all()


@pytest.mark.parametrize("rows", [None, [3, 0, 8, 5, 1]])
def test_rope_store_divides_by_the_scale_of_a_head_and_saturates_in_float8(rows):
    qkv, angles = heads(torch.float32)
    qkv[0, 4] *= 1e6
    _, *expected = rotate_qkv(qkv, angles, 2)
    scales = torch.tensor([0.5, 0.01]), torch.tensor([2.0, 0.125])
    dests = torch.zeros(2, 9, 2, 8).to(torch.float8_e4m3fn)
    OPS.rope_store(qkv, angles, *dests, None if rows is None else torch.tensor(rows), scales)
    for dest, x, scale in zip(dests, expected, scales, strict=True):
        stored = dest.float()[list(range(5)) if rows is None else rows]
        exact = (torch.where(x.isfinite(), x, 0.0) / scale[:, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX)
        torch.testing.assert_close(stored, exact, atol=2.0**-10, rtol=2.0**-4)
    assert (dests[0].float().abs() == FLOAT8_MAX).any()
