"""Replayed acceptance in one launch: a program per row draws the path that a profile accepts.

What the profile says and why acceptance is replayed is left to `runner/replay`, whose torch it equals.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The largest float32 below 1, as in `sampling/noise`.
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_WORD_UNIT = tl.constexpr(2.0**-32)


def replay_rows(
    nodes: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    edges: Tensor,
    token_ids: Tensor,
    next_token: Tensor,
    seed: Tensor,
    root_positions: Tensor,
    depth: int,
    stream: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (path [B, D + 1], num_accepted [B], token_ids [B, D + 1]), all int64.

    nodes: parents, depths, ranks, ancestor_bits, is_node of B trees, [B, N] each and contiguous; edges:
    [64, 64] float32; token_ids: [B, N] int64, the drafts; next_token, seed, root_positions: [B] int64.
    """
    num_rows, num_nodes = token_ids.shape
    assert all(table.is_contiguous() for table in nodes), [table.stride() for table in nodes]
    assert token_ids.stride(1) == 1, token_ids.stride()
    parents, depths, ranks, ancestor_bits, is_node = nodes
    path = torch.empty(num_rows, depth + 1, dtype=torch.int64, device=token_ids.device)
    num_accepted, emitted = torch.empty_like(next_token), torch.empty_like(path)
    _replay_kernel[(num_rows,)](
        parents,
        depths,
        ranks,
        ancestor_bits,
        is_node.view(torch.uint8),
        edges,
        token_ids,
        next_token,
        seed,
        root_positions,
        path,
        num_accepted,
        emitted,
        token_ids.stride(0),
        num_nodes,
        depth + 1,
        edges.shape[1],
        STREAM=stream,
        BLOCK_NODES=triton.next_power_of_2(num_nodes),
        BLOCK_STEPS=triton.next_power_of_2(depth + 1),
        num_warps=4,
    )
    return path, num_accepted, emitted


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _uniform(seed, position, STREAM: tl.constexpr):
    """Return word 0 of `sampling/noise.uniform` for one row."""
    zero = (position & 0).to(tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    key_low, key_high = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    word, _, _, _ = tl.random.philox_impl(zero, zero + STREAM, low, high, key_low, key_high)
    return tl.minimum(word.to(tl.float32) * _WORD_UNIT, _BELOW_ONE)


@triton.jit
def _node_at(node, bits, depths, step, num_accepted):
    """Return the node at each step of the path whose last node has ancestors `bits`; the last one repeats."""
    is_above = (bits >> node) & 1
    is_at = depths[None, :] == tl.minimum(step, num_accepted)[:, None]
    return tl.sum(tl.where(is_at & (is_above[None, :] == 1), node[None, :], 0), axis=1)


@triton.jit
def _replay_kernel(
    parents_ptr,
    depths_ptr,
    ranks_ptr,
    bits_ptr,
    is_node_ptr,
    edges_ptr,
    token_ids_ptr,
    next_token_ptr,
    seed_ptr,
    position_ptr,
    path_ptr,
    num_accepted_ptr,
    emitted_ptr,
    token_stride,
    num_nodes,
    num_steps,
    num_ranks,
    STREAM: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_NODES)
    is_held = node < num_nodes
    at = row * num_nodes + node
    depths = tl.load(depths_ptr + at, mask=is_held, other=0)
    ranks = tl.load(ranks_ptr + at, mask=is_held, other=0)
    bits = tl.load(bits_ptr + at, mask=is_held, other=0)
    parents = tl.load(parents_ptr + at, mask=is_held, other=0)
    is_node = tl.load(is_node_ptr + at, mask=is_held, other=0) != 0
    edges = tl.load(edges_ptr + depths * num_ranks + ranks, mask=is_node, other=0.0)
    is_above = ((bits[:, None] >> node[None, :].to(tl.int64)) & 1) == 1
    accepted = tl.reduce(tl.where(is_above, edges[None, :], 1.0), 1, _multiply)
    accepted = tl.where(is_node, accepted, 0.0)
    is_child = (parents[None, :] == node[:, None]) & (node > 0)[None, :]
    ends = accepted - tl.sum(tl.where(is_child, accepted[None, :], 0.0), axis=1)
    noise = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row), STREAM)
    is_passed = (tl.cumsum(ends, 0) <= noise) & is_held
    last = tl.sum(is_passed.to(tl.int32), axis=0)
    # Rounding may leave the running sum under a noise near 1: that draw ends at the root.
    last = tl.where(last == num_nodes, 0, last)
    num_accepted = tl.load(depths_ptr + row * num_nodes + last)
    last_bits = tl.load(bits_ptr + row * num_nodes + last)
    step = tl.arange(0, BLOCK_STEPS)
    node_ids = node.to(tl.int64)
    path = _node_at(node_ids, last_bits, depths, step, num_accepted)
    following = _node_at(node_ids, last_bits, depths, step + 1, num_accepted)
    is_step = step < num_steps
    drafted = tl.load(token_ids_ptr + row * token_stride + following, mask=is_step, other=0)
    after = tl.where(step == num_accepted, tl.load(next_token_ptr + row), -1)
    out = row * num_steps + step
    tl.store(path_ptr + out, path, mask=is_step)
    tl.store(emitted_ptr + out, tl.where(step < num_accepted, drafted, after), mask=is_step)
    tl.store(num_accepted_ptr + row, num_accepted)
