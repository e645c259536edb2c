"""Random chunks of prompts over paged K/V, and their answer by a dense softmax in float64."""

import itertools
from dataclasses import dataclass

import torch

from engine.attention.backend import PrefillLayout


@dataclass(frozen=True)
class Chunks:
    """One call of a backend's prefill: its layout, and q, k_pages, v_pages in that order."""

    layout: PrefillLayout
    block_size: int
    tensors: tuple[torch.Tensor, ...]


def make_chunks(
    *,
    starts=(0, 37, 3),
    lens=(19, 1, 50),
    window_starts=None,
    num_kv_heads=2,
    group=3,
    head_dim=16,
    block_size=16,
    dtype=torch.float32,
    seed=0,
):
    """Draw chunks at `starts` of `lens` tokens; the pages of a chunk's row hold more than it may read."""
    generator = torch.Generator().manual_seed(seed)
    width = max(start + size for start, size in zip(starts, lens, strict=True)) // block_size + 2
    total = width * len(starts) + 3
    tables = torch.randperm(total, generator=generator)[: width * len(starts)].view(len(starts), width)
    offsets = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    pages = (total, block_size, num_kv_heads, head_dim)
    tensors = (draw(sum(lens), num_kv_heads * group, head_dim), draw(*pages), draw(*pages))
    windows = torch.tensor(window_starts or (0,) * len(starts))
    layout = PrefillLayout(tables, offsets, torch.tensor(starts), windows, tuple(lens))
    return Chunks(layout, block_size, tensors)


def solve_chunks(chunks):
    """Return [T, Hq, D] float64: every token alone, over a list of just the keys that it may read."""
    q, k_pages, v_pages = (x.double() for x in chunks.tensors)
    layout, out = chunks.layout, []
    group = q.shape[1] // k_pages.shape[2]
    for row, begin in enumerate(layout.cu_seqlens[:-1].tolist()):
        pages = layout.block_tables[row]
        k, v = (x[pages].flatten(0, 1).repeat_interleave(group, 1) for x in (k_pages, v_pages))
        for i in range(layout.chunk_lens[row]):
            end = int(layout.starts[row]) + i + 1
            seen = slice(int(layout.window_starts[row]), end)
            scores = torch.einsum("hd,shd->hs", q[begin + i], k[seen]) / q.shape[-1] ** 0.5
            out.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v[seen]))
    return torch.stack(out)
