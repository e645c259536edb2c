"""Replayed acceptance in one launch: a program per row draws a path and raises the logits of its drafts.

What the profile says and why acceptance is replayed is left to `runner/replay`, whose torch it equals.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The largest float32 below 1, as in `sampling/noise`.
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_WORD_UNIT = tl.constexpr(2.0**-32)


def raise_rows(
    logits: Tensor,
    token_ids: Tensor,
    nodes: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    edges: Tensor,
    seed: Tensor,
    root_positions: Tensor,
    depth: int,
    stream: int,
    raised: float,
) -> None:
    """Write `raised` into logits [B, N, V] at every drafted token of a drawn path, at the node above it.

    token_ids: [B, N] int64, the drafts; nodes: parents, depths, ranks, ancestor_bits, is_node of B trees,
    [B, N] each and contiguous; edges: [64, 64] float32; seed, root_positions: [B] int64.
    """
    num_rows, num_nodes = token_ids.shape
    assert all(table.is_contiguous() for table in nodes), [table.stride() for table in nodes]
    assert token_ids.stride(1) == logits.stride(2) == 1, (token_ids.stride(), logits.stride())
    parents, depths, ranks, ancestor_bits, is_node = nodes
    _raise_kernel[(num_rows,)](
        logits,
        token_ids,
        parents,
        depths,
        ranks,
        ancestor_bits,
        is_node.view(torch.uint8),
        edges,
        seed,
        root_positions,
        logits.stride(0),
        logits.stride(1),
        token_ids.stride(0),
        seed.stride(0),
        root_positions.stride(0),
        num_nodes,
        edges.shape[1],
        raised,
        STREAM=stream,
        BLOCK_NODES=triton.next_power_of_2(num_nodes),
        BLOCK_STEPS=triton.next_power_of_2(depth),
        num_warps=4,
    )


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _uniform(seed, position, STREAM: tl.constexpr):
    """Return number 0 of `sampling/noise.uniform` for one row."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    key_low, key_high = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    zero = low & 0
    word, _, _, _ = tl.random.philox_impl(zero, zero + STREAM, low, high, key_low, key_high)
    return tl.minimum(word.to(tl.float32) * _WORD_UNIT, _BELOW_ONE)


@triton.jit
def _node_at(node, is_on_path, depths, step):
    """Return the node of the path at each step, 0 beyond its end."""
    is_at = (depths[None, :] == step[:, None]) & is_on_path[None, :]
    return tl.sum(tl.where(is_at, node[None, :], 0), axis=1)


@triton.jit
def _raise_kernel(
    logits_ptr,
    token_ids_ptr,
    parents_ptr,
    depths_ptr,
    ranks_ptr,
    bits_ptr,
    is_node_ptr,
    edges_ptr,
    seed_ptr,
    position_ptr,
    logits_row_stride,
    logits_node_stride,
    token_stride,
    seed_stride,
    position_stride,
    num_nodes,
    num_ranks,
    raised,
    STREAM: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_NODES).to(tl.int64)
    is_held = node < num_nodes
    at = row * num_nodes + node
    depths = tl.load(depths_ptr + at, mask=is_held, other=0)
    ranks = tl.load(ranks_ptr + at, mask=is_held, other=0)
    bits = tl.load(bits_ptr + at, mask=is_held, other=0)
    parents = tl.load(parents_ptr + at, mask=is_held, other=0)
    is_node = tl.load(is_node_ptr + at, mask=is_held, other=0) != 0
    edges = tl.load(edges_ptr + depths * num_ranks + ranks, mask=is_node, other=0.0)
    is_above = ((bits[:, None] >> node[None, :]) & 1) == 1
    accepted = tl.reduce(tl.where(is_above, edges[None, :], 1.0), 1, _multiply)
    accepted = tl.where(is_node, accepted, 0.0)
    is_child = (parents[None, :] == node[:, None]) & (node > 0)[None, :]
    ends = accepted - tl.sum(tl.where(is_child, accepted[None, :], 0.0), axis=1)
    seed = tl.load(seed_ptr + row * seed_stride)
    noise = _uniform(seed, tl.load(position_ptr + row * position_stride), STREAM)
    last = tl.sum(((tl.cumsum(ends, 0) <= noise) & is_held).to(tl.int64), axis=0)
    # Rounding may leave the running sum under a noise near 1: that draw ends at the root.
    last = tl.where(last == num_nodes, 0, last)
    num_accepted = tl.load(depths_ptr + row * num_nodes + last)
    is_on_path = ((tl.load(bits_ptr + row * num_nodes + last) >> node) & 1) == 1
    step = tl.arange(0, BLOCK_STEPS)
    above, drafted = _node_at(node, is_on_path, depths, step), _node_at(node, is_on_path, depths, step + 1)
    is_kept = step < num_accepted
    token = tl.load(token_ids_ptr + row * token_stride + drafted, mask=is_kept, other=0)
    place = logits_ptr + row * logits_row_stride + above * logits_node_stride + token
    tl.store(place, raised, mask=is_kept)
