"""What may steer the drafts of a step. Who steers is left to the runner; what is drafted, to `draft`."""

from typing import Protocol

from torch import Tensor


class DraftGuide(Protocol):
    """Knows drafts that can never be accepted."""

    def mask_draft(self, depth: int, logits: Tensor, target_ids: Tensor, token_ids: Tensor) -> None:
        """Forbid some children of the nodes at `depth`.

        logits: [B * W, draft_vocab_size], the draft's at the W nodes of each row, written in place;
        target_ids: [draft_vocab_size] int64, its tokens; token_ids: [B, N] int64, the drafts down to `depth`.
        No row of logits is left without a finite entry.
        """
