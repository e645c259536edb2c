"""Prefill for backends that have no kernel of their own for it: each chunk is a row of one `bind`.

The arithmetic is left to the backend. The starts of the chunks are read back, once per pass.
"""

import itertools

import torch
from torch import Tensor

from engine.attention.backend import (
    AttendChunks,
    AttendPages,
    AttentionBackend,
    AttentionLayout,
    PrefillLayout,
)


def bind_chunks(backend: AttentionBackend, layout: PrefillLayout, block_size: int) -> AttendChunks:
    """Return the function of `layout`: a chunk's tokens read the pages before it, and each other causally."""
    assert layout.chunk_lens is not None, "chunks are cut on the host"
    chunks = [
        _bind_chunk(backend, table, start, window_start, size, block_size)
        for table, start, window_start, size in zip(
            layout.block_tables, layout.starts.tolist(), layout.window_starts, layout.chunk_lens, strict=True
        )
    ]
    ends = list(itertools.accumulate(layout.chunk_lens))
    spans = [slice(end - size, end) for size, end in zip(layout.chunk_lens, ends, strict=True)]

    def attend(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        parts = zip(chunks, spans, strict=True)
        return torch.cat([chunk(q[span], k_pages, v_pages) for chunk, span in parts])

    return attend


def _bind_chunk(
    backend: AttentionBackend, table: Tensor, start: int, window_start: Tensor, size: int, block_size: int
) -> AttendChunks:
    """Return the function of one chunk of `size` tokens from position `start` under table [P]."""
    position = start + torch.arange(size, device=table.device)
    block, offset = table[position // block_size], position % block_size
    begin, end = window_start.expand(1, size), torch.full_like(window_start, start).expand(1, size)
    causal = torch.ones(1, size, size, dtype=torch.bool, device=table.device).tril()
    # A token before its window reads itself: no softmax may be empty.
    itself = torch.eye(size, dtype=torch.bool, device=table.device)
    causal = causal & (position >= window_start) | itself
    prefix = table[None, : -(-start // block_size)]
    attend_pages: AttendPages = backend.bind(AttentionLayout(prefix, begin, end, causal), block_size)

    def attend(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        k, v = (pages[block, offset][None] for pages in (k_pages, v_pages))
        return attend_pages(q[None], k, v, k_pages, v_pages)[0]

    return attend
