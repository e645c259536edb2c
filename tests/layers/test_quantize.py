"""Layers in few bits: what fits their grid is kept exactly, the rest within the error that the bits allow."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.errors import ConfigError
from engine.layers.fp8_linear import Fp8Linear, quantize_rows
from engine.layers.int4_linear import (
    GROUP_SIZES,
    MAX_TOKENS,
    Int4Linear,
    dequantize_groups,
    quantize_groups,
)
from engine.layers.quantize import quantize

SHAPES = [(128, 256), (48, 320)]
GROUP_SIZE = {256: 128, 320: 64}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def relative_error(found, weight, x, bias=None):
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_float8_rows_reach_448_and_are_near(scale):
    x = scale * draw(7, 64).float()
    rows, scales = quantize_rows(x)
    assert (rows.float().abs().amax(-1) == 448).all()
    # 2^-4 of a number, or half the smallest step.
    slack = 2.0**-4 * x.abs() + 2.0**-10 * scales
    assert ((rows.float() * scales - x).abs() <= slack * 1.001).all()


def test_a_float8_row_of_zeros_stays_zero_and_one_that_is_not_finite_spoils_only_itself():
    x = draw(4, 32).float()
    x[0], x[1, 3], x[2, 5] = 0.0, torch.nan, torch.inf
    rows, scales = quantize_rows(x)
    assert torch.equal(rows[0].float() * scales[0], torch.zeros(32))
    assert scales[1:3].isnan().all()
    alone, alone_scale = quantize_rows(x[3:])
    assert torch.equal(rows[3:].float(), alone.float())
    assert torch.equal(scales[3:], alone_scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_a_float8_layer_errs_by_its_three_bits_of_mantissa(shape, has_bias, num_tokens):
    weight, x = draw(*shape), draw(num_tokens, shape[1], seed=1)
    weight[3] *= 1000.0  # a channel of its own scale
    bias = draw(shape[0], seed=2) if has_bias else None
    found = Fp8Linear(weight, bias)(x)
    assert found.dtype == torch.bfloat16
    others = [row for row in range(shape[0]) if row != 3]
    rest = None if bias is None else bias[others]
    assert 0.01 < relative_error(found[:, others], weight[others], x, rest) < 0.05


def test_a_float8_layer_keeps_numbers_of_its_grid():
    weight, x = torch.randint(-8, 9, (2, 64, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:, 0], x[:, 0] = 448.0, 448.0
    assert torch.equal(Fp8Linear(weight)(x), F.linear(x, weight))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, MAX_TOKENS])
def test_a_four_bit_layer_errs_by_its_sixteen_levels(shape, has_bias, num_tokens):
    weight, x = draw(*shape), draw(num_tokens, shape[1], seed=1)
    bias = draw(shape[0], seed=2) if has_bias else None
    found = Int4Linear(weight, bias)(x)
    stored = dequantize_groups(*quantize_groups(weight, GROUP_SIZE[shape[1]]))
    assert relative_error(found, stored, x, bias) < 0.006  # the rounding of bfloat16
    assert 0.05 < relative_error(found, weight, x, bias) < 0.13


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_four_bit_weight_is_off_by_half_a_level(shape):
    weight, group_size = draw(*shape), GROUP_SIZE[shape[1]]
    groups = weight.float().view(shape[0], -1, group_size)
    level = (groups.amax(-1) - groups.amin(-1)) / 15
    gap = (
        (dequantize_groups(*quantize_groups(weight, group_size)) - weight.float())
        .view_as(groups)
        .abs()
        .amax(-1)
    )
    # Besides, scale and zero are rounded to bfloat16.
    assert (gap <= 0.5 * level + 2.0**-8 * groups.abs().amax(-1) + 15 * 2.0**-9 * level).all()


def test_a_four_bit_layer_keeps_weights_of_its_grid():
    q = torch.randint(0, 16, (32, 256), generator=torch.Generator().manual_seed(0))
    q[:, ::64], q[:, 1::64] = 0, 15
    weight = (q - 8).bfloat16() * 0.25
    for group_size in GROUP_SIZES:
        kept, scale_and_zero = quantize_groups(weight, group_size)
        assert torch.equal(kept, q.int())
        assert torch.equal(dequantize_groups(kept, scale_and_zero), weight.float())


def test_a_four_bit_layer_runs_many_tokens_on_the_plain_weight():
    weight, bias, x = draw(128, 256), draw(128, seed=1), draw(MAX_TOKENS + 1, 256, seed=2)
    assert torch.equal(Int4Linear(weight, bias)(x), F.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("make", "weight"),
    [
        (Fp8Linear, draw(24, 32)),
        (Fp8Linear, draw(32, 24)),
        (Int4Linear, draw(128, 200)),
        (Int4Linear, draw(24, 256)),
        (Int4Linear, draw(128, 256).float()),
    ],
)
def test_sizes_without_a_kernel_are_refused(make, weight):
    with pytest.raises(ConfigError, match="layers need"):
        make(weight)


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [("fp8", {"qkv_proj": Fp8Linear, "gate_up_proj": Fp8Linear, "down_proj": Fp8Linear}),
     ("int4-ffn", {"qkv_proj": nn.Linear, "gate_up_proj": Int4Linear, "down_proj": Int4Linear})],
)  # fmt: skip
def test_a_kind_names_the_layers_it_takes(kind, kinds):
    layer = nn.ModuleDict(
        {name: nn.Linear(128, 128, bias=False) for name in ("qkv_proj", "gate_up_proj", "down_proj")}
    )
    layers = nn.ModuleList([layer.bfloat16(), nn.ModuleDict()])
    quantize(layers, kind)
    assert {name: type(child) for name, child in layer.items()} == kinds
