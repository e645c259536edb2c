"""Which rank the draft gave to a token that was drawn: evidence for the dispatcher. Drafting is left to
`drafter`.
"""

import torch
from torch import Tensor

from engine.batch import NUM_RANKS
from engine.speculation import DraftOutput


def ranks_at(draft: DraftOutput, nodes: Tensor, token_ids: Tensor) -> Tensor:
    """Return [B] int64, the draft's ranks of token_ids [B] at nodes [B]: NUM_RANKS for none of the first
    ranks, -1 where the draft did not run.
    """
    if draft.children is None:
        return torch.full_like(token_ids, -1)
    best = draft.children[torch.arange(len(nodes), device=nodes.device), nodes]
    is_rank = best == token_ids[:, None]
    ranks = torch.where(is_rank.any(1), is_rank.int().argmax(1), NUM_RANKS)
    return torch.where(best[:, 0] < 0, -1, ranks)
