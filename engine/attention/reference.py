"""The reference backend: prefix and suffix attention in float32, merged by log-sum-exp.

It runs on any device and defines what is right; speed is left to the other backends.
"""

import torch
from torch import Tensor

from engine.attention.backend import AttendChunks, AttendPages, AttentionLayout, PrefillLayout
from engine.attention.chunks import bind_chunks
from engine.attention.merge import merge


class ReferenceAttention:
    """Plain torch; scores, softmax and merge in float32 (float64 where the input is float64)."""

    name = "reference"
    is_capturable = False
    is_prefill_capturable = False

    def bind_prefill(self, layout: PrefillLayout, block_size: int) -> AttendChunks:
        return bind_chunks(self, layout, block_size)

    def bind(self, layout: AttentionLayout, block_size: int) -> AttendPages:
        num_positions = layout.block_tables.shape[1] * block_size
        position = torch.arange(num_positions, device=layout.block_tables.device)
        prefix_mask = (position >= layout.prefix_start[..., None]) & (position < layout.prefix_end[..., None])

        def attend(q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
            prefix_k = k_pages[layout.block_tables].flatten(1, 2)
            prefix_v = v_pages[layout.block_tables].flatten(1, 2)
            # Masked rows of V may hold anything, NaN too, and zero times NaN is NaN: select, do not multiply.
            seen = prefix_mask.any(1)[:, :, None, None]
            prefix = _partial(q, torch.where(seen, prefix_k, 0), torch.where(seen, prefix_v, 0), prefix_mask)
            return merge(*prefix, *_partial(q, k, v, layout.suffix_mask)).to(q.dtype)

        return attend


def _partial(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [B, N, Hq, D], lse [B, N, Hq]) of q over the keys that mask [B, N, S] shows."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    k, v = (x.to(dtype).repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bnhd,bshd->bhns", q.to(dtype), k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # An empty row has lse -inf; exp(-inf - 0) gives it zero weights where exp(-inf + inf) would give NaN.
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("bhns,bshd->bnhd", weights, v), lse.transpose(1, 2)
