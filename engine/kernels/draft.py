"""What drafting does around the passes of its head, in one launch each: a window or a level made ready for
the first layer, and children chosen.

What a tree is and in which order it grows is left to `draft/drafter`; the torch that these equal is in
`draft/ops`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.embed import copy_angles
from engine.kernels.norm import scaled, warps_of_row
from engine.kernels.ordered_key import id_of_packed
from engine.kernels.topk import find_leaders
from engine.speculation import DraftOutput, TreeTensors


class PairTables(NamedTuple):
    """What a pair is made from: embedding [V, H], the rotary table [P, 2 * D], and the weights [H] that its
    token and its feature are normalised with; None where they are not.
    """

    embedding: Tensor
    angles: Tensor
    token_weight: Tensor | None
    feature_weight: Tensor | None
    eps: float
    is_residual_normed: bool


class Pairs(NamedTuple):
    """T pairs: x [T, 2 * H], token and feature side by side; residual [T, H], the features, normalised or
    not; angles [T, 2 * D], as rows of the table.
    """

    x: Tensor
    residual: Tensor
    angles: Tensor


def open_window(
    tables: PairTables,
    positions: Tensor,
    is_pending: Tensor,
    token_ids: Tensor,
    features: Tensor,
    block_tables: Tensor,
    block_size: int,
    *,
    overlap: bool = False,
) -> tuple[Pairs, Tensor, Tensor, Tensor]:
    """Return (pairs, slots [B * A] int64, suffix_mask [B, A, A] bool, end [B] int64) of a window.

    positions, token_ids: [B, A] int64, is_pending: [B, A] bool, features: [B * A, H], fused; block_tables:
    [B, P] int64. `overlap`: see `norm.rms_norm`.
    """
    num_rows, width = positions.shape
    size, angle_size = features.shape[1], tables.angles.shape[1]
    for x in (*tables[:2], positions, is_pending, token_ids, features, block_tables):
        assert x.is_contiguous(), x.stride()
    pairs = _room(tables, num_rows * width, features)
    if not tables.is_residual_normed:
        pairs = pairs._replace(residual=features)
    slots, end = torch.empty_like(positions), torch.empty_like(positions[:, 0])
    mask = torch.empty(num_rows, width, width, dtype=torch.bool, device=positions.device)
    block = triton.next_power_of_2(size)
    _open_window_kernel[(num_rows * width, 3)](
        *(*tables[:4], positions, is_pending.view(torch.uint8), token_ids, features, block_tables),
        *(pairs.x, pairs.residual if tables.is_residual_normed else None, pairs.angles),
        *(slots, mask.view(torch.uint8), end),
        *(width, block_tables.shape[1], block_size, size, angle_size, tables.eps),
        BLOCK=block,
        BLOCK_ANGLES=triton.next_power_of_2(angle_size),
        RESIDUAL_NORMED=tables.is_residual_normed,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        OVERLAP=overlap,
        num_warps=warps_of_row(block),
        launch_pdl=overlap,
    )
    return pairs, slots.flatten(), mask, end


def open_level(
    tables: PairTables,
    tree: TreeTensors,
    depth: int,
    feature: Tensor,
    end: Tensor,
    token_ids: Tensor,
    *,
    overlap: bool = False,
) -> tuple[Pairs, Tensor]:
    """Return (pairs, scratch rows [T] int64) of the nodes at `depth`, T = B * W.

    feature: [B, V, H] with contiguous rows, of the level above; end: [B] int64, the position after the root;
    token_ids: [B, N] int64. A node's scratch row is its column, of C per batch row.
    """
    num_rows, num_nodes = token_ids.shape
    level = tree.level(depth)
    above = tree.level(depth - 1).start if depth > 1 else -1
    size, angle_size = feature.shape[2], tables.angles.shape[1]
    for x in (*tables[:2], tree.columns, tree.parents, end, token_ids):
        assert x.is_contiguous(), x.stride()
    assert feature.stride(2) == 1, feature.stride()
    pairs = _room(tables, num_rows * tree.widths[depth - 1], feature)
    rows = torch.empty(pairs.x.shape[0], dtype=torch.int64, device=token_ids.device)
    block = triton.next_power_of_2(size)
    _open_level_kernel[(pairs.x.shape[0], 3)](
        *(*tables[:4], tree.columns, tree.parents, feature, end, token_ids, *pairs, rows),
        *(depth, level.start, tree.widths[depth - 1], above, tree.columns.shape[1], num_nodes),
        *(*feature.stride()[:2], size, angle_size, tables.eps),
        BLOCK=block,
        BLOCK_ANGLES=triton.next_power_of_2(angle_size),
        RESIDUAL_NORMED=tables.is_residual_normed,
        OVERLAP=overlap,
        num_warps=warps_of_row(block),
        launch_pdl=overlap,
    )
    return pairs, rows


def choose_children(
    target_ids: Tensor,
    tree: TreeTensors,
    depth: int,
    logits: Tensor,
    draft: DraftOutput,
    *,
    overlap: bool = False,
) -> None:
    """Write the best tokens of the nodes at `depth`, by logits [B * W, draft_vocab_size], into `draft`: the
    first R of each as its children, and those that nodes of the tree have as their tokens.

    target_ids: [draft_vocab_size] int64. Two launches.
    """
    children, token_ids = draft.children, draft.token_ids
    assert children is not None
    for x in (target_ids, tree.columns, tree.parents, tree.ranks, tree.is_node, token_ids, children):
        assert x.is_contiguous(), x.stride()
    num_found = min(children.shape[2], logits.shape[1])
    leaders = find_leaders(logits, num_found, overlap=overlap)
    level = tree.level(depth) if depth else slice(-1, 0)
    _place_kernel[(leaders.shape[0],)](
        *(leaders, target_ids, tree.columns, tree.parents, tree.ranks, tree.is_node.view(torch.uint8)),
        *(token_ids, children, level.start, level.stop - level.start),
        *(tree.columns.shape[1], tree.num_nodes, children.shape[2], leaders.shape[1]),
        NUM_FOUND=num_found,
        BLOCK=triton.next_power_of_2(leaders.shape[1]),
        BLOCK_NODES=triton.next_power_of_2(tree.num_nodes),
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )


def _room(tables: PairTables, num_pairs: int, feature: Tensor) -> Pairs:
    size = feature.shape[-1]
    return Pairs(
        x=feature.new_empty(num_pairs, 2 * size),
        residual=feature.new_empty(num_pairs, size),
        angles=tables.angles.new_empty(num_pairs, tables.angles.shape[1]),
    )


@triton.jit
def _load_weight(weight, element, size):
    """Return the weight of a norm [BLOCK] float32, of a norm that there is."""
    loaded = tl.zeros(element.shape, tl.float32)
    if weight is not None:
        loaded = tl.load(weight + element, element < size, 0.0).to(tl.float32)
    return loaded


@triton.jit
def _normed(values, has_norm, weight, size, eps):
    """Return the values normalised, where there is a norm."""
    if has_norm is not None:
        values = scaled(values.to(tl.float32), weight, size, eps).to(values.dtype)
    return values


@triton.jit
def _write_token(embedding, norm, token_id, out, element, size, eps, OVERLAP: tl.constexpr):
    """Write the embedding of the token at `token_id` to the pointers `out`."""
    weight = _load_weight(norm, element, size)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    values = tl.load(embedding + tl.load(token_id) * size + element, element < size, 0.0)
    tl.store(out, _normed(values, norm, weight, size, eps), element < size)


@triton.jit
def _write_feature(
    values, norm, weight, out, residual, pair, element, size, eps, RESIDUAL_NORMED: tl.constexpr
):
    """Write a feature to the pointers `out` and, where there is room for it, to the residual."""
    normed = _normed(values, norm, weight, size, eps)
    tl.store(out, normed, element < size)
    if residual is not None:
        tl.store(residual + pair * size + element, normed if RESIDUAL_NORMED else values, element < size)


@triton.jit(do_not_specialize=["width", "num_blocks"])
def _open_window_kernel(
    embedding,
    angle_table,
    token_weight,
    feature_weight,
    positions,
    is_pending,
    token_ids,
    features,
    block_tables,
    x,
    residual,
    angles,
    slots,
    mask,
    end,
    width,
    num_blocks,
    block_size,
    size,
    angle_size,
    eps,
    BLOCK: tl.constexpr,
    BLOCK_ANGLES: tl.constexpr,
    RESIDUAL_NORMED: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, BLOCK)
    out = x + pair * 2 * size + element
    if part == 0:
        _write_token(embedding, token_weight, token_ids + pair, out, element, size, eps, OVERLAP)
    elif part == 1:
        weight = _load_weight(feature_weight, element, size)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        values = tl.load(features + pair * size + element, element < size, 0.0)
        _write_feature(
            values, feature_weight, weight, out + size, residual, pair, element, size, eps, RESIDUAL_NORMED
        )
    else:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        row, own = pair // width, pair % width
        position = tl.load(positions + pair)
        reached = tl.maximum(position, 0)
        copy_angles(angle_table, angles + pair * angle_size, reached, angle_size, BLOCK_ANGLES)
        key = tl.arange(0, BLOCK_WIDTH)
        is_shown = tl.load(is_pending + row * width + key, key < width, 0) != 0
        is_shown = (is_shown & (key < own)) | (key == own)
        tl.store(mask + pair * width + key, is_shown.to(tl.uint8), key < width)
        block_idx = tl.minimum(reached // block_size, num_blocks - 1)
        block = tl.load(block_tables + row * num_blocks + block_idx)
        slot = block * block_size + reached % block_size
        tl.store(slots + pair, tl.where(tl.load(is_pending + pair) != 0, slot, 0))
        if own == width - 1:
            tl.store(end + row, position + 1)


@triton.jit(do_not_specialize=["depth", "start", "width", "above", "num_columns", "num_nodes"])
def _open_level_kernel(
    embedding,
    angle_table,
    token_weight,
    feature_weight,
    columns,
    parents,
    feature,
    end,
    token_ids,
    x,
    residual,
    angles,
    rows,
    depth,
    start,
    width,
    above,
    num_columns,
    num_nodes,
    feature_row,
    feature_node,
    size,
    angle_size,
    eps,
    BLOCK: tl.constexpr,
    BLOCK_ANGLES: tl.constexpr,
    RESIDUAL_NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = pair // width, start + pair % width
    element = tl.arange(0, BLOCK)
    out = x + pair * 2 * size + element
    # Padding reads the root: it is finite where the root is, and nobody reads what becomes of it.
    node = tl.load(columns + row * num_columns + column)
    is_node = node < num_nodes
    node = tl.where(is_node, node, 0)
    if part == 0:
        token_id = token_ids + row * num_nodes + node
        _write_token(embedding, token_weight, token_id, out, element, size, eps, OVERLAP)
        tl.store(rows + pair, row * num_columns + column)
    elif part == 1:
        weight = _load_weight(feature_weight, element, size)
        # Nodes are numbered level by level, so those of a level are side by side in it.
        first = tl.load(columns + row * num_columns + above, above >= 0, 0)
        parent = tl.where(is_node, tl.load(parents + row * num_nodes + node) - first, 0)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        source = feature + row * feature_row + parent * feature_node
        values = tl.load(source + element, element < size, 0.0)
        _write_feature(
            values, feature_weight, weight, out + size, residual, pair, element, size, eps, RESIDUAL_NORMED
        )
    else:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        position = tl.load(end + row) + depth - 1
        copy_angles(angle_table, angles + pair * angle_size, position, angle_size, BLOCK_ANGLES)


@triton.jit(do_not_specialize=["start", "width", "num_columns", "num_nodes", "num_children", "num_leaders"])
def _place_kernel(
    leaders,
    target_ids,
    columns,
    parents,
    ranks,
    is_node,
    token_ids,
    children,
    start,
    width,
    num_columns,
    num_nodes,
    num_children,
    num_leaders,
    NUM_FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    row, own = pair // width, pair % width
    node = tl.load(columns + row * num_columns + start + own, start >= 0, 0)
    each = tl.arange(0, BLOCK_NODES)
    at = row * num_nodes + each
    # The root is not a child, though its table has it as its own parent.
    is_child = (each > 0) & (each < num_nodes)
    is_child &= tl.load(is_node + at, is_child, 0) != 0
    is_child &= tl.load(parents + at, is_child, -1) == node
    rank_of = tl.load(ranks + at, is_child, -1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if node < num_nodes:
        idx = tl.arange(0, BLOCK)
        packed = tl.load(leaders + pair * num_leaders + idx, idx < num_leaders, 0)
        for rank in range(NUM_FOUND):
            highest = tl.max(packed, 0)
            token = tl.load(target_ids + id_of_packed(highest))
            tl.store(children + (row * num_nodes + node) * num_children + rank, token)
            tl.store(token_ids + at, tl.zeros([BLOCK_NODES], tl.int64) + token, is_child & (rank_of == rank))
            packed = tl.where(packed == highest, 0, packed)
