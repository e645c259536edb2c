"""The plan of tree attention, made on the device: rows are cut into units, one program's work each.

The attention over a unit is left to `tree_attention`, joining the pieces of a row to `tree_attention_merge`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_tiles import MASK_BITS
from engine.kernels.tree_attention_config import TreeConfig

# Int32 words of a plan: the header (cut rows), eight words per unit, four per cut row.
HEADER = tl.constexpr(8)
UNIT_WORDS = tl.constexpr(8)
CUT_WORDS = tl.constexpr(4)
_MAX_POSITION = tl.constexpr(2**31 - 1)
_NODES_PER_PROGRAM = tl.constexpr(32)
_NUM_SIZES = tl.constexpr(16)
_PIECES = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """What the layers of a pass share.

    mask: [B, N, ceil(S / 64)] int64, the suffix mask as bits. words: int32, None where a row is a unit. The
    words of a unit are (row, begin, end, stop, suffix, first and end of what every node reads, piece): it
    reads the positions [begin, end), of which those from `suffix` on are the suffix keys and those from
    `stop` to there do not exist; row is -1 for no unit, piece is -1 for a whole row. The words of a cut row
    are (row, first piece, pieces).
    """

    mask: Tensor
    words: Tensor | None


def make_plan(
    starts: Tensor, ends: Tensor, suffix_mask: Tensor, *, config: TreeConfig, limit: int
) -> TreePlan:
    """Cut B rows into units and pack the suffix mask, in one launch.

    starts, ends: [B, N] integers, a window per node, cut off at `limit` positions; suffix_mask: [B, N, S]
    bool.
    """
    num_rows, num_nodes, num_suffix = suffix_mask.shape
    device = suffix_mask.device
    num_words = triton.cdiv(num_suffix, MASK_BITS.value)
    mask = torch.empty((num_rows, num_nodes, num_words), dtype=torch.int64, device=device)
    words, num_cutters = None, 0
    num_units, num_cuts = config.max_units(num_rows), config.max_cuts(num_rows)
    if config.num_slots > 0:
        size = HEADER.value + UNIT_WORDS.value * num_units + CUT_WORDS.value * num_cuts
        words = torch.empty(size, dtype=torch.int32, device=device)
        num_cutters = 1
    # Windows that a row's nodes share by stride are looked at once.
    is_shared = starts.stride(1) == 0 and ends.stride(1) == 0
    num_windows = 1 if is_shared else num_nodes
    block_rows = triton.next_power_of_2(num_rows)
    _plan_kernel[(num_cutters + triton.cdiv(num_rows * num_nodes, _NODES_PER_PROGRAM.value),)](
        *(words, mask, starts, ends, suffix_mask.view(torch.uint8)),
        *starts.stride(),
        *ends.stride(),
        *suffix_mask.stride(),
        *(num_rows, num_windows, num_nodes, num_suffix, num_words),
        *(num_units, num_cutters, config.num_slots, config.min_tiles, config.idle_percent, limit),
        BLOCK_N=config.block_n,
        BLOCK_ROWS=block_rows,
        BLOCK_NODES=min(triton.next_power_of_2(num_windows), max(1, 4096 // block_rows)),
        BLOCK_UNITS=triton.next_power_of_2(num_units),
        num_warps=1 if block_rows <= 32 else 4,
    )
    return TreePlan(mask, words)


@triton.jit
def union_of_windows(
    starts, ends, start_stride, end_stride, is_node, limit, AXIS
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return (first, end, full_first, full_end) over `AXIS` of the windows at the given pointers.

    [first, end) holds every window; all nodes read [full_first, full_end).
    """
    start = tl.load(starts + start_stride, mask=is_node, other=0).to(tl.int32)
    end = tl.minimum(tl.load(ends + end_stride, mask=is_node, other=0), limit).to(tl.int32)
    is_read = is_node & (start < end)
    first = tl.min(tl.where(is_read, start, _MAX_POSITION), AXIS)
    last = tl.max(tl.where(is_read, end, 0), AXIS)
    full_first = tl.max(tl.where(is_node, start, 0), AXIS)
    full_last = tl.min(tl.where(is_node, end, _MAX_POSITION), AXIS)
    return first, last, full_first, full_last


@triton.jit
def tiles_of_row(first, last, num_suffix, BLOCK_N) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (first position, where the suffix begins, tiles) of rows that read [first, last) and a suffix.

    Positions are whole tiles from there: those of the window, then those of the suffix.
    """
    first = tl.minimum(first, last) // BLOCK_N * BLOCK_N
    num_prefix = tl.cdiv(last - first, BLOCK_N)
    return first, first + num_prefix * BLOCK_N, num_prefix + tl.cdiv(num_suffix, BLOCK_N)


@triton.jit
def _pack_mask(
    mask, shown, mask_row, mask_node, mask_key, num_rows, num_nodes, num_suffix, num_words, program
):
    """Write the bits of a few nodes, counted over all rows."""
    cell = program * _NODES_PER_PROGRAM + tl.arange(0, _NODES_PER_PROGRAM)
    bit = tl.arange(0, MASK_BITS)
    is_cell = cell < num_rows * num_nodes
    base = cell // num_nodes * mask_row + cell % num_nodes * mask_node
    for word in range(num_words):
        key = word * MASK_BITS + bit
        is_read = is_cell[:, None] & (key < num_suffix)[None, :]
        bits = tl.load(shown + (base[:, None] + key[None, :] * mask_key), mask=is_read, other=0).to(tl.int64)
        word_bits = tl.sum(bits << bit[None, :].to(tl.int64), 1)
        tl.store(mask + cell * num_words + word, word_bits, mask=is_cell)


@triton.jit
def _ceil_div(a, b):
    """Return ceil(a / b) of integers whose sum is below 2**20, cheaper than by integer division."""
    return ((a.to(tl.float32) + b.to(tl.float32) - 0.5) / b.to(tl.float32)).to(tl.int32)


@triton.jit
def _choose_size(num_tiles, num_units, num_slots, min_tiles, idle_percent):
    """Return how many tiles a unit has at most.

    Of sizes around an equal share, the one that ends first: units fill the slots of the GPU in waves, every
    wave costs its largest unit and a start, and a last wave with empty slots runs faster, to idle_percent.
    """
    eighths = tl.cdiv(tl.sum(num_tiles, 0), num_slots) * (4 + tl.arange(0, _NUM_SIZES))
    size = tl.maximum((eighths + 7) // 8, min_tiles)
    pieces = _ceil_div(num_tiles[None, :], size[:, None])
    largest = tl.max(_ceil_div(num_tiles[None, :], tl.maximum(pieces, 1)), 1)
    total = tl.sum(pieces, 1)
    wave = total // num_slots * 100
    rest = total % num_slots
    wave += tl.where(rest > 0, tl.maximum(100 * rest // num_slots, idle_percent), 0)
    cost = wave * largest + 100 * (tl.cdiv(total, num_slots) * 3 + tl.where(tl.max(pieces, 1) > 1, 2, 0))
    cost = tl.where(total > num_units, _MAX_POSITION, cost)
    return tl.min(tl.where(cost == tl.min(cost, 0), size, _MAX_POSITION), 0)


@triton.jit
def _windows_of_rows(
    starts,
    ends,
    start_row,
    start_node,
    end_row,
    end_node,
    num_rows,
    num_windows,
    limit,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Return the `union_of_windows` of every row, each [BLOCK_ROWS] int32."""
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
        a, b, c, d = union_of_windows(starts, ends, start_offset, end_offset, is_node, limit, 1)
        first, last = tl.minimum(first, a), tl.maximum(last, b)
        full_first, full_last = tl.maximum(full_first, c), tl.minimum(full_last, d)
    return first, last, full_first, full_last


@triton.jit
def _write_units(units, row, own_begin, pieces, num_tiles, span, BLOCK_N: tl.constexpr):
    """Write the words of every unit of the rows, from own_begin on, into which their tiles are cut evenly."""
    origin, last, suffix, full_first, full_last = span
    for first_piece in range(0, tl.max(pieces, 0), _PIECES):
        piece = first_piece + tl.arange(0, _PIECES)[:, None]
        unit = own_begin[None, :] + piece
        is_unit = piece < pieces[None, :]
        count = tl.maximum(pieces, 1)[None, :]
        begin = origin[None, :] + piece * num_tiles[None, :] // count * BLOCK_N
        end = origin[None, :] + (piece + 1) * num_tiles[None, :] // count * BLOCK_N
        out = units + UNIT_WORDS * unit
        tl.store(out, row[None, :], mask=is_unit)
        tl.store(out + 1, begin, mask=is_unit)
        tl.store(out + 2, end, mask=is_unit)
        tl.store(out + 3, last[None, :], mask=is_unit)
        tl.store(out + 4, suffix[None, :], mask=is_unit)
        tl.store(out + 5, full_first[None, :], mask=is_unit)
        tl.store(out + 6, full_last[None, :], mask=is_unit)
        tl.store(out + 7, tl.where(pieces[None, :] > 1, unit, -1), mask=is_unit)


@triton.jit
def _cut(
    words,
    starts,
    ends,
    start_row,
    start_node,
    end_row,
    end_node,
    num_rows,
    num_windows,
    num_suffix,
    num_units,
    num_slots,
    min_tiles,
    idle_percent,
    limit,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
):
    """Write the header, the units and the cut rows."""
    row = tl.arange(0, BLOCK_ROWS)
    first, last, full_first, full_last = _windows_of_rows(
        *(starts, ends, start_row, start_node, end_row, end_node, num_rows, num_windows, limit),
        *(BLOCK_ROWS, BLOCK_NODES),
    )
    origin, suffix, num_tiles = tiles_of_row(first, last, num_suffix, BLOCK_N)
    num_tiles = tl.where(row < num_rows, num_tiles, 0)
    size = _choose_size(num_tiles, num_units, num_slots, min_tiles, idle_percent)
    pieces = tl.cdiv(num_tiles, size)
    # Pieces of cut rows come first: they are the longest, and their numbers index the partial results.
    is_cut = pieces > 1
    cut_pieces = tl.where(is_cut, pieces, 0)
    num_pieces = tl.sum(cut_pieces, 0)
    is_whole = (pieces == 1).to(tl.int32)
    own_begin = tl.where(is_cut, tl.cumsum(cut_pieces, 0) - pieces, num_pieces + tl.cumsum(is_whole, 0) - 1)
    tl.store(words, tl.sum(is_cut.to(tl.int32), 0))
    cut = words + HEADER + UNIT_WORDS * num_units + CUT_WORDS * (tl.cumsum(is_cut.to(tl.int32), 0) - 1)
    tl.store(cut, row, mask=is_cut)
    tl.store(cut + 1, own_begin, mask=is_cut)
    tl.store(cut + 2, pieces, mask=is_cut)
    every = tl.arange(0, BLOCK_UNITS)
    is_unused = (every >= tl.sum(pieces, 0)) & (every < num_units)
    tl.store(words + HEADER + UNIT_WORDS * every, -1, mask=is_unused)
    span = (origin, last, suffix, full_first, full_last)
    _write_units(words + HEADER, row, own_begin, pieces, num_tiles, span, BLOCK_N)


@triton.jit(
    do_not_specialize=[
        *("start_row", "start_node", "end_row", "end_node", "mask_row", "mask_node"),
        *("num_rows", "num_windows", "num_nodes", "num_suffix", "num_words", "num_units", "num_cutters"),
        *("num_slots", "min_tiles", "idle_percent", "limit"),
    ]
)
def _plan_kernel(
    words,
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
    num_units,
    num_cutters,
    num_slots,
    min_tiles,
    idle_percent,
    limit,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
):
    program = tl.program_id(0)
    if program >= num_cutters:
        _pack_mask(
            *(mask, shown, mask_row, mask_node, mask_key),
            *(num_rows, num_nodes, num_suffix, num_words, program - num_cutters),
        )
    elif words is not None:
        _cut(
            *(words, starts, ends, start_row, start_node, end_row, end_node),
            *(num_rows, num_windows, num_suffix, num_units, num_slots, min_tiles, idle_percent),
            *(limit, BLOCK_N, BLOCK_ROWS, BLOCK_NODES, BLOCK_UNITS),
        )
