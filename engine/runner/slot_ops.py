"""What a step reads and writes of the slots, behind one protocol, and its torch implementation.

What the tables mean is said by `SlotTables`; admitting to them is left to `slot_state`.
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.batch import DUMMY_SLOT
from engine.draft.ranks import ranks_at
from engine.kvcache.kv_pool import slots_of
from engine.speculation import TreeTensors, Verification
from engine.step_rows import AlignWindow, CommittedRows, SlotTables, StepRows


class SlotOps(Protocol):
    """What a step reads and writes of the slots, for one device; `SlotState` says what each is for."""

    def open(self, tables: SlotTables, slots: Tensor, tree: TreeTensors, rows: StepRows) -> None:
        """See `SlotState.open`."""

    def align(
        self, tables: SlotTables, slots: Tensor, tree: TreeTensors, rows: StepRows, width: int
    ) -> AlignWindow:
        """See `SlotState.align`."""

    def commit(
        self,
        tables: SlotTables,
        slots: Tensor,
        rows: StepRows,
        verification: Verification,
        features: Tensor,
        block_size: int,
    ) -> CommittedRows:
        """See `SlotState.commit`; penalties are the state's own."""


class TorchSlotOps:
    """Plain torch on any device."""

    def open(self, tables: SlotTables, slots: Tensor, tree: TreeTensors, rows: StepRows) -> None:
        """See `SlotState.open`."""
        torch.index_select(tables.seq_len, 0, slots, out=rows.root_positions)
        torch.add(rows.root_positions[:, None], tree.depths, out=rows.positions)
        blocks = tables.block_tables[:, : rows.block_tables.shape[1]]
        torch.index_select(blocks, 0, slots, out=rows.block_tables)
        torch.index_select(tables.integers, 1, slots, out=rows.integers)
        torch.index_select(tables.numbers, 1, slots, out=rows.numbers)
        rows.draft.token_ids.fill_(-1)[:, 0] = tables.root_token[slots]
        if rows.draft.children is not None:
            rows.draft.children.fill_(-1)

    def align(
        self, tables: SlotTables, slots: Tensor, tree: TreeTensors, rows: StepRows, width: int
    ) -> AlignWindow:
        """See `SlotState.align`."""
        self.open(tables, slots, tree, rows)
        root, row = rows.root_positions, slots[:, None]
        draft_len, draft_start = tables.draft_len[slots], tables.draft_start[slots]
        first = torch.maximum(draft_len, root + 1 - width).minimum(root)
        # Positions between draft_len and first have no draft K/V and never will: the window starts after that
        # hole.
        start = torch.where(first > draft_len, first, draft_start)
        positions = root[:, None] + torch.arange(1 - width, 1, device=slots.device)
        tables.draft_len[slots] = root + 1
        tables.draft_start[slots] = start
        return AlignWindow(
            positions=positions,
            is_pending=positions >= first[:, None],
            token_ids=torch.cat(
                (tables.tokens[row, positions[:, :-1] % tables.window], tables.root_token[row]), dim=1
            ),
            features=tables.features[row, (positions - 1) % tables.window],
            prefix_start=start,
            prefix_end=first,
            block_tables=rows.block_tables,
        )

    def commit(
        self,
        tables: SlotTables,
        slots: Tensor,
        rows: StepRows,
        verification: Verification,
        features: Tensor,
        block_size: int,
    ) -> CommittedRows:
        """See `SlotState.commit`."""
        path, token_ids = verification.path, verification.token_ids
        step = torch.arange(path.shape[1], device=slots.device)
        is_kept = step <= verification.num_accepted[:, None]
        positions = rows.root_positions[:, None] + step
        row, slot = torch.arange(len(slots), device=slots.device)[:, None], slots[:, None]
        columns = torch.where(is_kept, positions % tables.window, tables.window)
        tables.features[slot, columns] = features[row, path]
        tables.tokens[slot, columns] = torch.cat(
            (tables.root_token[slot], token_ids[:, :-1].clamp(min=0)), dim=1
        )
        tables.seq_len[slots] = rows.root_positions + (verification.num_accepted + 1)
        tables.root_token[slots] = verification.next_token
        tables.seq_len[DUMMY_SLOT].zero_()  # an assignment would copy the number from the host
        last = path.gather(1, verification.num_accepted[:, None])[:, 0]
        ranks = ranks_at(rows.draft, last, verification.next_token)
        return CommittedRows(
            answer=torch.cat((token_ids, path, ranks, verification.is_finite[:, None].long()), dim=1),
            pool_slots=slots_of(rows.block_tables, positions, is_kept, block_size).flatten(),
            scratch_rows=(row * features.shape[1] + path).flatten(),
        )
