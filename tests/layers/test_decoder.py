"""A decoder layer equals its formula, for the target's width and for the draft's wide first layer."""

import pytest
import torch

from engine.layers.decoder import DecoderLayer, LayerShape
from engine.layers.ops import TorchOps
from engine.layers.rotary import Rotary, inverse_frequencies
from tests.layers.plain import attend_causally, plain_layer

SIZES = {"hidden_size": 24, "intermediate_size": 20, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("input_size", [24, 48])
@pytest.mark.parametrize(("attention_bias", "mlp_bias"), [(False, False), (True, False), (False, True)])
def test_it_equals_the_formula(input_size, attention_bias, mlp_bias):
    torch.manual_seed(0)
    shape = LayerShape(
        **SIZES,
        rms_norm_eps=1e-5,
        input_size=input_size,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
    )
    layer = DecoderLayer(shape).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(std=0.5)
    x, residual, positions = torch.randn(9, input_size), torch.randn(9, 24), torch.arange(3, 12)
    angles = Rotary(8, 10000.0, None, 16, torch.float32)(positions)
    found = sum(layer(x, residual, angles, attend_causally(shape.num_kv_heads), 0, TorchOps()))
    expected = plain_layer(layer, x, residual, positions, inverse_frequencies(8, 10000.0, None))
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_attention_is_given_the_layer_with_unrotated_heads():
    shape = LayerShape(**SIZES, rms_norm_eps=1e-5, input_size=24)
    asked = []

    def attend(layer_idx, qkv, angles):
        asked.append((layer_idx, qkv, angles))
        return torch.zeros(5, 6, 8)

    layer = DecoderLayer(shape).requires_grad_(False)
    residual = torch.randn(5, 24)
    before = residual.clone()
    angles = Rotary(8, 10000.0, None, 5, torch.float32)(torch.arange(5))
    x = torch.randn(5, 24)
    layer(x, residual, angles, attend, 7, TorchOps())
    ((layer_idx, qkv, given_angles),) = asked
    assert layer_idx == 7
    assert given_angles is angles
    assert torch.equal(qkv, layer.qkv_proj(x).view(5, 10, 8))
    assert torch.equal(residual, before)
