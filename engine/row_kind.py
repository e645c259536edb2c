"""Which rows are alike, as far as the acceptance of their drafts goes. What is learnt of them is left to
`dispatcher/acceptance`.
"""

import sys
from bisect import bisect_left
from typing import NamedTuple

from engine.request import SamplingParams


class RowKind(NamedTuple):
    """What the acceptance of a row's drafts may depend on, as the dispatcher tells rows apart. A named tuple,
    since every row of every step hashes it.

    `temperature_class` is 0 for greedy rows, 1 up to temperature 0.7, else 2; `context_bucket` is 0 up to
    2,048 cached tokens, 1 up to 8,192, else 2.
    """

    temperature_class: int = 0
    is_guided: bool = False
    context_bucket: int = 0

    @staticmethod
    def of(sampling: SamplingParams, num_cached: int) -> "RowKind":
        """Return the kind of a row that draws by `sampling` behind `num_cached` tokens."""
        temperature_class = bisect_left(_TEMPERATURE_EDGES, sampling.temperature)
        return _KINDS[temperature_class][bisect_left(_CONTEXT_EDGES, num_cached)]

    @property
    def max_context(self) -> int:
        """The most cached tokens of a row of this kind."""
        return _CONTEXT_ENDS[self.context_bucket]


ANY_KIND = RowKind()  # of rows about which nothing is said
_TEMPERATURE_EDGES = (0.0, 0.7)
_CONTEXT_EDGES = (2048, 8192)
_CONTEXT_ENDS = (*_CONTEXT_EDGES, sys.maxsize)
_KINDS = tuple(
    tuple(RowKind(temperature_class, context_bucket=bucket) for bucket in range(3))
    for temperature_class in range(3)
)
