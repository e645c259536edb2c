import random

import pytest

from engine.kvcache.block_pool import ROOT_DIGEST, BlockCounts, BlockPool, block_digest


def published(pool: BlockPool, name: int, has_draft: bool = True) -> int:
    """Allocate one block and index it under a digest made from `name`."""
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, block_digest(ROOT_DIGEST, [name]), has_draft)
    return block_id


def test_the_dummy_block_is_never_handed_out():
    pool = BlockPool(num_blocks=9, block_size=4)
    assert sorted(pool.allocate(8)) == list(range(1, 9))
    assert pool.allocate(1) is None


def test_a_failed_allocation_changes_nothing():
    pool = BlockPool(num_blocks=5, block_size=4)
    cached = published(pool, 1)
    pool.release(cached)
    assert pool.allocate(5) is None
    assert pool.counts() == BlockCounts(num_free=3, num_cached=1, num_held=0)
    assert pool.find(block_digest(ROOT_DIGEST, [1])).block_id == cached


def test_free_blocks_go_before_cached_ones_and_the_oldest_cached_first():
    pool = BlockPool(num_blocks=4, block_size=4)
    first, second = published(pool, 1), published(pool, 2)
    pool.release(second)
    pool.release(first)
    assert set(pool.allocate(1)) == {3}
    assert pool.allocate(2) == (second, first)
    assert pool.find(block_digest(ROOT_DIGEST, [1])) is None


def test_an_acquired_block_is_held_until_its_last_release():
    pool = BlockPool(num_blocks=3, block_size=4)
    block_id = published(pool, 1)
    pool.acquire(block_id)
    pool.release(block_id)
    assert pool.counts() == BlockCounts(1, 0, 1)
    pool.release(block_id)
    assert pool.counts() == BlockCounts(1, 1, 0)
    pool.acquire(block_id)
    assert pool.counts() == BlockCounts(1, 0, 1)


def test_of_equal_contents_the_first_block_stays():
    pool = BlockPool(num_blocks=4, block_size=4)
    first, second = published(pool, 1), published(pool, 1)
    assert pool.find(block_digest(ROOT_DIGEST, [1])).block_id == first
    pool.release(second)
    assert pool.counts() == BlockCounts(2, 0, 1)


def test_a_forgotten_block_is_free_once_released():
    pool = BlockPool(num_blocks=3, block_size=4)
    block_id = published(pool, 1)
    pool.forget(block_id)
    pool.forget(block_id)
    assert pool.find(block_digest(ROOT_DIGEST, [1])) is None
    pool.release(block_id)
    assert pool.counts() == BlockCounts(2, 0, 0)


def test_clearing_the_index_frees_cached_blocks_and_leaves_held_ones():
    pool = BlockPool(num_blocks=4, block_size=4)
    held, cached = published(pool, 1), published(pool, 2)
    pool.release(cached)
    pool.clear_index()
    assert pool.counts() == BlockCounts(2, 0, 1)
    assert pool.find(block_digest(ROOT_DIGEST, [1])) is None
    pool.release(held)
    assert pool.counts() == BlockCounts(3, 0, 0)


@pytest.mark.parametrize(
    ("left", "right"),
    [([1, 2], [2, 1]), ([1], [1, 0]), ([256], [0, 1]), ([-1], [2**32 - 1])],
)
def test_digests_tell_contents_apart(left, right):
    assert block_digest(ROOT_DIGEST, left) != block_digest(ROOT_DIGEST, right)


def test_a_digest_depends_on_every_token_before_its_block():
    parents = [block_digest(ROOT_DIGEST, [name]) for name in (1, 2)]
    assert block_digest(parents[0], [5]) != block_digest(parents[1], [5])


def test_a_digest_is_the_same_in_every_process():
    assert block_digest(ROOT_DIGEST, [1, 2, 3]).hex() == "20e6940ce341efc8b45db2e362c7ce61"


@pytest.mark.parametrize("seed", range(5))
def test_free_held_and_cached_blocks_are_all_blocks_after_any_history(seed):
    rng = random.Random(seed)
    pool = BlockPool(num_blocks=20, block_size=4)
    held: list[int] = []
    for _ in range(800):
        action = rng.randrange(6)
        if action == 0:
            held.extend(pool.allocate(rng.randint(0, 4)) or ())
        elif action == 1 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif action == 2 and held:
            block_id = rng.choice(held)
            if not pool.is_indexed(block_id):
                pool.publish(block_id, block_digest(ROOT_DIGEST, [rng.randrange(30)]), True)
        elif action == 3:
            found = pool.find(block_digest(ROOT_DIGEST, [rng.randrange(30)]))
            if found is not None:
                pool.acquire(found.block_id)
                held.append(found.block_id)
        elif action == 4 and held and rng.random() < 0.2:
            pool.forget(rng.choice(held))
        elif action == 5 and rng.random() < 0.05:
            pool.clear_index()
        counts = pool.counts()
        assert counts.num_free + counts.num_cached + counts.num_held == pool.capacity
        assert counts.num_held == len(set(held))
        assert all(pool.num_refs(block_id) == held.count(block_id) for block_id in range(20))
