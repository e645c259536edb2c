"""Verification of deterministic drafts on the GPU: one draw per node or per level, and the walk.

The law and the plain form are `sampling/verify`; the kernels are in the modules imported here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.draw import NoiseArguments, draw_rows
from engine.kernels.draw_row import NODE, DrawRows, column
from engine.kernels.sift import sift_rows
from engine.kernels.top_k_floor import find_floors
from engine.kernels.walk import WalkArguments
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors, Verification

# Returns the warped logits [B, V] float32 of a level, truncation left out, of: the nodes [B]; the tokens [B]
# drawn in the level before, -1 where the path has ended, or None at the root; the level.
WarpLevel = Callable[[Tensor, Tensor | None, int], Tensor]

# Drawing at every node saves the launches of each level but draws where no path goes. Worth it up to this
# many logits per level saved beyond those that a walk would read.
_EXTRA_GREEDY = 1 << 23
_EXTRA_SAMPLED = 1 << 21


def verify_drafts(
    logits: Tensor,
    draft: DraftOutput,
    tree: TreeTensors,
    sampling: SamplingTensors,
    root_positions: Tensor,
    *,
    stream: int,
    warp_level: WarpLevel | None = None,
    is_every_node: bool | None = None,
    overlap: bool = False,
) -> Verification:
    """Answer as `sampling.verify.verify` does for `draft.probs` None; no syncs, fixed launches.

    logits: [B, N, V] bfloat16, float16 or float32, any strides. stream: that of the noise. warp_level: called
    where the logits need more than truncation; then levels go one by one. is_every_node: draw at every node
    at once; chosen by size when None. With `overlap` (compute capability 9 and up) launches of one call come
    near while the one before still runs.
    """
    if is_every_node is None:
        is_every_node = _saves_time_at_every_node(logits, tree, sampling)
    rows = DrawRows.build(
        *(logits, tree.is_node),
        is_every_node=is_every_node and warp_level is None,
        is_truncated=sampling.is_truncated,
        overlap=overlap,
    )
    answer = _empty_answer(tree, logits.device)
    path = WalkArguments.build(draft, tree, answer)
    for level in range(1 if rows.is_every_node else tree.depth + 1):
        if warp_level is not None:
            token = answer.token_ids[:, level - 1] if level else None
            rows = rows.reading(warp_level(rows.state[:, NODE.value], token, level))
        _verify_rows(rows, sampling, root_positions, path, stream)
    return answer


def _verify_rows(
    rows: DrawRows,
    sampling: SamplingTensors,
    root_positions: Tensor,
    path: WalkArguments,
    stream: int,
) -> None:
    """Draw a token in every row and walk on: through the whole tree, or to the next level."""
    temperature = column(sampling.temperature)
    noise = NoiseArguments(temperature, column(sampling.seed), column(root_positions))
    flags = {"is_sampled": sampling.is_sampled, "is_truncated": sampling.is_truncated}
    if sampling.is_truncated:
        find_floors(rows, temperature, column(sampling.top_k))
    draw_rows(rows, noise, path, stream=stream, **flags)
    if sampling.is_truncated:
        sift_rows(rows, noise, column(sampling.top_p), column(sampling.min_p), path, stream=stream)


def _saves_time_at_every_node(logits: Tensor, tree: TreeTensors, sampling: SamplingTensors) -> bool:
    num_rows, num_nodes, vocab_size = logits.shape
    limit = _EXTRA_SAMPLED if sampling.is_sampled else _EXTRA_GREEDY
    # Levels read about three quarters of what they could: rows drop out.
    num_extra = num_rows * vocab_size * (num_nodes - 0.75 * (tree.depth + 1))
    return num_extra <= limit * tree.depth or num_nodes == 1


def _empty_answer(tree: TreeTensors, device: torch.device) -> Verification:
    num_rows, width = tree.num_rows, tree.depth + 1
    return Verification(
        path=torch.empty(num_rows, width, dtype=torch.int64, device=device),
        num_accepted=torch.empty(num_rows, dtype=torch.int64, device=device),
        next_token=torch.empty(num_rows, dtype=torch.int64, device=device),
        token_ids=torch.empty(num_rows, width, dtype=torch.int64, device=device),
        is_finite=torch.empty(num_rows, dtype=torch.bool, device=device),
    )
