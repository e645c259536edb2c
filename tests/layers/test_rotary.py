"""Rotary positions: the frequencies of transformers, and a rotation that only differences of position
show.
"""

import pytest
import torch

from engine.layers.rotary import Rotary, inverse_frequencies, rotate
from engine.model.config import RopeScaling
from tests.layers.plain import plain_rotate

SCALINGS = {
    "default": (None, {"rope_type": "default"}),
    "linear": (RopeScaling("linear", 4.0, 1.0, 1.0, 8192), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    scaling, parameters = SCALINGS[kind]
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters=parameters | {"rope_theta": 500000.0},
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    ours = inverse_frequencies(128, 500000.0, scaling)
    torch.testing.assert_close(ours.float(), theirs, atol=0, rtol=1e-6)


def test_llama3_keeps_fast_frequencies_divides_slow_ones_and_blends_between():
    plain, scaled = (inverse_frequencies(128, 500000.0, SCALINGS[kind][0]) for kind in ("default", "llama3"))
    wavelengths = 2 * torch.pi / plain
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192
    assert torch.equal(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8)
    between = (scaled / plain)[~fast & ~slow]
    assert len(between) > 2
    assert ((between > 1 / 8) & (between < 1)).all()


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_rotation_is_a_complex_product(kind):
    scaling = SCALINGS[kind][0]
    rotary = Rotary(16, 10000.0, scaling, 300, torch.float32)
    x, positions = torch.randn(7, 3, 16), torch.tensor([0, 1, 2, 50, 50, 299, 7])
    expected = plain_rotate(x, positions, inverse_frequencies(16, 10000.0, scaling))
    torch.testing.assert_close(rotate(x, rotary(positions)).double(), expected, atol=1e-5, rtol=1e-5)


def test_scores_depend_on_the_distance_of_two_positions_only():
    rotary = Rotary(16, 10000.0, None, 400, torch.float64)
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)

    def score(query_at, key_at):
        turned_q, turned_k = (rotate(x, rotary(torch.tensor([at]))) for x, at in ((q, query_at), (k, key_at)))
        return (turned_q * turned_k).sum().item()

    assert score(17, 5) == pytest.approx(score(312, 300), abs=1e-12)
    assert abs(score(17, 5) - score(17, 6)) > 1e-3


def test_position_zero_turns_nothing():
    x = torch.randn(1, 2, 8)
    assert torch.equal(rotate(x, Rotary(8, 10000.0, None, 1, torch.float32)(torch.tensor([0]))), x)


def test_tables_take_the_dtype_asked_for_and_are_not_saved():
    rotary = Rotary(8, 10000.0, None, 4, torch.bfloat16)
    assert rotary(torch.tensor([3]))[0].dtype == torch.bfloat16
    assert rotary.state_dict() == {}
