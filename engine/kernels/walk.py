"""The walk along the accepted path: from the token drawn at a node to the child that holds it.

Drawing is left to `draw` and `sift`; what an answer means is `speculation.Verification`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.draw_row import (
    AHEAD,
    BEST,
    FLOOR,
    IS_CLOSED,
    IS_SETTLED,
    NEXT,
    NODE,
    NUM_DRAWN,
    NUM_TIES,
    PEAK,
    ROW_WORDS,
    TOTAL,
    is_last_program,
)
from engine.kernels.ordered_key import id_of_packed, is_finite_key, key_of_packed
from engine.speculation import DraftOutput, TreeTensors, Verification
from engine.tree.topology import MAX_NODES

MOST_NODES = tl.constexpr(MAX_NODES)


class WalkArguments(NamedTuple):
    """Trees of N nodes as tables [B, N], with rows of drafted tokens `drafted_stride` apart; then where the
    fields of `Verification` are written.
    """

    parents: Tensor
    depths: Tensor
    drafted: Tensor
    drafted_stride: int
    num_levels: int
    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    token_ids: Tensor
    is_finite: Tensor

    @staticmethod
    def build(draft: DraftOutput, tree: TreeTensors, answer: Verification) -> "WalkArguments":
        """Name the tensors that a walk of this step reads and writes."""
        for table in (tree.parents, tree.depths, tree.is_node):
            assert table.is_contiguous(), table.stride()
        return WalkArguments(
            *(tree.parents, tree.depths, draft.token_ids, draft.token_ids.stride(0)),
            tree.depth + 1,
            *(answer.path, answer.num_accepted, answer.next_token, answer.token_ids),
            answer.is_finite.view(torch.uint8),
        )


@triton.jit
def walk_if_last(
    is_drawn,
    batch_row,
    rows,
    path,
    EVERY: tl.constexpr,
) -> None:
    """Walk on in the last of the programs that draw for the batch row: all of its rows where EVERY node has
    one, else those of a row that `is_drawn`.
    """
    num_rows = rows.num_nodes if EVERY else 1
    first = rows.state + batch_row.to(tl.int64) * num_rows * ROW_WORDS
    is_last = False
    if is_drawn | EVERY:
        is_last = is_last_program(first + NUM_DRAWN, num_rows * tl.num_programs(1))
    if is_last:
        _walk(batch_row, rows, path, first, EVERY)


@triton.jit
def _walk(
    batch_row,
    rows,
    path,
    state,
    EVERY: tl.constexpr,
):
    """Walk on from where the batch row stands: to the path's end where EVERY node has its token, else to the
    next level; and write the answer so far. state: that of the batch row's first row.
    """
    nodes, depths = tl.arange(0, MOST_NODES), tl.arange(0, MOST_NODES)
    table = batch_row * rows.num_nodes + nodes
    is_child = (nodes > 0) & (nodes < rows.num_nodes)
    is_child &= tl.load(rows.is_node + table, is_child, 0) != 0
    parents = tl.load(path.parents + table, is_child, -1)
    drafted = tl.load(path.drafted + batch_row * path.drafted_stride + nodes, is_child, -1)
    if EVERY:
        best = tl.load(state + nodes * ROW_WORDS + BEST, nodes < rows.num_nodes, 0, cache_modifier=".cg")
    else:
        best = tl.load(state + nodes * 0 + BEST, cache_modifier=".cg")
    node = tl.load(state + NODE)
    depth = tl.load(path.depths + batch_row * rows.num_nodes + node)
    slots = batch_row * path.num_levels + depths
    # Above this depth stands what the levels before wrote.
    nodes_taken = tl.load(path.path + slots, depths < depth, 0)
    token_ids = tl.load(path.token_ids + slots, depths < depth, -1)
    num_accepted, token = depth, node
    is_finite, has_child, is_walking = node >= 0, node < 0, node >= 0
    while is_walking:
        packed = tl.max(tl.where(nodes == node, best, 0), 0)
        is_finite = is_finite_key(key_of_packed(packed))
        # A fault accepts nothing and emits token 0.
        token = tl.where(is_finite, id_of_packed(packed), 0)
        num_accepted = tl.where(is_finite, depth, 0)
        nodes_taken = tl.where(is_finite, tl.where(depths >= depth, node, nodes_taken), 0)
        token_ids = tl.where(depths < num_accepted, token_ids, -1)
        token_ids = tl.where(depths == num_accepted, token, token_ids)
        is_match = is_child & (parents == node) & (drafted == token)
        child = tl.min(tl.where(is_match, nodes, MOST_NODES), 0)
        has_child = is_finite & (child < MOST_NODES)
        node = tl.where(has_child, child.to(tl.int64), node)
        depth += 1
        is_walking = has_child & EVERY
    tl.store(path.path + slots, nodes_taken, depths < path.num_levels)
    tl.store(path.token_ids + slots, token_ids, depths < path.num_levels)
    tl.store(path.num_accepted + batch_row, num_accepted)
    tl.store(path.next_token + batch_row, token)
    tl.store(path.is_finite + batch_row, is_finite.to(tl.uint8))
    if not EVERY:
        _enter_level(state, node, has_child)


@triton.jit
def _enter_level(state, node, is_open):
    """Stand on `node` with nothing drawn."""
    tl.store(state + NODE, node)
    tl.store(state + IS_CLOSED, (is_open == 0).to(tl.int64))
    tl.store(state + BEST, 0)
    tl.store(state + FLOOR, 0)
    tl.store(state + NUM_TIES, 0)
    tl.store(state + PEAK, 0)
    tl.store(state + AHEAD, 0)
    tl.store(state + TOTAL, 0)
    tl.store(state + NEXT, 0)
    tl.store(state + IS_SETTLED, 0)
