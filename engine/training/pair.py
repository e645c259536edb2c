"""A target and its draft as plain networks, for measuring on known answers.

Serving them together is left to the runner.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.draft.loader import load_draft
from engine.draft.network import DraftNetwork
from engine.model.config import ModelConfig
from engine.model.llama import LlamaForCausalLM
from engine.runner.worker import load_target
from engine.weights.digest import folder_digest

MEASURED_DEPTH = 8  # draft steps whose ranks are measured


@dataclass(frozen=True, slots=True)
class NetworkPair:
    """Both networks on one device in one dtype; `head` is bound to `target`."""

    target: LlamaForCausalLM
    head: DraftNetwork

    @staticmethod
    def load(
        model: Path, draft: Path, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> "NetworkPair":
        """Load both for texts of at most `num_tokens`. Raises `ModelLoadError` and `DraftMismatchError`."""
        config = ModelConfig.load(model)
        loaded = load_draft(draft)
        loaded.config.check_target(config, folder_digest(model))
        target = load_target(model, config, loaded.config.taps, num_tokens, dtype, device)
        num_positions = num_tokens + MEASURED_DEPTH
        head = loaded.build(target.embed_tokens.weight, target.head_weight, num_positions, dtype, device)
        return NetworkPair(target, head)
