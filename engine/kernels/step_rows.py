"""The rows of a step read from the slots in one launch, and written back in another.

What the numbers mean is left to `runner/slot_state`, whose torch it equals.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.speculation import Verification
from engine.step_rows import AlignWindow, CommittedRows, SlotTables, StepRows

_COPY_BLOCK = 2048


def open_rows(slots: Tensor, depths: Tensor, tables: SlotTables, rows: StepRows) -> None:
    """Fill `rows` from the slots [B] int64; depths: [B, N] int64, of the nodes."""
    _open(slots, depths, tables, rows, None)


def open_window(slots: Tensor, depths: Tensor, tables: SlotTables, rows: StepRows, width: int) -> AlignWindow:
    """Open the rows as `open_rows` does and return the window of their last `width` positions, which count
    as cached in the draft from now on.
    """
    num_rows, feature_size = slots.shape[0], tables.features.shape[2]

    def room(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=slots.device)

    window = AlignWindow(
        positions=room(width),
        is_pending=room(width, dtype=torch.bool),
        token_ids=room(width),
        features=room(width, feature_size, dtype=tables.features.dtype),
        prefix_start=room(),
        prefix_end=room(),
        block_tables=rows.block_tables,
    )
    _open(slots, depths, tables, rows, window)
    return window


def _open(
    slots: Tensor, depths: Tensor, tables: SlotTables, rows: StepRows, window: AlignWindow | None
) -> None:
    num_rows, num_nodes = depths.shape
    children = rows.draft.children
    state = (
        *(tables.seq_len, tables.root_token, tables.draft_len, tables.draft_start, tables.tokens),
        *(tables.features, tables.block_tables, tables.integers, tables.numbers),
    )
    opened = (rows.root_positions, rows.positions, rows.block_tables, rows.integers, rows.numbers)
    for x in (*state, *opened, depths, slots, rows.draft.token_ids):
        assert x.is_contiguous(), x.stride()
    assert children is None or children.is_contiguous()
    outputs: tuple[Tensor | None, ...] = (None,) * 6
    width = 0
    if window is not None:
        width = window.positions.shape[1]
        outputs = (
            *(window.positions, window.is_pending.view(torch.uint8), window.token_ids),
            *(window.features, window.prefix_start, window.prefix_end),
        )
    _open_kernel[(num_rows, 2 + width)](
        *(slots, depths, *state, *opened, rows.draft.token_ids, children, *outputs),
        *(tables.seq_len.shape[0], num_rows, num_nodes, 0 if children is None else children[0].numel()),
        *(tables.block_tables.shape[1], rows.block_tables.shape[1]),
        *(tables.window, tables.features.shape[2], width),
        NUM_INTEGERS=tables.integers.shape[0],
        NUM_NUMBERS=tables.numbers.shape[0],
        BLOCK_NODES=triton.next_power_of_2(num_nodes),
        BLOCK_WIDTH=triton.next_power_of_2(max(width, 1)),
        BLOCK=_COPY_BLOCK,
        num_warps=4,
    )


def commit_step(
    slots: Tensor,
    tables: SlotTables,
    rows: StepRows,
    verification: Verification,
    features: Tensor,
    block_size: int,
    *,
    overlap: bool = False,
) -> CommittedRows:
    """Advance the slots [B] by a verified step, with features [B, N, F] of its nodes.

    Slot 0 stays empty. `overlap`: see `norm.rms_norm`.
    """
    num_rows, num_steps = verification.path.shape
    num_nodes, feature_size = features.shape[1:]
    state = (tables.seq_len, tables.root_token, tables.tokens, tables.features)
    known = (rows.root_positions, rows.block_tables, rows.draft.token_ids, features)
    # Sampled children tell nothing of ranks: one may be wrong though it is the token.
    children = rows.draft.children if rows.draft.probs is None else None
    found = (verification.path, verification.num_accepted, verification.next_token, verification.token_ids)
    for x in (slots, *state, *known, *found):
        assert x.is_contiguous(), x.stride()
    assert children is None or children.is_contiguous()
    answer = torch.empty(num_rows, 2 * num_steps + 3, dtype=torch.int64, device=slots.device)
    pool_slots, scratch_rows = torch.empty_like(verification.path), torch.empty_like(verification.path)
    _commit_kernel[(num_rows, 1 + (num_steps if feature_size else 0))](
        *(slots, *state, *known, *found, verification.is_finite.view(torch.uint8), children),
        *(answer, pool_slots, scratch_rows, num_nodes, num_steps),
        *(rows.block_tables.shape[1], block_size, tables.window, feature_size),
        NUM_CHILDREN=1 if children is None else children.shape[2],
        BLOCK_STEPS=triton.next_power_of_2(num_steps),
        BLOCK=_COPY_BLOCK,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return CommittedRows(answer, pool_slots.flatten(), scratch_rows.flatten())


@triton.jit
def _copy(source, target, size, BLOCK: tl.constexpr):
    """Copy `size` elements, which do not overlap."""
    for begin in tl.range(0, size, BLOCK):
        idx = begin + tl.arange(0, BLOCK)
        tl.store(target + idx, tl.load(source + idx, idx < size), idx < size)


@triton.jit
def _fill(target, value, size, BLOCK: tl.constexpr):
    """Set `size` int64 to a value."""
    for begin in tl.range(0, size, BLOCK):
        idx = begin + tl.arange(0, BLOCK)
        tl.store(target + idx, tl.full([BLOCK], value, tl.int64), idx < size)


@triton.jit
def _first_pending(draft_len, draft_start, root, width):
    """Return (first pending position, first cached position) of a slot, whose draft K/V then reaches past
    its root.
    """
    cached, start = tl.load(draft_len), tl.load(draft_start)
    first = tl.minimum(tl.maximum(cached, root + 1 - width), root)
    # Positions in between have no draft K/V and never will.
    start = tl.where(first > cached, first, start)
    # Every warp must have read what is now overwritten.
    tl.debug_barrier()
    tl.store(draft_len, root + 1)
    tl.store(draft_start, start)
    return first, start


@triton.jit
def _column(position, ring):
    """Return position modulo `ring`, also of negative positions."""
    return (position % ring + ring) % ring


@triton.jit(
    do_not_specialize=[
        *("num_slots", "num_rows", "num_nodes", "num_children", "table_width", "num_blocks", "ring", "width")
    ]
)
def _open_kernel(
    slots,
    depths,
    seq_len,
    root_token,
    draft_len,
    draft_start,
    tokens,
    features,
    tables,
    integers,
    numbers,
    root_positions,
    positions,
    row_tables,
    row_integers,
    row_numbers,
    token_ids,
    children,
    window_positions,
    is_pending,
    window_tokens,
    window_features,
    prefix_start,
    prefix_end,
    num_slots,
    num_rows,
    num_nodes,
    num_children,
    table_width,
    num_blocks,
    ring,
    feature_size,
    width,
    NUM_INTEGERS: tl.constexpr,
    NUM_NUMBERS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    root = tl.load(seq_len + slot)
    if part == 0:
        root_id = tl.load(root_token + slot)
        node = tl.arange(0, BLOCK_NODES)
        at, is_node = row * num_nodes + node, node < num_nodes
        tl.store(root_positions + row, root)
        tl.store(positions + at, root + tl.load(depths + at, is_node), is_node)
        tl.store(token_ids + at, tl.where(node == 0, root_id, -1), is_node)
        for idx in tl.static_range(NUM_INTEGERS):
            tl.store(row_integers + idx * num_rows + row, tl.load(integers + idx * num_slots + slot))
        for idx in tl.static_range(NUM_NUMBERS):
            tl.store(row_numbers + idx * num_rows + row, tl.load(numbers + idx * num_slots + slot))
        if window_positions is not None:
            first, start = _first_pending(draft_len + slot, draft_start + slot, root, width)
            tl.store(prefix_start + row, start)
            tl.store(prefix_end + row, first)
            idx = tl.arange(0, BLOCK_WIDTH)
            at, is_idx = row * width + idx, idx < width
            position = root + 1 - width + idx
            kept = tl.load(tokens + slot * (ring + 1) + _column(position, ring), is_idx)
            tl.store(window_positions + at, position, is_idx)
            tl.store(is_pending + at, (position >= first).to(tl.uint8), is_idx)
            tl.store(window_tokens + at, tl.where(position == root, root_id, kept), is_idx)
    elif part == 1:
        _copy(tables + slot * table_width, row_tables + row * num_blocks, num_blocks, BLOCK)
        if children is not None:
            _fill(children + row * num_children, -1, num_children, BLOCK)
    elif window_positions is not None:
        idx = part - 2
        column = _column(root - width + idx, ring)
        source = features + (slot * (ring + 1) + column) * feature_size
        _copy(source, window_features + (row * width + idx) * feature_size, feature_size, BLOCK)


@triton.jit
def _rank_at(children, node, token, NUM_CHILDREN: tl.constexpr):
    """Return (rank, of how many) of a token among the children of a node, as `draft.ranks` has them."""
    rank, num_ranks = tl.full([], -1, tl.int64), tl.full([], -1, tl.int64)
    if children is not None:
        num_ranks = tl.full([], NUM_CHILDREN, tl.int64)
        if tl.load(children + node * NUM_CHILDREN) >= 0:
            rank = num_ranks
            for idx in tl.static_range(NUM_CHILDREN):
                child = tl.load(children + node * NUM_CHILDREN + NUM_CHILDREN - 1 - idx)
                rank = tl.where(child == token, NUM_CHILDREN - 1 - idx, rank)
    return rank, num_ranks


@triton.jit(do_not_specialize=["num_nodes", "num_steps", "num_blocks", "block_size", "ring"])
def _commit_kernel(
    slots,
    seq_len,
    root_token,
    tokens,
    ring_features,
    root_positions,
    row_tables,
    drafted,
    features,
    path,
    num_accepted,
    next_token,
    emitted,
    is_finite,
    children,
    answer,
    pool_slots,
    scratch_rows,
    num_nodes,
    num_steps,
    num_blocks,
    block_size,
    ring,
    feature_size,
    NUM_CHILDREN: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    slot, root = tl.load(slots + row), tl.load(root_positions + row)
    accepted = tl.load(num_accepted + row)
    if part == 0:
        step = tl.arange(0, BLOCK_STEPS)
        at, is_step = row * num_steps + step, step < num_steps
        is_kept = is_step & (step <= accepted)
        position = root + step
        node = tl.load(path + at, is_step)
        token = tl.load(emitted + at, is_step)
        out = answer + row * (2 * num_steps + 3)
        tl.store(out + step, token, is_step)
        tl.store(out + num_steps + step, node, is_step)
        last = tl.load(path + row * num_steps + accepted)
        rank, num_ranks = _rank_at(children, row * num_nodes + last, tl.load(next_token + row), NUM_CHILDREN)
        tl.store(out + 2 * num_steps, rank)
        tl.store(out + 2 * num_steps + 1, num_ranks)
        tl.store(out + 2 * num_steps + 2, tl.load(is_finite + row).to(tl.int64))
        block_idx = tl.minimum(position // block_size, num_blocks - 1)
        block = tl.load(row_tables + row * num_blocks + block_idx, is_kept, 0)
        tl.store(pool_slots + at, tl.where(is_kept, block * block_size + position % block_size, 0), is_step)
        tl.store(scratch_rows + at, row * num_nodes + node, is_step)
        before = tl.load(emitted + at - 1, is_kept & (step > 0), 0)
        before = tl.where(step == 0, tl.load(drafted + row * num_nodes), before)
        tl.store(tokens + slot * (ring + 1) + position % ring, before, is_kept)
        tl.store(seq_len + slot, tl.where(slot == 0, 0, root + accepted + 1))
        tl.store(root_token + slot, tl.load(next_token + row))
    elif part - 1 <= accepted:
        step = part - 1
        node = tl.load(path + row * num_steps + step)
        target = ring_features + (slot * (ring + 1) + (root + step) % ring) * feature_size
        _copy(features + (row * num_nodes + node) * feature_size, target, feature_size, BLOCK)
