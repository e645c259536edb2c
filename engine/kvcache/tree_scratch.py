"""K/V of the tokens of the step in flight. Moving the accepted rows into pages is left to `KVPool.commit`."""

import torch
from torch import Tensor

from engine.kvcache.kv_pool import finite


class TreeScratch:
    """The K and V of one pass, a pair per layer, in the dtype of the pages.

    So an ancestor seen in a tree equals the same token seen in the cache. Only `finite` values are kept: a
    drafted branch that overflows must not reach its siblings through a masked product. One pass overwrites
    the one before.
    """

    def __init__(self, num_layers: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pairs: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k, v [B, N, Hkv, D] of one layer and return them as later steps will read them."""
        pair = (finite(k.to(self._dtype)), finite(v.to(self._dtype)))
        self._pairs[layer_idx] = pair
        return pair

    def gather(self, path: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V, [L, B * W, Hkv, D], of the node ids path [B, W]."""
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        pairs = [pair for pair in self._pairs if pair is not None]
        assert len(pairs) == len(self._pairs), "a layer has not stored its K/V"
        k, v = (torch.stack(layers)[:, rows, path].flatten(1, 2) for layers in zip(*pairs, strict=True))
        return k, v


class NodeScratch:
    """The K and V of tree nodes that arrive level by level, [L, rows, nodes, Hkv, D]; finite, for masks
    multiply.
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
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)

    def store(self, layer_idx: int, nodes: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, W, Hkv, D] at node ids [B, W]; return all nodes of these rows, [B, max_nodes, Hkv,
        D].
        """
        rows = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
        self._k[layer_idx, rows, nodes] = finite(k)
        self._v[layer_idx, rows, nodes] = finite(v)
        return self._k[layer_idx, : nodes.shape[0]], self._v[layer_idx, : nodes.shape[0]]
