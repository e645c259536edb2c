"""The protocol of attention over a paged prefix and a suffix, and the layouts that one call is given.

The arithmetic is left to the backends: `reference` says what is right, every other must equal it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# Takes q [B, N, Hq, D], k and v [B, S, Hkv, D], and one layer's k_pages and v_pages
# [num_blocks, block_size, Hkv, D]; returns [B, N, Hq, D].
AttendPages = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# Takes q [T, Hq, D] and one layer's k_pages and v_pages; returns [T, Hq, D].
AttendChunks = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Which keys each of N query nodes of B rows may read; the same for every layer of a pass.

    block_tables: [B, P] int64, the pages of each row's prefix in order; P may be 0. A node reads the prefix
    positions [prefix_start, prefix_end), both [B, N] int64 (a window per node, empty where they meet), and
    the suffix keys of suffix_mask: [B, N, S] bool. Every node reads at least one suffix key (itself), so no
    softmax is empty.
    """

    block_tables: Tensor
    prefix_start: Tensor
    prefix_end: Tensor
    suffix_mask: Tensor


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """C chunks of prompts, their T tokens side by side, whose K/V are in the pages when attention runs.

    block_tables: [C, P] int64; cu_seqlens: [C + 1] int32 or int64, where each chunk begins among the tokens,
    and T; starts: [C] int64, the position of each chunk's first token. Token i of chunk c reads the positions
    from window_starts[c] ([C] int64) to starts[c] + i; where there are none, its answer is finite and means
    nothing. chunk_lens holds the lengths, at least 1 each, on the host; where it is None, only the device
    knows them, some may be 0, and a chunk of padding stands before position 0.
    """

    block_tables: Tensor
    cu_seqlens: Tensor
    starts: Tensor
    window_starts: Tensor
    chunk_lens: tuple[int, ...] | None


class AttentionBackend(Protocol):
    """Attention with scores scaled by 1 / sqrt(D), grouped queries, and a softmax over prefix and suffix
    together.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_capturable(self) -> bool:
        """True where `bind` and its function read lengths on the device only, so that a CUDA graph of them
        serves any batch of the same sizes, at a cost that follows the real lengths.
        """

    @property
    def is_prefill_capturable(self) -> bool:
        """The same of `bind_prefill` without chunk_lens."""

    def bind(self, layout: AttentionLayout, block_size: int) -> AttendPages:
        """Prepare whatever the layers of one pass share, and return the function that each layer calls."""

    def bind_prefill(self, layout: PrefillLayout, block_size: int) -> AttendChunks:
        """Do the same for chunks of prompts."""
