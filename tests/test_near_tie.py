"""The judge of divergences reads the same logits as the engine."""

import torch

from engine.near_tie import NearTies
from tests.app.tiny_model import write_random_model


def test_the_best_token_is_no_distance_from_itself_and_others_are_below(tmp_path):
    write_random_model(tmp_path)
    judge = NearTies(tmp_path)
    tokens = tuple(range(5, 25))
    vocab_size = judge._target.config.vocab_size
    gaps = torch.tensor([judge.gap(tokens, token, token) for token in range(vocab_size)])
    best = int(gaps.argmin())
    assert gaps[best] == 0.0
    assert (gaps >= 0).all()
    other = (best + 1) % vocab_size
    assert judge.gap(tokens, best, other) == judge.gap(tokens, other, best) == gaps[other] > 0
