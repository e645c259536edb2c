import pytest
import torch

from engine.training.head_init import create_head, default_config, default_taps
from tests.training.cases import NUM_POSITIONS, VOCAB, tiny_target


@pytest.mark.parametrize(
    ("num_layers", "taps"), [(30, (4, 14, 29)), (32, (4, 15, 31)), (2, (0, 1)), (1, (0,))]
)
def test_taps_are_a_low_a_middle_and_the_last_layer(num_layers, taps):
    assert default_taps(num_layers) == taps


@pytest.mark.parametrize("style", ["eagle1", "eagle3"])
def test_a_fresh_head_is_a_function_of_its_seed_and_bound_to_its_target(style):
    target = tiny_target()
    config = default_config(target.config, 16, style=style)
    ids = torch.arange(4, 20)
    heads = [create_head(config, target, ids, NUM_POSITIONS, seed) for seed in (1, 1, 2)]
    states = [head.state_dict() for head in heads]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not torch.equal(heads[0].fc.weight, heads[2].fc.weight)
    assert torch.equal(heads[0].head_rows, target.head_weight[4:20])
    assert heads[0].embed_rows.data_ptr() == target.embed_tokens.weight.data_ptr()
    assert heads[0].config.target_vocab_size == VOCAB
