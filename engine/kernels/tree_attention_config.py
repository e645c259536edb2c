"""The tiles, warps and slots of a tree attention launch, chosen by measurement on an H200.

The choice follows static shapes only, so that a captured graph keeps it; lengths are left to the plan.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """block_m queries (nodes times the heads of a K/V head) by block_n keys per step.

    max_registers: per thread, None for no bound. num_slots: programs that run at once for one K/V
    head and query block, or 0 for one program per row, uncut; min_tiles: of a unit of work at least;
    idle_percent: the time of a unit that has the GPU to itself, of its time on a full GPU.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    num_slots: int
    min_tiles: int
    idle_percent: int

    def max_units(self, num_rows: int) -> int:
        """Return a bound of the units of work of a plan."""
        return num_rows + self.num_slots + self.num_slots // 2 if self.num_slots else num_rows

    def max_cuts(self, num_rows: int) -> int:
        """Return a bound of the rows that a plan cuts, each longer than half an equal share."""
        return min(num_rows, 2 * self.num_slots)


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


_MANY_ROWS, _MOST_ROWS = 8, 64  # where other configurations begin to win


def choose_config(shape: TreeShape, num_processors: int) -> TreeConfig:
    """Return the configuration for `shape` on a GPU of `num_processors` multiprocessors."""
    num_queries = shape.num_nodes * shape.num_heads // shape.num_kv_heads
    is_wide = shape.kv_dtype.itemsize == 4
    block_m = _block_m(num_queries)
    if not is_wide and shape.num_rows >= _MANY_ROWS:
        # Few queries waste most of a wide block, but its warps keep more loads in flight.
        block_m = max(block_m, 64)
    num_warps = 8 if block_m == 128 else 4
    block_n = 32 if is_wide else 64
    programs_per_processor = 1 if block_m == 128 or is_wide or shape.num_rows < _MANY_ROWS else 2
    num_lanes = shape.num_kv_heads * triton.cdiv(num_queries, block_m)
    num_slots = max(1, programs_per_processor * num_processors // num_lanes)
    if shape.num_positions <= 4 * block_n:
        num_slots = 0
    return TreeConfig(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=2 if is_wide else 4 if block_m == 64 and shape.num_rows < _MOST_ROWS else 3,
        max_registers=None,
        num_slots=num_slots,
        min_tiles=2,
        idle_percent=100 if programs_per_processor == 1 else 55,
    )


def _block_m(num_queries: int) -> int:
    """Return the block with the least padding, the largest of equals."""
    if num_queries <= 128:
        return max(16, 1 << (num_queries - 1).bit_length())
    return min((128, 64), key=lambda block: -(-num_queries // block) * block)
