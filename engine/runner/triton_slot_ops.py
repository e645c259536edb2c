"""`SlotOps` on a CUDA device: one launch each. The kernels are in `engine/kernels`."""

from torch import Tensor

from engine.kernels.step_rows import commit_step, open_rows, open_window
from engine.speculation import TreeTensors, Verification
from engine.step_rows import AlignWindow, CommittedRows, SlotTables, StepRows


class TritonSlotOps:
    """Kernels fit for capture.

    `overlap` lets a launch begin before the kernel ahead of it has ended (compute capability 9 and up).
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap

    def open(self, tables: SlotTables, slots: Tensor, tree: TreeTensors, rows: StepRows) -> None:
        """See `SlotState.open`."""
        open_rows(slots, tree.depths, tables, rows)

    def align(
        self, tables: SlotTables, slots: Tensor, tree: TreeTensors, rows: StepRows, width: int
    ) -> AlignWindow:
        """See `SlotState.align`."""
        return open_window(slots, tree.depths, tables, rows, width)

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
        return commit_step(slots, tables, rows, verification, features, block_size, overlap=self._overlap)
