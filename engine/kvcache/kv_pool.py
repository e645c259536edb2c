"""The paged K/V tensors of one network. Which block holds what is left to `kv_cache`."""

import torch
from torch import Tensor

from engine.kvcache.finite import finite
from engine.kvcache.tree_scratch import TreeScratch


class KVPool:
    """K and V of every layer in blocks of `block_size` positions, [L, num_blocks, block_size, Hkv, D].

    Block 0 is the dummy: writes of padding land there. Only `finite` values are ever stored.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def store(self, layer_idx: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, Hkv, D] of one layer at slots [T] int64 (block * block_size + offset)."""
        self.k[layer_idx].view(-1, *k.shape[1:]).index_copy_(0, slots, finite(k))
        self.v[layer_idx].view(-1, *v.shape[1:]).index_copy_(0, slots, finite(v))

    def scratch(self, num_tokens: int) -> TreeScratch:
        """Return room for the K/V of `num_tokens` nodes; whoever reads a row must have written it."""
        shape = (self.k.shape[0], num_tokens, *self.k.shape[3:])
        return TreeScratch(self.k.new_empty(shape), self.v.new_empty(shape))

    def rows(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return K and V of one layer by slot, [num_blocks * block_size, Hkv, D]."""
        return self.k[layer_idx].flatten(0, 1), self.v[layer_idx].flatten(0, 1)

    def commit(self, slots: Tensor, scratch: TreeScratch, rows: Tensor | None = None) -> None:
        """Copy rows [R] of a scratch, of all layers, to slots [R]; all its rows in order where None."""
        k, v = self.k.flatten(1, 2), self.v.flatten(1, 2)
        if self.k.is_cuda:
            from engine.kernels.commit import commit_rows

            commit_rows(scratch.k, scratch.v, rows, k, v, slots)
        else:
            k.index_copy_(1, slots, scratch.k if rows is None else scratch.k[:, rows])
            v.index_copy_(1, slots, scratch.v if rows is None else scratch.v[:, rows])

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Return the memory that one block takes, K and V of all layers."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def slots_of(block_tables: Tensor, positions: Tensor, is_valid: Tensor, block_size: int) -> Tensor:
    """Return the pool slots [B, T] of positions [B, T] under block_tables [B, P]; invalid ones go to the
    dummy block.
    """
    blocks = block_tables.gather(1, (positions // block_size).clamp(0, block_tables.shape[1] - 1))
    slots = blocks * block_size + positions % block_size
    return torch.where(is_valid, slots, 0)
