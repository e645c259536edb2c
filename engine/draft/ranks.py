"""Which rank the draft gave to a token that was drawn: evidence for the dispatcher. Drafting is left to
`drafter`.
"""

import torch
from torch import Tensor

from engine.speculation import DraftOutput


def ranks_at(draft: DraftOutput, nodes: Tensor, token_ids: Tensor) -> Tensor:
    """Return [B, 2] int64 of token_ids [B] drawn at nodes [B]: its rank among the draft's best R tokens
    there, R for none of them, and R. The rank is -1 where the draft did not run, and where children were
    sampled: a sampled child may be wrong though it is the token.
    """
    if draft.children is None or draft.probs is not None:
        return torch.full((len(nodes), 2), -1, dtype=torch.int64, device=nodes.device)
    best = draft.children[torch.arange(len(nodes), device=nodes.device), nodes]
    num_ranks = torch.full_like(token_ids, best.shape[1])
    is_rank = best == token_ids[:, None]
    ranks = torch.where(is_rank.any(1), is_rank.int().argmax(1), num_ranks)
    return torch.stack((torch.where(best[:, 0] < 0, -1, ranks), num_ranks), dim=1)
