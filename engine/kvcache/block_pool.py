"""Who holds which cache block, and which blocks can be found again by what they contain.

Which sequence needs how many blocks is left to `kv_cache`; the tensors behind the ids to `kv_pool`.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from engine.batch import DUMMY_BLOCK

DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)  # the parent of a prompt's first block


def block_digest(parent: bytes, token_ids: TokenIds[int]) -> bytes:
    """Return the 128-bit name of a full block: its tokens, and through `parent` every token before them."""
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """An entry of the prefix index. `has_draft` False: the block's draft K/V is missing or has holes."""

    block_id: int
    has_draft: bool


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Free, cached (indexed, evictable) and held blocks; they add up to every block but the dummy."""

    num_free: int
    num_cached: int
    num_held: int


class BlockPool:
    """Reference counts and the prefix index over blocks 1..num_blocks - 1; every operation is O(1) a block.

    A block is held (referenced), cached (unreferenced, but indexed) or free. Block 0 is the dummy block of
    padded rows and never leaves. Cached blocks are evicted in the order in which they were released.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2, f"a pool needs the dummy block and one more, found {num_blocks}"
        assert block_size >= 1, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_refs = [0] * num_blocks
        # A stack; reversed so that low ids are handed out first.
        self._free = [block_id for block_id in reversed(range(num_blocks)) if block_id != DUMMY_BLOCK]
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_held = 0
        self._index: dict[bytes, CachedBlock] = {}
        self._digests: dict[int, bytes] = {}

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could return now, evicting where needed."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        return BlockCounts(len(self._free), len(self._cached), self._num_held)

    def num_refs(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def is_indexed(self, block_id: int) -> bool:
        return block_id in self._digests

    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        """Take `num_blocks` blocks nobody holds, evicting the oldest cached ones; None (and no change) if
        there are too few.
        """
        if num_blocks > self.num_available:
            return None
        block_ids = tuple(self._free.pop() if self._free else self._evict() for _ in range(num_blocks))
        for block_id in block_ids:
            self._num_refs[block_id] = 1
        self._num_held += num_blocks
        return block_ids

    def acquire(self, block_id: int) -> None:
        """Add a reference to a block found through the index."""
        assert self.is_indexed(block_id), f"block {block_id} is not indexed"
        if self._num_refs[block_id] == 0:
            del self._cached[block_id]
            self._num_held += 1
        self._num_refs[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop a reference; the last one makes the block cached where it is indexed, else free."""
        assert self._num_refs[block_id] > 0, f"block {block_id} is not held"
        self._num_refs[block_id] -= 1
        if self._num_refs[block_id]:
            return
        self._num_held -= 1
        if self.is_indexed(block_id):
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def find(self, digest: bytes) -> CachedBlock | None:
        return self._index.get(digest)

    def publish(self, block_id: int, digest: bytes, has_draft: bool) -> None:
        """Index a held, fully written block. Where the content is indexed already, the first block stays."""
        assert self._num_refs[block_id] > 0, f"block {block_id} is not held"
        if digest in self._index:
            return
        assert not self.is_indexed(block_id), f"block {block_id} is indexed under another content"
        self._index[digest] = CachedBlock(block_id, has_draft)
        self._digests[block_id] = digest

    def forget(self, block_id: int) -> None:
        """Take a held block out of the index, if it is there, so that it is free once released."""
        assert self._num_refs[block_id] > 0, f"block {block_id} is not held"
        digest = self._digests.pop(block_id, None)
        if digest is not None:
            del self._index[digest]

    def clear_index(self) -> None:
        """Forget every content; cached blocks become free. Held blocks stay with their holders."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._index.clear()
        self._digests.clear()

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        del self._index[self._digests.pop(block_id)]
        return block_id
