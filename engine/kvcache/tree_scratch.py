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

    def layers(self, num_rows: int) -> list[tuple[Tensor, ...]]:
        """Return (K, V, K by row, V by row) of each layer: two [T, Hkv, D], two [num_rows, T / num_rows, Hkv,
        D].
        """
        by_row = (x.view(x.shape[0], num_rows, -1, *x.shape[2:]) for x in (self.k, self.v))
        return list(zip(self.k, self.v, *by_row, strict=True))
