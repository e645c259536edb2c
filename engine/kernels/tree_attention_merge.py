"""Joining the pieces of rows that the plan of tree attention cut, by their log-sum-exp.

Making the pieces is left to `tree_attention`; rows in one piece are finished there.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.tree_attention_plan import HEADER, ROW_WORDS


def merge_pieces(
    part_out: Tensor, part_lse: Tensor, cuts: Tensor, out: Tensor, lse: Tensor | None, *, num_groups: int
) -> None:
    """Write out [B, N, Hq, D], and lse [B, N, Hq] in natural logarithm when given, of every cut row.

    part_out: [2 G, N Hq, D] float32, part_lse: [2 G, N Hq] float32 to base 2. Between two shares at most one
    row is cut, so the grid follows the shares and not the rows.
    """
    num_rows, num_nodes, num_heads, head_dim = out.shape
    num_cells = num_nodes * num_heads
    block_cells = 2 if num_cells <= 256 else 8
    if num_groups == 1:
        return
    _merge_kernel[(triton.cdiv(num_cells, block_cells), num_groups - 1)](
        part_out,
        part_lse,
        cuts,
        out,
        lse,
        num_rows,
        num_cells,
        HEAD_DIM=head_dim,
        BLOCK_CELLS=block_cells,
        BLOCK_PIECES=32 // block_cells,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows", "num_cells"])
def _merge_kernel(
    part_out,
    part_lse,
    cuts,
    out,
    lse,
    num_rows,
    num_cells,
    HEAD_DIM: tl.constexpr,
    BLOCK_CELLS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
):
    boundary = tl.program_id(1) + 1
    share = tl.load(cuts)
    total = tl.load(cuts + 1)
    row = tl.load(cuts + HEADER + num_rows * ROW_WORDS + 2 * boundary)
    tile_begin = tl.load(cuts + HEADER + row * ROW_WORDS)
    tile_end = tl.load(cuts + HEADER + row * ROW_WORDS + 1)
    first_group = tile_begin // share
    # A row that several boundaries cut is joined at the first of them.
    is_cut = (boundary * share < total) & (first_group + 1 == boundary) & (boundary * share < tile_end)
    last_group = tl.where(is_cut, (tile_end - 1) // share, first_group - 1)
    starts_inside = (tile_begin > first_group * share).to(tl.int32)
    cell = tl.program_id(0) * BLOCK_CELLS + tl.arange(0, BLOCK_CELLS)
    dim = tl.arange(0, HEAD_DIM)
    is_cell = cell < num_cells
    acc = tl.zeros([BLOCK_CELLS, HEAD_DIM], tl.float32)
    top = tl.full([BLOCK_CELLS], -1e30, tl.float32)
    weight_sum = tl.zeros([BLOCK_CELLS], tl.float32)
    for group_begin in tl.range(first_group, last_group + 1, BLOCK_PIECES, num_stages=1):
        group = group_begin + tl.arange(0, BLOCK_PIECES)
        piece = 2 * group + tl.where(group == first_group, starts_inside, 0)
        cells = piece.to(tl.int64)[:, None] * num_cells + cell[None, :]
        is_piece = (group <= last_group)[:, None] & is_cell[None, :]
        piece_lse = tl.load(part_lse + cells, mask=is_piece, other=-float("inf"))
        offset = cells[:, :, None] * HEAD_DIM + dim[None, None, :]
        piece_out = tl.load(part_out + offset, mask=is_piece[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(piece_lse, 0))
        weights = tl.exp2(piece_lse - new_top[None, :])
        decay = tl.exp2(top - new_top)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * piece_out, 0)
        weight_sum = weight_sum * decay + tl.sum(weights, 0)
        top = new_top
    if is_cut:
        is_empty = weight_sum == 0.0
        cells = row.to(tl.int64) * num_cells + cell
        value = acc / tl.where(is_empty, 1.0, weight_sum)[:, None]
        offset = cells[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + offset, value.to(out.dtype.element_ty), mask=is_cell[:, None])
        if lse is not None:
            joined = tl.where(is_empty, -float("inf"), top + tl.log2(tl.where(is_empty, 1.0, weight_sum)))
            tl.store(lse + cells, joined * 0.6931471805599453, mask=is_cell)
