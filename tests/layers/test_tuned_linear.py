"""Off CUDA no layer is tuned."""

import torch
from torch import nn

from engine.layers.tuned_linear import ProductTuner, TunedLinear, choosing, tune_linears


def test_a_network_on_a_cpu_stays_as_it_is():
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    network = nn.Sequential(layer)
    tune_linears(network)
    assert network[0] is layer


def test_outside_its_range_a_tuned_layer_is_torchs():
    linear = nn.Linear(64, 32, bias=False).requires_grad_(False)
    layer = TunedLinear(linear, ProductTuner([linear.weight]))
    assert layer.weight is linear.weight
    assert layer.state_dict().keys() == linear.state_dict().keys()
    with choosing():
        for num_tokens in (1, 16, 257):
            x = torch.randn(num_tokens, 64)
            assert torch.equal(layer(x), linear(x))
