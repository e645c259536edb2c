"""Draft heads for the tiny targets of `tests.model.paged_model`."""

from engine.draft.config import DraftConfig
from engine.model.config import RopeScaling
from tests.model.paged_model import TINY


def make_draft_config(**changes):
    """Return the config of a head of two layers over three taps, with a vocabulary of its own."""
    fields = {
        "num_layers": 2,
        "hidden_size": TINY["hidden_size"],
        "intermediate_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 128),
        "max_position": 1024,
        "taps": (0, 2, 3),
        "target_hidden_size": TINY["hidden_size"],
        "target_vocab_size": TINY["vocab_size"],
        "target_num_layers": TINY["num_hidden_layers"],
        "draft_vocab_size": 40,
        "is_feedback_normed": False,
        "base_model_digest": "base",
    }
    return DraftConfig(**(fields | changes))
