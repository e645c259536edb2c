"""The walk along the accepted path: from the token drawn at a node to the child that holds it.

Drawing is left to `sampling`; what an answer means is `speculation.Verification`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.draw_row import BEST, ROW_WORDS
from engine.kernels.ordered_key import id_of_packed, is_finite_key, key_of_packed


class TreeArguments(NamedTuple):
    """Trees of N nodes as tables [B, N]; rows of drafted tokens are `drafted_stride` apart."""

    parents: Tensor
    depths: Tensor
    drafted: Tensor
    drafted_stride: int


class AnswerArguments(NamedTuple):
    """Where the fields of `Verification` are written."""

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    token_ids: Tensor
    is_finite: Tensor


@triton.jit
def walk(
    batch_row,
    node,
    level,
    state,
    rows,
    tree,
    answer,
    DEPTH: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tuple:
    """Walk on from `node` at depth `level` as far as tokens were drawn, to the path's end where EVERY node
    has one, and write the answer so far. Return the node reached and whether the path has ended there.

    state: that of the batch row's first row; its rows follow it.
    """
    nodes, depths = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    table = batch_row * rows.num_nodes + nodes
    is_child = (nodes > 0) & (nodes < rows.num_nodes)
    is_child &= tl.load(rows.is_node + table, is_child, 0) != 0
    parents = tl.load(tree.parents + table, is_child, -1)
    drafted = tl.load(tree.drafted + batch_row * tree.drafted_stride + nodes, is_child, -1)
    if EVERY:
        best = tl.load(state + nodes * ROW_WORDS + BEST, nodes < rows.num_nodes, 0, cache_modifier=".cg")
    else:
        best = tl.load(state + BEST + nodes * 0, cache_modifier=".cg")
    slots = batch_row * (DEPTH + 1) + depths
    # Above the level: what the levels before wrote.
    path = tl.load(answer.path + slots, depths < level, 0)
    token_ids = tl.load(answer.token_ids + slots, depths < level, -1)
    depth, is_walking, has_child = level, True, False
    num_accepted, token, is_finite = level, node, node == node
    while is_walking:
        packed = tl.max(tl.where(nodes == node, best, 0), 0)
        is_finite = is_finite_key(key_of_packed(packed))
        # A fault accepts nothing and emits token 0.
        token = tl.where(is_finite, id_of_packed(packed), 0)
        num_accepted = tl.where(is_finite, depth, 0)
        path = tl.where(is_finite, tl.where(depths >= depth, node, path), 0)
        kept = tl.where(depths < num_accepted, token_ids, -1)
        token_ids = tl.where(depths == num_accepted, token, kept)
        is_match = is_child & (parents == node) & (drafted == token)
        child = tl.min(tl.where(is_match, nodes, BLOCK_N), 0)
        has_child = is_finite & (child < BLOCK_N)
        node = tl.where(has_child, child.to(tl.int64), node)
        depth += 1
        is_walking = has_child & EVERY
    tl.store(answer.path + slots, path, depths <= DEPTH)
    tl.store(answer.token_ids + slots, token_ids, depths <= DEPTH)
    tl.store(answer.num_accepted + batch_row, num_accepted.to(tl.int64))
    tl.store(answer.next_token + batch_row, token)
    tl.store(answer.is_finite + batch_row, is_finite.to(tl.uint8))
    return node, has_child
