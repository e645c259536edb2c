"""K/V of the step in flight: read back as stored, in the pages' dtype, and finite where it will be masked."""

import pytest
import torch

from engine.kvcache.kv_pool import KVPool
from engine.kvcache.tree_scratch import TreeScratch

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 3, 2, 4


def make_scratch(num_tokens: int, dtype=torch.float32) -> TreeScratch:
    return KVPool(NUM_LAYERS, 2, 4, NUM_KV_HEADS, HEAD_DIM, dtype, torch.device("cpu")).scratch(num_tokens)


def draw(num_tokens: int):
    return torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM)


def test_levels_fill_their_rows_of_their_layer_and_keep_the_earlier_ones():
    scratch = make_scratch(6)
    first, second = draw(2), draw(3)
    scratch.store(1, torch.tensor([1, 3]), *first)
    scratch.store(1, torch.tensor([2, 5, 0]), *second)
    for found, old, new in zip((scratch.k, scratch.v), first, second, strict=True):
        expected = torch.zeros(NUM_LAYERS, 6, NUM_KV_HEADS, HEAD_DIM)
        expected[1, 1], expected[1, 3] = old
        expected[1, 2], expected[1, 5], expected[1, 0] = new
        assert torch.equal(found, expected)


def test_a_layer_is_seen_row_by_row():
    scratch = make_scratch(6)
    k, v = draw(6)
    scratch.store(2, torch.arange(6), k, v)
    seen_k, seen_v = scratch.layer(2, 3)
    assert torch.equal(seen_k, k.view(3, 2, NUM_KV_HEADS, HEAD_DIM))
    assert torch.equal(seen_v, v.view(3, 2, NUM_KV_HEADS, HEAD_DIM))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nodes_are_finite_in_the_dtype_of_the_pages(value):
    scratch = make_scratch(2, torch.bfloat16)
    k, v = draw(2).bfloat16()
    k[0, 0, 0] = v[1, 1, 1] = value
    scratch.store(0, torch.arange(2), k, v)
    assert scratch.k.dtype == scratch.v.dtype == torch.bfloat16
    assert torch.equal(scratch.k[0], k.nan_to_num(0.0, 0.0, 0.0))
    assert torch.equal(scratch.v[0], v.nan_to_num(0.0, 0.0, 0.0))
