"""The tiles, warps and shares of a tree attention launch, chosen by measurement on an H200.

The choice follows static shapes only, so that a captured graph keeps it; lengths are left to the plan.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """block_m queries (nodes times the heads of a K/V head) by block_n prefix or block_s suffix keys per
    step.

    num_slices: 1, or num_warps where every warp takes its own keys of a tile, and the warps' sums meet at the
    end only. max_registers: per thread, None for no bound. num_groups: shares of the keys, or 0 for one
    program per row; min_share: tiles of a share at least.
    """

    block_m: int
    block_n: int
    block_s: int
    num_slices: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    num_groups: int
    min_share: int


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What a configuration follows from. num_positions: of a full block table."""

    num_rows: int
    num_nodes: int
    num_suffix: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_positions: int
    kv_dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, k: Tensor, num_positions: int) -> "TreeShape":
        """Return the shape of queries q [B, N, Hq, D] with a suffix k [B, S, Hkv, D]."""
        num_rows, num_nodes, num_heads, head_dim = q.shape
        num_suffix, num_kv_heads = k.shape[1:3]
        return cls(num_rows, num_nodes, num_suffix, num_heads, num_kv_heads, head_dim, num_positions, k.dtype)


def choose_config(shape: TreeShape, num_processors: int) -> TreeConfig:
    """Return the configuration for `shape` on a GPU of `num_processors` multiprocessors."""
    num_queries = shape.num_nodes * shape.num_heads // shape.num_kv_heads
    block_m = _block_m(num_queries)
    is_wide = shape.kv_dtype.itemsize == 4
    num_warps = 8 if block_m == 128 else 4
    num_slices = num_warps if block_m == 16 and not is_wide else 1
    block_n = 32 if is_wide else 64
    programs_per_processor = 1 if block_m == 128 or is_wide else 2
    num_lanes = shape.num_kv_heads * triton.cdiv(num_queries, block_m)
    num_tiles = shape.num_rows * (triton.cdiv(shape.num_positions, block_n) + 1)
    num_groups = min(max(1, programs_per_processor * num_processors // num_lanes), num_tiles)
    if shape.num_positions <= 4 * block_n:
        num_groups = 0
    return TreeConfig(
        block_m=block_m,
        block_n=block_n,
        block_s=max(16 * num_slices, min(triton.next_power_of_2(shape.num_suffix), 32)),
        num_slices=num_slices,
        num_warps=num_warps,
        num_stages=2 if is_wide else 3 if block_m >= 64 else 4,
        max_registers=None,
        num_groups=num_groups,
        min_share=2,
    )


def _block_m(num_queries: int) -> int:
    """Return the block with the least padding, the largest of equals."""
    if num_queries <= 128:
        return max(16, 1 << (num_queries - 1).bit_length())
    return min((128, 64), key=lambda block: -(-num_queries // block) * block)
