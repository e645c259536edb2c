import pytest

from engine.kvcache.block_pool import BlockCounts, BlockPool
from engine.kvcache.kv_cache import KVCache, PrefixHit, block_table_width
from engine.request import Request, SamplingParams, Sequence

SIZE = 4
NO_DRAFT = range(0)


def make_cache(num_blocks: int = 33, enable_prefix_cache: bool = True) -> KVCache:
    return KVCache(BlockPool(num_blocks, SIZE), enable_prefix_cache)


def make_sequence(tokens) -> Sequence:
    return Sequence(Request("r", tuple(tokens), SamplingParams()), seed=0, arrival_idx=0)


def cached(cache: KVCache, tokens, draft_valid: range = range(1000)) -> list[int]:
    """Run a sequence through the cache and leave its blocks published and unreferenced."""
    sequence = make_sequence(tokens)
    assert cache.admit(sequence, len(sequence.tokens), 0) is not None
    block_ids = list(sequence.block_ids)
    cache.publish(sequence, len(sequence.tokens) - 1, draft_valid)
    cache.release(sequence)
    return block_ids


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_a_hit_leaves_out_the_root(num_tokens):
    cache = make_cache()
    block_ids = cached(cache, range(20))
    hit = cache.match_prefix(make_sequence(range(num_tokens)))
    assert hit.block_ids == tuple(block_ids[: (num_tokens - 1) // SIZE])


@pytest.mark.parametrize("num_shared", range(20))
def test_a_hit_covers_the_shared_full_blocks_at_every_boundary(num_shared):
    cache = make_cache()
    block_ids = cached(cache, range(20))
    other = make_sequence([*range(num_shared), *(100 + idx for idx in range(20))])
    assert cache.match_prefix(other) == PrefixHit(tuple(block_ids[: num_shared // SIZE]), 0)


@pytest.mark.parametrize(
    ("draft_valid", "draft_start"),
    [(range(17), 0), (range(16), 0), (range(15), 16), (range(1, 17), 4), (range(5, 17), 8), (NO_DRAFT, 16)],
)
def test_a_hit_reads_draft_kv_behind_its_last_hole_only(draft_valid, draft_start):
    cache = make_cache()
    cached(cache, range(17), draft_valid)
    hit = cache.match_prefix(make_sequence(range(18)))
    assert len(hit.block_ids) == 4
    assert hit.draft_start == draft_start


def test_blocks_of_unpublished_tokens_are_never_hit():
    cache = make_cache()
    sequence = make_sequence(range(20))
    cache.admit(sequence, 20, 0)
    assert cache.match_prefix(make_sequence(range(20))).block_ids == ()
    cache.publish(sequence, 11, NO_DRAFT)
    assert len(cache.match_prefix(make_sequence(range(20))).block_ids) == 2


@pytest.mark.parametrize("num_tokens", range(17))
def test_publishing_tells_how_many_tokens_it_takes_to_publish_more(num_tokens):
    cache = make_cache()
    sequence = make_sequence(range(20))
    cache.admit(sequence, 20, 0)
    num_needed = cache.publish(sequence, num_tokens, NO_DRAFT)
    counts = []
    for num_cached in (num_needed - 1, num_needed):
        cache.publish(sequence, num_cached, NO_DRAFT)
        counts.append(len(cache.match_prefix(make_sequence(range(30))).block_ids))
    assert counts == [num_tokens // SIZE, num_tokens // SIZE + 1]


def test_a_hit_is_shared_and_outlives_its_first_owner():
    cache = make_cache()
    first, second = make_sequence(range(9)), make_sequence(range(9))
    cache.admit(first, 9, 0)
    cache.publish(first, 8, NO_DRAFT)
    cache.admit(second, 9, 0)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    cache.release(first)
    assert cache.pool.counts().num_held == 3


def test_an_admission_counts_the_evictable_blocks_it_revives():
    cache = make_cache(num_blocks=6)
    cached(cache, range(17))  # four cached blocks and one free
    sequence = make_sequence([*range(9), 77])
    assert cache.admit(sequence, 10, num_spare=3) is None
    assert cache.pool.counts() == BlockCounts(1, 4, 0)
    assert cache.admit(sequence, 10, num_spare=2).block_ids == tuple(sequence.block_ids[:2])
    assert cache.pool.num_available == 2


def test_a_reservation_grows_by_whole_blocks_or_not_at_all():
    cache = make_cache(num_blocks=5)
    sequence = make_sequence(range(4))
    cache.admit(sequence, 4, 0)
    assert cache.reserve(sequence, 4) == ()
    assert len(cache.reserve(sequence, 9)) == 2
    assert cache.reserve(sequence, 17) is None
    assert len(sequence.block_ids) == 3


def test_the_tail_of_a_released_sequence_is_evicted_first():
    cache = make_cache(num_blocks=6)
    block_ids = cached(cache, range(17))
    assert cache.pool.allocate(1) == (block_ids[4],)  # never published, so free
    assert cache.pool.allocate(2) == (block_ids[3], block_ids[2])
    assert cache.match_prefix(make_sequence(range(17))).block_ids == tuple(block_ids[:2])


@pytest.mark.parametrize("num_shared", [0, 4, 8, 12])
@pytest.mark.parametrize("num_published", [0, 8, 12, 20])
def test_a_discarded_sequence_takes_what_it_wrote_and_nothing_else_out_of_the_index(
    num_shared, num_published
):
    cache = make_cache()
    shared = cached(cache, range(num_shared + 1))[: num_shared // SIZE]
    before = cache.pool.counts()
    failed, holder = make_sequence(range(21)), make_sequence(range(21))
    cache.admit(failed, 21, 0)
    assert failed.block_ids[: num_shared // SIZE] == shared
    cache.publish(failed, max(num_shared, num_published), NO_DRAFT)
    cache.admit(holder, 21, 0)  # shares all that is published
    cache.discard(failed)
    assert cache.match_prefix(make_sequence(range(21))).block_ids == tuple(shared)
    assert cache.pool.counts().num_held == len(holder.block_ids) == 6
    cache.release(holder)
    assert cache.pool.counts() == before == BlockCounts(32 - len(shared), len(shared), 0)
    assert cached(cache, range(21))[: len(shared)] == shared


def test_a_discarded_sequence_that_holds_nothing_changes_nothing():
    cache = make_cache()
    cached(cache, range(9))
    before = cache.pool.counts()
    cache.discard(make_sequence(range(9)))
    assert cache.pool.counts() == before
    assert len(cache.match_prefix(make_sequence(range(9))).block_ids) == 2


def test_emitted_tokens_extend_the_chain():
    cache = make_cache()
    sequence = make_sequence(range(6))
    cache.admit(sequence, 6, 0)
    cache.publish(sequence, 5, NO_DRAFT)
    sequence.tokens.extend(range(6, 13))
    cache.reserve(sequence, 13)
    cache.publish(sequence, 12, NO_DRAFT)
    assert cache.match_prefix(make_sequence(range(13))).block_ids == tuple(sequence.block_ids[:3])


def test_without_a_prefix_cache_nothing_is_hit_or_kept():
    cache = make_cache(enable_prefix_cache=False)
    cached(cache, range(17))
    assert cache.match_prefix(make_sequence(range(17))) == PrefixHit((), 0)
    assert cache.pool.counts() == BlockCounts(32, 0, 0)


@pytest.mark.parametrize(
    ("max_model_len", "max_depth", "block_size", "width"), [(16, 0, 1, 18), (16, 7, 16, 2), (17, 7, 16, 3)]
)
def test_a_block_table_holds_two_overruns(max_model_len, max_depth, block_size, width):
    assert block_table_width(max_model_len, max_depth, block_size) == width
