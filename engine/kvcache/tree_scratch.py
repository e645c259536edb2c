"""K/V of the nodes of the step in flight. Moving the accepted rows into pages is left to `KVPool.commit`."""

import torch
from torch import Tensor


class TreeScratch:
    """K and V of every layer for up to `max_rows` trees of `max_nodes` nodes, [L, rows, nodes, Hkv, D].

    It has the dtype of the pages, so that an ancestor seen in a tree equals the same token seen in the cache.
    """

    def __init__(
        self,
        num_layers: int,
        max_rows: int,
        max_nodes: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, max_rows, max_nodes, num_kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, N, Hkv, D] of one layer and return them as later steps will read them."""
        num_rows, num_nodes = k.shape[:2]
        stored_k = self.k[layer_idx, :num_rows, :num_nodes]
        stored_v = self.v[layer_idx, :num_rows, :num_nodes]
        stored_k.copy_(k.nan_to_num(0.0))
        stored_v.copy_(v.nan_to_num(0.0))
        return stored_k, stored_v

    def store_nodes(self, layer_idx: int, nodes: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, W, Hkv, D] at node ids [B, W]; return all nodes of these rows, [B, max_nodes, Hkv,
        D].
        """
        rows = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
        self.k[layer_idx, rows, nodes] = k.nan_to_num(0.0)
        self.v[layer_idx, rows, nodes] = v.nan_to_num(0.0)
        return self.k[layer_idx, : nodes.shape[0]], self.v[layer_idx, : nodes.shape[0]]

    def gather(self, path: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V, [L, B * W, Hkv, D], of the node ids path [B, W]."""
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        return self.k[:, rows, path].flatten(1, 2), self.v[:, rows, path].flatten(1, 2)
