"""Prefill through `bind` equals a dense causal softmax over the pages, for every backend that uses it."""

import pytest
import torch

from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from tests.attention.chunk_cases import Chunks, make_chunks, solve_chunks

every_backend = pytest.mark.parametrize(
    "backend", [ReferenceAttention(), CpuAttention()], ids=lambda backend: backend.name
)


def solve(backend, chunks):
    return backend.bind_prefill(chunks.layout, chunks.block_size)(*chunks.tensors)


@every_backend
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize(
    ("starts", "lens"),
    [((0,), (1,)), ((0,), (33,)), ((16,), (16,)), ((41,), (1,)), ((0, 37, 3, 64), (19, 1, 50, 2))],
)
def test_chunks_of_any_length_and_start(backend, starts, lens, block_size):
    chunks = make_chunks(starts=starts, lens=lens, block_size=block_size)
    torch.testing.assert_close(solve(backend, chunks).double(), solve_chunks(chunks), atol=2e-5, rtol=2e-5)


@every_backend
@pytest.mark.parametrize("window_starts", [(0, 4, 3), (17, 37, 0)])
def test_windows_that_begin_after_the_first_position(backend, window_starts):
    chunks = make_chunks(starts=(17, 37, 3), window_starts=window_starts)
    torch.testing.assert_close(solve(backend, chunks).double(), solve_chunks(chunks), atol=2e-5, rtol=2e-5)


@every_backend
def test_a_token_before_its_window_gives_something_finite(backend):
    chunks = make_chunks(starts=(7,), lens=(9,), window_starts=(8,))
    found = solve(backend, chunks)
    assert found.isfinite().all()
    torch.testing.assert_close(found[1:].double(), solve_chunks(chunks)[1:], atol=2e-5, rtol=2e-5)


@every_backend
def test_the_dtype_of_the_query_is_kept(backend):
    chunks = make_chunks(dtype=torch.bfloat16)
    found = solve(backend, chunks)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), solve_chunks(chunks), atol=3e-2, rtol=3e-2)


@every_backend
def test_a_prompt_in_two_chunks_answers_as_in_one(backend):
    whole = make_chunks(starts=(0,), lens=(40,))
    layout, (q, *pages) = whole.layout, whole.tensors
    expected = solve(backend, whole)
    for start, size in ((0, 23), (23, 17)):
        part = type(layout)(
            layout.block_tables, torch.tensor([0, size]), torch.tensor([start]), torch.tensor([0]), (size,)
        )
        found = solve(backend, Chunks(part, whole.block_size, (q[start : start + size], *pages)))
        torch.testing.assert_close(found, expected[start : start + size], atol=1e-5, rtol=1e-5)


@every_backend
def test_keys_after_a_token_do_not_matter(backend):
    chunks = make_chunks(starts=(5,), lens=(10,), block_size=4)
    expected = solve(backend, chunks)
    table, (_, *pages) = chunks.layout.block_tables[0], chunks.tensors
    for x in pages:
        x[table[15 // 4 + 1 :]] = 1e4
        x[table[14 // 4], 14 % 4 + 1 :] = 1e4
    assert torch.equal(solve(backend, chunks), expected)


@every_backend
def test_one_key_more_is_noticed(backend):
    chunks = make_chunks(starts=(30,), lens=(20,))
    expected = solve_chunks(chunks)
    chunks.layout.starts[0] = 31
    assert not torch.allclose(solve(backend, chunks).double(), expected, atol=1e-2)
