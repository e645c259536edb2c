"""K/V of the tokens of the step in flight. Moving the accepted rows into pages is left to `KVPool.commit`."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeScratch:
    """The K and V of the T nodes of one step, [L, T, Hkv, D], in the dtype of the pages.

    So an ancestor seen in a tree equals the same token seen in the cache. Only `finite` values belong here: a
    drafted branch that overflows must not reach its siblings through a masked product. Made for one step.
    """

    k: Tensor
    v: Tensor

    def layer(self, layer_idx: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return K and V of one layer, [num_rows, T / num_rows, Hkv, D]."""
        k, v = self.k[layer_idx], self.v[layer_idx]
        return k.view(num_rows, -1, *k.shape[1:]), v.view(num_rows, -1, *v.shape[1:])
