"""Paged K/V: what is stored is found where it was put, finite, and nowhere else."""

import pytest
import torch

from engine.kvcache.kv_pool import KVPool, slots_of

CPU = torch.device("cpu")
NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = SHAPE = (3, 5, 4, 2, 6)


def make_pool(dtype=torch.float32):
    return KVPool(*SHAPE, dtype, CPU)


def flat(pages):
    """Return [L, num_blocks * block_size, Hkv, D]."""
    return pages.flatten(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_store_fills_its_slots_of_its_layer_only(dtype):
    pool = make_pool(dtype)
    k, v = torch.randn(2, 3, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    slots = torch.tensor([9, 4, 19])
    pool.store(1, slots, k, v)
    for pages, stored in ((pool.k, k), (pool.v, v)):
        expected = torch.zeros(NUM_LAYERS, NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
        for idx, slot in enumerate(slots.tolist()):
            expected[1, slot] = stored[idx]
        assert torch.equal(flat(pages), expected)


def test_a_block_holds_consecutive_slots():
    pool = make_pool()
    k = torch.randn(BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pool.store(0, torch.arange(2 * BLOCK_SIZE, 3 * BLOCK_SIZE), k, k)
    assert torch.equal(pool.k[0, 2], k)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_stored_as_zero(value):
    pool = make_pool(torch.bfloat16)
    k = torch.full((1, NUM_KV_HEADS, HEAD_DIM), value, dtype=torch.bfloat16)
    pool.store(0, torch.tensor([6]), k, k)
    # Zero, not the largest number: its product with a query would outweigh the mask.
    assert not pool.k.any()
    assert not pool.v.any()


def test_a_commit_fills_the_same_slots_of_every_layer():
    pool, other = make_pool(), make_pool()
    scratch = pool.scratch(7)
    nodes, slots = torch.tensor([6, 0, 2]), torch.tensor([17, 5, 6])
    for layer_idx in range(NUM_LAYERS):
        k, v = torch.randn(2, 7, NUM_KV_HEADS, HEAD_DIM)
        scratch.k[layer_idx], scratch.v[layer_idx] = k, v
        other.store(layer_idx, slots, k[nodes], v[nodes])
    pool.commit(slots, scratch, nodes)
    assert torch.equal(pool.k, other.k)
    assert torch.equal(pool.v, other.v)
    assert not torch.equal(pool.k, pool.v)


def test_a_block_takes_the_bytes_it_says():
    for dtype in (torch.float32, torch.bfloat16):
        pool = make_pool(dtype)
        per_block = KVPool.bytes_per_block(NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype)
        assert NUM_BLOCKS * per_block == pool.k.nbytes + pool.v.nbytes


def test_slots_follow_the_block_table():
    tables = torch.tensor([[3, 1, 4], [2, 0, 0]])
    positions = torch.tensor([[0, 5, 11], [1, 3, 2]])
    is_valid = torch.ones_like(positions, dtype=torch.bool)
    assert slots_of(tables, positions, is_valid, 4).tolist() == [[12, 5, 19], [9, 11, 10]]


def test_invalid_positions_go_to_the_dummy_block_even_outside_the_table():
    tables = torch.tensor([[3, 1]])
    positions = torch.tensor([[-5, 3, 8, 400]])
    slots = slots_of(tables, positions, torch.tensor([[False, True, False, False]]), 4)
    assert slots.tolist() == [[0, 15, 0, 0]]


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_different_positions_never_share_a_slot(block_size):
    tables = 1 + torch.randperm(12)[None]
    positions = torch.arange(12 * block_size)[None]
    slots = slots_of(tables, positions, torch.ones_like(positions, dtype=torch.bool), block_size)
    assert sorted(slots[0].tolist()) == list(range(block_size, 13 * block_size))
