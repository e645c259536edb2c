"""What one decode step knows of its rows from its start on. Reading it from the slots is left to
`slot_state`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import NUM_RANKS
from engine.speculation import DraftOutput, TreeTensors

NUM_INTEGERS = 3
NUM_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class StepRows:
    """The B rows of one step: written when it opens, so that its parts gather nothing from the slots again.

    root_positions: [B] int64. positions: [B, N] int64, of the nodes. block_tables: [B, P] int64. integers:
    [3, B] int64 and numbers: [6, B] float32, how each row draws, as `SlotState` names them. draft: what the
    step drafts, the root and padding already in place.
    """

    root_positions: Tensor
    positions: Tensor
    block_tables: Tensor
    integers: Tensor
    numbers: Tensor
    draft: DraftOutput

    @staticmethod
    def empty(tree: TreeTensors, num_blocks: int, probs_size: int | None) -> "StepRows":
        """Return room for the rows of `tree`; with probabilities over `probs_size` tokens where given."""
        num_rows, num_nodes = tree.parents.shape
        device = tree.parents.device

        def room(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        probs = None
        if probs_size is not None:
            probs = torch.zeros(num_rows, num_nodes, probs_size, device=device)
        return StepRows(
            root_positions=room(num_rows),
            positions=room(num_rows, num_nodes),
            block_tables=room(num_rows, num_blocks),
            integers=room(NUM_INTEGERS, num_rows),
            numbers=torch.empty(NUM_NUMBERS, num_rows, device=device),
            draft=DraftOutput(
                token_ids=room(num_rows, num_nodes),
                probs=probs,
                children=room(num_rows, num_nodes, _num_ranks(tree, probs_size is not None)),
            ),
        )


def _num_ranks(tree: TreeTensors, is_sampled: bool) -> int:
    """Return how many children of a node to keep. Beyond those of the tree they tell the dispatcher what
    wider trees would bring; a GPU takes a reduction over the vocabulary for each.
    """
    looked_at = 1 if is_sampled else 4 if tree.parents.is_cuda else NUM_RANKS
    return max(tree.max_rank + 1, looked_at)


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """What a step answers and which K/V it keeps.

    answer: [B, D + 2] int64, the emitted tokens, padded with -1, and last whether the logits were finite.
    pool_slots and scratch_rows: [B * (D + 1)] int64, where the K/V of each step of the path goes, the dummy
    block for what was not accepted, and the row of the scratch it comes from.
    """

    answer: Tensor
    pool_slots: Tensor
    scratch_rows: Tensor
