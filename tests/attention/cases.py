"""Random attention problems, and their answer by a dense softmax in float64."""

from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionLayout


@dataclass(frozen=True)
class Problem:
    """One call of a backend: its layout, and q, k, v, k_pages, v_pages in that order."""

    layout: AttentionLayout
    block_size: int
    tensors: tuple[torch.Tensor, ...]

    def solve(self, backend, dtype=None):
        """Return the backend's answer [B, N, Hq, D], with the tensors in `dtype`."""
        tensors = [x.to(dtype or x.dtype) for x in self.tensors]
        return backend.bind(self.layout, self.block_size)(*tensors)


def make_problem(
    *,
    seed=0,
    num_rows=2,
    num_nodes=5,
    num_suffix=None,
    num_kv_heads=2,
    group=3,
    head_dim=16,
    block_size=4,
    num_blocks=6,
    windows="random",
    dtype=torch.float32,
):
    """Draw a problem. `windows` is "random" (per node, some empty, starts inside blocks), "full" or
    "empty".
    """
    generator = torch.Generator().manual_seed(seed)
    num_suffix = num_suffix or num_nodes
    length = num_blocks * block_size
    ends = torch.randint(0, length + 1, (num_rows, num_nodes, 2), generator=generator).sort(-1).values
    start, end = ends.unbind(-1)
    if windows == "full":
        start, end = torch.zeros_like(start), torch.full_like(end, length)
    if windows == "empty":
        start = end
    mask = torch.rand(num_rows, num_nodes, num_suffix, generator=generator) < 0.5
    mask[:, torch.arange(num_nodes), torch.arange(num_nodes)] = True
    total = num_rows * num_blocks + 3
    tables = torch.randperm(total, generator=generator)[: num_rows * num_blocks].view(num_rows, num_blocks)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    suffix = (num_rows, num_suffix, num_kv_heads, head_dim)
    pages = (total, block_size, num_kv_heads, head_dim)
    q = draw(num_rows, num_nodes, num_kv_heads * group, head_dim)
    tensors = (q, draw(*suffix), draw(*suffix), draw(*pages), draw(*pages))
    return Problem(AttentionLayout(tables, start, end, mask), block_size, tensors)


def solve_densely(problem):
    """Return [B, N, Hq, D] float64: every query alone, over a list of just the keys that it may read."""
    q, k, v, k_pages, v_pages = (x.double() for x in problem.tensors)
    layout = problem.layout
    group = q.shape[2] // k.shape[2]
    out = torch.empty_like(q)
    for row in range(q.shape[0]):
        prefix_k, prefix_v = (pages[layout.block_tables[row]].flatten(0, 1) for pages in (k_pages, v_pages))
        for node in range(q.shape[1]):
            window = slice(int(layout.prefix_start[row, node]), int(layout.prefix_end[row, node]))
            seen = layout.suffix_mask[row, node]
            keys = torch.cat((prefix_k[window], k[row, seen])).repeat_interleave(group, 1)
            values = torch.cat((prefix_v[window], v[row, seen])).repeat_interleave(group, 1)
            scores = torch.einsum("hd,shd->hs", q[row, node], keys) / q.shape[-1] ** 0.5
            out[row, node] = torch.einsum("hs,shd->hd", scores.softmax(-1), values)
    return out
