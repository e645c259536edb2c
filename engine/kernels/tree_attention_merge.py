"""Joining the pieces of rows that the plan of tree attention cut, by their log-sum-exp.

Making the pieces is left to `tree_attention`; rows in one piece are finished there.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.tree_attention_plan import CUT_WORDS, HEADER, UNIT_WORDS

# Elements of a program: enough loads in flight, and enough programs.
_ELEMENTS = 4096


def merge_pieces(
    part_out: Tensor,
    part_lse: Tensor,
    words: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    num_units: int,
    num_cuts: int,
    overlap: bool,
) -> None:
    """Write out [B, N, Hq, D], and lse [B, N, Hq] in natural logarithm when given, of every cut row.

    part_out: [pieces, N Hq, D] float32, part_lse: [pieces, N Hq] float32 to base 2, words: of the plan.
    overlap: start before the kernel that makes the pieces ends.
    """
    num_cells, head_dim = part_out.shape[1:]
    block_cells = 1 if num_cells <= 256 else 4
    _merge_kernel[(triton.cdiv(num_cells, block_cells), num_cuts)](
        part_out,
        part_lse,
        words,
        out,
        lse,
        num_units,
        num_cells,
        HEAD_DIM=head_dim,
        BLOCK_CELLS=block_cells,
        BLOCK_PIECES=min(32, _ELEMENTS // (block_cells * head_dim)),
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )


@triton.jit(do_not_specialize=["num_units", "num_cells"])
def _merge_kernel(
    part_out,
    part_lse,
    words,
    out,
    lse,
    num_units,
    num_cells,
    HEAD_DIM: tl.constexpr,
    BLOCK_CELLS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    cut = words + HEADER + UNIT_WORDS * num_units + CUT_WORDS * tl.program_id(1)
    # The plan is older than the kernel before this one, whose end is waited for below.
    num_cuts = tl.load(words)
    row = tl.load(cut)
    first = tl.load(cut + 1)
    num_pieces = tl.load(cut + 2)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if tl.program_id(1) < num_cuts:
        cell = tl.program_id(0) * BLOCK_CELLS + tl.arange(0, BLOCK_CELLS)
        dim = tl.arange(0, HEAD_DIM)
        is_cell = cell < num_cells
        acc = tl.zeros([BLOCK_CELLS, HEAD_DIM], tl.float32)
        top = tl.full([BLOCK_CELLS], -1e30, tl.float32)
        total = tl.zeros([BLOCK_CELLS], tl.float32)
        for begin in tl.range(0, num_pieces, BLOCK_PIECES, num_stages=1):
            piece = begin + tl.arange(0, BLOCK_PIECES)
            cells = (first + piece).to(tl.int64)[:, None] * num_cells + cell[None, :]
            is_piece = (piece < num_pieces)[:, None] & is_cell[None, :]
            piece_lse = tl.load(part_lse + cells, mask=is_piece, other=-float("inf"))
            offset = cells[:, :, None] * HEAD_DIM + dim[None, None, :]
            piece_out = tl.load(part_out + offset, mask=is_piece[:, :, None], other=0.0)
            new_top = tl.maximum(top, tl.max(piece_lse, 0))
            weights = tl.exp2(piece_lse - new_top[None, :])
            decay = tl.exp2(top - new_top)
            acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * piece_out, 0)
            total = total * decay + tl.sum(weights, 0)
            top = new_top
        is_empty = total == 0.0
        total = tl.where(is_empty, 1.0, total)
        cells = row.to(tl.int64) * num_cells + cell
        offset = cells[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + offset, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_cell[:, None])
        if lse is not None:
            joined = tl.where(is_empty, -float("inf"), top + tl.log2(total))
            tl.store(lse + cells, joined * 0.6931471805599453, mask=is_cell)
