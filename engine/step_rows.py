"""The tensors of slots and of the rows of one step, as the parts of a decode step hand them on.

Reading and writing them is left to `runner/slot_state`, drafting to `draft`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import NUM_RANKS
from engine.speculation import DraftOutput, TreeTensors

NUM_INTEGERS = 3
NUM_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class SlotTables:
    """Device state of S slots that every step reads and writes.

    seq_len: [S] int64 counts cached target tokens, so it is the position of the root; root_token: [S] int64.
    Draft K/V is valid for positions [draft_start, draft_len), both [S] int64. block_tables: [S, P] int64.
    features: [S, W + 1, F] and tokens: [S, W + 1] int64 are rings over the last W positions, indexed by
    position modulo W; column W takes the writes of padding. integers: [3, S] int64, the seed, top_k and
    stop_from of each slot; numbers: [6, S] float32, its temperature, top_p, min_p, and repetition, presence
    and frequency penalty.
    """

    seq_len: Tensor
    root_token: Tensor
    draft_len: Tensor
    draft_start: Tensor
    block_tables: Tensor
    features: Tensor
    tokens: Tensor
    integers: Tensor
    numbers: Tensor

    @property
    def window(self) -> int:
        """W, the positions that a ring holds."""
        return self.tokens.shape[1] - 1

    @staticmethod
    def zeros(
        num_slots: int,
        table_width: int,
        window: int,
        feature_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "SlotTables":
        """Return empty slots; features are of `dtype`."""

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return SlotTables(
            seq_len=table(num_slots),
            root_token=table(num_slots),
            draft_len=table(num_slots),
            draft_start=table(num_slots),
            block_tables=table(num_slots, table_width),
            features=torch.zeros(num_slots, window + 1, feature_size, dtype=dtype, device=device),
            tokens=table(num_slots, window + 1),
            integers=table(NUM_INTEGERS, num_slots),
            numbers=torch.zeros(NUM_NUMBERS, num_slots, device=device),
        )


@dataclass(frozen=True, slots=True)
class StepRows:
    """The B rows of one step: written when it opens, so that its parts gather nothing from the slots again.

    root_positions: [B] int64. positions: [B, N] int64, of the nodes. block_tables: [B, P] int64. integers:
    [3, B] int64 and numbers: [6, B] float32, as in `SlotTables`. draft: what the
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
    if is_sampled or not tree.depth:
        return tree.max_rank + 1
    return max(tree.max_rank + 1, 4 if tree.parents.is_cuda else NUM_RANKS)


@dataclass(frozen=True, slots=True)
class AlignWindow:
    """A consecutive positions of each row, of which the pending ones lack draft K/V; before them it is
    cached.

    positions: [B, A] int64, ending at the root where a tree is drafted; is_pending: [B, A] bool, True at the
    last. token_ids: [B, A] int64; features: [B, A, F], the target's taps of the position before. The cached
    window is [prefix_start, prefix_end), both [B] int64, where prefix_end is the first pending position.
    block_tables: [B, P] int64 reach past the root.
    """

    positions: Tensor
    is_pending: Tensor
    token_ids: Tensor
    features: Tensor
    prefix_start: Tensor
    prefix_end: Tensor
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """What a step answers and which K/V it keeps.

    answer: [B, 2 D + 5] int64: what each row emitted, D + 1 columns padded with -1; its path, as many; the
    draft's rank of its last token, and of how many, as `draft.ranks` has them; and whether its logits were
    finite.
    pool_slots and scratch_rows: [B * (D + 1)] int64, where the K/V of each step of the path goes, the dummy
    block for what was not accepted, and the row of the scratch it comes from.
    """

    answer: Tensor
    pool_slots: Tensor
    scratch_rows: Tensor
