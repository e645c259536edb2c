"""Which blocks each sequence holds: prefix hits, growth, publication and release.

When to admit, grow or preempt is left to the scheduler; K/V tensors to `kv_pool`.
"""

import sys
from dataclasses import dataclass, field

from engine.kvcache.block_pool import ROOT_DIGEST, BlockPool, block_digest
from engine.request import Sequence


def block_table_width(max_model_len: int, max_depth: int, block_size: int) -> int:
    """Return how many blocks one row of the device's block table must hold.

    The host is one step late, so a sequence may be planned while the step in flight and the next one each
    write depth + 1 positions that a stop rule will drop: a table covers max_model_len + 2 (max_depth + 1).
    """
    return -(-(max_model_len + 2 * (max_depth + 1)) // block_size)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Full blocks that already hold the first tokens of a prompt; may be empty.

    `draft_start` is the first position whose draft K/V may be read: the end of the last block without it.
    """

    block_ids: tuple[int, ...]
    draft_start: int


@dataclass(slots=True)
class _Chain:
    """Digests of a sequence's full blocks, made once each, and how many of those blocks are published: the
    first `num_hit` by others.
    """

    digests: list[bytes] = field(default_factory=list)
    num_hit: int = 0
    num_published: int = 0


class KVCache:
    """Blocks of sequences over one pool. It alone writes `Sequence.block_ids`.

    Only published blocks are ever shared. They are full of tokens known from collected steps, and steps write
    behind those only, so no step writes to a block that another sequence may read.
    """

    def __init__(self, pool: BlockPool, enable_prefix_cache: bool = True) -> None:
        self.pool = pool
        self._enable_prefix_cache = enable_prefix_cache
        self._chains: dict[Sequence, _Chain] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def match_prefix(self, sequence: Sequence) -> PrefixHit:
        """Find the longest run of cached blocks that starts the known tokens; at least one token is left out,
        the root of the next decode step. Takes no reference. A prompt that is scored runs whole.
        """
        wanted = sequence.request.sampling.logprobs
        if not self._enable_prefix_cache or (wanted and wanted.scores_prompt):
            return PrefixHit((), 0)
        block_ids: list[int] = []
        draft_start = 0
        for idx in range((len(sequence.tokens) - 1) // self.pool.block_size):
            block = self.pool.find(self._digest(sequence, idx))
            if block is None:
                break
            block_ids.append(block.block_id)
            if not block.has_draft:
                draft_start = (idx + 1) * self.pool.block_size
        return PrefixHit(tuple(block_ids), draft_start)

    def admit(self, sequence: Sequence, num_tokens: int, num_spare: int) -> PrefixHit | None:
        """Give a sequence its first blocks, for `num_tokens` tokens, hits included; None (no change) where
        fewer than `num_spare` blocks would stay available.
        """
        assert not sequence.block_ids, f"{sequence.request.request_id} holds blocks already"
        hit = self.match_prefix(sequence)
        num_new = self.num_blocks_for(num_tokens) - len(hit.block_ids)
        num_revived = sum(self.pool.num_refs(block_id) == 0 for block_id in hit.block_ids)
        if num_new + num_revived + num_spare > self.pool.num_available:
            return None
        for block_id in hit.block_ids:
            self.pool.acquire(block_id)
        new_ids = self.pool.allocate(num_new)
        assert new_ids is not None, (num_new, self.pool.counts())
        sequence.block_ids = [*hit.block_ids, *new_ids]
        chain = self._chains.setdefault(sequence, _Chain())
        chain.num_hit = chain.num_published = len(hit.block_ids)
        return hit

    def reserve(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...] | None:
        """Grow a sequence to hold `num_tokens` tokens; return the new block ids, often none, or None (and no
        change) where the pool has too few.
        """
        if num_tokens <= len(sequence.block_ids) * self.pool.block_size:
            return ()
        new_ids = self.pool.allocate(self.num_blocks_for(num_tokens) - len(sequence.block_ids))
        if new_ids is not None:
            sequence.block_ids.extend(new_ids)
        return new_ids

    def publish(self, sequence: Sequence, num_tokens: int, draft_valid: range) -> int:
        """Index the full blocks among the first `num_tokens` tokens, each once; return how many tokens it
        takes to index another.

        Those tokens must be known from a collected step and their target K/V written. Draft K/V is known to
        be written, or to be written by a step already launched, for the positions in `draft_valid`.
        """
        assert num_tokens <= len(sequence.tokens), (num_tokens, len(sequence.tokens))
        if not self._enable_prefix_cache:
            return sys.maxsize
        size, chain = self.pool.block_size, self._chains[sequence]
        for idx in range(chain.num_published, num_tokens // size):
            has_draft = draft_valid.start <= idx * size and (idx + 1) * size <= draft_valid.stop
            self.pool.publish(sequence.block_ids[idx], self._digest(sequence, idx), has_draft)
            chain.num_published = idx + 1
        return (chain.num_published + 1) * size

    def release(self, sequence: Sequence) -> None:
        """Give back every block, last first, so that a prefix outlives its continuations in the cache."""
        for block_id in reversed(sequence.block_ids):
            self.pool.release(block_id)
        sequence.block_ids = []
        self._chains.pop(sequence, None)

    def discard(self, sequence: Sequence) -> None:
        """Release a sequence that failed: no block that it wrote may be found again. Those that it hit stay:
        what others wrote is as good as before.
        """
        num_hit = self._chains[sequence].num_hit if sequence.block_ids else 0
        for block_id in sequence.block_ids[num_hit:]:
            self.pool.forget(block_id)
        self.release(sequence)

    def _digest(self, sequence: Sequence, idx: int) -> bytes:
        """Return the digest of full block `idx`, extending the sequence's chain up to it."""
        size = self.pool.block_size
        digests = self._chains.setdefault(sequence, _Chain()).digests
        while len(digests) <= idx:
            start = len(digests) * size
            parent = digests[-1] if digests else ROOT_DIGEST
            digests.append(block_digest(parent, sequence.tokens[start : start + size]))
        return digests[idx]
