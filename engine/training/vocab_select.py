"""The reduced draft vocabulary: the tokens that the target itself writes most often.

Slicing the target's head to it is left to `DraftHead.bind`.
"""

import torch
from torch import Tensor

from engine.training.dataset import Conversations


def count_tokens(conversations: Conversations, vocab_size: int) -> Tensor:
    """Return how often each token occurs in the answers, [vocab_size] int64."""
    answers = conversations.token_ids[conversations.is_answer].long()
    return torch.bincount(answers, minlength=vocab_size)


def select_vocab(counts: Tensor, size: int) -> Tensor:
    """Return the ids of the `size` most frequent tokens, [size] int64 rising; ties prefer the smaller id."""
    assert 1 <= size <= counts.shape[0], (size, counts.shape)
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: Tensor, target_ids: Tensor) -> float:
    """Return the share of counted tokens that the draft vocabulary can express: a bound on acceptance."""
    return int(counts[target_ids].sum()) / max(int(counts.sum()), 1)


def invert(target_ids: Tensor, vocab_size: int) -> Tensor:
    """Return the draft id of each target id, [vocab_size] int64; -1 where the draft has none."""
    draft_ids = torch.full((vocab_size,), -1, dtype=torch.int64, device=target_ids.device)
    draft_ids[target_ids] = torch.arange(target_ids.shape[0], device=target_ids.device)
    return draft_ids
