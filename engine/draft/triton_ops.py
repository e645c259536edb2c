"""`DraftOps` on a CUDA device: one launch to open a pass, two to choose. The kernels are in
`engine/kernels`.
"""

from torch import Tensor

from engine.draft.network import DraftNetwork
from engine.draft.ops import LevelPass, WindowPass
from engine.draft.pairs import HeadInput
from engine.kernels.draft import Pairs, PairTables, choose_children, open_level, open_window
from engine.speculation import DraftOutput, TreeTensors
from engine.step_rows import AlignWindow


class TritonDraftOps:
    """Kernels fit for capture.

    `overlap` lets a launch begin before the kernel ahead of it has ended (compute capability 9 and up).
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap

    def open_window(
        self, head: DraftNetwork, window: AlignWindow, fused: Tensor, block_size: int
    ) -> WindowPass:
        """See `DraftOps`."""
        pairs, slots, suffix_mask, end = open_window(
            *(_tables(head), window.positions, window.is_pending, window.token_ids),
            *(fused, window.block_tables, block_size),
            overlap=self._overlap,
        )
        return WindowPass(_head_input(pairs), slots, suffix_mask, end)

    def open_level(
        self,
        head: DraftNetwork,
        tree: TreeTensors,
        depth: int,
        feature: Tensor,
        end: Tensor,
        draft: DraftOutput,
    ) -> LevelPass:
        """See `DraftOps`."""
        pairs, rows = open_level(
            _tables(head), tree, depth, feature, end, draft.token_ids, overlap=self._overlap
        )
        return LevelPass(_head_input(pairs), rows)

    def choose(
        self, head: DraftNetwork, tree: TreeTensors, depth: int, logits: Tensor, draft: DraftOutput
    ) -> None:
        """See `DraftOps`."""
        choose_children(head.target_ids, tree, depth, logits, draft, overlap=self._overlap)


def _tables(head: DraftNetwork) -> PairTables:
    norms = head.pair_norms
    return PairTables(
        embedding=head.embed_rows,
        angles=head.rotary.table,
        token_weight=None if norms is None else norms[0].weight,
        feature_weight=None if norms is None else norms[1].weight,
        eps=head.config.rms_norm_eps,
        is_residual_normed=head.config.is_residual_normed,
    )


def _head_input(pairs: Pairs) -> HeadInput:
    cos, sin = pairs.angles.unsqueeze(1).chunk(2, dim=-1)
    return HeadInput(pairs.x, pairs.residual, (cos, sin))
