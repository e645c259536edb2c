"""The tiles, warps and slots of a tree attention launch, chosen by measurement on an H200.

The choice follows static shapes only, so that a captured graph keeps it; lengths are left to the plan.
"""

from dataclasses import dataclass
from typing import NamedTuple

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


class _Tile(NamedTuple):
    """The part of a configuration that does not depend on the chip's size. programs: per multiprocessor."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    idle_percent: int


_MANY_ROWS, _MOST_ROWS = 8, 64  # where other tiles begin to win
_FEW_QUERIES, _SHORT_TABLE = 16, 2048


def choose_config(shape: TreeShape, num_processors: int) -> TreeConfig:
    """Return the configuration for `shape` on a GPU of `num_processors` multiprocessors."""
    num_queries = shape.num_nodes * shape.num_heads // shape.num_kv_heads
    if shape.kv_dtype.itemsize == 4:
        block_m = _block_m(num_queries)
        tile = _Tile(block_m, 32, 8 if block_m == 128 else 4, 2, 1, 100)
    elif shape.num_rows < _MANY_ROWS:
        tile = _tile_of_few_rows(shape, num_queries)
    elif num_queries > 64:
        tile = _tile_of_many_queries(num_queries)
    else:
        tile = _tile_of_many_rows(shape, num_queries)
    num_lanes = shape.num_kv_heads * triton.cdiv(num_queries, tile.block_m)
    num_slots = max(1, tile.programs * num_processors // num_lanes)
    return TreeConfig(
        *tile[:4],
        max_registers=None,
        num_slots=0 if shape.num_positions <= 4 * tile.block_n else num_slots,
        min_tiles=2,
        idle_percent=tile.idle_percent,
    )


def _tile_of_few_rows(shape: TreeShape, num_queries: int) -> _Tile:
    """Latency counts: blocks of 64 queries rather than 128, and short tiles where there are few of them."""
    if num_queries > 128:
        return _tile_of_many_queries(num_queries)._replace(programs=1, idle_percent=100)
    is_short = num_queries > _FEW_QUERIES and shape.num_positions <= _SHORT_TABLE
    return _Tile(min(_block_m(num_queries), 64), 32 if is_short else 64, 4, 3, 1, 100)


def _tile_of_many_queries(num_queries: int) -> _Tile:
    if _block_m(num_queries) == 128:
        return _Tile(128, 64, 8, 3, 1, 100)
    return _Tile(64, 64, 4, 3, 2, 55)


def _tile_of_many_rows(shape: TreeShape, num_queries: int) -> _Tile:
    """Few queries waste most of a wide block, but its warps keep more loads in flight; deep pipelines of one
    program do as well as two programs, and cut fewer rows.
    """
    has_most_rows, has_few_queries = shape.num_rows >= _MOST_ROWS, num_queries <= _FEW_QUERIES
    if shape.head_dim <= 64:
        if has_most_rows:
            return _Tile(64, 64, 4, 4, 1, 70)
        return _Tile(16, 64, 4, 3, 3, 70) if has_few_queries else _Tile(64, 64, 4, 5, 2, 70)
    if not has_most_rows:
        return _Tile(64, 64, 4, 4, 1, 100)
    if has_few_queries:
        return _Tile(16, 64, 4, 4, 1, 100)
    return _Tile(64, 32, 4, 4, 1, 100) if num_queries <= 32 else _Tile(64, 64, 4, 3, 2, 55)


def _block_m(num_queries: int) -> int:
    """Return the block with the least padding, the largest of equals."""
    if num_queries <= 128:
        return max(16, 1 << (num_queries - 1).bit_length())
    return min((128, 64), key=lambda block: -(-num_queries // block) * block)
