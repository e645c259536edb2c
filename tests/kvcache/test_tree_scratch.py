"""K/V of the step in flight: read back as stored, in the pages' dtype, and finite where it will be masked."""

import pytest
import torch

from engine.kvcache.tree_scratch import NodeScratch, TreeScratch

CPU = torch.device("cpu")
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 3, 2, 4


def draw(*shape, seed=0):
    return torch.randn(2, *shape, NUM_KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def test_a_store_answers_in_the_dtype_of_the_pages():
    k, v = draw(2, 5)
    stored_k, stored_v = TreeScratch(NUM_LAYERS, torch.bfloat16).store(0, k, v)
    assert torch.equal(stored_k, k.bfloat16())
    assert torch.equal(stored_v, v.bfloat16())


def test_a_path_is_gathered_from_every_layer_in_row_order():
    scratch = TreeScratch(NUM_LAYERS, torch.float32)
    layers = [draw(2, 5, seed=layer_idx) for layer_idx in range(NUM_LAYERS)]
    for layer_idx, (k, v) in enumerate(layers):
        scratch.store(layer_idx, k, v)
    path = torch.tensor([[0, 2, 4], [0, 1, 1]])
    for gathered, part in zip(scratch.gather(path), (0, 1), strict=True):
        assert gathered.shape == (NUM_LAYERS, 6, NUM_KV_HEADS, HEAD_DIM)
        for layer_idx, pair in enumerate(layers):
            for idx, (row, node) in enumerate([(0, 0), (0, 2), (0, 4), (1, 0), (1, 1), (1, 1)]):
                assert torch.equal(gathered[layer_idx, idx], pair[part][row, node])


def test_the_next_pass_replaces_the_last_whatever_its_shape():
    scratch = TreeScratch(1, torch.float32)
    scratch.store(0, *draw(4, 8))
    k, v = draw(1, 1, seed=1)
    scratch.store(0, k, v)
    found = scratch.gather(torch.zeros(1, 1, dtype=torch.int64))
    assert torch.equal(found[0][0], k[0])
    assert torch.equal(found[1][0], v[0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_a_pass_reads_and_what_goes_to_the_pages_is_finite(value):
    scratch = TreeScratch(1, torch.bfloat16)
    k, v = draw(1, 2)
    k[0, 0, 0, 0] = v[0, 1, 1, 1] = value
    stored_k, stored_v = scratch.store(0, k, v)
    assert stored_k[0, 0, 0, 0] == stored_v[0, 1, 1, 1] == 0.0
    parts = (stored_k, stored_v, *scratch.gather(torch.tensor([[0, 1]])))
    assert all(part.isfinite().all() for part in parts)


def make_nodes(dtype=torch.float32):
    return NodeScratch(NUM_LAYERS, 3, 6, NUM_KV_HEADS, HEAD_DIM, dtype, CPU)


def test_levels_fill_the_nodes_of_their_rows_and_keep_the_earlier_ones():
    scratch = make_nodes()
    first, second = draw(2, 1), draw(2, 2, seed=1)
    scratch.store(1, torch.tensor([[1], [3]]), *first)
    nodes = torch.tensor([[2, 5], [4, 0]])
    for found, old, new in zip(scratch.store(1, nodes, *second), first, second, strict=True):
        expected = torch.zeros(2, 6, NUM_KV_HEADS, HEAD_DIM)
        expected[0, 1], expected[1, 3] = old[:, 0]
        expected[0, 2], expected[0, 5] = new[0]
        expected[1, 4], expected[1, 0] = new[1]
        assert torch.equal(found, expected)


def test_layers_do_not_mix():
    scratch = make_nodes()
    nodes = torch.tensor([[1]])
    for layer_idx in range(NUM_LAYERS):
        scratch.store(layer_idx, nodes, *torch.full((2, 1, 1, NUM_KV_HEADS, HEAD_DIM), float(layer_idx)))
    k, _ = scratch.store(0, torch.tensor([[2]]), *draw(1, 1))
    assert (k[0, 1] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nodes_stay_finite(value):
    scratch = make_nodes(torch.bfloat16)
    filled = torch.full((1, 1, NUM_KV_HEADS, HEAD_DIM), value, dtype=torch.bfloat16)
    stored = scratch.store(0, torch.tensor([[3]]), filled, filled)
    assert all(part.isfinite().all() for part in stored)
