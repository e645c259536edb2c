"""The plan of tree attention: all rows' key tiles laid end to end and cut into equal shares, on the device.

The attention over a share is left to `tree_attention`, joining the pieces of a row to `tree_attention_merge`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.tree_attention_config import TreeConfig

# int32 words of the cuts: the header (share, total), eight words per row, two words per group.
HEADER = tl.constexpr(8)
ROW_WORDS = tl.constexpr(8)
MASK_BITS = tl.constexpr(32)
_MAX_POSITION = tl.constexpr(2**31 - 1)
_PER_PROGRAM = tl.constexpr(32)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """What the layers of a pass share.

    mask: [B, N, ceil(S / 32)] int32, the suffix mask as bits. cuts: int32, None where rows are not cut; the
    words of a row are (first tile, last tile + 1, first position, end, first and end of what every node
    reads), those of a group are (first row, last row + 1).
    """

    mask: Tensor
    cuts: Tensor | None


def make_plan(
    starts: Tensor, ends: Tensor, suffix_mask: Tensor, *, config: TreeConfig, limit: int
) -> TreePlan:
    """Cut the tiles of B rows into config.num_groups shares, and pack the suffix mask, in one launch.

    starts, ends: [B, N] integers, a window per node, cut off at `limit` positions; suffix_mask: [B, N, S]
    bool. A row has one tile per block_n positions of the union of its windows, and one more for its suffix.
    """
    num_rows, num_nodes, num_suffix = suffix_mask.shape
    num_groups, device = config.num_groups, suffix_mask.device
    num_words = triton.cdiv(num_suffix, MASK_BITS.value)
    mask = torch.empty((num_rows, num_nodes, num_words), dtype=torch.int32, device=device)
    cuts = None
    if num_groups > 0:
        size = HEADER.value + ROW_WORDS.value * num_rows + 2 * num_groups
        cuts = torch.empty(size, dtype=torch.int32, device=device)
    # Windows that a row's nodes share by stride are looked at once.
    is_shared = starts.stride(1) == 0 and ends.stride(1) == 0
    num_windows = 1 if is_shared else num_nodes
    block_rows = triton.next_power_of_2(num_rows)
    num_cutters = triton.cdiv(num_groups, _PER_PROGRAM.value)
    _plan_kernel[(num_cutters + triton.cdiv(num_rows * num_nodes, _PER_PROGRAM.value),)](
        *(cuts, mask, starts, ends, suffix_mask.view(torch.uint8)),
        *starts.stride(),
        *ends.stride(),
        *suffix_mask.stride(),
        *(num_rows, num_windows, num_nodes, num_suffix, num_words),
        *(num_groups, num_cutters, config.min_share, limit),
        BLOCK_N=config.block_n,
        BLOCK_ROWS=block_rows,
        BLOCK_NODES=min(triton.next_power_of_2(num_windows), max(1, 4096 // block_rows)),
        num_warps=4,
    )
    return TreePlan(mask, cuts)


@triton.jit
def union_of_windows(
    starts, ends, start_stride, end_stride, is_node, limit, BLOCK_N, AXIS
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return (first, end, full_first, full_end) over `AXIS` of the windows at the given pointers.

    [first, end) holds every window, first being rounded down to a tile; all nodes read [full_first,
    full_end).
    """
    start = tl.load(starts + start_stride, mask=is_node, other=0).to(tl.int32)
    end = tl.minimum(tl.load(ends + end_stride, mask=is_node, other=0), limit).to(tl.int32)
    is_read = is_node & (start < end)
    first = tl.min(tl.where(is_read, start, _MAX_POSITION), AXIS)
    last = tl.max(tl.where(is_read, end, 0), AXIS)
    full_first = tl.max(tl.where(is_node, start, 0), AXIS)
    full_last = tl.min(tl.where(is_node, end, _MAX_POSITION), AXIS)
    return first // BLOCK_N * BLOCK_N, last, full_first, full_last


@triton.jit
def _pack_mask(
    mask, shown, mask_row, mask_node, mask_key, num_rows, num_nodes, num_suffix, num_words, program
):
    """Write the bits of 32 nodes, counted over all rows."""
    cell = program * _PER_PROGRAM + tl.arange(0, _PER_PROGRAM)
    bit = tl.arange(0, MASK_BITS)
    is_cell = cell < num_rows * num_nodes
    base = cell // num_nodes * mask_row + cell % num_nodes * mask_node
    for word in range(num_words):
        key = word * MASK_BITS + bit
        is_read = is_cell[:, None] & (key < num_suffix)[None, :]
        bits = tl.load(shown + (base[:, None] + key[None, :] * mask_key), mask=is_read, other=0).to(tl.int32)
        tl.store(mask + cell * num_words + word, tl.sum(bits << bit[None, :], 1), mask=is_cell)


@triton.jit(
    do_not_specialize=[
        *("start_row", "start_node", "end_row", "end_node", "mask_row", "mask_node"),
        *("num_rows", "num_windows", "num_nodes", "num_suffix", "num_words"),
        *("num_groups", "num_cutters", "min_share", "limit"),
    ]
)
def _plan_kernel(
    cuts,
    mask,
    starts,
    ends,
    shown,
    start_row,
    start_node,
    end_row,
    end_node,
    mask_row,
    mask_node,
    mask_key,
    num_rows,
    num_windows,
    num_nodes,
    num_suffix,
    num_words,
    num_groups,
    num_cutters,
    min_share,
    limit,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    program = tl.program_id(0)
    if program >= num_cutters:
        _pack_mask(
            *(mask, shown, mask_row, mask_node, mask_key),
            *(num_rows, num_nodes, num_suffix, num_words, program - num_cutters),
        )
    elif cuts is not None:
        _cut(
            *(cuts, starts, ends, start_row, start_node, end_row, end_node),
            *(num_rows, num_windows, num_groups, min_share, limit, program),
            *(BLOCK_N, BLOCK_ROWS, BLOCK_NODES),
        )


@triton.jit
def _cut(
    cuts,
    starts,
    ends,
    start_row,
    start_node,
    end_row,
    end_node,
    num_rows,
    num_windows,
    num_groups,
    min_share,
    limit,
    program,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Write the words of 32 groups, and in the first program those of the rows."""
    row = tl.arange(0, BLOCK_ROWS)
    first = tl.full([BLOCK_ROWS], _MAX_POSITION, tl.int32)
    last = tl.zeros([BLOCK_ROWS], tl.int32)
    full_first = tl.zeros([BLOCK_ROWS], tl.int32)
    full_last = tl.full([BLOCK_ROWS], _MAX_POSITION, tl.int32)
    for node_begin in range(0, num_windows, BLOCK_NODES):
        node = node_begin + tl.arange(0, BLOCK_NODES)
        is_node = (row < num_rows)[:, None] & (node < num_windows)[None, :]
        start_offset = row[:, None].to(tl.int64) * start_row + node[None, :] * start_node
        end_offset = row[:, None].to(tl.int64) * end_row + node[None, :] * end_node
        a, b, c, d = union_of_windows(starts, ends, start_offset, end_offset, is_node, limit, BLOCK_N, 1)
        first, last = tl.minimum(first, a), tl.maximum(last, b)
        full_first, full_last = tl.maximum(full_first, c), tl.minimum(full_last, d)
    first = tl.minimum(first, last)
    num_tiles = tl.where(row < num_rows, tl.cdiv(last - first, BLOCK_N) + 1, 0)
    tile_end = tl.cumsum(num_tiles, 0)
    total = tl.sum(num_tiles, 0)
    share = tl.maximum(tl.cdiv(total, num_groups), min_share)
    if program == 0:
        tl.store(cuts, share)
        tl.store(cuts + 1, total)
        words = cuts + HEADER + row * ROW_WORDS
        is_row = row < num_rows
        tl.store(words, tile_end - num_tiles, mask=is_row)
        tl.store(words + 1, tile_end, mask=is_row)
        tl.store(words + 2, first, mask=is_row)
        tl.store(words + 3, last, mask=is_row)
        tl.store(words + 4, full_first, mask=is_row)
        tl.store(words + 5, full_last, mask=is_row)
    group = program * _PER_PROGRAM + tl.arange(0, _PER_PROGRAM)
    begin = group * share
    end = tl.minimum(begin + share, total)
    is_past = tile_end[None, :] <= begin[:, None]
    first_row = tl.sum(is_past.to(tl.int32), 1)
    is_before = (tile_end - num_tiles)[None, :] < end[:, None]
    last_row = tl.sum((is_before & (row < num_rows)[None, :]).to(tl.int32), 1)
    words = cuts + HEADER + num_rows * ROW_WORDS + 2 * group
    is_group = group < num_groups
    tl.store(words, tl.where(begin < total, first_row, 0), mask=is_group)
    tl.store(words + 1, tl.where(begin < total, last_row, 0), mask=is_group)
