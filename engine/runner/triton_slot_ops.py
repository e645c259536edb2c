"""`SlotOps` on a CUDA device: one launch each. The kernels are in `engine/kernels`."""

from torch import Tensor

from engine.draft.ops import AlignWindow
from engine.kernels.step_rows import OpenRows, SlotTables, commit_step, open_rows, open_window
from engine.runner.slot_state import SlotState
from engine.runner.step_rows import CommittedRows, StepRows
from engine.speculation import TreeTensors, Verification


class TritonSlotOps:
    """Kernels fit for capture.

    `overlap` lets a launch begin before the kernel ahead of it has ended (compute capability 9 and up).
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap

    def open(self, state: SlotState, slots: Tensor, tree: TreeTensors, rows: StepRows) -> None:
        """See `SlotState.open`."""
        open_rows(slots, tree.depths, _tables(state), _open_rows(rows), rows.draft)

    def align(
        self, state: SlotState, slots: Tensor, tree: TreeTensors, rows: StepRows, width: int
    ) -> AlignWindow:
        """See `SlotState.align`."""
        window = open_window(slots, tree.depths, _tables(state), _open_rows(rows), rows.draft, width)
        return AlignWindow(*window, block_tables=rows.block_tables)

    def commit(
        self,
        state: SlotState,
        slots: Tensor,
        rows: StepRows,
        verification: Verification,
        features: Tensor,
        block_size: int,
    ) -> CommittedRows:
        """See `SlotState.commit`."""
        return CommittedRows(
            *commit_step(
                *(slots, _tables(state), _open_rows(rows), rows.draft.token_ids),
                *(verification, features, block_size),
                overlap=self._overlap,
            )
        )


def _tables(state: SlotState) -> SlotTables:
    return SlotTables(
        seq_len=state.seq_len,
        root_token=state.root_token,
        draft_len=state.draft_len,
        draft_start=state.draft_start,
        tokens=state.tokens,
        features=state.features,
        block_tables=state.block_tables,
        integers=state.integers,
        numbers=state.numbers,
    )


def _open_rows(rows: StepRows) -> OpenRows:
    return OpenRows(rows.root_positions, rows.positions, rows.block_tables, rows.integers, rows.numbers)
