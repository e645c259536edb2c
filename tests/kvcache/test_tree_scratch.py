"""K/V of the step in flight: shaped and typed like the pages, seen row by row."""

import torch

from engine.kvcache.kv_pool import KVPool

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 3, 2, 4


def make_pool() -> KVPool:
    return KVPool(NUM_LAYERS, 2, 4, NUM_KV_HEADS, HEAD_DIM, torch.bfloat16, torch.device("cpu"))


def test_a_scratch_holds_every_layer_in_the_dtype_of_the_pages():
    scratch = make_pool().scratch(6)
    assert scratch.k.shape == scratch.v.shape == (NUM_LAYERS, 6, NUM_KV_HEADS, HEAD_DIM)
    assert scratch.k.dtype == scratch.v.dtype == torch.bfloat16


def test_a_layer_is_seen_row_by_row():
    scratch = make_pool().scratch(6)
    scratch.k.copy_(torch.randn(scratch.k.shape))
    scratch.v.copy_(torch.randn(scratch.v.shape))
    k, v = scratch.layer(2, 3)
    assert torch.equal(k, scratch.k[2].view(3, 2, NUM_KV_HEADS, HEAD_DIM))
    assert torch.equal(v, scratch.v[2].view(3, 2, NUM_KV_HEADS, HEAD_DIM))


def test_rows_of_the_pages_are_slots():
    pool = make_pool()
    k, v = pool.rows(1)
    k[5], v[6] = 1.0, 2.0
    assert (pool.k[1, 1, 1] == 1.0).all()
    assert (pool.v[1, 1, 2] == 2.0).all()
