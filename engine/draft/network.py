"""The networks a draft may be, and which one a config asks for.

What they compute is left to `head` and `eagle1`.
"""

import torch

from engine.draft.config import DraftConfig
from engine.draft.eagle1 import Eagle1Head
from engine.draft.head import DraftHead

DraftNetwork = DraftHead | Eagle1Head


def create_network(config: DraftConfig, *, num_positions: int, dtype: torch.dtype) -> DraftNetwork:
    """Return the network of `config`, its weights not filled and not bound to a target yet."""
    kind = Eagle1Head if config.style == "eagle1" else DraftHead
    return kind(config, num_positions=num_positions, dtype=dtype)
