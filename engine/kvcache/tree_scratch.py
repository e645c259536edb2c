"""K/V of the tokens of the step in flight. Moving the accepted rows into pages is left to `KVPool.commit`."""

from dataclasses import dataclass

from torch import Tensor

from engine.kvcache.finite import finite


@dataclass(frozen=True, slots=True)
class TreeScratch:
    """The K and V of the T nodes of one step, [L, T, Hkv, D], in the dtype of the pages.

    So an ancestor seen in a tree equals the same token seen in the cache. Only `finite` values are kept: a
    drafted branch that overflows must not reach its siblings through a masked product. Made for one step.
    """

    k: Tensor
    v: Tensor

    def store(self, layer_idx: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep k, v [R, Hkv, D] of one layer at rows [R] int64."""
        self.k[layer_idx].index_copy_(0, rows, finite(k))
        self.v[layer_idx].index_copy_(0, rows, finite(v))

    def layer(self, layer_idx: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return K and V of one layer, [num_rows, T / num_rows, Hkv, D]."""
        k, v = self.k[layer_idx], self.v[layer_idx]
        return k.view(num_rows, -1, *k.shape[1:]), v.view(num_rows, -1, *v.shape[1:])
